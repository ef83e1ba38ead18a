"""What the runner asks of a study, once it is known which of its results are stored."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from kvrepro.experiment.models import Loaded
from kvrepro.experiment.progress import clock


@dataclass(frozen=True)
class Job:
    """A part of a study that is computed by one process and stored at once."""

    size: int  # results
    work: Callable[[Loaded | None], Any]  # can be pickled
    of: Any = None  # what the plan wants to know again when the result comes


@dataclass(frozen=True)
class Forecast:
    """What the missing results of a study take, at most: answers may end early."""

    title: str
    what: str
    results: int
    seconds: float  # of one process
    stored: float  # bytes of results
    held: float = 0.0  # bytes of the caches that one process holds at a time

    def line(self, processes: int, at_once: int) -> str:
        """The forecast as one line, for so many processes, of which so many find a core or GPU of their own."""
        by = f" by {processes} workers" if processes > 1 else ""
        held = f", caches of {self.held * processes / 1e6:,.0f} MB at a time" if self.held else ""
        seconds = clock(self.seconds / at_once)
        return f"{self.title}: {self.what}; at most {seconds}{by}, {self.stored / 1e6:.1f} MB of results{held}"


class Plan(AbstractContextManager["Plan"]):
    """One study with one model: what is missing, and where results go. A context manager, for the store it holds."""

    loaded: Loaded | None
    title: str  # chapter/name
    unit: str  # what the results are
    total: int
    alone = False

    @abstractmethod
    def jobs(self) -> Sequence[Job]:
        """What is to be computed. The same parts, however many processes share them."""

    @abstractmethod
    def forecast(self) -> Forecast:
        """What that takes, from a short measured step. Stores nothing."""

    @abstractmethod
    def add(self, job: Job, result: Any) -> None:
        """Store a job's result."""

    @abstractmethod
    def results(self) -> Any:
        """All results, the old and the new ones."""

    @abstractmethod
    def rehearsal(self) -> Any:
        """Something of the results' shape, after an estimate: so that the studies after this one can be estimated."""

    @abstractmethod
    def failures(self) -> list[str]:
        """What failed, a text each that names it and its error."""

    def remarks(self) -> list[str]:
        """What else a reader should know, in lines."""
        return []

    def __exit__(self, *exception: object) -> None:
        return None
