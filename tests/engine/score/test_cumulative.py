"""H2O, Scissorhands, TOVA and Quest against float64 transcriptions in plain loops, and their identities."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from observations import observation, other_rubbish

from kvrepro.engine.allocate import select
from kvrepro.engine.score import cumulative


def summed(n=20, low_queries=400, sliding=None, seed=0, **shape):
    """A whole prompt's observation with its sums, and the probabilities [batch, kv_heads, group, n, n], float64."""
    o = observation(tokens=n, window=n - 2, seed=seed, **shape)
    g = torch.Generator().manual_seed(seed + 100)
    heads = o.queries.shape[1]
    q = torch.randn(o.keys.shape[0], heads, n, 8, generator=g, dtype=torch.float64)
    logits = torch.einsum("bgrtd,bgnd->bgrtn", q.unflatten(1, (-1, o.group)), o.keys.double()) * o.scaling * 2
    ahead = torch.ones(n, n, dtype=torch.bool).triu(1)
    if sliding is not None:
        ahead |= torch.ones(n, n, dtype=torch.bool).tril(-sliding)
    p = logits.masked_fill(ahead, -torch.inf).softmax(-1)
    t = torch.arange(n)
    counted = (p < 1 / (t[:, None] + 1)) & ~torch.ones(n, n, dtype=torch.bool).triu(1)
    low = counted[..., -low_queries:, :].double().mean(2).sum(2)
    sums = {"mass": p.mean(2).sum(2).float(), "low": low.float()}
    return replace(o, sums=sums, sliding=sliding), p


@pytest.mark.parametrize("sliding", [None, 7])
def test_h2o_is_the_mean_over_queries_that_could_see_the_token(sliding):
    o, p = summed(sliding=sliding)
    scores, n = cumulative.h2o(o), p.shape[-1]
    for b, g, j in product(range(2), range(2), range(n)):
        queries = [t for t in range(j, n) if sliding is None or t - j < sliding]
        total = sum(float(p[b, g, r, t, j]) for r in range(2) for t in queries) / 2
        assert float(scores[b, g, j]) == pytest.approx(total / len(queries), rel=1e-5)


def test_h2o_identities():
    """Attention sums to 1 per query; the plain sum of uniform causal attention favours early tokens."""
    o, p = summed()
    n = p.shape[-1]
    torch.testing.assert_close(cumulative.h2o_online(o).sum(-1), torch.full((2, 2), float(n)))
    uniform = torch.tril(torch.ones(n, n)) / torch.arange(1, n + 1)[:, None]
    flat = replace(o, sums={"mass": uniform.sum(0).expand(2, 2, n)})
    assert bool((cumulative.h2o_online(flat).diff() < 0).all())


def test_recent_share_protects_half_of_the_budget():
    o = observation(dead=5, gaps=4, seed=1)
    mask = cumulative.recent_share(o, torch.zeros(2, 2, 24), torch.tensor([9, 12]))
    assert mask.sum(-1).tolist() == [[4, 4], [6, 6]]
    assert mask[0, :, -4:].all()
    assert not cumulative.recent_share(o, torch.zeros(2, 2, 24), torch.tensor([9, 12]), share=0.0).any()
    everything = cumulative.recent_share(o, torch.zeros(2, 2, 24), torch.tensor([10, 10]), share=1.0)
    assert everything.sum(-1).tolist() == [[10, 10], [10, 10]]


@pytest.mark.parametrize("history", [400, 6])
def test_scissorhands_counts_low_attention_against_a_token(history):
    o, p = summed(low_queries=history, seed=2)
    scores, n = cumulative.scissorhands(o), p.shape[-1]
    for b, g, j in product(range(2), range(2), range(n)):
        queries = range(max(j, n - history), n)
        low = sum(float(p[b, g, r, t, j]) < 1 / (t + 1) for r in range(2) for t in queries) / 2
        assert float(scores[b, g, j]) == pytest.approx(-low)
    assert torch.equal(cumulative.scissorhands(o, "mass"), cumulative.h2o_online(o))


def test_tova_asks_the_last_query_of_all_heads():
    o = observation(gaps=4, seed=3)
    scores = cumulative.tova(o)
    last = o.queries[:, :, -1].double()
    for b in range(2):
        total = torch.zeros(24, dtype=torch.float64)
        for h in range(4):
            logits = o.keys[b, h // 2].double() @ last[b, h] * o.scaling
            total += logits.softmax(0) / 4
        for g in range(2):
            torch.testing.assert_close(scores[b, g].double(), total, rtol=1e-4, atol=1e-6)
    kept = select(scores, torch.zeros_like(o.alive), torch.full((2, 2), 7))
    assert torch.equal(kept[:, 0], kept[:, 1])  # the same tokens for all heads
    torch.testing.assert_close(scores, cumulative.tova(o.last(1)))


def test_tova_of_spans_asks_each_spans_last_token():
    o = observation(batch=1, seed=4, tokens=12, window=2)
    span_of = (torch.arange(12) >= 5).long()[None]
    fair = replace(o, span_of=span_of, span_local=True, query_positions=torch.tensor([[4, 11]]))
    scores = cumulative.tova(fair)[0, 0].double()
    expected = torch.zeros(12, dtype=torch.float64)
    for w, at, span in ((0, 4, slice(0, 5)), (1, 11, slice(5, 12))):
        for h in range(4):  # over all that the query saw; attention to other spans is not renormalised
            logits = o.keys[0, h // 2, : at + 1].double() @ o.queries[0, h, w].double() * o.scaling
            expected[span] += logits.softmax(0)[span] / 4
    torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-6)


def page_bounds(q, keys, pages):
    """max over each page's box, in plain loops: q [dim], keys {page: list of keys}."""
    bounds = {}
    for page, members in pages.items():
        total = 0.0
        for d in range(len(q)):
            values = [float(keys[j][d]) for j in members]
            total += max(float(q[d]) * max(values), float(q[d]) * min(values))
        bounds[page] = total
    return bounds


@pytest.mark.parametrize("group", ["max", "mean"])
@pytest.mark.parametrize("page", [1, 4, 16])
def test_quest_bounds_transcription(page, group):
    o = observation(dead=6, gaps=9, seed=5)
    scores = cumulative.quest(o, page, group)
    assert torch.isfinite(scores).all()
    for b in range(2):
        for g in range(2):
            slots = o.alive[b, g].nonzero()[:, 0].tolist()
            pages = {}
            for j in slots:
                pages.setdefault(int(o.positions[b, g, j]) // page, []).append(j)
            per_head = [page_bounds(o.queries[b, g * 2 + r, -1].double(), o.keys[b, g].double(), pages) for r in (0, 1)]
            for number, members in pages.items():
                both = [bound[number] for bound in per_head]
                expected = (max(both) if group == "max" else sum(both) / 2) * o.scaling
                for j in members:
                    assert float(scores[b, g, j]) == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert torch.equal(scores, cumulative.quest(other_rubbish(o), page, group))


@pytest.mark.parametrize("budget", [16, 48, 100, 10_000])
def test_page_mask_reads_the_best_pages(budget):
    o = observation(dead=9, tokens=75, seed=7)
    q = o.queries[:, :, -1]
    mask = cumulative.page_mask(q, o.keys, o.alive, 8, budget)
    for b in range(2):
        for h in range(4):
            slots = o.alive[b, h // 2].nonzero()[:, 0].tolist()
            pages = {i // 8: [] for i in range(len(slots))}
            for i, j in enumerate(slots):
                pages[i // 8].append(j)
            bounds = page_bounds(q[b, h].double(), o.keys[b, h // 2].double(), pages)
            best = sorted(pages, key=lambda n: (bounds[n], n), reverse=True)[: max(3, budget // 8)]
            assert mask[b, h].nonzero()[:, 0].tolist() == sorted(j for n in best for j in pages[n])


def test_h2o_tells_small_masses_apart_beside_its_bonus():
    masses = torch.tensor([[[1e-6, 1e-6 + 1e-11]]])
    sums = {**dict.fromkeys(("summed", "largest", "latest"), masses), "last_use": torch.zeros(1, 1, 2)}
    first, second = cumulative.h2o_simple(observation(1, 1, window=0, tokens=2, sums=sums, step=10))[0, 0].tolist()
    assert second > first  # in float32 both would be 1.000001, and H2O would not rank as SnapKV after the prompt
