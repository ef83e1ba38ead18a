"""What a prediction is worth, given one reference, or several of which the best counts."""

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

_PUNCTUATION = str.maketrans("", "", string.punctuation)
Answer = str | Sequence[str]


def all_measures(prediction: str, answer: Answer) -> dict[str, float]:
    """The measure columns of a results row."""
    measures = (token_f1, token_f1_longbench, exact_match, rouge_l)
    found = {measure.__name__: measure(prediction, answer) for measure in measures}
    return found | {"repetition_4gram": repetition_4gram(prediction)}


def token_f1(prediction: str, answer: Answer) -> float:
    """Bag-of-words F1 as the protection paper computes it: lower case, no ASCII punctuation, **articles kept**.

    Two empty texts give 1, one empty text 0. Source: run_v3_jax.py:38-65 of the paper's artifact.
    """
    return _best(prediction, answer, lambda p, a: _bag_f1(_clean(p).split(), _clean(a).split(), both_empty=1.0))


def token_f1_longbench(prediction: str, answer: Answer) -> float:
    """Bag-of-words F1 as LongBench and SQuAD compute it: as `token_f1`, but without a, an, the; two empty texts give 0.

    Source: Bai et al. 2024, arXiv:2308.14508 (qa_f1_score).
    """
    return _best(prediction, answer, lambda p, a: _bag_f1(_no_articles(p), _no_articles(a), both_empty=0.0))


def exact_match(prediction: str, answer: Answer) -> float:
    """1 if the texts are equal in lower case without punctuation and whitespace (protection paper's artifact)."""
    return _best(prediction, answer, lambda p, a: float("".join(_clean(p).split()) == "".join(_clean(a).split())))


def rouge_l(prediction: str, answer: Answer) -> float:
    """ROUGE-L F-measure with Porter stemming (Lin 2004, package rouge-score)."""
    return _best(prediction, answer, lambda p, a: _rouge().score(a, p)["rougeL"].fmeasure)


def rouge_l_recall(prediction: str, answer: Answer) -> float:
    """Share of the reference found in order in the prediction: ROUGE-L recall with Porter stemming."""
    return _best(prediction, answer, lambda p, a: _rouge().score(a, p)["rougeL"].recall)


def repetition_4gram(text: str) -> float:
    """Share of repeated 4-grams, 1 - distinct / total, over lower-cased words; 0 below four words."""
    words = text.lower().split()
    total = len(words) - 3
    if total < 1:
        return 0.0
    return 1 - len({tuple(words[i : i + 4]) for i in range(total)}) / total


def _best(prediction: str, answer: Answer, score: Callable[[str, str], float]) -> float:
    return max(score(prediction, a) for a in ([answer] if isinstance(answer, str) else answer))


def _clean(text: str) -> str:
    return text.lower().strip().translate(_PUNCTUATION)


def _no_articles(text: str) -> list[str]:
    return re.sub(r"\b(a|an|the)\b", " ", _clean(text)).split()


def _bag_f1(prediction: list[str], answer: list[str], both_empty: float) -> float:
    if not prediction and not answer:
        return both_empty
    common = (Counter(prediction) & Counter(answer)).total()
    return 2 * common / (len(prediction) + len(answer))


@cache
def _rouge() -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(["rougeL"], use_stemmer=True)
