"""Scorers, against their formulas written out for one token each."""

from dataclasses import replace

import pytest
import torch
from tiny import after_prefill

from kvrepro.chapters.protection import score
from kvrepro.chapters.protection.policy import POLICIES
from kvrepro.engine.condition import Condition

L, A, M, S, PF = 3, 0.2, 0.6, 1.9, 0.9  # last access, current, peak, cumulative and prefill attention


def state(step: int, reading: str = "as_run"):
    o = after_prefill(2, Condition("lru", 8, reading=reading))
    fill = lambda x: torch.full((1, 2), x)  # noqa: E731
    return replace(
        o, step=step, last_access=fill(L), current=fill(A), peak=fill(M), cumulative=fill(S), prefill=fill(PF)
    )


@pytest.mark.parametrize(("scorer", "expected"), [
    (score.lru, L), (score.h2o, 0.7 * S + 0.1 * M + 1), (score.snapkv, S + M), (score.ada_kv, S + 0.5 * M),
    (score.current, A), (score.cumulative, S), (score.prefill, PF),
])  # fmt: skip
def test_formulas(scorer, expected):
    assert scorer(state(10))[0, 0].tolist() == pytest.approx([expected] * 2)


def test_h2o_forgets_its_recency_bonus_after_64_steps():
    bonus = [float(score.h2o(state(L + age))[0, 0, 0]) for age in (64, 65)]
    assert bonus[0] - bonus[1] == pytest.approx(1.0)


def test_h2o_tells_small_masses_apart_beside_its_bonus():
    masses = torch.tensor([[1e-6, 1e-6 + 1e-11]])
    o = replace(state(10), cumulative=masses, peak=masses, current=masses)
    first, second = score.h2o(o)[0, 0].tolist()
    assert second > first  # in float32 both would be 1.000001, and H2O would not rank as SnapKV after the prefill


def test_snapkv_adds_the_peak_as_run_and_the_current_step_as_described():
    assert float(score.snapkv(state(10, "as_described"))[0, 0, 0]) == pytest.approx(S + A)


def test_every_score_is_floating_with_a_head_axis():
    for name, policy in POLICIES.items():
        scores = policy.score(
            replace(state(10), evictable=torch.ones(1, 2, dtype=torch.bool), excess=torch.tensor([1]))
        )
        assert scores.dtype == (torch.float64 if name == "h2o" else torch.float32)
        assert scores.shape[0] == 1
        assert scores.shape[-1] == 2
