"""The kernel of window scores (formula in `window_scores.py`): a program scores a stretch of one KV head's tokens.

A head's query rows are loaded once where they fit, or chunk by chunk for each block of tokens.
"""

import triton
import triton.language as tl


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
def score_tokens(
    query, keys, values, lse, outputs, norms, firsts, starts, scores,
    query_batch, query_head, query_row, output_batch, output_head, output_row, lse_batch, lse_head, lse_row,
    key_batch, key_head, key_token, value_batch, value_head, value_token,  # strides in elements
    kv_heads, tokens, group, window, edge, tokens_per_split, scale, eps, factor,
    FIRSTS: tl.constexpr, STARTS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr,
    GROUPS: tl.constexpr, WINDOW: tl.constexpr,
    CHUNKS: tl.constexpr, INDICATOR: tl.constexpr, AGGREGATE: tl.constexpr, REDUCTION: tl.constexpr,
    GIVEN_NORMS: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Scores of a stretch of one KV head's tokens. Long, because what is loaded once stays in registers."""
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
