"""Window scores: the importance of every cached token for the last queries, in one pass over keys and values.

The forward pass has computed the window's log-sum-exp L and outputs a, so no softmax is needed. For query head h of KV
head g, window query t and key j that it may see:

    p[h,t,j] = exp(scale <q[h,t], k[j]> - L[h,t])
    indicator   attention     p
                value         p n[j]                                 n[j] = ||v[j]||, or any norms given
                perturbation  (p / (1 - p + eps))^2 ||a[h,t] - v[j]||^2
                anchor        p <a[h,t], v[j]>
                entropy       -p ln(p + 1e-10)
    score[g,j] = group reduction over h of the aggregate over t of the indicator

The indicator is 0 for keys that the query may not see, and for absent queries. ||a - v||^2 = ||a||^2 + ||v||^2 -
2 <a, v> is clamped at 0, and in the perturbation p is clamped at 1, which it could exceed by rounding in a given L.
Aggregates: mean, sum, max and unbiased variance over the queries that are present. Group reductions: mean, max, sum, or
none for a score of each query head. pool: p is replaced by its mean or its largest over that many neighbouring tokens,
even where the query may not see the token itself. Perturbation: DropKV; anchor: AnDPro; variance and entropy: CAKE; max
over max of the pooled: DefensiveKV.

If a query pays nearly all attention to one key, its scores are only as accurate as 1 - p: rounding in L is magnified by
1 / (1 - p + eps), and rounding in a by (1 / (1 - p + eps))^2. Such a key leads the ranking in any case.
"""

import torch
from torch import Tensor

from kvrepro_kernels import launch
from kvrepro_kernels.window import window_rows
from kvrepro_kernels.window_attention import window_attention
from kvrepro_kernels.window_rules import check_rule
from kvrepro_kernels.window_scores_kernel import score_tokens


def window_scores(
    query: Tensor, keys: Tensor, values: Tensor, lse: Tensor | None = None, outputs: Tensor | None = None, *,
    indicator: str = "perturbation", aggregate: str = "sum", reduction: str = "mean", scale: float | None = None,
    last: Tensor | None = None, starts: Tensor | None = None, present: Tensor | None = None,
    norms: Tensor | None = None, eps: float = 1e-6, pool: int = 1, pool_by: str = "average", round_p: bool = False,
    out: Tensor | None = None, tuning: dict[str, int] | None = None,
) -> Tensor:  # fmt: skip
    """Scores of every cached token, float32 [batch, kv_heads, tokens], or with reduction "none" [batch, heads, tokens].

    query: the window's, [batch, heads, window, dim]; keys, values: [batch, kv_heads, tokens, dim], any strides with dim
    innermost. lse [batch, heads, window] in natural logarithm and outputs [batch, heads, window, dim]: the forward
    pass's; without them, `window_attention` computes them first, which reads keys and values once more. A query whose
    lse is not finite sees nothing.
    scale, last, starts: as in `window_attention`. present: int [batch], how many of the last queries are no padding, by
    default all; padding queries, which come first, do not count in a mean or variance.
    norms: [batch, kv_heads, tokens] for the indicator "value", by default ||v||. pool: an odd number of neighbouring
    tokens, over whose attention `pool_by` takes the "average" (with 0 beyond the ends) or the "max". round_p: round p
    to bfloat16 in the indicator "perturbation".
    out: contiguous float32 tensor to write into. tuning: overrides of `window_scores_tuning`.
    Raises ValueError for tensors that do not fit each other, unknown names and CPU tensors uninterpreted.
    """
    names = dict(indicator=indicator, aggregate=aggregate, reduction=reduction, pool_by=pool_by)
    check_rule(keys, query.shape[2], norms, present, pool, **names)
    last, starts = window_rows(query, keys, values, last, starts)
    batch, heads, window, dim = query.shape
    kv_heads, tokens = keys.shape[1:3]
    group = heads // kv_heads
    out = launch.scores_into(out, keys, heads if reduction == "none" else kv_heads)
    if (lse is None) != (outputs is None):
        raise ValueError("give both lse and outputs, or neither")
    if lse is None or outputs is None:
        outputs, lse = window_attention(query, keys, values, scale=scale, last=last, starts=starts)
    if lse.shape != (batch, heads, window) or outputs.shape != query.shape:
        shapes = f"{tuple(lse.shape)} and {tuple(outputs.shape)}"
        raise ValueError(f"lse and outputs must be {tuple(query.shape[:3])} and {tuple(query.shape)}, not {shapes}")
    given = {"NORMS": norms, "LASTS": last, "STARTS": starts, "PRESENTS": present}
    used = [keys if x is None else x.contiguous() for x in given.values()]  # the kernel does not read what is None
    launch.check_device(score_tokens, "window_scores", (query, keys, values, lse, outputs, *used, out))
    launch.check_innermost(outputs=outputs)
    if 0 in (batch, tokens):
        return out

    rows, heads_2 = launch.next_power_of_2(window), launch.next_power_of_2(group)
    tuned = window_scores_tuning(heads_2 * rows, dim, keys.dtype, indicator) | (tuning or {})
    groups = max(1, min(heads_2, tuned["rows"] // rows), 16 // rows)  # a dot needs 16 rows
    share = launch.even_share(tokens, batch * kv_heads, keys.device, tuned)
    tensors = query, keys, values, lse, outputs, *used, out
    strides = *query.stride()[:3], *outputs.stride()[:3], *lse.stride(), *keys.stride()[:3], *values.stride()[:3]
    sizes = kv_heads, tokens, group, window, tokens - window, share
    factors = launch.base_2(scale, dim), eps, 1 / group if reduction == "mean" else 1.0
    rule = {"INDICATOR": indicator, "AGGREGATE": aggregate, "REDUCTION": reduction, "ROUND": round_p}
    rule |= {"POOL": pool, "BY_MAX": pool_by == "max", **{name: x is not None for name, x in given.items()}}
    blocks = {"BLOCK_T": tuned["block_t"], "GROUPS": groups, "WINDOW": rows, "CHUNKS": launch.cdiv(group, groups)}
    blocks |= launch.constants(dim, keys.dtype, tuned)
    grid = launch.cdiv(tokens, share), batch * kv_heads
    score_tokens[grid](*tensors, *strides, *sizes, *factors, **rule, **blocks)
    return out


def window_scores_tuning(rows: int, dim: int, dtype: torch.dtype, indicator: str) -> dict[str, int]:
    """Block sizes by shape; measured on an H200 for bfloat16 and 128 dims.

    rows: query rows of a KV head, each axis rounded up to a power of two. "rows" of the result: the rows that a program
    takes at a time; all at once are faster than a loop over chunks.
    """
    if dim > 128 or dtype == torch.float32:
        return {"rows": 64, "block_t": 32, "warps": 4, "stages": 2, "per_multiprocessor": 2}
    if rows > 256:
        return {"rows": 64, "block_t": 128, "warps": 4, "stages": 2, "per_multiprocessor": 2}
    warps = 8 if rows > 64 and indicator in ("perturbation", "anchor") else 4  # these need a second product, <a, v>
    return {"rows": 256, "block_t": 64, "warps": warps, "stages": 3, "per_multiprocessor": 2}
