"""Window scores: what the last queries say about every cached token, in one pass over keys and values.

The forward pass already knows the window's log-sum-exp L and outputs a, so no softmax is left to do. For query head h
of KV head g, window query t and key j that it may see:

    p[h,t,j] = exp(scale <q[h,t], k[j]> - L[h,t])
    indicator   attention     p
                value         p n[j]                                 n[j] = ||v[j]||, or any norms given
                perturbation  (p / (1 - p + eps))^2 ||a[h,t] - v[j]||^2
                anchor        p <a[h,t], v[j]>
    score[g,j] = group reduction over h of the aggregate over t of the indicator

0 for a pair where the query may not see the key or is not there. ||a - v||^2 = ||a||^2 + ||v||^2 - 2 <a, v>, clamped
at 0; p is clamped at 1, which rounding in a given L would pass. Aggregates: mean and sum over all `window` rows, max,
and the unbiased variance. Group reductions: mean, max, sum. Perturbation: DropKV; anchor: AnDPro; variance: CAKE.

Scores of a query that pays nearly all attention to one key are as good as 1 - p: rounding in L is magnified by
1 / (1 - p + eps), and rounding in a by (1 / (1 - p + eps))^2. Such a key leads the ranking either way.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvrepro_kernels.launch import check_device, check_innermost, multiprocessors, precision
from kvrepro_kernels.window_attention import visible_keys, window_attention, window_rows

INDICATORS = ("attention", "value", "perturbation", "anchor")
AGGREGATES = ("mean", "sum", "max", "variance")
REDUCTIONS = ("mean", "max", "sum")


def window_scores_reference(
    query: Tensor, keys: Tensor, values: Tensor, lse: Tensor, outputs: Tensor,
    indicator: str, aggregate: str, reduction: str, scale: float, first: Tensor, starts: Tensor,
    norms: Tensor | None = None, eps: float = 1e-6,
) -> Tensor:  # fmt: skip
    """The truth, in the inputs' dtype (upcast first). Shapes as in `window_scores`, first [batch], starts
    [batch, kv_heads]."""
    kv_heads, tokens = keys.shape[1:3]
    q, a = (x.unflatten(1, (kv_heads, -1)) for x in (query, outputs))  # [batch, kv_heads, group, window, dim]
    log_sum = lse.unflatten(1, (kv_heads, -1)).unsqueeze(-1)
    there = log_sum.isfinite()
    a = torch.where(there, a, 0.0)
    p = torch.exp(scale * torch.einsum("bgrtd,bgjd->bgrtj", q, keys) - log_sum).clamp(max=1.0)
    if indicator == "attention":
        x = p
    elif indicator == "value":
        x = p * (values.norm(dim=-1) if norms is None else norms)[:, :, None, None]
    elif indicator == "anchor":
        x = p * torch.einsum("bgrtd,bgjd->bgrtj", a, values)
    else:
        square = a.square().sum(-1, keepdim=True) + values.square().sum(-1)[:, :, None, None]
        distance = (square - 2 * torch.einsum("bgrtd,bgjd->bgrtj", a, values)).clamp(min=0.0)
        x = (p / (1 - p + eps)).square() * distance
    x = torch.where(visible_keys(tokens, query.shape[2], first, starts) & there, x, 0.0)
    per_head = {"mean": x.mean, "sum": x.sum, "max": x.amax, "variance": x.var}[aggregate](-2)
    return {"mean": per_head.mean, "max": per_head.amax, "sum": per_head.sum}[reduction](2)


@triton.jit
def _load_rows(
    query, outputs, lse, query_head, query_row, output_head, output_row, lse_head, lse_row, chunk, first, group, window,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, GROUPS: tl.constexpr, WINDOW: tl.constexpr, READ_A: tl.constexpr,
):  # fmt: skip
    """Chunk `chunk` of a KV head's query rows, GROUPS heads of WINDOW rows each: q, a, ||a||^2, lse in base 2, last
    visible key, and whether the row belongs to the window."""
    row = tl.arange(0, GROUPS * WINDOW)  # [R]
    dim = tl.arange(0, BLOCK_D)  # [D]
    g = chunk * GROUPS + row // WINDOW
    t = row % WINDOW
    there = (g < group) & (t < window)
    log_sum = tl.load(lse + g * lse_head + t * lse_row, mask=there, other=float("inf")) * 1.4426950408889634  # [R]
    there = there & (tl.abs(log_sum) < float("inf"))
    log_sum = tl.where(there, log_sum, float("inf"))
    read = there[:, None] & (dim[None, :] < DIM)
    q = tl.load(query + (g * query_head + t * query_row)[:, None] + dim[None, :], mask=read, other=0.0)  # [R, D]
    a = q
    if READ_A:
        a = tl.load(outputs + (g * output_head + t * output_row)[:, None] + dim[None, :], mask=read, other=0.0)
        a = a.to(q.dtype)  # [R, D]
    a32 = a.to(tl.float32)
    return q, a, tl.sum(a32 * a32, 1), log_sum, first + t, (g < group) & (t < window)


@triton.jit
def _score_rows(
    key, value, norm, q, a, aa, log_sum, last, there, token, start, scale, eps, window,
    GROUPS: tl.constexpr, WINDOW: tl.constexpr, INDICATOR: tl.constexpr, AGGREGATE: tl.constexpr,
    REDUCTION: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """[T]: the tokens' aggregate over the rows of one chunk, summed or maximised over its heads."""
    logits = tl.dot(key, tl.trans(q), input_precision=PRECISION)  # [T, R]
    p = tl.minimum(tl.exp2(logits * scale - log_sum[None, :]), 1.0)
    if INDICATOR == "attention":
        x = p
    elif INDICATOR == "value":
        x = p * norm[:, None]
    else:
        av = tl.dot(value, tl.trans(a), input_precision=PRECISION)  # [T, R]
        if INDICATOR == "anchor":
            x = p * av
        else:
            w = p / (1.0 - p + eps)
            x = w * w * tl.maximum(aa[None, :] + norm[:, None] - 2.0 * av, 0.0)
    x = tl.where((token[:, None] <= last[None, :]) & (token[:, None] >= start), x, 0.0)
    if AGGREGATE == "max":
        x = tl.where(there[None, :], x, float("-inf"))
    linear: tl.constexpr = AGGREGATE == "mean" or AGGREGATE == "sum"
    if linear and REDUCTION != "max":
        y = tl.sum(x, 1)
    elif AGGREGATE == "max" and REDUCTION == "max":
        y = tl.max(x, 1)
    else:
        x = tl.reshape(x, (x.shape[0], GROUPS, WINDOW))
        head = tl.max(tl.reshape(there.to(tl.int32), (GROUPS, WINDOW)), 1)  # [GROUPS]
        if AGGREGATE == "max":
            z = tl.max(x, 2)  # [T, GROUPS]
        else:
            z = tl.sum(x, 2)
            if AGGREGATE == "variance":
                off = x - (z / window)[:, :, None]
                off = tl.where(tl.reshape(there, (GROUPS, WINDOW))[None, :, :], off, 0.0)
                z = tl.sum(off * off, 2) / (window - 1)
        if REDUCTION == "max":
            y = tl.max(tl.where(head[None, :] > 0, z, float("-inf")), 1)
        else:
            y = tl.sum(tl.where(head[None, :] > 0, z, 0.0), 1)
    return y


@triton.jit
def _window_scores(
    query, keys, values, lse, outputs, norms, firsts, starts, scores,
    query_batch, query_head, query_row, output_batch, output_head, output_row, lse_batch, lse_head, lse_row,
    key_batch, key_head, key_token, value_batch, value_head, value_token,  # strides in elements
    kv_heads, tokens, group, window, edge, tokens_per_split, scale, eps, factor,
    FIRSTS: tl.constexpr, STARTS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr,
    GROUPS: tl.constexpr, WINDOW: tl.constexpr,
    CHUNKS: tl.constexpr, INDICATOR: tl.constexpr, AGGREGATE: tl.constexpr, REDUCTION: tl.constexpr,
    GIVEN_NORMS: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    head_row = tl.program_id(1).to(tl.int64)  # batch row * kv_heads + KV head
    batch, head = head_row // kv_heads, head_row % kv_heads
    first = edge
    start = 0
    if FIRSTS:
        first = tl.load(firsts + batch)
    if STARTS:
        start = tl.load(starts + head_row)
    dim = tl.arange(0, BLOCK_D)  # [D]
    step = tl.arange(0, BLOCK_T)  # [T]
    keys += batch * key_batch + head * key_head
    values += batch * value_batch + head * value_head
    query += batch * query_batch + head * group * query_head
    outputs += batch * output_batch + head * group * output_head
    lse += batch * lse_batch + head * group * lse_head
    READ_A: tl.constexpr = INDICATOR == "perturbation" or INDICATOR == "anchor"
    READ_V: tl.constexpr = READ_A or (INDICATOR == "value" and not GIVEN_NORMS)
    if CHUNKS == 1:  # the rows stay in registers and shared memory
        q, a, aa, log_sum, last, there = _load_rows(
            query, outputs, lse, query_head, query_row, output_head, output_row, lse_head, lse_row, 0, first,
            group, window, DIM, BLOCK_D, GROUPS, WINDOW, READ_A,
        )  # fmt: skip
    begin = tl.program_id(0) * tokens_per_split
    for at in tl.range(begin, tl.minimum(begin + tokens_per_split, tokens), BLOCK_T, num_stages=STAGES):
        token = at + step
        here = token < tokens
        read = here[:, None] & (dim[None, :] < DIM)
        base = tl.zeros((), tl.int64) + at  # 64 bits: a head may pass 2**31 elements
        key = tl.load(
            keys + base * key_token + (step[:, None] * key_token + dim[None, :]), mask=read, other=0.0
        )  # [T, D]
        value = key
        norm = tl.zeros((BLOCK_T,), tl.float32)
        if READ_V:
            value_at = base * value_token + (step[:, None] * value_token + dim[None, :])
            value = tl.load(values + value_at, mask=read, other=0.0)  # [T, D]
        if INDICATOR == "perturbation" or (READ_V and INDICATOR == "value"):
            v32 = value.to(tl.float32)
            norm = tl.sum(v32 * v32, 1)  # [T]
            if INDICATOR == "value":
                norm = tl.sqrt(norm)
        if GIVEN_NORMS:
            norm = tl.load(norms + head_row * tokens + token, mask=here, other=0.0)
        if CHUNKS == 1:
            y = _score_rows(
                key, value, norm, q, a, aa, log_sum, last, there, token, start, scale, eps, window,
                GROUPS, WINDOW, INDICATOR, AGGREGATE, REDUCTION, PRECISION,
            )  # fmt: skip
        else:
            y = tl.full((BLOCK_T,), float("-inf") if REDUCTION == "max" else 0.0, tl.float32)
            for chunk in range(CHUNKS):
                q, a, aa, log_sum, last, there = _load_rows(
                    query, outputs, lse, query_head, query_row, output_head, output_row, lse_head, lse_row, chunk,
                    first, group, window, DIM, BLOCK_D, GROUPS, WINDOW, READ_A,
                )  # fmt: skip
                z = _score_rows(
                    key, value, norm, q, a, aa, log_sum, last, there, token, start, scale, eps, window,
                    GROUPS, WINDOW, INDICATOR, AGGREGATE, REDUCTION, PRECISION,
                )  # fmt: skip
                y = tl.maximum(y, z) if REDUCTION == "max" else y + z
        tl.store(scores + head_row * tokens + token, y * factor, mask=here)


def window_scores(
    query: Tensor, keys: Tensor, values: Tensor, lse: Tensor | None = None, outputs: Tensor | None = None, *,
    indicator: str = "perturbation", aggregate: str = "sum", reduction: str = "mean", scale: float | None = None,
    first: Tensor | int | None = None, starts: Tensor | None = None, norms: Tensor | None = None, eps: float = 1e-6,
    out: Tensor | None = None, tuning: dict[str, int] | None = None,
) -> Tensor:  # fmt: skip
    """Scores of every cached token, float32 [batch, kv_heads, tokens].

    query: the window's, [batch, heads, window, dim]; keys, values: [batch, kv_heads, tokens, dim], strided as they lie,
    dim innermost. lse [batch, heads, window] in natural logarithm and outputs [batch, heads, window, dim]: the forward
    pass's; without both, `window_attention` computes them first, which reads keys and values once more. A row whose
    lse is not finite counts as a query that is not there.
    scale: of the logits, by default dim**-0.5. first: int or int [batch], the index of the last key that window query 0
    may see, by default tokens - window. starts: int [batch] or [batch, kv_heads], the first live key (left padding,
    dead slots in front). norms: [batch, kv_heads, tokens] for the indicator "value", by default ||v||.
    out: contiguous float32 tensor to write into. tuning: overrides of `window_scores_tuning`.
    Raises ValueError for tensors that do not fit each other, unknown names and CPU tensors uninterpreted.
    """
    for name, known, kind in (
        (indicator, INDICATORS, "indicator"), (aggregate, AGGREGATES, "aggregate"), (reduction, REDUCTIONS, "reduction")
    ):  # fmt: skip
        if name not in known:
            raise ValueError(f"{kind} {name!r} is not one of {', '.join(known)}")
    firsts, edge, starts = window_rows(query, keys, values, first, starts)
    batch, heads, window, dim = query.shape
    kv_heads, tokens = keys.shape[1:3]
    group = heads // kv_heads
    if aggregate == "variance" and window < 2:
        raise ValueError(f"a variance needs a window of at least 2 queries, not {window}")
    if norms is not None and (indicator != "value" or norms.shape != (batch, kv_heads, tokens)):
        wanted = f"({batch}, {kv_heads}, {tokens}) with the indicator value"
        raise ValueError(f"norms must be {wanted}, not {tuple(norms.shape)} with {indicator}")
    if (lse is None) != (outputs is None):
        raise ValueError("give both lse and outputs, or neither")
    if out is None:
        out = torch.empty(batch, kv_heads, tokens, dtype=torch.float32, device=keys.device)
    if out.shape != (batch, kv_heads, tokens) or out.dtype != torch.float32 or not out.is_contiguous():
        raise ValueError(f"out must be contiguous float32 of shape {(batch, kv_heads, tokens)}")
    if lse is None:
        outputs, lse = window_attention(query, keys, values, scale=scale, first=first, starts=starts)
    if lse.shape != (batch, heads, window) or outputs.shape != query.shape:
        found = f"{tuple(lse.shape)} and {tuple(outputs.shape)}"
        raise ValueError(f"lse and outputs must be {tuple(query.shape[:3])} and {tuple(query.shape)}, not {found}")
    stand_in = keys  # for what is never read
    norms = stand_in if norms is None else norms.float().contiguous()
    firsts = stand_in if firsts is None else firsts
    starts = stand_in if starts is None else starts
    check_device(_window_scores, "window_scores", (query, keys, values, lse, outputs, norms, firsts, starts, out))
    check_innermost(outputs=outputs)
    if 0 in (batch, kv_heads, tokens):
        return out

    rows = triton.next_power_of_2(window)
    products = 2 if indicator in ("perturbation", "anchor") else 1
    tuned = window_scores_tuning(triton.next_power_of_2(group) * rows, dim, keys.dtype, products) | (tuning or {})
    groups = max(1, min(triton.next_power_of_2(group), tuned["rows"] // rows))
    groups = max(groups, 16 // rows)  # a dot needs 16 rows
    chunks = triton.cdiv(group, groups)
    block_t = tuned["block_t"]
    programs = multiprocessors(keys.device) * tuned["per_multiprocessor"]
    splits = max(1, min(programs // (batch * kv_heads), triton.cdiv(tokens, block_t)))
    per_split = triton.cdiv(triton.cdiv(tokens, splits), block_t) * block_t
    factor = (1 / window if aggregate == "mean" else 1.0) * (1 / group if reduction == "mean" else 1.0)
    _window_scores[(triton.cdiv(tokens, per_split), batch * kv_heads)](
        query, keys, values, lse, outputs, norms, firsts, starts, out,
        *query.stride()[:3], *outputs.stride()[:3], *lse.stride(), *keys.stride()[:3], *values.stride()[:3],
        kv_heads, tokens, group, window, edge, per_split, (dim**-0.5 if scale is None else scale) * math.log2(math.e),
        eps, factor,
        FIRSTS=firsts is not stand_in, STARTS=starts is not stand_in,
        DIM=dim, BLOCK_D=triton.next_power_of_2(dim), BLOCK_T=block_t, GROUPS=groups, WINDOW=rows, CHUNKS=chunks,
        INDICATOR=indicator, AGGREGATE=aggregate, REDUCTION=reduction,
        GIVEN_NORMS=norms is not stand_in, PRECISION=precision(keys.dtype), STAGES=tuned["stages"],
        num_warps=tuned["warps"],
    )  # fmt: skip
    return out


def window_scores_tuning(rows: int, dim: int, dtype: torch.dtype, products: int) -> dict[str, int]:
    """Block sizes by shape; measured on an H200 for bfloat16 and 128 dims.

    rows: query rows of a KV head, each axis rounded up to a power of two; products: matrix products per block, 2 where
    the indicator needs <a, v>. "rows" of the result: how many of them at a time; one go beats a loop over chunks.
    """
    if dim > 128 or dtype == torch.float32:
        return {"rows": 64, "block_t": 32, "warps": 4, "stages": 2, "per_multiprocessor": 2}
    if rows > 256:
        return {"rows": 64, "block_t": 128, "warps": 4, "stages": 2, "per_multiprocessor": 2}
    warps = 8 if rows > 64 and products == 2 else 4
    return {"rows": 256, "block_t": 64, "warps": warps, "stages": 3, "per_multiprocessor": 2}
