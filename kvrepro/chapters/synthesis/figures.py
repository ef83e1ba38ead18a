"""The chapter's own drawings: score against cost with its frontier, and score against evidence kept."""

import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvrepro.chapters.synthesis import frontier, grid
from kvrepro.experiment import figure


def frontiers(table: pd.DataFrame) -> Figure:
    """Score against each of `frontier.COSTS`, a row each, a panel per model: cells of the grid by scorer, published
    methods as open diamonds. The line is the frontier.

    table: rows of `frontier.conditions`.
    """
    table = table[table.kind != "full"]
    by_cost = pd.concat([table.assign(cost=name, at=table[name]) for name in frontier.COSTS])
    facets = _scatter(by_cost, "at", row="cost", height=2.6)
    for cost, row in zip(facets.row_names, facets.axes, strict=True):
        for axes in row:
            axes.set(xlabel=frontier.COSTS[cost])
    for (i, j, _), part in facets.facet_data():
        best = frontier.frontier(part, facets.row_names[i])
        facets.facet_axis(i, j).step(best["at"], best.value, where="post", color="black", lw=1, zorder=1)
    return figure.done(facets.figure)


def evidence(table: pd.DataFrame) -> Figure:
    """Score against the share of the evidence that a head holds on average, a point per cell, a panel per model.

    table: rows of `frontier.conditions`.
    """
    facets = _scatter(table[table.kind == "grid"], "evidence_heads")
    facets.set_axis_labels("evidence held by a head")
    return figure.done(facets.figure)


def _scatter(table: pd.DataFrame, x: str, row: str | None = None, height: float = 3) -> sns.FacetGrid:
    """A panel per model: grid cells by scorer, published methods as open diamonds; the legend below."""
    with figure.style():
        columns = table.model.nunique()
        facets = sns.FacetGrid(
            table, col="model", row=row, height=height, aspect=figure.WIDTH / columns / height,
            sharex="row" if row else True, ylim=(-0.03, 1.08),
        )  # fmt: skip
        facets.figure.set_layout_engine("constrained")
        for (i, j, _), part in facets.facet_data():
            axes = facets.facet_axis(i, j)
            _points(axes, part, x)
            axes.set_title(facets.col_names[j] if i == 0 else "")
        for axes in facets.axes[:, 0]:
            axes.set_ylabel("score")
        handles = {label: handle for axes in facets.axes.flat
                   for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}  # fmt: skip
        facets.figure.legend(handles.values(), handles, loc="outside lower center", ncols=5, columnspacing=1.2)
    return facets


def _points(axes: Axes, part: pd.DataFrame, x: str) -> None:
    """Draw cells by their scorer, then published methods."""
    for scorer, look in figure.looks(grid.FACTORS["scorer"]).items():
        cells = part[(part.kind == "grid") & (part.scorer == scorer)]
        axes.plot(cells[x], cells.value, look.marker, color=look.colour, ms=3.5, ls="none", alpha=0.7, label=look.name)
    methods = part[part.kind == "published"]
    if len(methods):
        axes.plot(methods[x], methods.value, "D", mfc="none", mec="black", ms=4.5, ls="none", label="published method")
    axes.xaxis.set_major_formatter(lambda share, _: f"{100 * share:g}%")
    texts = [f"{figure.hover_text(row, [row['name']], '.2f')}, at {row[x]:.0%}" for row in part.to_dict("records")]
    figure.add_hover_texts(axes, part[x], part.value, texts)
