import pandas as pd
import pytest

from kvrepro.experiment import claims, models
from kvrepro.tools import language_model_page as page
from kvrepro.tools.family_claims import FULL


def test_the_stored_tables_are_of_claims_and_items_that_the_page_knows():
    verdicts, runs, scores = page.read()
    assert set(runs["items"]) == set(page.ITEMS.values()) >= set(verdicts["items"]) >= set(scores["items"])
    for chapter, rows in verdicts.groupby("chapter"):
        assert set(rows.claim) <= {claim["id"] for claim in claims.load_claims(chapter)["claims"]}
    assert set(verdicts.verdict) <= set(claims.VERDICTS)
    assert not runs.failed.any()
    for entry in page.WORDS["central"]:
        chosen = verdicts[(verdicts.chapter == entry["chapter"]) & (verdicts.claim == entry["claim"])]
        assert (chosen.verdict != claims.NOT_TESTABLE).any()


def test_verdicts_are_compared_where_both_models_have_one(monkeypatch, tmp_path):
    full = pd.DataFrame([("protection", "P1", "any", "reproduced"), ("protection", "P2", "any", "partly"),
                         ("protection", "P3", "any", claims.NOT_TESTABLE)],
                        columns=["chapter", "claim", "reading", "verdict"])  # fmt: skip
    full.assign(estimate=1.0, low=0.5, high=2.0, unit="F1").to_csv(tmp_path / "full.csv", index=False)
    monkeypatch.setattr(page, "FULL", tmp_path / "full.csv")
    assert FULL != page.FULL
    verdicts = full.assign(items="needles", verdict=["not reproduced", "partly", "partly"], unit="F1",
                           estimate=0.0, low=0.0, high=0.1)  # fmt: skip
    wide = page.side_by_side(verdicts)
    assert list(wide) == [models.DEFAULT, "needles"]
    [row] = page.agreement(wide)
    assert (row["verdicts on both"], row["the same"], row["differently decided"], row["turn over"]) == (2, 1, 1, 1)
    [row] = page.turned(verdicts, wide)
    assert "P1" in row["claim"]
    assert row[page.NAME] == "not reproduced: 0.00 F1 [0.00, 0.10]"


def test_a_claims_block_tells_every_run_that_could_test_it():
    texts = page.by_claim("protection")
    assert texts["P6"].startswith("authors' code, needles: not reproduced")
    assert "real questions: reproduced" in texts["P6"]
    assert "(n = " in texts["P6"]
    assert "the panel" not in texts["P6"]  # not testable there
    assert page.by_claim("family") == {}


def test_a_claim_is_told_in_each_reading_that_was_judged():
    line = page.said(page.read()[0])[0]
    assert line.index("in the authors' code") < line.index("in the authors' text")


def test_cases_that_one_model_leaves_open_are_told_apart_from_those_that_differ():
    verdicts, runs, scores = page.read()
    wide = page.side_by_side(verdicts)
    text, total = page.found(verdicts, runs, wide, scores), pd.DataFrame(page.agreement(wide)).sum(numeric_only=True)
    [whole, same, differ] = [int(total[name]) for name in ("verdicts on both", "the same", "differently decided")]
    assert f"in {whole - same - differ} just one is inconclusive" in text


def test_scores_without_the_passage_are_of_the_items_that_the_full_cache_answers():
    scores = page.read()[2]
    rows = scores[scores.policy.isin(["full", page.NO_PASSAGE])]
    assert rows.groupby(["chapter", "items"]).n.agg(lambda n: len(set(n))).eq(1).all()


def test_the_table_of_runs_says_how_many_prompts_were_cut():
    rows = {(row["items"], row["chapter"]): row["cut"] for row in page.run_rows(page.read()[1])}
    assert rows["needles", "protection"] == "0%"
    assert rows["IFEval", "leakage"] == "-"


def test_figures_have_a_panel_for_each_kind_of_items():
    drawn = page.drawn()
    assert len(drawn["protection"].axes) == 6
    assert len(drawn["fragility"].axes) == 3
    assert len(drawn["synthesis"].axes) == 1
    assert len(drawn["verdicts"].axes) == 5
    named = {text.get_text() for text in drawn["fragility"].legends[0].get_texts()}
    assert {"CriticalKV", "DefensiveKV", "Layer-DefensiveKV"} <= named  # the text sets one against the others


@pytest.mark.parametrize("kept", [128, 512])
def test_what_guards_bring_back_stands_beside_the_questions_alone(kept):
    text = page.without_passage(page.read()[2], kept)
    assert text.count("without any passage") == 3
    assert "nan" not in text
