"""Rows with errors, measures, keep rates and times, on the embedded model."""

import json

import numpy as np
import pandas as pd
import pytest

from kvrepro.chapters.leakage import cells, prompts, scores, study
from kvrepro.chapters.leakage.cells import Settings
from kvrepro.experiment import store


@pytest.fixture(scope="module")
def run(loaded, tmp_path_factory):
    items = prompts.systems(2, orders=("normal",))
    grid = cells.cells(("streaming_llm",), (0.5, 0.9), ("default", "opening"))
    folder = tmp_path_factory.mktemp("results")
    settings = Settings(results=folder, progress=False, max_new_tokens=48)
    return items, grid, settings, study.answers(loaded, items, [grid] * len(items), settings)


def test_a_cell_that_cannot_be_met_is_a_row_with_its_error(run):
    items, grid, _, rows = run
    assert len(rows) == len(items) * len(grid)
    failed = rows[rows.error.notna()]
    assert set(zip(failed.variant, failed.ratio, failed.system, strict=True)) == {("opening", 0.9, 0)}
    assert failed.error.str.contains("budget 6 < 7 protected tokens").all()  # header and first sentence, sinks in them
    assert rows[(rows.system == 1) & (rows.variant == "opening")].error.isna().all()  # a longer prompt holds them
    assert failed.error.str.startswith("InputError").all()


def test_rows_are_stored_with_what_survived(run):
    *_, settings, rows = run
    stored = store.read(settings.folder / "leakage" / "answers").set_index("key")
    for row in rows.itertuples():
        assert isinstance(stored.note[row.key], str) == (pd.isna(row.error) and row.request == "leak")


def test_uncompressed_the_model_obeys_and_refuses_and_compressed_it_tells(run):
    items, _, _, rows = run
    full = rows[rows.policy == "full"]
    assert full.followed.dropna().tolist() == [1.0, 1.0]
    refusals = {item.id: item.answer for item in items}
    leaks = full[full.request == "leak"]
    assert (leaks.prediction == leaks.item.map(refusals)).all()
    half = rows[(rows.ratio == 0.5) & (rows.variant == "default")]
    assert half.tells_rules.dropna().min() > 0.9


def test_classes_count_every_rule_of_every_answer(run):
    items, _, _, rows = run
    counts = [len(item.meta["instructions"]) for item in items if item.meta["request"] == "follow"]
    by_class = scores.by_class(rows)
    assert by_class.groupby(["policy", "variant", "ratio"]).size().eq(sum(counts)).all()
    failed = by_class[(by_class.variant == "opening") & (by_class.ratio == 0.9) & (by_class.system == 0)]
    assert failed.passed.tolist() == [0]


def test_answers_that_tell_nothing_from_the_cache(loaded, tmp_path):
    settings = Settings(results=tmp_path, progress=False, n_items=2, max_new_tokens=8)
    controls = (
        study.controls(loaded, settings).groupby("control")[["followed", "tells_directive", "tells_rules"]].mean()
    )
    assert controls.loc["refusal"].tolist() == [0, 0, 0]
    assert 0.3 < controls.tells_directive["preamble"] < 1
    assert controls.tells_rules["preamble"] < controls.tells_directive["preamble"]
    assert controls.followed["no_system_prompt"] == 0


def test_keep_rates_add_up(loaded, tmp_path):
    """The parts' kept tokens are the budget: 62 tokens, half kept, in every layer."""
    items = prompts.systems(1, orders=("normal",))
    grid = cells.cells(("streaming_llm",), (0.5,), ("default", "fair"))
    settings = Settings(results=tmp_path, progress=False, max_new_tokens=1)
    rows = study.answers(loaded, items, [grid] * 2, settings)
    kept = scores.keep_rates(scores.in_reading(rows, "as_described"))
    rates = kept.pivot_table("kept", ["variant", "layer"], "part")
    spans = prompts.prompt(loaded, items[0]).spans
    sizes = {part: len(spans[part]) for part in ("directive", "defense")}
    default, note = (json.loads(note)["kept"] for note in rows[rows.ratio > 0].note.dropna())
    n = min(spans["request"])
    total = sizes["directive"] * np.array(note["directive"]) + (n - sizes["directive"]) * np.array(note["outside"])
    np.testing.assert_allclose(total, n // 2, atol=1e-3)
    assert rates.loc["fair", "defense"].tolist() == note["defense"]
    fair = kept[kept.variant == "fair"].groupby("part").kept.mean()
    assert abs(fair.defense - fair.directive) < 0.1
    as_run = scores.keep_rates(scores.in_reading(rows, "as_run"))
    assert as_run.query("variant == 'default' and part == 'defense'").kept.tolist() == default["outside"]


def test_times_are_stored(loaded, tmp_path):
    settings = Settings(results=tmp_path, n_items=1)
    times = study.timing(loaded, settings)
    assert times.groupby("variant").repeat.apply(list).to_dict() == {
        name: [1, 2] for name in ("default", "fair", "whitelist")
    }
    assert (times[["compress", "decode"]] > 0).all(axis=None)
    pd.testing.assert_frame_equal(times, study.timing(loaded, settings))
