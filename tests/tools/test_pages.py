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
