"""Intervals and paired tests. A number leaves this module with its interval or its p-value, never alone.

**One interval rule for all chapters**, by what is averaged:

- *Scores between two bounds* (F1, accuracy, leaked or not): the mean m is treated as a share of c "counted" items,
  where c is the number whose share would vary as the mean does: m (1 - m) / (error of the mean)^2, times (z / t)^2
  because the error is estimated from n items, but at least n, since no score varies more than a coin (Korn and Graubard
  1998). Its limits are Jeffreys': quantiles of Beta(m c + 1/2, (1 - m) c + 1/2). For zeros and ones c is n: n zeros of
  n leave room up to 2.5 / n. Scores that lie close together do not prove that none lies far off, so the error counts a
  sixteenth of an item at either end as well.
- *Differences of such scores*: mean gain and mean loss each have limits, joined by their correlation (Zou and Donner
  2008, "MOVER"). Where no item loses, an unseen loss is expected to be as large as the gains, and the other way round.
- *Ratios of means* (share of the ceiling, loss over loss): all r for which the mean of top - r bottom cannot be told
  from 0 by that same rule, which is Fieller's idea. Where the bottom itself may be 0 there is no bound.
- *Values without bounds*: Student's t, corrected for the sample's skewness by Hall's transformation (1992): the
  interval reaches farther to the side of the long tail, where a rare value may be missing.
- *Other statistics* (a median, a quantile, a rank correlation, a largest of several): Student's t with the spread over
  1,000 resamples, and at least as far as 95% of these lie from the sample, since some statistics move in steps (Hall
  1988). Where the mean of the resamples lies above the sample, the sample is taken to lie above the truth by as much,
  and the interval reaches that much lower; likewise the other way round (Efron and Tibshirani 1993). The interval ends
  where the statistic does (a correlation from -1 to 1). For a statistic with a least value and no largest (a quantile
  over its median, from 1) the rule is applied to the logarithm of its distance from the least value.
- *Clusters* (triples of a prompt, requests of a system prompt): a cluster, with hits or without, counts once, by its
  mean, and resamples draw it whole.
- Fewer than six items or clusters have no interval, nor have unbounded values that are all alike. Levels above 95% need
  as many items as a sign test needs to reach them, except for scores between bounds, whose farthest values are known.
  The estimate always lies inside its interval. Missing values (failed items) are dropped, pairwise where columns are.

Chosen by coverage (`studies.coverage`), and by how often the rules of claims err (`studies.error_rates`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pandas as pd
from scipy import optimize, special
from scipy import stats as scipy_stats

MIN_ITEMS = 6  # with fewer no two-sided sign or rank test of pairs can reach 5%, and an interval says even less
RARE = 1 / 16  # of an item: the weight of an unseen item at either end of a score's range
ROUNDING = 1e-9  # differences below this count as none
DRAWS = 1_000
UNIT = (0.0, 1.0)
ANY = (-math.inf, math.inf)
Columns: TypeAlias = Mapping[str, np.ndarray]
Ends: TypeAlias = tuple[float, float]
Bounds: TypeAlias = Ends | None  # None: there are none
Labels: TypeAlias = Sequence[Any] | None  # of clusters, one per value
Names: TypeAlias = Sequence[str] | str  # of columns


class Estimate(NamedTuple):
    """A value with its interval over n items or clusters; prints as `0.281 [0.243, 0.320]`. low, high: nan where there
    is no interval."""

    value: float
    low: float
    high: float
    n: int

    def estimate(self, _level: float = 0.95) -> Estimate:
        """Itself: a range that was measured is the same at every level."""
        return self

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


# A contrast of columns a, b, full, ...: the values that are averaged, and for a ratio those of the divisor.
CONTRASTS: dict[str, tuple[Callable[[Columns], np.ndarray], Callable[[Columns], np.ndarray] | None]] = {
    "mean": (lambda c: c["a"], None),
    "difference": (lambda c: c["a"] - c["b"], None),
    "share_of_ceiling": (lambda c: c["a"] - c.get("b", 0.0), lambda c: c["full"]),
    "loss": (lambda c: c["full"] - c["a"], lambda c: c["full"]),
    "loss_ratio": (lambda c: c["full"] - c["b"], lambda c: c["full"] - c["a"]),
    "lift_minus_difference": (lambda c: c["a"] - c["b"] - (c["x"] - c["y"]), None),
    "difference_of_ceiling": (lambda c: c["x"] - c["y"], lambda c: c["full"]),
}


def interval(
    values: Sequence[float], clusters: Labels = None, *, bounds: Bounds = None, each: float = 1, level: float = 0.95
) -> Estimate:
    """Mean with its interval, by the module's rule. bounds: the least and the largest possible value, if any."""
    frame = pd.DataFrame({"a": values})
    return contrast(frame, "mean", clusters, bounds=bounds, each=each, level=level)


def contrast(
    frame: pd.DataFrame,
    kind: str | Callable[[np.ndarray], float],
    clusters: Labels = None,
    *,
    bounds: Bounds = None,
    each: float = 1,
    limits: Ends = ANY,
    level: float = 0.95,
) -> Estimate:
    """A contrast over items (the rows of `frame`) with its interval, by the module's rule.

    kind: one of `CONTRASTS`; `unpaired`, of columns a and b that are of different items; or any statistic(values [rows,
    columns]). bounds: of every column. each: how many scores a row is the mean of. limits: the least and the largest
    value that the contrast can take. Rows that lack a value are dropped.
    """
    if not isinstance(kind, str):
        return _resampled(frame, kind, clusters, limits, level)
    if kind == "unpaired":
        ends = None if bounds is None else np.array(bounds)
        return within(_unpaired(frame, ends, each, level), limits)
    top, bottom = CONTRASTS[kind]
    values = frame.to_numpy(float)
    present = ~np.isnan(values).any(1)
    values = values[present]
    if clusters is not None and len(values):
        codes, names = pd.factorize(np.asarray(clusters)[present])
        each *= len(values) / len(names)
        values = np.stack([np.bincount(codes, column) for column in values.T], 1) / np.bincount(codes)[:, None]
    if not len(values):
        return Estimate(math.nan, math.nan, math.nan, 0)
    columns, extremes = dict(zip(map(str, frame), values.T, strict=True)), None
    if bounds is not None:  # every combination of the columns' extreme values
        corners = np.array(list(itertools.product(bounds, repeat=values.shape[1])))
        extremes = dict(zip(map(str, frame), corners.T, strict=True))

    def reach(x: np.ndarray, ends: np.ndarray | None) -> Ends:
        return _reach(x, ends, each, level, alike=bottom is None)

    x, ends = top(columns), top(extremes) if extremes else None
    if bottom is not None:
        both = (top(extremes), bottom(extremes)) if extremes else None
        return within(_ratio(x, bottom(columns), both, reach, level), limits)
    n, value = len(x), float(np.mean(x))
    if n < MIN_ITEMS or (ends is None and (n < fewest(level) or np.ptp(x) <= 1e-12 * max(1.0, abs(value)))):
        return Estimate(value, math.nan, math.nan, n)
    below, above = reach(x, ends)
    e = Estimate(value, value - below, value + above, n)
    return within(within(e, ANY if ends is None else (float(ends.min()), float(ends.max()))), limits)


@cache
def fewest(level: float) -> int:
    """The fewest items with which a two-sided sign or rank test can reach a level: n items give p >= 2 / 2^n."""
    return max(MIN_ITEMS, math.ceil(math.log2(2 / (1 - level)) - 1e-9))


@cache
def _quantile(level: float, freedom: float) -> float:
    """The quantile of Student's t for a two-sided interval."""
    return float(special.stdtrit(freedom, 0.5 + level / 2))


def _reach(x: np.ndarray, ends: np.ndarray | None, each: float, level: float, alike: bool = True) -> Ends:
    """How far the limits of the mean of x lie below and above it. ends: values that x may take, the extremes included.

    each: how many scores a value is the mean of. alike: gains and losses are differences of the same two scores, so
    that unseen ones are expected to be as large as those on the other side.
    """
    if ends is None:
        return _unbounded_reach(x, level)
    least, most = float(ends.min()), float(ends.max())
    zero = min(max(0.0, least), most)
    gain = np.maximum(x - zero, 0.0)
    loss = gain - (x - zero)
    sizes = [float(side @ side / side.sum()) if side.any() else 0.0 for side in (gain, loss)]  # weighted by themselves
    less_up, more_up = _side_reach(gain, most - zero, sizes[1] if alike else 0.0, each, level)
    less_down, more_down = _side_reach(loss, zero - least, sizes[0] if alike else 0.0, each, level)
    spread = float(gain.std() * loss.std())
    correlation = max(-1.0, -float(gain.mean() * loss.mean()) / spread) if spread else 0.0  # none gains and loses

    def joined(a: float, b: float) -> float:
        return math.sqrt(max(0.0, a * a - 2 * correlation * a * b + b * b))

    return joined(less_up, more_down), joined(more_up, less_down)


def _side_reach(x: np.ndarray, most: float, size: float, each: float, level: float) -> Ends:
    """How far Jeffreys' limits of the mean of gains, or of losses, lie below and above it, for as many items as the
    spread is worth. most: the largest possible one. size: the expected size of one that no item shows; 0: unknown, so
    that it may be the largest possible."""
    if not most:
        return 0.0, 0.0
    n, mean, tail = len(x), float(x.mean()), 0.5 - level / 2
    unseen = float(special.betaincinv(0.5, n + 0.5, 1 - tail))  # the upper limit of a share that none of n items has
    expected = min(size, most) * unseen
    if not mean:
        rare = _quantile(level, n - 1) * math.sqrt(RARE / each) / n
        return 0.0, max(expected, most * rare) if size else most * unseen
    share = min(mean / most, 1.0)
    error = float(x.var()) / (n - 1) / most**2 + RARE / each * (share**2 + (1 - share) ** 2) / n**2
    estimated = _quantile(level, math.inf) / _quantile(level, n - 1)
    counted = max(float(n), share * (1 - share) / error * estimated**2)
    hits = counted * share + 0.5
    low, high = (float(special.betaincinv(hits, counted + 1 - hits, q)) for q in (tail, 1 - tail))
    return most * max(0.0, share - low), max(expected, most * (high - share), 0.0)


def _unbounded_reach(x: np.ndarray, level: float) -> Ends:
    """`_reach` for values without bounds, corrected for their skewness."""
    n, away = len(x), x - x.mean()
    error = math.sqrt(float(away @ away) / (n - 1) / n)
    if not error:
        return 0.0, 0.0
    lean = float(((away / error) ** 3).sum()) / (n * (n - 1) * max(n - 2, 1))  # skewness / sqrt(n)

    def unbent(t: float) -> float:
        """The inverse of Hall's (1992) transformation of u to u + lean u^2 / 3 + lean^2 u^3 / 27 + lean / 6."""
        return t if abs(lean) < 1e-9 else (math.cbrt(1 + lean * (t - lean / 6)) - 1) * 3 / lean

    t = _quantile(level, n - 1)
    return error * unbent(t), -error * unbent(-t)


def _ratio(
    x: np.ndarray, y: np.ndarray, ends: tuple[np.ndarray, np.ndarray] | None, reach: Callable[..., Ends], level: float
) -> Estimate:
    """Ratio of two means: all r for which the mean of x - r y cannot be told from 0."""
    n, bottom = len(x), float(np.mean(y))
    if not bottom:
        return Estimate(math.nan, math.nan, math.nan, n)
    value = float(np.mean(x)) / bottom
    if n < MIN_ITEMS or (ends is None and (n < fewest(level) or np.ptp((x - value * y) / bottom) <= 1e-12)):
        return Estimate(value, math.nan, math.nan, n)
    if bottom < 0:
        x, y, bottom, ends = -x, -y, -bottom, ends and (-ends[0], -ends[1])
    if bottom <= reach(y, ends and ends[1])[0]:
        return Estimate(value, -math.inf, math.inf, n)
    first_step = max(*reach(x - value * y, ends and ends[0] - value * ends[1]), 1e-9 * bottom) / bottom

    def clear(d: float, side: int) -> float:
        """By how much the mean of x - r y is clear of 0, for an r that lies d below (side -1) or above the ratio."""
        r = value + side * d
        rest = -side * (x - r * y)
        return float(rest.mean()) - reach(rest, ends and -side * (ends[0] - r * ends[1]))[0]

    def limit(side: int) -> float:
        step = next((step for step in first_step * 2.0 ** np.arange(20) if clear(step, side) > 0), math.inf)
        if math.isfinite(step):
            step = float(optimize.brentq(clear, 0, step, (side,), rtol=1e-6))
        return value + side * step

    return Estimate(value, limit(-1), limit(1), n)


def _unpaired(frame: pd.DataFrame, ends: np.ndarray | None, each: float, level: float) -> Estimate:
    """Mean of a minus mean of b, for different items, with the limits of both joined; n is the smaller of the two."""
    sides = [frame[side].dropna().to_numpy(float) for side in "ab"]
    n = min(map(len, sides))
    value = float(sides[0].mean() - sides[1].mean()) if n else math.nan
    if n < MIN_ITEMS:
        return Estimate(value, math.nan, math.nan, n)
    (less_a, more_a), (less_b, more_b) = (_reach(side, ends, each, level) for side in sides)
    return Estimate(value, value - math.hypot(less_a, more_b), value + math.hypot(more_a, less_b), n)


def _resampled(
    frame: pd.DataFrame, statistic: Callable[[np.ndarray], float], clusters: Labels, limits: Ends, level: float
) -> Estimate:
    """Any statistic(values [rows, columns]) with its interval: the standard error is the spread over resamples."""
    codes, names = pd.factorize(np.arange(len(frame)) if clusters is None else np.asarray(clusters))
    values = frame.to_numpy(float)
    n, value = len(names), float(statistic(values)) if len(values) else math.nan
    if n < MIN_ITEMS or not math.isfinite(value):
        return Estimate(value, math.nan, math.nan, n)
    rows = [np.flatnonzero(codes == i) for i in range(n)]
    picks = np.random.default_rng(42).integers(0, n, (DRAWS, n))
    drawn = np.array([statistic(values[np.concatenate([rows[i] for i in pick])]) for pick in picks])
    return spread_of(value, drawn, n, level, limits)


def spread_of(value: float, drawn: np.ndarray, n: int, level: float = 0.95, limits: Ends = ANY) -> Estimate:
    """A statistic's interval from its values in resamples of n items or clusters; none where fewer than half of these
    have a value, and without width where all agree, as they may for a median. limits: as in `contrast`."""
    resamples, drawn = len(drawn), drawn[np.isfinite(drawn)]
    if n < fewest(level) or 2 * len(drawn) < resamples or not math.isfinite(value):
        return Estimate(value, math.nan, math.nan, n)
    least, most = limits
    if math.isinf(most) and math.isfinite(least) and min(value, drawn.min()) > least:
        e = spread_of(math.log(value - least), np.log(drawn - least), n, level)
        low, high = (least + math.exp(min(end, 700.0)) for end in (e.low, e.high))
        return within(Estimate(value, low, high, n), limits)
    error = float(drawn.std(ddof=1) * math.sqrt(n / (n - 1)))
    bias = float(drawn.mean()) - value
    half = max(_quantile(level, n - 1) * error, float(np.quantile(np.abs(drawn - value), level)))
    return within(Estimate(value, value - half - max(bias, 0.0), value + half - min(bias, 0.0), n), limits)


def within(e: Estimate, limits: Ends) -> Estimate:
    """The estimate with its interval cut to the limits; it still holds the value."""
    return e._replace(low=min(max(e.low, limits[0]), e.value), high=max(min(e.high, limits[1]), e.value))


def means(
    rows: pd.DataFrame,
    by: Names,
    column: Names,
    clusters: str | None = None,
    *,
    kind: str = "mean",
    bounds: Bounds = UNIT,
    limits: Ends = ANY,
) -> pd.DataFrame:
    """Mean of a column per group with its interval: columns `by`, value, low, high, n. Or another contrast, of several.

    bounds: of the values; None if they have none, or if values do not pile up there; then `limits` are those of the
    mean. clusters: a column whose groups are drawn whole, such as the item where it has several rows.
    """
    names, records = [by] if isinstance(by, str) else list(by), []
    for key, group in rows.groupby(names, sort=False, dropna=False, observed=True):
        values = group[column].to_frame("a") if isinstance(column, str) else group[list(column)]
        records.append((*key, *contrast(values, kind, clusters and group[clusters], bounds=bounds, limits=limits)))
    return pd.DataFrame(records, columns=[*names, "value", "low", "high", "n"])


def contrasts(
    rows: pd.DataFrame,
    against: pd.DataFrame,
    by: Names,
    column: str,
    *,
    on: Names = "item",
    kind: str = "difference",
    clusters: str | None = None,
    bounds: Bounds = UNIT,
) -> pd.DataFrame:
    """The contrast `kind` (of `CONTRASTS`) per group of rows, as a table of `means`.

    Rows are the contrast's `a`; the row of `against` with the same `on` is its `b`, or `full` where it names a ceiling.
    Rows without such a partner are left out. Raises MergeError where one has several.
    """
    keys, second = [on] if isinstance(on, str) else list(on), "full" if kind in ("share_of_ceiling", "loss") else "b"
    other = against[[*keys, column]].rename(columns={column: second})
    paired = rows.drop(columns=[second], errors="ignore").merge(other, on=keys, validate="many_to_one")
    return means(paired.assign(a=paired[column]), by, ["a", second], clusters, kind=kind, bounds=bounds)


def wilcoxon(a: Sequence[float], b: Sequence[float], *, greater: bool = False) -> float:
    """p of the two-sided Wilcoxon signed-rank test on the nonzero differences; 1 where there is none. greater: of the
    one-sided test that a is larger. Exact up to 50 untied differences and up to 13 tied ones, else the normal
    approximation with tie correction. Differences below 1e-9 are rounding and count as zero."""
    d = _differences(a, b)
    nonzero = d[d != 0]
    if not nonzero.size:
        return 1.0
    ranks = scipy_stats.rankdata(np.abs(nonzero))
    if len(ranks) <= 13 and len(set(ranks)) < len(ranks):  # scipy permutes here too, a hundred times slower
        signs = np.arange(2 ** len(ranks))[:, None] >> np.arange(len(ranks)) & 1
        sums, seen = signs @ ranks, ranks[nonzero > 0].sum()
        as_high, as_low = float((sums >= seen - 1e-9).mean()), float((sums <= seen + 1e-9).mean())
        return as_high if greater else min(1.0, 2 * min(as_low, as_high))
    return float(scipy_stats.wilcoxon(nonzero, alternative="greater" if greater else "two-sided").pvalue)


def tost(a: Sequence[float], b: Sequence[float], margin: float) -> float:
    """p of the paired equivalence test of |mean(a - b)| < margin, for scores from 0 to 1; small says equivalent.

    It is the p at which the interval of level 1 - 2 p, by the module's rule, reaches the margin; 1 where the mean lies
    outside. Fewer than two pairs give nan. Source: Schuirmann 1987.
    """
    d = _differences(a, b)
    if d.size < 2:
        return math.nan
    mean = float(d.mean())

    def beyond(p: float) -> float:
        below, above = _reach(d, np.array([-1.0, 1.0]), 1, 1 - 2 * p)
        return max(mean + above, below - mean) - margin

    if abs(mean) >= margin:
        return 1.0
    if beyond(1e-12) <= 0:
        return 0.0
    return float(optimize.brentq(beyond, 1e-12, 0.499)) if beyond(0.499) < 0 else 0.5


def holm(ps: Sequence[float]) -> list[float]:
    """Holm's step-down adjusted p-values, in the order given (Holm 1979)."""
    p = np.asarray(ps)  # not statsmodels' multipletests, which collects garbage at every call
    order = np.argsort(p)
    adjusted = np.minimum(1.0, np.maximum.accumulate(p[order] * np.arange(p.size, 0, -1)))
    return list(map(float, adjusted[np.argsort(order)]))


def _differences(a: Sequence[float], b: Sequence[float]) -> np.ndarray:
    """a - b for the pairs that have both values; differences by rounding are 0."""
    d = np.asarray(a, float) - np.asarray(b, float)
    d = d[~np.isnan(d)]
    return np.where(np.abs(d) < ROUNDING, 0.0, d)
