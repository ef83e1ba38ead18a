"""The one figure of the leakage chapter that is drawn by hand; all others are `kvrepro.experiment.figure`'s."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import PercentFormatter

from kvrepro.experiment import figure


def fronts(table: pd.DataFrame, panel: str, row: str) -> Figure:
    """Following against leakage for each setting of a dial (`study.fronts`), panels by two of the table's columns.

    Upper left is better. Filled: no other setting is better in one and as good in the other. Equal points are rings.
    """
    columns, rows = (list(dict.fromkeys(table[name])) for name in (panel, row))
    with plt.rc_context(figure.STYLE):
        size = (figure.WIDTH, 0.9 + 1.8 * len(rows))
        drawn, panels = plt.subplots(len(rows), len(columns), figsize=size, sharex=True, sharey=True, squeeze=False)
        for (i, j), axes in np.ndenumerate(panels):
            _front(axes, table[(table[panel] == columns[j]) & (table[row] == rows[i])])
            name = f"{columns[j]:.0%} dropped" if panel == "ratio" else figure.look(columns[j]).name
            axes.set_title(name if i == 0 else "", fontsize=8)
            axes.set_ylabel(f"following,\n{rows[i]}" if j == 0 else "")
        panels[-1, len(columns) // 2].set_xlabel("leakage")
        handles = [Line2D([], [], color=_shade(x), marker="o", ls="none", label=f"λ = {x:g}")
                   for x in sorted(set(table.setting))]  # fmt: skip
        handles.append(Line2D([], [], color="black", marker="o", mfc="white", ls="none", label="beaten"))
        drawn.legend(handles=handles, loc="outside lower center", ncols=7, columnspacing=1.0)
    return figure.done(drawn)


def _shade(setting: float):
    return plt.get_cmap("viridis_r")(0.15 + 0.85 * setting)


def _front(axes: Axes, points: pd.DataFrame) -> None:
    for i, p in enumerate(points.itertuples()):
        colour = _shade(p.setting)
        axes.plot([p.told_low, p.told_high], [p.followed, p.followed], color=colour, lw=0.9, alpha=0.7)
        axes.plot([p.told, p.told], [p.followed_low, p.followed_high], color=colour, lw=0.9, alpha=0.7)
        style = {"mfc": colour if p.best else "white", "markersize": 8 - 0.9 * i, "zorder": 3 + i}
        axes.plot(p.told, p.followed, "o", color=colour, **style)
    axes.set(xticks=[0, 0.5, 1], yticks=[0, 0.5, 1], xlim=(-0.1, 1.1), ylim=(-0.1, 1.1))
    for side in (axes.xaxis, axes.yaxis):
        side.set_major_formatter(PercentFormatter(1, decimals=0))
