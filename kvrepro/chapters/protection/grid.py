"""Which conditions a chapter runs: small functions that return lists of `Condition`, free of duplicates.

One prefill serves a whole list, so a chapter runs the union of its grids once and every figure reads one table.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from kvrepro.engine.condition import Condition
from kvrepro.engine.policy import check
from kvrepro.engine.regime import SharedCap
from kvrepro.errors import InputError

# The paper's Table 3.
PROTECTION_SEVEN = (
    "lru", "h2o_simple", "snapkv_simple", "slw", "ada_kv_simple", "quest_simple", "random_sample",
)  # fmt: skip
FAITHFUL = ("h2o_faithful", "snapkv_faithful", "ada_kv_faithful", "quest_faithful")
READINGS = ("as_run", "as_described")
SWEEP = (0.0, 0.5, 1.0, 1.5, 2.0)  # in units of the protected fraction: 0, 5, 10, 15, 20%
SIDES = ((1, 0), (0, 1), (2, 0), (0, 2), (1, 1))  # prefix and suffix in the same units; the last three match in budget


@dataclass(frozen=True)
class Size:
    """How many items each study of a chapter takes."""

    items: int
    context: int  # per prompt length
    attention: int


SIZES = {"quick": Size(48, 8, 8), "full": Size(162, 48, 32)}  # six for each of the eight tasks; the paper's main panel


def size(profile: str, n_items: int | None = None) -> Size:
    """The profile's size; `n_items` sets the main study and caps the others."""
    if profile not in SIZES:
        raise InputError(f"unknown profile {profile!r}: choose {' or '.join(SIZES)}")
    found = SIZES[profile]
    return found if n_items is None else Size(n_items, min(n_items, found.context), min(n_items, found.attention))


def readings(reading: str) -> tuple[str, ...]:
    """ "both", or one of the two readings, as a tuple."""
    if reading not in ("both", *READINGS):
        raise InputError(f"unknown reading {reading!r}: choose both, {' or '.join(READINGS)}")
    return READINGS if reading == "both" else (reading,)


def main(capacities: Sequence[int], policies: Sequence[str], protect_frac: float, reading: str) -> list[Condition]:
    """Full cache, then every policy at every capacity, unprotected and protected at both ends."""
    return [Condition()] + [
        Condition(policy, capacity, SharedCap(), prefix=side, suffix=side, reading=one)
        for one in readings(reading)
        for policy in policies
        for capacity in capacities
        for side in (0.0, protect_frac)
    ]


def sensitivity(capacity: int, protect_frac: float, reading: str, policy: str = "lru") -> list[Condition]:
    """Protection from none to twice `protect_frac` per side."""
    return _sided([(k, k) for k in SWEEP], capacity, protect_frac, reading, policy)


def sides(capacity: int, protect_frac: float, reading: str, policy: str = "lru") -> list[Condition]:
    """Prefix only, suffix only, each also with the number of positions that both sides take together."""
    return _sided(SIDES, capacity, protect_frac, reading, policy)


def _sided(
    parts: Iterable[tuple[float, float]], capacity: int, frac: float, reading: str, policy: str
) -> list[Condition]:
    return [
        Condition(policy, capacity, SharedCap(), prefix=round(a * frac, 6), suffix=round(b * frac, 6), reading=one)
        for one in readings(reading)
        for a, b in parts
    ]


def faithful(capacity: int, protect_frac: float, reading: str) -> list[Condition]:
    """The faithful implementations, unprotected and protected, and a suffix pinned to the prompt."""
    found = main([capacity], FAITHFUL, protect_frac, reading)
    for one in readings(reading):
        pinned = Condition(
            "ada_kv_faithful", capacity, SharedCap(), prefix=protect_frac, suffix=protect_frac, static_suffix=True,
            reading=one,
        )  # fmt: skip
        found += (
            [pinned, replace(pinned, policy="lru")] if one == "as_described" else [pinned]
        )  # as run, LRU has no such mode
    return found


def protection(
    capacities: Sequence[int] = (128, 256, 512),
    policies: Sequence[str] = PROTECTION_SEVEN,
    protect_frac: float = 0.10,
    reading: str = "both",
) -> list[Condition]:
    """All conditions of the protection chapter, each once; extra studies at the middle capacity. Bad ones raise."""
    if isinstance(capacities, str) or isinstance(policies, str):
        raise InputError(f"capacities {capacities!r}, policies {policies!r}: give lists, e.g. [128, 256] and ['lru']")
    if not 0 < protect_frac < 0.5:
        raise InputError(f"protect_frac {protect_frac}: a share of the capacity per side, between 0 and 0.5")
    if not capacities or not policies:
        raise InputError(f"{len(capacities)} capacities and {len(policies)} policies: give at least one of each")
    middle = sorted(capacities)[len(capacities) // 2]
    parts = (
        main(capacities, policies, protect_frac, reading),
        sensitivity(middle, protect_frac, reading),
        sides(middle, protect_frac, reading),
        faithful(middle, protect_frac, reading),
    )
    found = list(dict.fromkeys(condition for part in parts for condition in part))
    for condition in found:
        check(condition)
    return found


def context(
    tokens: int,
    protect_frac: float = 0.10,
    reading: str = "both",
    policies: Sequence[str] = ("lru", "h2o_simple", "random_sample"),
) -> list[Condition]:
    """Conditions of one prompt length: the full cache, and an eighth of it (the paper's share at 8K, 32K)."""
    return main([tokens // 8], policies, protect_frac, reading)
