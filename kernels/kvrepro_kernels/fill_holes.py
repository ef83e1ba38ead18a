"""Filling the holes of a paged cache (`paging.py`): moves the fewest bytes, but loses the order of the slots.

A kept slot below m stays where it is; the n-th hole below m takes the n-th kept slot from m on. This works in place,
since holes and movers are disjoint.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvrepro_kernels.launch import Tuning, cdiv
from kvrepro_kernels.paging import check_paged, row_of


@triton.jit
def _before(kept, value, n, STEPS: tl.constexpr):
    """The number of survivors below `value`, by bisection; the -1 behind them count as larger than every slot."""
    low = value * 0
    high = low + n
    for _ in range(STEPS):
        middle = (low + high) // 2
        kept_slot = tl.load(kept + middle, mask=middle < n, other=-1)  # as `value`
        below = (kept_slot >= 0) & (kept_slot < value) & (low < high)
        low = tl.where(below, middle + 1, low)
        high = tl.where(below, high, middle)
    return low


@triton.jit
def _search(kept, source, hole, mover, slots, n, BLOCK_I: tl.constexpr, STEPS: tl.constexpr):
    """For each slot, the slot that its content comes from; and the pairs of the n-th hole and the n-th mover."""
    request = tl.program_id(1).to(tl.int64) * n
    kept += request
    i = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)  # [I]
    count = _before(kept, i * 0 + slots, n, STEPS)  # [I], the same everywhere
    stay = _before(kept, count, n, STEPS)
    rank = _before(kept, i, n, STEPS)
    inside = (i < n) & (i < count)
    is_hole = inside & (tl.load(kept + rank, mask=inside & (rank < n), other=-1) != i)
    nth = i - rank  # holes before slot i
    content = tl.load(kept + stay + nth, mask=is_hole, other=-1)  # [I]
    tl.store(source + request + i, tl.where(is_hole, content, tl.where(inside, i, -1)), mask=i < n)
    tl.store(hole + request + nth, i, mask=is_hole)
    tl.store(mover + request + nth, content, mask=is_hole)
    behind = (i >= count - stay) & (i < n)
    tl.store(hole + request + i, -1, mask=behind)
    tl.store(mover + request + i, -1, mask=behind)


@triton.jit
def _fill(
    keys, values, table, hole, mover, max_blocks, n, block_size, width, pairs_per_program,
    BLOCK_I: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Hole filling: the n-th mover's row goes into the n-th hole."""
    request = tl.program_id(1)
    pool = keys
    if tl.program_id(2) == 1:
        pool = values
    slices = tl.cdiv(width, BLOCK_C)
    column = tl.program_id(0) % slices * BLOCK_C + tl.arange(0, BLOCK_C)  # [C]
    inside = (column < width)[None, :]
    begin = tl.program_id(0) // slices * pairs_per_program
    table += request * max_blocks
    hole += request.to(tl.int64) * n
    mover += request.to(tl.int64) * n
    for at in tl.range(begin, tl.minimum(begin + pairs_per_program, n), BLOCK_I):
        pair = at + tl.arange(0, BLOCK_I)  # [I]
        i = tl.load(hole + pair, mask=pair < n, other=-1)  # [I]
        j = tl.load(mover + pair, mask=pair < n, other=-1)  # [I]
        move = (i >= 0)[:, None] & inside
        read, write = row_of(table, j, j >= 0, block_size), row_of(table, i, i >= 0, block_size)
        tile = tl.load(pool + read[:, None] * width + column[None, :], mask=move, other=0.0)  # [I, C]
        tl.store(pool + write[:, None] * width + column[None, :], tile, mask=move)


def fill_holes(
    keys: Tensor, values: Tensor, table: Tensor, kept: Tensor, *, check_slots: bool = True, tuning: Tuning = None
) -> Tensor:
    """Move only the survivors behind the new end, into the holes before it, in place; arguments as in `repack`.

    Returns the source slots [requests, n], -1 behind: slot i now holds the token of position positions[source[i]].
    """
    check_paged("fill_holes", keys, values, table, kept, check_slots)
    if not kept.numel():
        return kept
    source, *pairs = find_holes(kept, table.shape[1] * keys.shape[1])
    fill_pairs(keys, values, table, pairs, tuning)
    return source


def find_holes(kept: Tensor, slots: int) -> tuple[Tensor, Tensor, Tensor]:
    """source, hole and mover of `fill_holes`, each [requests, n] like kept, -1 behind the last."""
    requests, n = kept.shape
    kept = kept.contiguous()
    source, hole, mover = (torch.empty_like(kept) for _ in range(3))
    _search[(cdiv(n, 128), requests)](kept, source, hole, mover, slots, n, BLOCK_I=128, STEPS=n.bit_length())
    return source, hole, mover


def fill_pairs(keys: Tensor, values: Tensor, table: Tensor, pairs: Sequence[Tensor], tuning: Tuning = None) -> None:
    """Move each pair's row, without checks: the second half of `fill_holes`."""
    requests, n = pairs[0].shape
    width = keys.shape[2] * keys.shape[3]
    tuned = {"block_i": 8, "block_c": 1024, "chunks": 2, "warps": 4} | (tuning or {})  # measured on an H200
    per_program = tuned["block_i"] * tuned["chunks"]
    tensors = keys, values, table.contiguous(), *(x.contiguous() for x in pairs)
    sizes = table.shape[1], n, keys.shape[1], width, per_program
    blocks = {"BLOCK_I": tuned["block_i"], "BLOCK_C": tuned["block_c"], "num_warps": tuned["warps"]}
    _fill[(cdiv(width, tuned["block_c"]) * cdiv(n, per_program), requests, 2)](*tensors, *sizes, **blocks)
