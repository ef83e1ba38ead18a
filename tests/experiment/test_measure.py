import itertools
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rouge_score.rouge_scorer import RougeScorer

from kvrepro.experiment import data, measure

words = st.lists(st.sampled_from("the a cat dog, sat. Mat on".split()), max_size=12).map(" ".join)
inflected = st.lists(st.sampled_from("run Running runs, ran relation relational café 12th".split())).map(" ".join)


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


@given(inflected, inflected)
def test_rouge_l_is_the_packages_own_with_its_stemmer(prediction, answer):
    expected = RougeScorer(["rougeL"], use_stemmer=True).score(answer, prediction)["rougeL"]
    assert measure.rouge_l(prediction, answer) == expected.fmeasure
    assert measure.rouge_l(prediction, answer, part="recall") == expected.recall


def test_repetition_closed_forms():
    assert measure.repetition_4gram("one two three") == 0.0
    assert measure.repetition_4gram("a b c d e") == 0.0
    assert measure.repetition_4gram("x " * 13) == 0.9  # one distinct of ten
    assert measure.repetition_4gram("A b C d a B c D") == pytest.approx(1 / 5)


IN_ANY_SCRIPT = [  # equal answers, written otherwise
    ("Cafe\u0301 Mu\u0308ller", "Café Müller"), ("北京市。", "北京市"), ("“tea”", "tea"), ("ship’s tea", "ship's tea"),
    ("te\u200ba\u00ad", "tea"), ("Красная дверь", "красная дверь!"), ("الباب الأحمر؟", "الباب الأحمر"),
    ("ＴＥＡ", "tea"), ("लाल दरवाज़ा।", "लाल दरवाज़ा"), ("می\u200cخواهم", "میخواهم"), ("ประตูแดง", "ประตูแดง"),
    ("<think>\nSo: red\n</think>\n\ntea", "tea"), ("\u22125", "-5"), ("STRASSE", "straße"), ("İzmir", "izmir"),
    ("❤\ufe0f", "❤"), ("5€", "5 €"),
]  # fmt: skip


@pytest.mark.parametrize(("prediction", "answer"), IN_ANY_SCRIPT)
def test_a_right_answer_counts_in_any_script(prediction, answer):
    for same in (measure.token_f1, measure.token_f1_longbench, measure.exact_match, measure.rouge_l):
        assert same(prediction, answer) == same(answer, ["wrong", prediction]) == 1.0
        assert same(prediction, "другое") == 0.0


def test_the_papers_measures_stay_what_they_were():
    """Other punctuation than ASCII's belongs to a word, and ROUGE sees ASCII letters alone."""
    papers = measure.all_measures("“tea” дверь", "tea дверь", papers=True)
    assert (papers["token_f1"], papers["exact_match"], papers["rouge_l"]) == (0.5, 0.0, 1.0)
    assert measure.rouge_l("дверь", "дверь", papers=True) == 0.0
    assert measure.official("“tea”", "tea", {"metric": "qa_f1"})["official"] == 0.0


@given(*[st.text(st.characters(max_codepoint=127), max_size=60)] * 3)
def test_on_ascii_text_the_papers_measures_and_ours_are_the_same(prediction, first, second):
    ours, papers = (measure.all_measures(prediction, [first, second], flag) for flag in (False, True))
    assert ours == pytest.approx(papers, rel=0, abs=0, nan_ok=True)
    recalls = [measure.rouge_l(prediction, first, flag, "recall") for flag in (False, True)]
    assert recalls[0] == recalls[1]


@given(words, words)
def test_measures_are_shares_and_symmetric(a, b):
    for f in (measure.token_f1, measure.token_f1_longbench, measure.exact_match, measure.rouge_l):
        assert 0 <= f(a, b) <= 1
        assert f(a, b) == pytest.approx(f(b, a))
    assert 0 <= measure.repetition_4gram(a) < 1


def test_what_follows_the_first_word_is_scored_without_it():
    scores = measure.after_first("red door shut", "red door open")
    assert scores == {"first_right": 1.0, "rest_f1": 0.5}
    assert measure.after_first("red", "red door open") == {"first_right": 1.0, "rest_f1": 0.0}  # the word alone
    assert measure.after_first("door red", "red door")["first_right"] == 0.0
    assert all(value != value for value in measure.after_first("red", "red").values())  # one word: nan
    best = measure.after_first("red door", ["red", "blue gate", "red door"])  # of those with more than a word
    assert best == {"first_right": 1.0, "rest_f1": 1.0}


@given(words, words)
def test_a_right_answer_is_right_after_its_first_word_too(prediction, answer):
    scores = measure.after_first(prediction, answer)
    if len(answer.split()) > 1 and prediction.split() == answer.split():
        assert scores == {"first_right": 1.0, "rest_f1": 1.0}
    assert (len(answer.split()) < 2) == (scores["rest_f1"] != scores["rest_f1"])


def test_evidence_is_covered_by_what_any_head_holds_and_by_what_is_not_compressed():
    assert measure.evidence_coverage([3, 4, 5, 6], kept=[0, 4, 6, 9], end=10) == 0.5
    assert measure.evidence_coverage([3, 4, 11, 12], kept=[4], end=10) == 0.75  # 11 and 12 follow what is compressed
    assert measure.evidence_coverage([], [1], 10) != measure.evidence_coverage([], [1], 10)  # nan
    assert measure.evidence_at([0, 10], tokens=11) == 0.5
    assert measure.evidence_at([10], tokens=11) == 1.0
    assert measure.evidence_at([], 11) != measure.evidence_at([], 11)


# ---- the official metrics of LongBench


def score(metric, prediction, answer, **meta):
    return measure.official(prediction, answer, {"metric": metric} | meta)["official"]


def longest(x, y):
    """One longest common subsequence of two lists, by the textbook: where two tie, x is shortened last."""
    table = [[0] * (len(y) + 1) for _ in range(len(x) + 1)]
    for i, j in itertools.product(range(len(x)), range(len(y))):
        table[i + 1][j + 1] = table[i][j] + 1 if x[i] == y[j] else max(table[i][j + 1], table[i + 1][j])
    i, j, common = len(x), len(y), []
    while i and j:
        if x[i - 1] == y[j - 1]:
            common, i, j = [x[i - 1], *common], i - 1, j - 1
        elif table[i - 1][j] > table[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return common


def summary_f(prediction, answer):
    """ROUGE-L by sentences: distinct words of any common subsequence, over the distinct words of either text."""
    ours, gold = ([part.split() for part in text.split(".") if part] for text in (prediction, answer))
    if not ours or not gold:
        return 0.0
    sizes = [len({word for sentence in text for word in sentence or [""]}) for text in (ours, gold)]
    hits = len({word for x in gold for y in ours for word in longest(x or [""], y or [""])})
    precision, recall = hits / sizes[0], hits / sizes[1]
    return 2 * precision * recall / (precision + recall + 1e-8)


def blocks(a, b):
    """Characters in the longest common stretch, the earliest in a, then in b, and in what lies on its either side."""
    if not a or not b:
        return 0
    pairs = itertools.product(range(len(a)), range(len(b)))
    sizes = {(i, j): len(os.path.commonprefix([a[i:], b[j:]])) for i, j in pairs}
    (i, j), size = max(sizes.items(), key=lambda pair: (pair[1], -pair[0][0], -pair[0][1]))
    return size and size + blocks(a[:i], b[:j]) + blocks(a[i + size :], b[j + size :])


sentences = st.lists(words, max_size=3).map(". ".join)
code = st.text(alphabet="ab( =1", max_size=14)


@given(sentences, st.lists(sentences, min_size=1, max_size=3))
def test_summaries_score_as_transcribed(prediction, references):
    expected = max(summary_f(prediction, reference) for reference in references)
    assert score("rouge", prediction, references) == pytest.approx(expected)


@given(code, code, st.lists(st.sampled_from(["", "# note", "x // y", "```"]), max_size=3))
def test_code_scores_as_transcribed(line, answer, before):
    before = [shown for shown in before if shown]
    both = len(line) + len(answer)
    expected = round(200 * blocks(line, answer) / both) / 100 if both else 1.0
    assert score("code_similarity", "\n".join(["", *before, line, "more"]), answer) == (
        pytest.approx(expected) if line or before else score("code_similarity", "more", answer)
    )


@pytest.mark.parametrize(
    ("metric", "prediction", "answer", "expected"),
    [
        ("qa_f1", "The cat", ["a dog", "a cat"], 1.0),
        ("count", "There are 7, not 8 or 17", "7", 1 / 3),
        ("count", "seven", "7", 0.0),
        ("retrieval", "Paragraph 3", "Paragraph 3", 1.0),
        ("retrieval", "3 or 30", "Paragraph 30", 1 / 2),
        ("code_similarity", "# a comment\nint x = 1;\nint y;", "int x = 1;", 1.0),
        ("code_similarity", "# nothing else", "int x = 1;", 0.0),
        ("code_similarity", "abcd", "bcde", 0.75),
        ("rouge", "the mat. the cat sat", "the cat sat on the mat", 2 * 1 * 0.8 / 1.8),  # 4 of 5 distinct words
        ("rouge", "", "the cat", 0.0),
        ("rouge", "...", "the cat", 0.0),
        ("ruler_all", "it is BLUE", ["blue", "red"], 0.5),
        ("ruler_part", "it is BLUE", ["blue", "red"], 1.0),
        ("ruler_part", "it is BLUE", "red", 0.0),
        ("classification", "Date", "Date", 1.0),
        ("classification", "Date or City", "Date", 1 / 2),
        ("classification", "City", "Date", 0.0),
        ("classification", "Other City", "Other City", 1.0),  # a label that is part of the right one
        ("classification", "City", "Other City", 0.0),
        ("classification", "", "Date", 0.0),
        ("classification", "Big Other City", "Big Other City", 1 / 2),  # of two in a row the second stays, as there
    ],
)
def test_official_scores_worked_by_hand(metric, prediction, answer, expected):
    classes = ["Date", "City", "Other City", "Big Other City"]
    assert score(metric, prediction, answer, classes=classes) == pytest.approx(expected, abs=1e-7)


MIRRORED = (Path(os.environ.get("KVREPRO_DATA", "/none")) / "artifact" / "results").is_dir()


@pytest.mark.skipif(not MIRRORED, reason="KVREPRO_DATA names no folder with the paper's results")
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
            assert measure.token_f1(row["prediction"], answer, papers=True) == pytest.approx(row["token_f1"], abs=1e-6)
            assert measure.exact_match(row["prediction"], answer, papers=True) == row["exact_match"]
            rows += 1
    assert rows > 31_000
