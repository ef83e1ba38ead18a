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

from kvrepro import claims, stats
from kvrepro.claims import Missing
from kvrepro.errors import InputError
from kvrepro.leakage import experiment

DRAWS = 2_000
KEY = ["order", "policy", "variant", "reading", "ratio"]
MIDDLE = (0.3, 0.7)
FROM = 0.3  # figures 2 and 3 of the paper look at r from 0.3 to 0.9
Series: TypeAlias = np.ndarray  # [1 + DRAWS]: the sample's value, then the resamples'


@dataclass(frozen=True)
class Means:
    """Means of one measure in every cell: `draws` [1 + DRAWS, cells], row 0 the sample's own."""

    draws: np.ndarray
    columns: dict[tuple, int]
    systems: int

    def at(self, **cell) -> Series:
        """One cell's mean. Ratio 0 is the uncompressed cache, the same for every policy. Not run: `Missing`."""
        cell = {"order": "normal", "variant": "default", "reading": "as_described"} | cell
        if not cell["ratio"]:
            cell |= {"policy": "full", "variant": "default", "reading": "as_described"}
        elif cell["policy"] != "snapkv":
            cell["reading"] = "as_described"  # other policies are the same in both
        names = [*KEY, *[name for name in cell if name not in KEY]]
        key = tuple(cell[name] for name in names)
        if key not in self.columns:
            raise Missing("not run: " + ", ".join(f"{name} {value}" for name, value in cell.items()))
        return self.draws[:, self.columns[key]]

    def ratios(self, **cell) -> list[float]:
        """Ratios above 0 at which a policy's curve was run."""
        known = {key[KEY.index("ratio")] for key in self.columns}
        found = []
        for ratio in sorted(known - {0.0}):
            try:
                self.at(ratio=ratio, **cell)
            except Missing:
                continue
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
        return Means(np.empty((1 + DRAWS, 0)), {}, 0)
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
    return Means(values, columns, n)


def over_classes(m: Means) -> Means:
    """The mean over classes, the last part of each column's key, in every cell."""
    parts: dict[tuple, list[int]] = {}
    for key, i in m.columns.items():
        parts.setdefault(key[:-1], []).append(i)
    values = [mean_of(m.draws[:, some], 1) for some in parts.values()]
    return Means(np.stack(values, 1) if values else m.draws, {key: i for i, key in enumerate(parts)}, m.systems)


def mean_of(values: np.ndarray, axis: int) -> np.ndarray:
    """The mean of what is known; nan where nothing is."""
    known = np.isfinite(values)
    counts = known.sum(axis)
    return np.divide(np.where(known, values, 0).sum(axis), counts, out=np.full(counts.shape, np.nan), where=counts > 0)


def interval(series: Series, systems: int) -> tuple[float, float, float]:
    """Value, low, high (95%); no interval below six system prompts."""
    known = series[1:][np.isfinite(series[1:])]
    if systems < claims.MIN_ITEMS or not len(known):
        return float(series[0]), np.nan, np.nan
    low, high = np.percentile(known, [2.5, 97.5])
    return float(series[0]), float(low), float(high)


@dataclass(frozen=True)
class Study:
    """All means of the chapter in one reading."""

    reading: str
    follow: Means  # of both orders
    leak: Means
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
    failed = "missing" if run else "worst"
    measure = "tells_directive" if run else "tells_rules"
    scored = experiment.score(main, items, failed)
    measure = measure if scored[measure].notna().any() else "tells_directive"
    told = None if examples is None else experiment.score(examples, items, failed)
    each = None if alone is None else experiment.by_class(alone, items, failed)
    obeyed = experiment.by_class(main, items, failed)
    part = None
    if kept is not None:
        chosen = kept[kept.part.isin(["directive", "outside" if run else "defense"])]
        part = means(chosen.assign(part=chosen.part.replace("outside", "defense")), "kept", "part")
    floor = experiment.floors([item for item in items if item.meta["request"] == "leak"])
    return Study(
        reading,
        means(obeyed, "passed") if run else over_classes(means(obeyed, "passed", "kind")),
        means(scored, measure),
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


def optimality(
    s: Study,
    policies: Sequence[str],
    orders: Sequence[str],
    lambdas: Sequence[float],
    where: str = "main",
    *,
    ties: bool = True,
) -> tuple[dict[float, Series], int]:
    """Of each lambda, the share of (ratio, order, policy) cells in which it is Pareto-optimal; and their number."""
    follow, leak = (s.follow, s.leak) if where == "main" else (s.examples_follow, s.examples_leak)
    if follow is None:
        raise Missing("the study of labelled examples was not run")
    names = {0.0: "default", 1.0: "fair"}
    found = []
    for name, order in product(policies, orders):
        cells = [s.cell(policy=name, order=order, variant=names.get(x, f"debias {x:g}")) for x in lambdas]
        common = set.intersection(*[set(follow.ratios(**cell)) for cell in cells])
        for ratio in sorted(common):
            obeyed, told = (np.stack([m.at(ratio=ratio, **cell) for cell in cells], -1) for m in (follow, leak))
            found.append(optimal(obeyed, told, ties))
    share = np.mean(found, 0)
    return {x: share[:, i] for i, x in enumerate(lambdas)}, len(found)


def safe_budget(s: Study, ratios: Sequence[float] | None = None, **cell) -> Series:
    """Smallest share of the system turn such that there, and at every larger share that was run (of `ratios` dropped),
    no more leaks than the uncompressed model's upper limit; 1 if no compression is safe."""
    ratios = s.leak.ratios(**cell) if ratios is None else sorted(ratios)
    start = s.leak.at(ratio=0.0, **cell)
    limit = max(interval(start, claims.MIN_ITEMS)[2], start[0])
    safe = np.cumprod(s.leak.curve(ratios, **cell) <= limit + 1e-9, 1).astype(bool)
    shares = np.broadcast_to(1 - np.asarray(ratios), safe.shape)
    return np.where(safe, shares, 1.0).min(1)


def common_ratios(s: Study) -> list[float]:
    """Ratios at which the variants were run too, so that their safe budgets can be compared."""
    try:
        return s.leak.ratios(**s.cell(policy="streaming_llm", variant="fair"))
    except Missing:
        return sorted({key[KEY.index("ratio")] for key in s.leak.columns} - {0.0})


def bias(s: Study, ratios: Iterable[float], **cell) -> Series:
    """Keep rate of the directive minus that of the defense, mean over the ratios."""
    if s.kept is None:
        raise Missing("keep rates were not measured")
    directive, defense = (s.kept.curve(ratios, part=part, **cell).mean(1) for part in experiment.PARTS[::-1])
    return directive - defense


# ---- contrasts: a study and one member's cell -> a series


def _upper(s: Study, m: Means, **cell) -> list[float]:
    return [ratio for ratio in m.ratios(**cell) if ratio >= FROM]


def _leak_low(s: Study, **cell) -> Series:
    return s.leak.at(ratio=s.leak.ratios(**cell)[0], **cell) - s.floor


def _leak_rise(s: Study, **cell) -> Series:
    return s.leak.curve(s.leak.ratios(**cell), **cell).max(1) - s.leak.at(ratio=0.0, **cell)


def _leak_fall(s: Study, **cell) -> Series:
    return s.leak.curve(s.leak.ratios(**cell), **cell).max(1) - s.leak.at(ratio=0.9, **cell)


def _follow_share(s: Study, **cell) -> Series:
    return s.follow.at(ratio=0.5, **cell) / s.follow.at(ratio=0.0, **cell)


def _between_orders(name: str) -> Callable[..., Series]:
    def contrast(s: Study, **cell) -> Series:
        m = getattr(s, name)
        ratios = middle(m.ratios(**cell))
        normal, flipped = (m.curve(ratios, order=order, **cell).mean(1) for order in experiment.ORDERS)
        return normal - flipped

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
    """By default minus with the variant, at the middle ratios that both were run at."""

    def contrast(s: Study, variant: str, **cell) -> Series:
        m = getattr(s, name)
        ratios = middle(set(m.ratios(variant=variant, **cell)) & set(m.ratios(**cell)))
        return m.curve(ratios, **cell).mean(1) - m.curve(ratios, variant=variant, **cell).mean(1)

    return contrast


def _policy_spread(s: Study) -> Series:
    ratios = _upper(s, s.follow, **s.cell(policy=experiment.FIVE[0]))
    found = np.stack([s.follow.curve(ratios, **s.cell(policy=name)).mean(1) for name in experiment.FIVE])
    return found.max(0) - found.min(0)


def class_curves(s: Study, rules: str, ratios: Iterable[float], **cell) -> tuple[list[str], np.ndarray]:
    """Classes, and their accuracies [1 + DRAWS, ratios, classes], in prompts with one rule or several."""
    if s.classes is None:
        raise Missing("prompts without a defense were not run")
    kinds = sorted({key[-1] for key in s.classes.columns if key[-2] == rules})
    ratios, none = list(ratios), np.full(1 + DRAWS, np.nan)
    curves = np.stack([np.stack([none] * len(kinds), -1)] * len(ratios), 1)
    for (i, ratio), (j, kind) in product(enumerate(ratios), enumerate(kinds)):
        key = {"order": "alone", "ratio": ratio, "rules": rules, "kind": kind} | cell
        with suppress(Missing):  # every prompt with this class failed there
            curves[:, i, j] = s.classes.at(**key)
    return kinds, curves


def _alone_ratios(s: Study) -> list[float]:
    if s.classes is None or not s.classes.columns:
        raise Missing("prompts without a defense were not run")
    return [ratio for ratio in sorted({key[4] for key in s.classes.columns}) if ratio >= FROM]


def _class_spread(s: Study, **cell) -> Series:
    accuracy = mean_of(class_curves(s, "multi", _alone_ratios(s), **cell)[1], 1)
    return range_of(accuracy)


def range_of(accuracy: np.ndarray) -> np.ndarray:
    """Largest minus smallest over the last axis; nan where there is none."""
    high, low = (np.where(np.isnan(accuracy), fill, accuracy) for fill in (-np.inf, np.inf))
    spread = high.max(-1) - low.min(-1)
    return np.where(np.isfinite(spread), spread, np.nan)


def rank_curves(s: Study, rules: str, ratios: Iterable[float], **cell) -> np.ndarray:
    """Rank correlation of the classes' accuracies with the uncompressed ones, [1 + DRAWS, ratios]."""
    start = class_curves(s, rules, [0.0], **cell)[1]
    return rank_correlation(class_curves(s, rules, ratios, **cell)[1], start)


def _rank_gap(s: Study, **cell) -> Series:
    ratios = _alone_ratios(s)
    single, multi = (rank_curves(s, rules, ratios, **cell) for rules in ("single", "multi"))
    if not (np.isfinite(single[0]).any() and np.isfinite(multi[0]).any()):
        raise Missing("uncompressed, every class is followed equally well: there is no order to lose")
    return mean_of(single, 1) - mean_of(multi, 1)


LAMBDAS = (0.0, *experiment.LAMBDAS, 1.0)


def _optimal_gain(s: Study, study: str, to: float = 0.0) -> Series:
    policies, orders = (["streaming_llm"], experiment.ORDERS) if study == "main" else (["snapkv", "tova"], ("normal",))
    share, _ = optimality(s, policies, orders, LAMBDAS, study)
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
    rng = np.random.default_rng(42)
    drawn = np.concatenate([np.arange(len(wide))[None], rng.integers(0, len(wide), (DRAWS, len(wide)))])
    x, y = (np.median(wide[name].to_numpy()[drawn], 1) for name in (variant, base))
    return x / y - 1


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
OF_FOLLOWING = {"follow_share", "follow_flipped", "follow_cost", "policy_spread", "class_spread", "rank_gap"}


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
    if s.leak.systems < claims.MIN_ITEMS:
        raise Missing(f"{s.leak.systems} system prompts: an interval needs at least {claims.MIN_ITEMS}")
    if claim["contrast"] in OF_LEAKAGE and s.leak.at(policy="full", ratio=0.0)[0] > 0.5:
        raise Missing("the uncompressed model itself tells its instructions")
    if claim["contrast"] in OF_FOLLOWING and s.follow.at(policy="full", ratio=0.0)[0] < 0.5:
        raise Missing("the uncompressed model itself follows too few instructions")
    found, reasons = [], []
    for label, cell in members(claim, sets):
        timed = claim["contrast"] in ("decode_cost", "compress_order")
        given = cell if timed or not {"policy"} & set(cell) else s.cell(**cell)
        try:
            series = CONTRASTS[claim["contrast"]](s, **given)
        except Missing as missing:
            reasons.append(str(missing))
            continue
        n = s.timing.item.nunique() if timed else s.leak.systems
        found.append(
            (label, *interval(series, n), n, _kruskal(s, cell) if claim.get("test") == "kruskal_holm" else np.nan)
        )
    if not found:
        raise Missing(reasons[0])
    frame = pd.DataFrame(found, columns=["member", "value", "low", "high", "n", "p"])
    tested = frame.p.notna()
    frame.loc[tested, "p"] = stats.holm(frame.p[tested].tolist()) if tested.any() else []
    frame["state"] = [
        claims.judge(claim["rule"], m.value, m.low, m.high, None if np.isnan(m.p) else m.p) for m in frame.itertuples()
    ]
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
    """Verdict of every claim in every reading of `studies`; columns as `kvrepro.claims.evaluate`."""
    book = claims.load_claims(chapter)
    rows, states = [], {}
    for claim in book["claims"]:
        free = claim["contrast"] in ("none", "decode_cost", "compress_order")
        for s in studies[:1] if free else studies:
            try:
                found: pd.DataFrame | str = _members_of(claim, book.get("sets", {}), s)
            except Missing as missing:
                found = str(missing)
            known = {} if isinstance(found, str) else dict(zip(found.member, found.state, strict=True))
            states.setdefault(claim["id"], []).append(known)
            test = "Kruskal-Wallis, Holm" if claim.get("test") else "bootstrap interval"
            row = claims.claim_row({**claim, "test": None}, found)
            rows.append(
                row | {"reading": "any" if free else s.reading} | ({} if isinstance(found, str) else {"test": test})
            )
    frame = pd.DataFrame(rows).reindex(columns=claims.COLUMNS + claims.EXTRA)
    frame["model"], frame["profile"] = model, profile
    frame["depends_on_reading"] = frame.claim.map({claim: claims._depends(states[claim]) for claim in states})
    return frame


def numbers(verdicts: pd.DataFrame, found: experiment.Found, studies: Sequence[Study]) -> dict[str, str]:
    """What the prose may quote, as text: of each claim `<claim>-<reading>` (value with interval) and `...-verdict`;
    sizes, floors, the uncompressed scores; of each policy, order and variant what it follows and tells at the middle
    ratios and its leak-safe budget, in the last of the readings."""
    s = studies[-1]
    shown = {
        "claims": str(verdicts.claim.nunique()),
        "decided-by-reading": str(verdicts[verdicts.depends_on_reading == "yes"].claim.nunique()),
        "systems": str(found.main.system.nunique()),
        "failed": str(int(found.main.error.notna().sum())),
        "rows": f"{len(found.main):,}",
        "floor-refusal": f"{s.floor:.2f}",
        "floor-preamble": f"{studies[0].echo:.2f}",
        "floor-defense": f"{experiment.floors(_leaks(found)).loc['defense', 'tells_directive']:.2f}",
        "floor-follow": f"{experiment.floors(_follows(found)).loc['refusal', 'followed']:.2f}",
        "follow-full": _said(s.follow.at(policy="full", ratio=0.0), s.follow.systems),
        "leak-full": _said(s.leak.at(policy="full", ratio=0.0), s.leak.systems),
    }
    for one, order in product(experiment.FIVE, experiment.ORDERS):
        for variant in ("default", "fair", "ends", "whitelist"):
            cell = s.cell(policy=one, order=order, variant=variant)
            name = f"{one}-{order}-{variant}"
            shown[f"safe-{name}"] = shown[f"leak-{name}"] = shown[f"follow-{name}"] = "not run"
            try:
                ratios = middle(s.leak.ratios(**cell))
                shown[f"safe-{name}"] = _said(safe_budget(s, common_ratios(s), **cell), s.leak.systems)
                shown[f"leak-{name}"] = _said(s.leak.curve(ratios, **cell).mean(1), s.leak.systems)
                shown[f"follow-{name}"] = _said(s.follow.curve(ratios, **cell).mean(1), s.follow.systems)
            except Missing:
                continue
    whole = s.cell(policy="streaming_llm", order="normal")
    shown |= {"whole-ratio": "not run", "whole-leak": "not run", "whole-default": "not run"}
    with suppress(Missing):
        ratio = s.leak.ratios(**whole, variant="whole")[0]
        shown |= {
            "whole-ratio": f"{ratio:.0%}",
            "whole-leak": _said(s.leak.at(ratio=ratio, variant="whole", **whole), s.leak.systems),
            "whole-default": _said(s.leak.at(ratio=ratio, **whole), s.leak.systems),
        }
    for reading, claim in product(claims.READINGS, verdicts.claim.unique()):
        row = next(verdicts[(verdicts.claim == claim) & verdicts.reading.isin([reading, "any"])].itertuples(), None)
        shown[f"{claim}-{reading}-verdict"] = "not run" if row is None else row.verdict
        shown[f"{claim}-{reading}"] = "no value" if row is None else claims.shown(row, with_unit=True) or "no value"
    return shown


def _said(series: Series, systems: int) -> str:
    value, low, high = interval(series, systems)
    return f"{value:.2f}" + ("" if np.isnan(low) else f" [{low:.2f}, {high:.2f}]")


def _leaks(found: experiment.Found) -> list:
    return [item for item in found.items if item.id in set(found.main[found.main.request == "leak"].item)]


def _follows(found: experiment.Found) -> list:
    return [item for item in found.items if item.id in set(found.main[found.main.request == "follow"].item)]
