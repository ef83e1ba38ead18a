"""Figures of the reclamation chapter: a table of `study` or `streaming` in, a Figure out.

Colours after Okabe and Ito, one per layout everywhere; width 7.2 in. Captions stand in the notebook.
"""

from collections.abc import Mapping
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, PercentFormatter

from kvrepro.experiment import stats
from kvrepro.experiment.figure import STYLE, WIDTH, done, point

LAYOUTS = {"none": "no compaction", "repack": "repack", "fill": "hole filling", "emptiest": "hole filling, emptiest"}
COLOURS = {"none": "#5F5F5F", "repack": "#0072B2", "fill": "#D55E00", "emptiest": "#E69F00", "own": "#009E73"}
MARKERS = {"none": "X", "repack": "o", "fill": "s", "emptiest": "^", "own": "D"}
POLICIES = {
    "sinks_recency": "sinks + recency",
    "cumulative": "cumulative",
    "window": "window",
    "redundancy": "redundancy",
}
WAYS = {"fused attention": "#5F5F5F", "one extra pass": "#009E73", "eager": "#D55E00"}


PERCENT = FuncFormatter(lambda y, _: f"{100 * y:g}%")  # of any size, for logarithmic axes


def _mean(values: pd.Series) -> tuple[float, float, float]:
    """Mean and 95% interval over rows; without one where too few."""
    return stats.interval(values).triple


def _point(axes: Axes, at: float, values: pd.Series, layout: str, **style) -> None:
    """A mean with its interval, in the colour of a layout."""
    shape: dict[str, Any] = {"color": COLOURS[layout], "marker": MARKERS[layout], "markersize": 5}
    point(axes, at, _mean(values), **(shape | style))


def _keys(layouts: list[str], names: Mapping[str, str] = LAYOUTS, line: bool = False) -> list[Line2D]:
    style = "-" if line else "none"
    return [Line2D([], [], color=COLOURS[x], marker=MARKERS[x], ls=style, label=names[x]) for x in layouts]


def toy(layouts: Mapping[str, np.ndarray]) -> Figure:
    """The guide's 24 tokens: the pool's six blocks after eviction, after a repack, after hole filling."""
    with plt.rc_context(STYLE | {"axes.grid": False}):
        figure, axes = plt.subplots(len(layouts), 1, figsize=(WIDTH, 2.9))
        before = next(iter(layouts.values())).ravel()
        for panel, (layout, slots) in zip(axes, layouts.items(), strict=True):
            for slot, position in enumerate(slots.ravel()):
                x = slot + 0.6 * (slot // slots.shape[1])
                moved = position >= 0 and position != before[slot]
                face = "white" if position < 0 else COLOURS[layout] if moved else "#D9D9D9"
                panel.add_patch(Rectangle((x, 0), 1, 1, facecolor=face, edgecolor="#777777", lw=0.6))
                colour = "white" if moved else "#222222"
                panel.text(x + 0.5, 0.48, position if position >= 0 else "", ha="center", va="center", fontsize=8,
                           color=colour)  # fmt: skip
            for block in np.flatnonzero((slots < 0).all(1)):
                x = block * (slots.shape[1] + 0.6)
                panel.text(x + slots.shape[1] / 2, 0.48, "free", ha="center", va="center", color="#009E73",
                           bbox={"facecolor": "white", "lw": 0, "pad": 1.5})  # fmt: skip
            copies = int(((slots.ravel() >= 0) & (slots.ravel() != before)).sum())
            panel.set_title({"none": "after eviction"}.get(layout, f"{LAYOUTS[layout]}: {copies} copies"), loc="left",
                            fontsize=9, pad=2)  # fmt: skip
            panel.set(xlim=(-0.2, slots.size + 0.6 * len(slots) - 0.4), ylim=(-0.05, 1.05))
            panel.axis("off")
    return done(figure)


def chance(sizes: pd.DataFrame, patterns: pd.DataFrame) -> Figure:
    """Left: blocks freed by chance alone against block size, and (1 - s)^B. Right: blocks freed by pattern."""
    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(WIDTH, 3.3), width_ratios=[1, 1.35])
        expected = sizes.groupby("block_size").expected.first()
        left.plot(expected.index, expected, color="black", lw=1, ls=(0, (4, 2)))
        for size, rows in sizes.groupby("block_size"):
            _point(left, size, rows.share_plain, "none")
        left.set_xscale("log", base=2)
        left.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        left.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        left.set(xlabel="block size (tokens)", ylabel="blocks freed without compaction")
        left.annotate("dashed: 0.9 to\nthe block size", (0.98, 0.97), xycoords="axes fraction", ha="right", va="top",
                      fontsize=8.5)  # fmt: skip
        names = list(dict.fromkeys(patterns.pattern))
        for y, name in enumerate(names):
            rows = patterns[patterns.pattern == name]
            _point(right, y, rows.share_plain, "none", along="x")
            _point(right, y, rows.share_repack, "repack", along="x", mfc="none")
        right.set_yticks(range(len(names)), names)
        right.invert_yaxis()
        right.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        right.set_xlim(-0.04, 1.04)
        right.set_xlabel("blocks freed")
        handles = _keys(["none", "repack"], LAYOUTS | {"repack": "compacted"})
        figure.legend(handles=handles, loc="outside lower right", ncols=2)
    return done(figure)


def occupancy(living: pd.DataFrame) -> Figure:
    """Living slots in each block of one prompt, by policy and granularity; white blocks are free."""
    size = int(living.block_size.iloc[0])
    rows = list(dict.fromkeys(zip(living.policy, living.granularity, strict=True)))
    matrix = np.stack([living[(living.policy == p) & (living.granularity == g)].living.to_numpy() for p, g in rows])
    with plt.rc_context(STYLE | {"axes.grid": False}):
        figure, axes = plt.subplots(figsize=(WIDTH, 0.8 + 0.26 * len(rows)))
        colours = plt.get_cmap("viridis_r").with_extremes(bad="white")
        image = axes.imshow(np.ma.masked_equal(matrix, 0), aspect="auto", cmap=colours, vmin=1, vmax=size,
                            interpolation="nearest")  # fmt: skip
        labels = [f"{POLICIES.get(p, p)}, {g}" for p, g in rows]
        axes.set_yticks(range(len(rows)), labels)
        for y, row in enumerate(matrix):
            axes.text(matrix.shape[1] + 0.3, y, f"{(row == 0).mean():.0%}", va="center", fontsize=8)
        axes.text(matrix.shape[1] + 0.3, -0.95, "free", fontsize=8)
        axes.set_xlabel("block of the prompt")
        bar = figure.colorbar(image, ax=axes, pad=0.09, ticks=[1, size // 2, size])
        bar.set_label("living slots")
        bar.outline.set_visible(False)
    return done(figure)


def granularity(arising: pd.DataFrame) -> Figure:
    """Blocks freed against tokens evicted, by granularity: without compaction, compacted, and with a table per head."""
    kinds = list(dict.fromkeys(arising.granularity))
    policies = [p for p in POLICIES if p in set(arising.policy)]
    dashes = dict(zip(policies, ["-", "--", ":", "-."], strict=False))
    with plt.rc_context(STYLE):
        figure, panels = plt.subplots(1, len(kinds), figsize=(WIDTH, 3.3), sharey=True, squeeze=False)
        for panel, kind in zip(panels[0], kinds, strict=True):
            panel.plot([0, 1], [0, 1], color="black", lw=0.8, ls=(0, (1, 2)))
            for policy in policies:
                rows = arising[(arising.policy == policy) & (arising.granularity == kind)]
                if rows.empty:
                    continue
                by_share = rows.groupby("kept")
                x = 1 - np.array(list(by_share.groups))
                for layout, column in (("none", "share_plain"), ("repack", "share_repack")):
                    panel.plot(x, by_share[column].mean(), color=COLOURS[layout], ls=dashes[policy], lw=1.1)
                    for at, (_, group) in zip(x, by_share, strict=True):
                        _point(panel, at, group[column], layout, markersize=4)
            panel.annotate(kind, (0, 1.02), xycoords="axes fraction", fontweight="bold", va="bottom")
            panel.set(xlabel="tokens evicted (per head)", xlim=(0, 1), ylim=(-0.03, 1.0))
            panel.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
            panel.set_xticks([0.1, 0.5, 0.9])
        panels[0][0].yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        panels[0][0].set_ylabel("blocks freed")
        handles = _keys(["none", "repack"], LAYOUTS | {"repack": "compacted"})
        handles += [Line2D([], [], color="#333333", ls=dashes[p], lw=1.1, label=POLICIES[p]) for p in policies]
        handles += [Line2D([], [], color="black", lw=0.8, ls=(0, (1, 2)), label="as many blocks as tokens")]
        figure.legend(handles=handles, loc="outside lower center", ncols=4)
    return done(figure)


def published(rows: pd.DataFrame) -> Figure:
    """Blocks freed by the catalogue's policies at each share kept: plain, compacted, and with a table per head."""
    shares, names = sorted(rows.kept.unique()), list(dict.fromkeys(rows.policy))
    with plt.rc_context(STYLE):
        figure, panels = plt.subplots(
            1, len(shares), figsize=(WIDTH, 1.1 + 0.27 * len(names)), sharey=True, squeeze=False
        )
        for panel, share in zip(panels[0], shares, strict=True):
            panel.axvline(1 - share, color="black", lw=1, ls=(0, (4, 2)))
            for y, name in enumerate(names):
                mine = rows[(rows.policy == name) & (rows.kept == share)]
                _point(panel, y, mine.share_plain, "none", along="x")
                _point(panel, y, mine.share_own, "own", along="x", mfc="white", markersize=7)
                _point(panel, y, mine.share_repack, "repack", along="x")
            panel.annotate(f"{share:.0%} kept", (0, 1.02), xycoords="axes fraction", fontweight="bold", va="bottom")
            panel.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
            panel.set(xlabel="blocks freed", xlim=(-0.03, 1.0))
        panels[0][0].set_yticks(range(len(names)), names)
        panels[0][0].invert_yaxis()
        handles = _keys(["none", "repack"], LAYOUTS | {"repack": "compacted"})
        handles += [Line2D([], [], color=COLOURS["own"], marker="D", mfc="white", ls="none", label="a table per head"),
                    Line2D([], [], color="black", lw=1, ls=(0, (4, 2)), label="tokens evicted")]  # fmt: skip
        figure.legend(handles=handles, loc="outside lower center", ncols=4)
    return done(figure)


def copies(arising: pd.DataFrame) -> Figure:
    """Slot copies per survivor, by policy and share kept, of three compactions that free the same blocks."""
    rows = arising[arising.granularity == "one set"]
    policies = [p for p in POLICIES if p in set(rows.policy)]
    with plt.rc_context(STYLE):
        figure, panels = plt.subplots(1, len(policies), figsize=(WIDTH, 2.9), sharey=True, squeeze=False)
        for panel, policy in zip(panels[0], policies, strict=True):
            mine = rows[rows.policy == policy]
            shares = sorted(mine.kept.unique())
            for layout in ("repack", "fill", "emptiest"):
                per = mine[f"copies_{layout}"] / mine.living
                panel.plot(range(len(shares)), per.groupby(mine.kept).mean(), color=COLOURS[layout], lw=0.9, alpha=0.6)
                for i, share in enumerate(shares):
                    _point(panel, i, per[mine.kept == share], layout)
            panel.annotate(POLICIES[policy], (0, 1.02), xycoords="axes fraction", fontweight="bold", va="bottom")
            panel.set_xticks(range(len(shares)), [f"{share:.0%}" for share in shares])
            panel.set_xlabel("tokens kept")
        panels[0][0].set(ylabel="copies per survivor", ylim=(-0.03, 1.05))
        figure.legend(handles=_keys(["repack", "fill", "emptiest"], line=True), loc="outside lower center", ncols=3)
    return done(figure)


def gauge(trace: pd.DataFrame) -> Figure:
    """Blocks held while decoding under a budget, by layout, beside the tokens alive in units of blocks."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(WIDTH, 2.9))
        size, budget = int(trace.block_size.iloc[0]), int(trace.budget.iloc[0])
        axes.axhline(budget / size, color="black", lw=1, ls=(0, (4, 2)))
        for layout, rows in trace.groupby("layout", sort=False):
            width = 2.6 if layout == "repack" else 1.2  # the two compactions hold the same
            axes.plot(rows.token, rows.blocks_held, color=COLOURS[str(layout)], lw=width,
                      alpha=0.45 if layout == "repack" else 1)  # fmt: skip
        axes.set(xlabel="tokens decoded", ylabel=f"blocks held ({size} tokens each)")
        axes.set_ylim(bottom=0.9 * budget / size)
        handles = [Line2D([], [], color=COLOURS[x], label=LAYOUTS[x], lw=2.6 if x == "repack" else 1.2,
                          alpha=0.45 if x == "repack" else 1) for x in dict.fromkeys(trace.layout)]  # fmt: skip
        handles += [Line2D([], [], color="black", lw=1, ls=(0, (4, 2)), label=f"budget, {budget} tokens")]
        axes.legend(handles=handles, loc="upper left")
    return done(figure)


def cadence(means: pd.DataFrame) -> Figure:
    """Against the tokens between two passes: blocks held at most, slot copies per token, and their share of traffic."""
    views = [
        ("blocks_max", "blocks held at most", None),
        ("copies_per_token", "slot copies per token", "log"),
        ("share", "copied over read, bytes", "log"),
    ]
    with plt.rc_context(STYLE):
        figure, panels = plt.subplots(1, 3, figsize=(WIDTH, 3.1))
        for panel, (column, label, scale) in zip(panels, views, strict=True):
            for layout in ("none", "repack", "fill"):
                rows = means[means.layout == layout]
                if layout == "none" and column != "blocks_max":
                    continue
                panel.plot(rows.groupby("every")[column].mean(), color=COLOURS[layout], lw=1)
                for every, group in rows.groupby("every"):
                    _point(panel, float(every), group[column], layout, markersize=4)
            panel.set_xscale("log", base=2)
            ticks = sorted(means.every.unique())
            panel.set_xticks(ticks[::3], [str(tick) for tick in ticks[::3]])
            panel.set_xlabel("tokens between passes")
            panel.set_ylabel(label)
            if scale:
                panel.set_yscale(scale)
        panels[2].yaxis.set_major_formatter(PERCENT)
        panels[2].axhline(0.05, color="black", lw=0.8, ls=(0, (1, 2)))
        figure.legend(handles=_keys(["none", "repack", "fill"], line=True), loc="outside lower center", ncols=3)
    return done(figure)


def latency(times: pd.DataFrame) -> Figure:
    """Time between tokens of real decoding, its mean and the token that waits for a pass; and what compaction adds."""
    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(WIDTH, 3.2))
        cadences = sorted(times.every.unique())
        for i, layout in enumerate(("none", "repack", "fill")):
            rows = times[times.layout == layout]
            for x, every in enumerate(cadences):
                mine, at = rows[rows.every == every], x + 0.22 * (i - 1)
                _point(left, at, mine.token_ms, layout, markersize=4)
                left.plot(at, mine.longest_ms.mean(), color=COLOURS[layout], marker="_", ls="none", markersize=7)
                if layout != "none":
                    _point(right, at, mine.added, layout, markersize=4)
        for panel in (left, right):
            panel.set_xticks(range(len(cadences)), [str(every) for every in cadences])
            panel.set_xlabel("tokens between passes")
            panel.grid(axis="x", visible=False)
        left.set_ylabel("inter-token time (ms)")
        left.set_ylim(bottom=0)
        right.axhline(0, color="black", lw=0.8)
        right.axhline(0.05, color="black", lw=0.8, ls=(0, (1, 2)))
        right.yaxis.set_major_formatter(PERCENT)
        right.set_ylabel("added by compaction")
        handles = _keys(["none", "repack", "fill"])
        handles += [Line2D([], [], color="#333333", marker="_", ls="none", markersize=7, label="token that waits")]
        figure.legend(handles=handles, loc="outside lower center", ncols=4)
    return done(figure)


def cost(model: pd.DataFrame) -> Figure:
    """The cost model: time that copies add to a bandwidth-bound step, by cadence and batch."""
    with plt.rc_context(STYLE):
        batches = sorted(model.batch.unique())
        figure, panels = plt.subplots(1, len(batches), figsize=(WIDTH, 2.9), sharey=True, squeeze=False)
        for panel, batch in zip(panels[0], batches, strict=True):
            for layout in ("repack", "fill"):
                rows = model[(model.batch == batch) & (model.layout == layout)]
                panel.plot(rows.groupby("every").added.mean(), color=COLOURS[layout], lw=1)
                for every, group in rows.groupby("every"):
                    _point(panel, float(every), group.added, layout, markersize=4)
            panel.axhline(0.05, color="black", lw=0.8, ls=(0, (1, 2)))
            panel.set_xscale("log", base=2)
            panel.set_yscale("log")
            ticks = sorted(model.every.unique())
            panel.set_xticks(ticks[::3], [str(tick) for tick in ticks[::3]])
            panel.set_xlabel("tokens between passes")
            step = model[model.batch == batch].step_us.mean()
            label = f"batch {batch}" + ("" if np.isnan(step) else f", step {step / 1e3:.1f} ms")
            panel.annotate(label, (0, 1.02), xycoords="axes fraction", fontweight="bold", va="bottom")
        panels[0][0].yaxis.set_major_formatter(PERCENT)
        panels[0][0].set_ylabel("copies, share of the step")
        figure.legend(handles=_keys(["repack", "fill"], line=True), loc="outside lower center", ncols=2)
    return done(figure)


def wall(checks: pd.DataFrame) -> Figure:
    """Two caches that a kernel cannot tell apart: the cumulative scores of the two tokens whose keys were swapped."""
    value = checks.set_index("check").value
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(WIDTH, 2.2))
        for i, cache in enumerate(("first", "second")):
            for j, token in enumerate(("first", "second")):
                score = value[f"score of the {token} token, {cache} cache"]
                axes.barh(i + 0.36 * (j - 0.5), score, height=0.32, color=["#0072B2", "#E69F00"][j])
                axes.text(score + 0.01, i + 0.36 * (j - 0.5), f"{score:.3f}", va="center", fontsize=8.5)
        axes.set_yticks([0, 1], ["first cache", "keys swapped"])
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        gap = max(value["output of the two caches"], value["denominator of the two caches"])
        axes.set_xlabel(f"cumulative attention; outputs and kernel state differ by at most {gap:.0e}")
        axes.set_xlim(0, 1.14 * value.filter(like="score of").max())
        handles = [
            Line2D([], [], color=c, lw=6, label=t) for c, t in (("#0072B2", "token 7"), ("#E69F00", "token 300"))
        ]
        figure.legend(handles=handles, loc="outside upper right", ncols=2)
    return done(figure)


def passes(rows: pd.DataFrame, gpu: pd.DataFrame) -> Figure:
    """What cumulative scores cost: time per call, memory held at once, and the extra pass over attention, here and on
    the GPU where it was measured."""
    with plt.rc_context(STYLE):
        figure, (left, middle, right) = plt.subplots(1, 3, figsize=(WIDTH, 2.9))
        shapes: dict[str, Any] = {"marker": "o", "markersize": 4}
        for way, colour in WAYS.items():
            mine = rows[rows.way == way].groupby("tokens")
            left.plot(1e3 * mine.seconds.mean(), color=colour, lw=1)
            for tokens, group in mine:
                _point(left, float(tokens), 1e3 * group.seconds, "none", color=colour, **shapes)
            hollow = {"markersize": 8, "mfc": "none"} if way == "fused attention" else {}  # both may hold the same
            middle.plot(mine.held_mib.mean(), color=colour, lw=1, **(shapes | hollow))
        wide = rows.pivot_table(index=["tokens", "repeat"], columns="way", values="seconds")
        ratio = (wide["one extra pass"] / wide["fused attention"]).groupby("tokens")
        green = WAYS["one extra pass"]
        right.plot(ratio.mean(), color=green, lw=1)
        for tokens, group in ratio:
            _point(right, float(tokens), group, "none", color=green, **shapes)
        for _, group in gpu.groupby("shape"):
            right.plot(group.tokens, group.share, color=green, marker="D", mfc="white", lw=1)
        for panel in (left, middle, right):
            panel.set_xscale("log", base=2)
            panel.set_xlabel("tokens")
            panel.xaxis.set_major_formatter(FuncFormatter(lambda n, _: f"{n / 1024:g}K"))
            panel.margins(x=0.12)
        for panel in (left, middle):
            panel.set_yscale("log")
            panel.set_xticks(sorted(rows.tokens.unique()))
        measured = sorted({*rows.tokens, *gpu.tokens})
        right.set_xticks(measured[:: -(-len(measured) // 4)])
        right.set_ylim(bottom=0)
        left.set_ylabel("milliseconds")
        middle.set_ylabel("memory at its peak (MiB)")
        right.set_ylabel("extra pass over attention, time")
        handles = [Line2D([], [], color=c, marker="o", lw=1, label=w) for w, c in WAYS.items()]
        if len(gpu):
            handles += [Line2D([], [], color=green, marker="D", mfc="white", lw=1, label="extra pass, GPU")]
        figure.legend(handles=handles, loc="outside lower center", ncols=4)
    return done(figure)
