"""Repacking a paged cache (`paging.py`): slot i gets the content of slot kept[i], which keeps the order.

This works in place, since every source is at or behind its target: kept[i] >= i. Programs take chunks of survivors in
ascending order. Each writes only after all chunks whose survivors lie where it writes have been read; none of these is
a later chunk.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvrepro_kernels.launch import Tuning, cdiv, next_power_of_2
from kvrepro_kernels.paging import check_paged, row_of


@triton.jit
def _chunk_of(kept, slot, n, BLOCK_I: tl.constexpr, ROUNDS: tl.constexpr):
    """The chunk of the first survivor at or behind `slot`; each of ROUNDS looks keeps a 32nd of the range."""
    below = 0
    for r in tl.static_range(ROUNDS):
        step = 32 ** (ROUNDS - 1 - r)
        place = below + (tl.arange(0, 32) + 1) * step - 1
        kept_slot = tl.load(kept + place, mask=place < n, other=-1)
        below += tl.sum(((kept_slot >= 0) & (kept_slot < slot)).to(tl.int32), 0) * step
    return below // BLOCK_I


@triton.jit
def _shift(
    keys, values, table, kept, read_yet, max_blocks, n, block_size, width, chunks,
    BLOCK_I: tl.constexpr, BLOCK_C: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """Repack: a program reads a chunk of survivors, sets its flag, waits until its targets have been read, and writes.

    Its targets hold survivors of at most two chunks, none of them later. read_yet: zeros, a ticket and a flag for each
    chunk. The ticket gives a program its chunk, so that the chunks that it waits for are already in other programs'
    hands.
    """
    ticket = tl.atomic_add(read_yet, 1, sem="relaxed")
    slices = tl.cdiv(width, BLOCK_C)
    request, chunk = ticket // (2 * slices) // chunks, ticket // (2 * slices) % chunks
    pool = keys
    if ticket % 2 == 1:
        pool = values
    column = ticket // 2 % slices * BLOCK_C + tl.arange(0, BLOCK_C)  # [C]
    inside = (column < width)[None, :]
    flags = read_yet + 1 + (request * 2 * slices + ticket % (2 * slices)) * chunks
    table += request * max_blocks
    kept += request.to(tl.int64) * n
    i = chunk * BLOCK_I + tl.arange(0, BLOCK_I)  # [I]
    j = tl.load(kept + i, mask=i < n, other=-1)  # [I]
    move = (j >= 0) & (j != i)
    read, write = row_of(table, j, move, block_size), row_of(table, i, move, block_size)
    tile = tl.load(pool + read[:, None] * width + column[None, :], mask=move[:, None] & inside)  # [I, C]
    first = _chunk_of(kept, chunk * BLOCK_I, n, BLOCK_I, ROUNDS)
    tl.debug_barrier()  # all of the tile is read before the flag says so
    tl.atomic_xchg(flags + chunk, 1, sem="release")
    for other in range(first, tl.minimum(first + 2, chunk)):
        while tl.atomic_cas(flags + other, 1, 1, sem="acquire") == 0:
            pass
    tl.debug_barrier()  # no thread writes before the flags were seen
    tl.store(pool + write[:, None] * width + column[None, :], tile, mask=move[:, None] & inside)


def repack(
    keys: Tensor, values: Tensor, table: Tensor, kept: Tensor, *, check_slots: bool = True, tuning: Tuning = None
) -> Tensor:
    """Move survivors to the front, order preserved, in place; returns the source slots, which are `kept`.

    keys, values: contiguous [blocks, block, kv_heads, dim]. table: int32 [requests, max_blocks], no block in two rows.
    kept: int [requests, n], ascending, -1 behind. check_slots: check their range and order, which waits for the GPU.
    tuning: overrides of the block sizes. Raises ValueError for tensors that do not fit each other.
    """
    check_paged("repack", keys, values, table, kept, check_slots)
    requests, n = kept.shape
    width = keys.shape[2] * keys.shape[3]
    block_c = min(1024, next_power_of_2(width))
    tuned = {"block_c": block_c, "block_i": 8192 // block_c, "warps": 4} | (tuning or {})
    chunks = cdiv(n, tuned["block_i"])
    programs = requests * chunks * 2 * cdiv(width, tuned["block_c"])
    if programs:
        read_yet = torch.zeros(1 + programs, dtype=torch.int32, device=keys.device)
        tensors = keys, values, table.contiguous(), kept.contiguous(), read_yet
        sizes = table.shape[1], n, keys.shape[1], width, chunks
        blocks = {"BLOCK_I": tuned["block_i"], "BLOCK_C": tuned["block_c"], "ROUNDS": cdiv(n.bit_length(), 5)}
        _shift[(programs,)](*tensors, *sizes, **blocks, num_warps=tuned["warps"])
    return kept
