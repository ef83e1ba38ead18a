"""Estimates of the chapter on DropKV's bound that are not means: medians and rank correlations; and printed numbers."""

import math
from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd
import torch

from kvrepro.chapters.dropkv_bound import bound
from kvrepro.chapters.dropkv_bound.study import WHERE
from kvrepro.chapters.dropkv_bound.triples import STRATA
from kvrepro.experiment import stats
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


def median_gap(values: np.ndarray) -> float:
    """Median of the first column where the second is true, minus that where it is false; nan if one side is empty."""
    held = values[:, 1] > 0
    return float(np.median(values[held, 0]) - np.median(values[~held, 0])) if 0 < held.mean() < 1 else np.nan
