"""Budgets per KV head."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrepro.chapters.protection.allocate import by_entropy, every_head


def test_every_head_gets_the_whole_budget():
    counts = every_head(torch.zeros(2, 3, 9), torch.ones(2, 9, dtype=torch.bool), torch.tensor([4, 5]))
    assert counts.tolist() == [[4, 4, 4], [5, 5, 5]]


@given(st.integers(0, 10_000), st.integers(1, 8), st.integers(1, 40))
@settings(max_examples=80, deadline=None)
def test_entropy_budgets_sum_and_leave_no_head_empty(seed, heads, budget):
    g = torch.Generator().manual_seed(seed)
    scores = torch.rand(3, heads, 50, generator=g) ** torch.randint(1, 12, (3, heads, 1), generator=g)
    evictable = torch.rand(3, 50, generator=g) < 0.8
    counts = by_entropy(scores, evictable, torch.full((3,), budget))
    assert counts.sum(1).tolist() == [budget * heads] * 3
    assert int(counts.min()) >= 1


def test_entropy_budgets_by_hand():
    # One head looks at 2 tokens, the other at 4: H = ln 2 and ln 4, so 1/H stands 2 to 1 and 18 splits into 12 and 6.
    scores = torch.tensor([[[0.5, 0.5, 0, 0], [0.1, 0.1, 0.1, 0.1]]])
    everything = torch.ones(1, 4, dtype=torch.bool)
    assert by_entropy(scores, everything, torch.tensor([9])).tolist() == [[12, 6]]
    assert math.isclose(math.log(4) / math.log(2), 2)


def test_heads_that_saw_nothing_share_alike():
    counts = by_entropy(torch.zeros(1, 4, 20), torch.ones(1, 20, dtype=torch.bool), torch.tensor([7]))
    assert counts.tolist() == [[7, 7, 7, 7]]
