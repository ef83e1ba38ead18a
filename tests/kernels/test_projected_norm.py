import pytest
import torch
from kernels_run import DEVICE, DTYPES
from kvrepro_kernels.projected_norm import projected_norm, projected_norm_reference


def problem(batch, kv_heads, group, tokens, dim, hidden, dtype=torch.float32):
    """Fresh random values, and a linear layer's weight as the model has it."""
    values = torch.randn(batch, kv_heads, tokens, dim, device=DEVICE).to(dtype)
    weight = torch.randn(hidden, kv_heads * group * dim, device=DEVICE).to(dtype)
    return values, weight.view(hidden, -1, dim).permute(1, 2, 0)


def test_reference_is_the_formula():
    values, output = (x.double().cpu() for x in problem(2, 2, 3, 5, 4, 7))
    norm = projected_norm_reference(values, output)
    for b, g, j in ((0, 0, 0), (1, 1, 4), (0, 1, 2)):
        norms_by_head = [(values[b, g, j] @ output[3 * g + r]).abs().sum() for r in range(3)]
        torch.testing.assert_close(norm[b, g, j], sum(norms_by_head) / 3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("batch", "kv_heads", "group", "tokens", "dim", "hidden"),
    [(1, 2, 3, 130, 64, 200), (2, 1, 1, 1, 80, 48), (2, 2, 2, 67, 128, 129), (1, 1, 8, 40, 256, 96)],
)
def test_norms_are_the_references(dtype, batch, kv_heads, group, tokens, dim, hidden):
    values, output = problem(batch, kv_heads, group, tokens, dim, hidden, dtype)
    out = torch.full((batch, kv_heads, tokens), float("nan"), device=DEVICE)
    projected_norm(values, output, out=out)
    expected = projected_norm_reference(values.double(), output.double())
    assert ((out - expected).norm() / expected.norm()) < 1e-5
    strided = values.transpose(1, 2).contiguous().transpose(1, 2)
    torch.testing.assert_close(projected_norm(strided, output.contiguous()), out, rtol=1e-5, atol=1e-5)
