"""The chapter's rows: items, prompts with parts, conditions that do what their cells say, rows beside their cells."""

from dataclasses import replace

import numpy as np
import pytest

import kvrepro as kv
from kvrepro.chapters.synthesis import grid, study
from kvrepro.chapters.synthesis.settings import Settings

SETTINGS = Settings(tokens=600, progress=False, workers=1)


@pytest.fixture(scope="module")
def loaded():
    return kv.load()


@pytest.fixture(scope="module")
def items(loaded):
    return study.questions(loaded, "tinyworld:needle_multikey,several,list_all", 3, SETTINGS)


def sets(loaded, item, conditions) -> list[np.ndarray]:
    """Who stays, bool [layers, kv_heads, tokens] of each condition."""
    prompt = study.with_parts(loaded, item, SETTINGS)
    [answers] = kv.generate(loaded.model, [prompt], conditions, max_new_tokens=1, stop_ids=(), kept_sets=True)
    return [np.stack(answer.kept_sets) for answer in answers]


def cell(**levels) -> dict:
    usual = {"aggregator": None, "pooling": None, "guard": "none", "split": "uniform", "quota": "none"}
    return usual | {"regime": "question seen", "kept": 0.1} | levels


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
