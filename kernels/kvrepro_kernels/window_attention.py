"""Window attention: outputs and log-sum-exp of the last queries, when the forward pass did not keep them.

    L[h,t] = log sum_j exp(scale <q[h,t], k[j]>)        over keys with starts[b,g] <= j <= first[b] + t
    a[h,t] = sum_j exp(scale <q[h,t], k[j]> - L[h,t]) v[j]

The keys are split over programs, each keeping a running maximum (flash attention); a second kernel merges the splits. A
query that sees no key gets L = -inf and a = 0.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvrepro_kernels.launch import check_device, check_innermost, multiprocessors, precision


def visible_keys(tokens: int, window: int, first: Tensor, starts: Tensor) -> Tensor:
    """Bool [batch, kv_heads, 1, window, tokens]: starts[b,g] <= j <= first[b] + t."""
    j = torch.arange(tokens, device=first.device)
    last = first[:, None] + torch.arange(window, device=first.device)
    return (j >= starts[:, :, None, None, None]) & (j <= last[:, None, None, :, None])


def window_attention_reference(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, first: Tensor, starts: Tensor
) -> tuple[Tensor, Tensor]:
    """The truth, in the inputs' dtype (upcast first): outputs [batch, heads, window, dim], lse [batch, heads, window].
    first [batch], starts [batch, kv_heads]."""
    q = query.unflatten(1, (keys.shape[1], -1))
    logits = scale * torch.einsum("bgrtd,bgjd->bgrtj", q, keys)
    logits = logits.masked_fill(~visible_keys(keys.shape[2], query.shape[2], first, starts), -torch.inf)
    outputs = torch.einsum("bgrtj,bgjd->bgrtd", logits.softmax(-1).nan_to_num(0.0), values)
    return outputs.flatten(1, 2), logits.logsumexp(-1).flatten(1, 2)


@triton.jit
def _attend(
    query, keys, values, firsts, starts, part_outputs, part_lse,
    query_batch, query_head, query_row, key_batch, key_head, key_token, value_batch, value_head, value_token,
    kv_heads, tokens, rows, window, edge, tokens_per_split, scale,
    FIRSTS: tl.constexpr, STARTS: tl.constexpr,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    head_row = tl.program_id(1).to(tl.int64)  # batch row * kv_heads + KV head
    batch, head = head_row // kv_heads, head_row % kv_heads
    row = tl.program_id(2) * BLOCK_R + tl.arange(0, BLOCK_R)  # [R], query head in the group * window + query
    dim = tl.arange(0, BLOCK_D)  # [D]
    step = tl.arange(0, BLOCK_T)  # [T]
    last = edge + row % window
    start = 0
    if FIRSTS:
        last = tl.load(firsts + batch) + row % window
    if STARTS:
        start = tl.load(starts + head_row)
    keys += batch * key_batch + head * key_head
    values += batch * value_batch + head * value_head
    query += batch * query_batch + head * (rows // window) * query_head
    mine = (row[:, None] < rows) & (dim[None, :] < DIM)
    q = tl.load(query + (row // window * query_head + row % window * query_row)[:, None] + dim[None, :], mine, 0.0)

    top = tl.full((BLOCK_R,), float("-inf"), tl.float32)  # running maximum, base 2
    mass = tl.zeros((BLOCK_R,), tl.float32)
    out = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
    begin = tl.program_id(0) * tokens_per_split
    for at in tl.range(begin, tl.minimum(begin + tokens_per_split, tokens), BLOCK_T, num_stages=STAGES):
        token = at + step
        read = (token < tokens)[:, None] & (dim[None, :] < DIM)
        base = tl.zeros((), tl.int64) + at  # 64 bits: a head may pass 2**31 elements
        key = tl.load(keys + base * key_token + (step[:, None] * key_token + dim[None, :]), read, 0.0)  # [T, D]
        value = tl.load(values + base * value_token + (step[:, None] * value_token + dim[None, :]), read, 0.0)  # [T, D]
        logits = tl.dot(q, tl.trans(key), input_precision=PRECISION) * scale  # [R, T]
        seen = (token[None, :] < tokens) & (token[None, :] <= last[:, None]) & (token[None, :] >= start)
        logits = tl.where(seen, logits, float("-inf"))
        higher = tl.maximum(top, tl.max(logits, 1))
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        p = tl.exp2(logits - shift[:, None])
        shrink = tl.exp2(top - shift)
        mass = mass * shrink + tl.sum(p, 1)
        out = tl.dot(p.to(value.dtype), value, out * shrink[:, None], input_precision=PRECISION)
        top = higher

    some = mass > 0.0
    part = (head_row * tl.num_programs(0) + tl.program_id(0)) * rows + row
    tl.store(part_lse + part, tl.where(some, top + tl.log2(mass), float("-inf")), mask=row < rows)
    out = out / tl.where(some, mass, 1.0)[:, None]
    tl.store(part_outputs + part[:, None] * DIM + dim[None, :], out, mask=mine)


@triton.jit
def _merge(
    part_outputs, part_lse, outputs, lse, rows, splits,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    head_row = tl.program_id(1).to(tl.int64)
    split = tl.arange(0, BLOCK_S)  # [S]
    dim = tl.arange(0, BLOCK_D)  # [D]
    part = (head_row * splits + split) * rows + row
    log_sum = tl.load(part_lse + part, mask=split < splits, other=float("-inf"))  # [S]
    top = tl.max(log_sum, 0)
    share = tl.exp2(log_sum - tl.where(top == float("-inf"), 0.0, top))
    mass = tl.sum(share, 0)
    read = (split < splits)[:, None] & (dim[None, :] < DIM)
    out = tl.load(part_outputs + part[:, None] * DIM + dim[None, :], mask=read, other=0.0)  # [S, D]
    out = tl.sum(out * share[:, None], 0) / tl.where(mass > 0.0, mass, 1.0)
    at = head_row * rows + row
    tl.store(outputs + at * DIM + dim, out.to(outputs.dtype.element_ty), mask=dim < DIM)
    log_sum = (top + tl.log2(mass)) * 0.6931471805599453
    tl.store(lse + at, tl.where(mass > 0.0, log_sum, float("-inf")))


def window_rows(
    query: Tensor, keys: Tensor, values: Tensor, first: Tensor | int | None, starts: Tensor | None
) -> tuple[Tensor | None, int, Tensor | None]:
    """Where the window's causal edge begins, int32 [batch] or one number for all, and the first live keys, int32
    [batch, kv_heads], None for 0 everywhere.

    Raises ValueError for queries, keys and values that do not fit each other.
    """
    batch, kv_heads, tokens, dim = keys.shape
    if values.shape != keys.shape or values.dtype != keys.dtype:
        one, other = (f"{tuple(x.shape)} {x.dtype}" for x in (keys, values))
        raise ValueError(f"keys {one} and values {other} differ")
    if query.dim() != 4 or query.shape[0] != batch or query.shape[3] != dim or query.shape[1] % kv_heads:
        raise ValueError(f"query {tuple(query.shape)} does not fit keys {tuple(keys.shape)}")
    if query.dtype != keys.dtype:
        raise ValueError(f"query is {query.dtype}, keys are {keys.dtype}; cast one")
    firsts = first.to(torch.int32) if isinstance(first, Tensor) else None
    edge = first if isinstance(first, int) else tokens - query.shape[2]
    if firsts is not None and firsts.shape != (batch,):
        raise ValueError(f"first must be an int or of shape ({batch},), not {tuple(firsts.shape)}")
    if starts is not None:
        starts = starts[:, None].expand(-1, kv_heads) if starts.dim() == 1 else starts
        if starts.shape != (batch, kv_heads):
            raise ValueError(f"starts must be ({batch},) or ({batch}, {kv_heads}), not {tuple(starts.shape)}")
        starts = starts.to(torch.int32).contiguous()
    check_innermost(query=query, keys=keys, values=values)
    return firsts, edge, starts


def window_attention(
    query: Tensor, keys: Tensor, values: Tensor, *,
    scale: float | None = None, first: Tensor | int | None = None, starts: Tensor | None = None,
    out: tuple[Tensor, Tensor] | None = None, tuning: dict[str, int] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Outputs [batch, heads, window, dim] in the query's dtype and log-sum-exp, float32 [batch, heads, window].

    query: [batch, heads, window, dim]; keys, values: [batch, kv_heads, tokens, dim], strided, dim innermost.
    scale: of the logits, by default dim**-0.5. first: int or int [batch], the index of the last key that window query 0
    may see, by default tokens - window. starts: int [batch] or [batch, kv_heads], the first live key (left padding).
    out: two contiguous tensors to write into. tuning: overrides of `window_attention_tuning`.
    Raises ValueError for tensors that do not fit each other and for CPU tensors uninterpreted.
    """
    firsts, edge, starts = window_rows(query, keys, values, first, starts)
    batch, heads, window, dim = query.shape
    kv_heads, tokens = keys.shape[1:3]
    rows = heads // kv_heads * window
    if out is None:
        out = query.new_empty(batch, heads, window, dim), query.new_empty(batch, heads, window, dtype=torch.float32)
    if out[0].shape != query.shape or out[1].shape != query.shape[:3] or not all(x.is_contiguous() for x in out):
        raise ValueError(f"out must be contiguous of shapes {tuple(query.shape)} and {tuple(query.shape[:3])}")
    check_device(
        _attend, "window_attention", (query, keys, values, *(x for x in (firsts, starts) if x is not None), *out)
    )
    if 0 in (batch, heads, window):
        return out
    tuned = window_attention_tuning(rows, dim, keys.dtype) | (tuning or {})
    block_t = tuned["block_t"]
    programs = multiprocessors(keys.device) * tuned["per_multiprocessor"]
    chunks = triton.cdiv(rows, tuned["block_r"])
    splits = max(1, min(programs // (batch * kv_heads * chunks), triton.cdiv(tokens, block_t), 64))
    per_split = triton.cdiv(triton.cdiv(tokens, splits), block_t) * block_t
    splits = max(1, triton.cdiv(tokens, per_split))
    part_outputs = torch.empty(batch * kv_heads, splits, rows, dim, dtype=torch.float32, device=keys.device)
    part_lse = torch.empty(batch * kv_heads, splits, rows, dtype=torch.float32, device=keys.device)
    _attend[(splits, batch * kv_heads, chunks)](
        query, keys, values,
        keys if firsts is None else firsts, keys if starts is None else starts,  # stand-ins that are never read
        part_outputs, part_lse, *query.stride()[:3], *keys.stride()[:3], *values.stride()[:3],
        kv_heads, tokens, rows, window, edge, per_split, (dim**-0.5 if scale is None else scale) * math.log2(math.e),
        FIRSTS=firsts is not None, STARTS=starts is not None,
        DIM=dim, BLOCK_D=triton.next_power_of_2(dim), BLOCK_T=block_t, BLOCK_R=tuned["block_r"],
        PRECISION=precision(keys.dtype), STAGES=tuned["stages"], num_warps=tuned["warps"],
    )  # fmt: skip
    _merge[(rows, batch * kv_heads)](
        part_outputs, part_lse, *out, rows, splits,
        DIM=dim, BLOCK_D=triton.next_power_of_2(dim), BLOCK_S=triton.next_power_of_2(splits), num_warps=4,
    )  # fmt: skip
    return out


def window_attention_tuning(rows: int, dim: int, dtype: torch.dtype) -> dict[str, int]:
    """Block sizes by shape; measured on an H200 for bfloat16, 128 dims, 32 rows."""
    wide = dim > 128 or dtype == torch.float32
    return {
        "block_t": 32 if wide else 64,
        "block_r": min(64, max(16, triton.next_power_of_2(rows))),
        "warps": 4,
        "stages": 2 if wide else 3,
        "per_multiprocessor": 2,
    }
