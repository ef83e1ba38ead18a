"""The `counts` largest scores of every row, exactly; among equals the later token stays.

    kept[r,j] = j is among the counts[r] largest of scores[r], -inf left out, ordered by (score, j)

A program finds its row's last kept score by a search that quarters the range of the floats' bits, and among equal
scores the first kept place by one that quarters the range of places; then it writes the row. One launch replaces the
sorts, comparisons and checks of an eviction, which a CPU launches more slowly than a GPU runs them.
"""

import torch
from torch import Tensor

from kvrepro_kernels.largest_kernel import keep_largest
from kvrepro_kernels.launch import check_device, next_power_of_2

LONGEST = 1 << 18  # tokens of a row; sorting is faster for a longer one
PARTS = 4  # into which each pass over the row divides the remaining range


def largest_reference(scores: Tensor, counts: Tensor, firm: Tensor | None = None) -> Tensor:
    """The reference, row by row."""
    if firm is not None:
        scores = torch.where(firm & ~scores.isneginf(), torch.inf, scores)
    kept = torch.zeros_like(scores, dtype=torch.bool)
    for row, count, kept_row in zip(scores.tolist(), counts.tolist(), kept, strict=True):
        order = sorted((j for j, x in enumerate(row) if x > -torch.inf), key=lambda j: (row[j], j))
        kept_row[order[max(0, len(order) - count) :]] = True
    return kept


def largest(scores: Tensor, counts: Tensor, firm: Tensor | None = None, *, problems: Tensor | None = None) -> Tensor:
    """Bool [rows, tokens]; scores: contiguous float32 [rows, tokens] without NaN; counts: int [rows]; firm: contiguous
    bool [rows, tokens], tokens that stay before all others, unless they are scored -inf.

    problems: contiguous int32 [rows, 3] to write into, needs `firm`: the number of NaN scores, whose tokens may stay or
    not; the number of firm tokens that the count has no room for; the number of firm tokens.
    Raises ValueError for other tensors, rows of more than `LONGEST` tokens and CPU tensors uninterpreted.
    """
    rows, tokens = scores.shape
    if scores.dtype != torch.float32 or not scores.is_contiguous() or counts.shape != (rows,) or tokens > LONGEST:
        given = f"scores {scores.dtype} {tuple(scores.shape)} and counts {tuple(counts.shape)}"
        raise ValueError(f"{given}: give float32 [rows, tokens], contiguous, at most {LONGEST} tokens, and [rows]")
    if firm is not None and (firm.shape != scores.shape or firm.dtype != torch.bool or not firm.is_contiguous()):
        raise ValueError(f"firm {firm.dtype} {tuple(firm.shape)}: give bool {tuple(scores.shape)}, contiguous")
    if problems is not None and (firm is None or problems.shape != (rows, 3) or problems.dtype != torch.int32):
        raise ValueError(f"problems {problems.dtype} {tuple(problems.shape)}: give int32 ({rows}, 3), and firm")
    kept = torch.empty(rows, tokens, dtype=torch.bool, device=scores.device)
    keys = torch.empty(rows, tokens, dtype=torch.int32, device=scores.device)
    firm_bytes = scores if firm is None else firm.view(torch.uint8)  # the kernel does not read what is None
    used = firm_bytes, keys, keys if problems is None else problems
    check_device(keep_largest, "largest", (scores, counts, *used, kept))
    if kept.numel():
        asked = {"FIRM": firm is not None, "PROBLEMS": problems is not None}
        blocks = {"BLOCK": min(8192, next_power_of_2(tokens)), "PARTS": PARTS, "num_warps": 8}
        keep_largest[(rows,)](scores, counts.contiguous(), *used, kept, tokens, **asked, **blocks)
    return kept
