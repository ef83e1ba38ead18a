"""Norms and rotations by kernels: only where the numbers are the same, and only inside the block."""

import sys
from threading import Event, Thread, current_thread

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

pytest.importorskip("triton", reason="triton is packaged for Linux only")

import kvrepro_kernels

from kvrepro.engine.fused import in_few_launches

SIZES = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             vocab_size=90, head_dim=8)  # fmt: skip
BOTH = {"rms_norm", "rotary"}


@pytest.mark.parametrize(
    ("family", "wanted", "more"),
    [
        ("llama", BOTH, {}),
        ("qwen2", BOTH, {}),
        ("qwen3", BOTH, {}),
        ("phi3", {"rms_norm"}, {"partial_rotary_factor": 0.5, "pad_token_id": 0}),  # rotates half of a row
        ("gemma3_text", {"rotary"}, {}),  # its norms add one to the weight
        ("olmo2", {"rotary"}, {}),  # its norms round after the weight
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
    module, ids = sys.modules[type(model).__module__], torch.arange(1, 13, device=device).view(2, 6)
    before = dict(vars(module))
    with torch.inference_mode():
        plain = model(ids).logits
        with in_few_launches(model):
            logits = model(ids).logits
    assert launched == wanted
    torch.testing.assert_close(logits, plain, rtol=1e-4, atol=1e-5)
    assert dict(vars(module)) == before
    assert not any("forward" in vars(part) for part in model.modules())


def test_threads_with_models_of_one_family_leave_nothing_behind(monkeypatch):
    """The second begins before the first has ended, and ends after it; a third asks for no kernels, and gets none."""
    models = [AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES)).eval() for _ in range(3)]
    family, launched, ids = sys.modules[type(models[0]).__module__], [], torch.arange(1, 7)[None]
    before = dict(vars(family))
    begun, left, alone, done = Event(), Event(), Event(), Event()

    def first() -> None:
        with in_few_launches(models[0]):
            begun.set()
            alone.wait(60)
        left.set()

    def second() -> None:
        begun.wait(60)
        with in_few_launches(models[1]):
            alone.set()
            left.wait(60)
            models[1](ids)
            done.wait(60)

    threads = [Thread(target=first), Thread(target=second)]
    rotary = kvrepro_kernels.rotary
    monkeypatch.setattr(kvrepro_kernels, "rotary", lambda *given: launched.append(current_thread()) or rotary(*given))
    for thread in threads:
        thread.start()
    left.wait(60)
    models[2](ids)
    done.set()
    for thread in threads:
        thread.join()
    assert set(launched) == {threads[1]}
    assert dict(vars(family)) == before


def test_a_model_on_several_devices_stays_as_it_is():
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES)).eval()
    model.hf_device_map = {"model.layers.0": 0, "model.layers.1": 1}
    with in_few_launches(model):
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
