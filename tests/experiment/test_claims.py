"""Claims: the file refers to printed numbers; the table of verdicts survives its file."""

import pandas as pd
import pytest

from kvrepro.errors import InputError
from kvrepro.experiment import claims, judge
from kvrepro.experiment.judge import Member, Sample
from kvrepro.paths import DATA

BOOK = claims.load_claims("protection")
BY_ID = {claim["id"]: claim for claim in BOOK["claims"]}


# ------------------------------------------------------------------ the file


def test_every_printed_number_is_found_in_a_table():
    for claim in BOOK["claims"]:
        text = claims.paper_text(claim["paper"], claim.get("unit", ""))
        assert text, claim["id"]
        assert "nan" not in text, claim["id"]


@pytest.mark.parametrize(
    ("claim_id", "printed"),
    [
        ("P1", "0.004 to 0.038"),  # table 3, Ada-KV at 128 and H2O at 256
        ("P8", "-0.105 to -0.087"),  # 0.124 - 0.229, 0.184 - 0.282, 0.198 - 0.285
        ("P9", "15 of 15 not significant"),
        ("P12", "0.271 lift, 0.040 spread"),
        ("P20", "0.092 to 0.108"),  # 0.283 - 0.191 and 0.283 - 0.175
        ("P22", "0.145 to 0.421"),  # Qasper 0.156 - 0.011, MuSiQue 0.421 - 0
        ("P31", "-0.002"),
    ],
)
def test_printed_values(claim_id, printed):
    assert claims.paper_text(BY_ID[claim_id]["paper"], BY_ID[claim_id].get("unit", "")) == printed


def test_a_reference_to_no_printed_number_raises():
    with pytest.raises(InputError, match="no printed number in protection_t08"):
        claims.cells("protection_t08_protection_sweep_qwen25_3b.csv", {"protect_frac": 0.33})


@pytest.mark.parametrize("chapter", sorted(file.stem for file in (DATA / "claims").glob("*.yml")))
def test_ids_are_unique_and_what_a_claim_presumes_is_another_of_its_file(chapter):
    book = claims.load_claims(chapter)["claims"]
    premise = {claim["id"]: claim.get("presumes") for claim in book}
    assert len(premise) == len(book)
    for name in premise:
        chain = [name]
        while name := premise[name]:  # noqa: PLW2901
            assert name in premise
            assert name not in chain
            chain.append(name)


# ------------------------------------------------------------------ claims written or changed when results were known


OLD = {"id": "X1", "topic": "t", "statement": "It helps.", "source": "here", "paper": {"text": "-"}}
OLD |= {"contrast": "mean", "shift": 0.0, "rule": {"above": 0.0}}
CHANGED = [
    OLD,
    {**OLD, "id": "X2", "changed": "why", "shift": -0.5, "first": {"rule": {"below": 0.0}}},
    {**OLD, "id": "X3", "exploratory": "why", "first": {"shift": -0.5}},
    {**OLD, "id": "X4", "exploratory": "why", "changed": "too"},
]
PREMISED = [
    {**OLD, "id": "X5", "presumes": "X6", "changed": "why", "only": "some", "first": {"only": None}},
    {**OLD, "id": "X6", "shift": -0.5},
    {**OLD, "id": "X7", "presumes": "X6"},
]


def table(readings=("any",), book=CHANGED) -> pd.DataFrame:
    def members(claim, reading):
        assert ("only" in claim) == (claim["id"] == "X5")
        gain = 0.4 + claim["shift"] - 0.8 * (reading == "as_run")
        return [Member("all", Sample(pd.DataFrame({"a": [gain, gain + 0.01] * 20}), bounds=None))]

    return judge.verdicts(book, members, lambda _: readings, model="m", profile="quick")


def test_both_forms_are_judged_by_the_same_rows_and_the_first_is_told_in_the_statement():
    verdicts = table().set_index("claim")
    assert list(verdicts.index) == ["X1", "X2", "X3", "X4"]
    assert verdicts.verdict.tolist() == ["reproduced", "not reproduced", "reproduced", "reproduced"]
    assert verdicts.statement["X1"] == "It helps."
    late = "It helps. (Changed when results were known; as first written (below 0): reproduced.)"
    assert verdicts.statement["X2"] == late
    assert verdicts.statement["X3"].endswith("known; as first written (above 0): not reproduced.)")
    assert verdicts.statement["X4"] == "It helps. (Exploratory: written when results were known.)"


def test_a_premise_is_no_part_of_a_first_form_and_null_takes_an_entry_away():
    verdicts = table(book=PREMISED).set_index("claim")
    assert verdicts.verdict.tolist() == ["not testable here", "not reproduced", "not testable here"]
    assert verdicts.statement["X5"].endswith(" as first written (above 0): reproduced.)")
    assert verdicts.statement["X7"] == "It helps. (Its premise was added when results were known.)"
    assert verdicts.note["X7"].endswith("Without this premise it would be reproduced")
