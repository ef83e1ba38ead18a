"""Orders and selections against Python's own sort."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrepro.chapters.protection.selection import drop_lowest, eviction_rank, position_rank, string_order, top_per_head

small = st.integers(0, 3)


@given(st.lists(st.tuples(small, small, st.booleans()), min_size=1, max_size=40), st.integers(0, 45))
@settings(max_examples=80, deadline=None)
def test_the_eviction_order_is_pythons_sort_and_drops_count(tokens, count):
    score = torch.tensor([[float(a) for a, _, _ in tokens]])
    tie = torch.tensor([[b for _, b, _ in tokens]])
    candidates = torch.tensor([[c for _, _, c in tokens]])
    order = sorted((i for i, t in enumerate(tokens) if t[2]), key=lambda i: (tokens[i][0], tokens[i][1], i))
    rank = eviction_rank(candidates, (score, tie))[0]
    assert [int(rank[i]) for i in order] == list(range(len(order)))
    dropped = drop_lowest(candidates, (score, tie), torch.tensor([count]))[0].nonzero()[:, 0].tolist()
    assert dropped == sorted(order[:count])


@given(st.lists(st.integers(0, 70_000), min_size=1, max_size=60, unique=True))
@settings(max_examples=60, deadline=None)
def test_string_ranks_sort_as_decimal_strings(positions):
    p = torch.tensor([positions])
    ranks = position_rank(p, "string")[0].tolist()
    assert [x for _, x in sorted(zip(ranks, positions, strict=True))] == sorted(positions, key=str)
    assert position_rank(p, "integer") is p


def test_string_order_begins_as_strings_do():
    assert string_order(2000, torch.get_default_device())[[0, 1, 10, 100, 1000, 1001]].tolist() == list(range(6))


@given(st.integers(0, 10_000), st.integers(1, 4), st.integers(1, 30))
@settings(max_examples=50, deadline=None)
def test_each_head_keeps_its_best_and_the_last_in_tie_order(seed, heads, tokens):
    g = torch.Generator().manual_seed(seed)
    scores = torch.randint(0, 4, (2, heads, tokens), generator=g).float()
    candidates = torch.rand(2, tokens, generator=g) < 0.7
    counts = torch.randint(0, tokens + 2, (2, heads), generator=g)
    ties = torch.stack([torch.randperm(tokens, generator=g) for _ in range(2)])
    chosen = top_per_head(scores, candidates, counts, ties)
    for b in range(2):
        pool = candidates[b].nonzero()[:, 0].tolist()
        for h in range(heads):
            best = sorted(pool, key=lambda i: (float(scores[b, h, i]), int(ties[b, i])), reverse=True)
            assert set(chosen[b, h].nonzero()[:, 0].tolist()) == set(best[: int(counts[b, h])])
