"""Kernels of paged compaction (what they do: `paging.py`): repacking by chunks, hole filling by pairs."""

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
def _chunk_of(kept, slot, n, BLOCK_I: tl.constexpr, ROUNDS: tl.constexpr):
    """The chunk of the first survivor at or behind `slot`: each round looks at 32 places, and leaves a 32nd."""
    below = 0
    for r in tl.static_range(ROUNDS):
        step = 32 ** (ROUNDS - 1 - r)
        place = below + (tl.arange(0, 32) + 1) * step - 1
        found = tl.load(kept + place, mask=place < n, other=-1)
        below += tl.sum(((found >= 0) & (found < slot)).to(tl.int32), 0) * step
    return below // BLOCK_I


@triton.jit
def shift(
    keys, values, table, kept, read_yet, max_blocks, n, block_size, width, chunks,
    BLOCK_I: tl.constexpr, BLOCK_C: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """Repack: a program reads a chunk of survivors, says so, waits until its targets have been read too, and writes.

    Its targets hold survivors of two chunks at most, none of them later ones. read_yet: zeros, a ticket and a flag for
    each chunk. The ticket says what a program does: chunks that it may wait for are in other programs' hands already.
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
    read, write, move = _rows(table, kept, chunk * BLOCK_I, n, block_size, BLOCK_I)
    tile = tl.load(pool + read[:, None] * width + column[None, :], mask=move[:, None] & inside)  # [I, C]
    first = _chunk_of(kept, chunk * BLOCK_I, n, BLOCK_I, ROUNDS)
    tl.debug_barrier()  # all of the tile is read before the flag says so
    tl.atomic_xchg(flags + chunk, 1, sem="release")
    for other in range(first, tl.minimum(first + 2, chunk)):
        while tl.atomic_cas(flags + other, 1, 1, sem="acquire") == 0:
            pass
    tl.debug_barrier()  # no thread writes before the flags were seen
    tl.store(pool + write[:, None] * width + column[None, :], tile, mask=move[:, None] & inside)


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
