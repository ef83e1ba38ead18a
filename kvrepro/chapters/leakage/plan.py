"""The plan of a run of the leakage chapter: its prompts and policies, and the size of each study."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from kvrepro.chapters.leakage.cells import FIVE, TWO, Cell
from kvrepro.chapters.leakage.english import Wording, wording
from kvrepro.chapters.leakage.prompts import suited
from kvrepro.chapters.leakage.settings import Settings
from kvrepro.engine import policy
from kvrepro.engine.allowed import ProperShare, Size, ensure_fields, ensure_once_each
from kvrepro.engine.rule import Rule
from kvrepro.errors import InputError


@dataclass(frozen=True)
class Sizes:
    """The sizes of the studies."""

    systems: int  # system prompts of the main study, in both orders
    singles: int  # system prompts without a defense, with one rule, for the curves by class
    several: int  # the same with two to five rules
    examples: int  # system prompts of labelled examples
    marks: int  # system prompts whose spans are marked in other ways, or that lack the preamble
    timed: int  # requests whose time is taken
    repeats: int  # of each time that is taken
    tokens: int  # of an answer, at most
    ratios: tuple[float, ...]  # at which the default is run
    varied: tuple[float, ...]  # at which the variants of the paper's policies and of the reader's own are run
    rest: tuple[float, ...]  # at which all other variants are run
    dial: tuple[float, ...]  # at which the first policy's settings between default and fair are run


TENTHS = tuple(i / 10 for i in range(1, 10))
MILD = TENTHS[2:7]
PROFILES = {
    "quick": Sizes(16, 48, 20, 6, 6, 6, 2, 128, TENTHS[::2], MILD[::2], (0.5,), (0.1, *MILD[::2])),
    "full": Sizes(256, 96, 96, 300, 32, 48, 10, 1280, TENTHS, TENTHS, MILD, TENTHS),
}


@dataclass(frozen=True)
class ChapterPlan:
    """The notebook's parameters. Raises InputError for what cannot be run."""

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
        if self.items.endswith(".jsonl"):
            print(f"leakage: the system turns of {self.items} are taken as the directives to keep secret")
        ensure_once_each(policies=self.policies, **{} if self.ratios is None else {"ratios": self.ratios})
        for name in self.policies:
            if name == "full":
                raise InputError("policy full is run in any case: name policies that evict")
            Rule.of(Cell(name, 0.5).condition)

    @cached_property
    def wording(self) -> Wording:
        """The wording of the defense for system prompts in English."""
        return wording(self.settings.wording)

    @property
    def main(self) -> list[str]:
        """The policies of every study: the paper's five and the reader's own, or all if none of these was named."""
        return [name for name in self.policies if name in FIVE or policy.is_own(name)] or list(self.policies)

    @property
    def sizes(self) -> Sizes:
        """The profile's sizes, changed by the parameters and settings."""
        sizes = PROFILES[self.settings.profile]
        if self.ratios is not None:
            ratios = tuple(sorted(self.ratios))
            sizes = replace(sizes, ratios=ratios, varied=ratios, rest=ratios[len(ratios) // 2 :][:1], dial=ratios)
        if self.n_items is not None:
            others = ("singles", "several", "examples", "marks", "timed")
            capped = {name: min(self.n_items, getattr(sizes, name)) for name in others}
            sizes = replace(sizes, systems=self.n_items, **capped)
        return replace(sizes, tokens=self.settings.max_new_tokens or sizes.tokens)
