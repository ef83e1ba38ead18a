"""The kernel of window scores (formula in `window_scores.py`): a program scores a stretch of one KV head's tokens.

A head's query rows are loaded once where they fit, or chunk by chunk for each block of tokens.
"""

import triton
import triton.language as tl

from kvrepro_kernels.window_indicators import indicated, pooled_attention
from kvrepro_kernels.window_rows_kernel import load_rows, reduced


@triton.jit(  # another prompt length or memory address must not compile the kernel again
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
    """Scores of a stretch of one KV head's tokens. Long, since data that is loaded once stays in registers."""
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
        rows = load_rows(
            query, outputs, lse, lasts, query_head, query_row, output_head, output_row, lse_head, lse_row, 0, edge,
            group, window, present, LASTS, DIM, BLOCK_D, GROUPS, WINDOW, READ_A,
        )  # fmt: skip
    begin = tl.program_id(0) * tokens_per_split
    for at in tl.range(begin, tl.minimum(begin + tokens_per_split, tokens), BLOCK_T, num_stages=STAGES):
        token = at + step
        valid = token < tokens
        read = valid[:, None] & (dim[None, :] < DIM)
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
            v32 = value.to(tl.float32)
            norm = tl.sum(v32 * v32, 1)  # [T]
            if INDICATOR == "value":
                norm = tl.sqrt(norm)
        elif NORMS:
            norm = tl.load(norms + head_row * tokens + token, mask=valid, other=0.0)  # [T]
        y = tl.full((BLOCK_T,), float("-inf") if REDUCTION == "max" else 0.0, tl.float32)
        for chunk in range(CHUNKS):
            if CHUNKS > 1:
                rows = load_rows(
                    query, outputs, lse, lasts, query_head, query_row, output_head, output_row, lse_head, lse_row,
                    chunk, edge, group, window, present, LASTS, DIM, BLOCK_D, GROUPS, WINDOW, READ_A,
                )  # fmt: skip
            q, a, aa, log_sum, last, is_query = rows
            live = token[:, None] >= start
            if POOL == 1:
                logits = tl.dot(key, tl.trans(q), input_precision=PRECISION)  # [T, R]
                p = tl.exp2(logits * scale - log_sum[None, :])
                live = live & (token[:, None] <= last[None, :])
            else:
                p = pooled_attention(
                    keys, at, step, dim, key_token, tokens, q, log_sum, last, start, scale, DIM, POOL, BY_MAX, PRECISION
                )
            x = tl.where(live, indicated(p, value, norm, a, aa, eps, INDICATOR, ROUND, PRECISION), 0.0)  # [T, R]
            z = reduced(x, is_query, present, GROUPS, WINDOW, AGGREGATE, REDUCTION)
            if REDUCTION == "none":
                z *= factor
                g = chunk * GROUPS + tl.arange(0, GROUPS)
                z_at = (head_row * group + g[None, :]) * tokens + token[:, None]
                tl.store(scores + z_at, z, mask=valid[:, None] & (g < group)[None, :])
            elif CHUNKS == 1:
                y = z
            else:
                y = tl.maximum(y, z) if REDUCTION == "max" else y + z
        if REDUCTION != "none":
            tl.store(scores + head_row * tokens + token, y * factor, mask=valid)
