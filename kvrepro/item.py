"""What an item is: one question to a model."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Span:
    """A named stretch of one message, as character offsets into its content."""

    name: str
    message: int
    start: int
    end: int


@dataclass(frozen=True)
class Item:
    """One question to a model: chat messages, gold answer, named spans.

    `context` and `question` are set when the passage must still be cut to the prompt's length (see `build_prompt`).
    `task` groups the items of a per-domain table; `meta` carries what a checker needs (e.g. `answers`, all references).
    """

    id: str
    task: str
    messages: tuple[dict, ...]
    answer: str
    spans: tuple[Span, ...] = ()
    context: str | None = None
    question: str | None = None
    meta: dict = field(default_factory=dict)
