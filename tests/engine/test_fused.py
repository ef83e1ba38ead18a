"""Norms and rotations by kernels: only where the numbers are the same, and only inside the block."""

import pytest
import torch
from families import build
from kernels_run import DEVICE
from kvrepro_kernels import rms_norm, rotary

from kvrepro.engine.backend import in_few_launches

BOTH = {"rms_norm": rms_norm, "rotary": rotary}
FAMILIES = [
    ("Llama", {*BOTH}, {}),
    ("Qwen2", {*BOTH}, {}),
    ("Qwen3", {*BOTH}, {}),
    ("Phi-3", {"rms_norm"}, {"partial_rotary_factor": 0.5}),  # rotates half of a row
    ("Gemma 3, text", {"rotary"}, {}),  # its norms add one to the weight
    ("OLMo 2", set(), {}),  # its norms round after the weight, its rotation casts
    ("Cohere", set(), {}),  # layer norms, and rotates neighbouring elements
]


@pytest.mark.parametrize(("family", "wanted", "more"), FAMILIES)
def test_a_model_computes_the_same_numbers(family, wanted, more, monkeypatch):
    model, launched = build(family, **more).to(DEVICE), set()
    for name, kernel in BOTH.items():
        monkeypatch.setattr(f"kvrepro_kernels.{name}", lambda *a, n=name, k=kernel: launched.add(n) or k(*a))
    ids = torch.arange(1, 13, device=DEVICE).view(2, 6)
    with torch.inference_mode():
        plain = model(ids).logits
        with in_few_launches(model):
            logits = model(ids).logits
    assert launched == wanted
    torch.testing.assert_close(logits, plain, rtol=1e-4, atol=1e-5)
    assert torch.equal(model(ids).logits, plain)
    assert not any("forward" in vars(part) for part in model.modules())


def test_weights_of_another_precision_and_norms_that_somebody_changed_stay_as_they_are():
    model = build("Llama").half()
    wide, changed = model.model.layers[0].input_layernorm, model.model.norm
    wide.weight.data = wide.weight.data.float()
    changed.forward = patched = lambda x: x + 1
    x = torch.linspace(-1, 2, 256).half()[None]
    with torch.inference_mode():
        plain = wide(x)
        with in_few_launches(model):
            assert torch.equal(wide(x), plain)
            assert torch.equal(changed(x), x + 1)
    assert changed.forward is patched
