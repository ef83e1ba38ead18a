"""Compaction: gather the kept rows of a layer's key and value cache into dense tensors.

With `rows[b, g, i]` the i-th kept row of batch row b and KV head g, or -1 where a head keeps fewer than its neighbours:

    out[b, g, i, :] = x[b, g, rows[b, g, i], :]   if rows[b, g, i] >= 0   else 0      for x in (keys, values)

Rows are places in storage, not true positions: after a first eviction the two differ. The kernel moves bytes and
computes nothing, so it agrees with the reference bit for bit in every dtype.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvrepro_kernels.launch import cdiv, check_device, check_innermost, check_pair, next_power_of_2


def compact_reference(keys: Tensor, values: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The reference: keys, values [batch, kv_heads, tokens, dim], rows [batch, kv_heads, kept]: two [.., kept, dim]."""
    index = rows.long().clamp(min=0).unsqueeze(-1).expand(*rows.shape, keys.shape[-1])
    padding = (rows < 0).unsqueeze(-1)
    return keys.gather(2, index).masked_fill(padding, 0), values.gather(2, index).masked_fill(padding, 0)


@triton.jit
def _compact(
    keys, values, rows, out_keys, out_values,
    key_batch, key_head, key_token, value_batch, value_head, value_token,  # strides in elements
    kv_heads, kept,
    DIM: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head_row = tl.program_id(1).to(tl.int64)  # batch row * kv_heads + KV head; 64 bits: a cache may pass 2**31 elements
    batch, head = head_row // kv_heads, head_row % kv_heads
    slot = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)  # [BLOCK_T]
    dim = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    row = tl.load(rows + head_row * kept + slot, mask=slot < kept, other=-1).to(tl.int64)  # [BLOCK_T]

    read = (row[:, None] >= 0) & (dim[None, :] < DIM)  # [BLOCK_T, BLOCK_D]
    key_at = batch * key_batch + head * key_head + row[:, None] * key_token + dim[None, :]
    value_at = batch * value_batch + head * value_head + row[:, None] * value_token + dim[None, :]
    key = tl.load(keys + key_at, mask=read, other=0.0)  # [BLOCK_T, BLOCK_D]
    value = tl.load(values + value_at, mask=read, other=0.0)  # [BLOCK_T, BLOCK_D]

    write = (slot[:, None] < kept) & (dim[None, :] < DIM)  # padding rows are written too, as zeros
    out_at = (head_row * kept + slot[:, None]) * DIM + dim[None, :]
    tl.store(out_keys + out_at, key, mask=write)
    tl.store(out_values + out_at, value, mask=write)


def compact(
    keys: Tensor,
    values: Tensor,
    rows: Tensor,
    out: tuple[Tensor, Tensor] | None = None,
    *,
    check_rows: bool = True,
    tuning: dict[str, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Gather kept rows on the GPU.

    keys, values: [batch, kv_heads, tokens, dim], one dtype, any strides with dim innermost.
    rows: [batch, kv_heads, kept], int32 or int64, -1 for padding. check_rows: check their range, which waits for the
    GPU once; without it a row outside the cache reads foreign memory.
    out: two contiguous [batch, kv_heads, kept, dim] tensors to write into; None allocates them.
    tuning: overrides of the block size, for measurements.
    Raises ValueError for tensors that do not fit each other, rows outside the cache, CPU tensors uninterpreted.
    """
    batch, kv_heads, tokens, dim = keys.shape
    kept = rows.shape[-1]
    check_pair(keys, values, "[batch, kv_heads, tokens, dim]")
    if rows.shape != (batch, kv_heads, kept) or rows.dtype not in (torch.int32, torch.int64):
        given = f"{rows.dtype} {tuple(rows.shape)}"
        raise ValueError(f"rows must be integers of shape ({batch}, {kv_heads}, kept), not {given}")
    check_innermost(keys=keys, values=values)
    if out is None:
        out = keys.new_empty(batch, kv_heads, kept, dim), keys.new_empty(batch, kv_heads, kept, dim)
    for x in out:
        if x.shape != (batch, kv_heads, kept, dim) or x.dtype != keys.dtype or not x.is_contiguous():
            raise ValueError(f"out must be contiguous {keys.dtype} of shape {(batch, kv_heads, kept, dim)}")
    check_device(_compact, "compact", (keys, values, rows, *out), moves=True)
    if out[0].numel() == 0:
        return out
    if check_rows:
        low, high = (int(x) for x in rows.aminmax())
        if low < -1 or high >= tokens:
            raise ValueError(f"rows {low} to {high} do not lie in -1 to {tokens - 1}")

    block_d = next_power_of_2(dim)
    tuned = {"elements": 2048, "warps": 8} | (tuning or {})
    block_t = max(8, tuned["elements"] // block_d)
    sizes = *keys.stride()[:3], *values.stride()[:3], kv_heads, kept
    blocks = {"DIM": dim, "BLOCK_T": block_t, "BLOCK_D": block_d, "num_warps": tuned["warps"]}
    _compact[(cdiv(kept, block_t), batch * kv_heads)](keys, values, rows.contiguous(), *out, *sizes, **blocks)
    return out
