"""What the leakage claims are tested on: values by system prompt; resampled statistics where order or rank decides."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import combinations, product

import numpy as np
import pandas as pd

from kvrepro.chapters.leakage.cells import FIVE
from kvrepro.chapters.leakage.prompts import ORDERS
from kvrepro.chapters.leakage.study import (
    DIALS,
    FROM,
    LOW,
    ROOM,
    TABLES,
    Means,
    Study,
    bias,
    mean_of,
    means,
    middle,
    optimality,
    rank_curves,
)
from kvrepro.experiment import claims, history, judge
from kvrepro.experiment.judge import Drawn, Facts, Member, NotTestable, Sample, Unpaired
from kvrepro.experiment.stats import MIN_ITEMS

Parts = dict[str, Sample | Unpaired | Drawn]
What = Sample | Drawn | Facts | Parts
UNBIASED = 0.10  # the most by which the keep rates of an unbiased policy differ (L5b)


def _upper(ratios: Iterable[float]) -> list[float]:
    found = [ratio for ratio in ratios if ratio >= FROM]
    if not found:
        raise NotTestable(f"no ratio from {FROM:g} on was run")
    return found


def _pair(m: Means, a: np.ndarray, b: np.ndarray, ratios: int = 1, compared: str = "") -> Sample:
    """Paired by system prompt; each value a mean over so many ratios. compared: of what ("follow", "leak") one side at
    least must have some."""
    if compared:
        _compared([a, b], compared)
    return Sample(pd.DataFrame({"a": a, "b": b}), "difference", each=m.each * ratios)


def _values(values: np.ndarray) -> Sample:
    """Of keep rates, which do not pile up at their bounds."""
    return Sample(pd.DataFrame({"a": values}), bounds=None)


def _compared(found: Iterable[np.ndarray], name: str) -> None:
    """Raise where no side has anything to compare."""
    if max(np.nanmean(values) if np.isfinite(values).any() else 0.0 for values in found) <= ROOM:
        raise NotTestable(f"nothing is {'followed' if name == 'follow' else 'told'} on either side")


# ---------------------------------------------------------------- contrasts: study, one member's cell -> what is tested


def _leak_low(s: Study, **cell) -> Sample:
    lowest = s.leak.ratios(**cell)[0]
    if lowest > LOW:
        raise NotTestable(f"the lowest ratio run, {lowest:g}, is above {LOW:g}")
    above = pd.DataFrame({"a": s.leak.per(ratio=lowest, **cell) - s.floor})
    return Sample(above, bounds=(-s.floor, 1 - s.floor), each=s.leak.each)


def _rise(name: str, s: Study, each: bool = False, **cell) -> What:
    """Mean over the ratios from 0.3 that every prompt has room for, minus the uncompressed. each: every ratio."""
    m: Means = getattr(s, name)
    if each:
        start = m.per(ratio=0.0, **cell)
        return {f"{r:.0%} dropped": _pair(m, m.per(ratio=r, **cell), start) for r in m.ratios(**cell)}
    ratios = _upper(m.ratios(True, **cell))
    return _pair(m, m.mean(ratios, **cell), m.per(ratio=0.0, **cell), len(ratios))


def _leak_fall(s: Study, each: bool = False, **cell) -> Parts:
    """From 0.7 to 0.9; each: from every ratio to 0.9."""
    ratios = [ratio for ratio in s.leak.ratios(**cell) if ratio != 0.9] if each else [0.7]
    curves, end = [s.leak.per(ratio=ratio, **cell) for ratio in ratios], s.leak.per(ratio=0.9, **cell)
    _compared([end, *curves], "leak")
    return {f"{r:.0%} dropped": _pair(s.leak, one, end) for r, one in zip(ratios, curves, strict=True)}


def _leak_long(s: Study) -> Sample:
    """Of labelled examples, uncompressed, the defense first."""
    if s.words < 3000:
        raise NotTestable(
            "system prompts of 3,000 to 4,000 words are needed: items=ifeval, and options with words=3000"
        )
    m = means(s.examples, "told")
    return Sample(pd.DataFrame({"a": m.per(policy=next(key[1] for key in m.columns), ratio=0.0)}), each=m.each)


def _follow_share(s: Study, ratio: float, **cell) -> Sample:
    pair = {"a": s.follow.per(ratio=ratio, **cell), "full": s.follow.per(ratio=0.0, **cell)}
    return Sample(pd.DataFrame(pair), "share_of_ceiling", each=s.follow.each)


def _follow_lost(s: Study, **cell) -> Sample:
    """Uncompressed minus the middle ratios, of a policy that keeps both instructions at nearly the same rate."""
    ratios = middle(s.follow.ratios(**cell))
    if not abs(found := float(np.nanmean(bias(s, ratios, **cell)))) <= UNBIASED:
        raise NotTestable(f"its keep rates differ by {found:.2f}: what is lost may be due to that")
    return _pair(s.follow, s.follow.per(ratio=0.0, **cell), s.follow.mean(ratios, **cell), len(ratios))


def _between_orders(name: str, s: Study, nothing: bool = False, **cell) -> Sample:
    """Normal minus flipped order. nothing: also where there is nothing to compare."""
    m: Means = getattr(s, name)
    ratios = middle(m.ratios(**cell))
    a, b = (m.mean(ratios, order=order, **cell) for order in ORDERS)
    return _pair(m, a, b, len(ratios), "" if nothing else name)


def _gain(name: str, s: Study, variant: str, nothing: bool = False, **cell) -> Sample:
    """By default minus with the variant, at the middle ratios that both were run at and every prompt has room for."""
    m: Means = getattr(s, name)
    ratios = middle(set(m.ratios(True, variant=variant, **cell)) & set(m.ratios(True, **cell)))
    a, b = m.mean(ratios, **cell), m.mean(ratios, variant=variant, **cell)
    return _pair(m, a, b, len(ratios), "" if nothing else name)


def _bias_asymmetry(s: Study, **cell) -> Sample:
    ratios = middle(s.leak.ratios(**cell))
    return _values(np.sum([bias(s, ratios, order=order, **cell) for order in ORDERS], 0))


def _bias(toward: str, s: Study, order: str = "normal", **cell) -> Sample:
    """toward: the directive, the defense, or the later of the two."""
    found = bias(s, middle(s.leak.ratios(**cell)), order=order, **cell)
    later = "directive" if order == "normal" else "defense"
    return _values(found if (later if toward == "later" else toward) == "directive" else -found)


def _defense_kept(s: Study, variant: str, **cell) -> Sample:
    """Keep rate of the defense with the variant minus that by default."""
    ratios = middle(set(s.leak.ratios(True, variant=variant, **cell)) & set(s.leak.ratios(True, **cell)))
    a, b = (s.by_part.mean(ratios, part="defense", variant=one, **cell) for one in (variant, "default"))
    return _values(a - b)


def _middle_layers(s: Study, policy: str) -> Sample:
    """Keep rate of the defense in the middle third of the layers minus that in the others, the defense first."""
    ratios = middle(s.leak.ratios(policy=policy))
    if s.kept.empty:
        raise NotTestable("no keep rates were run")
    rows = s.kept[(s.kept.order == "normal") & (s.kept.variant == "default") & (s.kept.part == "defense")]
    rows = rows[(rows.policy == policy) & rows.ratio.isin(ratios)]
    layers = sorted(rows.layer.unique())
    if not (third := len(layers) // 3):
        raise NotTestable(f"keep rates of {len(layers)} layers: a middle needs three")
    wide = rows.pivot_table(index="system", columns="layer", values="kept")
    return _values((wide[layers[third:-third]].mean(1) - wide[layers[:third] + layers[-third:]].mean(1)).to_numpy())


def _policy_gap(s: Study, each: bool = False) -> What:
    """The mean of the paper's other policies minus K-norm, which the paper finds far below them. each: every two."""
    ratios = _upper(set.intersection(*(set(s.follow.ratios(policy=name)) for name in FIVE)))
    if each:
        found = pd.DataFrame({name: s.follow.mean(ratios, policy=name) for name in FIVE})
        return judge.pairs(found, "", each=s.follow.each * len(ratios)).what  # type: ignore[return-value]
    others = [s.follow.mean(ratios, policy=name) for name in FIVE if name != "k_norm"]
    return _pair(s.follow, np.mean(others, 0), s.follow.mean(ratios, policy="k_norm"), len(ratios))


def _model_spread(s: Study) -> Parts:
    """What is lost of following, one model against the other, by policy: paired by system prompt."""
    if s.other is None:
        raise NotTestable("one run has one model: name a second checkpoint in options, as compare")
    found: Parts = {}
    for name in FIVE:
        with suppress(NotTestable):
            ratios = _upper(set(s.follow.ratios(policy=name)) & set(s.other.follow.ratios(policy=name)))
            lost = {}
            for side, one in (("a", s), ("b", s.other)):
                rows = one.answers[(one.answers.order == "normal") & (one.answers.variant == "default")]
                wide = rows[rows.policy == name].pivot_table(index="system", columns="ratio", values="followed")
                lost[side] = wide[0.0] - wide[ratios].mean(axis=1, skipna=False)
            pair = pd.DataFrame(lost).dropna()
            found[name] = Sample(pair, "difference", bounds=(-1.0, 1.0), each=s.follow.each)
    if not found:
        raise NotTestable("the two models share no policy and ratio")
    return found


def _alone_ratios(s: Study) -> list[float]:
    if not s.by_class.columns:
        raise NotTestable("prompts without a defense were not run")
    return _upper(sorted({key[3] for key in s.by_class.columns}))


def _class_spread(s: Study, **cell) -> Parts:
    """What every two classes lose that six system prompts or more hold; few hold both, so that they are not paired."""
    ratios, found = _alone_ratios(s), {}
    for kind in sorted({key[-1] for key in s.by_class.columns if key[-2] == "multi"}):
        key = {"order": "alone", "rules": "multi", "kind": kind} | cell
        with suppress(NotTestable):
            left = mean_of(np.stack([s.by_class.per(ratio=r, **key) for r in ratios], 1), 1)
            values = pd.Series(s.by_class.per(ratio=0.0, **key) - left).dropna()
            if len(values) >= MIN_ITEMS:
                found[kind] = values
    if len(found) < 2:
        raise NotTestable(f"{len(found)} classes are held by six system prompts: a spread needs two")
    each = s.by_class.each * len(ratios)
    return {f"{a} against {b}": Unpaired(found[a], found[b], each=each) for a, b in combinations(found, 2)}


def _rank_gap(s: Study, **cell) -> Drawn:
    ratios = _alone_ratios(s)
    single, multi = (rank_curves(s, rules, ratios, **cell) for rules in ("single", "multi"))
    if not (np.isfinite(single[0]).any() and np.isfinite(multi[0]).any()):
        raise NotTestable("uncompressed, every class is followed equally well: there is no order to lose")
    gap = mean_of(single, 1) - mean_of(multi, 1)
    systems = s.classes[s.classes.rules == "multi"].system.nunique()
    return Drawn(float(gap[0]), gap[1:], systems, limits=(-2.0, 2.0))  # of two rank correlations


def _optimal_gain(s: Study, study: str, usual: bool = False, least: float = 0.0) -> Parts:
    """Every setting above 0, or from `least` on, against the default. usual: by the usual definition."""
    share = _shares(s, study, usual)
    return {f"λ = {x:g}": _minus(s, study, share[x], share[0.0]) for x in share if x and x >= least}


def _optimal_tie(s: Study, study: str) -> Drawn:
    share = _shares(s, study)
    if 0.8 not in share:
        raise NotTestable("the setting 0.8 was not run")
    return _minus(s, study, share[1.0], share[0.8])


def _shares(s: Study, study: str, usual: bool = False) -> dict[float, np.ndarray]:
    share, _ = optimality(s, *DIALS[study], study, ties=not usual)
    if min(series[0] for series in share.values()) == 1:
        raise NotTestable("every setting is optimal in every cell, for want of one that is better in both measures")
    return share


def _minus(s: Study, study: str, a: np.ndarray, b: np.ndarray) -> Drawn:
    told = s.dials[study].told.notna()
    return Drawn(float(a[0] - b[0]), (a - b)[1:], s.dials[study][told].system.nunique(), limits=(-1.0, 1.0))


def _optimal_printed(s: Study, study: str) -> Facts:
    """The paper's own averages, every setting above 0 against 0."""
    rows = claims.published(TABLES[study])
    found = rows.metric.str.extract(r"^avg optimality %, lambda=(.*)$")[0].dropna().astype(float)
    share = rows.value[found.index].astype(float).div(100).set_axis(found)
    return Facts((share - share[0.0]).drop(0.0).rename("λ = {:g}".format))


def _times(s: Study, column: str, *variants: str) -> pd.DataFrame:
    """Median over repeats, items by variant."""
    if s.timing.empty:
        raise NotTestable("no timing was run")
    wide = s.timing.pivot_table(index="item", columns="variant", values=column, aggfunc="median")
    if missing := [name for name in variants if name not in wide]:
        raise NotTestable(f"no timing of {missing[0]}")
    return wide[list(variants)].dropna()


def _cost(column: str, s: Study, variant: str, speed: bool = False) -> Sample:
    """Median time of the variant over that of the default, minus 1; of tokens per second with `speed`."""

    def cost(values: np.ndarray) -> float:
        with_it, base = np.median(values, 0)
        return float((base / with_it if speed else with_it / base) - 1)

    return Sample(_times(s, column, variant, "default"), cost, limits=(-1.0, math.inf))


def _compress_order(s: Study) -> Sample:
    def order(values: np.ndarray) -> float:
        whitelist, fair, base = np.median(values, 0)
        return float((whitelist - fair) / base)

    return Sample(_times(s, "compress", "whitelist", "fair", "default"), order)


CONTRASTS: dict[str, Callable[..., What]] = {
    "class_spread": _class_spread,
    "rank_gap": _rank_gap,
    "policy_gap": _policy_gap,
    "model_spread": _model_spread,
    "leak_low": _leak_low,
    "leak_rise": partial(_rise, "leak"),
    "defense_rise": partial(_rise, "leak_defense"),
    "leak_fall": _leak_fall,
    "leak_long": _leak_long,
    "follow_share": _follow_share,
    "follow_lost": _follow_lost,
    "follow_flipped": partial(_between_orders, "follow"),
    "leak_flipped": partial(_between_orders, "leak"),
    "bias_asymmetry": _bias_asymmetry,
    "bias_size": partial(_bias, "directive"),
    "leak_cut": partial(_gain, "leak"),
    "defense_cut": partial(_gain, "leak_defense"),
    "follow_cost": partial(_gain, "follow"),
    "optimal_gain": _optimal_gain,
    "optimal_tie": _optimal_tie,
    "optimal_printed": _optimal_printed,
    "bias_later": partial(_bias, "later"),
    "bias_defense": partial(_bias, "defense"),
    "defense_kept": _defense_kept,
    "middle_layers": _middle_layers,
    "decode_cost": partial(_cost, "decode"),
    "decode_speed": partial(_cost, "decode", speed=True),
    "compress_cost": partial(_cost, "compress"),
    "compress_order": _compress_order,
}
OF_LEAKAGE = {"leak_low", "leak_rise", "leak_fall", "leak_flipped", "leak_cut", "defense_rise", "defense_cut"}
OF_KEEPING = {"bias_asymmetry", "bias_size", "bias_later", "bias_defense", "defense_kept", "middle_layers"}
OF_TIME = {"decode_cost", "decode_speed", "compress_cost", "compress_order"}
PRINTED = {"optimal_printed"}  # what the paper prints, whatever was run
FIXED = ("variant", "ratio", "nothing", "usual", "each", "least")  # what a claim says of all its members


# ---------------------------------------------------------------- members and verdicts


def cells(claim: Mapping, sets: Mapping) -> list[tuple[str, dict]]:
    """(label, cell) of every member: the product of `over`, and what the claim says of all of them."""
    axes = {
        name: sets.get(given, [given]) if isinstance(given, str) else given
        for name, given in claim.get("over", {}).items()
    }
    fixed = {name: claim[name] for name in FIXED if name in claim}
    return [
        (", ".join(map(str, chosen)) or "all", fixed | dict(zip(axes, chosen, strict=True)))
        for chosen in product(*axes.values())
    ]


def members(claim: Mapping, sets: Mapping, s: Study) -> list[Member | NotTestable]:
    """What a claim is tested on in one reading. A model that says nothing to the point keeps every secret."""
    contrast = claim["contrast"]
    if contrast not in OF_TIME | OF_KEEPING | PRINTED:
        following = s.follow.uncompressed()
        if not following.value >= 0.5:
            raise NotTestable(f"the uncompressed model itself follows too few instructions ({following:.2f})")
    if contrast in OF_LEAKAGE and s.leak.uncompressed().value > 0.5:
        raise NotTestable("the uncompressed model itself tells its instructions")
    found: list[Member | NotTestable] = []
    for label, cell in cells(claim, sets):
        try:
            found.append(Member(label, CONTRASTS[contrast](s, **cell), some=claim.get("some", False)))
        except NotTestable as reason:
            found.append(NotTestable(f"{label}: {reason}") if "policy" in cell else reason)
    return found


GENERAL = ("five", "steady")  # sets whose claims are about policies in general; "later" are the three that L9 names


def evaluate(studies: Sequence[Study], model: str, profile: str = "quick") -> pd.DataFrame:
    """Verdict of every claim in every reading of `studies` (`judge.verdicts`); claims about policies in general are
    asked of each of a reader's own policies too."""
    book, by = claims.load_claims("leakage"), {s.reading: s for s in studies}
    general = [one for one in book["claims"] if one.get("over", {}).get("policy") in GENERAL]
    return history.verdicts(
        book["claims"],
        lambda claim, reading: members(claim, book["sets"], by.get(reading, studies[0])),
        lambda claim: ["any"] if claim["contrast"] in OF_TIME | PRINTED else list(by),
        own=claims.of_own(general, studies[0].answers.policy), whose="paper", model=model, profile=profile,
    )  # fmt: skip


def differing(first: pd.DataFrame, second: pd.DataFrame, reading: str) -> pd.DataFrame:
    """Claims to which two models' verdicts differ, in one reading: claim, statement, and a column for each model."""
    both = pd.concat([first, second])
    both = both[both.reading.isin([reading, "any"])]
    wide = both.pivot_table(index="claim", columns="model", values="verdict", aggfunc="first", sort=False)
    wide = wide[wide.ne(wide.iloc[:, 0], axis=0).any(axis=1)].reset_index()
    wide.insert(1, "statement", wide.claim.map(both.drop_duplicates("claim").set_index("claim").statement))
    return wide
