"""The runner's half for `Answers`: what is asked, what of it is missing, a group of generations, a row."""

import datetime
import itertools
import json
import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import pandas as pd

from kvrepro.engine import generate as engine
from kvrepro.engine import policy
from kvrepro.engine.backend import obstacles
from kvrepro.engine.condition import Condition, Generation, Prompt
from kvrepro.engine.facts import ModelFacts
from kvrepro.engine.regime import Chunked, DecodeCap, Offline, PerStep, SharedCap
from kvrepro.errors import InputError
from kvrepro.experiment import data, fingerprint, measure, models, store
from kvrepro.experiment.models import Loaded
from kvrepro.experiment.plan import Estimate, Job, Plan
from kvrepro.item import Item

if TYPE_CHECKING:
    from kvrepro.experiment.run import Answers, Settings

Pair = tuple[int, int]  # item, condition
Found = dict[Pair, Generation | Exception]
REPEAT = "Repeat the previous context: "  # KVzip's request
BATCHES = 4  # per job, because the engine batches rows of like shape only, about four shapes to a chapter
LEAST = 8  # jobs of a study that has so many items, for workers to share
TRIAL = 8  # tokens generated to estimate the rest


# ---- what is asked


def prompt_limit(loaded: Loaded, max_new_tokens: int, limit: int | None = None) -> int:
    """Most tokens of a prompt: `limit`, or what the model's context leaves beside the answer. Raises InputError."""
    if type(max_new_tokens) is not int or max_new_tokens < 1:
        raise InputError(f"max_new_tokens is {max_new_tokens!r}: ask for a whole number, at least 1")
    room = loaded.context - max_new_tokens
    if room < 1 or (limit is not None and limit > room):
        wanted = f"limit {limit} + {max_new_tokens}" if limit is not None else f"{max_new_tokens}"
        raise InputError(f"{wanted} new tokens > context {loaded.context} of {loaded.name}: lower them")
    return room if limit is None else limit


def check(study: "Answers", loaded: Loaded) -> list[Prompt]:
    """The items' prompts, if every item and condition can be met (`gaps`: every condition be named); raises InputError
    otherwise. Computes nothing."""
    items, conditions = study.items, study.conditions
    if not items or not conditions:
        raise InputError(f"{len(items)} items x {len(conditions)} conditions: give at least one of each")
    limit = prompt_limit(loaded, study.max_new_tokens, study.limit)
    if (ids := len({item.id for item in items})) < len(items):
        raise InputError(f"{len(items)} items share {ids} ids: give every item its own")
    for condition in conditions:
        policy.check(condition)
    made = study.prompt or (lambda loaded, item: data.build_prompt(item, loaded.tokenizer, limit))
    prompts = [made(loaded, item) for item in items]
    if not study.gaps:
        engine.check_conditions(loaded.model, prompts, conditions, study.max_new_tokens)
    return prompts


def unmet(loaded: Loaded, prompts: Sequence[Prompt], conditions: Sequence[Condition]) -> dict[Pair, InputError]:
    """Why items cannot meet conditions, for each pair that cannot."""
    facts, found = ModelFacts.of(loaded.model), {}
    for (i, text), (j, condition) in itertools.product(enumerate(prompts), enumerate(conditions)):
        try:
            end = engine.boundary(text, condition)
            held = [at - end for at in engine.whitelisted(text, condition) if at < end]
            policy.check(condition, facts.held(end), held)
        except InputError as error:
            found[i, j] = error
    return found


# ---- what decides a row


OF_REGIMES = {  # code that only rows of these regimes reach
    (SharedCap,): {
        ("kvrepro.engine.shared", ""), ("kvrepro.engine.signals", ""), ("kvrepro.engine.rows", "evict_rows_shared"),
        ("kvrepro.engine.evict", "evict_shared"),
    },
    (Chunked,): {("kvrepro.engine.passes", "_chunked")},
    (Offline,): {("kvrepro.engine.passes", "_reused")},
    (Chunked, DecodeCap, PerStep): {("kvrepro.engine.rows", "evict_rows")},
}  # fmt: skip


def code_of(condition: Condition, backend: str) -> str:
    """Hash of the code that decides the condition's rows: the engine's, its policy's and the measures', and no other's.

    Kernels count where they run. Files that a policy's parameters name count by what is in them.
    """
    skipped = {("kvrepro_kernels", "")} if backend == "torch" else set()
    for regimes, names in OF_REGIMES.items():
        if not isinstance(condition.regime, regimes):
            skipped |= names
    roots = [("kvrepro.engine.generate", "generate"), ("kvrepro.experiment.measure", "all_measures"),
             ("kvrepro.experiment.answers", "answer_row")]  # fmt: skip
    return fingerprint.digest(fingerprint.code(*roots, unfollowed=frozenset(skipped)), policy_of(condition))


def policy_of(condition: Condition) -> Any:
    """What a condition's own policy brings: parameters, functions with what they reach, and the bytes of files."""
    if condition.policy == "full":
        return None
    own = policy.find(condition.policy)
    values = own.reading(condition.reading, condition.switches).values()
    files = [data.found(value) for value in values if isinstance(value, str)]
    return [fingerprint.describe(own), [fingerprint.describe(file.read_bytes()) for file in files if file]]


def heads(
    study: "Answers", loaded: Loaded, settings: "Settings", prompts: Sequence[Prompt], conditions: Sequence[Condition],
    backends: Sequence[str],
) -> list[list[dict[str, Any]]]:  # fmt: skip
    """What is known of each row before it is computed, [item][condition]; `key` hashes all that decides the rest.
    backends: who computes each condition."""
    limit = prompt_limit(loaded, study.max_new_tokens, study.limit)
    decisive = {
        "model": loaded.name, "model_hash": loaded.hash, "dtype": loaded.dtype, "device": loaded.device,
        "max_new_tokens": study.max_new_tokens, "limit": limit,
    }  # fmt: skip
    noted = {"chapter": study.chapter, "name": study.name, "profile": settings.profile, "seed": settings.seed}
    note = fingerprint.of(study.note)
    own = [
        (c.columns() | {"engine_hash": code_of(c, backend)}, {"backend": backend})
        for c, backend in zip(conditions, backends, strict=True)
    ]
    found = []
    for item, prompt in zip(study.items, prompts, strict=True):
        of = decisive | {"item": item.id}
        of["data_hash"] = fingerprint.digest(prompt.ids, prompt.spans, prompt.turns, references(item))
        told = {"task": item.task, "answer": item.answer, "prompt_tokens": len(prompt.ids)}
        told["cut"] = data.tokens_cut(item, loaded.tokenizer, limit)
        found.append([
            one | of | by | told | noted | {"key": fingerprint.digest(one, of | by, note)} for one, by in own
        ])  # fmt: skip
    return found


def references(item: Item) -> list[str]:
    """All answers that count as right."""
    return list(item.meta.get("answers", [item.answer]))


# ---- a group of generations


def group_rows(
    loaded: Loaded, parts: Sequence[tuple[Sequence[int], Sequence[int]]], known: dict[Pair, dict[str, Any]],
    items: dict[int, Item], prompts: dict[int, Prompt], conditions: dict[int, Condition], note: Any, **given: Any,
) -> list[dict[str, Any]]:  # fmt: skip
    """Rows of the pairs of each part (items, conditions); a pair that fails is a row with its error."""
    found: Found = {}
    for members, chosen in parts:
        found |= attempted(loaded, prompts, conditions, members, chosen, given)
    return [answer_row(loaded, items[i], prompts[i], known[i, j], answer, note) for (i, j), answer in found.items()]


def attempted(
    loaded: Loaded, prompts: Any, conditions: Any, members: Sequence[int], chosen: Sequence[int], given: dict[str, Any]
) -> Found:
    """Generations, or the exceptions that single pairs raise: what fails is halved, conditions first, then items."""
    try:
        asked = [prompts[i] for i in members], [conditions[j] for j in chosen]
        backends = [given["backend"][conditions[j]] for j in chosen]
        made = engine.generate(loaded.model, *asked, errors="return", **given | {"backend": backends})
    except Exception as error:  # whatever a condition raises becomes its row's error
        if len(members) == len(chosen) == 1:
            return {(members[0], chosen[0]): error}
        by_condition = len(chosen) > 1
        halved = chosen if by_condition else members
        found: Found = {}
        for half in (halved[: len(halved) // 2], halved[len(halved) // 2 :]):
            pair = (members, half) if by_condition else (half, chosen)
            found |= attempted(loaded, prompts, conditions, *pair, given)
        return found
    return {(i, j): made[a][b] for a, i in enumerate(members) for b, j in enumerate(chosen)}


def answer_row(
    loaded: Loaded, item: Item, prompt: Prompt, head: dict[str, Any], answer: Generation | Exception, note: Any = None
) -> dict[str, Any]:
    """The row of one generation, or of its error."""
    import torch
    import transformers

    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    row = head | {"torch": torch.__version__, "transformers": transformers.__version__, "date": date}
    if isinstance(answer, Exception):
        return row | {"error": f"{type(answer).__name__}: {answer}".splitlines()[0]}
    prediction = loaded.tokenizer.decode(answer.tokens, skip_special_tokens=True).strip()
    if note is not None and (more := note(item, prompt, answer)):
        row["note"] = json.dumps(more)
    same = """evicted policy_calls pages bytes_held bytes_state bytes_full peak_bytes prefill_seconds decode_seconds
        backend""".split()
    return row | {name: getattr(answer, name) for name in same} | {
        "prediction": prediction, **measure.all_measures(prediction, references(item)),
        "n_generated": len(answer.tokens), "kept": [round(count) for count in answer.kept],
        "kept_mean": sum(answer.kept) / len(answer.kept), "kept_hash": answer.kept_positions_hash,
    }  # fmt: skip


# ---- the plan


class AnswersPlan(Plan):
    """`Answers` with one model."""

    unit = "row"

    def __init__(self, study: "Answers", loaded: Loaded, settings: "Settings"):
        self.study, self.loaded, self.settings = study, loaded, settings
        self.title = f"{study.chapter}/{study.name}"
        self.conditions = list(dict.fromkeys(study.conditions))
        self.prompts = check(study, loaded)
        self.gaps = unmet(loaded, self.prompts, self.conditions) if study.gaps else {}
        self.left = self._left()
        usual = "triton" if settings.backend == "auto" else settings.backend
        self.backends = ["torch" if why else usual for why in self.left]
        self.heads = heads(study, loaded, settings, self.prompts, self.conditions, self.backends)
        self.pairs = list(itertools.product(range(len(self.prompts)), range(len(self.conditions))))
        self.keys = [self._head(pair)["key"] for pair in self.pairs]
        self.total = len(self.keys)

    def _left(self) -> list[str | None]:
        """Why the backend "auto" leaves a condition to plain PyTorch; None: it does not."""
        if self.settings.backend != "auto":
            return [None] * len(self.conditions)
        return obstacles(self.loaded.model, self.prompts[0].ids, self.conditions)

    def __enter__(self) -> "AnswersPlan":
        self.table = store.Store(self.settings.folder, self.study.chapter, self.study.name)
        try:
            missing = set(self.table.missing(self.keys))
            self.missing = {pair for pair in self.pairs if self._head(pair)["key"] in missing}
            if new := sorted(self.missing & self.gaps.keys()):
                self.missing -= set(new)
                if not self.settings.dry_run:
                    self.table.add([self._row(pair, self.gaps[pair]) for pair in new])
        except BaseException:
            self.table.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.table.close()

    def _head(self, pair: Pair) -> dict[str, Any]:
        return self.heads[pair[0]][pair[1]]

    def _row(self, pair: Pair, answer: Generation | Exception) -> dict[str, Any]:
        return answer_row(self.loaded, self.study.items[pair[0]], self.prompts[pair[0]], self._head(pair), answer)

    @property
    def given(self) -> dict[str, Any]:
        """What every call of the engine is given."""
        return {
            "max_new_tokens": self.study.max_new_tokens, "stop_ids": models.stop_ids(self.loaded),
            "batch_rows": self.settings.batch_rows, "backend": dict(zip(self.conditions, self.backends, strict=True)),
            "repeat": self.loaded.tokenizer.encode(REPEAT, add_special_tokens=False),
            "kept_sets": self.study.note is not None,
        }  # fmt: skip

    def jobs(self) -> list[Job]:
        """Blocks of neighbouring items, the same blocks whatever is missing of them."""
        together = self.study.together
        most = min(BATCHES * self.settings.batch_rows // len(self.conditions), -(-len(self.prompts) // LEAST))
        step = max(together, most // together * together)
        blocks = (range(first, min(first + step, len(self.prompts))) for first in range(0, len(self.prompts), step))
        return [job for block in blocks if (job := self._job(block)) is not None]

    def _job(self, block: Iterable[int]) -> Job | None:
        parts: dict[tuple[int, ...], list[int]] = {}  # conditions -> items that miss them
        for i in block:
            if chosen := tuple(j for j in range(len(self.conditions)) if (i, j) in self.missing):
                parts.setdefault(chosen, []).append(i)
        if not parts:
            return None
        known = {(i, j): self.heads[i][j] for js, some in parts.items() for i in some for j in js}
        members, asked = sorted({i for i, _ in known}), sorted({j for _, j in known})
        work = partial(
            group_rows, parts=[(some, js) for js, some in parts.items()], known=known,
            items={i: self.study.items[i] for i in members}, prompts={i: self.prompts[i] for i in members},
            conditions={j: self.conditions[j] for j in asked}, note=self.study.note, **self.given,
        )  # fmt: skip
        return Job(len(known), work)

    def estimate(self) -> Estimate:
        """From the first missing item under all its conditions, a few tokens each."""
        tokens = sum(len(self.prompts[i].ids) for i in {i for i, _ in self.missing})
        count = len(self.missing)
        most = count * self.study.max_new_tokens
        what = f"{count:,} of {self.total:,} rows, prompts of {tokens:,} tokens, {most:,} new tokens"
        if not self.missing:
            return Estimate(self.title, what, 0.0, 0.0)
        first = min(self.missing)[0]
        chosen = sorted(j for i, j in self.missing if i == first)
        trial = self.given | {"max_new_tokens": min(TRIAL, self.study.max_new_tokens)}
        began = time.perf_counter()
        found = attempted(self.loaded, self.prompts, self.conditions, [first], chosen, trial)
        taken = time.perf_counter() - began
        made = [answer for answer in found.values() if isinstance(answer, Generation)]
        decode = sum(answer.decode_seconds for answer in made)
        steps = sum(len(answer.tokens) for answer in made) or 1
        seconds = (taken - decode) / len(chosen) * count + decode / steps * most
        rows = [self._row(pair, answer) for pair, answer in found.items()]
        stored = sum(len(json.dumps(row)) for row in rows) / len(rows) * count / 2  # columns repeat themselves
        held = sum(answer.bytes_held for answer in made) / max(1, len(made)) * min(count, self.settings.batch_rows)
        return Estimate(self.title, what, seconds, stored, held)

    def add(self, job: Job, result: list[dict[str, Any]]) -> None:
        """Store rows."""
        self.table.add(result)

    def results(self) -> pd.DataFrame:
        """Rows by item, then condition."""
        rows = self.table.frame().set_index("key", drop=False)
        frame = rows.loc[self.keys].reset_index(drop=True)
        return frame.assign(profile=self.settings.profile, seed=self.settings.seed)

    def rehearsal(self) -> pd.DataFrame:
        """Rows without answers."""
        return pd.DataFrame(list(map(self._head, self.pairs)), columns=store.COLUMNS)

    def failures(self) -> list[str]:
        """Rows with an error, but for gaps."""
        errors = self.results().error
        return [
            f"{self.conditions[j].label} on {self.study.items[i].id}: {error}"
            for (i, j), error in zip(self.pairs, errors, strict=True)
            if isinstance(error, str) and (i, j) not in self.gaps
        ]

    def remarks(self) -> list[str]:
        """Who computed what, prompts that were cut, and conditions that did nothing."""
        said, frame = [], self.results()
        if self.settings.backend == "auto" and self.loaded.device != "cpu":
            labels: dict[str, list[str]] = {}
            for c, why in zip(self.conditions, self.left, strict=True):
                if why is not None:
                    labels.setdefault(why, []).append(c.label)
            others = [f"; plain PyTorch for {some[0]}{_more(some)} ({why})" for why, some in labels.items()]
            computed = f"{self.left.count(None)} of {len(self.left)} conditions"
            said.append(f"{self.title}: kernels computed {computed}{''.join(others)}")
        cut = frame[frame.cut > 0].drop_duplicates("item")
        if len(cut):
            said.append(
                f"{self.title}: {len(cut)} of {len(self.prompts)} passages were cut to prompts of {frame.limit[0]:,} "
                f"tokens, by {cut.cut.min():,} to {cut.cut.max():,}"
            )
        evicted = frame.evicted.to_numpy().reshape(len(self.prompts), len(self.conditions))
        idle = [
            c for c, some in zip(self.conditions, evicted.T, strict=True)
            if c.policy != "full" and c.budget != 1.0 and (some == 0).any() and not (some > 0).any()
        ]  # fmt: skip
        if idle:
            what = "conditions evicted nothing from any item"
            said.append(f"{len(idle)} {what}, {idle[0].label} for one: budgets never met")
        return said


def _more(labels: Sequence[str]) -> str:
    """How many there are beside the first."""
    return f" and {len(labels) - 1} more" if len(labels) > 1 else ""
