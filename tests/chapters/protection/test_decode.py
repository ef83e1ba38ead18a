"""Rows in a batch: regrouping slots, reducing a mixed batch, freeing slots."""

from dataclasses import replace
from random import Random

import torch
from tiny import after_prefill

from kvrepro.chapters.protection.decode import Plan, Rows, _compact, keep_sets, regrouped
from kvrepro.chapters.protection.policy import POLICIES, Limits, reduce
from kvrepro.chapters.protection.slots import SlotCache
from kvrepro.engine.condition import Condition


def test_regrouping_takes_slots_and_pads_with_zeros():
    v = torch.tensor([[5, 6, 7], [8, 9, 10]])
    slots = torch.tensor([[2, 0], [1, 1]])
    assert regrouped(v, slots, 4).tolist() == [[7, 5, 0, 0], [9, 9, 0, 0]]
    assert regrouped(v[:, None].expand(-1, 2, -1), slots, 3)[1].tolist() == [[9, 9, 0]] * 2


def test_a_mixed_batch_reduces_like_each_row_alone():
    conditions = [
        Condition("lru", 20), Condition("h2o", 30, 0.1, 0.1), Condition("lru", 25, reading="as_described"),
        Condition("random", 20), Condition("h2o", 20), Condition("lru", 20, suffix=0.2),
    ]  # fmt: skip
    signal = torch.rand(60, generator=torch.Generator(torch.get_default_device()).manual_seed(1))
    one = after_prefill(60, conditions[0], signal)
    together = keep_sets(
        one.map(lambda v: v.expand(6, *v.shape[1:])), conditions, [Random(42) for _ in conditions], heads=1
    )
    for row, c in zip(together, conditions, strict=True):
        alone = replace(one, reading=c.resolved(), draws=(Random(42),))
        assert row.tolist() == reduce(POLICIES[c.policy], alone, Limits.of([c], torch.get_default_device()))[0].tolist()


def test_living_tokens_behind_the_target_move_into_holes():
    o = after_prefill(6, Condition("lru", 4))
    o = replace(o, alive=torch.tensor([[True, False, True, False, True, True]]), positions=torch.arange(10, 16)[None])
    stored = torch.arange(6.0).view(1, 1, 6, 1).expand(1, 2, 6, 3).clone()
    cache = SlotCache([stored], [-stored], slot=6)
    rows = Rows([(0, 0)], [Condition("lru", 4)], [Random(42)], o, o.alive[:, None], cache, torch.zeros(1, 1),
                torch.zeros(1), torch.zeros(1))  # fmt: skip
    _compact(rows, Plan("physical", True, 6, 4, 2, 0, "max", None))
    assert rows.observation.alive.tolist() == [[True, True, True, True, False, False]]
    assert rows.visible.tolist() == [[[True, True, True, True, False, False]]]
    assert rows.observation.positions[0, :4].tolist() == [10, 14, 12, 15]
    assert cache.keys[0][0, 1, :4, 2].tolist() == [0, 4, 2, 5]
    assert cache.values[0][0, 0, :4, 0].tolist() == [0, -4, -2, -5]
    assert cache.slot == 4
