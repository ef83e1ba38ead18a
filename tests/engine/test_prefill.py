"""The observations that policies get, against Hugging Face's own attention; guards, whitelists and reused prefixes."""

from dataclasses import replace

import pytest
import torch
from conditions import other
from slow_engine import Slow, newest
from slow_engine import run as slow_run
from tiny import ARCHITECTURES, architecture, evictable
from tiny import prompts as tiny_prompts

from kvrepro.engine import allocate, evict
from kvrepro.engine import generate as engine
from kvrepro.engine.cache import RaggedLayer
from kvrepro.engine.catalogue import CATALOGUE
from kvrepro.engine.condition import Chunked, Condition, DecodeCap, Offline, PerStep, Prefill, Prompt
from kvrepro.engine.facts import ModelFacts
from kvrepro.engine.observe import Observation
from kvrepro.engine.policy import Policy
from kvrepro.errors import InputError

NEW = 7
CLOSE = {"atol": 1e-5, "rtol": 1e-4}


@pytest.fixture
def shown(monkeypatch) -> list[Observation]:
    """Observations in the order in which a policy got them; it keeps the newest tokens."""
    observations: list[Observation] = []

    def watch(o: Observation):
        observations.append(o)
        return o.positions.float()

    needs = ("mass", "low")
    monkeypatch.setitem(CATALOGUE, "spy", Policy("Spy", "tests", watch, {"window": 5, "sinks": 3}, needs=needs))
    return observations


def see(model, prompts, *conditions, **changes):
    return engine.generate(model, prompts, conditions, **{"max_new_tokens": NEW, "stop_ids": (), **changes})


def full_attention(model, prompt: list[int]) -> dict[int, torch.Tensor]:
    """Hugging Face's eager probabilities by layer, [kv_heads, group, queries, tokens]."""
    with torch.no_grad():
        attentions = model(torch.tensor([prompt]), output_attentions=True).attentions
    probabilities = [p for p in attentions if p is not None]
    return {n: p[0].unflatten(0, (2, 3)) for n, p in zip(ModelFacts.of(model).attention, probabilities, strict=True)}


SPY = Condition("spy", 20, Prefill())


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_attention_of_the_window_is_hugging_faces_whatever_the_padding(name, shown):
    model, prompts = architecture(name), tiny_prompts(70, 50)
    see(model, prompts, SPY, prompt_rows=2)
    layers = evictable(name)
    assert [(o.layer, o.layers) for o in shown] == [(i, len(layers)) for i in range(len(layers))]
    for row, prompt in enumerate(prompts):
        expected = full_attention(model, prompt)
        n = len(prompt)
        for o, layer in zip(shown, layers, strict=True):
            held = 31 if name == "mistral" else n  # tokens that the next query can see
            p = expected[layer][:, :, n - 5 :, n - held :]
            p = p / p.sum(-1, keepdim=True)
            alive = o.positions[row] >= 0
            assert o.positions[row, 1][alive[1]].tolist() == list(range(n - held, n))
            assert not alive[:, : o.positions.shape[2] - held].any()
            assert o.query_positions[row].tolist() == list(range(n - 5, n))
            assert int(o.seen[row]) == n
            torch.testing.assert_close(o.attention[row, ..., -held:], p, **CLOSE)
            assert not o.attention[row, ..., :-held].any()


def low_of(p: torch.Tensor) -> torch.Tensor:
    """Low attention among the last 400 queries of p [kv_heads, group, queries, tokens]."""
    n = p.shape[2]
    t, j = torch.arange(n)[:, None], torch.arange(n)[None, :]
    low = (p.double() < 1 / (t + 1).double()) & (j <= t) & (t >= n - 400)
    return low.sum((1, 2)).float()


def test_sums_are_those_of_the_full_matrix(shown):
    model, prompts = architecture("qwen2"), tiny_prompts(460, 430)
    see(model, prompts, SPY, prompt_rows=2, max_new_tokens=1)
    for row, prompt in enumerate(prompts):
        for o, p in zip(shown, full_attention(model, prompt).values(), strict=True):
            mass, low = (o.sums[name][row, :, -len(prompt) :] for name in ("mass", "low"))
            torch.testing.assert_close(mass, p.mean(1).sum(1), atol=1e-4, rtol=1e-4)
            away = (low - low_of(p)).abs()
            assert away.max() <= 2  # p at the border
            assert (away == 0).float().mean() > 0.98


@pytest.mark.parametrize("regime", ["chunked", "decode cap"])
def test_sums_go_on_with_every_chunk_and_generated_token(regime, shown):
    model, [prompt] = architecture("llama"), tiny_prompts(61)
    more = {"chunk": 20, "when": "every_chunk"} if regime == "chunked" else {"interval": 3}
    see(model, [prompt], other(SPY, regime=regime, **more))
    assert len(shown) == 3 * (3 if regime == "chunked" else 1 + 2)  # the first chunk exceeds no budget
    slow = Slow(model, prompt)
    settings = {"chunk": 20, "chunk_budget": lambda seen: 20} if regime == "chunked" else {"every": 3}
    at_eviction = []

    def decide(q, k, v, held, scaling, budget):
        n = len(at_eviction) % 3
        hidden = ~slow.visible[n].repeat_interleave(3, 0)
        p = (q @ k.repeat_interleave(3, 0).mT * scaling).masked_fill(hidden, -torch.inf)
        mass = torch.softmax(p, -1).unflatten(0, (2, 3)).mean(1).sum(1)
        at_eviction.append([mass[head][held[head]] for head in range(2)])
        return newest(3)(q, k, v, held, scaling, budget)

    slow_run(slow, decide, budget=20, new_tokens=NEW, **settings)
    for o, mass in zip(shown, at_eviction, strict=True):
        for head in range(2):
            mass_of_head = o.sums["mass"][0, head][o.alive[0, head]]
            torch.testing.assert_close(mass_of_head, mass[head], atol=1e-4, rtol=1e-4)


# ---- spans

SPANS = {"a": list(range(4, 20)), "b": list(range(25, 50)), "question": list(range(55, 60))}


def test_a_fair_window_shows_each_spans_last_queries_and_their_own_span(shown, monkeypatch):
    monkeypatch.setitem(CATALOGUE, "spy", replace(CATALOGUE["spy"], needs=("mass",)))
    model, [prompt, second] = architecture("llama"), tiny_prompts(60, 44)
    texts = [Prompt(prompt, SPANS), Prompt(second, {"a": [2, 3, 4], "b": list(range(20, 44))})]
    see(model, texts, other(SPY, fair=1.0, spans=("a", "b")), prompt_rows=2)
    for row, (ids, spans) in enumerate([(prompt, [SPANS["a"], SPANS["b"]]), (second, [[2, 3, 4], range(20, 44)])]):
        span_of = allocate.number_spans(len(ids), spans)
        windows = allocate.span_windows(span_of, 5)
        for o, p in zip(shown, full_attention(model, ids).values(), strict=True):
            at = o.query_positions[row]
            assert at[at >= 0].tolist() == windows.tolist()
            same = span_of[:, None] == span_of[None, :]
            expected = (p * same)[:, :, windows]
            torch.testing.assert_close(o.attention[row][:, :, at >= 0, -len(ids) :], expected, **CLOSE)
            mass = o.sums["span_mass"][row, :, -len(ids) :]
            torch.testing.assert_close(mass, (p * same).mean(1).sum(1), atol=1e-4, rtol=1e-4)


# ---- reused prefixes


def test_the_same_prefix_with_other_spans_is_another():
    model, [prefix, question] = architecture("qwen2"), tiny_prompts(50, 5)
    marks = ([3, 4, 5], [30, 31, 32])
    texts = [Prompt(prefix + question, {"keep": span, "question": [50]}) for span in marks]
    c = Condition("streaming_llm", 10, Offline(until="question"), whitelist=("keep",))
    for span, row in zip(marks, see(model, texts, c), strict=True):
        assert set(span) <= set(row[0].kept_positions)


# ---- layers that are decided together


def possible(model, texts, condition) -> bool:
    try:
        return not engine.unmet(model, texts, [[condition]] * len(texts), [7] * len(texts))
    except InputError:
        return False


ALIKE = [name for name, policy in CATALOGUE.items() if policy.together]
AGAIN = [DecodeCap(interval=2), PerStep(), Chunked(40, "every_chunk")]
TOGETHER = [(name, Prefill()) for name in ALIKE] + [(name, regime) for name in ALIKE[::3] for regime in AGAIN]


@pytest.mark.parametrize(("name", "regime"), TOGETHER, ids=lambda x: x if isinstance(x, str) else x.name)
def test_layers_decided_together_keep_what_each_alone_keeps(name, regime, monkeypatch):
    model, prompts = architecture("llama"), tiny_prompts(130, 107)
    judge, keeps = evict.score_and_protect, RaggedLayer.keep
    named = [list(range(20, 24)), list(range(40, 44))]
    texts = [Prompt(ids, {"named": at, "question": [100]}) for ids, at in zip(prompts, named, strict=True)]
    conditions = [
        replace(c, reading=reading)
        for reading in CATALOGUE[name].readings
        for c in (
            Condition(name, 80, regime),
            Condition(name, 0.85, replace(regime, until="question"), prefix=0.1, suffix=0.1),
            Condition(name, 84, regime, whitelist=("named",), prefix=0.2, suffix=0.2, static_suffix=True),
        )
    ]
    conditions = [c for c in conditions if possible(model, texts, c)]
    new, results = {"per step": 3, "chunked": 2}.get(regime.name, 5), []  # two evictions after the prompt, or in it
    for most in (0, 2 * 2 * 2 * 2 * 130 * 8 * 4, 2**27):  # no, two and all layers
        monkeypatch.setitem(evict.TOGETHER, "torch", most)
        counts, left = [], []

        def counted(job, o, counts=counts):
            counts.append(len(o.of))
            return judge(job, o)

        def noted(layer, places, stays, left=left):
            keeps(layer, places, stays)
            left.append((layer.positions.tolist(), layer.offsets.tolist()))

        monkeypatch.setattr(evict, "score_and_protect", counted)
        monkeypatch.setattr(RaggedLayer, "keep", noted)
        answers = sum(see(model, texts, *conditions, max_new_tokens=new, prompt_rows=2), [])
        left += [(answer.tokens, answer.bytes_held, answer.kept_positions_hash) for answer in answers]
        results.append((max(counts), left))
    (none, alone), (some, by_two), (every, by_all) = results
    assert (none, every) == (0, 3)
    assert some == 2 or regime in AGAIN
    assert len(alone) > 6
    assert alone == by_two == by_all
