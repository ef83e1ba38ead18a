"""The largest scores of every row, as many as the row asks for, exactly: among equals the later token stays.

    kept[r,j] = j is among the counts[r] largest of scores[r], -inf left out, ordered by (score, j)

A program finds its row's last kept score by quartering the floats' bits, and among its equals the first kept place by
quartering places; then it writes the row. One launch stands for the sorts, comparisons and checks of an eviction, which
take a processor longer to launch than a GPU to run.
"""

import torch
from torch import Tensor

from kvrepro_kernels.largest_kernel import keep_largest
from kvrepro_kernels.launch import check_device, next_power_of_2

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
    check_device(keep_largest, "largest", (scores, counts, *given, kept))
    if kept.numel():
        keep_largest[(rows,)](
            scores, counts.contiguous(), *given, kept, tokens, FIRM=firm is not None, TOLD=told is not None,
            BLOCK=min(8192, next_power_of_2(tokens)), PARTS=PARTS, num_warps=8,
        )  # fmt: skip
    return kept
