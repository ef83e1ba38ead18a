"""The studies of the chapter on DefensiveKV: retained importance over many answers, and the grid of conditions."""

import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pandas as pd

from kvrepro.chapters.fragility import retention
from kvrepro.chapters.fragility.retention import DEFAULT
from kvrepro.chapters.fragility.settings import DEFENSIVE, STEPS_OF_LONG, Setting, Settings
from kvrepro.engine.cache import GROUP
from kvrepro.engine.condition import Condition, Generation, Prefill, Prompt
from kvrepro.engine.facts import ModelFacts
from kvrepro.engine.policy import check as policy_check
from kvrepro.engine.policy import find, is_own
from kvrepro.engine.score.learned import available
from kvrepro.errors import InputError
from kvrepro.experiment import data, longbench, measure
from kvrepro.experiment.answers import able, check, prompt_limit
from kvrepro.experiment.models import Loaded
from kvrepro.experiment.run import Answers, PerItem, run
from kvrepro.item import Item

WORLD = "tinyworld"
LONG = ("list_all", "summary")
STAND_INS = ("single_fact", "two_hop", "summary", "few_shot", "frequent_words", "variable_tracking")  # for table 1's
DATASETS = ("narrativeqa", "hotpotqa", "gov_report", "trec", "passage_count", "lcc")
PLUG_IN = ("snapkv", "cake", "pyramid_kv", "ada_kv", "critical_kv", "critical_ada_kv", "andpro", "dropkv", "r_kv")
R_KV_DEFENSIVE = "kvrepro/chapters/fragility/policies.py:R_KV"  # R-KV's scorer has no switch for the aggregation
STEPS = {  # of the public code, each changed to what the paper describes: name -> parameter and value
    "top of the mean not first": ("mass", 0.0),
    "norm not divided by its sum": ("share", "none"),
    "rows keep their pooled sums": ("rescale", False),
    "window's tokens not hidden": ("over", "all"),
}
WINDOWS = (16, 32, 64)
DUO = {"sinks": 16, "recent": 32}  # an eighth of its own 128 and 256: these prompts are short
GUARDED_RIVALS = (*DEFENSIVE, "critical_ada_kv")  # compared behind guards on all items: twelve miss their rare gains
NEEDLES = "needles"  # the part of the grid with further needles, which enters no pooled mean


class Size(NamedTuple):
    """Numbers of items."""

    quality: int  # in the main comparison
    more: int  # of these, in all other conditions
    needles: int  # per needle task, at every share
    long: int  # per task with long answers, in the study of retained importance
    short: int  # per other task, in that study


SIZES = {  # a claim on two cases needs seven items (`stats.fewest`)
    "quick": Size(data.AtMost(96), data.AtMost(12), 6, 7, 7),
    "full": Size(data.AtMost(400), data.AtMost(128), 48, 48, 48),
}


def declare(loaded: Loaded, items: str, n_items: int | None, settings: Settings) -> tuple[Answers, list[Answers]]:
    """The chapter's studies: answers whose steps are looked at, and the parts of the grid. Computes nothing; raises
    InputError for what cannot be run. n_items: size of the main comparison; caps the other sizes."""
    sizes = SIZES[settings.profile]
    sizes = sizes if n_items is None else Size(n_items, *(min(n_items, count) for count in sizes[1:]))
    return observed(loaded, items, sizes, settings), parts_of(loaded, items, sizes, settings)


# ---------------------------------------------------------------- retained importance


def paper_layer(model: Any) -> int:
    """The layer at the depth of layer 14 of 32, counted among those that hold tokens to evict."""
    return round(14 / 31 * (len(ModelFacts.of(model).evictable) - 1))


def _is_long(item: Item) -> bool:
    """Whether its answer should be long, by its task in the embedded world or by the tokens that it may have."""
    return item.task in LONG or item.new_tokens(0) >= STEPS_OF_LONG


def first_of_each(items: Iterable[Item], count: int) -> list[Item]:
    """The first `count` items of each task."""
    by_task: dict[str, list[Item]] = {}
    for item in items:
        by_task.setdefault(item.task, []).append(item)
    return [item for of_task in by_task.values() for item in of_task[:count]]


def observed(loaded: Loaded, items: str, sizes: Size, settings: Settings) -> Answers:
    """The study of answers whose steps are looked at, by the full cache. Computes nothing; raises InputError for items
    that the settings do not fit.

    items: of the embedded world ("tinyworld..."), its long tasks and those that stand for the datasets of table 1 are
    taken. Of other items, those whose answers may be long (in LongBench: reports, meetings and news), and those of
    table 1's datasets, or of all other tasks if there are none.
    """
    if items.partition(":")[0] == WORLD:
        if settings.answer_tokens < STEPS_OF_LONG:
            raise InputError(f"answer_tokens {settings.answer_tokens} cuts answers of {STEPS_OF_LONG} steps and more")
        load = partial(data.load_items, seed=settings.seed)
        long = [item for task in LONG for item in load(f"{WORLD}:{task}", 8 * sizes.long, tokens=settings.long_tokens)]
        long = [item for item in long if len(loaded.tokenizer.encode(item.answer)) >= STEPS_OF_LONG]
        tasks = [name for name in STAND_INS if name not in LONG]
        short = load(f"{WORLD}:{','.join(tasks)}", sizes.short * len(tasks), tokens=settings.tokens)
    else:
        every = _load(loaded, items, None, settings)
        long, short = ([item for item in every if _is_long(item) == is_long] for is_long in (True, False))
        short = [item for item in short if item.task in DATASETS] or short
    chosen = first_of_each(long, sizes.long) + first_of_each(short, sizes.short)
    layers = len(ModelFacts.of(loaded.model).evictable)
    if (settings.layer or 0) >= layers:
        raise InputError(f"layer {settings.layer}: {loaded.name} has {layers}, counted from 0")
    study = Answers("fragility", "answers", chosen, [Condition()], settings.answer_tokens, note=tokens_of)

    def check_history(item: Item) -> None:
        [prompt] = check(replace(study, items=[item]), loaded)
        with data.named(item):
            for s in {s.until: s for s in _settings_for(item, settings.base).values()}.values():
                retention.end_of(prompt, s)

    return replace(study, items=data.usable(chosen, "fragility", check_history))


def tokens_of(item: Item, prompt: Prompt, answer: Generation) -> dict[str, Any]:
    """The note that a row keeps of an answer whose steps are looked at: its tokens."""
    return {"tokens": answer.tokens}


def _load(loaded: Loaded, items: str, n_items: int | None, settings: Settings) -> list[Item]:
    """Items as in `data.load_fitting`, without those that have no question to compress what comes before."""
    room = prompt_limit(loaded, settings.max_new_tokens)
    fitting = data.load_fitting(items, n_items, loaded.tokenizer, room, settings.seed, settings.tokens)
    full = Condition(regime=Prefill(until="question"))
    return able(Answers("fragility", "every", fitting, [full], settings.max_new_tokens), loaded)


def _settings_for(item: Item, base: Setting) -> dict[str, Setting]:
    """All settings for long answers and for the reader's own items; the base for others."""
    short = not _is_long(item) and item.task in (*STAND_INS, *DATASETS)
    return {DEFAULT: base} if short else retention.variants(base)


class Answered(NamedTuple):
    """An item, the limit of its prompt in tokens, and the tokens of the full cache's answer."""

    item: Item
    limit: int
    tokens: list[int]


def retained(answered: Answers, loaded: Loaded, settings: Settings) -> dict[str, pd.DataFrame]:
    """Tables of retained importance for every answer of the full cache: the `curves` and the `summary` of
    `retention.retained`, with columns item and task; in the summary also `long` (is its task one of those with long
    answers: the world's two, LongBench's three, or else all?) and `headline` (is its layer the headline's?)."""
    rows = run(answered, loaded, settings).set_index("item")
    seen = {}
    for item in answered.items:
        note, limit = rows.note[item.id], int(rows.limit[item.id])
        if isinstance(note, str):
            seen[item.id] = Answered(item, limit, json.loads(note)["tokens"])
    layer = paper_layer(loaded.model) if settings.layer is None else settings.layer
    study = PerItem("fragility", "retained", seen, retained_by_item, {"base": settings.base, "layer": layer})
    tables, tasks = run(study, loaded, settings), {item.id: item.task for item in answered.items}
    curves, summary = (table.assign(task=table["item"].map(tasks)) for table in (tables["curves"], tables["summary"]))
    long = summary.task.isin([*LONG, *longbench.GROUPS["long"]])
    return {"curves": curves, "summary": summary.assign(long=long | ~long.any(), headline=summary.layer == layer)}


def retained_by_item(loaded: Loaded, item: Answered, base: Setting, layer: int) -> dict[str, pd.DataFrame]:
    """Curves and summary of one item, as `retention.retained` has them."""
    prompt = data.build_prompt(item.item, loaded.tokenizer, item.limit)
    settings = _settings_for(item.item, base)
    curves, summary = retention.retained(loaded.model, prompt, item.tokens, settings, layer)
    return {"curves": curves, "summary": summary}


# ---------------------------------------------------------------- quality


def has_window(policy: str) -> bool:
    """Whether the policy looks at a window of past queries."""
    return "window" in {**find(policy).parameters, **find(policy).as_run}


def condition(
    policy: str, share: float, reading: str = "as_run", guard: float = 0.0, bits: int | None = None, **switches: object
) -> Condition:
    """Compress the prompt before its question, with the paper's window of 32 past queries for every method."""
    switches = ({"window": 32} if has_window(policy) else {}) | switches | (DUO if policy == "duo_attention" else {})
    if policy == "r_kv" and switches.pop("aggregate", "own") == "defensive":
        policy = R_KV_DEFENSIVE
    return Condition(
        policy, share, Prefill(until="question"), prefix=guard, suffix=guard, reading=reading, bits=bits,
        switches=tuple(switches.items()),
    )  # fmt: skip


def compared(shares: Sequence[float], settings: Settings) -> list[Condition]:
    """The full cache, and each policy at each share. Raises InputError."""
    conditions = [Condition(regime=Prefill(until="question"))]
    for policy, share in itertools.product(settings.policies, shares):
        conditions += [condition(policy, share, reading) for reading in settings.readings(policy)]
    for c in conditions:
        policy_check(c)
    return conditions


def grid(settings: Settings) -> list[Condition]:
    """The chapter's conditions: the main comparison (`compared`) first; then every policy behind guards, and windows,
    plug-ins and 4 bits as in the paper; the reader's own policies have the windows too. Raises InputError.

    The defensive methods run in the given readings, the others as in the authors' fork.
    """
    conditions, at, policies = compared(settings.shares, settings), settings.middle, settings.policies
    windowed = [p for p in policies if p in DEFENSIVE or (is_own(p) and has_window(p))]
    changed: list[tuple[str, float, dict[str, Any]]]
    changed = [(p, at, {"guard": settings.protect_frac}) for p in policies if settings.protect_frac]
    changed += [(policy, at, {"window": window}) for policy in windowed for window in WINDOWS]
    if "defensive_kv" in policies and 0.4 in settings.shares:
        changed += [("defensive_kv", 0.4, {"bits": 4})]
    for policy, share, change in changed:
        conditions += [condition(policy, share, reading, **change) for reading in settings.readings(policy)]
    if set(DEFENSIVE) & set(policies):
        for policy in PLUG_IN:
            conditions += [condition(policy, at), condition(policy, at, aggregate="defensive")]
    if "defensive_kv" in policies and settings.reading != "as_described":
        code = condition("defensive_kv", at)
        conditions += [replace(code, switches=(*code.switches, step)) for step in STEPS.values()]
    return list(dict.fromkeys(conditions))


def parts_of(loaded: Loaded, items: str, sizes: Size, settings: Settings) -> list[Answers]:
    """The parts of the grid, in which an answer is missing where an item cannot meet a condition. Raises InputError.

    every: some items in all conditions. middle: the other items in the main comparison, at the share nearest to the
    paper's, and `GUARDED_RIVALS` behind guards there. needles: among these other items, the embedded world's needles,
    at the remaining shares.
    """
    every, at = _possible(loaded, grid(settings)), settings.middle
    settings = replace(settings, policies=tuple(p for p in settings.policies if any(c.policy == p for c in every)))
    all_items = _load(loaded, items, sizes.quality, settings)
    first = {item.id for item in _load(loaded, items, sizes.more, settings)}
    needles = [item for item in all_items if item.task.startswith("needle") and items.partition(":")[0] == WORLD]
    guarded = [c for c in every if c.policy in GUARDED_RIVALS and c.budget == at and c.prefix]
    parts = [
        ("every", [item for item in all_items if item.id in first], every),
        ("middle", [item for item in all_items if item.id not in first], compared([at], settings) + guarded),
        (NEEDLES, [item for item in first_of_each(needles, sizes.needles) if item.id not in first],
         [c for c in compared(settings.shares, settings) if c.budget != at]),
    ]  # fmt: skip
    studies = [Answers("fragility", *part, settings.max_new_tokens) for part in parts if part[1]]
    studies = [study for study in studies if len(study.conditions) > 1]
    for study in studies:
        check(study, loaded)
    return studies


def _possible(loaded: Loaded, conditions: Sequence[Condition]) -> list[Condition]:
    """The conditions that this model can run; what is left out is printed: DuoAttention if its gates were learned for
    another model, and 4 bits if they do not fit the heads. Raises InputError where no policy is left."""
    shape = loaded.model.config.get_text_config()
    dim = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    duo = [c for c in conditions if c.policy == "duo_attention"]
    facts = ModelFacts.of(loaded.model)
    if duo and not available([facts.outputs[n] for n in facts.evictable]):
        print("duo_attention is left out: no gates were learned of this model; run python -m studies.duo")
        conditions = [c for c in conditions if c not in duo]
    if dim % GROUP and any(c.bits for c in conditions):
        print(f"4 bits are left out: groups of {GROUP} share a scale, heads have {dim} dimensions")
        conditions = [c for c in conditions if c.bits is None]
    if all(c.policy == "full" for c in conditions):
        raise InputError("policies: none is left for this model")
    return list(conditions)


def answers(parts: Sequence[Answers], loaded: Loaded, settings: Settings) -> pd.DataFrame:
    """Run the parts of the grid: their rows as `tidy` has them."""
    return tidy(pd.concat([run(part, loaded, settings) for part in parts], ignore_index=True))


def tidy(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with `score` (`measure.scores`), `part`, the name of their part of the grid, and `change`, the
    difference from the main comparison: "none", "guards", "window 16", "defensive" (in place of the mean), "4 bits", or
    a step of `STEPS` left out. Baselines get the reading "any". Each item has one row of the full cache.
    """
    switches, other = rows.switches.map(json.loads), rows.policy == R_KV_DEFENSIVE
    window = switches.map(lambda s: s.get("window", 32))
    change = ("window " + window.astype(str)).where(window != 32, "none").mask(rows.prefix > 0, "guards")
    change = change.mask(rows.bits == 4, "4 bits")
    change = change.mask(other | switches.map(lambda s: s.get("aggregate") == "defensive"), "defensive")
    for name, (step, _) in STEPS.items():
        change = change.mask(switches.map(lambda s, step=step: step in s), name)
    tidied = rows.rename(columns={"name": "part"}).assign(
        score=measure.scores(rows), change=change, policy=rows.policy.where(~other, "r_kv"),
        reading=rows.reading.where(rows.policy.isin(DEFENSIVE), "any"),
    )  # fmt: skip
    return tidied.drop_duplicates(["item", "policy", "share", "reading", "change"]).reset_index(drop=True)
