"""Tables and numbers of the leakage chapter."""

from collections.abc import Sequence
from contextlib import suppress
from itertools import product

import numpy as np
import pandas as pd

from kvrepro.chapters.leakage import experiment
from kvrepro.chapters.leakage.study import Means, Study, mean_of, means, middle, over_classes, safe_budget
from kvrepro.experiment import claims, stats
from kvrepro.experiment.judge import NotTestable
from kvrepro.experiment.stats import UNIT, Estimate


def numbers(verdicts: pd.DataFrame, found: experiment.Found, studies: Sequence[Study]) -> dict[str, str]:
    """What the prose may quote, as text: of each claim `<claim>-<reading>` (value with interval) and `...-verdict`;
    sizes, failures, floors, the uncompressed scores; of each policy, order and variant what it follows and tells at the
    middle ratios and its leak-safe budget, in the last of the readings."""
    s = studies[-1]
    every = [found.main, found.alone, found.bare, found.marks, *([] if found.examples is None else [found.examples])]
    errors = {name: sum(int(count(rows).sum()) for rows in every) for name, count in _COUNTS.items()}
    shown = {
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
        "follow-full": _said(s.follow.estimate(policy="full", ratio=0.0)),
        "leak-full": _said(s.leak.estimate(policy="full", ratio=0.0)),
    }
    variants = ("default", "fair", "ends", "whitelist", "opening", "whole")
    for one, order, variant in product((*experiment.FIVE, *experiment.TWO), experiment.ORDERS, variants):
        cell = s.cell(policy=one, order=order, variant=variant)
        name = f"{one}-{order}-{variant}"
        shown |= dict.fromkeys((f"safe-{name}", f"leak-{name}", f"follow-{name}"), "not run")
        with suppress(NotTestable):
            ratios = middle(s.leak.ratios(True, **cell))
            for which, m in (("leak", s.leak), ("follow", s.follow)):
                shown[f"{which}-{name}"] = _said(
                    stats.interval(m.mean(ratios, **cell), bounds=UNIT, each=m.each * len(ratios))
                )
            safe = safe_budget(s, **cell)
            following = s.follow.estimate(ratio=round(1 - float(safe[0]), 6), **cell).value
            budget = stats.spread_of(float(safe[0]), safe[1:], s.leak.systems)
            shown[f"safe-{name}"] = f"{_said(budget)} (following {following:.2f})"
    shown |= {f"{name}-{way}": text for way in WAYS for name, text in _marked(found, way).items()}
    whole = s.cell(policy="streaming_llm", order="normal")
    for variant in ("opening", "whole"):  # beside the whitelist and the default at the same ratio
        pair = (variant, "whitelist", "default")
        shown |= dict.fromkeys([f"{variant}-ratio", *[f"{variant}-beside-{one}" for one in pair]], "not run")
        with suppress(NotTestable):
            ratio = s.leak.ratios(**whole, variant=variant)[0]
            shown[f"{variant}-ratio"] = f"{ratio:.0%}"
            for one in pair:
                shown[f"{variant}-beside-{one}"] = _said(s.leak.estimate(ratio=ratio, variant=one, **whole))
    return shown | claims.quoted(verdicts)


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
        name: _said(stats.interval(mean_of(m.shares, 1), bounds=UNIT, each=m.each * len(m.columns)))
        if m.columns
        else "not run"
        for name, m in pairs.items()
    }


def _said(e: Estimate) -> str:
    return f"{e.value:.2f}" + ("" if np.isnan(e.low) else f" [{e.low:.2f}, {e.high:.2f}]")


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
            return _said(means(here, measure, *by).estimate(policy=policy, **({"ratio": ratio} | cell)))
        except NotTestable:
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
    pooled = means(each[each.order == "normal"], "passed")
    average = over_classes(means(each[each.order == "normal"], "passed", "kind"))
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
        return _said(m.estimate(policy=policy, ratio=ratio))
    except NotTestable:
        return "not run"
