"""The leakage chapter's statistics on made-up rows, against numbers worked out by hand or by scipy."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from scipy.stats import spearmanr

from kvrepro.chapters.leakage import cells, estimates, members, scores
from kvrepro.chapters.leakage.estimates import Means
from kvrepro.experiment import claims, stats
from kvrepro.experiment.judge import NotTestable


def frame(value, systems=8, policies=cells.FIVE, variants=("default",), ratios=(0.3, 0.5, 0.9), orders=cells.ORDERS):
    """Rows whose `x` is value(order, policy, variant, ratio), the same for all systems; the uncompressed cache once."""
    cells = [("full", "default", 0.0)] + [(p, v, r) for p in policies for v in variants for r in ratios]
    return pd.DataFrame(
        [
            {
                "system": s,
                "order": o,
                "policy": p,
                "variant": v,
                "reading": "as_described",
                "ratio": r,
                "error": None,
                "note": None,
                "x": value(o, p, v, r),
            }
            for s in range(systems)
            for o in orders
            for p, v, r in cells
        ]
    )


def study_of(follow, leak, **given):
    """A study of two made-up measures."""
    told_of = frame(leak, **given).x
    rows = frame(follow, **given).rename(columns={"x": "followed"})
    rows = rows.assign(following=rows.followed, told=told_of, tells_defense=told_of / 2)
    rows = scores.in_reading(rows.assign(tells_rules=told_of, tells_directive=told_of), "as_described")
    return members.Study("as_described", rows, dials={"main": rows}, floor=0.0)


def evaluate(s):
    """Verdicts of all claims."""
    return members.judged(claims.load_claims("leakage"), [s], "made up")


def interval(series, systems):
    return stats.spread_of(float(series[0]), series[1:], systems).triple


def test_means_and_intervals_resample_whole_systems():
    rows = pd.concat([frame(lambda *_, s=s: float(s), systems=1).assign(system=s) for s in range(10)])
    means = Means(rows, "x")
    assert means.systems == 10
    value, low, high = interval(means.at(policy="tova", ratio=0.5), 10)
    expected = stats.interval(range(10))
    assert (value, low, high) == pytest.approx(expected.triple, rel=0.1)
    series = means.at(policy="tova", ratio=0.5)
    np.testing.assert_array_equal(series, means.at(policy="h2o", ratio=0.9))  # the same systems are drawn everywhere
    assert series[1:].std() == pytest.approx(np.arange(10).std() / np.sqrt(10), rel=0.05)


def test_missing_values_do_not_count_and_few_systems_have_no_interval():
    rows = frame(lambda *_: 1.0, systems=4)
    rows.loc[(rows.system == 3) & (rows.ratio == 0.5), "x"] = np.nan
    means = Means(rows, "x")
    assert means.at(policy="tova", ratio=0.5)[0] == 1.0
    assert np.isnan(interval(means.at(policy="tova", ratio=0.5), 4)[1:]).all()
    with pytest.raises(NotTestable, match="ratio 0.7"):
        means.at(policy="tova", ratio=0.7)


def test_a_cell_of_fewer_than_six_prompts_has_no_interval_whatever_the_others_have():
    rows = frame(lambda o, p, v, r: r, systems=8)
    rows = rows[(rows.ratio != 0.9) | (rows.system < 5)]
    means = Means(rows, "x")
    assert np.isfinite(interval(means.at(policy="tova", ratio=0.5), 8)).all()
    value, low, high = interval(means.at(policy="tova", ratio=0.9), 8)
    assert value == pytest.approx(0.9)
    assert np.isnan([low, high]).all()
    curve = [means.at(ratio=ratio, policy="tova") for ratio in (0.5, 0.9)]
    assert np.isnan(interval(np.max(curve, 0), 8)[1])  # nor has what rests on it
    assert means.ratios(policy="tova") == [0.3, 0.5, 0.9]
    assert means.ratios(True, policy="tova") == [0.3, 0.5]


def test_rank_correlation_is_spearmans_and_undefined_for_a_constant():
    rng = np.random.default_rng(1)
    x, y = rng.integers(0, 4, (20, 8)), rng.integers(0, 4, (20, 8))
    wanted = [spearmanr(a, b).statistic for a, b in zip(x, y, strict=True)]
    np.testing.assert_allclose(estimates.rank_correlation(x.astype(float), y.astype(float)), wanted, atol=1e-12)
    assert np.isnan(estimates.rank_correlation(np.arange(8.0), np.ones(8)))


def test_optimal_points_by_both_definitions():
    """(follow, leak): the second ties with the first in following and leaks more; the third is worse in both."""
    follow, leak = np.array([1.0, 1.0, 0.5, 0.4]), np.array([0.2, 0.6, 0.7, 0.0])
    assert estimates.optimal(follow, leak, both=True).tolist() == [True, True, False, True]
    assert estimates.optimal(follow, leak).tolist() == [True, False, False, True]


def test_optimality_counts_cells():
    """At 0.3 fair leaks nothing and follows as much; at 0.5 it follows less and leaks as much; at 0 and 0.9 all tie."""
    variants = ("default", *[f"debias {x:g}" for x in cells.LAMBDAS], "fair")

    def follow(order, policy, variant, ratio):
        return 0.5 if (ratio, variant) == (0.5, "fair") else 1.0

    def leak(order, policy, variant, ratio):
        return 0.0 if (ratio, variant) == (0.3, "fair") else 1.0

    s = study_of(follow, leak, variants=variants)
    for start in (True, False):  # at ratio 0, which the paper counts, all settings are one cache
        share = estimates.optimality(s.answers, ["streaming_llm"], ["normal"], start=start)
        assert share[1.0][0] == pytest.approx((2 + start) / (3 + start))
        assert share[0.0][0] == pytest.approx((2 + start) / (3 + start))
    share = estimates.optimality(s.answers, ["streaming_llm"], ["normal"], both=True)
    assert share[0.0][0] == share[1.0][0] == 1.0


def rising(order, policy, variant, ratio):
    """Leakage as the paper draws it: none, then all, then less; less where the defense comes last, none when fair."""
    if variant == "fair" or ratio <= 0.1:
        return 0.0
    return (0.6 if ratio == 0.9 else 1.0) * (0.5 if order == "flipped" else 1.0)


def obeying(order, policy, variant, ratio):
    return 1.0 - ratio * (0.9 if order == "flipped" else 0.2 if policy != "k_norm" else 0.9)


def kept_rows(rate, layers=1, variants=("default",), systems=8, ratios=(0.3, 0.5, 0.9), policies=cells.FIVE):
    """Keep rates rate(order, policy, variant, part, layer), the same at all ratios."""
    parts = [
        frame(lambda o, p, v, r, part=part, layer=layer: rate(o, p, v, part, layer), systems=systems, ratios=ratios,
              variants=variants, policies=policies).assign(part=part, layer=layer)
        for part in cells.PARTS for layer in range(layers)
    ]  # fmt: skip
    return pd.concat(parts, ignore_index=True).rename(columns={"x": "kept"})


def with_kept(s, kept):
    """The study with these keep rates in the place of those of its notes."""
    copy = replace(s)
    copy.__dict__["kept"] = kept
    return copy


def test_ratios_and_policies_that_are_compared_are_named_beforehand():
    """By hand: leakage 0, .2, .6, .3 at 0.1, 0.3, 0.7, 0.9; K-norm follows .5 less than the four others."""
    leak = {0.0: 0.0, 0.1: 0.0, 0.3: 0.2, 0.7: 0.6, 0.9: 0.3}
    s = study_of(lambda o, p, v, r: 1.0 - (0.5 if r and p == "k_norm" else 0.0), lambda o, p, v, r: leak[r],
                 ratios=(0.1, 0.3, 0.7, 0.9))  # fmt: skip
    values = {name: members.CONTRASTS[name](s, policy="tova").estimate().value
             for name in ("leak_rise", "defense_rise")}  # fmt: skip
    assert values == pytest.approx({"leak_rise": 1.1 / 3, "defense_rise": 0.55 / 3})

    def parts(name, **given):
        return {
            part: sample.estimate().value for part, sample in members.CONTRASTS[name](s, policy="tova", **given).items()
        }

    assert parts("leak_fall") == pytest.approx({"70% dropped": 0.3})
    assert parts("leak_fall", each=True) == pytest.approx(
        {"10% dropped": -0.3, "30% dropped": -0.1, "70% dropped": 0.3}
    )
    assert max(parts("leak_rise", each=True).values()) == pytest.approx(0.6)
    assert members.CONTRASTS["policy_gap"](s).estimate().value == pytest.approx(0.5)


def test_curves_of_the_papers_shape_reproduce_its_claims():
    ratios = (0.1, 0.3, 0.5, 0.7, 0.9)
    many = study_of(obeying, rising, ratios=ratios, variants=("default", "fair"), systems=200)
    verdicts = evaluate(many)
    assert verdicts.columns.tolist() == claims.COLUMNS
    verdict_of = verdicts.set_index("claim").verdict
    assert set(verdict_of.index) == {claim["id"] for claim in claims.load_claims("leakage")["claims"]}
    for claim in ("L2", "L3a", "L3b", "L3c", "L3d", "L3e", "L3f", "L4b", "L7b"):
        assert verdict_of[claim] == "reproduced", claim
    assert verdict_of["L4"] == "partly"  # K-norm loses as much in either order
    for claim in ("L1", "L2b", "L5", "L6", "L7", "L8", "L9", "L9d", "L10", "L11"):
        assert verdict_of[claim] == "not testable here", claim


def test_flat_curves_refute_a_rise_and_leave_nothing_to_compare():
    flat = study_of(lambda *_: 1.0, lambda *_: 0.0, systems=60, ratios=(0.3, 0.5, 0.7, 0.9))
    verdicts = evaluate(flat).set_index("claim")
    for claim in ("L2", "L3b", "L3f", "L4", "L4d"):
        assert verdicts.verdict[claim] == "not reproduced", claim
    for claim in ("L3c", "L4b"):
        assert verdicts.verdict[claim] == "not testable here", claim
        assert "nothing is told on either side" in verdicts.note[claim]
    assert verdicts.verdict["L3a"] == "not testable here"
    assert "lowest ratio run, 0.3, is above 0.2" in verdicts.note["L3a"]


def test_a_model_that_tells_anyway_decides_nothing():
    verdicts = evaluate(study_of(lambda *_: 1.0, lambda *_: 0.9)).set_index("claim")
    assert verdicts.verdict["L3b"] == "not testable here"
    assert "tells its instructions" in verdicts.note["L3b"]


def test_a_model_that_says_nothing_to_the_point_keeps_no_secret():
    variants = ("default", "whitelist", *[f"debias {x:g}" for x in cells.LAMBDAS], "fair")
    dumb = study_of(lambda *_: 0.0, lambda *_: 0.0, ratios=(0.1, 0.3, 0.5, 0.9), variants=variants)
    verdicts = evaluate(dumb).set_index("claim")
    assert (verdicts.verdict.drop("L8d") == "not testable here").all()
    for claim in ("L3a", "L3b", "L7", "L7b", "L8", "L8c"):
        assert "follows too few instructions" in verdicts.note[claim], claim


def test_a_member_with_nothing_to_lose_is_left_out_and_named():
    """K-norm follows nothing by default: that its fair variant costs nothing is no merit."""

    def follow(order, policy, variant, ratio):
        return float(not ratio or policy != "k_norm")

    s = study_of(follow, rising, variants=("default", "whitelist", "fair"), systems=60)
    row = evaluate(s).set_index("claim").loc["L7c"]
    assert row.verdict == "reproduced"
    assert row.members.startswith("8 holds, 2 not testable (k_norm, whitelist: nothing is followed")


def test_a_dial_whose_settings_are_all_optimal_decides_nothing():
    variants = ("default", *[f"debias {x:g}" for x in cells.LAMBDAS], "fair")
    tied = study_of(lambda *_: 1.0, lambda o, p, v, r: float(r > 0), variants=variants)
    verdicts = evaluate(tied).set_index("claim")
    for claim in ("L8", "L8c"):
        assert verdicts.verdict[claim] == "not testable here"
        assert "every setting is optimal in every cell" in verdicts.note[claim]


def test_every_setting_of_the_dial_has_to_gain_and_the_printed_tables_are_read_as_printed():
    """Fair leaks nothing at 0.3 and follows as much: by the usual definition it alone gains on the default."""
    variants = ("default", *[f"debias {x:g}" for x in cells.LAMBDAS], "fair")
    s = study_of(lambda *_: 1.0, lambda o, p, v, r: float(r > 0 and (r, v) != (0.3, "fair")), variants=variants)
    gains = members.CONTRASTS["optimal_gain"](s, "main")
    assert list(gains) == [f"λ = {x:g}" for x in (*cells.LAMBDAS, 1)]
    assert [gain.value for gain in gains.values()] == pytest.approx([0, 0, 0, 0, 1 / 4])
    with pytest.raises(NotTestable, match="every setting is optimal"):
        members.CONTRASTS["optimal_gain"](s, "main", both=True)
    main, examples = (members.CONTRASTS["optimal_printed"](s, name).cases for name in ("main", "examples"))
    assert main.tolist() == pytest.approx([0.10, 0.25, 0.15, 0.30, 0.30])
    assert examples.tolist() == pytest.approx([0.15, 0.0, 0.15, 0.15, 0.30])
    row = evaluate(s).set_index("claim").loc["L8d"]
    assert (row.verdict, row.reading) == ("not reproduced", "any")
    assert row.decided_by == "examples: 1 of 5 cases, worst at λ = 0.4"


def test_keep_rates_under_cures_and_in_the_middle_layers():
    def rate(order, policy, variant, part, layer):
        fair = {"default": 0.2, "whitelist": 0.35, "fair": 0.4}[variant] + (0.3 if 2 <= layer <= 3 else 0.0)
        return 0.5 if part == "directive" else fair

    variants = ("default", "whitelist", "fair")
    s = with_kept(study_of(obeying, rising, variants=variants), kept_rows(rate, 6, variants))
    assert members.CONTRASTS["defense_kept"](s, "whitelist", policy="tova").estimate().value == pytest.approx(0.15)
    assert members.CONTRASTS["bias_size"](s, variant="fair", policy="tova").estimate().value == pytest.approx(0.0)
    assert members.CONTRASTS["middle_layers"](s, "tova").estimate().value == pytest.approx(0.3)
    with pytest.raises(NotTestable, match="2 layers"):
        members.CONTRASTS["middle_layers"](with_kept(s, kept_rows(rate, 2)), "tova")


def test_what_an_unbiased_policy_loses_is_judged_and_what_a_biased_one_loses_is_not():
    def rate(order, policy, variant, part, layer):
        return 0.5 + (0.4 if policy == "snapkv" and part == "directive" else 0.0)

    s = with_kept(study_of(obeying, rising), kept_rows(rate))
    lost = members.CONTRASTS["follow_lost"](s, policy="k_norm").estimate()
    assert lost.value == pytest.approx(0.9 * 0.4)  # at 0.3 and 0.5
    with pytest.raises(NotTestable, match="keep rates differ by 0.40"):
        members.CONTRASTS["follow_lost"](s, policy="snapkv")


def test_a_cost_in_time_and_in_tokens_per_second():
    times = [{"item": i, "variant": v, "repeat": r, "decode": t, "compress": 2 * t}
             for i in range(6) for r in range(2) for v, t in (("default", 1.0), ("fair", 1.25))]  # fmt: skip
    s = replace(study_of(obeying, rising), timing=pd.DataFrame(times))
    costs = {name: members.CONTRASTS[name](s, "fair").estimate().value
             for name in ("decode_cost", "decode_speed", "compress_cost")}  # fmt: skip
    assert costs == pytest.approx({"decode_cost": 0.25, "decode_speed": -0.2, "compress_cost": 0.25})


def test_what_was_changed_says_so_with_the_verdict_of_its_first_form():
    verdicts = evaluate(study_of(obeying, rising, ratios=(0.1, 0.3, 0.5, 0.7, 0.9), systems=60))
    statements = verdicts.set_index("claim").statement
    for claim in claims.load_claims("leakage")["claims"]:
        assert ("Changed when results were known" in statements[claim["id"]]) == ("changed" in claim)
        assert ("(Not in the paper's words.)" in statements[claim["id"]]) == ("ours" in claim)
        assert "first" not in claim or "as first written" in statements[claim["id"]]
    assert statements["L3d"].endswith("as first written (at least 80%): *reproduced*.)")


def test_n_is_that_of_the_rows_behind_a_contrast():
    s = study_of(obeying, rising)
    keep = frame(lambda o, p, v, r: 1 - r, systems=3).rename(columns={"x": "kept"})
    keep = pd.concat([keep.assign(part=part, layer=0) for part in cells.PARTS])
    verdicts = evaluate(with_kept(s, keep)).set_index("claim")
    for claim in ("L4c", "L5", "L5b", "L9", "L9b", "L9c"):
        assert verdicts.verdict[claim] == "not testable here", claim
        assert "3 items: an interval needs at least 6" in verdicts.note[claim]


def test_rank_correlations_are_with_the_uncompressed_order():
    kinds = {"a": (1.0, 1.0, 0.0), "b": (0.5, 0.5, 0.5), "c": (0.0, 0.0, 1.0)}
    rows = [
        {"system": i, "order": "alone", "policy": "tova", "variant": "default", "ratio": r, "rules": "multi",
         "kind": kind, "passed": values[j]}
        for i in range(6) for kind, values in kinds.items() for j, r in enumerate([0.0, 0.3, 0.5])
    ]  # fmt: skip
    rows.append(rows[0] | {"kind": "d"})  # a class of one prompt does not count
    accuracy = Means(pd.DataFrame(rows), "passed", "rules", "kind")
    np.testing.assert_allclose(estimates.rank_curves(accuracy, "multi", [0.3, 0.5], policy="tova")[0], [1.0, -1.0])


def test_five_systems_are_too_few():
    verdicts = evaluate(study_of(obeying, rising, systems=5)).set_index("claim")
    assert (verdicts.verdict.drop("L8d") == "not testable here").all()
    assert "at least 6" in verdicts.note["L3b"]


def test_a_low_ratio_alone_says_nothing_about_high_ones():
    verdicts = evaluate(study_of(obeying, rising, ratios=(0.1,))).set_index("claim")
    assert verdicts.verdict["L2"] == verdicts.verdict["L4"] == "not testable here"
    assert verdicts.verdict["L3a"] == "inconclusive"


def test_models_differ_where_one_loses_more_of_its_own_following():
    """Under K-norm alone the second model loses 0.4 more, whatever each follows uncompressed."""

    def follow(start, more):
        return lambda o, p, v, r: start - (more if r and p == "k_norm" else 0.1 * bool(r))

    first, second = (study_of(follow(*given), lambda *_: 0.0) for given in ((0.9, 0.1), (0.7, 0.5)))
    claim = {"contrast": "model_spread", "some": True}
    [member] = members.members(claim, {}, replace(first, other=second))
    assert set(member.what) == set(cells.FIVE)
    values = {name: sample.estimate().value for name, sample in member.what.items()}
    assert values == pytest.approx({name: -0.4 if name == "k_norm" else 0.0 for name in cells.FIVE})
    [reason] = members.members(claim, {}, first)
    assert str(reason).startswith("one run has one model: name a second checkpoint")


def test_long_examples_leak_where_their_recall_says_so():
    s = study_of(lambda *_: 1.0, lambda o, p, v, r: 0.6 - 0.5 * bool(r))
    for words in (0, 2000):
        with pytest.raises(NotTestable, match="words=3000"):
            members.CONTRASTS["leak_long"](replace(s, examples=s.answers.assign(words=words)))
    estimate = members.CONTRASTS["leak_long"](replace(s, examples=s.answers.assign(words=3000))).estimate()
    assert estimate.value == pytest.approx(0.6)
