"""The leakage chapter's figures: studies in, a matplotlib Figure out, in the style of `kvrepro.experiment.figure`.

Bands and bars are 95% intervals over resampled system prompts; where fewer than six stand behind a point,
there is none. One colour and one marker per policy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import product
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import PercentFormatter

from kvrepro.chapters.leakage import experiment, study, tables
from kvrepro.chapters.leakage.study import Study
from kvrepro.experiment import claims, figure, stats
from kvrepro.experiment.judge import NotTestable

NAMES = {
    "streaming_llm": "StreamingLLM",
    "h2o": "H2O",
    "k_norm": "K-norm",
    "snapkv": "SnapKV",
    "tova": "TOVA",
    "defensive_kv": "DefensiveKV",
    "dropkv": "DropKV",
}
NARROW = NAMES | {"streaming_llm": "Streaming-\nLLM", "defensive_kv": "Defensive-\nKV"}
COLOURS = {name: figure.COLOURS[name] for name in ("streaming_llm", "h2o", "snapkv")}
COLOURS |= {"k_norm": "#8C564B", "tova": "#1F4E9E", "defensive_kv": "#B8860B", "dropkv": "#56B4E9"}
MARKERS = {name: figure.MARKERS[name] for name in ("streaming_llm", "h2o", "snapkv")}
MARKERS |= {"k_norm": "v", "tova": "P", "defensive_kv": "o", "dropkv": "X"}
VARIANTS = {
    "default": ("default", "#444444", "o", "-"),
    "whitelist": ("whitelist", "#E69F00", "s", "--"),
    "opening": ("first sentence", "#D55E00", "v", ""),
    "whole": ("whole defense", "#CC79A7", "P", ""),
    "fair": ("fair", "#0072B2", "D", "-."),
    "ends": ("both ends", "#009E73", "^", ":"),
    "debias 0.4": ("debias, λ = 0.4", "#56B4E9", "X", ""),
}
PARTS = {"directive": ("directive", "#0072B2", "-"), "defense": ("defense", "#D55E00", "--")}
ORDERS = {"normal": "defense first", "flipped": "directive first"}
LINES = {"normal": ("#0072B2", "-"), "flipped": ("#D55E00", "--")}
RULES = {"single": ("one rule", "#0072B2", "o", "-"), "multi": ("two to five rules", "#D55E00", "s", "--")}
RATIO = "share dropped"
NOTHING = "no compressed prompt was answered: every row has an error"


def _name(policy: str, narrow: bool = False) -> str:
    """A policy's title; a reader's own is called as in its file."""
    return (NARROW if narrow else NAMES).get(policy, policy.rpartition(":")[2])


def _style(policy: str) -> dict[str, Any]:
    return {"color": COLOURS.get(policy, "#5F5F5F"), "marker": MARKERS.get(policy, "*")}


def _band(axes: Axes, x: Sequence[float], curve: Iterable[tuple[float, float, float]], **style) -> None:
    """A curve of (value, low, high) with its band."""
    found = np.array(list(curve))
    (line,) = axes.plot(x, found[:, 0], **({"lw": 1.2, "markersize": 4} | style))
    axes.fill_between(x, found[:, 1], found[:, 2], color=line.get_color(), alpha=0.2, lw=0)


def _drawn(curve: np.ndarray, systems: int) -> list[tuple[float, float, float]]:
    """The points of a resampled curve [1 + draws, points]."""
    return [study.interval(column, systems) for column in curve.T]


def _bars(axes: Axes, x: Sequence[float], curve: Iterable[tuple[float, float, float]], colour) -> None:
    """Thin bars for the intervals of a curve, where bands would hide one another."""
    for at, (_, low, high) in zip(x, curve, strict=True):
        if np.isfinite([low, high]).all():
            axes.plot([at, at], [low, high], color=colour, lw=0.9, alpha=0.7)


def _curve(m: study.Means, **cell) -> tuple[list[float], list[tuple[float, float, float]]]:
    """Ratios from 0, and the measure there."""
    ratios = [0.0, *m.ratios(**cell)]
    return ratios, [m.estimate(ratio=ratio, **cell).triple for ratio in ratios]


def _policies(m: study.Means | None) -> list[str]:
    """Those that were run, the known ones first."""
    run = list(dict.fromkeys(key[1] for key in m.columns if key[1] != "full")) if m else []
    return [name for name in NAMES if name in run] + [name for name in run if name not in NAMES]


def _title(axes: Axes, text: str, **style) -> None:
    axes.set_title(text, loc="left", fontweight="bold", **({"fontsize": 9} | style))


def _lines(names: Sequence[str]) -> list[Line2D]:
    return [Line2D([], [], lw=1.2, markersize=4, label=_name(name), **_style(name)) for name in names]


def _share(axes: Axes, x: bool = True, y: bool = True) -> None:
    if x:
        axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    if y:
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))


def _grid(
    rows: Sequence[str], columns: Sequence[str], height: float, ticks: Sequence[float]
) -> tuple[Figure, np.ndarray]:
    """Panels, a measure to a row and a name to a column, in shares of one."""
    drawn, panels = plt.subplots(
        len(rows), len(columns), figsize=(figure.WIDTH, height), sharex=True, sharey="row", squeeze=False
    )
    for panel in panels.flat:
        _share(panel)
        panel.set_xticks(ticks)
        panel.set_xlim(-0.05, 0.97)
        panel.set_yticks([0, 0.5, 1])
        panel.set_ylim(-0.06, 1.06)
        panel.tick_params(labelsize=7.5)
    for row, text in enumerate(rows):
        panels[row, 0].set_ylabel(text)
    for column, text in enumerate(columns):
        _title(panels[0, column], text, fontsize=8)
    _below(panels, RATIO)
    return drawn, panels


def _below(panels: np.ndarray, text: str) -> None:
    """One label for all panels of the lowest row."""
    columns = panels.shape[1]
    panels[-1, columns // 2].set_xlabel(text, x=0.5 if columns % 2 else -0.1)


def _low(panels: np.ndarray, m: study.Means | None) -> None:
    """A scale of its own for a row of panels where hardly anything is told."""
    if m is not None and m.shares.size and np.nanmax(np.nanmean(m.shares, 0)) < 0.3:
        for panel in panels:
            panel.set_ylim(-0.018, 0.318)
            panel.set_yticks([0, 0.1, 0.2, 0.3])


def _empty(text: str) -> Figure:
    with plt.rc_context(figure.STYLE):
        drawn = plt.figure(figsize=(figure.WIDTH, 0.5))
        drawn.text(0.5, 0.5, text, ha="center", va="center")
    return figure.done(drawn)


def curves(studies: Sequence[Study]) -> Figure:
    """Directive following, leakage of the directive in each reading, and leakage of the defense's own text against the
    share dropped, one column per policy, both orders. The dotted line is what an echo of the preamble alone scores."""
    last = studies[-1]
    if not _policies(last.leak):
        return _empty(NOTHING)
    rows: list[tuple[str, Study, study.Means | None]] = [("following", last, last.follow)]
    rows += [(f"leakage,\n{figure.READINGS[s.reading]}", s, s.leak) for s in studies]
    rows.append(("leakage of\nthe defense", last, last.leak_defense))
    with plt.rc_context(figure.STYLE):
        policies = _policies(last.leak)
        titles = [_name(name, True) for name in policies]
        drawn, panels = _grid([text for text, *_ in rows], titles, 0.9 + 1.15 * len(rows), [0, 0.5])
        for (i, (_, s, m)), (j, name) in product(enumerate(rows), enumerate(policies)):
            for order, (colour, line) in LINES.items():
                with suppress(NotTestable):
                    if m is not None:
                        _band(panels[i, j], *_curve(m, **s.cell(policy=name, order=order)), color=colour, ls=line)
            if m is s.leak and s.echo > 0:
                panels[i, j].axhline(s.echo, color="black", lw=0.8, ls=":")
        _low(panels[-1], last.leak_defense)
        handles = [
            Line2D([], [], color=colour, ls=line, label=ORDERS[order]) for order, (colour, line) in LINES.items()
        ]
        handles.append(Line2D([], [], color="black", lw=0.8, ls=":", label="the preamble alone"))
        drawn.legend(handles=handles, loc="outside lower center", ncols=3)
    return figure.done(drawn)


def keep(s: Study) -> Figure:
    """Share of the directive's and of the defense's tokens that survives, by policy (columns) and order (rows)."""
    if not _policies(s.kept):
        return _empty(NOTHING)
    with plt.rc_context(figure.STYLE):
        policies = _policies(s.kept)
        titles = [_name(name, True) for name in policies]
        drawn, panels = _grid([f"kept,\n{text}" for text in ORDERS.values()], titles, 3.5, [0, 0.5])
        for (row, order), (column, name) in product(enumerate(ORDERS), enumerate(policies)):
            panel = panels[row, column]
            panel.plot([0, 1], [1, 0], color="#BBBBBB", lw=0.8)
            for part, (_, colour, line) in PARTS.items():
                with suppress(NotTestable):
                    cell = s.cell(policy=name, order=order, part=part)
                    x, y = s.kept.ratios(**cell), [(1.0, 1.0, 1.0)]
                    y += [stats.interval(s.kept.per(ratio=ratio, **cell)).triple for ratio in x]
                    _band(panel, [0.0, *x], y, color=colour, ls=line)
        handles = [Line2D([], [], color=colour, ls=line, label=label) for label, colour, line in PARTS.values()]
        handles.append(Line2D([], [], color="#BBBBBB", lw=0.8, label="even"))
        drawn.legend(handles=handles, loc="outside lower center", ncols=3)
    return figure.done(drawn)


def layers(kept: pd.DataFrame, ratio: float = 0.5) -> Figure:
    """Keep rate of the directive minus that of the defense, by layer and policy, each order; the ratio that was run
    nearest to `ratio`. Smaller: half the width of the 95% interval."""
    if kept.empty:
        return _empty(NOTHING)
    with plt.rc_context(figure.STYLE | {"axes.grid": False}):
        ratio = min(set(kept.ratio), key=lambda one: abs(one - ratio))
        here = kept[np.isclose(kept.ratio, ratio) & (kept.variant == "default") & (kept.reading == "as_described")]
        drawn, panels = plt.subplots(1, 2, figsize=(figure.WIDTH, 3.4), sharey=True)
        run = list(dict.fromkeys(here.policy))
        policies = [name for name in NAMES if name in run] + [name for name in run if name not in NAMES]
        wide = here.pivot_table(index=["system", "order", "policy", "layer"], columns="part", values="kept")
        bias = (wide.directive - wide.defense).rename("bias").reset_index()
        for panel, order in zip(panels, ORDERS, strict=True):
            some = study.means(
                bias[bias.order == order].assign(variant="default", reading="as_described", ratio=ratio),
                "bias",
                "layer",
            )
            depth = sorted(set(bias.layer))
            shown = None
            image = np.full((len(policies), len(depth)), np.nan)
            for (y, name), (x, layer) in product(enumerate(policies), enumerate(depth)):
                with suppress(NotTestable):
                    found = stats.interval(some.per(order=order, policy=name, ratio=ratio, layer=layer))
                    image[y, x], low, high = found.triple
                    ink = "white" if abs(image[y, x]) > 0.6 else "black"
                    panel.text(
                        x, y - 0.13, f"{100 * image[y, x]:+.0f}", ha="center", va="center", fontsize=6.5, color=ink
                    )
                    if np.isfinite(low):
                        panel.text(
                            x, y + 0.24, f"±{50 * (high - low):.0f}", ha="center", va="center", fontsize=5, color=ink
                        )
            shown = panel.imshow(image, cmap="PuOr_r", vmin=-1, vmax=1, aspect="auto")
            panel.set_yticks(range(len(policies)), [_name(name) for name in policies])
            panel.set_xticks(range(len(depth)), depth)
            panel.set_xlabel("layer")
            _title(panel, f"{ORDERS[order]}, {ratio:.0%} dropped")
        drawn.colorbar(
            shown, ax=panels, label="directive minus defense", shrink=0.9, format=PercentFormatter(1, decimals=0)
        )
    return figure.done(drawn)


def classes(s: Study, normalised: bool = False) -> Figure:
    """Accuracy of each instruction class (columns) against the share dropped, no defense, by policy (rows), prompts
    with one rule and with several; `normalised`: as a share of the uncompressed accuracy."""
    if s.classes is None or not _policies(s.classes):
        return _empty("no prompt without a defense was answered")
    with plt.rc_context(figure.STYLE):
        kinds = sorted({key[-1] for key in s.classes.columns})
        policies = _policies(s.classes)
        drawn, panels = _grid([_name(name, True) for name in policies], kinds, 1.0 + 0.95 * len(policies), [0, 0.5])
        for (row, name), rules in product(enumerate(policies), RULES):
            _, colour, _, line = RULES[rules]
            known = [key[4] for key in s.classes.columns if key[1] in (name, "full")]
            ratios = sorted(set(known))
            found, curves = study.class_curves(s, rules, ratios, **s.cell(policy=name))
            if normalised:
                with np.errstate(invalid="ignore", divide="ignore"):
                    curves = curves / curves[:, :1]
            for kind, y in zip(found, curves.transpose(2, 0, 1), strict=True):
                band = _drawn(y, s.classes.systems)
                _band(panels[row, kinds.index(kind)], ratios, band, color=colour, ls=line, marker=".")
        handles = [
            Line2D([], [], color=colour, ls=line, marker=".", label=label) for label, colour, _, line in RULES.values()
        ]
        drawn.legend(handles=handles, loc="outside lower center", ncols=2)
        drawn.supylabel("share of the uncompressed accuracy" if normalised else "accuracy", fontsize=9)
    return figure.done(drawn)


def ranks(s: Study) -> Figure:
    """By policy, no defense, prompts with one rule and with several: mean accuracy; distance between the best and the
    worst class; Spearman's rank correlation of the classes with the first ratio at which they differ."""
    if s.classes is None or not _policies(s.classes):
        return _empty("no prompt without a defense was answered")
    with plt.rc_context(figure.STYLE):
        policies = _policies(s.classes)
        rows = ["mean\naccuracy", "class gap", "rank\ncorrelation"]
        drawn, panels = _grid(rows, [_name(name) for name in policies], 4.6, [0, 0.5])
        for panel in panels[2]:
            panel.set_ylim(-1.1, 1.1)
            panel.set_yticks([-1, 0, 1])
            _share(panel, x=False, y=False)
            panel.yaxis.set_major_formatter("{x:g}")
        for (column, name), (rules, (_, colour, marker, line)) in product(enumerate(policies), RULES.items()):
            cell = s.cell(policy=name)
            style: dict[str, Any] = {"color": colour, "marker": marker, "ls": line, "markersize": 3}
            ratios = sorted({key[4] for key in s.classes.columns if key[1] in (name, "full")})
            found = study.class_curves(s, rules, ratios, few=False, **cell)[1]
            n = s.classes.systems
            _band(panels[0, column], ratios, _drawn(study.mean_of(found, -1), n), **style)
            _band(panels[1, column], ratios, _drawn(study.range_of(found), n), **style)
            with suppress(NotTestable):
                _band(panels[2, column], ratios, _drawn(study.rank_drift(s, rules, ratios, **cell)[1], n), **style)
        handles = [
            Line2D([], [], color=colour, ls=line, marker=marker, markersize=4, label=label)
            for label, colour, marker, line in RULES.values()
        ]
        drawn.legend(handles=handles, loc="outside lower center", ncols=2)
    return figure.done(drawn)


def wrappers(s: Study, order: str = "normal") -> Figure:
    """Following, leakage of the directive, and leakage of the defense: default, whitelist, fair quotas, and with both
    ends of the system turn protected; one column per policy."""
    if not _policies(s.leak):
        return _empty(NOTHING)
    rows = [("following", s.follow), ("leakage", s.leak), ("leakage of\nthe defense", s.leak_defense)]
    with plt.rc_context(figure.STYLE):
        policies = _policies(s.leak)
        titles = [_name(name, True) for name in policies]
        drawn, panels = _grid([text for text, _ in rows], titles, 4.8, [0, 0.5])
        shown = {name: look for name, look in VARIANTS.items() if not name.startswith("debias")}
        for (row, (_, m)), (column, name) in product(enumerate(rows), enumerate(policies)):
            for i, (variant, (_, colour, marker, line)) in enumerate(shown.items()):
                with suppress(NotTestable):
                    x, y = _curve(m, **s.cell(policy=name, order=order, variant=variant))
                    start = 1 if not line else 0  # run at one ratio only: a point, no curve
                    x, y = [at + 0.014 * (i - 2.5) * (at > 0) for at in x[start:]], y[start:]
                    values = [value for value, _, _ in y]
                    panels[row, column].plot(x, values, color=colour, marker=marker, ls=line, lw=1.1, markersize=3)
                    _bars(panels[row, column], x, y, colour)
        _low(panels[-1], s.leak_defense)
        handles = [
            Line2D([], [], color=colour, marker=marker, ls=line, markersize=4, label=label)
            for label, colour, marker, line in shown.values()
        ]
        drawn.legend(handles=handles, loc="outside lower center", ncols=6, columnspacing=1.0)
    return figure.done(drawn)


def pareto(s: Study, policy: str = "streaming_llm") -> Figure:
    """Following against leakage for each setting of a policy's dial, one panel per ratio and order; filled: no other is
    better in one and as good in the other."""
    places = []
    for order in ORDERS:
        with suppress(NotTestable):
            settings, ratios, cells = study.dial(s, policy, order)
            places.append([(f"{ratio:.0%} dropped", ratio, settings, cells, order) for ratio in ratios])
    if not places:
        return _empty(f"no dial was run for {_name(policy)}")
    with plt.rc_context(figure.STYLE):
        drawn, panels = plt.subplots(
            len(places), max(map(len, places)), figsize=(figure.WIDTH, 0.9 + 1.9 * len(places)), sharex=True,
            sharey=True, squeeze=False,
        )  # fmt: skip
        for row, panels_of in zip(panels, places, strict=True):
            for panel in row[: len(row) - len(panels_of)]:
                panel.set_axis_off()
            for panel, (title, ratio, settings, cells, _) in zip(
                row[len(row) - len(panels_of) :], panels_of, strict=True
            ):
                _front(panel, s, ratio, settings, cells)
                _title(panel, title, fontsize=8)
            row[len(row) - len(panels_of)].set_ylabel(f"following,\n{ORDERS[panels_of[0][4]]}")
        _below(panels, "leakage")
        drawn.legend(handles=_settings(study.LAMBDAS), loc="outside lower center", ncols=7, columnspacing=1.0)
    return figure.done(drawn)


def dials(s: Study, known: str = "streaming_llm") -> Figure:
    """The same for the other policies, the defense first, at the middle one of the ratios that were run."""
    places = []
    for name in _policies(s.leak):
        with suppress(NotTestable):
            if name != known:
                settings, ratios, cells = study.dial(s, name, "normal")
                places.append((name, ratios[len(ratios) // 2], settings, cells))
    if not places:
        return _empty("no dial was run for another policy")
    with plt.rc_context(figure.STYLE):
        drawn, panels = plt.subplots(
            1, len(places), figsize=(figure.WIDTH, 2.6), sharex=True, sharey=True, squeeze=False
        )
        for panel, (name, ratio, settings, cells) in zip(panels[0], places, strict=True):
            _front(panel, s, ratio, settings, cells)
            _title(panel, f"{_name(name)}, {ratio:.0%}", fontsize=8)
        panels[0, 0].set_ylabel("following")
        _below(panels, "leakage")
        found = sorted({x for _, _, settings, _ in places for x in settings})
        drawn.legend(handles=_settings(found), loc="outside lower center", ncols=7, columnspacing=1.0)
    return figure.done(drawn)


def _shade(x: float):
    return plt.get_cmap("viridis_r")(0.15 + 0.85 * x)


def _settings(found: Sequence[float]) -> list[Line2D]:
    handles = [Line2D([], [], color=_shade(x), marker="o", ls="none", label=f"λ = {x:g}") for x in found]
    return [*handles, Line2D([], [], color="black", marker="o", mfc="white", ls="none", label="beaten")]


def _front(panel: Axes, s: Study, ratio: float, settings: Sequence[float], cells: Sequence[dict]) -> None:
    leak, follow = ([m.estimate(ratio=ratio, **one) for one in cells] for m in (s.leak, s.follow))
    best = study.optimal(*(np.array([e.value for e in side]) for side in (follow, leak)), ties=False)
    for i, x in enumerate(settings):
        (value, low, high), (y, bottom, top) = leak[i].triple, follow[i].triple
        if np.isfinite([low, bottom]).all():
            panel.plot([low, high], [y, y], color=_shade(x), lw=0.9, alpha=0.7)
            panel.plot([value, value], [bottom, top], color=_shade(x), lw=0.9, alpha=0.7)
        size = 8 - 0.9 * i  # equal points show as rings
        panel.plot(value, y, "o", color=_shade(x), mfc=_shade(x) if best[i] else "white", markersize=size, zorder=3 + i)
    panel.set_xticks([0, 0.5, 1])
    panel.set_yticks([0, 0.5, 1])
    panel.set_xlim(-0.1, 1.1)
    panel.set_ylim(-0.1, 1.1)
    panel.tick_params(labelsize=7.5)
    _share(panel)


def optimality(studies: Sequence[Study]) -> Figure:
    """How often each lambda is Pareto-optimal, beside the paper's counts: instructions (StreamingLLM, both orders) and
    labelled examples (SnapKV and TOVA, defense first). Hollow: by the paper's wording; filled: by the usual one."""
    panels_of = [
        ("instructions", "main", "pitfalls_t01_debias_ifeval.csv"),
        ("labelled examples", "examples", "pitfalls_t02_debias_longbench.csv"),
    ]
    with plt.rc_context(figure.STYLE):
        drawn, panels = plt.subplots(1, 2, figsize=(figure.WIDTH, 2.9), sharey=True)
        for panel, (title, where, file) in zip(panels, panels_of, strict=True):
            printed = [
                claims.paper_values({"file": file, "where": {"metric": f"avg optimality %, lambda={x:g}"}})[0] / 100
                for x in study.LAMBDAS
            ]
            cells = 0
            panel.plot(study.LAMBDAS, printed, "x", color="#888888", markersize=6, label="paper")
            for (ties, marker), s in product(((True, "o"), (False, "D")), studies):
                try:
                    share, cells = study.optimality(s, *study.DIALS[where], where, ties=ties)
                except NotTestable:
                    continue
                for x, series in share.items():
                    colour = "#0072B2" if s.reading == "as_described" else "#D55E00"
                    at = x + (0.02 if s.reading == "as_described" else -0.02) + (0.0 if ties else 0.07)
                    style: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 4.5}
                    systems = (s.leak if where == "main" else s.examples_leak).systems
                    figure.point(panel, at, study.interval(series, systems), filled=not ties, **style)
            _title(panel, f"{title} ({cells} cells)" if cells else f"{title} (not run)")
            panel.set_xlabel("λ (0 default, 1 fair)")
            panel.set_ylim(-0.04, 1.06)
            _share(panel, x=False)
        panels[0].set_ylabel("share of cells where optimal")
        handles = [
            Line2D([], [], color="#D55E00", lw=2, label="as run"),
            Line2D([], [], color="#0072B2", lw=2, label="as described"),
            Line2D([], [], color="#444444", marker="o", mfc="white", ls="none", label="beaten only in both"),
            Line2D([], [], color="#444444", marker="D", ls="none", label="beaten in one, equal in the other"),
            Line2D([], [], color="#888888", marker="x", ls="none", label="paper"),
        ]
        drawn.legend(handles=handles, loc="outside lower center", ncols=5, columnspacing=1.0)
    return figure.done(drawn)


def safe(s: Study) -> Figure:
    """Leak-safe budget: the smallest share of the system turn from which on no more leaks than without compression,
    each curve at the ratios that it was run at. Hollow: less than half of what is followed uncompressed is followed
    there."""
    if not _policies(s.leak):
        return _empty(NOTHING)
    with plt.rc_context(figure.STYLE):
        policies = _policies(s.leak)
        drawn, panels = plt.subplots(1, 2, figsize=(figure.WIDTH, 3.6), sharex=True, sharey=True)
        shown = [name for name, look in VARIANTS.items() if look[3]]
        for (panel, order), (y, name) in product(zip(panels, ORDERS, strict=True), enumerate(policies)):
            for i, variant in enumerate(shown):
                with suppress(NotTestable):
                    cell = s.cell(policy=name, order=order, variant=variant)
                    if len(s.leak.ratios(True, **cell)) < 2:
                        continue
                    series = study.safe_budget(s, **cell)
                    _, colour, marker, _ = VARIANTS[variant]
                    style: dict[str, Any] = {"color": colour, "marker": marker, "along": "x", "markersize": 4.5}
                    good = study.follows_there(s, float(series[0]), **cell)
                    figure.point(
                        panel, y + 0.19 * (i - 1.5), study.interval(series, s.leak.systems), filled=good, **style
                    )
        for panel, order in zip(panels, ORDERS, strict=True):
            panel.set_yticks(range(len(policies)), [_name(name) for name in policies])
            panel.set_xlabel("share to keep")
            panel.set_xlim(0, 1.04)
            _share(panel, y=False)
            _title(panel, ORDERS[order])
        panels[0].set_ylim(len(policies) - 0.5, -0.5)
        handles = [
            Line2D(
                [],
                [],
                color=VARIANTS[one][1],
                marker=VARIANTS[one][2],
                ls="none",
                markersize=4.5,
                label=VARIANTS[one][0],
            )
            for one in shown
        ]
        handles.append(
            Line2D([], [], color="black", marker="o", mfc="white", ls="none", markersize=4.5, label="hardly follows")
        )
        drawn.legend(handles=handles, loc="outside lower center", ncols=5)
    return figure.done(drawn)


def examples(s: Study) -> Figure:
    """Labelled examples as a system prompt: the right mark given, and the examples told, by policy; default and fair,
    the defense first; with the examples first at one ratio, hollow."""
    rows = [("right mark", s.examples_follow), ("leakage of\nthe examples", s.examples_leak)]
    policies = _policies(s.examples_leak)
    if not policies:
        return _empty("no labelled examples among these items")
    with plt.rc_context(figure.STYLE):
        drawn, panels = _grid([text for text, _ in rows], [_name(name) for name in policies], 3.5, [0, 0.5])
        looks = [("default", "normal"), ("fair", "normal"), ("default", "flipped"), ("fair", "flipped")]
        for (row, (_, m)), (column, name) in product(enumerate(rows), enumerate(policies)):
            for i, (variant, order) in enumerate(looks):
                _, colour, marker, line = VARIANTS[variant]
                with suppress(NotTestable):
                    x, y = _curve(m, **s.cell(policy=name, variant=variant, order=order))
                    x = [at + 0.02 * (i - 1.5) * (at > 0) for at in x]
                    style: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 3.5}
                    if order == "flipped":
                        style, x, y = style | {"mfc": "white", "ls": ""}, x[1:], y[1:]
                    panels[row, column].plot(x, [value for value, _, _ in y], **({"ls": line, "lw": 1.1} | style))
                    _bars(panels[row, column], x, y, colour)
        handles = [
            Line2D(
                [], [], color=VARIANTS[variant][1], marker=VARIANTS[variant][2],
                ls=VARIANTS[variant][3] if order == "normal" else "",
                mfc=None if order == "normal" else "white", markersize=4,
                label=VARIANTS[variant][0] + ("" if order == "normal" else ", examples first"),
            )
            for variant, order in looks
        ]  # fmt: skip
        drawn.legend(handles=handles, loc="outside lower center", ncols=4)
    return figure.done(drawn)


def marks(rows: pd.DataFrame, items: Sequence) -> Figure:
    """Fair quotas over spans that were marked in different ways: following and leakage (columns), one mark per policy,
    by the share dropped (rows).

    rows: of `experiment.run` on `experiment.marked` items.
    """
    scored = experiment.score(rows, items)
    told = "tells_rules" if scored.tells_rules.notna().any() else "tells_directive"
    ratios = sorted(set(scored.ratio) - {0.0})
    ways = [way for way in tables.WAYS if way in set(scored.marks)]
    run = set(scored.policy)
    policies = [name for name in NAMES if name in run] + sorted(run - set(NAMES))
    if not scored[["followed", told]].notna().any(axis=None):
        return _empty(NOTHING)
    with plt.rc_context(figure.STYLE):
        size = (figure.WIDTH, 0.9 + 1.8 * len(ratios))
        drawn, panels = plt.subplots(len(ratios), 2, figsize=size, sharex=True, sharey=True, squeeze=False)
        for (row, ratio), (column, measure) in product(enumerate(ratios), enumerate(("followed", told))):
            panel = panels[row, column]
            for (i, name), (y, way) in product(enumerate(policies), enumerate(ways)):
                found = study.means(scored[(scored.policy == name) & (scored.marks == way)], measure)
                with suppress(NotTestable):
                    e = found.estimate(policy=name, variant="fair", ratio=ratio)
                    at = y + 0.15 * (i - (len(policies) - 1) / 2)
                    figure.point(panel, at, e.triple, along="x", markersize=4.5, **_style(name))
            panel.set_yticks(range(len(ways)), [tables.WAYS[way] for way in ways])
            panel.set_xlim(-0.04, 1.06)
            _share(panel, y=False)
            _title(panel, f"{'following' if measure == 'followed' else 'leakage'}, {ratio:.0%} dropped", fontsize=8)
        panels[0, 0].set_ylim(len(ways) - 0.5, -0.5)
        drawn.legend(handles=_lines(policies), loc="outside lower center", ncols=5)
    return figure.done(drawn)


def cost(timing: pd.DataFrame) -> Figure:
    """Milliseconds to compress a system turn and read a request, and per decoded token; decoded tokens per second; by
    wrapper: every measured repeat, and the median with the 20th and 80th percentile."""
    if timing.empty:
        return _empty("no time was taken")
    measures = (
        ("ms to compress and read", lambda rows: 1000 * rows.compress),
        ("ms per decoded token", lambda rows: 10 * rows.decode),
        ("decoded tokens per second", lambda rows: 100 / rows.decode),
    )
    with plt.rc_context(figure.STYLE):
        drawn, panels = plt.subplots(1, 3, figsize=(figure.WIDTH, 2.4), sharey=True)
        variants = [name for name in VARIANTS if name in set(timing.variant)]
        for panel, (label, measure) in zip(panels, measures, strict=True):
            for y, name in enumerate(variants):
                values = measure(timing[timing.variant == name])
                low, middle, high = np.percentile(values, [20, 50, 80])
                panel.plot(values, np.full(len(values), y), "|", color="#999999", markersize=8)
                style: dict[str, Any] = {"color": VARIANTS[name][1], "marker": VARIANTS[name][2], "along": "x"}
                figure.point(panel, y, (middle, low, high), **style)
            panel.set_yticks(range(len(variants)), [VARIANTS[name][0] for name in variants])
            panel.set_xlabel(label)
            panel.set_xlim(left=0)
        panels[0].set_ylim(len(variants) - 0.5, -0.5)
    return figure.done(drawn)
