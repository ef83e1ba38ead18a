"""What the claims about DefensiveKV are tested on: shares and scores by item, and timings on a GPU."""

import itertools
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from kvrepro.chapters.fragility.retention import DEFAULT, TOKEN, theorems
from kvrepro.chapters.fragility.study import DEFENSIVE, Retained, has_window, readings_of, scores, without_needles
from kvrepro.engine.policy import find, is_own
from kvrepro.experiment import claims, history, judge, measure
from kvrepro.experiment.claims import KEPT, PLAIN
from kvrepro.experiment.judge import Facts, Measured, Member, NotTestable, Sample, Unpaired
from kvrepro.experiment.stats import ANY, UNIT
from kvrepro.paths import GPU

SHARES = {"mean": UNIT, "difference": (-1.0, 1.0)}  # least and greatest possible contrast of shares
WITH_FULL = ("loss", "loss_ratio", "spread", "difference_of_ceiling")  # contrasts that need the full cache's scores


# ---------------------------------------------------------------- shares that were retained, and answers


def _of_retained(claim: Mapping, sets: Mapping, r: Retained | None) -> list[Member]:
    if r is None:
        raise NotTestable("not run")
    over, tasks = claim["over"], set(r.summary.task)

    def run_tasks(name: str) -> list[str]:
        return [task for task in sets[name] if task in tasks] or sorted(tasks)

    layers = sorted(set(r.summary.layer) - {-1}) if "layer" in over else [r.layer]
    groups = [("", run_tasks(over["pooled"]))] if "task" not in over else [(t, [t]) for t in run_tasks(over["task"])]
    base, asked = r.summary[r.summary["head"] == -1], [TOKEN] if "token" in over else over.get("setting", [DEFAULT])
    settings = [name for name in base.setting.unique() if name.startswith(tuple(asked))]
    tested = []
    for setting, layer, (label, group) in itertools.product(settings, layers, groups):
        rows = base[(base.setting == setting) & (base.layer == layer) & base.task.isin(group)]
        sides = {side: rows[rows.rule == cell["rule"]].set_index("item") for side, cell in claim["cells"].items()}
        frame = pd.DataFrame({side: part[claim["column"]] for side, part in sides.items()})
        steps = float(sides["a"].steps.mean()) if len(frame) else 1.0
        bounds = UNIT if claim["column"] == "below" else None
        label = ", ".join(filter(None, ["" if setting == DEFAULT else setting, label])) or f"layer {layer}"
        limits = SHARES.get(claim["contrast"], ANY)
        tested.append(Member(label, Sample(frame, claim["contrast"], each=steps, bounds=bounds, limits=limits)))
    if not tested:
        raise NotTestable(claim.get("needs", "not run"))
    return tested


def _cells(claim: Mapping, sets: Mapping) -> list[dict]:
    """Policy, share and window of each member, as far as the claim varies them."""
    over = {name: values for name, values in claim.get("over", {}).items() if name in ("policy", "share", "window")}
    lists = [sets[values] if isinstance(values, str) else values for values in over.values()]
    return [dict(zip(over, values, strict=True)) for values in itertools.product(*lists)]


def _title(policy: str) -> str:
    """The policy's name in the claims table: its title if it is the reader's own, whose name is a file."""
    return find(policy).title if is_own(policy) else policy


def _answered(claim: Mapping, varied: Mapping, rows: pd.DataFrame, reading: str) -> pd.DataFrame:
    """Scores by item, in the columns that the contrast needs: a, b, full; for a spread one per value of its axis."""
    columns = {}
    [(axis, values)] = claim.get("across", {"": [None]}).items()
    for (side, of_side), value in itertools.product(claim["cells"].items(), values):
        cell = {**varied, **of_side, **({axis: value} if axis else {})}
        columns[f"{axis} {value}" if axis else side] = scores(rows, cell, reading)
    if claim["contrast"] in WITH_FULL:
        columns["full"] = scores(rows, {"policy": "full"})
    return pd.DataFrame(columns)


def _of_quality(claim: Mapping, sets: Mapping, rows: pd.DataFrame | None, reading: str) -> list[Member | NotTestable]:
    if rows is None:
        raise NotTestable("not run")
    rows, over = rows if claim.get("needles") else without_needles(rows), claim.get("over", {})
    full = rows[rows.policy == "full"].drop_duplicates("item")
    judge.answers_enough(measure.scores(full), full.get("error"))
    tasks = [(task, [task]) for task in over.get("task", [])] or [("", sets.get(over.get("pooled", ""), []))]
    tested: list[Member | NotTestable] = []
    for varied, (task, group) in itertools.product(_cells(claim, sets), tasks):
        share, window = (f"{varied['share']:.0%}" if "share" in varied else ""), varied.get("window", "")
        names = [_title(varied.get("policy", "")), task, share, window and f"window {window}"]
        label = ", ".join(filter(None, names)) or "all"
        try:
            frame = _answered(claim, varied, rows, reading)
            if group:
                frame = frame[frame.index.isin(rows[rows.task.isin(group)].item)]
            if frame.dropna().empty:
                needs = f": {claim['needs']}" if "needs" in claim else ""
                raise NotTestable(f"no item of {', '.join(group) or 'any task'} has a value in every condition{needs}")
            if claim["contrast"] == "spread":
                tested.append(judge.pairs(frame.drop(columns="full"), label, ceiling=frame.full))
            elif claim["contrast"] == "wins":
                tested.append(Member(label, Sample(_task_wins(frame, rows))))
            else:
                tested.append(Member(label, Sample(frame, claim["contrast"])))
        except NotTestable as reason:
            tested.append(reason)
    return tested


def _task_wins(frame: pd.DataFrame, rows: pd.DataFrame) -> pd.DataFrame:
    """A row per task; column a: 1 where a's mean score is above b's, 0 where it is below, a half where they tie."""
    task = rows.drop_duplicates("item").set_index("item").task
    gain = (frame.a - frame.b).dropna().groupby(task).mean().round(9)
    return pd.DataFrame({"a": (1 + np.sign(gain)) / 2})


def _leads(claim: Mapping, sets: Mapping, rows: pd.DataFrame | None, reading: str) -> list[Member | NotTestable]:
    """Gain of a over b on one task minus that on each other task of the set; unpaired, since the items differ."""
    tested: list[Member | NotTestable] = []
    for varied in _cells(claim, sets):
        gains = {}
        for task in sets[claim["others"]]:
            of_task = {**claim, "contrast": "difference", "over": {"policy": [varied["policy"]], "task": [task]}}
            [member] = _of_quality(of_task, sets, rows, reading)
            if isinstance(member, Member) and isinstance(member.what, Sample):
                gains[task] = member.what.data.a - member.what.data.b
        leading = [task for task in claim["tasks"] if task in gains]
        others = [task for task in gains if task not in leading]
        if not leading or not others:
            raise NotTestable(f"items of {' or '.join(claim['tasks'])} and of another task are needed")
        tested += [
            Member(f"{_title(varied['policy'])}, {task} over {other}", Unpaired(gains[task], gains[other]))
            for task, other in itertools.product(leading, others)
        ]
    return tested


def members(
    claim: Mapping, sets: Mapping, rows: pd.DataFrame | None, r: Retained | None, reading: str, experts: bool = False
) -> list[Member | NotTestable]:
    """What a claim is tested on in one reading. rows, r: of `study.results`; experts: is the model a mixture of
    experts?"""
    if claim["study"] == "theory":
        return [Member("all", Facts(theorems()[claim["contrast"]]))]
    if claim["study"] == "gpu":
        timings = TIMED[claim["contrast"]][0]()
        return [Member(label, Measured(value, low, high, n)) for label, value, low, high, n in timings]
    if claim.get("experts") and not experts:
        raise NotTestable(claim["needs"])
    if claim["contrast"] == "lead":
        return _leads(claim, sets, rows, reading)
    if claim["study"] == "retained":
        return list(_of_retained(claim, sets, r))
    return _of_quality(claim, sets, rows, reading)


def touches_reading(claim: Mapping, sets: Mapping) -> bool:
    """Whether the claim is about answers of a defensive method, which differ by reading."""
    over = claim.get("over", {}).get("policy", [])
    named = {cell.get("policy") for cell in claim.get("cells", {}).values()}
    named.update(sets[over] if isinstance(over, str) else over)
    return claim.get("study") == "quality" and not named.isdisjoint(DEFENSIVE)


LISTED = ("C10b",)  # claims about all methods with a window that list the methods


def of_own(book: Mapping, policies: Iterable[str]) -> list[dict[str, Any]]:
    """General claims, for each of the reader's own policies; those about windows only for policies with a window."""
    general = [c for c in book["claims"] if not c.get("experts")]
    general += [c | {"over": {"policy": "defensive"}} for c in book["claims"] if c["id"] in LISTED]
    of_own = claims.claims_on_own(general, policies)
    needs_window = {c["id"] for c in book["claims"] if "window" in c.get("over", {}) or "across" in c} | set(LISTED)
    return [c for c in of_own if has_window(c["over"]["policy"][0]) or c["id"].split(" ")[0] not in needs_window]


def evaluate(
    rows: pd.DataFrame | None, r: Retained | None, *, model: str, profile: str, experts: bool = False
) -> pd.DataFrame:
    """Verdict of every claim (`judge.verdicts`), one per reading for claims about the defensive methods. General claims
    are also tested on the reader's own policies. experts: is the model a mixture of experts?"""
    book = claims.load_claims("fragility")
    run_in = (readings_of(rows) if rows is not None else []) or ["any"]
    frame = history.verdicts(
        book["claims"],
        lambda claim, reading: members(claim, book["sets"], rows, r, reading, experts),
        lambda claim: run_in if touches_reading(claim, book["sets"]) else ["any"],
        own=of_own(book, [] if rows is None else rows.policy), model=model, profile=profile,
    )  # fmt: skip
    timed = {c["id"]: TIMED[c["contrast"]][1] for c in book["claims"] if c["study"] == "gpu"}
    return claims.timed(frame, timed)


# ---------------------------------------------------------------- cost, from timings on a GPU

TIMED_MODEL, FIFTH = "Llama-3.1-8B", 0.2
DEFENSIVE_PLAIN = "DefensiveKV, plain PyTorch"
FULL = {"transformers' full cache": PLAIN, "this engine's full cache": KEPT}
SCORING_MEAN, SCORING_MAX = "attention mean mean", "attention max max"  # timings of the fused scoring kernel
Timed = tuple[str, float, float, float, float | None]  # member, value, fastest and slowest timing, number of runs


def _measured(part: str, method: str, share: float, tokens: int | None = None) -> pd.DataFrame:
    """One method's timings of `TIMED_MODEL` at `tokens`, or else at the longest context; smallest batch first."""
    f = pd.read_csv(GPU / "models.csv")
    f = f[(f.part == part) & (f.model == TIMED_MODEL) & (f.method == method) & np.isclose(f["share"], share)]
    return f[f.tokens == (f.tokens.max() if tokens is None else tokens)].sort_values("batch")


def scoring_ratio() -> list[Timed]:
    """Scoring time, largest over mean, of one kernel at the longest context that has both; 20th, 80th percentiles."""
    table = pd.read_csv(GPU / "kernels.csv").query("kernel == 'window_scores'")
    table = table.rename(columns={"p20_us": "low", "p50_us": "seconds", "p80_us": "high"})
    table = table.groupby(["variant", "tokens"])[["low", "seconds", "high"]].mean().reset_index("tokens")
    mean, largest = (table[table.index == name].set_index("tokens") for name in (SCORING_MEAN, SCORING_MAX))
    tokens = mean.index.intersection(largest.index).max()
    return [(f"{tokens} tokens", *claims.over(largest.loc[tokens], mean.loc[tokens]))]


def first_token_ratio() -> list[Timed]:
    """Time to the first token, DefensiveKV over CriticalKV in one engine and backend, at each model, context and
    reading that has both."""
    f = pd.read_csv(GPU / "first_token.csv")
    f = f[(f.part == "first") & np.isclose(f["share"], FIFTH)].set_index(["model", "tokens", "backend", "method"])
    timed = []
    for model, tokens, backend, method in f.index[f.index.get_level_values("method").str.startswith("defensive_kv,")]:
        other = (model, tokens, backend, method.replace("defensive_kv", "critical_kv"))
        if other in f.index:
            reading = claims.LABELS[method.partition(", ")[2].replace(" ", "_")]
            top, bottom = f.loc[(model, tokens, backend, method)], f.loc[other]
            timed.append((f"{model}, {tokens} tokens, {reading}", *claims.over(top, bottom)))
    return timed


def decode_ratio(batch: int = 0, slowest: bool = False) -> list[Timed]:
    """Time of a token at the longest context, full cache over a fifth of it, at the smallest batch (-1: largest).

    The interval goes from the fastest to the median step of each side. slowest: to the slowest, a single step in fifty
    that may allocate memory.
    """
    ours = _measured("decode", "20% kept", FIFTH).iloc[batch]
    theirs = {label: _measured("decode", name, 1.0, ours.tokens).iloc[batch] for label, name in FULL.items()}
    return [(label, *claims.over(full, ours, "high" if slowest else "seconds")) for label, full in theirs.items()]


throughput_ratio = partial(decode_ratio, batch=-1)  # tokens per second, a fifth over the full cache: largest batch


def peak_ratio() -> list[Timed]:
    """Peak memory at the longest context, one request: a fifth over either full cache."""
    timed: list[Timed] = []
    for label, part, method in (("prefill", "prefill", DEFENSIVE_PLAIN), ("decoding", "decode", "20% kept")):
        ours = _measured(part, method, FIFTH).iloc[0]
        for against, name in FULL.items():
            value = float(ours.peak_gib / _measured(part, name, 1.0, ours.tokens).iloc[0].peak_gib)
            timed.append((f"{label}, over {against}", value, value, value, None))
    return timed


STEPS, TIMES = "fastest to median step", "fastest to slowest timing"
TIMED: dict[str, tuple[Callable[[], list[Timed]], str]] = {  # by contrast: its members, and what their interval is
    "scoring_ratio": (scoring_ratio, "p20 to p80 of timings"),
    "first_token_ratio": (first_token_ratio, TIMES),
    "decode_ratio": (decode_ratio, STEPS),
    "throughput_ratio": (throughput_ratio, STEPS),
    "peak_ratio": (peak_ratio, "counted"),
    "decode_ratio_of_steps": (partial(decode_ratio, slowest=True), TIMES),
    "throughput_ratio_of_steps": (partial(throughput_ratio, slowest=True), TIMES),
}


def costs() -> pd.DataFrame:
    """Costs of `TIMED_MODEL`, one request. Columns what (is measured), method, tokens, seconds, and value, low, high:
    time or peak memory over that of transformers' full cache."""
    f = pd.read_csv(GPU / "models.csv").drop_duplicates(["part", "model", "method", "share", "tokens", "batch"])
    f = f[(f.model == TIMED_MODEL) & (f.batch == 1) & (f.tokens >= 32_000)]
    f = f.merge(f[f.method == PLAIN], on=["part", "tokens"], suffixes=("", "_full")).query("method != @PLAIN")
    quantity = f.part.map({"prefill": "time to the first token", "decode": "time of a further token"})
    ends = {"value": f.seconds, "low": f.low, "high": f.high}
    time = f.assign(what=quantity, **{name: column / f.seconds_full for name, column in ends.items()})
    memory = f.assign(what="peak memory", value=f.peak_gib / f.peak_gib_full, low=np.nan, high=np.nan)
    return pd.concat([time, memory])[["what", "method", "tokens", "seconds", "value", "low", "high"]]
