"""The grid: every cell that can exist and none twice, a balanced choice of them, conditions that say what cells say."""

import itertools

import numpy as np
import pandas as pd
import pytest

from kvrepro.chapters.synthesis import grid
from kvrepro.chapters.synthesis.policies import OF_WINDOW
from kvrepro.chapters.synthesis.settings import Settings
from kvrepro.engine.policy import check
from kvrepro.errors import InputError

SETTINGS = Settings()


def test_the_grid_holds_every_cell_that_exists_once():
    """Counted by hand: window scorers have 3 x 3 more, position one split, a decode cap no quota."""
    cells = grid.cells(SETTINGS.kept)
    of_scorers = 3 * 9 * 4 + 4 * 4 + 1  # scorer, aggregator, pooling, split
    assert len(cells) == of_scorers * 3 * (2 * 2 + 1) * 3  # guard, regime and quota, share
    assert not cells.duplicated().any()
    assert (cells.aggregator.notna() == cells.scorer.isin(OF_WINDOW)).all()


def test_no_two_cells_ask_the_same_of_the_engine_and_all_can_be_asked():
    cells = grid.cells((0.1,)).to_dict("records")
    conditions = [grid.condition(cell, SETTINGS) for cell in cells]
    assert len(set(conditions)) == len(conditions)
    for condition in conditions:
        check(condition, prompt_tokens=1880)


@pytest.mark.parametrize("count", [40, 160])
def test_any_two_levels_meet_about_as_often_as_by_chance(count):
    chosen = grid.design(grid.cells(SETTINGS.kept), 200)[:count]  # every beginning is balanced
    assert not chosen.duplicated().any()
    for a, b in itertools.combinations(chosen, 2):
        both = chosen.dropna(subset=[a, b])
        table = pd.crosstab(both[a], both[b]).to_numpy()
        if {a, b} != {"quota", "regime"}:
            even = np.outer(table.sum(1), table.sum(0)) / table.sum()
            assert abs(table - even).max() <= 2.5, (a, b)


def test_published_methods_stand_at_every_share_and_others_are_refused():
    assert len(grid.published(grid.PUBLISHED, SETTINGS)) == len(grid.PUBLISHED) * 3
    for name in ("lru", "quest_pages"):
        with pytest.raises(InputError, match=name):
            grid.published([name], SETTINGS)
