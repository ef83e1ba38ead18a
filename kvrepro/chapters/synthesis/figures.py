"""The chapter's own drawings: the frontier of score against cost, and score against evidence kept."""

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvrepro.chapters.synthesis import frontier, grid
from kvrepro.experiment.figure import STYLE, Look, looks, panels

PER_ROW = 4  # entries of a legend's line


def frontiers(table: pd.DataFrame, cost: str) -> Figure:
    """Score against `cost` (of `frontier.COSTS`), a panel per model: cells of the grid by scorer, published methods as
    open diamonds, named where nothing beats them; the line is the frontier.

    table: rows of `frontier.conditions`.
    """
    models, shown = list(dict.fromkeys(table.model)), looks(grid.FACTORS["scorer"])
    with plt.rc_context(STYLE):
        figure, every = panels(len(models), height=4.2, sharey=True)
        for axes, model in zip(every, models, strict=True):
            mine = table[table.model == model]
            _points(axes, mine, cost, shown, dodge=0.0015 if cost == "held" else 0.0)
            best = frontier.frontier(mine[mine.kind != "full"], cost)
            axes.step(best[cost], best.value, where="post", color="black", lw=1, zorder=1)
            known = mine[mine.kind == "published"]
            axes.plot(known[cost], known.value, "D", mfc="none", mec="black", ms=4.5, ls="none", label="published")
            for row in best[best.kind == "published"].itertuples():
                far = getattr(row, cost) > mine[cost][mine.kind != "full"].mean()
                place = {"ha": "right" if far else "left", "xytext": (-5 if far else 5, 3), "fontsize": 6.5}
                axes.annotate(str(row.name), (getattr(row, cost), row.value), textcoords="offset points", **place)
            axes.set(title=model, xlabel=frontier.COSTS[cost], ylim=(-0.03, 1.08))
            axes.xaxis.set_major_formatter(lambda share, _: f"{100 * share:g}%")
        every[0].set_ylabel("score")
        figure.legend(*every[0].get_legend_handles_labels(), loc="outside lower center", ncols=PER_ROW)
    return figure


def evidence(table: pd.DataFrame) -> Figure:
    """Score against the share of the evidence that a head holds on average, a dot per cell, a panel per model.

    table: rows of `frontier.conditions`.
    """
    models, shown = list(dict.fromkeys(table.model)), looks(grid.FACTORS["scorer"])
    with plt.rc_context(STYLE):
        figure, every = panels(len(models), height=3.6, sharey=True)
        for axes, model in zip(every, models, strict=True):
            _points(axes, table[table.model == model], "evidence_heads", shown)
            axes.set(title=model, xlabel="evidence held by a head", ylim=(-0.03, 1.08))
            axes.xaxis.set_major_formatter(lambda share, _: f"{100 * share:g}%")
        every[0].set_ylabel("score")
        figure.legend(*every[0].get_legend_handles_labels(), loc="outside lower center", ncols=PER_ROW)
    return figure


def _points(axes: Axes, table: pd.DataFrame, cost: str, shown: dict[object, Look], dodge: float = 0.0) -> None:
    """The grid's cells; scorers that cost the same stand `dodge` apart."""
    for i, (scorer, look) in enumerate(shown.items()):
        part = table[(table.kind == "grid") & (table.scorer == scorer)]
        at = part[cost] + dodge * (i - len(shown) / 2)
        axes.plot(at, part.value, look.marker, color=look.colour, ms=3.5, ls="none", alpha=0.7, label=scorer)
