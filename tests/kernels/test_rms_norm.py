import pytest
import torch
from kernels_run import DEVICE, DTYPES
from kvrepro_kernels.rms_norm import rms_norm, rms_norm_reference


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
