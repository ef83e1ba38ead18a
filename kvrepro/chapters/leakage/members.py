"""What the leakage claims are tested on: values by system prompt, or resampled statistics for orders and ranks."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
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
UNBIASED = 0.10  # greatest difference between the keep rates of an unbiased policy (L5b)


def _high_ratios(ratios: Iterable[float]) -> list[float]:
    high = [ratio for ratio in ratios if ratio >= FROM]
    if not high:
        raise NotTestable(f"no ratio from {FROM:g} on was run")
    return high


def _pair(m: Means, a: np.ndarray, b: np.ndarray, ratios: int = 1, needed: str = "") -> Sample:
    """Values a and b of each system prompt, means over so many ratios. needed: "follow" or "leak", if one side at least
    must have some of it."""
    if needed:
        _check_some([a, b], needed)
    return Sample(
        pd.DataFrame({"a": a, "b": b}), "difference", bounds=m.bounds, each=m.each * ratios, limits=(-1.0, 1.0)
    )


def _values(values: np.ndarray) -> Sample:
    """Values of keep rates, which do not pile up at their bounds."""
    return Sample(pd.DataFrame({"a": values}), bounds=None)


def _check_some(sides: Iterable[np.ndarray], name: str) -> None:
    """Raise NotTestable if no side has anything to compare."""
    if max(np.nanmean(values) if np.isfinite(values).any() else 0.0 for values in sides) <= ROOM:
        raise NotTestable(f"nothing is {'followed' if name == 'follow' else 'told'} on either side")


# ---------------------------------------------------------------- contrasts: (study, a member's cell) -> what is tested


def _leak_low(s: Study, **cell) -> Sample:
    lowest = s.leak.ratios(**cell)[0]
    if lowest > LOW:
        raise NotTestable(f"the lowest ratio run, {lowest:g}, is above {LOW:g}")
    above = pd.DataFrame({"a": s.leak.per(ratio=lowest, **cell) - s.floor})
    return Sample(above, bounds=(-s.floor, 1 - s.floor), each=s.leak.each)


def _rise(name: str, s: Study, each: bool = False, **cell) -> What:
    """Mean over the ratios from 0.3 for which every prompt has room, minus the uncompressed. each: every ratio by
    itself."""
    m: Means = getattr(s, name)
    if each:
        start = m.per(ratio=0.0, **cell)
        return {f"{r:.0%} dropped": _pair(m, m.per(ratio=r, **cell), start) for r in m.ratios(**cell)}
    ratios = _high_ratios(m.ratios(True, **cell))
    return _pair(m, m.mean(ratios, **cell), m.per(ratio=0.0, **cell), len(ratios))


def _leak_fall(s: Study, each: bool = False, **cell) -> Parts:
    """Leakage at 0.7 minus that at 0.9; each: at every ratio minus that at 0.9."""
    ratios = [ratio for ratio in s.leak.ratios(**cell) if ratio != 0.9] if each else [0.7]
    curves, end = [s.leak.per(ratio=ratio, **cell) for ratio in ratios], s.leak.per(ratio=0.9, **cell)
    _check_some([end, *curves], "leak")
    return {f"{r:.0%} dropped": _pair(s.leak, curve, end) for r, curve in zip(ratios, curves, strict=True)}


def _leak_long(s: Study) -> Sample:
    """Leakage of labelled examples, uncompressed, the defense first."""
    if s.words < 3000:
        raise NotTestable(
            "system prompts of 3,000 to 4,000 words are needed: items=ifeval, and options with words=3000"
        )
    m = means(s.examples, "told")
    return Sample(pd.DataFrame({"a": m.per(policy=next(key[1] for key in m.shares), ratio=0.0)}), each=m.each)


def _follow_share(s: Study, ratio: float, **cell) -> Sample:
    pair = {"a": s.follow.per(ratio=ratio, **cell), "full": s.follow.per(ratio=0.0, **cell)}
    return Sample(pd.DataFrame(pair), "share_of_ceiling", bounds=s.follow.bounds, each=s.follow.each)


def _follow_lost(s: Study, **cell) -> Sample:
    """Following uncompressed minus that at the middle ratios, of a policy that keeps both parts at nearly the same
    rate."""
    ratios = middle(s.follow.ratios(**cell))
    if not abs(gap := float(np.nanmean(bias(s, ratios, **cell)))) <= UNBIASED:
        raise NotTestable(f"its keep rates differ by {gap:.2f}: what is lost may be due to that")
    return _pair(s.follow, s.follow.per(ratio=0.0, **cell), s.follow.mean(ratios, **cell), len(ratios))


def _between_orders(name: str, s: Study, nothing: bool = False, **cell) -> Sample:
    """Normal minus flipped order. nothing: also test if there is nothing to compare."""
    m: Means = getattr(s, name)
    ratios = middle(m.ratios(**cell))
    a, b = (m.mean(ratios, order=order, **cell) for order in ORDERS)
    return _pair(m, a, b, len(ratios), "" if nothing else name)


def _gain(name: str, s: Study, variant: str, nothing: bool = False, **cell) -> Sample:
    """Default minus variant, at the middle ratios at which both were run and for which every prompt has room."""
    m: Means = getattr(s, name)
    ratios = middle(set(m.ratios(True, variant=variant, **cell)) & set(m.ratios(True, **cell)))
    a, b = m.mean(ratios, **cell), m.mean(ratios, variant=variant, **cell)
    return _pair(m, a, b, len(ratios), "" if nothing else name)


def _bias_asymmetry(s: Study, **cell) -> Sample:
    ratios = middle(s.leak.ratios(**cell))
    return _values(np.sum([bias(s, ratios, order=order, **cell) for order in ORDERS], 0))


def _bias(toward: str, s: Study, order: str = "normal", **cell) -> Sample:
    """By how much the keep rate of one part exceeds the other's. toward: the directive, the defense, or the later."""
    toward_directive = bias(s, middle(s.leak.ratios(**cell)), order=order, **cell)
    later = "directive" if order == "normal" else "defense"
    return _values(toward_directive if (later if toward == "later" else toward) == "directive" else -toward_directive)


def _defense_kept(s: Study, variant: str, **cell) -> Sample:
    """Keep rate of the defense with the variant minus that with the default."""
    ratios = middle(set(s.leak.ratios(True, variant=variant, **cell)) & set(s.leak.ratios(True, **cell)))
    a, b = (s.by_part.mean(ratios, part="defense", variant=name, **cell) for name in (variant, "default"))
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
    """Mean of the paper's other policies minus K-norm, which the paper finds far below them. each: every pair."""
    ratios = _high_ratios(set.intersection(*(set(s.follow.ratios(policy=name)) for name in FIVE)))
    if each:
        means_by_policy = pd.DataFrame({name: s.follow.mean(ratios, policy=name) for name in FIVE})
        return judge.pairs(means_by_policy, "", each=s.follow.each * len(ratios)).what  # type: ignore[return-value]
    others = [s.follow.mean(ratios, policy=name) for name in FIVE if name != "k_norm"]
    return _pair(s.follow, np.mean(others, 0), s.follow.mean(ratios, policy="k_norm"), len(ratios))


def _model_spread(s: Study) -> Parts:
    """By policy, the loss of following in one model against that in the other, paired by system prompt."""
    if s.other is None:
        raise NotTestable("one run has one model: name a second checkpoint in options, as compare")
    parts: Parts = {}
    for name in FIVE:
        with suppress(NotTestable):
            ratios = _high_ratios(set(s.follow.ratios(policy=name)) & set(s.other.follow.ratios(policy=name)))
            lost = {}
            for side, study in (("a", s), ("b", s.other)):
                rows = study.answers[(study.answers.order == "normal") & (study.answers.variant == "default")]
                wide = rows[rows.policy == name].pivot_table(index="system", columns="ratio", values="following")
                lost[side] = wide[0.0] - wide[ratios].mean(axis=1, skipna=False)
            pair = pd.DataFrame(lost).dropna()
            most = max(s.follow.bounds[1], s.other.follow.bounds[1])
            parts[name] = Sample(pair, "difference", bounds=(-most, most), each=s.follow.each)
    if not parts:
        raise NotTestable("the two models share no policy and ratio")
    return parts


def _alone_ratios(s: Study) -> list[float]:
    if not s.by_class.shares:
        raise NotTestable("prompts without a defense were not run")
    return _high_ratios(sorted({key[3] for key in s.by_class.shares}))


def _class_spread(s: Study, **cell) -> Parts:
    """Losses of each pair of classes that six system prompts or more hold; unpaired, since few prompts hold both."""
    ratios, lost = _alone_ratios(s), {}
    for kind in sorted({key[-1] for key in s.by_class.shares if key[-2] == "multi"}):
        key = {"order": "alone", "rules": "multi", "kind": kind} | cell
        with suppress(NotTestable):
            left = mean_of(np.stack([s.by_class.per(ratio=r, **key) for r in ratios], 1), 1)
            values = pd.Series(s.by_class.per(ratio=0.0, **key) - left).dropna()
            if len(values) >= MIN_ITEMS:
                lost[kind] = values
    if len(lost) < 2:
        raise NotTestable(f"{len(lost)} classes are held by six system prompts: a spread needs two")
    scored = s.by_class.each * len(ratios)
    return {f"{a} against {b}": Unpaired(lost[a], lost[b], each=scored) for a, b in combinations(lost, 2)}


def _rank_gap(s: Study, **cell) -> Drawn:
    ratios = _alone_ratios(s)
    single, multi = (rank_curves(s, rules, ratios, **cell) for rules in ("single", "multi"))
    if not (np.isfinite(single[0]).any() and np.isfinite(multi[0]).any()):
        raise NotTestable("uncompressed, every class is followed equally well: there is no order to lose")
    gap = mean_of(single, 1) - mean_of(multi, 1)
    systems = s.classes[s.classes.rules == "multi"].system.nunique()
    return Drawn(float(gap[0]), gap[1:], systems, limits=(-2.0, 2.0))  # of two rank correlations


def _optimal_gain(s: Study, study: str, least: float = 0.0, **how: bool) -> Parts:
    """How much more often each setting above 0, or from `least` on, is optimal than the default. how: see
    `optimality`."""
    share = _shares(s, study, **how)
    return {f"λ = {x:g}": _share_gain(s, study, share[x], share[0.0]) for x in share if x and x >= least}


def _optimal_tie(s: Study, study: str, **how: bool) -> Drawn:
    share = _shares(s, study, **how)
    if 0.8 not in share:
        raise NotTestable("the setting 0.8 was not run")
    return _share_gain(s, study, share[1.0], share[0.8])


def _shares(s: Study, study: str, **how: bool) -> dict[float, np.ndarray]:
    policies, orders = DIALS[study]
    share, _ = optimality(s, policies, orders, study, **how)
    if min(series[0] for series in share.values()) == 1:
        raise NotTestable("every setting is optimal in every cell: none beats another")
    return share


def _share_gain(s: Study, study: str, a: np.ndarray, b: np.ndarray) -> Drawn:
    answered = s.dials[study].told.notna()
    return Drawn(float(a[0] - b[0]), (a - b)[1:], s.dials[study][answered].system.nunique(), limits=(-1.0, 1.0))


def _optimal_printed(s: Study, study: str) -> Facts:
    """The paper's own averages, each setting above 0 minus that of 0."""
    rows = claims.published(TABLES[study])
    settings = rows.metric.str.extract(r"^avg optimality %, lambda=(.*)$")[0].dropna().astype(float)
    share = rows.value[settings.index].astype(float).div(100).set_axis(settings)
    return Facts((share - share[0.0]).drop(0.0).rename("λ = {:g}".format))


def _times(s: Study, column: str, *variants: str) -> pd.DataFrame:
    """Median times over repeats, items by variant."""
    if s.timing.empty:
        raise NotTestable("no timing was run")
    wide = s.timing.pivot_table(index="item", columns="variant", values=column, aggfunc="median")
    if missing := [name for name in variants if name not in wide]:
        raise NotTestable(f"no timing of {missing[0]}")
    return wide[list(variants)].dropna()


def _cost(column: str, s: Study, variant: str, speed: bool = False) -> Sample:
    """Median time of the variant over that of the default, minus 1; speed: the same of tokens per second."""

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
PRINTED = {"optimal_printed"}  # about the paper's printed numbers, whatever was run
FIXED = ("variant", "ratio", "nothing", "both", "start", "each", "least")  # fields that hold for all members of a claim


# ---------------------------------------------------------------- members and verdicts


def cells(claim: Mapping, sets: Mapping) -> list[tuple[str, dict]]:
    """(label, cell) of every member: the product of `over`, with the claim's `FIXED` fields."""
    axes = {
        name: sets.get(given, [given]) if isinstance(given, str) else given
        for name, given in claim.get("over", {}).items()
    }
    fixed = {name: claim[name] for name in FIXED if name in claim}
    return [
        (", ".join(map(str, chosen)) or "all", fixed | dict(zip(axes, chosen, strict=True)))
        for chosen in product(*axes.values())
    ]


def by_prompt(s: Study) -> Study:
    """The study with following as claims were first judged by it: its mean over system prompts."""
    other = None if s.other is None else by_prompt(s.other)
    return replace(s, answers=s.answers.assign(following=s.answers.followed), other=other)


def members(claim: Mapping, sets: Mapping, s: Study) -> list[Member | NotTestable]:
    """What a claim is tested on in one reading. Not testable: a model that follows too little, since one that answers
    nothing keeps every secret."""
    contrast, s = claim["contrast"], by_prompt(s) if claim.get("mean") == "prompts" else s
    if contrast not in OF_TIME | OF_KEEPING | PRINTED:
        following = s.follow.uncompressed()
        if not following.value >= 0.5:
            raise NotTestable(f"the uncompressed model itself follows too few instructions ({following:.2f})")
    if contrast in OF_LEAKAGE and s.leak.uncompressed().value > 0.5:
        raise NotTestable("the uncompressed model itself tells its instructions")
    tested: list[Member | NotTestable] = []
    for label, cell in cells(claim, sets):
        try:
            tested.append(Member(label, CONTRASTS[contrast](s, **cell), some=claim.get("some", False)))
        except NotTestable as reason:
            tested.append(NotTestable(f"{label}: {reason}") if "policy" in cell else reason)
    return tested


GENERAL = ("five", "steady")  # sets of policies whose claims are general; "later" are the three that L9 names


def evaluate(studies: Sequence[Study], model: str, profile: str = "quick") -> pd.DataFrame:
    """Verdict of every claim in every reading of `studies` (`judge.verdicts`). General claims are also tested on each
    of the reader's own policies."""
    book, study_of = claims.load_claims("leakage"), {s.reading: s for s in studies}
    general = [claim for claim in book["claims"] if claim.get("over", {}).get("policy") in GENERAL]
    return history.verdicts(
        book["claims"],
        lambda claim, reading: members(claim, book["sets"], study_of.get(reading, studies[0])),
        lambda claim: ["any"] if claim["contrast"] in OF_TIME | PRINTED else list(study_of),
        own=claims.claims_on_own(general, studies[0].answers.policy), whose="paper", model=model, profile=profile,
    )  # fmt: skip


def differing(first: pd.DataFrame, second: pd.DataFrame, reading: str) -> pd.DataFrame:
    """The claims on which two models' verdicts differ in one reading. Columns claim, statement, and one per model."""
    both = pd.concat([first, second])
    both = both[both.reading.isin([reading, "any"])]
    wide = both.pivot_table(index="claim", columns="model", values="verdict", aggfunc="first", sort=False)
    wide = wide[wide.ne(wide.iloc[:, 0], axis=0).any(axis=1)].reset_index()
    wide.insert(1, "statement", wide.claim.map(both.drop_duplicates("claim").set_index("claim").statement))
    return wide
