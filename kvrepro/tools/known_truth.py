"""Data where the answer is known, in the shape of what a claim was tested on: `kvrepro.tools.error_rates` tries rules.

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
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


@dataclass(frozen=True, eq=False)
class Source:
    """One tested thing, from which `drawn` makes new data. what: the sample of `judge`; times: draw so many times the
    items; n: items or clusters; seen: the value in the data as they are; reach: the least and the greatest value that
    such data can be moved to."""

    what: Any
    times: float = 1.0

    @property
    def reach(self) -> tuple[float, float]:
        return -math.inf, math.inf

    @property
    def n(self) -> int:
        raise NotImplementedError

    @property
    def seen(self) -> float:
        raise NotImplementedError

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
    """A `Sample`: its rows are moved by an amount; 0 leaves them as they are."""

    @cached_property
    def data(self) -> pd.DataFrame:
        return self.what.data.dropna().astype(float)

    @cached_property
    def values(self) -> np.ndarray:
        return self.data.to_numpy()

    @cached_property
    def names(self) -> list[str]:
        return [str(name) for name in self.data]

    @cached_property
    def amounts(self) -> dict[float, float]:
        """The amount for each target that was asked for so far."""
        return {}

    @cached_property
    def groups(self) -> list[np.ndarray]:
        """The rows of each cluster; without clusters each row is a group of its own."""
        if self.what.clusters is None:
            return [np.array([i]) for i in range(len(self.data))]
        labels = pd.Series(np.asarray(self.what.clusters), self.what.data.index)[self.what.data.notna().all(axis=1)]
        codes, names = pd.factorize(labels)
        return [np.flatnonzero(codes == i) for i in range(len(names))]

    @cached_property
    def key(self) -> Any:
        """What names the draws that this part shares with others."""
        return len(self.groups), hash(tuple(self.data.index)) if self.what.clusters is None else "clusters"

    @property
    def n(self) -> int:
        return len(self.groups)

    def drawn(self, target: float, rng: np.random.Generator, picks: Picks) -> Sample:
        chosen = picks.setdefault(self.key, rng.integers(0, self.n, self.many(self.n)))
        rows = np.concatenate([self.groups[i] for i in chosen])
        if target not in self.amounts:
            self.amounts[target] = self.amount(target)
        values = self.moved(self.values[rows], self.amounts[target], rng)
        clusters = None if self.what.clusters is None else np.repeat(
            np.arange(len(chosen)), [len(self.groups[i]) for i in chosen]
        )  # fmt: skip
        return replace(self.what, data=pd.DataFrame(values, columns=self.data.columns), clusters=clusters)

    def amount(self, target: float) -> float:
        """By how much the rows are moved so that the value is at the target."""
        raise NotImplementedError

    def moved(self, values: np.ndarray, amount: float, rng: np.random.Generator) -> np.ndarray:
        """The values [rows, columns], moved."""
        raise NotImplementedError


class Linear(Rows):
    """A contrast of `stats.CONTRASTS`."""

    @cached_property
    def means(self) -> np.ndarray:
        """Mean of each column; a cluster counts once."""
        return np.mean([self.values[rows].mean(0) for rows in self.groups], 0)

    def value_of(self, means: np.ndarray) -> float:
        top, bottom = stats.CONTRASTS[str(self.what.contrast)]
        columns = dict(zip(self.names, means, strict=True))
        return float(top(columns) / (bottom(columns) if bottom else 1.0))

    @cached_property
    def weights(self) -> dict[int, float]:
        """By column that is moved: its weight in the numerator. The full cache's column is never moved."""
        top, _ = stats.CONTRASTS[str(self.what.contrast)]
        weights = {}
        for i, name in enumerate(self.names):
            weight = float(top({column: float(column == name) for column in self.names}))
            if weight and name != "full":
                weights[i] = weight
        return weights

    @property
    def seen(self) -> float:
        return self.value_of(self.means)


class Thinned(Linear):
    """Scores with bounds. The amount runs from 0 to the number of columns: a share of the first column is moved to a
    bound, then a share of the next. Its sign says to which bound."""

    def _after(self, amount: float) -> float:
        """The value after a move by that amount."""
        means = self.means.copy()
        for (i, weight), share in zip(self.weights.items(), self._shares(amount), strict=True):
            means[i] += share * (self._end(weight, amount) - means[i])
        return self.value_of(means)

    def _shares(self, amount: float) -> np.ndarray:
        """The share of the items that is moved, for each of `weights`."""
        return np.clip(abs(amount) - np.arange(len(self.weights)), 0, 1)

    def _end(self, weight: float, amount: float) -> float:
        """The bound that a column of that weight is moved to."""
        assert self.what.bounds is not None
        return self.what.bounds[1 if (weight > 0) == (amount > 0) else 0]

    @property
    def reach(self) -> tuple[float, float]:
        ends = self._after(-len(self.weights)), self._after(len(self.weights))
        return min(ends), max(ends)

    def amount(self, target: float) -> float:
        side = 1.0 if target >= self.seen else -1.0
        return side * _solved(lambda x: self._after(side * x), target, 0.0, float(len(self.weights)))

    def moved(self, values: np.ndarray, amount: float, rng: np.random.Generator) -> np.ndarray:
        values = values.copy()
        things = max(1, round(self.what.each))
        for (i, weight), share in zip(self.weights.items(), self._shares(amount), strict=True):
            if share:
                moved = rng.binomial(things, share, len(values)) / things
                values[:, i] += moved * (self._end(weight, amount) - values[:, i])
        return values


class Shifted(Linear):
    """Values without bounds, shifted along the first column by a share of the denominator."""

    def amount(self, target: float) -> float:
        return target - self.seen

    def moved(self, values: np.ndarray, amount: float, rng: np.random.Generator) -> np.ndarray:
        _, bottom = stats.CONTRASTS[str(self.what.contrast)]
        columns = dict(zip(self.names, values.T, strict=True))
        i, weight = next(iter(self.weights.items()))
        values = values.copy()
        values[:, i] += amount / weight * (bottom(columns) if bottom else 1.0)
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
    """Any statistic of the rows."""

    def value_of(self, values: np.ndarray) -> float:
        assert callable(self.what.contrast)
        return float(self.what.contrast(values))

    @property
    def seen(self) -> float:
        return self.value_of(self.values)

    @cached_property
    def transform(self) -> Transform:
        """The transform for such rows, and the least and greatest amount of it."""
        columns = self.values.shape[1]
        flagged = columns == 2 and set(self.values[:, -1]) <= {0.0, 1.0}
        ratio = (self.values > 0).all() and math.isclose(self.value_of(2 * self.values), self.seen, abs_tol=1e-9)
        if columns > 4:
            return TRANSFORMS["mixed"]
        if flagged:
            return TRANSFORMS["flagged"]
        if not ratio:
            return TRANSFORMS["shifted"]
        return TRANSFORMS["powered" if columns == 1 else "scaled"]

    @property
    def reach(self) -> tuple[float, float]:
        move, ends = self.transform
        values = [self.value_of(move(self.values, end)) for end in ends]
        return min(values), max(values)

    def amount(self, target: float) -> float:
        move, (low, high) = self.transform
        values = self.values
        up = self.value_of(move(values, high)) >= self.value_of(move(values, low))
        sign = 1.0 if up else -1.0
        return _solved(lambda x: sign * self.value_of(move(values, x)), sign * target, low, high)

    def moved(self, values: np.ndarray, amount: float, rng: np.random.Generator) -> np.ndarray:
        return self.transform[0](values, amount)


class Sides(Source):
    """An `Unpaired`: scores of the first sample are moved to a bound, then those of the second."""

    @cached_property
    def parts(self) -> tuple[np.ndarray, np.ndarray]:
        a, b = (np.asarray(side, float) for side in (self.what.a, self.what.b))
        return a[~np.isnan(a)], b[~np.isnan(b)]

    @property
    def n(self) -> int:
        return min(map(len, self.parts))

    @property
    def seen(self) -> float:
        return float(self.parts[0].mean() - self.parts[1].mean())

    @property
    def reach(self) -> tuple[float, float]:
        low, high = self.what.bounds
        return low - high, high - low

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

    @property
    def n(self) -> int:
        return self.what.n

    @property
    def seen(self) -> float:
        return self.what.value

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


@dataclass(frozen=True)
class Part:
    """One tested thing of a member. where: its value in each kind of data."""

    source: Source
    where: Mapping[str, float]


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


def moved(member: Member, parts: Mapping[str, Part], kinds: Mapping[str, str], rng: Any, picks: Picks) -> Member:
    """The member with new data. kinds: the kind of each part's data, by the part's name."""
    drawn = {name: p.source.drawn(p.where[kinds[name]], rng, picks) for name, p in parts.items()}
    return replace(member, what=drawn if isinstance(member.what, Mapping) else drawn[""])


def sampled(claim: Mapping[str, Any], members: Sequence[Member], times: float = 1.0) -> list[dict[str, Part]]:
    """Parts of each member by name; the name is "" where a member has one part. InputError for what is no sample."""
    parts = []
    for member in members:
        tested = member.what if isinstance(member.what, Mapping) else {"": member.what}
        sources = {name: source(what, times) for name, what in tested.items()}
        if any(s is None for s in sources.values()):
            raise InputError(f"{member.label} is no sample")
        parts.append({name: Part(s, targets(claim["rule"], s)) for name, s in sources.items() if s is not None})
    return parts
