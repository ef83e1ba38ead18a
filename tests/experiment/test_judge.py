"""The judge on data where the answer is known: true, false and at the threshold."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrepro.experiment import judge, stats
from kvrepro.experiment.claims import COLUMNS, STORED
from kvrepro.experiment.judge import Drawn, Judged, Member, NotTestable, Sample
from kvrepro.experiment.stats import Estimate

NAN = math.nan
CLAIM = {"id": "X1", "statement": "It is so.", "paper": "so", "contrast": "mean", "topic": "t", "source": "s"}


def table(rule: dict, outcome, **more) -> pd.Series:
    """The one row of a claim. outcome: its members, or what to raise."""

    def members(claim, reading):
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    frame = judge.verdicts([CLAIM | {"rule": rule} | more], members, model="m", profile="quick")
    assert len(frame) == 1
    return frame.iloc[0]


def scores(mean: float, n: int, spread: float = 0.1, seed: int = 0) -> pd.DataFrame:
    x = np.random.default_rng(seed).normal(size=n)
    return pd.DataFrame({"a": mean + spread * (x - x.mean()) / x.std(ddof=1)})


@pytest.mark.parametrize(
    ("rule", "low", "high", "state"),
    [
        ({"at_least": 0.5}, 0.5, 0.7, "holds"),  # the bound belongs to at_least and to at_most alike
        ({"at_most": 0.5}, 0.3, 0.5, "holds"),
        ({"at_least": 0.5}, 0.5, 0.5, "holds"),
        ({"at_most": 0.5}, 0.5, 0.5, "holds"),
        ({"above": 0.5}, 0.5, 0.5, "fails"),  # and neither to above nor to below
        ({"below": 0.5}, 0.5, 0.5, "fails"),
        ({"above": 0.5}, 0.5, 0.7, "open"),
        ({"below": 0.5}, 0.3, 0.5, "open"),
        ({"at_least": 0.5}, 0.2, 0.5, "open"),
        ({"at_most": 0.5}, 0.5, 0.7, "open"),
        ({"at_least": 0.5}, 0.2, 0.4, "fails"),
        ({"at_most": 0.5}, 0.6, 0.7, "fails"),
        ({"between": [0.4, 0.75]}, 0.4, 0.75, "holds"),
        ({"between": [0.4, 0.75]}, 0.3, 0.7, "open"),
        ({"between": [0.4, 0.75]}, 0.8, 0.9, "fails"),
        ({"size_at_least": 0.1}, -0.3, -0.2, "holds"),
        ({"size_at_least": 0.1}, -0.05, 0.05, "fails"),
        ({"size_at_least": 0.1}, -0.3, 0.3, "open"),
        ({"size_at_most": 0.1}, -0.05, 0.05, "holds"),
        ({"size_at_most": 0.1}, 0.2, 0.3, "fails"),
        ({"size_at_most": 0.1}, -0.3, -0.05, "open"),
        ({"size_at_least": 0.1}, -0.3, -0.1, "holds"),
        ({"size_at_least": 0.1}, 0.1, 0.3, "holds"),
        ({"size_at_most": 0.1}, -0.1, 0.1, "holds"),
        ({"no_difference": 0.1}, -0.1, 0.0, "open"),
        ({"no_difference": 0.1}, 0.1, 0.2, "fails"),
        ({"equivalent": 0.1}, 0.0, 0.1, "open"),
        ({"equivalent": 0.1}, -0.2, -0.1, "fails"),
        ({"at_least": 0.0}, math.nan, 0.5, "open"),
        ({"at_most": 0.0}, -0.5, math.nan, "open"),
        ({"at_least": 0.0}, math.nan, math.nan, "open"),
        ({"at_least": 0.0}, -math.inf, math.inf, "open"),
    ],
)
def test_state_by_interval(rule, low, high, state):
    assert judge.state_of(rule, low, high) == state


@pytest.mark.parametrize(
    ("states", "verdict"),
    [
        (["holds"] * 3, "reproduced"),
        (["holds", "open"], "partly"),
        (["fails", "open", "open"], "not reproduced"),
        (["holds", "fails"], "partly"),
        (["fails", "fails", "holds"], "not reproduced"),
        (["fails", "fails", "holds", "open"], "partly"),
        (["fails"], "not reproduced"),
        (["open"] * 2, "inconclusive"),
        (["fails by chance", *["open"] * 19], "inconclusive"),
        (["fails by chance"] * 11 + ["open"] * 9, "not reproduced"),
    ],
)
def test_verdict(states, verdict):
    members = [Judged("", s.split()[0], Estimate(0.5, NAN, NAN, 9), refuted=s == "fails") for s in states]
    assert judge.verdict({}, members) == verdict
    of_exact = "not reproduced" if any("fails" in s for s in states) else verdict
    assert judge.verdict({"exact": True}, members) == of_exact


def test_of_twenty_members_at_the_threshold_one_fails_by_chance():
    near, at = (Member(name, Sample(scores(mean, 40), bounds=None)) for name, mean in (("near", 0.46), ("at", 0.5)))
    alone = table({"at_least": 0.5}, [near])
    assert (alone.verdict, alone.members) == ("not reproduced", "1 fails")
    among = table({"at_least": 0.5}, [near, *[replace(at, label=str(i)) for i in range(19)]])
    assert (among.verdict, among.members) == ("inconclusive", "19 open, 1 fails, though not at the 99.75% asked of 20")
    assert among.decided_by != "near"  # shown is a case that leaves the claim open
    far = Member("far", Sample(scores(0.3, 40), bounds=None))
    assert table({"at_least": 0.5}, [far, *[replace(at, label=str(i)) for i in range(19)]]).verdict == "not reproduced"


MIRRORED = {"at_least": "at_most", "above": "below"}


@given(
    st.lists(st.sampled_from([0.0, 0.2, 0.5, 1.0]), min_size=6, max_size=20),
    st.sampled_from([0.0, 0.25, 0.5, 1.0]),
    st.sampled_from(sorted(MIRRORED)),
    st.sampled_from([None, "wilcoxon_holm", "sign"]),
)
@settings(max_examples=15, deadline=None)
def test_both_sides_of_a_bound_are_judged_alike(values, bound, kind, test):
    """A claim and its mirror image: ties, values at the bound and samples without spread included."""
    x = pd.DataFrame({"a": values, "b": values[::-1]})
    y = x.rename(columns={"a": "b", "b": "a"})
    claim = {"id": "X", "test": test}
    for bounds in ((0.0, 1.0), None):
        members, mirrored = (
            [Member(str(i), Sample(f[i:], "difference", bounds=bounds)) for i in range(2)] for f in (x, y)
        )
        up = judge.judge(claim | {"rule": {kind: bound}}, members)
        down = judge.judge(claim | {"rule": {MIRRORED[kind]: -bound}}, mirrored)
        assert [(j.state, j.refuted) for j in up] == [(j.state, j.refuted) for j in down]


@pytest.mark.parametrize(("mean", "verdict"), [(0.6, "reproduced"), (0.4, "not reproduced"), (0.5, "inconclusive")])
def test_true_false_and_at_the_threshold(mean, verdict):
    assert table({"at_least": 0.5}, [Member("all", Sample(scores(mean, 60)))]).verdict == verdict
    assert table({"at_most": 0.5}, [Member("all", Sample(scores(1 - mean, 60)))]).verdict == verdict


# ------------------------------------------------------------------ exact statements


def test_one_counterexample_refutes_an_exact_claim_and_is_named():
    cases = pd.Series(1.0, index=[f"prompt {i}" for i in range(1000)])
    exact = {"exact": True}
    whole = table({"at_least": 1}, [Member("repack", cases)], **exact)
    assert (whole.verdict, whole.n, whole.low) == ("reproduced", 1000, 1.0)
    cases.iloc[17] = 0.0
    refuted = table({"at_least": 1}, [Member("repack", cases)], **exact)
    assert refuted.verdict == "not reproduced"
    assert refuted.decided_by == "repack: 1 of 1000 cases, worst at prompt 17"
    assert refuted.ours == 0.0
    assert refuted.rule == "at least 1, in every case"
    parts = [Member("repack", cases), Member("fill", cases.clip(lower=1))]
    assert table({"at_least": 1}, parts, **exact).verdict == "not reproduced"  # one case in either of them


def test_a_single_case_decides_an_exact_claim_and_none_leaves_it():
    assert table({"between": [18, 18]}, [Member("all", pd.Series([18.0]))], exact=True).verdict == "reproduced"
    nothing = table({"at_most": 0}, [Member("all", pd.Series([np.nan]))], exact=True)
    assert (nothing.verdict, nothing.note) == ("not testable here", "no case of all has a value")


def paired(gap: float, n: int = 40, seed: int = 0) -> Sample:
    rng = np.random.default_rng(seed)
    b = rng.uniform(0.2, 0.5, n)
    return Sample(pd.DataFrame({"a": b + gap + rng.normal(0, 0.02, n), "b": b}), "difference")


# ------------------------------------------------------------------ what is estimated, and at which level


SEVEN, OTHER = [0.1, 0.2, 0.2, 0.5, 0.7, 1.0, 0.9], [0.4, 0.3, 0.1, 0.2, 0.2, 0.3, 0.6, 0.8]
LOST = pd.DataFrame({"a": SEVEN, "b": OTHER[:7], "full": 2.0})


@pytest.mark.parametrize("given", [{}, {"level": 0.8}])
@pytest.mark.parametrize(
    ("what", "options"),
    [
        (Sample(LOST[["a"]]), {"kind": "mean", "bounds": (0, 1)}),
        (Sample(LOST, "loss_ratio", None, (0, 2), 5), {"kind": "loss_ratio", "bounds": (0, 2), "each": 5}),
        (Sample(LOST, np.median, [*"uvwxyzz"], limits=(0.3, 0.4)),
         {"kind": np.median, "clusters": [*"uvwxyzz"], "limits": (0.3, 0.4)}),
    ],
)  # fmt: skip
def test_a_sample_has_the_estimate_of_its_contrast(what, options, given):
    assert repr(what.estimate(**given)) == repr(stats.contrast(what.data, **options, **given))
    drawn = Drawn(0.5, np.array(OTHER), 9, (0.4, 0.6)).estimate(**given)
    assert drawn == stats.spread_of(0.5, np.array(OTHER), 9, limits=(0.4, 0.6), **given)


@dataclass
class Band:
    """An estimate with as wide an interval as is given, wider in proportion to its normal quantile at other levels."""

    value: float
    reach: float
    levels: list[float] = field(default_factory=list)

    def estimate(self, level: float = 0.95) -> Estimate:
        self.levels.append(round(level, 9))
        half = self.reach * NormalDist().inv_cdf(0.5 + level / 2) / NormalDist().inv_cdf(0.975)
        return Estimate(self.value, self.value - half, self.value + half, 20)


def judged(rule: dict, *what: Any, some: bool = False, **more: Any) -> list[Judged]:
    members = [Member(f"m{i}", part, some) for i, part in enumerate(what)]
    return judge.judge({"id": "X", "rule": rule} | more, members)


@pytest.mark.parametrize(
    ("rule", "value", "against"),  # of an interval 0.2 to either side
    [
        ({"at_least": 0.5}, 0.6, (0.1, -0.1)),
        ({"at_most": 0.5}, 0.6, (0.3, 0.1)),
        ({"above": 0.5}, 0.4, (0.3, 0.1)),
        ({"below": 0.5}, 0.4, (0.1, -0.1)),
        ({"between": [0.2, 0.7]}, 0.3, (0.1, -0.1)),
        ({"between": [0.2, 0.7]}, 0.6, (0.1, -0.1)),
        ({"size_at_most": 0.3}, -0.2, (0.1, -0.1)),
        ({"size_at_least": 0.3}, 0.25, (0.25, 0.05)),
        ({"size_at_least": 0.3}, -0.1, (0.3, 0.2)),  # 0 lies inside, and speaks most against it
        ({"equivalent": 0.3}, 0.25, (0.15, -0.05)),
        ({"no_difference": 0.3}, -0.25, (0.15, -0.05)),
    ],
)
def test_an_open_member_says_what_speaks_against_it(rule, value, against):
    [j] = judged(rule, Band(value, 0.2))
    assert (j.label, j.decided_by, j.state, j.refuted, math.isnan(j.p)) == ("m0", "m0", "open", False, True)
    assert j.against == pytest.approx(against)
    assert j.ours.value == value


def test_what_fails_among_many_is_asked_again_more_strictly():
    far, near, open_, alone = Band(0.2, 0.1), Band(0.35, 0.1), Band(0.5, 0.1), Band(0.35, 0.1)
    members = judged({"at_least": 0.5}, far, near, *[open_] * 18)
    assert [(j.state, j.refuted) for j in members] == [("fails", True), ("fails", False), *[("open", False)] * 18]
    assert far.levels == near.levels == [0.95, 0.9975]
    assert open_.levels == [0.95] * 18
    assert judged({"at_least": 0.5}, alone)[0].refuted
    assert alone.levels == [0.95]


HOLDS, OPEN, FAILS, NEARLY, HARDLY = (0.9, 0.1), (0.5, 0.1), (0.1, 0.1), (0.61, 0.1), (0.39, 0.1)


@pytest.mark.parametrize(
    ("some", "parts", "state", "decisive", "refuted"),
    [
        (False, {"a": HOLDS, "b": (0.7, 0.1)}, "holds", "b", False),  # the nearest to failing
        (False, {"a": HOLDS, "b": (0.55, 0.1), "c": OPEN}, "open", "c", False),
        (False, {"a": (0.95, 0.01), "b": FAILS, "c": (0.05, 0.1)}, "fails", "c", True),
        (False, {"a": OPEN, "b": HARDLY}, "open", "b", False),  # fails, but not among so many
        (True, {"a": (0.8, 0.1), "b": HOLDS, "c": FAILS}, "holds", "b", False),  # the best of them
        (True, {"a": NEARLY, "b": FAILS}, "open", "a", False),
        (True, {"a": OPEN, "b": FAILS}, "open", "a", False),
        (True, {"a": (0.3, 0.3), "b": HARDLY}, "open", "a", False),  # b fails at 5%, though not more strictly
        (True, {"a": FAILS, "b": (0.2, 0.1)}, "fails", "b", True),
        (True, {"a": FAILS, "b": HARDLY}, "fails", "b", True),
    ],
)
def test_parts_decide_together_and_the_deciding_one_is_named(some, parts, state, decisive, refuted):
    [j] = judged({"at_least": 0.5}, {name: Band(*arguments) for name, arguments in parts.items()}, some=some)
    assert (j.label, j.state, j.decided_by, j.refuted) == ("m0", state, f"m0, {decisive}", refuted)
    assert j.ours.value == parts[decisive][0]
    assert judge.state_of({"at_least": 0.5}, j.ours.low, j.ours.high) == state  # as shown


def test_parts_are_asked_as_strictly_as_their_number_and_that_of_the_members_says():
    first, second = Band(0.39, 0.1), Band(0.5, 0.1)
    [j, other] = judged({"at_least": 0.5}, {"one": first, "two": second}, Band(0.9, 0.1))
    assert first.levels == [0.95, 0.975, 0.975]  # itself, as one of two members, as one of two parts
    assert (j.state, j.refuted, second.levels) == ("open", False, [0.95])
    parts = {"one": Band(0.2, 0.1), "two": Band(0.3, 0.1)}
    [j, _] = judged({"at_least": 0.5}, parts, Band(0.9, 0.1), some=True)
    assert (j.state, j.refuted, j.decided_by) == ("fails", True, "m0, two")
    assert parts["one"].levels == [0.95, 0.975, 0.975, 0.9875]
    parts = {"one": Band(0.2, 0.1), "two": Band(0.39, 0.1)}  # the second does not fail as one of two members
    [j, _] = judged({"at_least": 0.5}, parts, Band(0.9, 0.1), some=True)
    assert (j.state, j.refuted) == ("fails", False)
    parts = {"one": Band(0.1, 0.36), "two": Band(0.4, 0.05)}  # nor does the first of these
    [j, _] = judged({"at_least": 0.5}, parts, Band(0.9, 0.1), some=True)
    assert (j.state, j.refuted, j.decided_by) == ("fails", False, "m0, two")
    [j] = judge.judge({"id": "X", "rule": {"at_least": 0.5}}, [Member("", {"x": Band(0.9, 0.1)})])
    assert (j.label, j.decided_by) == ("", "x")


# ------------------------------------------------------------------ exact cases, tests, and what was refused


def test_the_worst_case_is_named():
    cases = pd.Series([0.5, 0.9, NAN, 0.7], index=["p, 1", "p, 2", "q, 3", "q, 4"])
    [j] = judged({"at_most": 0.6}, cases)
    assert (j.state, j.refuted, j.decided_by) == ("fails", True, "m0: 2 of 3 cases, worst at p, 2")
    assert (j.ours[:3], j.ours.n, j.against) == ((0.9,) * 3, 3, (pytest.approx(0.3),) * 2)
    [j] = judged({"at_most": 0.9}, cases)
    assert (j.state, j.refuted, j.decided_by, j.ours.value, j.against) == ("holds", False, "m0", 0.9, (0.0, 0.0))
    [j] = judged({"between": [0.6, 0.8]}, pd.Series([0.7, 0.5, 0.81]))
    assert (j.label, j.decided_by, j.ours.value) == ("m0", "m0: 2 of 3 cases, worst at 1", 0.5)
    [j] = judged({"at_most": 0.6}, pd.Series([0.7, 0.5]))
    assert (j.decided_by, j.refuted) == ("m0: 1 of 2 cases, worst at 0", True)


@pytest.mark.parametrize(
    ("kind", "state", "low", "high", "p", "heard"),
    [
        ("above", "holds", 0.1, 0.2, 0.049, "holds"),
        ("above", "holds", 0.1, 0.2, 0.05, "open"),
        ("above", "open", -0.1, 0.2, 0.01, "open"),
        ("above", "fails", -0.2, -0.1, 0.5, "fails"),
        ("above", "open", NAN, NAN, 0.01, "open"),
        ("no_difference", "open", NAN, NAN, 0.01, "open"),
        ("no_difference", "holds", -0.1, 0.1, 0.05, "holds"),
        ("no_difference", "open", -0.1, 0.2, 0.5, "open"),
        ("no_difference", "holds", 0.01, 0.1, 0.01, "fails"),
        ("no_difference", "holds", -0.1, -0.01, 0.01, "fails"),
        ("no_difference", "holds", 0.0, 0.1, 0.01, "open"),
        ("no_difference", "holds", -0.1, 0.0, 0.01, "open"),
        ("no_difference", "holds", 0.01, 0.1, 0.05, "open"),  # the interval alone finds a difference
        ("no_difference", "holds", -0.1, -0.01, 0.05, "open"),
        ("no_difference", "fails", 0.3, 0.4, 0.05, "fails"),
        ("equivalent", "open", -0.1, 0.1, 0.01, "holds"),
        ("equivalent", "holds", -0.1, 0.1, 0.05, "open"),
        ("equivalent", "fails", 0.1, 0.2, 0.5, "fails"),
        ("equivalent", "open", -0.1, 0.1, 0.5, "open"),
    ],
)
def test_a_state_once_its_test_is_heard(kind, state, low, high, p, heard):
    assert judge._heard(kind, Judged("x", state, Estimate(0.05, low, high, 9)), p) == heard


def test_a_named_test_hears_the_pairs_that_are_there():
    samples = [paired(0.2, 9), paired(0.01, 12, seed=2)]
    samples[0].data.loc[3, "b"] = NAN
    ps = [stats.wilcoxon(sample.data.a, sample.data.b) for sample in samples]
    members = judged({"above": 0}, *samples, test="wilcoxon_holm")
    assert [j.p for j in members] == stats.holm(ps)
    assert [j.p for j in judged({"above": 0}, *samples, test="sign")] == [0.5, 0.5]
    assert [j.p for j in judged({"above": 0}, Band(0.2, 0.1), *samples, Band(-0.1, 0.2), test="sign")] == [0.625] * 4
    members = judged({"equivalent": 0.03}, *samples, test="tost")
    assert [j.p for j in members] == [stats.tost(sample.data.a, sample.data.b, 0.03) for sample in samples]
    assert [j.refuted for j in judged({"at_least": 0.5}, Band(0.39, 0.1), Band(0.9, 0.1), test="sign")] == [False] * 2
    assert not judged({"no_difference": 0.5}, paired(0.0), test="wilcoxon_holm")[0].refuted
    same = judged({"no_difference": 0.5}, paired(0.1), test="wilcoxon_holm")[0]
    assert (same.state, same.refuted) == ("fails", True)  # inside the margin, and found to differ


def test_a_full_cache_that_says_nothing_says_why():
    assert judge.unanswered(pd.Series([1.0] * 6)) == judge.unanswered(pd.Series([np.nan, *[1.0] * 7])) == ""
    assert judge.unanswered(pd.Series([1.0] * 5)) == "5 items: an interval needs at least 6"
    assert judge.unanswered(pd.Series([1.0])) == "1 item: an interval needs at least 6"
    assert judge.unanswered(pd.Series([], dtype=float)) == "0 items: an interval needs at least 6"
    assert judge.unanswered(pd.Series([np.nan] * 8)) == "all 8 items of the full cache failed"
    few = pd.Series([0.0] * 7 + [0.3])
    assert (
        judge.unanswered(few) == f"the full cache itself answers too few items ({stats.interval(few, bounds=(0, 1))})"
    )
    gone = pd.Series([np.nan] * 3)
    for errors, reason in ((pd.Series([None] * 3), ""), (pd.Series([None, "no memory", "no time"]), ": no memory")):
        with pytest.raises(NotTestable, match=f"^all 3 items of the full cache failed{reason}$"):
            judge.answers_enough(gone, errors)


def test_a_full_cache_at_the_lowest_score_that_counts_is_enough(monkeypatch):
    for low, reason in ((0.1, ""), (0.0999, "the full cache itself answers too few items (0.500 [0.100, 0.900])")):
        monkeypatch.setattr(stats, "interval", lambda full, bounds, low=low: Estimate(0.5, low, 0.9, 6))
        assert judge.unanswered(pd.Series([0.5] * 6)) == reason


# ------------------------------------------------------------------ the table that a reader sees


def rows_of(claims: list[dict], members: Callable, **more: Any) -> list[dict]:
    frame = judge.verdicts(claims, members, model="m", profile="quick", **more)
    assert list(frame) == COLUMNS
    return frame.to_dict("records")


def test_a_row_says_everything():
    claim = CLAIM | {"rule": {"at_least": 0.4}, "why": "because", "unit": "%"}
    members = [Member("a", Band(0.5, 0.05)), Member("b", Band(0.41, 0.05)), Member("all", Band(0.42, 0.06))]
    members += [NotTestable("no GPU"), NotTestable("no time")]
    [row] = rows_of([claim], lambda claim, reading: members)
    assert math.isnan(row.pop("p"))
    assert [row.pop(name) for name in ("ours", "low", "high")] == pytest.approx([41, 36, 46])
    wanted = {"claim": "X1", "statement": "It is so.", "paper": "so", "test": "interval", "verdict": "partly"}
    wanted |= {"reading": "any", "model": "m", "profile": "quick", "rule": "at least 40%"}
    wanted |= {"unit": "%", "members": "1 holds, 2 open, 2 not testable (no GPU)", "decided_by": "b", "n": 20}
    assert row == wanted | {"topic": "t", "source": "s", "note": "because"}
    [row] = rows_of([CLAIM | {"rule": {"at_least": 0.4}}], lambda claim, reading: members[2:3])
    assert (row["unit"], row["note"], row["decided_by"], row["ours"]) == ("F1", "", "", 0.42)


@pytest.mark.parametrize(
    ("rule", "more", "text"),
    [
        ({"between": [1, 2.5]}, {}, "1 to 2.5"),
        ({"between": [0.5, 0.5]}, {"unit": "%", "exact": True}, "50%, in every case"),
        ({"at_most": 1 / 3}, {"test": "wilcoxon_holm"}, "at most 0.333333; Wilcoxon p < 0.05 (Holm)"),
        ({"size_at_most": 2}, {"test": "sign"}, "at most 2 either way; sign test p < 0.05"),
        ({"equivalent": 0.02}, {"unit": "%", "test": "tost"}, "equivalent within 2%; TOST p < 0.05"),
        ({"no_difference": 0.1}, {"test": "wilcoxon_holm"}, "within 0.1 of 0 and no significant difference"),
    ],
)
def test_a_rule_in_words(rule, more, text):
    assert judge.rule_text({"rule": rule} | more) == text


def test_a_claim_on_stored_rows_says_whose_they_are():
    row = table({"at_least": 0.4}, [Member("x", Band(0.9, 0.1))], stored="rows of 0.1.0")
    assert (row.test, row.model) == ("rows of 0.1.0", STORED)
    few = [Member("a", Estimate(1, NAN, NAN, 5))]
    assert table({"at_least": 0.4}, few, contrast="measured").note == "5 runs: an interval needs at least 6"
    assert table({"at_least": 0.4}, [Member("a", Estimate(1, NAN, NAN, 6))]).verdict == "inconclusive"


@pytest.mark.parametrize(
    ("members", "note"),
    [
        ([], "no member of this claim was run"),
        ([NotTestable("no GPU"), NotTestable("no time")], "no GPU"),
        (
            [Member("a", Estimate(1, NAN, NAN, 3)), Member("b", Estimate(1, NAN, NAN, 5))],
            "5 items: an interval needs at least 6",
        ),
    ],
)
def test_a_row_of_what_cannot_be_tested_keeps_what_is_known_of_the_claim(members, note):
    [row] = rows_of(
        [CLAIM | {"rule": {"at_least": 0.4}, "why": "because", "test": "sign"}], lambda claim, reading: members
    )
    wanted = {"claim": "X1", "statement": "It is so.", "paper": "so", "test": "none", "verdict": "not testable here"}
    wanted |= {"reading": "any", "model": "m", "profile": "quick", "rule": "at least 0.4; sign test p < 0.05"}
    wanted |= {"unit": "F1", "members": "", "decided_by": "", "topic": "t", "source": "s"}
    assert {name: value for name, value in row.items() if value == value} == wanted | {"note": note}


def test_the_worst_member_is_shown():
    members = [Member("a", Band(0.9, 0.1)), Member("b", Band(0.25, 0.1)), Member("c", Band(0.7, 0.4))]
    row = table({"at_least": 0.4}, members)
    assert (row.decided_by, row.members, row.verdict) == ("b", "1 holds, 1 open, 1 fails", "partly")
    row = table({"at_least": 0.4}, [Member("b", Band(0.35, 0.04)), *[Member("c", Band(0.5, 0.2))] * 9])
    assert (row.decided_by, row.verdict) == ("c", "inconclusive")  # what fails by chance does not decide
    for test, test_name in (
        ("sign", "sign test over members"),
        ("wilcoxon_holm", "Wilcoxon, Holm"),
        ("tost", "paired TOST"),
    ):
        row = table({"equivalent": 0.4}, [Member("x", paired(0.1))], test=test)
        assert (row.test, row.p < 1) == (test_name, test != "sign")
    assert table({"at_least": 0}, [Member("x", pd.Series([1]))], exact=True).test == "every case"
    assert table({"at_least": 0}, [Member("x", Band(0.0, 0.1))], test="sign").p == 1  # nothing but ties


def test_a_claim_whose_premise_is_not_reproduced_is_not_testable():
    of = dict.fromkeys("ADE", {"code": 0.9, "text": 0.1}) | dict.fromkeys("GI", {"code": 0.1, "text": 0.1, "any": 0.1})
    presumed = {"B": "A", "C": "B", "E": "X", "D": "E", "F": "A", "H": "G", "J": "I"}

    def members(claim, reading):
        return [Member("all", Band(of.get(claim["id"], {}).get(reading, 0.8), 0.1))]

    premises = {name: {"presumes": presumed[name]} if name in presumed else {} for name in "ABCEDFGHIJ"}
    claims = [CLAIM | {"id": name, "rule": {"at_least": 0.5}} | premise for name, premise in premises.items()]
    readings = {"F": ["any"], "G": ["any"], "J": ["any"]}
    frame = judge.verdicts(
        claims, members, lambda claim: readings.get(claim["id"], ["code", "text"]), model="m", profile="quick"
    )
    verdicts = frame.set_index(["claim", "reading"]).verdict
    assert verdicts["B", "code"] == verdicts["C", "code"] == verdicts["D", "code"] == "reproduced"
    assert verdicts["B", "text"] == verdicts["C", "text"] == verdicts["D", "text"] == "not testable here"
    assert verdicts["E", "text"] == "not reproduced"  # what it presumes was not asked
    assert verdicts["F", "any"] == "reproduced"  # its premise holds in one reading
    assert verdicts["H", "code"] == verdicts["J", "any"] == "not testable here"
    row = frame.set_index(["claim", "reading"]).loc[("B", "text")]
    without = "Without this premise it would be reproduced"
    assert row.note == f"it presumes A, which is not reproduced: It is so. {without}"
    assert (row.test, row.members, row.decided_by) == ("none", "", "")
    assert row[["ours", "low", "high", "p", "n"]].isna().all()


NEVER = "1 fails, though with 20 items this rule can never hold"


@pytest.mark.parametrize(
    ("values", "entries", "reading", "verdict", "why"),
    [
        ([0.1, 0.2], {}, "any", "inconclusive", "2 fails, though with 20 items this rule can never hold"),
        (
            [0.9],
            {"can_hold": True, "can_fail": False},
            "any",
            "inconclusive",
            "1 holds, though with 20 items this rule can never fail",
        ),
        ([0.41], {}, "any", "inconclusive", "1 open"),
        ([0.9], {}, "any", "reproduced", "1 holds"),
        ([0.1], {"can_hold": True, "can_fail": False}, "any", "not reproduced", "1 fails"),
        ([0.1], {"enough": 20.0}, "any", "not reproduced", "1 fails"),
        ([0.1], {"rule": "at least 0.5"}, "any", "not reproduced", "1 fails"),
        ([0.1], {}, "as_run", "not reproduced", "1 fails"),
        # Where no number of items was enough, 64 times as many as were tried are.
        ([0.1], {"enough": NAN, "n": 20 / 64}, "any", "inconclusive", NEVER),
        ([0.1], {"enough": NAN, "n": 19 / 64}, "any", "not reproduced", "1 fails"),
    ],
)
def test_with_too_few_items_for_both_verdicts_there_is_neither(monkeypatch, values, entries, reading, verdict, why):
    tried = {"rule": "at least 0.4", "n": 20, "can_hold": False, "can_fail": True, "enough": 160.0} | entries
    monkeypatch.setattr(judge, "tried", lambda: {("X1", reading): tried})
    row = table({"at_least": 0.4}, [Member(str(value), Band(value, 0.05)) for value in values])
    assert (row.verdict, row.members) == (verdict, why)


def test_each_reading_has_its_row():
    calls = []

    def members(claim, reading):
        calls.append((claim["id"], reading))
        if reading == "slow":
            raise NotTestable("too slow")
        return [Member("x", Band({"paper": 0.9, "code": 0.1}.get(reading, 0.5), 0.1))]

    claims = [CLAIM | {"id": name, "rule": {"at_least": 0.5}} for name in ("A", "B", "C", "D")]
    readings = {"A": ["paper", "code"], "B": ["paper", "open"], "C": ["paper", "slow"], "D": ["paper"]}
    rows = rows_of(claims, members, readings=lambda claim: readings[claim["id"]])
    assert calls == [(row["claim"], row["reading"]) for row in rows]
    assert [row["note"] for row in rows][4:6] == ["", "too slow"]


# ------------------------------------------------------------------ what mutants of the judge would change


def test_ranks_on_the_other_side_of_the_mean_do_not_confirm_it():
    gains = {"few large": [-0.1 - i / 1000 for i in range(18)] + [5.0, 6.0], "all": [0.1 + i / 1000 for i in range(20)]}
    gains["all lost"] = [-gain for gain in gains["all"]]
    states = {}
    for name, gain in gains.items():
        sample = Sample(pd.DataFrame({"a": gain, "b": 0.0}), "difference", bounds=None)
        [j] = judged({"above": -10}, sample, test="wilcoxon_holm")
        assert j.p < 0.05
        states[name] = j.state
    assert states == {"few large": "open", "all": "holds", "all lost": "holds"}


def test_members_without_a_value_are_named_but_for_the_only_one():
    nothing = Sample(pd.DataFrame({"a": [0.0] * 7, "full": 0.0}), "share_of_ceiling")
    alone = table({"at_least": 0.4}, [Member("all", nothing)])
    assert alone.note == "all has no value: a ratio to nothing"
    beside = table({"at_least": 0.4}, [Member("a", nothing), Member("b", Band(0.9, 0.1))])
    assert (beside.verdict, "a has no value" in str(beside.to_dict())) == ("reproduced", True)
