"""Device functions for the query rows of a window (formulas: `window_scores.py`): load them, and reduce over them."""

import triton
import triton.language as tl


@triton.jit
def load_rows(
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
    is_query = (g < group) & (t < window) & (t >= window - present)
    log_sum = tl.load(lse + g * lse_head + t * lse_row, mask=is_query, other=float("inf")) * 1.4426950408889634  # [R]
    finite = is_query & (tl.abs(log_sum) < float("inf"))
    log_sum = tl.where(finite, log_sum, float("inf"))
    read = finite[:, None] & (dim[None, :] < DIM)
    q = tl.load(query + (g * query_head + t * query_row)[:, None] + dim[None, :], mask=read, other=0.0)  # [R, D]
    a = q
    if READ_A:
        a = tl.load(outputs + (g * output_head + t * output_row)[:, None] + dim[None, :], mask=read, other=0.0)
        a = a.to(q.dtype)  # [R, D]
    a32 = a.to(tl.float32)
    last = edge + t
    if LASTS:
        last = tl.load(lasts + t, mask=is_query, other=-1)  # [R]
    return q, a, tl.sum(a32 * a32, 1), log_sum, last, is_query


@triton.jit
def reduced(
    x, is_query, present, GROUPS: tl.constexpr, WINDOW: tl.constexpr, AGGREGATE: tl.constexpr, REDUCTION: tl.constexpr
):
    """x [T, R] reduced over the rows of one chunk: [T], the sum or maximum over its heads, or [T, GROUPS]."""
    if AGGREGATE == "max":
        x = tl.where(is_query[None, :], x, float("-inf"))
    linear: tl.constexpr = AGGREGATE == "mean" or AGGREGATE == "sum"
    if linear and (REDUCTION == "mean" or REDUCTION == "sum"):
        y = tl.sum(x, 1)
    elif AGGREGATE == "max" and REDUCTION == "max":
        y = tl.max(x, 1)
    else:
        x = tl.reshape(x, (x.shape[0], GROUPS, WINDOW))
        head = tl.max(tl.reshape(is_query.to(tl.int32), (GROUPS, WINDOW)), 1)  # [GROUPS]
        if AGGREGATE == "max":
            y = tl.max(x, 2)  # [T, GROUPS]
        else:
            y = tl.sum(x, 2)
            if AGGREGATE == "variance":
                off = x - (y / present)[:, :, None]
                off = tl.where(tl.reshape(is_query, (GROUPS, WINDOW))[None, :, :], off, 0.0)
                y = tl.sum(off * off, 2) / tl.maximum(present - 1, 1)
        if REDUCTION == "max":
            y = tl.max(tl.where(head[None, :] > 0, y, float("-inf")), 1)
        elif REDUCTION != "none":
            y = tl.sum(tl.where(head[None, :] > 0, y, 0.0), 1)
    return y
