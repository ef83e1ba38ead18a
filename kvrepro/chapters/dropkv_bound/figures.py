"""Figures of the chapter on DropKV's bound: frames of a study in, a matplotlib Figure out, as in
`kvrepro.experiment.figure`.

Intervals are 95%, over prompts. Okabe and Ito's colours, one per pool and one per rule; what the paper
printed is grey. No titles: captions stand in the notebook.
"""

from collections.abc import Callable, Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator, PercentFormatter

from kvrepro.chapters.dropkv_bound import quality, tables
from kvrepro.chapters.dropkv_bound.quality import NAMES
from kvrepro.chapters.dropkv_bound.study import Study, pool_name
from kvrepro.chapters.dropkv_bound.triples import STRATA
from kvrepro.experiment import claims
from kvrepro.experiment.figure import STYLE, WIDTH, done

POOL_STYLES = (("#0072B2", "o", "-"), ("#E69F00", "s", "--"), ("#009E73", "D", ":"), ("#CC79A7", "^", "-."))
PAPER = "#8A8A8A"
RULE_STYLES = {"dropkv": ("#0072B2", "o"), "attention": ("#D55E00", "s"), "random": ("#009E73", "D")}
PRINTED = {"p50": "x", "p95": "+"}
FURTHEST = 20.0  # of a ratio's axis; what lies beyond is an arrow with its number


def _pools(study: Study) -> list[tuple[str, pd.DataFrame, tuple[str, str, str]]]:
    """Name, rows and style of each pool."""
    names = [pool_name(size) for size in study.settings.pools]
    rows = [study.assumptions[study.assumptions.pool == name] for name in names]
    return list(zip(names, rows, POOL_STYLES, strict=False))


def _cumulative(axes: Axes, values: pd.Series, **style) -> None:
    """Share of triples at or below each value."""
    finite = np.sort(values[np.isfinite(values)])
    axes.step(finite, np.arange(1, len(finite) + 1) / len(values), where="post", lw=1.6, **style)


def _paper_marks(axes: Axes, file: str, shares: dict[str, float]) -> None:
    """The paper's quantiles of three models as grey crosses, each at its share."""
    for metric, share in shares.items():
        values = claims.cells(file, {"metric": metric}).value.astype(float)
        axes.plot(values, [share] * len(values), "x", color=PAPER, ms=5, mew=1.2, zorder=4)


def _share_axis(axes: Axes, label: str) -> None:
    axes.set_ylabel(label)
    axes.set_ylim(-0.02, 1.02)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))


def _paper_handle(label: str = "paper, three models at 128K", marker: str = "x") -> Line2D:
    return Line2D([], [], color=PAPER, marker=marker, ls="none", mew=1.2, label=label)


def _plain(value: float) -> str:
    return f"{value:g}" if value < 1e4 else f"{value:.0e}".replace("e+0", "e")


def _ticks(axis: Axis, low: float, high: float, steps: Sequence[float] = (1, 2, 5)) -> None:
    """Ticks of a logarithmic axis from `low` to `high`, written out."""
    every = [step * 10.0**power for power in range(-3, 9) for step in steps]
    shown = [tick for tick in every if low * 0.999 <= tick <= high * 1.001]
    axis.set_major_locator(FixedLocator(shown))
    axis.set_major_formatter(FixedFormatter([_plain(tick) for tick in shown]))
    axis.set_minor_locator(NullLocator())


def _error(low: pd.Series, value: pd.Series, high: pd.Series) -> np.ndarray:
    """Lengths of the two arms of an interval, [2, rows]; none where there is no interval."""
    return np.nan_to_num(np.stack([value - low, high - value]).clip(min=0))


def lemma(study: Study) -> Figure:
    """Error of lemma 1 in units of float64's rounding, for one evicted key and for half of all keys."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(WIDTH, 2.3))
        unit = np.finfo(float).eps
        for row, (name, label) in enumerate((("joint", "half of all keys"), ("single", "one key"))):
            values = study.lemma[name].clip(lower=unit / 8) / unit
            jitter = np.random.default_rng(0).uniform(-0.22, 0.22, len(values))
            axes.plot(values, row + jitter, ".", color=POOL_STYLES[row][0], ms=4, alpha=0.6)
            axes.text(0.995, row + 0.3, label, ha="right", transform=axes.get_yaxis_transform())
        axes.set_xscale("log")
        axes.set_yticks([])
        axes.set_ylim(-0.5, 1.6)
        axes.set_xlabel("largest error of a triple, relative to $\\|a\\|/(1-P_J)$, in units of $2.2\\cdot10^{-16}$")
    return done(figure)


def _distribution(
    study: Study,
    values: Callable[[pd.DataFrame], pd.Series],
    printed: Sequence[tuple[pd.Series, Sequence[float]]],
    label: str,
    limits: tuple[float, float],
    legend: str,
) -> Figure:
    """Share of triples up to each value, a curve per pool, on a logarithmic axis; `printed`: the paper's values, each
    at its share. What lies beyond the axis is told at its edge."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(WIDTH, 3.0))
        for name, rows, (colour, _, line) in _pools(study):
            found = values(rows)
            _cumulative(axes, found, color=colour, ls=line, label=name + _beyond(axes, found, limits, colour))
        for found, shares in printed:
            axes.plot(found, shares, "x", color=PAPER, ms=5, mew=1.2, zorder=4)
        axes.set_xscale("log")
        axes.set_xlim(*limits)
        axes.set_xlabel(label)
        _share_axis(axes, "share of triples")
        handles, _ = axes.get_legend_handles_labels()
        axes.legend(handles=[*handles, _paper_handle("paper: median and p95")], loc=legend)
    return figure


def _beyond(axes: Axes, values: pd.Series, limits: tuple[float, float], colour: str) -> str:
    """Arrows where a curve leaves the axis, and in words what share of the values lies beyond which end."""
    left, right = (values < limits[0]).mean(), ((values > limits[1]) & np.isfinite(values)).mean()
    ends = ((limits[0], left, left, "left", "<"), (limits[1], right, (values <= limits[1]).mean(), "right", ">"))
    told = []
    for edge, share, height, side, arrow in ends:
        if share >= 0.005:
            axes.plot(edge, height, arrow, color=colour, ms=5, clip_on=False, zorder=5)
            told.append(f", {share:.0%} further {side}")
    return "".join(told)


def eps(study: Study) -> Figure:
    """Distribution of eps over triples, in multiples of the even share 1/n, per pool; the paper's medians at 128K."""
    printed = [
        (claims.cells("dropkv_t12_eps.csv", {"metric": metric}).value.astype(float) * 131072, [share] * 3)
        for metric, share in (("median eps", 0.5), ("p95 eps", 0.95))
    ]
    label = "$n\\,\\varepsilon$: largest attention weight in the pool, in multiples of $1/n$"
    figure = _distribution(study, lambda rows: rows.eps * rows.tokens, printed, label, (1e-8, 1e2), "upper left")
    figure.axes[0].axvline(1, color="black", lw=0.8, ls=(0, (4, 2)))
    return done(figure)


def factor(study: Study, k: int = tables.K) -> Figure:
    """Distribution of theorem 1's factor; where a curve ends below 100%, the rest has no finite bound."""
    file = "dropkv_t15_bound_factor.csv"
    finite = claims.cells(file, {"metric": "finite (%)"}).set_index("model").value.astype(float) / 100
    printed = []
    for metric, share in (("p50", 0.5), ("p95", 0.95)):
        found = claims.cells(file, {"metric": metric}).set_index("model").value.astype(float)
        printed.append((found, [share * finite[model] for model in found.index]))
    label = f"bound on $F$(DropKV) / $F$(optimum) by theorem 1, $k={k}$"
    return done(
        _distribution(study, lambda rows: tables.with_factor(rows, k).factor, printed, label, (1, 1e4), "lower right")
    )


def cone(study: Study) -> Figure:
    """Left: share of triples with c* > 0 per layer; right: distribution of c*, with the paper's quantiles."""
    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(WIDTH, 3.2))
        layers = tables.prevalence(study)
        for i, (name, rows, (colour, marker, line)) in enumerate(_pools(study)):
            f = layers[layers.pool == name]
            error = _error(f.low, f.share, f.high)
            x = f.layer + 0.12 * (i - 1)
            left.errorbar(
                x, f.share, yerr=error, color=colour, marker=marker, ls=line, lw=1.2, elinewidth=1, label=name
            )
            _cumulative(right, rows.c_low, color=colour, ls=line)
        left.set_xlabel("layer")
        left.set_xticks(sorted(layers.layer.unique()))
        _share_axis(left, "triples with $c^*>0$")
        right.axvline(0, color="black", lw=0.8, ls=(0, (4, 2)))
        _paper_marks(right, "dropkv_t13_cone_distribution.csv", {"p05": 0.05, "p50": 0.5, "p95": 0.95})
        right.set_xlabel("cone constant $c^*$")
        _share_axis(right, "share of triples")
        handles, _ = left.get_legend_handles_labels()
        figure.legend(handles=[*handles, _paper_handle()], loc="outside lower center", ncols=4, columnspacing=1.2)
    return done(figure)


def lengths(by_length: pd.DataFrame) -> Figure:
    """Share of triples with c* > 0, and the median of c*, negative ones taken as 0, by prompt length and pool."""
    with plt.rc_context(STYLE):
        figure, panels = plt.subplots(1, 2, figsize=(WIDTH, 3.0))
        for (name, rows), (colour, marker, line) in zip(
            by_length.groupby("pool", sort=False), POOL_STYLES, strict=False
        ):
            rows = rows.assign(c_low=rows.c_low.clip(lower=0))  # below zero it is enclosed only
            for panel, estimate in zip(panels, (tables.has_cone, lambda f: tables.median(f, "c_low")), strict=True):
                found = [(x, *estimate(f).triple) for x, f in rows.groupby("length")]
                x, value, low, high = np.array(found).T
                error = _error(low, value, high)
                panel.errorbar(x, value, yerr=error, color=colour, marker=marker, ls=line, lw=1.2, label=str(name))
        for panel in panels:
            panel.set_xscale("log")
            ticks = sorted(by_length.length.unique())
            panel.xaxis.set_major_locator(FixedLocator(ticks))
            panel.set_xticklabels([f"{tick:,}" for tick in ticks])
            panel.xaxis.set_minor_locator(NullLocator())
            panel.set_xlabel("prompt length (tokens)")
        _share_axis(panels[0], "triples with $c^*>0$")
        panels[1].set_ylabel("median of $c^*$ (0 where it is negative)")
        panels[1].set_ylim(bottom=-0.01)
        panels[0].legend(loc="lower left")
    return done(figure)


def ratios(study: Study) -> Figure:
    """Realised ratio per stratum: median and the middle 90% of DropKV, attention and random; a panel per k."""
    with plt.rc_context(STYLE):
        ks = list(study.settings.ks)
        figure, panels = plt.subplots(1, len(ks), figsize=(WIDTH, 3.6), sharey=True, squeeze=False)
        printed = claims.published("dropkv_t16_realized_ratio.csv")
        for panel, k in zip(panels[0], ks, strict=True):
            for row, stratum in enumerate(STRATA):
                name = tables.STRATUM_NAMES[stratum]
                cells = printed[printed.budget.str.contains(f"k={k} ") & (printed.task == name)]
                for short, marker in PRINTED.items():
                    values = cells[cells.metric.str.startswith(short)].value.astype(float)
                    panel.plot(values, [row - 0.32] * len(values), marker, color=PAPER, ms=4.5, mew=1)
                for i, (rule, (colour, marker)) in enumerate(RULE_STYLES.items()):
                    f = tables.selected(study.records, rule)
                    ratio = f[(f.k == k) & (f.stratum == stratum)].ratio
                    _row(panel, row + 0.21 * i - 0.1, ratio.quantile([0.05, 0.5, 0.95]).to_list(), colour, marker)
            panel.set_xscale("log")
            panel.set_xlim(0.97, FURTHEST)
            _ticks(panel.xaxis, 1, FURTHEST)
            panel.set_xlabel(f"$F$(selection) / $F$(optimum), evict {k} of 20")
            panel.grid(axis="y", visible=False)
        panels[0, 0].set_yticks(range(len(STRATA)), [tables.STRATUM_NAMES[one] for one in STRATA])
        panels[0, 0].set_ylim(len(STRATA) - 0.4, -0.6)
        handles = [Line2D([], [], color=c, marker=m, label=NAMES[rule]) for rule, (c, m) in RULE_STYLES.items()]
        handles += [_paper_handle(f"paper: DropKV, {short}", marker) for short, marker in PRINTED.items()]
        figure.legend(handles=handles, loc="outside lower center", ncols=5, columnspacing=1.0)
    return done(figure)


def _row(axes: Axes, y: float, quantiles: Sequence[float], colour: str, marker: str) -> None:
    """Median and middle 90% of a ratio; where they leave the axis, an arrow with the number that it points to."""
    low, middle, high = quantiles
    axes.plot([low, min(high, FURTHEST)], [y, y], color=colour, lw=1.3)
    axes.plot(middle, y, marker, color=colour, ms=5)
    if high > FURTHEST:
        axes.plot(FURTHEST, y, ">", color=colour, ms=5, clip_on=False)
        text, place = f"p95: {float(f'{high:.2g}'):,.0f}", {"xytext": (-6, 4), "textcoords": "offset points"}
        axes.annotate(text, (FURTHEST, y), **place, ha="right", fontsize=7, color=colour)


def slack(study: Study) -> Figure:
    """Each record's realised ratio against its bound; below the diagonal the theorem holds."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(WIDTH, 3.4))
        records = tables.selected(study.records)
        records = records[np.isfinite(records.bound)]
        for k, (colour, marker, _) in zip(study.settings.ks, POOL_STYLES, strict=False):
            f = records[records.k == k]
            axes.plot(f.bound, f.ratio, marker, color=colour, ms=3, alpha=0.45, mew=0, label=f"evict {k} of 20")
        wide, high = 1.2 * max(50, *records.bound), 1.15 * max(3.5, *records.ratio)
        axes.plot([1, wide], [1, wide], color="black", lw=1, ls=(0, (4, 2)), label="the bound itself")
        axes.set(xscale="log", yscale="log", xlim=(1, wide), ylim=(0.98, high))
        _ticks(axes.xaxis, 1, wide, (1, 2, 5) if wide < 1e4 else (1,))
        _ticks(axes.yaxis, 1, high, (1, 1.5, 2, 3, 5) if high < 100 else (1,))
        axes.set_xlabel("bound of theorem 1 on the same 20 keys")
        axes.set_ylabel("realised ratio")
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return done(figure)


def peers(study: Study, k: int = tables.HARD_K) -> Figure:
    """Geometric mean of each rule's ratio to the joint optimum: for the last query's F, and for the window's."""
    with plt.rc_context(STYLE):
        figure, panels = plt.subplots(1, 2, figsize=(WIDTH, 3.9), sharey=True)
        order: list[str] = []
        titles = {"query": "shift of the last query", "window": f"shift of all {study.settings.window} queries"}
        for panel, (objective, title) in zip(panels, titles.items(), strict=True):
            found = tables.peers(study, objective, k)
            order = order or found.groupby("rule").ratio.min().sort_values().index.to_list()
            for queries, filled, shift in ((1, False, -0.17), (study.settings.window, True, 0.17)):
                f = found[(found.queries == queries) & (found.kernel == 1)].copy()
                y = f.rule.map(order.index) + shift
                for position, one in zip(y, f.itertuples(), strict=True):
                    colour = "#0072B2" if one.rule == "dropkv" else "#333333"
                    error = None if np.isnan(one.low) else [[one.ratio - one.low], [one.high - one.ratio]]
                    marks = {"color": colour, "mfc": colour if filled else "white", "marker": "o", "elinewidth": 1.1}
                    panel.errorbar(one.ratio, position, xerr=error, ls="none", **marks)
            panel.set_xscale("log")
            panel.axvline(1, color="black", lw=0.8, ls=(0, (4, 2)))
            low, high = panel.get_xlim()
            _ticks(panel.xaxis, low, high, (1, 1.5, 2, 3, 5) if high < 10 else (1, 2, 5) if high < 1e3 else (1,))
            panel.set_xlabel(title)
        panels[0].set_yticks(range(len(order)), [NAMES[rule] for rule in order])
        panels[0].invert_yaxis()
        figure.supxlabel(f"ratio to the joint optimum, geometric mean (evict {k} of 20)", fontsize=9)
        handles = [
            Line2D([], [], color="#333333", marker="o", mfc="white", ls="none", label="rule sees the last query"),
            Line2D([], [], color="#333333", marker="o", ls="none", label=f"rule sees {study.settings.window} queries"),
        ]
        figure.legend(handles=handles, loc="outside upper center", ncols=2)
    return done(figure)


def alignment(study: Study) -> Figure:
    """Left: rank correlation of AnDPro's and DropKV's scores among aligned keys, with and without attention weight;
    right: the triple in which the values alone disagree most, key by key."""
    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(WIDTH, 3.1))
        found = tables.disagreement(study)
        bins = np.linspace(-1, 1, 21)
        left.hist(found.rho.dropna(), bins, color="#0072B2", alpha=0.75, label="whole scores")
        left.hist(found.rho_value.dropna(), bins, histtype="step", color="#D55E00", lw=1.6, label="values alone")
        left.set_xlabel("rank correlation, AnDPro and DropKV")
        left.set_ylabel("triples")
        left.legend(loc="upper left")
        where = ["item", "layer", "head", "position"]
        distinct = study.alignment.groupby(where).andpro_value.nunique().rename("distinct").reset_index()
        one = found.merge(distinct, on=where).sort_values(["distinct", "rho_value"], ascending=[False, True]).iloc[0]
        f = study.alignment[(study.alignment[where] == one[where].to_list()).all(axis=1)]
        right.plot(f.andpro_value, f.dropkv_value, "o", color="#D55E00", mfc="white", label="values alone")
        right.plot(f.andpro, f.dropkv, "o", color="#0072B2", ms=4, label="whole scores")
        right.set_xlabel("rank by AnDPro (1 = evicted first)")
        right.set_ylabel("rank by DropKV")
        note = f"layer {one.layer}, head {one['head']}, cosine {one.cosine:.2f}"
        right.annotate(note, (0.0, 1.02), xycoords="axes fraction", fontsize=8)
        right.set_ylim(top=len(f) * 1.35)
        right.legend(loc="upper right", ncols=2)
    return done(figure)


def budgets(study: Study, poolings: Sequence[str] = ("max", "average", "none")) -> Figure:
    """Relative shift of a layer's output, adaptive minus uniform budgets of its heads, by share kept and pooling."""
    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(WIDTH, 3.1))
        found = tables.budgets(study)
        shares = sorted(found.share.unique())
        for i, (pooling, (colour, marker, line)) in enumerate(zip(poolings, POOL_STYLES, strict=False)):
            f = found[(found.pooling == pooling) & ~found.bf16.astype(bool)].sort_values("share")
            x = np.array([shares.index(share) for share in f.share]) + 0.12 * (i - 1)
            name = {"none": "no pooling"}.get(pooling, f"{pooling} pooling")
            for panel, value, lines, label in ((left, "uniform", line, name), (right, "difference", "none", None)):
                error = _error(f[f"{value}_low"], f[value], f[f"{value}_high"])
                style = {"color": colour, "marker": marker, "ls": lines, "lw": 1.2, "elinewidth": 1.1}
                panel.errorbar(x, f[value], yerr=error, **style, label=label)
        for panel in (left, right):
            panel.set_xticks(range(len(shares)), [f"{share:.0%}" for share in shares])
            panel.set_xlabel("share of the prompt kept")
        left.set_ylabel("shift of the output (relative)")
        left.set_ylim(bottom=0)
        right.axhline(0, color="black", lw=0.8, ls=(0, (4, 2)))
        right.set_ylabel("adaptive minus uniform")
        left.legend(loc="upper right")
    return done(figure)


def answers(rows: pd.DataFrame) -> Figure:
    """Token F1 per method and share kept; variants below the peers."""
    with plt.rc_context(STYLE):
        found = quality.table(rows)
        full = found[found.method == "full"].iloc[0]
        rest = found[found.method != "full"]
        shares = sorted(rest.share.unique())
        first = rest[rest.share == shares[0]].sort_values("f1", ascending=False).method
        peers = [name for name in first if name in quality.PEERS]
        order = peers + [name for name in first if name not in quality.PEERS]
        figure, axes = plt.subplots(figsize=(WIDTH, 0.9 + 0.29 * len(order)))
        for i, (share, (colour, marker, _)) in enumerate(zip(shares, POOL_STYLES, strict=False)):
            for one in rest[rest.share == share].itertuples():
                error = None if np.isnan(one.low) else [[one.f1 - one.low], [one.high - one.f1]]
                y = order.index(one.method) + 0.22 * (i - (len(shares) - 1) / 2)
                axes.errorbar(one.f1, y, xerr=error, color=colour, marker=marker, ms=4, ls="none", elinewidth=1)
        axes.axvline(full.f1, color="black", lw=1, ls=(0, (4, 2)))
        axes.axhline(len(peers) - 0.5, color="#BDBDBD", lw=0.8)
        names = [NAMES.get(name, name) for name in order]
        axes.set_yticks(range(len(order)), names)
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.set_xlim(-0.02, 1.03)
        axes.set_xlabel("token F1 (0 to 1)")
        handles = [
            Line2D([], [], color=c, marker=m, ls="none", label=f"{share:.0%} kept")
            for share, (c, m, _) in zip(shares, POOL_STYLES, strict=False)
        ]
        handles.append(Line2D([], [], color="black", lw=1, ls=(0, (4, 2)), label="full cache"))
        figure.legend(handles=handles, loc="outside lower center", ncols=4)
    return done(figure)
