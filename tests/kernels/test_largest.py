import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="triton is packaged for Linux only")

from kvrepro_kernels.largest import largest, largest_reference

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
SPECIAL = [float("-inf"), float("inf"), 0.0, -0.0, 1.0, -1.0, 3.4e38, -3.4e38, 1e-45, -1e-45]


@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_any_row(data: st.DataObject):
    rows, tokens = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 20))
    value = st.one_of(st.sampled_from(SPECIAL), st.floats(-2, 2, width=32))
    scores = torch.tensor([data.draw(st.lists(value, min_size=tokens, max_size=tokens)) for _ in range(rows)])
    counts = torch.tensor(data.draw(st.lists(st.integers(0, tokens + 2), min_size=rows, max_size=rows)))
    kept = largest(scores.float().to(DEVICE), counts.to(DEVICE)).cpu()
    assert kept.tolist() == largest_reference(scores.float(), counts).tolist()


def test_rows_of_several_blocks_with_ties():
    scores = torch.randn(2, 20001).mul(8).round().to(DEVICE)
    counts = torch.tensor([5000, 1], device=DEVICE)
    assert largest(scores, counts).cpu().tolist() == largest_reference(scores.cpu(), counts.cpu()).tolist()


def test_bad_input_is_one_line():
    for wrong in (torch.zeros(2, 3, dtype=torch.float64), torch.zeros(3, 2).T):
        with pytest.raises(ValueError, match="give float32") as error:
            largest(wrong, torch.ones(2, dtype=torch.long))
        assert "\n" not in str(error.value)
