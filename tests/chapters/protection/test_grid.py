"""Grids: every condition once, nothing impossible, the studies' cells all there."""

import pytest

from kvrepro.chapters.protection import grid
from kvrepro.chapters.protection.grid import PROTECTION_SEVEN
from kvrepro.engine.condition import Condition
from kvrepro.engine.policy import OWN, Policy, find
from kvrepro.engine.rule import check, guarded
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


def test_absolute_guards_are_as_long_at_every_capacity():
    absolute = grid.absolute((128, 256, 512))
    conditions = [condition for size, k in absolute for condition in grid.sided([(k, k)], size, 0.10, "as_run")]
    assert {guarded(c, c.budget, find("lru").reading("as_run")) for c in conditions} == {(25, 25)}
    assert set(conditions) <= set(grid.protection())
    assert grid.absolute((100, 256, 600)) == grid.absolute((256,)) == []


def test_side_rows_match_in_budget():
    matched = [c for c in grid.sided(grid.SIDES, 256, 0.10, "as_run") if c.prefix + c.suffix > 0.15]
    assert sorted((c.prefix, c.suffix) for c in matched) == [(0.0, 0.2), (0.1, 0.1), (0.2, 0.0)]
    sides = [guarded(c, 256, find("lru").reading("as_run")) for c in matched]
    assert set(map(sum, sides)) <= {50, 51}  # floor(25.6) twice against floor(51.2)


@pytest.mark.parametrize(("reading", "n"), [("as_run", 1), ("as_described", 1), ("both", 2)])
def test_readings(reading, n):
    assert len({condition.reading for condition in grid.sided(grid.SIDES, 256, 0.10, reading)}) == n


def test_every_condition_can_be_met_at_every_length():
    for tokens in (500, 1000, 1900, 3800):
        for condition in grid.context(tokens):
            check(condition, tokens)


def test_sizes():
    assert grid.size("full").items == 480
    assert grid.size("quick", 8) == grid.Size(8, 2, 4)
    assert grid.size("quick", 500) == grid.Size(500, 8, 16)


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


@pytest.mark.parametrize("arguments", [{"capacities": "[64]"}, {"policies": "lru"}, {"capacities": [256.5]}])
def test_sizes_and_names_of_the_wrong_kind_are_refused(arguments):
    with pytest.raises(InputError, match="^(capacities|policies|budget) "):
        grid.protection(**arguments)


def test_a_policy_that_chooses_layer_by_layer_meets_the_cap_in_a_regime_of_its_own(monkeypatch):
    monkeypatch.setitem(OWN, "mine", Policy("Mine", "me", lambda o: o.positions.float()))
    conditions = grid.main([128], ["lru", "snapkv", "mine"], 0.1, "both")[1:]
    assert {(c.policy, c.regime.name, c.reading) for c in conditions} == {
        ("lru", "shared cap", "as_run"), ("lru", "shared cap", "as_described"),
        ("snapkv", "decode cap", "as_run"), ("snapkv", "decode cap", "as_described"),
        ("mine", "decode cap", "as_described"),
    }  # fmt: skip
    assert {c.reading for c in grid.main([128], ["mine"], 0.1, "as_run")[1:]} == {"as_described"}
