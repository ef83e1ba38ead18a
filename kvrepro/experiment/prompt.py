"""Prompts: an item's messages as token ids, its passage cut to a limit, its spans as token positions.

LongBench's forms are those of Bai et al. 2024, arXiv:2308.14508, and its public code (pred.py, eval.py).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from kvrepro.engine.condition import Prompt
from kvrepro.errors import InputError, first_line
from kvrepro.item import Item, Span, rendered
from kvrepro.paths import DATA

Range = tuple[int, int]  # [start, end) in characters
Messages = tuple[dict[str, Any], ...]
Spans = tuple[Span, ...]
# The paper's system turn asks for a short factual answer from the passage. Its wording is not published; this is ours.
SYSTEM = "Answer the question from the passage. Reply with a short, factual answer only."

say_once = cache(print)


@dataclass(frozen=True)
class Form:
    """One of LongBench's sets. A prompt is `before`, the context, and `after`, in which {} stands for the question."""

    metric: str
    max_new_tokens: int
    before: str
    after: str
    plain: bool = False  # without a chat template, where the model continues examples or code
    first_line: bool = False  # only the first line of an answer counts

    def messages(self, context: str, question: str) -> tuple[Messages, Spans]:
        """One user turn; its spans: `passage`, which ends with the context, and `question`, all that follows it."""
        passage, rest = self.before + context, self.after.replace("{}", question)
        spans = Span("passage", 0, 0, len(passage)), Span("question", 0, len(passage), len(passage) + len(rest))
        return ({"role": "user", "content": passage + rest},), spans


WORDS = DATA / "words" / "longbench.yml"
LONGBENCH = {name: Form(**form) for name, form in yaml.safe_load(WORDS.read_text(encoding="utf-8")).items()}


@contextmanager
def named(item: Item) -> Iterator[None]:
    """A context in which an InputError's message names the item."""
    try:
        yield
    except InputError as error:
        raise InputError(f"item {item.id}: {error}") from None


def passage_messages(context: str, question: str) -> tuple[Messages, Spans]:
    passage, ask = f"Passage: {context}", f"Question: {question}"
    content = f"{passage}\n\n{ask}"
    messages = ({"role": "system", "content": SYSTEM}, {"role": "user", "content": content})
    spans = (
        Span("system", 0, 0, len(SYSTEM)),
        Span("passage", 1, 0, len(passage)),
        Span("question", 1, len(content) - len(ask), len(content)),
    )
    return messages, spans


def with_context(item: Item, context: str) -> tuple[Messages, Spans]:
    """The item's messages and spans with another text in place of its context."""
    build = LONGBENCH[item.form].messages if item.form else passage_messages
    return build(context, item.question or "")


def without_passage(item: Item) -> Item:
    """The item with its question only: beside an empty passage, or as its span marks it; without either, all of it."""
    if item.context is not None:
        messages, spans = with_context(item, "")
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


def build_prompt(item: Item, tokenizer: Any, limit: int) -> Prompt:
    """Token ids of the item's messages with generation prompt, at most `limit`, and its spans as token positions.

    A passage that does not fit keeps its last tokens: budget = limit - tokens(template with empty user turn) -
    tokens(question part) - tokens("Passage: "); the kept tokens are decoded, templated and tokenised again, and what
    still exceeds the limit is cut on the right. No special tokens are added to the template's. Source: the protection
    paper's harness, run_v3_jax.py:410-480. A context of LongBench loses its middle instead, until the prompt fits, and
    five of its sets have no template but the tokenizer's own special tokens before them (its pred.py). InputError if
    an item without passage exceeds the limit.
    """
    if not any(message["content"].strip() for message in item.messages):
        raise InputError(f"item {item.id} is empty: its messages hold no text")
    messages, spans, _ = _cut(item, tokenizer, limit)
    messages, spans = _for_template(tokenizer, messages, spans)
    text, plain = _text(item, tokenizer, messages), _without_template(item)
    encoded = tokenizer(text, add_special_tokens=plain, return_offsets_mapping=True)
    ids, offsets = list(encoded["input_ids"]), encoded["offset_mapping"]
    if item.context is None and len(ids) > limit:
        way_out = "raise the limit or take shorter items"
        raise InputError(f"item {item.id} has {len(ids)} prompt tokens > limit {limit}: {way_out}")
    starts = _starts(item.id, text, messages)
    positions = _positions(starts, spans, offsets[:limit])
    return Prompt(ids[:limit], positions, _turns(tokenizer, text, messages, offsets[:limit]))


def tokens_cut(item: Item, tokenizer: Any, limit: int) -> int:
    """Tokens that `build_prompt` takes from the item's passage to meet `limit`."""
    return _cut(item, tokenizer, limit)[2]


def _cut(item: Item, tokenizer: Any, limit: int) -> tuple[Messages, Spans, int]:
    """The item's messages and spans with its passage cut to the limit, and the number of tokens cut."""
    if item.context is None:
        return item.messages, item.spans, 0
    context = _encode(tokenizer, item.context)
    if not item.form:
        budget = _passage_budget(item, tokenizer, limit)
        if len(context) <= budget:
            return item.messages, item.spans, 0
        return *with_context(item, tokenizer.decode(context[-budget:])), len(context) - budget
    kept = min(len(context), limit - limit % 2)
    while True:
        text, half = item.context, kept // 2
        if kept < len(context):
            text = "".join(map(tokenizer.decode, (context[:half], context[len(context) - half :])))
        messages, spans = with_context(item, text)
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
    return bool(item.form) and LONGBENCH[item.form].plain


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


def _positions(starts: Sequence[int], spans: Sequence[Span], offsets: Sequence[Range]) -> dict[str, list[int]]:
    """Token positions whose characters touch each span. starts: where the messages' contents begin in the text."""
    positions: dict[str, set[int]] = {}
    begins, ends = np.asarray(offsets).reshape(-1, 2).T
    for span in spans:
        first, last = starts[span.message] + span.start, starts[span.message] + span.end
        touching = (begins < last) & (ends > first) & (ends > begins)
        positions.setdefault(span.name, set()).update(np.flatnonzero(touching).tolist())
    return {name: sorted(touched) for name, touched in positions.items()}
