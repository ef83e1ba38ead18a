"""Rotary embedding of queries and keys in one launch; in a captured step of one token launches take most of the time.

With x1 and x2 the halves of a row x of dim numbers, c and s the cosines and sines of its place,

    y[:dim/2] = round(x1 c1) - round(x2 s1)     y[dim/2:] = round(x2 c2) + round(x1 s2)        round: to x's dtype

as transformers' Llama, Mistral, Qwen and Gemma compute it in ten launches.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvrepro_kernels.launch import check_device, check_innermost, next_power_of_2


def rotary_reference(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """The reference: query, key [batch, heads, tokens, dim], cos and sin [batch or 1, tokens, dim], one dtype."""
    cos, sin = cos[:, None], sin[:, None]

    def turned(x: Tensor) -> Tensor:
        first_half, second_half = x.chunk(2, -1)
        return x * cos + torch.cat([-second_half, first_half], -1) * sin

    return turned(query), turned(key)


@triton.jit
def _turn(x, out, c1, c2, s1, s2, half, valid, HALF: tl.constexpr):
    kind = x.dtype.element_ty
    first_half = tl.load(x + half, mask=valid).to(tl.float32)  # [H]
    second_half = tl.load(x + HALF + half, mask=valid).to(tl.float32)
    first = (first_half * c1).to(kind).to(tl.float32) - (second_half * s1).to(kind).to(tl.float32)
    second = (second_half * c2).to(kind).to(tl.float32) + (first_half * s2).to(kind).to(tl.float32)
    tl.store(out + half, first.to(kind), mask=valid)
    tl.store(out + HALF + half, second.to(kind), mask=valid)


@triton.jit
def _rotary(
    query, key, cos, sin, out_query, out_key, tokens, heads, kv_heads,
    query_batch, query_head, query_token, key_batch, key_head, key_token, cos_batch, cos_token, sin_batch, sin_token,
    HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(0).to(tl.int64) // tokens
    token = tl.program_id(0).to(tl.int64) % tokens
    head = tl.program_id(1)
    half = tl.arange(0, BLOCK)  # [H]
    valid = half < HALF
    cos += batch * cos_batch + token * cos_token
    sin += batch * sin_batch + token * sin_token
    c1 = tl.load(cos + half, mask=valid).to(tl.float32)
    c2 = tl.load(cos + HALF + half, mask=valid).to(tl.float32)
    s1 = tl.load(sin + half, mask=valid).to(tl.float32)
    s2 = tl.load(sin + HALF + half, mask=valid).to(tl.float32)
    if head < heads:
        x = query + batch * query_batch + head * query_head + token * query_token
        _turn(x, out_query + ((batch * heads + head) * tokens + token) * 2 * HALF, c1, c2, s1, s2, half, valid, HALF)
    else:
        head -= heads
        x = key + batch * key_batch + head * key_head + token * key_token
        _turn(x, out_key + ((batch * kv_heads + head) * tokens + token) * 2 * HALF, c1, c2, s1, s2, half, valid, HALF)


def rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate query and key [batch, heads, tokens, dim] by cos and sin [batch or 1, tokens, dim]. Any strides with dim
    innermost; the results are contiguous. Raises ValueError for tensors that do not fit each other."""
    batch, heads, tokens, dim = query.shape
    fits = key.shape[::3] + key.shape[2:3] == (batch, dim, tokens) and len({len(cos), batch} - {1}) <= 1
    if not fits or cos.shape[1:] != (tokens, dim) or sin.shape != cos.shape or dim % 2:
        shapes = ", ".join(str(tuple(x.shape)) for x in (query, key, cos, sin))
        raise ValueError(f"query, key, cos and sin do not fit each other: {shapes}")
    if len({x.dtype for x in (query, key, cos, sin)}) > 1:
        raise ValueError(f"query, key, cos and sin must have one dtype, not {query.dtype} and {cos.dtype} among others")
    check_innermost(query=query, key=key, cos=cos, sin=sin)
    out = query.new_empty(query.shape), key.new_empty(key.shape)
    check_device(_rotary, "rotary", (query, key, cos, sin))
    cos_batch, sin_batch = (x.stride(0) if len(x) > 1 else 0 for x in (cos, sin))
    if query.numel():
        sizes = tokens, heads, key.shape[1], *query.stride()[:3], *key.stride()[:3]
        rows = cos_batch, cos.stride(1), sin_batch, sin.stride(1)
        blocks = {"HALF": dim // 2, "BLOCK": next_power_of_2(dim // 2), "num_warps": 1, "enable_fp_fusion": False}
        _rotary[(batch * tokens, heads + key.shape[1])](query, key, cos, sin, *out, *sizes, *rows, **blocks)
    return out
