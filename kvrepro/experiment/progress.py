"""One line on the progress of a study: on a terminal, in a notebook, or in a file that the book's builder reads."""

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

FILE = "KVREPRO_PROGRESS"  # the builder sets this variable to a path, where each line replaces the one before
TURN, ENDED = ".turn", ".ended"  # suffixes of files beside it: studies may compute; they have ended

_listeners: list[Callable[[dict[str, Any]], None]] = []


@contextlib.contextmanager
def listening(listener: Callable[[dict[str, Any]], None]) -> Iterator[None]:
    """A context in which `listener` gets the messages of this process's studies, and no bar is shown: the progress of
    one (study, done, total, left), what it took (study, results, failed, seconds), and what a dry run expects (study,
    results, seconds, bytes, processes)."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def send(**message: Any) -> None:
    """Send a message to the listeners."""
    for listener in _listeners:
        listener(message)


def wait_for_turn() -> float:
    """Wait until the builder, if there is one, lets this chapter's studies compute: those of one chapter at a time.
    Returns how many seconds that took."""
    began = time.perf_counter()
    if file := os.environ.get(FILE):
        while not Path(file).with_suffix(TURN).exists():
            time.sleep(0.1)
    return time.perf_counter() - began


def give_turn(file: Path) -> None:
    """Let the studies of the chapter that writes to `file` compute."""
    file.with_suffix(TURN).touch()


def end_studies() -> None:
    """Tell the builder that this chapter's studies have ended."""
    if file := os.environ.get(FILE):
        Path(file).with_suffix(ENDED).touch()


def ended(file: Path) -> bool:
    """Whether the studies of the chapter that writes to `file` have ended."""
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
    """Counts the results of `total` that are done, and shows the count; a context manager."""

    def __init__(self, title: str, total: int, unit: str, shown: bool = True):
        self.title, self.total, self.done, self.began, self.reported = title, total, 0, time.monotonic(), 0.0
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
        self._report()

    @property
    def left(self) -> float | None:
        """Seconds that are left, at the speed so far; None before the first result."""
        return (time.monotonic() - self.began) * (self.total - self.done) / self.done if self.done else None

    @property
    def text(self) -> str:
        left = "" if self.left is None else f", {clock(self.left)} left"
        return f"{self.title}: {self.done:,} of {self.total:,}{left}"

    def update(self, count: int) -> None:
        """`count` more results are done."""
        self.done += count
        if self.bar is not None:
            self.bar.update(count)
        if time.monotonic() - self.reported > 0.5 or self.done == self.total:
            self._report()

    def _report(self) -> None:
        self.reported = time.monotonic()
        message = {"study": self.title, "done": self.done, "total": self.total, "left": self.left}
        send(**message)
        if self.file:
            with replaced(Path(self.file)) as aside:
                aside.write_text(json.dumps(message))
        if self.handle is not None:
            self.handle.update({"text/plain": self.text}, raw=True)

    def __exit__(self, *exception: object) -> None:
        if self.bar is not None:
            self.bar.close()
        if self.handle is not None:
            self.handle.update({"text/plain": ""}, raw=True)
