"""The parts of the training run that a CPU can take: schedule, model, optimizers, loss, rows."""

import random

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from kvrepro.experiment.models import EMBEDDED, embedded
from kvrepro.world import rows
from studies.training import train


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(train.model_config(EMBEDDED.name), dtype=torch.float32)


def narrow(name=EMBEDDED.name):
    """A model of the family, the first two layers with fewer dimensions: on a CPU, Muon takes half a minute for a step
    of a whole one."""
    config = train.model_config(name)
    config.num_hidden_layers, config.hidden_size, config.intermediate_size = 2, 64, 96
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:2]
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


@pytest.mark.parametrize("progress", [0.0, 0.05, 0.1, 0.5, 0.99])
def test_half_of_the_steps_have_the_newest_length(progress):
    shares = train.length_shares(progress)
    assert sum(shares.values()) == pytest.approx(1)
    assert list(shares) == sorted(shares, key=lambda length: (length != max(shares), length))
    assert shares[max(shares)] == (0.5 if len(shares) > 1 else 1.0)


def test_the_shipped_weights_have_this_architecture(model):
    weights, parameters = load_file(EMBEDDED / "model.safetensors"), dict(model.named_parameters())
    assert {name: w.shape for name, w in weights.items()} == {name: p.shape for name, p in parameters.items()}
    assert all(not w.any() for name, w in weights.items() if name.endswith("o_proj.bias"))


def test_the_optimizers_hold_every_parameter_once_but_for_the_output_bias(model):
    held = [p for o in train.optimizers_of(model, lr=2e-3) for group in o.param_groups for p in group["params"]]
    named = {name: p for name, p in model.named_parameters() if not name.endswith("o_proj.bias")}
    assert len(held) == len(named)
    assert {id(p) for p in held} == {id(p) for p in named.values()}


def test_a_step_learns_and_leaves_the_output_bias_alone():
    model = narrow()
    optimizers = train.optimizers_of(model, lr=2e-3)
    shares = np.ones(len(rows.TASK_NAMES))
    ids, turn, _ = rows.batch(random.Random(0), shares, 128, 256)
    x, y = torch.from_numpy(ids).long(), torch.from_numpy(turn)[:, 1:]
    weight = torch.where(y > 0, 1.0, train.CONTEXT_WEIGHT) * (x[:, 1:] != rows.PAD)
    losses = []
    for _ in range(3):
        hidden = model.model(x, use_cache=False).last_hidden_state
        loss, correct, loss_of_token = train.token_losses(hidden, model.model.embed_tokens.weight, x, weight)
        assert correct.shape == loss_of_token.shape == y.shape
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert all(not layer.self_attn.o_proj.bias.any() for layer in model.model.layers)


def test_a_batch_marks_answers_and_pads_the_rest():
    rng, shares = random.Random(1), np.ones(len(rows.TASK_NAMES))
    ids, turn, task = rows.batch(rng, shares, 256, 256 * 40, warm=0.5)
    assert ids.shape == turn.shape == (40, 256)
    assert 5 < (task == -1).sum() < 35
    for row, turns, kind in zip(ids, turn, task, strict=True):
        assert (turns > 0).any()
        if kind == -1:
            assert (row[:128] == row[128:]).all()
            assert (turns == np.repeat([0, 1], 128)).all()
        else:
            assert not turns[row == rows.PAD].any()
            ends = [t for t in range(255) if turns[t] and turns[t + 1] != turns[t]]
            assert {rows.vocabulary()["<|end|>"]} == {int(row[t]) for t in ends}


@pytest.mark.parametrize("name", embedded())
def test_every_model_of_the_family_can_be_built_and_takes_a_step(name):
    config = train.model_config(name)
    whole = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    assert config.hidden_size // config.num_attention_heads == 64
    sliding = [n for n, kind in enumerate(getattr(config, "layer_types", None) or []) if kind == "sliding_attention"]
    assert sliding == ([0, 2, 4] if name == "small-sliding" else [])
    ids = torch.arange(40)[None] + 5
    assert whole(ids).logits.shape == (1, 40, config.vocab_size)
    model = narrow(name)
    before = model(ids).logits.detach()
    optimizers = train.optimizers_of(model, lr=2e-3)
    torch.nn.functional.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:]).backward()
    for optimizer in optimizers:
        optimizer.step()
    assert not torch.equal(model(ids).logits, before)


def test_the_family_ships_in_90_megabytes():
    with torch.device("meta"):
        models = [AutoModelForCausalLM.from_config(train.model_config(name)) for name in embedded()]
    assert sum(2 * p.numel() for model in models for p in model.parameters()) < 90e6
