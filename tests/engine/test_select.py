import contextvars

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrepro.engine.allocate import by_kernels, largest, lexsort, select
from kvrepro.errors import InputError


@st.composite
def heads(draw):
    """(scores with ties and dead slots in front, protected, counts) of 1 to 2 rows and heads."""
    batch, kv_heads, tokens = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 9))
    shape = (batch, kv_heads, tokens)
    n = batch * kv_heads * tokens
    scores = torch.tensor(draw(st.lists(st.integers(-2, 2), min_size=n, max_size=n))).view(shape).float()
    protected = torch.tensor(draw(st.lists(st.booleans(), min_size=n, max_size=n))).view(shape)
    dead = torch.tensor(draw(st.lists(st.integers(0, tokens), min_size=batch * kv_heads, max_size=batch * kv_heads)))
    scores[torch.arange(tokens) < dead.view(batch, kv_heads, 1)] = -torch.inf
    least = (protected & ~scores.isneginf()).sum(-1)
    counts = least + torch.tensor(draw(st.lists(st.integers(0, 9), min_size=len(dead), max_size=len(dead)))).view(
        batch, kv_heads
    )
    return scores, protected, counts


@given(heads())
@settings(max_examples=200, deadline=None)
def test_matches_a_sort_of_each_head(case):
    scores, protected, counts = case
    kept = select(scores, protected, counts)
    for b in range(scores.shape[0]):
        for h in range(scores.shape[1]):
            alive = [j for j in range(scores.shape[2]) if scores[b, h, j] > -torch.inf]
            order = sorted(alive, key=lambda j: (not protected[b, h, j], -scores[b, h, j].item(), -j))
            assert kept[b, h].nonzero()[:, 0].tolist() == sorted(order[: int(counts[b, h])])


def test_refuses_more_protected_tokens_than_the_budget_and_names_both():
    protected = torch.ones(1, 2, 40).bool()
    protected[:, :, 36:] = False
    with pytest.raises(InputError, match="budget 32 < 36 protected tokens: raise the budget"):
        select(torch.zeros(1, 2, 40), protected, torch.tensor([[36, 32]]))


def test_refuses_nan():
    with pytest.raises(InputError, match="1 of 3 scores are NaN"):
        select(torch.tensor([[[0.0, torch.nan, 1.0]]]), torch.zeros(1, 1, 3).bool(), torch.tensor([[1]]))


@given(heads(), st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_ties_decide_among_equals_where_they_are_given(case, random):
    scores, protected, counts = case
    tokens = scores.shape[2]
    ties = torch.tensor([random.sample(range(tokens), tokens) for _ in range(counts.numel())]).view_as(scores)
    kept = select(scores, protected, counts, ties)
    for b, h in torch.cartesian_prod(*map(torch.arange, counts.shape)).tolist():
        alive = [j for j in range(tokens) if scores[b, h, j] > -torch.inf]
        order = sorted(alive, key=lambda j: (not protected[b, h, j], -scores[b, h, j].item(), -ties[b, h, j].item()))
        assert kept[b, h].nonzero()[:, 0].tolist() == sorted(order[: int(counts[b, h])])


def test_lexsort_leaves_equals_in_their_order():
    first, second = torch.arange(300).view(2, 1, 150) % 3, torch.arange(300).view(2, 1, 150) % 2
    for row, order in enumerate(lexsort(first, second)[:, 0].tolist()):
        keys = list(zip(first[row, 0].tolist(), second[row, 0].tolist(), range(150), strict=True))
        assert order == [place for *_, place in sorted(keys)]


def test_neighbouring_numbers_and_many_equals_are_told_apart():
    """Scores that differ in their last bit are not equal; among equals the 100th is later than the 99th."""
    for sign in (1, -1):
        scores = sign * torch.tensor([1.0, 1 + 2**-23, 1 + 2**-22, 1 + 2**-23])
        for more in (scores, scores.flip(0)):
            assert more[largest(more, torch.tensor(1))].item() == more.max()
            assert sorted(more[largest(more, torch.tensor(3))].tolist()) == sorted(more.tolist())[1:]
    assert largest(torch.tensor([0.0, 2e-9, 1e-9]), torch.tensor(1)).tolist() == [False, True, False]
    zeros = torch.tensor([0.0, -0.0, -1.0])  # which are equals
    assert largest(zeros, torch.tensor(1)).tolist() == [False, True, False]
    for n in (40, 200, 20_000):
        kept = largest(torch.zeros(2, n), torch.tensor([3, n - 1]))
        assert [row.nonzero()[:, 0].tolist() for row in kept] == [[n - 3, n - 2, n - 1], list(range(1, n))]


@given(heads())
@settings(max_examples=10, deadline=None)
def test_one_launch_chooses_and_finds_what_is_amiss(case):
    pytest.importorskip("triton", reason="triton is packaged for Linux only")
    scores, protected, counts = case
    with by_kernels():
        assert torch.equal(select(scores, protected, counts), _plainly(select, scores, protected, counts))
        short = counts - 1 - (counts > 0).long() * 8
        strange = scores.masked_fill(scores == 1, torch.nan)
        for wrong in ((scores, protected, short), (strange, protected, counts)):
            assert _line(select, *wrong) == _line(_plainly, select, *wrong)


def test_no_token_that_is_dead_stays_before_all_others():
    scores, firm = torch.tensor([-torch.inf, 1, 2]), torch.tensor([True, False, False])
    for kernels in (False, True):
        with by_kernels(kernels):
            assert largest(scores[None], torch.tensor([2]), firm[None]).tolist() == [[False, True, True]]


def _plainly(function, *arguments):
    return contextvars.Context().run(function, *arguments)


def _line(function, *arguments):
    """The error that a call raises, or None."""
    try:
        function(*arguments)
    except InputError as error:
        return str(error)
    return ""
