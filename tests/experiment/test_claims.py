"""Claims: the file refers to printed numbers, and synthetic data makes each verdict come out each way."""

import os
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import synthetic

from kvrepro.errors import InputError
from kvrepro.experiment import claims, data, stats

BOOK = claims.load_claims("protection")
BY_ID = {claim["id"]: claim for claim in BOOK["claims"]}


def states(claim_id: str, results: pd.DataFrame) -> pd.DataFrame:
    """Members of one claim on synthetic results."""
    return claims.evaluate_members(BY_ID[claim_id], BOOK["sets"], results, protect_frac=0.10, max_new_tokens=128)


def some(*ids: str) -> dict:
    """The claims file with a few claims only."""
    return BOOK | {"claims": [BY_ID[one] for one in ids]}


def outcome(claim_id: str, results: pd.DataFrame) -> str:
    return claims.verdict(states(claim_id, results).state.tolist())


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


# ------------------------------------------------------------------ the file


def test_every_printed_number_is_found_in_a_table():
    for claim in BOOK["claims"]:
        text = claims.paper_text(claim["paper"], claim.get("unit", ""))
        assert text, claim["id"]
        assert "nan" not in text, claim["id"]


def test_twelve_claims_at_least_with_ids_in_order_and_a_tolerance():
    ids = [claim["id"] for claim in BOOK["claims"]]
    assert ids == [f"P{i + 1}" for i in range(len(ids))]
    assert len(ids) >= 12
    assert all(claim["contrast"] == "none" or claim.get("rule") for claim in BOOK["claims"])


@pytest.mark.parametrize(
    ("claim_id", "printed"),
    [
        ("P1", "0.004 to 0.038"),  # table 3, Ada-KV at 128 and H2O at 256
        ("P2", "1.6 to 12.2"),
        ("P7", "79.5"),
        ("P8", "-0.105 to -0.087"),  # 0.124 - 0.229, 0.184 - 0.282, 0.198 - 0.285
        ("P9", "15 of 15 not significant"),
        ("P11", "0.040"),  # 0.290 - 0.250
        ("P12", "0.271 lift, 0.040 spread"),
        ("P15", "0.236"),  # 0.247 - 0.011
        ("P20", "0.092 to 0.108"),  # 0.283 - 0.191 and 0.283 - 0.175
        ("P22", "0.145 to 0.421"),  # Qasper 0.156 - 0.011, MuSiQue 0.421 - 0
        ("P24", "99.3"),  # 127.1 of 128 tokens
        ("P31", "-0.002"),
        ("P33", "0.100 to 0.128"),
    ],
)
def test_printed_values(claim_id, printed):
    assert claims.paper_text(BY_ID[claim_id]["paper"], BY_ID[claim_id].get("unit", "")) == printed


def test_a_reference_to_no_printed_number_raises():
    with pytest.raises(InputError, match="no printed number in protection_t08"):
        claims.cells("protection_t08_protection_sweep_qwen25_3b.csv", {"protect_frac": 0.33})


def test_an_unknown_chapter_raises():
    with pytest.raises(InputError, match="no claims for chapter 'nothing'"):
        claims.load_claims("nothing")


# ------------------------------------------------------------------ the arithmetic


def test_intervals_agree_with_the_statistics_module():
    rng = np.random.default_rng(1)
    frame = pd.DataFrame({"a": rng.normal(0.5, 0.2, 50), "b": rng.normal(0.3, 0.2, 50)})
    ours, theirs = claims.estimate(frame, "difference"), stats.paired_difference(frame.a.to_numpy(), frame.b.to_numpy())
    assert ours[0] == pytest.approx(theirs.mean)
    assert ours[1:] == pytest.approx((theirs.low, theirs.high), abs=0.01)


def test_contrasts_on_constant_columns():
    frame = pd.DataFrame({"a": [0.6] * 8, "b": [0.2] * 8, "full": [0.8] * 8, "a:lru": [0.6] * 8, "a:h2o": [0.5] * 8})
    expected = {"mean": 0.6, "difference": 0.4, "share_of_ceiling": 0.5, "spread": 0.1, "lift_minus_spread": 0.3}
    for contrast, value in expected.items():
        assert claims.estimate(frame, contrast) == pytest.approx((value,) * 3), contrast


def test_a_share_of_nothing_is_undecided_and_two_items_have_no_interval():
    nothing = pd.DataFrame({"a": [0.0] * 5, "full": [0.0] * 5})
    assert np.isnan(claims.estimate(nothing, "share_of_ceiling")).all()
    assert np.isnan(claims.estimate(pd.DataFrame({"a": [0.1, 0.9]}), "mean")[1])


@pytest.mark.parametrize(
    ("rule", "low", "high", "p", "state"),
    [
        ({"at_least": 0.0}, 0.1, 0.3, None, "holds"),
        ({"at_least": 0.0}, 0.1, 0.3, 0.2, "undecided"),  # the test does not agree
        ({"at_least": 0.0}, -0.1, 0.3, 0.01, "undecided"),
        ({"at_least": 0.0}, 0.0, 0.0, 1.0, "fails"),  # exactly no lift
        ({"at_least": 0.0}, -0.1, 0.0, 1.0, "undecided"),  # ends at the threshold, not beyond it
        ({"at_most": 0.25}, 0.25, 0.4, None, "undecided"),
        ({"at_least": 0.5}, 0.2, 0.4, None, "fails"),
        ({"at_most": 0.25}, 0.0, 0.1, None, "holds"),
        ({"at_most": 0.25}, 0.1, 0.3, None, "undecided"),
        ({"at_most": 0.25}, 0.3, 0.4, None, "fails"),
        ({"between": [0.4, 0.75]}, 0.45, 0.7, None, "holds"),
        ({"between": [0.4, 0.75]}, 0.3, 0.7, None, "undecided"),
        ({"between": [0.4, 0.75]}, 0.8, 0.9, None, "fails"),
        ({"no_difference": 0.1}, -0.02, 0.05, 0.4, "holds"),
        ({"no_difference": 0.1}, -0.2, 0.05, 0.4, "undecided"),
        ({"no_difference": 0.1}, 0.01, 0.05, 0.01, "fails"),
        ({"equivalent": 0.02}, -0.01, 0.01, 0.001, "holds"),
        ({"equivalent": 0.02}, -0.01, 0.05, 0.3, "undecided"),
        ({"equivalent": 0.02}, 0.03, 0.05, 1.0, "fails"),
        ({"at_least": 0.0}, np.nan, np.nan, None, "undecided"),
    ],
)
def test_judge(rule, low, high, p, state):
    assert claims.judge(rule, (low + high) / 2, low, high, p) == state


@pytest.mark.parametrize(
    ("members", "verdict"),
    [
        (["holds"] * 3, "reproduced"),
        (["holds", "undecided"], "partly"),
        (["fails", "undecided", "undecided"], "not reproduced"),
        (["holds", "fails"], "partly"),
        (["holds", "fails", "undecided"], "partly"),
        (["fails", "fails", "holds"], "not reproduced"),
        (["fails", "fails", "holds", "undecided"], "partly"),
        (["fails"], "not reproduced"),
        (["undecided"] * 2, "not testable here"),
        ([], "not testable here"),
    ],
)
def test_verdict(members, verdict):
    assert claims.verdict(members) == verdict


# ------------------------------------------------------------------ each way, on data made for it

PAPER = one_reading(synthetic.paper_like)


@pytest.mark.parametrize(
    ("claim_id", "against"),
    [
        ("P1", changed(when={"prefix": 0.0, "suffix": 0.0}, to=0.4)),
        ("P2", changed(when={"prefix": 0.0, "suffix": 0.0}, to=0.6)),
        ("P3", changed(when={"prefix": 0.0, "suffix": 0.0, "capacity": 512}, to=0.4)),
        ("P4", changed(when={"prefix": 0.0, "suffix": 0.0}, to=0.85)),
        ("P5", changed(when={"prefix": 0.0, "suffix": 0.0}, to=0.7)),
        ("P6", changed(when={"prefix": 0.1, "suffix": 0.1}, to=0.3)),
        ("P7", changed(when={"policy": "random", "prefix": 0.1}, to=0.3)),
        ("P8", changed(when={"policy": "streaming_llm"}, to=0.85)),
        ("P9", changed(when={"policy": "lru", "prefix": 0.1}, to=0.6)),
        ("P10", changed(when={"policy": "lru", "prefix": 0.1}, to=0.6)),
        ("P11", changed(when={"policy": "quest", "prefix": 0.1}, to=0.5)),
        ("P12", changed(when={"policy": "quest", "prefix": 0.1}, to=0.0)),
        ("P13", changed(when={"policy": "quest", "prefix": 0.1}, to=0.5)),
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
    assert outcome(claim_id, one_reading(against)) in ("not reproduced", "partly")
    assert "fails" in states(claim_id, one_reading(against)).state.tolist()


@pytest.mark.parametrize(
    ("claim_id", "columns", "verdict"),
    [
        ("P14", {"kept_hash": lambda row: "same"}, "reproduced"),
        ("P14", {}, "not reproduced"),
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
    assert outcome(claim_id, one_reading(synthetic.paper_like, n_items=20, **columns)) == verdict


@pytest.mark.parametrize("claim_id", ["P33", "P34"])
def test_context_scaling_each_way(claim_id):
    def worse(cell: dict) -> float:
        return 0.9 if cell["policy"] == "full" else 0.05 if cell["prefix"] else 0.3

    assert outcome(claim_id, synthetic.scaling(readings=("as_run",))) == "reproduced"
    assert outcome(claim_id, synthetic.scaling(worse, readings=("as_run",))) == "not reproduced"


def test_sink_claims_each_way():
    assert outcome("P35", synthetic.attention(sink=0.3)) == "reproduced"
    flat = synthetic.attention(sink=0.15).assign(mass=lambda f: f.mass.where(f.region != "prefix", 0.5))
    assert outcome("P35", flat) == "not reproduced"
    with pytest.raises(claims.Missing, match="gives position 0 less than a tenth"):
        states("P35", synthetic.attention(sink=0.01))


def test_few_items_leave_a_claim_open():
    noisy = one_reading(synthetic.paper_like, n_items=6, noise=0.5)
    assert set(states("P10", noisy).state) == {"undecided"}
    assert outcome("P10", noisy) == "not testable here"


def test_a_model_that_cannot_answer_tests_nothing():
    quality = claims.evaluate(one_reading(lambda cell: 0.0, n_items=6, noise=0.0), some("P1", "P4", "P6", "P9", "P22"))
    assert (quality.verdict == "not testable here").all()
    assert quality.note.str.contains("full cache itself|an interval needs").all()


def test_missing_conditions_are_named_not_guessed():
    table = claims.evaluate(one_reading(synthetic.paper_like, n_items=6), some("P30", "P33")).set_index("claim")
    assert table.verdict["P30"] == "not testable here"
    assert "not among the policies" in table.note["P30"]
    assert table.note["P33"]
    assert table.verdict["P33"] == "not testable here"


def test_fewer_than_six_items_are_not_judged():
    few = claims.evaluate(one_reading(synthetic.paper_like, n_items=5), some("P1", "P4"))
    assert set(few.verdict) == {"not testable here"}
    assert few.note.str.contains("5 items: an interval needs at least 6").all()


def test_a_failed_item_leaves_the_pair_not_the_table():
    broken = PAPER.copy()
    broken.loc[(broken["item"] == "item-000") & (broken.policy == "lru"), ["token_f1", "repetition_4gram"]] = np.nan
    found = states("P15", broken)
    assert found.n.tolist() == [39]
    assert found.state.tolist() == ["holds"]


def test_the_rest_after_the_first_word():
    rows = pd.DataFrame(
        {
            "prediction": ["cyan bellows", "cyan gloves", "red", "a b c", None],
            "answer": ["cyan gloves"] * 2 + ["red"] + ["b c"] * 2,
        }
    )
    found = claims.rest_of(rows)
    assert found.first_right.tolist()[:2] == [1, 1]
    assert found.rest_f1.tolist()[:2] == [0, 1]
    assert found.first_right[3] == 0
    assert found.rest_f1[3] == pytest.approx(2 / 3)
    assert found.rest_f1[[2, 4]].isna().all()  # one word, and a failed item


def test_two_rows_of_one_condition_raise():
    with pytest.raises(InputError, match="one per item is needed"):
        states("P15", pd.concat([PAPER, PAPER]))


def test_the_reading_decides_when_members_turn_over():
    def f1(cell):
        unprotected = not (cell["prefix"] or cell["suffix"]) and cell["policy"] != "full"
        return 0.7 if unprotected and cell["reading"] == "as_described" else synthetic.paper_like(cell)

    table = claims.evaluate(
        synthetic.results(f1, n_items=20),
        some("P1", "P2", "P6", "P33", "P35", "P38"),
        scaling=synthetic.scaling(),
        attention=synthetic.attention(),
    )
    assert list(table.columns[:12]) == claims.COLUMNS
    by = table.set_index(["claim", "reading"])
    assert by.verdict["P1", "as_run"] == "reproduced"
    assert by.verdict["P1", "as_described"] == "not reproduced"
    assert by.depends_on_reading["P1", "as_run"] == "yes"
    assert by.depends_on_reading["P6", "as_run"] == "no"
    assert by.depends_on_reading["P38", "any"] == ""
    text = claims.summary(table)
    assert "P1, without protection each of the seven policies" in text
    assert "*reproduced* as run, *not reproduced* as described" in text
    assert len(claims.table(table, ["collapse"])) == 4
    assert by.verdict["P33", "as_run"] == by.verdict["P35", "any"] == "reproduced"


def test_a_verdict_that_differs_without_a_turned_member_is_said():
    def summary(depends: str, *verdicts: str) -> str:
        rows = [
            {"claim": "L9", "statement": "Later wins.", "verdict": verdict, "reading": reading,
             "depends_on_reading": depends}
            for verdict, reading in zip(verdicts, claims.READINGS, strict=True)
        ]  # fmt: skip
        return claims.summary(pd.DataFrame(rows))

    text = summary("unclear", "not reproduced", "partly")
    assert "**The verdict differs** for 1 more, where no member turns over" in text
    assert "L9, later wins: *not reproduced* as run, *partly* as described." in text
    assert "No verdict depends" not in text
    assert "differs" in summary("", "not testable here", "not reproduced")
    assert "No verdict depends on the reading" in summary("no", "partly", "partly")
    assert "in both, but for other members" in summary("yes", "partly", "partly")


def test_errors_of_rounding_are_not_shown_as_zeros():
    assert claims._text((2e-16, 2e-16, 2e-16), "max abs difference") == "2e-16 max abs difference"
    assert claims._text((3e-7, 1e-7, 5e-7), "gap") == "3e-07 [1e-07, 5e-07] gap"
    assert claims._text((1e-17, -1e-17, 2e-17), "F1") == "0.000 [-0.000, 0.000]"
    assert claims._text((0.0, 0.0, 0.0), "slots") == "0 slots"


def test_the_table_survives_its_file(tmp_path):
    table = claims.evaluate(one_reading(synthetic.paper_like, n_items=6), some("P1", "P9", "P30", "P38"))
    back = pd.read_csv(claims.write(table, tmp_path / "protection" / "claims.csv"))
    assert back.columns[:12].tolist() == claims.COLUMNS
    assert back.verdict.tolist() == table.verdict.tolist()
    assert set(back.verdict) <= set(claims.VERDICTS)


def test_results_without_conditions_raise():
    with pytest.raises(InputError, match="no condition but the full cache"):
        claims.evaluate(PAPER[PAPER.policy == "full"], BOOK)


# ---------------------------------------------------------- the paper's own items, where the artifact is at hand


def test_the_artifacts_own_rows_give_the_papers_verdicts():
    folders = filter(None, os.environ.get("KVREPRO_DATA", "").split(os.pathsep))
    if not any((Path(one) / "artifact" / "results").is_dir() for one in folders):
        pytest.skip("KVREPRO_DATA names no folder with the artifact")
    rows = pd.concat([data.artifact_results(part) for part in ("ablation/", "confound", "protection-sweep/")])
    rows = rows[rows.policy.isin(["full", "lru"]) & (rows.capacity.isna() | rows.capacity.isin([128, 256, 512]))]
    table = claims.evaluate(rows, some("P1", "P4", "P15", "P16", "P17", "P22", "P24", "P25", "P32")).set_index("claim")
    assert (table.verdict.drop("P32") == "reproduced").all()
    assert table.verdict["P32"] == "not reproduced"  # two thirds of the outputs end before the second reduction
    assert table.ours["P4"] == pytest.approx(0.271, abs=1e-3)  # printed from rounded means
    assert table.ours["P16"] == pytest.approx(0.035, abs=5e-4)
