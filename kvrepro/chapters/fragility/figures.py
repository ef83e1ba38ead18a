"""Figures of the fragility chapter: frames of `study` in, a Figure out (width 7.2 in).

95% intervals over items. One colour and marker per aggregation and per policy everywhere, after Okabe and Ito; filled
means as run, hollow as described, where a method has both readings. Captions stand in the notebook.
"""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import PercentFormatter

from kvrepro.chapters.fragility import retention, study, tables
from kvrepro.chapters.fragility.retention import DEFAULT, OURS, Mixture, Setting
from kvrepro.chapters.fragility.study import DEFENSIVE, MIDDLE, Retained
from kvrepro.experiment import claims, stats
from kvrepro.experiment.figure import STYLE, WIDTH, done, point

RULES = {
    "single": ("one past query", "#8C8C8C", "X"),
    "mean": ("mean of the past", "#E69F00", "s"),
    "max": ("largest of the past", "#56B4E9", "^"),
    "defensive": ("defensive", "#0072B2", "o"),
    "true risk": ("largest of the answer", "#009E73", "D"),
}
NAMES = {
    "streaming_llm": "StreamingLLM", "snapkv": "SnapKV", "cake": "CAKE", "pyramid_kv": "PyramidKV", "ada_kv": "Ada-KV",
    "critical_kv": "CriticalKV, uniform", "critical_ada_kv": "CriticalKV", "andpro": "AnDPro", "dropkv": "DropKV",
    "r_kv": "R-KV", "duo_attention": "DuoAttention", "defensive_kv": "DefensiveKV",
    "layer_defensive_kv": "Layer-DefensiveKV",
}  # fmt: skip
COLOURS = {
    "streaming_llm": "#CC79A7", "snapkv": "#009E73", "cake": "#56B4E9", "ada_kv": "#E69F00",
    "critical_ada_kv": "#5F5F5F", "duo_attention": "#8B6F47", "defensive_kv": "#0072B2",
    "layer_defensive_kv": "#D55E00",
}  # fmt: skip
MARKERS = {
    "streaming_llm": "^", "snapkv": "D", "cake": "P", "ada_kv": "v", "critical_ada_kv": "s", "duo_attention": "X",
    "defensive_kv": "o", "layer_defensive_kv": "o",
}  # fmt: skip
OWN = ("#222222", "*")  # colour and marker of a reader's own policy
READINGS = {"as_run": "as run", "as_described": "as described", "any": ""}
CHOICES: dict[str, dict[object, str]] = {  # rows of the specification figure: what the dot means
    "until": {"question": "history before the question", "": "history to the prompt's end"},
    "norm": {"l1": "norm of v W_O", "none": "attention alone"},
    "pool": {"none": "no pooling", "average": "average over 5"},
    "joined": {True: "KV heads choose", False: "query heads choose"},
    "forced": {True: "past queries stay", False: "past queries may leave"},
    "prior": {"importance": "prior after the norm", "attention": "prior before the norm"},
    "later": {False: "history counts", True: "question and answer count"},
}


def _rule(rule: str) -> dict:
    _, colour, marker = RULES[rule]
    return {"color": colour, "marker": marker}


# ---- retained importance


def curves(r: Retained, rules: Sequence[str] = ("single", "mean", "defensive")) -> Figure:
    """Retained share at each step, for the first long answer of each long task: a row per task, a panel per rule."""
    with plt.rc_context(STYLE):
        tasks = study.long_tasks(r)[:2]
        figure, panels = plt.subplots(
            len(tasks), len(rules), figsize=(WIDTH, 0.6 + 1.7 * len(tasks)), squeeze=False, sharey=True, sharex="row"
        )
        here = r.curves[(r.curves.setting == DEFAULT) & (r.curves.layer == r.layer)]
        for number, task in enumerate(tasks):
            row = panels[number]
            first = here[here.task == task].groupby("item").step.max().idxmax()
            for panel, rule in zip(row, rules, strict=True):
                line = here[(here.item == first) & (here.rule == rule)].sort_values("step")
                panel.axhline(retention.OUTLIER, color="#555555", lw=0.8, ls=(0, (2, 2)))
                panel.plot(line.step, line.retained, color=RULES[rule][1], lw=0.9)
                worst = line.loc[line.retained.idxmin()]
                panel.plot(worst.step, worst.retained, "o", mfc="none", mec="black", ms=7)
                below = int((line.retained < retention.OUTLIER).sum())
                text = f"worst {worst.retained:.2f}, {below} of {len(line)} below"
                panel.annotate(text, (0.5, 0.03), xycoords="axes fraction", fontsize=8, ha="center")
                panel.set_ylim(0, 1.02)
                if number == 0:
                    panel.set_title(RULES[rule][0], loc="left", fontweight="bold")
                if number == len(tasks) - 1:
                    panel.set_xlabel("step (token of the answer)")
            row[0].set_ylabel(f"{task.replace('_', ' ')}\nretained share")
    return done(figure)


MEASURES = {"worst": "worst\nretained share", "mean": "mean\nretained share", "steps_below": "steps below ½"}


def by_layer(r: Retained) -> Figure:
    """Minimum, mean and steps below one half: by layer, heads together (left); of single query heads, mean against
    defensive (right)."""
    with plt.rc_context(STYLE):
        figure, panels = plt.subplots(3, 2, figsize=(WIDTH, 7.0), width_ratios=[1.9, 1])
        tasks = study.long_tasks(r)
        s = r.summary[(r.summary.setting == DEFAULT) & r.summary.task.isin(tasks) & (r.summary.layer >= 0)]
        s = s.assign(steps_below=s.below * s.steps)
        layers = sorted(set(s.layer))
        for (left, right), (column, title) in zip(panels, MEASURES.items(), strict=True):
            for i, rule in enumerate(RULES):
                for layer in layers:
                    here = s[(s["head"] == -1) & (s.rule == rule) & (s.layer == layer)]
                    found = stats.interval(here[column]).triple
                    point(left, layer + (i - 2) * 0.14, found, markersize=3.5, **_rule(rule))
            left.axvspan(r.layer - 0.5, r.layer + 0.5, color="#EFEFEF", zorder=0)
            left.set_xticks(layers if len(layers) < 13 else layers[::4])
            left.set_ylabel(title)
            left.grid(axis="x", visible=False)
            heads = s[s["head"] >= 0]
            wide = heads.pivot_table(index=["layer", "head"], columns="rule", values=column)
            most = 1.0 if column != "steps_below" else max(1.0, float(wide[["mean", "defensive"]].max().max()))
            right.plot([0, most], [0, most], color="#555555", lw=0.8, ls=(0, (2, 2)))
            style = {"color": RULES["defensive"][1], "ms": 4, "alpha": 0.65, "mew": 0}
            right.plot(wide["mean"], wide["defensive"], "o", **style)
            right.set_ylabel("defensive")
            for panel in (left, right):
                panel.set_ylim(-0.03 * most, 1.04 * most if panel is right or column != "steps_below" else None)
            right.set_xlim(-0.03 * most, 1.04 * most)
        panels[2][0].set_xlabel("layer (shaded: the headline's)")
        panels[2][1].set_xlabel("mean of the past, per query head")
        handles = [Line2D([], [], ls="none", label=RULES[rule][0], **_rule(rule)) for rule in RULES]
        figure.legend(handles=handles, loc="outside lower center", ncols=5, columnspacing=1.0, handletextpad=0.3)
    return done(figure)


def _printed() -> list[tuple[str, float, float]]:
    """The paper's three settings: label, worst step by mean, by defensive aggregation."""
    numbers, table_1 = "defensivekv_text_numbers.csv", "defensivekv_t01_worstcase.csv"
    places: list[tuple[str, str, dict[str, object]]] = [
        ("paper, figure 1, layer 14", numbers, {"context": "summary task, layer 14"}),
        ("paper, figure 3, GovReport", numbers, {"context": "GovReport"}),
        ("paper, table 1, GovReport", table_1, {"task": "GovReport"}),
    ]
    found = []
    for label, file, where in places:
        mean, defensive = (
            float(claims.cells(file, where | {"metric": metric, "method": f"{name} aggregation"}).value.iloc[0])
            for name in ("Mean", "Defensive")
            for metric in ["worst-case retained importance"]
        )
        found.append((label, mean, defensive))
    return found


def settings(r: Retained) -> Figure:
    """The headline, worst step by mean and by defensive aggregation: the paper's three, then ours in each setting."""
    with plt.rc_context(STYLE):
        head = tables.headline(r)
        printed = _printed()
        labels = [label for label, *_ in printed]
        labels += [
            ("our default" if place == "the headline's layer" else f"our default, {place}") if name == DEFAULT else name
            for name, place in zip(head.setting, head["where"], strict=True)
        ]
        figure, axes = plt.subplots(figsize=(WIDTH, 0.9 + 0.25 * len(labels)))
        for y, (_, mean, defensive) in enumerate(printed):
            axes.plot([mean, defensive], [y, y], color="#BBBBBB", lw=1.2, zorder=1)
            point(axes, y, (mean, np.nan, np.nan), along="x", **_rule("mean"))
            point(axes, y, (defensive, np.nan, np.nan), along="x", **_rule("defensive"))
        for y, row in enumerate(head.to_dict("records"), start=len(printed)):
            for shift, rule in ((-0.14, "mean"), (0.14, "defensive")):
                point(axes, y + shift, (row[rule], row[f"{rule}_low"], row[f"{rule}_high"]), along="x", **_rule(rule))
            out = f"{100 * row['outliers_mean']:.0f}% / {100 * row['outliers_defensive']:.0f}%"
            axes.annotate(out, (1.01, y), xycoords=("axes fraction", "data"), fontsize=8, va="center")
        axes.annotate(
            "steps\nbelow ½,\nmean / def.",
            (1.01, len(printed) - 1.2),
            xycoords=("axes fraction", "data"),
            fontsize=8,
            va="center",
        )
        axes.axhspan(-0.5, len(printed) - 0.5, color="#F1F1F1", zorder=0)
        axes.set_yticks(range(len(labels)), labels)
        axes.set_ylim(len(labels) - 0.5, -0.5)
        axes.set_xlim(-0.02, 1)
        axes.set_xlabel("worst retained share (mean over answers)")
        axes.grid(axis="y", visible=False)
        handles = [Line2D([], [], ls="none", label=RULES[rule][0], **_rule(rule)) for rule in ("mean", "defensive")]
        figure.legend(handles=handles, loc="outside upper center", ncols=2)
    return done(figure)


def specifications(r: Retained, base: Setting = OURS) -> Figure:
    """Defensive minus mean aggregation in every combination of the open choices, ascending, the choices below."""
    with plt.rc_context(STYLE):
        table = tables.specification_table(r, base)
        rows = [(field, value, name) for field, names in CHOICES.items() for value, name in names.items()]
        figure, (top, bottom) = plt.subplots(2, 1, figsize=(WIDTH, 5.4), height_ratios=[1.1, 1.5], sharex=True)
        x = np.arange(1, len(table) + 1)
        state = np.where(table.low > 0, 1, np.where(table.high < 0, -1, 0))
        for sign, colour in ((1, "#0072B2"), (0, "#9A9A9A"), (-1, "#D55E00")):
            top.vlines(x[state == sign], table.low[state == sign], table.high[state == sign], color=colour, lw=1.1)
            top.plot(x[state == sign], table.difference[state == sign], ".", color=colour, ms=4)
        top.axhline(0, color="black", lw=0.8)
        top.set_ylabel("defensive - mean\n(worst retained share)")
        for y, (field, value, _) in enumerate(rows):
            here = x[[cell == value for cell in table[field]]]
            bottom.plot(here, np.full(len(here), y), "|", color="#333333", ms=5.5, mew=0.9)
        bottom.set_yticks(range(len(rows)), [name for *_, name in rows], fontsize=8)
        for y in range(2, len(rows), 2):
            bottom.axhline(y - 0.5, color="#CCCCCC", lw=0.6)
        bottom.grid(visible=False)
        bottom.set_ylim(len(rows) - 0.5, -0.5)
        bottom.set_xlabel("combination of choices, by its difference")
        names = {"#0072B2": "interval above 0", "#9A9A9A": "undecided", "#D55E00": "interval below 0"}
        handles = [Line2D([], [], color=c, marker=".", label=name) for c, name in names.items()]
        figure.legend(handles=handles, loc="outside upper center", ncols=3)
    return done(figure)


# ---- appendix C


def mixture(x: Mixture = Mixture(), windows: Sequence[int] = (1, 2, 4, 8, 16, 32, 64, 128)) -> Figure:  # noqa: B008
    """Bias of mean and largest, chance of a miss, and survival of the fragile entries, against the window."""
    with plt.rc_context(STYLE):
        table, alive = retention.theory(x, windows), retention.survival(x, windows)
        figure, (left, middle, right) = plt.subplots(1, 3, figsize=(WIDTH, 2.9), sharex=True)
        for name, rule in (("bias of mean", "mean"), ("bias of max", "max")):
            here = table[table.quantity == name]
            left.plot(here.window, here.exact, color=RULES[rule][1], lw=1.2)
            for row in here.itertuples():
                point(left, row.window, (row.simulated, row.low, row.high), markersize=4, **_rule(rule))
        bound = table[table.quantity == "bias of max"]
        left.plot(bound.window, bound.bound, color=RULES["max"][1], lw=1, ls=(0, (3, 2)))
        left.axhline(x.risk - x.mean_low, color="#555555", lw=0.8, ls=(0, (1, 2)))
        left.set_ylabel("true risk - expected score")
        missed = table[table.quantity == "missed"]
        middle.plot(missed.window, missed.exact, color="#333333", lw=1.2)
        for row in missed.itertuples():
            point(middle, row.window, (row.simulated, row.low, row.high), color="#333333", marker="o", markersize=4)
        middle.set_ylabel("chance that no spike was seen")
        for i, rule in enumerate(("mean", "max", "defensive")):
            here = alive[alive.rule == rule]
            right.plot(here.window, here.survives, color=RULES[rule][1], lw=1)
            for row in here.itertuples():
                at = row.window * 1.06 ** (i - 1)
                point(right, at, (row.survives, row.low, row.high), markersize=4, **_rule(rule))
        right.set_ylabel("fragile entries that stay")
        for panel in (left, middle, right):
            panel.set_xscale("log", base=2)
            panel.set_xticks([1, 4, 16, 64], ["1", "4", "16", "64"])
            panel.set_xlabel("window (past queries)")
            panel.set_ylim(0, 1.03 * (x.risk if panel is left else 1))
        handles = [Line2D([], [], label=RULES[rule][0], **_rule(rule)) for rule in ("mean", "max", "defensive")]
        handles += [
            Line2D([], [], color=RULES["max"][1], ls=(0, (3, 2)), label="theorem 2's bound"),
            Line2D([], [], color="#555555", ls=(0, (1, 2)), label="limit for rare spikes"),
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=5, columnspacing=1.0, handletextpad=0.4)
    return done(figure)


# ---- quality


def _policies(rows: pd.DataFrame, reading: str) -> list[tuple[str, str]]:
    return [(policy, one) for policy, one in tables.policies_of(rows) if one in (reading, "any")]


def _lines(panel: Axes, rows: pd.DataFrame, reading: str, contrast: str, tasks: Sequence[str] = ()) -> None:
    found, drawn = _policies(rows, reading), set()
    for i, (policy, one) in enumerate(found):
        line = tables.curve(rows, policy, one, contrast, tasks)
        line = line[line.n >= stats.MIN_ITEMS] if (line.n >= stats.MIN_ITEMS).any() else line
        drawn |= set(line["share"])
        wide = policy in DEFENSIVE
        panel.plot(
            line["share"], line.value, color=COLOURS.get(policy, OWN[0]), lw=1.6 if wide else 1, zorder=3 if wide else 2
        )
        for row in line.itertuples():
            at = row.share + (i - len(found) / 2) * 0.004
            style: dict = {
                "color": COLOURS.get(policy, OWN[0]),
                "marker": MARKERS.get(policy, OWN[1]),
                "markersize": 4.5,
                "zorder": 3 if wide else 2,
            }
            ends = np.clip((row.low, row.high), 0, 1) if contrast == "mean" else (row.low, row.high)
            point(panel, at, (row.value, *ends), **style)
    panel.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    panel.set_xticks(sorted(drawn))
    panel.set_xlabel("share of the context kept")


def _legend(figure: Figure, rows: pd.DataFrame, more: Sequence[Line2D] = ()) -> None:
    names = dict.fromkeys(policy for policy, _ in tables.policies_of(rows))
    handles = [
        Line2D(
            [], [], color=COLOURS.get(p, OWN[0]), marker=MARKERS.get(p, OWN[1]), label=NAMES.get(p, p.split(":")[-1])
        )
        for p in names
    ]
    figure.legend(handles=[*handles, *more], loc="outside lower center", ncols=4, columnspacing=1.2, handletextpad=0.4)


def quality(rows: pd.DataFrame) -> Figure:
    """Loss of token F1 against the full cache by share kept; the defensive methods in one reading per panel."""
    with plt.rc_context(STYLE):
        readings = study.readings_of(rows) or ["any"]
        figure, panels = plt.subplots(1, len(readings), figsize=(WIDTH, 3.9), squeeze=False, sharey=True)
        for panel, reading in zip(panels[0], readings, strict=True):
            _lines(panel, rows, reading, "loss")
            panel.axhline(0, color="black", lw=0.8)
            panel.set_title(READINGS[reading], loc="left", fontweight="bold")
        panels[0][0].set_ylabel("loss of token F1 (share of full cache's)")
        panels[0][0].yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        _legend(figure, rows)
    return done(figure)


def needles(rows: pd.DataFrame, reading: str = "as_described") -> Figure:
    """Token F1 on single and multi-key needles by share kept, each with the full cache's line."""
    with plt.rc_context(STYLE):
        tasks = [task for task in rows.task.unique() if task.startswith("needle")] or list(rows.task.unique()[:2])
        reading = reading if reading in study.readings_of(rows) else (study.readings_of(rows) or ["any"])[0]
        figure, panels = plt.subplots(1, len(tasks), figsize=(WIDTH, 3.5), squeeze=False, sharey=True)
        for panel, task in zip(panels[0], tasks, strict=True):
            _lines(panel, rows, reading, "mean", [task])
            full = study.scores(rows[rows.task == task], {"policy": "full"}).mean()
            panel.axhline(full, color="black", lw=1, ls=(0, (4, 2)))
            panel.set_title(task.replace("_", " "), loc="left", fontweight="bold")
            panel.set_ylim(-0.03, 1.05)
        panels[0][0].set_ylabel("token F1 (0 to 1)")
        _legend(figure, rows, [Line2D([], [], color="black", ls=(0, (4, 2)), label="full cache")])
    return done(figure)


Pairs = Mapping[str, tuple[Mapping, Mapping]]


def _differences(panel: Axes, rows: pd.DataFrame, pairs: Pairs, readings: Sequence[str], touched: set[str]) -> None:
    """Paired differences of the labelled pairs, one mark per reading where the pair has readings."""
    labels = list(pairs)
    for y, (label, cells) in enumerate(pairs.items()):
        both = readings if touched & {c["policy"] for c in cells} else ["any"]
        for i, reading in enumerate(both):
            found = tables.compare(rows, {label: cells}, reading)
            colour = COLOURS.get(cells[0]["policy"], "#5F5F5F")
            for e in found.values():
                at = y + (i - (len(both) - 1) / 2) * 0.3
                filled = reading != "as_described"
                point(panel, at, e.triple, along="x", filled=filled, color=colour, marker="o")
    panel.axvline(0, color="black", lw=0.8)
    panel.set_yticks(range(len(labels)), labels)
    panel.set_ylim(len(labels) - 0.5, -0.5)
    panel.grid(axis="y", visible=False)


def differences(rows: pd.DataFrame, guard: float = 0.10) -> Figure:
    """Differences in token F1, paired by item: plug-in, window, guards, 4 bits, and the public code's steps undone."""
    readings, touched = study.readings_of(rows), set(DEFENSIVE)
    base = {"policy": "critical_ada_kv", "share": MIDDLE}
    plug: Pairs = {
        NAMES[one]: ({"policy": one, "share": MIDDLE, "aggregate": "defensive"}, {"policy": one, "share": MIDDLE})
        for one in study.PLUG_IN
    }
    window: Pairs = {
        f"{NAMES[one]}, {w}": ({"policy": one, "share": MIDDLE, "window": w}, base)
        for one in DEFENSIVE
        for w in study.WINDOWS
    }
    policies = list(dict.fromkeys(policy for policy, _ in tables.policies_of(rows)))
    guarded: Pairs = {
        NAMES.get(one, one.split(":")[-1]): (
            {"policy": one, "share": MIDDLE, "guard": guard},
            {"policy": one, "share": MIDDLE},
        )
        for one in policies
    } | {
        f"{NAMES[one]} - CriticalKV": ({"policy": one, "share": MIDDLE, "guard": guard}, base | {"guard": guard})
        for one in DEFENSIVE
    }
    four: Pairs = {
        "40% in 4 bits - 10%": (
            {"policy": "defensive_kv", "share": 0.4, "bits": 4},
            {"policy": "defensive_kv", "share": 0.1},
        ),
        "4 bits - unpacked, at 40%": (
            {"policy": "defensive_kv", "share": 0.4, "bits": 4},
            {"policy": "defensive_kv", "share": 0.4},
        ),
    } | {
        f"{name} - as run": (
            {"policy": "defensive_kv", "share": MIDDLE, "step": step},
            {"policy": "defensive_kv", "share": MIDDLE},
        )
        for step, (_, name) in study.STEPS.items()
    }
    with plt.rc_context(STYLE):
        figure, panels = plt.subplots(2, 2, figsize=(WIDTH, 6.2), height_ratios=[9, 10])
        titles = (
            "defensive in the mean's place",
            "window, minus CriticalKV",
            "behind guards",
            "4 bits; the code's steps",
        )
        for panel, title, pairs in zip(panels.flat, titles, (plug, window, guarded, four), strict=True):
            _differences(panel, rows, pairs, readings, touched)
            panel.set_title(title, loc="right", fontweight="bold")
            panel.set_xlabel("difference in token F1")
        panels[1][0].axhline(len(policies) - 0.5, color="#CCCCCC", lw=0.8)
        panels[1][1].axhline(1.5, color="#CCCCCC", lw=0.8)
        shown = [("as_run", "as run"), ("as_described", "as described")]
        handles = [
            Line2D([], [], ls="none", marker="o", color="#333333", mfc="#333333" if n == "as_run" else "white", label=t)
            for n, t in shown
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=2)
    return done(figure)
