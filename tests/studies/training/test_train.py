"""The parts of the training run that a CPU can take: schedule, model, optimizers, loss, rows."""

import random

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from kvrepro.experiment.models import EMBEDDED
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


def test_the_shipped_weights_have_this_architecture(model):
    weights, parameters = load_file(EMBEDDED / "model.safetensors"), dict(model.named_parameters())
    assert {name: w.shape for name, w in weights.items()} == {name: p.shape for name, p in parameters.items()}
    assert all(not w.any() for name, w in weights.items() if name.endswith("o_proj.bias"))


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
