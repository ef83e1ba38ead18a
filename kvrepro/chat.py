"""Text of a chat template, the same on every day."""

import copy
import datetime
from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

from kvrepro.engine.condition import ensure
from kvrepro.errors import InputError


class OneDay(datetime.datetime):
    """The date for templates that write one: the day that Llama 3.1's template has by default."""

    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> "OneDay":
        return cls(2024, 7, 26, tzinfo=tz)


def rendered(tokenizer: Any, turns: Sequence[Mapping[str, Any]], answer: bool = True) -> str:
    """The text of some turns, with the words that open the model's `answer`. Raises what the template raises."""
    with mock.patch("transformers.utils.chat_template_utils.datetime", OneDay):  # a template cannot be given a date
        more = {name: value for name, value in [("enable_thinking", thinks(tokenizer))] if value is not None}
        return str(tokenizer.apply_chat_template(list(turns), tokenize=False, add_generation_prompt=answer, **more))


def thinks(tokenizer: Any) -> bool | None:
    """What the tokenizer's chat template gets as `enable_thinking`; None: nothing, so that it does what it usually
    does."""
    value: bool | None = getattr(tokenizer, "enable_thinking", None)
    return value


def thinking(tokenizer: Any, enable: bool | None) -> Any:
    """The tokenizer, or, unless `enable` is None, a copy whose chat template gets it as `enable_thinking`. Raises
    InputError for a template that has no such switch (Qwen3's and SmolLM3's have)."""
    ensure(bool | None, enable_thinking=enable)
    if enable is None or enable == thinks(tokenizer):
        return tokenizer
    if "enable_thinking" not in str(tokenizer.chat_template):
        what = f"the chat template of {tokenizer.name_or_path} has no such switch"
        raise InputError(f"enable_thinking {enable}: {what}: leave it out")
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
