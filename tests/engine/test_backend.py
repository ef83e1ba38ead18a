"""Kernels in every regime against plain PyTorch, and the choice of "auto"."""

import itertools
import os
from dataclasses import replace

import pytest
import torch
from tiny import architecture
from tiny import prompts as tiny_prompts

pytest.importorskip("triton", reason="triton is packaged for Linux only")

import kvrepro_kernels

from kvrepro.engine import backend
from kvrepro.engine import generate as engine
from kvrepro.engine.catalogue import CATALOGUE
from kvrepro.engine.condition import Chunked, Condition, DecodeCap, PerStep, Prefill, Prompt, SharedCap
from kvrepro.errors import InputError

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
WINDOWS = [name for name, policy in CATALOGUE.items() if policy.parameters.get("window") and not policy.shared]
PLAIN = ["h2o", "h2o_online", "key_diff", "streaming_llm", "k_norm"]
READINGS = [(name, reading) for name in (*WINDOWS, *PLAIN) for reading in CATALOGUE[name].readings]
SMALL = (("window", 6),)


def model(kind="llama"):
    """On a GPU a kernel's product needs 16 dimensions; a layer that slides stands between others."""
    return architecture(kind, 16, 3 if kind == "gemma3" else 2).to(DEVICE)


def condition(name, regime, reading="as_described", budget=24):
    windows = "window" in CATALOGUE[name].parameters and name != "tova"
    return Condition(name, budget, regime, reading=reading, switches=SMALL if windows else ())


def both(conditions, *lengths, new=1, kind="llama", spans=None):
    settings, network = dict(max_new_tokens=new, stop_ids=(), kept_sets=True, repeat=(7, 3, 9)), model(kind)
    texts = [Prompt(ids, spans or {}) for ids in tiny_prompts(*lengths or (61,))]
    together = {"triton": len(texts), "torch": 1}
    answers_by_backend = [engine.generate(network, texts, conditions, backend=name, prompt_rows=rows, **settings)
             for name, rows in together.items()]  # fmt: skip
    return [list(itertools.chain.from_iterable(answers)) for answers in answers_by_backend]


def agree(conditions, *lengths, **given):
    """The same tokens stay, except for a few that rounding may swap, and the same tokens are generated."""
    by_backend = both(conditions, *lengths, **given)
    for c, kernels, plain in zip(conditions * max(1, len(lengths)), *by_backend, strict=True):
        assert (kernels.backend, plain.backend) == ("triton", "torch")
        same = [(a & b).sum() / b.sum() for a, b in zip(kernels.kept_sets, plain.kept_sets, strict=True)]
        assert min(same) > (0.9 if c.policy == "dropkv" and c.reading == "as_run" else 0.97), (c.label, same)
        assert kernels.kept == plain.kept, c.label
        assert kernels.policy_calls == plain.policy_calls
        assert kernels.tokens == plain.tokens


@pytest.mark.slow  # scores are compared in score/test_window_kernels.py
def test_every_reading_keeps_what_plain_pytorch_keeps():
    agree([condition(name, Prefill(), reading) for name, reading in READINGS])


@pytest.mark.parametrize("when", [pytest.param("every_chunk", marks=pytest.mark.slow), "last_chunk"])
def test_chunks(when):
    names = ["defensive_kv", "h2o"] if when == "every_chunk" else ["andpro"]
    agree([condition(name, Chunked(chunk=20, when=when)) for name in names], 41)


@pytest.mark.parametrize("regime", [DecodeCap(interval=2), PerStep()])
def test_evictions_while_tokens_are_generated(regime):
    names = ["defensive_kv", "cake"] if isinstance(regime, DecodeCap) else ["tova", "h2o_online"]
    agree([condition(name, regime) for name in names], 40, new=3)


def test_layers_that_slide_beside_layers_that_evict():
    regimes = Prefill(), Chunked(chunk=16, when="last_chunk"), DecodeCap(interval=2)
    agree([Condition(), *(condition("snapkv", r, budget=12) for r in regimes)], 45, new=3, kind="gemma3")


def test_a_prompt_shorter_than_the_window():
    agree([condition("cake", DecodeCap(interval=3), budget=8)], 5, new=7)


PARTS = "kvrepro/chapters/synthesis/policies.py"  # not from the catalogue, like a reader's own


@pytest.mark.parametrize(
    ("policy", "regime"), [("ATTENTION_X_VALUE_JOINT", Prefill()), ("ATTENTION_OF_ALL_ONE_SET", DecodeCap(interval=2))]
)
def test_scorers_without_a_kernel_score_beside_kernels(policy, regime):
    switches = (("window", 6), *((("aggregate", "max"), ("pool", "max")) if "OF_ALL" not in policy else ()))
    without_kernel = Condition(f"{PARTS}:{policy}", 24, regime, reading="as_described", switches=switches)
    agree([without_kernel, condition("r_kv", regime)], 40, new=3 if isinstance(regime, DecodeCap) else 2)


def test_prompts_of_several_lengths_in_one_pass():
    agree([Condition(), *(condition(name, Prefill(), budget=12) for name in ("cake", "dropkv", "h2o"))], 33, 20)


def test_quotas_are_scored_by_plain_pytorch_beside_kernels():
    spans = {"a": list(range(3, 10)), "b": list(range(10, 18))}
    fairly = Prefill(fair=1.0, spans=("a", "b"))
    conditions = [condition(name, regime, budget=12) for name in ("snapkv", "h2o") for regime in (fairly, Prefill())]
    agree([*conditions, condition("h2o", fairly, "as_run", budget=12)], 33, 20, spans=spans)


# ---- what kernels refuse

REFUSED = {
    "do not pack or page": replace(condition("snapkv", Prefill()), bits=4),
    "do not sum 'low', which scissorhands needs": condition("scissorhands", Prefill()),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_kernels_cannot_do_is_refused_and_by_auto_left_to_plain_pytorch(why, monkeypatch):
    c = REFUSED[why]
    assert why in backend.obstacle(model(), c)
    [ids] = tiny_prompts(40)
    text = Prompt(ids, {"a": [3, 4, 5]})
    with pytest.raises(InputError, match=f"backend triton: kernels .*{why}.*: use backend torch, or auto"):
        engine.generate(model(), [text], [c], max_new_tokens=1, stop_ids=(), backend="triton")


def test_layers_that_slide_are_taken_along_but_not_scored():
    mixed, slides = architecture("gemma3").to(DEVICE), architecture("mistral").to(DEVICE)
    snapkv, streaming, shared = condition("snapkv", Prefill()), condition("streaming_llm", Prefill()), SharedCap()
    for c in (Condition(), streaming, Condition("h2o_simple", 16, shared)):
        assert backend.obstacle(mixed, c) is None
        assert backend.obstacle(slides, c) is None
    assert backend.obstacle(mixed, snapkv) is None
    for c in (snapkv, condition("h2o", Prefill())):
        assert backend.obstacle(slides, c) == "kernels score no layer that slides"


# ---- auto


def test_a_context_that_is_repeated():
    agree([condition(name, Prefill()) for name in ("kv_zip", "kv_zip_plus", "snapkv")], 41, 50, new=3)


@pytest.mark.parametrize("broken", ["", "rms_norm"])
def test_a_kernel_that_does_not_run_leaves_every_condition_to_plain_pytorch(broken, monkeypatch):
    def fails(*_, **__):
        raise RuntimeError("out of registers\nat line 3")

    class OnGpu:
        device, dtype = torch.device("cuda"), torch.float32

    facts = backend.ModelFacts.of(model())
    monkeypatch.setattr(backend.ModelFacts, "of", lambda model: facts)
    launched = backend.ready.__wrapped__  # what is found is remembered
    monkeypatch.setattr(backend, "ready", lambda _: launched(torch.device(DEVICE)))
    if broken:
        monkeypatch.setattr(kvrepro_kernels, broken, fails)
    conditions = [Condition(), condition("snapkv", Prefill()), replace(condition("snapkv", Prefill()), bits=4)]
    reasons = backend.obstacles(OnGpu(), conditions)
    packed = "kernels do not pack or page tokens"
    assert reasons == (["RuntimeError: out of registers"] * 3 if broken else [None, None, packed])
