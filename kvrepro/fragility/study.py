"""The chapter on DefensiveKV: retained importance over many answers, the grid of qualities, tables, verdicts, numbers.

Intervals are percentile bootstraps over items, paired; an item is one prompt with its answer.
"""

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from tqdm.auto import tqdm

from kvrepro import claims, data, engine, models, store
from kvrepro.claims import Missing
from kvrepro.condition import Condition
from kvrepro.data import Item
from kvrepro.errors import InputError
from kvrepro.fragility import retention
from kvrepro.fragility.retention import DEFAULT, Setting
from kvrepro.models import Loaded
from kvrepro.policy import find
from kvrepro.quantise import GROUP
from kvrepro.run import prompt_limit, run
from kvrepro.score.heads import EMBEDDED, gates

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
PLUG_IN = ("snapkv", "cake", "pyramid_kv", "ada_kv", "critical_ada_kv", "andpro", "dropkv")
GUARDED = ("snapkv", "ada_kv", "critical_ada_kv", *DEFENSIVE)
STEPS = {  # of the public code, each turned to what the paper describes: parameter -> value, and what that leaves out
    "mass": (0.0, "no first mass"),
    "share": ("none", "norm not shared"),
    "rescale": (False, "rows not rescaled"),
    "over": ("all", "window counted"),
}
OWN_PAPERS = ("snapkv", "cake", "ada_kv", "critical_kv", "critical_ada_kv")
WINDOWS = (16, 32, 64)
DUO = (("sinks", 16), ("recent", 32))  # an eighth of its own 128 and 256, as these prompts are an eighth of 8K
MIDDLE = 0.2  # the share of the extra studies, the paper's
READINGS = ("as_run", "as_described")
GPU = claims.DATA / "gpu" / "kernels.csv"
SCORING_MEAN, SCORING_MAX = "attention mean mean", "attention max max"  # timings of the fused scoring kernel


@dataclass(frozen=True)
class Size:
    """Items: of the quality grid, of its shares above a half, and per task of the retained share."""

    quality: int
    large: int
    long: int
    short: int


SIZES = {"quick": Size(30, 10, 6, 6), "full": Size(200, 50, 24, 24)}


def size(profile: str, n_items: int | None = None) -> Size:
    """The profile's size; `n_items` sets the quality grid's and caps the others."""
    if profile not in SIZES:
        raise InputError(f"unknown profile {profile!r}: choose {' or '.join(SIZES)}")
    s = SIZES[profile]
    return s if n_items is None else Size(n_items, min(n_items, s.large), min(n_items, s.long), min(n_items, s.short))


# ---------------------------------------------------------------- retained importance


@dataclass
class Retained:
    """summary, and the default setting's curves, as `retention.retained` returns them, with columns item and task."""

    curves: pd.DataFrame
    summary: pd.DataFrame
    layer: int  # at the depth of the paper's figure 1


def paper_layer(model: Any) -> int:
    """The layer at the depth of layer 14 of 32."""
    count = model.config.get_text_config().num_hidden_layers
    return round(14 / 31 * (count - 1))


def retained(
    loaded: Loaded,
    items: str,
    sizes: Size,
    *,
    tokens: int = 1900,
    max_new_tokens: int = 320,
    base: Setting = retention.OURS,
    seed: int = 0,
    results: str | Path = "data/results",
    chapter: str = "fragility",
    progress: bool = True,
) -> Retained:
    """Answers of the full cache and what half of it retains at their steps.

    items: "tinyworld..." takes its long tasks in every setting and the stand-ins of the paper's table 1 in the default;
    other items (see `data.load_items`) are all taken in every setting. An item that was done before, with the same
    model, settings and code, is read back.
    """
    if items == "tinyworld" or items.startswith("tinyworld:"):
        short = ",".join(name for name in TABLE_1.values() if name not in LONG)
        found = data.load_items(f"tinyworld:{','.join(LONG)}", sizes.long * len(LONG), seed, tokens)
        found += data.load_items(f"tinyworld:{short}", sizes.short * (len(TABLE_1) - 1), seed, tokens)
    else:
        found = data.load_items(items, sizes.long, seed, tokens)
    folder = data.ROOT / results / chapter / "retained"
    folder.mkdir(parents=True, exist_ok=True)
    layer = paper_layer(loaded.model)
    code = [store.engine_hash(), store.code_of(Path(retention.__file__).read_text())]
    files, prompts = {}, {}
    for item in found:
        prompts[item.id] = data.build_prompt(item, loaded.tokenizer, prompt_limit(loaded, [item], max_new_tokens))
        key = [loaded.hash, loaded.dtype, prompts[item.id].ids, max_new_tokens, vars(base), _wide(item), layer, code]
        files[item.id] = folder / store.digest(*key)
    todo = [item for item in found if not _stored(files[item.id], "summary").is_file()]
    asked = [Condition(regime="prefill")]
    answers = engine.generate(
        loaded.model, [prompts[item.id] for item in todo], asked, max_new_tokens=max_new_tokens,
        stop_ids=models.stop_ids(loaded),
    ) if todo else []  # fmt: skip
    for item, [answer] in tqdm(list(zip(todo, answers, strict=True)), desc="retained", disable=not progress):
        settings = retention.variants(base) if _wide(item) else {DEFAULT: base}
        more = retention.specifications(base) if _wide(item) else ()
        frames = retention.retained(
            loaded.model, prompts[item.id], answer.tokens, settings, more=more, more_layer=layer
        )
        for name, frame in zip(("curves", "summary"), frames, strict=True):
            kept = frame[frame.setting == DEFAULT] if name == "curves" else frame
            kept.to_parquet(_stored(files[item.id], name))
    parts = {
        name: [pd.read_parquet(_stored(files[i.id], name)).assign(item=i.id, task=i.task) for i in found]
        for name in ("curves", "summary")
    }
    return Retained(**{name: pd.concat(frames, ignore_index=True) for name, frames in parts.items()}, layer=layer)


def _stored(path: Path, name: str) -> Path:
    return path.with_name(f"{path.name}-{name}.parquet")


def _wide(item: Item) -> bool:
    return item.task in LONG or item.task not in TABLE_1.values()


def per_item(r: Retained, column: str, rule: str, *, setting: str = DEFAULT, layer: int | None = None) -> pd.DataFrame:
    """item, task, value of one rule's curves, a layer's heads together (layer None: the paper's depth; -1: all)."""
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
    switches += [("aggregate", aggregate)] if aggregate != "own" else []
    switches += DUO if policy == "duo_attention" else []
    switches += [(step, STEPS[step][0])] if step else []
    return Condition(
        policy, share=share, prefix=guard, suffix=guard, reading=reading, switches=tuple(switches), regime="prefill",
        until="question", bits=bits,
    )  # fmt: skip


def grid(
    shares: Sequence[float], policies: Sequence[str] = POLICIES, reading: str = "both", guard: float = 0.10
) -> list[Condition]:
    """The chapter's conditions for these shares; windows, plug-ins, guards and 4 bits where the paper has them.

    The defensive methods stand in the readings asked for, the others as the authors' fork runs them.
    """
    if isinstance(policies, str) or not shares or not all(isinstance(s, float) and 0 < s < 1 for s in shares):
        raise InputError(f"shares {shares!r} of {policies!r}: give lists, shares between 0 and 1")
    for one in policies:
        find(one)  # raises for what neither the catalogue nor a file has
    readings = READINGS if reading == "both" else (reading,)
    found = [Condition(regime="prefill", until="question")]

    def add(policy: str, share: float, **more: Any) -> None:
        if policy in policies:
            for one in readings if policy in DEFENSIVE else ("as_run",):
                found.append(condition(policy, share, reading=one, **more))

    for policy, share in itertools.product(policies, shares):
        add(policy, share)
    if MIDDLE in shares:
        for policy, window in itertools.product(DEFENSIVE, WINDOWS):
            add(policy, MIDDLE, window=window)
        for policy in GUARDED:
            add(policy, MIDDLE, guard=guard)
        if set(DEFENSIVE) & set(policies):
            found += [condition(one, MIDDLE, aggregate=how) for one in PLUG_IN for how in ("own", "defensive")]
        if "defensive_kv" in policies and "as_run" in readings:
            found += [condition("defensive_kv", MIDDLE, step=step) for step in STEPS]
    if 0.4 in shares:
        add("defensive_kv", 0.4, bits=4)
    return list(dict.fromkeys(found))


def own_papers(share: float = MIDDLE) -> list[Condition]:
    """The baselines as their own papers describe them, their windows and poolings included."""
    return [
        Condition(one, share=share, reading="as_described", regime="prefill", until="question") for one in OWN_PAPERS
    ]


def quality(
    loaded: Loaded,
    items: str,
    sizes: Size,
    *,
    shares: Sequence[float] = (0.1, 0.2, 0.4, 0.6, 0.8),
    policies: Sequence[str] = POLICIES,
    reading: str = "both",
    guard: float = 0.10,
    tokens: int = 1900,
    seed: int = 0,
    profile: str = "quick",
    **settings: Any,
) -> pd.DataFrame:
    """Rows of `run` over the grid, tidied (`tidy`). Shares above one half take fewer items; the full profile adds the
    baselines as their own papers describe them."""
    policies, four = _with_gates(loaded, policies), _packs(loaded)
    small, large = [s for s in shares if s <= 0.5], [s for s in shares if s > 0.5]
    given: dict[str, Any] = {"seed": seed, "profile": profile, "max_new_tokens": 64} | settings
    parts = []
    for name, some, count in (("main", small, sizes.quality), ("large", large, sizes.large)):
        if some:
            conditions = [c for c in grid(some, policies, reading, guard) if c.bits is None or four]
            conditions += own_papers() if profile == "full" and MIDDLE in some else []
            here = data.load_items(items, count, seed, tokens)
            parts.append(run("fragility", loaded, here, conditions, name=name, **given))
    return tidy(pd.concat(parts, ignore_index=True))


def _with_gates(loaded: Loaded, policies: Sequence[str]) -> list[str]:
    """Without DuoAttention, and saying so, where its gates were learned for another model."""
    shape = loaded.model.config.get_text_config()
    if "duo_attention" not in policies or gates(EMBEDDED).shape == (shape.num_hidden_layers, shape.num_key_value_heads):
        return list(policies)
    print(f"duo_attention is left out: {EMBEDDED} holds gates of another model; learn some with python -m kvrepro.duo")
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
    reading = rows.reading.where(rows.policy.isin(DEFENSIVE) | (rows.reading == "as_described"), "any")
    found = rows.assign(
        window=switches.map(lambda s: s.get("window", 0)),
        aggregate=switches.map(lambda s: s.get("aggregate", "own")),
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
    """Value, 95% interval and items of a contrast of columns (rows are items, resampled together); below six: nan."""
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
    low, high = np.nanpercentile(drawn, [2.5, 97.5], method="lower")
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
    full = scores(rows, {"policy": "full"})
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


def members(
    claim: Mapping, sets: Mapping, rows: pd.DataFrame | None, r: Retained | None, reading: str, gpu: Path = GPU
) -> pd.DataFrame:
    """One row per member of a claim: member, value, low, high, n, p, state. No data raise `claims.Missing`."""
    if claim["contrast"] == "none":
        raise Missing(claim["why"])
    if claim["study"] == "gpu":
        value, low, high, tokens = scoring_ratio(gpu)
        found = [(f"{tokens} tokens", value, low, high, 1)]
    elif claim["study"] == "retained":
        found = [(name, *estimate(f, claim["contrast"])) for name, f in _retained_members(claim, sets, r)]
    else:
        found = [(name, *estimate(f, claim["contrast"])) for name, f in _quality_members(claim, sets, rows, reading)]
    frame = pd.DataFrame(found, columns=["member", "value", "low", "high", "n"]).assign(p=np.nan)
    if (frame.n < claims.MIN_ITEMS).all() and claim["study"] != "gpu":
        raise Missing(f"{frame.n.max()} items: an interval needs at least {claims.MIN_ITEMS}")
    frame["state"] = [claims.judge(claim["rule"], m.value, m.low, m.high, None) for m in frame.itertuples()]
    return frame


def scoring_ratio(gpu: Path) -> tuple[float, float, float, int]:
    """Scoring time, largest over mean, from the timings of one kernel at the longest context that has both: value, and
    the least and greatest ratio of their 20th and 80th percentiles. No timings raise `claims.Missing`."""
    if not gpu.is_file():
        raise Missing(f"no timings: {gpu} is missing")
    table = pd.read_csv(gpu)
    table = table[(table.kernel == "window_scores") & table.variant.isin([SCORING_MEAN, SCORING_MAX])]
    wide = table.pivot_table(index="tokens", columns="variant", values=["p20_us", "p50_us", "p80_us"]).dropna()
    if wide.empty:
        raise Missing(f"no timings of {SCORING_MEAN} beside {SCORING_MAX} in {gpu}")
    row = wide.loc[wide.index.max()]
    middle = row["p50_us", SCORING_MAX] / row["p50_us", SCORING_MEAN]
    low, high = (row[a, SCORING_MAX] / row[b, SCORING_MEAN] for a, b in (("p20_us", "p80_us"), ("p80_us", "p20_us")))
    return float(middle), float(low), float(high), int(row.name)


def evaluate(
    rows: pd.DataFrame | None,
    r: Retained | None,
    *,
    model: str,
    profile: str,
    gpu: Path = GPU,
    book: Mapping | str = "fragility",
) -> pd.DataFrame:
    """Verdict of every claim, columns as in `claims.evaluate`; those about the defensive methods once per reading."""
    known = claims.load_claims(book) if isinstance(book, str) else book
    sets = known["sets"]
    run_in = readings_of(rows) if rows is not None else []
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
            test = "p20 to p80 of timings" if claim["study"] == "gpu" else "bootstrap over items"
            table.append(row | ({} if isinstance(found, str) else {"test": test}))
    frame = pd.DataFrame(table).reindex(columns=claims.COLUMNS + claims.EXTRA).assign(model=model, profile=profile)
    return frame.assign(depends_on_reading=frame.claim.map({name: claims._depends(s) for name, s in states.items()}))


# ---------------------------------------------------------------- tables


def _shown(value: tuple, digits: int = 2, scale: float = 1.0) -> str:
    point, low, high, _ = value
    if np.isnan(point):
        return ""
    text = f"{point * scale:.{digits}f}"
    return text + (" (too few)" if np.isnan(low) else f" ({low * scale:.{digits}f} to {high * scale:.{digits}f})")


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


def headline(r: Retained, tasks: Sequence[str] | None = None) -> pd.DataFrame:
    """How the paper's headline moves: a row per setting and place, the worst step by mean and by defensive aggregation.

    Columns setting, where, mean, mean_low, mean_high, defensive, ..., difference, ..., and outliers_mean,
    outliers_defensive (share of steps under one half). Places vary in the default setting: the paper's depth, all
    layers together, the layer and the query head whose worst step is worst.
    """
    tasks = list(tasks or long_tasks(r))
    s = r.summary[r.summary.task.isin(tasks) & r.summary.rule.isin(["mean", "defensive"])]
    shared = s[(s.layer == r.layer) & (s["head"] == -1) & ~s.setting.str.startswith("#")]
    default = s[s.setting == DEFAULT]
    parts = [(name, "the paper's depth", f) for name, f in shared.groupby("setting", sort=False)]
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


def policies_of(rows: pd.DataFrame) -> list[tuple[str, str]]:
    """(policy, reading) of the main grid, in the book's order, a reader's own (named by file) last."""
    run_in = readings_of(rows)
    known = (*POLICIES, *sorted(p for p in set(rows.policy) if ":" in p))
    return [(p, one) for p in known if (rows.policy == p).any() for one in (run_in if p in DEFENSIVE else ["any"])]


def curve(
    rows: pd.DataFrame, policy: str, reading: str, contrast: str = "loss", tasks: Sequence[str] = ()
) -> pd.DataFrame:
    """share, value, low, high, n of a policy against the share kept; contrast "loss" (of full) or "mean" (token F1)."""
    here = rows[rows.task.isin(list(tasks))] if tasks else rows
    found = []
    for share in sorted(here[here.policy == policy].share.dropna().unique()):
        try:
            pair = pd.DataFrame(
                {
                    "a": scores(here, {"policy": policy, "share": float(share)}, reading),
                    "full": scores(here, {"policy": "full"}),
                }
            ).dropna()
        except Missing:
            continue
        found.append((float(share), *estimate(pair, contrast)))
    return pd.DataFrame(found, columns=["share", "value", "low", "high", "n"])


def compare(rows: pd.DataFrame, pairs: Mapping[str, tuple[Mapping, Mapping]], reading: str) -> pd.DataFrame:
    """label, value, low, high, n: paired difference in token F1 of two cells each; those not run are left out."""
    found = []
    for label, (a, b) in pairs.items():
        try:
            frame = pd.DataFrame({"a": scores(rows, a, reading), "b": scores(rows, b, reading)}).dropna()
        except Missing:
            continue
        found.append((label, *estimate(frame, "difference")))
    return pd.DataFrame(found, columns=["label", "value", "low", "high", "n"])


# ---------------------------------------------------------------- numbers for the prose


def numbers(frame: pd.DataFrame, rows: pd.DataFrame, r: Retained) -> dict[str, str]:
    """What the prose may quote: of each claim `<claim>-<reading>` and its verdict; sizes; the headline's range."""
    spec, head = specification_table(r), headline(r)
    default = head[(head.setting == DEFAULT) & (head["where"] == "the paper's depth")].iloc[0]
    s = r.summary[r.summary.task.isin(long_tasks(r)) & (r.summary["head"] == -1)]
    own = s[(s.setting == DEFAULT) & (s.layer == r.layer)]
    full = estimate(scores(rows, {"policy": "full"}).to_frame("a"), "mean")
    found = {
        "claims": str(frame.claim.nunique()),
        "decided-by-reading": str(frame[frame.depends_on_reading == "yes"].claim.nunique()),
        "items": str(rows["item"].nunique()),
        "prompt-tokens": f"{rows.prompt_tokens.mean():.0f}",
        "long-answers": str(own["item"].nunique()),
        "steps": f"{own.steps.mean():.0f}",
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
        here = head[head.setting == name]
        if len(here):
            key = name.replace(" ", "-")
            found[f"mean-{key}"], found[f"defensive-{key}"] = (f"{here[c].iloc[0]:.2f}" for c in ("mean", "defensive"))
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
