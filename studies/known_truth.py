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
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from kvrepro.experiment import judge, stats
from kvrepro.experiment.judge import Drawn, Member, Sample

KINDS = ("true", "threshold", "false", "one", "far_true", "far_false")
EFFECT = 0.5  # standard deviations of an item
ANYWHERE = (-math.inf, math.inf)
Picks = dict[Any, np.ndarray]  # rows or clusters drawn in one repeat, by what names them


# ---- new data of the shape of one part, with its value at a target


@dataclass
class Source:
    """One tested thing, from which new data are drawn. n: items or clusters; seen: the value in the data as they are;
    drawn(target, rng, picks): data of the same kind whose value is `target` but for chance, picks: draws of this
    repeat, which parts on the same items share; reach: the least and the greatest value that such data can be moved
    to; where: the value in each kind of data, as of `targets`."""

    n: int
    seen: float
    drawn: Callable[[float, np.random.Generator, Picks], Any]
    reach: tuple[float, float] = ANYWHERE
    where: Mapping[str, float] = field(default_factory=dict)


class Mover(NamedTuple):
    """How rows are moved. amount(target): by how much, so that the value is at the target; moved(values [rows,
    columns], amount, rng): the values, moved. Seen, reach: as of `Source`."""

    seen: float
    reach: tuple[float, float]
    amount: Callable[[float], float]
    moved: Callable[[np.ndarray, float, np.random.Generator], np.ndarray]


def rows(what: Sample, times: float) -> Source:
    """A sample's rows, drawn in whole clusters and moved."""
    whole = what.data.notna().all(axis=1)
    data = what.data[whole].astype(float)
    values, clustered = data.to_numpy(), what.clusters is not None
    codes, names = pd.factorize(np.asarray(what.clusters)[whole] if clustered else np.arange(len(data)))
    groups, n = [np.flatnonzero(codes == i) for i in range(len(names))], len(names)
    key = n, "clusters" if clustered else hash(tuple(data.index))  # names the draws that are shared
    if isinstance(what.contrast, str):
        mover = linear(what, [*map(str, data.columns)], np.mean([values[rows].mean(0) for rows in groups], 0))
    else:
        mover = transformed(what.contrast, values)
    amount = cache(mover.amount)

    def drawn(target: float, rng: np.random.Generator, picks: Picks) -> Sample:
        chosen = [groups[i] for i in picks.setdefault(key, rng.integers(0, n, round(times * n)))]
        new = mover.moved(values[np.concatenate(chosen)], amount(target), rng)
        clusters = np.repeat(np.arange(len(chosen)), list(map(len, chosen))) if clustered else None
        return replace(what, data=pd.DataFrame(new, columns=data.columns), clusters=clusters)

    return Source(n, mover.seen, drawn, mover.reach)


def linear(what: Sample, names: list[str], means: np.ndarray) -> Mover:
    """A contrast of `stats.CONTRASTS`. means: of each column, a cluster counts once. The full cache's column is never
    moved.

    Values without bounds are shifted along the first column by a share of the denominator. With bounds the amount runs
    from 0 to the number of columns: a share of the first column is moved to a bound, then a share of the next. Its sign
    says to which bound."""
    top, bottom = stats.CONTRASTS[str(what.contrast)]

    def value_of(means: np.ndarray) -> float:
        columns = dict(zip(names, means, strict=True))
        return float(top(columns) / (bottom(columns) if bottom else 1.0))

    seen = value_of(means)
    weights = {i: float(top({other: float(other == name) for other in names})) for i, name in enumerate(names)}
    weights = {i: weight for i, weight in weights.items() if weight and names[i] != "full"}  # in the numerator

    def shifted(values: np.ndarray, amount: float, _rng: np.random.Generator) -> np.ndarray:
        columns = dict(zip(names, values.T, strict=True))
        i, weight = next(iter(weights.items()))
        return _with(values, i, values[:, i] + amount / weight * (bottom(columns) if bottom else 1.0))

    if what.bounds is None:
        return Mover(seen, ANYWHERE, lambda target: target - seen, shifted)

    def moves(amount: float) -> Iterator[tuple[int, float, float]]:
        """Of each column that is moved: its number, the share of the items that is moved, and to which bound."""
        for place, (i, weight) in enumerate(weights.items()):
            yield i, min(1.0, max(0.0, abs(amount) - place)), what.bounds[(weight > 0) == (amount > 0)]

    def after(amount: float) -> float:
        """The value after a move by that amount."""
        moved = means.copy()
        for i, share, end in moves(amount):
            moved[i] += share * (end - moved[i])
        return value_of(moved)

    def amount(target: float) -> float:
        side = 1.0 if target >= seen else -1.0
        return side * _solved(lambda x: after(side * x), target, 0.0, float(len(weights)))

    def thinned(values: np.ndarray, amount: float, rng: np.random.Generator) -> np.ndarray:
        things = max(1, round(what.each))
        for i, share, end in moves(amount):
            if share:
                moved = rng.binomial(things, share, len(values)) / things * (end - values[:, i])
                values = _with(values, i, values[:, i] + moved)
        return values

    ends = after(-len(weights)), after(len(weights))
    return Mover(seen, (min(ends), max(ends)), amount, thinned)


def _with(values: np.ndarray, i: int, changed: np.ndarray) -> np.ndarray:
    """The values with another column i."""
    return np.concatenate([values[:, :i], changed[:, None], values[:, i + 1 :]], axis=1)


def _mixed(values: np.ndarray, amount: float) -> np.ndarray:
    """The second half of the columns mixed with the first, or with the first turned around."""
    first, second = np.split(values, 2, axis=1)
    share = min(1.0, abs(amount))
    return np.concatenate([first, (1 - share) * second + share * math.copysign(1.0, amount) * first], axis=1)


Transform = tuple[Callable[[np.ndarray, float], np.ndarray], tuple[float, float]]  # least and greatest amount
TRANSFORMS: dict[str, Transform] = {
    "mixed": (_mixed, (-1.0, 1.0)),
    "flagged": (lambda v, amount: _with(v, 0, v[:, 0] + amount * v[:, -1]), (-1e3, 1e3)),  # where the last is true
    "shifted": (lambda v, amount: _with(v, 0, v[:, 0] + amount), (-1e3, 1e3)),
    "powered": (lambda v, amount: np.sign(v) * np.abs(v) ** math.exp(amount), (-2.0, 2.0)),  # longer or shorter tails
    "scaled": (lambda v, amount: _with(v, 0, v[:, 0] * math.exp(amount)), (-3.0, 3.0)),  # for ratios of medians
}


def transformed(value_of: Callable[[np.ndarray], float], values: np.ndarray) -> Mover:
    """Any statistic of the rows, moved by what suits such rows."""
    seen, columns, kind = float(value_of(values)), values.shape[1], "shifted"
    if columns > 4:
        kind = "mixed"
    elif columns == 2 and set(values[:, -1]) <= {0.0, 1.0}:
        kind = "flagged"
    elif (values > 0).all() and math.isclose(value_of(2 * values), seen, abs_tol=1e-9):  # ratios
        kind = "powered" if columns == 1 else "scaled"
    transform, ends = TRANSFORMS[kind]
    low, high = (float(value_of(transform(values, end))) for end in ends)

    def amount(target: float) -> float:
        return _solved(lambda x: value_of(transform(values, x)), target, *ends)

    return Mover(seen, (min(low, high), max(low, high)), amount, lambda v, amount, _rng: transform(v, amount))


def sides(what: Sample, times: float) -> Source:
    """Scores of the first sample are moved to a bound, then those of the second."""
    parts = [what.data[side].dropna().to_numpy(float) for side in "ab"]
    seen, (low, high) = float(parts[0].mean() - parts[1].mean()), what.bounds or ANYWHERE

    def drawn(target: float, rng: np.random.Generator, _picks: Picks) -> Sample:
        new = [side[rng.integers(0, len(side), round(times * len(side)))] for side in parts]
        gap = target - seen
        for i, up in ((0, gap > 0), (1, gap < 0)):
            end = high if up else low
            room = abs(end - parts[i].mean())
            share = min(1.0, abs(gap) / room) if room else 0.0
            new[i] = np.where(rng.random(len(new[i])) < share, end, new[i])
            gap -= math.copysign(share * room, gap)
        return replace(what, data=pd.DataFrame({side: pd.Series(x) for side, x in zip("ab", new, strict=True)}))

    return Source(min(map(len, parts)), seen, drawn, (low - high, high - low))


def resampled(what: Drawn, times: float) -> Source:
    """One of the resamples plays the estimate, and the others move with it."""
    spread = (what.draws - what.value) / math.sqrt(times)

    def drawn(target: float, rng: np.random.Generator, _picks: Picks) -> Drawn:
        value = target + rng.choice(spread[np.isfinite(spread)])
        return replace(what, value=value, draws=spread + value, n=round(times * what.n))

    return Source(what.n, what.value, drawn)


def _solved(f: Callable[[float], float], target: float, low: float, high: float) -> float:
    """x at which a monotone f is at its target, by bisection; the nearer end where it never is."""
    if f(high) < f(low):
        return _solved(lambda x: -f(x), -target, low, high)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if f(middle) < target else (low, middle)
    return (low + high) / 2


def source(what: Any, times: float = 1.0) -> Source:
    """The source for a sample, with so many times its items."""
    if isinstance(what, Drawn):
        return resampled(what, times)
    return (sides if what.contrast == "unpaired" else rows)(what, times)


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
    estimates = [source.drawn(border, np.random.default_rng(seed), {}).estimate() for seed in range(5)]
    widths = [(e.high - e.low) / 2 * math.sqrt(e.n) / 1.96 for e in estimates]
    spreads = [width for width in widths if math.isfinite(width)]  # of one item's part
    step = EFFECT * float(np.median(spreads)) if spreads else math.nan
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
    kinds = {"true": stand(into, math.inf if centred else step, width), "false": stand(-into, step, hole)}
    return nowhere | kinds | {"threshold": exactly, "far_true": far(into, width), "far_false": far(-into, hole)}


# ---- one claim


def parts_of(member: Member) -> Mapping[str, Any]:
    """What a member tests, by name; the name is "" where it is one thing."""
    return member.what if isinstance(member.what, Mapping) else {"": member.what}


def sampled(claim: Mapping[str, Any], members: Sequence[Member], times: float = 1.0) -> list[dict[str, Source]]:
    """The sources of each member's parts, by name."""
    parts = [{name: source(what, times) for name, what in parts_of(member).items()} for member in members]
    for part in (part for parts_of_member in parts for part in parts_of_member.values()):
        part.where = targets(claim["rule"], part)
    return parts
