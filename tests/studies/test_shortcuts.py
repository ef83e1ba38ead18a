"""What can be told without reading: the measure on known scores, and what the shipped tables say."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrepro.experiment import data, models
from kvrepro.paths import DATA
from studies import shortcuts


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=2, max_size=20))
def test_auc_counts_pairs_and_halves_ties(drawn):
    scores, positive = np.array([s for s, _ in drawn], float), np.array([p for _, p in drawn])
    if positive.all() or not positive.any():
        return
    pairs = [(a > b) + 0.5 * (a == b) for a in scores[positive] for b in scores[~positive]]
    assert shortcuts.auc(scores, positive, ~positive) == pytest.approx(np.mean(pairs))


@pytest.fixture(scope="module")
def tiny():
    return models.load("small-gqa")


def test_a_passage_is_evidence_filler_and_other_facts(tiny):
    [item] = data.load_items("tinyworld:story", 1, seed=3, tokens=400)
    prompt = data.build_prompt(item, tiny.tokenizer, 500)
    words = tiny.tokenizer.convert_ids_to_tokens(prompt.ids)
    where = shortcuts.groups(prompt, words, set(item.answer.split()))
    passage = sum(where[name].astype(int) for name in ("evidence", "filler", "other facts"))
    start, end = prompt.turns["user"] + 1, min(prompt.spans["question"])
    assert passage[start:end].tolist() == [1] * (end - start)
    assert passage[:start].sum() == 0
    answer_words = " ".join(words[i] for i in np.flatnonzero(where["answer words"]))
    assert answer_words == item.answer
    assert set(np.flatnonzero(where["evidence"])) == set(prompt.spans["evidence"])
    assert all(words[i] == "That" for i in np.flatnonzero(where["other facts"])[::12])  # facts of twelve tokens each


def test_norms_and_attention_are_the_models_own(tiny):
    [item] = data.load_items("tinyworld:story", 1, seed=3, tokens=300)
    aucs = shortcuts.of_item(tiny, item)
    assert aucs.layer.nunique() == 7
    assert aucs[aucs.layer >= 0].groupby("layer")["head"].nunique().tolist() == [2] * 6
    assert aucs.auc.between(0, 1).all()
    rarity = aucs[(aucs.signal == "rarity") & (aucs.contrast == "answer words, filler")]
    assert rarity.auc.item() > 0.9


def test_the_shipped_tables_say_what_the_models_page_says():
    table = pd.read_csv(DATA / "shortcuts.csv").set_index(["contrast", "signal", "layer", "head"]).value
    plain = ["value_norm", "key_norm", "window"]
    others = table["evidence, other facts"]
    assert others[plain].sub(0.5).abs().groupby("signal").mean().max() < 0.05  # mean over layers
    assert abs(others["rarity", -1, 0] - 0.5) < 0.05
    words = table["answer words, filler"]
    assert words["rarity", -1, 0] > 0.99
    assert abs(words["position", -1, 0] - 0.5) < 0.1
    best = words["value_norm"].groupby("layer").max()
    assert best[[0, 1, 3, 4]].min() > 0.9
    assert words["key_norm"][1].max() > 0.95
    assert words["key_norm"][2].max() < 0.35
    assert words["window"].groupby("layer").max()[[2, 3]].min() > 0.85
    assert others["question"][1].min() > 0.65 > others["question"].drop(1, level="layer").max()
    lost = pd.read_csv(DATA / "shortcuts_lost.csv").set_index(["policy", "share"])
    for share in shortcuts.SHARES:
        assert lost.value["value_norm", share] < lost.value["snapkv", share] - 0.1 * (share > 0.1)
        assert lost.value["k_norm", share] > 0.9
        held = lost["answer words"][[("value_norm", share), ("snapkv", share)]]
        assert held.min() > share
        assert held.max() - held.min() < 0.08
