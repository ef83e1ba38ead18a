"""The largest scores of every row, as many as the row asks for, exactly: among equals the later token stays.

    kept[r,j] = j is among the counts[r] largest of scores[r], -inf left out, ordered by (score, j)

A program finds its row's last kept score by bisecting the floats' bits, and among its equals the first kept place by
bisecting places; then it writes the row. One launch stands for the sorts and comparisons of an eviction, which take a
processor longer to launch than a GPU to run.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvrepro_kernels.launch import check_device

LONGEST = 1 << 18  # tokens of a row; a longer one is sorted sooner than bisected


def largest_reference(scores: Tensor, counts: Tensor) -> Tensor:
    """The truth, row by row."""
    kept = torch.zeros_like(scores, dtype=torch.bool)
    for row, count, mine in zip(scores.tolist(), counts.tolist(), kept, strict=True):
        order = sorted((j for j, x in enumerate(row) if x > -torch.inf), key=lambda j: (row[j], j))
        mine[order[max(0, len(order) - count) :]] = True
    return kept


@triton.jit
def _keys(scores, token, tokens):
    """Scores as integers in the same order; what lies beyond the row is below -inf."""
    x = tl.load(scores + token, mask=token < tokens, other=float("-inf")) + 0.0  # [T], with one zero
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit(do_not_specialize=["tokens"])
def _largest(scores, counts, kept, tokens, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    step = tl.arange(0, BLOCK)
    scores += row * tokens
    kept += row * tokens
    count = tl.load(counts + row)
    low = tl.full((), -2139095040, tl.int64)  # just above the key of -inf
    high = tl.full((), 2139095041, tl.int64)  # just above the key of inf
    while high - low > 1:  # at least `count` keys from `low` on, or it is the least; fewer from `high` on
        middle = low + (high - low) // 2
        found = tl.zeros((), tl.int64)
        for at in range(0, tokens, BLOCK):
            found += tl.sum((_keys(scores, at + step, tokens) >= middle).to(tl.int32), 0)
        enough = found >= count
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    above = tl.zeros((), tl.int64)
    for at in range(0, tokens, BLOCK):
        above += tl.sum((_keys(scores, at + step, tokens) > low).to(tl.int32), 0)
    first = tl.zeros((), tl.int64)  # of the equals' places
    end = tl.zeros((), tl.int64) + tokens
    while end - first > 1:
        middle = first + (end - first) // 2
        found = tl.zeros((), tl.int64)
        for at in range(0, tokens, BLOCK):
            equal = (_keys(scores, at + step, tokens) == low) & (at + step >= middle)
            found += tl.sum(equal.to(tl.int32), 0)
        enough = found >= count - above
        first = tl.where(enough, middle, first)
        end = tl.where(enough, end, middle)
    for at in range(0, tokens, BLOCK):
        key = _keys(scores, at + step, tokens)
        stays = (key > low) | ((key == low) & (at + step >= first))
        tl.store(kept + at + step, stays & (count > 0), mask=at + step < tokens)


def largest(scores: Tensor, counts: Tensor) -> Tensor:
    """Bool [rows, tokens]; scores: contiguous float32 [rows, tokens] without NaN; counts: int [rows].

    Raises ValueError for other tensors, rows of more than `LONGEST` tokens and CPU tensors uninterpreted.
    """
    rows, tokens = scores.shape
    if scores.dtype != torch.float32 or not scores.is_contiguous() or counts.shape != (rows,) or tokens > LONGEST:
        raise ValueError(f"scores {scores.dtype} {tuple(scores.shape)} and counts {tuple(counts.shape)}: give float32 "
                         f"[rows, tokens], contiguous, at most {LONGEST} tokens, and [rows]")  # fmt: skip
    kept = torch.empty(rows, tokens, dtype=torch.bool, device=scores.device)
    check_device(_largest, "largest", (scores, counts, kept))
    if kept.numel():
        block = min(8192, triton.next_power_of_2(tokens))
        _largest[(rows,)](scores, counts.contiguous(), kept, tokens, BLOCK=block, num_warps=8)
    return kept
