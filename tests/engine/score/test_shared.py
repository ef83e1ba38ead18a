"""Scorers of `SharedCap`, against their formulas written out for one token each."""

from random import Random

import pytest
import torch
from observations import observation

from kvrepro.engine.catalogue import SHARED as POLICIES
from kvrepro.engine.policy import call
from kvrepro.engine.score import cumulative as score

L, A, M, S, PF = 3, 0.2, 0.6, 1.9, 0.9  # last use, latest, largest, summed attention, and attention in the prompt


def state(step: int, **tables: torch.Tensor):
    """Two tokens with the same numbers, one head."""
    numbers = {"last_use": L, "latest": A, "largest": M, "summed": S, "prompt": PF, "head_latest": A, "head_summed": S}
    sums = {name: torch.full((1, 1, 2), x) for name, x in numbers.items()}
    o = observation(batch=1, kv_heads=1, window=0, tokens=2)
    return type(o)(**{**vars(o), "sums": sums | tables, "step": step})


@pytest.mark.parametrize(("name", "expected"), [
    ("lru", L), ("h2o_simple", 0.7 * S + 0.1 * M + 1), ("snapkv_simple", S + M), ("ada_kv_simple", S + 0.5 * M),
    ("quest_simple", A), ("h2o_faithful", S), ("snapkv_faithful", PF), ("quest_faithful", A), ("ada_kv_faithful", S),
])  # fmt: skip
def test_formulas(name, expected):
    assert POLICIES[name].score(state(10))[0, 0].tolist() == pytest.approx([expected] * 2)


def test_h2o_tells_small_masses_apart_beside_its_bonus():
    masses = torch.tensor([[[1e-6, 1e-6 + 1e-11]]])
    first, second = score.h2o_simple(state(10, summed=masses, largest=masses, latest=masses))[0, 0].tolist()
    assert second > first  # in float32 both would be 1.000001, and H2O would not rank as SnapKV after the prompt


def test_snapkv_adds_the_peak_as_run_and_the_current_step_as_described():
    readings = {name: POLICIES["snapkv_simple"].reading(name) for name in ("as_run", "as_described")}
    scores = {name: float(call(score.snapkv_simple, state(10), parameters=p)[0, 0, 0]) for name, p in readings.items()}
    assert scores == pytest.approx({"as_run": S + M, "as_described": S + A})


def test_random_draws_among_unguarded_tokens_as_many_as_must_go():
    o = observation(batch=1, kv_heads=1, window=0, tokens=9)
    guards = torch.tensor([True, True] + [False] * 6 + [True]).view(1, 1, 9)
    scores = score.random_sample(o, torch.tensor([5]), guards, [Random(42)])
    assert (scores[0, 0] == 0).nonzero()[:, 0].tolist() == sorted(Random(42).sample(range(2, 8), 4))
