"""Column mass: how much attention every key got in the whole prompt, without tokens x tokens anywhere.

For query head h of KV head g, query i standing at key index first + i, and the log-sum-exp L of the forward pass:

    mass[g,j] = 1/G sum_h sum_i exp(scale <q[h,i], k[j]> - L[h,i])    over queries with first + i >= j

and, with spans, span[j] = span[first + i]: attention across spans counts as 0, and nothing is renormalised. H2O takes
the mass as it is, or divided by the number of queries that could look at j.

Queries stream past a block of keys that stays in shared memory, so half of the attention's matrix products are
repeated. Blocks of early keys, which most queries see, start first.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvrepro_kernels.launch import check_device, check_innermost, precision, scores_into
from kvrepro_kernels.window import first_live


def column_mass_reference(
    query: Tensor, keys: Tensor, lse: Tensor, scale: float, starts: Tensor, spans: Tensor | None = None
) -> Tensor:
    """The truth, in the inputs' dtype (upcast first), starts [batch, kv_heads]: [batch, kv_heads, tokens]."""
    kv_heads, tokens = keys.shape[1:3]
    q = query.unflatten(1, (kv_heads, -1))
    log_sum = lse.unflatten(1, (kv_heads, -1)).unsqueeze(-1)
    j = torch.arange(tokens, device=keys.device)
    i = j[tokens - query.shape[2] :]
    visible = (j <= i[:, None]) & (j >= starts[:, :, None, None, None])
    if spans is not None:
        visible = visible & (spans[:, None, i.tolist(), None] == spans[:, None, None, :])[:, :, None]
    p = torch.exp(scale * torch.einsum("bgrid,bgjd->bgrij", q, keys) - log_sum)
    return torch.where(visible & log_sum.isfinite(), p, 0.0).sum(-2).mean(2)


@triton.jit
def _add(
    mass, q_at, log_sum_at, key, at, end, first, spans, span, step, dim, query_row, token, queries, scale,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, CAUSAL: tl.constexpr, SPANS: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """mass [Q, T] plus the attention of queries at, at + 1, ... end - 1, one block of Q after another."""
    for i in tl.range(at, end, BLOCK_Q, num_stages=STAGES):
        here = i + step < queries
        read = here[:, None] & (dim[None, :] < DIM) if BLOCK_D != DIM else here[:, None]
        base = tl.zeros((), tl.int64) + i
        q = tl.load(
            q_at + base * query_row + (step[:, None] * query_row + dim[None, :]), mask=read, other=0.0
        )  # [Q, D]
        log_sum = tl.load(log_sum_at + i + step, mask=here, other=float("inf")) * 1.4426950408889634  # [Q]
        log_sum = tl.where(log_sum == float("-inf"), float("inf"), log_sum)  # a query that sees nothing
        logits = tl.dot(q, tl.trans(key), input_precision=PRECISION)  # [Q, T]
        p = tl.exp2(logits * scale - log_sum[:, None])
        if CAUSAL:
            p = tl.where(token[None, :] <= first + i + step[:, None], p, 0.0)
        if SPANS:
            own = tl.load(spans + first + i + step, mask=here, other=-1)  # [Q]
            p = tl.where(own[:, None] == span[None, :], p, 0.0)
        mass += p
    return mass


@triton.jit
def _column_mass(
    query, keys, lse, starts, spans, out,
    query_batch, query_head, query_row, key_batch, key_head, key_token,  # strides in elements
    kv_heads, group, queries, tokens, scale,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_T: tl.constexpr, SPANS: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)  # batch row * heads + query head
    head_row = row // group  # batch row * kv_heads + KV head
    batch, head = head_row // kv_heads, head_row % kv_heads
    begin = tl.program_id(1) * BLOCK_T
    token = begin + tl.arange(0, BLOCK_T)  # [T]
    dim = tl.arange(0, BLOCK_D)  # [D]
    step = tl.arange(0, BLOCK_Q)  # [Q]
    first = tokens - queries
    keys += batch * key_batch + head * key_head
    query += batch * query_batch + (row - batch * kv_heads * group) * query_head
    lse += row * queries
    spans += batch * tokens
    read = (token < tokens)[:, None] & (dim[None, :] < DIM)
    key = tl.load(keys + token.to(tl.int64)[:, None] * key_token + dim[None, :], mask=read, other=0.0)  # [T, D]
    span = token
    if SPANS:
        span = tl.load(spans + token, mask=token < tokens, other=-2)  # [T]

    low = tl.maximum(begin - first, 0) // BLOCK_Q * BLOCK_Q  # the first block that sees a key of this block
    edge = low + tl.cdiv(tl.maximum(begin + BLOCK_T - 1 - first - low, 0), BLOCK_Q) * BLOCK_Q  # ... that sees all
    mass = tl.zeros((BLOCK_Q, BLOCK_T), tl.float32)
    mass = _add(
        mass, query, lse, key, low, tl.minimum(edge, queries), first, spans, span, step, dim, query_row,
        token, queries, scale, DIM, BLOCK_D, BLOCK_Q, True, SPANS, PRECISION, STAGES,
    )  # fmt: skip
    mass = _add(
        mass, query, lse, key, edge, queries, first, spans, span, step, dim, query_row,
        token, queries, scale, DIM, BLOCK_D, BLOCK_Q, False, SPANS, PRECISION, STAGES,
    )  # fmt: skip
    total = tl.where(token >= tl.load(starts + head_row), tl.sum(mass, 0), 0.0)
    tl.store(out + row * tokens + token, total, mask=token < tokens)


def column_mass(
    query: Tensor, keys: Tensor, lse: Tensor, *,
    scale: float | None = None, starts: Tensor | None = None, spans: Tensor | None = None,
    out: Tensor | None = None, tuning: dict[str, int] | None = None,
) -> Tensor:  # fmt: skip
    """Attention that every key got, mean over the group, float32 [batch, kv_heads, tokens].

    query: [batch, heads, queries, dim], the last `queries` of the tokens; keys: [batch, kv_heads, tokens, dim], strided
    with dim innermost. lse: [batch, heads, queries], natural logarithm; not finite where a query is absent.
    scale: of the logits, by default dim**-0.5. starts: int [batch] or [batch, kv_heads], the first live key. spans: int
    [batch, tokens], the span of each token. out: contiguous float32 tensor to write into.
    Raises ValueError for tensors that do not fit each other and for CPU tensors uninterpreted.
    """
    batch, kv_heads, tokens, dim = keys.shape
    heads, queries = query.shape[1:3]
    if query.shape != (batch, heads, queries, dim) or heads % kv_heads or queries > tokens:
        raise ValueError(f"query {tuple(query.shape)} does not fit keys {tuple(keys.shape)}")
    if query.dtype != keys.dtype:
        raise ValueError(f"query is {query.dtype}, keys are {keys.dtype}; cast one")
    if lse.shape != (batch, heads, queries):
        raise ValueError(f"lse must be {(batch, heads, queries)}, not {tuple(lse.shape)}")
    if spans is not None and spans.shape != (batch, tokens):
        raise ValueError(f"spans must be {(batch, tokens)}, not {tuple(spans.shape)}")
    starts = torch.zeros(batch, dtype=torch.int32, device=keys.device) if starts is None else starts
    starts = first_live(starts, batch, kv_heads)
    out = scores_into(out, keys)
    own = starts if spans is None else spans.to(torch.int32).contiguous()  # a stand-in that is never read
    check_device(_column_mass, "column_mass", (query, keys, lse, starts, own, out))
    check_innermost(query=query, keys=keys)
    if out.numel() == 0:
        return out
    tuned = column_mass_tuning(dim, keys.dtype) | (tuning or {})
    each = torch.empty(batch, heads, tokens, dtype=torch.float32, device=keys.device)
    _column_mass[(batch * heads, triton.cdiv(tokens, tuned["block_t"]))](
        query, keys, lse.contiguous(), starts, own, each, *query.stride()[:3], *keys.stride()[:3],
        kv_heads, heads // kv_heads, queries, tokens, (dim**-0.5 if scale is None else scale) * math.log2(math.e),
        DIM=dim, BLOCK_D=triton.next_power_of_2(dim), BLOCK_Q=tuned["block_q"], BLOCK_T=tuned["block_t"],
        SPANS=spans is not None, PRECISION=precision(keys.dtype), STAGES=tuned["stages"], num_warps=tuned["warps"],
    )  # fmt: skip
    return torch.mean(each.unflatten(1, (kv_heads, -1)), 2, out=out)


def column_mass_tuning(dim: int, dtype: torch.dtype) -> dict[str, int]:
    """Block sizes by shape; measured on an H200 for bfloat16 and 128 dims."""
    if dtype == torch.float32:
        return {"block_q": 32, "block_t": 32, "warps": 4, "stages": 2}
    if dim > 128:
        return {"block_q": 64, "block_t": 64, "warps": 4, "stages": 2}
    return {"block_q": 64, "block_t": 128, "warps": 4, "stages": 4}
