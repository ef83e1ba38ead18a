"""`Answers`: what a model says to items under conditions, a row for each; which are missing, how they are computed."""

import contextlib
import datetime
import itertools
import json
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import Any

import pandas as pd
import torch
import transformers

from kvrepro.engine import batches, policy
from kvrepro.engine import generate as engine
from kvrepro.engine.backend import obstacle
from kvrepro.engine.condition import Condition, Generation, Prompt
from kvrepro.engine.facts import ModelFacts
from kvrepro.engine.generate import Conditions, let_go
from kvrepro.engine.policy import Rule
from kvrepro.errors import InputError, counted, error_line
from kvrepro.experiment import data, measure, models, pool, store
from kvrepro.experiment.jsonl import answers_of
from kvrepro.experiment.models import Loaded
from kvrepro.experiment.pool import Job
from kvrepro.experiment.settings import Settings
from kvrepro.item import Item, answer_of, thinks
from kvrepro.paths import ROOT

Pair = tuple[int, int]  # item, condition
Outcomes = dict[Pair, Generation | Exception]
REPEAT = "Repeat the previous context: "  # KVzip's request
BATCHES, GPU_BATCHES = 16, 4  # per job: the engine batches rows of like shape only, and half-empty batches cost as much
FEW = 8  # jobs on a CPU with up to so many cores, the same for all; fewer, down to two, so that each has half a batch


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
    together: int = 1  # neighbouring items that share a prefix


# ---- what can be run


def prompt_limit(loaded: Loaded, max_new_tokens: int, limit: int | None = None) -> int:
    """Most tokens of a prompt: `limit`, or what the model's context leaves beside the answer. Raises InputError."""
    if type(max_new_tokens) is not int or max_new_tokens < 1:
        raise InputError(f"max_new_tokens is {max_new_tokens!r}: ask for a whole number, at least 1")
    room = loaded.context - max_new_tokens
    if room < 1 or (limit is not None and limit > room):
        wanted = f"limit {limit} + {max_new_tokens}" if limit is not None else f"{max_new_tokens}"
        raise InputError(f"{wanted} new tokens > context {loaded.context} of {loaded.name}: lower them")
    return room if limit is None else limit


def unmet(loaded: Loaded, prompt: Prompt, conditions: Sequence[Condition]) -> dict[Condition, InputError]:
    """Why a prompt cannot meet conditions, for those that it cannot. Raises InputError for an invalid one."""
    return _unmet(ModelFacts.of(loaded.model), prompt, {condition: Rule.of(condition) for condition in conditions})


def _unmet(facts: ModelFacts, prompt: Prompt, rules: Mapping[Condition, Rule | None]) -> dict[Condition, InputError]:
    errors = {}
    for condition, rule in rules.items():
        try:
            engine.check_met(facts, prompt, condition, rule)
        except InputError as error:
            errors[condition] = error
    return errors


def prepared(study: Answers, loaded: Loaded) -> list[tuple[Prompt, int, dict[Condition, InputError]]]:
    """Of each item its prompt, the most tokens of that, and why it cannot meet conditions. Raises InputError where
    nothing can be run, for an item without an answer or with a prompt that is too long, and for a condition that this
    model cannot run. Computes nothing."""
    items, by_item = study.items, engine.conditions_by_prompt(study.conditions, len(study.items))
    if not items or not all(by_item):
        raise InputError(f"{len(items)} items x {len(study.conditions)} conditions: give at least one of each")
    if (ids := len({item.id for item in items})) < len(items):
        raise InputError(f"{len(items)} items share {ids} ids: give every item its own")
    facts, found, met = ModelFacts.of(loaded.model), [], []
    rules = {condition: Rule.of(condition) for condition in dict.fromkeys(itertools.chain.from_iterable(by_item))}
    for item, conditions in zip(items, by_item, strict=True):
        limit = prompt_limit(loaded, study.max_new_tokens, study.limit)
        limit = min(limit, prompt_limit(loaded, item.new_tokens(study.max_new_tokens)))  # room for its own answer
        if study.prompt is None and not item.papers:
            with data.named(item):
                answers_of({"answers": item.meta.get("answers", item.answer)})
        prompt = study.prompt(loaded, item) if study.prompt else data.build_prompt(item, loaded.tokenizer, limit)
        errors = _unmet(facts, prompt, {condition: rules[condition] for condition in conditions})
        found.append((prompt, limit, errors))
        met.append([condition for condition in conditions if condition not in errors])
    if not any(met):
        raise InputError(f"item {items[0].id}: {next(iter(found[0][-1].values()))}")
    new = [item.new_tokens(study.max_new_tokens) for item in items]
    engine.check_conditions(loaded.model, [prompt for prompt, *_ in found], met, new)
    return found


# ---- what decides a row


def code_of(chapter: str, condition: Condition) -> str:
    """Hash of the code that decides the condition's rows. A policy's files, which its parameters name, count by their
    content, and so does the file that a reader's own policy comes from."""
    if condition.policy == "full":
        return store.digest(store.code_of(chapter))
    found = policy.find(condition.policy)
    files: list[Path] = []
    for name in found.reading(condition.reading, condition.switches).values():
        if isinstance(name, str):
            files += sorted(ROOT.glob(name)) if "*" in name else filter(None, [data.find_file(name)])
    own = found if policy.is_own(condition.policy) else None
    return store.digest(store.code_of(chapter), own, [file.read_bytes() for file in files])


def references(item: Item) -> list[str]:
    """All answers that count as right."""
    answers = item.meta.get("answers", item.answer)
    return [answers] if isinstance(answers, str) else list(answers)


class Plan:
    """The rows of `Answers` with one model: which are missing, the jobs that compute them, and where they go."""

    unit, alone = "row", False

    def __init__(self, study: Answers, loaded: Loaded, settings: Settings):
        self.study, self.loaded, self.settings = study, loaded, settings
        self.prompts, self.limits, errors = zip(*prepared(study, loaded), strict=True)
        by_item = engine.conditions_by_prompt(study.conditions, len(self.prompts))
        self.conditions = list(dict.fromkeys(itertools.chain.from_iterable(by_item)))
        number = {condition: j for j, condition in enumerate(self.conditions)}
        self.columns = [[number[condition] for condition in dict.fromkeys(conditions)] for conditions in by_item]
        if settings.backend == "triton" and (why := obstacle(loaded.model, Condition())):
            raise InputError(f"backend 'triton': {why}; take auto or torch")
        self.heads = self._heads()
        self.total = len(self.heads)
        self.folder = settings.folder / study.chapter / study.name / store.folder_name(loaded.name)
        stored = store.latest(self.folder, columns=["key", "error"])
        done = set(stored.key[stored.error.isna()])
        self.missing = {pair for pair, head in self.heads.items() if head["key"] not in done}
        self.gaps = {(i, number[c]): error for i, of_item in enumerate(errors) for c, error in of_item.items()}
        gaps = [self._failed(pair, error) for pair, error in self.gaps.items() if pair in self.missing]
        store.add(self.folder, gaps)
        self.missing -= self.gaps.keys()

    def _heads(self) -> dict[Pair, dict[str, Any]]:
        """The columns of each row that are known before it is computed; `key` hashes all that decides the others."""
        study, loaded, settings = self.study, self.loaded, self.settings
        decisive: dict[str, Any] = {"model": loaded.name, "model_hash": loaded.hash}
        decisive |= {"dtype": loaded.dtype, "device": loaded.device}
        if (enabled := thinks(loaded.tokenizer)) is not None:
            decisive["enable_thinking"] = enabled
        noted = {"chapter": study.chapter, "name": study.name, "profile": settings.profile, "seed": settings.seed}
        note = store.digest(study.note)
        by_condition = [c.columns() | {"engine_hash": code_of(study.chapter, c)} for c in self.conditions]
        heads: dict[Pair, dict[str, Any]] = {}
        for i, (item, prompt, limit) in enumerate(zip(study.items, self.prompts, self.limits, strict=True)):
            of_item = decisive | {"item": item.id, "limit": limit}
            of_item["max_new_tokens"] = item.new_tokens(study.max_new_tokens)
            any_script = {} if item.papers else {"any_script": True}
            scored = [item.meta[name] for name in ("metric", "classes", "first_line") if name in item.meta]
            scored += [*any_script]
            of_item["data_hash"] = store.digest(prompt.ids, prompt.spans, prompt.turns, references(item), *scored)
            notes = noted | any_script | {"task": item.task, "answer": item.answer, "prompt_tokens": len(prompt.ids)}
            notes["cut"] = data.tokens_cut(item, loaded.tokenizer, limit)
            notes["evidence_at"] = measure.evidence_at(prompt.spans.get("evidence", ()), len(prompt.ids))
            for j in self.columns[i]:
                key = store.digest(by_condition[j], of_item, note, settings.backend)
                heads[i, j] = by_condition[j] | of_item | notes | {"key": key}
        return heads

    def jobs(self) -> list[Job]:
        """Jobs of about equal work. Items are dealt out in turn, the longest first, so that each job has items of every
        length and task. The blocks of items are the same whatever is missing."""
        on_cpu = self.loaded.device == "cpu"
        together = self.settings.batch_rows or (batches.USUAL_ROWS if on_cpu else batches.MOST_ROWS)
        if on_cpu:  # the cores of this machine, also where a cluster's nodes compute
            cores, most = pool.usual_workers(self.loaded), BATCHES
            parts = cores if cores > FEW else min(FEW, max(2, 2 * self.total // together))
        else:  # every job takes batches of its own, which cost almost the same however many rows they have
            parts, most = pool.usual_workers(self.loaded, self.settings.engine, self.settings.address), GPU_BATCHES
        parts = max(parts, -(-self.total // (most * together)))
        count, size = len(self.prompts), self.study.together
        groups = [range(first, min(first + size, count)) for first in range(0, count, size)]
        groups.sort(key=lambda group: -sum(len(self.columns[i]) * len(self.prompts[i].ids) for i in group))
        blocks = sorted(sorted(itertools.chain(*groups[part::parts])) for part in range(parts))
        return [self._job(block) for block in blocks if any(i in block for i, _ in self.missing)]

    def first(self) -> Job:
        """A job of the first missing item, from whose time that of all others is judged."""
        return self._job([min(self.missing)[0]])

    @cached_property
    def _given(self) -> dict[str, Any]:
        """What every job gives the engine; computed once, because listing a vocabulary takes time."""
        return {
            "stop_ids": models.stop_ids(self.loaded),
            "batch_rows": self.settings.batch_rows,
            "backend": self.settings.backend,
            "repeat": self.loaded.tokenizer.encode(REPEAT, add_special_tokens=False),
            "kept_sets": self.study.note is not None,
        }

    def _job(self, block: Sequence[int]) -> Job:
        """A job of these items' missing rows."""
        pairs = [(i, j) for i in block for j in self.columns[i] if (i, j) in self.missing]
        group = Group(
            {pair: self.heads[pair] for pair in pairs},
            {i: (self.study.items[i], self.prompts[i]) for i, _ in pairs},
            {j: self.conditions[j] for _, j in pairs},
            self._given,
            self.study.note,
            self.settings.time_limit,
        )
        return Job(len(pairs), group.rows, pairs)

    def add(self, job: Job, result: list[dict[str, Any]] | pool.Died) -> None:
        """Store a job's rows, or why there are none."""
        if isinstance(result, pool.Died):
            result = [self._failed(pair, RuntimeError(str(result))) for pair in job.label]
        store.add(self.folder, result)
        self.missing -= set(job.label)

    def _failed(self, pair: Pair, error: Exception) -> dict[str, Any]:
        i, _ = pair
        return answer_row(self.loaded, self.study.items[i], self.prompts[i], self.heads[pair], error)

    def results(self) -> tuple[pd.DataFrame, list[str]]:
        """Rows by item, then condition; and a text for each that failed, other than for what an item cannot meet, of
        which a line is printed."""
        stored = store.latest(self.folder).set_index("key", drop=False)
        rows = stored.loc[[head["key"] for head in self.heads.values()]].reset_index(drop=True)
        texts = {
            (i, j): f"{self.conditions[j].label} on {self.study.items[i].id}: {error}"
            for (i, j), error in zip(self.heads, rows.error, strict=True)
            if isinstance(error, str)
        }
        if gaps := [texts[pair] for pair in self.gaps if pair in texts]:
            print(f"{self.study.chapter}/{self.study.name}: {len(gaps)} of {self.total} rows cannot be: {gaps[0]}")
        failed = [text for pair, text in texts.items() if pair not in self.gaps]
        return rows.assign(profile=self.settings.profile, seed=self.settings.seed), failed


# ---- a group of rows, in whichever process


@dataclass(frozen=True)
class Group:
    """Rows that are computed by one call of the engine, or by several where that one fails."""

    heads: dict[Pair, dict[str, Any]]
    items: dict[int, tuple[Item, Prompt]]
    conditions: dict[int, Condition]
    given: dict[str, Any]  # to the engine
    note: Any = None
    limit: float | None = None  # seconds

    def rows(self, loaded: Loaded) -> list[dict[str, Any]]:
        """All rows; a pair that fails becomes a row with its error."""
        on_gpu = torch.device(loaded.device).type == "cuda"
        if on_gpu:
            torch.cuda.empty_cache()  # the job before left its memory in pieces, which may be too small for this one
        # Whose rounding a row has: the GPU's name, or the CPU instructions that PyTorch uses, AVX512 for instance.
        processor = torch.cuda.get_device_name(loaded.device) if on_gpu else torch.backends.cpu.get_cpu_capability()
        outcomes = self.attempt(loaded, list(self.heads))
        return [
            answer_row(loaded, *self.items[i], head, outcomes[i, j], self.note) | {"processor": str(processor)}
            for (i, j), head in self.heads.items()
        ]

    def attempt(self, loaded: Loaded, pairs: Sequence[Pair], quiet: bool = False) -> Outcomes:
        """Each pair's generation, or its exception.

        Where all pairs fail together or take more than `limit` seconds, or some run out of memory, those are tried
        again, half of them at a time: first fewer conditions, then fewer items; out of memory, a quarter of the prompts
        also pass through the model together. quiet: print nothing of that.
        """
        outcomes, smaller = self._tried(loaded, pairs), self
        one = outcomes[pairs[0]]
        together = isinstance(one, Exception) and all(outcome is one for outcome in outcomes.values())
        failed = [pair for pair in pairs if together or isinstance(outcomes[pair], torch.OutOfMemoryError)]
        if not failed or len(pairs) == 1:
            return outcomes
        first = outcomes[failed[0]]
        if isinstance(first, torch.OutOfMemoryError):
            prompt_rows = max(1, self.given.get("prompt_rows", batches.MOST_PROMPTS) // 4)
            smaller = replace(self, given=self.given | {"prompt_rows": prompt_rows})
        if isinstance(first, torch.OutOfMemoryError | TimeLimit) and not quiet:
            what = "out of memory" if isinstance(first, torch.OutOfMemoryError) else str(first)
            rows, items = counted(len(failed), "row"), counted(len({i for i, _ in failed}), "item")
            print(f"{what} with {rows} of {items}: {'half of them at a time' if len(failed) > 1 else 'alone'}")
        ordered, middle = sorted(failed, key=lambda pair: pair[::-1]), len(failed) // 2
        for half in filter(None, (ordered[:middle], ordered[middle:])):
            outcomes |= smaller.attempt(loaded, sorted(half), quiet=True)
        return outcomes

    def _tried(self, loaded: Loaded, pairs: Sequence[Pair]) -> Outcomes:
        """One call of the engine. Where it raises, all pairs have the same exception."""
        columns: dict[int, list[int]] = {}
        for i, j in pairs:
            columns.setdefault(i, []).append(j)
        try:
            with time_limit(self.limit):
                answers = engine.generate(
                    loaded.model,
                    [self.items[i][1] for i in columns],
                    [[self.conditions[j] for j in of_item] for of_item in columns.values()],
                    max_new_tokens=[self.heads[i, of_item[0]]["max_new_tokens"] for i, of_item in columns.items()],
                    errors="return",
                    **self.given,
                )
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:  # whatever a condition raises becomes its row's error
            failure = error if isinstance(error, Exception) else RuntimeError(f"a policy raised {error_line(error)}")
            let_go(error)  # frees the caches of this attempt, so that the next one has their room
            return dict.fromkeys(pairs, failure)
        numbers = [(i, j) for i, of_item in columns.items() for j in of_item]
        return dict(zip(numbers, itertools.chain.from_iterable(answers), strict=True))


def answer_row(
    loaded: Loaded, item: Item, prompt: Prompt, head: dict[str, Any], answer: Generation | Exception, note: Any = None
) -> dict[str, Any]:
    """The row of one generation, or of its error."""
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
    same = """evicted policy_calls pages bytes_held bytes_state bytes_full prefill_seconds decode_seconds backend"""
    return row | {name: getattr(answer, name) for name in same.split()}


# ---- a time limit, for code in a process's main thread, such as a policy that never returns


class TimeLimit(Exception):
    """Something took longer than it may."""


class _Alarm(BaseException):
    """Raised wherever the code is. It is no Exception, which a policy or the engine may catch."""


@contextlib.contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """A context that raises TimeLimit after so many seconds, as soon as Python runs again: within a second in pure
    Python (two where the clock rings as the context begins), after the current operation of PyTorch, and never in a C
    function that does not end. None: no limit.

    Raises InputError outside the main thread, which alone gets the system's signals.
    """
    if seconds is None:
        yield
        return
    if threading.current_thread() is not threading.main_thread():
        raise InputError(f"time_limit {seconds:g}: only a process's main thread can be stopped; leave it out here")

    over = False

    def ring(number: int, frame: FrameType | None) -> None:
        # An alarm as this context begins or ends would leave its clock running. While it begins, the next one counts.
        if not over and not (frame is not None and frame.f_code.co_filename in (contextlib.__file__, __file__)):
            raise _Alarm

    before = signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds, max(1.0, seconds))  # repeated, in case `except:` swallows it
        yield
    except _Alarm:
        over = True
        raise TimeLimit(f"more than {seconds:g} s") from None
    finally:
        over = True
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
