"""One line that says how far a study is: on a terminal, in a notebook, or in the file that the book's builder reads."""

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from kvrepro.paths import replaced

FILE = "KVREPRO_PROGRESS"  # the builder's: a path, where each line replaces the one before
ENDED = ".ended"  # of the file beside it

_listeners: list[Callable[[dict[str, Any]], None]] = []


@contextlib.contextmanager
def heard(by: Callable[[dict[str, Any]], None]) -> Iterator[None]:
    """Within, `by` is called with what studies of this process say of themselves, and no bar is shown: how far one is
    (study, done, total, left), what it took (study, results, failed, seconds), and what a dry run expects (study,
    results, seconds, bytes, processes)."""
    _listeners.append(by)
    try:
        yield
    finally:
        _listeners.remove(by)


def tell(**told: Any) -> None:
    """Call those who listen."""
    for listener in _listeners:
        listener(told)


def end_studies() -> None:
    """Tell the builder that this chapter's studies have ended."""
    if file := os.environ.get(FILE):
        Path(file).with_suffix(ENDED).touch()


def ended(file: Path) -> bool:
    """Whether the chapter that writes to `file` has told that."""
    return file.with_suffix(ENDED).exists()


def clock(seconds: float) -> str:
    """`45 s`, `12 min`, `3 h 20 min`."""
    if seconds < 600:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min"


class Progress(contextlib.AbstractContextManager["Progress"]):
    """Counts what is done of `total`; a context manager."""

    def __init__(self, title: str, total: int, unit: str, shown: bool = True):
        self.title, self.total, self.done, self.began, self.said = title, total, 0, time.monotonic(), 0.0
        self.file = os.environ.get(FILE)
        notebook = "ipykernel" in sys.modules and not sys.stderr.isatty()
        quiet = bool(self.file or _listeners)
        self.bar = None if quiet or notebook else tqdm(
            total=total, desc=title, unit=unit, disable=not shown, dynamic_ncols=True, leave=False
        )  # fmt: skip
        self.handle: Any = None
        if notebook and shown and not quiet:
            from IPython.display import DisplayHandle

            self.handle = DisplayHandle()
            self.handle.display({"text/plain": self.text}, raw=True)
        self._say()

    @property
    def left(self) -> float | None:
        """Seconds, by what was done so far; None before the first result."""
        return (time.monotonic() - self.began) * (self.total - self.done) / self.done if self.done else None

    @property
    def text(self) -> str:
        left = "" if self.left is None else f", {clock(self.left)} left"
        return f"{self.title}: {self.done:,} of {self.total:,}{left}"

    def update(self, count: int) -> None:
        """So many more are done."""
        self.done += count
        if self.bar is not None:
            self.bar.update(count)
        if time.monotonic() - self.said > 0.5 or self.done == self.total:
            self._say()

    def _say(self) -> None:
        self.said = time.monotonic()
        told = {"study": self.title, "done": self.done, "total": self.total, "left": self.left}
        tell(**told)
        if self.file:
            with replaced(Path(self.file)) as aside:
                aside.write_text(json.dumps(told))
        if self.handle is not None:
            self.handle.update({"text/plain": self.text}, raw=True)

    def __exit__(self, *exception: object) -> None:
        if self.bar is not None:
            self.bar.close()
        if self.handle is not None:
            self.handle.update({"text/plain": ""}, raw=True)
