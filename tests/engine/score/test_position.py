"""Position scorers: StreamingLLM keeps sinks and the newest; Random is a fixed draw per layer, head and position."""

from dataclasses import replace

import pytest
import torch
from observations import observation, other_rubbish

from kvrepro.engine.score import keys


def splitmix(x: int) -> int:
    """SplitMix64 in Python integers."""
    x = (x + 0x9E3779B97F4A7C15) % 2**64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
    return x ^ (x >> 31)


def test_streaming_llm_ranks_by_position():
    o = observation(dead=4, gaps=6)
    scores = keys.streaming_llm(o)
    assert scores.dtype == torch.float32
    assert torch.equal(scores.long(), o.positions)


@pytest.mark.parametrize(("dtype", "bits"), [(torch.float32, 24), (torch.float16, 11), (torch.bfloat16, 8)])
def test_random_is_splitmix(dtype, bits):
    o = observation(dead=3, gaps=5, layer=2, seed=7, dtype=dtype)
    full, coarse = keys.random(o), keys.random(o, draw="keys")
    for b, head, j in [(0, 0, 23), (1, 1, 23), (0, 1, 15), (1, 0, 9)]:
        x = splitmix(7)
        for part in (2, head, int(o.positions[b, head, j])):
            x = splitmix((x + part) % 2**64)
        assert float(full[b, head, j]) == (x >> 40) / 2**24
        assert float(coarse[b, head, j]) == (x >> (64 - bits)) / 2**bits


def test_random_depends_on_seed_layer_head_and_position_only():
    o = observation(dead=4, gaps=6, seed=1)
    scores = keys.random(o)
    assert torch.equal(scores, keys.random(other_rubbish(o)))
    second_row = replace(o, positions=o.positions[1:, :, 5:], keys=o.keys[1:, :, 5:])
    assert torch.equal(keys.random(second_row), scores[1:, :, 5:])
    same = o.positions[0, 0, -1] == o.positions[1, 0, -1]
    assert same
    assert scores[0, 0, -1] == scores[1, 0, -1]  # an equal position in another row: an equal draw
    assert scores[0, 0, -1] != scores[0, 1, -1]
    assert not torch.equal(scores, keys.random(replace(o, layer=1)))
    assert not torch.equal(scores, keys.random(replace(o, seed=2)))
