"""Figures that all chapters share: estimates with their intervals, and how a policy looks.

A figure takes a table with the columns value, low, high (`stats.means`, `stats.contrasts`) and the names of those that
say where a point stands, how it looks and in which panel. Everything else is seaborn and matplotlib.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from IPython.display import HTML, Markdown, display
from matplotlib import rc_params_from_file
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.category import StrCategoryFormatter
from matplotlib.collections import PathCollection
from matplotlib.colors import to_rgba_array
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.lines import AxLine, Line2D
from matplotlib.ticker import FuncFormatter, NullLocator, PercentFormatter, StrMethodFormatter
from matplotlib_inline.backend_inline import set_matplotlib_formats

from kvrepro.engine.policy import find
from kvrepro.errors import InputError
from kvrepro.experiment import stats
from kvrepro.experiment.claims import LABELS
from kvrepro.paths import DATA

WORDS = DATA / "words"
NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")  # of a figure
LARGE = 300_000  # characters of an SVG
EACH, ALL = 12, 36  # hover texts of one curve or set of points, and of a whole panel, at most
WHITE = 'style="background: white"'  # in Jupyter; the book shows figures on its own ground, light or dark
WIDTH = 7.2  # inches: the book's column
NARROW = 4.8  # inches: letters of 9 points are read on a phone
DASHED = (0, (4, 2))
CONTROLS = {  # reference lines that belong to no policy: colour and dashes
    "full": ("black", DASHED),
    "first_word": ("#B22222", (0, (1, 1.5))),
    "copy": ("#7B4FA3", (0, (4, 1.5, 1, 1.5))),
    "no_passage": ("#8B6F47", (0, (6, 3))),
    "no_system_prompt": ("#8B6F47", (0, (6, 3))),
    "preamble": ("#7B4FA3", (0, (4, 1.5, 1, 1.5))),
    "refusal": ("#8C8C8C", (0, (1, 4))),
}
MANY = 4  # panels side by side; where there are more, names of rows stand at the left, and one label below them all
HOVER_TEXTS: WeakKeyDictionary[Axes, list[tuple[float, float, str]]] = WeakKeyDictionary()  # x, y, text
STYLE = rc_params_from_file(WORDS / "book.mplstyle", use_default_template=False)


class Look(NamedTuple):
    """Name, colour and marker: the same in every figure of the book."""

    name: str
    colour: str
    marker: str


# After Okabe and Ito's palette; a method, its simplified and its faithful form look alike.
LOOKS = {row.policy: Look(row.name, row.colour, row.marker) for row in pd.read_csv(WORDS / "looks.csv").itertuples()}
TITLES = {look.name for look in LOOKS.values()}
ALIKE = {"slw": "streaming_llm", "random_sample": "random"}
SEQUENCE = "#0072B2 #D55E00 #009E73 #E69F00 #CC79A7 #56B4E9 #5F5F5F #8C564B #7B4FA3 #A0A000".split()
SHAPES = "osD^vPXphd"


def look(value: object, place: int = 0) -> Look:
    """The look of a policy, by its name; of anything else, by its place in a sequence. Readings have titles."""
    name = f"{value:g}" if isinstance(value, float | np.floating) else str(value)
    base = ALIKE.get(name, name.removesuffix("_simple").removesuffix("_faithful"))
    if base in LOOKS:
        shared = LOOKS[base]
        return shared._replace(name=f"{shared.name} faithful") if name.endswith("_faithful") else shared
    try:
        title = find(name).title
    except InputError:
        title = LABELS.get(name, name.replace("_", " "))
    return Look(title, SEQUENCE[place % len(SEQUENCE)], SHAPES[place % len(SHAPES)])


def looks(values: Iterable[object]) -> dict[Any, Look]:
    """The looks of several values, each with its own colour: policies as everywhere, numbers from pale to dark."""
    names = list(dict.fromkeys(values))
    by_name = {name: look(name, place) for place, name in enumerate(names)}
    if all(isinstance(name, int | float | np.number) for name in names):
        shades = sns.color_palette("crest", len(names)).as_hex()
        return {name: by_name[name]._replace(colour=shade) for name, shade in zip(names, shades, strict=True)}
    others = [name for name in names if by_name[name].name not in TITLES]
    used = {by_name[name].colour for name in names if name not in others}
    for name in others:
        colour = by_name[name].colour
        colour = next((free for free in (colour, *SEQUENCE) if free not in used), colour)
        by_name[name] = by_name[name]._replace(colour=colour)
        used.add(colour)
    return by_name


def set_style() -> None:
    """The book's style for all figures of a notebook, which are drawn as SVG: fit for a phone at `NARROW` inches."""
    plt.rcParams.update(STYLE | {"figure.constrained_layout.use": False, "figure.figsize": (NARROW, 3.0)})
    set_matplotlib_formats("svg", metadata={"Date": None})


def intervals(
    table: pd.DataFrame, x: str, y: str, *, colour: str | None = None, panel: str | None = None, line: bool = False,
    percent: bool = False, log: bool = False, labels: Mapping[str, str] | None = None,
    lines: pd.DataFrame | None = None, title: str = "", height: float | None = None,
) -> sns.FacetGrid:  # fmt: skip
    """Points with their 95% intervals (columns value, low, high); one of x and y is "value", the other names places.

    colour: a column of policies or other names, side by side at each place. panel: a column that facets, one panel
    below the other. line: join points along the places; numbers then stand where they are. log: the places' axis.
    percent: values are shares. labels: of columns and of values. lines: of `floors`, drawn across. height: inches of a
    panel. The grid stays open, so that a cell may add to it before `plt.show()`.
    """
    labels = {"value": "token F1", "policy": ""} | dict(labels or {})
    upright, along = y == "value", x if y == "value" else y
    places, series = (list(dict.fromkeys(table[name])) if name else [None] for name in (along, colour))
    numeric = line and all(isinstance(place, int | float | np.number) for place in places)
    seen = looks(series) if colour else {None: Look("", "#0072B2", "o")}
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
            value, low, high = (points[name].astype(float) for name in ("value", "low", "high"))
            error = np.stack([(value - low).clip(lower=0).fillna(0), (high - value).clip(lower=0).fillna(0)])
            where = {"x": at, "y": value, "yerr": error} if upright else {"x": value, "y": at, "xerr": error}
            form = {"color": seen[who].colour, "marker": seen[who].marker, "ls": "-" if line else "none"}
            axes.errorbar(**where, **form, lw=1.2, elinewidth=1.1, label=named(who) if colour else None)
        if lines is not None:
            for floor in lines.itertuples():
                name = "full cache" if floor.control == "full" else floor.control.replace("_", " ")
                shade, dashes = CONTROLS[floor.control]
                draw = axes.axhline if upright else axes.axvline
                draw(floor.value, color=shade, lw=1, ls=dashes, zorder=1, label=name)
        texts = [f"{place:g}" if numeric else named(place) for place in places]
        _scales(axes, places if numeric else range(len(places)), texts, upright, log, percent)
        axes.set_title(named(grid.row_names[i]) if panel else "")
    grid.set_axis_labels(*(labels.get(name, name.replace("_", " ")) for name in (x, y)))
    handles, names = grid.axes[0, 0].get_legend_handles_labels()
    if names and (colour != along or lines is not None):
        columns = 2 if max(map(len, names)) > 14 else 3
        grid.figure.legend(handles, names, loc="upper center", bbox_to_anchor=(0.5, 0), ncols=columns)
    grid.figure.suptitle(title, x=0.02, y=1, ha="left", va="bottom", fontsize=9, fontweight="bold")
    return grid


def _scales(axes: Axes, at: Sequence[Any], texts: list[str], upright: bool, log: bool, percent: bool) -> None:
    """The axis of places, from top to bottom where they stand below each other, and that of values."""
    places, values = (axes.xaxis, axes.yaxis) if upright else (axes.yaxis, axes.xaxis)
    if log:
        (axes.set_xscale if upright else axes.set_yscale)("log")
    if len(at) <= 8 or not upright:
        places.set_ticks(at, texts)
        places.set_minor_locator(NullLocator())
    if not upright:
        axes.set_ylim(len(at) - 0.5, -0.5)
    if percent:
        values.set_major_formatter(PercentFormatter(1, decimals=0))


def estimates(
    table: pd.DataFrame, x: str, y: str, *, colour: str | None = None, fill: str | None = None,
    panel: str | None = None, row: str | None = None, line: bool = False, band: bool = False,
    reference: pd.DataFrame | None = None, labels: Mapping[str, str] | None = None, height: float = 3.4,
    wrap: int | None = None, percent: bool = False, log: str = "", **share: Any,
) -> Figure:  # fmt: skip
    """Points with their 95% intervals; one of x and y is "value", the other a column of places, numbers or names.

    colour: a column of policies or other names. fill: a column of True (filled) and False (hollow). panel, row: columns
    that facet. line: join points along the places (then numbers stand where they are). band: shade the interval.
    reference: estimates to compare with, drawn dashed, by `panel` and `row` where it has these columns; a column
    `control` names several of them, "full" or one of `CONTROLS` (see `floors`). labels: names of columns, and of
    `True` and `False` in the legend. height: inches, of one row. wrap: panels side by side, the others below (without
    `row`). log: "x", "y" or "xy". share: `sharex`, `sharey` of the panels.
    For a table without rows the figure says so. Raises InputError where a column is missing.
    Long, because all figures of estimates are this one loop over panels and series.
    """
    if table.empty:
        return nothing()
    missing = {name for name in (x, y, colour, fill, panel, row) if name} | {"value", "low", "high"}
    if missing := missing - set(table):
        raise InputError(f"a table of {len(table)} rows cannot be drawn: it has no column {', '.join(sorted(missing))}")
    labels = {"value": "token F1", "policy": "", "protected": ""} | dict(labels or {})
    places = list(dict.fromkeys(table[x if y == "value" else y]))
    numeric = line and all(isinstance(place, int | float | np.number) for place in places)
    named = (table[name] if name else [None] * len(table) for name in (colour, fill))
    series = list(dict.fromkeys(zip(*named, strict=True)))
    shown = looks(who for who, _ in series) if colour else {None: Look("", "#0072B2", "o")}
    upright, along = y == "value", x if y == "value" else y
    rows = len({filled for _, filled in series}) if colour == along else len(series)  # side by side at one place
    with style():
        columns = table[panel].nunique() if panel else 1
        columns = columns if wrap is None else min(wrap, columns)
        few = columns <= MANY
        grid = _facets(table, panel, row, columns, bool(wrap), height, share)
        for (i, j, _), part in grid.facet_data():
            axes = grid.facet_axis(i, j)
            for n, (who, filled) in enumerate(series):
                points = part[(part[colour] == who) if colour else part.value.notna()]
                points = points[points[fill] == filled] if fill else points
                shift = 0.0 if numeric else (n % rows - (rows - 1) / 2) * min(0.2, 0.8 / rows)
                at = [place if numeric else places.index(place) + shift for place in points[along]]
                _points(axes, at, points, shown[who], upright, bool(filled or not fill), line, band)
                state = [labels.get(str(filled), f"{'' if filled else 'not '}{fill}")] if fill else []
                form = ".0%" if percent else ".3g"
                texts = [
                    hover_text(point, [shown[who].name, *state, look(point[along]).name], form)
                    for point in points.to_dict("records")
                ]
                across, up = (at, points.value) if upright else (points.value, at)
                add_hover_texts(axes, across, up, texts)
            facet = {row: grid.row_names[i]} if row else {}
            facet |= {panel: grid.col_names[j]} if panel else {}
            _reference(axes, reference, facet, upright)
            for direction in log:
                getattr(axes, f"set_{direction}scale")("log")
            _places(axes, places, numeric, upright, labels, few)
            names = [look(value).name for value in facet.values()]
            axes.set_title(" · ".join(names) if few else names[-1] if i == 0 else "", fontsize=9 if few else 7)
            if percent:
                (axes.yaxis if upright else axes.xaxis).set_major_formatter(lambda v, _: f"{100 * v:g}%")
        below, beside = (labels.get(name, name.replace("_", " ")) for name in (x, y))
        _name_axes(grid, below, beside, columns, few, bool(wrap))
        _legend(grid.figure, shown if colour and colour != along else {}, fill, labels, reference, line)
    return done(grid.figure)


def _facets(
    table: pd.DataFrame, panel: str | None, row: str | None, columns: int, wrap: bool, height: float,
    share: Mapping[str, Any],
) -> sns.FacetGrid:  # fmt: skip
    """Empty panels, as wide as the page together."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # seaborn's own layout does not fit small panels
        size = {"height": height, "aspect": WIDTH / columns / height, "col_wrap": columns if wrap else None}
        grid = sns.FacetGrid(table, col=panel, row=row, **share, **size)
    grid.figure.set_layout_engine("constrained")
    return grid


def _name_axes(grid: sns.FacetGrid, below: str, beside: str, columns: int, few: bool, wrap: bool) -> None:
    """Write the axes' names below the last panels and beside the first ones; where panels are many, only once."""
    every = list(grid.axes.flat)
    for n, axes in list(enumerate(every))[-columns:]:
        axes.set_xlabel(below if (few and not wrap) or n % columns == columns // 2 else "")
    for n, axes in enumerate(every[::columns]):
        axes.set_ylabel(look(grid.row_names[n]).name if grid.row_names and not few else beside)


def _points(
    axes: Axes, at: Sequence[float], points: pd.DataFrame, look: Look, upright: bool, filled: bool, line: bool,
    band: bool,
) -> None:  # fmt: skip
    """Draw one series of estimates at its places along the axis of names or numbers."""
    value, low, high = (points[name].to_numpy(float) for name in ("value", "low", "high"))
    low, high = np.where(np.isnan(low), value, low), np.where(np.isnan(high), value, high)
    error = np.stack([np.maximum(0, value - low), np.maximum(0, high - value)])
    style = {"color": look.colour, "marker": look.marker, "mfc": look.colour if filled else "white", "elinewidth": 1.1}
    style |= {"ls": ("-" if filled else ":") if line else "none", "lw": 1.2}
    if band:
        axes.plot(at, value, **{name: style[name] for name in ("color", "marker", "mfc", "ls", "lw")})
        axes.fill_between(at, low, high, color=look.colour, alpha=0.15, lw=0)
    else:
        where = {"x": at, "y": value, "yerr": error} if upright else {"x": value, "y": at, "xerr": error}
        for bars in axes.errorbar(**where, **style)[2]:
            bars.set_alpha(0.5 if line else 1)


def hover_text(estimate: Mapping[Any, Any], names: Iterable[str], form: str) -> str:
    """An estimate in words: `LRU, 256: 0.19 [0.11, 0.27], n = 24`."""
    numbers = {name: estimate.get(name, np.nan) for name in ("low", "high", "n")}
    interval = "" if pd.isna(numbers["low"]) else f" [{numbers['low']:{form}}, {numbers['high']:{form}}]"
    n = "" if pd.isna(numbers["n"]) else f", n = {numbers['n']:.0f}"
    return f"{', '.join(dict.fromkeys(filter(None, names)))}: {estimate['value']:{form}}{interval}{n}"


def add_hover_texts(axes: Axes, x: Iterable[float], y: Iterable[float], texts: Iterable[str]) -> None:
    """Set the texts that a reader sees on pointing at places of a panel, given in its own coordinates."""
    HOVER_TEXTS.setdefault(axes, []).extend(zip(x, y, texts, strict=True))


def _reference(axes: Axes, reference: pd.DataFrame | None, facet: Mapping[str, Any], upright: bool) -> None:
    if reference is None:
        return
    for name, value in facet.items():
        if name in reference:
            reference = reference[reference[name] == value]
    for _, row in reference.iterrows():
        line, span = (axes.axhline, axes.axhspan) if upright else (axes.axvline, axes.axvspan)
        name = row.get("control", "full")
        colour, dashes = CONTROLS[name]
        line(row.value, color=colour, lw=1, ls=dashes, zorder=1)
        if name == "full" and pd.notna(row.low):  # the others are many, and their lines are enough
            span(row.low, row.high, color="#BDBDBD", alpha=0.45, lw=0, zorder=0)


def _places(
    axes: Axes, places: Sequence[Any], numeric: bool, upright: bool, labels: Mapping[str, str], few: bool
) -> None:
    if numeric:
        if not few:
            places = sorted(places)[:: max(1, len(places) // 2)]
        if len(places) <= 8:
            axis = axes.xaxis if upright else axes.yaxis
            axis.set_ticks(places, [f"{place:g}" for place in places])
            axis.minorticks_off()
        return
    names = [f"{place:g}" if isinstance(place, float) else labels.get(str(place), look(place).name) for place in places]
    (axes.set_xticks if upright else axes.set_yticks)(range(len(places)), names)
    axes.grid(axis="x" if upright else "y", visible=False)
    if not upright and not axes.yaxis_inverted():
        axes.set_ylim(len(places) - 0.5, -0.5)


def _legend(
    figure: Figure, shown: Mapping[Any, Look], fill: str | None, labels: Mapping[str, str],
    reference: pd.DataFrame | None, line: bool,
) -> None:  # fmt: skip
    ls = "-" if line else "none"
    handles: list[Any] = [
        Line2D([], [], color=c, marker=m, ls=ls, label=labels.get(name, name)) for name, c, m in shown.values()
    ]
    if fill:
        names = [labels.get(str(value), f"{'' if value else 'not '}{fill}") for value in (True, False)]
        handles.append(Line2D([], [], color="#333333", marker="o", ls="none", label=names[0]))
        handles.append(Line2D([], [], color="#333333", marker="o", mfc="white", ls="none", label=names[1]))
    drawn = [] if reference is None else dict.fromkeys(reference.get("control", ["full"]))
    for name in drawn:
        colour, dashes = CONTROLS[name]
        label = labels.get("reference", "full cache") if name == "full" else name.replace("_", " ")
        handles.append(Line2D([], [], color=colour, lw=1, ls=dashes, label=label))
    if len(handles) > 1:
        figure.legend(handles=handles, loc="outside lower center", ncols=min(5, len(handles)), columnspacing=1.2)


def floors(controls: pd.DataFrame, full: pd.DataFrame, column: str = "token_f1") -> pd.DataFrame:
    """Reference lines for `estimates`: the means of the full cache and of the controls, answers that no policy gives.

    controls: of `controls.of_items`; full: rows of the full cache.
    """
    tables = [table.assign(control=name) for name, table in (("full", full), *controls.groupby("control", sort=False))]
    means = stats.means(pd.concat(tables).dropna(subset=column), "control", column)
    return means[means.value > 0].reset_index(drop=True)  # a line on the axis says nothing


def by_evidence(
    rows: pd.DataFrame, by: Sequence[str] = ("policy",), column: str = "token_f1", parts: int = 5
) -> pd.DataFrame:
    """Scores by the place of the evidence: means per group in equal parts of the prompt (`evidence_at`: a part's
    middle), and the mean share of the evidence that is held, where rows have it (`evidence_held`).

    Rows without a known place of the evidence are left out.
    """
    placed = rows.dropna(subset=["evidence_at", column])
    at = (np.minimum(placed.evidence_at * parts // 1, parts - 1) + 0.5) / parts
    placed, groups = placed.assign(evidence_at=at.round(2)), [*by, "evidence_at"]
    means = stats.means(placed, groups, column)
    if len(placed) and "evidence_coverage" in placed:
        held = placed.groupby(groups, sort=False).evidence_coverage.mean()
        means = means.join(held.rename("evidence_held"), on=groups)
    return means.sort_values("evidence_at", kind="stable")


def evidence(
    rows: pd.DataFrame, column: str = "token_f1", *, row: str | None = None, fill: str | None = None, parts: int = 5,
    **options: Any,
) -> Figure:  # fmt: skip
    """Each policy's score by the place of the evidence, beside the share of the evidence that it holds: a panel per
    policy, which shows the parts of the prompt that it keeps or misses.

    row, fill, options: as in `estimates`; parts: equal parts of the prompt. Without rows that have a place of the
    evidence the figure says so.
    """
    groups, labels = [name for name in (row, fill, "policy") if name], dict(options.pop("labels", {}))
    names = {column: labels.pop("value", "token F1"), "evidence_coverage": "evidence held"}
    tables = [by_evidence(rows, groups, key, parts).assign(measure=name) for key, name in names.items() if key in rows]
    labels = {"evidence_at": "place of the evidence (0 to 1)", "value": "", "measure": ""} | labels
    options |= {"colour": "measure", "fill": fill, "panel": "policy", "row": row, "line": True, "labels": labels}
    return estimates(pd.concat(tables), "evidence_at", "value", **options)


def nothing() -> Figure:
    """The figure that stands for a table without rows."""
    figure, [axes] = panels(1, height=0.6)
    axes.set_axis_off()
    axes.text(0.5, 0.5, "nothing to draw: no item or condition has what this shows", ha="center", va="center")
    return figure


def heat(
    table: pd.DataFrame, x: str, y: str, *, panel: str | None = None, percent: bool = False, form: str = ".2f",
    height: float = 3.2, labels: Mapping[str, str] | None = None, **style: Any,
) -> Figure:  # fmt: skip
    """A heat map of `value` over two other columns, with a panel per value of a third.

    Cells without a value stay blank; for a table without rows the figure says so. A cell shows its value on hover, and
    its interval and n where the table has them (low, high, n). percent: values are shares, shown times 100.
    """
    if table.empty:
        return nothing()
    if percent:
        table = table.assign(**{name: 100 * table[name] for name in ("value", "low", "high") if name in table})
    groups = list(table.groupby(panel, sort=False)) if panel else [("", table)]
    across, down = (list(dict.fromkeys(table[name])) for name in (x, y))  # the same in all panels
    labels = {name: name.replace("_", " ") for name in (x, y)} | dict(labels or {})
    limits = {"vmin": table.value.min(), "vmax": table.value.max(), "cmap": "crest"} | style
    named_rows = any(isinstance(name, str) for name in down)  # a number alone does not say what it numbers

    def named(column: str, value: Any) -> str:
        return look(value).name.replace("\n", " ") if isinstance(value, str) else f"{labels[column]} {value:g}"

    with plt.rc_context(STYLE | {"axes.grid": False}):
        figure, grid = plt.subplots(1, len(groups), figsize=(WIDTH, height), sharey=True, squeeze=False)
        for axes, (name, part) in zip(grid[0], groups, strict=True):
            wide = part.pivot_table(index=y, columns=x, values="value", sort=False, observed=True)
            wide = wide.reindex(index=down, columns=across)
            wide = wide.rename(index=lambda v: look(v).name if isinstance(v, str) else v)
            small = wide.size <= 200  # numbers fit into the cells; otherwise a colour bar says what colours mean
            written = {"annot": small, "fmt": form, "annot_kws": {"size": 7.5}, "linewidths": 0.5 * small}
            sns.heatmap(wide, ax=axes, cbar=not small, **written, **limits)
            axes.set_title(look(name).name if panel else "", fontsize=9 if len(groups) <= MANY else 7.5)
            axes.set(xlabel=labels[x], ylabel="" if named_rows or axes is not grid[0][0] else labels[y])
            columns = [name for name in ("value", "low", "high", "n") if name in part]
            means = part.dropna(subset="value").groupby([y, x], sort=False, observed=True)[columns].mean()
            cells = means.reset_index().to_dict("records")
            add_hover_texts(
                axes, [across.index(cell[x]) + 0.5 for cell in cells], [down.index(cell[y]) + 0.5 for cell in cells],
                [hover_text(cell, [named(y, cell[y]), named(x, cell[x])], form) for cell in cells],
            )  # fmt: skip
    return done(figure)


def panels(count: int, height: float = 3.4, **options: Any) -> tuple[Figure, Sequence[Axes]]:
    """A figure in the book's style with `count` panels side by side, to draw into with matplotlib."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, count, figsize=(WIDTH, height), squeeze=False, **options)
    return done(figure), list(axes[0])


def style() -> Any:
    """The book's style, as a context for drawing with seaborn, which lays out its figures itself."""
    return plt.rc_context(STYLE | {"figure.constrained_layout.use": False})


def done(figure: Figure) -> Figure:
    """The figure, taken out of pyplot's hands so that a notebook shows it once, as the cell's value."""
    plt.close(figure)
    return figure


def show(drawing: Figure, name: str, caption: str, alt: str, data: pd.DataFrame | None = None) -> None:
    """Show a figure with its caption; in the book it has a number and the label `fig-<chapter>-<name>`.

    name: lower-case words with hyphens, once in a chapter; caption: what is shown, in markdown; alt: what one sees, for
    those who do not; data: the table behind it, offered beside the figure. Raises InputError for other values.
    """
    if not NAME.fullmatch(name):
        raise InputError(f"figure {name!r}: its name is of lower-case words with hyphens, such as 'by-length'")
    caption, alt = (" ".join(text.split()) for text in (caption, alt))
    if not caption or len(alt) < 20:
        raise InputError(f"figure {name!r} needs a caption, and an alternative text that says what one sees")
    metadata = {"figure": name, "caption": caption, "alt": alt}
    if data is not None:
        metadata["data"] = data.to_csv(index=any(data.index.names), float_format="%.6g")
    display({"image/svg+xml": vector(drawing), "text/plain": alt}, raw=True, metadata={"kvrepro": metadata})
    display(Markdown(f"**Figure.** {caption}"), metadata={"kvrepro": {"caption_of": name}})


def table(frame: pd.DataFrame, rows: int = 10, digits: int = 3, width: int = 60) -> HTML:
    """The first rows of a table as readers see it: policies and readings by their names, numbers rounded, long texts
    cut, no index that only counts."""
    shown = (frame.reset_index() if any(frame.index.names) else frame).head(rows)
    named = shown.columns.intersection(["policy", "reading", "regime"])

    def written(value: Any) -> str:
        if isinstance(value, float | np.floating):
            return "" if np.isnan(value) else f"{value:.{digits}f}"
        text = str(value)
        return text if len(text) <= width else f"{text[:width].rstrip()} …"

    columns = {}
    for name, column in shown.items():
        whole = pd.api.types.is_float_dtype(column) and (column.dropna() % 1 == 0).all() and column.max() > 1
        column = column.astype("Int64") if whole else column
        columns[str(name).replace("_", " ")] = [
            "" if pd.api.types.is_scalar(value) and pd.isna(value)
            else look(value).name if name in named else written(value) for value in column
        ]  # fmt: skip
    return HTML(pd.DataFrame(columns).to_html(index=False, border=0, classes="rows"))


def ends(table: pd.DataFrame, *columns: str, percent: bool = False) -> str:
    """The smallest and the largest value of a table of estimates, for alternative texts: `from 0.19 (LRU) to 0.63
    (QUEST)`. columns: those that name a row."""
    rows = table.dropna(subset="value")
    if rows.empty:
        return "without any value"
    extremes = rows.iloc[rows.value.argmin()], rows.iloc[rows.value.argmax()]
    form = "z.0%" if percent else "z.2f"  # z: no "-0.00"
    low, high = (f"{row.value:{form}} ({', '.join(look(row[name]).name for name in columns)})" for row in extremes)
    return f"from {low} to {high}"


def vector(drawing: Figure) -> str:
    """A figure as SVG, on white, with the hover texts of its points (`tell`). Where the file would be large, what the
    axes hold is drawn as pixels."""
    for rasterised in (False, True):
        for axes in drawing.axes:
            for artist in (*axes.collections, *axes.lines, *axes.patches):
                if not isinstance(artist, AxLine):  # which cannot be pixels, and would warn
                    artist.set_rasterized(rasterised)
        written = io.StringIO()
        save(drawing, written, bbox_inches="tight", dpi=200)
        if len(text := written.getvalue()) < LARGE:
            break
    text = text[text.index("<svg") :].replace("<svg ", f"<svg {WHITE} ", 1)
    return text.replace("</svg>", _hovered(drawing) + "</svg>")


def save(drawing: Figure, file: Path | io.StringIO, **options: Any) -> None:
    """Write a figure as SVG: the same figure is the same file."""
    with plt.rc_context({"svg.hashsalt": "kvrepro"}):
        drawing.savefig(file, format="svg", transparent=True, metadata={"Date": None}, **options)


def _hovered(drawing: Figure) -> str:
    """Invisible circles with titles over the points of a drawing, in the coordinates of its SVG: 72 to an inch."""
    corner, circles = drawing.get_tightbbox().padded(plt.rcParams["savefig.pad_inches"]), []
    for axes in drawing.axes:
        for x, y, text in HOVER_TEXTS.get(axes) or _some(list(_drawn(axes)), ALL):
            place = axes.transData.transform((x, y))
            if axes.bbox.padded(1).contains(*place):  # what lies beyond the limits is not seen
                across, down = place / drawing.dpi
                at = 72 * (across - corner.x0), 72 * (corner.y1 - down)
                where = f'cx="{at[0]:.1f}" cy="{at[1]:.1f}"'
                circles.append(f'<circle {where} r="6" opacity="0"><title>{escape(text, quote=False)}</title></circle>')
    return "".join(circles)


def _drawn(axes: Axes) -> Iterable[tuple[float, float, str]]:
    """Hover texts for a panel that has none of its own: places of its curves and points (at most EACH of each) and of
    its bars' ends, with the legend's name for their colour and their position."""
    legends = [legend for legend in (axes.get_legend(), *axes.figure.legends) if legend is not None]
    keys = [key for legend in legends for key in zip(legend.legend_handles, legend.get_texts(), strict=False)]
    names = {tuple(_colours(handle)[0]): text.get_text() for handle, text in keys}
    curves = [(line, line.get_xydata()) for line in axes.lines if len(line.get_xydata()) > 2]  # two: a line for the eye
    dots = [(dot, np.ma.getdata(dot.get_offsets())) for dot in axes.collections if isinstance(dot, PathCollection)]
    bars = [(bar, [(box.x0 + box.width / 2, box.y1) if upright else (box.x1, box.y0 + box.height / 2)])
            for group in axes.containers if isinstance(group, BarContainer) for bar in group.patches
            for box, upright in [(bar.get_bbox(), group.orientation == "vertical")]]  # fmt: skip
    for drawn, places in curves + dots + bars:
        colours = _colours(drawn)
        for i in _some(range(len(places)), EACH):
            x, y = places[i]
            name = names.get(tuple(colours[i % len(colours)]), "")
            where = f"{axes.get_xlabel()} {_read(axes.xaxis, x)}, {axes.get_ylabel()} {_read(axes.yaxis, y)}".strip()
            yield x, y, f"{name}: {where}" if name else where


def _some(things: Sequence[Any], most: int) -> list[Any]:
    """At most `most` of the things: the first, the last, and others evenly between them."""
    places = np.linspace(0, len(things) - 1, min(most, len(things))).round().astype(int)
    return [things[i] for i in places]


def _colours(drawn: Any) -> Any:
    """The colours of a line, of points, or of their key in a legend: [1 or points, 4]."""
    colours = to_rgba_array(drawn.get_color() if isinstance(drawn, Line2D) else drawn.get_facecolor())
    return colours if len(colours) else np.zeros((1, 4))


def _read(axis: Axis, value: float) -> str:
    """A place on an axis as its tick labels would write it, or as a number where they are plain numbers."""
    form = axis.get_major_formatter()
    worded = isinstance(form, FuncFormatter | PercentFormatter | StrMethodFormatter | StrCategoryFormatter)
    return form(value) if worded else f"{value:.4g}"
