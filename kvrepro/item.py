"""What an item is: one question to a model. And what a name may hold that pages show."""

import re
from dataclasses import dataclass, field

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
    """One question to a model: chat messages, gold answer, named spans.

    `context` and `question` are set where a passage may be cut to the prompt's length. `form` says how the two become
    messages: "" as in the protection paper, otherwise as in the set of LongBench that it names (see `build_prompt`).
    `task` groups the items of a per-domain table. `meta` holds what a checker needs: `answers` (all references),
    `metric` (a name of `kvrepro.experiment.measure.METRICS`), `classes` (all labels), `max_new_tokens` (of the answer).
    `papers`: it is of a set of this project or of a paper, and its answers are scored exactly as the papers do. Answers
    to readers' own items are compared in any script, and none of these may be empty.
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
    papers: bool = False

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
