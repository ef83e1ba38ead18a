"""Intervals and paired tests. A number leaves this module with its interval or its p-value, never alone.

Missing values (failed items) are dropped, pairwise where two columns are compared, and counted in `missing`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats as scipy_stats

from kvrepro.errors import InputError


@dataclass(frozen=True)
class Estimate:
    """A mean with its interval, `level` wide, over n values; prints as `0.281 [0.243, 0.320]`."""

    mean: float
    low: float
    high: float
    n: int
    missing: int = 0
    level: float = 0.95

    def __format__(self, spec: str) -> str:
        spec = spec or ".3f"
        if self.n == 0:
            return "no values"
        interval = "one value, no interval" if math.isnan(self.low) else f"{self.low:{spec}}, {self.high:{spec}}"
        return f"{self.mean:{spec}} [{interval}]" + (f" ({self.missing} missing)" if self.missing else "")

    __str__ = __repr__ = lambda self: format(self)


@dataclass(frozen=True)
class Test:
    """A statistic with its p-value over n pairs, `used` of them in the test (tied pairs may be dropped)."""

    statistic: float
    p: float
    n: int
    used: int
    missing: int = 0

    def __format__(self, spec: str) -> str:
        p = "p < 0.0001" if self.p < 1e-4 else f"p = {self.p:{spec or '.4f'}}"
        return f"{p} (n = {self.n})" + (f" ({self.missing} missing)" if self.missing else "")

    __str__ = __repr__ = lambda self: format(self)
    __test__ = False  # the name is statistics', pytest need not collect it


def mean_ci(
    values: Sequence[float], *, clusters: Sequence | None = None, n: int = 10_000, seed: int = 42, level: float = 0.95
) -> Estimate:
    """Mean with a percentile bootstrap interval from n resamples.

    clusters: one label per value; whole clusters are drawn, for values that share an item. One value or one cluster
    gives an interval of nan. Source: Efron & Tibshirani 1993, ch. 13; the paper's settings are n = 10,000 and seed 42.
    """
    x = _vector(values)
    groups = np.arange(x.size) if clusters is None else _labels(clusters, x.size)
    present = ~np.isnan(x)
    missing = int(x.size - present.sum())
    x, groups = x[present], groups[present]
    if not x.size:
        return Estimate(math.nan, math.nan, math.nan, 0, missing, level)
    labels = np.unique(groups, return_inverse=True)[1]
    sums, counts = np.bincount(labels, weights=x), np.bincount(labels).astype(float)
    mean = float(sums.sum() / counts.sum())
    if sums.size == 1:
        return Estimate(mean, math.nan, math.nan, x.size, missing, level)
    interval = scipy_stats.bootstrap(
        (sums, counts),
        lambda s, c, axis: s.sum(axis) / c.sum(axis),
        paired=True,
        vectorized=True,
        n_resamples=n,
        confidence_level=level,
        method="percentile",
        batch=max(1, 10_000_000 // sums.size),  # bounds memory on long columns
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return Estimate(mean, float(interval.low), float(interval.high), x.size, missing, level)


def paired_difference(
    a: Sequence[float], b: Sequence[float], *, clusters: Sequence | None = None, n: int = 10_000, seed: int = 42,
    level: float = 0.95,
) -> Estimate:  # fmt: skip
    """Mean of a - b over pairs, with a paired percentile bootstrap interval (see `mean_ci`)."""
    x, y = _pair(a, b)
    return mean_ci(x - y, clusters=clusters, n=n, seed=seed, level=level)


def wilcoxon(a: Sequence[float], b: Sequence[float]) -> Test:
    """Two-sided Wilcoxon signed-rank test on the nonzero differences (zeros dropped, Wilcoxon's own handling).

    Exact p up to 50 untied differences, else scipy's choice (permutation or normal approximation with tie correction).
    No nonzero difference gives p = 1. Differences below 1e-9 are rounding and count as zero.
    """
    d, missing = _differences(a, b)
    nonzero = d[d != 0]
    if not nonzero.size:
        return Test(0.0, 1.0, d.size, 0, missing)
    result = scipy_stats.wilcoxon(nonzero, zero_method="wilcox", alternative="two-sided")
    return Test(float(result.statistic), float(result.pvalue), d.size, nonzero.size, missing)


def sign_test(a: Sequence[float], b: Sequence[float]) -> Test:
    """Two-sided exact sign test: statistic = number of untied pairs with a > b; no untied pair gives p = 1."""
    d, missing = _differences(a, b)
    wins, losses = int((d > 0).sum()), int((d < 0).sum())
    p = float(scipy_stats.binomtest(wins, wins + losses).pvalue) if wins + losses else 1.0
    return Test(float(wins), p, d.size, wins + losses, missing)


def tost(a: Sequence[float], b: Sequence[float], margin: float = 0.02) -> Test:
    """Paired t equivalence test of |mean(a - b)| < margin; a small p says equivalent. The larger of both one-sided p.

    Differences without spread decide by their mean alone (p = 0 or 1); fewer than two pairs give p = nan.
    Source: Schuirmann 1987; margin as in the protection paper.
    """
    if margin <= 0:
        raise InputError(f"margin is {margin}: give a positive difference that still counts as equal")
    d, missing = _differences(a, b)
    if d.size < 2:
        return Test(math.nan, math.nan, d.size, d.size, missing)
    if np.ptp(d) == 0:
        inside = abs(d[0]) < margin
        return Test(math.inf if inside else -math.inf, 0.0 if inside else 1.0, d.size, d.size, missing)
    from statsmodels.stats.weightstats import ttost_paired

    p, *sides = ttost_paired(d, np.zeros_like(d), -margin, margin)
    return Test(float(min(abs(t) for t, side_p, _ in sides if side_p == p)), float(p), d.size, d.size, missing)


def holm(ps: Sequence[float]) -> list[float]:
    """Holm's step-down adjusted p-values, in the order given (Holm 1979)."""
    p = _vector(ps)  # three lines rather than statsmodels' multipletests, which collects garbage at every call
    order = np.argsort(p)
    adjusted = np.minimum(1.0, np.maximum.accumulate(p[order] * np.arange(p.size, 0, -1)))
    return adjusted[np.argsort(order)].tolist()


def _vector(values: Sequence[float]) -> np.ndarray:
    x = np.asarray(values, dtype=float)
    if x.ndim != 1:
        raise InputError(f"values have shape {x.shape}: give one list of numbers")
    return x


def _labels(clusters: Sequence, n: int) -> np.ndarray:
    labels = np.asarray(clusters)
    if labels.shape != (n,):
        raise InputError(f"{labels.size} clusters for {n} values: give one label per value")
    return labels


def _pair(a: Sequence[float], b: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    x, y = _vector(a), _vector(b)
    if x.size != y.size:
        raise InputError(
            f"{x.size} values against {y.size}: a paired comparison needs the same items in the same order"
        )
    return x, y


def _differences(a: Sequence[float], b: Sequence[float]) -> tuple[np.ndarray, int]:
    x, y = _pair(a, b)
    d = x - y
    present = d[~np.isnan(d)]
    return np.where(np.abs(present) < 1e-9, 0.0, present), int(d.size - present.size)
