"""Prompts: an item's messages as token ids, its passage cut to a limit, its spans as token positions.

LongBench's forms are those of Bai et al. 2024, arXiv:2308.14508, and its public code (pred.py, eval.py).
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
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

Messages = tuple[dict[str, Any], ...]
Spans = tuple[Span, ...]
# The paper's system turn asks for a short factual answer from the passage. Its wording is not published; this is ours.
NO_ROOM = "limit {} leaves no room for the passage beside {} other tokens: raise the limit"
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
    """A context in which a ValueError, such as an InputError, becomes an InputError that names the item."""
    try:
        yield
    except ValueError as error:
        raise InputError(f"item {item.id}: {error}") from None


def passage_messages(context: str, question: str) -> tuple[Messages, Spans]:
    passage, ask = f"Passage: {context}", f"Question: {question}"
    end, asked = len(passage), len(passage) + 2
    messages = {"role": "system", "content": SYSTEM}, {"role": "user", "content": f"{passage}\n\n{ask}"}
    spans = Span("passage", 1, 0, end), Span("question", 1, asked, asked + len(ask))
    return messages, (Span("system", 0, 0, len(SYSTEM)), *spans)


def with_context(item: Item, context: str) -> tuple[Messages, Spans]:
    """The item's messages and spans with another text in place of its context."""
    build = LONGBENCH[item.form].messages if item.form else passage_messages
    return build(context, item.question or "")


def without_passage(item: Item) -> Item:
    """The item with its question only: beside an empty passage, or as its span marks it; without either, all of it."""
    if item.context is not None:
        messages, spans = with_context(item, "")
        return replace(item, messages=messages, spans=spans, context="")
    for span in (span for span in item.spans if span.name == "question"):
        turns = list(item.messages)
        question = turns[span.message]["content"][span.start : span.end].strip()
        turns[span.message] = turns[span.message] | {"content": question}
        others = [other for other in item.spans if other.message != span.message]
        spans = (*others, Span("question", span.message, 0, len(question)))
        return replace(item, messages=tuple(turns), spans=spans)
    return item


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
    with named(item):
        messages, spans, _ = _cut(item, tokenizer, limit)
        text, messages, spans = _render(item, tokenizer, messages, spans)
        turns, starts = _places(tokenizer, text, messages)
    encoded = tokenizer(text, add_special_tokens=_is_plain(item), return_offsets_mapping=True)
    ids, offsets = list(encoded["input_ids"]), encoded["offset_mapping"]
    if item.context is None and len(ids) > limit:
        way_out = "raise the limit or take shorter items"
        raise InputError(f"item {item.id} has {len(ids)} prompt tokens > limit {limit}: {way_out}")
    begins, ends = np.asarray(offsets[:limit]).reshape(-1, 2).T
    marked: dict[str, set[int]] = {}
    for span in spans:  # marked are tokens whose characters touch it
        first, last = starts[span.message] + span.start, starts[span.message] + span.end
        touching = (begins < last) & (ends > first) & (ends > begins)
        marked.setdefault(span.name, set()).update(np.flatnonzero(touching).tolist())
    after = {role: np.flatnonzero((begins >= at) & (ends > begins)).tolist() for role, at in turns.items()}
    opening = {role: positions[0] for role, positions in after.items() if positions}
    return Prompt(ids[:limit], {name: sorted(positions) for name, positions in marked.items()}, opening)


def tokens_cut(item: Item, tokenizer: Any, limit: int) -> int:
    """Tokens that `build_prompt` takes from the item's passage to meet `limit`."""
    return _cut(item, tokenizer, limit)[2]


def _cut(item: Item, tokenizer: Any, limit: int) -> tuple[Messages, Spans, int]:
    """The item's messages and spans with its passage cut to the limit, and the number of tokens cut."""
    if item.context is None:
        return item.messages, item.spans, 0
    context = _encode(tokenizer, item.context)
    if not item.form:
        empty = {"role": "system", "content": SYSTEM}, {"role": "user", "content": ""}
        parts = _render(item, tokenizer, empty)[0], f"\n\nQuestion: {item.question}", "Passage: "
        budget = limit - sum(len(_encode(tokenizer, part)) for part in parts)
        if budget < 1:
            raise InputError(NO_ROOM.format(limit, limit - budget))
        if len(context) <= budget:
            return item.messages, item.spans, 0
        return *with_context(item, tokenizer.decode(context[-budget:])), len(context) - budget
    kept = min(len(context), limit - limit % 2)
    while True:
        text, half = item.context, kept // 2
        if kept < len(context):
            text = "".join(map(tokenizer.decode, (context[:half], context[len(context) - half :])))
        messages, spans = with_context(item, text)
        whole = _encode(tokenizer, _render(item, tokenizer, messages)[0], _is_plain(item))
        over = len(whole) - limit
        if over <= 0:
            return messages, spans, len(context) - kept
        others = len(whole) - kept
        kept -= over + (kept - over) % 2
        if kept < 2:
            raise InputError(NO_ROOM.format(limit, others))


def _is_plain(item: Item) -> bool:
    """Whether the prompt is the message alone, without a template."""
    return bool(item.form) and LONGBENCH[item.form].plain


def _encode(tokenizer: Any, text: str, add_special_tokens: bool = False) -> list[int]:
    return list(tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])


def _render(item: Item, tokenizer: Any, messages: Messages, spans: Spans = ()) -> tuple[str, Messages, Spans]:
    """The text of messages, and messages and spans as the chat template takes them. Where it refuses a system turn, its
    text is put before the user's, which is printed once."""
    if _is_plain(item):
        return messages[0]["content"], messages, spans
    whose = tokenizer.name_or_path
    if tokenizer.chat_template is None:
        raise InputError(f"tokenizer {whose} has no chat template: use an instruction-tuned checkpoint")
    try:
        return rendered(tokenizer, messages), messages, spans
    except Exception as error:  # a template is a program
        if [message["role"] for message in messages[:2]] != ["system", "user"]:
            why = f"the chat template of {whose} refuses the messages ({first_line(error)})"
            raise InputError(f"{why}: give it roles, in an order, that it takes") from None
    system, user, *others = messages
    opening = f"{system['content']}\n\n"
    moved = []
    for span in spans:
        shift = len(opening) if span.message == 1 else 0
        moved.append(Span(span.name, max(0, span.message - 1), span.start + shift, span.end + shift))
    whole = (user | {"content": opening + user["content"]}, *others)
    taken = _render(item, tokenizer, whole, tuple(moved))
    say_once(f"the chat template of {Path(whose).name} takes no turn of the system: its text opens the user's")
    return taken


def _places(tokenizer: Any, text: str, messages: Messages) -> tuple[dict[str, int], list[int]]:
    """Where in the rendered text the first turn of each role begins, with its header, and where each message's content
    does, which templates may trim. Left out are turns that the template hides, and those before which it writes
    nothing, such as the user's where it refuses the system's alone (Qwen3.5)."""
    turns, starts, end = dict[str, int](), [], 0
    for i, message in enumerate(messages):
        with suppress(Exception):  # a template is a program
            before = rendered(tokenizer, messages[:i], answer=False) if i else ""
            if text.startswith(before):
                turns.setdefault(message["role"], len(before))
        content = message["content"]
        at = text.find(content.strip(), end)
        if at < 0:
            what = f"the chat template rewrites or moves a {message['role']} message, and spans are lost"
            raise InputError(f"{what}: give turns that it writes as they are")
        starts.append(at - len(content) + len(content.lstrip()))
        end = at + len(content.strip())
    return turns, starts
