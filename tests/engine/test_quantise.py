"""Four bits against quanto's own plain code, without its compiled helpers on any device."""

import pytest
import torch
from optimum.quanto.library.extensions import extension
from optimum.quanto.tensor.packed import PackedTensor

from kvrepro.engine.quantise import GROUP, Packed, _without_compiler, unpack
from kvrepro.errors import InputError


@pytest.fixture
def no_compiler(monkeypatch):
    """Quanto's helpers for CPU and CUDA as on a machine where neither is compiled, nor can be."""
    monkeypatch.setattr(extension, "load", lambda **_: pytest.fail("something was compiled"))
    monkeypatch.setitem(extension._extensions, "quanto_cuda", extension.Extension("quanto_cuda", "/nowhere", []))
    for compiled in extension._extensions.values():
        monkeypatch.setattr(compiled, "_lib", None)


@pytest.mark.parametrize("bits", [2, 4])
def test_shifts_undo_quantos_packing(bits, no_compiler):
    numbers = torch.randint(0, 2**bits, (64, 5), dtype=torch.uint8)
    codes = PackedTensor.pack(numbers, bits)._data
    assert codes.numel() == numbers.numel() * bits // 8
    assert torch.equal(unpack(codes, bits), numbers)
    with _without_compiler():
        assert torch.equal(torch.ops.quanto.unpack(codes, bits), numbers)
        for helper in extension._extensions.values():  # a GPU's asks the same question
            assert torch.equal(helper.lib.unpack(codes, bits), numbers)
    assert all(helper._lib is None for helper in extension._extensions.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_group_has_sixteen_levels_between_its_extremes(dtype, no_compiler):
    torch.manual_seed(0)
    dense = torch.randn(37, 2 * GROUP).to(dtype)
    packed = Packed(dense)
    rounded = packed.dense()
    assert (rounded.dtype, rounded.shape, len(packed)) == (dtype, dense.shape, 37)
    assert packed.bytes < dense.numel() * dense.itemsize / (5 if dtype == torch.float32 else 2.5)
    for ours, group in zip(rounded.float().view(-1, GROUP), dense.float().view(-1, GROUP), strict=True):
        low, high = min(float(group.min()), 0.0), max(float(group.max()), 0.0)
        step = (high - low) / 15
        assert len(ours.unique()) <= 16
        assert float((ours - group).abs().max()) <= step * (0.51 if dtype == torch.float32 else 0.6)


@pytest.mark.parametrize(("dtype", "moves"), [(torch.float32, 1e-4), (torch.float16, 0.02), (torch.bfloat16, 0.15)])
def test_packing_again_moves_few_numbers_by_parts_of_a_level_and_in_float32_by_rounding_alone(
    dtype, moves, no_compiler
):
    """moves: bounds the largest move, in levels of the group, whose scale is rounded to the dtype again."""
    dense = torch.randn(2000, 2 * GROUP, generator=torch.Generator("cpu").manual_seed(0)).to(dtype)
    once = Packed(dense).dense()
    apart = (Packed(once).dense().float() - once.float()).abs().view(-1, GROUP)
    groups = dense.float().view(-1, GROUP)
    level = (groups.amax(1, keepdim=True) - groups.amin(1, keepdim=True)) / 15
    assert float((apart / level).max()) < moves
    moved = float((apart > 0.01 * level).float().mean())
    assert 0 < moved < 0.02 if dtype == torch.bfloat16 else moved < 0.02


def test_no_tokens_and_heads_that_do_not_fit():
    assert Packed(torch.zeros(0, GROUP)).dense().shape == (0, GROUP)
    with pytest.raises(InputError, match="head dim 48 is no multiple of 64, which share a scale: use bits=None"):
        Packed(torch.zeros(3, 48))
