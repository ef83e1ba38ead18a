"""Device functions of window scores (formulas in `window_scores.py`): pooled attention and the indicators."""

import triton
import triton.language as tl


@triton.jit
def _bfloat16(x):
    """x rounded to bfloat16, half to even, as float32; by its bits, since the interpreter's own rounding is wrong."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def pooled_attention(
    keys, at, step, dim, key_token, tokens, q, log_sum, last, start, scale,
    DIM: tl.constexpr, POOL: tl.constexpr, BY_MAX: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """[T, R]: the mean or largest attention to the POOL neighbours of each token; 0 for invisible ones."""
    x = tl.full((step.shape[0], log_sum.shape[0]), float("-inf") if BY_MAX else 0.0, tl.float32)
    for shift in tl.range(-(POOL // 2), POOL // 2 + 1, num_stages=2):
        token = at + shift + step
        base = (tl.zeros((), tl.int64) + at + shift) * key_token
        read = ((token >= 0) & (token < tokens))[:, None] & (dim[None, :] < DIM)
        key = tl.load(keys + base + (step[:, None] * key_token + dim[None, :]), mask=read, other=0.0)  # [T, D]
        logits = tl.dot(key, tl.trans(q), input_precision=PRECISION) * scale  # [T, R]
        seen = (token[:, None] <= last[None, :]) & (token[:, None] >= start)
        if BY_MAX:
            x = tl.maximum(x, tl.where(seen, logits, float("-inf")))
        else:
            x += tl.where(seen, tl.exp2(logits - log_sum[None, :]), 0.0)
    return tl.exp2(x - log_sum[None, :]) if BY_MAX else x / POOL


@triton.jit
def indicated(p, value, norm, a, aa, eps, INDICATOR: tl.constexpr, ROUND: tl.constexpr, PRECISION: tl.constexpr):
    """[T, R]: the indicator of the tokens from attention p to them."""
    if INDICATOR == "attention":
        x = p
    elif INDICATOR == "value":
        x = p * norm[:, None]
    elif INDICATOR == "entropy":
        x = -p * tl.log(p + 1e-10)
    else:
        av = tl.dot(value, tl.trans(a), input_precision=PRECISION)  # [T, R]
        if INDICATOR == "anchor":
            x = p * av
        else:
            p = tl.minimum(p, 1.0)
            if ROUND:
                p = _bfloat16(p)
            w = p / (1.0 - p + eps)
            x = w * w * tl.maximum(aa[None, :] + norm[:, None] - 2.0 * av, 0.0)
    return x
