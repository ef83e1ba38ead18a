import os

import pytest
import torch

pytest.importorskip("triton", reason="triton is packaged for Linux only")

from kvrepro_kernels.rms_norm import rms_norm, rms_norm_reference

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE == "cuda" else [])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 48), (3, 2, 130), (2, 5, 7, 64), (1, 4096)])
def test_rows_are_normalised_as_transformers_does(shape, dtype):
    generator = torch.Generator().manual_seed(3)
    x = 5 * torch.randn(shape, generator=generator).to(DEVICE, dtype)
    weight = torch.randn(shape[-1], generator=generator).to(DEVICE, dtype)
    ours, truth = rms_norm(x, weight, 1e-6), rms_norm_reference(x, weight, 1e-6)
    torch.testing.assert_close(ours, truth, rtol=2 * torch.finfo(dtype).eps, atol=2 * torch.finfo(dtype).eps)
    zeros = torch.zeros_like(x)
    assert not rms_norm(zeros, weight, 1e-6).any()


def test_bad_input_is_one_line():
    x = torch.ones(2, 8, device=DEVICE)
    for weight, given in ((x[0, :4], x), (x[0].half(), x), (x[:, 0], x.T)):
        with pytest.raises(ValueError, match="must be contiguous"):
            rms_norm(given, weight, 1e-6)
