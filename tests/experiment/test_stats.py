import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from kvrepro.errors import InputError
from kvrepro.experiment import stats

unit = st.floats(0, 1, allow_nan=False)


def naive_bootstrap(values, clusters, n, seed):
    """Cluster bootstrap written out: draw labels, pool their values, take the mean."""
    rng, labels = np.random.default_rng(seed), sorted(set(clusters))
    means = []
    for _ in range(n):
        drawn = rng.choice(len(labels), len(labels))
        pool = [v for i in drawn for v, c in zip(values, clusters, strict=True) if c == labels[i]]
        means.append(np.mean(pool))
    return np.percentile(means, [2.5, 97.5])


def test_mean_ci_agrees_with_the_normal_interval_of_many_values():
    x = np.random.default_rng(0).normal(0.3, 0.2, 2000)
    estimate = stats.mean_ci(x)
    half = 1.96 * x.std() / math.sqrt(x.size)
    assert estimate.mean == pytest.approx(x.mean())
    assert estimate.low == pytest.approx(x.mean() - half, abs=5e-4)
    assert estimate.high == pytest.approx(x.mean() + half, abs=5e-4)


def test_clusters_are_drawn_whole():
    rng = np.random.default_rng(1)
    clusters = np.repeat(np.arange(12), rng.integers(1, 6, 12))
    values = rng.normal(size=12)[clusters] + rng.normal(0, 0.1, clusters.size)
    estimate = stats.mean_ci(values, clusters=clusters, n=4000)
    low, high = naive_bootstrap(values, clusters, 4000, 3)
    assert (estimate.low, estimate.high) == pytest.approx((low, high), abs=0.06)
    single = stats.mean_ci(values, n=4000)
    assert estimate.high - estimate.low > 1.5 * (single.high - single.low)


@given(st.lists(unit, min_size=1, max_size=30))
@settings(max_examples=30, deadline=None)
def test_copies_in_one_cluster_add_no_certainty(values):
    once = stats.mean_ci(values, n=200)
    thrice = stats.mean_ci(values * 3, clusters=list(range(len(values))) * 3, n=200)
    assert (thrice.mean, thrice.low, thrice.high) == pytest.approx((once.mean, once.low, once.high), nan_ok=True)
    assert thrice.n == 3 * once.n


@given(st.lists(st.tuples(unit, unit), min_size=2, max_size=20))
@settings(max_examples=12, deadline=None)
def test_paired_tests_are_antisymmetric(pairs):
    a, b = zip(*pairs, strict=True)
    there, back = stats.paired_difference(a, b, n=200), stats.paired_difference(b, a, n=200)
    assert there.mean == pytest.approx(-back.mean, abs=1e-12)
    assert (there.low, there.high) == pytest.approx((-back.high, -back.low), abs=1e-9)
    for test in (stats.wilcoxon, stats.sign_test, stats.tost):
        assert test(a, b).p == pytest.approx(test(b, a).p)
        assert 0 <= test(a, b).p <= 1


def test_same_seed_same_interval():
    x = np.random.default_rng(2).random(50)
    assert stats.mean_ci(x) == stats.mean_ci(x)
    assert stats.mean_ci(x) != stats.mean_ci(x, seed=43)


def test_one_value_has_no_interval_and_says_so():
    estimate = stats.mean_ci([0.5])
    assert math.isnan(estimate.low)
    assert str(estimate) == "0.500 [one value, no interval]"
    assert str(stats.mean_ci([])) == "no values"


def test_estimates_print_with_their_interval():
    assert str(stats.Estimate(0.28149, 0.2431, 0.3204, 162)) == "0.281 [0.243, 0.320]"
    assert f"{stats.Estimate(0.28149, 0.2431, 0.3204, 162, missing=2):.2f}" == "0.28 [0.24, 0.32] (2 missing)"
    assert str(stats.Test(3.0, 1e-9, 162, 80)) == "p < 0.0001 (n = 162)"


def test_missing_values_are_dropped_in_pairs_and_counted():
    a, b = [1.0, math.nan, 0.5, 0.25], [0.5, 0.5, math.nan, 0.5]
    difference = stats.paired_difference(a, b)
    assert (difference.mean, difference.n, difference.missing) == (0.125, 2, 2)
    assert stats.wilcoxon(a, b).missing == stats.sign_test(a, b).missing == stats.tost(a, b).missing == 2


def test_wilcoxon_exact_closed_form():
    # all 5 differences positive and distinct: the two-sided exact p is 2 / 2**5
    test = stats.wilcoxon([1, 2, 3, 4, 5], [0, 0, 0, 0, 0])
    assert test.p == pytest.approx(2 / 32)
    assert stats.wilcoxon([1, 2, 3, 4, 5, 7], [0, 0, 0, 0, 0, 7]).p == test.p  # a tie is dropped
    assert stats.wilcoxon([1, 2, 3, 4, 5, 7], [0, 0, 0, 0, 0, 7]).used == 5


def test_all_equal_inputs_give_p_one():
    same = [0.1, 0.2, 0.3]
    assert stats.wilcoxon(same, same).p == 1.0
    assert stats.wilcoxon([0.1 + 0.2], [0.3]).used == 0  # rounding is no difference
    assert stats.sign_test(same, same).p == 1.0
    assert stats.tost(same, same).p == 0.0
    assert stats.tost([0.2, 0.3], [0.1, 0.2]).p == 1.0


def test_sign_test_closed_form():
    test = stats.sign_test([1] * 9 + [0, 5], [0] * 9 + [1, 5])  # 9 wins, 1 loss, 1 tie
    assert (test.statistic, test.used, test.n) == (9, 10, 11)
    assert test.p == pytest.approx(2 * (1 + 10) / 2**10)


def test_tost_is_two_one_sided_t_tests():
    d = np.random.default_rng(4).normal(0.005, 0.04, 60)
    se = d.std(ddof=1) / math.sqrt(60)
    p = max(scipy_stats.t.sf((d.mean() + 0.02) / se, 59), scipy_stats.t.cdf((d.mean() - 0.02) / se, 59))
    assert stats.tost(d, np.zeros(60)).p == pytest.approx(p)
    assert stats.tost(d, np.zeros(60), margin=0.1).p < 1e-6
    assert math.isnan(stats.tost([0.1], [0.1]).p)


def test_holm_closed_form():
    assert stats.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert stats.holm([0.6, 0.7]) == pytest.approx([1.0, 1.0])
    assert stats.holm([]) == []


def test_holm_agrees_with_statsmodels():
    from statsmodels.stats.multitest import multipletests

    ps = np.random.default_rng(0).uniform(size=20)
    assert stats.holm(ps) == pytest.approx(multipletests(ps, method="holm")[1])


@pytest.mark.parametrize(
    ("call", "numbers"),
    [
        (lambda: stats.wilcoxon([1, 2], [1]), ("2", "1")),
        (lambda: stats.mean_ci([1, 2], clusters=[1]), ("1", "2")),
        (lambda: stats.mean_ci([[1, 2]]), ("(1, 2)",)),
        (lambda: stats.tost([1, 2], [1, 2], margin=0), ("0",)),
    ],
)
def test_bad_input_is_named(call, numbers):
    with pytest.raises(InputError) as error:
        call()
    assert all(number in str(error.value) for number in numbers)
    assert "\n" not in str(error.value)
