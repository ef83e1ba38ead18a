"""Scorers of the protection paper, large = keep: one ranking for all layers, from `Observation.sums`.

Symbols: L last use, a latest, M largest, S summed attention, Pf attention inside the prompt, t the step. `[batch, 1 or
kv_heads, tokens]`, float32; H2O's float64, since with its bonus of 1 small masses would be equal in float32.
"""

from random import Random

import torch

from kvrepro.engine.observe import Observation
from kvrepro.engine.shapes import Mask, RowInts, Scores


def lru(o: Observation) -> Scores:
    """L, the last use. Protection paper, section 3."""
    return o.sums["last_use"].float()


def h2o(o: Observation) -> Scores:
    """0.7 S + 0.1 max(a, M) + 1[t - L <= 64], mass and a bonus for recent use. Artifact's simplified H2O."""
    recent = (o.step - o.sums["last_use"] <= 64).double()
    return 0.7 * o.sums["summed"].double() + 0.1 * torch.maximum(o.sums["latest"], o.sums["largest"]) + recent


def snapkv(o: Observation, snapkv_bonus: str = "peak") -> Scores:
    """S + max(a, M) in the authors' code, S + a in their text. Artifact's simplified SnapKV; paper, Table 19."""
    latest = o.sums["latest"]
    bonus = latest if snapkv_bonus == "current" else torch.maximum(latest, o.sums["largest"])
    return o.sums["summed"] + bonus


def ada_kv(o: Observation) -> Scores:
    """S + 0.5 M. Artifact's simplified Ada-KV; paper, Table 19."""
    return o.sums["summed"] + 0.5 * o.sums["largest"]


def latest(o: Observation) -> Scores:
    """a, attention of the latest query. Artifact's simplified QUEST; paper, Table 19."""
    return o.sums["latest"]


def summed(o: Observation) -> Scores:
    """S, attention mass without a recency term. "Faithful" H2O; paper, appendix B."""
    return o.sums["summed"]


def prompt(o: Observation) -> Scores:
    """Pf, attention frozen at the prompt's end, 0 for generated tokens. "Faithful" SnapKV; paper, appendix B."""
    return o.sums["prompt"]


def random_sample(o: Observation, budget: RowInts, guarded: Mask, draws: list[Random]) -> Scores:
    """1 for the tokens that a draw without replacement leaves, 0 for those that must go.

    The draw is `random.sample` over the unguarded positions in ascending order. The one scorer with a memory: each
    row's generator in `draws` advances with every call, as in the artifact.
    """
    scores = torch.ones(o.positions.shape, device=o.positions.device)
    excess = o.alive[:, 0].sum(1) - budget
    for row, generator in enumerate(draws):
        slots = (o.alive[row, 0] & ~guarded[row, 0]).nonzero()[:, 0].tolist()
        scores[row, 0, generator.sample(slots, min(max(0, int(excess[row])), len(slots)))] = 0.0
    return scores


def head_summed(o: Observation) -> Scores:
    """S per KV head. "Faithful" Ada-KV; paper, appendix B."""
    return o.sums["head_summed"]


def head_latest(o: Observation) -> Scores:
    """a per KV head. "Faithful" QUEST; paper, appendix B."""
    return o.sums["head_latest"]
