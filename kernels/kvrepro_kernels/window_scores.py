"""Window scores: what the last queries say about every cached token, in one pass over keys and values.

The forward pass already knows the window's log-sum-exp L and outputs a, so no softmax is left to do. For query head h
of KV head g, window query t and key j that it may see:

    p[h,t,j] = exp(scale <q[h,t], k[j]> - L[h,t])
    indicator   attention     p
                value         p n[j]                                 n[j] = ||v[j]||, or any norms given
                perturbation  (p / (1 - p + eps))^2 ||a[h,t] - v[j]||^2
                anchor        p <a[h,t], v[j]>
                entropy       -p ln(p + 1e-10)
    score[g,j] = group reduction over h of the aggregate over t of the indicator

0 for a pair where the query may not see the key or is not there. ||a - v||^2 = ||a||^2 + ||v||^2 - 2 <a, v>, clamped
at 0; there p is clamped at 1, which rounding in a given L would pass. Aggregates: mean, sum, max and unbiased variance
over the queries that are there. Group reductions: mean, max, sum, or none, a score for each query head. pool: p becomes
its mean or its largest over that many neighbouring tokens, whether the query may see the token itself or not.
Perturbation: DropKV; anchor: AnDPro; variance and entropy: CAKE; max over max of the pooled: DefensiveKV.

Scores of a query that pays nearly all attention to one key are as good as 1 - p: rounding in L is magnified by
1 / (1 - p + eps), and rounding in a by (1 / (1 - p + eps))^2. Such a key leads the ranking either way.
"""

import math

import torch
import triton
from torch import Tensor

from kvrepro_kernels.launch import check_device, check_innermost, multiprocessors, precision, scores_into
from kvrepro_kernels.window import visible_keys, window_rows
from kvrepro_kernels.window_attention import window_attention
from kvrepro_kernels.window_scores_kernel import score_tokens

INDICATORS = ("attention", "value", "perturbation", "anchor", "entropy")
AGGREGATES = ("mean", "sum", "max", "variance")
REDUCTIONS = ("mean", "max", "sum", "none")
POOLS = ("average", "max")


def window_scores_reference(
    query: Tensor, keys: Tensor, values: Tensor, lse: Tensor, outputs: Tensor,
    indicator: str, aggregate: str, reduction: str, scale: float, last: Tensor, starts: Tensor,
    norms: Tensor | None = None, eps: float = 1e-6, present: Tensor | None = None, pool: int = 1,
    pool_by: str = "average", round_p: bool = False,
) -> Tensor:  # fmt: skip
    """The truth, in the inputs' dtype (upcast first). Shapes as in `window_scores`, last [batch, kv_heads, window],
    starts [batch, kv_heads]."""
    kv_heads, tokens = keys.shape[1:3]
    q, a = (x.unflatten(1, (kv_heads, -1)) for x in (query, outputs))  # [batch, kv_heads, group, window, dim]
    log_sum = lse.unflatten(1, (kv_heads, -1)).unsqueeze(-1)
    there = log_sum.isfinite()
    a = torch.where(there, a, 0.0)
    seen = visible_keys(tokens, last, starts) & there
    p = torch.exp(scale * torch.einsum("bgrtd,bgjd->bgrtj", q, keys) - log_sum)
    if pool > 1:
        around = torch.nn.functional.pad(torch.where(seen, p, 0.0), (pool // 2, pool // 2)).unfold(-1, pool, 1)
        p = around.mean(-1) if pool_by == "average" else around.amax(-1)
        seen = (torch.arange(tokens, device=keys.device) >= starts[:, :, None])[:, :, None, None]
    if indicator == "attention":
        x = p
    elif indicator == "value":
        x = p * (values.norm(dim=-1) if norms is None else norms)[:, :, None, None]
    elif indicator == "entropy":
        x = -p * (p + 1e-10).log()
    elif indicator == "anchor":
        x = p * torch.einsum("bgrtd,bgjd->bgrtj", a, values)
    else:
        square = a.square().sum(-1, keepdim=True) + values.square().sum(-1)[:, :, None, None]
        distance = (square - 2 * torch.einsum("bgrtd,bgjd->bgrtj", a, values)).clamp(min=0.0)
        p = p.clamp(max=1.0).bfloat16().to(p) if round_p else p.clamp(max=1.0)
        x = (p / (1 - p + eps)).square() * distance
    x = torch.where(seen, x, 0.0)
    absent = [0] * len(x) if present is None else (query.shape[2] - present).tolist()  # they stand in front
    rows = [row[:, :, n:] for row, n in zip(x, absent, strict=True)]
    per_head = torch.stack([
        {"mean": row.mean, "sum": row.sum, "max": row.amax, "variance": row.var}[aggregate](-2) for row in rows
    ])  # fmt: skip
    if reduction == "none":
        return per_head.flatten(1, 2)
    return {"mean": per_head.mean, "max": per_head.amax, "sum": per_head.sum}[reduction](2)


def _check(
    query: Tensor, keys: Tensor, lse: Tensor | None, outputs: Tensor | None,
    indicator: str, aggregate: str, reduction: str, norms: Tensor | None, present: Tensor | None, pool: int,
    pool_by: str,
) -> None:  # fmt: skip
    """Raises ValueError for unknown names, and for what does not go together."""
    batch, kv_heads, tokens = keys.shape[:3]
    window = query.shape[2]
    for name, known, kind in (
        (indicator, INDICATORS, "indicator"), (aggregate, AGGREGATES, "aggregate"),
        (reduction, REDUCTIONS, "reduction"), (pool_by, POOLS, "pool_by"),
    ):  # fmt: skip
        if name not in known:
            raise ValueError(f"{kind} {name!r} is not one of {', '.join(known)}")
    if pool < 1 or pool % 2 == 0:
        raise ValueError(f"pool is {pool}: give an odd number of tokens, 1 for none")
    if present is not None and present.shape != (batch,):
        raise ValueError(f"present must be ({batch},), not {tuple(present.shape)}")
    if aggregate == "variance" and window < 2:
        raise ValueError(f"a variance needs a window of at least 2 queries, not {window}")
    if norms is not None and (indicator != "value" or norms.shape != (batch, kv_heads, tokens)):
        wanted = f"({batch}, {kv_heads}, {tokens}) with the indicator value"
        raise ValueError(f"norms must be {wanted}, not {tuple(norms.shape)} with {indicator}")
    if (lse is None) != (outputs is None):
        raise ValueError("give both lse and outputs, or neither")


def window_scores(
    query: Tensor, keys: Tensor, values: Tensor, lse: Tensor | None = None, outputs: Tensor | None = None, *,
    indicator: str = "perturbation", aggregate: str = "sum", reduction: str = "mean", scale: float | None = None,
    last: Tensor | None = None, starts: Tensor | None = None, present: Tensor | None = None,
    norms: Tensor | None = None, eps: float = 1e-6, pool: int = 1, pool_by: str = "average", round_p: bool = False,
    out: Tensor | None = None, tuning: dict[str, int] | None = None,
) -> Tensor:  # fmt: skip
    """Scores of every cached token, float32 [batch, kv_heads, tokens], or with reduction "none" [batch, heads, tokens].

    query: the window's, [batch, heads, window, dim]; keys, values: [batch, kv_heads, tokens, dim], strided as they lie,
    dim innermost. lse [batch, heads, window] in natural logarithm and outputs [batch, heads, window, dim]: the forward
    pass's; without both, `window_attention` computes them first, which reads keys and values once more. A row whose
    lse is not finite looks at nothing.
    scale: of the logits, by default dim**-0.5. last: int [batch or 1, kv_heads or 1, window], the index of the last key
    that each query may see, by default that of its own token, the window being the last ones. starts: int [batch] or
    [batch, kv_heads], the first live key (left padding, dead slots in front). present: int [batch], how many of the
    last queries are there, by default all; those before them count in no mean or variance.
    norms: [batch, kv_heads, tokens] for the indicator "value", by default ||v||. pool: an odd number of neighbouring
    tokens, of whose attention `pool_by` "average" (beyond the ends it is 0) or "max" stands for a token's. round_p: in
    the indicator "perturbation" p is rounded to bfloat16.
    out: contiguous float32 tensor to write into. tuning: overrides of `window_scores_tuning`.
    Raises ValueError for tensors that do not fit each other, unknown names and CPU tensors uninterpreted.
    Long, because the launch names everything that the kernel is given.
    """
    _check(query, keys, lse, outputs, indicator, aggregate, reduction, norms, present, pool, pool_by)
    last, starts = window_rows(query, keys, values, last, starts)
    batch, heads, window, dim = query.shape
    kv_heads, tokens = keys.shape[1:3]
    group = heads // kv_heads
    out = scores_into(out, keys, heads if reduction == "none" else kv_heads)
    if lse is None or outputs is None:
        outputs, lse = window_attention(query, keys, values, scale=scale, last=last, starts=starts)
    if lse.shape != (batch, heads, window) or outputs.shape != query.shape:
        found = f"{tuple(lse.shape)} and {tuple(outputs.shape)}"
        raise ValueError(f"lse and outputs must be {tuple(query.shape[:3])} and {tuple(query.shape)}, not {found}")
    given = {"norms": norms, "lasts": last, "starts": starts, "presents": present}
    used = [keys if x is None else x.contiguous() for x in given.values()]  # keys stand in for what is never read
    check_device(score_tokens, "window_scores", (query, keys, values, lse, outputs, *used, out))
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
    score_tokens[(triton.cdiv(tokens, per_split), batch * kv_heads)](
        query, keys, values, lse, outputs, *used, out,
        *query.stride()[:3], *outputs.stride()[:3], *lse.stride(), *keys.stride()[:3], *values.stride()[:3],
        kv_heads, tokens, group, window, tokens - window, per_split,
        (dim**-0.5 if scale is None else scale) * math.log2(math.e), eps, 1 / group if reduction == "mean" else 1.0,
        **{name.upper(): x is not None for name, x in given.items()},
        DIM=dim, BLOCK_D=triton.next_power_of_2(dim), BLOCK_T=block_t, GROUPS=groups, WINDOW=rows, CHUNKS=chunks,
        INDICATOR=indicator, AGGREGATE=aggregate, REDUCTION=reduction, POOL=pool, BY_MAX=pool_by == "max",
        ROUND=round_p, PRECISION=precision(keys.dtype), STAGES=tuned["stages"], num_warps=tuned["warps"],
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
