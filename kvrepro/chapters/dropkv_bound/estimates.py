"""Estimates of the chapter on DropKV's bound that are not means: medians and rank correlations; and printed numbers."""

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pandas as pd
import torch
from scipy import stats as scipy_stats

from kvrepro.chapters.dropkv_bound import bound
from kvrepro.chapters.dropkv_bound.cone import ORIGIN
from kvrepro.chapters.dropkv_bound.study import WHERE
from kvrepro.chapters.dropkv_bound.triples import STRATA
from kvrepro.experiment import claims, stats
from kvrepro.experiment.judge import Sample
from kvrepro.experiment.stats import ANY, Estimate

TIMES = (1.0, math.inf)
LIMITS = {  # of columns and so of their quantiles; also of a high quantile of `factor` over its median
    "ratio": TIMES, "factor": TIMES, "slack": (0.0, math.inf), "even": (0.0, math.inf), "c_low": (-1.0, 1.0),
}  # fmt: skip


def with_factor(assumptions: pd.DataFrame, k: int | pd.Series) -> pd.DataFrame:
    """The triples with a column `factor`, theorem 1's constant for sets of k keys; infinite if an assumption fails."""
    frame = assumptions.assign(k=k)
    c, eps, size = (torch.tensor(frame[name].to_list(), dtype=torch.float64) for name in ("c_low", "eps", "k"))
    return frame.assign(factor=bound.factor(c, eps, size).numpy())


def selected(
    records: pd.DataFrame, rule: str = "dropkv", queries: int = 1, kernel: int = 1, objective: str = "query"
) -> pd.DataFrame:
    """Records of one rule on the paper's four strata."""
    of_rule = (records.rule == rule) & (records.queries == queries) & (records.kernel == kernel)
    return records[of_rule & records.stratum.isin(STRATA) & (records.objective == objective)]


def disagreement(alignment: pd.DataFrame) -> pd.DataFrame:
    """A row per triple and stratum, about the 20 keys of its pool whose values are nearest to the output, or most
    aligned with it.

    rho: Spearman's correlation of AnDPro's and DropKV's scores; rho_value: that of <a, v_j> and ||a - v_j||; kept:
    share of the ten keys that DropKV evicts and AnDPro keeps; distance: the largest ||a - v_j|| / ||a||; distinct:
    number of distinct <a, v_j>.
    """

    def of_triple(f: pd.DataFrame) -> pd.Series:
        gone, stays = f.dropkv.rank(method="first") <= len(f) / 2, f.andpro.rank(method="first") > len(f) / 2
        rho, rho_value = stats.correlation(f.andpro, f.dropkv), stats.correlation(f.andpro_value, f.dropkv_value)
        facts = {"kept": stays[gone].mean(), "distance": f.distance.max(), "distinct": f.andpro_value.nunique()}
        return pd.Series({"rho": rho, "rho_value": rho_value, **facts})

    return alignment.groupby(["item", *WHERE, "stratum"]).apply(of_triple, include_groups=False).reset_index()


# ---------------------------------------------------------------- estimates with intervals; whole prompts are resampled


def statistic(frame: pd.DataFrame, of: Callable[[np.ndarray], float], *columns: str) -> Sample:
    """A statistic of all rows. Of two columns it is a difference, which has no limits."""
    limits = LIMITS.get(columns[0], ANY) if len(columns) == 1 else ANY
    return Sample(frame[list(columns)], of, frame["item"], limits=limits)


def median(frame: pd.DataFrame, column: str) -> Estimate:
    """Median of a column over all rows."""
    return statistic(frame, lambda v: float(np.median(v)), column).estimate()


def medians(rows: pd.DataFrame, groups: Sequence[str], column: str) -> pd.DataFrame:
    """`median` per group, as `stats.means` gives means: columns `groups`, value, low, high, n."""
    return stats.by_group(rows, groups, lambda group: median(group, column))


def rank_correlation(frame: pd.DataFrame, x: str, y: str) -> Estimate:
    """Spearman's rho between two columns; infinite values rank last. No value where a column does not vary."""
    pairs = frame.dropna(subset=[x, y])

    def rho(values: np.ndarray) -> float:
        return stats.correlation(*scipy_stats.rankdata(values, axis=0).T)

    return stats.resampled(pairs[[x, y]], rho, pairs["item"], limits=(-1.0, 1.0))


def predictions(records: pd.DataFrame, factors: pd.DataFrame, losses: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Does a smaller bound predict less harm? Spearman's rho, a row per question.

    records: DropKV's; their bound on twenty keys is correlated with the realised ratio and with the shift. factors: the
    triples of one pool with their factor. losses: by question, frames with columns item, loss, and perhaps layer and
    head; the median factor of the same item (layer, head) is correlated with the loss.
    """
    estimates = {}
    for k, f in records.groupby("k"):
        estimates[f"bound and ratio, k = {k}"] = rank_correlation(f, "bound", "ratio")
        estimates[f"bound and shift, k = {k}"] = rank_correlation(f, "bound", "value")
    for name, frame in losses.items():
        keys = [column for column in ("item", "layer", "head") if column in frame]
        pairs = factors.groupby(keys, as_index=False).factor.median().merge(frame, on=keys)
        estimates[name] = rank_correlation(pairs, "factor", "loss")
    rows = [(question, *e.triple, e.n) for question, e in estimates.items()]
    return pd.DataFrame(rows, columns=["question", "value", "low", "high", "n"])


def median_gap(values: np.ndarray) -> float:
    """Median of the first column where the second is true, minus that where it is false; nan if one side is empty."""
    held = values[:, 1] > 0
    return float(np.median(values[held, 0]) - np.median(values[~held, 0])) if 0 < held.mean() < 1 else np.nan


def cone_and_ratio(records: pd.DataFrame, assumptions: pd.DataFrame) -> dict[str, Estimate]:
    """DropKV's median ratio `with` a cone in the triple's pool and `without` one, and `difference`, the second minus
    the first. records: DropKV's. assumptions: of one pool. The median of no triples has no value."""
    where = ["item", *WHERE]
    merged = records.merge(assumptions[[*where, "c_low"]], on=where, suffixes=("", "_pool"))
    coneless = merged.c_low_pool <= ORIGIN
    gap = stats.resampled(merged.assign(none=coneless)[["ratio", "none"]], median_gap, merged["item"])
    sides = {"with": median(merged[~coneless], "ratio"), "without": median(merged[coneless], "ratio")}
    return sides | {"difference": gap}


def side(e: Estimate) -> str:
    """On which side of 0 the interval lies: "above", "below", or "" where it contains 0 or there is none."""
    return "above" if e.low > 0 else "below" if e.high < 0 else ""


# ---------------------------------------------------------------- the paper's side


def printed(file: str, names: Mapping[str, str]) -> pd.DataFrame:
    """A printed table, a row per model. names: by the paper's metric, its column here."""
    rows = claims.published(file).assign(pool=lambda f: "paper: " + f.model.str.partition("-Instruct")[0])
    wide = rows.pivot_table(index="pool", columns="metric", values="value", aggfunc="first")
    return wide[list(names)].rename(columns=names).apply(pd.to_numeric, errors="coerce")


def printed_ratios() -> pd.DataFrame:
    """Table 16, a row per k and stratum, over its models: value: the median of the medians, low: the least median,
    high: the greatest 95th percentile."""
    names = {"low-attention tail": "tail", "near-threshold": "threshold", "rank-disagreement": "disagreement"}
    f = claims.published("dropkv_t16_realized_ratio.csv").replace({"task": names}).rename(columns={"task": "stratum"})
    f = f.assign(k=f.budget.str.extract(r"k=(\d+)", expand=False).astype(int), value=f.value.astype(float))
    p50, p95 = (f[f.metric.str.startswith(q)].groupby(["k", "stratum"], sort=False).value for q in ("p50", "p95"))
    columns = {"value": p50.median(), "low": p50.min(), "high": p95.max()}
    return pd.DataFrame(columns).reset_index().assign(rule="paper: DropKV")


def printed_leads() -> pd.DataFrame:
    """DropKV's printed average minus another's (tables 1 and 3 to 8). Columns benchmark, model, budget (%), context,
    against ("SnapKV", "best other", or "best other, without TREC"), value."""
    files = {5: "ruler_128k", 6: "ruler_64k", 7: "ruler_32k", 8: "ruler_16k"}
    files |= {1: "longbench_5", 3: "longbench_10", 4: "longbench_30"}
    f = pd.concat((claims.published(f"dropkv_t{n:02}_{name}.csv") for n, name in files.items()), ignore_index=True)
    f = f[~f.method.str.startswith("Full")].assign(value=pd.to_numeric(f.value, errors="coerce"))
    where = ["context", "model", "budget"]
    average = f[f.task == "Avg"].pivot_table(index=where, columns="method", values="value", aggfunc="first")
    sets = f[f.context.str.contains("LongBench") & ~f.task.isin(["Avg", "TREC"])]
    without = sets.pivot_table(index=where, columns="method", values="value")
    best, rest = (wide.drop(columns="DropKV").max(axis=1) for wide in (average, without))
    leads = {"SnapKV": average.DropKV - average.SnapKV, "best other": average.DropKV - best}
    leads["best other, without TREC"] = without.DropKV - rest
    parts = [lead.rename("value").reset_index().assign(against=name) for name, lead in leads.items()]
    rows = pd.concat(parts, ignore_index=True)
    benchmark = rows.context.str.contains("LongBench").map({True: "LongBench", False: "RULER"})
    rows = rows.assign(benchmark=benchmark, budget=rows.budget.str.rstrip("%").astype(int))
    return rows.dropna(subset="value").reset_index(drop=True)


def exceeding(records: pd.DataFrame) -> pd.DataFrame:
    """How often another rule's set exceeds the bound that theorem 1 gives for DropKV's on the same keys. Columns rule,
    queries, kernel, k, value (share)."""
    bounds = selected(records)[["item", *WHERE, "stratum", "k", "bound"]]
    others = records[(records.objective == "query") & records.stratum.isin(STRATA)].drop(columns="bound")
    merged = others.merge(bounds[np.isfinite(bounds.bound)], on=["item", *WHERE, "stratum", "k"])
    merged = merged.assign(value=merged.ratio > merged.bound * (1 + 1e-9))
    return merged.groupby(["rule", "queries", "kernel", "k"], as_index=False).value.mean()
