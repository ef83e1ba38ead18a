"""Items from a .jsonl file: what a row may hold, and one line that says what is wrong where it holds something else."""

import ast
import json
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, Field, ValidationError

from kvrepro.engine.condition import Count, Size
from kvrepro.errors import InputError, ensure_known, invalid
from kvrepro.experiment import measure
from kvrepro.experiment.prompt import LONGBENCH, with_context
from kvrepro.item import Item, Span, plain

Role = Literal["system", "user", "assistant"]
Name = str | int | None
Texts = Annotated[list[str], Field(min_length=1)]
IGNORED = {"word_count", "language", "length", "_id"}  # columns of public files


class Turn(BaseModel, extra="forbid", strict=True):
    role: Role
    content: str


class Marked(BaseModel, extra="forbid", strict=True):
    """A span of a message."""

    name: str
    message: Count
    start: Count
    end: Size


class Meta(BaseModel, extra="allow", strict=True):
    """What a checker needs, and anything else that a row brings along."""

    answers: Texts | None = None
    classes: Texts | None = None
    max_new_tokens: Size | None = None
    metric: str | None = None


class Row(BaseModel, extra="forbid", strict=True):
    """A line of a file, see `read`."""

    id: Name = None
    task: Name = None
    domain: Name = None
    dataset: Name = None
    answer: Any = None
    answers: Any = None
    context: str | None = None
    question: str | None = Field(None, validation_alias=AliasChoices("question", "input", "prompt"))
    messages: list[Turn] = []
    spans: list[Marked] = []
    max_new_tokens: Size | None = None
    metric: str | None = None
    all_classes: list[str] | None = None
    meta: Meta = Meta()
    form: Literal["", *LONGBENCH] = ""  # type: ignore[valid-type]  # as `Item.form`
    papers: bool = False  # as `Item.papers`

    def item(self, name: str) -> Item:
        """The item, whose id is `name` where the row has none. Raises ValueError."""
        answers = answers_of({"answer": self.answer, "answers": self.answers}, self.papers)
        meta = self.meta.model_dump(exclude_unset=True)
        right = meta.get("answers", answers)
        _ensure_filled(right, self.papers)
        if answers != right and answers[0] not in (", ".join(right), *right):
            raise ValueError(f"answer {answers[0]!r} beside meta's answers, which count instead: leave these out")
        given = {"max_new_tokens": self.max_new_tokens, "metric": self.metric}
        meta |= {key: value for key, value in given.items() if value is not None}
        if len(answers) > 1:
            meta["answers"] = answers
        if meta.get("metric") == "classification":
            meta.setdefault("classes", self.all_classes or [])
        _ensure_scored(right, meta)
        tasks = (self.task, self.domain, self.dataset, meta.get("benchmark"), "items")
        task = _name("task", next(task for task in tasks if task is not None))
        identity = _name("id", name if self.id is None else self.id)
        messages = tuple(turn.model_dump() for turn in self.messages)
        spans = tuple(Span(**span.model_dump()) for span in self.spans)
        item = Item(identity, task, messages, answers[0], spans, meta=meta, papers=self.papers)
        if self.context or self.question or not self.messages:
            for field in ("question", "context"):
                if getattr(self, field) is None:
                    raise ValueError(f"no field {field!r}")
            item = replace(item, context=self.context, question=self.question, form=self.form)
            built = with_context(item, self.context or "")
            if messages and (messages, spans or built[1]) != built:
                raise ValueError("context beside messages or spans: give context and question, or messages alone")
            item = replace(item, messages=built[0], spans=built[1])
        texts = [turn.content for turn in self.messages] or [f"{item.context}{item.question}"]
        if not any(text.strip() for text in texts):
            raise ValueError("messages hold no text" if self.messages else "context and question are both empty")
        for span in item.spans:
            if span.message >= len(item.messages) or not (
                span.start < span.end <= len(item.messages[span.message]["content"])
            ):
                raise ValueError(f"span {span.name!r} does not lie within a message")
        return item


def item_of(row: dict[str, Any], name: str, papers: bool = False) -> Item:
    """The item of a row. Raises ValueError. papers: unless the row says it."""
    json.dumps(row, ensure_ascii=False).encode()  # half of a surrogate pair can be stored nowhere: a ValueError
    given = {key: value for key, value in row.items() if key not in IGNORED and value is not None}
    try:
        return Row(**{"papers": papers} | given).item(name)
    except ValidationError as error:
        raise ValueError(invalid(error, [*Row.model_fields])) from None


def read(path: Path, papers: bool = False) -> list[Item]:
    """The items of a file, a JSON object on each line. papers: it is a set of a paper (`Item.papers`).

    A row has `answer`, a text, or `answers`, a list of texts of which the best counts. It also has either `context` and
    `question`, a passage (whose last tokens stay where it is cut to the prompt's length) and a question about it, or
    `messages`, a list of {role, content}, and perhaps `spans`, a list of {name, message, start, end}. It may have `id`
    (by default the file's name and the line), `task` (tables have a row for each task), `max_new_tokens` (of the
    answer), and `metric` (a name of `measure.METRICS`; `all_classes` lists the labels of a classification). Anything
    else goes into `meta`. Rows of LongBench and of the protection paper's artifact, and items as `kvrepro items` prints
    them, are read as well. Raises InputError with the numbers of all bad lines, of repeated ids too, and with what is
    wrong with the first.
    """
    if not path.is_file():
        raise InputError(f"no file {path}: give a .jsonl, or fetch one (see `kvrepro data`)")
    needed = "answer, and messages or context and question"
    return by_line(path, lambda row, number: item_of(row, f"{path.stem}-{number - 1:03d}", papers), needed)


def by_line(path: Path, build: Callable[[dict[str, Any], int], Any], needed: str) -> list[Any]:
    """build(row, line number) of each JSON object of a file; each result must have an `id` of its own.

    needed: what a row must have. Raises InputError as `read` does, for whatever `build` raises.
    """
    items: dict[str, Any] = {}
    bad: dict[int, str] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8-sig"), object_pairs_hook=_object)
            if not isinstance(row, dict):
                raise TypeError("not an object")
            item = build(row, number)
            if item.id in items:
                raise ValueError(f"id {item.id!r} stands in an earlier line: give each its own")
            items[item.id] = item
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            bad[number] = f"no field {error}" if isinstance(error, KeyError) else str(error)
    if bad:
        others = f" (bad lines: {', '.join(map(str, bad))})" if len(bad) > 1 else ""
        number, why = next(iter(bad.items()))
        raise InputError(f"{path}, line {number}: {why}; a row needs {needed}{others}")
    if not items:
        raise InputError(f"{path} holds no items: give a row on each line")
    return list(items.values())


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, whose keys must differ: Python's reader would keep the last of two."""
    row = dict(pairs)
    if len(row) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"key {next(key for key in keys if keys.count(key) > 1)!r} stands twice")
    return row


def answers_of(row: dict[str, Any], papers: bool = False) -> list[str]:
    """The answers that a row counts as right, at least one. Raises ValueError. papers: the row is of a paper's set."""
    given = [row[key] for key in ("answer", "answers") if row.get(key) is not None]
    if len(given) != 1:
        raise ValueError("answer and answers: give one of them" if given else "no field 'answer'")
    answers = given[0]
    if isinstance(answers, str):
        if _shows_list(answers):  # as spreadsheets write it
            raise ValueError(f"answer {answers!r} is the text of a list: give the list itself, or [this text]")
        answers = [answers]
    if not isinstance(answers, list) or not answers or not all(isinstance(text, str) for text in answers):
        raise ValueError(f"answer is {answers!r}, not a text or a list of texts")
    _ensure_filled(answers, papers)
    return answers


def _shows_list(text: str) -> bool:
    """Does a text look like a list of Python, or of JSON?"""
    for read in (ast.literal_eval, json.loads):
        with suppress(ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            if isinstance(read(text.strip(" \t\r\n,\ufeff")), list):
                return True
    return False


def ensure_possible(item: Item) -> None:
    """Raise ValueError for an item made in Python whose messages or answers a file could not hold."""
    if not all(isinstance(m, dict) and isinstance(m.get("content"), str) for m in item.messages):
        raise ValueError(f"messages are {item.messages!r:.80}: give {{role, content}}, both texts")
    many = "answers" in item.meta
    given = item.meta["answers"] if many else item.answer
    if not isinstance(given, list if many else str):
        raise ValueError(f"answer is {given!r:.60}: give a text, or a list of texts in meta's answers")
    answers_of({"answer": given})


def _ensure_filled(answers: list[str], papers: bool) -> None:
    """Raise ValueError for an empty answer, which an empty output would equal; of papers' sets only if all are."""
    filled = [bool(answer.strip()) if papers else measure.says_something(answer) for answer in answers]
    if not (any if papers else all)(filled):
        which = "" if papers else ", nor without their punctuation"
        raise ValueError(f"answer is {answers[filled.index(False)]!r}: give texts that are not empty{which}")


def _ensure_scored(answers: list[str], meta: dict[str, Any]) -> None:
    """Raise ValueError for an answer to which an item's metric gives nothing even where a model gives it exactly."""
    metric, labels = meta.get("metric"), meta.get("classes", ())
    if metric is None:
        return
    ensure_known("metric", [metric], measure.METRICS)
    if metric == "classification" and not labels:
        raise ValueError("metric 'classification' needs all_classes, the list of all labels")
    if metric == "retrieval" and not all(re.search(r"Paragraph \d", answer) for answer in answers):
        raise ValueError("metric 'retrieval' takes the name of a paragraph, such as 'Paragraph 3'")
    if metric != "rouge" and not any(measure.METRICS[metric](answer, [answer], labels) for answer in answers):
        raise ValueError(f"answer {answers[0]!r} scores 0 by metric {metric!r} even where a model gives it exactly")


def _name(field: str, value: object) -> str:
    """An id or a task as every page may show it."""
    if not str(value).strip():
        raise ValueError(f"{field} is {value!r}, not a text")
    return plain(str(value))
