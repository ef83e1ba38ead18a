"""What the claims about DefensiveKV are tested on: shares and scores by item, and timings of a GPU."""

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from kvrepro.chapters.fragility.study import DEFENSIVE, Retained, per_item, pooled, readings_of, scores
from kvrepro.experiment import claims, judge
from kvrepro.experiment.judge import Measured, Member, NotTestable, Sample, Unpaired
from kvrepro.experiment.stats import UNIT
from kvrepro.paths import DATA

WITH_FULL = ("loss", "loss_ratio", "spread")  # contrasts that need the full cache's scores


# ---------------------------------------------------------------- shares that were retained, and answers


def _of_retained(claim: Mapping, sets: Mapping, r: Retained | None) -> list[Member]:
    if r is None:
        raise NotTestable("not run")
    over, tasks = claim["over"], set(r.summary.task)

    def named(name: str) -> list[str]:
        return [task for task in sets[name] if task in tasks] or sorted(tasks)

    layers = sorted(set(r.summary.layer) - {-1}) if "layer" in over else [r.layer]
    groups = [(task, [task]) for task in named(over["task"])] if "task" in over else [("", named(over["pooled"]))]
    steps = r.summary.drop_duplicates("item").set_index("item").steps
    counted: dict[str, Any] = {"bounds": UNIT} if claim["column"] == "below" else {"bounds": None}
    found = []
    for layer, (label, group) in itertools.product(layers, groups):
        parts = {}
        for side, cell in claim["cells"].items():
            values = per_item(r, claim["column"], cell["rule"], layer=layer)
            parts[side] = values[values.task.isin(group)].set_index("item").value
        frame = pd.DataFrame(parts)
        each = float(steps[frame.index].mean()) if len(frame) else 1.0
        found.append(Member(label or f"layer {layer}", Sample(frame, claim["contrast"], each=each, **counted)))
    return found


def _cells(claim: Mapping, sets: Mapping) -> list[dict]:
    """What a claim's members vary: policy, share, window."""
    axes = []
    for name in ("policy", "share", "window"):
        values = claim.get("over", {}).get(name, [None])
        axes.append([{name: v} if v is not None else {} for v in (sets[values] if isinstance(values, str) else values)])
    return [{name: value for part in parts for name, value in part.items()} for parts in itertools.product(*axes)]


def _answered(claim: Mapping, by: Mapping, rows: pd.DataFrame, reading: str) -> pd.DataFrame:
    """Items by column: a, b, full as the contrast needs them; of a spread the values of what it runs across."""
    columns = {}
    [(axis, values)] = claim.get("across", {"": [None]}).items()
    for (side, given), value in itertools.product(claim["cells"].items(), values):
        cell = {**by, **given, **({axis: value} if axis else {})}
        columns[f"{axis} {value}" if axis else side] = scores(rows, cell, reading)
    if claim["contrast"] in WITH_FULL:
        columns["full"] = scores(rows, {"policy": "full"})
    return pd.DataFrame(columns)


def _of_quality(claim: Mapping, sets: Mapping, rows: pd.DataFrame | None, reading: str) -> list[Member | NotTestable]:
    if rows is None:
        raise NotTestable("not run")
    rows, over = pooled(rows), claim.get("over", {})
    full = rows[rows.policy == "full"].drop_duplicates("item")
    judge.answers_enough(full.token_f1, full.get("error"))
    tasks = [(task, [task]) for task in over.get("task", [])] or [("", sets.get(over.get("pooled", ""), []))]
    found: list[Member | NotTestable] = []
    for by, (task, group) in itertools.product(_cells(claim, sets), tasks):
        names = [by.get("policy"), task, f"{by['share']:.0%}" if "share" in by else "",
                 f"window {by['window']}" if "window" in by else ""]  # fmt: skip
        label = ", ".join(filter(None, names)) or "all"
        try:
            frame = _answered(claim, by, rows, reading)
            if group:
                frame = frame[frame.index.isin(rows[rows.task.isin(group)].item)]
            if frame.dropna().empty:
                raise NotTestable(f"no item of {', '.join(group) or 'any task'} has a value in every condition")
            if claim["contrast"] == "spread":
                found.append(judge.pairs(frame.drop(columns="full"), label, ceiling=frame.full))
            else:
                found.append(Member(label, Sample(frame, claim["contrast"])))
        except NotTestable as reason:
            found.append(reason)
    return found


def _leads(claim: Mapping, sets: Mapping, rows: pd.DataFrame | None, reading: str) -> list[Member | NotTestable]:
    """Gain of a over b on one task less that on each other task of the set: different items, so unpaired."""
    found: list[Member | NotTestable] = []
    here = {**claim, "contrast": "difference"}
    for by in _cells(claim, sets):
        gains = {}
        for task in sets[claim["others"]]:
            [one] = _of_quality(here | {"over": {"policy": [by["policy"]], "task": [task]}}, sets, rows, reading)
            if isinstance(one, Member) and isinstance(one.what, Sample):
                gains[task] = one.what.data.a - one.what.data.b
        own = gains.pop(claim["task"], None)
        if own is None or not gains:
            raise NotTestable(f"items of {claim['task']} and of another task are needed")
        found += [Member(f"{by['policy']}, over {task}", Unpaired(own, gain)) for task, gain in gains.items()]
    return found


def members(
    claim: Mapping, sets: Mapping, rows: pd.DataFrame | None, r: Retained | None, reading: str, gpu: Path | None = None
) -> list[Member | NotTestable]:
    """What a claim is tested on in one reading. rows: of `study.quality`; r: of `study.retained`."""
    if claim["study"] == "gpu":
        return [Member(label, Measured(*values)) for label, *values in TIMED[claim["contrast"]](gpu or GPU)]
    if claim["contrast"] == "lead":
        return _leads(claim, sets, rows, reading)
    if claim["study"] == "retained":
        return list(_of_retained(claim, sets, r))
    return _of_quality(claim, sets, rows, reading)


def touches_reading(claim: Mapping, sets: Mapping) -> bool:
    """Whether a defensive method takes part."""
    over = claim.get("over", {}).get("policy", [])
    named = [cell.get("policy") for cell in claim.get("cells", {}).values()]
    return claim.get("study") == "quality" and bool(
        set(DEFENSIVE) & {*named, *(sets[over] if isinstance(over, str) else over)}
    )


def evaluate(
    rows: pd.DataFrame | None, r: Retained | None, *, model: str, profile: str, gpu: Path | None = None
) -> pd.DataFrame:
    """Verdict of every claim (`judge.verdicts`); those about the defensive methods once per reading, and once without
    reading where none was run."""
    book = claims.load_claims("fragility")
    run_in = (readings_of(rows) if rows is not None else []) or ["any"]
    frame = judge.verdicts(
        book["claims"],
        lambda claim, reading: members(claim, book["sets"], rows, r, reading, gpu),
        lambda claim: run_in if touches_reading(claim, book["sets"]) else ["any"],
        model=model, profile=profile,
    )  # fmt: skip
    gpus = [claim for claim in book["claims"] if claim["study"] == "gpu"]
    timed = {claim["id"]: RANGES.get(claim["contrast"], RANGES[""]) for claim in gpus}
    return frame.assign(test=frame.claim.map(timed).where(frame.test != "none").fillna(frame.test))


# ---------------------------------------------------------------- cost, from what was timed on a GPU

TIMED_MODEL, FIFTH = "Llama-3.1-8B", 0.2
PLAIN, KEPT, ADA, DEFENSIVE_PLAIN = (
    "Hugging Face, sdpa, DynamicCache", "everything kept", "Ada-KV", "DefensiveKV, plain PyTorch",
)  # fmt: skip
SCORING_MEAN, SCORING_MAX = "attention mean mean", "attention max max"  # timings of the fused scoring kernel
Timed = tuple[str, float, float, float]  # member, value, low, high: from the fastest and slowest of the timings
GPU = DATA / "gpu"


def _timings(gpu: Path, file: str) -> pd.DataFrame:
    if not (gpu / file).is_file():
        raise NotTestable(f"no timings: {gpu / file} is missing")
    return pd.read_csv(gpu / file)


def _measured(gpu: Path, part: str, method: str, share: float, tokens: int | None = None) -> pd.DataFrame:
    """One method's timings of the model, shortest context and smallest batch first."""
    f = _timings(gpu, "models.csv")
    f = f[(f.part == part) & (f.model == TIMED_MODEL) & (f.method == method) & np.isclose(f["share"], share)]
    f = f if tokens is None else f[f.tokens == tokens]
    if f.empty:
        raise NotTestable(f"no timings of {part}, {method}, {share:.0%} kept in {gpu / 'models.csv'}")
    return f.sort_values(["tokens", "batch"])


def _ratio_of(label: str, top: Any, bottom: Any) -> Timed:
    return label, top.seconds / bottom.seconds, top.low / bottom.high, top.high / bottom.low


def scoring_ratio(gpu: Path) -> list[Timed]:
    """Scoring time, largest over mean, of one kernel at the longest context that has both; 20th, 80th percentiles."""
    table = _timings(gpu, "kernels.csv")
    table = table[(table.kernel == "window_scores") & table.variant.isin([SCORING_MEAN, SCORING_MAX])]
    wide = table.pivot_table(index="tokens", columns="variant", values=["p20_us", "p50_us", "p80_us"]).dropna()
    if wide.empty:
        raise NotTestable(f"no timings of {SCORING_MEAN} beside {SCORING_MAX} in {gpu / 'kernels.csv'}")
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


RANGES = {"": "fastest to slowest timing", "scoring_ratio": "p20 to p80 of timings"}


def costs(gpu: Path = GPU) -> pd.DataFrame:
    """What was timed for `TIMED_MODEL`, one request: seconds to the first token, ms per token, and peak memory, by
    method and context. Without timings: an empty frame."""
    try:
        f = _timings(gpu, "models.csv")
    except NotTestable:
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
