"""The protection claims: synthetic data makes each verdict come out each way."""

import numpy as np
import pandas as pd
import pytest
import synthetic

from kvrepro.chapters.protection import members as protection
from kvrepro.chapters.protection.study import Settings
from kvrepro.engine.policy import OWN, Policy
from kvrepro.experiment import claims, judge
from kvrepro.experiment.judge import Judged, Member
from kvrepro.experiment.members import Language, Table

BOOK = claims.load_claims("protection")
BY_ID = {claim["id"]: claim for claim in BOOK["claims"]}


def judged(claim_id: str, results: pd.DataFrame) -> list[Judged]:
    """Judged members of one claim on synthetic results."""
    claim = BY_ID[claim_id]
    given = {"main": PAPER, claim.get("rows", "main"): results}
    tidied = protection.tidied(given, None, Settings(), claim.get("kv_heads", [2])[0])
    language = Language(BOOK, {name: Table(rows) for name, rows in tidied.items()}, protection)
    tested = language.members(claim, language.readings(claim)[0])
    if not any(isinstance(member, Member) for member in tested):
        raise tested[0]
    return judge.judge(claim, [member for member in tested if isinstance(member, Member)])


def book_of(*ids: str) -> dict:
    """The claims file with a few claims only."""
    return BOOK | {"claims": [BY_ID[claim_id] for claim_id in ids]}


def outcome(claim_id: str, results: pd.DataFrame) -> str:
    return judge.verdict(BY_ID[claim_id], judged(claim_id, results))


def one_reading(f1, **given) -> pd.DataFrame:
    return synthetic.results(f1, readings=("as_run",), **given)


def changed(**where):
    """The paper's world with one group of conditions set to another mean F1."""

    def f1(cell: dict) -> float:
        hit = all(
            np.isclose(cell[name], want) if isinstance(want, float) else cell[name] == want
            for name, want in where["when"].items()
        )
        return where["to"] if hit and cell["policy"] != "full" else synthetic.paper_like(cell)

    return f1


# ------------------------------------------------------------------ each way, on data made for it

PAPER = one_reading(synthetic.paper_like, n_items=400)


@pytest.mark.parametrize(
    ("claim_id", "against"),
    [
        ("P1", changed(when={"prefix": 0.0, "suffix": 0.0}, to=0.4)),
        ("P2", changed(when={"prefix": 0.0, "suffix": 0.0}, to=0.6)),
        ("P3", changed(when={"prefix": 0.0, "suffix": 0.0, "capacity": 512}, to=0.4)),
        ("P4", changed(when={"prefix": 0.0, "suffix": 0.0}, to=0.85)),
        ("P5", changed(when={"prefix": 0.0, "suffix": 0.0}, to=0.7)),
        ("P6", changed(when={"prefix": 0.1, "suffix": 0.1}, to=0.3)),
        ("P7", changed(when={"policy": "random_sample", "prefix": 0.1}, to=0.3)),
        ("P8", changed(when={"policy": "slw"}, to=0.85)),
        ("P9", changed(when={"policy": "lru", "prefix": 0.1}, to=0.6)),
        ("P42", changed(when={"policy": "lru", "prefix": 0.1, "suffix": 0.1}, to=0.3)),
        ("P43", changed(when={"policy": "lru", "prefix": 0.1, "suffix": 0.1}, to=0.1)),
        ("P10", changed(when={"policy": "lru", "prefix": 0.1}, to=0.6)),
        ("P11", changed(when={"policy": "quest_simple", "prefix": 0.1}, to=0.5)),
        ("P12", changed(when={"policy": "quest_simple", "prefix": 0.1}, to=0.0)),
        ("P13", changed(when={"policy": "quest_simple", "prefix": 0.1}, to=0.5)),
        ("P15", changed(when={"prefix": 0.05}, to=0.01)),
        ("P16", changed(when={"prefix": 0.05}, to=0.85)),
        ("P17", changed(when={"policy": "lru", "prefix": 0.1, "suffix": 0.1}, to=0.6)),
        ("P18", changed(when={"policy": "lru", "prefix": 0.1, "suffix": 0.0}, to=0.9)),
        ("P19", changed(when={"policy": "lru", "suffix": 0.0}, to=0.2)),
        ("P20", changed(when={"policy": "lru", "prefix": 0.1, "suffix": 0.1}, to=0.4)),
        ("P21", changed(when={"policy": "lru", "prefix": 0.2, "suffix": 0.0}, to=0.8)),
        ("P22", changed(when={"policy": "lru", "prefix": 0.0}, to=0.9)),
        ("P25", changed(when={"policy": "lru", "prefix": 0.0}, to=0.4)),
        ("P27", changed(when={"prefix": 0.0, "suffix": 0.0, "capacity": 512}, to=0.9)),
        ("P28", changed(when={"policy": "h2o_faithful"}, to=0.4)),
        ("P29", changed(when={"policy": "lru", "prefix": 0.1}, to=0.9)),
        ("P31", changed(when={"suffix_mode": "static"}, to=0.4)),
    ],
)
def test_reproduced_in_the_papers_world_and_not_in_another(claim_id, against):
    assert outcome(claim_id, PAPER) == "reproduced"
    otherwise = judged(claim_id, one_reading(against, n_items=400))
    assert judge.verdict(BY_ID[claim_id], otherwise) in ("not reproduced", "partly")
    assert "fails" in [j.state for j in otherwise]


@pytest.mark.parametrize(
    ("claim_id", "columns", "verdict"),
    [
        ("P9b", {"token_f1": lambda row: 0.9 - 0.02 * (row["policy"] == "lru")}, "reproduced"),
        ("P9b", {"token_f1": lambda row: 0.9 + 0.02 * (row["policy"] == "lru")}, "not reproduced"),
        ("P14", {"prediction": lambda row: "same"}, "reproduced"),
        ("P14", {"prediction": lambda row: row["policy"]}, "not reproduced"),
        ("P14b", {"prediction": lambda row: row["policy"]}, "reproduced"),
        ("P14b", {"prediction": lambda row: "same"}, "not reproduced"),
        ("P29b", {}, "reproduced"),
        ("P29b", {"evicted": lambda row: 0 if row["item"] == "item-003" else 1700}, "not reproduced"),
        ("P41", {"token_f1": lambda row: 0.5 + 0.4 * (row["policy"] == "full")}, "reproduced"),
        ("P41", {}, "not reproduced"),
        ("P39", {"token_f1": lambda row: 0.9 - 0.6 * (row["policy"] == "h2o_simple")}, "reproduced"),
        ("P39", {"token_f1": lambda row: 0.9 - 0.6 * (row["policy"] == "lru")}, "not reproduced"),
        ("P23", {}, "reproduced"),
        ("P23", {"repetition_4gram": lambda row: 0.1}, "not reproduced"),
        ("P24", {}, "reproduced"),
        ("P24", {"n_generated": lambda row: 12}, "not reproduced"),
        ("P26", {"token_f1": lambda row: float(row["prefix"] > 0 or row["policy"] == "full")}, "reproduced"),
        ("P26", {"token_f1": lambda row: 0.5}, "not reproduced"),
        ("P32", {}, "reproduced"),
        ("P32", {"policy_calls": lambda row: 1}, "not reproduced"),
        ("P37", {}, "reproduced"),
        ("P37", {"rouge_l": lambda row: 1 - row["token_f1"]}, "not reproduced"),
    ],
)
def test_other_measures_each_way(claim_id, columns, verdict):
    assert outcome(claim_id, one_reading(synthetic.paper_like, n_items=80, **columns)) == verdict


@pytest.mark.parametrize("claim_id", ["P33", "P34"])
def test_context_scaling_each_way(claim_id):
    def worse(cell: dict) -> float:
        return 0.9 if cell["policy"] == "full" else 0.05 if cell["prefix"] else 0.3

    assert outcome(claim_id, synthetic.scaling(readings=("as_run",))) == "reproduced"
    assert outcome(claim_id, synthetic.scaling(worse, readings=("as_run",))) == "not reproduced"


def test_the_credit_each_way():
    lru = PAPER[PAPER.policy == "lru"]
    for shift, verdict in ((0.0, "reproduced"), (-0.1, "not reproduced")):
        taught = lru.assign(policy="online_credit", token_f1=lru.token_f1 + shift)
        assert outcome("P38", pd.concat([PAPER[PAPER.policy.isin(["full", "lru"])], taught])) == verdict


def test_sampling_each_way():
    greedy = PAPER[PAPER.policy.isin(["full", "lru"]) & (PAPER.capacity.isna() | (PAPER.capacity == 256))]
    greedy = greedy[
        (greedy.prefix == greedy.suffix) & greedy.prefix.isin([0.0, 0.1]) & (greedy.suffix_mode == "dynamic")
    ]
    greedy = greedy.assign(temperature=0.0)
    for loss, verdict in ((0.0, "reproduced"), (0.2, "not reproduced")):
        warm = [
            greedy.assign(
                temperature=0.7, seed=seed, token_f1=(greedy.token_f1 - loss * (greedy.prefix > 0)).clip(0, 1)
            )
            for seed in (42, 123)
        ]
        assert outcome("P40", pd.concat([greedy, *warm])) == verdict
    with pytest.raises(judge.NotTestable, match="not run: dynamic, lru, .*temperature 0.7"):
        judged("P40", greedy)


def real(f1, policies=BOOK["sets"]["real"], regimes=("prefill", "decode cap")) -> pd.DataFrame:
    """Rows of some methods in two regimes; f1(regime, guarded)."""
    full = PAPER[PAPER.policy == "full"]
    parts = [
        full.assign(
            policy=policy, regime=regime, capacity=256.0, prefix=side, suffix=side, token_f1=f1(regime, side > 0)
        )
        for policy in policies
        for regime in regimes
        for side in (0.0, 0.1)
    ]
    return pd.concat([full, *parts], ignore_index=True).assign(policy_calls=2, suffix_mode="dynamic")


def test_published_methods_each_way():
    lifted = real(lambda regime, guarded: 0.8 if guarded else 0.1)
    assert {outcome(claim_id, lifted) for claim_id in ("P45", "P46")} == {"reproduced"}
    lowered = real(lambda regime, guarded: (0.1 if guarded else 0.3) + 0.3 * (guarded and regime == "prefill"))
    assert {outcome(claim_id, lowered) for claim_id in ("P45", "P46")} == {"not reproduced"}


def test_sink_claims_each_way():
    assert outcome("P35", synthetic.attention(sink=0.3)) == "reproduced"
    flat = synthetic.attention(sink=0.15).assign(mass=lambda f: f.mass.where(f.region != "prefix", 0.5))
    assert outcome("P35", flat) == "not reproduced"
    with pytest.raises(judge.NotTestable, match="position 0 gets less than a tenth"):
        judged("P35", synthetic.attention(sink=0.01))


def test_a_model_that_cannot_answer_tests_nothing():
    silent = one_reading(lambda cell: 0.0, n_items=6, noise=0.0)
    quality = synthetic.verdicts(book_of("P1", "P4", "P6", "P9", "P22"), main=silent)
    assert (quality.verdict == "not testable here").all()
    assert quality.note.str.contains("full cache itself|an interval needs").all()


def test_a_failure_is_called_a_failure_and_moves_no_other_condition():
    broken = one_reading(synthetic.paper_like, n_items=20)
    lost = broken.policy == "quest_simple"
    broken.loc[lost, "token_f1"], broken.loc[lost, "error"] = np.nan, "ValueError: no such score"
    table = synthetic.verdicts(book_of("P4", "P15"), main=broken).set_index("claim")
    unbroken = one_reading(synthetic.paper_like, n_items=20)
    whole = synthetic.verdicts(book_of("P4", "P15"), main=unbroken).set_index("claim")
    assert table.members["P4"].startswith("18 holds, 3 not testable (all 20 items failed (ValueError: no such score)")
    assert table.ours["P15"] == whole.ours["P15"]
    broken["token_f1"], broken["error"] = np.nan, "ValueError: no such score"
    table = synthetic.verdicts(book_of("P4", "P15"), main=broken)
    assert set(table.verdict) == {"not testable here"}
    assert table.note.str.contains("all 20 items of the full cache failed: ValueError: no such score").all()


def test_the_reading_decides_when_members_turn_over():
    def f1(cell):
        unprotected = not (cell["prefix"] or cell["suffix"]) and cell["policy"] != "full"
        return 0.7 if unprotected and cell["reading"] == "as_described" else synthetic.paper_like(cell)

    tables = {
        "main": synthetic.results(f1, n_items=80),
        "scaling": synthetic.scaling(),
        "attention": synthetic.attention(),
    }
    table = synthetic.verdicts(book_of("P1", "P2", "P33", "P35"), **tables)
    assert list(table.columns[:12]) == claims.COLUMNS[:12]
    by_reading = table.set_index(["claim", "reading"])
    assert by_reading.verdict["P1", "as_run"] == "reproduced"
    assert by_reading.verdict["P1", "as_described"] == "not reproduced"
    assert by_reading.verdict["P33", "as_run"] == by_reading.verdict["P35", "any"] == "reproduced"


def test_a_readers_own_policy_gets_its_own_verdicts_and_moves_no_other(monkeypatch):
    monkeypatch.setitem(OWN, "mine", Policy("Mine", "me", lambda o: o.positions.float()))
    results = synthetic.results(readings=("as_described",))
    own_rows = results[results.policy == "lru"].assign(policy="mine")
    own_rows["rouge_l"] = 1 - own_rows.token_f1  # which would move a correlation over all conditions (P37)
    few = book_of("P1", "P2", "P4", "P37")
    both = pd.concat([results, own_rows], ignore_index=True)
    before, after = (synthetic.verdicts(few, main=rows) for rows in (results, both))
    own_verdicts = after[after.claim.str.endswith(" Mine")]
    assert {"P1 Mine", "P2 Mine", "P4 Mine"} <= set(own_verdicts.claim)
    assert own_verdicts.set_index("claim").verdict["P4 Mine"] == "reproduced"
    pd.testing.assert_frame_equal(after[~after.claim.isin(own_verdicts.claim)].reset_index(drop=True), before)
