"""Four bits against optimum-quanto's own code."""

import pytest
import torch
from optimum.quanto import MaxOptimizer, qint4
from optimum.quanto.tensor.grouped import ungroup

from kvrepro.engine.cache import GROUP, Packed
from kvrepro.errors import InputError


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_numbers_are_those_of_quanto(dtype):
    dense = torch.randn(137, 2 * GROUP, generator=torch.Generator("cpu").manual_seed(0)).to(dtype)
    dense[5, :GROUP] = 0.25  # a group of equals has no scale
    packed = Packed(dense)
    scale, shift = MaxOptimizer()(dense, qint4, 0, GROUP)
    levels = torch.ops.quanto.quantize_affine(dense, bits=4, axis=0, group_size=GROUP, scale=scale, shift=shift)
    assert torch.equal(packed.dense(), ungroup(scale * levels - shift, 0, dense.shape))
    assert (packed.dense().dtype, packed.dtype) == (dtype, dtype)
    assert torch.equal(packed.dense()[5, :GROUP], dense[5, :GROUP])
    assert packed.bytes == dense.numel() // 2 + 2 * dense.itemsize * dense.numel() // GROUP


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_group_has_sixteen_levels_between_its_extremes(dtype):
    dense = torch.randn(37, 2 * GROUP, generator=torch.Generator("cpu").manual_seed(1)).to(dtype)
    for ours, group in zip(Packed(dense).dense().float().view(-1, GROUP), dense.float().view(-1, GROUP), strict=True):
        assert len(ours.unique()) <= 16
        step = float(group.max() - group.min()) / 15
        assert float((ours - group).abs().max()) <= step * (0.51 if dtype == torch.float32 else 0.6)


def test_no_tokens_and_heads_that_do_not_fit():
    assert Packed(torch.zeros(0, GROUP)).dense().shape == (0, GROUP)
    with pytest.raises(InputError, match="head dim 48 is no multiple of 64, which share a scale: use bits=None"):
        Packed(torch.zeros(3, 48))
