"""Budgets per KV head, apart from scoring: `[batch, kv_heads]` counts that sum to what a row may keep."""

import torch

from kvrepro.engine.shapes import Counts, RowInts, Scores, TokenMask


def every_head(scores: Scores, evictable: TokenMask, budget: RowInts) -> Counts:
    """The whole `budget` to each head. "Faithful" QUEST, and Ada-KV's native mode, in the artifact."""
    return budget[:, None].expand(-1, scores.shape[1])


def by_entropy(scores: Scores, evictable: TokenMask, budget: RowInts) -> Counts:
    """Focused heads get more: B_h = round(budget * kv_heads * (1/H_h) / sum(1/H)), at least 1, then one by one from the
    largest or to the smallest until they sum to `budget * kv_heads`.

    H_h is the natural entropy of the head's scores normalised over the evictable tokens (uniform where all are 0).
    "Faithful" Ada-KV in the artifact.
    """
    mass = scores.masked_fill(~evictable[:, None], 0.0)
    total = mass.sum(-1, keepdim=True)
    uniform = evictable[:, None] / evictable.sum(-1).clamp(min=1)[:, None, None]
    p = torch.where(total > 0, mass / total, uniform)
    inverse = 1.0 / torch.special.entr(p).sum(-1).clamp(min=1e-9)
    goal = budget * scores.shape[1]
    counts = (inverse / inverse.sum(-1, keepdim=True) * goal[:, None]).round().long().clamp(min=1)
    while bool((missing := goal - counts.sum(-1)).any()):
        head = torch.where(missing < 0, counts.argmax(-1), counts.argmin(-1))
        counts = counts.scatter_add(1, head[:, None], missing.sign()[:, None])
    return counts
