"""Kernels of window attention (formula: `window_attention.py`): attention to a split of the keys, and the merge."""

import triton
import triton.language as tl


@triton.jit
def _logits(q, keys, at, step, dim, key_token, tokens, last, start, scale, DIM: tl.constexpr, PRECISION: tl.constexpr):
    """Logits [R, T] in base 2 of the tokens from `at` on; -inf where the query does not see the token."""
    token = at + step
    read = ((token >= 0) & (token < tokens))[:, None] & (dim[None, :] < DIM)
    base = (tl.zeros((), tl.int64) + at) * key_token  # 64 bits: a head may pass 2**31 elements
    key = tl.load(keys + base + (step[:, None] * key_token + dim[None, :]), read, 0.0)  # [T, D]
    logits = tl.dot(q, tl.trans(key), input_precision=PRECISION) * scale
    seen = (token[None, :] < tokens) & (token[None, :] <= last[:, None]) & (token[None, :] >= start)
    return tl.where(seen, logits, float("-inf"))


@triton.jit(  # another prompt length must not compile the kernel again
    do_not_specialize=["tokens", "edge", "tokens_per_split"], do_not_specialize_on_alignment=["lasts", "starts"]
)
def attend_split(
    query, keys, values, lasts, starts, part_outputs, part_lse,
    query_batch, query_head, query_row, key_batch, key_head, key_token, value_batch, value_head, value_token,
    kv_heads, tokens, rows, window, edge, tokens_per_split, scale,
    LASTS: tl.constexpr, STARTS: tl.constexpr, POOL: tl.constexpr,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Attention to one split of the keys. The kernel is long because its running sums stay in registers."""
    head_row = tl.program_id(1).to(tl.int64)  # batch row * kv_heads + KV head
    batch, head = head_row // kv_heads, head_row % kv_heads
    row = tl.program_id(2) * BLOCK_R + tl.arange(0, BLOCK_R)  # [R], query head in the group * window + query
    dim = tl.arange(0, BLOCK_D)  # [D]
    step = tl.arange(0, BLOCK_T)  # [T]
    last = edge + row % window
    start = 0
    if LASTS:
        last = tl.load(lasts + head_row * window + row % window)  # [R]
    if STARTS:
        start = tl.load(starts + head_row)
    keys += batch * key_batch + head * key_head
    values += batch * value_batch + head * value_head
    query += batch * query_batch + head * (rows // window) * query_head
    mask = (row[:, None] < rows) & (dim[None, :] < DIM)
    q = tl.load(query + (row // window * query_head + row % window * query_row)[:, None] + dim[None, :], mask, 0.0)

    top = tl.full((BLOCK_R,), float("-inf"), tl.float32)  # running maximum, base 2
    mass = tl.zeros((BLOCK_R,), tl.float32)
    out = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
    begin = tl.program_id(0) * tokens_per_split
    end = tl.minimum(begin + tokens_per_split, tokens)
    end = tl.minimum(end, tl.max(tl.where(row < rows, last, -1), 0) + 1 + POOL // 2)
    for at in tl.range(begin, end, BLOCK_T, num_stages=STAGES):
        token = at + step
        read = (token < tokens)[:, None] & (dim[None, :] < DIM)
        base = tl.zeros((), tl.int64) + at  # 64 bits: a head may pass 2**31 elements
        value = tl.load(values + base * value_token + (step[:, None] * value_token + dim[None, :]), read, 0.0)  # [T, D]
        if POOL == 1:
            logits = _logits(q, keys, at, step, dim, key_token, tokens, last, start, scale, DIM, PRECISION)
        else:
            logits = tl.full((BLOCK_R, BLOCK_T), float("-inf"), tl.float32)
            for shift in range(-(POOL // 2), POOL // 2 + 1):
                near = _logits(q, keys, at + shift, step, dim, key_token, tokens, last, start, scale, DIM, PRECISION)
                logits = tl.maximum(logits, near)
            logits = tl.where(((token < tokens) & (token >= start))[None, :], logits, float("-inf"))
        higher = tl.maximum(top, tl.max(logits, 1))
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        p = tl.exp2(logits - shift[:, None])
        shrink = tl.exp2(top - shift)
        mass = mass * shrink + tl.sum(p, 1)
        out = tl.dot(p.to(value.dtype), value, out * shrink[:, None], input_precision=PRECISION)
        top = higher

    sees_any = mass > 0.0
    part = (head_row * tl.num_programs(0) + tl.program_id(0)) * rows + row
    tl.store(part_lse + part, tl.where(sees_any, top + tl.log2(mass), float("-inf")), mask=row < rows)
    out = out / tl.where(sees_any, mass, 1.0)[:, None]
    tl.store(part_outputs + part[:, None] * DIM + dim[None, :], out, mask=mask)


@triton.jit(do_not_specialize=["splits"])
def merge_splits(
    part_outputs, part_lse, outputs, lse, rows, splits, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr
):
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
