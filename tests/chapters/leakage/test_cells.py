"""Cells: what the engine is asked for."""

import pytest

from kvrepro.chapters.leakage import cells
from kvrepro.engine.catalogue import CATALOGUE
from kvrepro.engine.condition import Prompt
from kvrepro.item import Item


def switches(policy, ratio, variant="default", reading="as_described", tokens=60, **meta):
    """Window and protected newest tokens of a cell, on a system turn of so many tokens with a phrase of 16."""
    item = Item("a", "follow", (), "", meta=meta)
    text = Prompt([0] * (tokens + 5), {"phrase": list(range(7, 23)), "request": list(range(tokens, tokens + 5))})
    given = dict(cells.Cell(policy, ratio, variant, reading).on(item, text).switches)
    return given.get("window"), given.get("recent", given.get("window"))


@pytest.mark.parametrize(("reading", "window"), [("as_run", 6), ("as_described", 24)])
@pytest.mark.parametrize("ratio", [0.1, 0.3, 0.5, 0.7, 0.9])
@pytest.mark.parametrize("tokens", [60, 100])
def test_a_window_is_its_prompts_whatever_the_variant(reading, window, ratio, tokens):
    kept = int(round(1 - ratio, 6) * tokens + 1e-9)
    for variant in ("default", "whitelist", "fair", "debias 0.4", "ends", "opening"):
        assert switches("snapkv", ratio, variant, reading, tokens)[0] == min(window, kept), variant


def test_what_must_stay_takes_its_room_from_the_windows_own_tokens():
    assert switches("snapkv", 0.7) == (18, 18)  # all that is kept of 60 tokens
    assert switches("snapkv", 0.7, "whitelist") == (18, 2)  # beside the phrase
    assert switches("snapkv", 0.7, "whitelist", "as_run") == (6, 2)
    assert switches("snapkv", 0.7, "whitelist", tokens=30) == (9, 0)  # less than the phrase
    assert switches("snapkv", 0.3, "whitelist", tokens=30) == (21, 5)
    assert switches("snapkv", 0.1, "whitelist", tokens=24) == (21, 21)  # the phrase lies in the window
    assert switches("snapkv", 0.7, "ends") == (18, 14)
    assert switches("dropkv", 0.7, "whitelist") == (6, 2)
    assert switches("snapkv", 0.5, tokens=200, wording="") == (64, 64)
    assert switches("snapkv", 0.5, tokens=200, wording="", reading="as_run") == (16, 16)
    assert switches("h2o", 0.5) == (None, None)


def test_policies_are_the_librarys():
    """kvpress prunes all layers by key norm, averages SnapKV's votes over the group and forces TOVA's last token in."""
    conditions = {name: cells.Cell(name, 0.5).condition for name in cells.FIVE}
    found = {name: CATALOGUE[name].reading(c.reading, c.switches) for name, c in conditions.items()}
    assert found["k_norm"]["dense_layers"] == 0
    assert [found["snapkv"][name] for name in ("group", "pool", "kernel")] == ["mean", "average", 5]
    assert (found["tova"]["recent"], found["streaming_llm"]["sinks"]) == (1, 4)
    fair = cells.Cell("snapkv", 0.5, "fair").condition  # stays the library's under quotas
    reading = CATALOGUE["snapkv"].reading(fair.reading, fair.switches)
    assert reading == CATALOGUE["snapkv"].reading("as_run", (("window", reading["window"]),))


@pytest.mark.parametrize("name", cells.FAIR_DIFFERS)
def test_fair_variants_differ_between_the_readings_and_the_dial_does_not(name):
    run, described = (cells.Cell(name, 0.5, "fair", reading).condition for reading in ("as_run", "as_described"))
    assert (run.reading, described.reading) == ("as_run", "as_described")
    ramps = CATALOGUE[name].reading(run.reading, run.switches).get("ramps")
    assert ramps is (True if name == "streaming_llm" else None)
    assert cells.differs(name, "fair")
    grid = cells.cells([name], (0.5,), ("debias 0.4",), ("as_described", "as_run"))
    assert [cell.reading for cell in grid[1:]] == ["as_described"]


def test_a_grid_has_the_uncompressed_cache_once_both_readings_where_they_differ_and_a_dial_where_it_can_run():
    grid = cells.cells(("h2o", "snapkv"), (0.5,), readings=("as_described", "as_run"))
    assert [c.policy for c in grid] == ["full", "h2o", "snapkv", "snapkv"]
    assert [c.reading for c in grid[1:]] == ["as_described", "as_described", "as_run"]
    grid = cells.cells(["layer_defensive_kv", "defensive_kv"], [0.5], ["fair", "debias 0.2"])  # waits for every layer
    assert [c.variant for c in grid[1:]] == ["fair", "fair", "debias 0.2"]
    assert grid[-1].policy == "defensive_kv"
