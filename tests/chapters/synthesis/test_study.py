"""The grid, and the chapter's rows: every cell once, a balanced choice, conditions that do what their cells say, rows
beside their cells, and what heads keep, on closed forms and against a plain softmax."""

import itertools
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from conditions import check

import kvrepro as kv
from kvrepro.chapters.reclamation.study import reclaim
from kvrepro.chapters.synthesis import study
from kvrepro.chapters.synthesis.policies import OF_WINDOW, SPLITS
from kvrepro.engine.condition import Generation, Prompt
from kvrepro.experiment import store

SETTINGS = study.Settings(tokens=600, progress=False, workers=1)


def test_the_grid_holds_every_cell_that_exists_once():
    """Counted by hand: window scorers have 3 x 3 more, position one split, a decode cap no quota."""
    cells = study.cells(SETTINGS.kept)
    of_scorers = 3 * 9 * 4 + 4 * 4 + 1  # scorer, aggregator, pooling, split
    assert len(cells) == of_scorers * 3 * (2 * 2 + 1) * 3  # guard, regime and quota, share
    assert not cells.duplicated().any()
    assert (cells.aggregator.notna() == cells.scorer.isin(OF_WINDOW)).all()


def test_no_two_cells_ask_the_same_of_the_engine_and_all_can_be_asked():
    cells = study.cells((0.1,)).to_dict("records")
    conditions = [study.condition(cell, SETTINGS) for cell in cells]
    assert len(set(conditions)) == len(conditions)
    for condition in conditions:
        check(condition, 1880)


@pytest.mark.parametrize("count", [40, 160])
def test_any_two_levels_meet_about_as_often_as_by_chance(count):
    chosen = study.design(study.cells(SETTINGS.kept), 200)[:count]  # every beginning is balanced
    assert not chosen.duplicated().any()
    for a, b in itertools.combinations(chosen, 2):
        both = chosen.dropna(subset=[a, b])
        table = pd.crosstab(both[a], both[b]).to_numpy()
        if {a, b} != {"quota", "regime"}:
            even = np.outer(table.sum(1), table.sum(0)) / table.sum()
            assert abs(table - even).max() <= 2.5, (a, b)


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
    parts = [prompt.spans[name] for name in SETTINGS.part_names]
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
        ours, theirs = sets(loaded, items[0], [study.condition(levels, SETTINGS), published])
        assert (ours == theirs).all(), levels


def test_every_split_keeps_the_budget_and_one_set_is_one_set(loaded, items):
    of_window = {"scorer": "attention", "aggregator": "mean", "pooling": "max"}
    by_split = sets(loaded, items[1], [study.condition(cell(**of_window, split=s), SETTINGS) for s in SPLITS])
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
    guarded, parted = cell(**free, guard="ends"), cell(**free, quota="parts")
    ends, quota = sets(loaded, items[0], [study.condition(levels, SETTINGS) for levels in (guarded, parted)])
    side = int(0.1 * ends[0, 0].sum())
    assert side >= 4
    assert ends[..., :side].all()
    assert ends[..., -side:].all()
    prompt = study.with_parts(loaded, items[0], SETTINGS)
    counts = [quota[..., prompt.spans[name]].sum(-1) for name in SETTINGS.part_names[:-1]]
    assert all((abs(count - counts[0]) <= 1).all() for count in counts)


def test_rows_stand_beside_their_cells(loaded, items, tmp_path):
    settings = replace(SETTINGS, results=tmp_path)
    rows = study.answers(loaded, items, 12, ["snapkv"], settings)
    assert len(rows) == 3 * (12 + 3 + 1)
    assert rows[rows.held.isna()].method.tolist() == ["snapkv"] * 3  # 29 tokens, fewer than its window has
    assert not rows.duplicated(["item", "kind", "method", *study.factors(())]).any()
    evicting = rows[(rows.kind != "full") & rows.held.notna()]
    assert (abs(evicting.held - evicting.kept.astype(float)) < 0.01).all()
    assert (rows[rows.kind == "full"].held == 1).all()
    assert (evicting.freed <= evicting.freed_compacted).all()
    one_set = evicting[evicting.split == "one set"]
    assert one_set.freed.mean() > evicting[evicting.split == "uniform"].freed.mean()
    assert study.answers(loaded, items, 12, ["snapkv"], settings).score.equals(rows.score)  # read, not computed
    names = ["policy", "share", "prefix", "regime", "spans", "switches"]
    stored = store.read(tmp_path / "synthesis" / "grid").to_dict("records")
    asked = {(row["item"], *(row[name] for name in names)): row["prediction"] for row in stored}
    for row in rows[rows.kind == "grid"].to_dict("records"):
        columns = study.condition(row, settings).columns()
        assert asked[row["item"], *(columns[name] for name in names)] == row["prediction"]


def test_blocks_are_counted_as_in_the_chapter_on_reclamation():
    keep = np.random.default_rng(0).random((3, 2, 100)) < 0.03
    generation = Generation([], [], [], "", 0, 0, 0, 0, 0.0, 0.0, "torch", kept_sets=list(keep))
    prompt = Prompt(list(range(100)), {"evidence": [3, 4, 60]})
    measures, reclaimed = study.kept_of(None, prompt, generation, 16), reclaim(keep, 16)
    assert measures["freed"] == pytest.approx(reclaimed["share_plain"])
    assert measures["freed_compacted"] == pytest.approx(reclaimed["share_repack"])
    assert measures["held"] == pytest.approx(1 - reclaimed["evicted"])
    assert measures["evidence_heads"] == pytest.approx(keep[..., [3, 4, 60]].mean())


def layer(keys: torch.Tensor, mask: list[bool], p: list[float]) -> dict[str, float]:
    """One head with values that are unit vectors, one per token."""
    tokens = len(mask)
    measures = study.of_layer(
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


def test_layers_hold_the_attention_of_the_models_own_last_query():
    loaded = kv.load()
    [item] = kv.load_items("tinyworld:needle", n_items=1, seed=0, tokens=300)
    ids = kv.build_prompt(item, loaded.tokenizer, 400).ids
    layers = study.last_attention(loaded, ids)
    loaded.model.set_attn_implementation("eager")
    attentions = loaded.model(torch.tensor([ids]), output_attentions=True).attentions
    for number, (key, value, p) in layers.items():
        assert key.shape == value.shape == (2, len(ids), 64)
        torch.testing.assert_close(p.flatten(0, 1), attentions[number][0, :, -1], atol=1e-4, rtol=1e-3)
