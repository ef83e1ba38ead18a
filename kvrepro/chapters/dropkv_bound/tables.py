"""Tables 12 to 16 of the DropKV paper beside ours, and rank correlations.

Intervals are over whole prompts (`kvrepro.experiment.stats`), since the triples of one prompt are not independent.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pandas as pd
import torch
from pandas.io.formats.style import Styler
from scipy import stats as scipy_stats

from kvrepro.chapters.dropkv_bound import bound
from kvrepro.chapters.dropkv_bound.study import Study, pool_name
from kvrepro.chapters.dropkv_bound.triples import STRATA
from kvrepro.errors import InputError
from kvrepro.experiment import claims, stats
from kvrepro.experiment.stats import UNIT, Estimate

K = 200  # in 1 - k eps: for it, "eps <= 0.005" (table 12) is the border of a finite factor
HARD_K = 10
MODELS = {"Llama-3.1-8B": "Llama", "MegaBeam-Mistral-7B": "Mistral", "Mistral-7B": "Mistral", "Qwen2.5-7B": "Qwen"}
TAUS = (0.0, 0.05, 0.10, 0.20, 0.30, 0.50)


def rank_correlation(frame: pd.DataFrame, x: str, y: str) -> Estimate:
    """Spearman's rho between two columns over prompts; infinite values rank last."""
    both = frame.dropna(subset=[x, y])
    return stats.resampled(
        both[[x, y]], lambda v: float(scipy_stats.spearmanr(v[:, 0], v[:, 1]).statistic), both["item"]
    )


# ---------------------------------------------------------------- columns that follow from the frames


def with_factor(assumptions: pd.DataFrame, k: int = K) -> pd.DataFrame:
    """The triples with `factor`, theorem 1's constant for sets of k keys; infinite where an assumption fails."""
    c, eps = (torch.tensor(assumptions[name].to_list(), dtype=torch.float64) for name in ("c_low", "eps"))
    return assumptions.assign(factor=bound.factor(c, eps, k).numpy(), k=k)


def selected(
    records: pd.DataFrame, rule: str = "dropkv", queries: int = 1, kernel: int = 1, objective: str = "query"
) -> pd.DataFrame:
    """Records of one rule on the paper's four strata."""
    of = (records.rule == rule) & (records.queries == queries) & (records.kernel == kernel)
    return records[of & records.stratum.isin(STRATA) & (records.objective == objective)]


# ---------------------------------------------------------------- tables 12 to 16


def _paper(table: str, row: str = "metric") -> pd.DataFrame:
    found = claims.published(table)
    short = found.model.map(lambda name: next(s for start, s in MODELS.items() if name.startswith(start)))
    return found.assign(model=short).pivot_table(
        index=row, columns="model", values="value", aggfunc="first", sort=False
    )


def _beside(table: str, names: Mapping[str, str], ours: Mapping[str, Mapping[str, float]]) -> pd.DataFrame:
    """Paper's models and ours (a column per pool) in one frame; `names` maps the paper's rows to ours."""
    paper = _paper(table).loc[list(names)].rename(index=names)
    mine = pd.DataFrame(ours).reindex(list(names.values()))
    return pd.concat({"paper, 128K": paper, "here": mine.map(_short)}, axis=1)


def _short(value: float) -> str:
    if value >= 1000 and value == round(value):
        return f"{value:.0f}"
    return "" if pd.isna(value) else f"{value:.3g}" if 0.01 <= abs(value) < 1e5 or value == 0 else f"{value:.1e}"


def by_pool(study: Study) -> Iterator[tuple[str, pd.DataFrame]]:
    for size in study.settings.pools:
        yield pool_name(size), study.assumptions[study.assumptions.pool == pool_name(size)]


def eps_table(study: Study) -> pd.DataFrame:
    """Table 12: distribution of eps over triples, per pool."""
    names = {"sampled triples": "triples", "median eps": "median", "p95 eps": "p95", "max eps": "max"}
    names["share eps<=0.005 (%)"] = "share at most 0.005 (%)"
    ours = {
        pool: {"triples": len(f), "median": f.eps.median(), "p95": f.eps.quantile(0.95), "max": f.eps.max()}
        | {"share at most 0.005 (%)": 100 * (f.eps <= 0.005).mean()}
        for pool, f in by_pool(study)
    }
    return _beside("dropkv_t12_eps.csv", names, ours)


def cone_table(study: Study) -> pd.DataFrame:
    """Table 13: distribution of c* per pool; where it is negative, of its attained lower bound."""
    quantiles = {"min": 0.0, "p05": 0.05, "p50": 0.5, "p95": 0.95, "max": 1.0}
    ours = {
        pool: {name: f.c_low.quantile(q) for name, q in quantiles.items()} | {"mean": f.c_low.mean()}
        for pool, f in by_pool(study)
    }
    names = ("min", "p05", "p50", "mean", "p95", "max")
    return _beside("dropkv_t13_cone_distribution.csv", dict(zip(names, names, strict=True)), ours)


def threshold_table(study: Study) -> pd.DataFrame:
    """Table 14: share of triples with c* > tau, percent."""
    ours = {pool: {f"tau = {t:.2f}": 100 * (f.c_low > max(t, 1e-9)).mean() for t in TAUS} for pool, f in by_pool(study)}
    return _beside("dropkv_t14_cone_thresholds.csv", {f"tau={t:.2f}": f"tau = {t:.2f}" for t in TAUS}, ours)


def factor_table(study: Study, k: int = K) -> pd.DataFrame:
    """Table 15: share of triples with a finite factor (percent), and its distribution there, for sets of k keys."""
    ours = {}
    for pool, f in by_pool(study):
        found = with_factor(f, k).factor
        finite = found[np.isfinite(found)]
        ours[pool] = {"finite (%)": 100 * np.isfinite(found).mean(), "p50": finite.median()}
        ours[pool] |= {"p95": finite.quantile(0.95), "max": finite.max()}
    return _beside("dropkv_t15_bound_factor.csv", {name: name for name in ("finite (%)", "p50", "p95", "max")}, ours)


STRATUM_NAMES = {"random": "random", "tail": "low-attention tail", "threshold": "near-threshold"} | {
    "disagreement": "rank-disagreement"
}


def ratio_table(study: Study) -> pd.DataFrame:
    """Table 16: median and 95th percentile of F(selection) / F(optimum) per stratum and k, the paper's least to
    greatest of three models beside DropKV, attention alone and random here."""
    printed = claims.published("dropkv_t16_realized_ratio.csv")
    printed = printed.assign(value=printed.value.astype(float))
    rows = {}
    for k in study.settings.ks:
        for stratum, name in STRATUM_NAMES.items():
            row = {}
            for short in ("p50", "p95"):
                cell = printed[
                    printed.budget.str.contains(f"k={k} ")
                    & (printed.task == name)
                    & printed.metric.str.startswith(short)
                ].value
                row["paper", "DropKV", short] = f"{cell.min():.3f} to {cell.max():.3f}" if len(cell) else ""
            for rule, title in (("dropkv", "DropKV"), ("attention", "attention"), ("random", "random choice")):
                here = selected(study.records, rule)
                ratio = here[(here.k == k) & (here.stratum == stratum)].ratio
                for short, value in (("p50", ratio.median()), ("p95", ratio.quantile(0.95))):
                    row["here", title, short] = f"{value:.3f}" if value < 100 else f"{value:,.0f}"
            rows[f"k = {k}", name] = row
    return pd.DataFrame.from_dict(rows, orient="index")


def prevalence(study: Study) -> pd.DataFrame:
    """Share of triples with c* > 0 per layer and pool, with intervals (figure 3b): layer, pool, share, low, high."""
    rows = []
    for pool, frame in by_pool(study):
        for layer, f in frame.groupby("layer"):
            value, low, high = has_cone(f).triple
            rows.append({"layer": layer, "pool": pool, "share": value, "low": low, "high": high})
    return pd.DataFrame(rows)


def has_cone(assumptions: pd.DataFrame) -> Estimate:
    """Share of triples with c* > 0."""
    return stats.interval(assumptions.c_low > 1e-9, assumptions["item"], bounds=UNIT)


def median(frame: pd.DataFrame, column: str) -> Estimate:
    """Median of a column over all rows; prompts are resampled."""
    return stats.resampled(frame[[column]], lambda v: float(np.median(v)), frame["item"])


def robust_table(study: Study) -> pd.DataFrame:
    """Theorem 2 on whole pools, for the half that DropKV evicts: how often it bounds the ratio, and by how much.

    Twenty keys in 64 dimensions always lie in some cone, so that the enumerated sets cannot show what theorem 2 adds.
    """
    rows = {}
    for pool, f in by_pool(study):
        first = with_factor(f, int(f.pool_size.median()) // 2).factor
        fails = f[f.c_low <= 1e-9]
        rows[pool] = {
            "theorem 1 finite (%)": 100 * np.isfinite(first).mean(),
            "its median": first[np.isfinite(first)].median(),
            "theorem 2 finite (%)": 100 * np.isfinite(f.guarantee).mean(),
            "its median ": f.guarantee[np.isfinite(f.guarantee)].median(),
            "triples without a cone (%)": 100 * len(fails) / len(f),
            "of these theorem 2 finite (%)": 100 * np.isfinite(fails.guarantee).mean() if len(fails) else np.nan,
            "their median mu at c = 0.1, share of the pool's mass": fails.mu_share.median(),
        }
    return pd.DataFrame(rows).map(_short)


# ---------------------------------------------------------------- peers, alignment, budgets, prediction


def peers(study: Study, objective: str = "query", k: int = HARD_K, strata: Sequence[str] = STRATA) -> pd.DataFrame:
    """Per selection rule the geometric mean of its ratio to the joint optimum, with interval, best first.

    objective: F of the last query, or of the window. Columns rule, queries (observed), kernel (of its pooling; 1:
    none), ratio, low, high, optimal (share at the optimum).
    """
    rows = []
    r = study.records
    here = r[(r.k == k) & (r.objective == objective) & r.stratum.isin(list(strata))]
    for (rule, queries, kernel), f in here.groupby(["rule", "queries", "kernel"], sort=False):
        value, low, high = stats.interval(np.log(f.ratio), f["item"]).triple
        row = {"rule": rule, "queries": queries, "kernel": kernel, "ratio": value, "low": low, "high": high}
        rows.append(row | {"optimal": (f.ratio < 1 + 1e-9).mean()})
    found = pd.DataFrame(rows)
    return found.assign(**{n: np.exp(found[n]) for n in ("ratio", "low", "high")}).sort_values(
        "ratio", ignore_index=True
    )


def disagreement(study: Study) -> pd.DataFrame:
    """Per triple, over the 20 keys of its pool whose values are most aligned with the output: `rho`, Spearman's between
    AnDPro's and DropKV's scores, `rho_value` between <a, v_j> and ||a - v_j||, `kept`: of the ten that DropKV evicts
    the share that AnDPro keeps; and the median `cosine`."""
    where = ["item", "layer", "head", "position"]
    rows = []
    for key, f in study.alignment.groupby(where):
        gone, stays = f.dropkv.rank(method="first") <= len(f) / 2, f.andpro.rank(method="first") > len(f) / 2
        rows.append(
            dict(zip(where, key, strict=True))
            | {"rho": f.andpro.corr(f.dropkv), "rho_value": f.andpro_value.corr(f.dropkv_value)}
            | {"kept": stays[gone].mean(), "cosine": f.cosine.median()}
        )
    return pd.DataFrame(rows)


def budgets(study: Study) -> pd.DataFrame:
    """Relative shift of a layer's output, mean over layers: share kept, pooling, bf16, uniform, adaptive, and their
    difference (adaptive - uniform; below zero: adaptive is better), each with its interval, `_low` and `_high`."""
    keys = ["share", "pooling", "bf16"]
    wide = study.budgets.pivot_table(index=["item", "layer", *keys], columns="allocation", values="error").reset_index()
    wide["difference"] = wide.adaptive - wide.uniform
    rows = []
    for key, f in wide.groupby(keys, sort=False):
        row = dict(zip(keys, key, strict=True))
        for name in ("uniform", "adaptive", "difference"):
            value, low, high = stats.interval(f[name], f["item"]).triple
            row |= {name: value, f"{name}_low": low, f"{name}_high": high}
        rows.append(row)
    return pd.DataFrame(rows).sort_values(keys, ignore_index=True)


def budget_table(study: Study) -> pd.DataFrame:
    """`budgets` for the eye: a row per switch, each value with its interval."""
    found = budgets(study)
    text = pd.DataFrame(
        {
            name: [_between(*row) for row in found[[name, f"{name}_low", f"{name}_high"]].itertuples(index=False)]
            for name in ("uniform", "adaptive", "difference")
        }
    )
    pooling = found.pooling.replace("none", "no") + " pooling" + np.where(found.bf16, ", bf16 attention", "")
    index = pd.MultiIndex.from_arrays([found.share.map("{:.0%}".format), pooling], names=["kept", "switch"])
    return text.set_axis(index)


def _between(value: float, low: float, high: float) -> str:
    return f"{value:.3f}" if np.isnan(low) else f"{value:.3f} [{low:.3f}, {high:.3f}]"


def prediction(study: Study, *losses: pd.DataFrame, k: int = K) -> pd.DataFrame:
    """Does a smaller bound predict less harm? Spearman's rho with its interval, a row per question.

    First the bound of the 20 keys against their realised ratio, and against the shift F itself. losses: frames with
    `loss` (lower is better), item, and perhaps layer and head; the median factor of the first pool over the triples
    that share these is ranked against each.
    """
    records = selected(study.records)
    rows = []
    for size in study.settings.ks:
        f = records[records.k == size]
        for against, title in (("ratio", "realised ratio"), ("value", "shift F of DropKV's set")):
            rows.append((f"bound against {title}, k = {size}", rank_correlation(f, "bound", against)))
    for frame in losses:
        on = [name for name in ("item", "layer", "head") if name in frame]
        if "item" not in on or "loss" not in frame:
            raise InputError(f"losses have columns {list(frame)}: give loss and item, perhaps layer and head")
        first = with_factor(next(by_pool(study))[1], k)
        both = first.groupby(on, as_index=False).factor.median().merge(frame, on=on)
        rows.append((f"factor against loss, per {', '.join(on)}", rank_correlation(both, "factor", "loss")))
    found = [(question, *e.triple, e.n) for question, e in rows]
    return pd.DataFrame(found, columns=["question", "rho", "low", "high", "prompts"]).set_index("question")


# ---------------------------------------------------------------- for the page


def shown(frame: pd.DataFrame, caption: str, digits: int = 2, wrap: bool = False, **given) -> Styler:
    """A table for the page: its caption above it, room between its cells, which break only if they hold sentences."""
    style = frame.style.format(precision=digits, na_rep="", **given).set_caption(caption)
    cells = [("padding", "0.15em 0.45em"), ("text-align", "left")]
    cells += [] if wrap else [("white-space", "nowrap")]
    rules = [{"selector": "th, td", "props": cells}, {"selector": "caption", "props": [("caption-side", "top")]}]
    return style.set_table_styles(rules)


def partition_text(found: bound.Partition) -> str:
    """The worked instance of the reduction in words, as Markdown."""
    sides = [sorted(found.numbers[j] for j in one.evicted.tolist()) for one in (found.best, found.proxy)]
    rest = sorted(found.numbers)
    for number in sides[0]:
        rest.remove(number)
    listed = [" + ".join(map(str, side)) for side in (*sides, rest)]
    said = f"{listed[0]} = {sum(sides[0])} and {listed[2]} = {sum(rest)}"
    verdict = "balances" if found.balanced else "does not balance"
    return (
        f"Numbers {', '.join(map(str, sorted(found.numbers)))}. The optimum over all subsets is "
        f"F = {found.best.value.item():.3g}: {said}, which {verdict}. DropKV evicts {listed[1]} = {sum(sides[1])}, "
        f"at F = {found.proxy.value.item():.3g}."
    )


def explanation(study: Study) -> str:
    """Does the theorem explain the ratio? In words: the ratio where a triple's pool has a cone and where it has none,
    whether they differ, and whether the bound ranks the records of the same twenty keys."""
    where, own = ["item", "layer", "head", "position"], selected(study.records)
    pools = next(by_pool(study))[1]
    both = own.merge(pools[[*where, "c_low"]], on=where, suffixes=("", "_pool")).assign(
        cone=lambda f: f.c_low_pool > 1e-9
    )
    parts = {name: median(both[both.cone == name], "ratio").triple for name in (True, False)}
    if both.cone.nunique() < 2:
        only = bool(both.cone.all())
        which = f"The pool of {'every' if only else 'no'} triple has a cone"
        text = f"{which} (median ratio {_between(*parts[only])}), so that this run cannot compare."
    else:
        value, low, high = stats.resampled(both[["ratio", "cone"]], _without_minus_with, both["item"]).triple
        text = (
            f"The median ratio is {_between(*parts[True])} where the pool has a cone and {_between(*parts[False])} "
            f"where it has none: the difference, {_between(value, low, high)}, "
        )
        text += (
            "shows that the assumption goes with near-optimality. But where a pool has no cone the theorem promises "
            "nothing, so that the ratio there has another reason."
            if low > 0
            else "runs against the theorem's explanation."
            if high < 0
            else "cannot be told from none, so that the assumption explains nothing that was seen here."
        )
    rho, low, high = rank_correlation(own[own.k == own.k.min()], "bound", "ratio").triple
    ranks = "does" if low > 0 else "does not" if high <= 0 else "cannot be shown to"
    return f"{text} A smaller bound {ranks} go with a smaller ratio (rank correlation {_between(rho, low, high)})."


def _without_minus_with(values: np.ndarray) -> float:
    """Columns ratio and cone (0 or 1): median without a cone minus median with one."""
    cone = values[:, 1] > 0
    return float(np.median(values[~cone, 0]) - np.median(values[cone, 0])) if 0 < cone.mean() < 1 else np.nan


def numbers(frame: pd.DataFrame, study: Study) -> dict[str, str]:
    """What the prose may quote, as text: of each claim its value with interval and its verdict; sizes of the run; the
    share of triples with c* > 0 per pool; how far lemma 1 is from its definition; the peers' ratios."""
    a, first, last = study.assumptions, *(pool_name(study.settings.pools[i]) for i in (0, -1))
    own = selected(study.records)
    found = {
        "prompts": str(a["item"].nunique()),
        "prompt-tokens": f"{a.groupby('item').tokens.max().mean():.0f}",
        "triples": str(len(a[a.pool == first])),
        "records": str(len(own)),
        "pool-first": first,
        "pool-last": last,
        "lemma-single": f"{study.lemma.single.max():.0e}",
        "lemma-joint": f"{study.lemma.joint.max():.0e}",
        "gap": f"{(a.c_high - a.c_low)[a.c_low > 1e-9].max():.0e}",
        "undecided": str(int(((a.c_low <= 1e-9) & (a.c_high > 1e-9)).sum())),
        "explained": explanation(study),
        "cone-twenty": f"{100 * (own.c_low > 1e-9).mean():.0f}%",
        "violations": str(int((own.ratio > own.bound * (1 + 1e-9)).sum())),
        "checked": str(int(np.isfinite(own.bound).sum())),
        "value-rho": f"{disagreement(study).rho_value.median():.2f}",
        "whole-rho": f"{disagreement(study).rho.median():.2f}",
    }
    for name, pool in (("first", first), ("last", last)):
        found[f"cone-{name}"] = f"{100 * (a[a.pool == pool].c_low > 1e-9).mean():.0f}%"
    negative = a[(a.pool == first) & (a.c_low <= 1e-9)].c_low
    found["cone-failed"] = f"{negative.median():.3f}" if len(negative) else "none fails"
    layers = prevalence(study)
    layers = layers[layers.pool == first]
    found["weakest-layer"] = str(layers.loc[layers.share.idxmin(), "layer"])
    ranked = {objective: peers(study, objective) for objective in ("query", "window")}
    for objective, ratios in ranked.items():
        best = ratios.iloc[0]
        found[f"peer-best-{objective}"] = f"{best.rule} on {best.queries} {'query' if best.queries == 1 else 'queries'}"
    window = study.settings.window
    for name, rule, queries, kernel, objective in (
        ("own-query", "dropkv", 1, 1, "query"),
        ("own-window", "dropkv", window, 1, "window"),
        ("cross", "dropkv", window, 1, "query"),
        ("pooled", "dropkv", window, study.settings.kernel, "window"),
        ("snapkv-window", "snapkv", window, 1, "window"),
    ):
        p = ranked[objective].set_index(["rule", "queries", "kernel"]).loc[(rule, queries, kernel)]
        found[f"peer-{name}"] = f"{p.ratio:.2f} [{p.low:.2f}, {p.high:.2f}]"
    return found | claims.quoted(frame)
