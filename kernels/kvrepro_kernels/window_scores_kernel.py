"""The kernel of window scores (formula in `window_scores.py`): a program scores a stretch of one KV head's tokens.

A head's query rows are loaded once where they fit, or chunk by chunk for each block of tokens.
"""

import triton
import triton.language as tl

from kvrepro_kernels.window_indicators import indicated, pooled_attention


@triton.jit
def _load_rows(
    query, outputs, lse, lasts, query_head, query_row, output_head, output_row, lse_head, lse_row, chunk, edge, group,
    window, present, LASTS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, GROUPS: tl.constexpr,
    WINDOW: tl.constexpr, READ_A: tl.constexpr,
):  # fmt: skip
    """Chunk `chunk` of a KV head's query rows, GROUPS heads of WINDOW rows each: q, a, ||a||^2, lse in base 2, last
    visible key, and whether the row is one of the window's `present` queries."""
    row = tl.arange(0, GROUPS * WINDOW)  # [R]
    dim = tl.arange(0, BLOCK_D)  # [D]
    g = chunk * GROUPS + row // WINDOW
    t = row % WINDOW
    mine = (g < group) & (t < window) & (t >= window - present)
    log_sum = tl.load(lse + g * lse_head + t * lse_row, mask=mine, other=float("inf")) * 1.4426950408889634  # [R]
    there = mine & (tl.abs(log_sum) < float("inf"))
    log_sum = tl.where(there, log_sum, float("inf"))
    read = there[:, None] & (dim[None, :] < DIM)
    q = tl.load(query + (g * query_head + t * query_row)[:, None] + dim[None, :], mask=read, other=0.0)  # [R, D]
    a = q
    if READ_A:
        a = tl.load(outputs + (g * output_head + t * output_row)[:, None] + dim[None, :], mask=read, other=0.0)
        a = a.to(q.dtype)  # [R, D]
    a32 = a.to(tl.float32)
    last = edge + t
    if LASTS:
        last = tl.load(lasts + t, mask=mine, other=-1)  # [R]
    return q, a, tl.sum(a32 * a32, 1), log_sum, last, mine


@triton.jit
def _score_rows(
    key, keys, value, norm, q, a, aa, log_sum, last, there, at, step, dim, key_token, tokens, start, scale, eps,
    present, GROUPS: tl.constexpr, WINDOW: tl.constexpr, DIM: tl.constexpr, INDICATOR: tl.constexpr,
    AGGREGATE: tl.constexpr, REDUCTION: tl.constexpr, POOL: tl.constexpr, BY_MAX: tl.constexpr, ROUND: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The tokens' aggregate over the rows of one chunk: [T], summed or maximised over its heads, or [T, GROUPS]."""
    token = at + step
    live = token[:, None] >= start
    if POOL == 1:
        logits = tl.dot(key, tl.trans(q), input_precision=PRECISION)  # [T, R]
        p = tl.exp2(logits * scale - log_sum[None, :])
        live = live & (token[:, None] <= last[None, :])
    else:
        p = pooled_attention(
            keys, at, step, dim, key_token, tokens, q, log_sum, last, start, scale, DIM, POOL, BY_MAX, PRECISION
        )
    x = tl.where(live, indicated(p, value, norm, a, aa, eps, INDICATOR, ROUND, PRECISION), 0.0)
    if AGGREGATE == "max":
        x = tl.where(there[None, :], x, float("-inf"))
    linear: tl.constexpr = AGGREGATE == "mean" or AGGREGATE == "sum"
    if linear and (REDUCTION == "mean" or REDUCTION == "sum"):
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
                off = x - (z / present)[:, :, None]
                off = tl.where(tl.reshape(there, (GROUPS, WINDOW))[None, :, :], off, 0.0)
                z = tl.sum(off * off, 2) / tl.maximum(present - 1, 1)
        if REDUCTION == "none":
            y = z
        elif REDUCTION == "max":
            y = tl.max(tl.where(head[None, :] > 0, z, float("-inf")), 1)
        else:
            y = tl.sum(tl.where(head[None, :] > 0, z, 0.0), 1)
    return y


@triton.jit
def _store_heads(scores, z, head_row, token, first, group, tokens, GROUPS: tl.constexpr):
    """z [T, GROUPS]: scores of the query heads `first` and on of a KV head."""
    g = first + tl.arange(0, GROUPS)
    at = (head_row * group + g[None, :]) * tokens + token[:, None]
    tl.store(scores + at, z, mask=(token < tokens)[:, None] & (g < group)[None, :])


@triton.jit(  # lengths and places of a prompt compile nothing anew
    do_not_specialize=["tokens", "edge", "tokens_per_split", "lse_batch", "lse_head"],
    do_not_specialize_on_alignment=["lse", "lasts", "starts", "presents"],
)
def score_tokens(
    query, keys, values, lse, outputs, norms, lasts, starts, presents, scores,
    query_batch, query_head, query_row, output_batch, output_head, output_row, lse_batch, lse_head, lse_row,
    key_batch, key_head, key_token, value_batch, value_head, value_token,  # strides in elements
    kv_heads, tokens, group, window, edge, tokens_per_split, scale, eps, factor,
    LASTS: tl.constexpr, STARTS: tl.constexpr, PRESENTS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr, GROUPS: tl.constexpr, WINDOW: tl.constexpr, CHUNKS: tl.constexpr,
    INDICATOR: tl.constexpr, AGGREGATE: tl.constexpr, REDUCTION: tl.constexpr, POOL: tl.constexpr,
    BY_MAX: tl.constexpr, ROUND: tl.constexpr, NORMS: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Scores of a stretch of one KV head's tokens. Long, because what is loaded once stays in registers."""
    head_row = tl.program_id(1).to(tl.int64)  # batch row * kv_heads + KV head
    batch, head = head_row // kv_heads, head_row % kv_heads
    start = 0
    present = window
    if STARTS:
        start = tl.load(starts + head_row)
    if PRESENTS:
        present = tl.load(presents + batch)
    if AGGREGATE == "mean":
        factor = factor / tl.maximum(present, 1)
    dim = tl.arange(0, BLOCK_D)  # [D]
    step = tl.arange(0, BLOCK_T)  # [T]
    keys += batch * key_batch + head * key_head
    values += batch * value_batch + head * value_head
    query += batch * query_batch + head * group * query_head
    outputs += batch * output_batch + head * group * output_head
    lse += batch * lse_batch + head * group * lse_head
    lasts += head_row * window
    READ_A: tl.constexpr = INDICATOR == "perturbation" or INDICATOR == "anchor"
    READ_V: tl.constexpr = READ_A or (INDICATOR == "value" and not NORMS)
    if CHUNKS == 1:  # the rows stay in registers and shared memory
        q, a, aa, log_sum, last, there = _load_rows(
            query, outputs, lse, lasts, query_head, query_row, output_head, output_row, lse_head, lse_row, 0, edge,
            group, window, present, LASTS, DIM, BLOCK_D, GROUPS, WINDOW, READ_A,
        )  # fmt: skip
    begin = tl.program_id(0) * tokens_per_split
    for at in tl.range(begin, tl.minimum(begin + tokens_per_split, tokens), BLOCK_T, num_stages=STAGES):
        token = at + step
        here = token < tokens
        read = here[:, None] & (dim[None, :] < DIM)
        base = tl.zeros((), tl.int64) + at  # 64 bits: a head may pass 2**31 elements
        key = tl.zeros((BLOCK_T, BLOCK_D), keys.dtype.element_ty)
        if POOL == 1:
            key_at = base * key_token + (step[:, None] * key_token + dim[None, :])
            key = tl.load(keys + key_at, mask=read, other=0.0)  # [T, D]
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
        if NORMS:
            norm = tl.load(norms + head_row * tokens + token, mask=here, other=0.0)  # [T]
        if CHUNKS == 1:
            y = _score_rows(
                key, keys, value, norm, q, a, aa, log_sum, last, there, at, step, dim, key_token, tokens, start, scale,
                eps, present, GROUPS, WINDOW, DIM, INDICATOR, AGGREGATE, REDUCTION, POOL, BY_MAX, ROUND, PRECISION,
            )  # fmt: skip
            if REDUCTION == "none":
                _store_heads(scores, y * factor, head_row, token, 0, group, tokens, GROUPS)
        else:
            y = tl.full((BLOCK_T,), float("-inf") if REDUCTION == "max" else 0.0, tl.float32)
            for chunk in range(CHUNKS):
                q, a, aa, log_sum, last, there = _load_rows(
                    query, outputs, lse, lasts, query_head, query_row, output_head, output_row, lse_head, lse_row,
                    chunk, edge, group, window, present, LASTS, DIM, BLOCK_D, GROUPS, WINDOW, READ_A,
                )  # fmt: skip
                z = _score_rows(
                    key, keys, value, norm, q, a, aa, log_sum, last, there, at, step, dim, key_token, tokens, start,
                    scale, eps, present, GROUPS, WINDOW, DIM, INDICATOR, AGGREGATE, REDUCTION, POOL, BY_MAX, ROUND,
                    PRECISION,
                )  # fmt: skip
                if REDUCTION == "none":
                    _store_heads(scores, z * factor, head_row, token, chunk * GROUPS, group, tokens, GROUPS)
                else:
                    y = tl.maximum(y, z) if REDUCTION == "max" else y + z
        if REDUCTION != "none":
            tl.store(scores + head_row * tokens + token, y * factor, mask=here)
