"""Intervals and paired tests. A number leaves this module with its interval or its p-value, never alone.

**One interval rule for all chapters**: estimate plus or minus Student's t (n - 1) times a standard error.

- *Means, and differences of paired columns*: the standard error of the items' values. Where scores pile up at their
  `bounds` (F1, exact match, accuracy: many are 0 or 1), half an item more is counted, spread evenly over the corners of
  what can be seen: a quarter at 0 and a quarter at 1 for a mean; an eighth each at -1 and 1 and a quarter at 0 for a
  difference. Six zeros in a row are no proof that there is nothing else.
- *Shares of items that are so or not* (the same text, a score near zero): Clopper and Pearson's exact limits.
  Differences of two such shares on the same items: the limits of the share that gains and of the share that loses,
  joined by their correlation (Zou 2007).
- *Ratios of means* (share of the ceiling, loss over loss): Fieller's: all r for which the mean of top - r bottom cannot
  be told from 0 by that same rule. Where the bottom itself may be 0 there is no bound.
- *Other statistics* (a median, a quantile, a rank correlation): the standard error is the spread over 1,000 resamples.
- *Clusters* (triples of a prompt, requests of a system prompt): a cluster counts once, by its mean; resamples draw it
  whole; the half item is half of one of its rows.
- Fewer than six items or clusters have no interval, nor have unbounded values that are all alike. The estimate always
  lies inside.

Chosen by coverage alone: `python -m kvrepro.tools.coverage` writes data/coverage.csv, means and differences with many
zeros and ones. At n = 6, 12, 48 coverage is 3 points from 95% on average (Student's t alone 14, BCa 18, percentiles
19, studentised resampling 22). From n = 100 on nine cells of ten lie within 93 to 97%; at n = 6 to 12 most lie above,
up to 100%, and one of eleven below. It does not reach where nearly all items are alike: n zeros of n end near 1.4 /
n, the exact limit is 3.7 / n, and what one item in ten has, or fewer, is covered in 86% of samples at worst; nor
where few scores are all 0 or 1 (83% for six items); what is 0 or 1 by nature has exact limits for that reason. Medians
of few clusters are covered in 91 to 98%.

Missing values (failed items) are dropped, pairwise where columns are compared, and counted in `missing`.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from scipy import special
from scipy import stats as scipy_stats

from kvrepro.errors import InputError

MIN_ITEMS = 6  # below that no two-sided sign or rank test of pairs can reach 5%, and an interval says less still
HALF = 0.5  # of an item, spread over the corners of bounded values
DRAWS = 1_000
UNIT = (0.0, 1.0)
NOT_RUN = "(not run)"  # in the place of a number that there is not; `wording.findings` leaves such sentences out
Columns = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Estimate:
    """A value with its interval, `level` wide, over n items or clusters; prints as `0.281 [0.243, 0.320]`.

    low, high: nan where there is no interval. sd: of one item; error: of the value.
    """

    value: float
    low: float
    high: float
    n: int
    missing: int = 0
    level: float = 0.95
    sd: float = math.nan
    error: float = math.nan

    @property
    def triple(self) -> tuple[float, float, float]:
        """Value, low, high."""
        return self.value, self.low, self.high

    def __format__(self, spec: str) -> str:
        spec = spec or ".3f"
        if self.n == 0:
            return "no values"
        why = f"{self.n} of {MIN_ITEMS} items" if self.n < MIN_ITEMS else "all alike"
        interval = f"no interval: {why}" if math.isnan(self.low) else f"{self.low:{spec}}, {self.high:{spec}}"
        return f"{self.value:{spec}} [{interval}]" + (f" ({self.missing} missing)" if self.missing else "")

    __str__ = __repr__ = lambda self: format(self)

    def needed(self, gap: float) -> float:
        """Items with which an interval (95%) would clear a threshold `gap` away in four of five repeats, were value and
        spread as seen. Infinite where there is no gap."""
        g = abs(gap) / float(special.ndtri(0.975) + special.ndtri(0.8))
        if not g or math.isnan(self.error) or math.isinf(gap):
            return math.inf
        spread = self.sd**2 if math.isfinite(self.sd) else self.n * self.error**2
        corners = max(0.0, self.error**2 - spread / self.n) * self.n**2  # their part falls with 1 / n squared
        return float(math.ceil((spread + math.sqrt(spread**2 + 4 * g**2 * corners)) / (2 * g**2)))


# ---------------------------------------------------------------- intervals


def _minus(name: str, other: str) -> Callable[[Columns], np.ndarray]:
    return lambda c: c[name] - c[other]


# A contrast of columns a, b, full, ...: what is averaged, and for a ratio what it is divided by.
CONTRASTS: dict[str, tuple[Callable[[Columns], np.ndarray], Callable[[Columns], np.ndarray] | None]] = {
    "mean": (lambda c: c["a"], None),
    "difference": (_minus("a", "b"), None),
    "share_of_ceiling": (lambda c: c["a"] - c.get("b", 0.0), lambda c: c["full"]),
    "loss": (_minus("full", "a"), lambda c: c["full"]),
    "loss_ratio": (_minus("full", "b"), _minus("full", "a")),
    "lift_minus_difference": (lambda c: c["a"] - c["b"] - (c["x"] - c["y"]), None),
    "difference_of_ceiling": (_minus("x", "y"), lambda c: c["full"]),
}


def interval(
    values: Sequence[float], clusters: Sequence[Any] | None = None, *, bounds: tuple[float, float] | None = None,
    each: float = 1, level: float = 0.95,
) -> Estimate:  # fmt: skip
    """Mean with its interval, by the module's rule. clusters: one label per value. bounds: of a value, where it has
    some."""
    return contrast(pd.DataFrame({"a": _vector(values)}), "mean", clusters, bounds=bounds, each=each, level=level)


def contrast(
    frame: pd.DataFrame, name: str, clusters: Sequence[Any] | None = None, *, bounds: tuple[float, float] | None = None,
    each: float = 1, level: float = 0.95,
) -> Estimate:  # fmt: skip
    """A contrast of `CONTRASTS` over items (the rows of `frame`) with its interval, by the module's rule.

    bounds: of every column. each: how many scored things a row is the mean of. A row that lacks a value is dropped and
    counted.
    """
    top, bottom = CONTRASTS[name]
    values = frame.to_numpy(float)
    present = ~np.isnan(values).any(1)
    missing = int((~present).sum())
    values = values[present]
    if clusters is not None and len(values):
        codes, names = pd.factorize(_labels(clusters, len(frame))[present])
        each *= len(values) / len(names)
        values = np.stack([np.bincount(codes, column) for column in values.T], 1) / np.bincount(codes)[:, None]
    if not len(values):
        return Estimate(math.nan, math.nan, math.nan, 0, missing, level)
    sides = [dict(zip(map(str, frame), values.T, strict=True))]
    if bounds is not None:
        corners = np.array(list(itertools.product(bounds, repeat=values.shape[1])), float)
        sides.append(dict(zip(map(str, frame), corners.T, strict=True)))
    parts = [[f(side) for f in (top, bottom) if f is not None] for side in sides]
    make = _mean if bottom is None else _fieller
    return make(*parts, half=HALF / each, level=level, missing=missing)


def counted(frame: pd.DataFrame, name: str, *, level: float = 0.95) -> Estimate:
    """Mean of column a, or difference of columns a and b, where every value is 0 or 1: exact limits (see the module).

    A row that lacks a value is dropped and counted. Raises InputError for other values, and for other contrasts.
    """
    present = frame.dropna()
    if not present.isin([0, 1]).all(axis=None) or name not in ("mean", "difference"):
        raise InputError(f"{name} of values that are not all 0 or 1: exact limits are of shares and their differences")
    values, n = CONTRASTS[name][0]({c: present[c].to_numpy(float) for c in present}), len(present)
    missing = len(frame) - n
    value = float(values.mean()) if n else math.nan
    if n < MIN_ITEMS:
        return Estimate(value, math.nan, math.nan, n, missing, level)
    up, down = (float((side > 0).mean()) for side in (values, -values))
    (up_low, up_high), (down_low, down_high) = (_exact(round(share * n), n, level) for share in (up, down))
    if name == "mean":
        low, high = up_low, up_high
    else:
        r = -math.sqrt(up * down / ((1 - up) * (1 - down))) if max(up, down) < 1 else 0.0
        low = value - _joined(up - up_low, down_high - down, r)
        high = value + _joined(up_high - up, down - down_low, r)
    error = (high - low) / 2 / _quantile(level, math.inf)
    return Estimate(value, low, high, n, missing, level, float(values.std(ddof=1)), error)


def _exact(count: int, n: int, level: float) -> tuple[float, float]:
    found = scipy_stats.binomtest(count, n).proportion_ci(level, "exact")
    return float(found.low), float(found.high)


def _joined(a: float, b: float, correlation: float) -> float:
    """Of the reaches of two terms of a difference, that of the difference."""
    return math.sqrt(a * a - 2 * correlation * a * b + b * b)


def _quantile(level: float, freedom: float) -> float:
    """Of Student's t, for a two-sided interval."""
    return float(special.stdtrit(freedom, 0.5 + level / 2))


def _moments(
    items: Sequence[np.ndarray], corners: Sequence[np.ndarray], half: float = HALF
) -> tuple[np.ndarray, np.ndarray, float]:
    """Means of the columns with `half` an item at the corners, the covariance of these means, and the items counted."""
    x = np.stack(items, 1)
    weight = np.ones(len(x))
    if corners:
        y = np.stack(corners, 1)
        x, weight = np.concatenate([x, y]), np.concatenate([weight, np.full(len(y), half / len(y))])
    total = weight.sum()
    mean = weight @ x / total
    centred = x - mean
    return mean, (centred * weight[:, None]).T @ centred / (total - 1) / total, total


def _mean(
    items: Sequence[np.ndarray], corners: Sequence[np.ndarray] = (), *, half: float, level: float, missing: int
) -> Estimate:
    [x] = items
    n, value = len(x), float(np.mean(x))
    if n < MIN_ITEMS or (not corners and np.ptp(x) <= 1e-12 * max(1.0, abs(value))):
        return Estimate(value, math.nan, math.nan, n, missing, level)
    [centre], [[variance]], total = _moments(items, corners, half)
    reach = _quantile(level, total - 1) * math.sqrt(variance)
    least, most = (min(corners[0]), max(corners[0])) if corners else (-math.inf, math.inf)
    low, high = min(max(centre - reach, least), value), max(min(centre + reach, most), value)
    return Estimate(value, low + 0.0, high + 0.0, n, missing, level, float(x.std(ddof=1)), math.sqrt(variance))


def _fieller(
    items: Sequence[np.ndarray], corners: Sequence[np.ndarray] = (), *, half: float, level: float, missing: int
) -> Estimate:
    """Ratio of two means; the interval solves (top - r bottom)^2 <= t^2 var(top - r bottom) for r (Fieller 1954)."""
    x, y = items
    n, bottom = len(x), float(np.mean(y))
    if not bottom:
        return Estimate(math.nan, math.nan, math.nan, n, missing, level)
    value = float(np.mean(x)) / bottom
    linear = (x - value * y) / bottom
    if n < MIN_ITEMS or (not corners and np.ptp(linear) <= 1e-12):
        return Estimate(value, math.nan, math.nan, n, missing, level)
    (a, b), ((aa, ab), (_, bb)), total = _moments(items, corners, half)
    t2 = _quantile(level, total - 1) ** 2
    square, middle, rest = b * b - t2 * bb, a * b - t2 * ab, a * a - t2 * aa
    sd, error = float(linear.std(ddof=1)), math.sqrt(max(0.0, aa - 2 * value * ab + value**2 * bb)) / abs(bottom)
    if not square > 0:
        return Estimate(value, -math.inf, math.inf, n, missing, level, sd, error)
    root = math.sqrt(max(0.0, middle * middle - square * rest))
    low, high = min((middle - root) / square, value), max((middle + root) / square, value)
    return Estimate(value, float(low), float(high), n, missing, level, sd, error)


def unpaired(
    a: Sequence[float], b: Sequence[float], *, bounds: tuple[float, float] | None = None, each: float = 1,
    level: float = 0.95,
) -> Estimate:  # fmt: skip
    """Mean of a minus mean of b, of different items, with Welch's degrees of freedom; n is the smaller sample's.

    bounds: of every value. Where it is a difference itself, half of the half item lies at 0, as in `contrast`.
    """
    sides = [_vector(side) for side in (a, b)]
    sides = [side[~np.isnan(side)] for side in sides]
    n = min(map(len, sides))
    value = float(sides[0].mean() - sides[1].mean()) if n else math.nan
    corners = [np.array([*bounds, 0.0, 0.0] if bounds[0] < 0 else bounds)] if bounds else []
    if n < MIN_ITEMS:
        return Estimate(value, math.nan, math.nan, n, level=level)
    moments = [_moments([side], corners, HALF / each) for side in sides]
    parts = [(float(variance[0, 0]), total) for _, variance, total in moments]
    error = math.sqrt(sum(variance for variance, _ in parts))
    if not error:
        return Estimate(value, math.nan, math.nan, n, level=level)
    freedom = error**4 / sum(variance**2 / (total - 1) for variance, total in parts)
    reach = _quantile(level, freedom) * error
    centre = float(moments[0][0][0] - moments[1][0][0])
    return Estimate(value, min(centre - reach, value), max(centre + reach, value), n, level=level, error=error)


def resampled(
    frame: pd.DataFrame, statistic: Callable[[np.ndarray], float], clusters: Sequence[Any] | None = None, *,
    level: float = 0.95, seed: int = 42,
) -> Estimate:  # fmt: skip
    """Any statistic(values [rows, columns]) with its interval: the standard error is the spread over resamples.

    No interval where fewer than half of the resamples have a value. Where all agree there is no width: a median may
    well be the same in all.
    """
    labels = np.arange(len(frame)) if clusters is None else _labels(clusters, len(frame))
    codes, names = pd.factorize(labels)
    values = frame.to_numpy(float)
    n, value = len(names), float(statistic(values)) if len(values) else math.nan
    if n < MIN_ITEMS or not math.isfinite(value):
        return Estimate(value, math.nan, math.nan, n, level=level)
    rows = [np.flatnonzero(codes == i) for i in range(n)]
    picks = np.random.default_rng(seed).integers(0, n, (DRAWS, n))
    drawn = np.array([statistic(values[np.concatenate([rows[i] for i in pick])]) for pick in picks])
    return spread_of(value, drawn, n, level)


def spread_of(value: float, drawn: np.ndarray, n: int, level: float = 0.95) -> Estimate:
    """A statistic's interval from its values in resamples of n items or clusters."""
    asked, drawn = len(drawn), drawn[np.isfinite(drawn)]
    if n < MIN_ITEMS or 2 * len(drawn) < asked or not math.isfinite(value):
        return Estimate(value, math.nan, math.nan, n, level=level)
    error = float(drawn.std(ddof=1) * math.sqrt(n / (n - 1)))
    half = _quantile(level, n - 1) * error
    return Estimate(value, value - half, value + half, n, level=level, error=error)


def means(
    rows: pd.DataFrame, by: Sequence[str] | str, column: str, clusters: str | None = None, *,
    bounds: tuple[float, float] | None = UNIT,
) -> pd.DataFrame:  # fmt: skip
    """Mean of a column per group with its interval: columns `by`, value, low, high, n. bounds: None for what has none.

    clusters: a column whose groups are drawn whole, such as the item where it has several rows.
    """
    return _table(rows, by, lambda group: interval(
        group[column], None if clusters is None else group[clusters], bounds=bounds
    ))  # fmt: skip


def contrasts(
    rows: pd.DataFrame, against: pd.DataFrame, by: Sequence[str] | str, column: str, *,
    on: Sequence[str] | str = "item", kind: str = "difference", clusters: str | None = None,
    bounds: tuple[float, float] | None = UNIT,
) -> pd.DataFrame:  # fmt: skip
    """The contrast `kind` (of `CONTRASTS`) per group of rows, a row paired with that of `against` with the same `on`.

    Columns as of `means`. Rows are the contrast's `a`, those of `against` its `b`, or `full` where it names a ceiling.
    Rows without a partner are left out. Raises InputError where `against` has several rows for the same `on`.
    """
    keys = [on] if isinstance(on, str) else list(on)
    if (twice := against.duplicated(keys)).any():
        raise InputError(f"{int(twice.sum())} rows to compare with share their {', '.join(keys)}: add columns to `on`")
    second = "full" if kind in ("share_of_ceiling", "loss") else "b"
    other = against[[*keys, column]].rename(columns={column: second})
    paired = rows.drop(columns=[second], errors="ignore").merge(other, on=keys).rename(columns={column: "a"})
    return _table(paired, by, lambda group: contrast(
        group[["a", second]], kind, None if clusters is None else group[clusters], bounds=bounds
    ))  # fmt: skip


def _table(rows: pd.DataFrame, by: Sequence[str] | str, estimate: Callable[[pd.DataFrame], Estimate]) -> pd.DataFrame:
    names, found = [by] if isinstance(by, str) else list(by), []
    for key, group in rows.groupby(names, sort=False, dropna=False, observed=True):
        e = estimate(group)
        found.append((*key, *e.triple, e.n))
    return pd.DataFrame(found, columns=[*names, "value", "low", "high", "n"])


def told(table: pd.DataFrame, unit: str = "", *, digits: int | None = None, **where: Any) -> str:
    """One row of a table with columns value, low, high, as text for the prose: `0.281 [0.243, 0.320]`, in a unit.

    unit: "%" for shares as percent. digits: after the point; None: three, of percent one. where: what the row's columns
    hold. `NOT_RUN` where there is no such row.
    """
    rows = table
    for name, value in where.items():
        rows = rows[rows[name] == value]
    if len(rows) > 1:
        raise InputError(f"{len(rows)} rows with {where}: name more columns")
    if rows.empty or pd.isna(rows.value.iloc[0]):
        return NOT_RUN
    places = (1 if unit == "%" else 3) if digits is None else digits
    row, spec = rows.iloc[0], f".{places}%" if unit == "%" else f".{places}f"
    after = f" {unit}" if unit not in ("", "%") else ""
    if pd.isna(row.low):
        return f"{row.value:{spec}}{after}"
    return f"{row.value:{spec}} [{row.low:{spec}}, {row.high:{spec}}]{after}"


def percent(share: float) -> str:
    """A share without its interval for the prose, `28%`; `NOT_RUN` where it is nan."""
    return NOT_RUN if math.isnan(share) else f"{share:.0%}"


# ---------------------------------------------------------------- tests


def wilcoxon(a: Sequence[float], b: Sequence[float]) -> float:
    """p of the two-sided Wilcoxon signed-rank test on the nonzero differences (zeros dropped, Wilcoxon's own handling).

    Exact p up to 50 untied differences and up to 13 tied ones, else the normal approximation with tie correction.
    No nonzero difference gives p = 1. Differences below 1e-9 are rounding and count as zero.
    """
    d = _differences(a, b)
    nonzero = d[d != 0]
    if not nonzero.size:
        return 1.0
    ranks = scipy_stats.rankdata(np.abs(nonzero))
    if len(ranks) <= 13 and len(set(ranks)) < len(ranks):  # scipy permutes here too, a hundred times slower
        signs = np.arange(2 ** len(ranks))[:, None] >> np.arange(len(ranks)) & 1
        sums, seen = signs @ ranks, ranks[nonzero > 0].sum()
        return min(1.0, 2 * float(min((sums <= seen + 1e-9).mean(), (sums >= seen - 1e-9).mean())))
    return float(scipy_stats.wilcoxon(nonzero).pvalue)


def sign_test(a: Sequence[float], b: Sequence[float]) -> float:
    """p of the two-sided exact sign test; no untied pair gives p = 1."""
    d = _differences(a, b)
    wins, untied = int((d > 0).sum()), int((d != 0).sum())
    return float(scipy_stats.binomtest(wins, untied).pvalue) if untied else 1.0


def tost(
    a: Sequence[float], b: Sequence[float], margin: float = 0.02, *, bounds: tuple[float, float] | None = None
) -> float:
    """p of the paired equivalence test of |mean(a - b)| < margin: the larger one-sided p; small says equivalent.

    With the mean and the standard error of the module's rule: without bounds the paired t tests, where differences
    without spread decide by their mean alone (p = 0 or 1). Fewer than two pairs give nan. Source: Schuirmann 1987.
    """
    if margin <= 0:
        raise InputError(f"margin is {margin}: give a positive difference that still counts as equal")
    d = _differences(a, b)
    if d.size < 2:
        return math.nan
    corners = [np.array([bounds[0] - bounds[1], 0.0, 0.0, bounds[1] - bounds[0]])] if bounds else []
    [mean], [[variance]], total = _moments([d], corners)
    if variance <= 1e-30:
        return 0.0 if abs(mean) < margin else 1.0
    return float(scipy_stats.t.sf((margin - abs(mean)) / math.sqrt(variance), total - 1))


def holm(ps: Sequence[float]) -> list[float]:
    """Holm's step-down adjusted p-values, in the order given (Holm 1979)."""
    p = _vector(ps)  # three lines rather than statsmodels' multipletests, which collects garbage at every call
    order = np.argsort(p)
    adjusted = np.minimum(1.0, np.maximum.accumulate(p[order] * np.arange(p.size, 0, -1)))
    return list(map(float, adjusted[np.argsort(order)]))


def _vector(values: Sequence[float]) -> np.ndarray:
    x = np.asarray(values, dtype=float)
    if x.ndim != 1:
        raise InputError(f"values have shape {x.shape}: give one list of numbers")
    return x


def _labels(clusters: Sequence[Any], n: int) -> np.ndarray:
    labels = np.asarray(clusters)
    if labels.shape != (n,):
        raise InputError(f"{labels.size} clusters for {n} values: give one label per value")
    return labels


def _differences(a: Sequence[float], b: Sequence[float]) -> np.ndarray:
    """Of the pairs that have both, rounding errors as zero."""
    x, y = _vector(a), _vector(b)
    if x.size != y.size:
        raise InputError(
            f"{x.size} values against {y.size}: a paired comparison needs the same items in the same order"
        )
    d = (x - y)[~np.isnan(x - y)]
    return np.where(np.abs(d) < 1e-9, 0.0, d)
