"""Slots of the cache: rows, moves, new buffers."""

import torch
from transformers import DynamicCache

from kvrepro.chapters.protection.slots import concatenate, from_prompt


def prompt_cache(tokens: int = 10) -> DynamicCache:
    cache = DynamicCache()
    for layer in range(2):
        base = torch.arange(tokens, dtype=torch.float32).view(1, 1, tokens, 1) + 100 * layer
        cache.update(base.expand(1, 2, tokens, 4).clone(), -base.expand(1, 2, tokens, 4), layer)
    return cache


def contents(cache, row: int, layer: int = 0) -> list[float]:
    return cache.keys[layer][row, 1, :, 2].tolist()


def test_rows_of_one_prompt_hold_their_own_tokens_and_zeros_behind():
    cache = from_prompt(prompt_cache(), torch.tensor([[1, 4, 9], [0, 2, 3]]), 5)
    assert contents(cache, 0) == [1, 4, 9, 0, 0]
    assert contents(cache, 1, layer=1) == [100, 102, 103, 0, 0]
    assert cache.values[1][1, 0, 2, 0] == -103
    assert cache.token_bytes == 2 * 2 * 2 * 4 * 4


def test_updates_moves_gathers_and_rows():
    cache = concatenate([
        from_prompt(prompt_cache(), torch.tensor([[1, 4, 9]]), 5),
        from_prompt(prompt_cache(), torch.tensor([[0, 2]]), 5),
    ])  # fmt: skip
    assert cache.slot == 3
    for layer in range(2):
        cache.update(torch.full((2, 2, 1, 4), 50.0), torch.full((2, 2, 1, 4), 60.0), layer)
    assert contents(cache, 0) == [1, 4, 9, 50, 0]
    assert contents(cache, 1) == [0, 2, 0, 50, 0]
    cache.move(torch.tensor([[3], [3]]), torch.tensor([[0], [3]]))
    assert contents(cache, 0) == [50, 4, 9, 50, 0]
    assert contents(cache, 1) == [0, 2, 0, 50, 0]
    cache.gather(torch.tensor([[2, 0], [1, 3]]), 3)
    assert contents(cache, 0) == [9, 50, 0]
    assert contents(cache, 1) == [2, 50, 0]
    cache.rows(torch.tensor([1]))
    assert contents(cache, 0) == [2, 50, 0]
