import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrepro.experiment import data, measure

words = st.lists(st.sampled_from("the a cat dog, sat. Mat on".split()), max_size=12).map(" ".join)


def test_token_f1_closed_forms():
    assert measure.token_f1("The cat sat.", "the cat sat") == 1.0
    # two of four predicted words are among the three of the answer: P = 2/4, R = 2/3
    assert measure.token_f1("cat sat down here", "the cat sat") == pytest.approx(2 * 0.5 * (2 / 3) / (0.5 + 2 / 3))
    assert measure.token_f1("cat cat", "cat dog") == 0.5  # a bag: the second cat counts for nothing
    assert measure.token_f1("", "...") == 1.0
    assert measure.token_f1("", "cat") == 0.0
    assert measure.token_f1("café", "cafe") == 0.0


def test_the_two_f1_variants_differ_in_articles_and_in_empty_texts():
    assert measure.token_f1("the cat", "a cat") == 0.5
    assert measure.token_f1_longbench("the cat", "a cat") == 1.0
    assert measure.token_f1_longbench("", "") == 0.0
    assert measure.token_f1_longbench("theatre", "atre") == 0.0  # articles are words, not letters


def test_exact_match_ignores_case_punctuation_and_spaces():
    assert measure.exact_match("New-York ", "new york") == 1.0
    assert measure.exact_match("new york city", "new york") == 0.0


def test_rouge_l_closed_forms():
    # longest common subsequence "cat the mat" = 3 of 4 and of 5 words
    assert measure.rouge_l("cat on the mat", "big cat near the mat") == pytest.approx(
        2 * (3 / 4) * (3 / 5) / (3 / 4 + 3 / 5)
    )
    assert measure.rouge_l_recall("cat on the mat", "big cat near the mat") == pytest.approx(3 / 5)
    assert measure.rouge_l("running", "runs") == 1.0  # stemmed


def test_repetition_closed_forms():
    assert measure.repetition_4gram("one two three") == 0.0
    assert measure.repetition_4gram("a b c d e") == 0.0
    assert measure.repetition_4gram("x " * 13) == 0.9  # one distinct of ten
    assert measure.repetition_4gram("A b C d a B c D") == pytest.approx(1 / 5)


def test_several_references_count_the_best():
    references = ["no", "the red door"]
    assert measure.token_f1("red door", references) == measure.token_f1("red door", "the red door")
    assert measure.exact_match("No.", references) == 1.0


@given(words, words)
def test_measures_are_shares_and_symmetric(a, b):
    for f in (measure.token_f1, measure.token_f1_longbench, measure.exact_match, measure.rouge_l):
        assert 0 <= f(a, b) <= 1
        assert f(a, b) == pytest.approx(f(b, a))
    assert 0 <= measure.repetition_4gram(a) < 1


def test_all_measures_has_the_column_names():
    found = measure.all_measures("a cat", "the cat")
    assert list(found) == ["token_f1", "token_f1_longbench", "exact_match", "rouge_l", "repetition_4gram"]


def mirrored() -> bool:
    folders = filter(None, os.environ.get("KVREPRO_DATA", "").split(os.pathsep))
    return any((Path(f) / part / "results").is_dir() for f in folders for part in ("", "artifact"))


@pytest.mark.skipif(not mirrored(), reason="KVREPRO_DATA names no folder with the paper's results")
def test_agrees_with_every_published_row():
    folder = data.fetch("artifact")
    references = {"longctx": data.load_items(str(folder / "data" / "longbench-longctx.jsonl"))}
    rows = 0
    for path in data.sources()["artifact"]["files"]:
        if not path.startswith("results/") or not path.endswith(".jsonl"):
            continue
        for line in (folder / path).read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if len(row["prediction"]) >= 500 or len(row["reference"]) >= 500:
                continue  # the artifact stores 500 characters and scored all of them
            items = references.get(path.split("/")[1])
            answer = items[row["idx"]].meta.get("answers", row["reference"]) if items else row["reference"]
            assert measure.token_f1(row["prediction"], answer) == pytest.approx(row["token_f1"], abs=1e-6)
            assert measure.exact_match(row["prediction"], answer) == row["exact_match"]
            rows += 1
    assert rows > 31_000
