"""What the guide says of attention: its own checks, transcribed; column sums and shares against loops and matrices."""

from types import SimpleNamespace

import families
import numpy as np
import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrepro.chapters.reclamation import attention


def test_the_guides_facts():
    value = attention.wall().set_index("check").value
    assert value["online minus eager"] <= 1e-12
    assert value["online minus eager after 400"] <= 1e-12
    assert value["peak live scores"] == 512 * 32 == 512 * 512 / 16
    assert value["output of the two caches"] <= 1e-12
    assert value["running maximum of the two caches"] == 0
    assert value["denominator of the two caches"] <= 1e-12
    assert value["scores swapped"] <= 1e-12
    assert value["score gap of the swapped tokens"] > 1e-3


@settings(max_examples=25, deadline=None)
@given(queries=st.integers(1, 20), tokens=st.integers(1, 33), tile=st.integers(1, 40), seed=st.integers(0, 9))
def test_online_equals_eager_for_any_tile(queries, tokens, tile, seed):
    random = np.random.default_rng(seed)
    q, k, v = random.standard_normal((queries, 5)) * 9, *random.standard_normal((2, tokens, 5))
    np.testing.assert_allclose(attention.online(q, k, v, tile)["output"], attention.eager(q, k, v)[0], atol=1e-12)


@settings(max_examples=25, deadline=None)
@given(tokens=st.integers(1, 70), tile=st.integers(1, 80), seed=st.integers(0, 9))
def test_column_sums_of_the_extra_pass(tokens, tile, seed):
    q, k = torch.randn(2, 2, tokens, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 3
    scores = (q @ k.transpose(1, 2)) / 8**0.5
    scores = scores.masked_fill(torch.ones(tokens, tokens, dtype=torch.bool).triu(1), -torch.inf)
    sums = attention.column_sums(q, k, torch.logsumexp(scores, -1), tile)
    torch.testing.assert_close(sums.double(), torch.softmax(scores, -1).sum(1), rtol=1e-4, atol=1e-5)
    assert sums.sum() == pytest.approx(2 * tokens, rel=1e-5)  # every query gives away its whole attention


@pytest.mark.parametrize("family", ["", "Gemma 2", "GPT-OSS"])
def test_attention_is_that_of_the_model_and_shares_are_those_of_loops(family):
    """Also behind a softcap of the logits, and beside sinks that take a part of the attention."""
    model = families.build(family, sliding_window=512) if family else tiny.model()
    ids, windows, ahead = tiny.prompts(120)[0], (1, 8, 25), 6
    table = attention.sparsity(SimpleNamespace(model=model, context=512, tokenizer=None), ids, windows, ahead)
    with torch.inference_mode():
        eager = model(torch.tensor([ids]), output_attentions=True).attentions
    for layer, p in enumerate(eager):
        rows = table[table.layer == layer]
        p = p[0].unflatten(0, (2, -1)).sum(1).numpy()  # [kv_heads, queries, tokens]
        history = 120 - ahead - max(windows)

        def held(scores, mass):
            best = [np.argsort(-s)[: round(0.2 * len(s))] for s in scores]
            return np.mean([m[b].sum() / m.sum() for m, b in zip(mass, best, strict=True)])

        mass, wanted = p.sum(1), p[:, -ahead:, :history].sum(1)
        assert rows[rows.what == "heavy hitters"].value.item() == pytest.approx(held(mass, mass), abs=1e-4)
        assert rows[rows.what == "best"].value.item() == pytest.approx(held(wanted, wanted), abs=1e-4)
        for w in windows:
            voted = p[:, -ahead - w : -ahead, :history].sum(1)
            assert rows[rows.window == w].value.item() == pytest.approx(held(voted, wanted), abs=1e-4)
    of_window = table[table.what == "window"].pivot_table(index="layer", columns="window", values=["value", "gain"])
    assert np.allclose(of_window.gain[8], of_window.value[8] - of_window.value[25])
    assert (of_window.gain[25] == 0).all()


def test_selected_pages_are_held_with_all_others():
    loaded = SimpleNamespace(model=tiny.model(), context=512, tokenizer=None)
    rows = attention.pages(loaded, tiny.prompts(160)[0], (0.3, 0.5))
    assert (rows.held >= 1).all()
    assert rows.read.tolist() == pytest.approx([0.3, 0.5], abs=0.1)
