"""What the table of verdicts says, in sentences, lists and tables."""

import itertools
import math
import re

import pandas as pd
import pytest
import synthetic

from kvrepro.chapters.protection import members
from kvrepro.experiment import claims, judge, stats, wording

BOOK = claims.load_claims("protection")
BY_ID = {claim["id"]: claim for claim in BOOK["claims"]}


def table_of(*verdicts: str, depends: str = "", **fields: object) -> pd.DataFrame:
    """One claim, judged in both readings, or in none in particular."""
    readings = claims.READINGS if len(verdicts) == 2 else ("any",)
    row = {
        "claim": "L9",
        "statement": "Later wins.",
        "unit": "%",
        "ours": 23.4,
        "low": 17.1,
        "high": 31.2,
        "members": "1 open",
        "decided_by": "",
    }
    rows = [row | fields | {"verdict": verdict, "reading": reading, "depends_on_reading": depends}
            for verdict, reading in zip(verdicts, readings, strict=True)]  # fmt: skip
    return pd.DataFrame(rows)


def plain(text: str) -> str:
    """Without its links."""
    return re.sub(r"</?a[^>]*>", "", text)


def test_a_summary_says_where_code_and_text_part():
    text = plain(wording.summary(table_of("not reproduced", "partly", depends="unclear")))
    assert "**Authors' code**, 1 claim: 1 *not reproduced* (L9)." in text
    assert "**The verdict differs** for 1 claim, though no case holds with one and fails with the other." in text
    assert "L9 Later wins. *Not reproduced* with the authors' code, *partly reproduced* with their text." in text
    assert "No verdict depends" not in text
    assert "differs" in wording.summary(table_of("not testable here", "not reproduced"))
    assert "No verdict depends on whether" in wording.summary(table_of("partly", "partly", depends="no"))
    alike = plain(wording.summary(table_of("partly", "partly", depends="yes")))
    assert "**Code and text disagree** on 1 claim: a case holds with one and fails with the other." in alike
    assert "*Partly reproduced* with both, but different cases hold." in alike
    assert "**All claims**, 1 claim: 1 *inconclusive* (L9)." in plain(wording.summary(table_of("inconclusive")))


def test_a_sentence_reads_naturally_for_every_pair_of_verdicts():
    sentences = {
        pair: plain(wording.sentence(table_of(*pair), "L9", "Recovery"))
        for pair in itertools.product(claims.VERDICTS, repeat=2)
    }
    assert len(set(sentences.values())) == len(sentences) == 25
    value = " (23% [17, 31])"
    for (code, text), sentence in sentences.items():
        assert re.fullmatch(r"Recovery [a-z][^.]*\.", sentence)
        joins = " but " if code != text else " or " if "not" in sentence else " and "
        assert sum(word in sentence for word in (" but ", " or ", " and ")) == sentence.count(joins) == 1
        assert sentence.count(value) == 2
    expected = {
        ("reproduced", "reproduced"): "comes out in the authors' code{} and in their text{}.",
        ("not reproduced", "not reproduced"): "does not come out in the authors' code{} or in their text{}.",
        ("reproduced", "not reproduced"): "comes out in the authors' code{} but does not come out in their text{}.",
        ("partly", "inconclusive"): "comes out in part in the authors' code{} but is undecided in their text{}.",
        ("not testable here", "not testable here"): "cannot be tested here in the authors' code{} or in their text{}.",
    }
    for pair, text in expected.items():
        assert sentences[pair] == "Recovery " + text.format(value, value)


def test_a_sentence_of_one_verdict_and_of_none():
    assert plain(wording.sentence(table_of("partly"), "L9", "Recovery")) == (
        "Recovery comes out in part (23% [17, 31])."
    )
    unknown = table_of("not testable here", ours=math.nan, low=math.nan, high=math.nan)
    assert plain(wording.sentence(unknown, "L9", "Recovery")) == "Recovery cannot be tested here."
    assert plain(wording.sentence(unknown, "L1", "Recovery")) == "Recovery was not run."
    assert '<a href="claims.html#L9">' in wording.sentence(unknown, "L9", "Recovery")


@pytest.mark.parametrize(
    ("verdict", "cases", "counted"),
    [
        ("reproduced", "2 holds", "both cases hold"),
        ("reproduced", "5 holds", "all 5 cases hold"),
        ("partly", "1 holds, 1 fails", "1 of 2 cases holds"),
        ("partly", "5 holds, 2 open, 1 fails", "5 of 8 cases hold"),
        ("not reproduced", "3 holds, 6 fails", "6 of 9 cases fail"),
        ("not reproduced", "2 open, 1 fails", "1 of 3 cases fails"),
        ("not reproduced", "4 fails, 1 not testable (h2o: nothing is told)", "all 4 cases fail"),
        ("inconclusive", "2 open", "both cases are undecided"),
    ],
)
def test_a_number_of_one_case_among_several_is_not_shown_as_that_of_all(verdict, cases, counted):
    fields = {"members": cases, "unit": "F1", "ours": -0.09, "low": -0.15, "high": -0.02}
    value = f"({counted}; the hardest, Layer-DefensiveKV: -0.09 F1 [-0.15, -0.02])"
    both = table_of(verdict, verdict, decided_by="layer_defensive_kv", **fields)
    assert plain(wording.sentence(both, "L9", "The lead")).count(value) == 2
    nameless = table_of(verdict, decided_by="", **fields)
    assert f"({counted}; the hardest: -0.09 F1 " in plain(wording.sentence(nameless, "L9", "The lead"))
    alone = table_of(verdict, decided_by="quest", **fields | {"members": f"1 {wording.LEADS[verdict]}"})
    assert plain(wording.sentence(alone, "L9", "The lead")).endswith(" (-0.09 F1 [-0.15, -0.02]).")
    refuted = table_of(verdict, decided_by="layer_defensive_kv, C=512: 6 of 6 cases, worst at 3", **fields)
    assert "the hardest, Layer-DefensiveKV, 512 tokens: -0.09" in wording.sentence(refuted, "L9", "The lead")


def test_an_inconclusive_claim_says_that_a_case_fails_and_why_that_does_not_decide():
    cases = "3 open, 1 fails, though not at the 98.75% asked of 4"
    fields = {"members": cases, "unit": "x", "ours": 1.16, "low": 1.12, "high": 1.21, "decided_by": "lru"}
    [row] = table_of("inconclusive", **fields).itertuples()
    expected = (
        "3 of 4 cases are undecided; the hardest, LRU: 1.16 times [1.12, 1.21]; one fails, not clearly enough among 4"
    )
    assert wording.weighed(row) == expected


@pytest.mark.parametrize(
    ("cases", "text"),
    [
        ("7 holds, 1 open", "7 of 8 cases hold; one is undecided: LRU, 1.16 times [1.12, 1.21]"),
        ("1 holds, 2 open", "1 of 3 cases holds; 2 are undecided, the hardest of them, LRU: 1.16 times [1.12, 1.21]"),
    ],
)
def test_a_claim_of_which_no_case_fails_says_how_many_are_undecided(cases, text):
    fields = {"members": cases, "unit": "x", "ours": 1.16, "low": 1.12, "high": 1.21, "decided_by": "lru"}
    [row] = table_of("partly", **fields).itertuples()
    assert wording.weighed(row) == text


def test_only_what_is_open_says_what_would_settle_it():
    texts = {
        verdict: wording.missing(next(table_of(verdict, needed=needed, note="", test="t", p=0.5).itertuples()))
        for verdict, needed in [
            ("reproduced", 9.0), ("not reproduced", 9.0), ("partly", 1125.0), ("inconclusive", 2e6),
        ]
    }  # fmt: skip
    assert texts == {"reproduced": "", "not reproduced": "", "partly": "about 1,125 items",
                    "inconclusive": "no practical number of items"}  # fmt: skip


def test_an_outcome_is_the_verb_of_one_reading():
    both = table_of("reproduced", "partly")
    assert plain(wording.outcome(both, "L9", "as_described")) == "comes out in part"
    assert plain(wording.outcome(both, "L9", "as_run")) == "comes out"
    assert plain(wording.outcome(both, "L1")) == "was not run"


def test_emphasis_leaves_a_table_and_stars_stay():
    starred = {"statement": "It holds (c* > 0). (First: *partly reproduced*.)", "paper": "-", "rule": "", "model": "m"}
    assert "It holds (c* > 0). (First: partly reproduced.)" in wording.styled(table_of("partly", **starred)).to_html()


@pytest.mark.parametrize(
    ("values", "unit", "heard"),
    [
        ((23.4, 17.1, 31.2), "%", "23% [17, 31]"),
        ((0.2814, 0.243, 0.3204), "F1", "0.28 F1 [0.24, 0.32]"),
        ((900, 900, 900), "blocks", "900 blocks"),
        ((1, 1, 1), "blocks", "1 block"),
        ((24567, 24567, 24567), "tokens", "24,567 tokens"),
        ((2.94, 2.9, 3.0), "x", "2.94 times [2.90, 3.00]"),
        ((1.005, 0.987, 1.026), "x", "1.00 times [0.99, 1.03]"),
        ((24.4, 24.27, 24.54), "x", "24 times [24, 25]"),
        ((-0.001, -0.09, 0.09), "F1", "0.00 F1 [-0.09, 0.09]"),
        ((0.0, -math.inf, math.inf), "x", "0.00 times"),
        ((1.43, -math.inf, math.inf), "x", "1.43 times"),  # without bounds: no reason to round it to a whole number
        ((-0.15, -0.2, -0.1), "share", "-0.15 of the importance [-0.20, -0.10]"),
        ((-0.2, -7.1, 6.9), "%", "0% [-7, 7]"),
        ((112.2, -4.0, 228.4), "x the median", "112 times the median [-4, 228]"),
        ((1.029, 1.01, 1.05), "x the even share", "1.03 times the even share [1.01, 1.05]"),
    ],
)
def test_numbers_are_rounded_for_the_ear(values, unit, heard):
    [row] = table_of("partly", unit=unit, **dict(zip(("ours", "low", "high"), values, strict=True))).itertuples()
    assert wording.spoken(row) == heard


def test_what_a_verdict_rests_on_is_said_in_sentences():
    fields = {"decided_by": "ada_kv, C=512", "members": "3 holds, 1 open", "test": "Wilcoxon, Holm", "p": 0.04,
              "needed": 1234.0, "note": ""}  # fmt: skip
    [row] = table_of("partly", **fields).itertuples()
    assert wording.evidence(row) == (
        "Decided by Ada-KV, 512 tokens. Of 4 cases, 3 hold, 1 is undecided. Wilcoxon, Holm: p = 0.040. "
        "About 1,234 items would settle what is open."
    )
    [row] = table_of("not testable here", ours=math.nan, **fields | {"note": "streaming_llm has no sink"}).itertuples()
    assert wording.evidence(row) == "StreamingLLM has no sink."


def test_errors_of_rounding_are_not_shown_as_zeros():
    assert wording.text_of((2e-16, 2e-16, 2e-16), "max abs difference") == "2e-16 max abs difference"
    assert wording.text_of((3e-7, 1e-7, 5e-7), "gap") == "3e-07 gap [1e-07, 5e-07]"
    assert wording.text_of((1e-17, -1e-17, 2e-17), "F1") == "0.000 [-0.000, 0.000]"
    assert wording.text_of((0.0, 0.0, 0.0), "slots") == "0 slots"
    assert wording.text_of((0.5, -math.inf, math.inf), "x") == "0.500 times (no interval)"


def test_the_table_survives_its_file_and_says_no_nan(tmp_path):
    few = BOOK | {"claims": [BY_ID[claim] for claim in ("P1", "P9", "P30", "P38")]}
    table = members.evaluate(synthetic.results(synthetic.paper_like, n_items=8), few)
    back = claims.read(claims.write(table, tmp_path / "protection" / "claims.csv"))
    assert back.columns.tolist() == claims.COLUMNS
    assert back.verdict.tolist() == table.verdict.tolist()
    assert set(back.verdict) <= set(claims.VERDICTS)
    topics = set(table.topic)
    for frame in (table, back):
        texts = [wording.summary(frame), wording.beside(frame, *topics), wording.overview(frame).to_csv()]
        assert not any("nan" in text for text in texts)
    assert "Rule: at most 0.1." in wording.beside(table, "collapse")
    first = next(table.itertuples())
    html = wording.styled(table).to_html()
    assert "nan" not in html
    assert html.count('<a href="claims.html#P') == 4
    assert f"background-color: {wording.LOOKS[first.verdict][1]}" in html


def test_a_chapter_without_readings_has_one_column_of_verdicts():
    frame = members.evaluate(synthetic.results(synthetic.paper_like, n_items=8), BOOK | {"claims": [BY_ID["P38"]]})
    assert wording.overview(frame).columns.tolist() == ["statement", "printed", "rule", "here"]


def test_verdicts_on_stored_timings_are_told_from_those_of_the_run():
    row = {"claim": "A1", "statement": "It is fast.", "paper": "2", "verdict": "reproduced", "reading": "any",
           "model": "mine", "test": "t", "topic": "cost", "rule": "", "unit": "x", "depends_on_reading": "",
           }  # fmt: skip
    rows = [row, row | {"claim": "A2", "test": "none"}, row | {"claim": "A3"}]
    frame = pd.DataFrame(rows).reindex(columns=claims.COLUMNS)
    frame = claims.timed(frame, {"A1": "fastest to slowest", "A2": "fastest to slowest"})
    assert frame.test.tolist() == ["fastest to slowest", "none", "t"]
    assert frame.model.tolist() == [claims.STORED, claims.STORED, "mine"]
    assert [("not in this run" in text) for text in wording.overview(frame).statement] == [True, True, False]
    lines = wording.summary(frame).splitlines()
    assert len(lines) == 2
    assert "not by this run" in lines[0]
    assert "A1, A2" in plain(lines[0])
    assert "A3" in lines[1]
    assert wording.beside(frame, "cost").count("not in this run") == 2
    folded = wording.folded(frame, "cost").split("\n\n")  # blank lines, so that what is between is Markdown
    named = ", ".join(frame[frame.topic == "cost"].claim.unique())
    assert folded == [
        f"<details><summary>Claims judged here: {named}</summary>",
        wording.beside(frame, "cost"),
        "</details>",
    ]


def test_a_policy_beats_another_where_the_interval_leaves_zero_out():
    gap = pd.Series({"value": 0.1, "low": -0.02, "high": 0.2, "n": 12})
    assert wording.beats(gap, "chance") == (
        "It scored more than chance (a difference of +0.10 [-0.02, 0.20]); 12 items cannot tell whether that is chance."
    )
    worse = pd.Series({"value": -0.1, "low": -0.2, "high": -0.02, "n": 12})
    assert wording.beats(worse, "SnapKV") == "It scored less than SnapKV (a difference of -0.10 [-0.20, -0.02])."
    few = pd.Series({"value": 0.1, "low": math.nan, "high": math.nan, "n": 4})
    assert wording.beats(few, "LRU") == (
        "It scored more than LRU (a difference of +0.10); 4 items cannot tell whether that is chance."
    )


@pytest.mark.parametrize(("low", "high", "text"), [
    (-0.2, -0.1, "is not one to use"), (0.1, 0.2, "does better than chance;"), (-0.1, 0.2, "stays open"),
    (math.nan, math.nan, "stays open"),
])  # fmt: skip
def test_an_idea_is_judged_by_its_interval_against_chance(low, high, text):
    assert text in wording.against_chance(pd.Series({"value": 0.1, "low": low, "high": high, "n": 12}))
    assert text not in wording.against_chance(None)


def test_findings_begin_with_a_model_that_does_not_answer():
    with_number = f"SnapKV keeps {stats.percent(0.4)}."
    unknown = f"LRU keeps {stats.percent(math.nan)}."
    box = wording.findings(unknown, with_number, unanswered=judge.unanswered(pd.Series([0.0] * 8)))
    assert "the full cache itself answers too few items" in box.data
    assert "SnapKV keeps 40%." in box.data
    assert "LRU" not in box.data
    assert "LRU keeps (no value)." in wording.findings(unknown).data
    assert judge.unanswered(pd.Series([0.9] * 8)) == ""
    assert wording.findings("One.", "", "Two.").data.endswith("\n\n- One.\n- Two.")


def test_a_chapter_is_named_in_words():
    assert [wording.chapter_name(name) for name in ("dropkv_bound", "leakage")] == ["DropKV bound", "leakage"]


def test_a_case_names_own_policies_by_their_titles(tmp_path):
    file = tmp_path / "some_file.py"
    file.write_text("from kvrepro.engine.policy import Policy\nMINE = Policy('Mine', 'me', lambda o: o.positions)\n")
    assert wording.case(f"{file}:MINE against snapkv, C=128") == "Mine against SnapKV, 128 tokens"
    assert wording.case(f"{file}:MINE: nothing is told") == "Mine: nothing is told"
    assert wording.case("gone.py:MINE: at 12:30, nothing") == "gone.py:MINE: at 12:30, nothing"
