"""Guards: boolean masks of tokens that a policy may not evict. They never touch scores."""

import math

import torch

from kvrepro.chapters.protection.observe import Observation
from kvrepro.chapters.protection.selection import eviction_rank, tie_key
from kvrepro.engine.shapes import RowInts, TokenMask


def protected_count(fraction: float, capacity: int, rounding: str = "floor") -> int:
    """Tokens guarded on one side: `fraction` of `capacity`, at least 4, and 0 if the fraction is 0. Paper, section 3
    (26 of 256: "ceil"); the artifact rounds down (25 of 256)."""
    if fraction == 0:
        return 0
    # The tiny slack keeps products such as 0.1 * 70 = 7.000000000000001 from rounding up to 8.
    return max(4, math.floor(fraction * capacity) if rounding == "floor" else math.ceil(fraction * capacity - 1e-9))


def ends(o: Observation, prefix: RowInts, suffix: RowInts, static_suffix: bool = False) -> TokenMask:
    """The `prefix` lowest and `suffix` highest retained positions of each row; with `static_suffix` the last `suffix`
    positions of the prompt instead, whatever was generated since. Paper, sections 3 and 10."""
    rank = eviction_rank(o.alive, (o.positions,))
    first = o.alive & (rank < prefix[:, None])
    if static_suffix:
        n = o.prompt_tokens[:, None]
        return first | (o.alive & (o.positions >= n - suffix[:, None]) & (o.positions < n))
    return first | (o.alive & (rank >= (o.alive.sum(1) - suffix)[:, None]))


def sinks_and_window(o: Observation, capacity: RowInts, sinks: int = 4) -> TokenMask:
    """StreamingLLM's own shield among the evictable tokens: the `sinks` oldest and the `capacity - sinks` latest.

    As run "oldest" orders by (I, position) and "latest" by (L, I, position), positions in the reading's tie order; as
    described both order by position. Artifact's SLW; paper, Table 19.
    """
    by_position = o.reading.slw_window == "position"
    oldest = eviction_rank(o.evictable, (tie_key(o, () if by_position else ("inserted",)),))
    latest = eviction_rank(o.evictable, (tie_key(o, () if by_position else ("last_access", "inserted")),))
    window = (o.evictable.sum(1) - (capacity - sinks))[:, None]
    return o.evictable & ((oldest < sinks) | (latest >= window))


def nothing(o: Observation, capacity: RowInts) -> TokenMask:
    """No shield of the policy's own."""
    return torch.zeros_like(o.alive)
