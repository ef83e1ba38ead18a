"""Paged moves against their reference, in place."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels_run import DEVICE, ascending
from kvrepro_kernels.fill_holes import fill_holes
from kvrepro_kernels.paging import moved_reference
from kvrepro_kernels.repack import repack


def pool(
    requests: int, blocks_each: int, block: int = 4, spare: int = 3, dim: int = 8, dtype=torch.float32, seed: int = 0
):
    """Two pools of which every request owns `blocks_each` blocks in random order, and the block table."""
    generator = torch.Generator().manual_seed(seed)
    shape = (requests * blocks_each + spare, block, 2, dim)
    keys, values = (torch.randn(shape, generator=generator).to(DEVICE, dtype) for _ in range(2))
    table = torch.randperm(shape[0], generator=generator)[: requests * blocks_each].view(requests, blocks_each)
    return keys, values, table.int().to(DEVICE)


def filled(kept: torch.Tensor) -> torch.Tensor:
    """Sources of hole filling, slot by slot."""
    source = torch.full_like(kept, -1)
    for r, slots in enumerate(kept.tolist()):
        slots = [j for j in slots if j >= 0]
        movers = iter([j for j in slots if j >= len(slots)])
        for i in range(len(slots)):
            source[r, i] = i if i in slots else next(movers)
    return source


@pytest.mark.parametrize("move", [repack, fill_holes])
@pytest.mark.parametrize(
    ("blocks", "counts"), [(1, [1, 4]), (8, [0, 32]), (9, [17, 35]), (80, [111, 319]), (80, [1, 2])]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_paged_moves_equal_the_reference(move, blocks: int, counts: list[int], dtype: torch.dtype):
    keys, values, table = pool(2, blocks, dtype=dtype)
    kept = ascending(counts, blocks * 4, seed=sum(counts))
    wanted = kept if move is repack else filled(kept)
    expected = [moved_reference(x, table, wanted) for x in (keys, values)]
    source = move(keys, values, table, kept)
    assert torch.equal(source, wanted)
    assert torch.equal(keys, expected[0])  # also the blocks that no request owns, and the slots behind the survivors
    assert torch.equal(values, expected[1])


@settings(deadline=None, max_examples=20)
@given(data=st.data())
def test_any_paged_move(data: st.DataObject):
    requests, blocks, block = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 12)), data.draw(st.integers(1, 5))
    counts = [data.draw(st.integers(0, blocks * block)) for _ in range(requests)]
    seed = data.draw(st.integers(0, 1000))
    keys, values, table = pool(requests, blocks, block, seed=seed)
    kept = ascending(counts, blocks * block, seed)
    if not kept.numel():
        return
    source = filled(kept)
    for row, slots, count in zip(source.tolist(), kept.tolist(), counts, strict=True):
        assert sorted(row) == sorted(slots)  # the same survivors
        assert all(j == i for i, j in enumerate(row[:count]) if i in slots)  # survivors in front do not move
    for move, wanted in ((repack, kept), (fill_holes, source)):
        moved = [x.clone() for x in (keys, values)]
        assert torch.equal(move(*moved, table, kept, tuning=dict(block_i=4, block_c=8)), wanted)
        assert torch.equal(moved[0], moved_reference(keys, table, wanted))
        assert torch.equal(moved[1], moved_reference(values, table, wanted))
