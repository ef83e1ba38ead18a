import os

import pytest
import torch

pytest.importorskip("triton", reason="triton is packaged for Linux only")

from kvrepro_kernels.rotary import rotary, rotary_reference

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE == "cuda" else [])


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


def test_bad_input_is_one_line():
    query, key, cos, sin = problem()
    for given, message in (
        ((query, key[:1], cos, sin), "do not fit"), ((query, key, cos[:, :2], sin), "do not fit"),
        ((query, key, cos[..., :8], sin[..., :8]), "do not fit"), ((query, key, cos.double(), sin), "one dtype"),
        ((query.transpose(2, 3).contiguous().transpose(2, 3), key, cos, sin), "innermost"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message) as error:
            rotary(*given)
        assert "\n" not in str(error.value)
