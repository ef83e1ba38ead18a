"""The tool that tries rules: bad ones are found."""

import numpy as np
import pandas as pd

from kvrepro.experiment import claims, judge
from kvrepro.experiment.judge import Member, Sample
from kvrepro.paths import DATA
from studies import error_rates

RNG = np.random.default_rng(0)
F1 = pd.DataFrame({"a": RNG.choice([0.0, 0.33, 1.0], 48), "b": RNG.choice([0.0, 0.5, 1.0], 48, p=[0.6, 0.2, 0.2])})
F1 = F1.assign(full=np.maximum(F1.a, RNG.choice([0.5, 1.0], 48)), x=F1.a, y=F1.b)
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


def test_what_the_judge_is_asked_is_recorded():
    def members(_claim, reading):
        if reading == "as_run":
            raise judge.NotTestable("no rows")
        return [Member("m", Sample(F1[["a"]])), judge.NotTestable("nor this one")]

    given = claim({"at_least": 0.1}, statement="s", paper="-", contrast="mean", topic="t", source="s")
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
