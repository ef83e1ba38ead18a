"""One call for every study of every chapter: declare it, and `run` gives its rows.

    rows = run(Answers("mine", "main", items, conditions, max_new_tokens=32), loaded, Settings())

`Answers`: what the model says, items x conditions, a row for each. `PerItem`: whatever else is computed per item, as
tables. What is computed is stored at once, whole or not at all; what is stored with the same inputs and code is not
computed again; what fails costs its own row; items are shared among worker processes.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar, overload

import pandas as pd
from tqdm.auto import tqdm

from kvrepro.engine.condition import Condition
from kvrepro.engine.policy import find, is_own
from kvrepro.errors import InputError, Stopped, error_line
from kvrepro.experiment import answers, data, measure, pool, store
from kvrepro.experiment.answers import Answers, references, time_limit
from kvrepro.experiment.models import Loaded
from kvrepro.experiment.pool import Job
from kvrepro.experiment.settings import Settings, ensure_name
from kvrepro.item import Item, thinking, thinks
from kvrepro.paths import WORK
from kvrepro.world import world

__all__ = ["Answers", "PerItem", "Settings", "StudyFailed", "run"]
MOST_FAILED = 0.1  # share of a study's results that may fail before the study as a whole counts as failed
POOL_FROM = 20.0  # seconds of work from which worker processes, which load the model each, are worth starting
ONE = "table"  # the name of the table where a computation gives only one
REFUSAL = world.pretty(world.REFUSAL)
USUAL = Settings()
Result = TypeVar("Result", pd.DataFrame, dict[str, pd.DataFrame])


class StudyFailed(Stopped):
    """More than a tenth of a study's results failed; those that did not are stored."""


@dataclass(frozen=True)
class PerItem(Generic[Result]):
    """A study of `compute(loaded, item, **parameters)` for every item: a table, or several by name.

    Tables of the same name are joined over the items; columns `item` and `task` are added where they lack them. A
    result depends on the item, the parameters, the checkpoint and the source (`store.code_of`). A reader's own policies
    must be among the parameters, as conditions or by name.
    """

    chapter: str
    name: str
    items: Sequence[Item] | Mapping[str, Any]  # items, or anything else by its name
    compute: Callable[..., Result]
    parameters: Mapping[str, Any] = field(default_factory=dict)
    alone: bool = False  # one item after the other in this process, to measure time


@overload
def run(study: Answers, loaded: Loaded, settings: Settings = USUAL) -> pd.DataFrame: ...
@overload
def run(study: PerItem[Result], loaded: Loaded | None, settings: Settings = USUAL) -> Result: ...
def run(study: Any, loaded: Any, settings: Settings = USUAL) -> Any:
    """The results of a study. Those that are stored are read, the others are computed and stored.

    A result that failed is tried again by the next run. Failures are in `attrs["failed"]` of the frame, as texts, and
    the first is in the line that is printed. Raises InputError, if possible before anything is computed; StudyFailed
    where more than a tenth of the results failed, after all others are stored.
    """
    started = time.perf_counter()
    ensure_name(study.chapter)
    ensure_name(study.name)
    if not Path(settings.results).is_absolute() and Path.cwd() != WORK.resolve():
        data.say_once(f"results go to {settings.folder}: a relative folder lies in the clone")
    if loaded is not None and settings.enable_thinking is not None:
        loaded = replace(loaded, tokenizer=thinking(loaded.tokenizer, settings.enable_thinking))
    plan = (answers.Plan if isinstance(study, Answers) else Plan)(study, loaded, settings)
    title = f"{study.chapter}/{study.name}"
    computed = _compute(plan, loaded, settings, title)
    results, failed = plan.results()
    line = f"{title}: {plan.total} {plan.unit}s, {computed} computed now, {len(failed)} failed"
    first = f", the first {failed[0]}" if failed else ""
    print(f"{line}, {time.perf_counter() - started:.0f} s{first}")
    if len(failed) > MOST_FAILED * plan.total:
        raise StudyFailed(f"{title}: {len(failed)} of {plan.total} {plan.unit}s failed{first}")
    for frame in results.values() if isinstance(results, dict) else [results]:
        frame.attrs["failed"] = failed
    return results


def _compute(plan: "answers.Plan | Plan", loaded: Loaded | None, settings: Settings, title: str) -> int:
    """Do a plan's jobs, in this process or in workers, and store the result of each. Returns how many results."""
    if not (jobs := plan.jobs()):
        return 0
    count, began = sum(job.size for job in jobs), time.perf_counter()
    workers, devices = 1, {p.device for p in loaded.model.parameters()} if loaded else set()
    if settings.address:  # a small study would not notice that it is wrong
        pool.connect(settings.address)
    if len(jobs) > 1 and not plan.alone and len(devices) <= 1:  # a worker loads its model onto one
        workers = settings.workers or pool.usual_workers(loaded, settings.engine, settings.address)
    with tqdm(total=count, desc=title, unit=plan.unit, disable=not settings.progress, leave=False) as bar:
        if workers > 1 and settings.workers is None:
            [(first, result)] = pool.results(loaded, [plan.first()], 1)
            plan.add(first, result)
            bar.update(first.size)
            jobs = plan.jobs()
            if (time.perf_counter() - began) / first.size * (count - first.size) < POOL_FROM:
                workers = 1
        for job, result in pool.results(loaded, jobs, min(workers, len(jobs)), settings.engine, settings.address):
            plan.add(job, result)
            bar.update(job.size)
    return count


# ---- tables of items


class Plan:
    """The tables of `PerItem`: which are missing, the jobs that compute them, and where they go."""

    unit = "item"

    def __init__(self, study: PerItem[Any], loaded: Loaded | None, settings: Settings):
        self.study, self.alone, self.limit = study, study.alone, settings.time_limit
        pairs = study.items.items() if isinstance(study.items, Mapping) else [(item.id, item) for item in study.items]
        self.items: dict[str, Any] = dict(pairs)
        self.total = len(self.items)
        if not self.items or self.total < len(study.items):
            raise InputError(f"{len(study.items)} items with {self.total} names: give at least one, each its own")
        where: list[Any] = []
        if loaded is not None:
            where = [loaded.hash, loaded.dtype, loaded.device, thinks(loaded.tokenizer)]
        own_policies = _policies_in(study.parameters)
        code = store.digest(store.code_of(study.chapter), study.compute, study.parameters, own_policies)
        folder = settings.folder / study.chapter / study.name
        self.folders = {name: folder / store.digest(where, code, item) for name, item in self.items.items()}
        self.errors: dict[str, str] = {}

    def jobs(self) -> list[Job]:
        """One for each missing item."""
        study = self.study
        work = partial(_tables, compute=study.compute, parameters=study.parameters, limit=self.limit)
        return [
            Job(1, partial(work, item=self.items[name]), name)
            for name, place in self.folders.items()
            if name not in self.errors and not store.has_tables(place)
        ]

    def first(self) -> Job:
        """The first of them, from whose time that of all others is judged."""
        return self.jobs()[0]

    def add(self, job: Job, result: Any) -> None:
        """Store an item's tables, or remember why there are none."""
        if isinstance(result, dict):
            store.add_tables(self.folders[job.label], result)
        else:
            self.errors[job.label] = str(result)

    def results(self) -> tuple[Any, list[str]]:
        """The items' tables of the same name below each other; and a text for each item that failed."""
        parts: dict[str, list[pd.DataFrame]] = {}
        for name, item in self.items.items():
            columns = {"item": name} | ({"task": item.task} if hasattr(item, "task") else {})
            for table, frame in store.read_tables(self.folders[name]).items():
                missing = {column: value for column, value in columns.items() if column not in frame}
                parts.setdefault(table, []).append(frame.assign(**missing))
        joined = {name: pd.concat(frames, ignore_index=True) for name, frames in parts.items()}
        tables = joined.get(ONE, pd.DataFrame()) if set(joined) <= {ONE} else joined
        return tables, [f"{name}: {error}" for name, error in self.errors.items()]


def _tables(loaded: Loaded | None, compute: Any, item: Any, parameters: Mapping[str, Any], limit: float | None) -> Any:
    """An item's tables by name, or the error of its computation as a line; a TimeLimit after `limit` seconds."""
    try:
        with time_limit(limit):
            result = compute(loaded, item, **parameters)
        tables = result if isinstance(result, dict) else {ONE: result}
        if not tables or not all(isinstance(table, pd.DataFrame) for table in tables.values()):
            raise TypeError(f"{compute} gave {type(result).__name__}, not a table or tables by name")
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # a SystemExit too, which would end the run without an explanation
        return error_line(error)
    return tables


def _policies_in(parameters: Any) -> list[Any]:
    """A reader's own policies among parameters, which stand there as conditions or by name."""
    if isinstance(parameters, Condition):
        return _policies_in(parameters.policy)
    if isinstance(parameters, str):
        return [find(parameters)] if is_own(parameters) else []
    parts = parameters.values() if isinstance(parameters, Mapping) else parameters
    return [policy for part in parts for policy in _policies_in(part)] if isinstance(parts, Iterable) else []


# ---- control answers


def controls(
    chapter: str, items: Sequence[Item], loaded: Loaded, settings: Settings, max_new_tokens: int
) -> pd.DataFrame:
    """Answers that no policy gives: a row for each item and control, with columns item, task, control, prediction,
    answer, and the measures'. A score says something about a cache only where it is above the scores of these.

    Controls: `first_word`, only the answer's first word, which comes from the full cache wherever tokens leave after
    the question; `copy`, that word and the words that follow its first place in the prompt; `refusal`; and
    `no_passage`, the model's answer to the question alone, which is stored beside the chapter's rows as `controls`.
    """
    questions = [data.without_passage(item) for item in items]
    rows = run(Answers(chapter, "controls", questions, [Condition()], max_new_tokens), loaded, settings)
    alone, controls = dict(zip(rows["item"], rows.prediction, strict=True)), []
    for item in items:
        texts = {"first_word": " ".join(item.answer.split()[:1]), "copy": copied(item), "refusal": REFUSAL}
        for name, text in (texts | {"no_passage": alone[item.id]}).items():
            if isinstance(text, str):  # there is none where the generation failed
                row = {"item": item.id, "task": item.task, "control": name, "prediction": text, "answer": item.answer}
                scores = measure.all_measures(text, references(item), item.papers)
                controls.append(row | scores | measure.official(text, references(item), item.meta))
    return pd.DataFrame(controls)


def copied(item: Item) -> str:
    """The answer's first word and those that follow its first place in the messages, as many as the answer has."""
    answer = item.answer.split()
    words = " ".join(message["content"] for message in item.messages).split()
    at = next((i for i, word in enumerate(words) if answer and word.strip(".,;:?") == answer[0].strip(".,;:?")), None)
    return " ".join(answer[:1] if at is None else [answer[0], *words[at + 1 : at + len(answer)]])
