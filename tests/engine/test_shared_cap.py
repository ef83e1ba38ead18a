"""The engine against an independent slow harness, against Hugging Face, and against itself."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from families import build
from slow_shared import run as slow_run
from tiny import architecture
from tiny import model as tiny_model
from tiny import prompts as tiny_prompts

from kvrepro.engine.catalogue import SHARED as POLICIES
from kvrepro.engine.condition import Condition, DecodeCap, SharedCap
from kvrepro.engine.facts import ModelFacts
from kvrepro.engine.generate import generate
from kvrepro.errors import InputError

EVERY = [
    Condition(policy, 32, SharedCap(), prefix=guarded, suffix=guarded, reading=reading)
    for policy, guarded, reading in product(POLICIES, (0.0, 0.1), ("as_run", "as_described"))
]
AT_ONCE_BY_MEANS = (("per_head_first_reduction", 0), ("head_map", "group_mean"))
MORE = [
    Condition("lru", 32, SharedCap(), prefix=0.2, suffix=0.0),
    Condition("lru", 32, SharedCap(), prefix=0.2, suffix=0.0, reading="as_described"),
    Condition("lru", 32, SharedCap(), prefix=0.0, suffix=0.2),
    Condition("h2o_simple", 40, SharedCap(interval=5), prefix=0.1, suffix=0.1),
    Condition("snapkv_simple", 32, SharedCap(), prefix=0.1, suffix=0.2, static_suffix=True, reading="as_described"),
    Condition("ada_kv_faithful", 32, SharedCap(), prefix=0.1, suffix=0.2, static_suffix=True),
    Condition("quest_faithful", 32, SharedCap(), 0.1, 0.2, True, switches=(("trim_guard", "same"),)),
    Condition("ada_kv_faithful", 32, SharedCap(), 0.1, 0.1, switches=(("per_head_first_reduction", 0),)),
    Condition("quest_faithful", 32, SharedCap(), switches=AT_ONCE_BY_MEANS),
    Condition("lru", 32, SharedCap(), 0.1, 0.1, switches=(("first_reduction", 8),)),
    Condition("h2o_simple", 32, SharedCap(interval=3), 0.1, 0.1, switches=(("first_reduction", 8),)),
    Condition("h2o_simple", 75, SharedCap(), 0.1, 0.1),  # longer than one prompt: eviction starts while decoding
    Condition("ada_kv_faithful", 75, SharedCap(), prefix=0.1, suffix=0.1),
    Condition("lru", 200, SharedCap()),  # never evicts
]
ALL = EVERY + MORE
LENGTHS = (61, 70)
NEW = 26  # three evictions after the prompt's


def answer(model, prompts, conditions, **changes):
    return generate(model, prompts, conditions, **{"max_new_tokens": NEW, "stop_ids": [2], **changes})


def small_model(kind="qwen2"):
    return tiny_model(kind, num_hidden_layers=2)


@pytest.fixture(scope="module")
def answers():
    """Both prompts under all conditions."""
    return answer(small_model(), tiny_prompts(*LENGTHS), ALL)


@pytest.mark.parametrize("length", [61, pytest.param(70, marks=pytest.mark.slow)])
@pytest.mark.parametrize("condition", ALL, ids=lambda c: f"{c.label} {c.reading} {c.switches}")
def test_the_engine_agrees_with_a_slow_harness_written_from_the_protocol(condition, length, answers):
    at = LENGTHS.index(length)
    prompt, ours = tiny_prompts(*LENGTHS)[at], answers[at][ALL.index(condition)]
    tokens, history, heads = slow_run(small_model(), prompt, condition, NEW, [2])
    assert ours.tokens == tokens
    assert ours.kept_positions == sorted(set().union(*history[0]))
    assert ours.kept == [round(sum(map(len, heads)) / 2)] * 2
    assert ours.evicted == len(prompt) + len(tokens) - (tokens[-1] == 2) - len(set().union(*heads))


@pytest.mark.parametrize("kind", ["llama", "phi3", "mistral", "gemma3"])
def test_without_eviction_the_tokens_are_those_of_hugging_face(kind):
    """In two of them layers slide over less than the prompt."""
    model, prompts, new = architecture(kind), tiny_prompts(70, 33), 12
    conditions = [Condition()] + [Condition(p, 70 + new, SharedCap(), prefix=0.1, suffix=0.1) for p in POLICIES]
    for prompt, row in zip(prompts, answer(model, prompts, conditions, max_new_tokens=new), strict=True):
        plain = model.generate(torch.tensor([prompt]), max_new_tokens=new, do_sample=False)[0, len(prompt) :].tolist()
        assert [generation.tokens for generation in row] == [plain] * len(conditions)
        assert not any(generation.evicted for generation in row)


def test_a_batch_gives_what_its_rows_give_alone(answers):
    model, prompts, conditions = small_model(), tiny_prompts(*LENGTHS), ALL[::3]
    small = answer(model, prompts, conditions, batch_rows=7)
    for i, prompt in enumerate(prompts):
        for j in range(i, len(conditions), 2):
            [[alone]] = answer(model, [prompt], [conditions[j]], batch_rows=1)
            without_costs = dict.fromkeys(("prefill_seconds", "decode_seconds", "bytes_held", "bytes_state"), 0)
            for other in (answers[i][3 * j], small[i][j]):
                assert replace(alone, **without_costs) == replace(other, **without_costs)


def test_seventeen_policy_calls_per_128_tokens_and_none_for_a_short_per_head_answer_as_run():
    model, prompts = tiny_model(), tiny_prompts(70)
    for_all_heads, per_head = Condition("lru", 32, SharedCap()), Condition("ada_kv_faithful", 32, SharedCap())
    [[lru, head]] = answer(model, prompts, [for_all_heads, per_head], max_new_tokens=128, stop_ids=[])
    assert (lru.policy_calls, head.policy_calls) == (17, 16)
    conditions = [per_head, replace(per_head, reading="as_described"), Condition()]
    [[short, described, full]] = answer(model, prompts, conditions, max_new_tokens=7)
    assert (short.policy_calls, short.evicted, short.tokens) == (0, 0, full.tokens)
    assert (described.policy_calls, described.evicted) == (1, 70 - 32)


def test_layers_with_unequal_kv_heads_are_refused_and_other_regimes_take_them():
    more = {"num_global_key_value_heads": 1, "attention_k_eq_v": True}
    model, [prompt] = build("Gemma 4, text", **more), tiny_prompts(60)
    assert set(ModelFacts.of(model).kv_heads.values()) == {1, 2}
    with pytest.raises(InputError, match="layers have 1 and 2 KV heads: one set of tokens for all needs equally many"):
        answer(model, [prompt], [Condition("lru", 20, SharedCap())])
    [[cut]] = answer(model, [prompt], [Condition("k_norm", 20, DecodeCap())])
    assert len(cut.tokens) == NEW
