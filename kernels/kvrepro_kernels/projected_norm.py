"""Projected norms: the norm of every cached value after the output projection, without storing the projected values.

    norm[g,j] = 1/G sum over the query heads h of KV head g of ||v[g,j] W[h]||_1

A block of values stays on the chip while the projection streams past it, and each product is reduced at once: this
costs as many operations as the layer's own output projection of every token. If there are too few blocks for a GPU,
several programs share one, each with a part of the projection. CriticalKV and DefensiveKV rank by these norms.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvrepro_kernels.launch import cdiv, check_device, check_innermost, constants, multiprocessors, scores_into


def projected_norm_reference(values: Tensor, output: Tensor) -> Tensor:
    """The reference, in the inputs' dtype (upcast them first)."""
    w = output.unflatten(0, (values.shape[1], -1))  # [kv_heads, group, dim, hidden]
    return torch.einsum("bgjd,grdc->bgrjc", values, w).abs().sum(-1).mean(2)


@triton.jit
def _projected_norm(
    values, output, norms,
    value_batch, value_head, value_token, output_head, output_dim, output_column,  # strides in elements
    kv_heads, tokens, group, hidden,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    head_row = tl.program_id(1).to(tl.int64)  # batch row * kv_heads + KV head
    batch, head = head_row // kv_heads, head_row % kv_heads
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)  # [T]
    dim = tl.arange(0, BLOCK_D)  # [D]
    step = tl.arange(0, BLOCK_C)  # [C]
    at = values + batch * value_batch + head * value_head + token.to(tl.int64)[:, None] * value_token + dim[None, :]
    value = tl.load(at, mask=(token < tokens)[:, None] & (dim[None, :] < DIM), other=0.0)  # [T, D]
    output += head * group * output_head
    columns = tl.cdiv(hidden, BLOCK_C)
    part = tl.program_id(2)
    blocks = tl.cdiv(group * columns, tl.num_programs(2))  # blocks of the projection
    total = tl.zeros((BLOCK_T,), tl.float32)
    for i in tl.range(part * blocks, tl.minimum((part + 1) * blocks, group * columns), num_stages=STAGES):
        column = i % columns * BLOCK_C + step
        w_at = output + (i // columns) * output_head + column[:, None] * output_column + dim[None, :] * output_dim
        w = tl.load(w_at, mask=(column < hidden)[:, None] & (dim[None, :] < DIM), other=0.0)  # [C, D]
        total += tl.sum(tl.abs(tl.dot(value, tl.trans(w), input_precision=PRECISION)), 1)
    row = part * tl.num_programs(1).to(tl.int64) + head_row
    tl.store(norms + row * tokens + token, total / group, mask=token < tokens)


def projected_norm(
    values: Tensor, output: Tensor, *, out: Tensor | None = None, tuning: dict[str, int] | None = None
) -> Tensor:
    """Mean over the group of ||v W||_1, float32 [batch, kv_heads, tokens].

    values: [batch, kv_heads, tokens, dim], strided with dim innermost. output: the output projection of each query
    head, [heads, dim, hidden], strided; fastest with dim innermost, as a linear layer's [hidden, heads * dim] is.
    out: contiguous float32 tensor to write into. tuning: overrides of `projected_norm_tuning`.
    Raises ValueError for tensors that do not fit each other and for CPU tensors uninterpreted.
    """
    batch, kv_heads, tokens, dim = values.shape
    heads, _, hidden = output.shape
    if output.shape[1] != dim or heads % kv_heads:
        raise ValueError(f"output {tuple(output.shape)} does not fit values {tuple(values.shape)}")
    if output.dtype != values.dtype:
        raise ValueError(f"output is {output.dtype}, values are {values.dtype}; cast one")
    out = scores_into(out, values)
    check_device(_projected_norm, "projected_norm", (values, output, out))
    check_innermost(values=values)
    if out.numel() == 0:
        return out
    tuned = projected_norm_tuning(dim, values.dtype) | (tuning or {})
    grid = cdiv(tokens, tuned["block_t"]), batch * kv_heads
    programs, processors = grid[0] * grid[1], multiprocessors(values.device)
    parts = 1 if programs > processors else min(heads // kv_heads, 4 * processors // programs)
    norms = out if parts == 1 else out.new_empty(parts, *out.shape)
    sizes = *values.stride()[:3], *output.stride(), kv_heads, tokens, heads // kv_heads, hidden
    blocks = {"BLOCK_T": tuned["block_t"], "BLOCK_C": tuned["block_c"], **constants(dim, values.dtype, tuned)}
    _projected_norm[(*grid, parts)](values, output, norms, *sizes, **blocks)
    return out if parts == 1 else torch.sum(norms, 0, out=out)


def projected_norm_tuning(dim: int, dtype: torch.dtype) -> dict[str, int]:
    """Block sizes by shape; measured on an H100 for bfloat16 and 128 dims."""
    if dtype == torch.float32 or dim > 128:
        return {"block_t": 64, "block_c": 32, "warps": 4, "stages": 2}
    return {"block_t": 256, "block_c": 64, "warps": 8, "stages": 3}
