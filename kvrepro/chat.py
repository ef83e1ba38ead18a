"""What a chat template makes of turns, the same on every day."""

import datetime
from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock


class OneDay(datetime.datetime):
    """The day that templates hear of which write the date: the one that Llama 3.1's has by itself."""

    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> "OneDay":
        return cls(2024, 7, 26, tzinfo=tz)


def rendered(tokenizer: Any, turns: Sequence[Mapping[str, Any]], answer: bool = True) -> str:
    """The text of some turns; answer: with what opens the model's own. Raises what the template raises."""
    with mock.patch("transformers.utils.chat_template_utils.datetime", OneDay):  # templates are handed data alone
        return str(tokenizer.apply_chat_template(list(turns), tokenize=False, add_generation_prompt=answer))
