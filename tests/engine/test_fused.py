"""Norms and rotations by kernels: only where the numbers are the same, and only inside the block."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

pytest.importorskip("triton", reason="triton is packaged for Linux only")

import kvrepro_kernels

from kvrepro.engine.backend import in_few_launches

SIZES = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=90,
    head_dim=8,
)
BOTH = {"rms_norm", "rotary"}


@pytest.mark.parametrize(
    ("family", "wanted", "more"),
    [
        ("llama", BOTH, {}),
        ("qwen2", BOTH, {}),
        ("qwen3", BOTH, {}),
        ("phi3", {"rms_norm"}, {"partial_rotary_factor": 0.5, "pad_token_id": 0}),  # rotates half of a row
        ("gemma3_text", {"rotary"}, {}),  # its norms add one to the weight
        ("olmo2", set(), {}),  # its norms round after the weight, its rotation casts
        ("cohere", set(), {}),  # layer norms, and rotates neighbouring elements
    ],
)
def test_a_model_computes_the_same_numbers(family, wanted, more, monkeypatch):
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES | more)).eval().to(device)
    launched = set()
    for name in BOTH:
        kernel = getattr(kvrepro_kernels, name)
        monkeypatch.setattr(kvrepro_kernels, name, lambda *a, n=name, k=kernel: launched.add(n) or k(*a))
    ids = torch.arange(1, 13, device=device).view(2, 6)
    with torch.inference_mode():
        plain = model(ids).logits
        with in_few_launches(model):
            logits = model(ids).logits
    assert launched == wanted
    torch.testing.assert_close(logits, plain, rtol=1e-4, atol=1e-5)
    assert torch.equal(model(ids).logits, plain)
    assert not any("forward" in vars(part) for part in model.modules())


def test_weights_of_another_precision_and_norms_that_somebody_changed_stay_as_they_are():
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES)).eval().half()
    wide, changed = model.model.layers[0].input_layernorm, model.model.norm
    wide.weight.data = wide.weight.data.float()
    changed.forward = patched = lambda x: x + 1
    x = torch.linspace(-1, 2, 32).half()[None]
    with torch.inference_mode():
        plain = wide(x)
        with in_few_launches(model):
            assert torch.equal(wide(x), plain)
            assert torch.equal(changed(x), x + 1)
    assert changed.forward is patched
