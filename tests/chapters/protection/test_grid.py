"""Grids: every condition once, nothing impossible, the studies' cells all there."""

import pytest

from kvrepro.chapters.protection import grid
from kvrepro.chapters.protection.grid import PROTECTION_SEVEN
from kvrepro.engine.condition import Condition
from kvrepro.engine.policy import check
from kvrepro.errors import InputError


def test_the_paper_grid_has_42_conditions_and_the_full_cache():
    conditions = grid.main((128, 256, 512), PROTECTION_SEVEN, 0.10, "as_run")
    assert len(conditions) == len(set(conditions)) == 43
    assert conditions[0] == Condition()


def test_the_chapter_runs_every_study_without_repeating_a_condition():
    conditions = grid.protection()
    assert len(conditions) == len(set(conditions))
    one_side = [grid.sided(parts, 256, 0.10, "both") for parts in (grid.SIDES, [(k, k) for k in grid.SWEEP])]
    for part in (*one_side, grid.faithful(256, 0.10, "both")):
        assert set(part) <= set(conditions)
    assert sum(condition.policy == "full" for condition in conditions) == 1


def test_every_condition_can_be_met_at_every_length():
    for tokens in (500, 1000, 1900, 3800):
        for condition in grid.context(tokens):
            check(condition, tokens)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"reading": "neither"}, "reading 'neither'"),
        ({"policies": ("lru", "nonsense")}, "unknown policy 'nonsense'"),
        ({"capacities": (6,)}, "budget 6 < 8 protected tokens"),
        ({"capacities": ()}, r"capacities \(\): give a list of at least one"),
        ({"capacities": 128}, "capacities 128: "),
        ({"capacities": [128, 128]}, r"capacities \[128, 128\]: give a list of at least one, each once"),
    ],
)
def test_bad_parameters_raise_before_anything_runs(given, message):
    with pytest.raises(InputError, match=message):
        grid.protection(**given)
