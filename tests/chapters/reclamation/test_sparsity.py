"""Where attention goes, against loops that spell it out."""

from types import SimpleNamespace

import families
import numpy as np
import pytest
import tiny
import torch

from kvrepro.chapters.reclamation import sparsity


@pytest.fixture(scope="module")
def loaded():
    return SimpleNamespace(model=tiny.model(), context=512, tokenizer=None)


@pytest.mark.parametrize("family", ["", "Gemma 2", "GPT-OSS"])
def test_attention_is_that_of_the_model_and_shares_are_those_of_loops(loaded, family):
    if family:  # logits behind a softcap, sinks that take a part of the attention
        loaded = SimpleNamespace(model=families.build(family, sliding_window=512), context=512, tokenizer=None)
    ids, windows, ahead = tiny.prompts(120)[0], (1, 8, 25), 6
    table = sparsity.sparsity(loaded, ids, windows, ahead, share=0.2)
    with torch.inference_mode():
        eager = loaded.model(torch.tensor([ids]), output_attentions=True).attentions
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


def test_selected_pages_are_held_with_all_others(loaded):
    rows = sparsity.pages(loaded, tiny.prompts(160)[0], (0.3, 0.5))
    assert (rows.held >= 1).all()
    assert rows.read.tolist() == pytest.approx([0.3, 0.5], abs=0.1)
