"""One call for every study of every chapter: declare it, and `run` gives its rows.

    rows = run(Answers("mine", "main", items, conditions, max_new_tokens=32), loaded, Settings())

`Answers`: what the model says, items x conditions, a row for each. `PerItem`: whatever else is computed per item, as
tables. What is computed is stored at once, whole or not at all; what is stored with the same inputs and code is not
computed again; what fails costs its own row; items are shared among worker processes.
"""

import os
import time
from pathlib import Path
from typing import Any, overload

import pandas as pd
from tqdm.auto import tqdm

from kvrepro.errors import Stopped
from kvrepro.experiment import pool
from kvrepro.experiment.answers import Answers
from kvrepro.experiment.data import say_once
from kvrepro.experiment.models import Loaded
from kvrepro.experiment.parameters import ensure_name
from kvrepro.experiment.per_item import PerItem, Result
from kvrepro.experiment.plan import Plan, clock
from kvrepro.experiment.settings import Settings
from kvrepro.paths import WORK

__all__ = ["Answers", "PerItem", "Settings", "StudyFailed", "run"]
MOST_FAILED = 0.1  # share of a study's results that may fail before the study as a whole counts as failed
POOL_FROM = 20.0  # seconds of work from which worker processes, which load the model each, are worth starting


class StudyFailed(Stopped):
    """More than a tenth of a study's results failed; those that did not are stored."""


USUAL = Settings()


@overload
def run(study: Answers, loaded: Loaded, settings: Settings = USUAL) -> pd.DataFrame: ...
@overload
def run(study: PerItem[Result], loaded: Loaded | None, settings: Settings = USUAL) -> Result: ...
def run(study: Any, loaded: Any, settings: Settings = USUAL) -> Any:
    """The results of a study. Those that are stored are read, the others are computed and stored.

    A result that failed is tried again by the next run. Failures are in `attrs["failed"]` of the frame, as texts, and
    in one printed line. Raises InputError, if possible before anything is computed; StudyFailed where more than a tenth
    of the results failed, after all others are stored.
    """
    started = time.perf_counter()
    ensure_name(study.chapter)
    ensure_name(study.name)
    if not Path(settings.results).is_absolute() and Path.cwd() != WORK.resolve():
        say_once(f"results go to {settings.folder}: a relative folder lies in the clone")
    if loaded is not None and settings.enable_thinking is not None:
        loaded = loaded.thinking(settings.enable_thinking)
    with study.plan(study, loaded, settings) as plan:
        if settings.dry_run:
            print(plan.forecast().line(_processes(plan, settings, float("inf"))))
            return plan.rehearsal()
        computed = _compute(plan, settings)
        results = plan.results()
    failed = plan.failures()
    taken = time.perf_counter() - started
    units = f"{plan.unit}s" if plan.total != 1 else plan.unit
    text = f"{plan.title}: {plan.total} {units}, {computed} computed now, {len(failed)} failed"
    print(f"{text}, {clock(taken)}", *plan.remarks(), sep="\n")
    if len(failed) > MOST_FAILED * plan.total:
        raise StudyFailed(f"{plan.title}: {len(failed)} of {plan.total} {units} failed, the first {failed[0]}")
    if failed:
        missing = "is missing" if len(failed) == 1 else "are missing"
        print(f"{plan.title}: {len(failed)} of {plan.total} {units} {missing}, the first {failed[0]}")
    for frame in results.values() if isinstance(results, dict) else [results]:
        frame.attrs["failed"] = failed
    return results


def _compute(plan: Plan, settings: Settings) -> int:
    """Do a plan's jobs, in this process or in workers, and store the result of each. Returns how many results."""
    jobs = plan.jobs()
    count = sum(job.size for job in jobs)
    if not jobs:
        return 0
    if settings.engine == "ray" and settings.address:  # a small study would not notice that it is wrong
        pool.reach(settings.address)
    processes = 1
    if len(jobs) > 1 and (settings.workers is not None or not _testing()):
        with pool.one_thread():
            expected = plan.forecast()
        processes = _processes(plan, settings, expected.seconds)
        print(expected.line(processes))
        jobs = plan.jobs()  # without those that the forecast has done
    engine = settings.engine or "local"
    results = pool.results(plan.loaded, jobs, min(processes, len(jobs)), engine, settings.address)
    total = sum(job.size for job in jobs)
    with tqdm(total=total, desc=plan.title, unit=plan.unit, disable=not settings.progress, leave=False) as bar:
        for job, result in results:
            plan.lost(job, str(result)) if isinstance(result, pool.Died) else plan.add(job, result)
            bar.update(job.size)
    return count


def _processes(plan: Plan, settings: Settings, seconds: float) -> int:
    """The number of worker processes for so many seconds of work."""
    if plan.alone or not pool.possible(plan.loaded):
        return 1
    if settings.workers is not None:
        return settings.workers
    if _testing() or seconds < POOL_FROM:
        return 1
    return pool.usual_workers(plan.loaded, settings.engine or "local", settings.address)


def _testing() -> bool:
    return "PYTEST_CURRENT_TEST" in os.environ
