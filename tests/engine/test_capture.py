"""Captured steps against plain ones: equal tokens, kept sets and bytes, whatever ends, fails or is evicted meanwhile.

On a GPU the steps are CUDA graphs; on the CPU the same steps run as they stand, on the same fixed cache.
"""

import pytest
import torch
from kernels_run import DEVICE
from kvrepro_kernels.column_mass import column_mass_reference
from kvrepro_kernels.prefill_attention import Prefilled, prefill_attention_reference
from kvrepro_kernels.ragged_storage import ragged_decode_reference
from tiny import architecture, prompts

from kvrepro.engine import decode
from kvrepro.engine import generate as engine
from kvrepro.engine.allocate import by_kernels
from kvrepro.engine.catalogue import CATALOGUE
from kvrepro.engine.condition import Condition, DecodeCap, PerStep, Prefill, SharedCap
from kvrepro.engine.policy import Policy

NEW = 18  # evictions after 8 and 16 tokens, and a step that sees what is left
SHARED = [
    Condition("lru", 16, SharedCap(8), 0.1, 0.1),
    Condition("lru", 40, SharedCap(8), reading="as_described"),
    Condition("h2o_simple", 24, SharedCap(8), 0.1, 0.1),
    Condition("ada_kv_faithful", 24, SharedCap(8), 0.1, 0.1),
    Condition("quest_faithful", 16, SharedCap(8), 0.1, 0.1, reading="as_described"),
    Condition("random_sample", 24, SharedCap(5)),
    Condition("h2o_faithful", 70, SharedCap(8), 0.1, 0.1, reading="as_described"),
]
OTHERS = [
    Condition(),
    Condition("streaming_llm", 12, Prefill()),
    Condition("streaming_llm", 24, DecodeCap(4)),
    Condition("streaming_llm", 16, PerStep()),
    Condition("k_norm", 20, DecodeCap(8)),
    Condition("h2o", 24, DecodeCap(8)),
    Condition("k_norm", 90, DecodeCap(8)),
    Condition("k_norm", 40, DecodeCap(8)),
]
WINDOWS = [
    Condition("snapkv", 24, DecodeCap(8), switches=(("window", 8),)),
    Condition("ada_kv", 0.5, DecodeCap(4), switches=(("window", 8),)),
]


def steps(kind: str, conditions, texts, captured: bool, monkeypatch, stop_ids=(), **given):
    """Generations with plain prefills, the decode steps captured or not."""
    monkeypatch.setattr("kvrepro_kernels.prefill_attention", plain)
    monkeypatch.setattr("kvrepro_kernels.column_mass", plain_mass)
    if DEVICE == "cpu":  # interpreted kernels take minutes
        monkeypatch.setattr("kvrepro_kernels.ragged_decode", slow_ragged_decode)
        monkeypatch.setattr("kvrepro.engine.allocate.by_kernels", lambda use: by_kernels(False))
    monkeypatch.setattr(decode, "can_capture", lambda call, rows: captured and call.captures)
    settings = {"max_new_tokens": NEW, "stop_ids": stop_ids, "kept_sets": True} | given
    return engine.generate(architecture(kind, 16).to(DEVICE), texts, conditions, backend="triton", **settings)


def slow_ragged_decode(query, keys, values, offsets, tail_keys, tail_values, tail, used, scale, emit):
    tail_room = tail
    tail = tail if used is None else int(used)
    done = ragged_decode_reference(query, keys, values, offsets, tail_keys, tail_values, tail, scale, emit)
    for name, (flat, dense) in done.attention.items():
        done.attention[name] = flat, torch.nn.functional.pad(dense, (0, tail_room - tail))
    return done


def plain(query, key, value, scale):
    """The computation of the kernels of a prompt in plain PyTorch."""
    return Prefilled(*prefill_attention_reference(query, key, value, scale), "plain")


def plain_mass(query, key, log_sums, scale, starts, spans):
    starts = torch.zeros(len(key), dtype=torch.long, device=key.device) if starts is None else starts
    return column_mass_reference(query, key, log_sums, scale, starts[:, None].expand(-1, key.shape[1]), spans)


def same(ours, theirs):
    for row in zip(ours, theirs, strict=True):
        for pair in zip(*row, strict=True):
            x, y = ((a.tokens, a.kept_positions_hash, a.evicted, a.policy_calls, a.kept) for a in pair)
            assert x == y


@pytest.mark.parametrize(
    "conditions",
    [SHARED, OTHERS, pytest.param(WINDOWS, marks=pytest.mark.slow)],
    ids=["one set for all layers", "each layer's own", "windows"],
)
def test_captured_steps_are_the_plain_ones(conditions, monkeypatch):
    given = "qwen2", conditions, prompts(70, 45)
    plain = steps(*given, False, monkeypatch)
    same(steps(*given, True, monkeypatch), plain)
    tokens = [t for row in plain for answer in row for t in answer.tokens]
    stops = {max(set(tokens), key=tokens.count), tokens[7], tokens[-4]}  # rows end at different steps
    ended = steps(*given, False, monkeypatch, stop_ids=stops)
    assert len({len(answer.tokens) for row in ended for answer in row}) > 2
    same(steps(*given, True, monkeypatch, stop_ids=stops), ended)
    unequal = {"max_new_tokens": [NEW, 6]}
    same(steps(*given, True, monkeypatch, **unequal), steps(*given, False, monkeypatch, **unequal))


@pytest.mark.parametrize(("kind", "lengths"), [("gemma3", (70, 45)), ("mistral", (20, 38))])
def test_layers_that_slide_answer_as_plain_pytorch_does(kind, lengths, monkeypatch):
    texts = prompts(*lengths)  # of windows of 32: some are full, others fill up on the way
    conditions = [*OTHERS[:3], SHARED[0]]
    model, settings = architecture(kind, 16).to(DEVICE), {"max_new_tokens": NEW, "kept_sets": True}
    plain = engine.generate(model, texts, conditions, stop_ids=(), **settings)
    stops = {plain[0][0].tokens[7], plain[1][2].tokens[12]}
    ended = engine.generate(model, texts, conditions, stop_ids=stops, **settings)
    same(steps(kind, conditions, texts, True, monkeypatch), plain)
    same(steps(kind, conditions, texts, True, monkeypatch, stop_ids=stops), ended)


def test_a_policy_that_fails_later_costs_its_rows_alone(monkeypatch):
    calls = []

    def falters(o):
        calls.append(0)
        if len(calls) > 6:  # three layers, two evictions
            raise ZeroDivisionError("third eviction")
        return o.positions.float()

    monkeypatch.setitem(CATALOGUE, "falters", Policy("Falters", "tests", falters))
    conditions = [Condition("falters", 24, DecodeCap(4)), *OTHERS[:5]]
    plain = steps("qwen2", OTHERS[:5], prompts(70), False, monkeypatch)
    [answers] = steps("qwen2", conditions, prompts(70), True, monkeypatch, errors="return")
    assert isinstance(answers[0], ZeroDivisionError)
    same([answers[1:]], plain)
