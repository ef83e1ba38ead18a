"""The state of cached tokens, step by step."""

from dataclasses import replace

import pytest
import torch
from tiny import model as tiny_model
from tiny import prompts as tiny_prompts

from kvrepro.chapters.protection.attention import PromptAttention
from kvrepro.chapters.protection.observe import after_prompt, append, attend
from kvrepro.chapters.protection.reading import AS_DESCRIBED, AS_RUN
from kvrepro.engine.attention import installed


@pytest.fixture(scope="module")
def prompt() -> tuple[PromptAttention, torch.Tensor]:
    """A prompt's streamed statistics and its full attention [layers, heads, queries, tokens]."""
    model, [ids] = tiny_model(), tiny_prompts(40)
    seen = PromptAttention(sums=True, groups=True)
    with torch.no_grad():
        p = torch.stack(model(torch.tensor([ids]), output_attentions=True).attentions)[:, 0]
        with installed(model):
            model(torch.tensor([ids]), kvrepro=seen)
    return seen, p


def test_as_run_takes_maxima_and_as_described_means_summed_over_queries(prompt):
    seen, p = prompt
    run = after_prompt(seen, AS_RUN, kv_heads=2, per_head=False, rows=3)
    for signal in (run.current, run.peak, run.cumulative, run.prefill):
        torch.testing.assert_close(signal, p.amax((0, 1, 2)).expand(3, -1), atol=1e-5, rtol=1e-5)
    assert run.cumulative[0, 0] == 1.0  # the first query sees nothing else
    described = after_prompt(seen, AS_DESCRIBED, kv_heads=2, per_head=False, rows=1)
    torch.testing.assert_close(described.cumulative[0], p.mean((0, 1)).sum(0), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(described.current[0], p[:, :, -1].mean((0, 1)), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(described.peak[0], p.amax(2).mean((0, 1)), atol=1e-5, rtol=1e-5)


def test_a_kv_head_follows_the_query_head_of_its_number_or_its_groups_mean(prompt):
    seen, p = prompt
    as_run = replace(AS_RUN, per_head_first_reduction=0)
    first = after_prompt(seen, as_run, kv_heads=2, per_head=True, rows=1)
    torch.testing.assert_close(first.head_cumulative[0], p[:, :2].amax((0, 2)), atol=1e-5, rtol=1e-5)
    group = after_prompt(seen, replace(as_run, head_map="group_mean"), kv_heads=2, per_head=True, rows=1)
    torch.testing.assert_close(
        group.head_cumulative[0], p.unflatten(1, (2, 3)).mean(2).amax((0, 2)), atol=1e-5, rtol=1e-5
    )
    described = after_prompt(seen, AS_DESCRIBED, kv_heads=2, per_head=True, rows=1)
    means = p.unflatten(1, (2, 3)).mean((0, 2))
    torch.testing.assert_close(described.head_cumulative[0], means.sum(1), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(described.head_current[0], means[:, -1], atol=1e-5, rtol=1e-5)


def test_as_run_per_head_signals_start_empty(prompt):
    o = after_prompt(prompt[0], AS_RUN, kv_heads=2, per_head=True, rows=1)
    assert float(o.head_cumulative.abs().max()) == 0.0


def test_a_new_token_starts_unseen_and_attention_above_five_percent_is_an_access(prompt):
    o = after_prompt(prompt[0], AS_RUN, kv_heads=2, per_head=False, rows=2)
    o = o.map_slots(lambda v: torch.nn.functional.pad(v, (0, 1)))
    o = append(replace(o, step=4), 40, torch.tensor([True, False]))
    assert o.positions[:, 40].tolist() == [43, 43]
    assert o.alive[:, 40].tolist() == [True, False]
    assert (o.last_access[0, 40], o.inserted[0, 40], o.peak[0, 40], o.cumulative[0, 40]) == (4, 4, 0, 0)
    attention = torch.full((2, 41), 0.01)
    attention[:, 7], attention[:, 8] = 0.8, 0.041
    later = attend(o, attention)
    assert later.last_access[0, [6, 7, 8]].tolist() == [0, 4, 4]
    torch.testing.assert_close(later.cumulative[0, :40], o.cumulative[0, :40] + attention[0, :40])
    torch.testing.assert_close(later.peak[0, :40], torch.maximum(o.peak[0, :40], attention[0, :40]))
    assert bool((later.current == attention).all())
    assert bool((later.prefill == o.prefill).all())


def test_attention_to_a_token_that_is_gone_is_no_access(prompt):
    o = after_prompt(prompt[0], AS_RUN, kv_heads=2, per_head=False, rows=1)
    alive = o.alive.clone()
    alive[0, 5] = False
    attention = torch.zeros(1, 40)
    attention[0, 5] = attention[0, 6] = 0.5
    later = attend(replace(o, alive=alive, step=3), attention)
    assert later.last_access[0, 4:8].tolist() == [0, 0, 3, 0]
