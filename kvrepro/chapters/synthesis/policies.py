"""Policies put together from parts: any scorer, with any aggregator and pooling, under any way to split the budget.

Used by file, as a reader's own: `Condition("kvrepro/chapters/synthesis/policies.py:UNIFORM", 0.1, Prefill(), switches=(
("scorer", "attention"), ("aggregate", "mean"), ("pool", "none")))`. They protect nothing on their own account: what is
protected is the condition's business, so that guards can be crossed with everything else.
"""

from collections.abc import Callable
from typing import Annotated

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvrepro.engine import allocate
from kvrepro.engine.allowed import Odd
from kvrepro.engine.observe import Observation
from kvrepro.engine.policy import Policy
from kvrepro.engine.score import cumulative, keys, position, window
from kvrepro.engine.score.window import Aggregate, Indicator, Pool
from kvrepro.engine.shapes import Counts, Mask, Probabilities, RowInts, Scores

ALONE: dict[str, Callable[[Observation], Scores]] = {  # whose numbers are scores as they are
    "position": position.streaming_llm,
    "random": position.random,
    "key norm": keys.k_norm,
    "key difference": keys.key_diff,
    "attention of all": cumulative.h2o,
}
OF_WINDOW: dict[str, Callable[[Observation], Probabilities] | Indicator] = {  # of each query: aggregated and pooled
    "attention": "attention",  # names are known to kernels
    "attention x value": window.attention_norm,
    "perturbation": "perturbation",
}
SCORERS = (*ALONE, *OF_WINDOW)
Scorer = Annotated[str, SCORERS]


def composed(
    o: Observation, scorer: Scorer = "attention", aggregate: Aggregate = "mean", pool: Pool = "none", kernel: Odd = 5
) -> Scores:
    """s_j = the scorer's own number, or Pool_k over tokens of the aggregate over the window's queries of it.

    The window's own tokens are scored like any other. "attention x value" is p ||v W_O||_1. Float32 [batch, kv_heads,
    tokens]. Source: the scorers of `kvrepro.engine.score`, which name theirs.
    """
    if scorer in ALONE:
        return ALONE[scorer](o)
    of = OF_WINDOW[scorer]
    return window.windowed(o, of if isinstance(of, str) else of(o), aggregate, pool, kernel, over="all")


def one_set(
    scores: list[Scores], protected: list[Mask], budget: RowInts, summaries: list[Tensor] | None = None
) -> tuple[list[Scores], list[Counts]]:
    """The mean score over heads and layers, for all of them: they keep the same tokens.

    Layers hold the same tokens, flush right, but behind unlike numbers of dead slots, which other rows of a batch need.
    """
    width = min(s.shape[-1] for s in scores)
    mean = torch.stack([s[..., -width:].mean(1, keepdim=True) for s in scores]).mean(0)
    shared = [pad(mean, (s.shape[-1] - width, 0), value=-torch.inf).expand_as(s) for s in scores]
    return shared, [allocate.uniform(s, protected[0], budget) for s in shared]


def _policy(split: str, **how: object) -> Policy:
    parameters = {"window": 16, "scorer": "attention", "aggregate": "mean", "pool": "none", "kernel": 5}
    only = {"mass": ("scorer", "attention of all")}
    return Policy(f"Composed, {split}", "this chapter", composed, parameters, needs=("mass",), needs_if=only, **how)  # type: ignore[arg-type]


UNIFORM = _policy("the same for all heads")
PER_HEAD = _policy("heads of a layer compete", allocate=allocate.joint, budget="per head")
JOINT = _policy("all heads compete", across=allocate.joint_layers, budget="joint")
ONE_SET = _policy("one set for all", across=one_set)
