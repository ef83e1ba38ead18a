"""Who chooses the survivors: the catalogue's policies at every granularity, and another run's choice."""

import numpy as np
import pytest
import tiny

from kvrepro.chapters.reclamation import survivors as s
from kvrepro.engine.condition import DecodeCap, Prefill
from kvrepro.engine.generate import generate

PAIRS = [(p, g) for p in s.POLICIES for g in (s.JOINT if p != "sinks_recency" else s.JOINT[:1])]


def keep(policy: str, granularity: str, budget: int = 40) -> np.ndarray:
    """Who stays of a prompt of 200 tokens, [layers, kv_heads, tokens]."""
    chosen = s.condition(policy, granularity, budget, Prefill())
    [[answer]] = generate(tiny.model(), tiny.prompts(200), [chosen], max_new_tokens=1, stop_ids=(), kept_sets=True)
    return np.stack(answer.kept_sets)


@pytest.mark.parametrize(("policy", "granularity"), PAIRS)
def test_a_granularity_is_who_chooses_for_itself(policy, granularity):
    kept = keep(policy, granularity)
    assert kept.sum() == 40 * 6
    assert kept[..., -1].all()
    if granularity != "joint":
        assert (kept.sum(-1) == 40).all()
    alike = {axis: bool((kept == kept.take([0], axis)).all()) for axis in (0, 1)}
    one_set = granularity == "one set"
    assert alike == {0: one_set, 1: one_set or granularity == "per layer"}


def test_an_evicted_token_is_never_kept_again():
    for granularity in s.JOINT:
        conditions = [s.condition("cumulative", granularity, 40, regime) for regime in (Prefill(), DecodeCap(4))]
        [[once, again]] = generate(tiny.model(), tiny.prompts(120), conditions, max_new_tokens=20, stop_ids=())
        assert once.kept_positions == again.kept_positions
        assert sum(again.kept) == 43 * 3  # three tokens each since the last eviction
