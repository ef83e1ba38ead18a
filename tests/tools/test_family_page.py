import pandas as pd
import pytest

from kvrepro.experiment import claims
from kvrepro.tools import family_page
from kvrepro.tools.family_claims import kinds

MODELS = ("small-gqa", "small-gqa-seed-0", "small-mqa", "small-mha", "small-sliding", "tiny-gqa")
SAID = {  # a letter per model
    "P1": "rrrrrr", "P2": "rnrrrr", "P4": "rrnrrr", "P5": "rrrrni", "P6": "rrr--r", "P7": "--r--r", "P8": "r-----",
    "P9": "r-nrrr",
}  # fmt: skip
WORDS = {"r": "reproduced", "n": "not reproduced", "i": "inconclusive", "-": claims.NOT_TESTABLE}


@pytest.fixture
def table():
    rows = [
        {"model": model, "chapter": "protection", "claim": claim, "reading": "as_run", "verdict": WORDS[letter],
         "note": "the full cache itself answers too few items (0.02)" if (model, letter) == ("small-mha", "-") else "",
         "profile": "quick", "code": "abc", "date": "2026-11-22"}
        for claim, letters in SAID.items() for model, letter in zip(MODELS, letters, strict=True)
    ]  # fmt: skip
    failed = {"model": "small-mqa", "chapter": "leakage", "verdict": "not run", "note": "InputError: why"}
    return pd.DataFrame([*rows, failed])


def test_what_a_verdict_depends_on(table):
    causes = family_page.wide(table).apply(family_page.depends_on, axis=1, kind_of=kinds())
    assert dict(zip(causes.index.get_level_values("claim"), causes, strict=True)) == {
        "P1": "", "P2": "seed", "P4": "KV heads", "P5": "sliding layers, size", "P6": "", "P7": "too few",
        "P8": "too few", "P9": family_page.ONE,
    }  # fmt: skip


def test_counts_and_pairs_add_up(table):
    verdicts = family_page.wide(table)
    causes = verdicts.apply(family_page.depends_on, axis=1, kind_of=kinds())
    [chapter, every] = family_page.counts(verdicts, causes).to_dict("records")
    assert chapter | {"chapter": "all"} == every
    assert (every["asked of two models or more"], every["the same for all"], every["turn over"]) == (6, 2, 4)
    assert [every[f"depends on {cause}"] for cause in family_page.CAUSES] == [1, 1, 1, 1]
    assert every["differs, one seed asked"] == 1
    pairs = family_page.differences_of_pairs(verdicts, kinds()).set_index("the models differ in")
    assert pairs.differ["seed"] == "20% (20% to 20%)"  # P2 of P1, P2, P4, P5, P6
    assert pairs.pairs.sum() == 15


def test_the_page_says_who_cannot_answer_and_what_was_found(table, tmp_path):
    table.to_csv(tmp_path / "family.csv", index=False)
    row = dict.fromkeys(claims.COLUMNS, "") | {"claim": "M1", "verdict": "partly", "reading": "any", "model": "family",
                                               "wrongly_reproduced": 0.02, "wrongly_not_reproduced": 0.0,
                                               "can_hold": True, "can_fail": False}  # fmt: skip
    pd.DataFrame([row]).to_csv(tmp_path / "judged.csv", index=False)
    page = family_page.page(tmp_path / "family.csv", tmp_path / "judged.csv")
    assert "Of 6 verdicts" in page["found"]
    assert "**2 (33%) are the same for all that can test them**" in page["found"]
    assert "For 4, two models reach different definite verdicts (4 turn over: " in page["found"]
    assert "The other 0 differ only in that" in page["found"]
    assert page["rates"] == [{"claim": "M1", "wrongly reproduced": "2%", "wrongly not reproduced": "0%",
                              "can hold": "yes", "can fail": "no"}]  # fmt: skip
    models = page["models"].to_dict("records")
    poor = {row["model"]: row["answers too little in"] for row in models}
    assert poor == dict.fromkeys(MODELS, "-") | {"small-mha": "protection"}
    assert [row["failed"] for row in models if row["model"] == "small-mqa"] == ["leakage (InputError: why)"]
    assert [row["claim"] for row in page["dependent"]] == [
        "P4 authors' code",
        "P5 authors' code",
        "P2 authors' code",
        "P9 authors' code",
    ]
    assert page["dependent"][0]["small-mqa"] == "✗"
    wide = family_page.wide(pd.read_csv(tmp_path / "family.csv"))
    [axes] = family_page.drawn(wide).axes
    assert axes.collections[0].get_array().size == 6 * 8
    wide["small-mqa"] = None
    [axes] = family_page.drawn(wide).axes
    assert axes.collections[0].get_array().size == 5 * 8


def test_the_stored_tables_are_of_claims_and_models_that_exist():
    stored = pd.read_csv(family_page.TABLE)
    assert set(stored.model) <= set(kinds())
    for chapter, rows in stored.groupby("chapter"):
        assert set(rows.claim.dropna()) <= {claim["id"] for claim in claims.load_claims(chapter)["claims"]}
    assert set(stored[stored.claim.notna()].verdict) <= set(claims.VERDICTS)
    assert set(claims.read(family_page.JUDGED).claim) == {c["id"] for c in claims.load_claims("family")["claims"]}
