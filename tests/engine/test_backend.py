"""Kernels in every regime against plain PyTorch, and the choice of "auto"."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from families import build
from kernels_run import DEVICE
from kvrepro_kernels import rms_norm, rotary
from tiny import architecture
from tiny import prompts as tiny_prompts

from kvrepro.engine import backend
from kvrepro.engine import generate as engine
from kvrepro.engine.catalogue import CATALOGUE
from kvrepro.engine.condition import Chunked, Condition, DecodeCap, PerStep, Prefill, Prompt, SharedCap
from kvrepro.errors import InputError

SMALL = (("window", 6),)


def model(kind="llama"):
    """On a GPU a kernel's product needs 16 dimensions; a layer that slides stands between others."""
    return architecture(kind, 16, 3 if kind == "gemma3" else 2).to(DEVICE)


def condition(name, regime, reading="as_described", budget=24):
    windows = "window" in CATALOGUE[name].parameters and name != "tova"
    return Condition(name, budget, regime, reading=reading, switches=SMALL if windows else ())


def agree(conditions, *lengths, new=1, kind="llama", spans=None):
    """The same tokens stay, except for a few that rounding may swap, and the same tokens are generated."""
    settings, network = dict(max_new_tokens=new, stop_ids=(), kept_sets=True, repeat=(7, 3, 9)), model(kind)
    texts = [Prompt(ids, spans or {}) for ids in tiny_prompts(*lengths)]
    together = {"triton": len(texts), "torch": 1}
    by_backend = [
        sum(engine.generate(network, texts, conditions, backend=name, prompt_rows=rows, **settings), [])
        for name, rows in together.items()
    ]
    for c, kernels, plain in zip(conditions * len(texts), *by_backend, strict=True):
        assert (kernels.backend, plain.backend) == ("triton", "torch")
        same = [(a & b).sum() / b.sum() for a, b in zip(kernels.kept_sets, plain.kept_sets, strict=True)]
        assert min(same) > (0.9 if c.policy == "dropkv" and c.reading == "as_run" else 0.97), (c.label, same)
        assert (kernels.kept, kernels.policy_calls, kernels.tokens) == (plain.kept, plain.policy_calls, plain.tokens)


SPANS = {"a": list(range(3, 10)), "b": list(range(10, 18))}
FAIRLY = Prefill(fair=1.0, spans=("a", "b"))


def without_kernel(policy, regime, *more):
    """Not from the catalogue, like a reader's own."""
    name = f"kvrepro/chapters/synthesis/policies.py:{policy}"
    return Condition(name, 24, regime, reading="as_described", switches=(*SMALL, *more))


def of(regime, *names, **given):
    return [condition(name, regime, **given) for name in names]


MAX = ("aggregate", "max"), ("pool", "max")
JOINT = without_kernel("ATTENTION_X_VALUE_JOINT", Prefill(), *MAX)
ONE_SET = without_kernel("ATTENTION_OF_ALL_ONE_SET", DecodeCap(2))
BESIDE = [condition("snapkv", regime, budget=12) for regime in (Prefill(), Chunked(16), DecodeCap(2))]
QUOTAS = of(FAIRLY, "snapkv", "h2o", budget=12) + of(Prefill(), "snapkv", "h2o", budget=12)
AGREE = {  # conditions; lengths of the prompts; more
    "chunks": (of(Chunked(chunk=20, when="every_chunk"), "andpro", "h2o"), (41,), {}),
    "a cap": (of(DecodeCap(interval=2), "defensive_kv", "cake"), (40,), {"new": 3}),
    "per step": (of(PerStep(), "tova", "h2o_online"), (40,), {"new": 3}),
    "layers that slide beside layers that evict": ([Condition(), *BESIDE], (45,), {"new": 3, "kind": "gemma3"}),
    "a prompt shorter than the window": (of(DecodeCap(interval=3), "cake", budget=8), (5,), {"new": 7}),
    "a scorer without a kernel": ([JOINT, *of(Prefill(), "r_kv")], (40,), {"new": 2}),
    "another while decoding": ([ONE_SET, *of(DecodeCap(2), "r_kv")], (40,), {"new": 3}),
    "prompts of several lengths": ([Condition(), *of(Prefill(), "cake", "dropkv", "h2o", budget=12)], (33, 20), {}),
    "quotas": ([*QUOTAS, condition("h2o", FAIRLY, "as_run", budget=12)], (33, 20), {"spans": SPANS}),
    "a context that is repeated": (of(Prefill(), "kv_zip", "kv_zip_plus", "snapkv"), (41, 50), {"new": 3}),
}


@pytest.mark.parametrize(("conditions", "lengths", "given"), AGREE.values(), ids=AGREE)
def test_kernels_keep_and_say_what_plain_pytorch_does(conditions, lengths, given):
    agree(conditions, *lengths, **given)


# ---- what kernels refuse

PACKED = "kernels do not pack or page tokens"
NO_LOW, NO_SLIDING = "kernels do not sum 'low', which scissorhands needs", "kernels score no layer that slides"
PLAINLY = (Condition(), condition("streaming_llm", Prefill()), Condition("h2o_simple", 16, SharedCap()))
OBSTACLES = [(kind, c, None) for kind in ("gemma3", "mistral") for c in PLAINLY] + [
    ("llama", replace(condition("snapkv", Prefill()), bits=4), PACKED),
    ("llama", condition("scissorhands", Prefill()), NO_LOW),
    ("gemma3", condition("snapkv", Prefill()), None),
    ("mistral", condition("snapkv", Prefill()), NO_SLIDING),
    ("mistral", condition("h2o", Prefill()), NO_SLIDING),
]


@pytest.mark.parametrize(("kind", "c", "why"), OBSTACLES)
def test_what_kernels_cannot_do_is_refused(kind, c, why):
    assert backend.obstacle(architecture(kind).to(DEVICE), c) == why
    if why in (PACKED, NO_LOW):
        with pytest.raises(InputError, match=f"backend triton: {why}.*: use backend torch, or auto"):
            engine.generate(model(), tiny_prompts(40), [c], max_new_tokens=1, stop_ids=(), backend="triton")


@pytest.mark.parametrize("broken", [False, True])
def test_a_kernel_that_does_not_run_leaves_every_condition_to_plain_pytorch(broken, monkeypatch):
    def fails(*_):
        raise RuntimeError("out of registers")

    if broken:
        monkeypatch.setattr("kvrepro_kernels.rms_norm", fails)
    found = backend.launch_error.__wrapped__(torch.device(DEVICE))  # without what is remembered
    assert found == ("RuntimeError: out of registers" if broken else None)
    monkeypatch.setattr(backend, "launch_error", lambda _: found)
    on_gpu, facts = SimpleNamespace(device=torch.device("cuda")), backend.ModelFacts.of(model())
    for c, why in (Condition(), None), (replace(condition("snapkv", Prefill()), bits=4), PACKED):
        assert backend.choose("auto", on_gpu, c, facts) == ("torch" if broken or why else "triton")


# ---- norms and rotations by kernels: only where the numbers are the same, and only inside the block

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
        with backend.in_few_launches(model):
            logits = model(ids).logits
    assert launched == wanted
    torch.testing.assert_close(logits, plain, rtol=1e-4, atol=1e-5)
    assert torch.equal(model(ids).logits, plain)
    assert not any("forward" in vars(part) for part in model.modules())


def test_weights_of_another_precision_and_norms_that_somebody_changed_stay_as_they_are():
    model, x = build("Llama").half(), torch.linspace(-1, 2, 256).half()[None]
    wide, changed = model.model.layers[0].input_layernorm.float(), model.model.norm
    changed.forward = lambda x: x + 1
    plain = wide(x)
    with torch.inference_mode(), backend.in_few_launches(model):
        assert torch.equal(wide(x), plain)
        assert torch.equal(changed(x), x + 1)
