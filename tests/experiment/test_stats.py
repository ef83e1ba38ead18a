import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from kvrepro.errors import InputError
from kvrepro.experiment import stats

unit = st.floats(0, 1, allow_nan=False)


def test_an_unbounded_mean_has_students_interval():
    x = np.random.default_rng(0).normal(0.3, 0.2, 12)
    e = stats.interval(x)
    half = scipy_stats.t.ppf(0.975, 11) * x.std(ddof=1) / math.sqrt(12)
    assert e.triple == pytest.approx((x.mean(), x.mean() - half, x.mean() + half))


@given(st.lists(unit, min_size=6, max_size=40))
@settings(max_examples=50, deadline=None)
def test_the_estimate_lies_inside_and_the_interval_within_the_bounds(values):
    e = stats.interval(values, bounds=(0, 1))
    assert 0 <= e.low <= e.value <= e.high <= 1
    assert e.high > e.low  # even where all are alike


@pytest.mark.parametrize(("n", "most"), [(6, 0.46), (12, 0.27), (100, 0.037)])
def test_zeros_only_leave_room_but_no_more_than_the_exact_interval(n, most):
    e = stats.interval([0.0] * n, bounds=(0, 1))
    assert e.low == 0
    assert 0.3 * most < e.high < most  # most: Clopper and Pearson's upper limit for 0 of n
    assert math.isnan(stats.interval([0.0] * n).low)  # of unbounded values alike nothing is known


def gains(up: int, down: int, n: int) -> pd.DataFrame:
    return pd.DataFrame({"a": [1] * up + [0] * (n - up), "b": [0] * up + [1] * down + [0] * (n - up - down)})


def test_shares_have_exact_limits_in_closed_form():
    none = 1 - 0.025 ** (1 / 41)  # Clopper and Pearson's upper limit of 0 in 41
    all_alike = stats.counted(pd.DataFrame({"a": [1.0] * 41}), "mean")
    assert all_alike.triple == pytest.approx((1, 1 - none, 1))
    assert stats.counted(gains(0, 0, 41), "difference").triple == pytest.approx((0, -none, none))
    half = scipy_stats.binomtest(4, 41).proportion_ci(0.95, "exact")
    some = stats.counted(gains(4, 0, 41), "difference")
    assert some.low == pytest.approx(4 / 41 - math.hypot(4 / 41 - half.low, none))
    assert some.high == pytest.approx(half.high)
    assert stats.counted(gains(4, 2, 41), "difference").value == pytest.approx(2 / 41)
    with pytest.raises(InputError, match="not all 0 or 1"):
        stats.counted(pd.DataFrame({"a": [0.5] * 8}), "mean")


@pytest.mark.parametrize(("up", "down"), [(0.02, 0.0), (0.08, 0.0), (0.1, 0.1), (0.3, 0.1), (0.9, 0.02)])
def test_limits_of_a_difference_of_shares_hold_the_truth(up, down):
    """Every outcome weighed by its probability, so that nothing is left to chance."""
    covered, n = 0.0, 24
    for i in range(n + 1):
        for j in range(n + 1 - i):
            weight = scipy_stats.multinomial.pmf([i, j, n - i - j], n, [up, down, 1 - up - down])
            if weight > 1e-5:
                e = stats.counted(gains(i, j, n), "difference")
                covered += weight * (e.low <= up - down <= e.high)
    assert covered > 0.95


def test_a_cluster_counts_once_by_its_mean():
    rng = np.random.default_rng(1)
    clusters = np.repeat(np.arange(12), rng.integers(1, 6, 12))
    values = rng.normal(size=12)[clusters] + rng.normal(0, 0.1, clusters.size)
    e = stats.interval(values, clusters)
    assert e.triple == pytest.approx(stats.interval([values[clusters == i].mean() for i in range(12)]).triple)
    assert e.n == 12
    assert e.high - e.low > 1.5 * (lambda one: one.high - one.low)(stats.interval(values))


def test_the_half_item_is_half_of_a_row_however_many_make_a_cluster():
    alone = stats.interval([0.0] * 12, bounds=(0, 1))
    many = stats.interval([0.0] * 1200, np.repeat(np.arange(12), 100), bounds=(0, 1))
    assert many.high < 0.2 * alone.high
    assert many.triple == pytest.approx(stats.interval([0.0] * 12, bounds=(0, 1), each=100).triple)


@given(st.lists(unit, min_size=1, max_size=30))
@settings(max_examples=30, deadline=None)
def test_copies_in_one_cluster_add_no_certainty(values):
    once = stats.interval(values)
    thrice = stats.interval(values * 3, list(range(len(values))) * 3)
    assert (*thrice.triple, thrice.n) == pytest.approx((*once.triple, once.n), nan_ok=True)


@given(st.lists(st.tuples(unit, unit), min_size=6, max_size=20))
@settings(max_examples=12, deadline=None)
def test_paired_tests_are_antisymmetric(pairs):
    a, b = zip(*pairs, strict=True)
    there, back = (
        stats.contrast(pd.DataFrame({"a": x, "b": y}), "difference", bounds=(0, 1)) for x, y in ((a, b), (b, a))
    )
    assert there.value == pytest.approx(-back.value, abs=1e-12)
    assert (there.low, there.high) == pytest.approx((-back.high, -back.low), abs=1e-9)
    for test in (stats.wilcoxon, stats.sign_test, stats.tost):
        assert test(a, b) == pytest.approx(test(b, a))
        assert 0 <= test(a, b) <= 1


def test_a_ratio_has_fiellers_interval():
    rng = np.random.default_rng(2)
    full = rng.uniform(0.5, 1, 40)
    frame = pd.DataFrame({"a": full * rng.uniform(0.3, 0.6, 40), "full": full})
    e = stats.contrast(frame, "share_of_ceiling", bounds=(0, 1))
    assert e.value == pytest.approx(frame.a.mean() / frame.full.mean())
    for r in (e.low, e.high):  # at its ends the mean of a - r full is exactly t standard errors from zero
        corners = np.array([0, 1, -r, 1 - r])
        x = np.concatenate([frame.a - r * frame.full, corners])
        w = np.concatenate([np.ones(40), np.full(4, 1 / 8)])
        mean = np.average(x, weights=w)
        error = math.sqrt(w @ (x - mean) ** 2 / (40.5 - 1) / 40.5)
        assert abs(mean) == pytest.approx(scipy_stats.t.ppf(0.975, 39.5) * error, rel=1e-6)


def test_a_ratio_whose_bottom_may_be_zero_has_no_bound():
    frame = pd.DataFrame({"a": [0.9, 0.1] * 6, "b": [0.1, 0.9] * 6, "full": [0.5] * 12})
    e = stats.contrast(frame, "loss_ratio", bounds=(0, 1))
    assert math.isnan(e.value) or (e.low, e.high) == (-math.inf, math.inf)
    assert math.isnan(stats.contrast(frame.assign(full=0.0), "share_of_ceiling").value)


def test_a_resampled_mean_agrees_with_students_interval():
    x = np.random.default_rng(3).normal(size=(40, 1))
    e, known = stats.resampled(pd.DataFrame(x), lambda v: v[:, 0].mean()), stats.interval(x[:, 0])
    assert e.triple == pytest.approx(known.triple, abs=0.05)
    assert stats.resampled(pd.DataFrame(x), lambda v: float(np.median(v))).low < np.median(x)
    assert math.isnan(stats.resampled(pd.DataFrame(x), lambda v: math.nan).low)


def test_two_samples_are_compared_by_welch():
    rng = np.random.default_rng(5)
    a, b = rng.normal(0.4, 0.1, 12), rng.normal(0.1, 0.3, 7)
    e, known = stats.unpaired(a, b), scipy_stats.ttest_ind(a, b, equal_var=False).confidence_interval()
    assert (e.low, e.high, e.n) == (pytest.approx(known.low), pytest.approx(known.high), 7)
    assert math.isnan(stats.unpaired([0.5] * 9, [0.5] * 9).low)
    assert stats.unpaired([0.5] * 9, [0.5] * 9, bounds=(-1, 1)).low < 0


def test_needed_items_solve_for_the_gap():
    e = stats.interval(np.random.default_rng(4).normal(0.5, 0.2, 50))
    assert e.needed(0.05) == pytest.approx((2.80 * e.sd / 0.05) ** 2, rel=0.01)
    zeros = stats.interval([0.0] * 48, bounds=(0, 1))
    assert stats.interval([0.0] * int(zeros.needed(0.005)), bounds=(0, 1)).high < 0.005
    assert math.isinf(e.needed(0.0))


def test_groups_are_frames_with_intervals():
    frame = pd.DataFrame({"policy": ["x"] * 8 + ["y"] * 3, "f1": [0.0, 1.0] * 4 + [0.5] * 3})
    found = stats.means(frame, "policy", "f1", bounds=(0, 1)).set_index("policy")
    assert found.loc["x", "value"] == 0.5
    assert found.loc["x", "low"] > 0
    assert found.n.tolist() == [8, 3]
    assert math.isnan(found.loc["y", "low"])


def test_few_values_have_no_interval_and_say_so():
    assert str(stats.interval([0.5])) == "0.500 [no interval: 1 of 6 items]"
    assert str(stats.interval([])) == "no values"
    assert str(stats.interval([0.5] * 9)) == "0.500 [no interval: all alike]"


def test_estimates_print_with_their_interval():
    assert str(stats.Estimate(0.28149, 0.2431, 0.3204, 162)) == "0.281 [0.243, 0.320]"
    assert f"{stats.Estimate(0.28149, 0.2431, 0.3204, 162, missing=2):.2f}" == "0.28 [0.24, 0.32] (2 missing)"


def test_missing_values_are_dropped_in_pairs_and_counted():
    a, b = [1.0, math.nan, 0.5, 0.25], [0.5, 0.5, math.nan, 0.5]
    difference = stats.contrast(pd.DataFrame({"a": a, "b": b}), "difference")
    assert (difference.value, difference.n, difference.missing) == (0.125, 2, 2)
    for test in (stats.wilcoxon, stats.sign_test, stats.tost):
        assert test(a, b) == pytest.approx(test([1.0, 0.25], [0.5, 0.5]))


def test_wilcoxon_exact_closed_form():
    # all 5 differences positive and distinct: the two-sided exact p is 2 / 2**5
    p = stats.wilcoxon([1, 2, 3, 4, 5], [0, 0, 0, 0, 0])
    assert p == pytest.approx(2 / 32)
    assert stats.wilcoxon([1, 2, 3, 4, 5, 7], [0, 0, 0, 0, 0, 7]) == p  # a tie is dropped


@pytest.mark.parametrize("n", [5, 9, 13])
def test_wilcoxon_with_ties_is_scipys_permutation(n):
    d = np.random.default_rng(n).choice([-1.0, -0.5, 0.25, 0.5, 1.0], n)
    assert stats.wilcoxon(d, np.zeros(n)) == pytest.approx(scipy_stats.wilcoxon(d, method="auto").pvalue)


def test_all_equal_inputs_give_p_one():
    same = [0.1, 0.2, 0.3]
    assert stats.wilcoxon(same, same) == 1.0
    assert stats.wilcoxon([0.1 + 0.2], [0.3]) == 1.0  # rounding is no difference
    assert stats.sign_test(same, same) == 1.0
    assert stats.tost(same, same) == 0.0
    assert stats.tost([0.2, 0.3], [0.1, 0.2]) == 1.0


def test_sign_test_closed_form():
    p = stats.sign_test([1] * 9 + [0, 5], [0] * 9 + [1, 5])  # 9 wins, 1 loss, 1 tie
    assert p == pytest.approx(2 * (1 + 10) / 2**10)


def test_tost_is_two_one_sided_t_tests():
    d = np.random.default_rng(4).normal(0.005, 0.04, 60)
    se = d.std(ddof=1) / math.sqrt(60)
    p = max(scipy_stats.t.sf((d.mean() + 0.02) / se, 59), scipy_stats.t.cdf((d.mean() - 0.02) / se, 59))
    assert stats.tost(d, np.zeros(60)) == pytest.approx(p)
    assert stats.tost(d, np.zeros(60), margin=0.1) < 1e-6
    assert math.isnan(stats.tost([0.1], [0.1]))
    same = np.full(20, 0.4)  # twenty ties of scores do not show equivalence within 0.02, two hundred do
    assert stats.tost(same, same, 0.02, bounds=(0, 1)) > 0.05 > stats.tost([0.4] * 200, [0.4] * 200, bounds=(0, 1))


def test_holm_closed_form():
    assert stats.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert stats.holm([0.6, 0.7]) == pytest.approx([1.0, 1.0])
    assert stats.holm([]) == []


def test_a_row_is_told_with_as_many_digits_as_asked_for():
    rows = pd.DataFrame({"who": ["a", "b"], "value": [0.6333, 0.5], "low": [0.5449, np.nan], "high": [0.7182, np.nan]})
    assert stats.told(rows, who="a") == "0.633 [0.545, 0.718]"
    assert stats.told(rows, "%", who="a") == "63.3% [54.5%, 71.8%]"
    assert stats.told(rows, "%", digits=0, who="a") == "63% [54%, 72%]"
    assert stats.told(rows, digits=2, who="b") == "0.50"


def test_holm_agrees_with_statsmodels():
    from statsmodels.stats.multitest import multipletests

    ps = np.random.default_rng(0).uniform(size=20)
    assert stats.holm(ps) == pytest.approx(multipletests(ps, method="holm")[1])


@pytest.mark.parametrize(
    ("call", "numbers"),
    [
        (lambda: stats.wilcoxon([1, 2], [1]), ("2", "1")),
        (lambda: stats.interval([1, 2], clusters=[1]), ("1", "2")),
        (lambda: stats.interval([[1, 2]]), ("(1, 2)",)),
        (lambda: stats.tost([1, 2], [1, 2], margin=0), ("0",)),
    ],
)
def test_bad_input_is_named(call, numbers):
    with pytest.raises(InputError) as error:
        call()
    assert all(number in str(error.value) for number in numbers)
    assert "\n" not in str(error.value)


def test_what_has_no_interval_still_says_its_level_and_its_number():
    few, flat = [0.1, 0.2, 0.4], [0.5] * 12
    for e, n in ((stats.interval(few, level=0.9), 3), (stats.interval(flat, level=0.9), 12)):
        assert (math.isnan(e.low), e.level, e.n) == (True, 0.9, n)
    for e, n in ((stats.unpaired(few, flat, level=0.9), 3), (stats.unpaired(flat, flat, level=0.9), 12)):
        assert (math.isnan(e.low), e.level, e.n) == (True, 0.9, n)


def test_contrasts_pair_the_rows_of_a_group_with_those_of_the_other_table():
    rows = pd.DataFrame({"item": [*range(8)] * 2, "policy": ["a"] * 8 + ["b"] * 8, "f1": np.linspace(0, 1, 16)})
    against = pd.DataFrame({"item": range(1, 9), "f1": 0.25})  # item 0 has no partner, item 8 no row
    found = stats.contrasts(rows, against, "policy", "f1").set_index("policy")
    for name, own in rows[rows.item > 0].groupby("policy"):
        assert (found.value[name], found.n[name]) == (pytest.approx(own.f1.mean() - 0.25), 7)
