"""The kernel of the largest scores (definition in `largest.py`): each program searches a row and writes it."""

import triton
import triton.language as tl


@triton.jit
def _order(
    scores, firm, keys, problems, count, tokens, step, FIRM: tl.constexpr, PROBLEMS: tl.constexpr, BLOCK: tl.constexpr
):
    """Store a row's scores as integers in the same order, firm tokens' as inf; and the row's `problems`."""
    nan_count = tl.zeros((), tl.int32)
    held = tl.zeros((), tl.int32)
    for at in range(0, tokens, BLOCK):
        valid = at + step < tokens
        x = tl.load(scores + at + step, mask=valid, other=0.0) + 0.0  # [T], with one zero
        if FIRM:
            is_firm = (tl.load(firm + at + step, mask=valid, other=0) != 0) & (x != float("-inf"))
            nan_count += tl.sum((x != x).to(tl.int32), 0)
            held += tl.sum(is_firm.to(tl.int32), 0)
            x = tl.where(is_firm, float("inf"), x)
        bits = x.to(tl.int32, bitcast=True)
        tl.store(keys + at + step, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits), mask=valid)
    if PROBLEMS:
        tl.store(problems, nan_count)
        tl.store(problems + 1, tl.maximum(held - count, 0).to(tl.int32))
        tl.store(problems + 2, held)
    tl.debug_barrier()


@triton.jit
def _load(keys, at, step, tokens):
    """A block of the row's keys; behind the row's end the least integer, which lies below every key."""
    return tl.load(keys + at + step, mask=at + step < tokens, other=-2147483648)  # [T]


@triton.jit
def _edge(keys, tokens, step, low, high, count, last, PLACES: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr):
    """The highest edge from `low` to below `high` that at least `count` keys reach; with PLACES, that the places of at
    least `count` keys equal to `last` reach. `low` if there is none."""
    while high - low > 1:  # fewer than `count` reach `high`
        width = (high - low + PARTS - 1) // PARTS
        edge = low + width * (tl.arange(0, PARTS) + 1)  # [PARTS], at least the last not below `high`
        reached = tl.zeros((PARTS,), tl.int32)
        for at in range(0, tokens, BLOCK):
            key = _load(keys, at, step, tokens)
            if PLACES:
                reach = (key == last)[None, :] & ((at + step)[None, :] >= edge[:, None])
            else:
                reach = key[None, :] >= edge.to(tl.int32)[:, None]
            reached += tl.sum(reach.to(tl.int32), 1)
        enough = tl.sum(((reached >= count) & (edge < high)).to(tl.int32), 0)
        high = tl.minimum(high, low + width * (enough + 1))
        low += width * enough
    return low.to(tl.int32)


@triton.jit(do_not_specialize=["tokens"])
def keep_largest(
    scores, counts, firm, keys, problems, kept, tokens, FIRM: tl.constexpr, PROBLEMS: tl.constexpr, BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    step = tl.arange(0, BLOCK)
    keys += row * tokens
    kept += row * tokens
    count = tl.load(counts + row)
    _order(
        scores + row * tokens, firm + row * tokens, keys, problems + 3 * row, count, tokens, step, FIRM, PROBLEMS, BLOCK
    )
    low = tl.full((), -2139095040, tl.int64)  # just above the key of -inf
    high = tl.full((), 2139095041, tl.int64)  # just above the key of inf
    last = _edge(keys, tokens, step, low, high, count, 0, False, BLOCK, PARTS)  # the key of the last kept score
    above = tl.zeros((), tl.int32)
    equal = tl.zeros((), tl.int32)
    for at in range(0, tokens, BLOCK):
        key = _load(keys, at, step, tokens)
        above += tl.sum((key > last).to(tl.int32), 0)
        equal += tl.sum((key == last).to(tl.int32), 0)
    end = tl.where(equal > count - above, tokens, 1)  # all the equals are kept: no search
    first = _edge(keys, tokens, step, tl.zeros((), tl.int32), end, count - above, last, True, BLOCK, PARTS)
    for at in range(0, tokens, BLOCK):
        key = _load(keys, at, step, tokens)
        stays = (key > last) | ((key == last) & (at + step >= first))
        tl.store(kept + at + step, stays & (count > 0), mask=at + step < tokens)
