"""The tokens that stay in `SharedCap`, position by position, in both readings: the protection paper's policies and
guards."""

from dataclasses import replace

import pytest
import torch

from kvrepro.engine.catalogue import SHARED as POLICIES
from kvrepro.engine.condition import Condition, SharedCap
from kvrepro.engine.evict import EvictionJob, Prompts, evict_shared, generator
from kvrepro.engine.shared import PromptSignals, Signals


def capped(policy: str, budget: int | None = None, **settings) -> Condition:
    return Condition(policy, budget, SharedCap(), **settings)


def after_prompt(
    c: Condition, n: int, signal: torch.Tensor | None = None, room: int = 0
) -> tuple[EvictionJob, Signals]:
    """One row of n prompt tokens whose attention in the prompt is `signal` for every head; space for `room` more."""
    policy = POLICIES[c.policy]
    parameters = policy.reading(c.reading, c.switches)
    prompts = Prompts(torch.arange(n)[None], [{}])
    job = EvictionJob([c], policy, parameters, [c.budget], prompts, [generator(parameters, range(n))])
    seen = PromptSignals([job.reduction])
    s = torch.zeros(n) if signal is None else signal.float()
    heads = s.expand(1, 1, 1, n)  # [batch, kv_heads, group, tokens]
    seen.layers = [{"max": heads, "sum": heads, "last": heads, "group": heads[:, :, 0]}]
    return job, seen.signals(job.reduction, prompts.positions, n + room, False)


def kept(c: Condition, n: int, signal: torch.Tensor | None = None) -> list[int]:
    left = evict_shared(*after_prompt(c, n, signal), 0)
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
