"""The judge on data where the answer is known: true, false and at the threshold."""

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrepro.errors import InputError
from kvrepro.experiment import judge
from kvrepro.experiment.judge import Facts, Measured, Member, NotTestable, Sample

CLAIM = {"id": "X1", "statement": "It is so.", "paper": {"text": "so"}, "contrast": "mean", "topic": "t", "source": "s"}


def table(rule: dict, found, **more) -> pd.Series:
    """The one row of a claim; `found`: its members, or what to raise."""

    def members(claim, reading):
        if isinstance(found, Exception):
            raise found
        return found

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
        ([], "not testable here"),
    ],
)
def test_verdict(states, verdict):
    assert judge.verdict(states) == verdict


def test_of_twenty_members_at_the_threshold_one_fails_by_chance():
    assert judge.verdict(["fails"] + ["open"] * 19, refuted=False) == "inconclusive"
    assert judge.verdict(["fails"] * 11 + ["open"] * 9, refuted=False) == "not reproduced"
    assert judge.verdict(["fails"] + ["holds"] * 19, exact=True) == "not reproduced"
    near, at = (Member(name, Sample(scores(mean, 40), bounds=None)) for name, mean in (("near", 0.46), ("at", 0.5)))
    alone = table({"at_least": 0.5}, [near])
    assert (alone.verdict, alone.members) == ("not reproduced", "1 fails")
    among = table({"at_least": 0.5}, [near, *[replace(at, label=str(i)) for i in range(19)]])
    assert (among.verdict, among.members) == (
        "inconclusive",
        "19 open, 1 fails, which is expected of so many by chance",
    )
    far = Member("far", Sample(scores(0.3, 40), bounds=None))
    assert table({"at_least": 0.5}, [far, *[replace(at, label=str(i)) for i in range(19)]]).verdict == "not reproduced"


MIRRORED = {"at_least": "at_most", "above": "below"}


@given(
    st.lists(st.sampled_from([0.0, 0.2, 0.5, 1.0]), min_size=6, max_size=20),
    st.sampled_from([0.0, 0.25, 0.5, 1.0]), st.sampled_from(sorted(MIRRORED)),
    st.sampled_from([None, "wilcoxon_holm", "sign"]),
)  # fmt: skip
@settings(max_examples=15, deadline=None)
def test_both_sides_of_a_bound_are_judged_alike(values, bound, kind, test):
    """A claim and its mirror image: ties, values at the bound and samples without spread included."""
    x = pd.DataFrame({"a": values, "b": values[::-1]})
    y = x.rename(columns={"a": "b", "b": "a"})
    claim = {"id": "X", "test": test}
    for bounds in ((0.0, 1.0), None):
        one, other = (
            [Member(str(i), Sample(f[i:], "difference", bounds=bounds)) for i in range(2)] for f in (x, y)
        )  # fmt: skip
        up = judge.judge(claim | {"rule": {kind: bound}}, one)
        down = judge.judge(claim | {"rule": {MIRRORED[kind]: -bound}}, other)
        assert [(j.state, j.refuted) for j in up] == [(j.state, j.refuted) for j in down]


@pytest.mark.parametrize(("mean", "verdict"), [(0.6, "reproduced"), (0.4, "not reproduced"), (0.5, "inconclusive")])
def test_true_false_and_at_the_threshold(mean, verdict):
    assert table({"at_least": 0.5}, [Member("all", Sample(scores(mean, 60)))]).verdict == verdict
    assert table({"at_most": 0.5}, [Member("all", Sample(scores(1 - mean, 60)))]).verdict == verdict


def test_inconclusive_says_how_many_items_would_decide_and_they_do():
    row = table({"at_least": 0.5}, [Member("all", Sample(scores(0.52, 20), bounds=None))])
    assert row.verdict == "inconclusive"
    drawn = np.random.default_rng(1).normal(0.52, 0.1, (200, int(row.needed)))
    again = [Sample(pd.DataFrame({"a": values}), bounds=None).estimate() for values in drawn]
    assert 0.7 < np.mean([e.low >= 0.5 for e in again]) < 0.9  # four times of five
    assert math.isinf(table({"at_least": 0.5}, [Member("all", Sample(scores(0.5, 20)))]).needed)


def test_six_items_all_alike_prove_little_and_many_prove_more():
    few, many = (Sample(pd.DataFrame({"a": [0.0] * n})) for n in (6, 600))
    assert table({"at_most": 0.05}, [Member("all", few)]).verdict == "inconclusive"
    assert table({"at_most": 0.05}, [Member("all", many)]).verdict == "reproduced"


def test_nothing_to_test_is_not_inconclusive():
    assert table({"at_least": 0}, NotTestable("a sink is needed")).note == "a sink is needed"
    empty = table({"at_least": 0}, [])
    assert (empty.verdict, empty.note) == ("not testable here", "no member of this claim was run")
    few = table({"at_least": 0}, [Member("all", Sample(scores(0.5, 5)))])
    assert (few.verdict, few.note) == ("not testable here", "5 items: an interval needs at least 6")
    gone = table({"at_least": 0}, [Member("all", Sample(pd.DataFrame({"a": [np.nan] * 9})))])
    assert (gone.verdict, gone.note) == ("not testable here", "0 items: an interval needs at least 6")


def test_members_that_cannot_be_tested_are_named_and_the_rest_decide():
    row = table({"at_least": 0.1}, [Member("one", Sample(scores(0.6, 40))), NotTestable("quest was not run")])
    assert row.verdict == "reproduced"
    assert row.members == "1 holds, 1 not testable (quest was not run)"


def test_missing_values_drop_their_item_only():
    frame = scores(0.6, 40).assign(b=0.1)
    frame.loc[3, "b"] = np.nan
    row = table({"above": 0}, [Member("all", Sample(frame, "difference"))])
    assert (row.verdict, row.n) == ("reproduced", 39)


# ------------------------------------------------------------------ exact statements


def test_one_counterexample_refutes_an_exact_claim_and_is_named():
    cases = pd.Series(1.0, index=[f"prompt {i}" for i in range(1000)])
    exact = {"exact": True}
    whole = table({"at_least": 1}, [Member("repack", Facts(cases))], **exact)
    assert (whole.verdict, whole.n, whole.low) == ("reproduced", 1000, 1.0)
    cases.iloc[17] = 0.0
    refuted = table({"at_least": 1}, [Member("repack", Facts(cases))], **exact)
    assert refuted.verdict == "not reproduced"
    assert refuted.decided_by == "repack: 1 of 1000 cases, worst at prompt 17"
    assert refuted.ours == 0.0
    assert refuted.rule == "at least 1, in every case"
    parts = [Member("repack", Facts(cases)), Member("fill", Facts(cases.clip(lower=1)))]
    assert table({"at_least": 1}, parts, **exact).verdict == "not reproduced"  # one case in either of them


def test_a_single_case_decides_an_exact_claim_and_none_leaves_it():
    assert table({"between": [18, 18]}, [Member("all", Facts(pd.Series([18.0])))], exact=True).verdict == "reproduced"
    nothing = table({"at_most": 0}, [Member("all", Facts(pd.Series([np.nan])))], exact=True)
    assert (nothing.verdict, nothing.note) == ("not testable here", "no case of all has a value")
    with pytest.raises(InputError, match="X1 is exact: member all has to list its cases"):
        table({"at_most": 0}, [Member("all", Sample(scores(0.5, 9)))], exact=True)


# ------------------------------------------------------------------ spreads and other parts


def policies(means, n=60, seed=0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    shared = rng.normal(0, 0.1, n)
    return pd.DataFrame({name: shared + mean + rng.normal(0, 0.05, n) for name, mean in means.items()})


def test_a_spread_is_judged_by_its_pairs_and_names_the_widest():
    near, far = policies({"x": 0.5, "y": 0.51, "z": 0.5}, 400), policies({"x": 0.5, "y": 0.7, "z": 0.5})
    assert table({"size_at_most": 0.05}, [judge.pairs(near, "all")]).verdict == "reproduced"
    row = table({"size_at_most": 0.05}, [judge.pairs(far, "all")])
    assert (row.verdict, row.decided_by) == ("not reproduced", "all, y against z")
    assert table({"size_at_least": 0.05}, [judge.pairs(far, "all", some=True)]).verdict == "reproduced"
    assert table({"size_at_least": 0.05}, [judge.pairs(near, "all", some=True)]).verdict == "not reproduced"


def test_equal_policies_seldom_show_a_spread():
    """The bootstrap of a range finds one among six equal policies nearly always; all pairs at 5% do not."""
    same = dict.fromkeys("uvwxyz", 0.5)
    found = [
        table({"size_at_least": 0.001}, [judge.pairs(policies(same, 24, seed), "all", some=True)]).verdict
        for seed in range(60)
    ]
    assert found.count("reproduced") <= 6


def test_a_spread_of_one_condition_is_not_testable():
    with pytest.raises(NotTestable, match="1 of the conditions"):
        judge.pairs(policies({"x": 0.5}), "all")


# ------------------------------------------------------------------ tests that a claim names


def paired(gap: float, n: int = 40, seed: int = 0) -> Sample:
    rng = np.random.default_rng(seed)
    b = rng.uniform(0.2, 0.5, n)
    return Sample(pd.DataFrame({"a": b + gap + rng.normal(0, 0.02, n), "b": b}), "difference")


def test_the_named_test_must_agree():
    row = table({"above": 0.0}, [Member("x", paired(0.2)), Member("y", paired(0.1))], test="wilcoxon_holm")
    assert (row.verdict, row.rule) == ("reproduced", "above 0; Wilcoxon p < 0.05 (Holm)")
    two = [Member(str(i), paired(0.2, seed=i)) for i in range(4)]
    assert table({"above": 0.0}, two, test="sign").verdict == "inconclusive"  # four signs give p = 0.125
    assert table({"above": 0.0}, [*two, *two], test="sign").verdict == "reproduced"


def test_no_difference_and_equivalence():
    assert table({"no_difference": 0.1}, [Member("x", paired(0.0, 60))], test="wilcoxon_holm").verdict == "reproduced"
    assert table({"no_difference": 0.1}, [Member("x", paired(0.05))], test="wilcoxon_holm").verdict == "not reproduced"
    assert table({"equivalent": 0.05}, [Member("x", paired(0.0, 100))], test="tost").verdict == "reproduced"
    assert table({"equivalent": 0.05}, [Member("x", paired(0.2))], test="tost").verdict == "not reproduced"
    assert table({"equivalent": 0.05}, [Member("x", paired(0.04, 12))], test="tost").verdict == "inconclusive"


def test_ranks_alone_refute_no_equality_of_means():
    """Many items lose a little, few gain much: Wilcoxon's test finds it, the mean is 0."""
    lost = pd.DataFrame({"a": [0.45] * 40 + [1.0] * 4, "b": [0.5] * 44})
    row = table({"no_difference": 0.1}, [Member("x", Sample(lost, "difference"))], test="wilcoxon_holm")
    assert row.p < 0.001
    assert row.low < 0 < row.high
    assert row.verdict == "inconclusive"


def test_what_a_claim_cannot_mean_raises():
    with pytest.raises(InputError, match="unknown rule 'about'"):
        table({"about": 1}, [Member("x", paired(0.1))])
    with pytest.raises(InputError, match="X1: unknown test 'guess'"):
        table({"above": 0}, [Member("x", paired(0.1))], test="guess")
    with pytest.raises(InputError, match="needs paired columns"):
        table({"above": 0}, [Member("x", Measured(1, 1, 1))], test="tost")


def test_measured_ranges_are_judged_like_intervals():
    assert table({"at_most": 1.2}, [Member("x", Measured(1.1, 1.0, 1.19))]).verdict == "reproduced"
    assert table({"at_most": 1.2}, [Member("x", Measured(1.1, 1.0, 1.3))]).verdict == "inconclusive"
    assert table({"at_most": 1.2}, [Member("x", Measured(1.1, 1.0, 1.19, n=6))]).verdict == "reproduced"
    steps = table({"at_most": 1.2}, [Member("x", Measured(1.1, 1.0, 1.19, n=1))])  # fifty steps of a single run
    assert (steps.verdict, steps.note) == ("not testable here", "1 items: an interval needs at least 6")


def test_the_reading_decides_where_a_member_turns_over():
    assert judge.depends([{"x": "holds"}, {"x": "fails"}]) == "yes"
    assert judge.depends([{"x": "holds"}, {"x": "open"}]) == "unclear"
    assert judge.depends([{"x": "holds"}, {"x": "holds"}]) == "no"
    assert judge.depends([{"x": "holds"}]) == judge.depends([{"x": "holds"}, {}]) == ""


def test_a_model_that_answers_nothing_or_failed_says_which():
    judge.answers_enough(pd.Series([1.0] * 8))
    with pytest.raises(NotTestable, match="answers too few items"):
        judge.answers_enough(pd.Series([0.0] * 8))
    with pytest.raises(NotTestable, match="all 8 items of the full cache failed: out of memory"):
        judge.answers_enough(pd.Series([np.nan] * 8), pd.Series(["out of memory"] * 8))
    with pytest.raises(NotTestable, match="3 items: an interval needs at least 6"):
        judge.answers_enough(pd.Series([1.0] * 3))


def test_a_claim_in_percent_shows_a_hundred_times_its_estimate():
    members = [Member("m", Sample(scores(0.5, 40)))]
    plain, percent = (table({"at_least": 0.1}, members, unit=unit) for unit in ("F1", "%"))
    for name in ("ours", "low", "high"):
        assert percent[name] == pytest.approx(100 * plain[name])


def test_a_claim_without_a_contrast_says_why_and_asks_nobody():
    def members(claim, reading):
        raise AssertionError("asked")

    row = judge.verdicts(
        [CLAIM | {"rule": {"at_least": 0}, "contrast": "none", "why": "needs a GPU"}], members, model="m", profile="q"
    ).iloc[0]
    assert (row.verdict, row.note) == ("not testable here", "needs a GPU")
