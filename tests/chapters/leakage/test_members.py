"""The leakage chapter's statistics on made-up rows, against numbers worked out by hand or by scipy."""

import itertools

import numpy as np
import pandas as pd
import pytest
from scipy.stats import spearmanr

from kvrepro.chapters.leakage import cells, members, scores
from kvrepro.experiment import claims, stats
from kvrepro.experiment import members as language
from kvrepro.experiment.judge import NotTestable

BOOK = claims.load_claims("leakage")
DIAL = tuple(cells.DIAL.values())


def frame(value, systems=8, policies=cells.FIVE, variants=("default",), ratios=(0.3, 0.5, 0.9), orders=cells.ORDERS):
    """Rows whose `x` is value(order, policy, variant, ratio), the same for all systems; the uncompressed cache once."""
    run = [("full", "default", 0.0), *itertools.product(policies, variants, ratios)]
    rows = [(s, o, *cell, value(o, *cell)) for s, o, cell in itertools.product(range(systems), orders, run)]
    rows = pd.DataFrame(rows, columns=["system", "order", "policy", "variant", "ratio", "x"])
    return rows.assign(reading="as_described", error=None)


def tidied(follow, leak, kept=None, **given):
    """The tables of a run with two made-up measures, and keep rates kept(order, policy, variant, part, layer)."""
    rows = frame(follow, **given).rename(columns={"x": "followed"})
    told = frame(leak, **given).x
    rows = rows.assign(tells_rules=told, tells_directive=told, tells_defense=told / 2, following=rows.followed)
    rows = scores.in_reading(rows, "as_described")
    tables = {"following": members.of_answers(rows, floor=0.0), "dial": rows.assign(study="main")}
    tables = {name: table.assign(reading="as_described") for name, table in tables.items()}
    parts = [
        frame(lambda *cell, part=part, layer=layer: kept(*cell[:3], part, layer), **given).assign(
            part=part, layer=layer
        )
        for part, layer in itertools.product(cells.PARTS, range(6 if kept else 0))
    ]
    rates = pd.concat(parts or [frame(lambda *_: 0.0).head(0).assign(part="", layer=0)])
    tables["kept"] = members.of_layers(rates.query("ratio > 0").rename(columns={"x": "kept"})).assign(
        reading="as_described"
    )
    return tables | {"leakage": tables["following"], "printed": members.printed()}


def evaluate(tables):
    """Verdicts of all claims."""
    return language.verdicts(BOOK, tables, members, model="made up", profile="quick").set_index("claim")


def evidence(tables, name, policy=None, first=False):
    """What a claim is tested on, under one policy, perhaps in its first form."""
    claim = next(claim for claim in BOOK["claims"] if claim["id"] == name)
    claim = {**claim, **(claim["first"] if first else {})}
    claim = {key: value for key, value in claim.items() if value is not None}
    if policy:
        claim["over"] = {**claim["over"], "policy": [policy]}
    tables = {name: language.Table(table) for name, table in tables.items()}
    spoken = language.Language(BOOK, tables, members)
    [member] = spoken.members(claim, spoken.readings(claim)[0])
    if isinstance(member, NotTestable):
        raise member
    return member.what


def value(*given):
    return evidence(*given).estimate().value


def values(*given, **how):
    return {name: sample.estimate().value for name, sample in evidence(*given, **how).items()}


def test_resamples_are_of_whole_systems_and_few_have_no_interval():
    one = np.arange(10.0)
    series = members.drawn(np.stack([one, one, np.where(one < 5, one, np.nan)], 1))
    assert series[0].tolist() == [4.5, 4.5, 2.0]  # a missing value does not count
    np.testing.assert_array_equal(series[:, 0], series[:, 1])  # the same systems are drawn everywhere
    assert series[1:, 0].std() == pytest.approx(one.std() / np.sqrt(10), rel=0.05)
    assert np.isnan(series[1:, 2]).all()  # five prompts
    estimate = stats.spread_of(series[0, 0], series[1:, 0], 10)
    assert estimate[:3] == pytest.approx(stats.interval(one)[:3], rel=0.1)


def test_rank_curves_are_spearmans_coefficients_with_the_uncompressed_order_and_undefined_for_a_constant():
    columns = pd.MultiIndex.from_product([(0.0, 0.3, 0.5), range(8)], names=["ratio", "kind"])
    of_kind = np.random.default_rng(1).integers(0, 4, (3, 8)).astype(float)
    of_kind[2] = 1.0
    found = members.rank_curves(pd.DataFrame([of_kind.ravel()] * 6, columns=columns))
    assert found[0.3].to_numpy() == pytest.approx(spearmanr(*of_kind[:2]).statistic)
    assert found[0.5].isna().all()
    kinds = {"a": (1.0, 1.0, 0.0), "b": (0.5, 0.5, 0.5), "c": (0.0, 0.0, 1.0)}
    wide = pd.DataFrame(
        {(r, kind): [x] * 6 for kind, of in kinds.items() for r, x in zip((0.0, 0.3, 0.5), of, strict=True)}
    )
    wide[0.0, "d"] = wide[0.3, "d"] = [1.0, *[np.nan] * 5]  # a class of one prompt does not count
    wide.columns.names = ["ratio", "kind"]
    assert members.rank_curves(wide).iloc[0].tolist() == pytest.approx([1.0, -1.0])


def test_optimal_points_by_both_definitions():
    """(follow, leak): the second ties with the first in following and leaks more; the third is worse in both."""
    follow, leak = np.array([1.0, 1.0, 0.5, 0.4]), np.array([0.2, 0.6, 0.7, 0.0])
    assert members.optimal(follow, leak, both=True).tolist() == [True, True, False, True]
    assert members.optimal(follow, leak).tolist() == [True, False, False, True]


def test_optimality_counts_cells():
    """At 0.3 fair leaks nothing and follows as much; at 0.5 it follows less and leaks as much; at 0 and 0.9 all tie."""

    def follow(order, policy, variant, ratio):
        return 0.5 if (ratio, variant) == (0.5, "fair") else 1.0

    def leak(order, policy, variant, ratio):
        return 0.0 if (ratio, variant) == (0.3, "fair") else 1.0

    rows = tidied(follow, leak, variants=DIAL)["dial"]
    for start in (True, False):  # at ratio 0, which the paper counts, all settings are one cache
        share = members.optimality(rows, "main", start=start)
        assert share[1.0].value == share[0.0].value == pytest.approx((2 + start) / (3 + start))
    share = members.optimality(rows, "main", both=True)
    assert share[0.0].value == share[1.0].value == 1.0


def rising(order, policy, variant, ratio):
    """Leakage as the paper draws it: none, then all, then less; less where the defense comes last, none when fair."""
    if variant == "fair" or ratio <= 0.1:
        return 0.0
    return (0.6 if ratio == 0.9 else 1.0) * (0.5 if order == "flipped" else 1.0)


def obeying(order, policy, variant, ratio):
    return 1.0 - ratio * (0.9 if order == "flipped" else 0.2 if policy != "k_norm" else 0.9)


def test_ratios_and_policies_that_are_compared_are_named_beforehand():
    """By hand: leakage 0, .2, .6, .3 at 0.1, 0.3, 0.7, 0.9; K-norm follows .5 less than the four others."""
    leak = {0.0: 0.0, 0.1: 0.0, 0.3: 0.2, 0.7: 0.6, 0.9: 0.3}
    tables = tidied(
        lambda o, p, v, r: 1.0 - (0.5 if r and p == "k_norm" else 0.0),
        lambda o, p, v, r: leak[r],
        ratios=list(leak)[1:],
    )
    found = [value(tables, name, "tova") for name in ("L3a", "L3b", "L3f", "L3c")]
    assert found == pytest.approx([0.0, 1.1 / 3, 0.55 / 3, 0.3])
    first = {name: values(tables, name, "tova", first=True) for name in ("L3b", "L3c")}
    assert list(first["L3c"].values()) == pytest.approx([-0.3, -0.1, 0.3])
    assert list(first["L3b"].values()) == pytest.approx([0.0, 0.2, 0.6, 0.3])
    assert value(tables, "L2") == pytest.approx(0.5)
    assert sorted(values(tables, "L2", first=True).values()) == pytest.approx([-0.5] * 2 + [0.0] * 6 + [0.5] * 2)


def test_curves_of_the_papers_shape_reproduce_its_claims():
    many = tidied(obeying, rising, ratios=(0.1, 0.3, 0.5, 0.7, 0.9), variants=("default", "fair"), systems=200)
    verdicts = evaluate(many)
    assert ["claim", *verdicts.columns] == claims.COLUMNS
    assert set(verdicts.index) == {claim["id"] for claim in BOOK["claims"]}
    for claim in ("L2", "L3a", "L3b", "L3c", "L3d", "L3e", "L3f", "L4b", "L7b"):
        assert verdicts.verdict[claim] == "reproduced", claim
    assert verdicts.verdict["L4"] == "partly"  # K-norm loses as much in either order
    for claim in ("L1", "L2b", "L5", "L6", "L7", "L8", "L9", "L9d", "L10", "L11"):
        assert verdicts.verdict[claim] == "not testable here", claim
    for claim in BOOK["claims"]:  # what was changed says so, with the verdict of its first form
        statement = verdicts.statement[claim["id"]]
        assert ("Changed when results were known" in statement) == ("changed" in claim)
        assert ("(Not in the paper's words.)" in statement) == ("ours" in claim)
        assert "first" not in claim or "as first written" in statement
    assert verdicts.statement["L3d"].endswith("as first written (at least 80%): reproduced.)")


def test_flat_curves_refute_a_rise_and_leave_nothing_to_compare():
    flat = tidied(lambda *_: 1.0, lambda *_: 0.0, systems=60, ratios=(0.3, 0.5, 0.7, 0.9))
    verdicts = evaluate(flat)
    for claim in ("L2", "L3b", "L3f", "L4", "L4d"):
        assert verdicts.verdict[claim] == "not reproduced", claim
    for claim in ("L3c", "L4b"):
        assert verdicts.verdict[claim] == "not testable here", claim
        assert "nothing is told on either side" in verdicts.note[claim]
    assert verdicts.verdict["L3a"] == "not testable here"
    assert "it needs a ratio of at most 0.2" in verdicts.note["L3a"]


def test_a_model_that_tells_anyway_or_says_nothing_to_the_point_decides_nothing():
    telling = evaluate(tidied(lambda *_: 1.0, lambda *_: 0.9))
    assert telling.verdict["L3b"] == "not testable here"
    assert "tells its instructions" in telling.note["L3b"]
    dumb = evaluate(tidied(lambda *_: 0.0, lambda *_: 0.0, ratios=(0.1, 0.3, 0.5, 0.9), variants=(*DIAL, "whitelist")))
    assert (dumb.verdict.drop("L8d") == "not testable here").all()
    for claim in ("L3a", "L3b", "L7", "L7b", "L8", "L8c"):
        assert "follows too few instructions" in dumb.note[claim], claim


def test_a_member_with_nothing_to_lose_is_left_out_and_named():
    """K-norm follows nothing by default: that its fair variant costs nothing is no merit."""

    def follow(order, policy, variant, ratio):
        return float(not ratio or policy != "k_norm")

    row = evaluate(tidied(follow, rising, variants=("default", "whitelist", "fair"), systems=60)).loc["L7c"]
    assert row.verdict == "reproduced"
    assert row.members.startswith("8 holds, 2 not testable (nothing is followed")


def test_every_setting_of_the_dial_has_to_gain_and_the_printed_tables_are_read_as_printed():
    """Fair leaks nothing at 0.3 and follows as much: by the usual definition it alone gains on the default."""
    tables = tidied(lambda *_: 1.0, lambda o, p, v, r: float(r > 0 and (r, v) != (0.3, "fair")), variants=DIAL)
    gains = values_of_drawn(evidence(tables, "L8"))
    assert list(gains) == [f"λ = {x:g}" for x in cells.DIAL if x]
    assert list(gains.values()) == pytest.approx([0, 0, 0, 0, 1 / 4])
    assert values_of_drawn(evidence(tables, "L8c")) == pytest.approx({"λ = 1": 1 / 4})
    with pytest.raises(NotTestable, match="every setting is optimal"):
        evidence(tables, "L8e")
    printed = members.printed().query("λ > 0").groupby("study").gain.apply(list)
    assert printed["main"] == pytest.approx([0.10, 0.25, 0.15, 0.30, 0.30])
    assert printed["examples"] == pytest.approx([0.15, 0.0, 0.15, 0.15, 0.30])
    row = evaluate(tables).loc["L8d"]
    assert (row.verdict, row.reading) == ("not reproduced", "any")
    assert row.decided_by == "examples: 1 of 5 cases, worst at λ 0.4"


def values_of_drawn(parts):
    return {name: drawn.value for name, drawn in parts.items()}


def test_keep_rates_by_part_place_and_layer_and_under_cures():
    def rate(order, policy, variant, part, layer):
        fair = {"default": 0.2, "whitelist": 0.35, "fair": 0.4}[variant] + (0.3 if 2 <= layer <= 3 else 0.0)
        return (0.6 if order == "normal" else 0.5) if part == "directive" else fair

    tables = tidied(obeying, rising, rate, variants=("default", "whitelist", "fair"))
    assert value(tables, "L7g", "tova") == pytest.approx(0.15)
    assert value(tables, "L7h", "tova") == pytest.approx(0.1)
    assert value(tables, "L9d", "tova") == pytest.approx(0.3)
    assert value(tables, "L4c", "tova") == pytest.approx(0.3 + 0.2)
    found = evidence(tables, "L5", "snapkv").estimate()
    assert (found.value, found.n) == (pytest.approx(0.3), 8)
    tables["kept"] = tables["kept"].query("layers == 'all' and system < 3")
    verdicts = evaluate(tables)
    assert "it needs keep rates of three layers" in verdicts.note["L9d"]
    for claim in ("L4c", "L5", "L5b", "L9", "L9b", "L9c"):
        assert "3 items: an interval needs at least 6" in verdicts.note[claim]


def test_what_an_unbiased_policy_loses_is_judged_and_what_a_biased_one_loses_is_not():
    def rate(order, policy, variant, part, layer):
        return 0.5 + (0.4 if policy == "snapkv" and part == "directive" else 0.0)

    tables = tidied(obeying, rising, rate)
    assert value(tables, "L6", "k_norm") == pytest.approx(0.9 * 0.4)  # at 0.3 and 0.5
    with pytest.raises(NotTestable, match="keep rates differ by 0.40"):
        evidence(tables, "L6", "snapkv")


def test_a_cost_in_time_and_in_tokens_per_second():
    times = pd.DataFrame(
        [
            {"item": item, "variant": variant, "decode": time, "compress": 2 * time}
            for item, (variant, time) in itertools.product(
                range(6), {"default": 1.0, "fair": 1.25, "whitelist": 1.5}.items()
            )
        ]
    )
    tables = tidied(obeying, rising) | {"timing": times}
    rows = evaluate(tables)
    assert rows.ours[["L11", "L11b", "L11c", "L11d"]].tolist() == pytest.approx([50, 25, -100 / 3, 25])


def test_too_few_systems_or_ratios():
    few = evaluate(tidied(obeying, rising, systems=5))
    assert (few.verdict.drop("L8d") == "not testable here").all()
    assert "at least 6" in few.note["L3b"]
    low = evaluate(tidied(obeying, rising, ratios=(0.1,)))
    assert low.verdict["L2"] == low.verdict["L4"] == "not testable here"
    assert low.verdict["L3a"] == "inconclusive"


def test_models_differ_where_one_loses_more_of_its_own_following():
    """Under K-norm alone the second model loses 0.4 more, whatever each follows uncompressed."""

    def follow(start, more):
        return lambda o, p, v, r: start - (more if r and p == "k_norm" else 0.1 * bool(r))

    first, second = (tidied(follow(*given), lambda *_: 0.0) for given in ((0.9, 0.1), (0.7, 0.5)))
    found = values(first | {"other": second["following"]}, "L2b")
    assert found == pytest.approx({name: -0.4 if name == "k_norm" else 0.0 for name in cells.FIVE})
    with pytest.raises(NotTestable, match="one run has one model: name a second checkpoint"):
        evidence(first, "L2b")


def test_long_examples_leak_where_their_recall_says_so():
    tables = tidied(lambda *_: 1.0, lambda o, p, v, r: 0.1)
    told = pd.DataFrame({"system": range(6), "told": 0.6, "reading": "as_described"})
    for words in (0, 2000):
        with pytest.raises(NotTestable, match="words=3000"):
            evidence(tables | {"examples": told.assign(words=words)}, "L10")
    assert value(tables | {"examples": told.assign(words=3000)}, "L10") == pytest.approx(0.6)
