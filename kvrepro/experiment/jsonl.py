"""Items from a .jsonl file: what a row may hold, and one line that says what is wrong where it holds something else."""

import ast
import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, Field, ValidationError

from kvrepro.engine.condition import Count, Size, ensure
from kvrepro.errors import InputError, ensure_known, invalid
from kvrepro.experiment import measure
from kvrepro.experiment.prompt import LONGBENCH, with_context
from kvrepro.item import Item, Span, plain

Texts = Annotated[list[str], Field(min_length=1)]
IGNORED = {"word_count", "language", "length", "_id"}  # columns of public files


class Turn(BaseModel, extra="forbid", strict=True):
    role: Literal["system", "user", "assistant"]
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

    id: str | int = ""
    task: str | int = Field("items", validation_alias=AliasChoices("task", "domain", "dataset"))
    answers: Any = Field(None, validation_alias=AliasChoices("answers", "answer"))
    context: str | None = None
    question: str | None = Field(None, validation_alias=AliasChoices("question", "input", "prompt"))
    messages: list[Turn] = []
    spans: list[Marked] = []
    max_new_tokens: Size | None = None
    metric: str | None = None
    all_classes: list[str] = []
    meta: Meta = Meta()
    form: Literal["", *LONGBENCH] = ""  # type: ignore[valid-type]  # as `Item.form`
    papers: bool = False  # as `Item.papers`

    def item(self, name: str) -> Item:
        """The item, whose id is `name` where the row has none. Raises ValueError."""
        answers = answers_of(self.answers, self.papers)
        meta = self.meta.model_dump(exclude_unset=True)
        meta |= self.model_dump(include={"max_new_tokens", "metric"}, exclude_none=True)
        if meta.get("metric") == "classification":
            meta.setdefault("classes", self.all_classes)
        if len(answers) > 1:
            meta.setdefault("answers", answers)
        right = meta.get("answers", answers)
        if answers[0] not in (", ".join(right), *right):
            raise ValueError(f"answer {answers[0]!r} beside meta's answers, which count instead: leave these out")
        _ensure_scored(answers_of(right, self.papers), meta)
        messages = tuple(turn.model_dump() for turn in self.messages)
        spans = tuple(Span(**span.model_dump()) for span in self.spans)
        identity, task = plain(str(self.id)) or plain(name), plain(str(self.task))
        item = Item(identity, task, messages, answers[0], spans, meta=meta, papers=self.papers)
        if self.context or self.question or not messages:
            if "messages" in self.model_fields_set and not (self.context or self.question):
                raise ValueError("messages []: give at least one turn")
            if self.context is None or self.question is None:
                raise KeyError("context" if self.context is None else "question")
            item = replace(item, context=self.context, question=self.question, form=self.form)
            built = with_context(item, self.context)
            if messages and (messages, spans or built[1]) != built:
                raise ValueError("context beside messages or spans: give context and question, or messages alone")
            item = replace(item, messages=built[0], spans=built[1])
        for span in item.spans:
            content = item.messages[span.message]["content"] if span.message < len(item.messages) else ""
            if not span.start < span.end <= len(content):
                raise ValueError(f"span {span.name!r} does not lie within a message")
        return item


def item_of(row: dict[str, Any], name: str, papers: bool = False) -> Item:
    """The item of a row. Raises ValueError. papers: unless the row says it."""
    given = {key: value for key, value in row.items() if key not in IGNORED and value is not None}
    for choices in [getattr(field.validation_alias, "choices", ()) for field in Row.model_fields.values()]:
        if len(same := [name for name in choices if name in given]) > 1:
            raise ValueError(f"fields {' and '.join(same)} mean the same: give one of them")
    return Row.model_validate({"papers": papers} | given).item(name)


def read(path: Path, papers: bool = False) -> list[Item]:
    """The items of a file, a JSON object on each line, as book/your-model.md describes them; also rows of LongBench and
    of the protection paper's artifact, and items as `kvrepro items` prints them. papers: as `Item.papers`. Raises
    InputError with the numbers of all bad lines, of repeated ids too, and with what is wrong with the first."""
    items: dict[str, Item] = {}
    bad: dict[int, str] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            if line.strip():
                item = item_of(dict(json.loads(line.decode("utf-8-sig"))), f"{path.stem}-{number - 1:03d}", papers)
                if item.id in items:
                    raise ValueError(f"id {item.id!r} stands in an earlier line: give each its own")
                items[item.id] = item
        except ValidationError as error:
            bad[number] = invalid(error, Row.model_fields)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            bad[number] = f"no field {error}" if isinstance(error, KeyError) else str(error)
    if bad:
        others = f" (bad lines: {', '.join(map(str, bad))})" if len(bad) > 1 else ""
        number, why = next(iter(bad.items()))
        raise InputError(
            f"{path}, line {number}: {why}; a row needs answer or answers, and messages or context and question{others}"
        )
    if not items:
        raise InputError(f"{path} holds no items: give a row on each line")
    return list(items.values())


def answers_of(answers: Any, papers: bool = False) -> list[str]:
    """The answers that count as right, of a text or a list of them. Raises InputError for an empty one, which an empty
    output would equal; a paper's set may have one beside others."""
    if isinstance(answers, str):
        if _shows_list(answers):  # as spreadsheets write it
            raise InputError(f"answer {answers!r} is the text of a list: give the list itself, or [this text]")
        answers = [answers]
    ensure(Texts, answer=answers)
    filled = [bool(answer.strip()) if papers else not measure.exact_match("", answer) for answer in answers]
    if not (any if papers else all)(filled):
        raise InputError(f"answer is {answers[filled.index(False)]!r}: give texts that are more than punctuation")
    return list(answers)


def _shows_list(text: str) -> bool:
    """Does a text look like a list of Python, or of JSON?"""
    for read_text in (ast.literal_eval, json.loads):
        with suppress(ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            if isinstance(read_text(text.strip(" \t\r\n,\ufeff")), list):
                return True
    return False


def _ensure_scored(answers: list[str], meta: dict[str, Any]) -> None:
    """Raise ValueError for answers to which an item's metric gives nothing even where a model gives them exactly."""
    if metric := meta.get("metric"):
        ensure_known("metric", [metric], measure.METRICS)
        if metric != "rouge" and not any(measure.official(answer, answer, meta)["official"] for answer in answers):
            why = f"answer {answers[0]!r} scores 0 by metric {metric!r} even where a model gives it exactly"
            raise ValueError(f"{why}, among all_classes" if metric == "classification" else why)
