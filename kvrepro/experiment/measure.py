"""Scores of a prediction, by one reference, or by several of which the best counts.

The papers' measures know ASCII alone: they take other punctuation for letters, and ROUGE drops other letters. Given
`papers`, texts are compared so. Otherwise both are first written in `one_form`, which changes no ASCII text.
"""

import difflib
import math
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, lru_cache
from types import SimpleNamespace
from typing import Any

import pandas as pd

from kvrepro.item import without_thinking

_PUNCTUATION = str.maketrans("", "", string.punctuation)
# Thai, Lao; Burmese; Khmer; kana; Chinese characters: scripts that put no spaces between words
_UNSPACED = re.compile(
    r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"
)
Answer = str | Sequence[str]


def one_form(text: str) -> str:
    """A text of any script in the form in which texts are compared; ASCII text stays as it is.

    A <think> block is left out. Characters are composed and their variants unified (Unicode's NFKC), case is folded,
    characters without a width are dropped, every punctuation mark and the minus sign become an apostrophe, and
    currency signs and characters of scripts without spaces stand alone, as words.
    """
    text = unicodedata.normalize("NFKC", without_thinking(text)[0])
    if text.isascii():
        return text
    text = unicodedata.normalize("NFKC", text.casefold().replace("i\u0307", "i"))  # of the Turkish capital with a dot

    def shown(sign: str) -> str:
        kind = "" if sign.isascii() else unicodedata.category(sign)
        if kind == "Cf" or "\ufe00" <= sign <= "\ufe0f":
            return ""
        return "'" if kind[:1] == "P" or sign == "\u2212" else f" {sign} " if kind == "Sc" else sign

    return _UNSPACED.sub(r" \g<0> ", "".join(map(shown, text)))


def all_measures(prediction: str, answer: Answer, papers: bool = False) -> dict[str, float]:
    """The measure columns of a results row. papers: as the papers compute them, for their data (`Item.papers`)."""
    measures = (token_f1, token_f1_longbench, exact_match, rouge_l)
    scores = {measure.__name__: measure(prediction, answer, papers) for measure in measures}
    if not papers:
        prediction, answer = one_form(prediction), [*map(one_form, _listed(answer))]
    return scores | after_first(prediction, answer) | {"repetition_4gram": repetition_4gram(prediction)}


def token_f1(prediction: str, answer: Answer, papers: bool = False) -> float:
    """Bag-of-words F1 in lower case, without punctuation, **articles kept**; two empty texts give 1, one empty text 0.
    Source: run_v3_jax.py:38-65 of the protection paper's artifact."""
    return _best(prediction, answer, lambda p, a: _bag_f1(_words(p), _words(a), both_empty=1.0), papers)


def token_f1_longbench(prediction: str, answer: Answer, papers: bool = False) -> float:
    """`token_f1` without a, an, the; two empty texts give 0. Source: Bai et al. 2024, arXiv:2308.14508, qa_f1_score."""
    return _best(prediction, answer, lambda p, a: _bag_f1(_words(p, False), _words(a, False), both_empty=0.0), papers)


def after_first(prediction: str, answer: Answer) -> dict[str, float]:
    """`first_right`, whether the first word is the answer's (0 or 1), and `rest_f1`, `token_f1` of the words after it.

    Where tokens leave after the question has been read, the first output token comes from the full cache, and only the
    words after it show an eviction. The best reference of more than one word counts; nan where there is none.
    """
    first, *rest = prediction.split() or [""]
    longer = [words for a in _listed(answer) if len(words := a.split()) > 1]
    if not longer:
        return {"first_right": math.nan, "rest_f1": math.nan}
    rest_f1 = token_f1(" ".join(rest), [" ".join(words[1:]) for words in longer], papers=True)
    return {"first_right": max(float(words[0] == first) for words in longer), "rest_f1": rest_f1}


def exact_match(prediction: str, answer: Answer, papers: bool = False) -> float:
    """1 if the texts are equal in lower case without punctuation and whitespace (protection paper's artifact)."""
    return _best(prediction, answer, lambda p, a: float("".join(_words(p)) == "".join(_words(a))), papers)


def rouge_l(prediction: str, answer: Answer, papers: bool = False, part: str = "fmeasure") -> float:
    """ROUGE-L F-measure with Porter stemming (Lin 2004, package rouge-score). part: or its "recall", the share of the
    reference found in order in the prediction."""
    return _best(prediction, answer, lambda p, a: getattr(_rouge(papers).score(a, p)["rougeL"], part), papers)


def repetition_4gram(text: str) -> float:
    """Share of repeated 4-grams, 1 - distinct / total, over lower-cased words; 0 below four words."""
    words = text.lower().split()
    grams = list(zip(words, words[1:], words[2:], words[3:], strict=False))
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def evidence_at(evidence: Sequence[int], tokens: int) -> float:
    """The mean position of the evidence in a prompt of `tokens` tokens, from 0 to 1; nan without evidence."""
    return sum(evidence) / len(evidence) / (tokens - 1) if evidence and tokens > 1 else math.nan


def evidence_coverage(evidence: Sequence[int], kept: Iterable[int], end: int) -> float:
    """Share of the evidence's tokens that some layer and head still holds after the first reduction; nan without
    evidence. kept: positions below `end` that any head holds; tokens from `end` on are not compressed."""
    held = set(kept)
    return sum(at >= end or at in held for at in evidence) / len(evidence) if evidence else math.nan


# ---- the metrics of benchmarks


def official(prediction: str, answer: Answer, meta: Mapping[str, Any]) -> dict[str, Any]:
    """The columns `official`, 0 to 1, and `metric`, its name, by an item's `meta`; none where it names no metric.
    LongBench's metrics are those of its public code (eval.py, metrics.py)."""
    if "metric" not in meta:
        return {}
    if meta.get("first_line"):
        prediction = prediction.lstrip("\n").split("\n")[0]
    each = [METRICS[meta["metric"]](prediction, a, meta.get("classes", ())) for a in _listed(answer)]
    score = sum(each) / len(each) if meta["metric"] == "ruler_all" else max(each)
    return {"official": score, "metric": meta["metric"]}


def scores(rows: pd.DataFrame) -> pd.Series:
    """The scores by which answers are judged: the official one of rows that have it, token F1 of the others."""
    return rows.official.fillna(rows.token_f1) if "official" in rows else rows.token_f1


def rouge_longbench(prediction: str, answer: str) -> float:
    """ROUGE-L of LongBench: F of the union of common subsequences over sentences, of distinct words (package rouge); 0
    for texts that the package cannot score, such as an empty one."""
    from rouge import Rouge

    try:
        return float(Rouge(["rouge-l"]).get_scores(prediction, answer)[0]["rouge-l"]["f"])
    except (ValueError, RecursionError):
        return 0.0


def classification(prediction: str, answer: str, classes: Sequence[str]) -> float:
    """1 / labels named where the right one is among them, else 0. A label that is part of the right one does not count;
    of two such labels in a row LongBench drops only the first, and so does this."""
    named = [label for label in classes if label in prediction]
    for label in named:
        if label != answer and label in answer:
            named.remove(label)  # the next one takes its place and is passed over
    return 1 / len(named) if answer in named else 0.0


def count(prediction: str, answer: str) -> float:
    """Share of the prediction's numbers that are the right one; 0 where it has none."""
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(answer) / len(numbers) if numbers else 0.0


def code_similarity(prediction: str, answer: str) -> float:
    """Similarity of the first line without a comment or a code fence, in whole hundredths (Ratcliff and Obershelp), as
    fuzzywuzzy's ratio, which LongBench calls, without python-Levenshtein."""
    lines = prediction.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    return round(100 * difflib.SequenceMatcher(None, line, answer).ratio()) / 100


# name -> score of (prediction, one reference, all labels), of which the best counts, for "ruler_all" the mean
METRICS: dict[str, Callable[[str, str, Sequence[str]], float]] = {
    "qa_f1": lambda prediction, answer, _: token_f1_longbench(prediction, answer, True),
    "rouge": lambda prediction, answer, _: rouge_longbench(prediction, answer),
    "classification": classification,
    "count": lambda prediction, answer, _: count(prediction, answer),
    "retrieval": lambda prediction, answer, _: count(prediction, answer.removeprefix("Paragraph ")),
    "code_similarity": lambda prediction, answer, _: code_similarity(prediction, answer),
    **dict.fromkeys(("ruler_all", "ruler_part"), lambda text, part, _: float(part.lower() in text.lower())),
}


def _listed(answer: Answer) -> Sequence[str]:
    return [answer] if isinstance(answer, str) else answer


def _best(prediction: str, answer: Answer, score: Callable[[str, str], float], papers: bool = True) -> float:
    form = str if papers else one_form
    return max(score(form(prediction), form(a)) for a in _listed(answer))


def _words(text: str, articles: bool = True) -> list[str]:
    """The words in lower case, without punctuation, and perhaps without articles."""
    text = text.lower().translate(_PUNCTUATION)
    return (text if articles else re.sub(r"\b(a|an|the)\b", " ", text)).split()


def _bag_f1(prediction: list[str], answer: list[str], both_empty: float) -> float:
    if not prediction and not answer:
        return both_empty
    common = (Counter(prediction) & Counter(answer)).total()
    return 2 * common / (len(prediction) + len(answer))


@cache
def _rouge(papers: bool) -> Any:
    """The scorer with Porter stemming, which remembers stems: finding them took four fifths of its time. Unless
    `papers`, letters of other scripts than ASCII's make words, too."""
    from nltk.stem.porter import PorterStemmer
    from rouge_score.rouge_scorer import RougeScorer

    stem = lru_cache(2**16)(PorterStemmer().stem)
    word = re.compile(r"[a-z0-9]+" if papers else r"(?:[a-z0-9]|(?!\s)[\u0080-\U0010ffff])+")

    def stems(text: str) -> list[str]:
        return [stem(found) if len(found) > 3 else found for found in word.findall(text.lower())]

    return RougeScorer(["rougeL"], tokenizer=SimpleNamespace(tokenize=stems))
