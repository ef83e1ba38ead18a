"""A paged cache whose survivors move to the front of their own blocks, in place: by `repack` or `fill_holes`.

Request r owns the blocks table[r, 0], table[r, 1], ...; its logical slot i lies in row i % block of block
table[r, i // block]. kept[r, :] lists the m slots that stay, ascending, with -1 behind them. Afterwards slots 0 to
m - 1 hold their content, and the blocks from ceil(m / block) on are free.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvrepro_kernels.launch import check_device, check_pair


def moved_reference(pool: Tensor, table: Tensor, source: Tensor) -> Tensor:
    """The reference for a pool [blocks, block, kv_heads, dim]: slot i of request r gets slot source[r, i]'s content."""
    block, out = pool.shape[1], pool.clone()
    for r, slots in enumerate(source.tolist()):
        for i, j in enumerate(slots):
            if j >= 0:
                out[table[r, i // block], i % block] = pool[table[r, j // block], j % block]
    return out


@triton.jit
def row_of(table, slot, mask, block_size):
    """The row of the pool in which a slot of a request lies."""
    return tl.load(table + slot // block_size, mask=mask, other=0).to(tl.int64) * block_size + slot % block_size  # [I]


def check_paged(name: str, keys: Tensor, values: Tensor, table: Tensor, kept: Tensor, check_slots: bool) -> None:
    """Raises ValueError for tensors that do not fit, and with `check_slots` for slots out of range or order."""
    check_pair(keys, values, "[blocks, block, kv_heads, dim]", keys.dim() == 4)
    if not (keys.is_contiguous() and values.is_contiguous()):
        raise ValueError("keys and values are changed in place and must be contiguous")
    if table.dim() != 2 or kept.dim() != 2 or len(table) != len(kept) or table.dtype != torch.int32:
        given = f"{table.dtype} {tuple(table.shape)} and {tuple(kept.shape)}"
        raise ValueError(f"table must be int32 [requests, blocks] and kept [requests, n], not {given}")
    if kept.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"kept must be int32 or int64, not {kept.dtype}")
    check_device(row_of, name, (table, kept, keys, values), moves=True)
    if not check_slots or not kept.numel():
        return
    slots = table.shape[1] * keys.shape[1]
    low, high = (int(x) for x in kept.aminmax())
    if low < -1 or high >= slots:
        raise ValueError(f"kept slots {low} to {high} do not lie in -1 to {slots - 1}")
    behind, before = kept[:, 1:], kept[:, :-1]
    if not bool(((behind > before) & (before >= 0) | (behind == -1)).all()):
        raise ValueError("kept slots must ascend in every row, with -1 behind them")
    low, high = (int(x) for x in table.aminmax())
    if low < 0 or high >= len(keys):
        raise ValueError(f"table's blocks {low} to {high} do not lie in 0 to {len(keys) - 1}")
