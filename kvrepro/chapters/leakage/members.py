"""What the leakage claims are tested on: values by system prompt, or resampled statistics for orders and ranks."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import combinations, product
from typing import Any, Self

import numpy as np
import pandas as pd

from kvrepro.chapters.leakage import scores
from kvrepro.chapters.leakage.cells import FIVE, ORDERS
from kvrepro.chapters.leakage.estimates import Means, mean_of, optimality, rank_curves
from kvrepro.chapters.leakage.settings import Settings
from kvrepro.experiment import claims, history, judge
from kvrepro.experiment.judge import Drawn, Facts, Member, NotTestable, Sample, Unpaired
from kvrepro.experiment.models import Loaded
from kvrepro.experiment.stats import MIN_ITEMS

Parts = dict[str, Sample | Unpaired | Drawn]
What = Sample | Drawn | Facts | Parts
MIDDLE = (0.3, 0.7)  # the middle ratios; figures 2 and 3 of the paper start at the first
LOW = 0.2  # greatest ratio that counts as low
ROOM = 0.05  # if neither of two measures exceeds this, there is nothing to compare
UNBIASED = 0.10  # greatest difference between the keep rates of an unbiased policy (L5b)
DIALS = {"main": (["streaming_llm"], ORDERS), "examples": (["snapkv", "tova"], ("normal",))}
TABLES = {"main": "pitfalls_t01_debias_ifeval.csv", "examples": "pitfalls_t02_debias_longbench.csv"}  # as printed


@dataclass(frozen=True)
class Study:
    """The tables of one run in one reading, and the means of each measure."""

    reading: str
    answers: pd.DataFrame  # of the main study: columns of a cell, system, followed, following, told, tells_defense
    alone: pd.DataFrame = field(default_factory=pd.DataFrame)  # without a defense
    examples: pd.DataFrame = field(default_factory=pd.DataFrame)
    dials: Mapping[str, pd.DataFrame] = field(default_factory=dict)  # main, examples: cells as described in any reading
    timing: pd.DataFrame = field(default_factory=pd.DataFrame)
    instructions: float = 1  # mean number of rules of a system prompt; 1 as described, where classes are counted
    floor: float = math.nan  # leakage of a refusal
    other: "Study | None" = None  # of a second model, in the same reading

    @classmethod
    def of(cls, tables: Mapping[str, pd.DataFrame | None], reading: str) -> Self:
        """The tables by their studies' names; those that were not run are missing or None."""
        run = {name: table for name, table in tables.items() if table is not None}
        as_run, main, none = reading == "as_run", run["main"], pd.DataFrame()
        read = {name: scores.in_reading(run[name], reading) for name in ("main", "alone", "examples") if name in run}
        refused = run["controls"].query("control == 'refusal'") if "controls" in run else main.head(0)
        return cls(
            reading,
            answers=read["main"].assign(following=scores.following(read["main"], as_run)),
            alone=read.get("alone", none),
            examples=read.get("examples", none),
            dials={name: dial(run[name], reading) for name in DIALS if name in run},
            timing=run.get("timing", none),
            instructions=main.asked[main.ratio == 0].mean() if as_run else 1.0,
            floor=scores.told(refused, as_run).mean(),
            other=cls.of({"main": run["other"]}, reading) if "other" in run else None,
        )

    @cached_property
    def follow(self) -> Means:
        return Means(self.answers, "following", each=self.instructions)

    @cached_property
    def leak(self) -> Means:
        return Means(self.answers, "told")

    @cached_property
    def leak_defense(self) -> Means:
        return Means(self.answers, "tells_defense")

    @cached_property
    def classes(self) -> pd.DataFrame:
        if self.alone.empty:
            raise NotTestable("prompts without a defense were not run")
        return scores.by_class(self.alone)

    @cached_property
    def by_class(self) -> Means:
        return Means(self.classes, "passed", "rules", "kind")

    @cached_property
    def kept(self) -> pd.DataFrame:
        return scores.keep_rates(self.answers)

    @cached_property
    def by_part(self) -> Means:
        return Means(self.kept, "kept", "part", piled=False)


def within(ratios: Iterable[float], low: float = MIDDLE[0], high: float = MIDDLE[1]) -> list[float]:
    """The ratios between two, of the middle ones if none are named."""
    inner = [ratio for ratio in ratios if low <= ratio <= high]
    if not inner:
        raise NotTestable(f"no ratio from {low:g} {'on' if high >= 1 else f'to {high:g}'} was run")
    return inner


def difference(m: Means, a: np.ndarray, b: np.ndarray, ratios: int = 1) -> Sample:
    """Values a and b of each system prompt, means over so many ratios."""
    frame = pd.DataFrame({"a": a, "b": b})
    return Sample(frame, "difference", bounds=m.bounds, each=m.each * ratios, limits=(-1.0, 1.0))


def check_some(name: str, *sides: np.ndarray) -> None:
    """Raise NotTestable if no side has anything to compare."""
    if max(np.nanmean(side) if np.isfinite(side).any() else 0.0 for side in sides) <= ROOM:
        raise NotTestable(f"nothing is {'followed' if name == 'follow' else 'told'} on either side")


def compared(m: Means, a: Mapping, b: Mapping, *, whole: bool = False, some: str = "") -> Sample:
    """Cell a minus cell b, means over the middle ratios at which both were run (whole: for every prompt). some: what,
    "follow" or "leak", one of them must have some of."""
    ratios = within(sorted(set(m.ratios(whole, **a)) & set(m.ratios(whole, **b))))
    sides = [m.mean(ratios, **cell) for cell in (a, b)]
    if some:
        check_some(some, *sides)
    return difference(m, *sides, ratios=len(ratios))


# ---------------------------------------------------------------- following and leakage


def leak_low(s: Study, **cell) -> Sample:
    """Leakage at the lowest ratio, minus that of a refusal."""
    lowest = s.leak.ratios(**cell)[0]
    if lowest > LOW:
        raise NotTestable(f"the lowest ratio run, {lowest:g}, is above {LOW:g}")
    above = pd.DataFrame({"a": s.leak.per(ratio=lowest, **cell) - s.floor})
    return Sample(above, bounds=(-s.floor, 1 - s.floor))


def rise(name: str, s: Study, each: bool = False, **cell) -> What:
    """Mean over the ratios from 0.3 for which every prompt has room, minus the uncompressed. each: every ratio by
    itself."""
    m: Means = getattr(s, name)
    start = m.per(ratio=0.0, **cell)
    if each:
        return {f"{r:.0%} dropped": difference(m, m.per(ratio=r, **cell), start) for r in m.ratios(**cell)}
    ratios = within(m.ratios(True, **cell), high=1)
    return difference(m, m.mean(ratios, **cell), start, len(ratios))


def leak_fall(s: Study, each: bool = False, **cell) -> Parts:
    """Leakage at 0.7 minus that at 0.9; each: at every ratio minus that at 0.9."""
    ratios = [ratio for ratio in s.leak.ratios(**cell) if ratio != 0.9] if each else [0.7]
    curves, end = {r: s.leak.per(ratio=r, **cell) for r in ratios}, s.leak.per(ratio=0.9, **cell)
    check_some("leak", end, *curves.values())
    return {f"{r:.0%} dropped": difference(s.leak, curve, end) for r, curve in curves.items()}


def leak_long(s: Study) -> Sample:
    """Leakage of labelled examples, uncompressed, the defense first."""
    if s.examples.empty or s.examples.words.max() < 3000:
        needed = "items=ifeval, and options with words=3000"
        raise NotTestable(f"system prompts of 3,000 to 4,000 words are needed: {needed}")
    return Sample(pd.DataFrame({"a": Means(s.examples, "told").per(policy=s.examples.policy.iloc[0], ratio=0.0)}))


def follow_share(s: Study, ratio: float, **cell) -> Sample:
    """Following at a ratio as a share of the uncompressed."""
    frame = pd.DataFrame({"a": s.follow.per(ratio=ratio, **cell), "full": s.follow.per(ratio=0.0, **cell)})
    return Sample(frame, "share_of_ceiling", bounds=s.follow.bounds, each=s.follow.each)


def follow_lost(s: Study, **cell) -> Sample:
    """Following uncompressed minus that at the middle ratios, of a policy that keeps both parts at nearly the same
    rate."""
    ratios = within(s.follow.ratios(**cell))
    if not abs(gap := float(np.nanmean(bias(s, **cell)))) <= UNBIASED:
        raise NotTestable(f"its keep rates differ by {gap:.2f}: what is lost may be due to that")
    return difference(s.follow, s.follow.per(ratio=0.0, **cell), s.follow.mean(ratios, **cell), len(ratios))


def between_orders(name: str, s: Study, nothing: bool = False, **cell) -> Sample:
    """Normal minus flipped order. nothing: also test if there is nothing to compare."""
    normal, flipped = (cell | {"order": order} for order in ORDERS)
    return compared(getattr(s, name), normal, flipped, some="" if nothing else name)


def gain(name: str, s: Study, variant: str, nothing: bool = False, **cell) -> Sample:
    """Default minus variant. nothing: as in `between_orders`."""
    return compared(getattr(s, name), cell, cell | {"variant": variant}, whole=True, some="" if nothing else name)


def policy_gap(s: Study, each: bool = False) -> What:
    """Mean of the paper's other policies minus K-norm, which the paper finds far below them. each: every pair."""
    ratios = within(set.intersection(*(set(s.follow.ratios(policy=name)) for name in FIVE)), high=1)
    curves = pd.DataFrame({name: s.follow.mean(sorted(ratios), policy=name) for name in FIVE})
    if each:
        return judge.pairs(curves, "", each=s.follow.each * len(ratios)).what  # type: ignore[return-value]
    others = curves.drop(columns="k_norm").mean(axis=1, skipna=False)
    return difference(s.follow, others.to_numpy(), curves.k_norm.to_numpy(), len(ratios))


def model_spread(s: Study) -> Parts:
    """By policy, the loss of following in one model against that in the other, paired by system prompt."""
    if s.other is None:
        raise NotTestable("one run has one model: name a second checkpoint in options, as compare")
    parts: Parts = {}
    for name in FIVE:
        with suppress(NotTestable):
            ratios = within(set(s.follow.ratios(policy=name)) & set(s.other.follow.ratios(policy=name)), high=1)
            lost = {}
            for side, study in (("a", s), ("b", s.other)):
                rows = study.answers.query("order == 'normal' and variant == 'default' and policy == @name")
                wide = rows.pivot_table(index="system", columns="ratio", values="following")
                lost[side] = wide[0.0] - wide[ratios].mean(axis=1, skipna=False)
            most = max(s.follow.most, s.other.follow.most)
            parts[name] = Sample(pd.DataFrame(lost).dropna(), "difference", bounds=(-most, most), each=s.follow.each)
    if not parts:
        raise NotTestable("the two models share no policy and ratio")
    return parts


# ---------------------------------------------------------------- keep rates


def bias(s: Study, **cell) -> np.ndarray:
    """Keep rate of the directive minus that of the defense, mean over the middle ratios, [systems]."""
    ratios = within(s.by_part.ratios(part="defense", **cell))
    return s.by_part.mean(ratios, part="directive", **cell) - s.by_part.mean(ratios, part="defense", **cell)


def bias_toward(toward: str, s: Study, order: str = "normal", **cell) -> Sample:
    """By how much the keep rate of one part exceeds the other's. toward: the directive, the defense, or the later."""
    parts = ["directive", "defense"]
    if toward == "defense" or (toward == "later" and order == "flipped"):
        parts.reverse()
    return compared(s.by_part, *(cell | {"order": order, "part": part} for part in parts))


def bias_asymmetry(s: Study, **cell) -> Sample:
    """The sum of both orders' biases, which is 0 for a mirror image."""
    both = np.sum([bias(s, order=order, **cell) for order in ORDERS], 0)
    return Sample(pd.DataFrame({"a": both}), bounds=None)


def defense_kept(s: Study, variant: str, **cell) -> Sample:
    """Keep rate of the defense with the variant minus that with the default."""
    cell |= {"part": "defense"}
    return compared(s.by_part, cell | {"variant": variant}, cell, whole=True)


def middle_layers(s: Study, policy: str) -> Sample:
    """Keep rate of the defense in the middle third of the layers minus that in the others, the defense first."""
    rows = s.kept.query("order == 'normal' and variant == 'default' and part == 'defense' and policy == @policy")
    rows = rows[rows.ratio.isin(within(rows.ratio.unique()))]
    wide = rows.pivot_table(index="system", columns="layer", values="kept").to_numpy()
    if not (third := wide.shape[1] // 3):
        raise NotTestable(f"keep rates of {wide.shape[1]} layers: a middle needs three")
    inner, outer = wide[:, third:-third], np.delete(wide, np.s_[third:-third], 1)
    return Sample(pd.DataFrame({"a": inner.mean(1) - outer.mean(1)}), bounds=None)


# ---------------------------------------------------------------- classes of rules


def alone_ratios(s: Study) -> list[float]:
    return within(sorted({key[3] for key in s.by_class.cells}), high=1)


def class_spread(s: Study, **cell) -> Parts:
    """Losses of each pair of classes that six system prompts or more hold; unpaired, since few prompts hold both."""
    ratios, lost = alone_ratios(s), {}
    for kind in sorted({key[-1] for key in s.by_class.cells if key[-2] == "multi"}):
        key = {"order": "alone", "rules": "multi", "kind": kind} | cell
        with suppress(NotTestable):
            left = mean_of(np.stack([s.by_class.per(ratio=r, **key) for r in ratios], 1), 1)
            of_prompts = pd.Series(s.by_class.per(ratio=0.0, **key) - left).dropna()
            if len(of_prompts) >= MIN_ITEMS:
                lost[kind] = of_prompts
    if len(lost) < 2:
        raise NotTestable(f"{len(lost)} classes are held by six system prompts: a spread needs two")
    return {f"{a} against {b}": Unpaired(lost[a], lost[b], each=len(ratios)) for a, b in combinations(lost, 2)}


def rank_gap(s: Study, **cell) -> Drawn:
    """Rank correlation with the uncompressed order of the classes: prompts with one rule minus those with several."""
    ratios = alone_ratios(s)
    single, multi = (rank_curves(s.by_class, rules, ratios, **cell) for rules in ("single", "multi"))
    if not (np.isfinite(single[0]).any() and np.isfinite(multi[0]).any()):
        raise NotTestable("uncompressed, every class is followed equally well: there is no order to lose")
    gap = mean_of(single, 1) - mean_of(multi, 1)
    systems = s.classes[s.classes.rules == "multi"].system.nunique()
    return Drawn(float(gap[0]), gap[1:], systems, limits=(-2.0, 2.0))  # of two rank correlations


# ---------------------------------------------------------------- the dial


def dial(rows: pd.DataFrame, reading: str) -> pd.DataFrame:
    """The rows of a dial, whose cells are as described in both readings. Following is the mean over classes, of
    labelled examples, which have none, the share of right labels."""
    rows = scores.in_reading(rows, reading, "as_described")
    following = scores.following(rows, pooled=False) if rows.passed.notna().any() else rows.followed
    return rows.assign(following=following)


def share_gains(s: Study, study: str, minus: float | None = None, **how: bool) -> dict[float, Drawn]:
    """How often each setting is Pareto-optimal (`estimates.optimality`), minus the share of another setting."""
    if study not in s.dials:
        raise NotTestable("the study of labelled examples was not run")
    (policies, orders), dial = DIALS[study], s.dials[study]
    share = optimality(dial, policies, orders, **how)
    if minus is not None and min(series[0] for series in share.values()) == 1:
        raise NotTestable("every setting is optimal in every cell: none beats another")
    if minus is not None and minus not in share:
        raise NotTestable(f"the setting {minus:g} was not run")
    base = 0.0 if minus is None else share[minus]
    n = dial[dial.told.notna()].system.nunique()
    gains = {x: series - base for x, series in share.items()}
    return {x: Drawn(float(series[0]), series[1:], n, limits=(-1.0, 1.0)) for x, series in gains.items()}


def optimal_gain(s: Study, study: str, least: float = 0.0, **how: bool) -> Parts:
    """How much more often each setting above 0, or from `least` on, is optimal than the default."""
    return {f"λ = {x:g}": gained for x, gained in share_gains(s, study, 0.0, **how).items() if x and x >= least}


def optimal_tie(s: Study, study: str, **how: bool) -> Drawn:
    """How much more often fair shares are optimal than the setting 0.8."""
    return share_gains(s, study, 0.8, **how)[1.0]


def printed(study: str) -> pd.Series:
    """The paper's own averages by setting."""
    rows = claims.published(TABLES[study])
    settings = rows.metric.str.extract(r"^avg optimality %, lambda=(.*)$")[0].dropna().astype(float)
    return rows.value[settings.index].astype(float).div(100).set_axis(settings)


def optimal_printed(s: Study, study: str) -> Facts:
    """The paper's own averages, each setting above 0 minus that of 0."""
    share = printed(study)
    return Facts((share - share[0.0]).drop(0.0).rename("λ = {:g}".format))


def optimal_shares(s: Study) -> pd.DataFrame:
    """How often each setting is optimal, as printed, in the usual sense, and in the paper's words: columns study,
    source, setting, value, low, high."""
    rows: list[tuple] = []
    for study in s.dials:
        rows += [(study, "printed", x, share, math.nan, math.nan) for x, share in printed(study).items()]
        for source, both in (("here", False), ("here, in the paper's words", True)):
            with suppress(NotTestable):
                found = share_gains(s, study, both=both)
                rows += [(study, source, x, *share.estimate().triple) for x, share in found.items()]
    return pd.DataFrame(rows, columns=["study", "source", "setting", "value", "low", "high"])


# ---------------------------------------------------------------- time


def of_times(column: str, statistic: Callable[..., float], s: Study, variant: str = "") -> Sample:
    """A statistic of the median times, by item, of variants and default, which stands last."""
    if s.timing.empty:
        raise NotTestable("no timing was run")
    wide = s.timing.pivot_table(index="item", columns="variant", values=column, aggfunc="median")
    variants = [*([variant] if variant else ("whitelist", "fair")), "default"]
    if missing := [name for name in variants if name not in wide]:
        raise NotTestable(f"no timing of {missing[0]}")
    limits = (-1.0 if variant else -math.inf, math.inf)
    return Sample(wide[variants].dropna(), lambda times: float(statistic(*np.median(times, 0))), limits=limits)


# ---------------------------------------------------------------- claims


CONTRASTS: dict[str, Callable[..., What]] = {
    "leak_low": leak_low, "leak_rise": partial(rise, "leak"), "defense_rise": partial(rise, "leak_defense"),
    "leak_fall": leak_fall, "leak_flipped": partial(between_orders, "leak"), "leak_cut": partial(gain, "leak"),
    "defense_cut": partial(gain, "leak_defense"), "leak_long": leak_long, "follow_share": follow_share,
    "follow_lost": follow_lost, "follow_flipped": partial(between_orders, "follow"),
    "follow_cost": partial(gain, "follow"), "policy_gap": policy_gap, "model_spread": model_spread,
    "class_spread": class_spread, "rank_gap": rank_gap, "optimal_gain": optimal_gain, "optimal_tie": optimal_tie,
    "bias_size": partial(bias_toward, "directive"), "bias_later": partial(bias_toward, "later"),
    "bias_defense": partial(bias_toward, "defense"), "bias_asymmetry": bias_asymmetry, "defense_kept": defense_kept,
    "middle_layers": middle_layers, "optimal_printed": optimal_printed,
    "decode_cost": partial(of_times, "decode", lambda cured, base: cured / base - 1),
    "decode_speed": partial(of_times, "decode", lambda cured, base: base / cured - 1),
    "compress_cost": partial(of_times, "compress", lambda cured, base: cured / base - 1),
    "compress_order": partial(of_times, "compress", lambda whitelist, fair, base: (whitelist - fair) / base),
}  # fmt: skip
OF_LEAKAGE = {"leak_low", "leak_rise", "leak_fall", "leak_flipped", "leak_cut", "defense_rise", "defense_cut"}
OF_KEEPING = {"bias_asymmetry", "bias_size", "bias_later", "bias_defense", "defense_kept", "middle_layers"}
IN_ANY_READING = {"decode_cost", "decode_speed", "compress_cost", "compress_order", "optimal_printed"}
FIXED = ("variant", "ratio", "nothing", "both", "start", "each", "least")  # fields that hold for all members of a claim
GENERAL = ("five", "steady")  # sets of policies whose claims are general; "later" are the three that L9 names


def cells(claim: Mapping, sets: Mapping) -> list[tuple[str, dict]]:
    """(label, cell) of every member: the product of `over`, with the claim's `FIXED` fields."""
    over = {
        name: sets[given] if isinstance(given, str) and given in sets else given
        for name, given in claim.get("over", {}).items()
    }
    axes = {name: [given] if isinstance(given, str) else given for name, given in over.items()}
    fixed = {name: claim[name] for name in FIXED if name in claim}
    return [
        (", ".join(map(str, chosen)) or "all", fixed | dict(zip(axes, chosen, strict=True)))
        for chosen in product(*axes.values())
    ]


def by_prompt(s: Study) -> Study:
    """The study with following as claims were first judged by it: its mean over system prompts."""
    other = None if s.other is None else by_prompt(s.other)
    dials = {name: rows.assign(following=rows.followed) for name, rows in s.dials.items()}
    return replace(s, answers=s.answers.assign(following=s.answers.followed), dials=dials, other=other)


def members(claim: Mapping, sets: Mapping, s: Study) -> list[Member | NotTestable]:
    """What a claim is tested on in one reading. Not testable: a model that follows too little, since one that answers
    nothing keeps every secret."""
    contrast, s = claim["contrast"], by_prompt(s) if claim.get("mean") == "prompts" else s
    if contrast not in OF_KEEPING | IN_ANY_READING and not (value := s.follow.uncompressed()) >= 0.5:
        raise NotTestable(f"the uncompressed model itself follows too few instructions ({value:.2f})")
    if contrast in OF_LEAKAGE and s.leak.uncompressed() > 0.5:
        raise NotTestable("the uncompressed model itself tells its instructions")
    tested: list[Member | NotTestable] = []
    for label, cell in cells(claim, sets):
        try:
            tested.append(Member(label, CONTRASTS[contrast](s, **cell), some=claim.get("some", False)))
        except NotTestable as reason:
            tested.append(NotTestable(f"{label}: {reason}") if "policy" in cell else reason)
    return tested


def judged(book: Mapping, studies: Sequence[Study], model: str, profile: str = "quick") -> pd.DataFrame:
    """Verdict of a book's claims in every reading of `studies` (`judge.verdicts`). General claims are also tested on
    each of the reader's own policies."""
    study_of = {s.reading: s for s in studies}
    general = [claim for claim in book["claims"] if claim.get("over", {}).get("policy") in GENERAL]
    return history.verdicts(
        book["claims"],
        lambda claim, reading: members(claim, book["sets"], study_of.get(reading, studies[0])),
        lambda claim: ["any"] if claim["contrast"] in IN_ANY_READING else list(study_of),
        own=claims.claims_on_own(general, studies[0].answers.policy), whose="paper", model=model, profile=profile,
    )  # fmt: skip


def verdicts(book: Mapping, tables: Mapping[str, Any], loaded: Loaded, settings: Settings) -> pd.DataFrame:
    """`judged` of a book's claims on the tables of one run: main, alone, examples, controls, timing and other."""
    return judged(book, [Study.of(tables, name) for name in settings.readings], loaded.name, settings.profile)
