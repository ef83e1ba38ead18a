"""Items, prompts and public data: every text that enters a run comes from here.

data/sources.yml names public files with commit and checksum: `python -m kvrepro.experiment.data list`, or `fetch NAME`.
"""

import ast
import hashlib
import http.client
import json
import os
import random
import re
import shutil
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import yaml
from annotated_types import Ge, Le, Lt

from kvrepro.chat import rendered, thinking
from kvrepro.engine.allowed import Count, Size, ensure
from kvrepro.engine.condition import Prompt
from kvrepro.errors import InputError, counted, ensure_known, first_line, program, suggestion
from kvrepro.experiment import longbench, measure
from kvrepro.item import Item, Span, plain
from kvrepro.paths import CACHE, DATA, ROOT, replaced

SOURCES = DATA / "sources.yml"
PANEL_NAME = "protection-panel"
PANEL = "artifact/data/longbench-balanced.jsonl"  # the protection paper's 162 items
WORLD = (200, 4000)  # the least and the most tokens of a prompt of the embedded world, by its own tokenizer
FILLED = 0.9  # a prompt stands for a length if it has at least this share of it
Range = tuple[int, int]  # [start, end) in characters
Messages = tuple[dict[str, Any], ...]
Spans = tuple[Span, ...]
ANSWERS = {  # metrics that take answers of one form only: the pattern, and its description
    "count": (r"\d+", "a number in digits, such as '3'"),
    "retrieval": (r".*Paragraph \d.*", "the name of a paragraph, such as 'Paragraph 3'"),
    "ruler_all": (r".*\S.*", "a text that is not empty"),
    "ruler_part": (r".*\S.*", "a text that is not empty"),
}
ROLES = ("system", "user", "assistant")
FIELDS = """id task domain dataset answer answers context question input prompt messages spans max_new_tokens metric
all_classes meta form papers word_count language length _id""".split()  # of a row of a .jsonl file; others are misspelt
# The paper's system turn asks for a short factual answer from the passage. Its wording is not published; this is ours.
SYSTEM = "Answer the question from the passage. Reply with a short, factual answer only."


say_once = cache(print)

# ---- items


MOST_MADE = 100_000  # items of a generator: enough for any interval, and seconds of work


class AtMost(int):
    """A number of items that the user did not choose, such as a profile's: where there are fewer, all are taken."""


def load_items(
    items: str, n_items: int | None = None, seed: int = 0, tokens: int = 1900, tokenizer: Any = None
) -> list[Item]:
    """`n_items` items (None: all of a file), balanced over tasks, the same for the same seed.

    items:
    - "tinyworld" (all its tasks), "tinyworld:domains" (the six QA domains), "tinyworld:long" (eight with long answers),
      "tinyworld:domains,needle" (some tasks); `tokens` is the prompt length
    - "longbench" (its sixteen English sets), "longbench:qasper,gov_report" (some of them), "longbench:qa" (the six QA
      sets), "longbench:long" (reports, meetings, news: answers of up to 512 tokens)
    - "longbench:protection": the QA sets as the protection paper asks them, passages of up to 6,000 words;
      "protection-panel": its 162 items, ids as in `artifact.results`; "protection-panel:qasper": those of some sets
    - "ruler" (thirteen tasks), "ruler:vt,cwe" (some), made for the model's `tokenizer`; `tokens` is the length of
      prompt and answer
    - the path of a .jsonl file, see `read_jsonl`

    Given a `tokenizer`, texts that hold one of its special tokens, such as `<|im_start|>`, are `spelled_out`.
    """
    check_items(items, n_items)
    ensure(Count, seed=seed)
    kind, _, names = items.partition(":")
    if kind == "tinyworld":
        return _tinyworld(names, n_items, seed, tokens)
    if kind == "ruler":
        from kvrepro.world import ruler

        return ruler.sample(names, n_items, seed, tokens, tokenizer, fetch)
    if kind == "longbench":
        loaded = _longbench(names)
    elif kind == PANEL_NAME:
        loaded = [item for item in read_jsonl(fetch(PANEL), papers=True) if not names or item.task in names.split(",")]
    else:
        loaded = read_jsonl(_own_file(items))
    loaded = balanced(loaded, n_items, seed, items)
    return loaded if tokenizer is None else spelled_out(loaded, tokenizer, items)


def spelled_out(items: list[Item], tokenizer: Any, name: str = "this") -> list[Item]:
    """The items with the tokenizer's special tokens made plain text: the first sign of each becomes its full-width
    twin, so that a passage cannot open a turn or end an answer. Prints how many items held such tokens, if any did."""
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    special |= {*tokenizer.all_special_tokens}
    words = [re.escape(token) for token in sorted(special, key=len, reverse=True) if not token.isalnum()]
    pattern = re.compile("|".join(words) or r"(?!)")

    def twin(token: re.Match[str]) -> str:
        return re.sub("[!-~]", lambda sign: chr(ord(sign[0]) + 0xFEE0), token[0], count=1)

    def plainly(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(turn | {"content": plainly(turn["content"])} for turn in value)
        return pattern.sub(twin, value) if isinstance(value, str) else value

    texts = ("messages", "context", "question")
    spelled = [replace(item, **{text: plainly(getattr(item, text)) for text in texts}) for item in items]
    if changed := sum(a != b for a, b in zip(items, spelled, strict=True)):
        whose = Path(tokenizer.name_or_path).name
        print(f"{name}: {changed} of {len(items)} items hold special tokens of {whose}: spelled out")
    return spelled


def check_items(items: object, n_items: object = None) -> None:
    """Raise InputError for items, or a number of them, that `load_items` cannot give. Loads none of them."""
    ensure(str, items=items)
    check_count(items, n_items)
    kind, _, names = str(items).partition(":")
    if kind == "tinyworld":
        _tasks(names)
    elif kind == "longbench":
        longbench.named("qa" if names == longbench.PAPER else names)
    elif kind == "ruler":
        from kvrepro.world import ruler

        ruler.named(names)
    elif str(items).endswith(".jsonl"):
        if not _own_file(str(items)).is_file():
            raise InputError(f"no file {items!r}: give the path of a .jsonl file that is there")
    elif kind == PANEL_NAME:
        ensure_known("set of the panel", names.split(",") if names else (), longbench.GROUPS["qa"])
    else:
        choices = "tinyworld, longbench, protection-panel, ruler, or the path of a .jsonl file"
        raise InputError(f"unknown items {str(items)[:200]!r}: use {choices}")


def check_count(items: object, n_items: object) -> None:
    """Raise InputError for a number of items that nothing can have, or that a generator would make for hours."""
    ensure(Size | None, n_items=n_items)
    kind = str(items).partition(":")[0]
    if kind in ("tinyworld", "ruler") and isinstance(n_items, int) and n_items > MOST_MADE:
        raise InputError(f"n_items is {n_items:,}: at most {MOST_MADE:,} {kind} items are made, take fewer or your own")


def _own_file(items: str) -> Path:
    """The path of a reader's own file."""
    try:
        path = Path(items).expanduser()
        return find_file(path) or path
    except (OSError, RuntimeError, ValueError) as error:  # no home of that user, a name too long or with a NUL
        raise InputError(f"items {items[:200]!r} is no path ({error}): give that of a .jsonl file") from None


def load_fitting(
    items: str, n_items: int | None, tokenizer: Any, limit: int, seed: int = 0, tokens: int | None = None,
    room: int = 0,
) -> list[Item]:  # fmt: skip
    """`load_items` whose prompts have at most `limit` tokens of a model's tokenizer.

    Passages will be cut (`build_prompt`). The embedded world counts in tokens of its own, so its length is changed
    until the longest prompt fits and nearly fills the limit; given `tokens`, it is made of that length, and shorter
    only if that does not fit. `tokens` is also the length of RULER's prompts. Other messages may have as many tokens as
    the limit or `room`, whichever is more; prints how many longer ones are left out. InputError where none is left.
    """
    aim = tokens or limit
    if items.partition(":")[0] != "tinyworld":
        return not_too_long(load_items(items, n_items, seed, aim, tokenizer), items, tokenizer, max(limit, room))
    for _ in range(8):
        aim = min(max(aim, WORLD[0]), WORLD[1])
        drawn = load_items(items, n_items, seed, aim)
        longest = max(len(build_prompt(item, tokenizer, 10**9).ids) for item in drawn)
        if longest <= limit and (tokens is not None or longest > 0.9 * limit):
            return drawn
        aim = round(0.99 * aim * limit / longest)
    whose = Path(tokenizer.name_or_path).name
    wanted = f"prompts of {limit} tokens of {whose} wanted, but the nearest of {items} have {longest}"
    raise InputError(f"{wanted}: ask for another length, or take other items")


def not_too_long(items: list[Item], name: str, tokenizer: Any, most: int) -> list[Item]:
    """The `usable` items: those with a passage, which can be cut, or at most `most` tokens."""
    return usable(items, name, lambda item: item.context is not None or build_prompt(item, tokenizer, most))


def filling(items: list[Item], name: str, tokenizer: Any, length: int) -> list[Item]:
    """The `usable` items: those whose prompts, with longer passages cut, have at least the share `FILLED` of `length`
    tokens."""

    def check_length(item: Item) -> None:
        count = len(build_prompt(item, tokenizer, length).ids)
        if count < FILLED * length:
            few = f"item {item.id} has {count} prompt tokens, less than {FILLED:.0%} of {length}"
            raise InputError(f"{few}: ask for fewer tokens or take longer items")

    return usable(items, name, check_length)


def usable(items: Sequence[Item], name: str, check: Callable[[Item], object]) -> list[Item]:
    """The items for which `check` raises no InputError; prints how many are left out, and why the first of them is.
    Raises that error if none is left."""
    errors: dict[str, InputError] = {}
    for item in items:
        try:
            check(item)
        except InputError as error:
            errors[item.id] = error
    if errors:
        first = next(iter(errors.values()))
        if len(errors) == len(items):
            raise first
        say_once(f"{name}: {len(errors)} of {len(items)} items left out, the first because: {first}")
    return [item for item in items if item.id not in errors]


@contextmanager
def named(item: Item) -> Iterator[None]:
    """A context in which an InputError's message names the item."""
    try:
        yield
    except InputError as error:
        raise InputError(f"item {item.id}: {error}") from None


def suited(chapter: str, items: str, instead: Mapping[str, str]) -> str:
    """The name of the items that a chapter takes for `items`: another one where `instead` has it, which is printed."""
    if items not in instead:
        return items
    print(f"{chapter}: items {instead[items]!r}, which suit this chapter, in the place of {items!r}")
    return instead[items]


def find_file(path: str | Path) -> Path | None:
    """The file of that name in the working folder, or else in the project, because notebooks run in a folder of their
    own; None if there is none."""
    return next((place / path for place in (Path(), ROOT) if str(path) and (place / path).is_file()), None)


def _tasks(names: str) -> list[str]:
    """The tasks of "domains,needle". Raises InputError for others."""
    from kvrepro.world import world

    groups = {"": world.TASKS, "domains": world.DOMAINS, "long": world.LONG}
    tasks = [task for name in names.split(",") for task in groups.get(name, [name])]
    ensure_known("tinyworld task", tasks, world.EVERY, also=filter(None, groups))
    return list(dict.fromkeys(tasks))


def _tinyworld(names: str, n_items: int | None, seed: int, tokens: int) -> list[Item]:
    from kvrepro.world import world

    tasks = _tasks(names)
    if n_items is None:
        raise InputError("tinyworld has no end: give n_items")
    counts = [n_items // len(tasks) + (i < n_items % len(tasks)) for i in range(len(tasks))]
    return [item for task, n in zip(tasks, counts, strict=True) if n for item in world.sample(task, n, seed, tokens)]


def _longbench(names: str) -> list[Item]:
    """Sets of LongBench from the public archive, which is published as one."""
    paper = names == longbench.PAPER
    sets = longbench.named("qa" if paper else names)
    archive = fetch("longbench/data.zip")
    if not paper:
        return [item for name in sets for item in longbench.items(archive, name)]
    return [
        _item(row, f"{name}-{i:03d}", papers=True)
        for name in sets
        for i, row in enumerate(longbench.rows(archive, name))
        if row["length"] <= longbench.PAPER_WORDS
    ]


def read_jsonl(path: Path, papers: bool = False) -> list[Item]:
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
        raise InputError(f"no file {path}: give a .jsonl, or fetch one (python -m kvrepro.experiment.data list)")
    needed = "answer, and messages or context and question"
    return by_line(path, lambda row, number: _item(row, f"{path.stem}-{number - 1:03d}", papers), needed)


def by_line(path: Path, build: Callable[[dict[str, Any], int], Any], needed: str) -> list[Any]:
    """build(row, line number) of each JSON object of a file; each result must have an `id` of its own.

    needed: what a row must have. Raises InputError as `read_jsonl` does, for whatever `build` raises.
    """
    items: dict[str, Any] = {}
    lines: dict[str, int] = {}  # of each id
    bad: dict[int, str] = {}
    content = path.read_bytes()
    try:
        content.decode()
    except UnicodeDecodeError as error:
        where = f"{path}, line {len(content[: error.start + 1].splitlines())}"
        raise InputError(f"{where}: byte {content[error.start]:#04x} is not UTF-8: save the file as UTF-8") from None
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line, object_pairs_hook=_object)
            if not isinstance(row, dict):
                raise TypeError("not an object")
            item = build(row, number)
            if item.id in items:
                raise ValueError(f"id {item.id!r} is that of line {lines[item.id]}: give each its own")
            items[item.id], lines[item.id] = item, number
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


def _item(row: dict[str, Any], identity: str, papers: bool = False) -> Item:
    """The item of a .jsonl file's row; its id is `identity` where the row has none. papers: unless the row says it."""
    if unknown := next((key for key in row if key not in FIELDS), None):
        raise ValueError(f"unknown field {unknown!r}{suggestion(unknown, FIELDS)}; anything else goes into meta")
    json.dumps(row, ensure_ascii=False).encode()  # half of a surrogate pair can be stored nowhere: a ValueError
    if row.get("form") and not {"messages", "context"} <= row.keys():
        raise ValueError("form says how context and question became messages: give all of them, or leave it out")
    papers = row.get("papers", papers)
    ensure(bool, papers=papers)
    meta, answers = row.get("meta") or {}, answers_of(row, papers)
    if not isinstance(meta, dict):
        raise ValueError(f"meta is {meta!r}, not an object")
    for key in ("answers", "classes"):
        if key in meta and not _are_texts(meta[key]):
            raise ValueError(f"meta: {key} is {meta[key]!r}, not a list of texts")
    counted = meta.get("answers", answers)
    _ensure_filled(counted, papers)
    if answers != counted and answers not in ([", ".join(counted)], *([answer] for answer in counted)):
        raise ValueError(f"answer {answers[0]!r} beside meta's answers, which count instead: leave these out")
    meta = meta | ({"answers": answers} if len(answers) > 1 or _shows_list(answers[0]) else {})
    meta |= _scoring(row, meta, counted)
    name = _name("id", row["id"] if row.get("id") is not None else identity)
    tasks = (*map(row.get, ("task", "domain", "dataset")), meta.get("benchmark"))
    task = _name("task", next((task for task in tasks if task is not None), "items"))
    if "messages" in row:
        spans = _spans(row)
        item = Item(name, task, tuple(row["messages"]), answers[0], spans, meta=meta, papers=papers)
        if not any(row.get(key) for key in ("context", "question", "input", "prompt")):
            return item
        item = replace(item, context=row.get("context"), question=row.get("question"), form=row.get("form", ""))
        if item.form not in ("", *longbench.SETS) or _with_context(item, item.context or "") != (item.messages, spans):
            raise ValueError("context beside messages: give context and question, or messages alone")
        return item  # a row as `kvrepro items` prints it
    question = next((row[key] for key in ("question", "input", "prompt") if key in row), None)
    if question is None:
        raise KeyError("question")
    if not isinstance(row["context"], str) or not isinstance(question, str) or not (row["context"] + question).strip():
        raise ValueError("context and question are not texts, or both are empty")
    if row.get("spans"):
        raise ValueError("spans beside context: they are of messages, leave them out or give messages")
    messages, spans = _passage_messages(row["context"], question)
    return Item(name, task, messages, answers[0], spans, row["context"], question, meta, papers=papers)


def _name(field: str, value: object) -> str:
    """An id or a task as every page may show it."""
    if isinstance(value, bool) or not isinstance(value, str | int) or not str(value).strip():
        raise ValueError(f"{field} is {value!r}, not a text")
    return plain(str(value))


def _spans(row: dict[str, Any]) -> Spans:
    """The spans of a row's messages, each within its message."""
    messages, spans = row["messages"], row.get("spans") or ()
    if not isinstance(messages, list) or not all(_is_message(message) for message in messages):
        raise ValueError("messages is not a list of {role, content}, both texts")
    for message in messages:
        ensure(ROLES, role=message["role"])
    if not any(message["content"].strip() for message in messages):
        raise ValueError("messages hold no text")
    named = {"name", "message", "start", "end"}
    if not isinstance(spans, list | tuple) or not all(isinstance(s, dict) and s.keys() == named for s in spans):
        raise ValueError("spans is not a list of {name, message, start, end}")
    for span in spans:
        name = f"span {span['name']!r}"
        ensure(str, **{"name of a span": span["name"]})
        ensure(Annotated[int, Ge(0), Lt(len(messages))], name, message=span["message"])
        ensure(Annotated[int, Ge(1), Le(len(messages[span["message"]]["content"]))], name, end=span["end"])
        ensure(Annotated[int, Ge(0), Lt(span["end"])], name, start=span["start"])
    return tuple(Span(**span) for span in spans)


def answers_of(row: dict[str, Any], papers: bool = False) -> list[str]:
    """The answers that a row counts as right, at least one. Raises ValueError for what is none, KeyError without any.
    papers: the row is of a paper's set."""
    if "answer" in row and "answers" in row:
        raise ValueError("answer and answers: give one of them")
    answers = row.get("answers", row.get("answer"))
    if answers is None:
        raise KeyError("answer")
    if isinstance(answers, str):
        if _shows_list(answers):  # as spreadsheets write it
            raise ValueError(f"answer {answers!r} is the text of a list: give the list itself, or [this text]")
        answers = [answers]
    if not _are_texts(answers):
        raise ValueError(f"answer is {answers!r}, not a text or a list of texts")
    _ensure_filled(answers, papers)
    return answers


def _shows_list(text: str) -> bool:
    """Does a text look like a list of Python?"""
    with suppress(ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return isinstance(ast.literal_eval(text.strip()), list)
    return False


def _ensure_filled(answers: list[str], papers: bool) -> None:
    """Raise ValueError for an empty answer, which an empty output would equal; of papers' sets only if all are."""
    filled = [bool(answer.strip()) if papers else measure.says_something(answer) for answer in answers]
    if not (any if papers else all)(filled):
        which = "" if papers else ", nor without their punctuation"
        raise ValueError(f"answer is {answers[filled.index(False)]!r}: give texts that are not empty{which}")


def _scoring(row: dict[str, Any], meta: dict[str, Any], answers: list[str]) -> dict[str, Any]:
    """A row's answer length, metric and labels, which may stand in its meta. Raises ValueError where the metric could
    only score the answers wrongly."""
    given: dict[str, Any] = {key: meta[key] for key in ("max_new_tokens", "metric", "classes") if key in meta}
    given |= {key: row[key] for key in ("max_new_tokens", "metric") if row.get(key) is not None}
    metric = given.get("metric")
    ensure(Size | None, max_new_tokens=given.get("max_new_tokens"))
    ensure((*measure.METRICS, None), metric=metric)
    if metric == "classification":
        labels: Any = given.setdefault("classes", row.get("all_classes"))
        if not _are_texts(labels):
            raise ValueError("metric 'classification' needs all_classes, the list of all labels, which are texts")
        if not set(answers) & set(labels):
            raise ValueError(f"answer {answers[0]!r} is none of all_classes, the list of all labels")
    form, takes = ANSWERS.get(metric or "", (".*", ""))
    if wrong := [answer for answer in answers if not re.fullmatch(form, answer, re.DOTALL)]:
        raise ValueError(f"answer {wrong[0]!r}: metric {metric!r} takes {takes}")
    if metric in ("qa_f1", "code_similarity") and not any(measure.METRICS[metric](a, [a], ()) for a in answers):
        raise ValueError(f"answer {answers[0]!r} scores 0 by metric {metric!r} even where a model gives it exactly")
    return given


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(text, str) for text in value)


def _is_message(message: object) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))


def balanced(items: list[Item], n: int | None, seed: int, name: str = "this") -> list[Item]:
    """n items in file order, spread over tasks as equally as their numbers allow. The seed chooses within a task.
    Raises InputError where there are fewer than n, unless n is `AtMost`."""
    if n is None or n == len(items):
        return items
    if n > len(items):
        if isinstance(n, AtMost):
            taken = f"{len(items)} items, all are" if len(items) > 1 else "one item, which is"
            say_once(f"{name} has {taken} taken")  # a chapter's studies load a file more than once
            return items
        raise InputError(f"n_items is {n} but {name} has {counted(len(items), 'item')}: ask for at most {len(items)}")
    groups: dict[str, list[int]] = {}
    for i, item in enumerate(items):
        groups.setdefault(item.task, []).append(i)
    for task, members in groups.items():
        random.Random(f"{seed} {task}").shuffle(members)
    turns = [members[turn] for turn in range(len(items)) for members in groups.values() if turn < len(members)]
    return [items[i] for i in sorted(turns[:n])]


# ---- prompts


def _passage_messages(context: str, question: str) -> tuple[Messages, Spans]:
    passage, ask = f"Passage: {context}", f"Question: {question}"
    content = f"{passage}\n\n{ask}"
    messages = ({"role": "system", "content": SYSTEM}, {"role": "user", "content": content})
    spans = (
        Span("system", 0, 0, len(SYSTEM)),
        Span("passage", 1, 0, len(passage)),
        Span("question", 1, len(content) - len(ask), len(content)),
    )
    return messages, spans


def _with_context(item: Item, context: str) -> tuple[Messages, Spans]:
    """The item's messages and spans with another text in place of its context."""
    build = partial(longbench.messages, item.form) if item.form else _passage_messages
    return build(context, item.question or "")


def without_passage(item: Item) -> Item:
    """The item with its question only: beside an empty passage, or as its span marks it; without either, all of it."""
    if item.context is not None:
        messages, spans = _with_context(item, "")
        return replace(item, messages=messages, spans=spans, context="")
    span = next((span for span in item.spans if span.name == "question"), None)
    if span is None:
        return item
    question = item.messages[span.message]["content"][span.start : span.end].strip()
    turns = list(item.messages)
    turns[span.message] = turns[span.message] | {"content": question}
    kept_spans = tuple(other for other in item.spans if other.message != span.message)
    question_span = Span("question", span.message, 0, len(question))
    return replace(item, messages=tuple(turns), spans=(*kept_spans, question_span))


def build_prompt(item: Item, tokenizer: Any, limit: int, enable_thinking: bool | None = None) -> Prompt:
    """Token ids of the item's messages with generation prompt, at most `limit`, and its spans as token positions.

    A passage that does not fit keeps its last tokens: budget = limit - tokens(template with empty user turn) -
    tokens(question part) - tokens("Passage: "); the kept tokens are decoded, templated and tokenised again, and what
    still exceeds the limit is cut on the right. No special tokens are added to the template's. Source: the protection
    paper's harness, run_v3_jax.py:410-480. A context of LongBench loses its middle instead, until the prompt fits, and
    five of its sets have no template but the tokenizer's own special tokens before them (its pred.py). InputError if
    an item without passage exceeds the limit, and for a template whose own words the tokenizer does not know.
    enable_thinking: for the template of a model that thinks before it answers; None: as the tokenizer was loaded.
    """
    tokenizer = thinking(tokenizer, enable_thinking)
    if not all(_is_message(message) for message in item.messages):
        raise InputError(f"item {item.id}: messages are {str(item.messages)[:200]}: give {{role, content}}, both texts")
    if not any(message["content"].strip() for message in item.messages):
        raise InputError(f"item {item.id} is empty: its messages hold no text")
    messages, spans, _ = _fitted(item, tokenizer, limit)
    text, plain = _text(item, tokenizer, messages), _without_template(item)
    encoded = tokenizer(text, add_special_tokens=plain, return_offsets_mapping=True)
    ids, offsets = list(encoded["input_ids"]), encoded["offset_mapping"]
    if item.context is None and len(ids) > limit:
        way_out = "raise the limit or take shorter items"
        raise InputError(f"item {item.id} has {len(ids)} prompt tokens > limit {limit}: {way_out}")
    starts = _starts(item.id, text, messages)
    contents = [(at, at + len(message["content"])) for at, message in zip(starts, messages, strict=True)]
    _ensure_known(tokenizer, text, ids, offsets, contents)
    positions = _positions(starts, spans, offsets[:limit])
    return Prompt(ids[:limit], positions, _turns(tokenizer, text, messages, offsets[:limit]))


def tokens_cut(item: Item, tokenizer: Any, limit: int) -> int:
    """Tokens that `build_prompt` takes from the item's passage to meet `limit`."""
    return _fitted(item, tokenizer, limit)[2]


def _fitted(item: Item, tokenizer: Any, limit: int) -> tuple[Messages, Spans, int]:
    """The item's messages and spans with its passage cut to the limit, and the number of tokens cut."""
    messages, spans, cut = item.messages, item.spans, 0
    if item.context is not None:
        messages, spans, cut = _cut(item, item.context, tokenizer, limit)
    return *_for_template(tokenizer, messages, spans), cut


def _cut(item: Item, passage: str, tokenizer: Any, limit: int) -> tuple[Messages, Spans, int]:
    """`_fitted` for an item with a passage, before the turns are adapted to the template (`_for_template`)."""
    context = _encode(tokenizer, passage)
    if not item.form:
        budget = _passage_budget(item, tokenizer, limit)
        if len(context) <= budget:
            return item.messages, item.spans, 0
        return *_with_context(item, tokenizer.decode(context[-budget:])), len(context) - budget
    kept = min(len(context), limit - limit % 2)
    while True:
        whole = kept == len(context)
        text = passage if whole else "".join(map(tokenizer.decode, longbench.halves(context, kept)))
        messages, spans = _with_context(item, text)
        ids = tokenizer(_text(item, tokenizer, messages), add_special_tokens=_without_template(item))["input_ids"]
        over = len(ids) - limit
        if over <= 0:
            return messages, spans, len(context) - kept
        others = len(ids) - kept
        kept -= over + (kept - over) % 2
        if kept < 2:
            why = f"limit {limit} leaves no room for its context beside {others} other tokens"
            raise InputError(f"item {item.id}: {why}: raise the limit")


def _for_template(tokenizer: Any, messages: Messages, spans: Spans) -> tuple[Messages, Spans]:
    """Messages and spans as the chat template takes them. Where it refuses a system turn, that turn's text is put
    before the user's, which is printed once."""
    opened = [message["role"] for message in messages[:2]] == ["system", "user"]
    if not opened or _template_takes(tokenizer, "system", "user") or not _template_takes(tokenizer, "user"):
        return messages, spans
    whose = Path(tokenizer.name_or_path).name
    say_once(f"the chat template of {whose} takes no turn of the system: its text opens the user's")
    system, user, *others = messages
    opening = f"{system['content']}\n\n"
    moved = []
    for span in spans:
        shift = len(opening) if span.message == 1 else 0
        moved.append(Span(span.name, max(0, span.message - 1), span.start + shift, span.end + shift))
    return (user | {"content": opening + user["content"]}, *others), tuple(moved)


def _template_takes(tokenizer: Any, *roles: str) -> bool:
    """Does the chat template take turns of these roles?"""
    try:
        _render(tokenizer, tuple({"role": role, "content": "Yes."} for role in roles))
    except InputError:
        return False
    return True


def _without_template(item: Item) -> bool:
    """Whether the prompt is the message alone, without a template."""
    return bool(item.form) and longbench.SETS[item.form].plain


def _text(item: Item, tokenizer: Any, messages: Messages) -> str:
    with named(item):
        return messages[0]["content"] if _without_template(item) else _render(tokenizer, messages)


def _passage_budget(item: Item, tokenizer: Any, limit: int) -> int:
    empty_user, _ = _for_template(
        tokenizer, ({"role": "system", "content": SYSTEM}, {"role": "user", "content": ""}), ()
    )
    parts = (_render(tokenizer, empty_user), f"\n\nQuestion: {item.question}", "Passage: ")
    others = sum(len(_encode(tokenizer, part)) for part in parts)
    if limit <= others:
        why = f"limit {limit} leaves no room for the passage beside {others} other tokens"
        raise InputError(f"item {item.id}: {why}: raise the limit")
    return limit - others


def _encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _render(tokenizer: Any, messages: Messages) -> str:
    if tokenizer.chat_template is None:
        way_out = "use an instruction-tuned checkpoint"
        raise InputError(f"tokenizer {tokenizer.name_or_path} has no chat template: {way_out}")
    try:
        return rendered(tokenizer, messages)
    except Exception as error:  # a template is a program
        why = f"the chat template of {tokenizer.name_or_path} refuses the messages ({first_line(error)})"
        raise InputError(f"{why}: give it roles, in an order, that it takes") from None


def _turns(tokenizer: Any, text: str, messages: Sequence[dict[str, Any]], offsets: Sequence[Range]) -> dict[str, int]:
    """First token of the first turn of each role, its header included; left out are turns that the template hides, and
    those before which it writes nothing, such as the user's where it refuses the system's alone (Qwen3.5)."""
    turns: dict[str, int] = {}
    for i, message in enumerate(messages):
        try:
            before = "" if i == 0 else rendered(tokenizer, messages[:i], answer=False)
        except Exception:
            continue
        first = next((at for at, (a, b) in enumerate(offsets) if a >= len(before) and b > a), None)
        if text.startswith(before) and first is not None:
            turns.setdefault(message["role"], first)
    return turns


def _starts(identity: str, text: str, messages: Sequence[dict[str, Any]]) -> list[int]:
    """Where each message's content begins in the rendered text; templates may trim it, so both forms are looked for."""
    starts, cursor = [], 0
    for message in messages:
        content = message["content"]
        at = text.find(content, cursor)
        if at < 0:
            at = text.find(content.strip(), cursor)
            if at < 0:
                what = f"the chat template rewrites or moves a {message['role']} message, and spans are lost"
                raise InputError(f"item {identity}: {what}: give turns that it writes as they are")
            at -= len(content) - len(content.lstrip())
        starts.append(at)
        cursor = at + len(content.rstrip())
    return starts


def _ensure_known(
    tokenizer: Any, text: str, ids: Sequence[int], offsets: Sequence[Range], contents: Sequence[Range]
) -> None:
    """Raise InputError where the template's own words, not those of `contents`, become unknown tokens.

    A template may write the unknown token itself, because some tokenizers use it for another purpose as well.
    """
    unknown = tokenizer.unk_token_id
    for token, (a, b) in zip(ids, offsets, strict=True):
        if token != unknown or a == b or text[a:b].strip() == tokenizer.unk_token:
            continue
        if not any(a < last and b > first for first, last in contents):
            raise InputError(
                f"the chat template of {tokenizer.name_or_path} writes {text[a:b]!r}, which its tokenizer does not "
                f"know ({tokenizer.unk_token}): give it its own template, or the messages roles that it knows"
            )


def _positions(starts: Sequence[int], spans: Sequence[Span], offsets: Sequence[Range]) -> dict[str, list[int]]:
    """Token positions whose characters touch each span. starts: where the messages' contents begin in the text."""
    positions: dict[str, set[int]] = {}
    begins, ends = np.asarray(offsets).reshape(-1, 2).T
    for span in spans:
        first, last = starts[span.message] + span.start, starts[span.message] + span.end
        touching = (begins < last) & (ends > first) & (ends > begins)
        positions.setdefault(span.name, set()).update(np.flatnonzero(touching).tolist())
    return {name: sorted(touched) for name, touched in positions.items()}


# ---- public data


def sources() -> dict[str, dict[str, Any]]:
    """The manifest: source name -> title, url, commit, licence, citation, files {path: {bytes, sha256}}."""
    return dict(yaml.safe_load(SOURCES.read_text(encoding="utf-8")))


def fetch(name: str) -> Path:
    """The verified local path of a public file ("artifact/data/longbench-balanced.jsonl", or the end of its path where
    that is unique), or the folder of a whole source ("artifact").

    Looks into the folders of $KVREPRO_DATA (read only), the cache of Hugging Face, then data/cache, else downloads.
    Raises InputError when there is no network, and for a file with another size or checksum, which stays as it is.
    """
    manifest = sources()
    if name in manifest:
        source, paths = name, list(manifest[name]["files"])
    else:
        matches = [(s, p) for s in manifest for p in manifest[s]["files"] if f"/{s}/{p}".endswith(f"/{name}")]
        if len(matches) != 1:
            what = "is not in" if not matches else f"names {len(matches)} files of"
            raise InputError(f"'{name}' {what} data/sources.yml: see python -m kvrepro.experiment.data list")
        source, paths = matches[0][0], [matches[0][1]]
    own_folders = [Path(folder) for folder in os.environ.get("KVREPRO_DATA", "").split(os.pathsep) if folder]
    folders = [place for folder in own_folders for place in (folder, folder / source)]
    folders += _in_hub_cache(manifest[source]["url"])
    folder = next((f for f in folders if all((f / path).is_file() for path in paths)), CACHE / source)
    for path in paths:
        file, entry = folder / path, manifest[source]["files"][path]
        if not file.is_file():
            _download(manifest[source]["url"].format(path=path), file, entry, f"{source}/{path}")
        _check(file, entry, f"remove it and run: python -m kvrepro.experiment.data fetch {source}/{path}")
    return folder if name in manifest else folder / paths[0]


def _in_hub_cache(url: str) -> list[Path]:
    """The folder, if any, where Hugging Face's own programs keep the files that they fetched from an address."""
    match = re.match(r"https://huggingface\.co/datasets/([^/]+)/([^/]+)/resolve/([0-9a-f]{40})/", url)
    if not match:
        return []
    from huggingface_hub.constants import HF_HUB_CACHE

    return [Path(HF_HUB_CACHE) / f"datasets--{match[1]}--{match[2]}" / "snapshots" / match[3]]


def _check(file: Path, entry: dict[str, Any], way_out: str) -> None:
    size = file.stat().st_size
    if size != entry["bytes"]:
        raise InputError(f"{file} has {size} of {entry['bytes']} bytes: {way_out}")
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != entry["sha256"]:
        raise InputError(f"{file} has sha256 {digest[:12]}..., expected {entry['sha256'][:12]}...: {way_out}")


def _download(url: str, file: Path, entry: dict[str, Any], name: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        with replaced(file) as part:  # never under the final name until it is whole and right
            with urllib.request.urlopen(url, timeout=30) as reply, part.open("wb") as out:
                shutil.copyfileobj(reply, out)
            _check(part, entry, "the download is not the file of the manifest; try again")
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        way_out = f"connect to the network, or set KVREPRO_DATA to a folder that holds it as {name}"
        raise InputError(f"cannot download {url} ({reason}): {way_out}") from None


# ---- command line


def main() -> None:
    import typer

    purpose = "Public data: what the manifest names, and fetching it."
    app = typer.Typer(add_completion=False, no_args_is_help=True, help=purpose)

    @app.command("list")
    def list_() -> None:
        """Print every source with its files, sizes and checksums."""
        for name, source in sources().items():
            total = sum(entry["bytes"] for entry in source["files"].values())
            print(f"{name}: {source['title']}")
            print(f"  {len(source['files'])} files, {total / 1e6:.1f} MB, commit {source['commit']}")
            print(f"  licence: {source['licence']}\n  cite: {source['citation']}\n  from: {source['url']}")
            for path, entry in source["files"].items():
                print(f"  {name}/{path}  {entry['bytes']}  {entry['sha256'][:12]}")

    @app.command("fetch")
    def fetch_(name: str) -> None:
        """Get a source or one file, verify it, print where it lies."""
        print(fetch(name))

    program(app, "kvrepro data")


if __name__ == "__main__":
    main()
