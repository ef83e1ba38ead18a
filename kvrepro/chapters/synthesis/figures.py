"""The chapter's own drawings: the frontiers of score against cost, and score against evidence kept."""

from collections.abc import Mapping

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.path import Path
from matplotlib.transforms import BboxBase

from kvrepro.chapters.synthesis import frontier, grid
from kvrepro.experiment import figure

PUBLISHED = "published"


def frontiers(table: pd.DataFrame) -> Figure:
    """Score against each of `frontier.COSTS`, a row each, a panel per model: cells of the grid by scorer, published
    methods as open diamonds, named where nothing beats them and there is room; the line is the frontier.

    table: rows of `frontier.conditions`.
    """
    table = table[table.kind != "full"]
    each = pd.concat([table.assign(cost=name, at=table[name]) for name in frontier.COSTS])
    grid_of = _scatter(each, "at", row="cost", height=2.6)
    for (i, _, _), _ in grid_of.facet_data():
        for axes in grid_of.axes[i]:
            axes.set(xlabel=frontier.COSTS[grid_of.row_names[i]])
    grid_of.figure.draw_without_rendering()  # panels get their sizes, and names can be placed
    for (i, j, _), part in grid_of.facet_data():
        axes = grid_of.facet_axis(i, j)
        best = frontier.frontier(part, grid_of.row_names[i])
        steps = np.repeat(best[["at", "value"]].to_numpy(float), 2, axis=0)
        steps = np.stack([steps[1:, 0], steps[:-1, 1]], 1)  # to the right, then up
        axes.step(best["at"], best.value, where="post", color="black", lw=1, zorder=1)
        covered = np.concatenate([part[["at", "value"]], Path(steps).interpolated(20).vertices])
        _named(axes, best[best.kind == PUBLISHED], covered)
    return figure.done(grid_of.figure)


def _named(axes: Axes, rows: pd.DataFrame, covered: np.ndarray) -> None:
    """The name of each row above its point, the best first, if there is room. covered: places [n, 2] that stay free."""
    there, names = axes.transData.transform(covered), list[BboxBase]()
    for one in rows.iloc[::-1].itertuples():
        for ha, across in (("right", -4), ("left", 4), ("center", 0)):
            text = axes.annotate(
                str(one.name), (one.at, one.value), xytext=(across, 4), textcoords="offset points", ha=ha, fontsize=6.5
            )
            text.set_in_layout(False)
            box = text.get_window_extent().padded(3)
            inside = axes.bbox.x0 <= box.x0 and box.x1 <= axes.bbox.x1
            if inside and not box.count_contains(there) and not any(box.overlaps(name) for name in names):
                names.append(box)
                break
            text.remove()


def evidence(table: pd.DataFrame) -> Figure:
    """Score against the share of the evidence that a head holds on average, a point per cell, a panel per model.

    table: rows of `frontier.conditions`.
    """
    grid_of = _scatter(table[table.kind == "grid"], "evidence_heads", height=3)
    grid_of.set_axis_labels("evidence held by a head")
    return figure.done(grid_of.figure)


def _scatter(table: pd.DataFrame, x: str, row: str | None = None, height: float = 3) -> sns.FacetGrid:
    """A panel per model: grid cells by scorer, published methods as open diamonds; the legend below."""
    shown = figure.looks(grid.FACTORS["scorer"])
    table = table.assign(by=table.scorer.where(table.kind == "grid", PUBLISHED))
    with figure.style():
        facets = {"row": row} if row else {}
        columns = table.model.nunique()
        found = sns.FacetGrid(
            table, col="model", **facets, height=height, aspect=figure.WIDTH / columns / height,
            sharex="row" if row else True, ylim=(-0.03, 1.08),
        )  # fmt: skip
        found.figure.set_layout_engine("constrained")
        for (i, j, _), part in found.facet_data():
            axes = found.facet_axis(i, j)
            _points(axes, part, x, shown)
            axes.set_title(found.col_names[j] if i == 0 else "")
        for axes in found.axes[:, 0]:
            axes.set_ylabel("score")
        handles = {label: one for axes in found.axes.flat
                   for one, label in zip(*axes.get_legend_handles_labels(), strict=True)}  # fmt: skip
        found.figure.legend(handles.values(), handles, loc="outside lower center", ncols=5, columnspacing=1.2)
    return found


def _points(axes: Axes, part: pd.DataFrame, x: str, shown: Mapping[object, figure.Look]) -> None:
    """Cells by their scorer, then published methods."""
    for scorer, look in shown.items():
        mine = part[part.by == scorer]
        axes.plot(mine[x], mine.value, look.marker, color=look.colour, ms=3.5, ls="none", alpha=0.7, label=look.name)
    known = part[part.by == PUBLISHED]
    if len(known):
        axes.plot(known[x], known.value, "D", mfc="none", mec="black", ms=4.5, ls="none", label="published method")
    axes.xaxis.set_major_formatter(lambda share, _: f"{100 * share:g}%")
    told = [f"{figure.said(one, [one['name']], '.2f')}, at {one[x]:.0%}" for one in part.to_dict("records")]
    figure.tell(axes, part[x], part.value, told)
