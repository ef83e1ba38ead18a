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
def _keys(scores, firm, token, tokens, FIRM: tl.constexpr):
    """Scores as integers in the same order, the firm ones' as inf; what lies beyond the row is below -inf."""
    x = tl.load(scores + token, mask=token < tokens, other=float("-inf")) + 0.0  # [T], with one zero
    if FIRM:
        x = tl.where((tl.load(firm + token, mask=token < tokens, other=0) != 0) & (x > float("-inf")), float("inf"), x)
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _tell(scores, firm, told, count, tokens, step, BLOCK: tl.constexpr):
    """Of a row: how many scores are NaN, how many firm tokens are beyond its count, how many firm tokens there are."""
    strange = tl.zeros((), tl.int32)
    held = tl.zeros((), tl.int32)
    for at in range(0, tokens, BLOCK):
        here = at + step < tokens
        x = tl.load(scores + at + step, mask=here, other=0.0)
        is_firm = tl.load(firm + at + step, mask=here, other=0) != 0
        strange += tl.sum((x != x).to(tl.int32), 0)
        held += tl.sum((is_firm & (x != float("-inf"))).to(tl.int32), 0)
    tl.store(told, strange)
    tl.store(told + 1, tl.maximum(held - count, 0).to(tl.int32))
    tl.store(told + 2, held)


@triton.jit(do_not_specialize=["tokens"])
def _largest(
    scores, counts, firm, told, kept, tokens, FIRM: tl.constexpr, TOLD: tl.constexpr, BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    step = tl.arange(0, BLOCK)
    scores += row * tokens
    kept += row * tokens
    firm += row * tokens
    count = tl.load(counts + row)
    if TOLD:
        _tell(scores, firm, told + 3 * row, count, tokens, step, BLOCK)
    part = tl.arange(0, PARTS) + 1
    low = tl.full((), -2139095040, tl.int64)  # just above the key of -inf
    high = tl.full((), 2139095041, tl.int64)  # just above the key of inf
    while high - low > 1:  # at least `count` keys from `low` on, or it is the least; fewer from `high` on
        width = tl.maximum((high - low) // PARTS, 1)
        edge = low + width * part  # [PARTS], the last perhaps not below `high`
        found = tl.zeros((PARTS,), tl.int32)
        for at in range(0, tokens, BLOCK):
            key = _keys(scores, firm, at + step, tokens, FIRM)
            found += tl.sum((key[None, :] >= edge.to(tl.int32)[:, None]).to(tl.int32), 1)
        enough = tl.sum(((found >= count) & (edge < high)).to(tl.int32), 0)
        high = tl.minimum(high, low + width * (enough + 1))
        low += width * enough
    above = tl.zeros((), tl.int32)
    equal = tl.zeros((), tl.int32)
    for at in range(0, tokens, BLOCK):
        key = _keys(scores, firm, at + step, tokens, FIRM)
        above += tl.sum((key > low).to(tl.int32), 0)
        equal += tl.sum((key == low).to(tl.int32), 0)
    first = tl.zeros((), tl.int32)  # of the equals' places
    end = tl.where(equal > count - above, tokens, 1)
    while end - first > 1:
        width = tl.maximum((end - first) // PARTS, 1)
        edge = first + width * part
        found = tl.zeros((PARTS,), tl.int32)
        for at in range(0, tokens, BLOCK):
            same = _keys(scores, firm, at + step, tokens, FIRM) == low
            found += tl.sum((same[None, :] & ((at + step)[None, :] >= edge[:, None])).to(tl.int32), 1)
        enough = tl.sum(((found >= count - above) & (edge < end)).to(tl.int32), 0)
        end = tl.minimum(end, first + width * (enough + 1))
        first += width * enough
    for at in range(0, tokens, BLOCK):
        key = _keys(scores, firm, at + step, tokens, FIRM)
        stays = (key > low) | ((key == low) & (at + step >= first))
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
    unread = scores if firm is None else firm.view(torch.uint8), kept if told is None else told  # stand in where None
    check_device(_largest, "largest", (scores, counts, *unread, kept))
    if kept.numel():
        block = min(8192, triton.next_power_of_2(tokens))
        _largest[(rows,)](
            scores, counts.contiguous(), *unread, kept, tokens, FIRM=firm is not None, TOLD=told is not None,
            BLOCK=block, PARTS=PARTS, num_warps=8,
        )  # fmt: skip
    return kept
