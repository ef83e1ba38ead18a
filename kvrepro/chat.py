"""Text of a chat template, the same on every day."""

import datetime
from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock


class OneDay(datetime.datetime):
    """The date for templates that write one: the day that Llama 3.1's template has by default."""

    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> "OneDay":
        return cls(2024, 7, 26, tzinfo=tz)


def rendered(tokenizer: Any, turns: Sequence[Mapping[str, Any]], answer: bool = True) -> str:
    """The text of some turns, with the words that open the model's `answer`. Raises what the template raises."""
    with mock.patch("transformers.utils.chat_template_utils.datetime", OneDay):  # a template cannot be given a date
        return str(tokenizer.apply_chat_template(list(turns), tokenize=False, add_generation_prompt=answer))
