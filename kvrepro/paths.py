"""Where the project's files lie: in a clone, or in an installed package, which brings data and notebooks along."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

INSTALLED = (Path(__file__).parent / "shipped" / "data").is_dir()
PACKAGES = Path(__file__).resolve().parents[1]  # the folder of both packages, or the clone
CODE = {
    "kvrepro": PACKAGES / "kvrepro",
    "kvrepro_kernels": PACKAGES / ("" if INSTALLED else "kernels/") / "kvrepro_kernels",
}
ROOT = Path(__file__).resolve().parents[1]  # of data/ and notebooks/: the clone
if INSTALLED:
    from kvrepro.shipped import ROOT
WORK = Path() if INSTALLED else ROOT  # where results go and relative paths start: the working folder, or the clone
DATA = ROOT / "data"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "kvrepro" if INSTALLED else DATA / "cache"
GPU = DATA / "gpu"  # tables measured on a GPU


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """A context with a temporary file to write beside `path`, which then replaces `path`; so a reader meets whole files
    only. Each writer has a file of its own, and the last one wins."""
    aside = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        yield aside
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def write_table(table: Path, rows: "pd.DataFrame", form: str | None = "%.4g") -> None:
    """Write a CSV table of the project, whole or not at all; its folder is made. form: of numbers with decimals; None:
    in full."""
    table.parent.mkdir(parents=True, exist_ok=True)
    with replaced(table) as aside:
        rows.to_csv(aside, index=False, float_format=form)
