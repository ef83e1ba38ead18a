"""LongBench's sixteen English sets: the prompt of each, the length of its answers, its official metric.

Source: Bai et al. 2024, arXiv:2308.14508, and its public code (pred.py, eval.py).
"""

import json
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from kvrepro.errors import InputError, ensure_known
from kvrepro.item import Item, Span
from kvrepro.paths import DATA

WORDS = DATA / "words" / "longbench.yml"  # a `Set` for each set
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


SETS = {name: Set(**form) for name, form in yaml.safe_load(WORDS.read_text(encoding="utf-8")).items()}
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
        first = row["answers"][0]
        items.append(Item(f"{name}-{i:03d}", name, turns, first, spans, context, question, meta, name, papers=True))
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
