"""One function per figure: a results table in, a matplotlib Figure out (width 7.2 in: the book's column).

Every estimate has its 95% interval (`kvrepro.experiment.stats`). One colour and one marker per policy everywhere,
after Okabe and Ito's palette; filled means protected, hollow unprotected. No titles: captions stand in the notebook.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import PercentFormatter

from kvrepro.chapters.protection import members
from kvrepro.experiment import claims, stats
from kvrepro.experiment.figure import COLOURS, MARKERS, NAMES, READINGS, STYLE, WIDTH, done, point
from kvrepro.experiment.stats import UNIT


def _readings(results: pd.DataFrame) -> list[str]:
    """Readings that were run, in the book's order."""
    run = set(results[results.policy != "full"].reading)
    return [reading for reading in READINGS if reading in run]


def _of(results: pd.DataFrame, reading: str) -> pd.DataFrame:
    return members.named(results[(results.reading == reading) | (results.policy == "full")])


def _cell(policy: str, capacity: float, side: float) -> dict:
    return {"policy": policy, "capacity": capacity, "prefix": side, "suffix": side}


def _estimate(rows: pd.DataFrame, measure: str, contrast: str, **cells: Mapping) -> tuple[float, float, float]:
    """A contrast over the named cells, by the same code as the claims."""
    frame = pd.DataFrame({name: members.per_item(rows, cell, measure) for name, cell in cells.items()}).dropna()
    return stats.contrast(frame, contrast, bounds=UNIT).triple


def _ceiling(axes: Axes, rows: pd.DataFrame, measure: str, along: str = "y") -> None:
    value, low, high = _estimate(rows, measure, "mean", a={"policy": "full"})
    line, span = (axes.axhline, axes.axhspan) if along == "y" else (axes.axvline, axes.axvspan)
    line(value, color="black", lw=1, ls=(0, (4, 2)), zorder=1)
    if np.isfinite(low):
        span(low, high, color="#BDBDBD", alpha=0.45, lw=0, zorder=0)


def _panels(readings: Sequence[str], height: float, **share) -> tuple[Figure, list[Axes]]:
    """One panel per reading, side by side."""
    figure, axes = plt.subplots(1, len(readings), figsize=(WIDTH, height), squeeze=False, **share)
    for panel, reading in zip(axes[0], readings, strict=True):
        panel.annotate(READINGS[reading], (0.0, 1.02), xycoords="axes fraction", fontweight="bold", va="bottom")
    return figure, list(axes[0])


def _legend(
    figure: Figure,
    policies: Sequence[str],
    *,
    columns: int = 5,
    more: Sequence[Line2D] = (),
) -> None:
    """Policies, then filled and hollow, the full cache, and what else is given, below the panels."""
    handles = [Line2D([], [], color=COLOURS[one], marker=MARKERS[one], ls="none", label=NAMES[one]) for one in policies]
    handles += [
        Line2D([], [], color="#333333", marker="o", ls="none", label="protected"),
        Line2D([], [], color="#333333", marker="o", mfc="white", ls="none", label="unprotected"),
        Line2D([], [], color="black", lw=1, ls=(0, (4, 2)), label="full cache"),
        *more,
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, columnspacing=1.2, handletextpad=0.5)


def _policies(rows: pd.DataFrame, protect_frac: float) -> list[str]:
    """Policies of the main grid: run at every capacity, with and without protection."""
    sizes = members.capacities(rows, protect_frac)["all"]
    main = rows[
        np.isclose(rows.prefix, rows.suffix) & (np.isclose(rows.prefix, 0) | np.isclose(rows.prefix, protect_frac))
    ]
    count = (
        main[main.capacity.isin(sizes)]
        .groupby("policy")[["capacity", "prefix"]]
        .apply(lambda g: len(g.drop_duplicates()))
    )
    return [name for name in NAMES if count.get(name, 0) == 2 * len(sizes)]


def quality(results: pd.DataFrame, protect_frac: float = 0.10, measure: str = "token_f1") -> Figure:
    """F1 by policy and capacity, unprotected and protected joined, with the full cache's band; a panel per reading."""
    with plt.rc_context(STYLE):
        readings = _readings(results)
        figure, panels = _panels(readings, 3.9, sharey=True)
        for panel, reading in zip(panels, readings, strict=True):
            rows = _of(results, reading)
            sizes, policies = members.capacities(rows, protect_frac)["all"], _policies(rows, protect_frac)
            _ceiling(panel, rows, measure)
            for i, capacity in enumerate(sizes):
                for j, policy in enumerate(policies):
                    x = i + (j - (len(policies) - 1) / 2) * 0.115
                    pair = [
                        _estimate(rows, measure, "mean", a=_cell(policy, capacity, side))
                        for side in (0.0, protect_frac)
                    ]
                    panel.plot([x, x], [pair[0][0], pair[1][0]], color=COLOURS[policy], lw=0.8, alpha=0.35)
                    for estimate, filled in zip(pair, (False, True), strict=True):
                        point(panel, x, estimate, policy=policy, filled=filled, markersize=4.5)
            panel.set_xticks(range(len(sizes)), [f"{size:.0f}" for size in sizes])
            panel.grid(axis="x", visible=False)
            panel.set_xlabel("capacity (tokens kept)")
            panel.set_ylim(bottom=-0.02)
        panels[0].set_ylabel("token F1 (0 to 1)")
        _legend(figure, policies)
    return done(figure)


def lift(results: pd.DataFrame, protect_frac: float = 0.10) -> Figure:
    """F1 gained by protection, per policy and capacity (paired differences), one panel per reading."""
    with plt.rc_context(STYLE):
        readings = _readings(results)
        figure, panels = _panels(readings, 3.6, sharey=True, sharex=True)
        for panel, reading in zip(panels, readings, strict=True):
            rows = _of(results, reading)
            sizes, policies = members.capacities(rows, protect_frac)["all"], _policies(rows, protect_frac)
            panel.axvline(0, color="black", lw=0.8)
            for i, policy in enumerate(policies):
                for j, capacity in enumerate(sizes):
                    cells = {"a": _cell(policy, capacity, protect_frac), "b": _cell(policy, capacity, 0.0)}
                    alpha = 0.4 + 0.6 * j / max(1, len(sizes) - 1)
                    y = i + (j - (len(sizes) - 1) / 2) * 0.24
                    point(
                        panel,
                        y,
                        _estimate(rows, "token_f1", "difference", **cells),
                        policy=policy,
                        along="x",
                        alpha=alpha,
                        markersize=4 + j,
                    )
            panel.set_yticks(range(len(policies)), [NAMES[one] for one in policies])
            panel.set_xlabel("F1 gained by protection")
        panels[0].invert_yaxis()
        handles = [
            Line2D(
                [],
                [],
                color="#333333",
                marker="o",
                ls="none",
                markersize=4 + j,
                alpha=0.4 + 0.6 * j / max(1, len(sizes) - 1),
                label=f"capacity {size:.0f}",
            )
            for j, size in enumerate(sizes)
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=len(sizes))
    return done(figure)


def domains(results: pd.DataFrame, policy: str = "lru", protect_frac: float = 0.10) -> pd.io.formats.style.Styler:
    """Per-domain table at the middle capacity: full cache, unprotected, protected, lift, each with its interval."""
    table: dict[str, dict[tuple[str, str], object]] = {}
    for reading in _readings(results):
        rows = _of(results, reading)
        size = members.capacities(rows, protect_frac)["middle"]
        for task, group in rows.groupby("task"):
            bare, kept = _cell(policy, size, 0.0), _cell(policy, size, protect_frac)
            gain = _estimate(group, "token_f1", "difference", a=kept, b=bare)
            means = {
                name: _mean(_estimate(group, "token_f1", "mean", a=cell))
                for name, cell in (("full", {"policy": "full"}), ("bare", bare), ("kept", kept))
            }
            label = READINGS[reading]
            row: dict[tuple[str, str], object] = {
                ("", "items"): group["item"].nunique(),
                ("", "full cache"): means["full"],
            }
            row |= {(label, "unprotected"): means["bare"], (label, "protected"): means["kept"]}
            row |= {(label, "lift"): gain[0], (label, "95%"): _interval(gain)}
            table.setdefault(str(task), {}).update(row)
    frame = pd.DataFrame.from_dict(table, orient="index")
    frame.columns = pd.MultiIndex.from_tuples(frame.columns)
    frame.index.name = "domain"
    lifts = [column for column in frame.columns if column[1] == "lift"]
    return frame.style.format(dict.fromkeys(lifts, "{:+.2f}"), na_rep="").background_gradient(
        _PALE, subset=lifts, vmin=0, vmax=1
    )


_PALE = LinearSegmentedColormap.from_list("pale", ["#FFFFFF", "#9ECAE1"])


def _mean(estimate: tuple[float, float, float]) -> str:
    value, low, high = estimate
    return f"{value:.2f}" + (" (too few)" if np.isnan(low) else f" ({low:.2f} to {high:.2f})")


def _interval(estimate: tuple[float, float, float]) -> str:
    return "too few" if np.isnan(estimate[1]) else f"{estimate[1]:+.2f} to {estimate[2]:+.2f}"


def sensitivity(results: pd.DataFrame, policy: str = "lru", protect_frac: float = 0.10) -> Figure:
    """Share of the full cache's F1 against the fraction protected per side: both readings and the paper's own curve."""
    with plt.rc_context(STYLE):
        fractions = [k * protect_frac for k in (0.0, 0.5, 1.0, 1.5, 2.0)]
        figure, axes = plt.subplots(figsize=(WIDTH, 3.2))
        shades = {"as_run": COLOURS[policy], "as_described": "#D55E00"}
        for shift, reading in enumerate(_readings(results)):
            rows = _of(results, reading)
            size = members.capacities(rows, protect_frac)["middle"]
            found = [
                _estimate(rows, "token_f1", "share_of_ceiling", a=_cell(policy, size, side), full={"policy": "full"})
                for side in fractions
            ]
            x = np.asarray(fractions) + (shift - 0.5) * 0.0016
            axes.plot(
                x, [value for value, _, _ in found], color=shades[reading], lw=1.4, ls="-" if shift == 0 else "--"
            )
            for at, one in zip(x, found, strict=True):
                point(axes, at, one, color=shades[reading], marker="o" if shift == 0 else "s")
        printed = claims.cells("protection_t08_protection_sweep_qwen25_3b.csv", {"metric": "pct_of_ceiling"})
        axes.plot(
            printed.protect_frac.astype(float),
            printed.value.astype(float) / 100,
            color="#777777",
            marker="x",
            lw=1,
            ls=":",
        )
        axes.axhline(1, color="black", lw=1, ls=(0, (4, 2)))
        axes.set_xticks(list(fractions))
        axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        axes.set_xlabel("protected per side (share of capacity)")
        axes.set_ylabel("F1, share of full cache")
        axes.set_ylim(bottom=-0.03)
        handles = [
            Line2D(
                [], [], color=shades[one], marker="os"[i], ls=["-", "--"][i], label=f"{NAMES[policy]} {READINGS[one]}"
            )
            for i, one in enumerate(_readings(results))
        ]
        handles += [
            Line2D([], [], color="#777777", marker="x", ls=":", label="paper, LRU on Qwen2.5-3B"),
            Line2D([], [], color="black", ls=(0, (4, 2)), label="full cache"),
        ]
        axes.legend(handles=handles, loc="lower right")
    return done(figure)


def sides(results: pd.DataFrame, policy: str = "lru", protect_frac: float = 0.10) -> Figure:
    """Prefix, suffix or both: share of the full cache's F1, budget-matched rows in the lower half, and the paper's."""
    one, two = protect_frac, 2 * protect_frac
    rows_of = [
        (0, 0, "none"),
        (one, 0, "prefix"),
        (0, one, "suffix"),
        (two, 0, "prefix"),
        (0, two, "suffix"),
        (one, one, "both"),
    ]
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(WIDTH, 3.6))
        shades = {"as_run": COLOURS[policy], "as_described": "#D55E00"}
        ceiling = claims.paper_values(
            {"file": "protection_t02_noprot_qwen25_3b.csv", "where": {"policy": "FullCache"}}
        )[0]
        labels = []
        for y, (prefix, suffix, name) in enumerate(rows_of):
            for shift, reading in enumerate(_readings(results)):
                rows = _of(results, reading)
                cell = {
                    "policy": policy,
                    "capacity": members.capacities(rows, protect_frac)["middle"],
                    "prefix": prefix,
                    "suffix": suffix,
                }
                estimate = _estimate(rows, "token_f1", "share_of_ceiling", a=cell, full={"policy": "full"})
                point(axes, y + (shift - 1) * 0.22, estimate, color=shades[reading], marker="os"[shift], along="x")
            where = {"side": name, "protect_frac": max(prefix, suffix)}
            value, low, high = (
                (
                    claims.paper_values(
                        {"file": "protection_t09_side_ablation_qwen25_3b.csv", "where": where | {"metric": metric}}
                    )[0]
                    / ceiling
                    for metric in ("token_f1", "ci95_low", "ci95_high")
                )
                if np.isclose(protect_frac, 0.10)
                else (np.nan,) * 3
            )
            point(axes, y + 0.22, (value, low, high), color="#777777", marker="x", along="x")
            total = prefix + suffix
            labels.append(
                "no protection"
                if not total
                else f"{name} {'10% + 10%' if name == 'both' else f'{total:.0%}'}".replace("10%", f"{protect_frac:.0%}")
                if name == "both"
                else f"{name} only, {total:.0%}"
            )
        axes.axhspan(2.5, 5.5, color="#F3F3F3", lw=0, zorder=0)
        axes.annotate(
            "same number of protected positions",
            (0.01, 5.38),
            xycoords=("axes fraction", "data"),
            fontsize=8,
            color="#555555",
        )
        axes.axvline(1, color="black", lw=1, ls=(0, (4, 2)))
        axes.set_yticks(range(len(labels)), labels)
        axes.set_ylim(5.5, -0.5)
        axes.set_xlim(left=-0.03)
        axes.grid(axis="y", visible=False)
        axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        axes.set_xlabel("F1, share of full cache")
        handles = [
            Line2D([], [], color=shades[r], marker="os"[i], ls="none", label=f"{NAMES[policy]} {READINGS[r]}")
            for i, r in enumerate(_readings(results))
        ]
        handles += [
            Line2D([], [], color="#777777", marker="x", ls="none", label="paper, Qwen2.5-3B"),
            Line2D([], [], color="black", ls=(0, (4, 2)), label="full cache"),
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=4)
    return done(figure)


def convergence(results: pd.DataFrame, protect_frac: float = 0.10, margin: float = 0.02) -> Figure:
    """Protected policies minus protected LRU, middle capacity: 95% (thin), 90% (thick) interval, TOST band, Holm p."""
    with plt.rc_context(STYLE):
        readings = _readings(results)
        figure, panels = _panels(readings, 3.4, sharey=True, sharex=True)
        reach = margin
        for panel, reading in zip(panels, readings, strict=True):
            rows = _of(results, reading)
            size = members.capacities(rows, protect_frac)["middle"]
            policies = [one for one in _policies(rows, protect_frac) if one != "lru"]
            base = members.per_item(rows, _cell("lru", size, protect_frac), "token_f1")
            frames = [
                pd.DataFrame(
                    {"a": members.per_item(rows, _cell(one, size, protect_frac), "token_f1"), "b": base}
                ).dropna()
                for one in policies
            ]
            adjusted = stats.holm([stats.wilcoxon(frame.a, frame.b) for frame in frames])
            panel.axvspan(-margin, margin, color="#CFE8CF", lw=0, zorder=0)
            panel.axvline(0, color="black", lw=0.8)
            for y, (policy, frame, p) in enumerate(zip(policies, frames, adjusted, strict=True)):
                estimate = stats.contrast(frame, "difference", bounds=UNIT)
                point(panel, y, estimate.triple, policy=policy, along="x")
                reach = max(reach, *np.abs(np.nan_to_num([estimate.low, estimate.high])))
                inner = stats.contrast(frame, "difference", bounds=UNIT, level=0.90)
                panel.plot(
                    [inner.low, inner.high], [y, y], color=COLOURS[policy], lw=3, alpha=0.45, solid_capstyle="butt"
                )
                equivalent = stats.tost(frame.a, frame.b, margin, bounds=UNIT) < 0.05
                text = f"p {'< 0.001' if p < 0.001 else f'= {p:.3f}'}{', equivalent' if equivalent else ''}"
                panel.annotate(
                    text,
                    (0.99, y),
                    xycoords=("axes fraction", "data"),
                    ha="right",
                    va="center",
                    fontsize=7.5,
                    color="#444444",
                )
            panel.set_yticks(range(len(policies)), [NAMES[one] for one in policies])
            panel.set_xlabel("F1 minus LRU's, both protected")
        panels[0].set_ylim(len(policies) - 0.5, -0.6)
        panels[0].set_xlim(-1.1 * reach, 2.4 * reach)  # room for the p-values on the right
        handles = [
            Patch(color="#CFE8CF", label=f"equivalence band ± {margin}"),
            Line2D([], [], color="#333333", lw=1.1, label="95% interval"),
            Line2D([], [], color="#333333", lw=3, alpha=0.45, label="90% interval (TOST)"),
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=3)
    return done(figure)


def items(results: pd.DataFrame, policy: str = "lru", protect_frac: float = 0.10, bins: int = 20) -> Figure:
    """Histogram of per-item F1 at the middle capacity: unprotected, protected and full cache, one panel per reading."""
    with plt.rc_context(STYLE):
        readings = _readings(results)
        figure, panels = _panels(readings, 3.0, sharey=True)
        edges = np.linspace(0, 1, bins + 1)
        for panel, reading in zip(panels, readings, strict=True):
            rows = _of(results, reading)
            size = members.capacities(rows, protect_frac)["middle"]
            shown = {
                "unprotected": (_cell(policy, size, 0.0), {"color": "#D55E00", "alpha": 0.45}),
                "protected": (_cell(policy, size, protect_frac), {"color": COLOURS[policy], "alpha": 0.55}),
                "full cache": (
                    {"policy": "full"},
                    {"histtype": "step", "color": "black", "lw": 1.3, "ls": (0, (4, 2))},
                ),
            }
            for label, (cell, look) in shown.items():
                values = members.per_item(rows, cell, "token_f1").dropna()
                panel.hist(values, edges, weights=np.full(len(values), 1 / len(values)), label=label, **look)
            panel.set_xlabel("token F1 of one item")
            panel.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        panels[0].set_ylabel("share of items")
        handles = [
            Patch(color="#D55E00", alpha=0.45, label="LRU unprotected"),
            Patch(color=COLOURS[policy], alpha=0.55, label="LRU protected"),
        ]
        handles.append(Line2D([], [], color="black", lw=1.3, ls=(0, (4, 2)), label="full cache"))
        figure.legend(handles=handles, loc="outside lower center", ncols=3)
    return done(figure)


def repetition(results: pd.DataFrame, protect_frac: float = 0.10) -> Figure:
    """Share of repeated 4-grams in the output, middle capacity, unprotected and protected; one panel per reading."""
    with plt.rc_context(STYLE):
        readings = _readings(results)
        figure, panels = _panels(readings, 3.4, sharey=True, sharex=True)
        for panel, reading in zip(panels, readings, strict=True):
            rows = _of(results, reading)
            size, policies = members.capacities(rows, protect_frac)["middle"], _policies(rows, protect_frac)
            _ceiling(panel, rows, "repetition_4gram", along="x")
            for y, policy in enumerate(policies):
                pair = [
                    _estimate(rows, "repetition_4gram", "mean", a=_cell(policy, size, side))
                    for side in (0.0, protect_frac)
                ]
                panel.plot([pair[0][0], pair[1][0]], [y, y], color=COLOURS[policy], lw=0.8, alpha=0.35)
                for shift, estimate in enumerate(pair):
                    point(panel, y + (shift - 0.5) * 0.2, estimate, policy=policy, filled=bool(shift), along="x")
            panel.set_yticks(range(len(policies)), [NAMES[one] for one in policies])
            panel.set_xlim(left=-0.02)
            panel.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
            panel.set_xlabel("repeated 4-grams in the output")
        panels[0].invert_yaxis()
        _legend(figure, [], columns=3)
    return done(figure)


def first_word(results: pd.DataFrame, protect_frac: float = 0.10) -> Figure:
    """Token F1 of all words after the first, middle capacity, unprotected and protected; one panel per reading.

    The dotted line is the share of items whose first word is right with the full cache, which every policy is given.
    """
    with plt.rc_context(STYLE):
        readings = _readings(results)
        figure, panels = _panels(readings, 3.4, sharey=True, sharex=True)
        for panel, reading in zip(panels, readings, strict=True):
            rows = members.rest_of(_of(results, reading))
            size, policies = members.capacities(rows, protect_frac)["middle"], _policies(rows, protect_frac)
            _ceiling(panel, rows, "rest_f1", along="x")
            given = _estimate(rows, "first_right", "mean", a={"policy": "full"})[0]
            panel.axvline(given, color="black", lw=1, ls=":")
            for y, policy in enumerate(policies):
                pair = [_estimate(rows, "rest_f1", "mean", a=_cell(policy, size, side)) for side in (0.0, protect_frac)]
                panel.plot([pair[0][0], pair[1][0]], [y, y], color=COLOURS[policy], lw=0.8, alpha=0.35)
                for shift, estimate in enumerate(pair):
                    point(panel, y + (shift - 0.5) * 0.2, estimate, policy=policy, filled=bool(shift), along="x")
            panel.set_yticks(range(len(policies)), [NAMES[one] for one in policies])
            panel.set_xlim(-0.02, 1.02)
            panel.set_xlabel("token F1 after the first word")
        panels[0].invert_yaxis()
        dotted = Line2D([], [], color="black", lw=1, ls=":", label="first word right (given)")
        _legend(figure, [], columns=4, more=[dotted])
    return done(figure)


REGIONS = {
    "sink": ("position 0", "#D55E00", "o"),
    "prefix": ("rest of the prefix", "#0072B2", "s"),
    "middle": ("middle", "#7F7F7F", "v"),
    "suffix": ("suffix", "#009E73", "D"),
}


def boundary_attention(attention: pd.DataFrame) -> Figure:
    """Attention of the prompt's last token by layer: share of mass per region, and mass per position over uniform."""
    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(WIDTH, 3.3), sharex=True)
        for shift, (region, (_, colour, marker)) in enumerate(REGIONS.items()):
            here = attention[attention.region == region]
            if here.empty:
                continue
            per_item = (
                here.groupby(["layer", "item"]).agg(mass=("mass", "mean"), uniform=("uniform", "first")).reset_index()
            )
            per_item["density"] = per_item.mass / per_item.uniform
            for panel, column in ((left, "mass"), (right, "density")):
                wide = per_item.pivot_table(index="item", columns="layer", values=column)
                found = [
                    stats.interval(wide[layer], bounds=UNIT if column == "mass" else None).triple for layer in wide
                ]
                x = np.asarray(wide.columns, float) + (shift - 1.5) * 0.09
                panel.plot(x, [value for value, _, _ in found], color=colour, lw=1, alpha=0.7)
                for at, one in zip(x, found, strict=True):
                    point(panel, at, one, color=colour, marker=marker, markersize=4)
        right.axhline(1, color="black", lw=1, ls=(0, (4, 2)))
        right.set_yscale("log")
        left.set_ylim(bottom=0)
        left.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        left.set_ylabel("share of attention mass")
        right.set_ylabel("mass per position (1 = uniform)")
        for panel in (left, right):
            panel.set_xlabel("layer")
            panel.xaxis.get_major_locator().set_params(integer=True)
        handles = [
            Line2D([], [], color=colour, marker=marker, lw=1, label=label) for label, colour, marker in REGIONS.values()
        ]
        handles.append(Line2D([], [], color="black", lw=1, ls=(0, (4, 2)), label="uniform"))
        figure.legend(handles=handles, loc="outside lower center", ncols=5)
    return done(figure)


def scaling(results: pd.DataFrame, protect_frac: float = 0.10) -> Figure:
    """F1 against prompt length at one eighth of the cache, unprotected, protected and full; one panel per reading."""
    with plt.rc_context(STYLE):
        readings = _readings(results)
        figure, panels = _panels(readings, 3.4, sharey=True)
        for panel, reading in zip(panels, readings, strict=True):
            rows = _of(results, reading)
            lengths = rows.groupby("length").prompt_tokens.mean()
            policies = [one for one in NAMES if one in set(rows.policy) and one != "full"]
            lines: dict[tuple[str, float], list[tuple[float, tuple[float, float, float]]]] = {}
            for length, tokens in lengths.items():
                group = rows[rows.length == length]
                size = members.capacities(group, protect_frac)["middle"]
                lines.setdefault(("full", 0.0), []).append(
                    (tokens, _estimate(group, "token_f1", "mean", a={"policy": "full"}))
                )
                for j, policy in enumerate(policies):
                    for side in (0.0, protect_frac):
                        x = tokens * 1.045 ** (2 * j - len(policies) + 1 + (0.5 if side else -0.5))
                        lines.setdefault((policy, side), []).append(
                            (x, _estimate(group, "token_f1", "mean", a=_cell(policy, size, side)))
                        )
            for (policy, side), points in lines.items():
                filled = bool(side) or policy == "full"
                style: object = (0, (4, 2)) if policy == "full" else "-" if side else ":"
                panel.plot(
                    [x for x, _ in points],
                    [estimate[0] for _, estimate in points],
                    color=COLOURS[policy],
                    lw=1,
                    ls=style,
                    alpha=0.8,
                )
                for x, estimate in points:
                    point(
                        panel,
                        x,
                        estimate,
                        policy=policy,
                        filled=filled,
                        **({"marker": "_"} if policy == "full" else {}),
                    )
            panel.set_xscale("log")
            panel.set_xticks(list(lengths), [f"{tokens:,.0f}" for tokens in lengths])
            panel.minorticks_off()
            panel.set_xlabel("prompt length (tokens)")
            panel.set_ylim(bottom=-0.02)
        panels[0].set_ylabel("token F1 (0 to 1)")
        _legend(figure, policies, columns=len(policies) + 3)
    return done(figure)


def retention(kept: pd.DataFrame) -> Figure:
    """Which prompt positions survive the first reduction: one strip per policy, unprotected above protected.

    kept: one row per kept position (policy, reading, protected, position); `attrs["tokens"]` is the prompt's length,
    `attrs["spans"]`, if there, the first and last position of its parts. LRU's longest stretch is labelled.
    """
    tokens, bins = kept.attrs["tokens"], 480
    policies = [one for one in NAMES if one in set(kept.policy)]
    readings = [one for one in READINGS if one in set(kept.reading)]
    edges = np.linspace(0, tokens, bins + 1)
    size = (WIDTH, 0.7 + 0.5 * len(policies))
    with plt.rc_context(STYLE | {"axes.grid": False}):
        figure, panels = plt.subplots(2, len(readings), figsize=size, squeeze=False, sharex=True, sharey=True)
        for row, column in np.ndindex(panels.shape):
            panel, reading, protected = panels[row, column], readings[column], bool(row)
            chosen = kept[(kept.reading == reading) & (kept.protected == protected)]
            image = np.ones((len(policies), bins, 3))
            for y, policy in enumerate(policies):
                here = np.sort(chosen[chosen.policy == policy].position.to_numpy())
                share = np.histogram(here, edges)[0] / np.maximum(1, np.histogram(np.arange(tokens), edges)[0])
                image[y] = 0.955 - share[:, None] * (0.955 - np.asarray(to_rgb(COLOURS[policy])))
                if policy == "lru" and len(here):
                    _stretch(panel, y, here, tokens)
            panel.imshow(image, aspect="auto", extent=(0, tokens, len(policies) - 0.5, -0.5), interpolation="nearest")
            for y in range(len(policies) - 1):
                panel.axhline(y + 0.5, color="white", lw=3)
            panel.set_yticks(range(len(policies)), [NAMES[one] for one in policies])
            panel.tick_params(axis="y", length=0)
            for side in ("left", "bottom"):
                panel.spines[side].set_visible(False)
            label = f"{READINGS[reading]}, {'protected' if protected else 'unprotected'}"
            panel.annotate(
                label,
                (0, 1),
                xytext=(0, 16 if kept.attrs.get("spans") and not row else 4),
                xycoords="axes fraction",
                textcoords="offset points",
                fontweight="bold",
                va="bottom",
            )
            for first, last in kept.attrs.get("spans", {}).values():
                if last - first < 0.05 * tokens:
                    panel.axvline((first + last) / 2, color="black", lw=0.8, ls=(0, (1, 2)), zorder=2)
            if not row:
                _spans(panel, kept.attrs.get("spans", {}))
        for panel in panels[-1]:
            panel.set_xlabel("position in the prompt (tokens)")
    return done(figure)


def _stretch(panel: Axes, y: int, positions: np.ndarray, tokens: int) -> None:
    """First and last position of the longest run of kept positions, written beside it."""
    runs = np.split(positions, np.flatnonzero(np.diff(positions) > 1) + 1)
    longest = max(runs, key=len)
    first, last = longest[0], longest[-1]
    beyond = last < tokens * 0.7
    x = last + 0.015 * tokens if beyond else first - 0.015 * tokens
    panel.text(x, y, f"{first} to {last}", ha="left" if beyond else "right", va="center", fontsize=8, zorder=3)


def _spans(panel: Axes, spans: Mapping[str, tuple[int, int]]) -> None:
    """Parts of the prompt as a ruler above a panel: a bar and a name each, where there is room for it."""
    for i, (name, (first, last)) in enumerate(spans.items()):
        shade = ("#444444", "#AAAAAA")[i % 2]
        panel.axvspan(first, last + 1, ymin=1.015, ymax=1.045, color=shade, clip_on=False, lw=0)
        panel.annotate(
            name,
            ((first + last) / 2, 1.05),
            xycoords=("data", "axes fraction"),
            ha="left" if first < 60 else "center",
            va="bottom",
            fontsize=7.5,
            color="#444444",
            annotation_clip=False,
        )
