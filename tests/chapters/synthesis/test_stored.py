"""Stored rows give back the factors of the cells that asked for them."""

import json

import pandas as pd
import pytest

import kvrepro as kv
from kvrepro.chapters.synthesis import grid, stored
from kvrepro.chapters.synthesis.settings import Settings
from kvrepro.errors import InputError
from kvrepro.experiment import store
from kvrepro.experiment.store import Store

NOTE = json.dumps({"held": 0.1, "freed": 0.5, "freed_compacted": 0.9, "evidence_heads": 0.3, "evidence_best": 1.0})


def test_rows_know_the_cell_that_they_belong_to(tmp_path):
    settings = Settings()
    cells = grid.design(grid.cells([0.1, 0.2]), 80)
    conditions = [grid.condition(cell, settings) for cell in cells.to_dict("records")]
    published = kv.Condition("snapkv", 0.1, kv.Prefill(), reading="as_described")
    earlier = kv.Condition(f"{grid.FILE}:UNIFORM", 0.1, kv.Prefill())  # named otherwise: no cell, and not published
    columns = {"model": "m", "task": "t", "token_f1": 0.5, "bytes_full": 100, "note": NOTE}
    with Store(tmp_path, "synthesis", "grid") as store:
        store.add([
            columns | condition.columns() | {"key": str(i), "item": "i"}
            for i, condition in enumerate([*conditions, published, earlier, kv.Condition()])
        ])  # fmt: skip
    rows = stored.rows(tmp_path)
    of_grid = rows[rows.kind == "grid"].reset_index(drop=True)
    factors = list(grid.FACTORS)
    pd.testing.assert_frame_equal(of_grid[factors].fillna("-"), cells[factors].fillna("-"), check_dtype=False)
    assert list(of_grid.kept) == list(cells.kept)
    assert rows.kind.value_counts().to_dict() == {"grid": len(cells), "published": 1, "full": 1}
    assert rows[rows.kind == "published"].method.item() == "snapkv"
    assert set(rows.bytes_kept) == {10.0}


def test_rows_of_an_earlier_checkpoint_of_that_name_are_left_out(tmp_path):
    columns = {"model": "m", "item": "i", "task": "t", "bytes_full": 100} | kv.Condition().columns()
    with Store(tmp_path, "synthesis", "grid") as written:
        for number, name in enumerate(["old", "new"]):
            written.add([columns | {"key": name, "model_hash": name, "token_f1": float(number), "note": NOTE}])
    assert stored.rows(tmp_path).token_f1.tolist() == [1.0]


def test_a_row_that_failed_says_nothing_of_who_stayed(tmp_path):
    columns = {"model": "m", "task": "t", "bytes_full": 100} | kv.Condition("snapkv", 0.1, kv.Prefill()).columns()
    with Store(tmp_path, "synthesis", "grid") as written:
        written.add([columns | {"key": "0", "item": "i", "token_f1": 0.5, "note": NOTE}])
        written.add([columns | {"key": "1", "item": "j", "error": "TimeLimit: after 3 seconds"}])
    rows = stored.tidy(store.read(tmp_path / "synthesis" / "grid.parquet")).set_index("item")
    assert rows.held.i == 0.1
    assert rows.loc["j", ["held", "bytes_kept", "score"]].isna().all()


def test_a_chapter_that_has_not_run_is_said_to_have_no_results(tmp_path):
    with pytest.raises(InputError, match="run the chapter first"):
        stored.rows(tmp_path)
