"""Selection: who stays, given scores. Ties are defined, orders are total, rows are handled together."""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from kvrepro.chapters.protection.observe import Observation
from kvrepro.engine.shapes import RowInts, TokenInts, TokenMask

FIELD_BITS = 21  # steps and positions below two million fit one field of a packed int64 key


@cache
def string_order(size: int, device: torch.device) -> Tensor:
    """Rank of each position `0 .. size-1` by its decimal string, int64 `[size]`: 0, 1, 10, 100, 1000, 1001, ..."""
    order = torch.tensor(sorted(range(size), key=str), device=device)
    return torch.empty_like(order).scatter_(0, order, torch.arange(size, device=device))


def position_rank(positions: TokenInts, tie_break: str) -> TokenInts:
    """Order among equals: by the position's number ("integer"), or by its decimal string ("string", the artifact's)."""
    if tie_break == "integer":
        return positions
    size = 1 << max(int(positions.max()) + 1, 1024).bit_length()  # few sizes, so that the table is sorted once
    return string_order(size, positions.device)[positions]


def tie_key(o: Observation, names: Sequence[str]) -> TokenInts:
    """One int64 key per token for the lexicographic order (`names` ..., position), in the reading's tie order."""
    key = torch.zeros_like(o.positions)
    for name in names:
        key = (key | getattr(o, name)) << FIELD_BITS
    return key | position_rank(o.positions, o.reading.tie_break)


def eviction_rank(candidates: TokenMask, keys: Sequence[Tensor]) -> TokenInts:
    """Place of each candidate in the eviction order: smallest `keys[0]` first, ties by `keys[1]`, and so on; the others
    come after all candidates. All `[batch, tokens]`, float keys without NaN."""
    order = None
    for key in reversed(keys):
        top = torch.inf if key.is_floating_point() else torch.iinfo(key.dtype).max
        key = key.masked_fill(~candidates, top)
        if order is None:
            order = key.argsort(dim=1, stable=True)
        else:
            order = order.gather(1, key.gather(1, order).argsort(dim=1, stable=True))
    places = torch.arange(order.shape[1], device=order.device).expand_as(order)
    rank = torch.empty_like(order).scatter_(1, order, places)
    return rank.masked_fill(~candidates, order.shape[1])


def drop_lowest(candidates: TokenMask, keys: Sequence[Tensor], count: RowInts) -> TokenMask:
    """The `count` candidates of each row that go first (all of them if fewer). `[batch, tokens]`."""
    return candidates & (eviction_rank(candidates, keys) < count[:, None])


def top_per_head(scores: Tensor, candidates: TokenMask, counts: Tensor, ties: TokenInts) -> Tensor:
    """Each head's `counts` [batch, kv_heads] best candidates by `scores` [batch, kv_heads, tokens], as a boolean mask;
    among equals the last in the tie order stays."""
    heads = scores.shape[1]
    flat = candidates.repeat_interleave(heads, 0)
    rank = eviction_rank(flat, (scores.flatten(0, 1), ties.repeat_interleave(heads, 0)))
    chosen = flat & (rank >= (flat.sum(1) - counts.flatten())[:, None])
    return chosen.view_as(scores)
