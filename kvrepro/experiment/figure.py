"""Figures that all chapters share: estimates with their intervals, and how a policy looks.

A figure takes a table with the columns value, low, high (`stats.means`, `stats.contrasts`) and the names of those that
say where a point stands, how it looks and in which panel. Everything else is seaborn and matplotlib.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator, PercentFormatter
from matplotlib_inline.backend_inline import set_matplotlib_formats

from kvrepro.engine.policy import find
from kvrepro.errors import InputError
from kvrepro.experiment import stats
from kvrepro.experiment.claims import LABELS
from kvrepro.paths import DATA

WORDS = DATA / "words"
NARROW = 4.8  # inches: letters of 9 points are read on a phone
FLOORS = [  # colours and dashes of reference lines, which belong to no policy; the full cache's first
    ("black", (0, (4, 2))),
    ("#B22222", (0, (1, 1.5))),
    ("#7B4FA3", (0, (4, 1.5, 1, 1.5))),
    ("#8B6F47", (0, (6, 3))),
]


class Look(NamedTuple):
    """Name, colour and marker: those of a policy are the same in every figure of the book."""

    name: str
    colour: str = ""
    marker: str = ""


# After Okabe and Ito's palette; a method, its simplified and its faithful form look alike.
LOOKS = {row.policy: Look(row.name, row.colour, row.marker) for row in pd.read_csv(WORDS / "looks.csv").itertuples()}
ALIKE = {"slw": "streaming_llm", "random_sample": "random"}
SEQUENCE = "#0072B2 #D55E00 #009E73 #E69F00 #CC79A7 #56B4E9 #5F5F5F #8C564B #7B4FA3 #A0A000".split()
SHAPES = "osD^vPXphd"
NUMBER = int | float | np.number


def look(value: object) -> Look:
    """The look of a policy, by its name. Readings, own policies and anything else have names alone."""
    name = f"{value:g}" if isinstance(value, float | np.floating) else str(value)
    base = ALIKE.get(name, name.removesuffix("_simple").removesuffix("_faithful"))
    if base in LOOKS:
        shared = LOOKS[base]
        return shared._replace(name=f"{shared.name} faithful") if name.endswith("_faithful") else shared
    try:
        return Look(find(name).title)
    except InputError:
        return Look(LABELS.get(name, name.replace("_", " ")))


def looks(values: Iterable[object]) -> dict[Any, Look]:
    """The looks of several values, each with its own colour: policies as everywhere, numbers from pale to dark."""
    by_name = {name: look(name) for name in values}
    taken, palette = {part for seen in by_name.values() for part in seen}, SEQUENCE
    if all(isinstance(name, NUMBER) for name in by_name):
        palette = sns.color_palette("crest", len(by_name)).as_hex()
    colours, shapes = (cycle([one for one in ones if one not in taken] or ones) for ones in (palette, SHAPES))
    own = {name: Look(seen.name, next(colours), next(shapes)) for name, seen in by_name.items() if not seen.colour}
    return by_name | own


def set_style() -> None:
    """The book's style for all figures of a notebook, which are drawn as SVG: fit for a phone at `NARROW` inches."""
    plt.style.use([WORDS / "book.mplstyle", {"figure.constrained_layout.use": False, "figure.figsize": (NARROW, 3.0)}])
    set_matplotlib_formats("svg", metadata={"Date": None})


def intervals(
    table: pd.DataFrame,
    x: str,
    y: str,
    *,
    colour: str | None = None,
    panel: str | None = None,
    line: bool = False,
    percent: bool = False,
    log: bool = False,
    labels: Mapping[str, str] | None = None,
    lines: pd.DataFrame | None = None,
    height: float | None = None,
) -> sns.FacetGrid:
    """Points with their 95% intervals (columns value, low, high); one of x and y is "value", the other names places.

    colour: a column of names, side by side at each place. panel: a column that facets, one panel below the other. line:
    join points along the places; numbers then stand where they are. log: the places' axis. percent: values are shares.
    labels: of columns and of values. lines: of `floors`. height: inches of a panel. The grid stays open to additions.
    """
    labels = {"value": "token F1", "policy": ""} | dict(labels or {})
    upright, along = y == "value", x if y == "value" else y
    places, series = (list(dict.fromkeys(table[name])) if name else [None] for name in (along, colour))
    numeric, seen = line and all(isinstance(place, NUMBER) for place in places), looks(series)
    height = height or (2.6 if upright else 0.5 + len(places) * max(0.25, 0.13 * len(series)))
    grid = sns.FacetGrid(table, row=panel, height=height, aspect=NARROW / height)

    def named(value: Any) -> str:
        return labels.get(str(value), look(value).name)

    for (i, _, _), part in grid.facet_data():
        axes = grid.axes[i, 0]
        for n, who in enumerate(series):
            points = part[part[colour] == who] if colour else part
            shift = 0.0 if numeric or colour == along else (n - (len(series) - 1) / 2) * 0.7 / len(series)
            at = [place if numeric else places.index(place) + shift for place in points[along]]
            form = {"color": seen[who].colour, "marker": seen[who].marker, "ls": "-" if line else "none"}
            _bars(axes, points, at, upright, **form, label=named(who) if colour not in (None, along) else None)
        for floor, (shade, dashes) in zip(() if lines is None else lines.itertuples(), cycle(FLOORS), strict=False):
            draw = axes.axhline if upright else axes.axvline
            draw(floor.value, color=shade, lw=1, ls=dashes, zorder=1, label=look(floor.control).name)
        if log:
            (axes.set_xscale if upright else axes.set_yscale)("log")
        if len(places) <= 8 or not upright:
            of_places = axes.xaxis if upright else axes.yaxis
            ticks = places if numeric else range(len(places))
            of_places.set_ticks(ticks, [f"{place:g}" if numeric else named(place) for place in places])
            of_places.set_minor_locator(NullLocator())
        if not upright:
            axes.set_ylim(len(places) - 0.5, -0.5)  # from top to bottom
        if percent:
            (axes.yaxis if upright else axes.xaxis).set_major_formatter(PercentFormatter(1, decimals=0))
        axes.set_title(named(grid.row_names[i]) if panel else "")
    grid.set_axis_labels(*(labels.get(name, name.replace("_", " ")) for name in (x, y)))
    _legend(grid)
    return grid


def _bars(axes: Axes, points: pd.DataFrame, at: Sequence[Any], upright: bool, **form: Any) -> None:
    """Points at these places, with their intervals."""
    value, low, high = (points[name].astype(float) for name in ("value", "low", "high"))
    error = np.stack([(value - low).clip(lower=0).fillna(0), (high - value).clip(lower=0).fillna(0)])
    where = {"x": at, "y": value, "yerr": error} if upright else {"x": value, "y": at, "xerr": error}
    axes.errorbar(**where, **form, lw=1.2, elinewidth=1.1)


def _legend(grid: sns.FacetGrid) -> None:
    """The legend below the panels, if anything has a name."""
    handles, names = grid.axes[0, 0].get_legend_handles_labels()
    if names:
        columns = 2 if max(map(len, names)) > 14 else 3
        grid.figure.legend(handles, names, loc="upper center", bbox_to_anchor=(0.5, 0), ncols=columns)


def floors(controls: pd.DataFrame, full: pd.DataFrame, column: str = "token_f1") -> pd.DataFrame:
    """Reference lines for `intervals`: means of the full cache's rows, and of `run.controls`, which no policy gives."""
    tables = [table.assign(control=name) for name, table in (("full", full), *controls.groupby("control", sort=False))]
    means = stats.means(pd.concat(tables).dropna(subset=column), "control", column)
    return means[means.value > 0].reset_index(drop=True)  # a line on the axis says nothing
