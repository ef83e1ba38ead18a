import itertools
import math
import statistics

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize
from scipy import stats as scipy_stats

from kvrepro.experiment import stats

unit = st.floats(0, 1, allow_nan=False)


def symmetric(n: int, middle: float = 0.3) -> np.ndarray:
    away = np.abs(np.random.default_rng(0).normal(0, 0.2, n // 2))
    return middle + np.concatenate([away, -away])


@pytest.mark.parametrize("n", [8, 16, 48])
def test_skewed_values_are_missed_less_often_than_by_students_interval(n):
    """Exponential: that one ends below the mean in 10, 8 and 6% of samples."""
    draws = np.random.default_rng(n).exponential(size=(1000, n))
    estimates = [stats.interval(x) for x in draws]
    assert np.mean([e.high < 1 for e in estimates]) < 0.07
    assert np.mean([e.low > 1 for e in estimates]) < 0.05
    student = quantile(0.95, n - 1) * draws.std(axis=1, ddof=1) / math.sqrt(n)
    assert np.mean([e.high < 1 for e in estimates]) < 0.7 * (draws.mean(axis=1) + student < 1).mean()


@given(st.lists(unit, min_size=6, max_size=40))
@settings(max_examples=50, deadline=None)
def test_the_estimate_lies_inside_and_the_interval_within_the_bounds(values):
    e = stats.interval(values, bounds=(0, 1))
    assert 0 <= e.low <= e.value <= e.high <= 1
    assert e.high > e.low  # even where all are alike


def gains(up: int, down: int, n: int) -> pd.DataFrame:
    return pd.DataFrame({"a": [1] * up + [0] * (n - up), "b": [0] * up + [1] * down + [0] * (n - up - down)})


@pytest.mark.parametrize(("hits", "n"), [(0, 8), (3, 8), (48, 48), (17, 48), (1, 200)])
def test_the_share_of_zeros_and_ones_has_jeffreys_limits(hits, n):
    e = stats.interval([1.0] * hits + [0.0] * (n - hits), bounds=(0, 1))
    low, high = scipy_stats.beta.ppf([0.025, 0.975], hits + 0.5, n - hits + 0.5)
    assert e[:3] == pytest.approx((hits / n, low if hits else 0, high if hits < n else 1))


@pytest.mark.parametrize(("up", "down"), [(0.02, 0.0), (0.08, 0.0), (0.1, 0.1), (0.3, 0.1), (0.9, 0.02)])
def test_limits_of_a_difference_of_shares_hold_the_truth(up, down):
    """Every outcome weighed by its probability, so that nothing is left to chance."""
    covered, n = 0.0, 24
    for i in range(n + 1):
        for j in range(n + 1 - i):
            weight = scipy_stats.multinomial.pmf([i, j, n - i - j], n, [up, down, 1 - up - down])
            if weight > 1e-5:
                e = stats.contrast(gains(i, j, n), "difference", bounds=(0, 1))
                covered += weight * (e.low <= up - down <= e.high)
    assert covered > 0.93


def test_seeing_nothing_says_no_more_than_seeing_little():
    """Steps of answers, hits in one answer of five: intervals of six answers have to cover a mean of 0.06."""
    draws = np.random.default_rng(5)
    missed = 0
    for _ in range(200):
        values = np.where(draws.random(6) < 0.2, draws.binomial(200, 0.3, 6), 0) / 200
        e = stats.interval(values, bounds=(0, 1), each=200)
        missed += not e.low <= 0.06 <= e.high
    assert missed <= 0.1 * 200


@given(st.lists(unit, min_size=1, max_size=30))
@settings(max_examples=30, deadline=None)
def test_copies_in_one_cluster_add_no_certainty(values):
    once = stats.interval(values)
    thrice = stats.interval(values * 3, list(range(len(values))) * 3)
    assert (*thrice[:3], thrice.n) == pytest.approx((*once[:3], once.n), nan_ok=True)


@given(st.lists(st.tuples(unit, unit), min_size=6, max_size=20))
@settings(max_examples=12, deadline=None)
def test_paired_tests_are_antisymmetric(pairs):
    a, b = zip(*pairs, strict=True)
    there, back = (
        stats.contrast(pd.DataFrame({"a": x, "b": y}), "difference", bounds=(0, 1)) for x, y in ((a, b), (b, a))
    )
    assert there.value == pytest.approx(-back.value, abs=1e-12)
    assert (there.low, there.high) == pytest.approx((-back.high, -back.low), abs=1e-9)
    for test in (stats.wilcoxon, lambda x, y: stats.tost(x, y, 0.02)):
        assert test(a, b) == pytest.approx(test(b, a))
        assert 0 <= test(a, b) <= 1


@pytest.mark.parametrize("n", [5, 9, 14, 40])
def test_wilcoxon_with_ties_is_scipys(n):
    """By permutation up to 13 differences, from 14 on by the normal approximation."""
    d = np.random.default_rng(n).choice([-1.0, -0.5, 0.25, 0.5, 1.0], n)
    assert stats.wilcoxon(d, np.zeros(n)) == pytest.approx(scipy_stats.wilcoxon(d, method="auto").pvalue)
    one_sided = scipy_stats.wilcoxon(d, method="auto", alternative="greater").pvalue
    assert stats.wilcoxon(d, np.zeros(n), greater=True) == pytest.approx(one_sided)


@pytest.mark.parametrize(
    "d", [[1, 1], [1, -1], [1, 1, -2], [3, 3, -1, -1], [-1, -1, -1, -1, 2], [2, 2, 2, -1, 5, 7, 7, 8, 9, 9, 9, 9, -4]]
)
def test_wilcoxon_with_ties_counts_all_signs(d):
    ranks = [sum(abs(x) < abs(y) for x in d) + (sum(abs(x) == abs(y) for x in d) + 1) / 2 for y in d]
    seen = sum(rank for rank, x in zip(ranks, d, strict=True) if x > 0)
    sums = [sum(itertools.compress(ranks, signs)) for signs in itertools.product([0, 1], repeat=len(d))]
    rarer = min(sum(x <= seen for x in sums), sum(x >= seen for x in sums)) / len(sums)
    assert stats.wilcoxon(d, np.zeros(len(d))) == pytest.approx(min(1, 2 * rarer))
    above = sum(x >= seen for x in sums) / len(sums)
    assert stats.wilcoxon(d, np.zeros(len(d)), greater=True) == pytest.approx(above)


def test_tost_asks_at_which_level_the_interval_reaches_the_margin():
    same = np.full(20, 0.4)  # twenty ties of scores do not show equivalence within 0.02, two hundred do
    assert stats.tost(same, same, 0.02) > 0.05 > stats.tost([0.4] * 200, [0.4] * 200, 0.02)
    assert stats.tost([0.5, 0.5], [0.0, 0.0], 0.5) == 1.0  # a difference of the margin itself is no equivalence
    p = stats.tost(SIX, np.zeros(6), 0.9)
    assert np.mean(SIX) + reach(SIX, -1, 1, level=1 - 2 * p)[1] == pytest.approx(0.9)
    assert p == pytest.approx(stats.tost(np.zeros(6), SIX, 0.9))
    assert math.isnan(stats.tost([0.1], [0.1], 0.02))


def test_holm_agrees_with_statsmodels():
    from statsmodels.stats.multitest import multipletests

    ps = np.random.default_rng(0).uniform(size=20)
    assert stats.holm(ps) == pytest.approx(multipletests(ps, method="holm")[1])
    assert stats.holm([0, 1]) == [0.0, 1.0]


def test_scores_may_be_true_or_false_and_one_side_may_be_constant():
    yes, no = [True] * 5 + [False], [False, True] * 3
    assert stats.wilcoxon(yes, no) == stats.wilcoxon(np.array(yes, float), np.array(no, float))
    sides = pd.DataFrame({"a": [1.0] * 8, "b": np.arange(8) / 8})
    e, alone = stats.contrast(sides, "unpaired"), stats.contrast(sides[["b"]].rename(columns={"b": "a"}), "mean")
    assert (e.high - e.value, e.value - e.low) == pytest.approx((alone.value - alone.low, alone.high - alone.value))


# ------------------------------------------------------------------ every field of an estimate, against plain loops

NAN, INF = math.nan, math.inf
SIX = [0.1, 0.2, 0.2, 0.5, 0.7, 1.0]


def alike(e: stats.Estimate, *wanted: float) -> bool:
    """value, low, high, n."""
    return tuple(e) == pytest.approx(wanted, nan_ok=True, rel=1e-9)


def reach(values, least=None, most=None, each=1, level=0.95, alike=True) -> tuple[float, float]:
    """How far the limits of a mean lie below and above it: the module's rule in plain loops."""
    n = len(values)
    if least is None:
        t, error = quantile(level, n - 1), statistics.stdev(values) / math.sqrt(n)
        return error * hall(values, t), -error * hall(values, -t)
    parts = [[max(0.0, sign * x) for x in values] for sign in (1, -1)]
    sizes = [sum(x * x for x in part) / sum(part) if any(part) else 0.0 for part in parts]
    less, more = [0.0, 0.0], [0.0, 0.0]
    for i, (part, end) in enumerate(zip(parts, (most, -least), strict=True)):
        if not end:
            continue
        size = sizes[1 - i] if alike else 0
        unseen = [min(size, end) * scipy_stats.beta(0.5, n + 0.5).ppf((1 + level) / 2)]
        if not any(part):
            unseen.append(end * quantile(level, n - 1) * math.sqrt(1 / 16 / each) / n)
            more[i] = max(unseen) if size else end * scipy_stats.beta(0.5, n + 0.5).ppf((1 + level) / 2)
            continue
        share, error = sum(part) / n / end, statistics.variance(part) / n / end**2
        error += ((0 - share) ** 2 + (1 - share) ** 2) / 16 / each / n**2
        z, t = NORMAL.inv_cdf((1 + level) / 2), quantile(level, n - 1)
        count = n if share == 1 else max(n, share * (1 - share) / error * (z / t) ** 2)
        beta = scipy_stats.beta(count * share + 0.5, count * (1 - share) + 0.5)
        less[i] = end * (share - min(share, beta.ppf((1 - level) / 2)))
        more[i] = end * ((1.0 if share == 1 else max(share, beta.ppf((1 + level) / 2))) - share)
        more[i] = max(more[i], *unseen)
    r = statistics.correlation(*parts) if all(len(set(part)) > 1 for part in parts) else 0.0
    below = math.sqrt(less[0] ** 2 + more[1] ** 2 - 2 * r * less[0] * more[1])
    above = math.sqrt(more[0] ** 2 + less[1] ** 2 - 2 * r * more[0] * less[1])
    return below, above


def hall(values, t) -> float:
    """The t ratio that Hall's transformation of these values takes to t, by search."""
    n, skew = len(values), float(scipy_stats.skew(values, bias=False))

    def transformed(ratio):
        terms = skew / 6, skew * ratio**2 / 3, skew**2 * ratio**3 / 27 / math.sqrt(n)
        return ratio + sum(terms) / math.sqrt(n)

    return float(optimize.brentq(lambda ratio: transformed(ratio) - t, -1e3, 1e3))


NORMAL = statistics.NormalDist()


def quantile(level: float, freedom: float) -> float:
    return scipy_stats.t.ppf((1 + level) / 2, freedom)


def frame(**columns) -> pd.DataFrame:
    return pd.DataFrame(columns)


def apart(a, b) -> pd.DataFrame:
    return frame(a=pd.Series(a, dtype=float), b=pd.Series(b, dtype=float))


FLIPPED = [0.9, 0.1, 0.3, 0.3, 0.2, 0.4]
SMALL = [0.01, 0.02, 0.01, 0.02, 0.01, 0.02]  # gains so small that unseen losses weigh more


@pytest.mark.parametrize(
    ("data", "name", "given", "items", "ends", "each"),
    [
        (frame(a=SIX), "mean", {}, SIX, [], 1),
        (frame(a=SIX), "mean", {"level": 0.8}, SIX, [], 1),
        (frame(a=[*SIX, NAN]), "mean", {"bounds": (0, 1)}, SIX, [0, 1], 1),
        (frame(a=SIX), "mean", {"bounds": (-2, 3), "each": 3}, SIX, [-2, 3], 3),
        (frame(a=[0] * 6), "mean", {"bounds": (0, 1)}, [0] * 6, [0, 1], 1),
        (frame(a=[1] * 6), "mean", {"bounds": (0, 1)}, [1] * 6, [0, 1], 1),
        (frame(a=[0.3] * 6), "mean", {"bounds": (0, 1), "each": 4, "level": 0.99}, [0.3] * 6, [0, 1], 4),
        (frame(a=SIX, b=SIX), "difference", {"bounds": (0, 1), "each": 2}, [0] * 6, [-1, 1], 2),
        (frame(a=[*SIX, NAN, 1], b=[*FLIPPED, 0, NAN]), "difference", {"bounds": (0, 1), "level": 0.9},
         [-0.8, 0.1, -0.1, 0.2, 0.5, 0.6], [-1, 1], 1),
        (frame(a=SIX, b=FLIPPED, x=[0.5] * 6, y=SIX[::-1]), "lift_minus_difference", {"bounds": (0, 1)},
         [-0.3, 0.3, -0.1, -0.1, 0.2, 0.2], [-2, 2], 1),
        (frame(a=SMALL, b=[0] * 6), "difference", {"bounds": (0, 1), "each": 2}, SMALL, [-1, 1], 2),
        (frame(a=[*SMALL[1:], 0], b=[0] * 5 + [0.9]), "difference", {"bounds": (0, 1)}, [*SMALL[1:], -0.9], [-1, 1], 1),
        (frame(a=[0.3] * 29 + [0], b=[0] * 29 + [0.9]), "difference", {"bounds": (0, 1)},
         [0.3] * 29 + [-0.9], [-1, 1], 1),
        (frame(a=[*SIX, NAN, 0.3, 0.4]), "mean", {"bounds": (0, 1), "each": 2, "clusters": [*"uvwxyz", "z", "z", "u"]},
         [0.25, 0.2, 0.2, 0.5, 0.7, 0.65], [0, 1], 2 * 8 / 6),
    ],
)  # fmt: skip
def test_every_field_of_a_mean(data, name, given, items, ends, each):
    level = given.get("level", 0.95)
    below, above = reach(items, *ends, each=each, level=level)
    e = stats.contrast(data, name, **given)
    mean = np.mean(items)
    low, high = max(mean - below, min(ends, default=-INF)), min(mean + above, max(ends, default=INF))
    assert alike(e, mean, low, high, len(items))
    if name == "mean":
        assert tuple(stats.interval(data.a, **given)) == pytest.approx(tuple(e))


@pytest.mark.parametrize(
    ("name", "top", "bottom"),
    [
        ("share_of_ceiling", lambda a, b, full, x, y: a - b, lambda a, b, full, x, y: full),
        ("loss", lambda a, b, full, x, y: full - a, lambda a, b, full, x, y: full),
        ("loss_ratio", lambda a, b, full, x, y: full - b, lambda a, b, full, x, y: full - a),
        ("difference_of_ceiling", lambda a, b, full, x, y: x - y, lambda a, b, full, x, y: full),
    ],
)
@pytest.mark.parametrize(("bounds", "each", "level"), [(None, 1, 0.95), ((0, 1), 1, 0.95), ((0, 1), 4, 0.8)])
def test_every_field_of_a_ratio(name, top, bottom, bounds, each, level):
    data = pd.DataFrame(np.random.default_rng(7).uniform(0, 0.3, (6, 5)), columns=[*"ab", "full", *"xy"])
    data.full += 0.6
    x, y = (np.array([f(*row) for row in data.to_numpy()]) for f in (top, bottom))

    def sides(r):
        """Limits of the mean of top - r bottom."""
        corners = [top(*c) - r * bottom(*c) for c in itertools.product(bounds, repeat=5)] if bounds else []
        ends = (min(corners), max(corners)) if bounds else ()
        below, above = reach(x - r * y, *ends, each=each, level=level, alike=False)
        return np.mean(x - r * y) - below, np.mean(x - r * y) + above

    value = x.mean() / y.mean()
    e = stats.contrast(data, name, bounds=bounds, each=each, level=level)
    step = 1e-4 * (e.high - e.low)  # within, the rest cannot be told from 0; beyond, it can
    assert sides(e.low - step)[0] > 0 > sides(e.low + step)[0]
    assert sides(e.high + step)[1] < 0 < sides(e.high - step)[1]
    assert (e.value, e.n) == (pytest.approx(value), 6)


def test_a_ratio_whose_bottom_may_be_zero_has_no_bound():
    data = frame(a=[1, 2, 3, -1, 0, 2, NAN], full=[-1, 1, -1, 1, -1, -1, 1])
    assert alike(stats.contrast(data, "share_of_ceiling"), -3.5, -INF, INF, 6)
    below = stats.contrast(frame(a=SIX, full=[-0.5, -0.6, -0.5, -0.6, -0.5, -0.6]), "share_of_ceiling")
    assert below.value == pytest.approx(-0.45 / 0.55)
    assert below.low < below.value < below.high < 0


def test_scores_whose_bounds_leave_out_zero_are_read_from_the_nearer_end():
    e, shifted = stats.interval(SIX, bounds=(0, 1)), stats.interval([1 + x for x in SIX], bounds=(1, 2))
    assert shifted[:3] == pytest.approx([1 + end for end in e[:3]])
    turned = stats.interval([-1 - x for x in SIX], bounds=(-2, -1))
    assert turned[:3] == pytest.approx([-1 - end for end in (e.value, e.high, e.low)])


@pytest.mark.parametrize("level", [0.8, 0.95])
def test_a_ratio_of_losses_is_that_of_the_gains_of_the_reflected_scores(level):
    """Then both means are negative."""
    scores = pd.DataFrame(np.random.default_rng(3).uniform(0, 0.4, (9, 3)), columns=["a", "b", "full"])
    scores.full += 0.6
    losses = stats.contrast(scores, "loss_ratio", bounds=(0, 1), level=level)
    assert alike(stats.contrast(1 - scores, "loss_ratio", bounds=(0, 1), level=level), *tuple(losses))
    wide = stats.contrast(3 - 2 * scores, "loss_ratio", bounds=(1, 3), level=level)
    assert alike(wide, *tuple(losses))


def test_whether_the_bottom_may_be_zero_is_asked_with_its_bounds():
    """A single hit of eight: by Student's t the share may be 0, as a share of zeros and ones it may not."""
    scores = frame(a=[0.6, 0.1, 0, 0, 0, 0, 0, 0], full=[1.0, 0, 0, 0, 0, 0, 0, 0])
    free, bounded = (stats.contrast(scores, "share_of_ceiling", bounds=bounds) for bounds in (None, (0, 1)))
    assert (free.low, free.high) == (-INF, INF)
    assert math.isfinite(bounded.low)
    assert math.isfinite(bounded.high)


@pytest.mark.parametrize("bounds", [(0, 1), (-1, 1)])
@pytest.mark.parametrize(("each", "level"), [(1, 0.95), (4, 0.8)])
def test_every_field_of_two_samples(bounds, each, level):
    sides = (SIX, [*FLIPPED, 0.6, 0.8])
    value = np.mean(sides[0]) - np.mean(sides[1])
    (less_a, more_a), (less_b, more_b) = (reach(side, *bounds, each=each, level=level) for side in sides)
    below, above = math.hypot(less_a, more_b), math.hypot(more_a, less_b)
    e = stats.contrast(apart([*SIX, NAN], [NAN, *sides[1]]), "unpaired", bounds=bounds, each=each, level=level)
    assert alike(e, value, value - below, value + above, 6)
    if (each, level) == (1, 0.95):
        assert stats.contrast(apart(SIX, sides[1]), "unpaired", bounds=bounds)[:3] == pytest.approx(e[:3])


def test_every_field_of_a_resampled_statistic():
    """A cluster is drawn whole, with the rows that it has."""
    values, clusters = [0.1, 0.9, 0.4, 0.3, 0.8, 0.2, 0.6, 0.7], [*"uvwxyzuu"]
    values_of = {name: [x for x, c in zip(values, clusters, strict=True) if c == name] for name in "uvwxyz"}
    picks = np.random.default_rng(42).integers(0, 6, (1000, 6))
    drawn = [np.mean([x for i in pick for x in values_of["uvwxyz"[i]]]) for pick in picks]
    error = np.std(drawn, ddof=1) * math.sqrt(6 / 5)
    half, bias = quantile(0.9, 5) * error, np.mean(drawn) - 0.5
    e = stats.contrast(frame(a=values), np.mean, clusters, level=0.9)
    assert alike(e, 0.5, 0.5 - half - max(bias, 0), 0.5 + half + max(-bias, 0), 6)
    assert stats.contrast(frame(a=SIX), np.mean) == stats.contrast(frame(a=SIX), np.mean, [*"uvwxyz"])


def test_an_interval_ends_where_its_statistic_can_go_no_farther():
    free = stats.spread_of(0.9, np.array([0.5, 1.0, 0.8, 1.0]), 6)
    assert free.low < 0.7
    assert free.high > 1
    e = stats.spread_of(0.9, np.array([0.5, 1.0, 0.8, 1.0]), 6, limits=(0.7, 1))
    assert (e.low, e.high) == (0.7, 1)
    assert stats.spread_of(5, np.array([2.0, 3.0, 4.0]), 6, limits=(1, INF)).n == 6
    assert stats.spread_of(1.5, np.array([1.4, 1.6]), 6, limits=(0, 1)).high == 1.5  # the estimate lies inside
    x = frame(a=SIX)
    assert stats.contrast(x, np.mean, limits=(0.3, 0.5))[:3] == (pytest.approx(np.mean(SIX)), 0.3, 0.5)


def test_a_statistic_with_a_least_value_and_no_largest_is_read_by_its_logarithm():
    drawn = np.array([2.0, 3.0, 5.0, 9.0, 5.0, 3.0])
    free = stats.spread_of(math.log(4), np.log(drawn - 1), 6)
    e = stats.spread_of(5, drawn, 6, limits=(1, INF))
    assert e[:3] == pytest.approx((5, 1 + math.exp(free.low), 1 + math.exp(free.high)))
    free = stats.spread_of(math.log(4), np.log(drawn - 1), 6, 0.8)
    narrow = stats.spread_of(5, drawn, 6, 0.8, limits=(1, INF))
    assert narrow[:3] == pytest.approx((5, 1 + math.exp(free.low), 1 + math.exp(free.high)))
    assert 1 < e.low < 5 < e.high < INF
    assert stats.spread_of(5, 10.0 ** np.arange(-200, 200), 6, limits=(0, INF)).high < INF
    at_its_end = stats.spread_of(5, np.array([1.0, *drawn]), 6, limits=(1, INF))  # which has no logarithm
    assert at_its_end.low == max(1.0, stats.spread_of(5, np.array([1.0, *drawn]), 6).low)


def test_a_statistic_that_moves_in_steps_may_be_a_step_off():
    """Nine of ten resamples agree, one of ten lies a step lower: so may the sample itself."""
    drawn = np.array([0.5] * 18 + [0.375] * 2)
    e = stats.spread_of(0.5, drawn, 100)
    assert quantile(0.95, 99) * drawn.std(ddof=1) < 0.124
    assert e.high >= 0.625
    assert e.low <= 0.375


@pytest.mark.parametrize(("level", "wanted"), [(0.8, 6), (0.95, 6), (0.96875, 6), (0.97, 7), (0.9875, 8), (0.99375, 9)])
def test_levels_ask_for_as_many_items_as_a_sign_test_needs(level, wanted):
    assert stats.fewest(level) == wanted
    many = [1.0, 2.0, 4.0, 7.0, 7.5, 9.0, 9.5, 9.9, 11.0]
    for n, there in ((wanted - 1, False), (wanted, True)):
        x = frame(a=many[:n], full=many[:n][::-1])
        sign = scipy_stats.binomtest(0, n).pvalue
        assert there == (sign <= 1 - level + 1e-12 and n >= 6)
        estimates = (
            stats.interval(x.a, level=level),
            stats.contrast(x, "share_of_ceiling", level=level),
            stats.spread_of(4, np.array(many), n, level),
        )
        assert [not math.isnan(e.low) for e in estimates] == [there] * 3
        if n >= 6:
            assert stats.interval(x.a, bounds=(0, 20), level=level).low > 0  # of scores the farthest are known


def test_half_of_the_resamples_suffice():
    error = math.sqrt(1 / 3) * 2 * math.sqrt(6 / 5)
    estimate = stats.spread_of(2, np.array([1.0, NAN, 3.0, INF, 1.0, -INF, 3.0, NAN]), 6)
    assert alike(estimate, 2, 2 - quantile(0.95, 5) * error, 2 + quantile(0.95, 5) * error, 6)
    for value, drawn, n in (
        (0.5, [1.0, 2.0, NAN, NAN, NAN], 6),
        (0.5, [1.0, 2.0], 5),
        (NAN, [1.0, 2.0], 6),
        (INF, [1.0, 2.0], 6),
    ):
        assert alike(stats.spread_of(value, np.array(drawn), n), value, NAN, NAN, n)


@pytest.mark.parametrize("value", [1.5, 2.5])
def test_the_bias_that_resamples_show_widens_the_interval_on_its_own_side(value):
    drawn = np.array([1.0, 2.0, 3.0] * 4)
    half = quantile(0.95, 5) * drawn.std(ddof=1) * math.sqrt(6 / 5)
    e = stats.spread_of(value, drawn, 6)
    assert e.low == pytest.approx(min(value, 2 * value - 2) - half)
    assert e.high == pytest.approx(max(value, 2 * value - 2) + half)


def test_the_largest_of_equal_means_is_covered_more_often():
    """It stands above the truth in nearly every sample, and its resamples stand higher still."""
    rng, covered = np.random.default_rng(11), 0
    for _ in range(100):
        e = stats.contrast(pd.DataFrame(rng.normal(size=(16, 5))), lambda v: float(v.mean(0).max()))
        assert e.low <= e.value <= e.high
        covered += e.low <= 0 <= e.high
    assert covered >= 82


FIVE = [*SIX[:5], NAN]


@pytest.mark.parametrize(
    ("estimate", "wanted"),
    [
        (lambda: stats.interval([]), (NAN, NAN, NAN, 0)),
        (lambda: stats.interval([NAN, NAN], [1, 1]), (NAN, NAN, NAN, 0)),
        (lambda: stats.interval(FIVE), (0.34, NAN, NAN, 5)),
        (lambda: stats.interval([0.5] * 7 + [NAN]), (0.5, NAN, NAN, 7)),
        (lambda: stats.interval([5e-13, -5e-13] * 3), (0, NAN, NAN, 6)),  # rounding
        (lambda: stats.interval([1e6] * 5 + [1e6 + 5e-7]), (1e6, NAN, NAN, 6)),
        (lambda: stats.contrast(frame(a=[*SIX, NAN], full=0), "share_of_ceiling"),
         (NAN, NAN, NAN, 6)),
        (lambda: stats.contrast(frame(a=FIVE, full=0.5), "share_of_ceiling", bounds=(0, 1)),
         (0.68, NAN, NAN, 5)),
        (lambda: stats.contrast(frame(a=[0.25] * 6 + [NAN], full=0.5), "share_of_ceiling"),
         (0.5, NAN, NAN, 6)),
        (lambda: stats.contrast(frame(a=[5e-13, -5e-13] * 3, full=1), "share_of_ceiling"), (0, NAN, NAN, 6)),
        (lambda: stats.contrast(apart([], SIX), "unpaired", bounds=(0, 1)), (NAN, NAN, NAN, 0)),
        (lambda: stats.contrast(apart([*SIX, 0.45], FIVE), "unpaired", bounds=(0, 1)), (0.11, NAN, NAN, 5)),
        (lambda: stats.contrast(frame(a=[]), np.mean), (NAN, NAN, NAN, 0)),
        (lambda: stats.contrast(frame(a=SIX[:5]), np.mean), (0.34, NAN, NAN, 5)),
        (lambda: stats.contrast(frame(a=SIX), lambda v: INF), (INF, NAN, NAN, 6)),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("error")
def test_every_field_where_there_is_no_interval(estimate, wanted):
    assert alike(estimate(), *wanted)


# ------------------------------------------------------------------ tables, texts, tests: what is seen


def test_an_estimate_prints_with_its_interval():
    assert str(stats.Estimate(0.28149, 0.2431, 0.3204, 162)) == "0.281 [0.243, 0.320]"


def test_a_table_has_a_row_per_group_in_the_order_of_its_rows():
    rows = frame(policy=["y"] * 6 + ["x"] * 6 + [None] * 6, task="t", item=[1, 2] * 9, f1=[*SIX, *FLIPPED, *SIX])
    table = stats.means(rows, ["task", "policy"], "f1")
    assert list(table) == ["task", "policy", "value", "low", "high", "n"]
    assert table.policy[:2].tolist() == ["y", "x"]
    assert pd.isna(table.policy[2])  # a group without a name is one as well
    for row, values in zip(table.itertuples(), (SIX, FLIPPED, SIX), strict=True):
        assert row[3:] == pytest.approx((*stats.interval(values, bounds=(0, 1))[:3], 6))
    free = stats.means(rows, "policy", "f1", bounds=None).iloc[1]
    assert (free.low, free.high) == pytest.approx(stats.interval(FLIPPED)[1:3])
    share = frame(policy="x", f1=[0, 0, 0, 0, 0, 0.001])
    [cut] = stats.means(share, "policy", "f1", bounds=None, limits=(0, 1)).itertuples()
    assert stats.interval(share.f1).low < 0 == cut.low
    assert cut.high == stats.interval(share.f1).high
    assert stats.means(rows, "policy", "f1", "item").n.tolist() == [2, 2, 2]
    named = pd.Categorical(rows.policy, ["x", "y", "never run"])
    assert len(stats.means(rows.assign(policy=named), "policy", "f1")) == 3


@pytest.mark.parametrize("kind", ["difference", "share_of_ceiling", "loss"])
@pytest.mark.parametrize(("bounds", "clustered"), [((0, 1), False), (None, True)])
def test_contrasts_are_those_of_pairs(kind, bounds, clustered):
    second = "b" if kind == "difference" else "full"
    full = [0.8, 0.9, 1.0, 0.8, 0.7, 0.9, 0.8]
    rows = frame(item=range(7), seed=1, policy="x", f1=[*SIX, 0.4], b=9.0, full=9.0, group=[*"uvwxyzz"])
    against = frame(item=[*range(7), *range(7)], seed=[1] * 7 + [2] * 7, f1=[*full, *([0.0] * 7)])
    given = {"bounds": bounds, "clusters": "group" if clustered else None} if clustered else {}
    table = stats.contrasts(rows, against, "policy", "f1", on=["item", "seed"], kind=kind, **given)
    expected = stats.contrast(
        frame(a=rows.f1, **{second: full}), kind, rows.group if clustered else None, bounds=bounds
    )
    assert list(table) == ["policy", "value", "low", "high", "n"]
    assert table.iloc[0].tolist() == ["x", *map(pytest.approx, expected[:3]), 6 if clustered else 7]
    if kind == "difference":
        assert stats.contrasts(rows, against[:7], "policy", "f1", **given).iloc[0].tolist() == table.iloc[0].tolist()


def test_contrasts_refuse_a_row_with_two_partners():
    rows = frame(item=[1, 1, 2], seed=[1, 1, 1], policy="x", f1=[0.5, 0.6, 0.5])
    for on in ("item", ("item", "seed")):
        with pytest.raises(pd.errors.MergeError):
            stats.contrasts(rows, rows, "policy", "f1", on=on)


def test_a_difference_of_a_billionth_is_none_and_one_above_counts():
    zeros = [0.0] * 6
    assert stats.wilcoxon([-9e-10] * 6, zeros) == 1.0
    assert stats.wilcoxon([-1e-9] * 6, zeros) == 2 / 64


def test_true_and_false_are_one_and_zero():
    so, not_so = [True, True, False, True, False, True], [False, True, False, False, True, False]
    true, as_numbers = frame(a=so, b=not_so), frame(a=so, b=not_so).astype(float)
    assert stats.contrast(true, "difference", bounds=(0, 1)) == stats.contrast(as_numbers, "difference", bounds=(0, 1))
    assert stats.contrast(as_numbers, "difference", bounds=(0, 1)).low < 1 / 3  # six items suffice
    assert stats.interval(so, bounds=(0, 1)) == stats.interval(list(map(float, so)), bounds=(0, 1))
    gain = stats.contrast(true, lambda v: float((v[:, 0] - v[:, 1]).mean()))
    assert gain == stats.contrast(as_numbers, lambda v: float((v[:, 0] - v[:, 1]).mean()))
    assert stats.wilcoxon(so, not_so) == 2 * 5 / 16  # three gains, one loss
