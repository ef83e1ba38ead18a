"""Who stays in each head, once scores, protected tokens and counts are known."""

import torch

from kvrepro.errors import InputError
from kvrepro.shapes import Counts, Mask, Scores


def select(scores: Scores, protected: Mask, counts: Counts) -> Mask:
    """The protected tokens of each head, then its best-scored; among equals the later token. bool, as `scores`.

    Exactly `counts` [batch, kv_heads] tokens per head. A slot scored -inf is dead and never kept; a head with fewer
    tokens than its count keeps them all. Raises InputError for a count below the protected tokens, and for NaN scores.
    """
    dead = scores.isneginf()
    guarded = (protected & ~dead).sum(-1)
    if (guarded > counts).any():
        worst = (guarded - counts).argmax()
        raise InputError(
            f"budget {int(counts.flatten()[worst])} < {int(guarded.flatten()[worst])} protected tokens: raise the "
            "capacity, or protect less"
        )
    if scores.isnan().any():
        raise InputError(f"{int(scores.isnan().sum())} of {scores.numel()} scores are NaN: mend the scorer")
    key = scores.masked_fill(protected & ~dead, torch.inf).flip(-1)  # flipped: a stable sort leaves the later one first
    place = key.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    return (place < counts[..., None]).flip(-1) & ~dead
