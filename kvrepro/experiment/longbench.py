"""LongBench's sixteen English sets: the prompt of each, the length of its answers, its official metric.

The task, the place of the context, the metric and the number of new tokens are the benchmark's; the wording is ours.
Source: Bai et al. 2024, arXiv:2308.14508, and its public code (pred.py, eval.py).
"""

import json
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvrepro.errors import InputError, ensure_known
from kvrepro.item import Item, Span

BRIEF = "Reply with the answer alone, without further words."
PASSAGES = "Here are several passages. One question about them follows.\n\n"
FROM_PASSAGES = f"\n\nUse the passages above to answer. {BRIEF}\n\nQuestion: {{}}\nAnswer:"
PAPER_WORDS = 6000  # the protection paper's items have 549 to 5,996 words


@dataclass(frozen=True)
class Set:
    """One set. A prompt is `before`, the context, and `after`, in which {} stands for the item's question."""

    metric: str
    max_new_tokens: int
    before: str
    after: str
    plain: bool = False  # without a chat template, where the model continues examples or code
    first_line: bool = False  # only the first line of an answer counts


def _several_passages() -> Set:
    return Set("qa_f1", 32, PASSAGES, FROM_PASSAGES)


SETS = {
    "2wikimqa": _several_passages(),
    "qasper": Set(
        "qa_f1", 128, "Here is a scientific article. One question about it follows.\n\nArticle: ",
        "\n\nUse the article above to answer in one phrase or one sentence, as short as you can. Where the article "
        'does not hold the answer, say "unanswerable". Where yes or no is asked for, say "yes", "no" or '
        '"unanswerable". Explain nothing.\n\nQuestion: {}\nAnswer:',
    ),
    "multifieldqa_en": Set(
        "qa_f1", 64, "Read this text. One question about it follows.\n\n",
        f"\n\nUse the text above to answer. {BRIEF}\n\nQuestion: {{}}\nAnswer:",
    ),
    "hotpotqa": _several_passages(),
    "narrativeqa": Set(
        "qa_f1", 128, "Here is a story, from a novel or from the script of a film. One question about it follows.\n\n"
        "Story: ",
        "\n\nUse the story above to answer in one phrase, as short as you can. Explain nothing.\n\n"
        "Question: {}\nAnswer:",
    ),
    "musique": _several_passages(),
    "gov_report": Set(
        "rouge", 512, "Here is a report of a government agency, to be summarised on one page.\n\nReport:\n",
        "\n\nWrite the one-page summary of the report above.\n\nSummary:",
    ),
    "qmsum": Set(
        "rouge", 512, "Here is the transcript of a meeting. A query about it follows, a question or an instruction.\n\n"
        "Transcript:\n",
        "\n\nUse the transcript above to answer the query in one sentence or a few.\n\nQuery: {}\nAnswer:",
    ),
    "multi_news": Set(
        "rouge", 512, "Here are news articles on one event, to be summarised together on one page.\n\nNews:\n",
        "\n\nWrite the one-page summary of all the news above.\n\nSummary:",
    ),
    "trec": Set(
        "classification", 64, "Name the type of the last question. Other questions and their types come first.\n\n",
        "\n{}", plain=True, first_line=True,
    ),
    "triviaqa": Set(
        "qa_f1", 32, f"Answer the last question from its passage. Examples come first. {BRIEF}\n\n",
        "\n\n{}", plain=True, first_line=True,
    ),
    "samsum": Set(
        "rouge", 128, "Summarise the last dialogue in a few short sentences. Examples come first.\n\n",
        "\n\n{}", plain=True, first_line=True,
    ),
    "passage_count": Set(
        "count", 32, "Here are paragraphs from Wikipedia. Some of them may stand here more than once. How many "
        "different paragraphs are there, each counted once?\n\n",
        "\n\nHow many different paragraphs stand above? Reply with the number alone, such as 1, 2 or 3.\n\nNumber:",
    ),
    "passage_retrieval_en": Set(
        "retrieval", 32, "Here are 30 paragraphs from Wikipedia. The abstract of one of them follows.\n\n",
        "\n\nAbstract: {}\n\nWhich of the paragraphs above is it the abstract of? Reply with its number, in the form "
        '"Paragraph 1", "Paragraph 2" and so on.\n\nReply:',
    ),
    "lcc": Set("code_similarity", 64, "Continue this code by one line.\n", "The next line is:\n", plain=True),
    "repobench-p": Set("code_similarity", 64, "Continue this code by one line.\n", "{}The next line is:\n", plain=True),
}  # fmt: skip
GROUPS = {
    "": tuple(SETS),
    "qa": ("2wikimqa", "qasper", "multifieldqa_en", "hotpotqa", "narrativeqa", "musique"),
    "long": ("gov_report", "qmsum", "multi_news"),
}
PAPER = "protection"  # the QA sets as the protection paper puts them


def named(names: str) -> list[str]:
    """The sets of "qasper,gov_report", of a group ("qa", "long"), or ("") all. Raises InputError for other names."""
    sets = list(dict.fromkeys(member for name in names.split(",") for member in GROUPS.get(name, [name])))
    if PAPER in sets:
        raise InputError(f"longbench:{names}: '{PAPER}' asks its sets in a form of its own: name it alone")
    ensure_known("LongBench set", sets, SETS, also=[*filter(None, GROUPS), PAPER])
    return sets


def rows(archive: Path, name: str) -> Iterator[dict[str, Any]]:
    """The rows of a set as published, from the benchmark's archive."""
    with zipfile.ZipFile(archive) as folder, folder.open(f"data/{name}.jsonl") as lines:
        yield from map(json.loads, lines)


def items(archive: Path, name: str) -> list[Item]:
    """A set's items, ids `<set>-000` and so on in the order of the archive."""
    form = SETS[name]
    items = []
    for i, row in enumerate(rows(archive, name)):
        meta = {"metric": form.metric, "max_new_tokens": form.max_new_tokens, "first_line": form.first_line}
        meta |= {"answers": row["answers"]} | ({"classes": row["all_classes"]} if row.get("all_classes") else {})
        context, question = row["context"], row["input"]
        turns, spans = messages(name, context, question)
        items.append(Item(f"{name}-{i:03d}", name, turns, row["answers"][0], spans, context, question, meta, name))
    return items


def messages(name: str, context: str, question: str) -> tuple[tuple[dict[str, Any], ...], tuple[Span, ...]]:
    """One user turn, and its spans: `passage`, which ends with the context, and `question`, all that follows it."""
    form = SETS[name]
    passage, rest = form.before + context, form.after.replace("{}", question)
    ends = len(passage), len(passage) + len(rest)
    return ({"role": "user", "content": passage + rest},), (Span("passage", 0, 0, ends[0]), Span("question", 0, *ends))


def halves(tokens: list[int], count: int) -> list[list[int]]:
    """The first and the last `count` / 2 tokens: the benchmark cuts the middle out of a context that is too long."""
    half = count // 2
    return [tokens[:half], tokens[len(tokens) - half :]]
