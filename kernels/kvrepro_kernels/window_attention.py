"""Window attention: outputs and log-sum-exp of the last queries, for a forward pass that did not keep them.

    L[h,t] = log sum_j exp(scale <q[h,t], k[j]>)        over keys with starts[b,g] <= j <= last[b,g,t]
    a[h,t] = sum_j exp(scale <q[h,t], k[j]> - L[h,t]) v[j]

pool: a token's logit becomes the largest among its visible neighbours; then every live token counts as visible
(AnDPro's public code).

The keys are split over programs with a running maximum each (flash attention); a second kernel merges the splits. A
query that sees no key gets L = -inf and a = 0.
"""

import torch
from torch import Tensor

from kvrepro_kernels.launch import base_2, cdiv, check_device, constants, even_share, next_power_of_2
from kvrepro_kernels.window import visible_keys, window_rows
from kvrepro_kernels.window_attention_kernel import attend_split, merge_splits


def window_attention_reference(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, last: Tensor, starts: Tensor, pool: int = 1
) -> tuple[Tensor, Tensor]:
    """The reference, in the inputs' dtype (upcast them first): outputs [batch, heads, window, dim], lse [batch, heads,
    window]. last: [batch, kv_heads, window]; starts: [batch, kv_heads]."""
    q = query.unflatten(1, (keys.shape[1], -1))
    logits = scale * torch.einsum("bgrtd,bgjd->bgrtj", q, keys)
    logits = logits.masked_fill(~visible_keys(keys.shape[2], last, starts), -torch.inf)
    if pool > 1:
        logits = torch.nn.functional.max_pool1d(logits.flatten(0, 3)[:, None], pool, 1, pool // 2).view_as(logits)
        live = torch.arange(keys.shape[2], device=keys.device) >= starts[:, :, None]
        logits = logits.masked_fill(~live[:, :, None, None], -torch.inf)
    outputs = torch.einsum("bgrtj,bgjd->bgrtd", logits.softmax(-1).nan_to_num(0.0), values)
    return outputs.flatten(1, 2), logits.logsumexp(-1).flatten(1, 2)


def window_attention(
    query: Tensor, keys: Tensor, values: Tensor, *,
    scale: float | None = None, last: Tensor | None = None, starts: Tensor | None = None, pool: int = 1,
    out: tuple[Tensor, Tensor] | None = None, tuning: dict[str, int] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Outputs [batch, heads, window, dim] in the query's dtype and log-sum-exp, float32 [batch, heads, window].

    query: [batch, heads, window, dim]; keys, values: [batch, kv_heads, tokens, dim], strided, dim innermost.
    scale: of the logits, by default dim**-0.5. last: int [batch or 1, kv_heads or 1, window], the index of the last key
    that each query may see, by default its own token's, where the window holds the last tokens. starts: int [batch] or
    [batch, kv_heads], the first live key (after left padding or dead slots). pool: an odd number of neighbouring
    tokens. out: two contiguous tensors to write into. tuning: overrides of `window_attention_tuning`.
    Raises ValueError for tensors that do not fit each other and for CPU tensors uninterpreted.
    """
    last, starts = window_rows(query, keys, values, last, starts)
    batch, heads, window, dim = query.shape
    kv_heads, tokens = keys.shape[1:3]
    rows = heads // kv_heads * window
    if out is None:
        out = query.new_empty(batch, heads, window, dim), query.new_empty(batch, heads, window, dtype=torch.float32)
    if out[0].shape != query.shape or out[1].shape != query.shape[:3] or not all(x.is_contiguous() for x in out):
        raise ValueError(f"out must be contiguous of shapes {tuple(query.shape)} and {tuple(query.shape[:3])}")
    used = [keys if x is None else x for x in (last, starts)]  # the kernel does not read what is None
    check_device(attend_split, "window_attention", (query, keys, values, *used, *out))
    if 0 in (batch, heads, window):
        return out
    tuned = window_attention_tuning(rows, dim, keys.dtype) | (tuning or {})
    chunks = cdiv(rows, tuned["block_r"])
    share = even_share(tokens, batch * kv_heads * chunks, keys.device, tuned, most=64)
    splits = max(1, cdiv(tokens, share))
    part_outputs = torch.empty(batch * kv_heads, splits, rows, dim, dtype=torch.float32, device=keys.device)
    part_lse = torch.empty(batch * kv_heads, splits, rows, dtype=torch.float32, device=keys.device)
    tensors, parts = (query, keys, values, *used), (part_outputs, part_lse)
    strides = *query.stride()[:3], *keys.stride()[:3], *values.stride()[:3]
    sizes = kv_heads, tokens, rows, window, tokens - window, share, base_2(scale, dim)
    given = {"LASTS": last is not None, "STARTS": starts is not None, "POOL": pool}
    blocks = {"BLOCK_T": tuned["block_t"], "BLOCK_R": tuned["block_r"], **constants(dim, keys.dtype, tuned)}
    attend_split[(splits, batch * kv_heads, chunks)](*tensors, *parts, *strides, *sizes, **given, **blocks)
    blocks = {"DIM": dim, "BLOCK_D": next_power_of_2(dim), "BLOCK_S": next_power_of_2(splits), "num_warps": 4}
    merge_splits[(rows, batch * kv_heads)](*parts, *out, rows, splits, **blocks)
    return out


def window_attention_tuning(rows: int, dim: int, dtype: torch.dtype) -> dict[str, int]:
    """Block sizes by shape; measured on an H200 for bfloat16, 128 dims, 32 rows."""
    wide = dim > 128 or dtype == torch.float32
    blocks = {"block_t": 32 if wide else 64, "block_r": min(64, max(16, next_power_of_2(rows)))}
    return blocks | {"warps": 4, "stages": 2 if wide else 3, "per_multiprocessor": 2}
