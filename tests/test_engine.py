"""Every regime against a slow transcription, against Hugging Face, and against itself, in nine architectures."""

from dataclasses import dataclass, replace

import pytest
import torch
from slow_engine import Slow, looked_at, newest
from slow_engine import run as slow_run
from tiny import ARCHITECTURES, architecture
from tiny import prompts as tiny_prompts

from kvrepro import engine
from kvrepro.cache import EngineCache
from kvrepro.catalogue import CATALOGUE
from kvrepro.compress import Facts
from kvrepro.condition import Condition, Prompt
from kvrepro.errors import InputError
from kvrepro.observe import Observation
from kvrepro.policy import Policy

WINDOW, CAP, NEW = 4, 16, 12
DECODING = ("decode cap", "per step")


def watched(o: Observation):
    """Mean attention of the window, over queries and group."""
    return o.attention.mean((2, 3))


def lopsided(scores, protected, budget, unequal: int = 0):
    """`unequal` tokens more for the first head, as many less for the last."""
    counts = budget[:, None].repeat(1, scores.shape[1])
    counts[:, 0] += unequal
    counts[:, -1] -= unequal
    return counts


TEST_POLICIES = {
    "watched": Policy("Watched", "tests", watched, {"window": WINDOW, "recent": "window"}),
    "lopsided": Policy(
        "Lopsided", "tests", watched, {"window": WINDOW, "recent": "window", "unequal": 5}, allocate=lopsided,
        budget="per head",
    ),
}  # fmt: skip
DECIDE = {"streaming_llm": newest(4), "watched": looked_at(WINDOW), "lopsided": looked_at(WINDOW, 5)}


@pytest.fixture(autouse=True)
def _policies(monkeypatch):
    for name, policy in TEST_POLICIES.items():
        monkeypatch.setitem(CATALOGUE, name, policy)


def sliding_of(name: str) -> dict[int, int]:
    config = architecture(name).config
    types = getattr(config, "layer_types", None) or ["sliding_attention"] * 3
    return {n: 32 for n, kind in enumerate(types) if kind == "sliding_attention"} if config_slides(name) else {}


def config_slides(name: str) -> bool:
    return name in ("mistral", "gemma3")


def evictable(name: str) -> list[int]:
    """Layers that lose tokens: all that attend, but in a mixed model only those that do not slide."""
    return {"gemma3": [1], "qwen3_next": [1, 2], "qwen3_5": [1, 2]}.get(name, [0, 1, 2])


@dataclass
class End:
    """One row when it ended."""

    logits: torch.Tensor  # that the last token was taken from
    held: dict  # per layer, the positions of each head


def answers(model, prompts, conditions, monkeypatch=None, **changes):
    """(generations, ends), `[prompt][condition]`."""
    ends = {}
    finish = engine._Engine._finish

    def spy(self, rows, done, tokens, seconds):
        finish(self, rows, done, tokens, seconds)
        for row in done:
            held = {}
            for n, layer in rows.cache.ragged.items():
                mine = layer.rows(torch.tensor([row]))
                flat = mine.positions if mine.hidden is None else mine.positions.masked_fill(mine.hidden, -1)
                held[n] = [[p for p in head.tolist() if p >= 0] for head in flat.split(mine.lengths[0].tolist())]
            ends[rows.tags[row]] = End(rows.logits[row].clone(), held)

    engine._Engine._finish = spy
    try:
        found = engine.generate(model, prompts, conditions, **{"max_new_tokens": NEW, "stop_ids": (), **changes})
    finally:
        engine._Engine._finish = finish
    return found, [[ends[i, j] for j in range(len(conditions))] for i in range(len(prompts))]


def cut(regime: str, policy: str = "watched", **changes) -> Condition:
    """A condition that evicts in `regime`."""
    more = {"chunked": {"chunk": 16}, "decode cap": {"interval": 3}}.get(regime, {})
    return Condition(policy, regime=regime, **{"capacity": CAP, **more, **changes})


REGIMES = ["prefill", "chunked", "offline", "decode cap", "per step"]
MODES = [(r, {}) for r in REGIMES] + [("chunked", {"chunk_mode": m}) for m in ("budget", "every_chunk")]


# ---- against Hugging Face


def greedy(model, prompt: list[int], n: int) -> tuple[list[int], torch.Tensor]:
    """Hugging Face's own attention and cache."""
    ids, cache, tokens = torch.tensor([prompt]), None, []
    with torch.no_grad():
        for _ in range(n):
            out = model(ids, past_key_values=cache, use_cache=True)
            cache, logits = out.past_key_values, out.logits[0, -1]
            ids = logits.argmax().view(1, 1)
            tokens.append(int(ids))
    return tokens, logits


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_without_eviction_the_engine_is_a_greedy_loop_of_hugging_face(name):
    model, prompts = architecture(name), tiny_prompts(70, 55, 20)
    ours, ends = answers(model, prompts, [Condition(regime="prefill"), Condition(regime="decode cap")])
    for prompt, row, states in zip(prompts, ours, ends, strict=True):
        tokens, logits = greedy(model, prompt, NEW)
        for one, state in zip(row, states, strict=True):
            assert one.tokens == tokens
            assert one.policy_calls == one.evicted == 0
            torch.testing.assert_close(state.logits, logits, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_slow_transcription_is_hugging_face_when_nothing_is_hidden(name):
    model, [prompt] = architecture(name), tiny_prompts(60)
    logits = Slow(model, prompt, sliding_of(name)).read(60)
    torch.testing.assert_close(logits, model(torch.tensor([prompt])).logits[0, -1], atol=1e-4, rtol=1e-4)


# ---- against the slow transcription


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("policy", DECIDE)
@pytest.mark.parametrize(("regime", "mode"), MODES, ids=lambda x: str(x) if isinstance(x, str) else x.get("chunk_mode"))
def test_evicted_decoding_equals_the_slow_transcription(name, policy, regime, mode):
    model, [prompt] = architecture(name), tiny_prompts(70)
    c = cut(regime, policy, **mode)
    [[ours]], [[end]] = answers(model, [prompt], [c])
    slow = Slow(model, prompt, sliding_of(name), evictable(name))
    decide = DECIDE[policy]
    if name == "mistral" and policy != "streaming_llm":
        decide = looked_at(WINDOW, 5 if policy == "lopsided" else 0, sliding=32)
    each = {"budget": lambda seen: CAP, "every_chunk": lambda seen: CAP}.get(c.chunk_mode)
    tokens, logits = slow_run(
        slow, decide, budget=CAP, new_tokens=NEW, chunk=16 if regime == "chunked" else None, chunk_budget=each,
        every={"decode cap": 3, "per step": 1}.get(regime),
    )  # fmt: skip
    assert ours.tokens == tokens
    torch.testing.assert_close(end.logits, logits, atol=1e-4, rtol=1e-4)
    for n in evictable(name):
        expected = [head.nonzero()[:, 0].tolist() for head in slow.held[n]]
        if n in slow.windows:
            reach = slow.length - slow.windows[n]
            expected = [[p for p in head if p > reach] for head in expected]
        assert end.held[n] == expected
