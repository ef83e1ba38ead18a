"""The chapter's conditions, and its studies on a small random checkpoint and on few items of the embedded model."""

import copy
from dataclasses import replace

import checkpoint
import pytest
import synthetic
import torch
from conditions import check

from kvrepro.chapters.protection import study
from kvrepro.chapters.protection.study import Settings
from kvrepro.engine.condition import Condition
from kvrepro.engine.generate import generate
from kvrepro.errors import InputError
from kvrepro.experiment import claims, data, models
from kvrepro.experiment.data import Item
from kvrepro.experiment.prompt import passage_messages

PASSAGE = "The red door is open and the blue door is shut. " * 60
ITEM = Item(
    "door-0", "doors", passage_messages(PASSAGE, "Which door?")[0], "red", context=PASSAGE, question="Which door?"
)
SETTINGS = Settings(max_new_tokens=8)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return models.load(str(checkpoint.save(tmp_path_factory.mktemp("hub") / "small", context=1024)))


@pytest.fixture(scope="module")
def tiny():
    return models.load()


def test_the_chapter_runs_every_study_without_repeating_a_condition():
    papers = study.capped(study.SEVEN, (128, 256, 512), replace(SETTINGS, reading="as_run"))
    assert len(papers) == len(set(papers)) == 42
    conditions = study.grid(SETTINGS)
    assert conditions[0] == Condition()
    assert len(conditions) == len(set(conditions)) == 114
    for sides in (study.SIDES, study.SWEEP):
        assert set(study.capped(["lru"], [256], SETTINGS, sides)) <= set(conditions)
    assert set(papers) <= set(conditions)
    assert sum(condition.policy == "full" for condition in conditions) == 1


def test_fewer_questions_shrink_the_other_studies_with_them():
    studies = ("main", "real", "context", "attention")
    assert [SETTINGS.size(name) for name in studies] == [40, 12, 8, 8]
    assert [replace(SETTINGS, n_items=4).size(name) for name in studies] == [4, 2, 1, 1]
    assert replace(SETTINGS, n_items=900, profile="full").size("context") == 160


def test_every_condition_can_be_met_at_every_length():
    for tokens in SETTINGS.lengths:
        for condition in study.capped(study.SEVEN, [tokens // 8], SETTINGS):
            check(condition, tokens)


def test_retention_tells_what_each_condition_keeps(loaded):
    settings = replace(SETTINGS, policies=("lru", "random_sample"), capacities=(64,))
    kept = study.retention(loaded, ITEM, settings)
    tokens = len(data.build_prompt(ITEM, loaded.tokenizer, study.limit_of(loaded, [ITEM], settings)).ids)
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
    settings = Settings(items=str(items), n_items=1, results=tmp_path, progress=False, max_new_tokens=2)
    frame = study.context(loaded, replace(settings, lengths=[300, 600, 4000]))
    assert frame.length.unique().tolist() == [300, 600]
    assert (frame.prompt_tokens <= frame.length).all()
    assert (frame.prompt_tokens > frame.length * 0.95).all()
    assert set(frame.capacity.dropna()) == {37, 75}
    [longest] = study.context(loaded, replace(settings, lengths=[4000])).length.unique()
    assert 0.95 * 1022 < longest <= 1022  # what the model's context leaves


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


def test_a_temperature_near_zero_gives_the_greedy_answers(tiny):
    [item] = data.load_items("tinyworld:needle", 1, seed=6, tokens=200)
    conditions = study.capped(["lru"], [40], replace(SETTINGS, reading="as_run"))
    cold = study.samples_of(tiny, item, conditions, limit=512, seed=0, temperature=1e-4, max_new_tokens=8)
    prompt = data.build_prompt(item, tiny.tokenizer, 512)
    [greedy] = generate(tiny.model, [prompt], conditions, max_new_tokens=8, stop_ids=models.stop_ids(tiny))
    texts = [tiny.tokenizer.decode(answer.tokens, skip_special_tokens=True).strip() for answer in greedy]
    assert cold.prediction.tolist() == [texts[0]] * 3 + [texts[1]] * 3
    assert cold.n_generated.tolist()[::3] == [len(answer.tokens) for answer in greedy]


def test_a_single_reduction_stands_beside_lru_under_the_cap(tiny, tmp_path):
    settings = Settings(results=tmp_path, progress=False, max_new_tokens=24, workers=1, capacities=(64,))
    items = data.load_items("tinyworld:needle", 6, seed=5, tokens=200)
    conditions = study.capped(["lru", "random_sample"], [64], replace(settings, reading="as_run"))
    rows = study.answers("main", tiny, items, [Condition(), *conditions], settings)
    both = study.once(tiny, items, rows, settings)
    lru = both[both.policy == "lru"].pivot(index="item", columns=["regime", "prefix"], values="policy_calls")
    assert (lru[study.ONCE] == 1).all(axis=None)
    assert (lru["shared cap"] > 1).any(axis=None)
    book = claims.load_claims("protection")
    book["claims"] = [claim for claim in book["claims"] if claim["id"] == "P48"]
    table = synthetic.verdicts(book, settings, main=rows, once=both).set_index("claim")
    again = int((lru["shared cap", settings.protect_frac] > 1).sum())
    assert table.n["P48"] == again or table.note["P48"].startswith(f"{again} items: an interval needs")
