"""Guards: boolean masks of tokens that a policy may not evict, `[batch, kv_heads, tokens]`. They never touch scores."""

import math
from typing import TypeAlias

import torch
from torch import Tensor

from kvrepro.engine.observe import Observation
from kvrepro.engine.shapes import Mask, RowInts

RowCount: TypeAlias = int | RowInts  # the same for every row, or one per row


def protected_count(fraction: float, budget: int, rounding: str = "floor") -> int:
    """Tokens guarded on one side: `fraction` of `budget`, at least 4, and 0 if the fraction is 0. Protection paper,
    section 3 (26 of 256: "ceil"); the artifact rounds down (25 of 256)."""
    if fraction == 0:
        return 0
    # The tiny slack keeps products such as 0.1 * 70 = 7.000000000000001 from rounding up to 8.
    return max(4, math.floor(fraction * budget) if rounding == "floor" else math.ceil(fraction * budget - 1e-9))


def sinks(o: Observation, n: RowCount) -> Mask:
    """The `n` oldest tokens that each head holds; 0 protects none. StreamingLLM (Xiao et al. 2023) keeps 4."""
    if isinstance(n, int) and n == 0:
        return o.places.nothing
    return o.alive & (o.alive.cumsum(-1) <= _rows(o, n))


def recent(o: Observation, n: RowCount) -> Mask:
    """The `n` newest tokens that each head holds; 0 protects none."""
    if isinstance(n, int) and n == 0:
        return o.places.nothing
    newer = torch.arange(o.positions.shape[-1] - 1, -1, -1, device=o.positions.device)  # tokens lie flush right
    return o.alive & (newer < _rows(o, n))


def ends(o: Observation, prefix: RowCount, suffix: RowCount, static_prompt_end: RowCount | None = None) -> Mask:
    """The `prefix` oldest and the `suffix` newest tokens of each head; a token in both counts once.

    static_prompt_end: tokens of the prompt; the suffix then stays at the prompt's last `suffix` positions, whatever was
    generated since. Source: protection paper, sections 3 and 10.
    """
    if static_prompt_end is None:
        return sinks(o, prefix) | recent(o, suffix)
    end = _rows(o, static_prompt_end)
    return sinks(o, prefix) | (o.alive & (o.positions >= end - _rows(o, suffix)) & (o.positions < end))


def whitelist(o: Observation, table: Tensor) -> Mask:
    """The tokens whose positions are marked in `table`, bool [batch, positions]; later positions are not protected.

    Source: leakage paper, section 5.1 (the set S_req, the same in all layers and heads).
    """
    marked = table.gather(1, o.positions.flatten(1).clamp(0, table.shape[1] - 1)).view_as(o.positions)
    return o.alive & marked & (o.positions < table.shape[1])


def _rows(o: Observation, n: RowCount) -> Tensor | int:
    """`n` as a tensor [batch or 1, 1, 1], or unchanged if it is one number."""
    return n if isinstance(n, int) else n.to(o.positions.device).view(-1, 1, 1)
