"""The chapter on DefensiveKV: retained importance over many answers, the grid of qualities, tables, verdicts, numbers.

Intervals are over items, paired: percentile bootstraps, and Student's t for means of few items, for which a percentile
bootstrap is too narrow. An item is one prompt with its answer.
"""

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import t as student

from kvrepro.chapters.fragility import retention
from kvrepro.chapters.fragility.retention import DEFAULT, Setting
from kvrepro.engine import generate as engine
from kvrepro.engine.condition import Condition, Prompt
from kvrepro.engine.policy import find
from kvrepro.engine.quantise import GROUP
from kvrepro.engine.score.heads import EMBEDDED, gates
from kvrepro.errors import InputError
from kvrepro.experiment import claims_before as claims
from kvrepro.experiment import data, models
from kvrepro.experiment.answers import check, prompt_limit
from kvrepro.experiment.claims_before import Missing
from kvrepro.experiment.models import Loaded
from kvrepro.experiment.run import Answers, PerItem, Settings, run
from kvrepro.item import Item
from kvrepro.paths import DATA

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
GPU = DATA / "gpu"
STEPS_OF_LONG = 200  # a long answer's tokens, at least
LONG_TOKENS = 1000  # shortest prompts in which the world's long tasks have so many
FEW = 15  # items below which a mean's interval is Student's


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
        loaded.model, [prompt], [Condition(regime="prefill")], max_new_tokens=answer_tokens,
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
        policy, share=share, prefix=guard, suffix=guard, reading=reading, switches=tuple(switches), regime="prefill",
        until="question", bits=bits,
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
    for one in policies:
        find(one)  # raises for what neither the catalogue nor a file has
    return [Condition(regime="prefill", until="question")] + [
        condition(policy, share, reading=one)
        for policy, share in itertools.product(policies, shares)
        for one in _readings(policy, reading)
    ]


def _readings(policy: str, reading: str) -> tuple[str, ...]:
    return ("as_run",) if policy not in DEFENSIVE else READINGS if reading == "both" else (reading,)


def own_papers(share: float = MIDDLE) -> list[Condition]:
    """The baselines as their own papers describe them, their windows and poolings included."""
    return [
        Condition(one, share=share, reading="as_described", regime="prefill", until="question") for one in OWN_PAPERS
    ]


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
          if c.share != nearest]),
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

    A condition that was not run raises `claims.Missing`.
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
        raise Missing("not run: " + ", ".join(f"{name} {value}" for name, value in cell.items()))
    return here.set_index("item")[measure]


def pooled(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows whose items are balanced over tasks: without the further needles, which stand in their own figure."""
    return rows[rows.part != NEEDLES]


def readings_of(rows: pd.DataFrame) -> list[str]:
    """Readings of the defensive methods that were run."""
    return [one for one in READINGS if (rows[rows.policy.isin(DEFENSIVE)].reading == one).any()]


# ---------------------------------------------------------------- contrasts with intervals


def _ratio(top: np.ndarray, bottom: np.ndarray) -> np.ndarray:
    """top / bottom; no loss below the bar is infinitely smaller; where neither loses there is nothing to compare."""
    safe = np.divide(top, bottom, out=np.full_like(top, np.nan), where=bottom > 0)
    return np.where((bottom <= 0) & (top > 0), np.inf, safe)


CONTRASTS = {  # of column means
    "mean": lambda m: m["a"],
    "difference": lambda m: m["a"] - m["b"],
    "loss": lambda m: 1 - m["a"] / m["full"],
    "loss_ratio": lambda m: _ratio(m["full"] - m["b"], m["full"] - m["a"]),
    "spread": lambda m: np.ptp([v for k, v in m.items() if k.startswith("a:")], axis=0) / m["full"],
}


def estimate(
    frame: pd.DataFrame, contrast: str, *, draws: int = claims.DRAWS, seed: int = 42
) -> tuple[float, float, float, int]:
    """Value, 95% interval and items of a contrast of columns (rows are items, resampled together); below six: nan.
    Means and differences of fewer than `FEW` items: Student's t, as a percentile bootstrap of so few is too narrow. So
    few that are all alike have no spread to judge by: nan."""
    values = frame.dropna().to_numpy(float)
    n = len(values)
    if not n:
        return np.nan, np.nan, np.nan, 0
    compute = CONTRASTS[contrast]
    weights = claims._weights(n, seed)[:draws]
    with np.errstate(divide="ignore", invalid="ignore"):
        point, drawn = (
            np.asarray(compute(dict(zip(frame.columns, part.T, strict=True))))
            for part in (values.mean(0, keepdims=True), weights @ values)
        )
    if n < claims.MIN_ITEMS or np.isnan(drawn).all():
        return float(point[0]), np.nan, np.nan, n
    if n < FEW and contrast in ("mean", "difference") and len(np.unique(np.round(drawn, 12))) > 1:
        each = frame.dropna()["a"] - (frame.dropna()["b"] if contrast == "difference" else 0.0)
        half = float(student.ppf(0.975, n - 1) * each.std(ddof=1) / np.sqrt(n))
        return float(point[0]), float(point[0]) - half, float(point[0]) + half, n
    low, high = np.nanpercentile(drawn, [2.5, 97.5], method="lower")
    if n < FEW and low == high:
        return float(point[0]), np.nan, np.nan, n
    return float(point[0]), float(low), float(high), n


Member = tuple[str, pd.DataFrame]


def _retained_members(claim: Mapping, sets: Mapping, r: Retained | None) -> list[Member]:
    if r is None:
        raise Missing("not run")
    over = claim["over"]
    tasks = set(r.summary.task)

    def named(name: str) -> list[str]:
        return [task for task in sets[name] if task in tasks] or sorted(tasks)

    layers = sorted(set(r.summary.layer) - {-1}) if "layer" in over else [r.layer]
    groups = [(task, [task]) for task in named(over["task"])] if "task" in over else [("", named(over["pooled"]))]
    found = []
    for layer, (label, group) in itertools.product(layers, groups):
        parts = {}
        for side, cell in claim["cells"].items():
            values = per_item(r, claim["column"], cell["rule"], layer=layer)
            parts[side] = values[values.task.isin(group)].set_index("item").value
        found.append((label or f"layer {layer}", pd.DataFrame(parts)))
    return found


def _quality_members(claim: Mapping, sets: Mapping, rows: pd.DataFrame | None, reading: str) -> list[Member]:
    if rows is None:
        raise Missing("not run")
    rows = pooled(rows)
    full = scores(rows, {"policy": "full"})
    if len(full) < claims.MIN_ITEMS:
        raise Missing(f"{len(full)} items: an interval needs at least {claims.MIN_ITEMS}")
    if not estimate(full.to_frame("a"), "mean")[1] >= claims.MIN_CEILING:
        raise Missing("the full cache itself answers too few items")
    over = claim.get("over", {})
    axes = []
    for name in ("policy", "share", "window"):
        values = over.get(name, [None])
        axes.append([{name: v} if v is not None else {} for v in (sets[values] if isinstance(values, str) else values)])
    tasks = [(task, [task]) for task in over.get("task", [])] or [("", sets.get(over.get("pooled", ""), []))]
    found = []
    for parts in itertools.product(*axes):
        by = {name: value for part in parts for name, value in part.items()}
        columns = {}
        for side, given in claim["cells"].items():
            across = claim.get("across", {"": [None]})
            [(axis, values)] = across.items()
            for value in values:
                cell = {**by, **given, **({axis: value} if axis else {})}
                columns[f"{side}:{value}" if axis else side] = scores(rows, cell, reading)
        frame = pd.DataFrame(columns | {"full": full})
        for label, group in tasks:
            names = [by.get("policy"), label, f"{by['share']:.0%}" if "share" in by else "",
                     f"window {by['window']}" if "window" in by else ""]  # fmt: skip
            chosen = rows[rows.task.isin(group)].item.unique() if group else frame.index
            here = frame[frame.index.isin(chosen)].dropna()
            if here.empty:
                raise Missing(f"no item of {', '.join(group)}" if group else "no item has a value in every condition")
            found.append((", ".join(filter(None, names)) or "all", here))
    return found


def touches_reading(claim: Mapping, sets: Mapping) -> bool:
    """Whether a defensive method takes part."""
    over = claim.get("over", {}).get("policy", [])
    named = [cell.get("policy") for cell in claim.get("cells", {}).values()]
    return claim.get("study") == "quality" and bool(
        set(DEFENSIVE) & {*named, *(sets[over] if isinstance(over, str) else over)}
    )


def _lead_members(claim: Mapping, sets: Mapping, rows: pd.DataFrame | None, reading: str) -> list[tuple]:
    """Gain of a over b on one task less that on each other task of the set: different items, so Welch's interval."""
    here = {**claim, "contrast": "difference"}
    own = dict(_quality_members(here | {"over": claim["over"] | {"task": [claim["task"]]}}, sets, rows, reading))
    found = []
    for label, gain in own.items():
        policy = label.split(",")[0]
        for task in sets[claim["others"]]:
            over = {"policy": [policy], "task": [task]}
            try:
                [(_, other)] = _quality_members(here | {"over": over}, sets, rows, reading)
            except Missing:
                continue
            if task != claim["task"]:
                found.append((f"{policy}, over {task}", *welch(gain.a - gain.b, other.a - other.b)))
    if not found:
        raise Missing(f"no item of another task than {claim['task']}")
    return found


def welch(a: pd.Series, b: pd.Series) -> tuple[float, float, float, int]:
    """Difference of the means of two sets of items, 95% interval, and the smaller number of items; below six: nan."""
    n = min(len(a), len(b))
    value = float(a.mean() - b.mean())
    if n < claims.MIN_ITEMS:
        return value, np.nan, np.nan, n
    parts = [x.var(ddof=1) / len(x) for x in (a, b)]
    if not sum(parts):
        return value, value, value, n
    freedom = sum(parts) ** 2 / sum(v**2 / (len(x) - 1) for v, x in zip(parts, (a, b), strict=True))
    half = float(student.ppf(0.975, freedom) * np.sqrt(sum(parts)))
    return value, value - half, value + half, n


def members(
    claim: Mapping, sets: Mapping, rows: pd.DataFrame | None, r: Retained | None, reading: str, gpu: Path = GPU
) -> pd.DataFrame:
    """One row per member of a claim: member, value, low, high, n, p, state. No data raise `claims.Missing`."""
    if claim["study"] == "gpu":
        found = [(*one, 1) for one in TIMED[claim["contrast"]](gpu)]
    elif claim["contrast"] == "lead":
        found = _lead_members(claim, sets, rows, reading)
    elif claim["study"] == "retained":
        found = [(name, *estimate(f, claim["contrast"])) for name, f in _retained_members(claim, sets, r)]
    else:
        found = [(name, *estimate(f, claim["contrast"])) for name, f in _quality_members(claim, sets, rows, reading)]
    frame = pd.DataFrame(found, columns=["member", "value", "low", "high", "n"]).assign(p=np.nan)
    if (frame.n < claims.MIN_ITEMS).all() and claim["study"] != "gpu":
        raise Missing(f"{frame.n.max()} items: an interval needs at least {claims.MIN_ITEMS}")
    frame["state"] = [claims.judge(claim["rule"], m.value, m.low, m.high, None) for m in frame.itertuples()]
    return frame


# ---------------------------------------------------------------- cost, from what was timed on a GPU

TIMED_MODEL, FIFTH = "Llama-3.1-8B", 0.2
PLAIN, KEPT, ADA, DEFENSIVE_PLAIN = (
    "Hugging Face, sdpa, DynamicCache", "everything kept", "Ada-KV", "DefensiveKV, plain PyTorch",
)  # fmt: skip
SCORING_MEAN, SCORING_MAX = "attention mean mean", "attention max max"  # timings of the fused scoring kernel
Timed = tuple[str, float, float, float]  # member, value, low, high: from the fastest and slowest of the timings


def _timings(gpu: Path, file: str) -> pd.DataFrame:
    if not (gpu / file).is_file():
        raise Missing(f"no timings: {gpu / file} is missing")
    return pd.read_csv(gpu / file)


def _measured(gpu: Path, part: str, method: str, share: float, tokens: int | None = None) -> pd.DataFrame:
    """One method's timings of the model, shortest context and smallest batch first."""
    f = _timings(gpu, "models.csv")
    f = f[(f.part == part) & (f.model == TIMED_MODEL) & (f.method == method) & np.isclose(f["share"], share)]
    f = f if tokens is None else f[f.tokens == tokens]
    if f.empty:
        raise Missing(f"no timings of {part}, {method}, {share:.0%} kept in {gpu / 'models.csv'}")
    return f.sort_values(["tokens", "batch"])


def _ratio_of(label: str, top: Any, bottom: Any) -> Timed:
    return label, top.seconds / bottom.seconds, top.low / bottom.high, top.high / bottom.low


def scoring_ratio(gpu: Path) -> list[Timed]:
    """Scoring time, largest over mean, of one kernel at the longest context that has both; 20th, 80th percentiles."""
    table = _timings(gpu, "kernels.csv")
    table = table[(table.kernel == "window_scores") & table.variant.isin([SCORING_MEAN, SCORING_MAX])]
    wide = table.pivot_table(index="tokens", columns="variant", values=["p20_us", "p50_us", "p80_us"]).dropna()
    if wide.empty:
        raise Missing(f"no timings of {SCORING_MEAN} beside {SCORING_MAX} in {gpu / 'kernels.csv'}")
    row = wide.loc[wide.index.max()]
    middle = row["p50_us", SCORING_MAX] / row["p50_us", SCORING_MEAN]
    low, high = (row[a, SCORING_MAX] / row[b, SCORING_MEAN] for a, b in (("p20_us", "p80_us"), ("p80_us", "p20_us")))
    return [(f"{row.name} tokens", float(middle), float(low), float(high))]


def prefill_ratio(gpu: Path) -> list[Timed]:
    """Time to the first token, DefensiveKV over Ada-KV, at each context that has both."""
    ours, theirs = (_measured(gpu, "prefill", name, FIFTH).set_index("tokens") for name in (DEFENSIVE_PLAIN, ADA))
    return [_ratio_of(f"{n} tokens", ours.loc[n], theirs.loc[n]) for n in ours.index.intersection(theirs.index)]


def decode_ratio(gpu: Path) -> list[Timed]:
    """Time of a token, one request at the longest context: full cache over a fifth of it."""
    ours = _measured(gpu, "decode", "20% kept", FIFTH)
    ours = ours[ours.tokens == ours.tokens.max()].iloc[0]
    return [
        _ratio_of(label, _measured(gpu, "decode", name, 1.0, ours.tokens).iloc[0], ours)
        for label, name in (("transformers' full cache", PLAIN), ("this engine's full cache", KEPT))
    ]


def throughput_ratio(gpu: Path) -> list[Timed]:
    """Tokens per second at the largest batch that fits, longest context: a fifth over the full cache."""
    ours = _measured(gpu, "decode", "20% kept", FIFTH)
    ours = ours[ours.tokens == ours.tokens.max()].iloc[-1]
    found = []
    for label, name in (("transformers' full cache", PLAIN), ("this engine's full cache", KEPT)):
        full = _measured(gpu, "decode", name, 1.0, ours.tokens).iloc[-1]
        _, *ratios = _ratio_of(label, full, ours)
        found.append((label, *(ratio * ours.batch / full.batch for ratio in ratios)))
    return found


def peak_ratio(gpu: Path) -> list[Timed]:
    """Peak memory at the longest context, one request: a fifth over transformers' full cache."""
    found = []
    for label, part, method in (("prefill", "prefill", DEFENSIVE_PLAIN), ("decoding", "decode", "20% kept")):
        ours = _measured(gpu, part, method, FIFTH)
        ours = ours[ours.tokens == ours.tokens.max()].iloc[0]
        value = float(ours.peak_gib / _measured(gpu, part, PLAIN, 1.0, ours.tokens).iloc[0].peak_gib)
        found.append((label, value, value, value))
    return found


TIMED: dict[str, Callable[[Path], list[Timed]]] = {
    f.__name__: f for f in (scoring_ratio, prefill_ratio, decode_ratio, throughput_ratio, peak_ratio)
}


def costs(gpu: Path = GPU) -> pd.DataFrame:
    """What was timed for `TIMED_MODEL`, one request: seconds to the first token, ms per token, and peak memory, by
    method and context. Without timings: an empty frame."""
    try:
        f = _timings(gpu, "models.csv")
    except Missing:
        return pd.DataFrame()
    f = f[(f.model == TIMED_MODEL) & (f.batch == 1) & (f.tokens >= 32_000)]
    f = f.assign(
        time=np.where(f.part == "prefill", f.seconds, 1000 * f.seconds),
        what=np.where(f.part == "prefill", "first token, s", "next token, ms"),
        method=np.where(f.method == PLAIN, "transformers' full cache", f.method),
        kept=[f"{share:.0%}" for share in f["share"]],
    )
    rows = ["what", "method", "kept"]
    wide = f.drop_duplicates([*rows, "tokens"]).pivot_table(index=rows, columns="tokens", values=["time", "peak_gib"])
    wide = wide[["time", "peak_gib"]].round(2).rename_axis(columns=[None, None])
    return wide.rename(columns={"time": "time at tokens", "peak_gib": "peak GiB at tokens"})


def evaluate(
    rows: pd.DataFrame | None,
    r: Retained | None,
    *,
    model: str,
    profile: str,
    gpu: Path = GPU,
    book: Mapping | str = "fragility",
) -> pd.DataFrame:
    """Verdict of every claim, columns as in `claims.evaluate`; those about the defensive methods once per reading, and
    once without reading where none was run."""
    known = claims.load_claims(book) if isinstance(book, str) else book
    sets = known["sets"]
    run_in = (readings_of(rows) if rows is not None else []) or ["any"]
    table, states = [], {}
    for claim in known["claims"]:
        for reading in run_in if touches_reading(claim, sets) else ["any"]:
            try:
                found: pd.DataFrame | str = members(claim, sets, rows, r, reading, gpu)
            except Missing as missing:
                found = str(missing)
            known_states = {} if isinstance(found, str) else dict(zip(found.member, found.state, strict=True))
            states.setdefault(claim["id"], []).append(known_states)
            row = claims.claim_row(claim, found) | {"reading": reading}
            table.append(row | ({} if isinstance(found, str) else {"test": _test(claim, found)}))
    frame = pd.DataFrame(table).reindex(columns=claims.COLUMNS + claims.EXTRA).assign(model=model, profile=profile)
    return frame.assign(depends_on_reading=frame.claim.map({name: claims._depends(s) for name, s in states.items()}))


def _test(claim: Mapping, found: pd.DataFrame) -> str:
    if claim["study"] == "gpu":
        return "fastest to slowest timing" if claim["contrast"] != "scoring_ratio" else "p20 to p80 of timings"
    if claim["contrast"] == "lead":
        return "Welch over items"
    few = claim["contrast"] in ("mean", "difference") and found.n.max() < FEW
    return "Student's t over items" if few else "bootstrap over items"


# ---------------------------------------------------------------- tables


def _shown(value: tuple, digits: int = 2, scale: float = 1.0) -> str:
    point, low, high, n = value
    if np.isnan(point):
        return ""
    text = f"{point * scale:.{digits}f}"
    why = " (too few)" if n < claims.MIN_ITEMS else " (all alike)"
    return text + (why if np.isnan(low) else f" ({low * scale:.{digits}f} to {high * scale:.{digits}f})")


def table_1(r: Retained, column: str = "worst") -> pd.DataFrame:
    """The paper's table 1 beside ours: worst retained share by task, mean over items; and the worst of all items."""
    printed = claims.published("defensivekv_t01_worstcase.csv")
    rows = {}
    for dataset, task in TABLE_1.items():
        row: dict[tuple[str, str], object] = {("here", "task"): task.replace("_", " ")}
        for rule, title in (("mean", "Mean aggregation"), ("defensive", "Defensive aggregation")):
            row["paper", rule] = printed[(printed.task == dataset) & (printed.method == title)].value.iloc[0]
            values = per_item(r, column, rule).query("task == @task")[["value"]].rename(columns={"value": "a"})
            row["here", f"{rule}, mean over items"] = _shown(estimate(values, "mean"))
            row["here", f"{rule}, worst item"] = f"{values.a.min():.2f}" if len(values) else ""
        rows[dataset] = row
    frame = pd.DataFrame.from_dict(rows, orient="index")
    order = [("paper", "mean"), ("paper", "defensive"), ("here", "task")]
    frame = frame[[*order, *(c for c in frame.columns if c not in order)]]
    frame.columns = pd.MultiIndex.from_tuples(frame.columns)
    frame.index.name = "dataset"
    return frame


def retained_by(r: Retained, by: str, rules: Sequence[str] = ("single", "mean", "defensive")) -> pd.DataFrame:
    """Minimum, mean and number of steps below one half, means over answers with intervals, in the base setting.

    by: "layer" (long answers, a layer's heads together; the last row: all layers), "head" (long answers, query heads of
    the headline's layer) or "task" (that layer's heads together).
    """
    s = r.summary[(r.summary.setting == DEFAULT) & r.summary.rule.isin(rules)]
    if by != "task":
        s = s[s.task.isin(long_tasks(r))]
    s = s[(s.layer == r.layer) & (s["head"] >= 0)] if by == "head" else s[s["head"] == -1]
    s = s[s.layer == r.layer] if by == "task" else s
    s = s.assign(steps_below=s.below * s.steps)
    rows: dict[object, dict[tuple[str, str], str]] = {}
    for name in [*dict.fromkeys(s[by])] if by == "task" else sorted(set(s[by]), key=lambda n: (n < 0, n)):
        here = s[s[by] == name]
        row = {}
        for column, title, digits in (
            ("worst", "minimum", 2),
            ("mean", "mean", 2),
            ("steps_below", "steps below ½", 1),
        ):
            for rule in rules:
                values = here[here.rule == rule][[column]].set_axis(["a"], axis=1)
                row[title, rule] = _shown(estimate(values, "mean"), digits)
        row["steps", ""] = f"{here.steps.mean():.0f}"
        rows["all" if name == -1 else str(name).replace("_", " ")] = row
    frame = pd.DataFrame.from_dict(rows, orient="index")
    frame.columns = pd.MultiIndex.from_tuples(frame.columns)
    frame.index.name = by
    return frame


def headline(r: Retained, tasks: Sequence[str] | None = None) -> pd.DataFrame:
    """How the paper's headline moves: a row per setting and place, the worst step by mean and by defensive aggregation.

    Columns setting, where, mean, mean_low, mean_high, defensive, ..., difference, ..., and outliers_mean,
    outliers_defensive (share of steps under one half). Places vary in the default setting: the headline's layer, all
    layers together, the layer and the query head whose worst step is worst.
    """
    tasks = list(tasks or long_tasks(r))
    s = r.summary[r.summary.task.isin(tasks) & r.summary.rule.isin(["mean", "defensive"])]
    shared = s[(s.layer == r.layer) & (s["head"] == -1) & ~s.setting.str.startswith("#")]
    default = s[s.setting == DEFAULT]
    parts = [(name, "the headline's layer", f) for name, f in shared.groupby("setting", sort=False)]
    lowest = {
        "all layers together": default[default.layer == -1],
        "worst layer": _lowest(default[(default.layer >= 0) & (default["head"] == -1)]),
        "worst query head": _lowest(default[default["head"] >= 0]),
    }
    parts += [(DEFAULT, place, f) for place, f in lowest.items()]
    rows = []
    for setting, place, f in parts:
        wide = f.pivot_table(index="item", columns="rule", values=["worst", "below"])
        pair = wide["worst"].rename(columns={"mean": "b", "defensive": "a"})
        row = {"setting": setting, "where": place}
        for name, contrast, columns in (
            ("mean", "mean", {"b": "a"}),
            ("defensive", "mean", {"a": "a"}),
            ("difference", "difference", {"a": "a", "b": "b"}),
        ):
            value, low, high, _ = estimate(pair[list(columns)].rename(columns=columns), contrast)
            row |= {name: value, f"{name}_low": low, f"{name}_high": high}
        rows.append(row | {f"outliers_{rule}": wide["below"][rule].mean() for rule in ("mean", "defensive")})
    return pd.DataFrame(rows)


def _lowest(f: pd.DataFrame) -> pd.DataFrame:
    """Per item and rule the curve with the lowest worst step."""
    return f.loc[f.groupby(["item", "rule"]).worst.idxmin()]


def specification_table(r: Retained, base: Setting = retention.OURS) -> pd.DataFrame:
    """Every combination of open choices: the choices, mean, defensive, their difference with interval, ascending."""
    s = r.summary[r.summary.setting.str.startswith("#") & r.summary.task.isin(long_tasks(r))]
    settings = retention.specifications(base)
    rows = []
    for name, f in s[s.rule.isin(["mean", "defensive"])].groupby("setting"):
        wide = f.pivot_table(index="item", columns="rule", values="worst").rename(
            columns={"mean": "b", "defensive": "a"}
        )
        value, low, high, _ = estimate(wide, "difference", draws=2000)
        row = {"difference": value, "low": low, "high": high, "mean": wide.b.mean(), "defensive": wide.a.mean()}
        rows.append(vars(settings[int(str(name)[1:])]) | row)
    return pd.DataFrame(rows).sort_values("difference", ignore_index=True)


GROUPS = {
    "single_fact": "one document", "story": "one document", "needle": "needle", "two_hop": "two documents",
    "encyclopedia": "two documents", "summary": "summary", "list_all": "summary", "few_shot": "few-shot",
    "frequent_words": "counting", "passage_retrieval": "retrieval", "variable_tracking": "tracking",
    "needle_multikey": "multi-key needle", "needle_multivalue": "multi-value needle",
    "needle_multiquery": "multi-query needle",
}  # fmt: skip


def losses(rows: pd.DataFrame, share: float = MIDDLE, guard: float = 0.0) -> pd.DataFrame:
    """Loss of token F1 against the full cache in percent, per policy and reading, for each task and all: text with
    intervals where six items allow one."""
    rows = pooled(rows)
    full = scores(rows, {"policy": "full"})
    tasks = rows.drop_duplicates("item").set_index("item").task
    found: dict[tuple[str, str], dict[str, str]] = {}
    for policy, reading in policies_of(rows):
        try:
            pair = pd.DataFrame(
                {"a": scores(rows, {"policy": policy, "share": share, "guard": guard}, reading), "full": full}
            )
        except Missing:
            continue
        row = {"all": _shown(estimate(pair.dropna(), "loss"), 1, 100)}
        for task in tasks.unique():
            here = pair[pair.index.map(tasks) == task].dropna()
            row[GROUPS.get(task, task)] = _shown(estimate(here, "loss"), 0, 100)
        found[policy, reading] = row
    return pd.DataFrame.from_dict(found, orient="index")


def guarded(rows: pd.DataFrame, guard: float) -> pd.DataFrame:
    """The same table behind guards: per policy and reading, the loss in percent at each share that has both, bare and
    behind guards of `guard` of the budget at each end, on the same items."""
    rows = pooled(rows)
    full = scores(rows, {"policy": "full"})
    found: dict[tuple[str, str], dict[tuple[str, str], str]] = {}
    for policy, reading in policies_of(rows):
        row: dict[tuple[str, str], str] = {}
        for share in sorted(rows[np.isclose(rows.guard, guard) & (rows.guard > 0)]["share"].dropna().unique()):
            try:
                cells = {
                    name: scores(rows, {"policy": policy, "share": float(share), "guard": g}, reading)
                    for name, g in (("bare", 0.0), ("guarded", guard))
                }
            except Missing:
                continue
            pair = pd.DataFrame(cells | {"full": full}).dropna()
            for name in cells:
                row[f"{share:.0%}", name] = _shown(
                    estimate(pair[[name, "full"]].rename(columns={name: "a"}), "loss"), 0, 100
                )
        if row:
            found[policy, reading] = row
    frame = pd.DataFrame.from_dict(found, orient="index")
    if len(frame):
        frame.columns = pd.MultiIndex.from_tuples(frame.columns)
    return frame


def policies_of(rows: pd.DataFrame) -> list[tuple[str, str]]:
    """(policy, reading) of the main grid, in the book's order, a reader's own (named by file) last."""
    run_in = readings_of(rows)
    known = (*POLICIES, *sorted(p for p in set(rows.policy) if ":" in p))
    return [(p, one) for p in known if (rows.policy == p).any() for one in (run_in if p in DEFENSIVE else ["any"])]


def curve(
    rows: pd.DataFrame, policy: str, reading: str, contrast: str = "loss", tasks: Sequence[str] = ()
) -> pd.DataFrame:
    """share, value, low, high, n of a policy against the share kept; contrast "loss" (of full) or "mean" (token F1).

    Every point is about the same items: those that were run at all the shares.
    """
    here = rows[rows.task.isin(list(tasks))] if tasks else pooled(rows)
    columns = {}
    for share in sorted(here[here.policy == policy]["share"].dropna().unique()):
        try:
            columns[float(share)] = scores(here, {"policy": policy, "share": float(share)}, reading)
        except Missing:
            continue
    full = scores(here, {"policy": "full"})
    wide = pd.DataFrame(columns | {"full": full}).dropna()
    found = [(share, *estimate(wide[[share, "full"]].rename(columns={share: "a"}), contrast)) for share in columns]
    return pd.DataFrame(found, columns=["share", "value", "low", "high", "n"])


def compare(rows: pd.DataFrame, pairs: Mapping[str, tuple[Mapping, Mapping]], reading: str) -> pd.DataFrame:
    """label, value, low, high, n: paired difference in token F1 of two cells each; those not run are left out."""
    rows, found = pooled(rows), []
    for label, (a, b) in pairs.items():
        try:
            frame = pd.DataFrame({"a": scores(rows, a, reading), "b": scores(rows, b, reading)}).dropna()
        except Missing:
            continue
        found.append((label, *estimate(frame, "difference")))
    return pd.DataFrame(found, columns=["label", "value", "low", "high", "n"])


# ---------------------------------------------------------------- numbers for the prose


def _memory(rows: pd.DataFrame) -> dict[str, str]:
    """Bytes held at the answer's end as a share of the full cache's: two fifths in 4 bits, and a tenth alone."""
    found = {}
    for name, cell in (("four-bits", {"share": 0.4, "bits": 4}), ("a-tenth", {"share": 0.1})):
        text = "not run"
        for reading in readings_of(rows) if "bytes_held" in rows else ():
            try:
                held, full = (
                    scores(rows, {"policy": "defensive_kv"} | cell, reading, measure)
                    for measure in ("bytes_held", "bytes_full")
                )
            except Missing:
                continue
            text = f"{100 * (held / full).mean():.1f}%"
            break
        found[f"bytes-{name}"] = text
    return found


def _timed(gpu: Path) -> dict[str, str]:
    """What a kernel is worth: time to the first token in plain PyTorch over the kernel's, DropKV, shortest context."""
    try:
        plain, kernel = (_measured(gpu, "prefill", name, 0.05).iloc[0] for name in ("DropKV, plain PyTorch", "DropKV"))
        fastest = {one: _measured(gpu, "prefill", one, FIFTH).iloc[0] for one in (DEFENSIVE_PLAIN, ADA)}
    except Missing:
        return dict.fromkeys(("plain-dropkv", "seconds-defensive", "seconds-ada", "tokens-timed"), "not timed")
    return {
        "plain-dropkv": f"{plain.seconds / kernel.seconds:.2f}",
        "seconds-defensive": f"{fastest[DEFENSIVE_PLAIN].seconds:.2f} s",
        "seconds-ada": f"{fastest[ADA].seconds:.2f} s",
        "tokens-timed": f"{fastest[ADA].tokens:.0f}",
    }


def numbers(frame: pd.DataFrame, rows: pd.DataFrame, r: Retained, gpu: Path = GPU) -> dict[str, str]:
    """What the prose may quote: of each claim `<claim>-<reading>` and its verdict; sizes; the headline's range."""
    rows = pooled(rows)
    spec, head = specification_table(r), headline(r)
    default = head[(head.setting == DEFAULT) & (head["where"] == "the headline's layer")].iloc[0]
    s = r.summary[r.summary.task.isin(long_tasks(r)) & (r.summary["head"] == -1)]
    own = s[(s.setting == DEFAULT) & (s.layer == r.layer)]
    full = estimate(scores(rows, {"policy": "full"}).to_frame("a"), "mean")
    found = {
        "claims": str(frame.claim.nunique()),
        "decided-by-reading": str(frame[frame.depends_on_reading == "yes"].claim.nunique()),
        "items": str(rows["item"].nunique()),
        "items-at-all-shares": str(rows[rows.groupby("item")["share"].transform("nunique") > 1]["item"].nunique()),
        "tasks": ", ".join(task.replace("_", " ") for task in rows.task.unique()),
        "prompt-tokens": f"{rows.prompt_tokens.mean():.0f}",
        "long-answers": str(own["item"].nunique()),
        "steps": f"{own.steps.mean():.0f}",
        "steps-least": f"{own.steps.min():.0f}",
        "layer": str(r.layer),
        "ceiling": _shown(full),
        "worst-single": f"{own[own.rule == 'single'].worst.mean():.2f}",
        "worst-mean": f"{default['mean']:.2f}",
        "worst-defensive": f"{default.defensive:.2f}",
        "worst-max": f"{own[own.rule == 'max'].worst.mean():.2f}",
        "worst-true": f"{own[own.rule == 'true risk'].worst.mean():.2f}",
        "tied": f"{100 * own[own.rule == 'defensive'].tied.mean():.0f}%",
        "counted": f"{100 * own[own.rule == 'mean'].counted.mean():.0f}%",
        "specifications": str(len(spec)),
        "specifications-better": str(int((spec.low > 0).sum())),
        "specifications-worse": str(int((spec.high < 0).sum())),
        "difference-least": f"{spec.difference.min():+.2f}" if len(spec) else "no value",
        "difference-greatest": f"{spec.difference.max():+.2f}" if len(spec) else "no value",
    }
    for name in ("ties go to the oldest", "prior before the norm", "question and answer count", "algorithm 2"):
        here, key = head[head.setting == name], name.replace(" ", "-")  # none where it is the base already
        for rule in ("mean", "defensive"):
            found[f"{rule}-{key}"] = f"{(here.iloc[0] if len(here) else default)[rule]:.2f}"
    found |= _memory(rows) | _timed(gpu)
    for step in STEPS:
        pair = {
            step: (
                {"policy": "defensive_kv", "share": MIDDLE, "step": step},
                {"policy": "defensive_kv", "share": MIDDLE},
            )
        }
        gap = compare(rows, pair, "as_run")
        found[f"step-{step}"] = _shown(tuple(gap.iloc[0])[1:]) if len(gap) else "not run"
    for reading in READINGS:
        for claim in frame.claim.unique():
            row = next(frame[(frame.claim == claim) & frame.reading.isin([reading, "any"])].itertuples(), None)
            found[f"{claim}-{reading}"] = "no value" if row is None else claims.shown(row, with_unit=True) or "no value"
            found[f"{claim}-{reading}-verdict"] = "not run" if row is None else row.verdict
    return found
