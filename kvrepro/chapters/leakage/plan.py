"""What a run of the leakage chapter takes: which prompts and policies, and how much of each study."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from kvrepro.chapters.leakage.cells import FIVE, TWO, Cell
from kvrepro.chapters.leakage.english import Wording, wording
from kvrepro.chapters.leakage.prompts import suited
from kvrepro.chapters.leakage.settings import Settings
from kvrepro.engine import policy
from kvrepro.engine.allowed import ProperShare, Size, ensure_fields, ensure_once_each
from kvrepro.errors import InputError


@dataclass(frozen=True)
class Sizes:
    """How much each study takes."""

    systems: int  # system prompts of the main study, in both orders
    singles: int  # without a defense, for the curves by class: prompts with one rule
    several: int  # and with two to five
    examples: int
    marks: int
    timed: int
    repeats: int
    tokens: int  # of an answer
    ratios: tuple[float, ...]  # of the default
    varied: tuple[float, ...]  # of the variants, for the paper's policies and a reader's own
    rest: tuple[float, ...]  # of the variants elsewhere
    dial: tuple[float, ...]  # of the first policy's settings between default and fair


TENTHS = tuple(i / 10 for i in range(1, 10))
MILD = TENTHS[2:7]
PROFILES = {
    "quick": Sizes(16, 48, 20, 6, 6, 6, 2, 128, TENTHS[::2], MILD[::2], (0.5,), (0.1, *MILD[::2])),
    "full": Sizes(256, 96, 96, 300, 32, 48, 10, 1280, TENTHS, TENTHS, MILD, TENTHS),
}


@dataclass(frozen=True)
class ChapterPlan:
    """What the notebook's parameters ask for. Raises InputError for what cannot be run."""

    settings: Settings = Settings()
    items: str = "tinyworld"  # or "ifeval", or a .jsonl file of system prompts: for models of English
    n_items: Size | None = None  # system prompts of the main study, at most of others
    policies: tuple[str, ...] = (*FIVE, *TWO)  # of the catalogue, or a reader's own
    ratios: tuple[ProperShare, ...] | None = None  # shares of the system turn that are dropped
    reading: Literal["both", "as_run", "as_described"] = "both"

    def __post_init__(self) -> None:
        ensure_fields(self, type(self))
        if (suits := suited(self.items)) != self.items:
            print(f"leakage: items {suits!r}, which suit this chapter, in the place of {self.items!r}")
            object.__setattr__(self, "items", suits)
        ensure_once_each(policies=self.policies, **{} if self.ratios is None else {"ratios": self.ratios})
        for name in self.policies:
            if name == "full":
                raise InputError("policy full is run in any case: name policies that evict")
            policy.check(Cell(name, 0.5).condition)

    @cached_property
    def wording(self) -> Wording:
        """Of the defense, for system prompts in English."""
        return wording(self.settings.wording)

    @property
    def main(self) -> list[str]:
        """Those that every study takes: the paper's five and a reader's own, or all where none of these is there."""
        return [name for name in self.policies if name in FIVE or policy.is_own(name)] or list(self.policies)

    @property
    def sizes(self) -> Sizes:
        """The profile's sizes, with what is set."""
        found = PROFILES[self.settings.profile]
        names = ("singles", "several", "examples", "marks", "timed")
        if self.ratios is not None:
            chosen = tuple(sorted(self.ratios))
            found = replace(found, ratios=chosen, varied=chosen, rest=chosen[len(chosen) // 2 :][:1], dial=chosen)
        if self.n_items is not None:
            capped = {one: min(self.n_items, getattr(found, one)) for one in names}
            found = replace(found, systems=self.n_items, **capped)
        own = {one: getattr(self.settings, one) for one in (*names, "repeats")}
        own["tokens"] = self.settings.max_new_tokens
        return replace(found, **{one: value for one, value in own.items() if value is not None})
