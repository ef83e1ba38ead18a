"""Studies beside the main run, on a small random checkpoint."""

import copy
import json
import re
from dataclasses import replace

import checkpoint
import pytest
import torch

from kvrepro.chapters.protection import study
from kvrepro.chapters.protection.settings import Settings
from kvrepro.engine.condition import Condition
from kvrepro.errors import InputError
from kvrepro.experiment import data, models
from kvrepro.experiment.data import Item

PASSAGE = "The red door is open and the blue door is shut. " * 60
ITEM = Item(
    "door-0", "doors", data._passage_messages(PASSAGE, "Which door?")[0], "red", context=PASSAGE, question="Which door?"
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


def test_a_policy_that_protects_more_than_the_budget_keeps_no_positions(loaded):
    kept = study.retention(loaded, ITEM, [48], ["lru", "snapkv"], "as_run", Settings(max_new_tokens=8))
    assert set(kept.policy) == {"lru"}
    assert study.retention(loaded, ITEM, [48], ["snapkv"], "as_run", Settings(max_new_tokens=8)).empty


def test_items_are_spread_over_all_tasks_whatever_their_number():
    assert study.spread("abcdef", 3) == ["a", "c", "e"]
    assert study.spread("abc", 5) == ["a", "b", "c"]
    assert study.spread("", 5) == []
    for name, count, few in (("long", 40, 16), ("all", 200, 160), ("all", 300, 160), ("all", 480, 160)):
        items = data.load_items(f"tinyworld:{name}".removesuffix(":all"), count, tokens=300)
        assert {item.task for item in study.spread(items, few)} == {item.task for item in items}


def test_attention_takes_items_evenly_and_sums_to_one(loaded, tmp_path):
    items = [Item(f"door-{i}", ITEM.task, ITEM.messages, "red", context=PASSAGE, question="Which?") for i in range(6)]
    table = study.attention(loaded, items, 4, 60, Settings(tmp_path, max_new_tokens=8))
    assert table["item"].unique().tolist() == ["door-0", "door-1", "door-3", "door-4"]
    sums = table.groupby(["item", "layer", "head"]).mass.sum()
    assert sums.to_numpy() == pytest.approx(1.0, abs=1e-4)


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


def test_items_shorter_than_the_guards_are_left_out_of_every_study(loaded, tmp_path, capsys):
    rows = [
        {"id": name, "context": context, "question": "Which?", "answer": "red"}
        for name, context in (("short", "Red."), ("long", PASSAGE))
    ]
    items = tmp_path / "doors.jsonl"
    items.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = Settings(tmp_path, progress=False, max_new_tokens=2, protect_frac=0.4)
    conditions = study.grid.main([400], ["lru"], 0.4, "as_run")
    questions = study.questions(loaded, str(items), 2, settings, conditions)
    assert [item.id for item in questions] == ["long"]
    assert "protection: 1 of 2 items left out, the first because: item short: prompt of" in capsys.readouterr().out
    assert len(study.questions(loaded, str(items), 2, settings)) == 2  # the full cache takes any


def test_prompts_with_a_passage_stop_at_the_papers_length():
    class Long:
        context, name = 32_768, "long"

    message = Item("m", "t", ITEM.messages, "a")
    assert study.paper_limit(Long, [ITEM], 128) == 1920
    assert study.paper_limit(Long, [message], 128) == 32_640


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


def chats(path, *words):
    """A file of messages with so many words each; a passage where the number is negative."""
    rows = [
        {"messages": [{"role": "user", "content": "door " * n}], "answer": "red"}
        if n > 0
        else {"context": "door " * -n, "question": "Which?", "answer": "red"}
        for n in words
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_a_length_is_asked_of_prompts_that_fill_it(loaded, tmp_path, capsys):
    settings = Settings(results=tmp_path, progress=False, max_new_tokens=2, lengths=(300, 600))
    items = chats(tmp_path / "own.jsonl", 270, 20, -700, -10)
    frame = study.context(loaded, items, 4, "as_run", settings)
    assert (frame.prompt_tokens >= 0.9 * frame.length).all()
    assert (frame.prompt_tokens <= frame.length).all()
    filling = frame.groupby("length")["item"].unique().map(list).to_dict()
    assert filling == {300: ["own-000", "own-002"], 600: ["own-002"]}
    short = r"item own-\d+ has \d+ prompt tokens, less than 90% of 300"
    assert re.search(f"{items}: 2 of 4 items left out, the first because: {short}", capsys.readouterr().out)


def test_a_length_that_no_prompt_fills_is_not_asked_and_where_all_are_so_the_longest_counts(loaded, tmp_path, capsys):
    settings = Settings(results=tmp_path, progress=False, max_new_tokens=2, lengths=(300, 900))
    items = chats(tmp_path / "own.jsonl", 100, 102)
    [longest] = study.context(loaded, items, 2, "as_run", settings).length.unique()
    assert longest == max(len(data.build_prompt(i, loaded.tokenizer, 10**6).ids) for i in data.load_items(items))
    printed = capsys.readouterr().out
    assert "length 900 is left out" in printed
    assert f"fill none of [300, 900] tokens: asked at {longest}, their longest" in printed


def test_messages_beside_passages_are_no_longer_than_the_passages_are_cut_to(loaded, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(study, "PAPER_TOKENS", 402)
    monkeypatch.setattr(study, "WORLD_TOKENS", 400)
    settings = Settings(results=tmp_path, progress=False, max_new_tokens=2)
    items = chats(tmp_path / "own.jsonl", 100, 500, -600)
    questions = study.questions(loaded, items, 3, settings)
    assert [item.id for item in questions] == ["own-000", "own-002"]
    left_out = r"1 of 3 items left out, the first because: item own-001 has \d+ prompt tokens > limit 400"
    assert re.search(left_out, capsys.readouterr().out)
    assert not study.main(loaded, questions, [Condition()], settings).error.notna().any()
