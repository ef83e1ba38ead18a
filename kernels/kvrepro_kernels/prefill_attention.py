"""Causal attention of a whole prompt that also returns the log-sum-exp, by torch's own kernels.

    L[h,i] = log sum_(j <= i) exp(scale <q[h,i], k[j]>)
    out[h,i] = sum_(j <= i) exp(scale <q[h,i], k[j]> - L[h,i]) v[j]

Every backend below returns both from one forward pass; the public function `scaled_dot_product_attention` returns only
the output. The backend is an argument and a field of the result; none falls back to another.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

BACKENDS = ("cudnn", "flash", "efficient", "cpu")


@dataclass(frozen=True)
class Prefilled:
    """output [batch, heads, tokens, dim] in the query's dtype, lse float32 [batch, heads, tokens], and the backend."""

    output: Tensor
    lse: Tensor
    backend: str


def prefill_attention_reference(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The reference, in the inputs' dtype (upcast them first): output and lse."""
    q = query.unflatten(1, (keys.shape[1], -1))
    logits = scale * torch.einsum("bgrid,bgjd->bgrij", q, keys)
    future = torch.ones(logits.shape[-2:], dtype=torch.bool, device=query.device).triu(1)
    logits = logits.masked_fill(future, -torch.inf)
    output = torch.einsum("bgrij,bgjd->bgrid", logits.softmax(-1), values)
    return output.flatten(1, 2), logits.logsumexp(-1).flatten(1, 2)


def prefill_backend(query: Tensor) -> str:
    """The fastest backend for these queries: on an H200 cuDNN's, in 16 bit, to 128 dims (data/gpu/kernels.csv)."""
    if query.device.type == "cpu":
        return "cpu"
    if query.dtype == torch.float32:
        return "efficient"
    return "cudnn" if query.shape[-1] <= 128 else "flash"


def prefill_attention(
    query: Tensor, keys: Tensor, values: Tensor, *, scale: float | None = None, backend: str | None = None
) -> Prefilled:
    """Causal attention, query [batch, heads, tokens, dim] against keys and values [batch, kv_heads, tokens, dim].

    scale: of the logits, by default dim**-0.5. backend: one of `BACKENDS`, by default `prefill_backend`'s. "efficient"
    repeats keys and values for grouped heads, the others read them in place.
    Raises ValueError for tensors that do not fit each other, and torch's own error for what a backend does not support.
    """
    batch, heads, tokens, dim = query.shape
    kv_heads = keys.shape[1]
    if keys.shape != (batch, kv_heads, tokens, dim) or values.shape != keys.shape or heads % kv_heads:
        given = f"{tuple(keys.shape)} and values {tuple(values.shape)}"
        raise ValueError(f"query {tuple(query.shape)} does not fit keys {given}: a prefill has as many queries as keys")
    backend = backend or prefill_backend(query)
    if backend not in BACKENDS:
        raise ValueError(f"backend {backend!r} is not one of {', '.join(BACKENDS)}")
    scale = dim**-0.5 if scale is None else scale
    ops = torch.ops.aten
    if backend == "cudnn":
        output, lse, *_ = ops._scaled_dot_product_cudnn_attention(
            query, keys, values, None, True, 0.0, True, False, scale=scale
        )
    elif backend == "flash":
        output, lse, *_ = ops._scaled_dot_product_flash_attention(query, keys, values, 0.0, True, False, scale=scale)
    elif backend == "efficient":
        k, v = (x.repeat_interleave(heads // kv_heads, 1) for x in (keys, values))
        output, lse, *_ = ops._scaled_dot_product_efficient_attention(query, k, v, None, True, 0.0, True, scale=scale)
    else:
        output, lse = ops._scaled_dot_product_flash_attention_for_cpu(query, keys, values, 0.0, True, scale=scale)
    return Prefilled(output, lse.reshape(batch, heads, -1)[:, :, :tokens].float(), backend)
