"""Cells: a policy that drops a share of the system turn, with or without a cure, in one of two readings. And the
chapter's settings, with the sizes of its studies."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Literal

from kvrepro.engine import policy
from kvrepro.engine.condition import Condition, Offline, Prompt, ProperShare, Size, ensure_once_each
from kvrepro.engine.policy import Rule
from kvrepro.errors import InputError
from kvrepro.experiment import data, run
from kvrepro.experiment.claims import READINGS
from kvrepro.item import Item

ORDERS = ("normal", "flipped")  # the defense before the directive, and after it
PARTS = ("defense", "directive")
FIVE = ("streaming_llm", "h2o", "k_norm", "snapkv", "tova")  # the paper's
TWO = ("defensive_kv", "dropkv")  # not in the paper
DIAL = {0.0: "default", **{x: f"debias {x:g}" for x in (0.2, 0.4, 0.6, 0.8)}, 1.0: "fair"}  # λ -> variant
DEBIAS = tuple(DIAL.values())[1:-1]
SHARED = {variant: x for x, variant in DIAL.items() if x}  # variants that share the budget
HELD: dict[str, dict[str, Any]] = {  # the other variants, and what always stays
    "default": {},
    "whitelist": {"whitelist": ("phrase",)},
    "opening": {"whitelist": ("core",)},
    "ends": {"prefix": 0.1, "suffix": 0.1},
}
FAIR_DIFFERS = ("streaming_llm", "h2o", "snapkv", "tova")  # whose fair variant in the public code is not the paper's
LIBRARY = ("snapkv", "tova")  # whose defaults in kvpress, which the paper takes, are the catalogue's "as_run"
# kvpress' SnapKV, for the fair variant "as_described", where the catalogue would give that of SnapKV's paper
KVPRESS = (("aggregate", "mean"), ("pool", "average"), ("kernel", 5), ("group", "mean"), ("pool_at", "head"))
# SnapKV's window is 16 in the public code and 64 by its library's default, on prompts of some 200 tokens. The embedded
# world's have 60 to 110, so both are scaled by 3/8.
WINDOWS = {"embedded": {"as_run": 6, "as_described": 24}, "english": {"as_run": 16, "as_described": 64}}


@dataclass(frozen=True)
class Cell:
    """One point of a curve: a policy that drops `ratio` of the system turn.

    variant: default; whitelist (the defense's prohibition stays), opening (its first sentence stays); fair; debias
    <lambda>; ends (a tenth of the budget protected at either end). reading: decides SnapKV's window (`on`) and the fair
    variant (`differs`). policy: of the catalogue, or the reader's own.
    """

    policy: str
    ratio: float
    variant: str = "default"
    reading: str = "as_described"

    @property
    def condition(self) -> Condition:
        """The cell as a condition of the engine, without the window that a prompt gets (`on`)."""
        before, held = Offline(until="request"), {}
        if not self.ratio:
            return Condition("full", regime=before)
        if self.variant in SHARED:
            before = Offline(until="request", fair=SHARED[self.variant], spans=PARTS)
            reading = self.reading if self.policy in FAIR_DIFFERS else "as_described"
        else:
            held, reading = HELD[self.variant], "as_run" if self.policy in LIBRARY else "as_described"
        switches = KVPRESS if self.policy == "snapkv" and reading == "as_described" else ()
        return Condition(self.policy, round(1 - self.ratio, 6), before, reading=reading, switches=switches, **held)

    def on(self, item: Item, text: Prompt) -> Condition:
        """The cell as a condition for one item, whose prompt is `text`.

        A window belongs to the prompt and is the same in every variant: at most what is kept of the prompt. As in the
        public code, its own tokens give way to those that must stay: the newest that there is room for are protected.
        """
        condition = self.condition
        parameters = {} if condition.policy == "full" else policy.find(self.policy).parameters
        window = parameters.get("window", 1)
        if not isinstance(window, int) or window <= 1:
            return condition
        if self.policy in ("snapkv", *TWO):
            scale = WINDOWS["embedded" if "wording" not in item.meta else "english"]
            window = scale[self.reading if self.policy == "snapkv" else "as_run"]
        n = min(text.spans["request"])
        budget = policy.budget_of(condition, n)
        recent = window = max(1, min(window, budget))
        must_stay = {at for name in condition.whitelist for at in text.spans.get(name, ()) if at < n}
        must_stay |= set(range(policy.guarded(condition, budget, parameters)[0]))
        while recent and len(must_stay | set(range(n - recent, n))) > budget:
            recent -= 1
        switches = (*condition.switches, ("window", window))
        if recent < window and parameters.get("recent") == "window":
            switches = (*switches, ("recent", recent))
        return replace(condition, switches=switches)


def differs(name: str, variant: str) -> bool:
    """Whether a cell differs between the public code and the paper. The dial (debias) has no public code."""
    return variant not in DEBIAS and (name == "snapkv" or (variant == "fair" and name in FAIR_DIFFERS))


def cells(
    policies: Iterable[str],
    ratios: Iterable[float],
    variants: Iterable[str] = ("default",),
    readings: Iterable[str] = READINGS[1:],
) -> list[Cell]:
    """The uncompressed cache, and all combinations that can run; those as run only if they differ from the paper's."""
    ratios = list(ratios)
    chosen = [
        Cell(name, ratio, variant, reading)
        for name in policies
        for variant in variants
        if not (variant in DEBIAS and policy.find(name).across)  # such budgets are known after all layers
        for reading in readings
        for ratio in ratios
        if reading == "as_described" or differs(name, variant)
    ]
    return [Cell("full", 0.0), *chosen]


# ---------------------------------------------------------------- settings

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
