import pytest
import torch
from kernels_run import DEVICE
from kvrepro_kernels.prefill_attention import prefill_attention, prefill_attention_reference, prefill_backend

CUDA = DEVICE == "cuda"
CASES = [("cpu", torch.float32), ("cpu", torch.bfloat16)]
if CUDA:
    CASES = [("cudnn", torch.bfloat16), ("flash", torch.bfloat16), ("efficient", torch.float32)]


def problem(group=2, tokens=63, dim=64, dtype=torch.float32):
    return [torch.randn(2, h, tokens, dim, device=DEVICE).to(dtype) for h in (3 * group, 3, 3)]


@pytest.mark.parametrize(("backend", "dtype"), CASES)
@pytest.mark.parametrize("dim", [64, 80, 128])
@pytest.mark.parametrize("tokens", [1, 63, 300])
@pytest.mark.parametrize("group", [1, 4])
def test_output_and_lse(backend, dtype, dim, tokens, group):
    inputs = problem(group, tokens, dim, dtype)
    ours = prefill_attention(*inputs, scale=0.1, backend=backend)
    output, lse = prefill_attention_reference(*(x.double() for x in inputs), 0.1)
    assert ours.backend == backend
    assert ours.output.dtype == dtype
    assert (ours.output - output).norm() / output.norm() < (1e-5 if dtype == torch.float32 else 1e-2)
    assert ours.lse.shape == lse.shape
    assert ours.lse.dtype == torch.float32
    assert (ours.lse - lse).abs().max() < (1e-5 if dtype == torch.float32 else 2e-2)


def test_the_default_is_named():
    inputs = problem()
    assert prefill_attention(*inputs).backend == prefill_backend(inputs[0]) == ("efficient" if CUDA else "cpu")
