"""Drawings of the fragility chapter that `kvrepro.experiment.figure` does not have."""

import itertools
from collections.abc import Mapping
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from kvrepro.chapters.fragility.retention import MEANS, OPEN, OUTLIER, Mixture, Setting
from kvrepro.experiment import figure
from kvrepro.experiment.claims import LABELS
from kvrepro.experiment.figure import DASHED, LOOKS, STYLE, WIDTH, Look, done, look

LOOKS.update(  # of the rules that rank the tokens of the past
    {
        "single": Look("one past query", "#8C8C8C", "X"),
        "mean": Look("mean", "#E69F00", "s"),
        "mean with prior": Look("mean and prior", "#D55E00", "v"),
        "max": Look("largest", "#56B4E9", "^"),
        "defensive": Look("defensive", "#0072B2", "o"),
        "true risk": Look("ranked by the answer", "#009E73", "D"),
    }
)


def methods(table: pd.DataFrame) -> list[str]:
    """Names of the table's policies; where a policy has two readings, its reading on a second line."""
    readings = {reading: f",\n{text}" for reading, text in LABELS.items()}
    return [look(p).name + readings.get(reading, "") for p, reading in zip(table.policy, table.reading, strict=True)]


def by_bytes(table: pd.DataFrame, colour: str, **given: Any) -> Figure:
    """A panel per policy: value against `held`, percent of the full cache's bytes; in grey the lines of all others."""
    options = given | {"panel": "policy", "line": True, "wrap": 4, "height": 1.9}
    drawing = figure.estimates(table, "held", "value", colour=colour, **options)
    for axes in drawing.axes[: table.policy.nunique()]:
        for _, line in table.groupby(["policy", colour]):
            axes.plot(line.held, line.value, color="#BDBDBD", lw=0.6, zorder=0.5)
    return drawing


def grouped(drawing: Figure, groups: pd.Series) -> Figure:
    """The drawing with a line between rows of different groups. groups: of the rows, from the top."""
    for y in np.flatnonzero(groups.to_numpy()[1:] != groups.to_numpy()[:-1]):
        drawing.axes[0].axhline(y + 0.5, color="#9A9A9A", lw=0.6)
    return drawing


def curves(answers: pd.DataFrame) -> Figure:
    """Retained share at each step of some answers: a row per task, a panel per rule, the worst step circled."""
    if answers.empty:  # every answer ended at once
        return figure.nothing()
    tasks, rules = answers.task.unique(), answers.rule.unique()
    with plt.rc_context(STYLE):
        size = (WIDTH, 0.6 + 1.7 * len(tasks))
        drawn, panels = plt.subplots(len(tasks), len(rules), figsize=size, squeeze=False, sharey=True, sharex="row")
        for (task, rule), axes in zip(itertools.product(tasks, rules), panels.flat, strict=True):
            line = answers[(answers.task == task) & (answers.rule == rule)]
            worst, (name, colour, _) = line.loc[line.retained.idxmin()], look(rule)
            axes.axhline(OUTLIER, color="#555555", lw=0.8, ls=DASHED)
            axes.plot(line.step, line.retained, color=colour, lw=0.9)
            axes.plot(worst.step, worst.retained, "o", mfc="none", mec="black", ms=7)
            text = f"worst {worst.retained:.2f}, {(line.retained < OUTLIER).sum()} below"
            axes.annotate(text, (0.5, 0.03), xycoords="axes fraction", fontsize=8, ha="center")
            axes.set(ylim=(0, 1.02), title=name if task == tasks[0] else "")
            axes.set_xlabel("step" if task == tasks[-1] else "")
            axes.set_ylabel(f"{task.replace('_', ' ')}\nretained share" if rule == rules[0] else "")
    return done(drawn)


def specifications(table: pd.DataFrame, settings: Mapping[str, Setting]) -> Figure:
    """Every combination of the open choices by its difference: above, the difference with its interval, and the largest
    alone; below, the choices.

    table: columns setting (a name in `settings`), value, low, high, and largest, a value.
    """
    table = table.sort_values("value", ignore_index=True)
    choices = [(field, value) for field, values in OPEN.items() for value in values]
    colours = np.select([table.low > 0, table.high < 0], ["#0072B2", "#D55E00"], "#9A9A9A")
    with plt.rc_context(STYLE):
        drawn, (top, bottom) = plt.subplots(2, 1, figsize=(WIDTH, 5.4), height_ratios=[1.1, 1.5], sharex=True)
        top.vlines(table.index, table.low, table.high, color=colours, lw=1.1)
        top.scatter(table.index, table.value, color=colours, s=6, zorder=3)
        top.axhline(0, color="black", lw=0.8)
        _, light, triangle = look("max")
        top.scatter(table.index, table.largest, color=light, s=8, marker=triangle, zorder=2)
        top.set_ylabel("minus the mean\n(worst retained share)")
        for y, (field, value) in enumerate(choices):
            ranks = [x for x, name in enumerate(table.setting) if getattr(settings[name], field) == value]
            bottom.plot(ranks, np.full(len(ranks), y), "|", color="#333333", ms=5.5, mew=0.9)
        for y in range(2, len(choices), 2):
            bottom.axhline(y - 0.5, color="#CCCCCC", lw=0.6)
        bottom.set_yticks(range(len(choices)), [MEANS[field][value] for field, value in choices], fontsize=8)
        bottom.set(ylim=(len(choices) - 0.5, -0.5), xlabel="combination of choices, by its difference", xticks=[])
        bottom.grid(visible=False)
        names = {"#0072B2": "above 0", "#9A9A9A": "undecided", "#D55E00": "below 0"}
        handles = [Line2D([], [], color=c, marker=".", label=f"defensive, {name}") for c, name in names.items()]
        handles += [Line2D([], [], color=light, marker=triangle, ms=4, ls="none", label="largest alone")]
        drawn.legend(handles=handles, loc="outside upper center", ncols=4)
    return done(drawn)


ZERO = pd.DataFrame({"value": [0.0], "low": [np.nan], "high": [np.nan]})  # a reference: no difference
PANELS = {
    "bias": "true risk minus expected score",
    "missed": "chance that no spike was seen",
    "survives": "spiky entries that stay",
}


def mixture(table: pd.DataFrame, x: Mixture) -> Figure:
    """Bias, chance of a miss, and survival against the window: simulated points, and closed forms as lines.

    table: rows of `retention.theory` and `retention.survival`.
    """
    with plt.rc_context(STYLE):
        drawn, panels = figure.panels(3, height=2.9)
        for axes, (quantity, title) in zip(panels, PANELS.items(), strict=True):
            for rule, part in table[table.quantity == quantity].groupby("rule", sort=False):
                _, colour, marker = look(rule)
                error = [part.value - part.low, part.high - part.value]
                line = part.value if quantity == "survives" else part.exact
                axes.errorbar(part.window, part.value, yerr=error, color=colour, marker=marker, ls="none", ms=4)
                axes.plot(part.window, line, color=colour, lw=1.2)
                axes.plot(part.window, part.bound, color=colour, lw=1, ls=DASHED)
            axes.set_xscale("log", base=2)
            axes.set_xticks([1, 4, 16, 64], ["1", "4", "16", "64"])
            most = x.risk if quantity == "bias" else 1
            axes.set(xlabel="window (past queries)", ylabel=title, ylim=(0, 1.03 * most))
        panels[0].axhline(x.risk - x.mean_low, color="#555555", lw=0.8, ls=(0, (1, 2)))
        handles = [Line2D([], [], color=c, marker=m, label=n) for n, c, m in map(look, ("mean", "max", "defensive"))]
        handles += [Line2D([], [], color=look("max").colour, ls=DASHED, label="theorem 2's bound")]
        handles += [Line2D([], [], color="#555555", ls=(0, (1, 2)), label="limit for rare spikes")]
        drawn.legend(handles=handles, loc="outside lower center", ncols=5, columnspacing=1.0, handletextpad=0.4)
    return done(drawn)
