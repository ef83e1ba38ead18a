"""Data where the answer is known, in the shape of what a claim was tested on: `studies.error_rates` tries rules.

Rows (clusters whole) are drawn with replacement, the same ones for all parts, and changed so that the estimated value
is at its target:

- scores with bounds: a share of the items gets the lowest or the highest score in one condition, the others keep theirs
  (answers are lost or found); where that is not enough, in the next condition too. Of a row that is a mean of several
  things, that share is drawn among these;
- values without bounds: all are shifted by the same amount, in ratios by that share of the denominator;
- medians, quantiles: shifted; ratios of medians: one side scaled; ratios of quantiles: raised to a power; correlations:
  one half of the columns mixed with the other;
- statistics that come with resamples: one of them plays the estimate, the others move with it.

Five kinds of data. *true*, *false*: every part stands half a standard deviation of an item inside or outside of the
bound (that is a medium effect), or as far as the region and the scores' bounds allow. *threshold*: every part stands at
the bound, where both wrong verdicts are most likely. *one*: one part stands at the bound, the others are true: the
hardest case for a claim about all. *far*: nine tenths of the way to the farthest that such data can reach.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from kvrepro.errors import InputError
from kvrepro.experiment import judge, stats
from kvrepro.experiment.judge import Drawn, Member, Sample, Unpaired

KINDS = ("true", "threshold", "false", "one", "far_true", "far_false")
EFFECT = 0.5  # standard deviations of an item
Picks = dict[Any, np.ndarray]  # rows or clusters drawn in one repeat, by what names them


# ---- new data of the shape of one part, with its value at a target


class Source:
    """One tested thing, from which `drawn` makes new data. what: the sample of `judge`; times: draw so many times the
    items; n: items or clusters; seen: the value in the data as they are; reach: the least and the greatest value that
    such data can be moved to; where: the value in each kind of data, as of `targets`."""

    n: int
    seen: float
    where: Mapping[str, float]
    reach: tuple[float, float] = (-math.inf, math.inf)

    def __init__(self, what: Any, times: float = 1.0):
        self.what, self.times = what, times

    def many(self, n: int) -> int:
        """The number of draws in the place of n."""
        return round(self.times * n)

    def drawn(self, target: float, rng: np.random.Generator, picks: Picks) -> Any:
        """New data of the same kind, whose value is `target` but for chance. picks: draws of this repeat, which parts
        on the same items share."""
        raise NotImplementedError

    def spread(self, target: float) -> float:
        """Standard deviation of one item's part in the estimate, at a target: from the errors of five samples."""
        estimates = [self.drawn(target, np.random.default_rng(seed), {}).estimate() for seed in range(5)]
        spreads = [e.error * math.sqrt(e.n) for e in estimates if math.isfinite(e.error)]
        return float(np.median(spreads)) if spreads else math.nan


class Rows(Source):
    """A `Sample`: its rows are moved by an amount; 0 leaves them as they are. groups: the rows of each cluster, of each
    row without clusters; key: what names the draws that this part shares with others."""

    def __init__(self, what: Any, times: float = 1.0):
        super().__init__(what, times)
        whole = what.data.notna().all(axis=1)
        data = what.data[whole].astype(float)
        self.values, self.columns = data.to_numpy(), data.columns
        clustered = what.clusters is not None
        shared = "clusters" if clustered else hash(tuple(data.index))
        codes, names = pd.factorize(np.asarray(what.clusters)[whole] if clustered else np.arange(len(data)))
        self.groups = [np.flatnonzero(codes == i) for i in range(len(names))]
        self.n, self.key = len(names), (len(names), shared)
        self.amounts: dict[float, float] = {}  # for each target that was asked for so far

    def drawn(self, target: float, rng: np.random.Generator, picks: Picks) -> Sample:
        chosen = picks.setdefault(self.key, rng.integers(0, self.n, self.many(self.n)))
        groups = [self.groups[i] for i in chosen]
        if target not in self.amounts:
            self.amounts[target] = self.amount(target)
        values = self.moved(self.values[np.concatenate(groups)], self.amounts[target], rng)
        clusters = None if self.what.clusters is None else np.repeat(np.arange(len(groups)), list(map(len, groups)))
        return replace(self.what, data=pd.DataFrame(values, columns=self.columns), clusters=clusters)

    def amount(self, target: float) -> float:
        """By how much the rows are moved so that the value is at the target."""
        raise NotImplementedError

    def moved(self, values: np.ndarray, amount: float, rng: np.random.Generator) -> np.ndarray:
        """The values [rows, columns], moved."""
        raise NotImplementedError


class Linear(Rows):
    """A contrast of `stats.CONTRASTS`. means: of each column, a cluster counts once; weights: by column that is moved,
    its weight in the numerator. The full cache's column is never moved."""

    def __init__(self, what: Any, times: float = 1.0):
        super().__init__(what, times)
        self.names = [str(name) for name in self.columns]
        self.top, self.bottom = stats.CONTRASTS[str(what.contrast)]
        self.means = np.mean([self.values[rows].mean(0) for rows in self.groups], 0)
        self.seen = self.value_of(self.means)
        units = ({other: float(other == name) for other in self.names} for name in self.names)
        weights = dict(enumerate(float(self.top(unit)) for unit in units))
        self.weights = {i: weight for i, weight in weights.items() if weight and self.names[i] != "full"}

    def value_of(self, means: np.ndarray) -> float:
        columns = dict(zip(self.names, means, strict=True))
        return float(self.top(columns) / (self.bottom(columns) if self.bottom else 1.0))


class Thinned(Linear):
    """Scores with bounds. The amount runs from 0 to the number of columns: a share of the first column is moved to a
    bound, then a share of the next. Its sign says to which bound."""

    def __init__(self, what: Any, times: float = 1.0):
        super().__init__(what, times)
        ends = self._after(-len(self.weights)), self._after(len(self.weights))
        self.reach = min(ends), max(ends)

    def _after(self, amount: float) -> float:
        """The value after a move by that amount."""
        means = self.means.copy()
        for i, share, end in self._moves(amount):
            means[i] += share * (end - means[i])
        return self.value_of(means)

    def _moves(self, amount: float) -> Iterator[tuple[int, float, float]]:
        """Of each column that is moved: its number, the share of the items that is moved, and to which bound."""
        for place, (i, weight) in enumerate(self.weights.items()):
            yield i, min(1.0, max(0.0, abs(amount) - place)), self.what.bounds[(weight > 0) == (amount > 0)]

    def amount(self, target: float) -> float:
        side = 1.0 if target >= self.seen else -1.0
        return side * _solved(lambda x: self._after(side * x), target, 0.0, float(len(self.weights)))

    def moved(self, values: np.ndarray, amount: float, rng: np.random.Generator) -> np.ndarray:
        values = values.copy()
        things = max(1, round(self.what.each))
        for i, share, end in self._moves(amount):
            if share:
                values[:, i] += rng.binomial(things, share, len(values)) / things * (end - values[:, i])
        return values


class Shifted(Linear):
    """Values without bounds, shifted along the first column by a share of the denominator."""

    def amount(self, target: float) -> float:
        return target - self.seen

    def moved(self, values: np.ndarray, amount: float, rng: np.random.Generator) -> np.ndarray:
        columns = dict(zip(self.names, values.T, strict=True))
        i, weight = next(iter(self.weights.items()))
        values = values.copy()
        values[:, i] += amount / weight * (self.bottom(columns) if self.bottom else 1.0)
        return values


def _mixed(values: np.ndarray, amount: float) -> np.ndarray:
    """The second half of the columns mixed with the first, or with the first turned around."""
    first, second = np.split(values, 2, axis=1)
    share = min(1.0, abs(amount))
    return np.concatenate([first, (1 - share) * second + share * math.copysign(1.0, amount) * first], axis=1)


def _first(values: np.ndarray, changed: np.ndarray) -> np.ndarray:
    """The values with a first column that was changed."""
    return np.concatenate([changed[:, None], values[:, 1:]], axis=1)


def _powered(values: np.ndarray, amount: float) -> np.ndarray:
    """All values raised to a power, which makes their tails longer or shorter."""
    return np.sign(values) * np.abs(values) ** math.exp(amount)


Transform = tuple[Callable[[np.ndarray, float], np.ndarray], tuple[float, float]]  # least and greatest amount
TRANSFORMS: dict[str, Transform] = {
    "mixed": (_mixed, (-1.0, 1.0)),
    "flagged": (lambda v, amount: _first(v, v[:, 0] + amount * v[:, -1]), (-1e3, 1e3)),  # where the last is true
    "shifted": (lambda v, amount: _first(v, v[:, 0] + amount), (-1e3, 1e3)),
    "powered": (_powered, (-2.0, 2.0)),
    "scaled": (lambda v, amount: _first(v, v[:, 0] * math.exp(amount)), (-3.0, 3.0)),  # for ratios of medians
}


class Transformed(Rows):
    """Any statistic of the rows. transform: what moves such rows; ends: the least and the greatest amount of it."""

    def __init__(self, what: Any, times: float = 1.0):
        super().__init__(what, times)
        self.value_of: Callable[[np.ndarray], float] = what.contrast
        self.seen = float(self.value_of(self.values))
        self.transform, self.ends = TRANSFORMS[self._kind()]
        values = [float(self.value_of(self.transform(self.values, end))) for end in self.ends]
        self.reach, self.sign = (min(values), max(values)), 1.0 if values[1] >= values[0] else -1.0

    def _kind(self) -> str:
        """The name of the transform for such rows."""
        columns = self.values.shape[1]
        if columns > 4:
            return "mixed"
        if columns == 2 and set(self.values[:, -1]) <= {0.0, 1.0}:
            return "flagged"
        if (self.values > 0).all() and math.isclose(self.value_of(2 * self.values), self.seen, abs_tol=1e-9):
            return "powered" if columns == 1 else "scaled"  # ratios
        return "shifted"

    def amount(self, target: float) -> float:
        def value(x: float) -> float:
            return self.sign * self.value_of(self.transform(self.values, x))

        return _solved(value, self.sign * target, *self.ends)

    def moved(self, values: np.ndarray, amount: float, rng: np.random.Generator) -> np.ndarray:
        return self.transform(values, amount)


class Sides(Source):
    """An `Unpaired`: scores of the first sample are moved to a bound, then those of the second."""

    def __init__(self, what: Any, times: float = 1.0):
        super().__init__(what, times)
        a, b = (np.asarray(side, float) for side in (what.a, what.b))
        self.parts = a[~np.isnan(a)], b[~np.isnan(b)]
        self.n = min(map(len, self.parts))
        self.seen = float(self.parts[0].mean() - self.parts[1].mean())
        low, high = what.bounds
        self.reach = low - high, high - low

    def drawn(self, target: float, rng: np.random.Generator, picks: Picks) -> Unpaired:
        drawn = [side[rng.integers(0, len(side), self.many(len(side)))] for side in self.parts]
        gap, (low, high) = target - self.seen, self.what.bounds
        for i, up in ((0, gap > 0), (1, gap < 0)):
            end = high if up else low
            room = abs(end - self.parts[i].mean())
            share = min(1.0, abs(gap) / room) if room else 0.0
            drawn[i] = np.where(rng.random(len(drawn[i])) < share, end, drawn[i])
            gap -= math.copysign(share * room, gap)
        return replace(self.what, a=drawn[0], b=drawn[1])


class Resampled(Source):
    """A `Drawn`: one of its resamples plays the estimate, and the others move with it."""

    def __init__(self, what: Any, times: float = 1.0):
        super().__init__(what, times)
        self.n, self.seen = what.n, what.value

    def drawn(self, target: float, rng: np.random.Generator, picks: Picks) -> Drawn:
        spread = (self.what.draws - self.what.value) / math.sqrt(self.times)
        value = target + rng.choice(spread[np.isfinite(spread)])
        return replace(self.what, value=value, draws=spread + value, n=self.many(self.n))


def _solved(f: Callable[[float], float], target: float, low: float, high: float) -> float:
    """x at which a monotone f is at its target, by bisection; the nearer end where it never is."""
    if f(high) < f(low):
        return _solved(lambda x: -f(x), -target, low, high)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if f(middle) < target else (low, middle)
    return (low + high) / 2


def source(what: Any, times: float = 1.0) -> Source | None:
    """The source for a tested thing. None for what is no sample: facts, and ranges of timings."""
    if isinstance(what, Sample):
        if not isinstance(what.contrast, str):
            return Transformed(what, times)
        return (Shifted if what.bounds is None else Thinned)(what, times)
    kind = {Unpaired: Sides, Drawn: Resampled}.get(type(what))
    return kind(what, times) if kind else None


# ---- where the truth stands


def targets(rule: Mapping[str, Any], source: Source) -> dict[str, float]:
    """The value in each kind of data, measured from the border of the rule that is nearest to the seen value. nan where
    such data cannot take that value."""
    [(kind, _)] = rule.items()
    regions, (low, high) = judge.region(rule), source.reach
    borders = [(end, 1.0 if end == a else -1.0) for a, b, _ in regions for end in (a, b) if math.isfinite(end)]
    border, into = min(borders, key=lambda border: abs(border[0] - source.seen))  # into: the side where the rule holds
    nowhere = dict.fromkeys(KINDS, math.nan)
    if not low - 1e-9 <= border <= high + 1e-9:  # all that such data can be is on one side
        side = "true" if judge.state_of(rule, source.seen, source.seen) == "holds" else "false"
        return nowhere | {side: source.seen, f"far_{side}": source.seen}
    step = EFFECT * source.spread(border)
    exactly = border if step > 0 else math.nan  # nan, too, is not above 0: without any spread nothing stands at a bound
    step = step if step > 0 else 0.05 * max(1.0, abs(border))
    width = min([(b - a) / 2 for a, b, _ in regions if math.isfinite(b - a)], default=math.inf)
    hole = (regions[1][0] - regions[0][1]) / 2 if len(regions) == 2 else math.inf  # where a size is too small

    def stand(direction: float, least: float, middle: float) -> float:
        """`least` away from the border, at most at the middle of the region there, and within what can be reached."""
        return float(np.clip(border + direction * min(least, middle), low, high))

    def far(direction: float, middle: float) -> float:
        return border + (0.9 if math.isinf(middle) else 1.0) * (stand(direction, 10 * step, middle) - border)

    centred = kind in ("no_difference", "equivalent", "size_at_most")  # such claims mean 0
    return nowhere | {
        "true": stand(into, math.inf if centred else step, width), "threshold": exactly,
        "false": stand(-into, step, hole), "far_true": far(into, width), "far_false": far(-into, hole),
    }  # fmt: skip


# ---- one claim


def moved(member: Member, parts: Mapping[str, Source], kinds: Mapping[str, str], rng: Any, picks: Picks) -> Member:
    """The member with new data. kinds: the kind of each part's data, by the part's name."""
    drawn = {name: part.drawn(part.where[kinds[name]], rng, picks) for name, part in parts.items()}
    return replace(member, what=drawn if isinstance(member.what, Mapping) else drawn[""])


def sampled(claim: Mapping[str, Any], members: Sequence[Member], times: float = 1.0) -> list[dict[str, Source]]:
    """Parts of each member by name; the name is "" where a member has one part. InputError for what is no sample."""
    parts_of_members = []
    for member in members:
        parts = {}
        for name, what in (member.what if isinstance(member.what, Mapping) else {"": member.what}).items():
            part = source(what, times)
            if part is None:
                raise InputError(f"{member.label} is no sample")
            part.where = targets(claim["rule"], part)
            parts[name] = part
        parts_of_members.append(parts)
    return parts_of_members
