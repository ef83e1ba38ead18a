"""The chapter's rows: items, prompts with parts, conditions that do what their cells say, rows beside their cells."""

import json
from dataclasses import replace

import numpy as np
import pytest

import kvrepro as kv
from kvrepro.chapters.synthesis import grid, kept, study
from kvrepro.chapters.synthesis.settings import Settings
from kvrepro.errors import InputError
from kvrepro.experiment import models

SETTINGS = Settings(tokens=600, progress=False, workers=1)


@pytest.fixture(scope="module")
def loaded():
    return kv.load()


@pytest.fixture(scope="module")
def items(loaded):
    return study.questions(loaded, "tinyworld:needle_multikey,several,list_all", 3, SETTINGS)


def test_a_prompt_too_short_for_the_grid_is_left_out_and_the_others_run(loaded, tmp_path, capsys):
    room = "The key lies in room {}. " * 60
    rows = [
        {"id": name, "context": context, "question": "Where is the key?", "answer": "there"}
        for name, context in (("long", room), ("short", room[:250]), ("also long", room))
    ]
    items, short = tmp_path / "own.jsonl", tmp_path / "short.jsonl"
    items.write_text("".join(json.dumps(row) + "\n" for row in rows))
    short.write_text(json.dumps(rows[1]) + "\n")
    settings = replace(SETTINGS, results=tmp_path, kept=(0.1,))
    size = study.Size(3, 4, 4)
    answered, of_heads = study.of_family(loaded, [], str(items), size, ["key_diff"], settings)
    assert set(answered.item) == set(of_heads["item"]) == {"long", "also long"}
    assert set(study.without_cache(loaded, str(items), 3, settings)["item"]) == {"long", "also long"}
    printed = capsys.readouterr().out
    assert printed.count("synthesis: 1 of 3 items left out, the first because: item short: budget") == 1
    with pytest.raises(InputError, match="^item short: budget .* protected tokens"):
        study.questions(loaded, str(short), 1, settings)


def sets(loaded, item, conditions) -> list[np.ndarray]:
    """Who stays, bool [layers, kv_heads, tokens] of each condition."""
    prompt = study.with_parts(loaded, item, SETTINGS)
    [answers] = kv.generate(loaded.model, [prompt], conditions, max_new_tokens=1, stop_ids=(), kept_sets=True)
    return [np.stack(answer.kept_sets) for answer in answers]


def cell(**levels) -> dict:
    usual = {"aggregator": None, "pooling": None, "guard": "none", "split": "uniform", "quota": "none"}
    return usual | {"regime": "question seen", "kept": 0.1} | levels


def test_long_answers_and_their_evidence_are_cut_and_short_ones_have_room(loaded, items):
    short, _, long = items
    whole = kv.load_items("tinyworld:list_all", n_items=1, seed=0, tokens=600)[0]
    assert long.answer.split() == whole.answer.split()[:24]
    assert loaded.tokenizer.decode(loaded.tokenizer.encode(long.answer)[: long.meta["max_new_tokens"]]) == long.answer
    evidence = [span for span in long.spans if span.name == "evidence"]
    entries = len([span for span in whole.spans if span.name == "evidence"])
    assert len(evidence) == np.ceil(entries * 24 / len(whole.answer.split())) < entries
    assert short.meta["max_new_tokens"] == len(loaded.tokenizer.encode(short.answer)) + SETTINGS.interval


def test_parts_are_what_stands_before_the_question_cut_evenly(loaded, items):
    prompt = study.with_parts(loaded, items[0], SETTINGS)
    parts = [prompt.spans[name] for name in grid.part_names(SETTINGS)]
    assert sum(parts, []) == list(range(min(prompt.spans["question"])))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_composed_policies_are_the_catalogues_where_they_coincide(loaded, items):
    given = [
        (cell(scorer="key difference"), kv.Condition("key_diff", 0.1, kv.Prefill())),
        (cell(scorer="position", split=None, guard="sinks"), kv.Condition("streaming_llm", 0.1, kv.Prefill())),
        (cell(scorer="attention of all"), kv.Condition("h2o", 0.1, kv.Prefill())),
        (cell(scorer="random"), kv.Condition("random", 0.1, kv.Prefill(), reading="as_described")),
    ]
    for levels, published in given:
        ours, theirs = sets(loaded, items[0], [grid.condition(levels, SETTINGS), published])
        assert (ours == theirs).all(), levels


def test_every_split_keeps_the_budget_and_one_set_is_one_set(loaded, items):
    of_window = {"scorer": "attention", "aggregator": "mean", "pooling": "max"}
    by_split = sets(loaded, items[1], [grid.condition(cell(**of_window, split=s), SETTINGS) for s in grid.SPLITS])
    uniform, per_head, joint, one_set = by_split
    budget = uniform[0, 0].sum()
    assert (uniform.sum(-1) == budget).all()
    assert (per_head.sum((1, 2)) == 2 * budget).all()
    assert per_head.sum(-1).std() > 0
    assert joint.sum() == uniform.sum()
    assert joint.sum((1, 2)).std() > 0
    assert (one_set == one_set[:1, :1]).all()
    assert one_set[0, 0].sum() == budget


def test_guards_and_quotas_hold(loaded, items):
    free = {"scorer": "random", "kept": 0.2}
    ends, quota = sets(loaded, items[0], [grid.condition(cell(**free, **more), SETTINGS) for more in (
        {"guard": "ends"}, {"quota": "parts"}
    )])  # fmt: skip
    side = int(0.1 * ends[0, 0].sum())
    assert side >= 4
    assert ends[..., :side].all()
    assert ends[..., -side:].all()
    prompt = study.with_parts(loaded, items[0], SETTINGS)
    counts = [quota[..., prompt.spans[name]].sum(-1) for name in grid.part_names(SETTINGS)[:-1]]
    assert all((abs(count - counts[0]) <= 1).all() for count in counts)


def test_rows_stand_beside_their_cells(loaded, items, tmp_path, capsys):
    settings = replace(SETTINGS, results=tmp_path)
    rows = study.answers(loaded, items, 12, ["snapkv"], settings)
    assert len(rows) == 3 * (12 + 2 + 1)
    assert "snapkv 5% prefill as described is left out: budget 29 < 32" in capsys.readouterr().out
    assert not rows.duplicated(["item", "kind", "method", *grid.factors(())]).any()
    evicting = rows[rows.kind != "full"]
    assert (abs(evicting.held - evicting.kept.astype(float)) < 0.01).all()
    assert (rows[rows.kind == "full"].held == 1).all()
    assert (evicting.freed <= evicting.freed_compacted).all()
    one_set = evicting[evicting.split == "one set"]
    assert one_set.freed.mean() > evicting[evicting.split == "uniform"].freed.mean()
    random = study.answers(loaded, items, 12, ["snapkv"], settings)
    assert random.score.tolist() == rows.score.tolist()  # read, not computed


def test_resamples_that_no_memory_holds_are_refused():
    with pytest.raises(InputError, match="^draws 1000000000000: "):
        Settings(draws=10**12)


def test_a_family_is_named_or_the_profiles(tmp_path):
    others = set(models.embedded())
    assert set(study.family(models.DEFAULT, None, "full")) == others
    assert study.family(models.DEFAULT, None, "quick")[0] == models.DEFAULT
    assert study.family("Qwen/Qwen2.5-3B", None, "full") == ["Qwen/Qwen2.5-3B"]
    assert study.family("a", ["b", "a", "b"], "quick") == ["a", "b"]
    assert study.size("quick", 3, 12) == study.Size(3, 12, 12)


def test_sliding_layers_and_single_heads_leave_cells_out():
    sliding = grid.cells_of(kv.load("small-sliding").model, (0.1,))
    assert "one set" not in set(sliding.split)
    single = grid.cells_of(kv.load("small-mqa").model, (0.1,))
    assert "per head" not in set(single.split)
    assert set(kept.COMPARED[:3]) <= set(grid.RIVALS)


def test_a_dry_run_says_what_it_would_take_and_stores_nothing(loaded, tmp_path, capsys):
    settings = replace(SETTINGS, results=tmp_path, dry_run=True, kept=(0.2,))
    study.of_family(loaded, [], "tinyworld:needle", study.Size(1, 3, 3), ["key_diff"], settings)
    printed = capsys.readouterr().out
    assert "synthesis/grid: 5 of 5 rows" in printed
    assert "synthesis/kept: 1 of 1 items" in printed
    assert not list(tmp_path.rglob("*.parquet"))


def test_controls_answer_the_common_items_without_a_cache(loaded, tmp_path):
    settings = replace(SETTINGS, results=str(tmp_path))
    rows = study.without_cache(loaded, "tinyworld:needle_multikey,several,list_all", 3, settings)
    assert set(rows.control) == {"first_word", "copy", "refusal", "no_passage"}
    assert len(rows) == 3 * 4
    assert rows.score.notna().all()
    first = rows[rows.control == "first_word"].set_index("task").score
    assert first["list_all"] < first["needle_multikey"] < 1  # one word of four is worth more than one of 24
