"""Answers under DropKV and its peers: conditions, pairs on frames with known means, and one layer's loss."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import tiny
import torch

from kvrepro.chapters.dropkv_bound import quality, triples
from kvrepro.chapters.dropkv_bound.settings import Settings
from kvrepro.engine.rule import check
from kvrepro.engine.score.window import pooled
from kvrepro.errors import InputError
from kvrepro.experiment import data
from kvrepro.experiment.judge import NotTestable


def rows(n: int = 8) -> pd.DataFrame:
    """F1 by construction: full 1, dropkv share-dependent, snapkv always 0.1 below it."""
    means = {"full": {1.0: 1.0}, "dropkv": {0.05: 0.6, 0.3: 0.95}, "snapkv": {0.05: 0.5, 0.3: 0.85}}
    return pd.DataFrame(
        {"item": f"i{i}", "method": method, "share": share, "score": f1 - 0.02 * (i % 2), "length": 1900}
        for i in range(n)
        for method, f1_by_share in means.items()
        for share, f1 in f1_by_share.items()
    )


def test_every_condition_can_be_met_and_carries_the_paper_s_settings():
    grid = quality.grid(Settings(shares=(0.05, 0.3)))
    assert set(grid) == {"full", "dropkv", *quality.PEERS, *quality.VARIANTS}
    for conditions in grid.values():
        for condition in conditions:
            check(condition, 1900)
    assert len(grid["snapkv"]) == 2
    assert dict(grid["snapkv"][0].switches) == {"window": 8, "kernel": 11}
    assert dict(grid["DropKV, average pooling"][0].switches) == {"window": 8, "kernel": 11, "pool": "average"}
    assert grid["streaming_llm"][0].switches == ()


def test_policies_are_named_once_and_dropkv_is_always_there():
    assert quality.peers_of(["snapkv", "dropkv", "full", "snapkv", "tova"]) == ["snapkv", "tova"]
    with pytest.raises(InputError, match="unknown policy 'nokv'"):
        quality.peers_of(["nokv"])


def test_differences_and_leads_are_paired():
    both = quality.pair(rows(), "snapkv", 0.05)
    assert len(both) == 8
    assert np.allclose(both.a - both.b, 0.1)
    loss = quality.losses(rows(), 0.3)
    assert np.allclose(loss.loss, 0.05)
    with pytest.raises(NotTestable, match="not run: cake at 5%"):
        quality.pair(rows(), "cake", 0.05)


def test_an_item_that_failed_drops_out_where_it_failed_only():
    broken = rows()
    broken.loc[(broken["item"] == "i3") & (broken.method == "snapkv"), "score"] = np.nan
    assert "i3" not in quality.pair(broken, "snapkv", 0.05).index
    assert "i3" in quality.pair(broken, "full", 0.05).index


class Loaded:
    context = 64

    hash, dtype, device, path = "tiny", "float32", "cpu", None

    def __init__(self):
        self.model = tiny.model("qwen2")
        self.tokenizer = lambda text, **_: {"input_ids": [5, 9, 7]}


@pytest.mark.parametrize("packed", [512, 7])
def test_the_loss_of_a_layer_or_a_head_is_that_of_a_model_with_its_keys_masked(monkeypatch, tmp_path, packed):
    """Against the whole text in one pass, where the evicted keys of one layer, or of one of its heads, are hidden from
    the answer's queries."""
    monkeypatch.setattr(quality, "PACKED", packed)
    ids = tiny.prompts(40)[0]
    monkeypatch.setattr(data, "build_prompt", lambda *_: data.Prompt(ids, {}))
    loaded = Loaded()
    item = data.Item("a", "task", (), "answer")
    settings = Settings(results=tmp_path, shares=(0.25, 0.5), window=4, kernel=3)
    layers, heads = quality.answer_losses(loaded, [item], settings)
    of_layer, of_head = layers.set_index("layer").loss, heads.set_index(["layer", "head"]).loss
    assert len(of_head) == 3 * 6
    assert of_layer.index.tolist() == [0, 1, 2]
    assert of_layer.abs().max() > 1e-3

    every = quality.answer_loss(loaded, item, share=1.0, window=4, kernel=3, limit=64)
    assert every.loss.abs().max() < 1e-5

    answer, masks = [5, 9, 7], {}

    def visit(layer):
        for t in tiny.triples_of(layer):
            score = pooled(triples.dropkv(t), "max", 3)[:-4]
            masks.setdefault(t.layer, []).append(score.argsort(stable=True)[:30].tolist())

    triples.triples(loaded.model, ids, [39], visit, window=4)
    target = 1
    whole = ids + answer[:-1]

    def hidden(module, query, key, value, attention_mask, *, scaling, **_):
        n = query.shape[2]
        logits = query @ key.repeat_interleave(3, 1).mT * scaling
        logits = logits.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -torch.inf)
        if module.layer_idx == target:
            for head in hide:
                logits[0, head, 39:, masks[target][head]] = -torch.inf
        return (logits.softmax(-1) @ value.repeat_interleave(3, 1)).transpose(1, 2), None

    from transformers import AttentionInterface

    AttentionInterface.register("hidden", hidden)
    loaded.model.set_attn_implementation("hidden")
    values = []
    for hide in ((), range(6), (4,)):  # noqa: B007
        with torch.inference_mode():
            logits = loaded.model(torch.tensor([whole]), use_cache=False).logits[0, 39:]
        values.append(torch.nn.functional.cross_entropy(logits, torch.tensor(answer)).item())
    assert of_layer[target] == pytest.approx(values[1] - values[0], abs=1e-5)
    assert of_head[target, 4] == pytest.approx(values[2] - values[0], abs=1e-5)


def test_the_policies_of_our_own_are_found_by_file():
    root = Path(quality.__file__).resolve().parents[3]
    assert all((root / name.split(":")[0]).is_file() for name, _ in quality.VARIANTS.values() if ":" in name)
