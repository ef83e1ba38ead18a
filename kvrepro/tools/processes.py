"""Chapters in processes of their own, with one live line; signals, and the end of all that a process started."""

import contextlib
import json
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
from papermill.exceptions import PapermillExecutionError

from kvrepro.errors import ENDING, interrupted, signals_interrupt
from kvrepro.experiment import progress
from kvrepro.tools.rows import words

SECONDS: dict[str, dict[str, int]] = words("seconds")  # of studies
DIED = "its process ended: too little memory?"


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Around a command: a signal of `ENDING` that is not ignored ends what this process started, says so, and exits."""
    try:
        with signals_interrupt([], once=True):
            yield
    except KeyboardInterrupt as interrupt:
        end_family(os.getpid())
        os._exit(interrupted(interrupt))  # the usual way takes seconds more


def end_family(pid: int) -> None:
    """Kill all descendants of a process: chapters, kernels, workers. Parents are killed first, so that they start no
    more."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


class Chapter:
    """A chapter's work, which says whether it ran, in a process of its own.

    Whatever ends this process, an interrupt above all, ends the chapter, its kernel and its workers with it.
    """

    def __init__(self, name: str, work: Callable[[], bool]):
        self.name, self.began, self.waits = name, time.monotonic(), True
        self.folder = tempfile.TemporaryDirectory()
        self.file = Path(self.folder.name) / "progress.json"
        self.answer, there = multiprocessing.Pipe(duplex=False)
        self.process = multiprocessing.get_context("fork").Process(target=_chapter, args=(there, work))
        os.environ[progress.FILE] = str(self.file)
        try:
            self.process.start()
        finally:
            del os.environ[progress.FILE]
        there.close()

    def give_turn(self) -> None:
        """Let its studies compute. Its time counts from now on."""
        if self.waits:
            progress.give_turn(self.file)
            self.began, self.waits = time.monotonic(), False

    @property
    def seconds(self) -> float:
        """Since it got its turn; of one that needed none, since it began."""
        return time.monotonic() - self.began

    @property
    def at_work(self) -> bool:
        return self.process.is_alive() and not self.answer.poll()

    @property
    def computing(self) -> bool:
        """Its studies have not ended."""
        return self.at_work and not progress.ended(self.file)

    def end(self) -> tuple[bool, str]:
        """(Whether it ran, its error or ""), once it is no longer at work; before, all that it started is killed."""
        try:
            return self.answer.recv() if self.answer.poll() else (False, DIED)
        except EOFError:
            return False, DIED
        finally:
            if self.process.is_alive():
                os.kill(int(self.process.pid or 0), signal.SIGSTOP)  # it starts nothing now
                end_family(int(self.process.pid or 0))
            self.process.kill()
            self.process.join()
            self.folder.cleanup()
            if sys.stderr.isatty():
                print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def show(self) -> None:
        """Print its live line: time so far, the study and how far it is, and the time left of the chapter."""
        if not sys.stderr.isatty():
            return
        text = f"{self.name:<16}{self.seconds:8.0f} s"
        with contextlib.suppress(OSError, ValueError):
            message = json.loads(self.file.read_text())
            left = chapter_left(self.name, message, self.seconds)
            text += f"  {message['study'].partition('/')[2]}: {message['done']:,} of {message['total']:,}"
            text += "" if left is None else f", about {progress.clock(left)} left"
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


Ended = tuple[str, float, bool, str]  # a chapter, its seconds, whether it ran, its error or ""


def in_turn(
    works: Iterable[tuple[str, Callable[[], bool]]], most: int = 3, shared: Collection[str] = ()
) -> Iterator[Ended]:
    """Run chapters, with a live line of the first whose studies compute. Yields what became of each, as it ends.

    The studies of one chapter compute at a time, or of two that are both `shared`. Meanwhile the one before draws its
    figures, and the next one loads what it needs, which keep busy the cores that workers leave idle. At most `most`
    chapters run at a time.
    """
    running: list[Chapter] = []
    try:
        for name, work in works:
            running.append(Chapter(name, work))
            while len(running) >= most or (running and running[-1].waits):
                yield from _ended(running, shared)
        while running:
            yield from _ended(running, shared)
    finally:
        for chapter in running:
            chapter.end()


def _give_turn(running: Sequence[Chapter], shared: Collection[str]) -> Chapter:
    """Give the turn to the first chapter whose studies have not ended, to the second as well where both are `shared`,
    and return the first; otherwise the newest chapter."""
    computing = [chapter for chapter in running if chapter.computing]
    two = computing[:2]
    for chapter in two if all(chapter.name in shared for chapter in two) else two[:1]:
        chapter.give_turn()
    return computing[0] if computing else running[-1]


def _ended(running: list[Chapter], shared: Collection[str]) -> Iterator[Ended]:
    """Wait half a second at most, remove the chapters that have ended from the list, and yield what became of them."""
    computing = _give_turn(running, shared)
    multiprocessing.connection.wait([chapter.answer for chapter in running], 0.5)
    computing.show()
    for chapter in [chapter for chapter in running if not chapter.at_work]:
        running.remove(chapter)
        yield chapter.name, chapter.seconds, *chapter.end()


def _chapter(answer: Connection, work: Callable[[], bool]) -> None:
    """Do the work and send (whether it ran, its error or "")."""
    for ending_signal in ENDING:  # the parent handles them; a function does nothing, as kernels would inherit SIG_IGN
        signal.signal(ending_signal, lambda number, frame: None)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    try:
        answer.send((work(), ""))
    except PapermillExecutionError as error:
        answer.send((True, f"{error.ename}: {error.evalue}"))
    except Exception as error:
        answer.send((True, f"{type(error).__name__}: {error}"))


def _end_with(parent: int) -> None:
    """End this process and all that it started as soon as its parent has ended."""
    while os.getppid() == parent:
        time.sleep(0.5)
    end_family(os.getpid())
    os._exit(1)


def chapter_left(name: str, message: dict[str, Any], seconds: float) -> float | None:
    """Estimated seconds until a chapter ends, of which the part so far took `seconds`. In a study that `SECONDS` does
    not list, until the end of that study. message: as of `progress.listening`."""
    expected, study = SECONDS.get(name, {}), message["study"].partition("/")[2]
    if message["left"] is None or study not in expected:
        return message["left"]
    before = list(expected.values())[: list(expected).index(study)]
    done = sum(before) + expected[study] * message["done"] / message["total"]
    return max(message["left"], seconds * (sum(expected.values()) / done - 1))
