"""The largest scores of every row, as many as the row asks for, exactly: among equals the later token stays.

    kept[r,j] = j is among the counts[r] largest of scores[r], -inf left out, ordered by (score, j)

A program finds its row's last kept score by quartering the floats' bits, and among its equals the first kept place by
quartering places; then it writes the row. One launch stands for the sorts, comparisons and checks of an eviction, which
take a processor longer to launch than a GPU to run.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvrepro_kernels.launch import check_device

LONGEST = 1 << 18  # tokens of a row; a longer one is sorted sooner
PARTS = 4  # of what is left, at each look at the row


def largest_reference(scores: Tensor, counts: Tensor, firm: Tensor | None = None) -> Tensor:
    """The truth, row by row."""
    if firm is not None:
        scores = torch.where(firm & ~scores.isneginf(), torch.inf, scores)
    kept = torch.zeros_like(scores, dtype=torch.bool)
    for row, count, mine in zip(scores.tolist(), counts.tolist(), kept, strict=True):
        order = sorted((j for j, x in enumerate(row) if x > -torch.inf), key=lambda j: (row[j], j))
        mine[order[max(0, len(order) - count) :]] = True
    return kept


@triton.jit
def _read(scores, firm, keys, told, count, tokens, step, FIRM: tl.constexpr, TOLD: tl.constexpr, BLOCK: tl.constexpr):
    """A row's scores as integers in the same order, the firm ones' as inf; and what `largest` tells of it."""
    strange = tl.zeros((), tl.int32)
    held = tl.zeros((), tl.int32)
    for at in range(0, tokens, BLOCK):
        here = at + step < tokens
        x = tl.load(scores + at + step, mask=here, other=0.0) + 0.0  # [T], with one zero
        if FIRM:
            is_firm = (tl.load(firm + at + step, mask=here, other=0) != 0) & (x != float("-inf"))
            strange += tl.sum((x != x).to(tl.int32), 0)
            held += tl.sum(is_firm.to(tl.int32), 0)
            x = tl.where(is_firm, float("inf"), x)
        bits = x.to(tl.int32, bitcast=True)
        tl.store(keys + at + step, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits), mask=here)
    if TOLD:
        tl.store(told, strange)
        tl.store(told + 1, tl.maximum(held - count, 0).to(tl.int32))
        tl.store(told + 2, held)
    tl.debug_barrier()


@triton.jit(do_not_specialize=["tokens"])
def _largest(
    scores, counts, firm, keys, told, kept, tokens, FIRM: tl.constexpr, TOLD: tl.constexpr, BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    step = tl.arange(0, BLOCK)
    keys += row * tokens
    kept += row * tokens
    count = tl.load(counts + row)
    _read(scores + row * tokens, firm + row * tokens, keys, told + 3 * row, count, tokens, step, FIRM, TOLD, BLOCK)
    below = -2147483648  # any key
    part = tl.arange(0, PARTS) + 1
    low = tl.full((), -2139095040, tl.int64)  # just above the key of -inf
    high = tl.full((), 2139095041, tl.int64)  # just above the key of inf
    while high - low > 1:  # at least `count` keys from `low` on, or it is the least; fewer from `high` on
        width = (high - low + PARTS - 1) // PARTS
        edge = low + width * part  # [PARTS], at least the last not below `high`
        found = tl.zeros((PARTS,), tl.int32)
        for at in range(0, tokens, BLOCK):
            key = tl.load(keys + at + step, mask=at + step < tokens, other=below)
            found += tl.sum((key[None, :] >= edge.to(tl.int32)[:, None]).to(tl.int32), 1)
        enough = tl.sum(((found >= count) & (edge < high)).to(tl.int32), 0)
        high = tl.minimum(high, low + width * (enough + 1))
        low += width * enough
    last = low.to(tl.int32)  # the key of the last kept score
    above = tl.zeros((), tl.int32)
    equal = tl.zeros((), tl.int32)
    for at in range(0, tokens, BLOCK):
        key = tl.load(keys + at + step, mask=at + step < tokens, other=below)
        above += tl.sum((key > last).to(tl.int32), 0)
        equal += tl.sum((key == last).to(tl.int32), 0)
    first = tl.zeros((), tl.int32)  # of the equals' places
    end = tl.where(equal > count - above, tokens, 1)
    while end - first > 1:  # at least as many as are missing from `first` on; fewer from `end` on
        width = (end - first + PARTS - 1) // PARTS
        edge = first + width * part
        found = tl.zeros((PARTS,), tl.int32)
        for at in range(0, tokens, BLOCK):
            same = tl.load(keys + at + step, mask=at + step < tokens, other=below) == last
            found += tl.sum((same[None, :] & ((at + step)[None, :] >= edge[:, None])).to(tl.int32), 1)
        enough = tl.sum(((found >= count - above) & (edge < end)).to(tl.int32), 0)
        end = tl.minimum(end, first + width * (enough + 1))
        first += width * enough
    for at in range(0, tokens, BLOCK):
        key = tl.load(keys + at + step, mask=at + step < tokens, other=below)
        stays = (key > last) | ((key == last) & (at + step >= first))
        tl.store(kept + at + step, stays & (count > 0), mask=at + step < tokens)


def largest(scores: Tensor, counts: Tensor, firm: Tensor | None = None, *, told: Tensor | None = None) -> Tensor:
    """Bool [rows, tokens]; scores: contiguous float32 [rows, tokens] without NaN; counts: int [rows]; firm: contiguous
    bool [rows, tokens], tokens that stay before all others, unless they are scored -inf.

    told: contiguous int32 [rows, 3] to write into, needs `firm`: how many scores are NaN, which then stay in no stated
    order; how many firm tokens a count has no room for; how many there are.
    Raises ValueError for other tensors, rows of more than `LONGEST` tokens and CPU tensors uninterpreted.
    """
    rows, tokens = scores.shape
    if scores.dtype != torch.float32 or not scores.is_contiguous() or counts.shape != (rows,) or tokens > LONGEST:
        raise ValueError(f"scores {scores.dtype} {tuple(scores.shape)} and counts {tuple(counts.shape)}: give float32 "
                         f"[rows, tokens], contiguous, at most {LONGEST} tokens, and [rows]")  # fmt: skip
    if firm is not None and (firm.shape != scores.shape or firm.dtype != torch.bool or not firm.is_contiguous()):
        raise ValueError(f"firm {firm.dtype} {tuple(firm.shape)}: give bool {tuple(scores.shape)}, contiguous")
    if told is not None and (firm is None or told.shape != (rows, 3) or told.dtype != torch.int32):
        raise ValueError(f"told {told.dtype} {tuple(told.shape)}: give int32 ({rows}, 3), and firm")
    kept = torch.empty(rows, tokens, dtype=torch.bool, device=scores.device)
    keys = torch.empty(rows, tokens, dtype=torch.int32, device=scores.device)
    given = scores if firm is None else firm.view(torch.uint8), keys, keys if told is None else told  # one for None
    check_device(_largest, "largest", (scores, counts, *given, kept))
    if kept.numel():
        block = min(8192, triton.next_power_of_2(tokens))
        _largest[(rows,)](
            scores, counts.contiguous(), *given, kept, tokens, FIRM=firm is not None, TOLD=told is not None,
            BLOCK=block, PARTS=PARTS, num_warps=8,
        )  # fmt: skip
    return kept
