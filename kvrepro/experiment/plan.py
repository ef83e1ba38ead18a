"""How the runner sees a study: what is missing of its results, the jobs that compute it, and where results go."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from kvrepro.experiment.models import Loaded


def clock(seconds: float) -> str:
    """`45 s`, `12 min`, `3 h 20 min`."""
    if seconds < 600:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min"


@dataclass(frozen=True)
class Job:
    """A part of a study that is computed by one process and stored at once."""

    size: int  # results
    work: Callable[[Loaded | None], Any]  # can be pickled
    label: Any = None  # of the plan, which needs it when the result comes


@dataclass(frozen=True)
class Forecast:
    """What the missing results of a study will take, judged by a few of them: less where answers end early, more where
    workers have yet to start or the machine is busy."""

    title: str
    work: str  # the missing results, in words
    results: int
    seconds: float  # of one process
    stored: float  # bytes of results
    held: float = 0.0  # bytes of the caches that one process holds at a time
    unless: str = ""  # when it takes less, in words

    def line(self, processes: int) -> str:
        """The forecast as one line."""
        workers = f" by {processes} workers" if processes > 1 else ""
        held = f", caches of {self.held * processes / 1e6:,.0f} MB at a time" if self.held else ""
        seconds = clock(self.seconds / processes)
        expected = f"about {seconds}{workers}{self.unless and f' ({self.unless})'}"
        return f"{self.title}: {self.work}; {expected}, {self.stored / 1e6:.1f} MB of results{held}"


class Plan(AbstractContextManager["Plan"]):
    """One study with one model. A context manager, because it holds the store open."""

    loaded: Loaded | None
    title: str  # chapter/name
    unit: str  # the name of one result: "row", "item"
    total: int  # results, stored and missing
    alone = False  # whether the study must run in this process

    @abstractmethod
    def jobs(self) -> Sequence[Job]:
        """The jobs that compute what is missing; the same ones, however many processes share them."""

    @abstractmethod
    def forecast(self) -> Forecast:
        """What these jobs will take, from a short measured step; a rehearsal stores nothing of it."""

    @abstractmethod
    def add(self, job: Job, result: Any) -> None:
        """Store a job's result."""

    @abstractmethod
    def lost(self, job: Job, why: str) -> None:
        """Note that a job has no result."""

    @abstractmethod
    def results(self) -> Any:
        """All results, old and new ones."""

    @abstractmethod
    def rehearsal(self) -> Any:
        """After a forecast: a stand-in of the results' shape, so that the studies after this one can be forecast."""

    @abstractmethod
    def failures(self) -> list[str]:
        """A text for each result that failed, with its name and its error."""

    def remarks(self) -> list[str]:
        """Lines on what else a reader should know."""
        return []

    def __exit__(self, *exception: object) -> None:
        return None
