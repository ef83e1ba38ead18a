"""The kernel of column mass (formula in `column_mass.py`): queries stream past a block of keys."""

import triton
import triton.language as tl


@triton.jit
def sum_columns(
    query, keys, lse, starts, spans, out,
    query_batch, query_head, query_row, key_batch, key_head, key_token,  # strides in elements
    kv_heads, group, queries, tokens, scale,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_T: tl.constexpr, SPANS: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The attention of one query head to one block of keys, summed over its queries. The sum stays in registers."""
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
    inside = (token < tokens)[:, None] & (dim[None, :] < DIM)
    key = tl.load(keys + token.to(tl.int64)[:, None] * key_token + dim[None, :], mask=inside, other=0.0)  # [T, D]
    span = token
    if SPANS:
        span = tl.load(spans + token, mask=token < tokens, other=-2)  # [T]

    low = tl.maximum(begin - first, 0) // BLOCK_Q * BLOCK_Q  # the first block that sees a key of this block
    edge = low + tl.cdiv(tl.maximum(begin + BLOCK_T - 1 - first - low, 0), BLOCK_Q) * BLOCK_Q  # ... that sees all
    mass = tl.zeros((BLOCK_Q, BLOCK_T), tl.float32)
    for whole in tl.static_range(2):  # queries that see some of the keys, then those that see all
        at = edge if whole else low
        end = queries if whole else tl.minimum(edge, queries)
        for i in tl.range(at, end, BLOCK_Q, num_stages=STAGES):
            is_query = i + step < queries
            read = is_query[:, None] & (dim[None, :] < DIM) if BLOCK_D != DIM else is_query[:, None]
            base = tl.zeros((), tl.int64) + i
            q_at = query + base * query_row + (step[:, None] * query_row + dim[None, :])
            q = tl.load(q_at, mask=read, other=0.0)  # [Q, D]
            log_sum = tl.load(lse + i + step, mask=is_query, other=float("inf")) * 1.4426950408889634  # [Q]
            log_sum = tl.where(log_sum == float("-inf"), float("inf"), log_sum)  # a query that sees nothing
            logits = tl.dot(q, tl.trans(key), input_precision=PRECISION)  # [Q, T]
            p = tl.exp2(logits * scale - log_sum[:, None])
            if not whole:
                p = tl.where(token[None, :] <= first + i + step[:, None], p, 0.0)
            if SPANS:
                query_span = tl.load(spans + first + i + step, mask=is_query, other=-1)  # [Q]
                apart = (query_span[:, None] != span[None, :]) & (query_span[:, None] >= 0) & (span[None, :] >= 0)
                p = tl.where(apart, 0.0, p)
            mass += p
    total = tl.where(token >= tl.load(starts + head_row), tl.sum(mass, 0), 0.0)
    tl.store(out + row * tokens + token, total, mask=token < tokens)
