"""Studies beside the main run, on a small random checkpoint."""

import copy
from dataclasses import replace

import checkpoint
import pytest
import torch

from kvrepro.chapters.protection import study
from kvrepro.chapters.protection.settings import Settings
from kvrepro.errors import InputError
from kvrepro.experiment import data, models
from kvrepro.experiment.data import Item
from kvrepro.experiment.prompt import passage_messages

PASSAGE = "The red door is open and the blue door is shut. " * 60
ITEM = Item(
    "door-0", "doors", passage_messages(PASSAGE, "Which door?")[0], "red", context=PASSAGE, question="Which door?"
)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return models.load(str(checkpoint.save(tmp_path_factory.mktemp("hub") / "small", context=1024)))


def test_retention_tells_what_each_condition_keeps(loaded):
    kept = study.retention(loaded, ITEM, [64], ("lru", "random_sample"), "both", Settings(max_new_tokens=8))
    tokens = kept.attrs["tokens"]
    assert kept.groupby(["policy", "reading", "protected"]).size().tolist() == [64] * 8
    newest = kept[(kept.policy == "lru") & (kept.reading == "as_described") & ~kept.protected].position
    assert sorted(newest) == list(range(tokens - 64, tokens))
    strings = sorted(range(tokens), key=str)[-64:]
    band = kept[(kept.policy == "lru") & (kept.reading == "as_run") & ~kept.protected].position
    assert sorted(band) == sorted(strings)
    ends = kept[kept.protected].groupby(["policy", "reading"]).position
    assert (ends.min() == 0).all()
    assert (ends.max() == tokens - 1).all()


def test_context_cuts_passages_to_each_length_and_leaves_out_what_does_not_fit(loaded, tmp_path):
    items = tmp_path / "doors.jsonl"
    items.write_text(
        '{"context": "' + PASSAGE * 3 + '", "question": "Which door?", "answer": "red", "domain": "doors"}\n'
    )
    settings = Settings(results=tmp_path, progress=False, max_new_tokens=2, lengths=[300, 600, 4000])
    frame = study.context(loaded, str(items), 1, "both", settings)
    assert frame.length.unique().tolist() == [300, 600]
    assert (frame.prompt_tokens <= frame.length).all()
    assert (frame.prompt_tokens > frame.length * 0.95).all()
    assert set(frame.capacity.dropna()) == {37, 75}
    with pytest.raises(
        InputError, match=r"^lengths \[4000\]: with 2 new tokens none fits 1024 positions, give shorter"
    ):
        study.questions(loaded, str(items), 1, replace(settings, lengths=[4000]))  # before anything is computed


def test_attention_by_region_sums_to_one_and_matches_eager(loaded):
    ids = data.build_prompt(ITEM, loaded.tokenizer, 200).ids
    table = study.attention_by_region(loaded, ITEM, 5, 200)
    assert set(table.region) == {"sink", "prefix", "middle", "suffix"}
    total = table.groupby(["layer", "head"])[["mass", "uniform"]].sum()
    assert total.sub(1).abs().max().max() < 1e-5
    eager = copy.deepcopy(loaded.model)
    eager.set_attn_implementation("eager")
    p = torch.stack(eager(torch.tensor([ids]), output_attentions=True).attentions)[:, 0].detach()
    row = table[(table["layer"] == 1) & (table["head"] == 3)].set_index("region")
    received = p[1, 3].mean(0)  # over all queries
    assert row.mass["sink"] == pytest.approx(received[0].item(), abs=1e-5)
    assert row.mass["prefix"] == pytest.approx(received[1:5].sum().item(), abs=1e-5)
    assert row.mass["suffix"] == pytest.approx(received[-5:].sum().item(), abs=1e-5)
    assert row.uniform["sink"] == pytest.approx(sum(1 / t for t in range(1, len(ids) + 1)) / len(ids))
    with pytest.raises(InputError, match="100 tokens at either end leave no middle of"):
        study.attention_by_region(loaded, ITEM, 100, 200)


def test_queries_that_attend_evenly_give_every_region_its_even_share(loaded):
    """In layers that see all earlier tokens, and in layers that see the last 32."""
    config = copy.deepcopy(loaded.model.config)
    config.use_sliding_window, config.sliding_window = True, 32
    config.layer_types = ["full_attention", "sliding_attention"]
    even = type(loaded.model)(config).eval()
    for layer in even.model.layers:
        layer.self_attn.q_proj.weight.data.zero_()
        layer.self_attn.q_proj.bias.data.zero_()
    table = study.attention_by_region(replace(loaded, model=even), ITEM, 5, 200)
    shares = table.groupby(["layer", "region"])[["mass", "uniform"]].mean().unstack("layer")
    assert (shares["mass"] - shares.uniform).abs().max().max() < 1e-5
    assert shares.uniform.loc["sink", 0] > 1.2 * shares.uniform.loc["sink", 1] > 0
