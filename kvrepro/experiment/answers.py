"""`Answers`: what a model says to items under conditions, a row for each; which are missing, how they are computed."""

import datetime
import itertools
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch
import transformers

from kvrepro.engine import batches
from kvrepro.engine import generate as engine
from kvrepro.engine.condition import Condition, Generation, Prompt, Size, ensure
from kvrepro.engine.generate import Conditions, let_go
from kvrepro.engine.policy import find
from kvrepro.errors import InputError, counted, error_line
from kvrepro.experiment import data, measure, models, pool, store
from kvrepro.experiment.jsonl import Turn, answers_of
from kvrepro.experiment.models import Loaded
from kvrepro.experiment.pool import Job, Plan
from kvrepro.experiment.settings import Settings
from kvrepro.item import Item, answer_of, thinks
from kvrepro.paths import ROOT

REPEAT = "Repeat the previous context: "  # KVzip's request
BATCHES = 16  # of a job, at most: the engine batches rows of like shape only, and half-empty batches cost as much
FEW = 8  # jobs on a CPU with up to so many cores, the same for all; fewer where each would have less than half a batch
CANNOT_BE = InputError.__name__  # an error that begins so is no failure: the item cannot meet its condition


@dataclass(frozen=True)
class Answers:
    """A study of what the model answers: one row for each item and condition, with the columns of
    `kvrepro.experiment.store.SCHEMA`. The conditions are one list for all items, or a list for each item. Where an item
    cannot meet a condition, such as a budget above its length, the row has an error."""

    chapter: str
    name: str
    items: Sequence[Item]
    conditions: Conditions
    max_new_tokens: int = 128
    limit: int | None = None  # tokens of a prompt; longer passages are cut; None: what the model's context leaves
    prompt: Callable[[Loaded, Item], Prompt] | None = None  # instead of the item's messages as they are
    note: Callable[[Item, Prompt, Generation], dict[str, Any]] | None = None  # for the column `note`; sees kept sets


class Asked(NamedTuple):
    """A row that is asked for."""

    place: tuple[int, int]  # the numbers of its item and its condition
    item: Item
    prompt: Prompt
    condition: Condition
    head: dict[str, Any]  # the columns that are known before; `key` hashes all that decides the others


# ---- what is asked


def prompt_limit(loaded: Loaded, max_new_tokens: int, limit: int | None = None) -> int:
    """Most tokens of a prompt: `limit`, or what the model's context leaves beside the answer. Raises InputError."""
    ensure(Size, max_new_tokens=max_new_tokens)
    room = loaded.context - max_new_tokens
    if room < (limit or 1):
        wanted = f"{limit or 1} prompt + {max_new_tokens} new tokens"
        raise InputError(f"{wanted} > context {loaded.context} of {loaded.name}: lower them")
    return room if limit is None else limit


def prompt_of(study: Answers, loaded: Loaded, item: Item) -> tuple[Prompt, int]:
    """An item's prompt, and the most tokens that it may have. Raises InputError without an answer or room for it."""
    limit = prompt_limit(loaded, study.max_new_tokens, study.limit)
    limit = min(limit, prompt_limit(loaded, item.new_tokens(study.max_new_tokens)))  # room for its own answer
    if study.prompt is not None:
        return study.prompt(loaded, item), limit
    if not item.papers:
        with data.named(item):
            ensure(tuple[Turn, ...], messages=tuple(item.messages))
            answers_of(item.meta.get("answers", item.answer))
    return data.build_prompt(item, loaded.tokenizer, limit), limit


def references(item: Item) -> list[str]:
    """All answers that count as right."""
    answers = item.meta.get("answers", item.answer)
    return [answers] if isinstance(answers, str) else list(answers)


def code_of(chapter: str, condition: Condition) -> str:
    """Hash of the code that decides the condition's rows, with the files that its policy reads or comes from."""
    if condition.policy == "full":
        return store.digest(store.code_of(chapter))
    found, files = find(condition.policy), list[Path]()
    parameters = found.reading(condition.reading, condition.switches)
    for name in (value for value in parameters.values() if isinstance(value, str)):
        files += sorted(ROOT.glob(name)) if "*" in name else filter(None, [data.find_file(name)])
    return store.digest(store.code_of(chapter), found, [file.read_bytes() for file in files])


def _asked(study: Answers, loaded: Loaded, settings: Settings) -> list[Asked]:
    """All rows by item, then condition. Raises InputError where nothing, or not on this model, can be run."""
    items, by_item = study.items, engine.conditions_by_prompt(study.conditions, len(study.items))
    if not items or not all(by_item):
        raise InputError(f"{len(items)} items x {len(study.conditions)} conditions: give at least one of each")
    if (ids := len({item.id for item in items})) < len(items):
        raise InputError(f"{len(items)} items share {ids} ids: give every item its own")
    prompts = [prompt_of(study, loaded, item) for item in items]
    new = [item.new_tokens(study.max_new_tokens) for item in items]
    gaps = engine.unmet(loaded.model, [prompt for prompt, _ in prompts], by_item, new)
    if len(gaps) == sum(len(set(of_item)) for of_item in by_item):
        raise InputError(f"item {items[0].id}: {next(iter(gaps.values()))}")
    of_study = {"chapter": study.chapter, "name": study.name, "profile": settings.profile, "seed": settings.seed}
    of_model: dict[str, Any] = {"model": loaded.name, "model_hash": loaded.hash, "dtype": loaded.dtype}
    of_model |= {"device": loaded.device, "enable_thinking": thinks(loaded.tokenizer)}
    numbers = {c: j for j, c in enumerate(dict.fromkeys(itertools.chain.from_iterable(by_item)))}
    columns = {c: c.columns() | {"engine_hash": code_of(study.chapter, c)} for c in numbers}
    how, rows = store.digest(study.note, settings.backend), []
    for i, (item, (prompt, limit), of_item) in enumerate(zip(items, prompts, by_item, strict=True)):
        read = prompt.ids, prompt.spans, prompt.turns, references(item), item.papers
        scored = [item.meta.get(name) for name in ("metric", "classes", "first_line")]
        facts = of_model | {"item": item.id, "task": item.task, "answer": item.answer, "limit": limit}
        facts |= {"max_new_tokens": new[i], "prompt_tokens": len(prompt.ids), "any_script": not item.papers or None}
        facts |= {"data_hash": store.digest(read, scored), "cut": data.tokens_cut(item, loaded.tokenizer, limit)}
        facts["evidence_at"] = measure.evidence_at(prompt.spans.get("evidence", ()), len(prompt.ids))
        for c in dict.fromkeys(of_item):
            head = facts | columns[c]
            head |= of_study | {"key": store.digest(head, how)}
            rows.append(Asked((i, numbers[c]), item, prompt, c, head))
    return rows


def plan(study: Answers, loaded: Loaded, settings: Settings) -> Plan:
    """The study's missing rows as jobs. Raises InputError as `_asked` does."""
    rows = _asked(study, loaded, settings)
    folder = settings.folder / study.chapter / study.name / loaded.name.replace("/", "-")
    stored = store.read(folder, ["key"])
    done = set(stored.key[stored.error.isna() | stored.error.str.startswith(CANNOT_BE, na=False)])
    missing = [asked for asked in rows if asked.head["key"] not in done]
    given = {"stop_ids": models.stop_ids(loaded), "batch_rows": settings.batch_rows, "backend": settings.backend}
    given |= {"repeat": loaded.tokenizer.encode(REPEAT, add_special_tokens=False), "kept_sets": study.note is not None}
    jobs = []
    for block in _blocks(len(study.items), len(rows), loaded, settings):
        if part := [asked for asked in missing if asked.place[0] in block]:
            jobs.append(Job(len(part), partial(rows_of, asked=part, given=given, note=study.note), part))

    def add(part: list[Asked], result: list[dict[str, Any]] | RuntimeError) -> None:
        if isinstance(result, RuntimeError):
            result = [answer_row(loaded, asked, result) for asked in part]
        store.add(folder, result)

    def read() -> tuple[pd.DataFrame, list[str]]:
        frame = store.read(folder, ["key"]).set_index("key", drop=False).loc[[asked.head["key"] for asked in rows]]
        frame = frame.reset_index(drop=True).assign(profile=settings.profile, seed=settings.seed)
        errors = frame.error.dropna()
        texts = [f"{rows[i].condition.label} on {rows[i].item.id}: {error}" for i, error in errors.items()]
        cannot = [text for text in texts if f": {CANNOT_BE}: " in text]
        failed = [text for text in texts if f": {CANNOT_BE}: " not in text]
        if len(texts) == len(rows):  # no answer at all: these conditions suit no item, or not this machine
            failed = texts
        elif cannot:
            print(f"{study.chapter}/{study.name}: {len(cannot)} of {len(rows)} rows cannot be: {cannot[0]}")
        return frame, failed

    return Plan("row", len(rows), jobs, add, read)


def _blocks(count: int, total: int, loaded: Loaded, settings: Settings) -> list[range]:
    """The items of each job, which are neighbours, whatever is missing. count: of items; total: of rows."""
    on_cpu = loaded.device == "cpu"
    together = settings.batch_rows or (batches.USUAL_ROWS if on_cpu else batches.MOST_ROWS)
    if on_cpu:  # the cores of this machine, also where a cluster's nodes compute
        parts = min(max(FEW, os.cpu_count() or 1), -(-2 * total // together))
    else:  # every job takes batches of its own, which cost almost the same however many rows they have
        parts = pool.usual_workers(loaded, settings)
    size = -(-count // max(parts, -(-total // (BATCHES * together))))
    return [range(first, first + size) for first in range(0, count, size)]


# ---- rows, in whichever process


def rows_of(loaded: Loaded, asked: Sequence[Asked], given: dict[str, Any], note: Any = None) -> list[dict[str, Any]]:
    """The rows that are asked for; one that fails has its error. Where the engine raises, or some rows run out of
    memory, those are tried again, half of them at a time: first fewer conditions, then fewer items; out of memory, a
    quarter of the prompts also pass through the model together. given: to the engine."""
    by_item = [list(of_item) for _, of_item in itertools.groupby(asked, lambda a: a.place[0])]
    raised, outcomes = None, list[Generation | Exception]()
    try:
        answers = engine.generate(
            loaded.model,
            [of_item[0].prompt for of_item in by_item],
            [[a.condition for a in of_item] for of_item in by_item],
            max_new_tokens=[of_item[0].head["max_new_tokens"] for of_item in by_item],
            errors="return",
            **given,
        )
        outcomes += itertools.chain.from_iterable(answers)
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # whatever a condition raises becomes its row's error
        raised = error if isinstance(error, Exception) else RuntimeError(f"a policy raised {error_line(error)}")
        let_go(error)  # frees the caches of this attempt, so that the next one has their room
        outcomes += [raised] * len(asked)
    short = [isinstance(outcome, torch.OutOfMemoryError) for outcome in outcomes]
    again = [len(asked) > 1 and (raised is not None or lacks) for lacks in short]
    rows = [answer_row(loaded, a, o, note) for a, o, lost in zip(asked, outcomes, again, strict=True) if not lost]
    failed = sorted(itertools.compress(asked, again), key=lambda a: a.place[::-1])
    if failed and any(short):
        print(f"out of memory with {counted(len(failed), 'row')}: half of them at a time")
        given = given | {"prompt_rows": max(1, given.get("prompt_rows", batches.MOST_PROMPTS) // 4)}
    middle = len(failed) // 2
    for half in filter(None, (failed[:middle], failed[middle:])):
        rows += rows_of(loaded, sorted(half, key=lambda a: a.place), given, note)
    return rows


def answer_row(loaded: Loaded, asked: Asked, answer: Generation | Exception, note: Any = None) -> dict[str, Any]:
    """The row of one generation, or of its error."""
    item, prompt, head = asked.item, asked.prompt, asked.head
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    row = head | {"torch": torch.__version__, "transformers": transformers.__version__, "date": date}
    if isinstance(answer, Exception):
        return row | {"error": error_line(answer)}
    text, row["thought"] = answer_of(loaded.tokenizer, answer.tokens, prompt.ids)
    row["prediction"] = text.strip()
    if note is not None and (more := note(item, prompt, answer)):
        row["note"] = json.dumps(more)
    evidence, until = prompt.spans.get("evidence", ()), head["until"]
    end = prompt.turns[until] if until in prompt.turns else min(prompt.spans.get(until, [len(prompt.ids)]))
    row["evidence_coverage"] = measure.evidence_coverage(evidence, answer.kept_positions, end)
    row |= {"n_generated": len(answer.tokens), "kept_hash": answer.kept_positions_hash}
    row |= {"kept": [round(count) for count in answer.kept], "kept_mean": sum(answer.kept) / len(answer.kept)}
    row |= measure.all_measures(row["prediction"], references(item), item.papers)
    row |= measure.official(text, references(item), item.meta)
    return {name: value for name, value in vars(answer).items() if name in store.COLUMNS} | row
