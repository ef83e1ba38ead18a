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
from torch import Tensor

from kvrepro_kernels.launch import check_device, check_innermost, multiprocessors, precision, scores_into
from kvrepro_kernels.window import visible_keys, window_rows
from kvrepro_kernels.window_attention import window_attention
from kvrepro_kernels.window_scores_kernel import score_tokens

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


def _check(
    query: Tensor, keys: Tensor, lse: Tensor | None, outputs: Tensor | None,
    indicator: str, aggregate: str, reduction: str, norms: Tensor | None,
) -> None:  # fmt: skip
    """Raises ValueError for unknown names, and for what does not go together."""
    batch, kv_heads, tokens = keys.shape[:3]
    window = query.shape[2]
    for name, known, kind in (
        (indicator, INDICATORS, "indicator"), (aggregate, AGGREGATES, "aggregate"), (reduction, REDUCTIONS, "reduction")
    ):  # fmt: skip
        if name not in known:
            raise ValueError(f"{kind} {name!r} is not one of {', '.join(known)}")
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
    Long, because the launch names everything that the kernel is given.
    """
    _check(query, keys, lse, outputs, indicator, aggregate, reduction, norms)
    firsts, edge, starts = window_rows(query, keys, values, first, starts)
    batch, heads, window, dim = query.shape
    kv_heads, tokens = keys.shape[1:3]
    group = heads // kv_heads
    out = scores_into(out, keys)
    if lse is None:
        outputs, lse = window_attention(query, keys, values, scale=scale, first=first, starts=starts)
    if lse.shape != (batch, heads, window) or outputs.shape != query.shape:
        found = f"{tuple(lse.shape)} and {tuple(outputs.shape)}"
        raise ValueError(f"lse and outputs must be {tuple(query.shape[:3])} and {tuple(query.shape)}, not {found}")
    stand_in = keys  # for what is never read
    norms = stand_in if norms is None else norms.float().contiguous()
    firsts = stand_in if firsts is None else firsts
    starts = stand_in if starts is None else starts
    check_device(score_tokens, "window_scores", (query, keys, values, lse, outputs, norms, firsts, starts, out))
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
    score_tokens[(triton.cdiv(tokens, per_split), batch * kv_heads)](
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
