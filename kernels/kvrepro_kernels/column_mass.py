"""Column mass: how much attention every key got in the whole prompt, without tokens x tokens anywhere.

For query head h of KV head g, query i standing at key index first + i, and the log-sum-exp L of the forward pass:

    mass[g,j] = 1/G sum_h sum_i exp(scale <q[h,i], k[j]> - L[h,i])    over queries with first + i >= j

With spans, only pairs count with span[j] = span[first + i] or with a negative span; attention across spans is 0, and
nothing is renormalised. H2O uses the mass itself, or divides it by the number of queries that could see j.

Queries stream past a block of keys that stays in shared memory. This repeats half of the attention's matrix products.
Blocks of early keys, which most queries see, start first.
"""

import torch
from torch import Tensor

from kvrepro_kernels.column_mass_kernel import sum_columns
from kvrepro_kernels.launch import base_2, cdiv, check_device, check_innermost, check_query, constants, scores_into
from kvrepro_kernels.window import first_live


def column_mass_reference(
    query: Tensor, keys: Tensor, lse: Tensor, scale: float, starts: Tensor, spans: Tensor | None = None
) -> Tensor:
    """The reference, in the inputs' dtype (upcast them first): [batch, kv_heads, tokens]. starts: [batch, kv_heads]."""
    kv_heads, tokens = keys.shape[1:3]
    q = query.unflatten(1, (kv_heads, -1))
    log_sum = lse.unflatten(1, (kv_heads, -1)).unsqueeze(-1)
    j = torch.arange(tokens, device=keys.device)
    i = j[tokens - query.shape[2] :]
    visible = (j <= i[:, None]) & (j >= starts[:, :, None, None, None])
    if spans is not None:
        query_span, token_span = spans[:, None, i.tolist(), None], spans[:, None, None, :]
        visible = visible & ((query_span == token_span) | (query_span < 0) | (token_span < 0))[:, :, None]
    p = torch.exp(scale * torch.einsum("bgrid,bgjd->bgrij", q, keys) - log_sum)
    return torch.where(visible & log_sum.isfinite(), p, 0.0).sum(-2).mean(2)


def column_mass(
    query: Tensor, keys: Tensor, lse: Tensor, *,
    scale: float | None = None, starts: Tensor | None = None, spans: Tensor | None = None,
    out: Tensor | None = None, tuning: dict[str, int] | None = None,
) -> Tensor:  # fmt: skip
    """Attention that every key got, mean over the group, float32 [batch, kv_heads, tokens].

    query: [batch, heads, queries, dim], the last `queries` of the tokens; keys: [batch, kv_heads, tokens, dim], strided
    with dim innermost. lse: [batch, heads, queries], natural logarithm; not finite where a query is absent.
    scale: of the logits, by default dim**-0.5. starts: int [batch] or [batch, kv_heads], the first live key. spans: int
    [batch, tokens], the span of each token, negative for one that sees all and is seen by all. out: contiguous float32
    tensor to write into.
    Raises ValueError for tensors that do not fit each other and for CPU tensors uninterpreted.
    """
    batch, kv_heads, tokens, dim = keys.shape
    heads, queries = query.shape[1:3]
    check_query(query, keys)
    if queries > tokens:
        raise ValueError(f"query {tuple(query.shape)} does not fit keys {tuple(keys.shape)}: more queries than tokens")
    if lse.shape != (batch, heads, queries):
        raise ValueError(f"lse must be {(batch, heads, queries)}, not {tuple(lse.shape)}")
    if spans is not None and spans.shape != (batch, tokens):
        raise ValueError(f"spans must be {(batch, tokens)}, not {tuple(spans.shape)}")
    starts = torch.zeros(batch, dtype=torch.int32, device=keys.device) if starts is None else starts
    starts = first_live(starts, batch, kv_heads)
    out = scores_into(out, keys)
    spans_or_starts = starts if spans is None else spans.to(torch.int32).contiguous()  # without spans it is not read
    check_device(sum_columns, "column_mass", (query, keys, lse, starts, spans_or_starts, out))
    check_innermost(query=query, keys=keys)
    if out.numel() == 0:
        return out
    tuned = column_mass_tuning(dim, keys.dtype) | (tuning or {})
    by_query_head = torch.empty(batch, heads, tokens, dtype=torch.float32, device=keys.device)
    tensors = query, keys, lse.contiguous(), starts, spans_or_starts, by_query_head
    sizes = *query.stride()[:3], *keys.stride()[:3], kv_heads, heads // kv_heads, queries, tokens, base_2(scale, dim)
    blocks = {"BLOCK_Q": tuned["block_q"], "BLOCK_T": tuned["block_t"], "SPANS": spans is not None}
    grid = batch * heads, cdiv(tokens, tuned["block_t"])
    sum_columns[grid](*tensors, *sizes, **blocks, **constants(dim, keys.dtype, tuned))
    return torch.mean(by_query_head.unflatten(1, (kv_heads, -1)), 2, out=out)


def column_mass_tuning(dim: int, dtype: torch.dtype) -> dict[str, int]:
    """Block sizes by shape; measured on an H200 for bfloat16 and 128 dims."""
    if dtype == torch.float32:
        return {"block_q": 32, "block_t": 32, "warps": 4, "stages": 2}
    if dim > 128:
        return {"block_q": 64, "block_t": 64, "warps": 4, "stages": 2}
    return {"block_q": 64, "block_t": 128, "warps": 4, "stages": 4}
