"""Triples against the model's own attention, Table 11's rules against loops, and what each stratum picks."""

import numpy as np
import pytest
import tiny
import torch
from scipy import stats as scipy_stats

from kvrepro.chapters.dropkv_bound import bound, triples
from kvrepro.chapters.dropkv_bound.triples import RULES, Triple
from kvrepro.engine.catalogue import CATALOGUE


def collect(model, ids, positions, **given) -> list[Triple]:
    collected = []
    triples.triples(model, ids, positions, lambda layer: collected.extend(tiny.triples_of(layer)), **given)
    return collected


def random_triple(window: int = 3, tokens: int = 40, dim: int = 5, seed: int = 0) -> Triple:
    generator = torch.Generator("cpu").manual_seed(seed)
    rows = torch.randn(window, tokens, generator=generator, dtype=torch.float64, device="cpu")
    v, keys = torch.randn(2, tokens, dim, generator=generator, dtype=torch.float64, device="cpu")
    w_o = torch.randn(dim, 7, generator=generator, dtype=torch.float64, device="cpu")
    return Triple(1, 2, tokens - 1, rows.softmax(-1), v, keys, w_o)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "phi3"])
def test_attention_and_values_are_the_model_s_own(kind):
    """Against eager attention weights; the output, through W_O, against what the layer returns."""
    model, ids = tiny.model(kind), tiny.prompts(30)[0]
    collected = collect(model, ids, [12, 29], window=4)
    assert [(t.layer, t.head, t.position) for t in collected] == [
        (layer, head, t) for layer in range(3) for head in range(6) for t in (12, 29)
    ]
    outputs = {}
    hooks = [
        m.o_proj.register_forward_pre_hook(lambda _, given, layer=m.layer_idx: outputs.update({layer: given[0][0]}))
        for m in model.modules()
        if hasattr(m, "o_proj")
    ]
    with torch.inference_mode():
        weights = model(torch.tensor([ids]), output_attentions=True, use_cache=False).attentions
    for hook in hooks:
        hook.remove()
    for t in collected:
        expected = weights[t.layer][0, t.head, t.position - 3 : t.position + 1, : t.position + 1]
        assert torch.allclose(t.window_p, expected.double(), atol=1e-5)
        assert torch.allclose(t.window_p.sum(-1), torch.ones(4, dtype=torch.float64))
        output = outputs[t.layer][t.position].view(6, -1)[t.head]
        assert torch.allclose(t.window_a[-1], output.double(), atol=1e-5)
        w = next(m for m in model.modules() if getattr(m, "layer_idx", None) == t.layer and hasattr(m, "o_proj"))
        assert torch.equal(t.w_o.float(), w.o_proj.weight.T.view(6, -1, 48)[t.head])


def loops(t: Triple) -> dict[str, list[float]]:
    """Table 11, key by key."""
    p, v, keys, w_o = t.window_p.numpy(), t.v.numpy(), t.keys.numpy(), t.w_o.numpy()
    w, n = p.shape
    a = [sum(p[q, j] * v[j] for j in range(n)) for q in range(w)]
    mean = sum(keys) / n
    scores: dict[str, list[float]] = {name: [] for name in RULES}
    for j in range(n):
        scores["streaming_llm"].append((j < 4) * 2 + j / n)
        scores["key_diff"].append(-keys[j] @ mean / np.linalg.norm(keys[j]) / np.linalg.norm(mean))
        total = sum(p[q, j] for q in range(w))
        scores["snapkv"].append(total)
        scores["pyramid_kv"].append(total)
        scores["cake"].append(total / w + 200 * sum((p[q, j] - total / w) ** 2 for q in range(w)) / (w - 1))
        scores["critical_kv"].append((total / w + 1e-4) * np.abs(v[j] @ w_o).sum())
        scores["andpro"].append(sum(p[q, j] * (a[q] @ v[j]) for q in range(w)))
        scores["dropkv"].append(
            sum((p[q, j] / (1 - p[q, j] + 1e-6)) ** 2 * ((a[q] - v[j]) ** 2).sum() for q in range(w))
        )
    return scores


def test_every_rule_of_table_11_equals_its_loop():
    t = random_triple()
    for name, expected in loops(t).items():
        assert np.allclose(RULES[name](t).numpy(), expected, rtol=1e-9, atol=1e-12), name


@pytest.mark.parametrize("name", ["snapkv", "andpro", "dropkv", "tova", "k_norm", "random"])
def test_a_policy_s_own_scores_rank_the_keys_as_its_rule_does(name):
    """The engine's scorers, shown one query head; where table 11 has the rule, the order is that rule's."""
    policy = CATALOGUE[name]
    assert triples.scored_alone(policy)
    for t in collect(tiny.model("qwen2"), tiny.prompts(30)[0], [12, 29], window=4):
        score = triples.scores_of(policy, t)
        assert score.shape == t.p.shape
        if name in RULES:
            assert scipy_stats.spearmanr(score[:-4], RULES[name](t)[:-4]).statistic > 0.999  # the window always stays


def test_one_query_of_dropkv_ranks_as_the_exact_cost():
    t = random_triple()
    exact = bound.single_cost(t.p, t.r)
    assert torch.equal(RULES["dropkv"](t.last(1)).argsort(), exact.argsort())


def test_strata_pick_what_they_are_named_for():
    t = random_triple(tokens=60)
    keys = bound.pool(t.p, 0.9, window=3)
    strata, pool = triples.strata(t, keys, size=6), set(keys.nonzero()[:, 0].tolist())
    assert all(len(chosen) == len(pool & set(chosen.tolist())) == 6 for chosen in strata.values())
    cost = bound.single_cost(t.p, t.r)
    ranks = [torch.full((60,), 0).masked_scatter(keys, x[keys].argsort().argsort()) for x in (t.p, cost)]
    cosine = torch.nn.functional.cosine_similarity(t.v, t.window_a[-1].expand_as(t.v), dim=-1)
    lowest = {"tail": t.p, "threshold": (cost - cost[keys].median()).abs(), "near": t.r.norm(dim=-1)}
    lowest |= {"disagreement": -(ranks[0] - ranks[1]).abs(), "aligned": -cosine}
    for name, order in lowest.items():
        assert order[strata[name]].max() <= order[keys].sort().values[5], name
    for seed, same in ((0, True), (1, False)):
        assert torch.equal(triples.strata(t, keys, size=6, seed=seed)["random"], strata["random"]) == same
