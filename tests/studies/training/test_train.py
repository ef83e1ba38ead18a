"""The parts of the training run that a CPU can take: schedule, model, optimizers, loss, rows."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from kvrepro.experiment.models import EMBEDDED
from studies.training import train


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(train.model_config(EMBEDDED.name), dtype=torch.float32)


def test_the_shipped_weights_have_this_architecture(model):
    weights, parameters = load_file(EMBEDDED / "model.safetensors"), dict(model.named_parameters())
    assert {name: w.shape for name, w in weights.items()} == {name: p.shape for name, p in parameters.items()}
    assert all(not w.any() for name, w in weights.items() if name.endswith("o_proj.bias"))
