"""What heads keep, on closed forms, and against a plain softmax."""

import pytest
import torch

import kvrepro as kv
from kvrepro.chapters.synthesis import kept


def layer(keys: torch.Tensor, mask: list[bool], p: list[float]) -> dict[str, float]:
    """One head with values that are unit vectors, one per token."""
    tokens = len(mask)
    measures = kept._of_layer(
        keys[None], torch.eye(tokens)[None], torch.tensor(p)[None, None], torch.tensor(mask)[None]
    )
    return {name: float(value[0]) for name, value in measures.items()}


def test_distinct_mass_and_shift_on_closed_forms():
    """Attention (.5, .3, .2); without the last token its output moves from (.5, .3, .2) to (.625, .375, 0)."""
    same, apart = torch.ones(3, 4), torch.eye(3, 4)
    measures = layer(apart, [True, True, False], [0.5, 0.3, 0.2])
    assert measures["distinct"] == pytest.approx(1)
    assert measures["mass"] == pytest.approx(0.8)
    moved, whole = torch.tensor([0.125, 0.075, -0.2]), torch.tensor([0.5, 0.3, 0.2])
    assert measures["shift"] == pytest.approx(float(moved.norm() / whole.norm()))
    assert layer(same, [True, True, False], [0.5, 0.3, 0.2])["distinct"] == pytest.approx(0, abs=1e-6)
    assert layer(apart, [True, True, True], [0.5, 0.3, 0.2])["shift"] == pytest.approx(0, abs=1e-6)


def test_layers_hold_the_attention_of_the_models_own_last_query():
    loaded = kv.load()
    [item] = kv.load_items("tinyworld:needle", n_items=1, seed=0, tokens=300)
    ids = kv.build_prompt(item, loaded.tokenizer, 400).ids
    layers = kept._layers(loaded, ids)
    loaded.model.set_attn_implementation("eager")
    attentions = loaded.model(torch.tensor([ids]), output_attentions=True).attentions
    for number, (key, value, p) in layers.items():
        assert key.shape == value.shape == (2, len(ids), 64)
        torch.testing.assert_close(p.flatten(0, 1), attentions[number][0, :, -1], atol=1e-4, rtol=1e-3)
