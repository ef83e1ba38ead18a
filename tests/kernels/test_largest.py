import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels_run import DEVICE
from kvrepro_kernels.largest import largest, largest_reference

SPECIAL = [float("-inf"), float("inf"), 0.0, -0.0, 1.0, -1.0, 3.4e38, -3.4e38, 1e-45, -1e-45]


@settings(deadline=None, max_examples=10)
@given(data=st.data())
def test_any_row(data: st.DataObject):
    rows, tokens = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 20))
    value = st.one_of(st.sampled_from(SPECIAL), st.floats(-2, 2, width=32))
    scores = torch.tensor([data.draw(st.lists(value, min_size=tokens, max_size=tokens)) for _ in range(rows)])
    counts = torch.tensor(data.draw(st.lists(st.integers(0, tokens + 2), min_size=rows, max_size=rows)))
    firm = torch.tensor([data.draw(st.lists(st.booleans(), min_size=tokens, max_size=tokens)) for _ in range(rows)])
    kept = largest(scores.float().to(DEVICE), counts.to(DEVICE)).cpu()
    assert kept.tolist() == largest_reference(scores.float(), counts).tolist()
    kept = largest(scores.float().to(DEVICE), counts.to(DEVICE), firm.to(DEVICE)).cpu()
    assert kept.tolist() == largest_reference(scores.float(), counts, firm).tolist()


def test_rows_of_several_blocks_with_ties():
    scores = torch.randn(2, 20001).mul(8).round().to(DEVICE)
    counts = torch.tensor([5000, 1], device=DEVICE)
    assert largest(scores, counts).cpu().tolist() == largest_reference(scores.cpu(), counts.cpu()).tolist()


@pytest.mark.parametrize(
    "tokens", [*range(1, 9), 15, 17, *(pytest.param(tokens, marks=pytest.mark.slow) for tokens in (16, 31))]
)
def test_every_count_among_equals(tokens):
    """For all sizes of the remaining range and its quarters."""
    scores = torch.stack([torch.zeros(tokens), torch.arange(tokens) // 3 * 1.4e-45]).repeat_interleave(tokens + 2, 0)
    counts = torch.arange(tokens + 2).repeat(2)
    kept = largest(scores.to(DEVICE), counts.to(DEVICE)).cpu()
    assert kept.tolist() == largest_reference(scores, counts).tolist()


def test_a_row_tells_what_is_amiss():
    scores = torch.tensor([[0.0, 1.0, torch.nan, -torch.inf], [torch.nan, torch.nan, 2.0, 3.0]], device=DEVICE)
    firm = torch.tensor([[True, True, False, True], [False, False, False, True]], device=DEVICE)
    problems = torch.full((2, 3), -1, dtype=torch.int32, device=DEVICE)
    largest(scores, torch.tensor([1, 2], device=DEVICE), firm, problems=problems)
    assert problems.tolist() == [[1, 1, 2], [2, 0, 1]]
