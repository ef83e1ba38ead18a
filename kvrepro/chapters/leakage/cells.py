"""Cells: a policy that drops a share of the system turn, with or without a cure, in one of two readings."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from kvrepro.engine import policy
from kvrepro.engine.condition import Condition, Offline, Prompt
from kvrepro.experiment.claims import READINGS
from kvrepro.item import Item

ORDERS = ("normal", "flipped")  # the defense before the directive, and after it
PARTS = ("defense", "directive")
FIVE = ("streaming_llm", "h2o", "k_norm", "snapkv", "tova")  # the paper's
TWO = ("defensive_kv", "dropkv")  # not in the paper
LAMBDAS = (0.2, 0.4, 0.6, 0.8)  # between default (0) and fair (1)
DEBIAS = tuple(f"debias {x:g}" for x in LAMBDAS)
SHARED: dict[str, float] = {"fair": 1.0, **dict(zip(DEBIAS, LAMBDAS, strict=True))}  # variants that share the budget
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
    policies: Iterable[str], ratios: Iterable[float], variants: Iterable[str] = ("default",),
    readings: Iterable[str] = READINGS[1:],
) -> list[Cell]:  # fmt: skip
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
