"""One judge: claims and their members in, one row per claim and reading out. A verdict is arithmetic.

A chapter supplies members only: what is measured, for each policy, capacity, task or length that a claim is about. The
claim's rule, test and tolerance are data (`data/claims/*.yml`), and `kvrepro.experiment.stats` gives the intervals.

A member *holds* where its whole interval satisfies the rule and the test, if the claim names one, agrees; it *fails*
where no part of the interval does; else it is *open*. Rules:

- at_least, at_most b: the bound itself satisfies both. above, below b: it satisfies neither.
- between [b, c]; size_at_least, size_at_most b: of the absolute value; equivalent b: TOST at 5%.
- no_difference b: within b of 0, where neither the test nor the interval finds a difference. Where both find one, the
  member fails. Where one does, it is open: ranks can differ where means are equal, and means where ranks are.

A test of ranks agrees with an interval if it is significant and its ranks lie on the same side of 0 as the mean. A
member may have parts, such as all pairs of policies. Then all of them must hold (each is tested at 5%: an intersection
of claims needs no correction), or with `some` one of them (tested at 5% divided by their number). No maximum and no
range is ever estimated: both are biased upwards. A claim marked `exact: true` is a theorem or arithmetic: its members
list every case, and one counterexample refutes it.

Verdicts:

- *reproduced*: every member holds.
- *not reproduced*: most fail, or none holds and some fail even at 5% divided by the number of members (of twenty
  members at the threshold one fails by chance; a score without bounds needs more than six items: `stats.fewest`).
- *partly*: some hold, some do not.
- *inconclusive*: tested, and none of the above.
- *not testable here*: there is no member to test, or the claim `presumes` another that is not reproduced here.

`data/error_rates.csv`, by `studies.error_rates`, says how often each claim's rule errs. Where it says that a rule
can never hold, or never fail, with as many items as a claim has, the verdict is *inconclusive* whatever they say.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
from scipy import stats as scipy_stats

from kvrepro.errors import counted
from kvrepro.experiment import stats
from kvrepro.experiment.claims import COLUMNS, NOT_TESTABLE, STORED, first_form, note
from kvrepro.experiment.stats import ANY, MIN_ITEMS, UNIT, Estimate
from kvrepro.paths import DATA

MIN_CEILING = 0.10  # lower bound of the full cache's score below which a claim about quality says nothing
STATES = ("holds", "open", "fails")


class NotTestable(Exception):
    """A claim, or one member of it, cannot be asked of this model or these items; the message says what is needed."""


@dataclass(frozen=True)
class Sample:
    """What one number is estimated from: a row per item, columns as the contrast names them. See `stats.contrast`."""

    data: pd.DataFrame
    contrast: str | Callable[[np.ndarray], float] = "mean"
    clusters: Sequence[Any] | None = None
    bounds: tuple[float, float] | None = UNIT
    each: float = 1
    limits: tuple[float, float] = ANY

    def estimate(self, level: float = 0.95) -> Estimate:
        given: dict[str, Any] = {"bounds": self.bounds, "each": self.each, "limits": self.limits, "level": level}
        return stats.contrast(self.data, self.contrast, self.clusters, **given)


@dataclass(frozen=True)
class Drawn:
    """A statistic that comes with its values in resamples of n clusters, and the limits between which it must lie."""

    value: float
    draws: np.ndarray
    n: int
    limits: tuple[float, float] = ANY

    def estimate(self, level: float = 0.95) -> Estimate:
        return stats.spread_of(self.value, self.draws, self.n, level, self.limits)


@dataclass(frozen=True)
class Member:
    """A label and what is tested: one thing, or several named parts that must all hold (`some`: of which one must).

    A thing is anything with `estimate(level)`: a sample, an estimate itself. Or, of an exact statement, a series with
    the value of every case, indexed by the case's name.
    """

    label: str
    what: Any
    some: bool = False


Claim: TypeAlias = Mapping[str, Any]
Rule: TypeAlias = Mapping[str, Any]
Members: TypeAlias = Sequence[Member | NotTestable]
Supplier: TypeAlias = Callable[[Claim, str], Members]  # of a claim in one reading


def unanswered(full: pd.Series, errors: pd.Series | None = None) -> str:
    """Why the full cache's scores (0 to 1, per item) cannot show what is forgotten; empty where they can."""
    if len(full) and full.isna().all():
        why = "" if errors is None or errors.dropna().empty else f": {errors.dropna().iloc[0]}"
        return f"all {len(full)} items of the full cache failed{why}"
    e = stats.interval(full, bounds=UNIT)
    if e.n < MIN_ITEMS:
        return f"{counted(e.n, 'item')}: an interval needs at least {MIN_ITEMS}"
    return "" if e.low >= MIN_CEILING else f"the full cache itself answers too few items ({e})"


def answers_enough(full: pd.Series, errors: pd.Series | None = None) -> None:
    """Raise NotTestable where the full cache's scores cannot show what is forgotten."""
    if why := unanswered(full, errors):
        raise NotTestable(why)


@dataclass(frozen=True)
class Judged:
    """One member's state, with the estimate that decided it."""

    label: str
    state: str
    ours: Estimate
    p: float = math.nan
    decided_by: str = ""
    against: tuple[float, float] = (0.0, 0.0)  # how far it speaks against the claim
    refuted: bool = False  # fails even at 5% divided by the number of the claim's members


RULES = {  # in words, where the name is no such word itself
    "between": "{} to {}",
    "size_at_least": "at least {} either way",
    "size_at_most": "at most {} either way",
    "no_difference": "within {} of 0 and no significant difference",
    "equivalent": "equivalent within {}",
}


def region(rule: Rule) -> list[tuple[float, float, bool]]:
    """The values that satisfy a rule: intervals (from, to, do the ends belong?)."""
    [(kind, bound)] = rule.items()
    low, high = bound if kind == "between" else (-bound, bound)
    ends = kind not in ("above", "below", "no_difference", "equivalent")
    if kind == "size_at_least":
        return [(-math.inf, low, ends), (high, math.inf, ends)]
    if kind in ("at_least", "above"):
        return [(high, math.inf, ends)]
    return [(-math.inf if kind in ("at_most", "below") else low, high, ends)]


def state_of(rule: Rule, low: float, high: float) -> str:
    """`holds`, `fails` or `open`, by an interval [low, high]."""
    if math.isnan(low) or math.isnan(high):
        return "open"
    parts = region(rule)
    if any(a <= low and high <= b if ends else a < low and high < b for a, b, ends in parts):
        return "holds"
    met = any(low <= b and a <= high if ends else low < b and a < high for a, b, ends in parts)
    return "open" if met else "fails"


def _against(rule: Rule, e: Estimate) -> tuple[float, float]:
    """How far an estimate speaks against a rule: how far its interval's worst point, which is an end or, for a size,
    that nearest 0, and its value miss the region."""
    points = [e.value] if math.isnan(e.low) else [e.low, e.high, min(max(e.low, 0.0), e.high)]
    return max(_outside(rule, x) for x in points), _outside(rule, e.value)


def _outside(rule: Rule, value: float) -> float:
    """The distance from a value to a rule's region; negative inside."""
    return min(max(a - value, value - b) for a, b, _ in region(rule))


def _single(rule: Rule, label: str, what: Any, members: int, level: float = 0.95) -> Judged:
    """Judge one thing at a level. members: how many the claim has."""
    e = what.estimate(level)
    state = state_of(rule, e.low, e.high)
    strict = what.estimate(1 - (1 - level) / members) if state == "fails" and members > 1 else e
    refuted = state_of(rule, strict.low, strict.high) == "fails"
    return Judged(label, state, e, decided_by=label, against=_against(rule, e), refuted=refuted)


def _judged(rule: Rule, member: Member, members: int) -> Judged:
    """Judge a member. Of one with parts all must hold; with `some`, one. A state that a single part can decide is
    tested at 5% divided by the number of parts."""
    if isinstance(member.what, pd.Series):
        return _exact(rule, member.label, member.what)
    if not isinstance(member.what, Mapping):
        return _single(rule, member.label, member.what, members)
    strict_level = 1 - 0.05 / len(member.what)
    usual, strict = [], []  # the parts, judged at 5% and at 5% divided by their number
    for name, what in member.what.items():
        part = _single(rule, name, what, members)
        usual.append(part)
        again = member.some or part.state == "fails"  # what does not fail at 5% fails at no stricter level
        strict.append(_single(rule, name, what, members, strict_level) if again else part)
    decisive, other = ("holds", "fails") if member.some else ("fails", "holds")
    choose = min if member.some else max
    if deciding := [part for part in strict if part.state == decisive]:
        best = choose(deciding, key=lambda j: j.against)
    elif all(part.state == other for part in usual):
        best = choose(usual, key=lambda j: j.against)
        best = replace(best, refuted=all(part.refuted for part in usual))
    else:
        undecided = [part for part, at_5 in zip(strict, usual, strict=True) if at_5.state != other]
        best = choose(undecided, key=lambda j: j.against)
    return replace(best, label=member.label, decided_by=", ".join(filter(None, [member.label, best.label])))


def _exact(rule: Rule, label: str, cases: pd.Series) -> Judged:
    """Every case must satisfy the rule; the worst counterexample is named. Shows the case nearest to refuting."""
    values = cases.dropna()
    if values.empty:
        raise NotTestable(f"no case of {label} has a value")
    distance = values.map(lambda value: _outside(rule, value))
    wrong = sum(state_of(rule, v, v) != "holds" for v in values)
    at = distance.argmax()
    text = f"{label}: {wrong} of {len(values)} cases, worst at {values.index[at]}" if wrong else label
    worst, against = float(values.iloc[at]), (float(distance.max()),) * 2
    ours, state = Estimate(worst, worst, worst, len(values)), "fails" if wrong else "holds"
    return Judged(label, state, ours, decided_by=text, against=against, refuted=wrong > 0)


def _tested(claim: Claim, members: Sequence[Member], judged: Sequence[Judged]) -> list[Judged]:
    """The members' states after the test that the claim names."""
    test, [(kind, margin)] = claim.get("test"), claim["rule"].items()
    alike = [True] * len(judged)
    if not test:
        return list(judged)
    if test == "sign":
        untied = [j.ours.value > 0 for j in judged if abs(j.ours.value) >= stats.ROUNDING]
        ps = [float(scipy_stats.binomtest(sum(untied), len(untied)).pvalue) if untied else 1.0] * len(judged)
    else:
        frames = [m.what.data.dropna() for m in members if isinstance(m.what, Sample)]
        if test == "tost":
            ps = [stats.tost(f.a, f.b, margin) for f in frames]
        else:
            ps = stats.holm([stats.wilcoxon(f.a, f.b) for f in frames])
            up = [stats.wilcoxon(f.a, f.b, greater=True) < 0.5 for f in frames]
            alike = [side == (j.ours.value > 0) for side, j in zip(up, judged, strict=True)]
    heard = [replace(j, p=p, state=_heard(kind, j, p, side)) for j, p, side in zip(judged, ps, alike, strict=True)]
    return [replace(j, refuted=j.refuted or (kind == "no_difference" and j.state == "fails")) for j in heard]


def _heard(kind: str, j: Judged, p: float, alike: bool = True) -> str:
    """A member's state after its test. kind: of the claim's rule; alike: mean and ranks lie on the same side of 0."""
    significant, apart = p < 0.05, j.ours.low > 0 or j.ours.high < 0
    if math.isnan(j.ours.low):
        return j.state
    if significant and (kind == "equivalent" or (kind == "no_difference" and apart)):
        return "holds" if kind == "equivalent" else "fails"
    agrees = {"no_difference": not (significant or apart), "equivalent": False}.get(kind, significant and alike)
    return j.state if agrees or j.state != "holds" else "open"


def judge(claim: Claim, members: Sequence[Member]) -> list[Judged]:
    """State of every member of a claim. Raises NotTestable for a member without any value to judge by."""
    return _tested(claim, members, [_judged(claim["rule"], m, len(members)) for m in members])


def verdict(claim: Claim, judged: Sequence[Judged]) -> str:
    """Verdict of a claim from its judged members."""
    holds, fails = (sum(j.state == state for j in judged) for state in ("holds", "fails"))
    if holds == len(judged):
        return "reproduced"
    refuted = claim.get("exact") or (not holds and any(j.refuted for j in judged))
    if fails > len(judged) / 2 or (fails and refuted):
        return "not reproduced"
    return "partly" if holds else "inconclusive"


TESTS = {None: "interval", "wilcoxon_holm": "Wilcoxon, Holm", "tost": "paired TOST", "sign": "sign test over members"}
AFTER: dict[str | None, str] = {
    "wilcoxon_holm": "; Wilcoxon p < 0.05 (Holm)",
    "tost": "; TOST p < 0.05",
    "sign": "; sign test p < 0.05",
}
NUMBERS = ("ours", "low", "high", "p", "n")
UNTESTED = {"verdict": NOT_TESTABLE, "test": "none", "members": "", "decided_by": ""} | dict.fromkeys(NUMBERS, math.nan)


def rule_text(claim: Claim) -> str:
    """The rule and its tolerance in words."""
    [(kind, bound)] = claim["rule"].items()
    bounds = [f"{100 * b:.6g}%" if claim.get("unit") == "%" else f"{b:.6g}" for b in np.atleast_1d(bound)]
    text = (
        bounds[0]
        if len(set(bounds)) < len(bounds)
        else RULES.get(kind, f"{kind.replace('_', ' ')} {{}}").format(*bounds)
    )
    text += ", in every case" if claim.get("exact") else ""
    return text + ("" if kind == "no_difference" else AFTER.get(claim.get("test"), ""))


@cache
def tried() -> dict[tuple[str, str], dict[str, Any]]:
    """The rows of data/error_rates.csv by claim and reading."""
    rates = pd.read_csv(DATA / "error_rates.csv")
    return {(row["claim"], row["reading"]): row for row in rates.to_dict("records")}


def _never(claim: Claim, reading: str, n: int) -> str:
    """What n items can never make a claim's rule do (hold, fail); empty where they can do both, as `enough` of them
    can. Up to 64 times the items were tried. Rows of another rule do not count."""
    row = tried().get((claim["id"], reading), {})
    never = [what for what in ("hold", "fail") if not row.get(f"can_{what}", True)]  # nan: was not tried
    if not never or row["rule"] != rule_text(claim):
        return ""
    return "" if n >= (64 * row["n"] + 1 if math.isnan(row["enough"]) else row["enough"]) else never[0]


def _valued(claim: Claim, members: Members) -> tuple[list[Judged], list[NotTestable]]:
    """The members that have a value, judged, and why the others have none. Raises NotTestable where none has."""
    missing = [m for m in members if isinstance(m, NotTestable)]
    if len(missing) == len(members):
        raise missing[0] if missing else NotTestable("no member of this claim was run")
    judged = judge(claim, [m for m in members if isinstance(m, Member)])
    if all(j.ours.n < MIN_ITEMS and math.isnan(j.ours.low) for j in judged):
        most, what = max(j.ours.n for j in judged), "run" if claim.get("contrast") == "measured" else "item"
        raise NotTestable(f"{counted(most, what)}: an interval needs at least {MIN_ITEMS}")
    valued = [j for j in judged if not math.isnan(j.ours.value)]
    missing += [NotTestable(f"{j.label} has no value: a ratio to nothing") for j in judged if j not in valued]
    if not valued:
        raise missing[-1]
    return valued, missing


def _row(claim: Claim, members: Supplier, reading: str) -> dict[str, Any]:
    """One row of the table."""
    unit = claim.get("unit", "F1")
    row = {name: claim[name] for name in ("statement", "paper", "topic", "source")} | {
        "claim": claim["id"],
        "reading": reading,
        "unit": unit,
        "rule": rule_text(claim),
        "note": claim.get("why", ""),
        "test": claim.get("stored") or ("every case" if claim.get("exact") else TESTS[claim.get("test")]),
    }
    try:
        judged, missing = _valued(claim, members(claim, reading))
    except NotTestable as reason:
        return row | UNTESTED | {"note": str(reason)}
    scale, states = 100.0 if unit == "%" else 1.0, [j.state for j in judged]
    counts = [f"{states.count(state)} {state}" for state in STATES if state in states]
    decision = verdict(claim, judged)
    deciding = [j for j in judged if decision == "inconclusive" and j.state == "open"] or judged
    worst = max(deciding, key=lambda j: (STATES.index(j.state), j.against))
    if "fails" in states and decision == "inconclusive":
        counts += [f"though not at the {100 - 5 / len(judged):.4g}% asked of {len(judged)}"]
    counts += [f"{len(missing)} not testable ({missing[0]})"] if missing else []
    never = _never(claim, reading, min(j.ours.n for j in judged))
    if never and decision not in ("inconclusive", {"hold": "reproduced", "fail": "not reproduced"}[never]):
        decision = "inconclusive"
        counts += [f"though with {counted(worst.ours.n, 'item')} this rule can never {never}"]
    return row | {
        "ours": worst.ours.value * scale,
        "low": worst.ours.low * scale,
        "high": worst.ours.high * scale,
        "p": worst.p,
        "n": worst.ours.n,
        "verdict": decision,
        "members": ", ".join(counts),
        "decided_by": "" if worst.decided_by == "all" else worst.decided_by,
    }


def verdicts(
    claims: Sequence[Claim],
    members: Supplier,
    readings: Callable[[Claim], Sequence[str]] = lambda claim: ("any",),
    *,
    model: str,
    profile: str,
) -> pd.DataFrame:
    """The claims table, `claims.COLUMNS`: a row per claim and reading. Verdicts on first forms stand in statements.

    members(claim, reading) lists what is tested, with NotTestable in place of what cannot be; it may raise NotTestable
    for the whole claim. ours, low, high, p and n are those of the member that `decided_by` names, in the claim's unit:
    a failing one, else an open one, else the one closest to failing. What a claim presumes stands before it; of a
    premise in both readings one must be reproduced.
    """
    table: list[dict[str, Any]] = []
    for claim in claims:
        first = first_form(claim) if "first" in claim else {}
        before = [_row(first, members, reading) for reading in (readings(first) if first else ())]
        for reading in readings(claim):
            row = _row(claim, members, reading)
            premises = [r for r in table if r["claim"] == claim.get("presumes")]
            premises = [r for r in premises if reading == "any" or r["reading"] in (reading, "any")]
            refused = bool(premises) and all(r["verdict"] != "reproduced" for r in premises)
            if refused and row["verdict"] != NOT_TESTABLE:
                found = "it presumes {claim}, which is {verdict}: {statement}".format(**premises[0])
                row |= UNTESTED | {"note": f"{found} Without this premise it would be {row['verdict']}"}
            whose = {"model": STORED if claim.get("stored") else model, "profile": profile}
            table.append(row | whose | {"statement": claim["statement"] + note(claim, before)})
    return pd.DataFrame(table).reindex(columns=COLUMNS)
