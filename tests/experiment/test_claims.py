"""Claims: the file refers to printed numbers; the table of verdicts and what it says."""

import math

import pandas as pd
import pytest
import synthetic

from kvrepro.chapters.protection import members
from kvrepro.errors import InputError
from kvrepro.experiment import claims, judge, stats

BOOK = claims.load_claims("protection")
BY_ID = {claim["id"]: claim for claim in BOOK["claims"]}


# ------------------------------------------------------------------ the file


def test_every_printed_number_is_found_in_a_table():
    for claim in BOOK["claims"]:
        text = claims.paper_text(claim["paper"], claim.get("unit", ""))
        assert text, claim["id"]
        assert "nan" not in text, claim["id"]


def test_twelve_claims_at_least_with_ids_in_order_and_a_tolerance():
    ids = [claim["id"] for claim in BOOK["claims"]]
    assert [one for one in ids if one[-1].isdigit()] == [f"P{i + 1}" for i in range(48)]
    assert all(one[:-1] in ids[i - 1] for i, one in enumerate(ids) if not one[-1].isdigit())  # P9b stands after P9
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
    assert "L9, later wins: *not reproduced* with the authors' code, *partly* with their text." in text
    assert "No verdict depends" not in text
    assert "differs" in summary("", "not testable here", "not reproduced")
    assert "No verdict depends on the reading" in summary("no", "partly", "partly")
    assert "in both, but for other members" in summary("yes", "partly", "partly")


def test_errors_of_rounding_are_not_shown_as_zeros():
    assert claims.text_of((2e-16, 2e-16, 2e-16), "max abs difference") == "2e-16 max abs difference"
    assert claims.text_of((3e-7, 1e-7, 5e-7), "gap") == "3e-07 [1e-07, 5e-07] gap"
    assert claims.text_of((1e-17, -1e-17, 2e-17), "F1") == "0.000 [-0.000, 0.000]"
    assert claims.text_of((0.0, 0.0, 0.0), "slots") == "0 slots"


def test_the_table_survives_its_file_and_says_no_nan(tmp_path):
    few = BOOK | {"claims": [BY_ID[one] for one in ("P1", "P9", "P30", "P38")]}
    table = members.evaluate(synthetic.results(synthetic.paper_like, n_items=8), few)
    back = claims.read(claims.write(table, tmp_path / "protection" / "claims.csv"))
    assert back.columns.tolist() == claims.COLUMNS
    assert back.verdict.tolist() == table.verdict.tolist()
    assert set(back.verdict) <= set(claims.VERDICTS)
    topics = set(table.topic)
    for frame in (table, back):
        texts = [claims.summary(frame), claims.beside(frame, *topics), claims.overview(frame).to_csv()]
        assert not any("nan" in text for text in texts)
    assert "Rule: at most 0.1." in claims.beside(table, "collapse")
    assert claims.verdict(table, "P1", "as_run").startswith(f"*{table.verdict.iloc[0]}*")


def test_another_model_leaves_the_verdicts_of_the_first(tmp_path):
    few = BOOK | {"claims": [BY_ID[one] for one in ("P1", "P9")]}
    first = members.evaluate(synthetic.results(synthetic.paper_like), few).assign(model="first")
    other = first.assign(model="other", verdict="partly")
    timed = first.assign(model=claims.STORED, claim="T1").head(1)
    path = tmp_path / "protection" / "claims.csv"
    claims.write(pd.concat([timed, first]), path)
    claims.write(pd.concat([timed, other]), path)
    both = claims.read(path)
    assert claims.runs(both) == [("first", "quick"), ("other", "quick")]
    assert claims.of_run(both).verdict.tolist() == [*timed.verdict, *first.verdict]
    assert claims.of_run(both, ("other", "quick")).claim.tolist().count("T1") == 1
    claims.write(pd.concat([timed, first.assign(verdict="inconclusive")]), path)  # the first again: at its place
    both = claims.read(path)
    assert claims.runs(both) == [("first", "quick"), ("other", "quick")]
    wide = claims.side_by_side(both)
    assert (len(wide), set(wide["first, quick"]), set(wide["other, quick"])) == (4, {"inconclusive"}, {"partly"})
    assert set(wide["the same"]) == {"no"}


def test_a_chapter_without_readings_has_one_column_of_verdicts():
    frame = members.evaluate(synthetic.results(synthetic.paper_like, n_items=8), BOOK | {"claims": [BY_ID["P38"]]})
    assert claims.overview(frame).columns.tolist() == ["statement", "paper", "unit", "rule", "here"]


def test_verdicts_on_stored_timings_are_told_from_those_of_the_run():
    row = {"claim": "A1", "statement": "It is fast.", "paper": "2", "verdict": "reproduced", "reading": "any",
           "model": "mine", "test": "t", "topic": "cost", "rule": "", "unit": "x", "depends_on_reading": "",
           }  # fmt: skip
    rows = [row, row | {"claim": "A2", "test": "none"}, row | {"claim": "A3"}]
    frame = pd.DataFrame(rows).reindex(columns=claims.COLUMNS)
    frame = claims.timed(frame, {"A1": "fastest to slowest", "A2": "fastest to slowest"})
    assert frame.test.tolist() == ["fastest to slowest", "none", "t"]
    assert frame.model.tolist() == [claims.STORED, claims.STORED, "mine"]
    assert [("no part of this run" in text) for text in claims.overview(frame).statement] == [True, True, False]
    told = claims.summary(frame).splitlines()
    assert len(told) == 2
    assert "no part of this run" in told[0]
    assert "A1, A2" in told[0]
    assert "A3" in told[1]
    assert claims.beside(frame, "cost").count("no part of this run") == 2


def test_findings_begin_with_a_model_that_does_not_answer():
    known = f"SnapKV keeps {stats.percent(0.4)}."
    unknown = f"LRU keeps {stats.percent(math.nan)}."
    said = claims.findings(unknown, known, unanswered=judge.unanswered(pd.Series([0.0] * 8)))
    assert "the full cache itself answers too few items" in said.data
    assert "SnapKV keeps 40%." in said.data
    assert "LRU" not in said.data
    assert "LRU keeps (not run)." in claims.findings(unknown).data
    assert judge.unanswered(pd.Series([0.9] * 8)) == ""
