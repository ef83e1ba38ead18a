"""Paged compaction: survivors of a block table move to the front of their own blocks, in place.

Request r owns the blocks table[r, 0], table[r, 1], ...; its logical slot i lies in row i % block of block
table[r, i // block].
kept[r, :] names the slots that stay, ascending, -1 behind them; m of them. Afterwards slots 0 to m - 1 hold them:

    repack       slot i holds what slot kept[i] held: the order stays
    fill_holes   a kept slot below m stays where it is, the n-th hole below m takes the n-th kept slot from m on: fewest
                 bytes, and the order is lost

and blocks from ceil(m / block) on are free. Both are safe in place. Holes and movers are disjoint. In a repack every
source is at or behind its target, since kept[i] >= i: a program owns a column slice of a request, walks it in ascending
order and reads a chunk of rows whole before it writes it, so a row is overwritten only after it was read; later chunks
lie behind everything written so far and may be read ahead.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvrepro_kernels.launch import check_device


def moved_reference(pool: Tensor, table: Tensor, source: Tensor) -> Tensor:
    """The truth for one pool [blocks, block, kv_heads, dim]: slot i of request r takes what slot source[r,i] held."""
    block, out = pool.shape[1], pool.clone()
    for r, slots in enumerate(source.tolist()):
        for i, j in enumerate(slots):
            if j >= 0:
                out[table[r, i // block], i % block] = pool[table[r, j // block], j % block]
    return out


def hole_sources(kept: Tensor, slots: int) -> Tensor:
    """Which slot's content each slot holds after `fill_holes`, [requests, n] like kept, -1 behind the survivors."""
    n = kept.shape[1]
    there = kept >= 0
    count = there.sum(1, keepdim=True)
    stays = kept.new_zeros(kept.shape[0], slots + 1, dtype=torch.bool)
    stays.scatter_(1, torch.where(there, kept, slots).long(), True)
    slot = torch.arange(n, device=kept.device)
    hole = ~stays[:, :n] & (slot < count)
    nth = hole.cumsum(1) - 1
    mover = kept.gather(1, (count - hole.sum(1, keepdim=True) + nth).clamp(0, n - 1))
    return torch.where(slot < count, torch.where(hole, mover, slot.to(kept.dtype)), -1)


@triton.jit
def _rows(table, source, at, slots, n, block_size, BLOCK_I: tl.constexpr):
    """Rows of the pool that slots at, at + 1, ... are read from and written to, and which of them move."""
    i = at + tl.arange(0, BLOCK_I)  # [I]
    j = tl.load(source + i, mask=i < n, other=-1)
    move = (j >= 0) & (j != i)
    read = tl.load(table + j // block_size, mask=move, other=0).to(tl.int64) * block_size + j % block_size
    write = tl.load(table + i // block_size, mask=move, other=0).to(tl.int64) * block_size + i % block_size
    return read, write, move


@triton.jit
def _move(
    keys, values, table, source, max_blocks, n, block_size, width, rows_per_program,
    BLOCK_I: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """A program walks `rows_per_program` slots of a request, ascending, for one slice of columns of one pool."""
    request = tl.program_id(1)
    pool = keys
    if tl.program_id(2) == 1:
        pool = values
    slices = tl.cdiv(width, BLOCK_C)
    column = tl.program_id(0) % slices * BLOCK_C + tl.arange(0, BLOCK_C)  # [C]
    begin = tl.program_id(0) // slices * rows_per_program
    end = tl.minimum(begin + rows_per_program, n)
    table += request * max_blocks
    source += request.to(tl.int64) * n
    inside = (column < width)[None, :]
    read, write, move = _rows(table, source, begin, max_blocks, end, block_size, BLOCK_I)
    tile = tl.load(pool + read[:, None] * width + column[None, :], mask=move[:, None] & inside)  # [I, C]
    for at in tl.range(begin + BLOCK_I, end + BLOCK_I, BLOCK_I, num_stages=1):
        read, next_write, next_move = _rows(table, source, at, max_blocks, end, block_size, BLOCK_I)
        next_tile = tl.load(pool + read[:, None] * width + column[None, :], mask=next_move[:, None] & inside)  # [I, C]
        tl.debug_barrier()  # every row of the chunk is read before one is overwritten
        tl.store(pool + write[:, None] * width + column[None, :], tile, mask=move[:, None] & inside)
        tile, write, move = next_tile, next_write, next_move


def _launch(
    keys: Tensor, values: Tensor, table: Tensor, source: Tensor, in_order: bool, tuning: dict[str, int] | None
) -> None:
    requests, n = source.shape
    width = keys.shape[2] * keys.shape[3]
    tuned = paging_tuning(in_order) | (tuning or {})
    per_program = n if in_order else tuned["block_i"] * tuned["chunks"]
    slices = triton.cdiv(width, tuned["block_c"])
    _move[(slices * triton.cdiv(n, per_program), requests, 2)](
        keys, values, table, source, table.shape[1], n, keys.shape[1], width, per_program,
        BLOCK_I=tuned["block_i"], BLOCK_C=tuned["block_c"], num_warps=tuned["warps"],
    )  # fmt: skip


def _check(name: str, keys: Tensor, values: Tensor, table: Tensor, kept: Tensor, check_slots: bool) -> None:
    """Raises ValueError for what does not fit, and with `check_slots` for slots out of range or out of order."""
    if keys.dim() != 4 or values.shape != keys.shape or values.dtype != keys.dtype:
        one, other = (f"{tuple(x.shape)} {x.dtype}" for x in (keys, values))
        raise ValueError(f"keys {one} and values {other} must both be [blocks, block, kv_heads, dim]")
    if not (keys.is_contiguous() and values.is_contiguous()):
        raise ValueError("keys and values are changed in place and must be contiguous")
    if table.dim() != 2 or kept.dim() != 2 or len(table) != len(kept) or table.dtype != torch.int32:
        found = f"{table.dtype} {tuple(table.shape)} and {tuple(kept.shape)}"
        raise ValueError(f"table must be int32 [requests, blocks] and kept [requests, n], not {found}")
    if kept.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"kept must be int32 or int64, not {kept.dtype}")
    check_device(_move, name, (table, kept, keys.view(torch.uint8), values.view(torch.uint8)))
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


def repack(
    keys: Tensor, values: Tensor, table: Tensor, kept: Tensor, *,
    check_slots: bool = True, tuning: dict[str, int] | None = None,
) -> Tensor:  # fmt: skip
    """Move survivors to the front, order preserved, in place; returns the source slots, which are `kept`.

    keys, values: contiguous [blocks, block, kv_heads, dim]. table: int32 [requests, max_blocks], no block in two rows.
    kept: int [requests, n], ascending, -1 behind. check_slots: check their range and order, which waits for the GPU.
    tuning: overrides of `paging_tuning`. Raises ValueError for tensors that do not fit each other.
    """
    _check("repack", keys, values, table, kept, check_slots)
    if kept.numel():
        _launch(keys, values, table.contiguous(), kept.contiguous(), True, tuning)
    return kept


def fill_holes(
    keys: Tensor, values: Tensor, table: Tensor, kept: Tensor, *,
    check_slots: bool = True, tuning: dict[str, int] | None = None,
) -> Tensor:  # fmt: skip
    """Move only the survivors behind the new end, into the holes before it, in place; arguments as in `repack`.

    Returns the source slots [requests, n], -1 behind: positions[source] are the positions that the slots now hold.
    """
    _check("fill_holes", keys, values, table, kept, check_slots)
    source = hole_sources(kept, table.shape[1] * keys.shape[1])
    if kept.numel():
        _launch(keys, values, table.contiguous(), source, False, tuning)
    return source


def paging_tuning(in_order: bool) -> dict[str, int]:
    """Rows and columns of a chunk, and chunks per program where the order is free; measured on an H200."""
    if in_order:
        return {"block_i": 128, "block_c": 64, "warps": 4}
    return {"block_i": 16, "block_c": 512, "warps": 4, "chunks": 2}
