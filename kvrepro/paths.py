"""Where the project's files lie."""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]  # the clone
DATA = ROOT / "data"
GPU = DATA / "gpu"  # tables measured on a GPU


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """A file beside `path` to write, which takes its place when it is whole; a reader meets whole files only. Each
    writer has a file of its own, and the last one wins."""
    aside = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        yield aside
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
