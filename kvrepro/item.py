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

    `context` and `question` are set where a passage may be cut to the prompt's length, `form` says how the two become
    messages: "" as the protection paper does, else a set of LongBench (see `build_prompt`). `task` groups the items of
    a per-domain table. `meta` carries what a checker needs: `answers` (all references), `metric` (a name of
    `kvrepro.experiment.measure.METRICS`), `classes` (all labels), `max_new_tokens` (of the answer).
    """

    id: str
    task: str
    messages: tuple[dict, ...]
    answer: str
    spans: tuple[Span, ...] = ()
    context: str | None = None
    question: str | None = None
    meta: dict = field(default_factory=dict)
    form: str = ""

    def new_tokens(self, usual: int) -> int:
        """Most tokens of an answer: the item's own number, or the usual one."""
        return int(self.meta.get("max_new_tokens", usual))
