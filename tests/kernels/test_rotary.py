import pytest
import torch
from kernels_run import DEVICE, DTYPES
from kvrepro_kernels.rotary import rotary, rotary_reference


def problem(batch=2, heads=(5, 3), tokens=4, dim=24, dtype=torch.float32, given=2):
    """Queries and keys as a model's projections leave them, [batch, tokens, heads, dim] seen the other way round."""
    generator = torch.Generator().manual_seed(dim)
    query, key = (torch.randn(batch, tokens, n, dim, generator=generator).transpose(1, 2) for n in heads)
    angle = torch.rand(given, tokens, dim, generator=generator) * 6
    return [x.to(DEVICE, dtype) for x in (query, key, angle.cos(), angle.sin())]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [{}, {"given": 1}, {"batch": 1, "given": 1, "tokens": 1, "dim": 128}, {"dim": 2}])
def test_rows_are_turned_as_transformers_does(shape, dtype):
    inputs = problem(**shape, dtype=dtype)
    for ours, truth in zip(rotary(*inputs), rotary_reference(*inputs), strict=True):
        assert ours.is_contiguous()
        torch.testing.assert_close(ours, truth, rtol=2 * torch.finfo(dtype).eps, atol=2 * torch.finfo(dtype).eps)
