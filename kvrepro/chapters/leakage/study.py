"""What the leakage chapter concludes: curves with intervals, rankings, Pareto fronts, safe budgets, verdicts.

Every number is a function of cell means, and every interval comes from the same resampled system prompts: whole prompts
are drawn, so that the two requests, the rules and all conditions of a prompt stay together.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
from scipy.stats import kruskal, rankdata

from kvrepro.chapters.leakage import experiment
from kvrepro.errors import InputError
from kvrepro.experiment import claims_before as claims
from kvrepro.experiment import stats
from kvrepro.experiment.claims_before import Missing

DRAWS = 2_000
KEY = ["order", "policy", "variant", "reading", "ratio"]
MIDDLE = (0.3, 0.7)
FROM = 0.3  # figures 2 and 3 of the paper look at r from 0.3 to 0.9
LOW = 0.2  # the most that counts as a low ratio
ROOM = 0.05  # where neither of two measures exceeds this, there is nothing to compare
Series: TypeAlias = np.ndarray  # [1 + DRAWS]: the sample's value, then the resamples'


@dataclass(frozen=True)
class Means:
    """Means of one measure in every cell: `draws` [1 + DRAWS, cells], row 0 the sample's own; `count` [cells], system
    prompts with a value there. A cell of fewer than six has no draws: no interval comes of it."""

    draws: np.ndarray
    columns: dict[tuple, int]
    systems: int
    count: np.ndarray

    def at(self, **cell) -> Series:
        """One cell's mean. Ratio 0 is the uncompressed cache, the same for every policy. Not run: `Missing`."""
        return self.column(self._column(cell))

    def column(self, i: int) -> Series:
        series = self.draws[:, i]
        return series if self.count[i] >= claims.MIN_ITEMS else np.where(np.arange(len(series)) == 0, series, np.nan)

    def _column(self, cell: dict[str, Any]) -> int:
        cell = {"order": "normal", "variant": "default", "reading": "as_described"} | cell
        if not cell["ratio"]:
            cell |= {"policy": "full", "variant": "default", "reading": "as_described"}
        elif not experiment.differs(cell["policy"], cell["variant"]):
            cell["reading"] = "as_described"
        names = [*KEY, *[name for name in cell if name not in KEY]]
        key = tuple(cell[name] for name in names)
        if key not in self.columns:
            raise Missing("not run: " + ", ".join(f"{name} {value}" for name, value in cell.items()))
        return self.columns[key]

    def ratios(self, whole: bool = False, **cell) -> list[float]:
        """Ratios above 0 at which a policy's curve was run; `whole`: by every system prompt."""
        known = {key[KEY.index("ratio")] for key in self.columns}
        found = []
        for ratio in sorted(known - {0.0}):
            with suppress(Missing):
                if self.count[self._column({"ratio": ratio} | cell)] == self.systems or not whole:
                    found.append(ratio)
        if not found:
            raise Missing("not run: " + ", ".join(map(str, cell.values())))
        return found

    def curve(self, ratios: Iterable[float], **cell) -> np.ndarray:
        """[1 + DRAWS, ratios]."""
        return np.stack([self.at(ratio=ratio, **cell) for ratio in ratios], 1)


def means(frame: pd.DataFrame, measure: str, *by: str, seed: int = 42) -> Means:
    """Means of a column over the rows of each cell (`KEY` and `by`), resampled by `system`; nulls do not count."""
    here = frame[frame[measure].notna()]
    if here.empty:
        return Means(np.empty((1 + DRAWS, 0)), {}, 0, np.empty(0, int))
    groups = here.groupby([*KEY, *by, "system"])[measure].agg(["sum", "count"]).reset_index()
    columns = {key: i for i, key in enumerate(dict.fromkeys(groups[[*KEY, *by]].itertuples(index=False, name=None)))}
    column = [columns[key] for key in groups[[*KEY, *by]].itertuples(index=False, name=None)]
    row = groups.system.rank(method="dense").astype(int).to_numpy() - 1
    n = row.max() + 1
    sums, counts = np.zeros((n, len(columns))), np.zeros((n, len(columns)))
    sums[row, column], counts[row, column] = groups["sum"], groups["count"]
    weights = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=DRAWS)
    weights = np.concatenate([np.ones((1, n)), weights])
    with np.errstate(invalid="ignore"):
        values = (weights @ sums) / (weights @ counts)
    return Means(values, columns, n, (counts > 0).sum(0))


def over_classes(m: Means, pooled: Means) -> Means:
    """The mean over classes, the last part of each column's key, in every cell; `pooled` knows the system prompts."""
    parts: dict[tuple, list[int]] = {}
    for key, i in m.columns.items():
        parts.setdefault(key[:-1], []).append(i)
    values = [mean_of(m.draws[:, some], 1) for some in parts.values()]
    draws = np.stack(values, 1) if values else m.draws
    count = np.array([pooled.count[pooled.columns[key]] for key in parts], int)
    return Means(draws, {key: i for i, key in enumerate(parts)}, m.systems, count)


def mean_of(values: np.ndarray, axis: int) -> np.ndarray:
    """The mean of what is known; nan where nothing is."""
    known = np.isfinite(values)
    counts = known.sum(axis)
    return np.divide(np.where(known, values, 0).sum(axis), counts, out=np.full(counts.shape, np.nan), where=counts > 0)


def interval(series: Series) -> tuple[float, float, float]:
    """Value, low, high (95%); no interval where fewer than half of the resamples have a value."""
    known = series[1:][np.isfinite(series[1:])]
    if 2 * len(known) < len(series) - 1 or not np.isfinite(series[0]):
        return float(series[0]), np.nan, np.nan
    low, high = np.percentile(known, [2.5, 97.5])
    return float(series[0]), float(low), float(high)


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

    Following is pooled over instructions as run, and the mean over classes as described.
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
    pooled = means(obeyed, "passed")
    part = None
    if kept is not None and len(kept):
        chosen = kept[kept.part.isin(["directive", "outside" if run else "defense"])]
        part = means(chosen.assign(part=chosen.part.replace("outside", "defense")), "kept", "part")
    floor = experiment.floors([item for item in items if item.id in set(main[main.request == "leak"].item)])
    return Study(
        reading,
        pooled if run else over_classes(means(obeyed, "passed", "kind"), pooled),
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
        raise Missing(f"no ratio from {MIDDLE[0]} to {MIDDLE[1]} was run")
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
        raise Missing("the study of labelled examples was not run")
    names = {0.0: "default", 1.0: "fair"}
    settings, found = [], []
    for x in LAMBDAS:
        cell: dict[str, Any] = {"policy": policy, "order": order, "variant": names.get(x, f"debias {x:g}")}
        cell["reading"] = "as_described"
        with suppress(Missing):
            found.append((cell, set(follow.ratios(**cell))))
            settings.append(x)
    if len(settings) < 3:
        raise Missing(f"no setting between default and fair was run for {policy}")
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
        raise Missing(f"the dial has other settings under {policies[0]} than under {policies[-1]}")
    share = np.mean(found, 0)
    return {x: share[:, i] for i, x in enumerate(known[0])}, len(found)


def safe_budget(s: Study, **cell) -> Series:
    """Smallest share of the system turn such that there, and at every larger share that was run, no more leaks than
    the uncompressed model's upper limit; 1 if no compression that was run is safe. At ratios that every prompt met."""
    ratios = s.leak.ratios(True, **cell)
    curve = s.leak.curve(ratios, **cell)
    value, _, high = interval(s.leak.at(ratio=0.0, **cell))
    limit = value if np.isnan(high) else max(high, value)
    safe = np.cumprod(curve <= limit + 1e-9, 1).astype(bool)
    found = np.where(safe, 1 - np.asarray(ratios), 1.0).min(1)
    return np.where(np.isnan(curve).any(1), np.nan, found)


def follows_there(s: Study, share: float, **cell) -> bool:
    """Whether a leak-safe budget is worth something: at it, at least half of what is followed uncompressed still is."""
    ratio = round(1 - share, 6)
    return bool(s.follow.at(ratio=ratio, **cell)[0] >= 0.5 * s.follow.at(ratio=0.0, **cell)[0])


def bias(s: Study, ratios: Iterable[float], **cell) -> Series:
    """Keep rate of the directive minus that of the defense, mean over the ratios."""
    if s.kept is None:
        raise Missing("keep rates were not measured")
    directive, defense = (s.kept.curve(ratios, part=part, **cell).mean(1) for part in experiment.PARTS[::-1])
    return directive - defense


# ---- contrasts: a study and one member's cell -> a series


def _upper(s: Study, m: Means, **cell) -> list[float]:
    return [ratio for ratio in m.ratios(**cell) if ratio >= FROM]


def _compared(a: Series, b: Series, what: str) -> Series:
    if max(a[0], b[0]) <= ROOM:
        raise Missing(f"{what} on either side")
    return a - b


def _leak_low(s: Study, **cell) -> Series:
    lowest = s.leak.ratios(**cell)[0]
    if lowest > LOW:
        raise Missing(f"the lowest ratio run, {lowest:g}, is above {LOW:g}")
    return s.leak.at(ratio=lowest, **cell) - s.floor


def _leak_rise(s: Study, **cell) -> Series:
    return s.leak.curve(s.leak.ratios(**cell), **cell).max(1) - s.leak.at(ratio=0.0, **cell)


def _leak_fall(s: Study, **cell) -> Series:
    return _compared(
        s.leak.curve(s.leak.ratios(**cell), **cell).max(1), s.leak.at(ratio=0.9, **cell), "nothing is told"
    )


def _follow_share(s: Study, **cell) -> Series:
    return s.follow.at(ratio=0.5, **cell) / s.follow.at(ratio=0.0, **cell)


def _between_orders(name: str) -> Callable[..., Series]:
    def contrast(s: Study, **cell) -> Series:
        m = getattr(s, name)
        ratios = middle(m.ratios(**cell))
        normal, flipped = (m.curve(ratios, order=order, **cell).mean(1) for order in experiment.ORDERS)
        return _compared(normal, flipped, "nothing is followed" if name == "follow" else "nothing is told")

    return contrast


def _bias_asymmetry(s: Study, **cell) -> Series:
    ratios = middle(s.leak.ratios(**cell))
    return np.abs(sum(bias(s, ratios, order=order, **cell) for order in experiment.ORDERS))


def _bias_size(s: Study, **cell) -> Series:
    return np.abs(bias(s, middle(s.leak.ratios(**cell)), **cell))


def _bias_later(s: Study, order: str, **cell) -> Series:
    return bias(s, middle(s.leak.ratios(**cell)), order=order, **cell) * (1 if order == "normal" else -1)


def _bias_defense(s: Study, order: str, **cell) -> Series:
    return -bias(s, middle(s.leak.ratios(**cell)), order=order, **cell)


def _gain(name: str) -> Callable[..., Series]:
    """By default minus with the variant, at the middle ratios that both were run at and every prompt has room for."""

    def contrast(s: Study, variant: str, **cell) -> Series:
        m = getattr(s, name)
        ratios = middle(set(m.ratios(True, variant=variant, **cell)) & set(m.ratios(True, **cell)))
        pair = (m.curve(ratios, **cell).mean(1), m.curve(ratios, variant=variant, **cell).mean(1))
        return _compared(*pair, "nothing is followed" if name == "follow" else "nothing is told")

    return contrast


def _policy_spread(s: Study) -> Series:
    found = []
    for name in experiment.FIVE:
        with suppress(Missing):
            found.append(s.follow.curve(_upper(s, s.follow, **s.cell(policy=name)), **s.cell(policy=name)).mean(1))
    if len(found) < 2:
        raise Missing(f"{len(found)} of the five policies were run: a spread needs two")
    return np.max(found, 0) - np.min(found, 0)


def class_curves(
    s: Study, rules: str, ratios: Iterable[float], few: bool = True, **cell
) -> tuple[list[str], np.ndarray]:
    """Classes, and their accuracies [1 + DRAWS, ratios, classes], in prompts with one rule or several; without `few`
    only of classes that six prompts or more hold."""
    if s.classes is None:
        raise Missing("prompts without a defense were not run")
    kinds = sorted({key[-1] for key in s.classes.columns if key[-2] == rules})
    ratios, none = list(ratios), np.full(1 + DRAWS, np.nan)
    curves = np.stack([np.stack([none] * len(kinds), -1)] * len(ratios), 1)
    for (i, ratio), (j, kind) in product(enumerate(ratios), enumerate(kinds)):
        key = {"order": "alone", "ratio": ratio, "rules": rules, "kind": kind} | cell
        with suppress(Missing):  # every prompt with this class failed there
            if few or s.classes.count[s.classes._column(key)] >= claims.MIN_ITEMS:
                curves[:, i, j] = s.classes.at(**key)
    return kinds, curves


def _alone_ratios(s: Study) -> list[float]:
    if s.classes is None or not s.classes.columns:
        raise Missing("prompts without a defense were not run")
    return [ratio for ratio in sorted({key[4] for key in s.classes.columns}) if ratio >= FROM]


def _class_spread(s: Study, **cell) -> Series:
    return range_of(mean_of(class_curves(s, "multi", _alone_ratios(s), few=False, **cell)[1], 1))


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
    are not all followed equally well; `Missing` where they always are."""
    for start in (0.0, *ratios):
        order = class_curves(s, rules, [start], few=False, **cell)[1]
        found = rank_correlation(class_curves(s, rules, ratios, few=False, **cell)[1], order)
        if np.isfinite(found[0]).any():
            found[:, [ratio < start for ratio in ratios]] = np.nan
            return start, found
    raise Missing("at every ratio all classes are followed equally well")


def _rank_gap(s: Study, **cell) -> Series:
    ratios = _alone_ratios(s)
    single, multi = (rank_curves(s, rules, ratios, **cell) for rules in ("single", "multi"))
    if not (np.isfinite(single[0]).any() and np.isfinite(multi[0]).any()):
        raise Missing("uncompressed, every class is followed equally well: there is no order to lose")
    return mean_of(single, 1) - mean_of(multi, 1)


LAMBDAS = (0.0, *experiment.LAMBDAS, 1.0)


DIALS = {"main": (["streaming_llm"], experiment.ORDERS), "examples": (["snapkv", "tova"], ("normal",))}


def _optimal_gain(s: Study, study: str, to: float = 0.0) -> Series:
    share, _ = optimality(s, *DIALS[study], study)
    if min(series[0] for series in share.values()) == 1:
        raise Missing("every setting is optimal in every cell, for want of one that is better in both measures")
    return share[1.0] - share[to]


def _optimal_tie(s: Study, study: str) -> Series:
    return _optimal_gain(s, study, to=0.8)


def _time(s: Study, column: str, variant: str, base: str = "default") -> Series:
    """Median of the variant over median of the base, minus 1; items resampled."""
    if s.timing is None or s.timing.empty:
        raise Missing("no timing was run")
    wide = s.timing.pivot_table(index="item", columns="variant", values=column, aggfunc="median")
    if not {variant, base} <= set(wide):
        raise Missing(f"no timing of {variant}")
    wide = wide[[variant, base]].dropna()
    rng = np.random.default_rng(42)
    drawn = np.concatenate([np.arange(len(wide))[None], rng.integers(0, len(wide), (DRAWS, len(wide)))])
    x, y = (np.median(wide[name].to_numpy()[drawn], 1) for name in (variant, base))
    return x / y - 1 if len(wide) >= claims.MIN_ITEMS else np.where(np.arange(len(x)) == 0, x / y - 1, np.nan)


def _decode_cost(s: Study, variant: str) -> Series:
    return _time(s, "decode", variant)


def _compress_order(s: Study) -> Series:
    return _time(s, "compress", "whitelist") - _time(s, "compress", "fair")


CONTRASTS: dict[str, Callable[..., Series]] = {
    "class_spread": _class_spread,
    "rank_gap": _rank_gap,
    "policy_spread": _policy_spread,
    "leak_low": _leak_low,
    "leak_rise": _leak_rise,
    "leak_fall": _leak_fall,
    "follow_share": _follow_share,
    "follow_flipped": _between_orders("follow"),
    "leak_flipped": _between_orders("leak"),
    "bias_asymmetry": _bias_asymmetry,
    "bias_size": _bias_size,
    "leak_cut": _gain("leak"),
    "follow_cost": _gain("follow"),
    "optimal_gain": _optimal_gain,
    "optimal_tie": _optimal_tie,
    "bias_later": _bias_later,
    "bias_defense": _bias_defense,
    "decode_cost": _decode_cost,
    "compress_order": _compress_order,
}
OF_LEAKAGE = {"leak_low", "leak_rise", "leak_fall", "leak_flipped", "leak_cut"}
OF_KEEPING = {"bias_asymmetry", "bias_size", "bias_later", "bias_defense"}
OF_CLASSES = {"class_spread", "rank_gap"}
OF_TIME = {"decode_cost", "compress_order"}


def sampled(s: Study, contrast: str, cell: Mapping) -> int:
    """How many system prompts (or timed items) a contrast rests on."""
    if contrast in OF_TIME:
        return 0 if s.timing is None else s.timing.item.nunique()
    if contrast in OF_CLASSES:
        return 0 if s.by_item is None else s.by_item[s.by_item.rules == "multi"].system.nunique()
    if contrast in OF_KEEPING:
        return s.kept.systems if s.kept else 0
    if cell.get("study") == "examples":
        return s.examples_leak.systems if s.examples_leak else 0
    return s.leak.systems


# ---- verdicts


def members(claim: Mapping, sets: Mapping) -> list[tuple[str, dict]]:
    """(label, cell) of every member: the product of `over`, and the claim's own variant."""
    axes = {
        name: sets.get(given, [given]) if isinstance(given, str) else given
        for name, given in claim.get("over", {}).items()
    }
    fixed = {"variant": claim["variant"]} if "variant" in claim else {}
    return [
        (", ".join(map(str, chosen)) or "all", fixed | dict(zip(axes, chosen, strict=True)))
        for chosen in product(*axes.values())
    ]


def _members_of(claim: Mapping, sets: Mapping, s: Study) -> pd.DataFrame:
    if claim["contrast"] == "none":
        raise Missing(claim["why"])
    contrast = claim["contrast"]
    able = contrast in OF_TIME | OF_KEEPING or s.follow.at(policy="full", ratio=0.0)[0] >= 0.5
    if not able:  # a model that says nothing to the point keeps every secret
        raise Missing("the uncompressed model itself follows too few instructions")
    if contrast in OF_LEAKAGE and s.leak.at(policy="full", ratio=0.0)[0] > 0.5:
        raise Missing("the uncompressed model itself tells its instructions")
    found, reasons = [], []
    for label, cell in members(claim, sets):
        given = s.cell(**cell) if "policy" in cell else cell
        try:
            series, n = CONTRASTS[contrast](s, **given), sampled(s, contrast, cell)
            if n < claims.MIN_ITEMS:
                raise Missing(f"{n} system prompts: an interval needs at least {claims.MIN_ITEMS}")
        except Missing as missing:
            reasons.append(f"{label}: {missing}" if "policy" in cell else str(missing))
            continue
        found.append(
            (label, *interval(series), n, _kruskal(s, cell) if claim.get("test") == "kruskal_holm" else np.nan)
        )
    if not found:
        raise Missing(reasons[0])
    frame = pd.DataFrame(found, columns=["member", "value", "low", "high", "n", "p"])
    tested = frame.p.notna()
    frame.loc[tested, "p"] = stats.holm(frame.p[tested].tolist()) if tested.any() else []
    frame["state"] = [
        claims.judge(claim["rule"], m.value, m.low, m.high, None if np.isnan(m.p) else m.p) for m in frame.itertuples()
    ]
    frame.attrs["left out"] = reasons
    return frame


def _kruskal(s: Study, cell: Mapping) -> float:
    """p of Kruskal and Wallis' test that the classes' mean accuracies, one per system prompt, have one distribution."""
    rows = s.by_item
    rows = rows[(rows.policy == cell["policy"]) & (rows.rules == "multi") & (rows.ratio >= FROM)]
    if cell["policy"] == "snapkv":
        rows = rows[rows.reading == s.reading]
    groups = [one.to_numpy() for _, one in rows.groupby(["kind", "system"]).passed.mean().groupby("kind")]
    groups = [one for one in groups if len(one)]
    if len(groups) < 2 or np.ptp(np.concatenate(groups)) == 0:
        return 1.0
    return float(kruskal(*groups).pvalue)


def evaluate(studies: Sequence[Study], model: str, profile: str = "quick", chapter: str = "leakage") -> pd.DataFrame:
    """Verdict of every claim in every reading of `studies`; columns as `kvrepro.experiment.claims.evaluate`."""
    book = claims.load_claims(chapter)
    rows, states = [], {}
    for claim in book["claims"]:
        free = claim["contrast"] in {"none", *OF_TIME}
        for s in studies[:1] if free else studies:
            try:
                found: pd.DataFrame | str = _members_of(claim, book.get("sets", {}), s)
            except Missing as missing:
                found = str(missing)
            known = {} if isinstance(found, str) else dict(zip(found.member, found.state, strict=True))
            states.setdefault(claim["id"], []).append(known)
            test = "Kruskal-Wallis, Holm" if claim.get("test") else "bootstrap interval"
            row = claims.claim_row({**claim, "test": None}, found)
            if not isinstance(found, str) and found.attrs["left out"]:
                row["members"] += f", {len(found.attrs['left out'])} not testable ({found.attrs['left out'][0]})"
            rows.append(
                row | {"reading": "any" if free else s.reading} | ({} if isinstance(found, str) else {"test": test})
            )
    frame = pd.DataFrame(rows).reindex(columns=claims.COLUMNS + claims.EXTRA)
    frame["model"], frame["profile"] = model, profile
    frame["depends_on_reading"] = frame.claim.map({claim: claims._depends(states[claim]) for claim in states})
    return frame


def numbers(verdicts: pd.DataFrame, found: experiment.Found, studies: Sequence[Study]) -> dict[str, str]:
    """What the prose may quote, as text: of each claim `<claim>-<reading>` (value with interval) and `...-verdict`;
    sizes, failures, floors, the uncompressed scores; of each policy, order and variant what it follows and tells at the
    middle ratios and its leak-safe budget, in the last of the readings."""
    s = studies[-1]
    every = [found.main, found.alone, found.bare, found.marks, *([] if found.examples is None else [found.examples])]
    errors = {name: sum(int(count(rows).sum()) for rows in every) for name, count in _COUNTS.items()}
    shown = {
        "claims": str(verdicts.claim.nunique()),
        "decided-by-reading": str(verdicts[verdicts.depends_on_reading == "yes"].claim.nunique()),
        "systems": str(found.main.system.nunique()),
        "rows": f"{sum(map(len, every)):,}",
        "unmet": str(errors["unmet"]),
        "failed": str(errors["failed"] - errors["unmet"]),
        "unmet-alone": str(int(experiment.refused(found.alone).sum())),
        "rows-alone": f"{len(found.alone):,}",
        "floor-refusal": f"{s.floor:.2f}",
        "floor-preamble": f"{studies[0].echo:.2f}",
        "floor-defense": f"{experiment.floors(_asked(found, 'leak')).loc['defense', 'tells_directive']:.2f}",
        "floor-follow": f"{experiment.floors(_asked(found, 'follow')).loc['refusal', 'followed']:.2f}",
        "follow-full": _said(s.follow.at(policy="full", ratio=0.0)),
        "leak-full": _said(s.leak.at(policy="full", ratio=0.0)),
    }
    variants = ("default", "fair", "ends", "whitelist", "opening", "whole")
    for one, order, variant in product((*experiment.FIVE, *experiment.TWO), experiment.ORDERS, variants):
        cell = s.cell(policy=one, order=order, variant=variant)
        name = f"{one}-{order}-{variant}"
        shown |= dict.fromkeys((f"safe-{name}", f"leak-{name}", f"follow-{name}"), "not run")
        with suppress(Missing):
            ratios = middle(s.leak.ratios(True, **cell))
            shown[f"leak-{name}"] = _said(s.leak.curve(ratios, **cell).mean(1))
            shown[f"follow-{name}"] = _said(s.follow.curve(ratios, **cell).mean(1))
            safe = safe_budget(s, **cell)
            following = s.follow.at(ratio=round(1 - float(safe[0]), 6), **cell)
            shown[f"safe-{name}"] = f"{_said(safe)} (following {following[0]:.2f})"
    shown |= {f"{name}-{way}": text for way in WAYS for name, text in _marked(found, way).items()}
    whole = s.cell(policy="streaming_llm", order="normal")
    for variant in ("opening", "whole"):  # beside the whitelist and the default at the same ratio
        pair = (variant, "whitelist", "default")
        shown |= dict.fromkeys([f"{variant}-ratio", *[f"{variant}-beside-{one}" for one in pair]], "not run")
        with suppress(Missing):
            ratio = s.leak.ratios(**whole, variant=variant)[0]
            shown[f"{variant}-ratio"] = f"{ratio:.0%}"
            for one in pair:
                shown[f"{variant}-beside-{one}"] = _said(s.leak.at(ratio=ratio, variant=one, **whole))
    for reading, claim in product(claims.READINGS, verdicts.claim.unique()):
        row = next(verdicts[(verdicts.claim == claim) & verdicts.reading.isin([reading, "any"])].itertuples(), None)
        shown[f"{claim}-{reading}-verdict"] = "not run" if row is None else row.verdict
        shown[f"{claim}-{reading}"] = "no value" if row is None else claims.shown(row, with_unit=True) or "no value"
    return shown


WAYS = {
    "hand": "defense, directive",
    "rules": "every rule",
    "sentences": "sentences found",
    "turns": "the turn as one span",
}
_COUNTS = {"unmet": experiment.refused, "failed": lambda rows: rows.error.notna()}


def _marked(found: experiment.Found, way: str) -> dict[str, str]:
    """Following and leakage of fair quotas over spans marked in one way, mean over policies and ratios."""
    scored = experiment.score(found.marks[found.marks.marks == way], found.items)
    told = "tells_rules" if scored.tells_rules.notna().any() else "tells_directive"
    pairs = {"marks-follow": means(scored, "followed"), "marks-leak": means(scored, told)}
    return {
        name: _said(np.mean([m.column(i) for i in m.columns.values()], 0)) if m.columns else "not run"
        for name, m in pairs.items()
    }


def _said(series: Series) -> str:
    value, low, high = interval(series)
    return f"{value:.2f}" + ("" if np.isnan(low) else f" [{low:.2f}, {high:.2f}]")


def _asked(found: experiment.Found, request: str) -> list:
    return [item for item in found.items if item.id in set(found.main[found.main.request == request].item)]


# ---- tables


def covered(found: experiment.Found) -> pd.DataFrame:
    """Which shares were dropped under each policy and variant, defense first; or why none."""
    rows = found.main[(found.main.order == "normal") & (found.main.ratio > 0)]
    names = ["default", "whitelist", "opening", "whole", "fair", *[f"debias {x:g}" for x in experiment.LAMBDAS], "ends"]
    table = {
        variant: {
            name: experiment.cannot(name, variant)
            or ", ".join(f"{r:g}" for r in sorted(set(rows[(rows.policy == name) & (rows.variant == variant)].ratio)))
            or "not in this profile"
            for name in found.policies
        }
        for variant in names
    }
    return pd.DataFrame(table).rename_axis("policy")


def switched(found: experiment.Found) -> pd.DataFrame:
    """The switches that were run both ways, with what they move: rows (switch, measure), columns the two ways. At the
    ratio nearest to half of those run without the preamble, the defense first."""
    runs = {name: experiment.score(rows, found.items) for name, rows in (("main", found.main), ("bare", found.bare))}
    worst = experiment.score(found.main, found.items, "worst")
    ratio = max(found.bare.ratio)
    first = "streaming_llm" if "streaming_llm" in found.policies else found.policies[0]
    rules = "tells_rules" if runs["main"].tells_rules.notna().any() else "tells_directive"
    each = experiment.by_class(found.main, found.items)

    def at(frame: pd.DataFrame, measure: str, policy: str = first, *by: str, **cell) -> str:
        try:
            here = frame[(frame.order == "normal") & (frame.policy == policy)]
            return _said(means(here, measure, *by).at(policy=policy, **({"ratio": ratio} | cell)))
        except Missing:
            return "not run"

    high = max([0.0, *found.main[experiment.refused(found.main)].ratio])
    lost = found.main[experiment.refused(found.main) & (found.main.ratio == high)]
    where = {"ratio": high, "variant": lost.variant.iloc[0]} if len(lost) else {}
    whose = lost.policy.iloc[0] if len(lost) else first
    places = {
        (span.start, span.end)
        for item in found.items
        if item.id in set(found.main[found.main.order == "normal"].item)
        for span in item.spans
        if span.name == "phrase"
    }
    classes = means(each[each.order == "normal"], "passed", "kind")
    pooled = means(each[each.order == "normal"], "passed")
    average = over_classes(classes, pooled)
    rows = [
        ("preamble", f"{first}, leakage by reference, with / without it", at(runs["main"], "tells_directive"),
         at(runs["main"], rules)),
        ("preamble", f"{first}, leakage of the rules, prompt with / without it", at(runs["main"], rules),
         at(runs["bare"], rules)),
        ("preamble", f"{first}, following, prompt with / without it", at(runs["main"], "followed"),
         at(runs["bare"], "followed")),
        ("keep rate of the defense", f"{first}, outside the directive / the defense",
         *[at(found.kept[found.kept.part == part], "kept", first) for part in ("outside", "defense")]),
        ("SnapKV window", "snapkv, leakage of the rules",
         *[at(runs["main"], rules, "snapkv", reading=one) for one in claims.READINGS]),
        *[
            ("fair variants", f"{name}, leakage of the rules",
             *[at(runs["main"], rules, name, reading=one, variant="fair") for one in claims.READINGS])
            for name in experiment.FAIR_DIFFERS
        ],
        ("failed items", f"{whose}, {where.get('variant', 'default')}, leakage, dropped / counted as failed",
         *[at(frame, rules, whose, **where) for frame in (runs["main"], worst)]),
        ("whitelist", "places of the phrase, defense first", "fixed",
         "the same in every prompt" if len(places) == 1 else f"{len(places)} places"),
        ("accuracy", f"{first}, strict / loose", at(runs["main"], "followed"), at(runs["main"], "followed_loose")),
        ("accuracy", f"{first}, pooled / class mean", *[_at(m, first, ratio) for m in (pooled, average)]),
    ]  # fmt: skip
    table = pd.DataFrame(rows, columns=["switch", f"measured at {ratio:.0%} dropped", "first way", "second way"])
    return table.set_index("switch")


def _at(m: Means, policy: str, ratio: float) -> str:
    try:
        return _said(m.at(policy=policy, ratio=ratio))
    except Missing:
        return "not run"
