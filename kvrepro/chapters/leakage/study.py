"""What the leakage chapter measures: means by system prompt, rankings, Pareto fronts, safe budgets.

A system prompt is a cluster: it counts once, and is resampled whole, so that the two requests, the rules and all
conditions of a prompt stay together.
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
from scipy.stats import rankdata

from kvrepro.chapters.leakage import experiment
from kvrepro.errors import InputError
from kvrepro.experiment import claims, stats
from kvrepro.experiment.judge import NotTestable
from kvrepro.experiment.stats import UNIT, Estimate

KEY = ["order", "policy", "variant", "reading", "ratio"]
MIDDLE = (0.3, 0.7)
FROM = 0.3  # figures 2 and 3 of the paper look at r from 0.3 to 0.9
LOW = 0.2  # the most that counts as a low ratio
ROOM = 0.05  # where neither of two measures exceeds this, there is nothing to compare
Series: TypeAlias = np.ndarray  # [1 + DRAWS]: the sample's value, then the resamples'


@lru_cache(maxsize=8)
def _weights(systems: int, seed: int = 42) -> np.ndarray:
    """[1 + DRAWS, systems]: every system once, then how often each was drawn."""
    drawn = np.random.default_rng(seed).multinomial(systems, np.full(systems, 1 / systems), size=stats.DRAWS)
    return np.concatenate([np.ones((1, systems)), drawn])


@dataclass(frozen=True)
class Means:
    """One measure in every cell: `shares` [systems, cells], mean over the rows of a system prompt, nan where it has
    none; `each`: how many rows that is. A system prompt counts once."""

    shares: np.ndarray
    columns: dict[tuple, int]
    each: float = 1

    @property
    def systems(self) -> int:
        return len(self.shares)

    def per(self, **cell) -> np.ndarray:
        """One cell, [systems]. Ratio 0 is the uncompressed cache, the same for every policy. Not run: NotTestable."""
        return self.shares[:, self._column(cell)]

    def mean(self, ratios: Iterable[float], **cell) -> np.ndarray:
        """Mean over ratios, [systems]; nan where one is missing."""
        return np.mean([self.per(ratio=ratio, **cell) for ratio in ratios], 0)

    def estimate(self, **cell) -> Estimate:
        """One cell's mean with its interval."""
        return stats.interval(self.per(**cell), bounds=UNIT, each=self.each)

    def at(self, **cell) -> Series:
        """One cell's mean in the sample and in resamples of whole system prompts; none of fewer than six."""
        values = self.per(**cell)
        known = np.isfinite(values)
        weights = _weights(self.systems)
        with np.errstate(invalid="ignore"):
            series = (weights @ np.where(known, values, 0)) / (weights @ known)
        return series if known.sum() >= stats.MIN_ITEMS else np.where(np.arange(len(series)) == 0, series, np.nan)

    def curve(self, ratios: Iterable[float], **cell) -> np.ndarray:
        """[1 + DRAWS, ratios]."""
        return np.stack([self.at(ratio=ratio, **cell) for ratio in ratios], 1)

    def count(self, **cell) -> int:
        """System prompts with a value in a cell."""
        return int(np.isfinite(self.per(**cell)).sum())

    def _column(self, cell: dict[str, Any]) -> int:
        cell = {"order": "normal", "variant": "default", "reading": "as_described"} | cell
        if not cell["ratio"]:
            cell |= {"policy": "full", "variant": "default", "reading": "as_described"}
        elif not experiment.differs(cell["policy"], cell["variant"]):
            cell["reading"] = "as_described"
        names = [*KEY, *[name for name in cell if name not in KEY]]
        key = tuple(cell[name] for name in names)
        if key not in self.columns:
            raise NotTestable("not run: " + ", ".join(f"{name} {value}" for name, value in cell.items()))
        return self.columns[key]

    def ratios(self, whole: bool = False, **cell) -> list[float]:
        """Ratios above 0 at which a policy's curve was run; `whole`: by every system prompt."""
        known = {key[KEY.index("ratio")] for key in self.columns}
        found = []
        for ratio in sorted(known - {0.0}):
            with suppress(NotTestable):
                if self.count(ratio=ratio, **cell) == self.systems or not whole:
                    found.append(ratio)
        if not found:
            raise NotTestable("not run: " + ", ".join(map(str, cell.values())))
        return found


def means(frame: pd.DataFrame, measure: str, *by: str) -> Means:
    """Means of a column over the rows of each cell (`KEY` and `by`) and `system`; nulls do not count."""
    here = frame[frame[measure].notna()]
    if here.empty:
        return Means(np.empty((0, 0)), {})
    groups = here.groupby([*KEY, *by, "system"])[measure].agg(["mean", "count"]).reset_index()
    keys = list(groups[[*KEY, *by]].itertuples(index=False, name=None))
    columns = {key: i for i, key in enumerate(dict.fromkeys(keys))}
    row = groups.system.rank(method="dense").astype(int).to_numpy() - 1
    values = np.full((row.max() + 1, len(columns)), np.nan)
    values[row, [columns[key] for key in keys]] = groups["mean"]
    return Means(values, columns, float(groups["count"].mean()))


def over_classes(m: Means) -> Means:
    """The mean over classes, the last part of each column's key, in every cell."""
    parts: dict[tuple, list[int]] = {}
    for key, i in m.columns.items():
        parts.setdefault(key[:-1], []).append(i)
    values = [mean_of(m.shares[:, some], 1) for some in parts.values()]
    return Means(np.stack(values, 1) if values else m.shares, {key: i for i, key in enumerate(parts)}, m.each)


def mean_of(values: np.ndarray, axis: int) -> np.ndarray:
    """The mean of what is known; nan where nothing is."""
    known = np.isfinite(values)
    counts = known.sum(axis)
    return np.divide(np.where(known, values, 0).sum(axis), counts, out=np.full(counts.shape, np.nan), where=counts > 0)


def interval(series: Series, systems: int) -> tuple[float, float, float]:
    """Value, low, high (95%) of a statistic of resampled system prompts (`stats.spread_of`)."""
    return stats.spread_of(float(series[0]), series[1:], systems).triple


@dataclass(frozen=True)
class Study:
    """All means of the chapter in one reading."""

    reading: str
    follow: Means  # of both orders
    leak: Means
    leak_defense: Means | None  # of the defense's own text
    classes: Means | None  # alone: following by class and number of rules
    kept: Means | None  # by part
    examples_follow: Means | None
    examples_leak: Means | None
    timing: pd.DataFrame | None
    by_item: pd.DataFrame | None  # alone: one row per instruction
    floor: float  # leakage of a refusal
    echo: float  # of an echo of the preamble alone

    def cell(self, **cell) -> dict[str, Any]:
        return {"reading": self.reading} | cell


def study(
    reading: str,
    main: pd.DataFrame,
    items: Sequence,
    *,
    alone: pd.DataFrame | None = None,
    kept: pd.DataFrame | None = None,
    examples: pd.DataFrame | None = None,
    timing: pd.DataFrame | None = None,
) -> Study:
    """A reading's means, from rows of `experiment.run` of `items` (main: both orders; alone: no defense; examples).

    Following is the mean over instructions as run, and over classes as described, of each system prompt.
    """
    if reading not in claims.READINGS:
        raise InputError(f"unknown reading {reading!r}: choose {' or '.join(claims.READINGS)}")
    run = reading == "as_run"
    failed = "missing" if run else "broken"
    measure = "tells_directive" if run else "tells_rules"
    scored = experiment.score(main, items, failed)
    measure = measure if scored[measure].notna().any() else "tells_directive"
    told = None if examples is None else experiment.score(examples, items, failed)
    each = None if alone is None else experiment.by_class(alone, items, failed)
    obeyed = experiment.by_class(main, items, failed)
    part = None
    if kept is not None and len(kept):
        chosen = kept[kept.part.isin(["directive", "outside" if run else "defense"])]
        part = means(chosen.assign(part=chosen.part.replace("outside", "defense")), "kept", "part")
    floor = experiment.floors([item for item in items if item.id in set(main[main.request == "leak"].item)])
    return Study(
        reading,
        means(obeyed, "passed") if run else over_classes(means(obeyed, "passed", "kind")),
        means(scored, measure),
        means(scored, "tells_defense"),
        None if each is None else means(each, "passed", "rules", "kind"),
        part,
        None if told is None else means(told, "followed"),
        None if told is None else means(told, "tells_directive"),
        timing,
        each,
        float(floor.loc["refusal", measure]),
        float(floor.loc["preamble", measure]),
    )


def studies(found: experiment.Found, reading: str = "both") -> list[Study]:
    """The chapter's runs in one reading or in both."""
    if reading not in ("both", *claims.READINGS):
        raise InputError(f"unknown reading {reading!r}: choose both, {' or '.join(claims.READINGS)}")
    rest = {"alone": found.alone, "kept": found.kept, "examples": found.examples, "timing": found.timing}
    chosen = claims.READINGS if reading == "both" else (reading,)
    return [study(one, found.main, found.items, **rest) for one in chosen]


# ---- pieces that figures and claims share


def middle(ratios: Iterable[float]) -> list[float]:
    found = [ratio for ratio in ratios if MIDDLE[0] <= ratio <= MIDDLE[1]]
    if not found:
        raise NotTestable(f"no ratio from {MIDDLE[0]} to {MIDDLE[1]} was run")
    return found


def rank_correlation(curve: np.ndarray, start: np.ndarray) -> np.ndarray:
    """Spearman's coefficient between two rankings of classes, over the last axis, average ranks for ties; nan where a
    ranking is constant. curve, start: [..., classes]."""
    x, y = (rankdata(one, axis=-1, nan_policy="omit") for one in (curve, start))
    x, y = x - mean_of(x, -1)[..., None], y - mean_of(y, -1)[..., None]
    size = np.sqrt(np.nansum(x**2, -1) * np.nansum(y**2, -1))
    return np.divide(np.nansum(x * y, -1), size, out=np.full(size.shape, np.nan), where=size > 1e-12)


def optimal(follow: np.ndarray, leak: np.ndarray, ties: bool = True) -> np.ndarray:
    """Which points no other beats, [..., points] -> bool.

    ties: as the paper words it, a better point must be better in both (more followed and less told). Without, as
    usual: better in one and no worse in the other.
    """
    more = follow[..., None, :] - follow[..., :, None]
    less = leak[..., :, None] - leak[..., None, :]
    if ties:
        return ~((more > 1e-9) & (less > 1e-9)).any(-1)
    return ~((more > -1e-9) & (less > -1e-9) & ((more > 1e-9) | (less > 1e-9))).any(-1)


def dial(s: Study, policy: str, order: str, where: str = "main") -> tuple[list[float], list[float], list[dict]]:
    """(settings, ratios, cells) of a policy between default (0) and fair (1), as far as they were run. As described in
    either reading: the public code has no dial."""
    follow = s.follow if where == "main" else s.examples_follow
    if follow is None:
        raise NotTestable("the study of labelled examples was not run")
    names = {0.0: "default", 1.0: "fair"}
    settings, found = [], []
    for x in LAMBDAS:
        cell: dict[str, Any] = {"policy": policy, "order": order, "variant": names.get(x, f"debias {x:g}")}
        cell["reading"] = "as_described"
        with suppress(NotTestable):
            found.append((cell, set(follow.ratios(**cell))))
            settings.append(x)
    if len(settings) < 3:
        raise NotTestable(f"no setting between default and fair was run for {policy}")
    return settings, sorted(set.intersection(*[ratios for _, ratios in found])), [cell for cell, _ in found]


def optimality(
    s: Study, policies: Sequence[str], orders: Sequence[str], where: str = "main", *, ties: bool = True
) -> tuple[dict[float, Series], int]:
    """Of each setting, the share of (ratio, order, policy) cells in which it is Pareto-optimal; and their number."""
    follow, leak = (s.follow, s.leak) if where == "main" else (s.examples_follow, s.examples_leak)
    found, known = [], []
    for name, order in product(policies, orders):
        settings, ratios, cells = dial(s, name, order, where)
        known.append(tuple(settings))
        for ratio in ratios:
            obeyed, told = (np.stack([m.at(ratio=ratio, **cell) for cell in cells], -1) for m in (follow, leak))
            lost = ~np.isfinite(obeyed + told).all(-1, keepdims=True)
            found.append(np.where(lost, np.nan, optimal(obeyed, told, ties)))
    if len(set(known)) > 1:
        raise NotTestable(f"the dial has other settings under {policies[0]} than under {policies[-1]}")
    share = np.mean(found, 0)
    return {x: share[:, i] for i, x in enumerate(known[0])}, len(found)


def safe_budget(s: Study, **cell) -> Series:
    """Smallest share of the system turn such that there, and at every larger share that was run, no more leaks than
    the uncompressed model's upper limit; 1 if no compression that was run is safe. At ratios that every prompt met."""
    ratios = s.leak.ratios(True, **cell)
    curve = s.leak.curve(ratios, **cell)
    start = s.leak.estimate(ratio=0.0, **cell)
    limit = start.value if np.isnan(start.high) else start.high
    safe = np.cumprod(curve <= limit + 1e-9, 1).astype(bool)
    found = np.where(safe, 1 - np.asarray(ratios), 1.0).min(1)
    return np.where(np.isnan(curve).any(1), np.nan, found)


def follows_there(s: Study, share: float, **cell) -> bool:
    """Whether a leak-safe budget is worth something: at it, at least half of what is followed uncompressed still is."""
    ratio = round(1 - share, 6)
    return bool(s.follow.at(ratio=ratio, **cell)[0] >= 0.5 * s.follow.at(ratio=0.0, **cell)[0])


def bias(s: Study, ratios: Iterable[float], **cell) -> np.ndarray:
    """Keep rate of the directive minus that of the defense, mean over the ratios, [systems]."""
    if s.kept is None:
        raise NotTestable("keep rates were not measured")
    directive, defense = (s.kept.mean(ratios, part=part, **cell) for part in experiment.PARTS[::-1])
    return directive - defense


def class_curves(
    s: Study, rules: str, ratios: Iterable[float], few: bool = True, **cell
) -> tuple[list[str], np.ndarray]:
    """Classes, and their accuracies [1 + DRAWS, ratios, classes], in prompts with one rule or several; without `few`
    only of classes that six prompts or more hold."""
    if s.classes is None:
        raise NotTestable("prompts without a defense were not run")
    kinds = sorted({key[-1] for key in s.classes.columns if key[-2] == rules})
    ratios, none = list(ratios), np.full(1 + stats.DRAWS, np.nan)
    curves = np.stack([np.stack([none] * len(kinds), -1)] * len(ratios), 1)
    for (i, ratio), (j, kind) in product(enumerate(ratios), enumerate(kinds)):
        key = {"order": "alone", "ratio": ratio, "rules": rules, "kind": kind} | cell
        with suppress(NotTestable):  # every prompt with this class failed there
            if few or s.classes.count(**key) >= stats.MIN_ITEMS:
                curves[:, i, j] = s.classes.at(**key)
    return kinds, curves


def range_of(accuracy: np.ndarray) -> np.ndarray:
    """Largest minus smallest over the last axis; nan where there is none."""
    high, low = (np.where(np.isnan(accuracy), fill, accuracy) for fill in (-np.inf, np.inf))
    spread = high.max(-1) - low.min(-1)
    return np.where(np.isfinite(spread), spread, np.nan)


def rank_curves(s: Study, rules: str, ratios: Iterable[float], **cell) -> np.ndarray:
    """Rank correlation of the classes' accuracies with the uncompressed ones, [1 + DRAWS, ratios]."""
    start = class_curves(s, rules, [0.0], few=False, **cell)[1]
    return rank_correlation(class_curves(s, rules, ratios, few=False, **cell)[1], start)


def rank_drift(s: Study, rules: str, ratios: Sequence[float], **cell) -> tuple[float, np.ndarray]:
    """(start, coefficients [1 + DRAWS, ratios]): rank correlation with the first ratio, from 0, at which the classes
    are not all followed equally well; `NotTestable` where they always are."""
    for start in (0.0, *ratios):
        order = class_curves(s, rules, [start], few=False, **cell)[1]
        found = rank_correlation(class_curves(s, rules, ratios, few=False, **cell)[1], order)
        if np.isfinite(found[0]).any():
            found[:, [ratio < start for ratio in ratios]] = np.nan
            return start, found
    raise NotTestable("at every ratio all classes are followed equally well")


LAMBDAS = (0.0, *experiment.LAMBDAS, 1.0)
DIALS = {"main": (["streaming_llm"], experiment.ORDERS), "examples": (["snapkv", "tova"], ("normal",))}
