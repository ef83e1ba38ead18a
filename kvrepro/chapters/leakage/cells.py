"""Cells: a policy that drops a share of the system turn, with or without a cure, in one of two readings. And the
chapter's settings, with the sizes of its studies."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

from kvrepro.engine import policy
from kvrepro.engine.condition import Condition, Offline, Prompt, ProperShare, Size
from kvrepro.engine.policy import READINGS, Rule
from kvrepro.experiment import data, run
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
# SnapKV's window in the public code, and by its library's default, on prompts of some 200 tokens. The embedded world's
# have 60 to 110, so there both are scaled.
WINDOWS, SCALE = {"as_run": 16, "as_described": 64}, 3 / 8


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
        if not self.ratio:
            return Condition("full", regime=Offline(until="request"))
        fair = SHARED.get(self.variant)
        held = {} if fair else HELD[self.variant]
        as_run = self.reading == "as_run" and self.policy in FAIR_DIFFERS if fair else self.policy in LIBRARY
        reading = "as_run" if as_run else "as_described"
        switches = KVPRESS if self.policy == "snapkv" and not as_run else ()
        before = Offline(until="request", fair=fair, spans=PARTS if fair else ())
        return Condition(self.policy, round(1 - self.ratio, 6), before, reading=reading, switches=switches, **held)

    def on(self, item: Item, text: Prompt) -> Condition:
        """The cell as a condition for one item, whose prompt is `text`.

        A window belongs to the prompt and is the same in every variant: at most what is kept of the prompt. As in the
        public code, its own tokens give way to those that must stay: the newest that there is room for are protected.
        """
        condition = self.condition
        parameters = policy.find(self.policy).parameters if self.ratio else {}
        window = parameters.get("window", 1)
        if not isinstance(window, int) or window <= 1:
            return condition
        if self.policy in ("snapkv", *TWO):
            window = WINDOWS[self.reading if self.policy == "snapkv" else "as_run"]
            window = window if "wording" in item.meta else int(SCALE * window)
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
    chosen = (
        Cell(name, ratio, variant, reading)
        for name in policies
        for variant in variants
        if not (variant in DEBIAS and policy.find(name).across)  # such budgets are known after all layers
        for reading in readings
        if reading == "as_described" or differs(name, variant)
        for ratio in ratios
    )
    return [Cell("full", 0.0), *chosen]


# ---------------------------------------------------------------- settings

TENTHS = tuple(i / 10 for i in range(1, 10))
MILD = TENTHS[2:7]
# System prompts of the main study, in both orders; of those without a defense, with one rule and with several; of
# labelled examples; and requests whose time is taken.
SIZES = {
    "quick": {"main": 16, "single": 48, "multi": 20, "examples": 6, "timing": 6},
    "full": {"main": 256, "single": 96, "multi": 96, "examples": 300, "timing": 48},
}
# Shares that are dropped: without a cure; with the cures of the paper's policies and of a reader's own; with the first
# sentence of the defense kept; and at the first policy's settings between default and fair.
RATIOS = {
    "quick": {"default": TENTHS[::2], "cures": MILD[::2], "opening": (0.5,), "dial": (0.1, *MILD[::2])},
    "full": {"default": TENTHS, "cures": TENTHS, "opening": MILD, "dial": TENTHS},
}


@dataclass(frozen=True)
class Settings(run.Settings):
    """Settings of the leakage chapter; the profile decides those that are None."""

    items: str = "tinyworld"  #: or "ifeval", for models of English, which is also taken for any other items
    policies: tuple[str, ...] = (*FIVE, *TWO)  #: of the catalogue, or a reader's own
    ratios: tuple[ProperShare, ...] | None = None  #: shares of the system turn that are dropped
    reading: Literal["both", "as_run", "as_described"] = "both"  #: the authors' code, or their text
    max_new_tokens: Size | None = None  #: of an answer; None: 128, in the full profile the paper's 1,280
    compare: str = ""  #: a second checkpoint, which answers the prompts of the main study
    words: Literal[1000, 2000, 3000] = 1000  #: of TREC's contexts, from so many to a thousand more: the paper's classes

    def __post_init__(self) -> None:
        super().__post_init__()
        kind = self.items.partition(":")[0]
        if (suits := kind if kind in ("tinyworld", "ifeval") else "ifeval") != self.items:
            data.check_items(self.items, self.n_items)
            print(f"leakage: items {suits!r}, which suit this chapter, in the place of {self.items!r}")
            object.__setattr__(self, "items", suits)

    def ensure_runs(self, policy: str) -> None:
        """Raise InputError for a policy that no cell can be run with."""
        Rule.of(Cell(policy, 0.5).condition)

    @property
    def readings(self) -> tuple[str, ...]:
        """The readings that are judged. Figures show the last one."""
        return tuple(READINGS) if self.reading == "both" else (self.reading,)

    @property
    def main(self) -> list[str]:
        """The policies of every study: the paper's five and the reader's own, or all if none of these was named."""
        return [name for name in self.policies if name in FIVE or policy.is_own(name)] or list(self.policies)

    @property
    def tokens(self) -> int:
        """Tokens of an answer, at most."""
        return self.max_new_tokens or {"quick": 128, "full": 1280}[self.profile]

    def size(self, study: str) -> int:
        """How many of `SIZES` a study takes; `n_items`, of the main study, caps the others."""
        usual = SIZES[self.profile][study]
        asked = self.n_items or usual
        return asked if study == "main" else min(asked, usual)

    def dropped(self, cells: str) -> tuple[float, ...]:
        """The shares of `RATIOS` at which cells are run, or those of the settings, of which the middle one is for
        "opening"."""
        if not self.ratios:
            return RATIOS[self.profile][cells]
        ratios = tuple(sorted(self.ratios))
        return ratios[len(ratios) // 2 :][:1] if cells == "opening" else ratios
