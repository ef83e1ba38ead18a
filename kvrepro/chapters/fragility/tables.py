"""Tables and numbers of the chapter on DefensiveKV. Intervals are over items, one prompt with its answer each."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from kvrepro.chapters.fragility import retention
from kvrepro.chapters.fragility.members import ADA, DEFENSIVE_PLAIN, FIFTH, GPU, _measured
from kvrepro.chapters.fragility.retention import DEFAULT, Setting
from kvrepro.chapters.fragility.study import (
    DEFENSIVE,
    MIDDLE,
    POLICIES,
    STEPS,
    TABLE_1,
    Retained,
    long_tasks,
    per_item,
    pooled,
    readings_of,
    scores,
)
from kvrepro.experiment import claims, stats
from kvrepro.experiment.judge import NotTestable
from kvrepro.experiment.stats import MIN_ITEMS, UNIT, Estimate


def _shown(e: Estimate, digits: int = 2, scale: float = 1.0) -> str:
    if np.isnan(e.value):
        return ""
    text = f"{e.value * scale:.{digits}f}"
    why = " (too few)" if e.n < MIN_ITEMS else " (all alike)"
    return text + (why if np.isnan(e.low) else f" ({e.low * scale:.{digits}f} to {e.high * scale:.{digits}f})")


def table_1(r: Retained, column: str = "worst") -> pd.DataFrame:
    """The paper's table 1 beside ours: worst retained share by task, mean over items; and the worst of all items."""
    printed = claims.published("defensivekv_t01_worstcase.csv")
    rows = {}
    for dataset, task in TABLE_1.items():
        row: dict[tuple[str, str], object] = {("here", "task"): task.replace("_", " ")}
        for rule, title in (("mean", "Mean aggregation"), ("defensive", "Defensive aggregation")):
            row["paper", rule] = printed[(printed.task == dataset) & (printed.method == title)].value.iloc[0]
            values = per_item(r, column, rule).query("task == @task").value
            row["here", f"{rule}, mean over items"] = _shown(stats.interval(values))
            row["here", f"{rule}, worst item"] = f"{values.min():.2f}" if len(values) else ""
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
                row[title, rule] = _shown(stats.interval(here[here.rule == rule][column]), digits)
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
            value, low, high = stats.contrast(pair[list(columns)].rename(columns=columns), contrast).triple
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
        value, low, high = stats.contrast(wide, "difference").triple
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
        except NotTestable:
            continue
        row = {"all": _shown(stats.contrast(pair, "loss", bounds=UNIT), 1, 100)}
        for task in tasks.unique():
            here = pair[pair.index.map(tasks) == task]
            row[GROUPS.get(task, task)] = _shown(stats.contrast(here, "loss", bounds=UNIT), 0, 100)
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
            except NotTestable:
                continue
            pair = pd.DataFrame(cells | {"full": full}).dropna()
            for name in cells:
                of = pair[[name, "full"]].rename(columns={name: "a"})
                row[f"{share:.0%}", name] = _shown(stats.contrast(of, "loss", bounds=UNIT), 0, 100)
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
        except NotTestable:
            continue
    full = scores(here, {"policy": "full"})
    wide, found = pd.DataFrame(columns | {"full": full}).dropna(), []
    for share in columns:
        of = wide[[share, "full"]].set_axis(["a", "full"], axis=1)
        e = stats.contrast(of, contrast, bounds=UNIT)
        found.append((share, *e.triple, e.n))
    return pd.DataFrame(found, columns=["share", "value", "low", "high", "n"])


def compare(rows: pd.DataFrame, pairs: Mapping[str, tuple[Mapping, Mapping]], reading: str) -> dict[str, Estimate]:
    """Paired difference in token F1 of two cells each, by label; those not run are left out."""
    rows, found = pooled(rows), {}
    for label, (a, b) in pairs.items():
        try:
            frame = pd.DataFrame({"a": scores(rows, a, reading), "b": scores(rows, b, reading)})
        except NotTestable:
            continue
        found[label] = stats.contrast(frame, "difference", bounds=UNIT)
    return found


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
            except NotTestable:
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
    except NotTestable:
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
    full = stats.interval(scores(rows, {"policy": "full"}), bounds=UNIT)
    found = {
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
        found[f"step-{step}"] = _shown(gap[step]) if gap else "not run"
    return found | claims.quoted(frame)
