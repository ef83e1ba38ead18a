"""What the claims about DefensiveKV are tested on: shares and scores by item, and timings of a GPU."""

import contextlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from kvrepro.chapters.fragility.retention import DEFAULT
from kvrepro.chapters.fragility.study import DEFENSIVE, Retained, has_window, pooled, readings_of, scores
from kvrepro.engine.policy import find, is_own
from kvrepro.experiment import claims, judge, measure
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
    base = r.summary[(r.summary.setting == DEFAULT) & (r.summary["head"] == -1)]
    found = []
    for layer, (label, group) in itertools.product(layers, groups):
        here = base[(base.layer == layer) & base.task.isin(group)]
        parts = {side: here[here.rule == cell["rule"]].set_index("item") for side, cell in claim["cells"].items()}
        frame = pd.DataFrame({side: part[claim["column"]] for side, part in parts.items()})
        each = float(parts["a"].steps.mean()) if len(frame) else 1.0
        bounds = UNIT if claim["column"] == "below" else None
        found.append(Member(label or f"layer {layer}", Sample(frame, claim["contrast"], each=each, bounds=bounds)))
    return found


def _cells(claim: Mapping, sets: Mapping) -> list[dict]:
    """What a claim's members vary: policy, share, window."""
    over = {name: values for name, values in claim.get("over", {}).items() if name in ("policy", "share", "window")}
    lists = [sets[values] if isinstance(values, str) else values for values in over.values()]
    return [dict(zip(over, values, strict=True)) for values in itertools.product(*lists)]


def _named(policy: str) -> str:
    """In the claims table: a reader's own by its title, not by its file."""
    return find(policy).title if is_own(policy) else policy


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
    judge.answers_enough(measure.scores(full), full.get("error"))
    tasks = [(task, [task]) for task in over.get("task", [])] or [("", sets.get(over.get("pooled", ""), []))]
    found: list[Member | NotTestable] = []
    for by, (task, group) in itertools.product(_cells(claim, sets), tasks):
        share, window = (f"{by['share']:.0%}" if "share" in by else ""), by.get("window", "")
        names = [_named(by.get("policy", "")), task, share, window and f"window {window}"]
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
        found += [Member(f"{_named(by['policy'])}, over {task}", Unpaired(own, gain)) for task, gain in gains.items()]
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


LISTED = ("C10b",)  # claims about all methods with a window, which list those that they were written for


def of_own(book: Mapping, own: Sequence[str]) -> list[dict[str, Any]]:
    """Claims about policies in general, asked of a reader's own; those about windows of the policies that have one."""
    general = claims.of_own(book, own)
    listed = [c | {"over": {"policy": "defensive"}} for c in book["claims"] if c["id"] in LISTED]
    general += claims.of_own({"claims": listed}, own)
    needs_window = {c["id"] for c in book["claims"] if "window" in c.get("over", {}) or "across" in c} | set(LISTED)
    found = []
    for claim in general:
        name, [policy] = claim["id"].split(" ")[0], claim["over"]["policy"]
        if has_window(policy) or name not in needs_window:
            found.append(claim | {"statement": f"Asked of {_named(policy)}: {claim['statement']}"})
    return found


def evaluate(
    rows: pd.DataFrame | None, r: Retained | None, *, model: str, profile: str, gpu: Path | None = None
) -> pd.DataFrame:
    """Verdict of every claim (`judge.verdicts`); those about the defensive methods once per reading, and once without
    reading where none was run. Claims about policies in general are also asked of a reader's own."""
    book = claims.load_claims("fragility")
    run_in = (readings_of(rows) if rows is not None else []) or ["any"]
    own = [] if rows is None else [str(policy) for policy in rows.policy.unique() if is_own(policy)]
    frame = judge.verdicts(
        [*book["claims"], *of_own(book, own)],
        lambda claim, reading: members(claim, book["sets"], rows, r, reading, gpu),
        lambda claim: run_in if touches_reading(claim, book["sets"]) else ["any"],
        model=model, profile=profile,
    )  # fmt: skip
    ranges = {"scoring_ratio": "p20 to p80 of timings"}
    timed = {
        c["id"]: ranges.get(c["contrast"], "fastest to slowest timing") for c in book["claims"] if c["study"] == "gpu"
    }
    return claims.timed(frame, timed)


# ---------------------------------------------------------------- cost, from what was timed on a GPU

TIMED_MODEL, FIFTH = "Llama-3.1-8B", 0.2
PLAIN, KEPT, ADA, DEFENSIVE_PLAIN = (
    "Hugging Face, sdpa, DynamicCache", "everything kept", "Ada-KV", "DefensiveKV, plain PyTorch",
)  # fmt: skip
FULL = {"transformers' full cache": PLAIN, "this engine's full cache": KEPT}
SCORING_MEAN, SCORING_MAX = "attention mean mean", "attention max max"  # timings of the fused scoring kernel
Timed = tuple[str, float, float, float]  # member, value, low, high: from the fastest and slowest of the timings
GPU = DATA / "gpu"


def _timings(gpu: Path, file: str) -> pd.DataFrame:
    if not (gpu / file).is_file():
        raise NotTestable(f"no timings: {gpu / file} is missing")
    return pd.read_csv(gpu / file)


def _measured(gpu: Path, part: str, method: str, share: float, tokens: int | None = None) -> pd.DataFrame:
    """One method's timings of the model at so many tokens, or at its longest context; smallest batch first."""
    f = _timings(gpu, "models.csv")
    f = f[(f.part == part) & (f.model == TIMED_MODEL) & (f.method == method) & np.isclose(f["share"], share)]
    f = f[f.tokens == (f.tokens.max() if tokens is None else tokens)]
    if f.empty:
        raise NotTestable(f"no timings of {part}, {method}, {share:.0%} kept in {gpu / 'models.csv'}")
    return f.sort_values("batch")


def _ratio_of(label: str, top: Any, bottom: Any) -> Timed:
    return label, top.seconds / bottom.seconds, top.low / bottom.high, top.high / bottom.low


def scoring_ratio(gpu: Path) -> list[Timed]:
    """Scoring time, largest over mean, of one kernel at the longest context that has both; 20th, 80th percentiles."""
    table = _timings(gpu, "kernels.csv").query("kernel == 'window_scores'")
    table = table.rename(columns={"p20_us": "low", "p50_us": "seconds", "p80_us": "high"})
    table = table.groupby(["variant", "tokens"])[["low", "seconds", "high"]].mean().reset_index("tokens")
    mean, largest = (table[table.index == name].set_index("tokens") for name in (SCORING_MEAN, SCORING_MAX))
    both = mean.index.intersection(largest.index)
    if both.empty:
        raise NotTestable(f"no timings of {SCORING_MEAN} beside {SCORING_MAX} in {gpu / 'kernels.csv'}")
    return [_ratio_of(f"{both.max()} tokens", largest.loc[both.max()], mean.loc[both.max()])]


def prefill_ratio(gpu: Path) -> list[Timed]:
    """Time to the first token, DefensiveKV over Ada-KV, at each context that has both."""
    found = []
    for tokens in sorted(set(_timings(gpu, "models.csv").tokens)):
        with contextlib.suppress(NotTestable):
            parts = (_measured(gpu, "prefill", name, FIFTH, tokens).iloc[0] for name in (DEFENSIVE_PLAIN, ADA))
            found.append(_ratio_of(f"{tokens} tokens", *parts))
    return found


def decode_ratio(gpu: Path, batch: int = 0) -> list[Timed]:
    """Time of a token at the longest context, full cache over a fifth of it: of the smallest batch (-1: largest)."""
    ours = _measured(gpu, "decode", "20% kept", FIFTH).iloc[batch]
    theirs = {label: _measured(gpu, "decode", name, 1.0, ours.tokens).iloc[batch] for label, name in FULL.items()}
    columns = ["seconds", "low", "high"]
    return [_ratio_of(label, full[columns] / full.batch, ours[columns] / ours.batch) for label, full in theirs.items()]


def throughput_ratio(gpu: Path) -> list[Timed]:
    """Tokens per second at the largest batch that fits, longest context: a fifth over the full cache."""
    return decode_ratio(gpu, -1)


def peak_ratio(gpu: Path) -> list[Timed]:
    """Peak memory at the longest context, one request: a fifth over transformers' full cache."""
    found = []
    for label, part, method in (("prefill", "prefill", DEFENSIVE_PLAIN), ("decoding", "decode", "20% kept")):
        ours = _measured(gpu, part, method, FIFTH).iloc[0]
        value = float(ours.peak_gib / _measured(gpu, part, PLAIN, 1.0, ours.tokens).iloc[0].peak_gib)
        found.append((label, value, value, value))
    return found


TIMED: dict[str, Callable[[Path], list[Timed]]] = {
    f.__name__: f for f in (scoring_ratio, prefill_ratio, decode_ratio, throughput_ratio, peak_ratio)
}


def costs(gpu: Path = GPU) -> pd.DataFrame:
    """What was timed for `TIMED_MODEL`, one request: what, method, tokens, seconds, and value, low, high: the time, or
    the peak memory, over that of transformers' full cache."""
    f = _timings(gpu, "models.csv").drop_duplicates(["part", "model", "method", "share", "tokens", "batch"])
    f = f[(f.model == TIMED_MODEL) & (f.batch == 1) & (f.tokens >= 32_000)]
    f = f.merge(f[f.method == PLAIN], on=["part", "tokens"], suffixes=("", "_full")).query("method != @PLAIN")
    what = f.part.map({"prefill": "time to the first token", "decode": "time of a further token"})
    ends = {"value": f.seconds, "low": f.low, "high": f.high}
    time = f.assign(what=what, **{name: column / f.seconds_full for name, column in ends.items()})
    memory = f.assign(what="peak memory", value=f.peak_gib / f.peak_gib_full, low=np.nan, high=np.nan)
    return pd.concat([time, memory])[["what", "method", "tokens", "seconds", "value", "low", "high"]]
