"""DuoAttention's counts, and layers left whole."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from observations import observation

from kvrepro.engine.score import learned
from kvrepro.engine.score.learned import sampled
from kvrepro.errors import InputError


@pytest.mark.parametrize(("layer", "expected"), [(0, "all"), (1, "all"), (2, "budget")])
def test_whole_layers_keep_every_token(layer, expected):
    o = observation(dead=6, gaps=3, layer=layer, seed=2)
    counts = learned.whole(torch.zeros(2, 2, 24), o.alive, torch.tensor([5, 7]), o, dense_layers=2)
    assert counts.tolist() == (o.alive.sum(-1).tolist() if expected == "all" else [[5, 5], [7, 7]])
    assert learned.whole(torch.zeros(2, 2, 24), o.alive, torch.tensor([5, 7]), o).tolist() == [[5, 5], [7, 7]]


LAYERS = [observation(seed=layer) for layer in range(3)]


@pytest.fixture(scope="module")
def gate_file(tmp_path_factory):
    file = tmp_path_factory.mktemp("gates") / "gates.json"
    sample = sampled([o.output for o in LAYERS]).tolist()
    file.write_text(json.dumps({"gates": [[0.9, 0.1], [0.4, 0.4], [0.0, 1.3]], "sample": sample}))
    return str(file)


ORDER = [(2, 0), (0, 1), (1, 0), (1, 1), (0, 0), (2, 1)]  # streaming first to last, equal gates in their order


def layers_of(tokens, sinks, recent, rows=1):
    """Three layers of two heads whose newest tokens score best, and their protected ends."""
    at = torch.arange(tokens)
    protected = ((at < sinks) | (at >= tokens - recent)).expand(rows, 2, -1)
    return [at.float().expand(rows, 2, -1)] * 3, [protected] * 3


@given(tokens=st.integers(6, 60), sinks=st.integers(0, 3), recent=st.integers(0, 3), data=st.data())
@settings(max_examples=60, deadline=None)
def test_duo_streams_the_lowest_gates_and_meets_the_budget(gate_file, tokens, sinks, recent, data):
    budget = data.draw(st.integers(max(1, sinks + recent), tokens))
    scores, protected = layers_of(tokens, sinks, recent)
    same, counts = learned.duo_attention(scores, protected, torch.tensor([budget]), gate_file, observations=LAYERS)
    assert same is scores
    held = [int(counts[layer][0, head]) for layer, head in ORDER]
    assert sum(held) == 6 * budget
    assert held == sorted(held)
    between = [h for h in held if sinks + recent < h < tokens]
    assert len(between) <= 1
    assert min(held) >= sinks + recent


def test_duo_by_heads_keeps_more_than_its_budget(gate_file):
    """kvpress: x = 0.4 of six heads is 2.4, so two stream, and the realised ratio is x' (1 - 5 / 20)."""
    scores, protected = layers_of(20, 2, 3)
    _, counts = learned.duo_attention(scores, protected, torch.tensor([12]), gate_file, "heads", LAYERS)
    held = [int(counts[layer][0, head]) for layer, head in ORDER]
    assert held == [5, 5, 20, 20, 20, 20]
    assert 1 - sum(held) / 120 == pytest.approx(2 / 6 * (1 - 5 / 20))


def test_duo_refuses(gate_file):
    scores, protected = layers_of(20, 4, 4)
    learned.duo_attention(scores, protected, torch.tensor([9]), gate_file, observations=LAYERS)
    with pytest.raises(InputError, match="budget 36 < 48 protected tokens of 6 heads together"):
        learned.duo_attention(scores, protected, torch.tensor([6]), gate_file, observations=LAYERS)
    with pytest.raises(InputError, match=r"gates.json was not made from this model"):
        learned.duo_attention(scores, protected, torch.tensor([9]), gate_file, observations=LAYERS[::-1])
