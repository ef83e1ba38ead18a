"""Where the project's files lie."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]  # the clone
DATA = ROOT / "data"
GPU = DATA / "gpu"  # tables measured on a GPU


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """A file beside `path` to write, which takes its place when it is whole; a reader meets whole files only."""
    aside = path.with_name(f"{path.name}.tmp")
    yield aside
    aside.replace(path)
