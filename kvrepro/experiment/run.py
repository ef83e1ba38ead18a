"""One call for every study of every chapter: `run(Answers(...), loaded, settings)` gives its rows.

`Answers`: what the model says, items x conditions, a row for each. `PerItem`: whatever else is computed per item, as
tables. What is computed is stored at once; what is stored with the same inputs and code is not computed again.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, Generic, TypeVar, overload

import pandas as pd
from pydantic import Field
from tqdm.auto import tqdm

from kvrepro.engine.condition import Condition, ensure
from kvrepro.engine.policy import find, is_own
from kvrepro.errors import InputError, Stopped, error_line
from kvrepro.experiment import answers, data, measure, pool, store
from kvrepro.experiment.answers import Answers, references
from kvrepro.experiment.models import Loaded
from kvrepro.experiment.pool import Job, Plan
from kvrepro.experiment.settings import Settings
from kvrepro.item import Item, thinking, thinks
from kvrepro.world import world

__all__ = ["Answers", "PerItem", "Settings", "run"]
NAMED = "up to 60 letters, digits, _, . or -, of which the first is neither . nor -"
Name = Annotated[str, Field(pattern=r"^\w[\w.-]{0,59}$"), NAMED]  # a study's, which names its folder
MOST_FAILED = 0.1  # share of a study's results that may fail before the study as a whole counts as failed
ONE = "table"  # the name of the table where a computation gives only one
USUAL = Settings()
Result = TypeVar("Result", pd.DataFrame, dict[str, pd.DataFrame])


@dataclass(frozen=True)
class PerItem(Generic[Result]):
    """A study of `compute(loaded, item, **parameters)` for every item: a table, or several by name. Tables of the same
    name are joined over the items; columns `item` and `task` are added where they lack them. A reader's own policies
    must be among the parameters, as conditions or by name."""

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
    """The results of a study. Those that are stored are read, the others are computed and stored. Failures are in
    `attrs["failed"]` of the frame, as texts; the next run tries them again. Raises InputError, if possible before
    anything is computed, and Stopped with the results where more than a tenth failed, after all others are stored."""
    started, title = time.perf_counter(), f"{study.chapter}/{study.name}"
    ensure(Name, chapter=study.chapter, name=study.name)
    if loaded is not None and settings.enable_thinking is not None:
        loaded = replace(loaded, tokenizer=thinking(loaded.tokenizer, settings.enable_thinking))
    plan = (answers.plan if isinstance(study, Answers) else _tables_plan)(study, loaded, settings)
    computed, alone = sum(job.size for job in plan.jobs), isinstance(study, PerItem) and study.alone
    with tqdm(total=computed, desc=title, unit=plan.unit, disable=not settings.progress, leave=False) as bar:
        for job, result in pool.results(loaded, plan.jobs, settings, alone):
            plan.add(job.label, result)
            bar.update(job.size)
    results, failed = plan.read()
    line = f"{title}: {plan.total} {plan.unit}s, {computed} computed now, {len(failed)} failed"
    first = f", the first {failed[0]}" if failed else ""
    print(f"{line}, {time.perf_counter() - started:.0f} s{first}")
    for frame in results.values() if isinstance(results, dict) else [results]:
        frame.attrs["failed"] = failed
    if len(failed) > MOST_FAILED * plan.total:
        stopped = Stopped(f"{title}: {len(failed)} of {plan.total} {plan.unit}s failed{first}")
        stopped.results = results
        raise stopped
    return results


def _tables_plan(study: PerItem[Any], loaded: Loaded | None, settings: Settings) -> Plan:
    """The missing items as jobs, one for each."""
    pairs = study.items.items() if isinstance(study.items, Mapping) else [(item.id, item) for item in study.items]
    items: dict[str, Any] = dict(pairs)
    if not items or len(items) < len(study.items):
        raise InputError(f"{len(study.items)} items with {len(items)} names: give at least one, each its own")
    where = loaded and [loaded.hash, loaded.dtype, loaded.device, thinks(loaded.tokenizer)]
    code = store.digest(store.code_of(study.chapter), study.compute, study.parameters, _policies_in(study.parameters))
    folder = settings.folder / study.chapter / study.name
    folders = {name: folder / store.digest(where, code, item) for name, item in items.items()}
    work = partial(_tables, compute=study.compute, parameters=study.parameters)
    missing = [name for name, place in folders.items() if not any(place.glob("*.parquet"))]
    errors: dict[str, str] = {}

    def add(name: str, result: dict[str, pd.DataFrame] | str | RuntimeError) -> None:
        if isinstance(result, dict):
            store.add_tables(folders[name], result)
        else:
            errors[name] = str(result)

    def read() -> tuple[Any, list[str]]:
        parts: dict[str, list[pd.DataFrame]] = {}
        for name, item in items.items():
            columns = {"item": name} | ({"task": item.task} if hasattr(item, "task") else {})
            for table, frame in store.read_tables(folders[name]).items():
                lacking = {column: value for column, value in columns.items() if column not in frame}
                parts.setdefault(table, []).append(frame.assign(**lacking))
        joined = {name: pd.concat(frames, ignore_index=True) for name, frames in parts.items()}
        tables = joined.get(ONE, pd.DataFrame()) if set(joined) <= {ONE} else joined
        return tables, [f"{name}: {error}" for name, error in errors.items()]

    return Plan("item", len(items), [Job(1, partial(work, item=items[name]), name) for name in missing], add, read)


def _tables(loaded: Loaded | None, compute: Any, item: Any, parameters: Mapping[str, Any]) -> Any:
    """An item's tables by name, or the error of its computation as a line."""
    try:
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


def controls(
    chapter: str, items: Sequence[Item], loaded: Loaded, settings: Settings, max_new_tokens: int
) -> pd.DataFrame:
    """Answers that no policy gives, above whose scores others must be: a row for each item and control, with columns
    item, task, control, prediction, answer, and the measures'. Controls: `first_word`, the answer's, which comes from
    the full cache wherever tokens leave after the question; `copy`, that word and the words that follow its first place
    in the prompt; `refusal`; and `no_passage`, the model's answer to the question alone (the study `controls`)."""
    questions = [data.without_passage(item) for item in items]
    rows = run(Answers(chapter, "controls", questions, [Condition()], max_new_tokens), loaded, settings)
    alone, controls = dict(zip(rows["item"], rows.prediction, strict=True)), []
    for item in items:
        texts = {"first_word": " ".join(item.answer.split()[:1]), "copy": copied(item)}
        texts |= {"refusal": world.pretty(world.REFUSAL), "no_passage": alone[item.id]}
        for name, text in texts.items():
            if isinstance(text, str):  # there is none where the generation failed
                row = {"item": item.id, "task": item.task, "control": name, "prediction": text, "answer": item.answer}
                scores = measure.all_measures(text, references(item), item.papers)
                controls.append(row | scores | measure.official(text, references(item), item.meta))
    return pd.DataFrame(controls)


def copied(item: Item) -> str:
    """The answer's first word and those that follow its first place in the messages, as many as the answer has."""
    answer, words = item.answer.split(), " ".join(message["content"] for message in item.messages).split()
    places = [i for i, word in enumerate(words) if answer and word.strip(".,;:?") == answer[0].strip(".,;:?")]
    following = words[places[0] + 1 : places[0] + len(answer)] if places else []
    return " ".join([*answer[:1], *following])
