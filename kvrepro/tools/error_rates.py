"""How often the rule of each claim errs, tried on data where the answer is known. Writes data/error_rates.csv.

`python -m kvrepro.tools.error_rates`, after `make book`. The data have the shape of what the claim was tested on in the
last run: its members and their parts, items, clusters, bounds, the spread and the zeros and ones that were seen. Rows
(clusters whole) are drawn with replacement, the same ones for all parts, and moved so that what is estimated stands
where it shall:

- scores with bounds: a share of the items gets the lowest or the highest score in one condition, the others keep theirs
  (answers are lost or found); where that does not reach, in the next condition too. Of a row that is a mean of
  several things, that share is drawn among these;
- values without bounds: all are shifted by the same amount, in ratios by that share of the denominator;
- medians, quantiles, ratios of medians: shifted; ratios of quantiles: raised to a power; correlations: one half of the
  columns mixed with the other;
- statistics that come with resamples: one of them plays the estimate, the others move with it.

The claim's own rule judges five kinds of data. *true*, *false*: every part stands half a standard deviation of an item
inside or outside of the bound (that is a medium effect), or as far as the region and the scores' bounds allow.
*threshold*: every part stands at the bound, where both wrong verdicts are most likely. *one*: one part stands at the
bound, the others are true: the hardest case for a claim about all. *far*: nine tenths of the way to the farthest that
such data can reach. A rule that is never reproduced there cannot hold, one that is never refuted cannot fail.

Wanted: at most 5% "reproduced" where the claim is false or just not true, and at most 5% "not reproduced" where it is
true or just true. With 150 repeats a rate of 5% has a standard error of 1.8 points, with the 60 of rules that
resample (120 times each) or have many parts one of 2.8; a rule is listed where its rate is above 5% by two of these.
Column `repeats` says how many a row had.
"""

from __future__ import annotations

import math
import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import numpy as np
import pandas as pd
import typer

from kvrepro.errors import InputError, one_line_errors
from kvrepro.experiment import judge, stats
from kvrepro.experiment.judge import Drawn, Facts, Measured, Member, NotTestable, Sample, Unpaired
from kvrepro.paths import DATA, replaced
from kvrepro.tools import book

KINDS = ("true", "threshold", "false", "one", "far_true", "far_false")
SHORT = {"reproduced": "reproduced", "not reproduced": "not_reproduced", "inconclusive": "inconclusive"}
COLUMNS = [
    "chapter", "claim", "reading", "rule", "members", "parts", "n", "repeats", "wrongly_reproduced",
    "wrongly_not_reproduced", "decided", "can_hold", "can_fail", "wrongly_reproduced_above",
    "wrongly_not_reproduced_above",
    *(f"{kind}_{name}" for kind in KINDS[:4] for name in SHORT.values()), "note",
]  # fmt: skip
WRONG = 0.05  # of either false verdict, at most
EFFECT = 0.5  # standard deviations of an item
REPEATS, SLOW_REPEATS, FAR_REPEATS = 150, 60, 20
SLOW_DRAWS, MANY = 120, 25  # resamples; parts from which on a claim counts as slow
Picks = dict[Any, np.ndarray]  # rows or clusters drawn in one repeat, by what names them
Asked = tuple[Mapping[str, Any], str, list[Member]]  # claim, reading, members


# ---- what can be drawn: new data of the shape of one part, with its value at a target


@dataclass(frozen=True, eq=False)
class Source:
    """What `drawn` makes new data from. n: items or clusters; seen: the value in the data as they are; reach: the least
    and the greatest value that such data can be moved to."""

    what: Any

    @property
    def reach(self) -> tuple[float, float]:
        return -math.inf, math.inf

    @property
    def n(self) -> int:
        raise NotImplementedError

    @property
    def seen(self) -> float:
        raise NotImplementedError

    def drawn(self, target: float, rng: np.random.Generator, picks: Picks) -> Any:
        raise NotImplementedError

    def spread(self, target: float) -> float:
        """Standard deviation of one item's part in the estimate, at a target: from the errors of five samples."""
        found = [self.drawn(target, np.random.default_rng(seed), {}).estimate() for seed in range(5)]
        spreads = [e.error * math.sqrt(e.n) for e in found if math.isfinite(e.error)]
        return float(np.median(spreads)) if spreads else math.nan


class Rows(Source):
    """Of a `Sample`: rows that are moved by an amount, 0 for not at all."""

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
        """By target, once found."""
        return {}

    @cached_property
    def groups(self) -> list[np.ndarray]:
        """Rows of each cluster; each row alone where there are no clusters."""
        if self.what.clusters is None:
            return [np.array([i]) for i in range(len(self.data))]
        labels = pd.Series(np.asarray(self.what.clusters), self.what.data.index)[self.what.data.notna().all(axis=1)]
        codes, names = pd.factorize(labels)
        return [np.flatnonzero(codes == i) for i in range(len(names))]

    @cached_property
    def key(self) -> Any:
        return len(self.groups), hash(tuple(self.data.index)) if self.what.clusters is None else "clusters"

    @property
    def n(self) -> int:
        return len(self.groups)

    def drawn(self, target: float, rng: np.random.Generator, picks: Picks) -> Sample:
        chosen = picks.setdefault(self.key, rng.integers(0, self.n, self.n))
        rows = np.concatenate([self.groups[i] for i in chosen])
        if target not in self.amounts:
            self.amounts[target] = self.amount(target)
        values = self.moved(self.values[rows], self.amounts[target], rng)
        clusters = None if self.what.clusters is None else np.repeat(
            np.arange(self.n), [len(self.groups[i]) for i in chosen]
        )  # fmt: skip
        return replace(self.what, data=pd.DataFrame(values, columns=self.data.columns), clusters=clusters)

    def amount(self, target: float) -> float:
        raise NotImplementedError

    def moved(self, values: np.ndarray, amount: float, rng: np.random.Generator) -> np.ndarray:
        raise NotImplementedError


class Linear(Rows):
    """A contrast of `stats.CONTRASTS`."""

    @cached_property
    def means(self) -> np.ndarray:
        """Of the columns; a cluster counts once."""
        return np.mean([self.values[rows].mean(0) for rows in self.groups], 0)

    def value_of(self, means: np.ndarray) -> float:
        top, bottom = stats.CONTRASTS[str(self.what.contrast)]
        columns = dict(zip(self.names, means, strict=True))
        return float(top(columns) / (bottom(columns) if bottom else 1.0))

    @cached_property
    def weights(self) -> dict[int, float]:
        """Of each column that is moved (not the full cache's) in the numerator, those that decide first."""
        top, _ = stats.CONTRASTS[str(self.what.contrast)]
        found = {i: float(top({n: float(n == name) for n in self.names})) for i, name in enumerate(self.names)}
        return {i: w for i, w in found.items() if w and self.names[i] != "full"}

    @property
    def seen(self) -> float:
        return self.value_of(self.means)


class Thinned(Linear):
    """Scores with bounds. The amount runs from 0 to the number of columns: of the first a share is moved, then of the
    next; its sign says where to."""

    def _after(self, amount: float) -> float:
        means = self.means.copy()
        for (i, weight), share in zip(self.weights.items(), self._shares(amount), strict=True):
            means[i] += share * (self._end(weight, amount) - means[i])
        return self.value_of(means)

    def _shares(self, amount: float) -> np.ndarray:
        return np.clip(abs(amount) - np.arange(len(self.weights)), 0, 1)

    def _end(self, weight: float, amount: float) -> float:
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


def _mixed(values: np.ndarray, by: float) -> np.ndarray:
    """The second half of the columns mixed with the first, or with the first turned around."""
    one, other = np.split(values, 2, axis=1)
    share = min(1.0, abs(by))
    return np.concatenate([one, (1 - share) * other + share * math.copysign(1.0, by) * one], axis=1)


def _of_flagged(values: np.ndarray, by: float) -> np.ndarray:
    """The first column shifted where the last one is true."""
    return np.concatenate([values[:, :1] + by * values[:, -1:], values[:, 1:]], axis=1)


def _powered(values: np.ndarray, by: float) -> np.ndarray:
    """Longer tails, or shorter ones."""
    return np.sign(values) * np.abs(values) ** math.exp(by)


TRANSFORMS: tuple[tuple[Callable[[np.ndarray, float], np.ndarray], tuple[float, float]], ...] = (
    (_mixed, (-1.0, 1.0)),
    (_of_flagged, (-1e3, 1e3)),
    (lambda v, by: np.concatenate([v[:, :1] + by, v[:, 1:]], axis=1), (-1e3, 1e3)),
    (_powered, (-2.0, 2.0)),
)


class Transformed(Rows):
    """Any statistic of the rows."""

    def value_of(self, values: np.ndarray) -> float:
        assert callable(self.what.contrast)
        return float(self.what.contrast(values))

    @property
    def seen(self) -> float:
        return self.value_of(self.values)

    @cached_property
    def transform(self) -> tuple[Callable[[np.ndarray, float], np.ndarray], tuple[float, float]]:
        columns = self.values.shape[1]
        flagged = columns == 2 and set(self.values[:, -1]) <= {0.0, 1.0}
        scaled = columns == 1 and math.isclose(self.value_of(2 * self.values), self.seen)  # a ratio of quantiles
        return TRANSFORMS[0 if columns > 4 else 1 if flagged else 3 if scaled else 2]

    @property
    def reach(self) -> tuple[float, float]:
        move, ends = self.transform
        found = [self.value_of(move(self.values, end)) for end in ends]
        return min(found), max(found)

    def amount(self, target: float) -> float:
        move, (low, high) = self.transform
        values = self.values
        up = self.value_of(move(values, high)) >= self.value_of(move(values, low))
        sign = 1.0 if up else -1.0
        return _solved(lambda x: sign * self.value_of(move(values, x)), sign * target, low, high)

    def moved(self, values: np.ndarray, amount: float, rng: np.random.Generator) -> np.ndarray:
        return self.transform[0](values, amount)


class Sides(Source):
    """Of an `Unpaired`: scores of the first sample are lost or found, then those of the second."""

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
        low, high = self.what.bounds or (-math.inf, math.inf)
        return low - high, high - low

    def drawn(self, target: float, rng: np.random.Generator, picks: Picks) -> Unpaired:
        drawn = [side[rng.integers(0, len(side), len(side))] for side in self.parts]
        if self.what.bounds is None:
            return replace(self.what, a=drawn[0] + target - self.seen, b=drawn[1])
        gap, (low, high) = target - self.seen, self.what.bounds
        for i, up in ((0, gap > 0), (1, gap < 0)):
            end = high if up else low
            room = abs(end - self.parts[i].mean())
            share = min(1.0, abs(gap) / room) if room else 0.0
            drawn[i] = np.where(rng.random(len(drawn[i])) < share, end, drawn[i])
            gap -= math.copysign(share * room, gap)
        return replace(self.what, a=drawn[0], b=drawn[1])


class Resampled(Source):
    """Of a `Drawn`."""

    @property
    def n(self) -> int:
        return self.what.n

    @property
    def seen(self) -> float:
        return self.what.value

    def drawn(self, target: float, rng: np.random.Generator, picks: Picks) -> Drawn:
        finite = self.what.draws[np.isfinite(self.what.draws)]
        value = target + rng.choice(finite) - self.what.value
        return replace(self.what, value=value, draws=self.what.draws - self.what.value + value)


def _solved(f: Callable[[float], float], target: float, low: float, high: float) -> float:
    """x at which a growing or falling f is at its target, by bisection; the nearer end where it never is."""
    if f(high) < f(low):
        return _solved(lambda x: -f(x), -target, low, high)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if f(middle) < target else (low, middle)
    return (low + high) / 2


def source(what: Any) -> Source | None:
    """What draws such data. None for what is no sample: facts, and ranges of timings."""
    if isinstance(what, Sample):
        if not isinstance(what.contrast, str):
            return Transformed(what)
        return Shifted(what) if what.bounds is None else Thinned(what)
    return Sides(what) if isinstance(what, Unpaired) else Resampled(what) if isinstance(what, Drawn) else None


# ---- where the truth stands


@dataclass(frozen=True)
class Part:
    """One tested thing of a member, and where its value stands in each kind of data."""

    source: Source
    where: Mapping[str, float]


def targets(rule: Mapping[str, Any], source: Source) -> dict[str, float]:
    """Where the value stands in each kind of data, by the border of the rule that is nearest to what was seen; nan
    where such data cannot stand there."""
    [(kind, _)] = rule.items()
    regions, (low, high) = judge.region(rule), source.reach
    borders = [(end, 1.0 if end == a else -1.0) for a, b, _ in regions for end in (a, b) if math.isfinite(end)]
    border, into = min(borders, key=lambda one: abs(one[0] - source.seen))
    nowhere = dict.fromkeys(KINDS, math.nan)
    if not low - 1e-9 <= border <= high + 1e-9:  # all that such data can be is on one side
        side = "true" if judge.state_of(rule, source.seen, source.seen) == "holds" else "false"
        return nowhere | {side: source.seen, f"far_{side}": source.seen}
    step = EFFECT * source.spread(border)
    exactly = border if step > 0 else math.nan  # nan, too, is not above 0: without any spread nothing stands at a bound
    step = step if step > 0 else 0.05 * max(1.0, abs(border))
    width = min([(b - a) / 2 for a, b, _ in regions if math.isfinite(b - a)], default=math.inf)
    hole = (regions[1][0] - regions[0][1]) / 2 if len(regions) == 2 else math.inf  # where a size is too small

    def stand(way: float, least: float, middle: float) -> float:
        """`least` from the border, or at the middle of what lies there; not outside of what can be reached."""
        return float(np.clip(border + way * min(least, middle), low, high))

    def far(way: float, middle: float) -> float:
        return border + (0.9 if math.isinf(middle) else 1.0) * (stand(way, 10 * step, middle) - border)

    centred = kind in ("no_difference", "equivalent", "size_at_most")  # such claims mean 0
    return nowhere | {
        "true": stand(into, math.inf if centred else step, width), "threshold": exactly,
        "false": stand(-into, step, hole), "far_true": far(into, width), "far_false": far(-into, hole),
    }  # fmt: skip


# ---- one claim


def _moved(member: Member, parts: Mapping[str, Part], kinds: Mapping[str, str], rng: Any, picks: Picks) -> Member:
    """The member with new data, each part's of the kind named for it."""
    drawn = {name: p.source.drawn(p.where[kinds[name]], rng, picks) for name, p in parts.items()}
    return replace(member, what=drawn if isinstance(member.what, Mapping) else drawn[""])


def sampled(claim: Mapping[str, Any], members: Sequence[Member]) -> list[dict[str, Part]]:
    """Parts of each member by name ("" where there is one). InputError for what is no sample."""
    found = []
    for member in members:
        whats = member.what if isinstance(member.what, Mapping) else {"": member.what}
        sources = {name: source(what) for name, what in whats.items()}
        if any(s is None for s in sources.values()):
            raise InputError(f"{member.label} is no sample")
        found.append({name: Part(s, targets(claim["rule"], s)) for name, s in sources.items() if s is not None})
    return found


def simulated(
    claim: Mapping[str, Any], members: Sequence[Member], parts: Sequence[Mapping[str, Part]], kind: str, repeats: int,
    seed: int = 0,
) -> dict[str, float]:  # fmt: skip
    """Share of repeats in which such data are reproduced, not reproduced, inconclusive; empty where some part cannot
    stand there."""
    names = [(i, name) for i, one in enumerate(parts) for name in one]
    hard = (kind == "one") and (len(names) > 1)
    needed = {"one": ["true", "threshold"]}.get(kind, [kind])
    if (kind == "one" and not hard) or any(
        math.isnan(p.where[k]) for one in parts for p in one.values() for k in needed
    ):
        return {}
    rng, verdicts = np.random.default_rng([seed, KINDS.index(kind)]), []
    for repeat in range(repeats):
        i, chosen = names[repeat % len(names)]
        picks: Picks = {}
        drawn = []
        for j, (member, one) in enumerate(zip(members, parts, strict=True)):
            hit = hard and i == j
            kinds = {
                name: ("threshold" if hit and (member.some or name == chosen) else "true") if hard else kind
                for name in one
            }
            drawn.append(_moved(member, one, kinds, rng, picks))
        verdicts.append(judge.verdict_of(claim, judge.judge(claim, drawn)))
    return {short: verdicts.count(name) / repeats for name, short in SHORT.items()}


def of_facts(claim: Mapping[str, Any], members: Sequence[Member]) -> dict[str, dict[str, float]]:
    """Of an exact claim: all cases as they shall be; all but one."""
    a, b, ends = judge.region(claim["rule"])[0]
    good = next(x for x in (a, b) if math.isfinite(x))
    step = 0.01 * max(1.0, abs(good))
    good += 0.0 if ends else step * (1 if good == a else -1)
    wrong = a - step if math.isfinite(a) else b + step

    facts = [m.what for m in members if isinstance(m.what, Facts)]

    def verdict(refuted: int) -> dict[str, float]:
        given = []
        for i, (member, fact) in enumerate(zip(members, facts, strict=True)):
            cases = pd.Series(good, index=fact.cases.index)
            cases.iloc[: int(i == refuted)] = wrong
            given.append(replace(member, what=Facts(cases)))
        found = judge.verdict_of(claim, judge.judge(claim, given))
        return {short: float(found == name) for name, short in SHORT.items()}

    bad = [verdict(i) for i in range(len(members))]
    mean = {name: float(np.mean([one[name] for one in bad])) for name in bad[0]}
    return {"true": verdict(-1), "false": mean, "far_true": verdict(-1), "far_false": mean}


def rates(claim: Mapping[str, Any], members: Sequence[Member], repeats: int | None = None) -> dict[str, Any]:
    """One row of the table but for what names the claim."""
    whats = [p for m in members for p in (m.what.values() if isinstance(m.what, Mapping) else [m.what])]
    row: dict[str, Any] = {"members": len(members), "parts": len(whats)}
    if all(isinstance(what, Facts) for what in whats):
        found = of_facts(claim, members)
        row |= {"n": sum(len(what.cases) for what in whats if isinstance(what, Facts)), "repeats": 1}
    elif any(isinstance(what, Measured | Facts) for what in whats):
        return row | {"note": "ranges of timings, or facts beside samples: not tried"}
    else:
        slow = any(isinstance(what, Sample) and callable(what.contrast) for what in whats)
        times = repeats or (SLOW_REPEATS if slow or len(whats) > MANY else REPEATS)
        with mock.patch.object(stats, "DRAWS", SLOW_DRAWS):
            parts = sampled(claim, members)
            found = {
                k: simulated(claim, members, parts, k, min(times, FAR_REPEATS) if "far" in k else times) for k in KINDS
            }
        row |= {"n": min(p.source.n for one in parts for p in one.values()), "repeats": times}
    for kind in KINDS[:4]:
        row |= {f"{kind}_{name}": found.get(kind, {}).get(name, math.nan) for name in SHORT.values()}
    return row | summed(claim, found, row["repeats"])


def summed(claim: Mapping[str, Any], found: Mapping[str, Mapping[str, float]], repeats: int) -> dict[str, Any]:
    """What the rates of the five kinds come to: the larger rate of each wrong verdict, whether it is above 5% by more
    than chance, how often a medium effect is decided, whether the rule can hold and fail."""

    def most(name: str, kinds: Sequence[str]) -> float:
        return max((found[k][name] for k in kinds if found.get(k)), default=math.nan)

    at_bound = ["threshold"] if "no_difference" not in claim["rule"] else []  # a real difference, which may be found
    wrong = {
        "wrongly_reproduced": most("reproduced", ["false", "threshold", "one"]),
        "wrongly_not_reproduced": most("not_reproduced", ["true", *at_bound]),
    }
    chance = 2 * math.sqrt(WRONG * (1 - WRONG) / repeats)
    above = {f"{name}_above": bool(share > WRONG + chance) for name, share in wrong.items()}
    sides = [found[k][name] for k, name in (("true", "reproduced"), ("false", "not_reproduced")) if found.get(k)]
    far = {"can_hold": ("far_true", "reproduced"), "can_fail": ("far_false", "not_reproduced")}
    return {
        **wrong, **above, "decided": float(np.mean(sides)) if sides else math.nan,
        **{c: found.get(kind, {}).get(name, 0.0) > 0 for c, (kind, name) in far.items()},
    }  # fmt: skip


# ---- all claims


@contextmanager
def recorded() -> Iterator[list[Asked]]:
    """What `judge.verdicts` is asked in the meantime: members that can be tested, none where there are none."""
    asked: list[Asked] = []
    real = judge.verdicts

    def verdicts(claims: Any, members: Any, *rest: Any, **named: Any) -> pd.DataFrame:
        def listed(claim: Mapping[str, Any], reading: str) -> Any:
            asked.append((claim, reading, []))
            found = list(members(claim, reading))
            asked[-1] = claim, reading, [m for m in found if not isinstance(m, NotTestable)]
            return found

        return real(claims, listed, *rest, **named)

    with mock.patch.object(judge, "verdicts", verdicts):
        yield asked


def asked_of(chapter: str, results: Path) -> list[Asked]:
    """Claims of a chapter with their members, from stored rows: its cells as far as the one that judges."""
    with recorded() as asked:
        for cell in book.cells(chapter, {"results": str(results)}, lambda *_: None):
            if "claims.write(" in cell:
                break
    return asked


def table(chapter: str, asked: Sequence[Asked], processes: int = 2) -> pd.DataFrame:
    """Error rates of each claim and reading."""
    _ASKED[:] = asked
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        rows = pool.map(_row, range(len(asked)), chunksize=1)
    return pd.DataFrame(rows).assign(chapter=chapter)


_ASKED: list[Asked] = []  # what the processes inherit: members hold functions, which cannot be sent


def _row(i: int) -> dict[str, Any]:
    claim, reading, members = _ASKED[i]
    row = {"claim": claim["id"], "reading": reading, "rule": judge.rule_text(claim)}
    if not members:
        return row | {"note": "nothing to test in this run"}
    started = time.perf_counter()
    found = row | rates(claim, members)
    return found | {"seconds": time.perf_counter() - started}


@one_line_errors()
def main(
    results: Annotated[Path, typer.Option(help="stored rows of all chapters")] = DATA / "results",
    chapter: Annotated[list[str] | None, typer.Option(help="these alone; the rows of others stay")] = None,
    processes: Annotated[int, typer.Option()] = 2,
    out: Annotated[Path, typer.Option()] = DATA / "error_rates.csv",
) -> None:
    """Try every rule, write the table, and name the rules that err too often, cannot hold or cannot fail."""
    names = chapter or [name for name in book.chapters() if (DATA / "claims" / f"{name}.yml").is_file()]
    parts = [pd.read_csv(out)] if out.is_file() else []
    parts = [part[~part.chapter.isin(names)] for part in parts]
    for name in names:
        found = table(name, asked_of(name, results), processes)
        typer.echo(f"{name}: {len(found)} rules, {found.seconds.sum() / processes:.0f} s")
        parts.append(found)
    written = pd.concat(parts).reindex(columns=COLUMNS)
    with replaced(out) as aside:
        written.to_csv(aside, index=False, float_format="%.3g")
    for said, which in (
        ("wrongly reproduced in more than 5%", written.wrongly_reproduced_above.eq(True)),
        ("wrongly not reproduced in more than 5%", written.wrongly_not_reproduced_above.eq(True)),
        ("cannot hold", written.can_hold.eq(False)), ("cannot fail", written.can_fail.eq(False)),
    ):  # fmt: skip
        typer.echo(f"{said}: {', '.join(dict.fromkeys(written.claim[which])) or 'none'}")


if __name__ == "__main__":
    typer.run(main)
