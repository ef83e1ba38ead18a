"""Scorers of the protection paper: pure functions of one `Observation`, large = keep.

Each returns float32 (H2O float64) `[batch, kv_heads, tokens]`, with kv_heads = 1 where one ranking serves all heads.
Symbols as in `Observation`: L last access, a current, M peak, S cumulative, Pf prefill attention, t the step.
"""

import torch

from kvrepro.chapters.protection.observe import Observation
from kvrepro.engine.shapes import Scores


def lru(o: Observation) -> Scores:
    """L, the last use. Protection paper, section 3."""
    return o.last_access.float()[:, None]


def h2o(o: Observation) -> Scores:
    """0.7 S + 0.1 max(a, M) + 1[t - L <= 64], mass and a bonus for recent use. Artifact's simplified H2O."""
    recent = (o.step - o.last_access <= 64).double()  # float64: beside the 1, small masses would tie in float32
    return (0.7 * o.cumulative.double() + 0.1 * torch.maximum(o.current, o.peak) + recent)[:, None]


def snapkv(o: Observation) -> Scores:
    """S + max(a, M) as run, S + a as described. Artifact's simplified SnapKV; paper, Table 19."""
    bonus = o.current if o.reading.snapkv_bonus == "current" else torch.maximum(o.current, o.peak)
    return (o.cumulative + bonus)[:, None]


def ada_kv(o: Observation) -> Scores:
    """S + 0.5 M. Artifact's simplified Ada-KV; paper, Table 19."""
    return (o.cumulative + 0.5 * o.peak)[:, None]


def current(o: Observation) -> Scores:
    """a, attention of the latest query. Artifact's simplified QUEST; paper, Table 19."""
    return o.current[:, None]


def cumulative(o: Observation) -> Scores:
    """S, attention mass without a recency term. "Faithful" H2O; paper, appendix B."""
    return o.cumulative[:, None]


def prefill(o: Observation) -> Scores:
    """Pf, attention frozen at the prompt's end, 0 for generated tokens. "Faithful" SnapKV; paper, appendix B."""
    return o.prefill[:, None]


def random(o: Observation) -> Scores:
    """1 for the tokens that a draw without replacement leaves, 0 for those that must go.

    The draw is `random.sample` over the evictable positions in ascending order.
    The one scorer with a memory: each row's generator advances with every call, as in the artifact.
    """
    scores = torch.ones_like(o.current)
    for row, generator in enumerate(o.draws):
        slots = o.evictable[row].nonzero()[:, 0]
        slots = slots[o.positions[row, slots].argsort()].tolist()
        victims = generator.sample(slots, min(int(o.excess[row]), len(slots)))
        scores[row, victims] = 0.0
    return scores[:, None]


def head_cumulative(o: Observation) -> Scores:
    """S per KV head. "Faithful" Ada-KV; paper, appendix B."""
    return o.head_cumulative


def head_current(o: Observation) -> Scores:
    """a per KV head. "Faithful" QUEST; paper, appendix B."""
    return o.head_current
