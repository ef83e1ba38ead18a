"""One call for every study of every chapter: declare it, and `run` gives its rows.

    rows = run(Answers("mine", "main", items, conditions, max_new_tokens=32), loaded, Settings())

`Answers`: what the model says, items x conditions, a row for each. `PerItem`: whatever else is computed per item, as
tables. What is computed is stored at once, whole or not at all; what is stored with the same inputs and code is not
computed again; what fails costs its own row; items are shared among worker processes.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Generic, Literal, Self, TypeVar, overload

import pandas as pd

from kvrepro.engine.allowed import Positive, Size, ensure_fields
from kvrepro.engine.condition import Generation, Prompt
from kvrepro.engine.generate import Conditions
from kvrepro.errors import InputError, Stopped, meant
from kvrepro.experiment import cluster, workers
from kvrepro.experiment.answers import AnswersPlan
from kvrepro.experiment.models import Loaded
from kvrepro.experiment.parameters import ensure_name
from kvrepro.experiment.per_item import PerItemPlan
from kvrepro.experiment.plan import Plan
from kvrepro.experiment.progress import Progress, clock, tell
from kvrepro.item import Item
from kvrepro.paths import WORK

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Result = TypeVar("Result", pd.DataFrame, dict[str, pd.DataFrame])
MOST_FAILED = 0.1  # share of a study's results that may fail before the study as a whole counts as failed
POOL_FROM = 20.0  # seconds of work from which worker processes, which load the model each, are worth starting


class StudyFailed(Stopped):
    """More than a tenth of a study's results failed; those that did not are stored."""


@dataclass(frozen=True)
class Settings:
    """How studies are run; a chapter's `settings.Settings` adds its own fields. Raises InputError for other values."""

    results: str | Path = "data/results"  #: a folder; a relative one lies in the clone, or else in the working folder
    profile: Literal["quick", "full"] = "quick"  #: how many items, where their number is not given
    seed: int = 0  #: of the items
    device: str = "cpu"  #: or "cuda"
    dtype: Dtype = "auto"  #: of weights and caches; "auto": the checkpoint's own on a GPU, float32 on the CPU
    backend: Literal["auto", "torch", "triton"] = "auto"  #: "auto": kernels where they agree with plain PyTorch
    workers: Size | None = None  #: processes, one thread or GPU each; None: `$KVREPRO_WORKERS`, or all cores or GPUs
    engine: Literal["local", "ray"] | None = None  #: who runs workers; None: `$KVREPRO_ENGINE`, or local processes
    address: str | None = None  #: of a Ray cluster, host:port; None: `$KVREPRO_RAY_ADDRESS`, or this machine alone
    batch_rows: Size | None = None  #: rows that decode together; None: 64, on a GPU what its memory holds
    time_limit: Positive | None = None  #: seconds for an item or a row; what takes longer fails, and the rest goes on
    progress: bool = True  #: show a progress bar
    dry_run: bool = False  #: print what a study would take, and compute nothing; also by `$KVREPRO_DRY_RUN`

    def __post_init__(self) -> None:
        if not isinstance(self.results, str | Path):
            raise InputError(f"results is {self.results!r}: give the name of a folder")
        object.__setattr__(self, "dry_run", self.dry_run or bool(os.environ.get("KVREPRO_DRY_RUN")))
        if self.workers is None and (given := os.environ.get("KVREPRO_WORKERS")):
            object.__setattr__(self, "workers", int(given) if given.isdigit() else given)
        if self.engine is None:
            object.__setattr__(self, "engine", os.environ.get("KVREPRO_ENGINE") or "local")
        ensure_fields(self, type(self))
        if self.address is not None and self.engine == "local":
            raise InputError(f"address {self.address!r} is of a Ray cluster, and the engine is local: set engine 'ray'")
        object.__setattr__(self, "address", self.address or os.environ.get("KVREPRO_RAY_ADDRESS") or None)

    @classmethod
    def of(cls, options: Mapping[str, Any] | None = None, **given: Any) -> Self:
        """Settings from a notebook's `options` and from what is given by name. InputError for an unknown option."""
        if not isinstance(options, Mapping | None):
            raise InputError(f"options {options!r}: give settings by name, {{'seed': 1}} for instance")
        known = [f.name for f in fields(cls)]
        for name in options or {}:
            if name not in known:
                raise InputError(f"unknown option {name!r}{meant(name, known)}; there are: {', '.join(known)}")
            if name in given:
                raise InputError(f"{name} is a parameter of its own: set it there, not among the options")
        return cls(**given, **(options or {}))

    @property
    def folder(self) -> Path:
        """Where results lie."""
        return WORK / self.results

    def end_dry_run(self) -> None:
        """In a dry run, end the notebook here: what follows needs rows. papermill stops at a SystemExit of 0, too, and
        counts it as no error."""
        if self.dry_run:
            print("dry run: nothing was computed, and the cells below were not run")
            raise SystemExit(0)


USUAL = Settings()


@dataclass(frozen=True)
class Answers:
    """Generations of items under conditions, those of all items or a list for each: a row each, columns as in
    `kvrepro.experiment.table.SCHEMA`."""

    chapter: str
    name: str
    items: Sequence[Item]
    conditions: Conditions
    max_new_tokens: int = 128
    limit: int | None = None  # tokens of a prompt; longer passages are cut; None: what the model's context leaves
    prompt: Callable[[Loaded, Item], Prompt] | None = None  # instead of the item's messages as they are
    note: Callable[[Item, Prompt, Generation], dict[str, Any]] | None = None  # more of a row, as JSON; sees kept sets
    gaps: bool = False  # a condition that an item cannot meet is a row with an error; otherwise it is refused
    together: int = 1  # neighbouring items that share a prefix
    prompt_rows: int = 1  # neighbouring items under the same conditions that pass through the model together

    plan = AnswersPlan


@dataclass(frozen=True)
class PerItem(Generic[Result]):
    """`compute(loaded, item, **parameters)` of every item: a table, or several by name.

    Of several items equal tables are joined; columns `item` and `task` are added where the tables lack them. A result
    depends on the item, the parameters, the checkpoint and the code that `compute` reaches. Policies must be among the
    parameters, as conditions or by name: the catalogue itself is no part of that code.
    """

    chapter: str
    name: str
    items: Sequence[Item] | Mapping[str, Any]  # items, or anything else by its name
    compute: Callable[..., Result]
    parameters: Mapping[str, Any] = field(default_factory=dict)
    alone: bool = False  # measures time: one item after the other, in this process

    plan = PerItemPlan


@overload
def run(study: Answers, loaded: Loaded, settings: Settings = USUAL) -> pd.DataFrame: ...
@overload
def run(study: PerItem[Result], loaded: Loaded | None, settings: Settings = USUAL) -> Result: ...
def run(study: Any, loaded: Any, settings: Settings = USUAL) -> Any:
    """The results of a study; those that are stored are read, the others computed and stored.

    A result that failed is tried again by the next run. What failed is in `attrs["failed"]` of the frame, as text, and
    in one printed line. Raises InputError, before anything is computed, for what can be known by then; StudyFailed,
    when everything else is stored, where more than a tenth failed.
    """
    started = time.perf_counter()
    ensure_name(study.chapter)
    ensure_name(study.name)
    with study.plan(study, loaded, settings) as plan:
        if settings.dry_run:
            expected, processes = plan.estimate(), _processes(plan, settings, float("inf"))
            print(expected.line(processes))
            tell(study=plan.title, results=expected.results, seconds=expected.seconds, bytes=expected.stored,
                 processes=processes)  # fmt: skip
            return plan.rehearsal()
        computed = _compute(plan, settings)
        found = plan.results()
    failed = plan.failures()
    text = f"{plan.title}: {plan.total} {plan.unit}s, {computed} computed now, {len(failed)} failed"
    print(f"{text}, {clock(time.perf_counter() - started)}", *plan.remarks(), sep="\n")
    if len(failed) > MOST_FAILED * plan.total:
        raise StudyFailed(f"{plan.title}: {len(failed)} of {plan.total} {plan.unit}s failed, the first {failed[0]}")
    if failed:
        print(f"{plan.title}: {len(failed)} of {plan.total} {plan.unit}s are missing, the first {failed[0]}")
    for frame in found.values() if isinstance(found, dict) else [found]:
        frame.attrs["failed"] = failed
    return found


def _compute(plan: Plan, settings: Settings) -> int:
    """Do a plan's jobs, in this process or in workers, and store each as it is done. How many results that were."""
    jobs = plan.jobs()
    count = sum(job.size for job in jobs)
    if not jobs:
        return 0
    processes = 1
    if len(jobs) > 1 and (settings.workers is not None or not _testing()):
        with workers.one_thread():
            expected = plan.estimate()
        processes = _processes(plan, settings, expected.seconds)
        print(expected.line(processes))
        jobs = plan.jobs()  # without what the estimate has done
    given = (plan.loaded, jobs, min(processes, len(jobs)))
    shared = cluster.each(*given, settings.address) if settings.engine == "ray" else workers.each(*given)
    with Progress(plan.title, count, plan.unit, settings.progress) as bar:
        for job, result in shared:
            plan.add(job, result)
            bar.update(job.size)
    return count


def _processes(plan: Plan, settings: Settings, seconds: float) -> int:
    """Worker processes for that much work."""
    if plan.alone or not workers.possible(plan.loaded):
        return 1
    if settings.workers is not None:
        return settings.workers
    few = _testing() or seconds < POOL_FROM
    return 1 if few else cluster.usual_workers(plan.loaded, settings.engine, settings.address)


def _testing() -> bool:
    return "PYTEST_CURRENT_TEST" in os.environ
