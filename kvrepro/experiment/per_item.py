"""How `PerItem` is run: which items are missing, how the tables of one are computed, how all of them are joined."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

import pandas as pd

from kvrepro.chat import thinks
from kvrepro.engine.condition import Condition
from kvrepro.engine.policy import find, is_own
from kvrepro.errors import InputError, error_line
from kvrepro.experiment import store
from kvrepro.experiment.limit import time_limit
from kvrepro.experiment.models import Loaded
from kvrepro.experiment.plan import Forecast, Job, Plan
from kvrepro.experiment.settings import Settings
from kvrepro.item import Item

Result = TypeVar("Result", pd.DataFrame, dict[str, pd.DataFrame])
ONE = "table"  # the name of the table where a computation gives only one


def item_tables(
    loaded: Loaded | None, compute: Any, item: Any, parameters: Mapping[str, Any], limit: float | None = None
) -> Any:
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


def policies_in(parameters: Any) -> list[Any]:
    """A reader's own policies among parameters, which stand there as conditions or by name."""
    if isinstance(parameters, Condition):
        return policies_in(parameters.policy)
    if isinstance(parameters, str):
        return [find(parameters)] if is_own(parameters) else []
    parts = parameters.values() if isinstance(parameters, Mapping) else parameters
    return [policy for part in parts for policy in policies_in(part)] if isinstance(parts, Iterable) else []


class PerItemPlan(Plan):
    """`PerItem` with one model, or without."""

    unit = "item"

    def __init__(self, study: "PerItem[Any]", loaded: Loaded | None, settings: Settings):
        self.study, self.loaded, self.settings = study, loaded, settings
        self.title = f"{study.chapter}/{study.name}"
        self.alone = study.alone
        pairs = study.items.items() if isinstance(study.items, Mapping) else [(item.id, item) for item in study.items]
        self.items: dict[str, Any] = dict(pairs)
        if not self.items or len(self.items) < len(study.items):
            raise InputError(f"{len(study.items)} items with {len(self.items)} names: give at least one, each its own")
        self.total = len(self.items)
        where: list[Any] = [loaded.hash, loaded.dtype, loaded.device] if loaded is not None else []
        if loaded is not None and (enabled := thinks(loaded.tokenizer)) is not None:
            where.append({"enable_thinking": enabled})
        code = store.digest(
            store.code_of(study.chapter), study.compute, study.parameters, policies_in(study.parameters)
        )
        self.keys = {name: store.digest(where, code, item) for name, item in self.items.items()}
        self.table = store.Tables(settings.folder, study.chapter, study.name)
        self.errors: dict[str, str] = {}
        self.trial: dict[str, Any] = {}  # of the first missing item, once the estimate has computed it

    @property
    def missing(self) -> list[str]:
        """Names of the items that are not stored."""
        return [name for name, key in self.keys.items() if key not in self.table]

    def jobs(self) -> list[Job]:
        """One for each missing item."""
        return [Job(1, self._work(name), name) for name in self.missing]

    def _work(self, name: str) -> Any:
        if name in self.trial:
            return partial(lambda tables, loaded: tables, self.trial[name])
        item, study = self.items[name], self.study
        limit = self.settings.time_limit
        return partial(item_tables, compute=study.compute, item=item, parameters=study.parameters, limit=limit)

    def forecast(self) -> Forecast:
        """An estimate from the first missing item."""
        missing = self.missing
        work = f"{len(missing)} of {self.total} items"
        if not missing:
            return Forecast(self.title, work, 0, 0.0, 0.0)
        began = time.perf_counter()
        tables = self.trial[missing[0]] = self._work(missing[0])(self.loaded)
        seconds = (time.perf_counter() - began) * len(missing)
        stored = 0 if isinstance(tables, str) else sum(int(t.memory_usage().sum()) for t in tables.values())
        return Forecast(self.title, work, len(missing), seconds, stored * len(missing) / 2)

    def add(self, job: Job, result: Any) -> None:
        """Store an item's tables, or remember why there are none."""
        if isinstance(result, str):
            self.errors[job.label] = result
        else:
            self.table.add(self.keys[job.label], result)

    def lost(self, job: Job, why: str) -> None:
        """Remember why there are none."""
        self.errors[job.label] = why

    def results(self) -> Any:
        """The items' tables joined, in the order of the items."""
        stored = [(name, key) for name, key in self.keys.items() if key in self.table]
        return self._joined([(name, self.table.read(key)) for name, key in stored])

    def rehearsal(self) -> Any:
        """The stored results, or, where nothing is stored, those that the forecast computed."""
        whole = {name: tables for name, tables in self.trial.items() if not isinstance(tables, str)}
        return self._joined(whole.items()) if whole and len(self.missing) == self.total else self.results()

    def _joined(self, tables_of_items: Iterable[tuple[str, Mapping[str, pd.DataFrame]]]) -> Any:
        """The items' tables of the same name below each other, with columns `item` and `task` where they lack them."""
        parts: dict[str, list[pd.DataFrame]] = {}
        for name, tables in tables_of_items:
            item = self.items[name]
            columns = {"item": name} | ({"task": item.task} if hasattr(item, "task") else {})
            for table, frame in tables.items():
                missing = {column: value for column, value in columns.items() if column not in frame}
                parts.setdefault(table, []).append(frame.assign(**missing))
        joined = {name: pd.concat(frames, ignore_index=True) for name, frames in parts.items()}
        return joined.get(ONE, pd.DataFrame()) if set(joined) <= {ONE} else joined

    def failures(self) -> list[str]:
        """Items whose computation failed."""
        return [f"{name}: {error}" for name, error in self.errors.items()]


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

    plan = PerItemPlan
