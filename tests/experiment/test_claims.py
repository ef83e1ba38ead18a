"""Files of claims, and what their statements say of first forms."""

import pandas as pd
import pytest

from kvrepro.experiment import claims, judge
from kvrepro.experiment.judge import Member, Sample
from kvrepro.paths import DATA

# ------------------------------------------------------------------ the file


@pytest.mark.parametrize("chapter", sorted(file.stem for file in (DATA / "claims").glob("*.yml")))
def test_ids_are_unique_and_what_a_claim_presumes_stands_before_it(chapter):
    book = claims.load_claims(chapter)["claims"]
    ids = [claim["id"] for claim in book]
    assert len(set(ids)) == len(ids)
    assert all(claim["presumes"] in ids[: ids.index(claim["id"])] for claim in book if "presumes" in claim)


# ------------------------------------------------------------------ claims written or changed when results were known


OLD = {"id": "X1", "topic": "t", "statement": "It helps.", "source": "here", "paper": "-"}
OLD |= {"contrast": "mean", "shift": 0.0, "rule": {"above": 0.0}}
CHANGED = [
    OLD,
    {**OLD, "id": "X2", "changed": "why", "shift": -0.5, "first": {"rule": {"below": 0.0}}},
    {**OLD, "id": "X3", "exploratory": "why", "first": {"shift": -0.5}},
    {**OLD, "id": "X4", "exploratory": "why", "changed": "too"},
]
PREMISED = [
    {**OLD, "id": "X6", "shift": -0.5},
    {**OLD, "id": "X5", "presumes": "X6", "changed": "why", "only": "some", "first": {"only": None}},
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
    assert verdicts.verdict.tolist() == ["not reproduced", "not testable here", "not testable here"]
    assert verdicts.statement["X5"].endswith(" as first written (above 0): reproduced.)")
    assert verdicts.statement["X7"] == "It helps. (Its premise was added when results were known.)"
    assert verdicts.note["X7"].endswith("Without this premise it would be reproduced")
