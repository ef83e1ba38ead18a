"""What all figures share: the book's width, one colour and marker per policy, a style, a point with its interval."""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

WIDTH = 7.2  # inches
NAMES = {
    "lru": "LRU",
    "h2o": "H2O",
    "snapkv": "SnapKV",
    "streaming_llm": "StreamingLLM",
    "ada_kv": "Ada-KV",
    "quest": "QUEST",
    "random": "Random",
    "h2o_faithful": "H2O faithful",
    "snapkv_faithful": "SnapKV faithful",
    "ada_kv_faithful": "Ada-KV faithful",
    "quest_faithful": "QUEST faithful",
    "full": "full cache",
}
COLOURS = {
    "lru": "#0072B2",
    "h2o": "#D55E00",
    "snapkv": "#009E73",
    "streaming_llm": "#CC79A7",
    "ada_kv": "#E69F00",
    "quest": "#56B4E9",
    "random": "#5F5F5F",
    "h2o_faithful": "#D55E00",
    "snapkv_faithful": "#009E73",
    "ada_kv_faithful": "#E69F00",
    "quest_faithful": "#56B4E9",
    "full": "#000000",
}
MARKERS = {"lru": "o", "h2o": "s", "snapkv": "D", "streaming_llm": "^", "ada_kv": "v", "quest": "P", "random": "X"}
for looks in (NAMES, COLOURS, MARKERS):  # the protection paper's simplified methods look like those they stand for
    looks |= {f"{name}_simple": looks[name] for name in ("h2o", "snapkv", "ada_kv", "quest")}
    looks |= {"slw": looks["streaming_llm"], "random_sample": looks["random"]}
MARKERS |= {f"{name}_faithful": MARKERS[name] for name in ("h2o", "snapkv", "ada_kv", "quest")}
READINGS = {"as_run": "as run", "as_described": "as described"}
STYLE = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#E3E3E3",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "lines.markersize": 5,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "figure.dpi": 140,
    "savefig.dpi": 160,
    "figure.constrained_layout.use": True,
}


def point(
    axes: Axes,
    x: float,
    y: tuple[float, float, float],
    *,
    policy: str = "lru",
    filled: bool = True,
    along: str = "y",
    **style: Any,
) -> None:
    """One estimate with its interval (value, low, high), along either axis."""
    value, low, high = y
    colour = style.pop("color", COLOURS[policy])
    error = [[max(0.0, value - low)], [max(0.0, high - value)]] if np.isfinite(low) else None
    where = {"x": x, "y": value, "yerr": error} if along == "y" else {"x": value, "y": x, "xerr": error}
    shape = {
        "marker": MARKERS.get(policy, "o"),
        "color": colour,
        "mfc": colour if filled else "white",
        "elinewidth": 1.1,
        "ls": "none",
    }
    axes.errorbar(**where, **(shape | style))


def done(figure: Figure) -> Figure:
    """The figure, taken out of pyplot's hands so that a notebook shows it once, as the cell's value."""
    plt.close(figure)
    return figure
