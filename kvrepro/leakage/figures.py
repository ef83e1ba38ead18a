"""The leakage chapter's figures: studies in, a matplotlib Figure out, in the style of `kvrepro.figure`.

Bands and bars are 95% intervals over resampled system prompts. One colour and one marker per policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import PercentFormatter

from kvrepro import claims, figure
from kvrepro.claims import Missing
from kvrepro.leakage import experiment, study
from kvrepro.leakage.study import Study

NAMES = {
    "streaming_llm": "StreamingLLM",
    "h2o": "H2O",
    "k_norm": "K-norm",
    "snapkv": "SnapKV",
    "tova": "TOVA",
    "defensive_kv": "DefensiveKV",
    "dropkv": "DropKV",
}
COLOURS = {name: figure.COLOURS[name] for name in ("streaming_llm", "h2o", "snapkv")}
COLOURS |= {"k_norm": "#8C564B", "tova": "#1F4E9E", "defensive_kv": "#B8860B", "dropkv": "#56B4E9"}
MARKERS = {name: figure.MARKERS[name] for name in ("streaming_llm", "h2o", "snapkv")}
MARKERS |= {"k_norm": "v", "tova": "P", "defensive_kv": "o", "dropkv": "X"}
VARIANTS = {
    "default": ("default", "#444444", "o", "-"),
    "whitelist": ("whitelist", "#E69F00", "s", "--"),
    "whole": ("whole defense", "#CC79A7", "P", ""),
    "fair": ("fair", "#0072B2", "D", "-."),
    "ends": ("both ends protected", "#009E73", "^", ":"),
}
PARTS = {"directive": ("directive", "#0072B2", "-"), "defense": ("defense", "#D55E00", "--")}
ORDERS = {"normal": "defense first", "flipped": "directive first"}
RATIO = "share dropped"
CLASSES = plt.get_cmap("tab10").colors


def _band(axes: Axes, x: Sequence[float], curve: np.ndarray, systems: int, *, band: bool = True, **style) -> None:
    """A curve [1 + draws, points] with its interval."""
    found = np.array([study.interval(column, systems) for column in curve.T])
    (line,) = axes.plot(x, found[:, 0], **({"lw": 1.2, "markersize": 4} | style))
    if band and np.isfinite(found[:, 1:]).all():
        axes.fill_between(x, found[:, 1], found[:, 2], color=line.get_color(), alpha=0.13, lw=0)


def _bars(axes: Axes, x: Sequence[float], curve: np.ndarray, systems: int, colour) -> None:
    """Thin bars for the intervals of a curve, where bands would hide one another."""
    for at, column in zip(x, curve.T, strict=True):
        _, low, high = study.interval(column, systems)
        if np.isfinite([low, high]).all():
            axes.plot([at, at], [low, high], color=colour, lw=0.7, alpha=0.6)


def _curve(s: Study, name: str, **cell) -> tuple[list[float], np.ndarray]:
    """Ratios from 0, and the measure there."""
    m = getattr(s, name)
    ratios = [0.0, *m.ratios(**cell)]
    return ratios, m.curve(ratios, **cell)


def _policies(s: Study) -> list[str]:
    run = {key[1] for key in s.leak.columns}
    return [name for name in NAMES if name in run]


def _title(axes: Axes, text: str, **style) -> None:
    said = axes.annotate(text, (0, 1.02), xycoords="axes fraction", fontweight="bold", va="bottom", **style)
    said.set_in_layout(False)  # a long title may reach over its neighbour's margin; the room above is set aside here
    drawn = axes.get_figure()
    drawn.get_layout_engine().set(rect=(0, 0, 1, 1 - 0.2 / drawn.get_figheight()))


def _lines(names: Sequence[str]) -> list[Line2D]:
    return [
        Line2D([], [], color=COLOURS[name], marker=MARKERS[name], lw=1.2, markersize=4, label=NAMES[name])
        for name in names
    ]


def _share(axes: Axes, x: bool = True, y: bool = True) -> None:
    if x:
        axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    if y:
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))


def classes(s: Study, policy: str = "streaming_llm") -> Figure:
    """Accuracy of each instruction class against the share dropped, no defense: raw and as a share of the uncompressed
    accuracy (rows), prompts with one rule and with several (columns)."""
    with plt.rc_context(figure.STYLE):
        drawn, panels = plt.subplots(2, 2, figsize=(figure.WIDTH, 5.0), sharex=True, sharey="row")
        every = sorted({key[-1] for key in s.classes.columns})
        ratios = sorted({key[4] for key in s.classes.columns})
        for column, rules in enumerate(("single", "multi")):
            kinds, curves = study.class_curves(s, rules, ratios, **s.cell(policy=policy))
            with np.errstate(invalid="ignore", divide="ignore"):
                shares = curves / curves[:, :1]
            for kind, raw, share in zip(kinds, curves.transpose(2, 0, 1), shares.transpose(2, 0, 1), strict=True):
                i = every.index(kind)
                x = [ratio + 0.006 * (i - len(every) / 2) for ratio in ratios]  # apart where they would hide each other
                style: dict[str, Any] = {"color": CLASSES[i % 10], "marker": "osD^vPX*"[i % 8], "band": False}
                _band(panels[0, column], x, raw, s.classes.systems, **style)
                _band(panels[1, column], x, share, s.classes.systems, **style)
                _bars(panels[0, column], x, raw, s.classes.systems, CLASSES[i % 10])
            _title(panels[0, column], {"single": "one rule", "multi": "two to five rules"}[rules])
            panels[1, column].set_xlabel(RATIO)
            _share(panels[1, column])
        panels[0, 0].set_ylabel("accuracy")
        panels[1, 0].set_ylabel("share of uncompressed")
        for panel in panels.flat:
            panel.set_ylim(-0.04, 1.08)
            _share(panel)
        handles = [
            Line2D([], [], color=CLASSES[i % 10], marker="osD^vPX*"[i % 8], lw=1.2, markersize=4, label=kind)
            for i, kind in enumerate(every)
        ]
        drawn.legend(handles=handles, loc="outside lower center", ncols=min(8, len(every)), columnspacing=1.0)
    return figure.done(drawn)


def ranks(s: Study) -> Figure:
    """Left: mean accuracy by policy, no defense. Middle and right: how far the classes drift apart in prompts with one
    rule and with several: Spearman's rank correlation with the uncompressed order where there is one, else the gap
    between the best and the worst class."""
    with plt.rc_context(figure.STYLE):
        drawn, panels = plt.subplots(1, 3, figsize=(figure.WIDTH, 2.9), sharex=True)
        policies = [name for name in experiment.FIVE if any(key[1] == name for key in s.classes.columns)]
        ranked = False
        for name in policies:
            cell = s.cell(policy=name)
            style: dict[str, Any] = {"color": COLOURS[name], "marker": MARKERS[name]}
            ratios = sorted({key[4] for key in s.classes.columns})
            both = [study.class_curves(s, rules, ratios, **cell)[1] for rules in ("single", "multi")]
            _band(panels[0], ratios, study.mean_of(np.concatenate(both, -1), -1), s.classes.systems, **style)
            for panel, curves in zip(panels[1:], both, strict=True):
                correlation = study.rank_correlation(curves, curves[:, :1])
                if np.isfinite(correlation[0]).any():
                    ranked, shown = True, correlation
                else:
                    shown = study.range_of(curves)
                _band(panel, ratios, shown, s.classes.systems, band=False, **style)
        _title(panels[0], "mean accuracy")
        for panel, rules in zip(panels[1:], ("one rule", "several rules"), strict=True):
            _title(panel, f"{'rank order' if ranked else 'class gap'}, {rules}")
        for panel in panels:
            panel.set_xlabel(RATIO)
            _share(panel, y=not ranked or panel is panels[0])
        drawn.legend(handles=_lines(policies), loc="outside lower center", ncols=5)
    return figure.done(drawn)


def curves(studies: Sequence[Study]) -> Figure:
    """Directive following and leakage of the directive against the share dropped; the defense first (above) and last.

    Leakage in each reading; the dotted line is what an echo of the preamble alone would score.
    """
    with plt.rc_context(figure.STYLE):
        drawn, panels = plt.subplots(
            2, 1 + len(studies), figsize=(figure.WIDTH, 4.8), sharex=True, sharey=True, squeeze=False
        )
        for row, order in enumerate(ORDERS):
            for column, (s, name) in enumerate([(studies[-1], "follow"), *[(s, "leak") for s in studies]]):
                panel = panels[row, column]
                for one in _policies(s):
                    x, y = _curve(s, name, **s.cell(policy=one, order=order))
                    _band(
                        panel,
                        x,
                        y,
                        s.leak.systems,
                        color=COLOURS[one],
                        marker=MARKERS[one],
                        band=one in experiment.FIVE,
                    )
                if name == "leak" and s.echo > 0:
                    panel.axhline(s.echo, color="black", lw=0.8, ls=":")
                reading = figure.READINGS[s.reading]
                if not row:
                    _title(panel, "following" if name == "follow" else f"leakage, {reading}")
            panels[row, 0].set_ylabel(ORDERS[order])
        for panel in panels.flat:
            panel.set_ylim(-0.04, 1.06)
            _share(panel)
        for panel in panels[-1]:
            panel.set_xlabel(RATIO)
        drawn.legend(handles=_lines(_policies(studies[0])), loc="outside lower center", ncols=7, columnspacing=1.0)
    return figure.done(drawn)


def keep(s: Study) -> Figure:
    """Share of the directive's and of the defense's tokens that survives, by policy (columns) and order (rows)."""
    with plt.rc_context(figure.STYLE):
        policies = [name for name in _policies(s) if any(key[1] == name for key in s.kept.columns)]
        drawn, panels = plt.subplots(
            2, len(policies), figsize=(figure.WIDTH, 3.6), sharex=True, sharey=True, squeeze=False
        )
        for (row, order), (column, name) in product(enumerate(ORDERS), enumerate(policies)):
            panel = panels[row, column]
            ratios = [r for r in sorted({key[4] for key in s.kept.columns}) if r]
            panel.plot([0, 1], [1, 0], color="#BBBBBB", lw=0.8)
            for part, (_, colour, line) in PARTS.items():
                y = s.kept.curve(ratios, part=part, **s.cell(policy=name, order=order))
                y = np.concatenate([np.ones_like(y[:, :1]), y], 1)
                _band(panel, [0.0, *ratios], y, s.kept.systems, color=colour, ls=line)
            if not row:
                _title(panel, NAMES[name], fontsize=7.5)
            panel.set_xticks([0, 0.5])
            _share(panel)
        for row, order in enumerate(ORDERS):
            panels[row, 0].set_ylabel(f"kept, {ORDERS[order]}")
        panels[-1, len(policies) // 2].set_xlabel(RATIO)
        handles = [Line2D([], [], color=colour, ls=line, label=label) for label, colour, line in PARTS.values()]
        handles.append(Line2D([], [], color="#BBBBBB", lw=0.8, label="even"))
        drawn.legend(handles=handles, loc="outside lower center", ncols=3)
    return figure.done(drawn)


def layers(kept: pd.DataFrame, ratio: float = 0.5) -> Figure:
    """Keep rate of the directive minus that of the defense, by layer and policy, each order; the ratio that was run
    nearest to `ratio`."""
    with plt.rc_context(figure.STYLE | {"axes.grid": False}):
        ratio = min(set(kept.ratio), key=lambda one: abs(one - ratio))
        here = kept[np.isclose(kept.ratio, ratio) & (kept.variant == "default") & (kept.reading == "as_described")]
        here = here[here.policy.isin(NAMES)]
        drawn, panels = plt.subplots(1, 2, figsize=(figure.WIDTH, 2.6), sharey=True)
        policies = [name for name in NAMES if name in set(here.policy)]
        for panel, order in zip(panels, ORDERS, strict=True):
            wide = here[here.order == order].pivot_table(index=["policy", "layer"], columns="part", values="kept")
            image = (wide.directive - wide.defense).unstack("layer").loc[policies]  # noqa: PD010
            shown = panel.imshow(image, cmap="PuOr_r", vmin=-1, vmax=1, aspect="auto")
            panel.set_yticks(range(len(policies)), [NAMES[name] for name in policies])
            panel.set_xticks(range(image.shape[1]), image.columns)
            panel.set_xlabel("layer")
            _title(panel, ORDERS[order])
            for (y, x), value in np.ndenumerate(image.to_numpy()):
                ink = "white" if abs(value) > 0.6 else "black"
                panel.text(x, y, f"{100 * value:+.0f}", ha="center", va="center", fontsize=6.5, color=ink)
        drawn.colorbar(
            shown, ax=panels, label="directive minus defense", shrink=0.9, format=PercentFormatter(1, decimals=0)
        )
    return figure.done(drawn)


def wrappers(s: Study, order: str = "normal") -> Figure:
    """Following (above) and leakage (below): default, the defense's first sentence whitelisted, fair quotas,
    and with both ends of the system turn protected; one column per policy."""
    with plt.rc_context(figure.STYLE):
        policies = [name for name in experiment.FIVE if name in _policies(s)]
        drawn, panels = plt.subplots(
            2, len(policies), figsize=(figure.WIDTH, 3.9), sharex=True, sharey=True, squeeze=False
        )
        for column, name in enumerate(policies):
            for row, measure in enumerate(("follow", "leak")):
                for variant, (_, colour, marker, line) in VARIANTS.items():
                    try:
                        x, y = _curve(s, measure, **s.cell(policy=name, order=order, variant=variant))
                    except Missing:
                        continue
                    ends = slice(1, None) if not line else slice(None)  # run at one ratio only: a point, no curve
                    style: dict[str, Any] = {"color": colour, "marker": marker, "ls": line}
                    _band(panels[row, column], x[ends], y[:, ends], s.leak.systems, **style)
                    if not line:
                        _bars(panels[row, column], x[ends], y[:, ends], s.leak.systems, colour)
                _share(panels[row, column])
            _title(panels[0, column], NAMES[name])
        panels[0, 0].set_ylabel("following")
        panels[1, 0].set_ylabel("leakage")
        panels[0, 0].set_ylim(-0.04, 1.06)
        panels[1, len(policies) // 2].set_xlabel(RATIO)
        handles = [
            Line2D([], [], color=colour, marker=marker, ls=line, markersize=4, label=label)
            for label, colour, marker, line in VARIANTS.values()
        ]
        drawn.legend(handles=handles, loc="outside lower center", ncols=5)
    return figure.done(drawn)


def pareto(s: Study, policy: str = "streaming_llm", where: str = "main") -> Figure:
    """Following against leakage for each lambda, one panel per ratio and order; filled: no other is better in one
    and as good in the other."""
    follow, leak = (s.follow, s.leak) if where == "main" else (s.examples_follow, s.examples_leak)
    orders = list(ORDERS) if where == "main" else ["normal"]
    names = {0.0: "default", 1.0: "fair"}
    cell = s.cell(policy=policy)
    ratios = leak.ratios(variant="debias 0.4", **cell)
    shade = plt.get_cmap("viridis_r")
    with plt.rc_context(figure.STYLE):
        drawn, panels = plt.subplots(
            len(orders),
            len(ratios),
            figsize=(figure.WIDTH, 0.7 + 2.1 * len(orders)),
            sharex=True,
            sharey=True,
            squeeze=False,
        )
        for (row, order), (column, ratio) in product(enumerate(orders), enumerate(ratios)):
            panel = panels[row, column]
            cells = [
                cell | {"order": order, "variant": names.get(x, f"debias {x:g}"), "ratio": ratio} for x in study.LAMBDAS
            ]
            points = [np.stack([m.at(**one) for one in cells], -1) for m in (leak, follow)]
            best = study.optimal(points[1][0], points[0][0], ties=False)
            for i, x in enumerate(study.LAMBDAS):
                (value, low, high), (y, bottom, top) = (study.interval(p[:, i], leak.systems) for p in points)
                colour = shade(0.15 + 0.85 * x)
                if np.isfinite([low, bottom]).all():
                    panel.plot([low, high], [y, y], color=colour, lw=0.8, alpha=0.7)
                    panel.plot([value, value], [bottom, top], color=colour, lw=0.8, alpha=0.7)
                panel.plot(value, y, "o", color=colour, mfc=colour if best[i] else "white", markersize=6)
            if not row:
                _title(panel, f"{ratio:.0%} dropped")
            _share(panel)
            panel.set_xlim(-0.06, 1.06)
            panel.set_ylim(-0.06, 1.06)
        for row, order in enumerate(orders):
            panels[row, 0].set_ylabel(f"following, {ORDERS[order]}" if len(orders) > 1 else "following")
        for panel in panels[-1]:
            panel.set_xlabel("leakage")
        handles = [
            Line2D([], [], color=shade(0.15 + 0.85 * x), marker="o", ls="none", label=f"λ = {x:g}")
            for x in study.LAMBDAS
        ]
        handles.append(Line2D([], [], color="black", marker="o", mfc="white", ls="none", label="beaten"))
        drawn.legend(handles=handles, loc="outside lower center", ncols=7, columnspacing=1.0)
    return figure.done(drawn)


def optimality(studies: Sequence[Study]) -> Figure:
    """How often each lambda is Pareto-optimal, beside the paper's counts: instructions (StreamingLLM, both orders) and
    labelled examples (SnapKV and TOVA, defense first). Hollow: by the paper's wording; filled: by the usual one."""
    panels_of = [
        ("instructions", (["streaming_llm"], list(ORDERS)), "main", "pitfalls_t01_debias_ifeval.csv"),
        ("labelled examples", (["snapkv", "tova"], ["normal"]), "examples", "pitfalls_t02_debias_longbench.csv"),
    ]
    with plt.rc_context(figure.STYLE):
        drawn, panels = plt.subplots(1, 2, figsize=(figure.WIDTH, 2.9), sharey=True)
        for panel, (title, which, where, file) in zip(panels, panels_of, strict=True):
            printed = [
                claims.paper_values({"file": file, "where": {"metric": f"avg optimality %, lambda={x:g}"}})[0] / 100
                for x in study.LAMBDAS
            ]
            cells = 0
            panel.plot(study.LAMBDAS, printed, "x", color="#888888", markersize=6, label="paper")
            for (ties, marker), s in product(((True, "o"), (False, "D")), studies):
                if where == "examples" and s.examples_leak is None:
                    continue
                share, cells = study.optimality(s, *which, study.LAMBDAS, where, ties=ties)
                systems = s.leak.systems if where == "main" else s.examples_leak.systems
                for x, series in share.items():
                    colour = "#0072B2" if s.reading == "as_described" else "#D55E00"
                    at = x + (0.02 if s.reading == "as_described" else -0.02) + (0.0 if ties else 0.07)
                    style: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 4.5}
                    figure.point(panel, at, study.interval(series, systems), filled=not ties, **style)
            _title(panel, f"{title} ({cells} cells)")
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
    among the ratios at which the variants were run."""
    with plt.rc_context(figure.STYLE):
        policies, shared = _policies(s), study.common_ratios(s)
        drawn, panels = plt.subplots(1, 2, figsize=(figure.WIDTH, 3.2), sharex=True, sharey=True)
        for panel, order in zip(panels, ORDERS, strict=True):
            for y, name in enumerate(policies):
                shown = [
                    variant
                    for variant in VARIANTS
                    if VARIANTS[variant][3] and _has(s, policy=name, order=order, variant=variant)
                ]
                for i, variant in enumerate(shown):
                    series = study.safe_budget(s, shared, **s.cell(policy=name, order=order, variant=variant))
                    at = y + 0.17 * (i - (len(shown) - 1) / 2)
                    _, colour, marker, _ = VARIANTS[variant]
                    figure.point(
                        panel,
                        at,
                        study.interval(series, s.leak.systems),
                        color=colour,
                        marker=marker,
                        along="x",
                        markersize=4.5,
                    )
            panel.set_yticks(range(len(policies)), [NAMES[name] for name in policies])
            panel.set_xlabel("share to keep")
            panel.set_xlim(0, 1.04)
            panel.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
            _title(panel, ORDERS[order])
        panels[0].invert_yaxis()
        handles = [
            Line2D([], [], color=colour, marker=marker, ls="none", markersize=4.5, label=label)
            for label, colour, marker, line in VARIANTS.values()
            if line
        ]
        drawn.legend(handles=handles, loc="outside lower center", ncols=4)
    return figure.done(drawn)


def _has(s: Study, **cell) -> bool:
    try:
        s.leak.ratios(**s.cell(**cell))
    except Missing:
        return False
    return True


def examples(s: Study) -> Figure:
    """Labelled examples as a system prompt: the right mark given, and the examples told; default and fair."""
    with plt.rc_context(figure.STYLE):
        if s.examples_leak is None:
            drawn = plt.figure(figsize=(figure.WIDTH, 0.5))
            drawn.text(0.5, 0.5, "no labelled examples among these items", ha="center", va="center")
            return figure.done(drawn)
        drawn, panels = plt.subplots(1, 2, figsize=(figure.WIDTH, 2.8), sharex=True, sharey=True)
        policies = [name for name in NAMES if any(key[1] == name for key in s.examples_leak.columns)]
        for panel, name in zip(panels, ("examples_follow", "examples_leak"), strict=True):
            for one in policies:
                for variant, line in (("default", "-"), ("fair", "--")):
                    x, y = _curve(s, name, **s.cell(policy=one, variant=variant))
                    _band(panel, x, y, s.examples_leak.systems, color=COLOURS[one], marker=MARKERS[one], ls=line)
            _title(panel, "right mark" if name == "examples_follow" else "leakage of the examples")
            panel.set_xlabel(RATIO)
            panel.set_ylim(-0.04, 1.06)
            _share(panel)
        handles = _lines(policies) + [
            Line2D([], [], color="#444444", ls=line, label=label) for label, line in (("default", "-"), ("fair", "--"))
        ]
        drawn.legend(handles=handles, loc="outside lower center", ncols=6)
    return figure.done(drawn)


def marks(rows: pd.DataFrame, items: Sequence, ratio: float | None = None) -> Figure:
    """Fair quotas over spans that were marked in different ways: following and leakage, one mark per policy.

    rows: of `experiment.run` on `experiment.marked` items; `ratio`: the one shown, the middle one run if None.
    """
    scored = experiment.score(rows, items)
    told = "tells_rules" if scored.tells_rules.notna().any() else "tells_directive"
    known = sorted(set(scored.ratio) - {0.0})
    ratio = known[len(known) // 2] if ratio is None else ratio
    here = scored[np.isclose(scored.ratio, ratio)]
    ways = [way for way in ("hand", "rules", "sentences", "turns") if way in set(here.marks)]
    labels = {"hand": "defense, directive", "rules": "every rule", "sentences": "sentences found", "turns": "one turn"}
    with plt.rc_context(figure.STYLE):
        drawn, panels = plt.subplots(1, 2, figsize=(figure.WIDTH, 2.8), sharey=True)
        for panel, measure in zip(panels, ("followed", told), strict=True):
            for i, name in enumerate(sorted(set(here.policy), key=list(NAMES).index)):
                for y, way in enumerate(ways):
                    some = here[(here.policy == name) & (here.marks == way)]
                    found = study.means(some, measure)
                    series = study.mean_of(found.draws, 1)
                    at = y + 0.15 * (i - 2)
                    figure.point(
                        panel,
                        at,
                        study.interval(series, found.systems),
                        color=COLOURS[name],
                        marker=MARKERS[name],
                        along="x",
                        markersize=4.5,
                    )
            panel.set_yticks(range(len(ways)), [labels[way] for way in ways])
            panel.set_xlim(-0.04, 1.06)
            panel.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
            panel.set_xlabel("following" if measure == "followed" else "leakage")
        panels[0].set_ylim(len(ways) - 0.5, -0.5)
        drawn.legend(
            handles=_lines(sorted(set(here.policy), key=list(NAMES).index)), loc="outside lower center", ncols=5
        )
    return figure.done(drawn)


def cost(timing: pd.DataFrame) -> Figure:
    """Milliseconds to compress a system turn and read a request, and per decoded token, by wrapper: every
    measured repeat, and the median with the 20th and 80th percentile."""
    with plt.rc_context(figure.STYLE):
        drawn, panels = plt.subplots(1, 2, figsize=(figure.WIDTH, 2.2), sharey=True)
        variants = [name for name in VARIANTS if name in set(timing.variant)]
        for panel, (column, scale, label) in zip(
            panels, (("compress", 1000, "ms to compress and read"), ("decode", 10, "ms per decoded token")), strict=True
        ):
            for y, name in enumerate(variants):
                values = scale * timing[timing.variant == name][column]
                low, middle, high = np.percentile(values, [20, 50, 80])
                panel.plot(values, np.full(len(values), y), "|", color="#999999", markersize=8)
                figure.point(
                    panel, y, (middle, low, high), color=VARIANTS[name][1], marker=VARIANTS[name][2], along="x"
                )
            panel.set_yticks(range(len(variants)), [VARIANTS[name][0] for name in variants])
            panel.set_xlabel(label)
            panel.set_xlim(left=0)
        panels[0].set_ylim(len(variants) - 0.5, -0.5)
    return figure.done(drawn)
