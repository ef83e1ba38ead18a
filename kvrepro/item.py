"""What an item is: one question to a model; the text of its chat, the same on every day; names that pages may show."""

import copy
import datetime
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from kvrepro.errors import InputError

MARKUP = {ord(sign): ord(sign) + 0xFEE0 for sign in "<>`${}[]|*\\^~#"}  # signs of HTML and Markdown -> full-width twins
LONGEST = 200  # characters of a name


@dataclass(frozen=True)
class Span:
    """A named stretch of one message, as character offsets into its content."""

    name: str
    message: int
    start: int
    end: int


@dataclass(frozen=True)
class Item:
    """One question to a model: chat messages, gold answer, named spans. `meta` holds what a checker needs: `answers`
    (all references), `metric` (of `measure.METRICS`), `classes` (all labels), `max_new_tokens` (of the answer)."""

    id: str
    task: str  # groups the items of a per-domain table
    messages: tuple[dict, ...]
    answer: str
    spans: tuple[Span, ...] = ()
    context: str | None = None  # a passage that may be cut to the prompt's length, and its question
    question: str | None = None
    meta: dict = field(default_factory=dict)
    form: str = ""  # of the two as messages: the protection paper's, or that of LongBench's set of this name
    papers: bool = False  # scored exactly as the papers do; answers to readers' own items are compared in any script

    def new_tokens(self, usual: int) -> int:
        """Most tokens of an answer: the item's own number, or the usual one."""
        return int(self.meta.get("max_new_tokens", usual))


def plain(name: str) -> str:
    """A name (of an item, a task, a model) as every page may show it: signs that HTML, Markdown or a formula would
    interpret become their full-width twins, unprintable ones become spaces. Raises ValueError for long names."""
    if len(name) > LONGEST:
        raise ValueError(f"the name {name[:20]!r}... has {len(name):,} characters: give it at most {LONGEST}")
    text = "".join(sign if sign.isprintable() else " " for sign in name).strip().translate(MARKUP)
    odd = r"^[^\w]|^\d+[.)](?=\s)|\b_+|_+\b"  # the begin of a list, a heading, a fence; underscores that stress a word
    return re.sub(odd, lambda match: "".join(chr(ord(c) + 0xFEE0) if "!" <= c <= "~" else c for c in match[0]), text)


ONE_DAY = mock.Mock(now=lambda: datetime.datetime(2024, 7, 26))  # of templates that write one: Llama 3.1's by default


def rendered(tokenizer: Any, turns: Sequence[Mapping[str, Any]], answer: bool = True) -> str:
    """The text of some turns, with the words that open the model's `answer`. Raises what the template raises."""
    more = {} if (enable := thinks(tokenizer)) is None else {"enable_thinking": enable}
    with mock.patch("transformers.utils.chat_template_utils.datetime", ONE_DAY):  # a template cannot be given a date
        return str(tokenizer.apply_chat_template(list(turns), tokenize=False, add_generation_prompt=answer, **more))


def thinks(tokenizer: Any) -> bool | None:
    """What the tokenizer's chat template gets as `enable_thinking`; None: nothing."""
    return getattr(tokenizer, "enable_thinking", None)


def thinking(tokenizer: Any, enable: bool | None) -> Any:
    """The tokenizer, or, unless `enable` is None, a copy whose chat template gets it as `enable_thinking`. Raises
    InputError for a template that has no such switch (Qwen3's and SmolLM3's have)."""
    if enable is None or enable == thinks(tokenizer):
        return tokenizer
    if "enable_thinking" not in str(tokenizer.chat_template):
        raise InputError(f"enable_thinking {enable}: the chat template of {tokenizer.name_or_path} has no such switch")
    changed = copy.copy(tokenizer)
    changed.enable_thinking = enable
    return changed


def without_thinking(text: str, begun: bool = False) -> tuple[str, str | None]:
    """An output without its <think> block, and the block (None without one). Of a block without an end nothing is an
    answer. begun: the prompt has opened the block."""
    block, end, answer = text.rpartition("</think>")
    if not end:
        answer, begin, block = text.partition("<think>")
        if begun:
            return "", text
        return answer, block if begin else None
    return answer, block.lstrip().removeprefix("<think>")


def answer_of(tokenizer: Any, tokens: Sequence[int], prompt: Sequence[int] = ()) -> tuple[str, str | None]:
    """`without_thinking` of generated tokens. prompt: the ids before them, whose template may have opened a block."""
    begun = tokenizer.decode(prompt[-8:]).rstrip().endswith("<think>")
    return without_thinking(tokenizer.decode(tokens, skip_special_tokens=True), begun)
