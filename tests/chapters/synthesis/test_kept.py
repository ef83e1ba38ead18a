"""What heads keep, on closed forms, and against a plain softmax."""

import pandas as pd
import pytest
import torch

import kvrepro as kv
from kvrepro.chapters.synthesis import kept


def layer(keys: torch.Tensor, mask: list[bool], p: list[float]) -> dict[str, float]:
    """One head with values that are unit vectors, one per token."""
    tokens = len(mask)
    measures = kept._of_layer(
        keys[None], torch.eye(tokens)[None], torch.tensor(p)[None, None], torch.tensor(mask)[None]
    )
    return {name: float(value[0]) for name, value in measures.items()}


def test_distinct_mass_and_shift_on_closed_forms():
    """Attention (.5, .3, .2); without the last token its output moves from (.5, .3, .2) to (.625, .375, 0)."""
    same, apart = torch.ones(3, 4), torch.eye(3, 4)
    measures = layer(apart, [True, True, False], [0.5, 0.3, 0.2])
    assert measures["distinct"] == pytest.approx(1)
    assert measures["mass"] == pytest.approx(0.8)
    moved, whole = torch.tensor([0.125, 0.075, -0.2]), torch.tensor([0.5, 0.3, 0.2])
    assert measures["shift"] == pytest.approx(float(moved.norm() / whole.norm()))
    assert layer(same, [True, True, False], [0.5, 0.3, 0.2])["distinct"] == pytest.approx(0, abs=1e-6)
    assert layer(apart, [True, True, True], [0.5, 0.3, 0.2])["shift"] == pytest.approx(0, abs=1e-6)


def test_how_often_keydiff_leads_reads_well_with_few_pairs_and_with_none():
    pairs = pd.DataFrame({"value": [0.2, 0.1, -0.1], "low": [0.1, -0.1, -0.2]})
    assert "in 2 of 3 pairs of model and budget, and clearly higher (by the interval) in 1." in kept.lead_sentence(
        pairs
    )
    assert "in none of 1 pair of model and budget" in kept.lead_sentence(pairs[2:])
    assert kept.lead_sentence(pairs[:0]) == "This run compares KeyDiff with no rival."


def test_layers_hold_the_attention_of_the_models_own_last_query():
    loaded = kv.load()
    [item] = kv.load_items("tinyworld:needle", n_items=1, seed=0, tokens=300)
    ids = kv.build_prompt(item, loaded.tokenizer, 400).ids
    layers = kept._layers(loaded, ids)
    loaded.model.set_attn_implementation("eager")
    attentions = loaded.model(torch.tensor([ids]), output_attentions=True).attentions
    for number, (key, value, p) in layers.items():
        assert key.shape == value.shape == (2, len(ids), 64)
        torch.testing.assert_close(p.flatten(0, 1), attentions[number][0, :, -1], atol=1e-4, rtol=1e-3)


def test_a_policy_that_keeps_the_newest_tokens_loses_early_evidence():
    loaded = kv.load()
    [item] = kv.load_items("tinyworld:several_front", n_items=1, seed=0, tokens=500)
    means = (
        kept.of_item(loaded, item, ("streaming_llm", "key_diff"), 0.2, 600).groupby("policy")[[*kept.MEASURES]].mean()
    )
    assert means.evidence["streaming_llm"] == 0
    assert means.evidence["key_diff"] > 0
    assert means.distinct["key_diff"] > means.distinct["streaming_llm"]


def test_leads_are_paired_by_item_and_ordered_by_how_close_the_rival_is():
    rows = pd.DataFrame(
        {"kind": "published", "model": "m", "kept": 0.1, "item": f"i{i}", "method": method, "score": score + i / 100}
        for i in range(7)
        for method, score in (("key_diff", 0.6), ("snapkv", 0.5), ("dropkv", 0.65))
    )
    leads = kept.leads(rows)
    assert leads.rival.tolist() == ["dropkv", "snapkv"]
    assert leads.value.tolist() == pytest.approx([-0.05, 0.1])
    assert (leads.n == 7).all()
    assert kept.leads(rows[rows.method != "key_diff"]).empty


def test_agreement_is_the_rank_correlation_of_each_item_that_has_one():
    rows = pd.DataFrame(
        {"model": "m", "item": item, "evidence_heads": e, "score": score}
        for item, scores in (("up", (0.1, 0.2, 0.9)), ("down", (0.9, 0.5, 0.1)), ("flat", (1.0, 1.0, 1.0)))
        for e, score in zip((0.1, 0.2, 0.3), scores, strict=True)
    )
    correlations = kept.agreement(rows).set_index("item").value
    assert correlations.to_dict() == pytest.approx({"up": 1.0, "down": -1.0})
    assert kept.agreement(rows.assign(evidence_heads=float("nan"))).empty
