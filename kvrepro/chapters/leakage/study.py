"""Statistics of the leakage chapter: means by system prompt, rankings, Pareto fronts, safe budgets.

A system prompt counts once and is resampled whole: its two requests, its rules and all its conditions stay together.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import product
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
from scipy.stats import rankdata

from kvrepro.chapters.leakage import cells, scores
from kvrepro.chapters.leakage.prompts import ORDERS, PARTS
from kvrepro.chapters.leakage.runs import ChapterRows
from kvrepro.chapters.leakage.scores import CELL
from kvrepro.experiment import claims, stats
from kvrepro.experiment.judge import NotTestable
from kvrepro.experiment.stats import UNIT, Estimate

MIDDLE = (0.3, 0.7)
FROM = 0.3  # figures 2 and 3 of the paper show r from 0.3 to 0.9
LOW = 0.2  # greatest ratio that counts as low
ROOM = 0.05  # if neither of two measures exceeds this, there is nothing to compare
LAMBDAS = (0.0, *cells.LAMBDAS, 1.0)
DIALS = {"main": (["streaming_llm"], ORDERS), "examples": (["snapkv", "tova"], ("normal",))}
TABLES = {"main": "pitfalls_t01_debias_ifeval.csv", "examples": "pitfalls_t02_debias_longbench.csv"}  # as printed
NAMES = {  # words of the data -> words of the book, by column
    "order": {"normal": "defense first", "flipped": "directive first"},
    "variant": {"opening": "first sentence", "whole": "whole defense", "ends": "both ends"},
    "rules": {"single": "one rule", "multi": "several rules"},
    "measure": {"followed": "following", "told": "leakage", "tells_defense": "leakage of\nthe defense"},
    "marks": {"hand": "defense, directive", "rules": "every rule", "sentences": "sentences found", "turns": "one span"},
}
Series: TypeAlias = np.ndarray  # [1 + DRAWS]: the sample's value, then the resamples'


@lru_cache(maxsize=8)
def _weights(systems: int, seed: int = 42) -> np.ndarray:
    """[1 + DRAWS, systems]: a row of ones, then for each resample how often each system was drawn."""
    drawn = np.random.default_rng(seed).multinomial(systems, np.full(systems, 1 / systems), size=stats.DRAWS)
    return np.concatenate([np.ones((1, systems)), drawn])


@dataclass(frozen=True)
class Means:
    """One measure in every cell. shares: cell -> [systems], means over the rows of a system prompt, nan without rows.
    each: how many scored things make one share."""

    shares: dict[tuple, np.ndarray]
    each: float = 1

    @property
    def systems(self) -> int:
        return len(next(iter(self.shares.values()), ()))

    def per(self, **cell) -> np.ndarray:
        """Shares of one cell, [systems]; ratio 0 is the uncompressed cache. Raises NotTestable if it was not run."""
        cell = {"order": "normal", "variant": "default"} | cell
        key = tuple(cell[name] for name in [*CELL, *[name for name in cell if name not in CELL]])
        if key not in self.shares:
            raise NotTestable("not run: " + ", ".join(f"{name} {value}" for name, value in cell.items()))
        return self.shares[key]

    @cached_property
    def bounds(self) -> tuple[float, float]:
        """The ends of the shares: 0 and 1, or more where a prompt of many rules counts more than others."""
        return 0.0, max([1.0, *(float(np.nanmax(values)) for values in self.shares.values())])

    def mean(self, ratios: Iterable[float], **cell) -> np.ndarray:
        """Mean over ratios, [systems]; nan if a ratio is missing."""
        return np.mean([self.per(ratio=ratio, **cell) for ratio in ratios], 0)

    def estimate(self, **cell) -> Estimate:
        """One cell's mean with its interval."""
        return stats.interval(self.per(**cell), bounds=UNIT, each=self.each)

    def uncompressed(self) -> Estimate:
        """The mean without compression, with its interval, the defense first."""
        for order, policy, variant, ratio in self.shares:
            if order == "normal" and not ratio:
                return self.estimate(policy=policy, variant=variant, ratio=ratio)
        raise NotTestable("nothing was answered without compression")

    def at(self, **cell) -> Series:
        """One cell's mean in the sample and in resamples of whole system prompts (nan for fewer than six prompts)."""
        values = self.per(**cell)
        finite = np.isfinite(values)
        weights = _weights(self.systems)
        with np.errstate(invalid="ignore"):
            series = (weights @ np.where(finite, values, 0)) / (weights @ finite)
        return series if finite.sum() >= stats.MIN_ITEMS else np.where(np.arange(len(series)) == 0, series, np.nan)

    def count(self, **cell) -> int:
        """Number of system prompts with a value in a cell."""
        return int(np.isfinite(self.per(**cell)).sum())

    def ratios(self, whole: bool = False, **cell) -> list[float]:
        """Ratios above 0 at which a policy's curve was run; whole: for every system prompt."""
        ratios = []
        for ratio in sorted({key[CELL.index("ratio")] for key in self.shares} - {0.0}):
            with suppress(NotTestable):
                if self.count(ratio=ratio, **cell) == self.systems or not whole:
                    ratios.append(ratio)
        if not ratios:
            raise NotTestable("not run: " + ", ".join(map(str, cell.values())))
        return ratios


def means(frame: pd.DataFrame, measure: str, *more_columns: str, each: float = 1) -> Means:
    """Means of a column over the rows of each cell (`CELL` and `more_columns`) and `system`; nulls do not count."""
    valued = frame[frame[measure].notna()] if len(frame) else frame
    if valued.empty:
        return Means({})
    names = [*CELL, *more_columns]
    order = list(dict.fromkeys(valued[names].itertuples(index=False, name=None)))
    wide = valued.pivot_table(index="system", columns=names, values=measure)[order]
    return Means(dict(zip(wide.columns, wide.to_numpy().T, strict=True)), each)


def mean_of(values: np.ndarray, axis: int) -> np.ndarray:
    """Mean of the finite values along an axis; nan where there are none."""
    finite = np.isfinite(values)
    counts = finite.sum(axis)
    return np.divide(np.where(finite, values, 0).sum(axis), counts, out=np.full(counts.shape, np.nan), where=counts > 0)


def interval(series: Series, systems: int, bounds: tuple[float, float] = stats.ANY) -> tuple[float, ...]:
    """Value, low, high (95%) of a statistic of resampled system prompts (`stats.spread_of`), within its bounds."""
    return stats.spread_of(float(series[0]), series[1:], systems, limits=bounds).triple


# ---------------------------------------------------------------- one reading of all rows


@dataclass(frozen=True)
class Study:
    """The rows of one reading (one per answer, keep rate or instruction), and the means of each measure."""

    reading: str
    answers: pd.DataFrame  # of the main study: columns of a cell, system, followed, following, told, tells_defense
    kept: pd.DataFrame = field(default_factory=pd.DataFrame)  # directive and defense, by layer
    classes: pd.DataFrame = field(default_factory=pd.DataFrame)  # without a defense: one row per instruction
    examples: pd.DataFrame = field(default_factory=pd.DataFrame)
    dials: Mapping[str, pd.DataFrame] = field(default_factory=dict)  # main, examples: as described, in both readings
    timing: pd.DataFrame = field(default_factory=pd.DataFrame)
    instructions: float = 1  # mean number of instructions of a system prompt; 1 as described, where classes are counted
    floor: float = 0.0  # leakage of a refusal
    words: int = 0  # of labelled examples in English, at least
    model: str = ""
    other: "Study | None" = None  # of a second model, in the same reading

    @cached_property
    def follow(self) -> Means:
        """Weighted as the claims are judged (`scores.following`)."""
        return means(self.answers, "following", each=self.instructions)

    @cached_property
    def followed(self) -> Means:
        """Unweighted: every system prompt counts alike."""
        return means(self.answers, "followed", each=self.instructions)

    @cached_property
    def leak(self) -> Means:
        return means(self.answers, "told")

    @cached_property
    def leak_defense(self) -> Means:
        return means(self.answers, "tells_defense")

    @cached_property
    def by_class(self) -> Means:
        return means(self.classes, "passed", "rules", "kind")

    @cached_property
    def by_part(self) -> Means:
        return means(self.kept, "kept", "part")


def study(chapter: ChapterRows, reading: str) -> Study:
    """The chapter's rows in one reading."""
    as_run = reading == "as_run"
    main = scores.in_reading(chapter.main, chapter.items, reading)
    main = main.merge(scores.following(chapter.main, chapter.items, reading), how="left")
    answered = {"main": main}
    if len(chapter.examples):
        answered["examples"] = scores.in_reading(chapter.examples, chapter.items, reading)
    floor = scores.floors(chapter.of(chapter.main, request="leak")).loc["refusal"]
    floor_told = floor.tells_directive if as_run or np.isnan(floor.tells_rules) else floor.tells_rules
    kept = scores.cells_of(scores.keep_rates(chapter.main), reading)
    kept = kept[kept.part.isin(["directive", "outside" if as_run else "defense"])]
    kept = kept.replace({"part": {"outside": "defense"}})
    by_class = scores.by_class(chapter.alone, chapter.items, "missing" if as_run else "broken")
    of_reading = {name: scores.cells_of(frame, reading) for name, frame in answered.items()}
    return Study(
        reading,
        of_reading["main"],
        kept,
        scores.cells_of(by_class, reading),
        of_reading.get("examples", pd.DataFrame()),
        {name: scores.cells_of(frame, "as_described") for name, frame in answered.items()},
        chapter.timing,
        float(main.asked[main.followed.notna()].mean()) if as_run else 1.0,
        floor=float(floor_told),
        words=max(item.meta.get("words", 0) for item in chapter.items),
        model=chapter.model,
    )


def studies(chapter: ChapterRows, reading: str = "both", other: ChapterRows | None = None) -> list[Study]:
    """The chapter's rows in one reading or in both, with those of another model if it is given."""
    readings = claims.READINGS if reading == "both" else (reading,)
    return [replace(study(chapter, name), other=study(other, name) if other is not None else None) for name in readings]


# ---------------------------------------------------------------- pieces that figures and claims share


def middle(ratios: Iterable[float]) -> list[float]:
    """The ratios from 0.3 to 0.7."""
    inner = [ratio for ratio in ratios if MIDDLE[0] <= ratio <= MIDDLE[1]]
    if not inner:
        raise NotTestable(f"no ratio from {MIDDLE[0]} to {MIDDLE[1]} was run")
    return inner


def rank_correlation(curve: np.ndarray, start: np.ndarray) -> np.ndarray:
    """Spearman's coefficient between two rankings of classes, over the last axis, average ranks for ties; nan where a
    ranking is constant. curve, start: [..., classes]."""
    x, y = (rankdata(values, axis=-1, nan_policy="omit") for values in (curve, start))
    x, y = x - mean_of(x, -1)[..., None], y - mean_of(y, -1)[..., None]
    size = np.sqrt(np.nansum(x**2, -1) * np.nansum(y**2, -1))
    return np.divide(np.nansum(x * y, -1), size, out=np.full(size.shape, np.nan), where=size > 1e-12)


def optimal(follow: np.ndarray, leak: np.ndarray, both: bool = False) -> np.ndarray:
    """Mask of the points that no other beats, [..., points], by being better in one measure (more followed, or less
    told) and no worse in the other. both: by being better in both, as the paper words it."""
    more = follow[..., None, :] - follow[..., :, None]
    less = leak[..., :, None] - leak[..., None, :]
    if both:
        return ~((more > 1e-9) & (less > 1e-9)).any(-1)
    return ~((more > -1e-9) & (less > -1e-9) & ((more > 1e-9) | (less > 1e-9))).any(-1)


@dataclass(frozen=True)
class Dial:
    """A policy's settings between default (0) and fair (1) that were run, with what is followed and told."""

    settings: list[float]
    ratios: list[float]
    cells: list[dict[str, Any]]
    follow: Means
    leak: Means


def dial(s: Study, policy: str, order: str, where: str = "main") -> Dial:
    """The dial of a policy; as described in both readings, since the public code has none."""
    if where not in s.dials:
        raise NotTestable("the study of labelled examples was not run")
    follow, leak = (means(s.dials[where], name) for name in ("followed", "told"))
    names = {0.0: "default", 1.0: "fair"}
    settings, ratios, dial_cells = [], [], []
    for x in LAMBDAS:
        cell: dict[str, Any] = {"policy": policy, "order": order, "variant": names.get(x, f"debias {x:g}")}
        with suppress(NotTestable):
            ratios.append(set(follow.ratios(**cell)))
            settings.append(x)
            dial_cells.append(cell)
    if len(settings) < 3:
        raise NotTestable(f"no setting between default and fair was run for {policy}")
    return Dial(settings, sorted(set.intersection(*ratios)), dial_cells, follow, leak)


def optimality(
    s: Study, policies: Sequence[str], orders: Sequence[str], where: str = "main", *, both: bool = False,
    start: bool = True,
) -> tuple[dict[float, Series], int]:  # fmt: skip
    """The share of (ratio, order, policy) cells in which each setting is Pareto-optimal, and the number of cells. both:
    as in `optimal`. start: count ratio 0 as well, as the paper does; all settings are the same there."""
    optimal_cells, settings = [], []
    for name, order in product(policies, orders):
        d = dial(s, name, order, where)
        settings.append(tuple(d.settings))
        for ratio in [0.0, *d.ratios] if start else d.ratios:
            followed, leaked = (
                np.stack([m.at(ratio=ratio, **cell) for cell in d.cells], -1) for m in (d.follow, d.leak)
            )
            lost = ~np.isfinite(followed + leaked).all(-1, keepdims=True)
            optimal_cells.append(np.where(lost, np.nan, optimal(followed, leaked, both)))
    if len(set(settings)) > 1:
        raise NotTestable(f"the dial has other settings under {policies[0]} than under {policies[-1]}")
    share = np.mean(optimal_cells, 0)
    return {x: share[:, i] for i, x in enumerate(settings[0])}, len(optimal_cells)


def safe_budget(s: Study, **cell) -> Series:
    """Smallest kept share of the system turn at which, and at every larger share that was run, no more leaks than the
    upper limit of the uncompressed model's interval; 1 if no compression is safe. Of ratios that every prompt met."""
    ratios = s.leak.ratios(True, **cell)
    curve = np.stack([s.leak.at(ratio=ratio, **cell) for ratio in ratios], 1)
    start = s.leak.estimate(ratio=0.0, **cell)
    limit = start.value if np.isnan(start.high) else start.high
    safe = np.cumprod(curve <= limit + 1e-9, 1).astype(bool)
    budgets = np.where(safe, 1 - np.asarray(ratios), 1.0).min(1)
    return np.where(np.isnan(curve).any(1), np.nan, budgets)


def bias(s: Study, ratios: Iterable[float], **cell) -> np.ndarray:
    """Keep rate of the directive minus that of the defense, means over the ratios, [systems]."""
    directive, defense = (s.by_part.mean(ratios, part=part, **cell) for part in PARTS[::-1])
    return directive - defense


def class_curves(s: Study, rules: str, ratios: Iterable[float], **cell) -> np.ndarray:
    """Accuracies of the classes, [1 + DRAWS, ratios, classes], in prompts with one rule or several; nan for classes
    that fewer than six prompts hold."""
    kinds = sorted({key[-1] for key in s.by_class.shares if key[-2] == rules})
    ratios = list(ratios)
    curves = np.full((1 + stats.DRAWS, len(ratios), len(kinds)), np.nan)
    for (i, ratio), (j, kind) in product(enumerate(ratios), enumerate(kinds)):
        key = {"order": "alone", "ratio": ratio, "rules": rules, "kind": kind} | cell
        with suppress(NotTestable):  # every prompt with this class failed there
            if s.by_class.count(**key) >= stats.MIN_ITEMS:
                curves[:, i, j] = s.by_class.at(**key)
    return curves


def rank_curves(s: Study, rules: str, ratios: Iterable[float], **cell) -> np.ndarray:
    """Rank correlation of the classes' accuracies with the uncompressed ones, [1 + DRAWS, ratios]."""
    return rank_correlation(class_curves(s, rules, ratios, **cell), class_curves(s, rules, [0.0], **cell))


def rank_drift(s: Study, rules: str, ratios: Sequence[float], **cell) -> tuple[float, np.ndarray]:
    """(start, coefficients [1 + DRAWS, ratios]): rank correlation with the first ratio, from 0 on, at which the classes
    are not all followed equally well. Raises `NotTestable` if they always are."""
    curves = class_curves(s, rules, ratios, **cell)
    for start in (0.0, *ratios):
        correlations = rank_correlation(curves, class_curves(s, rules, [start], **cell))
        if np.isfinite(correlations[0]).any():
            correlations[:, [ratio < start for ratio in ratios]] = np.nan
            return start, correlations
    raise NotTestable("at every ratio all classes are followed equally well")


# ---------------------------------------------------------------- tables of resampled statistics, for the notebook


def rankings(s: Study) -> pd.DataFrame:
    """Prompts without a defense, by policy, number of rules and ratio: mean accuracy, and rank correlation of the
    classes with the first ratio at which they differ. Columns measure, policy, rules, ratio, value, low, high."""
    rows, systems = [], s.by_class.systems
    for name, rules in product(dict.fromkeys(key[1] for key in s.by_class.shares), ("single", "multi")):
        ratios = sorted({key[3] for key in s.by_class.shares if key[1] == name})
        curves = class_curves(s, rules, ratios, policy=name)
        curves_by_measure = {"mean accuracy": mean_of(curves, -1)}
        with suppress(NotTestable):
            curves_by_measure["rank correlation"] = rank_drift(s, rules, ratios, policy=name)[1]
        rows += [
            (measure, name, rules, ratio, *interval(column, systems, (-1, 1) if "rank" in measure else UNIT))
            for measure, series in curves_by_measure.items()
            for ratio, column in zip(ratios, series.T, strict=True)
        ]
    return pd.DataFrame(rows, columns=["measure", "policy", "rules", "ratio", "value", "low", "high"])


def forgotten_first(means: pd.DataFrame) -> pd.DataFrame:
    """Which part of the system prompt a policy forgets first as more is dropped. The directive is forgotten when less
    than half of the rules are followed, the defense when more than half are told. What is so without compression was
    not forgotten: such a policy is left out. Columns order, policy, part ("directive", "defense", "both", "neither").
    means: columns measure ("following", "leakage"), order, policy, ratio, value.
    """
    following, leakage = (means[means.measure == name] for name in ("following", "leakage"))
    lost = {"directive": following[following.value < 0.5], "defense": leakage[leakage.value > 0.5]}
    at = {part: rows.groupby(["order", "policy"]).ratio.min() for part, rows in lost.items()}
    pairs = means[["order", "policy"]].drop_duplicates().reset_index(drop=True)
    first = pd.DataFrame({part: pairs.join(ratio, on=["order", "policy"]).ratio for part, ratio in at.items()})
    first = first.fillna(np.inf)
    part = np.select(
        [first.directive < first.defense, first.defense < first.directive, np.isinf(first.directive)],
        ["directive", "defense", "neither"],
        "both",
    )
    return pairs.assign(part=part)[first.min(axis=1) > 0].reset_index(drop=True)


def by_model(s: Study) -> pd.DataFrame:
    """The default of every policy by model and ratio, the defense first: following, leakage, and bias (keep rate of the
    directive minus that of the defense); and, of prompts without a defense, the rank correlation of the classes.
    Columns model, measure, policy, ratio, value, low, high."""
    rows, ranks = [], []
    names = ["model", "measure", "policy", "ratio", "value", "low", "high"]
    for of_model in (study for study in (s, s.other) if study is not None):
        parts = {"following": of_model.followed, "leakage": of_model.leak}
        policies, ratios = dict.fromkeys(of_model.answers.policy), sorted({0.0, *of_model.answers.ratio})
        for name, measure, ratio in product(policies, (*parts, "bias"), ratios):
            with suppress(NotTestable):  # not run, or no part of it survived
                if measure == "bias":
                    estimate = stats.interval(bias(of_model, [ratio], policy=name), bounds=None)
                else:
                    estimate = parts[measure].estimate(policy=name, ratio=ratio)
                rows.append((of_model.model, measure, name, ratio, *estimate.triple))
        ranked = rankings(of_model).assign(model=of_model.model)
        ranks.append(ranked.query("measure == 'rank correlation' and rules == 'multi'")[names])
    return pd.concat([pd.DataFrame(rows, columns=names), *ranks], ignore_index=True)


def fronts(s: Study) -> pd.DataFrame:
    """What is followed and told at every setting of every dial. Columns order, policy, ratio, setting, best (no other
    is better in one and as good in the other), and followed and told with their intervals."""
    rows = []
    for policy, order in product(dict.fromkeys(s.answers.policy), ORDERS):
        with suppress(NotTestable):
            d = dial(s, policy, order)
            for ratio in d.ratios:
                leaked, followed = ([m.estimate(ratio=ratio, **cell) for cell in d.cells] for m in (d.leak, d.follow))
                best = optimal(*(np.array([e.value for e in side]) for side in (followed, leaked)))
                rows += [
                    (order, policy, ratio, x, bool(best[i]), *followed[i].triple, *leaked[i].triple)
                    for i, x in enumerate(d.settings)
                ]
    sides = [f"{side}{end}" for side in ("followed", "told") for end in ("", "_low", "_high")]
    return pd.DataFrame(rows, columns=["order", "policy", "ratio", "setting", "best", *sides])


def optimal_shares(studies: Sequence[Study]) -> pd.DataFrame:
    """How often each setting is Pareto-optimal, in the usual sense, in the paper's wording and as printed, for
    instructions (StreamingLLM, both orders) and labelled examples (SnapKV and TOVA, defense first). Columns study,
    source, reading, setting, cells, value, low, high."""
    names = {"main": "instructions", "examples": "labelled examples"}
    wordings = {False: "here, by the usual definition", True: "here, by the paper's wording"}
    rows: list[tuple] = []
    for where, file in TABLES.items():
        for x in LAMBDAS:
            cell = {"file": file, "where": {"metric": f"avg optimality %, lambda={x:g}"}}
            rows.append((names[where], "printed", "", x, 0, claims.paper_values(cell)[0] / 100, np.nan, np.nan))
        for s, (both, wording) in product(studies, wordings.items()):
            with suppress(NotTestable):
                share, count = optimality(s, *DIALS[where], where, both=both)
                n = s.dials[where].system.nunique()
                labels = (names[where], wording, s.reading)
                rows += [(*labels, x, count, *interval(series, n, UNIT)) for x, series in share.items()]
    return pd.DataFrame(rows, columns=["study", "source", "reading", "setting", "cells", "value", "low", "high"])


def safe_budgets(s: Study) -> pd.DataFrame:
    """Leak-safe budgets (`safe_budget`) by order, policy and variant, of curves with two ratios or more. Columns order,
    policy, variant, value, low, high, following (at that budget), follows, usable.

    follows: is at least half of what is followed uncompressed still followed at that budget? usable: the smallest
    budget, not below the safe one, for which this holds at it and at all larger ones; nan if only the whole does, or
    if nothing is followed uncompressed.
    """
    rows = []
    for order, policy, variant in dict.fromkeys(key[:3] for key in s.leak.shares):
        cell = {"order": order, "policy": policy, "variant": variant}
        with suppress(NotTestable):
            if len(s.leak.ratios(True, **cell)) > 1:
                series = safe_budget(s, **cell)
                most = round(1 - float(series[0]), 6)  # the share that may be dropped before more is told
                dropped = [r for r in (0.0, *s.leak.ratios(True, **cell)) if r < most] + [most]
                following = [s.followed.at(ratio=r, **cell)[0] for r in dropped]
                enough = [bool(share >= 0.5 * following[0]) for share in following]
                last = dropped[int(np.cumprod(enough).sum()) - 1]
                ends = interval(series, s.leak.systems, UNIT)
                rows.append(
                    (*cell.values(), *ends, following[-1], enough[-1], 1 - last if last and following[0] else np.nan)
                )
    names = ["order", "policy", "variant", "value", "low", "high", "following", "follows", "usable"]
    return pd.DataFrame(rows, columns=names)
