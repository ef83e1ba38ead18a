"""The parts of the training run that a CPU can take."""

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from kvrepro.experiment.models import EMBEDDED
from studies.training import train


def test_what_is_trained_has_the_shipped_weights_and_its_output_biases_stay_zero():
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(EMBEDDED), dtype=torch.float32)
    train.optimizers_of(model)
    weights, parameters = load_file(EMBEDDED / "model.safetensors"), dict(model.named_parameters())
    assert {name: w.shape for name, w in weights.items()} == {name: p.shape for name, p in parameters.items()}
    biases = {name: w for name, w in weights.items() if name.endswith("o_proj.bias")}
    assert not any(w.any() or parameters[name].requires_grad for name, w in biases.items())
