"""Drawings of the chapter on DropKV's bound that `experiment.figure` lacks: distributions over triples."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, LogLocator, NullFormatter, PercentFormatter, StrMethodFormatter

from kvrepro.experiment.figure import DASHED, looks, panels

PAPER = "#8A8A8A"


def distribution(
    rows: pd.DataFrame,
    column: str,
    label: str,
    printed: Sequence[tuple[pd.Series, pd.Series | float]],
    *,
    limits: tuple[float, float] | None = None,
    line: float | None = None,
    log: bool = True,
) -> Figure:
    """Share of triples up to each value of a column, a curve per pool; values that are not finite count as larger.

    printed: the paper's quantiles, one value per model, each with the share that it stands for. limits: of the axis;
    the legend says how much lies beyond. line: a value to compare with.
    """
    figure, [axes] = panels(1, 3.2)
    for pool, look in looks(rows.pool.unique()).items():
        values = rows[rows.pool == pool][column]
        finite = np.sort(values[np.isfinite(values)])
        height = np.arange(1, len(finite) + 1) / len(values)
        name = str(pool) + _beyond(axes, values, limits, look.colour)
        axes.step(finite, height, where="post", lw=1.6, color=look.colour, label=name)
    for models, share in printed:
        axes.plot(models, np.broadcast_to(share, len(models)), "x", color=PAPER, ms=5, mew=1.2, zorder=4)
    if line is not None:
        axes.axvline(line, color="black", lw=0.8, ls=DASHED)
    axes.set(xscale="log" if log else "linear", xlim=limits, ylim=(-0.02, 1.02), xlabel=label)
    axes.set_ylabel("share of triples")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    paper = Line2D([], [], color=PAPER, marker="x", ls="none", mew=1.2, label="paper, three models at 128K")
    handles, _ = axes.get_legend_handles_labels()
    figure.legend(handles=[*handles, paper], loc="outside lower center", ncols=2, frameon=False, fontsize=8.5)
    return figure


def _beyond(axes: Axes, values: pd.Series, limits: tuple[float, float] | None, colour: str) -> str:
    """Draw arrows where a curve leaves the axis; return in words what share of the values lies beyond which end."""
    if limits is None:
        return ""
    left, right = (values < limits[0]).mean(), ((values > limits[1]) & np.isfinite(values)).mean()
    ends = ((limits[0], left, left, "left", "<"), (limits[1], right, (values <= limits[1]).mean(), "right", ">"))
    words = []
    for edge, share, height, side, arrow in ends:
        if share >= 0.005:
            axes.plot(edge, height, arrow, color=colour, ms=5, clip_on=False, zorder=5)
            words.append(f", {share:.0%} further {side}")
    return "".join(words)


def plain(drawing: Figure, *limits: float) -> Figure:
    """The drawing with the numbers of its logarithmic axes written out. limits: of the horizontal axis."""
    for axes in drawing.axes:
        if limits:
            axes.set_xlim(*limits)
        for axis in (axes.xaxis, axes.yaxis):
            if axis.get_scale() == "log" and not isinstance(axis.get_major_locator(), FixedLocator):
                low, high = axis.get_view_interval()
                steps = (1, 1.5, 2, 3, 5) if high / low < 8 else (1, 2, 5) if high / low < 300 else (1,)
                axis.set_major_locator(LogLocator(subs=steps))
                axis.set_major_formatter(StrMethodFormatter("{x:g}"))
                axis.set_minor_formatter(NullFormatter())
    return drawing
