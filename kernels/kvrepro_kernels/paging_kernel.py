"""Kernels of paged compaction (what they do: `paging.py`): repacking by a walk, hole filling by a search and pairs."""

import triton
import triton.language as tl


@triton.jit
def _before(kept, value, n, STEPS: tl.constexpr):
    """How many survivors lie below `value`, by bisection; the -1 behind them count as beyond everything."""
    low = value * 0
    high = low + n
    for _ in range(STEPS):
        middle = (low + high) // 2
        found = tl.load(kept + middle, mask=middle < n, other=-1)  # as `value`
        below = (found >= 0) & (found < value) & (low < high)
        low = tl.where(below, middle + 1, low)
        high = tl.where(below, high, middle)
    return low


@triton.jit
def search(kept, source, hole, mover, slots, n, BLOCK_I: tl.constexpr, STEPS: tl.constexpr):
    """Per slot, where its content comes from; and the pairs: the n-th hole below the new end, the n-th mover."""
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
def _row(table, slot, mask, block_size):
    """The row of the pool in which a slot of a request lies."""
    return tl.load(table + slot // block_size, mask=mask, other=0).to(tl.int64) * block_size + slot % block_size  # [I]


@triton.jit
def _rows(table, kept, at, n, block_size, BLOCK_I: tl.constexpr):
    """Rows of the pool that slots at, at + 1, ... are read from and written to, and which of them move."""
    i = at + tl.arange(0, BLOCK_I)  # [I]
    j = tl.load(kept + i, mask=i < n, other=-1)  # [I]
    move = (j >= 0) & (j != i)
    return _row(table, j, move, block_size), _row(table, i, move, block_size), move


@triton.jit
def walk(
    keys, values, table, kept, max_blocks, n, block_size, width,
    BLOCK_I: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Repack: a program walks all slots of one request in ascending order, for one slice of columns of one pool."""
    request = tl.program_id(1)
    pool = keys
    if tl.program_id(2) == 1:
        pool = values
    column = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)  # [C]
    inside = (column < width)[None, :]
    table += request * max_blocks
    kept += request.to(tl.int64) * n
    read, write, move = _rows(table, kept, 0, n, block_size, BLOCK_I)
    tile = tl.load(pool + read[:, None] * width + column[None, :], mask=move[:, None] & inside)  # [I, C]
    for at in tl.range(BLOCK_I, n + BLOCK_I, BLOCK_I, num_stages=1):
        read, next_write, next_move = _rows(table, kept, at, n, block_size, BLOCK_I)
        next_tile = tl.load(pool + read[:, None] * width + column[None, :], mask=next_move[:, None] & inside)  # [I, C]
        tl.debug_barrier()  # every row of the chunk is read before one is overwritten
        tl.store(pool + write[:, None] * width + column[None, :], tile, mask=move[:, None] & inside)
        tile, write, move = next_tile, next_write, next_move


@triton.jit
def fill(
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
        read, write = _row(table, j, j >= 0, block_size), _row(table, i, i >= 0, block_size)
        tile = tl.load(pool + read[:, None] * width + column[None, :], mask=move, other=0.0)  # [I, C]
        tl.store(pool + write[:, None] * width + column[None, :], tile, mask=move)
