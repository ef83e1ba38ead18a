"""What the hand-written sentences of the pages presume, held against the committed tables."""

from pathlib import Path

import pandas as pd
import pytest

DATA = Path(__file__).resolve().parents[2] / "data"
NEEDLES, QUESTIONS = "ruler:niah_single_1", "protection-panel:multifieldqa_en"


def table(name: str) -> pd.DataFrame:
    return pd.read_csv(DATA / name)


LANDING = [  # claim, reading; on SmolLM2 by items; on the seven small models, how many of each
    ("P6", "as_run", {NEEDLES: "not reproduced", QUESTIONS: "reproduced"}, {"not reproduced": 6, "partly": 1}),
    ("C4", "as_run", {NEEDLES: "partly"}, {"not reproduced": 5, "partly": 1, "inconclusive": 1}),
    ("D3", "any", {NEEDLES: "reproduced", QUESTIONS: "partly"}, {"partly": 5, "reproduced": 2}),
    ("L3b", "as_run", {}, {"partly": 7}),
    ("R1f", "any", {"protection-panel": "not reproduced"}, {"not reproduced": 7}),
]


@pytest.mark.parametrize(("claim", "reading", "other", "small"), LANDING, ids=[row[0] for row in LANDING])
def test_the_landing_page_gives_the_verdicts_of_the_tables(claim, reading, other, small):
    family, larger = (
        t[(t.claim == claim) & (t.reading == reading)] for t in map(table, ("family.csv", "language_model.csv"))
    )
    assert family.verdict.value_counts().to_dict() == small
    tested = larger[larger.verdict != "not testable here"]
    assert len(tested) == len(other)
    for items, verdict in other.items():
        assert tested[tested["items"].str.startswith(items)].verdict.tolist() == [verdict]


def test_guards_bring_the_authors_questions_back_and_not_their_needles():
    recovery = table("control.csv").query("claim == 'P6'").set_index("panel").verdict
    assert recovery["Qwen3-4B, needles at 64K, 60"] == "not reproduced"
    assert (recovery[recovery.index.str.contains("LongBench")] == "reproduced").all()


def test_the_family_agrees_as_its_page_says():
    family = table("family.csv").query("verdict != 'not testable here'")
    wide = family.pivot_table("verdict", ["chapter", "claim", "reading"], "model", aggfunc="first")
    wide = wide[wide.count(axis=1) > 1]
    seeds = wide[["small-gqa", "small-gqa-seed-0", "small-gqa-seed-2"]].nunique(axis=1).gt(1)
    same = wide.nunique(axis=1).eq(1)
    assert (len(wide), same.sum(), seeds.sum(), (~same & ~seeds).sum()) == (266, 132, 72, 62)


def test_smollm2_and_the_small_model_agree_in_two_thirds_of_what_both_decide():
    key, decided = ["chapter", "claim", "reading"], ["reproduced", "partly", "not reproduced"]
    both = table("language_model.csv").merge(table("full_profile.csv"), on=key, suffixes=("", "_small"))
    both = both[both.verdict.isin(decided) & both.verdict_small.isin(decided)]
    assert (both.verdict == both.verdict_small).mean() == pytest.approx(2 / 3, abs=0.02)


def test_no_row_was_lost_doubled_or_changed_by_a_kill():
    assert table("reliability/kills.csv")[["lost", "doubled", "different"]].to_numpy().sum() == 0


def test_no_method_clears_the_next_where_the_page_on_choices_says_so():
    scores = table("language_model_scores.csv").query("items.str.startswith(@NEEDLES) and guard == '0% + 0%'")
    rows = scores[
        ((scores.chapter == "synthesis") & (scores.reading == "as_described"))
        | ((scores.chapter == "fragility") & (scores.reading == "as_run"))
    ].dropna(subset="kept")
    for _, few in rows.groupby(["chapter", "kept"]):
        best, rival = few.sort_values("value").iloc[[-1, -2]].itertuples()
        assert best.low <= rival.high
    assert rows[rows.kept <= 0.1].value.max() < 0.06
