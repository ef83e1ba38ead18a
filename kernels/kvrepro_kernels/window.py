"""Windows of last queries: the keys that each query may see, and the checks of a window's tensors."""

import torch
from torch import Tensor

from kvrepro_kernels.launch import check_innermost, check_pair, check_query


def visible_keys(tokens: int, last: Tensor, starts: Tensor) -> Tensor:
    """Bool [batch, kv_heads, 1, window, tokens]: starts[b,g] <= j <= last[b,g,t]."""
    j = torch.arange(tokens, device=last.device)
    return ((j >= starts[:, :, None, None]) & (j <= last[..., None]))[:, :, None]


def window_rows(
    query: Tensor, keys: Tensor, values: Tensor, last: Tensor | None, starts: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """(last visible keys, int32 [batch, kv_heads, window]; first live keys, int32 [batch, kv_heads]), each None if it
    is None in the arguments. Raises ValueError for queries, keys and values that do not fit each other."""
    batch, kv_heads = keys.shape[:2]
    check_pair(keys, values, "[batch, kv_heads, tokens, dim]")
    check_query(query, keys)
    if last is not None:
        shape = (batch, kv_heads, query.shape[2])
        if last.dim() != 3 or any(a not in (1, b) for a, b in zip(last.shape, shape, strict=True)):
            raise ValueError(f"last must be {shape}, not {tuple(last.shape)}")
        last = last.expand(shape).to(torch.int32).contiguous()
    check_innermost(query=query, keys=keys, values=values)
    return last, None if starts is None else first_live(starts, batch, kv_heads)


def first_live(starts: Tensor, batch: int, kv_heads: int) -> Tensor:
    """The first live key of every head, int32 [batch, kv_heads], from int [batch] or [batch, kv_heads]."""
    starts = starts[:, None].expand(-1, kv_heads) if starts.dim() == 1 else starts
    if starts.shape != (batch, kv_heads):
        raise ValueError(f"starts must be ({batch},) or ({batch}, {kv_heads}), not {tuple(starts.shape)}")
    return starts.to(torch.int32).contiguous()
