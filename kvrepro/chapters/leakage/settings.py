"""Settings of the leakage chapter, its notebook's parameters among them, and the sizes of its studies."""

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Literal

from kvrepro.chapters.leakage.cells import FIVE, TWO, Cell
from kvrepro.engine import policy
from kvrepro.engine.condition import ProperShare, Size, ensure_once_each
from kvrepro.engine.policy import Rule
from kvrepro.errors import InputError
from kvrepro.experiment import data, run
from kvrepro.experiment.claims import READINGS

QUESTIONS = ("longbench", "protection-panel", "ruler")  # items of other chapters, without a system prompt to obey


@dataclass(frozen=True)
class Sizes:
    """The sizes of the studies."""

    systems: int  # system prompts of the main study, in both orders
    singles: int  # system prompts without a defense, with one rule
    several: int  # the same with two to five rules
    examples: int  # system prompts of labelled examples
    timed: int  # requests whose time is taken
    repeats: int  # of each time that is taken
    tokens: int  # of an answer, at most
    ratios: tuple[float, ...]  # at which the default is run
    varied: tuple[float, ...]  # at which the cures of the paper's policies and of the reader's own are run
    rest: tuple[float, ...]  # at which all other variants are run
    dial: tuple[float, ...]  # at which the first policy's settings between default and fair are run


TENTHS = tuple(i / 10 for i in range(1, 10))
MILD = TENTHS[2:7]
PROFILES = {
    "quick": Sizes(16, 48, 20, 6, 6, 2, 128, TENTHS[::2], MILD[::2], (0.5,), (0.1, *MILD[::2])),
    "full": Sizes(256, 96, 96, 300, 48, 10, 1280, TENTHS, TENTHS, MILD, TENTHS),
}


@dataclass(frozen=True)
class Settings(run.Settings):
    """Settings of the leakage chapter; the profile decides those that are None."""

    items: str = "tinyworld"  #: or "ifeval", or a .jsonl file of system prompts: for models of English
    policies: tuple[str, ...] = (*FIVE, *TWO)  #: of the catalogue, or a reader's own
    ratios: tuple[ProperShare, ...] | None = None  #: shares of the system turn that are dropped
    reading: Literal["both", "as_run", "as_described"] = "both"  #: the authors' code, or their text
    max_new_tokens: Size | None = None  #: of an answer; None: 128, in the full profile the paper's 1,280
    wording: Literal["paper", "ours"] | None = None  #: of the defense in English; None: the paper's if at hand
    compare: str = ""  #: a second checkpoint, which answers the prompts of the main study
    words: Literal[1000, 2000, 3000] = 1000  #: of TREC's contexts, from so many to a thousand more: the paper's classes

    def __post_init__(self) -> None:
        super().__post_init__()
        if (suits := suited(self.items)) != self.items:
            print(f"leakage: items {suits!r}, which suit this chapter, in the place of {self.items!r}")
            object.__setattr__(self, "items", suits)
        if self.items.endswith(".jsonl"):
            print(f"leakage: the system turns of {self.items} are taken as the directives to keep secret")
        if self.ratios is not None:
            ensure_once_each(ratios=self.ratios)
        for name in self.policies:
            if name == "full":
                raise InputError("policy full is run in any case: name policies that evict")
            Rule.of(Cell(name, 0.5).condition)

    @property
    def readings(self) -> tuple[str, ...]:
        """The readings that are judged. Figures show the last one."""
        return tuple(READINGS) if self.reading == "both" else (self.reading,)

    @property
    def main(self) -> list[str]:
        """The policies of every study: the paper's five and the reader's own, or all if none of these was named."""
        return [name for name in self.policies if name in FIVE or policy.is_own(name)] or list(self.policies)

    @property
    def sizes(self) -> Sizes:
        """The profile's sizes, changed by the other settings."""
        sizes = PROFILES[self.profile]
        if self.ratios is not None:
            ratios = tuple(sorted(self.ratios))
            sizes = replace(sizes, ratios=ratios, varied=ratios, rest=ratios[len(ratios) // 2 :][:1], dial=ratios)
        if self.n_items is not None:
            others = {
                name: min(self.n_items, getattr(sizes, name)) for name in ("singles", "several", "examples", "timed")
            }
            sizes = replace(sizes, systems=self.n_items, **others)
        return replace(sizes, tokens=self.max_new_tokens or sizes.tokens)


def suited(items: str) -> str:
    """The items that this chapter takes when the whole book is run with `items`: "tinyworld", "ifeval", or a .jsonl
    file with a system and a user turn in every row (`prompts.read`). Items without a system prompt are replaced by
    "ifeval". Raises InputError for unknown items."""
    kind = items.partition(":")[0]
    if kind in ("tinyworld", "ifeval"):
        return kind
    if items.endswith(".jsonl") and (path := data.find_file(items)):
        rows = data.by_line(path, _of_row, "messages, or context and question")
        return items if all(row.is_prompt for row in rows) else "ifeval"
    if kind not in QUESTIONS:
        way_out = "use tinyworld, ifeval, or the path of a .jsonl file of system prompts"
        raise InputError(f"unknown items {items!r}: {way_out}")
    return "ifeval"


def _of_row(row: dict, number: int) -> SimpleNamespace:
    """Whether a row holds a system prompt: a system and a user turn, and neither `context` nor `question`."""
    roles, asked = [turn["role"] for turn in row.get("messages") or []], row.get("context") or row.get("question")
    return SimpleNamespace(id=number, is_prompt=roles == ["system", "user"] and not asked)
