"""The tool that tries rules: bad ones are found."""

import math

import numpy as np
import pandas as pd

from kvrepro.experiment import claims, judge, stats
from kvrepro.experiment.judge import Facts, Measured, Member, Sample
from kvrepro.paths import DATA
from studies import error_rates

RNG = np.random.default_rng(0)
F1 = pd.DataFrame({"a": RNG.choice([0.0, 0.33, 1.0], 48), "b": RNG.choice([0.0, 0.5, 1.0], 48, p=[0.6, 0.2, 0.2])})
F1 = F1.assign(full=np.maximum(F1.a, RNG.choice([0.5, 1.0], 48)), x=F1.a, y=F1.b)
CLUSTERS = np.repeat(np.arange(12), 5)
LONG = pd.DataFrame({"x": np.exp(RNG.normal(size=12)[CLUSTERS] + RNG.normal(size=60))})
RATES = pd.read_csv(DATA / "error_rates.csv")


def claim(rule: dict, **more) -> dict:
    return {"id": "X", "rule": rule} | more


def test_a_sound_rule_errs_seldom_and_decides_what_is_clear():
    members = [Member(name, Sample(F1[[name, "full"]].set_axis(["a", "b"], axis=1), "difference")) for name in "ab"]
    row = error_rates.rates(claim({"at_most": -0.1}), members, repeats=80)
    assert row["wrongly_reproduced"] <= 0.1
    assert row["wrongly_not_reproduced"] <= 0.1
    assert min(row["true_reproduced"], row["false_not_reproduced"]) > 0.6
    assert row["can_hold"]
    assert row["can_fail"]
    assert (row["members"], row["parts"], row["n"], row["repeats"]) == (2, 2, 48, 80)


def test_rules_that_cannot_hold_or_cannot_fail_are_found():
    few = [Member("m", Sample(F1[["a", "b"]][:8], "difference"))]
    row = error_rates.rates(claim({"equivalent": 0.1}, test="tost"), few, repeats=20)
    assert not row["can_hold"]
    assert 8 < row["enough"] <= 64 * 8
    enough = error_rates.rates(claim({"equivalent": 0.1}, test="tost"), few, repeats=20, times=row["enough"] / 8)
    assert (enough["can_hold"], enough["can_fail"], math.isnan(enough["enough"])) == (True, True, True)
    share = [Member("m", Sample(F1[["a"]]))]
    above_all = error_rates.rates(claim({"at_most": 1.2}), share, repeats=20)
    assert above_all["can_hold"]
    assert not above_all["can_fail"]
    assert math.isnan(above_all["threshold_reproduced"])
    never = error_rates.rates(claim({"at_least": 1.2}), share, repeats=20)
    assert (never["can_hold"], math.isnan(never["enough"])) == (False, True)


def test_a_rule_that_errs_is_found():
    """Members at the threshold, each refuted by its own 5%: the claim falls by one of twenty."""
    columns = pd.DataFrame(np.random.default_rng(2).normal(0.3, 0.1, (30, 20)))
    members = [
        Member(str(i), Sample(columns[[i]].set_axis(["a"], axis=1).set_axis(range(30 * i, 30 * i + 30)), bounds=None))
        for i in range(20)
    ]
    row = error_rates.rates(claim({"at_least": 0.3}), members, repeats=60)
    assert row["wrongly_not_reproduced"] <= 0.12
    judged = [judge.judge(claim({"at_least": 0.3}), [m]) for m in members]
    assert all(j.refuted == (j.state == "fails") for [j] in judged)  # alone, a member stands for itself


def test_of_facts_one_counterexample_in_any_member_refutes():
    members = [Member(name, Facts(pd.Series([1.0] * 9))) for name in "ab"]
    row = error_rates.rates(claim({"between": [1, 1]}, exact=True), members)
    assert (row["true_reproduced"], row["false_not_reproduced"], row["n"]) == (1.0, 1.0, 18)
    assert row["can_hold"]
    assert row["can_fail"]


def test_ranges_of_timings_are_not_tried():
    assert "not tried" in error_rates.rates(claim({"at_most": 1}), [Member("m", Measured(1, 1, 1))])["note"]


def test_too_few_items_are_not_tried():
    few = [Member("m", Sample(F1[["a"]][:5]))]
    assert error_rates.rates(claim({"at_most": 0.5}), few)["note"] == "5 items: an interval needs at least 6"
    assert error_rates.rates(claim({"at_most": 0.5}), few, 5, times=4)["n"] == 20


def test_what_the_judge_is_asked_is_recorded():
    def members(_claim, reading):
        if reading == "as_run":
            raise judge.NotTestable("no rows")
        return [Member("m", Sample(F1[["a"]])), judge.NotTestable("nor this one")]

    given = claim({"at_least": 0.1}, statement="s", paper={"text": "-"}, contrast="mean", topic="t", source="s")
    with error_rates.recorded() as recorded:
        judge.verdicts([given], members, lambda c: ("as_run", "as_described"), model="m", profile="quick")
    assert [(reading, len(testable)) for _, reading, testable in recorded] == [("as_run", 0), ("as_described", 1)]
    table = error_rates.table("c", recorded, processes=1)
    assert table.note.tolist()[0] == "nothing to test in this run"
    assert table.n.tolist()[1] == 48


def test_the_shipped_table_has_every_claim_and_its_sums_are_those_of_its_kinds():
    for chapter in ("protection", "fragility", "dropkv_bound", "leakage", "reclamation"):
        ids = {claim["id"] for claim in claims.load_claims(chapter)["claims"]}
        assert len(ids & set(RATES[RATES.chapter == chapter].claim)) > 0.5 * len(ids), f"{chapter}: compute anew"
    tried = RATES[RATES.repeats.notna()]
    assert len(tried) > 100
    for name, kinds in (("reproduced", ("false", "threshold", "one")), ("not_reproduced", ("true",))):
        largest = tried[[f"{kind}_{name}" for kind in kinds]].max(axis=1).fillna(0)
        assert (tried[f"wrongly_{name}"].fillna(1) >= largest).all()
    chance = 2 * np.sqrt(0.05 * 0.95 / tried.repeats)
    assert (tried.wrongly_reproduced_above == (tried.wrongly_reproduced > 0.05 + chance)).all()


def test_resamples_are_few_only_while_rules_are_tried():
    before = stats.DRAWS
    error_rates.rates(claim({"at_most": 9}), [Member("m", Sample(LONG, lambda v: float(np.median(v)), CLUSTERS))], 1)
    assert before == stats.DRAWS
