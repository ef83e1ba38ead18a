"""How `Answers` are run: which rows a study wants, which of them are missing, and how a group of them is computed."""

import contextlib
import datetime
import itertools
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from kvrepro.chat import answer_of, thinks
from kvrepro.engine import batches, policy
from kvrepro.engine import generate as engine
from kvrepro.engine.backend import obstacle, obstacles
from kvrepro.engine.condition import Condition, Generation, Prompt
from kvrepro.engine.facts import ModelFacts
from kvrepro.engine.generate import Conditions, let_go
from kvrepro.engine.policy import Rule
from kvrepro.errors import InputError, counted, error_line, first_line
from kvrepro.experiment import data, measure, models, pool, store
from kvrepro.experiment.jsonl import ensure_possible
from kvrepro.experiment.limit import TimeLimit, time_limit
from kvrepro.experiment.models import Loaded
from kvrepro.experiment.plan import Forecast, Job, Plan
from kvrepro.experiment.settings import Settings
from kvrepro.item import Item
from kvrepro.paths import ROOT

Pair = tuple[int, int]  # item, condition
Columns = Sequence[Sequence[int]]  # of each item its conditions
Outcomes = dict[Pair, Generation | Exception]
REPEAT = "Repeat the previous context: "  # KVzip's request
BATCHES, GPU_BATCHES = 16, 4  # per job: the engine batches rows of like shape only, and half-empty batches cost as much
FEW = 8  # jobs on a CPU with up to so many cores, the same for all; fewer, down to two, so that each has half a batch
TRIAL, SHORT = 8, 32  # tokens generated to estimate the rest; tokens up to which an answer is generated as a whole


# ---- what a study wants


def prompt_limit(loaded: Loaded, max_new_tokens: int, limit: int | None = None) -> int:
    """Most tokens of a prompt: `limit`, or what the model's context leaves beside the answer. Raises InputError."""
    if type(max_new_tokens) is not int or max_new_tokens < 1:
        raise InputError(f"max_new_tokens is {max_new_tokens!r}: ask for a whole number, at least 1")
    room = loaded.context - max_new_tokens
    if room < 1 or (limit is not None and limit > room):
        wanted = f"limit {limit} + {max_new_tokens}" if limit is not None else f"{max_new_tokens}"
        raise InputError(f"{wanted} new tokens > context {loaded.context} of {loaded.name}: lower them")
    return room if limit is None else limit


def limit_of(study: "Answers", loaded: Loaded, item: Item) -> int:
    """Most tokens of an item's prompt: the study's, or fewer where the item's own answer needs the room."""
    limit = prompt_limit(loaded, study.max_new_tokens, study.limit)
    return min(limit, prompt_limit(loaded, item.new_tokens(study.max_new_tokens)))


def check(study: "Answers", loaded: Loaded) -> list[Prompt]:
    """The items' prompts. Raises InputError where an item cannot meet a condition (with `gaps`: where a condition is
    not valid in itself). Computes nothing."""
    items, conditions = study.items, study.conditions
    if not items or not conditions:
        raise InputError(f"{len(items)} items x {len(conditions)} conditions: give at least one of each")
    conditions_by_item = engine.conditions_by_prompt(conditions, len(items))
    limits = {item.id: limit_of(study, loaded, item) for item in items}
    if (ids := len({item.id for item in items})) < len(items):
        raise InputError(f"{len(items)} items share {ids} ids: give every item its own")
    for item in items if study.prompt is None else ():
        if not item.papers:
            try:
                ensure_possible(item)
            except ValueError as error:
                raise InputError(f"item {item.id}: {first_line(error)}") from None
    for condition in dict.fromkeys(itertools.chain.from_iterable(conditions_by_item)):
        Rule.of(condition)
    build_prompt = study.prompt or (lambda loaded, item: data.build_prompt(item, loaded.tokenizer, limits[item.id]))
    prompts = [build_prompt(loaded, item) for item in items]
    new = [item.new_tokens(study.max_new_tokens) for item in items]
    if not study.gaps:
        with contextlib.suppress(InputError):  # of one item, which its error below names
            engine.check_conditions(loaded.model, prompts, conditions_by_item, new)  # much quicker than one by one
            return prompts
    for item, prompt, wanted, most_new in zip(items, prompts, conditions_by_item, new, strict=True):
        met = met_by(loaded, prompt, wanted) if study.gaps else wanted
        with data.named(item):
            engine.check_conditions(loaded.model, [prompt], met, most_new)
    return prompts


def able(study: "Answers", loaded: Loaded) -> list[Item]:
    """The study's items without those that cannot meet one of its conditions, such as prompts shorter than a budget;
    prints how many are left out, and why (`data.usable`). Computes nothing. Raises InputError if none is left."""
    try:
        check(study, loaded)
    except InputError:
        return data.usable(study.items, study.chapter, lambda item: check(replace(study, items=[item]), loaded))
    return list(study.items)


def unmet(
    loaded: Loaded, prompts: Sequence[Prompt], conditions: Sequence[Condition], columns: Columns
) -> dict[Pair, InputError]:
    """Why items cannot meet conditions, for each pair that cannot."""
    facts = ModelFacts.of(loaded.model)
    rules = [Rule.of(c) for c in conditions]
    errors = {}
    for i, columns_of_item in enumerate(columns):
        for j in columns_of_item:
            try:
                engine.check_met(facts, prompts[i], conditions[j], rules[j])
            except InputError as error:
                errors[i, j] = error
    return errors


def met_by(loaded: Loaded, prompt: Prompt, conditions: Sequence[Condition]) -> list[Condition]:
    """Those of the conditions that a prompt can meet."""
    gaps = unmet(loaded, [prompt], conditions, [range(len(conditions))])
    return [condition for j, condition in enumerate(conditions) if (0, j) not in gaps]


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
    return list(item.meta.get("answers", [item.answer]))


# ---- a group of generations


def group_rows(
    loaded: Loaded, pairs: Sequence[Pair], heads: dict[Pair, dict[str, Any]], items: dict[int, Item],
    prompts: dict[int, Prompt], conditions: dict[int, Condition], note: Any, limit: float | None = None,
    **engine_arguments: Any,
) -> list[dict[str, Any]]:  # fmt: skip
    """Rows of the pairs; a pair that fails becomes a row with its error. limit: seconds."""
    max_new_tokens = {i: heads[i, j]["max_new_tokens"] for i, j in pairs}
    if torch.device(loaded.device).type == "cuda":
        torch.cuda.empty_cache()  # the job before left its memory in pieces, which may be too small for this one
    outcomes = attempted(loaded, prompts, conditions, pairs, max_new_tokens, engine_arguments, limit)
    computed_by = {"processor": processor(loaded)}
    return [answer_row(loaded, items[i], prompts[i], heads[i, j], outcomes[i, j], note) | computed_by for i, j in pairs]


def processor(loaded: Loaded) -> str:
    """Whose rounding a row has: the GPU's name, or the CPU instructions that PyTorch uses, AVX512 for instance."""
    gpu = torch.device(loaded.device).type == "cuda"
    return str(torch.cuda.get_device_name(loaded.device) if gpu else torch.backends.cpu.get_cpu_capability())


def attempted(
    loaded: Loaded, prompts: Any, conditions: Any, pairs: Sequence[Pair], max_new_tokens: dict[int, int],
    engine_arguments: dict[str, Any], limit: float | None = None, quiet: bool = False,
) -> Outcomes:  # fmt: skip
    """Each pair's generation, or its exception.

    Where all pairs fail together or take more than `limit` seconds, or some run out of memory, those are tried again,
    half of them at a time: first fewer conditions, then fewer items; out of memory, a quarter of the prompts also pass
    through the model together. max_new_tokens: of each item's answer. quiet: print nothing of that.
    """
    outcomes, failed = _tried(loaded, prompts, conditions, pairs, max_new_tokens, engine_arguments, limit)
    if not failed or len(pairs) == 1:
        return outcomes
    failure = outcomes[failed[0]]
    if isinstance(failure, torch.OutOfMemoryError):
        rows = engine_arguments.get("prompt_rows", batches.MOST_PROMPTS)
        engine_arguments = engine_arguments | {"prompt_rows": max(1, rows // 4)}
    if isinstance(failure, torch.OutOfMemoryError | TimeLimit) and not quiet:
        what = "out of memory" if isinstance(failure, torch.OutOfMemoryError) else str(failure)
        rows, items = counted(len(failed), "row"), counted(len({i for i, _ in failed}), "item")
        print(f"{what} with {rows} of {items}: {'half of them at a time' if len(failed) > 1 else 'alone'}")
    ordered, half_size = sorted(failed, key=lambda pair: pair[::-1]), len(failed) // 2
    for half in (ordered[:half_size], ordered[half_size:]):
        if half:
            outcomes |= attempted(
                loaded, prompts, conditions, sorted(half), max_new_tokens, engine_arguments, limit, quiet=True
            )
    return outcomes


def _tried(
    loaded: Loaded, prompts: Any, conditions: Any, pairs: Sequence[Pair], max_new_tokens: dict[int, int],
    engine_arguments: dict[str, Any], limit: float | None,
) -> tuple[Outcomes, list[Pair]]:  # fmt: skip
    """One call of the engine: its outcomes, and the pairs to try again."""
    columns: dict[int, list[int]] = {}
    for i, j in pairs:
        columns.setdefault(i, []).append(j)
    try:
        with time_limit(limit):
            answers = engine.generate(
                loaded.model, [prompts[i] for i in columns], [[conditions[j] for j in columns[i]] for i in columns],
                max_new_tokens=[max_new_tokens[i] for i in columns], errors="return", **engine_arguments,
            )  # fmt: skip
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # whatever a condition raises becomes its row's error
        failure = error if isinstance(error, Exception) else RuntimeError(f"a policy raised {error_line(error)}")
        let_go(error)  # frees the caches of this attempt, so that the next one has their room
        return dict.fromkeys(pairs, failure), list(pairs)
    outcomes: Outcomes = {}
    for i, answers_of_item in zip(columns, answers, strict=True):
        outcomes |= {(i, j): answer for j, answer in zip(columns[i], answers_of_item, strict=True)}
    return outcomes, [pair for pair in pairs if isinstance(outcomes[pair], torch.OutOfMemoryError)]


def answer_row(
    loaded: Loaded, item: Item, prompt: Prompt, head: dict[str, Any], answer: Generation | Exception, note: Any = None
) -> dict[str, Any]:
    """The row of one generation, or of its error."""
    import transformers

    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    row = head | {"torch": torch.__version__, "transformers": transformers.__version__, "date": date}
    if isinstance(answer, Exception):
        return row | {"error": error_line(answer)}
    text, thought = answer_of(loaded.tokenizer, answer.tokens, prompt.ids)
    prediction = text.strip()
    if note is not None and (more := note(item, prompt, answer)):
        row["note"] = json.dumps(more)
    evidence, until = prompt.spans.get("evidence", ()), head["until"]
    end = prompt.turns[until] if until in prompt.turns else min(prompt.spans.get(until, [len(prompt.ids)]))
    same = """evicted policy_calls pages bytes_held bytes_state bytes_full prefill_seconds decode_seconds
        backend""".split()
    return row | {name: getattr(answer, name) for name in same} | {
        "prediction": prediction, **measure.all_measures(prediction, references(item), item.papers), "thought": thought,
        **measure.official(text, references(item), item.meta),
        "evidence_coverage": measure.evidence_coverage(evidence, answer.kept_positions, end),
        "n_generated": len(answer.tokens), "kept": [round(count) for count in answer.kept],
        "kept_mean": sum(answer.kept) / len(answer.kept), "kept_hash": answer.kept_positions_hash,
    }  # fmt: skip


# ---- the plan


class AnswersPlan(Plan):
    """`Answers` with one model."""

    loaded: Loaded
    unit = "row"

    def __init__(self, study: "Answers", loaded: Loaded, settings: Settings):
        self.study, self.loaded, self.settings = study, loaded, settings
        self.title = f"{study.chapter}/{study.name}"
        self.prompts = check(study, loaded)
        conditions_by_item = engine.conditions_by_prompt(study.conditions, len(self.prompts))
        number = {c: j for j, c in enumerate(dict.fromkeys(itertools.chain.from_iterable(conditions_by_item)))}
        self.conditions = list(number)
        self.columns = [[number[c] for c in dict.fromkeys(conditions)] for conditions in conditions_by_item]
        self.pairs = [(i, j) for i, columns_of_item in enumerate(self.columns) for j in columns_of_item]
        self.gaps = unmet(loaded, self.prompts, self.conditions, self.columns) if study.gaps else {}
        self.obstacles = self._obstacles()
        usual = "triton" if settings.backend == "auto" else settings.backend
        self.backends = ["torch" if why else usual for why in self.obstacles]
        self.heads = self._heads()
        self.keys = [self.heads[pair]["key"] for pair in self.pairs]
        self.total = len(self.keys)

    def _heads(self) -> dict[Pair, dict[str, Any]]:
        """The columns of each row that are known before it is computed; `key` hashes all that decides the others."""
        study, loaded, settings = self.study, self.loaded, self.settings
        decisive: dict[str, Any] = {"model": loaded.name, "model_hash": loaded.hash}
        decisive |= {"dtype": loaded.dtype, "device": loaded.device}
        if (enabled := thinks(loaded.tokenizer)) is not None:
            decisive["enable_thinking"] = enabled
        noted = {"chapter": study.chapter, "name": study.name, "profile": settings.profile, "seed": settings.seed}
        note = store.digest(study.note)
        backends = [{"backend": backend} for backend in self.backends]
        decided_by = [c.columns() | {"engine_hash": code_of(study.chapter, c)} for c in self.conditions]
        rows: dict[Pair, dict[str, Any]] = {}
        for i, (item, prompt) in enumerate(zip(study.items, self.prompts, strict=True)):
            new, limit = item.new_tokens(study.max_new_tokens), limit_of(study, loaded, item)
            of_item = decisive | {"max_new_tokens": new, "limit": limit, "item": item.id}
            scored = [item.meta[name] for name in ("metric", "classes", "first_line") if name in item.meta]
            any_script = {} if item.papers else {"any_script": True}
            scored += [*any_script]
            of_item["data_hash"] = store.digest(prompt.ids, prompt.spans, prompt.turns, references(item), *scored)
            notes = noted | any_script | {"task": item.task, "answer": item.answer, "prompt_tokens": len(prompt.ids)}
            notes["cut"] = data.tokens_cut(item, loaded.tokenizer, limit)
            notes["evidence_at"] = measure.evidence_at(prompt.spans.get("evidence", ()), len(prompt.ids))
            for j in self.columns[i]:
                key = store.digest(decided_by[j], of_item | backends[j], note)
                rows[i, j] = decided_by[j] | of_item | backends[j] | notes | {"key": key}
        return rows

    def _obstacles(self) -> list[str | None]:
        """For each condition why the backend "auto" leaves it to plain PyTorch; None where it does not. Raises
        InputError for "triton" where no kernel can run."""
        if self.settings.backend == "triton" and (why := obstacle(self.loaded.model, Condition())):
            raise InputError(f"backend 'triton': {why}; take auto or torch")
        if self.settings.backend != "auto":
            return [None] * len(self.conditions)
        return obstacles(self.loaded.model, self.conditions)

    def __enter__(self) -> "AnswersPlan":
        self.table = store.Store(self.settings.folder, self.study.chapter, self.study.name, self.loaded.name)
        missing = set(self.table.missing(self.keys))
        self.missing = {pair for pair in self.pairs if self.heads[pair]["key"] in missing}
        if new := sorted(self.missing & self.gaps.keys()):
            self.missing -= set(new)
            if not self.settings.dry_run:
                self.table.add([self._row_of(*pair, self.gaps[pair]) for pair in new])
        return self

    def _row_of(self, i: int, j: int, error: Exception) -> dict[str, Any]:
        return answer_row(self.loaded, self.study.items[i], self.prompts[i], self.heads[i, j], error)

    @property
    def engine_arguments(self) -> dict[str, Any]:
        """The keyword arguments that every call of the engine gets."""
        return {
            "stop_ids": models.stop_ids(self.loaded),
            "batch_rows": self.settings.batch_rows,
            "backend": dict(zip(self.conditions, self.backends, strict=True)),
            "repeat": self.loaded.tokenizer.encode(REPEAT, add_special_tokens=False),
            "kept_sets": self.study.note is not None,
        }  # fmt: skip

    def _rows_together(self) -> int:
        usual = batches.USUAL_ROWS if self.loaded.device == "cpu" else batches.MOST_ROWS
        return self.settings.batch_rows or usual

    def jobs(self) -> list[Job]:
        """Jobs of about equal work. Items are dealt out in turn, the longest first, so that each job has items of every
        length and task. The blocks of items are the same whatever is missing."""
        if self.loaded.device == "cpu":  # the cores of this machine, also where a cluster's nodes compute
            cores, batches = pool.usual_workers(self.loaded, "local"), BATCHES
            parts = cores if cores > FEW else min(FEW, max(2, 2 * self.total // self._rows_together()))
        else:  # every job takes batches of its own, which cost almost the same however many rows they have
            parts = pool.usual_workers(self.loaded, self.settings.engine or "local", self.settings.address)
            batches = GPU_BATCHES
        parts = max(parts, -(-self.total // (batches * self._rows_together())))
        count, together = len(self.prompts), self.study.together
        groups = [range(first, min(first + together, count)) for first in range(0, count, together)]
        groups.sort(key=lambda group: -sum(len(self.columns[i]) * len(self.prompts[i].ids) for i in group))
        blocks = sorted(sorted(itertools.chain(*groups[part::parts])) for part in range(parts))
        return [job for block in blocks if (job := self._job(block)) is not None]

    def _job(self, block: Sequence[int], new_tokens: int | None = None) -> Job | None:
        """A job of these items' missing rows. new_tokens: of each answer at most, for a trial."""
        pairs = [(i, j) for i in block for j in self.columns[i] if (i, j) in self.missing]
        if not pairs:
            return None
        items, columns = sorted({i for i, _ in pairs}), sorted({j for _, j in pairs})
        heads = {pair: self.heads[pair] for pair in pairs}
        if new_tokens is not None:
            heads = {p: head | {"max_new_tokens": min(new_tokens, head["max_new_tokens"])} for p, head in heads.items()}
        work = partial(
            group_rows, pairs=pairs, heads=heads, items={i: self.study.items[i] for i in items},
            prompts={i: self.prompts[i] for i in items}, conditions={j: self.conditions[j] for j in columns},
            note=self.study.note, limit=self.settings.time_limit, **self.engine_arguments,
        )  # fmt: skip
        return Job(len(pairs), work, pairs)

    def forecast(self) -> Forecast:
        """An estimate from the first missing item under all its conditions. On a GPU, where items share passes and
        steps: from a sixteenth of the missing items, of one pass at most. Short answers are generated as a whole, and
        stored; of longer ones a few tokens are generated."""
        tokens = sum(len(self.prompts[i].ids) for i in {i for i, _ in self.missing})
        count = len(self.missing)
        most = sum(self.heads[pair]["max_new_tokens"] for pair in self.missing)
        work = f"{count:,} of {self.total:,} rows, {tokens:,} prompt tokens in all, up to {most:,} new tokens"
        if not self.missing:
            return Forecast(self.title, work, 0, 0.0, 0.0)
        left = sorted({i for i, _ in self.missing})
        first = left[:1] if self.loaded.device == "cpu" else left[: max(1, min(batches.MOST_PROMPTS, len(left) // 16))]
        longest = max(self.heads[pair]["max_new_tokens"] for pair in self.missing if pair[0] in first)
        whole = longest <= (TRIAL if self.settings.dry_run else SHORT)
        trial = self._job(first, None if whole else TRIAL)
        assert trial is not None
        began = time.perf_counter()
        rows = trial.work(self.loaded)
        taken = time.perf_counter() - began
        answered = [row for row in rows if "error" not in row]
        decode = sum(row["decode_seconds"] for row in answered)
        steps = sum(row["n_generated"] for row in answered) or 1
        seconds = (taken - decode) / len(rows) * count + decode / steps * most
        stored = sum(len(json.dumps(row)) for row in rows) / len(rows) * count / 2  # columns repeat themselves
        mean_held = sum(row["bytes_held"] for row in answered) / max(1, len(answered))
        held = mean_held * min(count, self._rows_together())
        if whole and not self.settings.dry_run:
            self.add(trial, rows)
            self.missing -= {pair for pair in self.missing if pair[0] in first}
        return Forecast(self.title, work, count, seconds, stored, held, "less where answers end early")

    def add(self, job: Job, result: list[dict[str, Any]]) -> None:
        """Store rows."""
        self.table.add(result)

    def lost(self, job: Job, why: str) -> None:
        """Store rows with an error."""
        self.table.add([self._row_of(i, j, RuntimeError(why)) for i, j in job.label])

    @cached_property
    def rows(self) -> pd.DataFrame:
        """The stored rows by item, then condition; read once, when all jobs are done."""
        return self.table.frame(self.keys)

    def results(self) -> pd.DataFrame:
        """Rows by item, then condition."""
        return self.rows.assign(profile=self.settings.profile, seed=self.settings.seed)

    def rehearsal(self) -> pd.DataFrame:
        """All rows: those that are stored as they are, the others without answers."""
        missing = {*self.table.missing(self.keys)}
        stored = self.table.frame([key for key in dict.fromkeys(self.keys) if key not in missing])
        stored_by_key = {row["key"]: row for row in stored.to_dict("records")}
        heads = [self.heads[pair] for pair in self.pairs]
        return pd.DataFrame([stored_by_key.get(head["key"], {}) | head for head in heads], columns=store.COLUMNS)

    def failures(self) -> list[str]:
        """Rows with an error, except for gaps."""
        errors = self.rows.error
        return [
            f"{self.conditions[j].label} on {self.study.items[i].id}: {error}"
            for (i, j), error in zip(self.pairs, errors, strict=True)
            if isinstance(error, str) and (i, j) not in self.gaps
        ]

    def remarks(self) -> list[str]:
        """Who computed what, prompts that were cut, and conditions that did nothing."""
        lines, frame = [], self.rows
        if self.settings.backend == "auto" and self.loaded.device != "cpu":
            labels_by_obstacle: dict[str, list[str]] = {}
            for c, why in zip(self.conditions, self.obstacles, strict=True):
                if why is not None:
                    labels_by_obstacle.setdefault(why, []).append(c.label)
            line = f"{self.title}: kernels computed {self.obstacles.count(None)} of {len(self.obstacles)} conditions"
            for why, labels in labels_by_obstacle.items():
                more = f" and {len(labels) - 1} more" if len(labels) > 1 else ""
                line += f"; plain PyTorch for {labels[0]}{more} ({why})"
            lines.append(line)
        cut = frame[frame.cut > 0].drop_duplicates("item")
        if len(cut):
            lines.append(
                f"{self.title}: {len(cut)} of {len(self.prompts)} passages were cut to prompts of {_range(cut.limit)} "
                f"tokens, by {_range(cut.cut)}"
            )
        if ended := int((frame.thought.notna() & (frame.prediction == "")).sum()):
            what = "ended within their <think> block, and count as empty answers"
            way_out = "give more max_new_tokens, or enable_thinking=False"
            lines.append(f"{self.title}: {ended} of {len(frame)} outputs {what}: {way_out}")
        most = frame.evicted.groupby([j for _, j in self.pairs]).max()
        idle = [c for j, c in enumerate(self.conditions) if c.policy != "full" and c.budget != 1.0 and most[j] == 0]
        if idle:
            what = "conditions evicted nothing from any item"
            lines.append(f"{len(idle)} {what}, {idle[0].label} for one: budgets never met")
        return lines


def _range(counts: "pd.Series[int]") -> str:
    """The least and the largest of some counts in words, or the only one."""
    return " to ".join(f"{count:,}" for count in dict.fromkeys((counts.min(), counts.max())))


@dataclass(frozen=True)
class Answers:
    """A study of what the model answers: one row for each item and condition, with the columns of
    `kvrepro.experiment.store.SCHEMA`. The conditions are one list for all items, or a list for each item."""

    chapter: str
    name: str
    items: Sequence[Item]
    conditions: Conditions
    max_new_tokens: int = 128
    limit: int | None = None  # tokens of a prompt; longer passages are cut; None: what the model's context leaves
    prompt: Callable[[Loaded, Item], Prompt] | None = None  # instead of the item's messages as they are
    note: Callable[[Item, Prompt, Generation], dict[str, Any]] | None = None  # for the column `note`; sees kept sets
    gaps: bool = False  # a condition that an item cannot meet is a row with an error; otherwise it is refused
    together: int = 1  # neighbouring items that share a prefix

    plan = AnswersPlan
