"""Which conditions the chapter runs: small functions that return lists of `Condition` without duplicates.

The model reads a prompt once for a whole list, so the chapter runs all its grids as one, and figures share one table.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from kvrepro.engine.condition import Condition, DecodeCap, SharedCap, ensure, ensure_once_each
from kvrepro.engine.policy import READINGS, check, find
from kvrepro.experiment.data import AtMost

# The paper's Table 3.
PROTECTION_SEVEN = (
    "lru", "h2o_simple", "snapkv_simple", "slw", "ada_kv_simple", "quest_simple", "random_sample",
)  # fmt: skip
FAITHFUL = ("h2o_faithful", "snapkv_faithful", "ada_kv_faithful", "quest_faithful")
SWEEP = (0.0, 0.5, 1.0, 1.5, 2.0)  # in units of the protected fraction: 0, 5, 10, 15, 20%
SIDES = ((1, 0), (0, 1), (2, 0), (0, 2), (1, 1))  # prefix and suffix in the same units; the last three match in budget


class Size(NamedTuple):
    """How many items each study of the chapter takes."""

    items: int
    context: int  # per prompt length
    attention: int


SIZES = {  # quick: five for each of the eight tasks; full: sixty, three times the paper's main panel
    "quick": Size(40, 8, 16),
    "full": Size(480, 160, 32),
}


def size(profile: str, n_items: int | None = None) -> Size:
    """The profile's size; `n_items` sets the main study, and fewer items than usual shrink the others with it."""
    sizes = SIZES[profile]
    if n_items is None:
        return Size(*map(AtMost, sizes))
    part = min(1.0, n_items / sizes.items)
    return Size(n_items, *(math.ceil(n * part) for n in sizes[1:]))


def readings(reading: str, policy: str = "lru") -> list[str]:
    """A policy's readings among those asked for ("both", or one by its name); where it has none of them, its last."""
    ensure(("both", *READINGS), reading=reading)
    existing = READINGS if find(policy).shared else find(policy).readings
    return list(existing) if reading == "both" else [reading if reading in existing else existing[-1]]


def capped(policy: str, capacity: int, prefix: float, suffix: float, reading: str) -> Condition:
    """A policy under the cap: it keeps one set of tokens for all layers if it is made for that, else one per layer."""
    regime = SharedCap() if find(policy).shared else DecodeCap()
    return Condition(policy, capacity, regime, prefix=prefix, suffix=suffix, reading=reading)


def main(capacities: Sequence[int], policies: Sequence[str], protect_frac: float, reading: str) -> list[Condition]:
    """Full cache, then every policy at every capacity, unprotected and protected at both ends."""
    return [Condition()] + [
        capped(policy, capacity, side, side, policy_reading)
        for policy in policies
        for policy_reading in readings(reading, policy)
        for capacity in capacities
        for side in (0.0, protect_frac)
    ]


def sided(parts: Iterable[tuple[float, float]], capacity: int, frac: float, reading: str) -> list[Condition]:
    """LRU with prefixes and suffixes that are given in units of the protected fraction."""
    return [
        capped("lru", capacity, round(prefix * frac, 6), round(suffix * frac, 6), lru_reading)
        for lru_reading in readings(reading)
        for prefix, suffix in parts
    ]


def faithful(capacity: int, protect_frac: float, reading: str) -> list[Condition]:
    """The faithful implementations, unprotected and protected, and a suffix pinned to the prompt."""
    conditions = main([capacity], FAITHFUL, protect_frac, reading)
    for name in readings(reading):
        pinned = replace(capped("ada_kv_faithful", capacity, protect_frac, protect_frac, name), static_suffix=True)
        conditions.append(pinned)
        if name == "as_described":  # the code's LRU has no such suffix
            conditions.append(replace(pinned, policy="lru"))
    return conditions


def protection(
    capacities: Sequence[int] = (128, 256, 512),
    policies: Sequence[str] = PROTECTION_SEVEN,
    protect_frac: float = 0.10,
    reading: str = "both",
) -> list[Condition]:
    """All conditions of the protection chapter, each once; extra studies at the middle capacity. Raises InputError for
    parameters that make an impossible condition."""
    ensure_once_each(capacities=capacities, policies=policies)
    middle = sorted(capacities)[len(capacities) // 2]
    conditions = main(capacities, policies, protect_frac, reading)
    conditions += sided([(k, k) for k in SWEEP], middle, protect_frac, reading)
    conditions += sided(SIDES, middle, protect_frac, reading)
    conditions += faithful(middle, protect_frac, reading)
    for capacity in sorted(capacities):  # guards of as many tokens as at the middle one, where no rounding moves them
        if (k := middle / capacity) in (0.5, 2.0):
            conditions += sided([(k, k)], capacity, protect_frac, reading)
    conditions = list(dict.fromkeys(conditions))
    for condition in conditions:
        check(condition)
    return conditions


def context(tokens: int, protect_frac: float = 0.10, reading: str = "both") -> list[Condition]:
    """Conditions of one prompt length: the full cache, and an eighth of it (the paper's share at 8K, 32K)."""
    return main([tokens // 8], ("lru", "h2o_simple", "random_sample"), protect_frac, reading)
