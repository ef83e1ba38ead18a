"""`SharedCap` against an independent slow harness, Hugging Face, itself, and positions by hand."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from families import build, hugging_face
from slow_shared import run as slow_run
from tiny import architecture
from tiny import model as tiny_model
from tiny import prompts as tiny_prompts

from kvrepro.engine.catalogue import SHARED as POLICIES
from kvrepro.engine.condition import Condition, DecodeCap, SharedCap
from kvrepro.engine.evict import EvictionJob, Prompts, evict_shared, generator
from kvrepro.engine.facts import ModelFacts
from kvrepro.engine.generate import generate
from kvrepro.engine.shared import PromptSignals, Signals
from kvrepro.errors import InputError


def capped(policy: str, budget: int = 32, interval: int = 8, **settings) -> Condition:
    return Condition(policy, budget, SharedCap(interval), **settings)


EVERY = [
    capped(policy, prefix=guarded, suffix=guarded, reading=reading)
    for policy, guarded, reading in product(POLICIES, (0.0, 0.1), ("as_run", "as_described"))
]
AT_ONCE_BY_MEANS = (("per_head_first_reduction", 0), ("head_map", "group_mean"))
MORE = [
    capped("lru", prefix=0.2),
    capped("lru", prefix=0.2, reading="as_described"),
    capped("lru", suffix=0.2),
    capped("h2o_simple", 40, 5, prefix=0.1, suffix=0.1),
    capped("snapkv_simple", prefix=0.1, suffix=0.2, static_suffix=True, reading="as_described"),
    capped("ada_kv_faithful", prefix=0.1, suffix=0.2, static_suffix=True),
    capped("quest_faithful", prefix=0.1, suffix=0.2, static_suffix=True, switches=(("trim_guard", "same"),)),
    capped("ada_kv_faithful", prefix=0.1, suffix=0.1, switches=(("per_head_first_reduction", 0),)),
    capped("quest_faithful", switches=AT_ONCE_BY_MEANS),
    capped("h2o_simple", 75, prefix=0.1, suffix=0.1),  # longer than one prompt: eviction starts while decoding
    capped("ada_kv_faithful", 75, prefix=0.1, suffix=0.1),
    capped("lru", 200),  # never evicts
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
    for prompt, row in zip(prompts, answer(model, prompts, conditions, max_new_tokens=new, stop_ids=()), strict=True):
        plain, _ = hugging_face(model, prompt, new)
        assert [generation.tokens for generation in row] == [plain] * len(conditions)
        assert not any(generation.evicted for generation in row)


def test_a_batch_gives_what_its_rows_give_alone(answers):
    model, prompts, conditions = small_model(), tiny_prompts(*LENGTHS), ALL[::3]
    small = answer(model, prompts, conditions, batch_rows=7)
    for i, prompt in enumerate(prompts):
        for j in range(i, len(conditions), 2):
            [[alone]] = answer(model, [prompt], [conditions[j]], batch_rows=1)
            without_costs = dict.fromkeys(("prefill_seconds", "decode_seconds", "bytes_held"), 0)
            for other in (answers[i][3 * j], small[i][j]):
                assert replace(alone, **without_costs) == replace(other, **without_costs)


def test_seventeen_policy_calls_per_128_tokens_and_none_for_a_short_per_head_answer_as_run():
    model, prompts = tiny_model(), tiny_prompts(70)
    for_all_heads, per_head = capped("lru"), capped("ada_kv_faithful")
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
    with pytest.raises(InputError, match="layers have {1, 2} KV heads: one set of tokens for all needs equally many"):
        answer(model, [prompt], [Condition("lru", 20, SharedCap())])
    [[cut]] = answer(model, [prompt], [Condition("k_norm", 20, DecodeCap())])
    assert len(cut.tokens) == NEW


# ---- the tokens that stay, position by position, in both readings


def after_prompt(c: Condition, n: int, room: int = 0) -> tuple[EvictionJob, Signals]:
    """One row of n prompt tokens without attention in the prompt; space for `room` more."""
    policy = POLICIES[c.policy]
    parameters = policy.reading(c.reading, c.switches)
    prompts = Prompts(torch.arange(n)[None], [{}])
    job = EvictionJob([c], policy, parameters, [c.budget], prompts, [generator(parameters, range(n))])
    seen, none = PromptSignals([job.reduction]), torch.zeros(1, 1, 1, n)  # [batch, kv_heads, group, tokens]
    seen.layers = [{"max": none, "sum": none, "last": none, "group": none[:, :, 0]}]
    return job, seen.signals(job.reduction, prompts.positions, n + room, False)


def kept(c: Condition, n: int) -> list[int]:
    left = evict_shared(*after_prompt(c, n), 0)
    stays = left.held[0].any(0).nonzero()[:, 0].tolist()
    assert left.evicted.tolist() == [n - len(stays)]
    return stays


def ranges(text: str) -> list[int]:
    """`"8-9, 77-99"` as positions."""
    spans = [part.split("-") for part in text.split(", ")]
    return [i for span in spans for i in range(int(span[0]), int(span[-1]) + 1)]


AS_RUN_LRU = [
    (1919, 128, "9, 89-99, 884-999", "0-11, 91-99, 905-999, 1907-1918"),
    (1919, 256, "8-9, 77-99, 769-999", "0-24, 82-99, 812-999, 1894-1918"),
    (1919, 512, "6-9, 54-99, 538-999", "0-50, 63-99, 627-999, 1868-1918"),
    (8056, 1024, "8-9, 74-99, 733-999, 7327-8055", "0-101, 740-999, 7394-8055"),
    (32717, 4096, "7-9, 64-99, 632-999, 6311-9999", "0-408, 702-999, 7020-9999, 32308-32716"),
    (65406, 4096, "7-9, 66-99, 652-999, 6518-9999, 65177-65405", "0-408, 702-999, 7020-9999, 64997-65405"),
]


@pytest.mark.parametrize(("n", "budget", "unprotected", "protected"), AS_RUN_LRU)
def test_as_run_lru_keeps_the_band_of_large_decimal_strings(n, budget, unprotected, protected):
    assert kept(capped("lru", budget), n) == ranges(unprotected)
    assert kept(capped("lru", budget, prefix=0.1, suffix=0.1), n) == ranges(protected)


def test_guardrail_deletes_streaming_llms_protected_prefix_as_run_only():
    c = capped("slw", 256, prefix=0.1, suffix=0.1)
    assert kept(c, 1919) == ranges("772-1002, 1894-1918")
    honoured = replace(c, switches=(("guardrail", "honours"),))
    assert set(kept(honoured, 1919)) >= set(ranges("0-24, 1894-1918"))


def test_guarded_sink_and_window_is_rigid_as_described_where_lru_keeps_what_is_attended():
    """Paper, section 6: under guards the rule still discards the middle, which LRU can retain. A token in the middle
    gets all attention for seven steps; at the first reduction both policies keep the newest."""
    left = {}
    for name in ("slw", "lru"):
        c = capped(name, 32, prefix=0.1, suffix=0.1, reading="as_described")
        job, signals = after_prompt(c, 40, room=8)
        signals = evict_shared(job, signals, 0)
        assert signals.held[0, 0].nonzero()[:, 0].tolist() == ranges("0-3, 12-39")
        on_the_middle = torch.nn.functional.one_hot(torch.tensor([12]), 48).float()
        for step in range(1, 8):
            signals = signals.enter(step).attended(step, on_the_middle, None)
        left[name] = evict_shared(job, signals.enter(8), 8).held[0, 0].nonzero()[:, 0].tolist()
    assert left == {"slw": ranges("0-3, 20-47"), "lru": ranges("0-3, 12, 21-47")}
