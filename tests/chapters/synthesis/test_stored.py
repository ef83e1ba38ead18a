"""Stored rows give back the factors of the cells that asked for them."""

import json

import pandas as pd

import kvrepro as kv
from kvrepro.chapters.synthesis import grid, study
from kvrepro.chapters.synthesis.settings import Settings
from kvrepro.experiment import store

NOTE = json.dumps({"held": 0.1, "freed": 0.5, "freed_compacted": 0.9, "evidence_heads": 0.3})


def test_rows_know_the_cell_that_they_belong_to(tmp_path):
    settings = Settings()
    cells = grid.design(grid.cells([0.1, 0.2]), 80)
    conditions = [grid.condition(cell, settings) for cell in cells.to_dict("records")]
    published = kv.Condition("snapkv", 0.1, kv.Prefill(), reading="as_described")
    columns = {"model": "m", "task": "t", "token_f1": 0.5, "note": NOTE}
    every = enumerate([*conditions, published, kv.Condition()])
    store.add(tmp_path, [columns | condition.columns() | {"key": str(i), "item": "i"} for i, condition in every])
    rows = study.tidy(store.read(tmp_path))
    of_grid = rows[rows.kind == "grid"].reset_index(drop=True)
    factors = list(grid.FACTORS)
    pd.testing.assert_frame_equal(of_grid[factors].fillna("-"), cells[factors].fillna("-"), check_dtype=False)
    assert list(of_grid.kept) == list(cells.kept)
    assert rows.kind.value_counts().to_dict() == {"grid": len(cells), "published": 1, "full": 1}
    assert rows[rows.kind == "published"].method.item() == "snapkv"
