"""The chapter on DefensiveKV: retained importance over many answers, and the grid of qualities."""

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from kvrepro.chapters.fragility import retention
from kvrepro.chapters.fragility.retention import DEFAULT, Setting
from kvrepro.engine import generate as engine
from kvrepro.engine.condition import Condition, Prompt
from kvrepro.engine.policy import check as policy_check
from kvrepro.engine.policy import find
from kvrepro.engine.quantise import GROUP
from kvrepro.engine.regime import Prefill
from kvrepro.engine.score.heads import EMBEDDED, gates
from kvrepro.errors import InputError
from kvrepro.experiment import data, models
from kvrepro.experiment.answers import check, prompt_limit
from kvrepro.experiment.judge import NotTestable
from kvrepro.experiment.models import Loaded
from kvrepro.experiment.run import Answers, PerItem, Settings, run
from kvrepro.item import Item

LONG = ("list_all", "summary")
TABLE_1 = {  # the paper's dataset -> what stands in for it
    "NarrativeQA": "single_fact",
    "HotpotQA": "two_hop",
    "GovReport": "summary",
    "TREC": "few_shot",
    "PassageCount": "frequent_words",
    "LCC": "variable_tracking",
}
BASELINES = ("streaming_llm", "snapkv", "cake", "ada_kv", "critical_ada_kv", "duo_attention")
DEFENSIVE = ("defensive_kv", "layer_defensive_kv")
POLICIES = (*BASELINES, *DEFENSIVE)
PLUG_IN = ("snapkv", "cake", "pyramid_kv", "ada_kv", "critical_kv", "critical_ada_kv", "andpro", "dropkv", "r_kv")
R_KV_DEFENSIVE = "kvrepro/chapters/fragility/policies.py:R_KV"  # R-KV's scorer has no aggregation to switch
STEPS = {  # of the public code, each turned to what the paper describes: parameter -> value, and what that leaves out
    "mass": (0.0, "no first mass"),
    "share": ("none", "norm not shared"),
    "rescale": (False, "rows not rescaled"),
    "over": ("all", "window counted"),
}
OWN_PAPERS = ("snapkv", "cake", "ada_kv", "critical_kv", "critical_ada_kv")
WINDOWS = (16, 32, 64)
DUO = (("sinks", 16), ("recent", 32))  # an eighth of its own 128 and 256: these prompts are short
MIDDLE = 0.2  # the share of the extra studies, the paper's
GUARDED = (0.1, MIDDLE, 0.4)  # shares at which every policy runs behind guards too
READINGS = ("as_run", "as_described")
STEPS_OF_LONG = 200  # a long answer's tokens, at least
LONG_TOKENS = 1000  # shortest prompts in which the world's long tasks have so many


@dataclass(frozen=True)
class Size:
    """Items: of the main comparison, of everything beside it (some of the same), of each needle task at every share;
    per task of the retained share, long answers and the others."""

    quality: int
    more: int
    needles: int
    long: int
    short: int


SIZES = {"quick": Size(48, 12, 6, 6, 6), "full": Size(200, 64, 24, 24, 24)}


def size(profile: str, n_items: int | None = None) -> Size:
    """The profile's size; `n_items` sets the main comparison's and caps the others. Raises InputError."""
    if profile not in SIZES:
        raise InputError(f"unknown profile {profile!r}: choose {' or '.join(SIZES)}")
    if n_items is None:
        return SIZES[profile]
    if type(n_items) is not int or n_items < 1:
        raise InputError(f"n_items is {n_items!r}: ask for a whole number, at least 1")
    return Size(n_items, *(min(n_items, count) for count in list(vars(SIZES[profile]).values())[1:]))


# ---------------------------------------------------------------- retained importance


@dataclass
class Retained:
    """summary, and the default setting's curves, as `retention.retained` returns them, with columns item and task."""

    curves: pd.DataFrame
    summary: pd.DataFrame
    layer: int  # the setting's, or the one at the depth of the paper's figure 1


def paper_layer(model: Any) -> int:
    """The layer at the depth of layer 14 of 32."""
    count = model.config.get_text_config().num_hidden_layers
    return round(14 / 31 * (count - 1))


def _world(items: str) -> bool:
    return items == "tinyworld" or items.startswith("tinyworld:")


def _long_items(loaded: Loaded, count: int, seed: int, tokens: int, most: int) -> list[Item]:
    """`count` items of each long task, the first whose answers have `STEPS_OF_LONG` tokens. Raises InputError."""
    if tokens < LONG_TOKENS:
        raise InputError(
            f"long_tokens {tokens}: answers of {STEPS_OF_LONG} steps need prompts of {LONG_TOKENS} or more"
        )
    if most < STEPS_OF_LONG:
        raise InputError(f"answer_tokens {most} cuts answers of {STEPS_OF_LONG} steps and more: raise it")
    found = []
    for task in LONG:
        drawn = data.load_items(f"tinyworld:{task}", 8 * count, seed, tokens)
        long = [item for item in drawn if len(loaded.tokenizer.encode(item.answer)) >= STEPS_OF_LONG]
        if len(long) < count:
            raise InputError(f"{len(long)} of {len(drawn)} answers of {task} are long, {count} asked: another seed")
        found += long[:count]
    return found


def answers(
    loaded: Loaded,
    items: str,
    sizes: Size,
    *,
    tokens: int,
    long_tokens: int,
    answer_tokens: int,
    base: Setting = retention.OURS,
    seed: int = 0,
) -> list[tuple[Item, Prompt]]:
    """Items and prompts whose answers are looked at; computes nothing. Raises InputError for what they cannot meet.

    items: "tinyworld..." takes its long tasks, and the stand-ins of the paper's table 1; other items are all taken.
    """
    if _world(items):
        short = ",".join(name for name in TABLE_1.values() if name not in LONG)
        found = _long_items(loaded, sizes.long, seed, long_tokens, answer_tokens)
        found += data.load_items(f"tinyworld:{short}", sizes.short * (len(TABLE_1) - 1), seed, tokens)
    else:
        found = data.load_items(items, sizes.long, seed, tokens)
    config = loaded.model.config.get_text_config()
    for name, value, count in (
        ("layer", base.layer, config.num_hidden_layers),
        ("head", base.head, config.num_attention_heads),
    ):
        if value is not None and value >= count:
            raise InputError(f"{name} {value}: {loaded.name} has {count}, counted from 0")
    limit = prompt_limit(loaded, answer_tokens)
    prompts = [data.build_prompt(item, loaded.tokenizer, limit) for item in found]
    for item, prompt in zip(found, prompts, strict=True):
        settings = [base, *(retention.variants(base).values() if _wide(item) else ())]
        for end in {s.until: s for s in settings}.values():
            retention.end_of(prompt, end)
    return list(zip(found, prompts, strict=True))


def retained(
    loaded: Loaded,
    items: str,
    sizes: Size,
    settings: Settings,
    *,
    tokens: int = 1000,
    long_tokens: int = LONG_TOKENS,
    answer_tokens: int = 320,
    base: Setting = retention.OURS,
) -> Retained:
    """Answers of the full cache and what half of it retains at their steps (items: see `answers`).

    Long answers in every setting, the others in the default.
    """
    asked = answers(
        loaded, items, sizes, tokens=tokens, long_tokens=long_tokens, answer_tokens=answer_tokens, base=base,
        seed=settings.seed,
    )  # fmt: skip
    layer = paper_layer(loaded.model) if base.layer is None else base.layer
    given = {"answer_tokens": answer_tokens, "base": base, "layer": layer}
    study = PerItem("fragility", "retained", [item for item, _ in asked], retained_by_item, given)
    return Retained(**run(study, loaded, settings), layer=layer)


def retained_by_item(
    loaded: Loaded, item: Item, answer_tokens: int, base: Setting, layer: int
) -> dict[str, pd.DataFrame]:
    """One item's curves and summary."""
    prompt = data.build_prompt(item, loaded.tokenizer, prompt_limit(loaded, answer_tokens))
    [[reply]] = engine.generate(
        loaded.model, [prompt], [Condition()], max_new_tokens=answer_tokens,
        stop_ids=models.stop_ids(loaded),
    )  # fmt: skip
    settings = retention.variants(base) if _wide(item) else {DEFAULT: base}
    more = retention.specifications(base) if _wide(item) else ()
    curves, summary = retention.retained(loaded.model, prompt, reply.tokens, settings, more=more, more_layer=layer)
    return {"curves": curves[curves.setting == DEFAULT], "summary": summary}


def _wide(item: Item) -> bool:
    return item.task in LONG or item.task not in TABLE_1.values()


def per_item(r: Retained, column: str, rule: str, *, setting: str = DEFAULT, layer: int | None = None) -> pd.DataFrame:
    """item, task, value of one rule's curves, a layer's heads together (layer None: the headline's; -1: all)."""
    s = r.summary
    at = r.layer if layer is None else layer
    rows = s[(s.setting == setting) & (s.rule == rule) & (s.layer == at) & (s["head"] == -1)]
    return rows[["item", "task", column]].rename(columns={column: "value"})


def long_tasks(r: Retained) -> list[str]:
    """Tasks with answers long enough to have a worst step: the world's two, or else all."""
    tasks = list(r.summary.task.unique())
    return [task for task in tasks if task in LONG] or tasks


# ---------------------------------------------------------------- quality


def condition(
    policy: str,
    share: float,
    *,
    reading: str = "as_run",
    window: int = 32,
    aggregate: str = "own",
    guard: float = 0.0,
    bits: int | None = None,
    step: str = "",
) -> Condition:
    """A prompt compressed before its question, with the paper's window of 32 past queries for every method.

    step: one of `STEPS`, turned to what the paper describes.
    """
    known = {**find(policy).parameters, **find(policy).as_run}
    switches: list[tuple[str, object]] = [("window", window)] if "window" in known else []
    if policy == "r_kv" and aggregate == "defensive":
        policy = R_KV_DEFENSIVE
    elif aggregate != "own":
        switches += [("aggregate", aggregate)]
    switches += DUO if policy == "duo_attention" else []
    switches += [(step, STEPS[step][0])] if step else []
    return Condition(
        policy, share, Prefill(until="question"), prefix=guard, suffix=guard, reading=reading, switches=tuple(switches),
        bits=bits,
    )  # fmt: skip


def grid(
    shares: Sequence[float], policies: Sequence[str] = POLICIES, reading: str = "both", guard: float = 0.10
) -> list[Condition]:
    """The chapter's conditions for these shares, the main comparison (`compared`) first; then every policy behind
    guards; windows, plug-ins and 4 bits where the paper has them.

    The defensive methods stand in the readings asked for, the others as the authors' fork runs them. Raises InputError.
    """
    found = compared(shares, policies, reading)

    def add(policy: str, share: float, **more: Any) -> None:
        if policy in policies:
            found.extend(condition(policy, share, reading=one, **more) for one in _readings(policy, reading))

    for policy, share in itertools.product(policies, [s for s in shares if s in GUARDED and guard]):
        add(policy, share, guard=guard)
    if MIDDLE in shares:
        for policy, window in itertools.product(DEFENSIVE, WINDOWS):
            add(policy, MIDDLE, window=window)
        if set(DEFENSIVE) & set(policies):
            found += [condition(one, MIDDLE, aggregate=how) for one in PLUG_IN for how in ("own", "defensive")]
        if "defensive_kv" in policies and reading != "as_described":
            found += [condition("defensive_kv", MIDDLE, step=step) for step in STEPS]
    if 0.4 in shares:
        add("defensive_kv", 0.4, bits=4)
    return list(dict.fromkeys(found))


def compared(shares: Sequence[float], policies: Sequence[str], reading: str) -> list[Condition]:
    """The full cache, and each policy at each share. Raises InputError."""
    if isinstance(policies, str) or isinstance(shares, str) or not policies or not shares:
        raise InputError(f"shares {shares!r} of {policies!r}: give lists with one entry at least")
    if not all(isinstance(s, float) and 0 < s < 1 for s in shares):
        raise InputError(f"shares {list(shares)!r}: give shares between 0 and 1")
    if reading not in ("both", *READINGS):
        raise InputError(f"unknown reading {reading!r}: choose both, {' or '.join(READINGS)}")
    found = [Condition(regime=Prefill(until="question"))] + [
        condition(policy, share, reading=one)
        for policy, share in itertools.product(policies, shares)
        for one in _readings(policy, reading)
    ]
    for one in found:
        policy_check(one)
    return found


def _readings(policy: str, reading: str) -> tuple[str, ...]:
    return ("as_run",) if policy not in DEFENSIVE else READINGS if reading == "both" else (reading,)


def own_papers(share: float = MIDDLE) -> list[Condition]:
    """The baselines as their own papers describe them, their windows and poolings included."""
    return [Condition(one, share, Prefill(until="question"), reading="as_described") for one in OWN_PAPERS]


NEEDLES = "needles"  # the part of the grid that holds further needles: for their own figure, in no pooled mean


def parts_of(
    loaded: Loaded,
    items: str,
    sizes: Size,
    *,
    shares: Sequence[float],
    policies: Sequence[str],
    reading: str,
    guard: float,
    tokens: int,
    seed: int,
    profile: str,
) -> list[tuple[str, list[Item], list[Condition]]]:
    """What `quality` runs: (name, items, conditions). Raises InputError.

    every: some items in all conditions; middle: the others in the main comparison, at the share nearest to the
    paper's; needles: of these others the world's needles, at the remaining shares.
    """
    policies, four = _with_gates(loaded, policies), _packs(loaded)
    every = [c for c in grid(shares, policies, reading, guard) if c.bits is None or four]
    every += own_papers() if profile == "full" and MIDDLE in shares else []
    nearest = min(shares, key=lambda share: abs(share - MIDDLE))
    found = data.load_items(items, sizes.quality, seed, tokens)
    first = {item.id for item in data.load_items(items, sizes.more, seed, tokens)}
    rest = [item for item in found if item.id not in first]
    named = [task for task in dict.fromkeys(item.task for item in found) if task.startswith("needle") and _world(items)]
    more = [item for task in named for item in [i for i in found if i.task == task][: sizes.needles]]
    parts = [
        ("every", [item for item in found if item.id in first], every),
        ("middle", rest, compared([nearest], policies, reading)),
        (NEEDLES, [i for i in more if i.id not in first],
         [c for c in compared(shares, policies, "as_run" if reading == "as_run" else "as_described")
          if c.budget != nearest]),
    ]  # fmt: skip
    return [part for part in parts if part[1] and len(part[2]) > 1]


def quality(
    loaded: Loaded,
    items: str,
    sizes: Size,
    settings: Settings,
    *,
    shares: Sequence[float] = (0.1, 0.2, 0.4, 0.6, 0.8),
    policies: Sequence[str] = POLICIES,
    reading: str = "both",
    guard: float = 0.10,
    tokens: int = 1000,
    max_new_tokens: int = 32,
) -> pd.DataFrame:
    """Rows of `run` over the grid (`parts_of`), tidied (`tidy`). The full profile adds the baselines as their own
    papers describe them."""
    parts = parts_of(
        loaded, items, sizes, shares=shares, policies=policies, reading=reading, guard=guard, tokens=tokens,
        seed=settings.seed, profile=settings.profile,
    )  # fmt: skip
    studies = [Answers("fragility", name, some, asked, max_new_tokens) for name, some, asked in parts]
    return tidy(pd.concat([run(study, loaded, settings) for study in studies], ignore_index=True))


def checked(
    loaded: Loaded,
    items: str,
    sizes: Size,
    *,
    base: Setting,
    long_tokens: int,
    answer_tokens: int,
    max_new_tokens: int,
    **asked: Any,
) -> Size:
    """`sizes`, once all that both studies will do is known to be possible; computes nothing. Raises InputError."""
    where = {name: asked[name] for name in ("tokens", "seed")}
    answers(loaded, items, sizes, long_tokens=long_tokens, answer_tokens=answer_tokens, base=base, **where)
    for name, some, conditions in parts_of(loaded, items, sizes, **asked):
        check(Answers("fragility", name, some, conditions, max_new_tokens), loaded)
    return sizes


def _with_gates(loaded: Loaded, policies: Sequence[str]) -> list[str]:
    """Without DuoAttention, and saying so, where its gates were learned for another model."""
    shape = loaded.model.config.get_text_config()
    if "duo_attention" not in policies or gates(EMBEDDED).shape == (shape.num_hidden_layers, shape.num_key_value_heads):
        return list(policies)
    print(f"duo_attention is left out: {EMBEDDED} holds gates of another model; run python -m kvrepro.tools.duo")
    return [one for one in policies if one != "duo_attention"]


def _packs(loaded: Loaded) -> bool:
    """Whether 4 bits fit the model's heads; says so where they do not."""
    shape = loaded.model.config.get_text_config()
    dim = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    if dim % GROUP:
        print(f"4 bits are left out: groups of {GROUP} share a scale, heads have {dim} dimensions")
    return dim % GROUP == 0


def tidy(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with `window`, `aggregate` ("own" or "defensive"), `guard`, `step`; baselines have the reading "any".

    A baseline as its own paper describes it keeps its reading. The full cache of an item is listed once.
    """
    switches = rows.switches.map(json.loads)
    other = rows.policy == R_KV_DEFENSIVE
    reading = rows.reading.where(rows.policy.isin(DEFENSIVE) | (rows.reading == "as_described"), "any")
    found = rows.assign(
        window=switches.map(lambda s: s.get("window", 0)),
        aggregate=switches.map(lambda s: s.get("aggregate", "own")).where(~other, "defensive"),
        policy=rows.policy.where(~other, "r_kv"),
        part=rows.get("name", "every"),
        step=switches.map(lambda s: next((name for name in STEPS if name in s), "")),
        guard=rows.prefix,
        reading=reading,
        bits=rows.bits.fillna(16).astype(int),
    )
    cell = ["item", "policy", "share", "reading", "window", "aggregate", "guard", "bits", "step"]
    return found.drop_duplicates(cell).reset_index(drop=True)


CELL = {"window": 32, "aggregate": "own", "guard": 0.0, "bits": 16, "step": ""}


def scores(
    rows: pd.DataFrame, cell: Mapping[str, Any], reading: str = "as_run", measure: str = "token_f1"
) -> pd.Series:
    """One measure of one condition, by item. cell: policy and share, and of `CELL` what is not as there.

    A condition that was not run, or failed on every item, raises `NotTestable`.
    """
    if cell["policy"] == "full":
        here = rows[rows.policy == "full"].drop_duplicates("item")
    else:
        full: dict[str, Any] = CELL | dict(cell)
        if "window" not in (find(full["policy"]).parameters):
            full["window"] = 0
        keep = pd.Series(True, index=rows.index)
        for name, value in full.items():
            keep &= np.isclose(rows[name].astype(float), value) if isinstance(value, float) else rows[name] == value
        here = rows[keep & (rows.reading == (reading if full["policy"] in DEFENSIVE else "any"))]
    if here.empty:
        raise NotTestable("not run: " + ", ".join(f"{name} {value}" for name, value in cell.items()))
    if "error" in here and here.error.notna().all():
        raise NotTestable(f"all {len(here)} items of {cell['policy']} failed: {here.error.iloc[0]}")
    return here.set_index("item")[measure]


def pooled(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows whose items are balanced over tasks: without the further needles, which stand in their own figure."""
    return rows[rows.part != NEEDLES]


def readings_of(rows: pd.DataFrame) -> list[str]:
    """Readings of the defensive methods that were run."""
    return [one for one in READINGS if (rows[rows.policy.isin(DEFENSIVE)].reading == one).any()]
