"""What RULER's prompts are made of: words, essays, and questions about paragraphs of two public data sets."""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from kvrepro.errors import InputError

Fetch = Callable[[str], Path]  # the name of a public file or folder -> where it lies (kvrepro.experiment.public.fetch)
BORROWED = "artifact/data/longbench-balanced.jsonl"  # its passages replace the essays where these cannot be fetched


@dataclass(frozen=True)
class Haystack:
    """Running text as words."""

    words: Sequence[str]
    ends: Sequence[int]  # of sentences: the number of words before each end
    origin: str  # the source of the text

    def sentences(self, n: int) -> list[str]:
        """The first n words, from the start again where the text is shorter; the last sentence may be cut."""
        size, bounds = len(self.words), [0]
        for start in range(0, n, size):
            bounds += [start + end for end in self.ends if start + end < n]
        words = [*self.words] * -(-n // size)
        return [" ".join(words[a:b]) for a, b in zip(bounds, [*bounds[1:], n], strict=True)]


@dataclass(frozen=True)
class AskedQuestion:
    """A question with all its right answers and the numbers of its paragraphs."""

    question: str
    answers: list[str]
    evidence: list[int]  # the paragraphs that answer it
    near: list[int]  # those of the same subject, which are taken as distractors before any others


@dataclass(frozen=True)
class Questions:
    """Questions about numbered paragraphs."""

    paragraphs: list[str]
    questions: list[AskedQuestion]


@cache
def words() -> dict[str, list[str]]:
    """English words by kind, "noun", "adjective" and "all" (verbs too), in alphabetical order. Source: wonderwords."""
    from wonderwords import RandomWord

    def words_of(*kinds: str) -> list[str]:
        listed = {word.strip().lower() for word in RandomWord().filter(include_categories=kinds)}
        return sorted(word for word in listed if re.fullmatch("[a-z-]+", word))

    return {"noun": words_of("noun"), "adjective": words_of("adjective"), "all": words_of("noun", "adjective", "verb")}


@cache
def essays(fetch: Fetch) -> Haystack:
    """The benchmark's essays, or else the passages of `BORROWED`, longest first. InputError if both cannot be had."""
    try:
        folder = fetch("essays")
        texts, origin = [file.read_text(encoding="utf-8") for file in sorted(folder.glob("*.txt"))], "essays"
    except InputError as error:
        try:
            lines = fetch(BORROWED).read_text(encoding="utf-8").splitlines()
        except InputError:
            raise error from None
        texts, origin = sorted({json.loads(line)["context"] for line in lines}, key=lambda t: (-len(t), t)), BORROWED
    return haystack("\n".join(texts), origin)


def haystack(text: str, origin: str) -> Haystack:
    """A text as words. A sentence ends with a word that ends in a full stop, question mark or exclamation mark."""
    listed = text.split()
    ends = [i for i, word in enumerate(listed, 1) if re.search(r"[.!?][\"'”’)\]]*$", word)]
    return Haystack(listed, ends, origin)


@cache
def squad(fetch: Fetch) -> Questions:
    """SQuAD 2.0's answerable questions; `near` are the other paragraphs of the same article."""
    articles = json.loads(fetch("squad/dev-v2.0.json").read_text(encoding="utf-8"))["data"]
    contexts = [[paragraph["context"] for paragraph in article["paragraphs"]] for article in articles]
    number = _numbers(context for article in contexts for context in article)
    questions = []
    for article, texts in zip(articles, contexts, strict=True):
        for paragraph in article["paragraphs"]:
            own_number = number[paragraph["context"]]
            near = sorted({number[text] for text in texts} - {own_number})
            for row in paragraph["qas"]:
                if not row["is_impossible"]:
                    answers = list(dict.fromkeys(answer["text"] for answer in row["answers"]))
                    questions.append(AskedQuestion(row["question"], answers, [own_number], near))
    return Questions(list(number), questions)


@cache
def hotpotqa(fetch: Fetch) -> Questions:
    """HotpotQA's questions about two paragraphs; `near` are the eight others that the data set gives with them."""
    rows = json.loads(fetch("hotpotqa/hotpot_dev_distractor_v1.json").read_text(encoding="utf-8"))
    texts = [{title: f"{title}\n{''.join(sentences)}" for title, sentences in row["context"]} for row in rows]
    number = _numbers(text for by_title in texts for text in by_title.values())
    questions = []
    for row, by_title in zip(rows, texts, strict=True):
        titles = {title for title, _ in row["supporting_facts"]}
        evidence = sorted({number[text] for title, text in by_title.items() if title in titles})
        near = sorted({number[text] for text in by_title.values()} - set(evidence))
        questions.append(AskedQuestion(row["question"], [row["answer"]], evidence, near))
    return Questions(list(number), questions)


def _numbers(texts: Iterable[str]) -> dict[str, int]:
    """Each distinct text, in alphabetical order, with its number."""
    return {text: i for i, text in enumerate(sorted(set(texts)))}
