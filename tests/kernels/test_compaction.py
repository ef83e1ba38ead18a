import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels_run import DEVICE, ascending
from kvrepro_kernels.compaction import compact, compact_reference


def cache(batch: int, kv_heads: int, tokens: int, dim: int, dtype: torch.dtype = torch.float32, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(batch, kv_heads, tokens, dim, generator=generator) for _ in range(2))
    return keys.to(DEVICE, dtype), values.to(DEVICE, dtype)


def ragged_rows(counts: list[list[int]], tokens: int, seed: int = 0) -> torch.Tensor:
    """Random ascending rows, counts[b][g] of them, padded with -1 to the largest count."""
    return ascending(sum(counts, []), tokens, seed).view(len(counts), len(counts[0]), -1)


def transcription(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The formula, element by element."""
    out = torch.zeros(*rows.shape, x.shape[-1], dtype=x.dtype)
    for b, g, i in ((b, g, i) for b in range(x.shape[0]) for g in range(x.shape[1]) for i in range(rows.shape[2])):
        if rows[b, g, i] >= 0:
            out[b, g, i] = x[b, g, rows[b, g, i]].cpu()
    return out


def poisoned(shape: tuple[int, ...], dtype: torch.dtype, margin: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    """A NaN-filled buffer with a margin on both sides, and the view between the margins."""
    size = torch.Size(shape).numel()
    buffer = torch.full((size + 2 * margin,), float("nan"), dtype=dtype, device=DEVICE)
    return buffer, buffer[margin : margin + size].view(shape)


def test_reference_is_the_formula():
    keys, values = cache(2, 3, 17, 5)
    rows = ragged_rows([[0, 1, 17], [4, 9, 2]], tokens=17)
    for x, out in zip((keys, values), compact_reference(keys, values, rows), strict=True):
        torch.testing.assert_close(out.cpu(), transcription(x, rows), rtol=0, atol=0)


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_kernel_equals_reference_and_writes_every_element_once(dim: int, dtype: torch.dtype):
    keys, values = cache(2, 2, 111, dim, dtype)
    rows = ragged_rows([[63, 111], [1, 0]], tokens=111)
    shape = (*rows.shape, dim)
    (key_buffer, out_keys), (value_buffer, out_values) = poisoned(shape, dtype), poisoned(shape, dtype)
    compact(keys, values, rows, out=(out_keys, out_values))
    expected = compact_reference(keys, values, rows)
    assert torch.equal(out_keys, expected[0])
    assert torch.equal(out_values, expected[1])
    for buffer in (key_buffer, value_buffer):
        assert buffer[:64].isnan().all()
        assert buffer[-64:].isnan().all()


@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_any_ragged_shape(data: st.DataObject):
    batch, kv_heads = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    tokens, dim = data.draw(st.integers(1, 70)), data.draw(st.integers(1, 40))
    counts = [[data.draw(st.integers(0, tokens)) for _ in range(kv_heads)] for _ in range(batch)]
    seed = data.draw(st.integers(0, 1000))
    keys, values = cache(batch, kv_heads, tokens, dim, seed=seed)
    rows = ragged_rows(counts, tokens, seed)
    for x, out in zip((keys, values), compact(keys, values, rows), strict=True):
        assert torch.equal(out.cpu(), transcription(x, rows))
