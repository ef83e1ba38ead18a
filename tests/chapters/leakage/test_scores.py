"""Measures of answers that are written down here."""

import pandas as pd
import pytest

from kvrepro.chapters.leakage import prompts, scores
from kvrepro.errors import InputError
from kvrepro.item import Item


def test_loose_accuracy_forgives_a_line_and_asterisks():
    item = next(i for i in prompts.systems(16) if "capitals" in i.meta["instructions"])
    assert not scores.checks(item, "Sure:\nBOATS ARE FINE")["capitals"]
    assert scores.loose(item, "Sure:\nBOATS ARE FINE")["capitals"]
    assert not scores.loose(item, "Sure: boats")["capitals"]
    assert not any(scores.loose(item, "").values())


def test_floors_are_what_telling_nothing_scores():
    items = prompts.systems(2, orders=("normal",))
    floors = scores.floors(items)
    assert floors.loc["refusal", "followed"] == 0
    assert floors.loc["refusal", "tells_rules"] == 0
    assert 0.3 < floors.loc["preamble", "tells_directive"] < 1
    assert floors.loc["preamble", "tells_rules"] < floors.loc["preamble", "tells_directive"]
    unasked = pd.DataFrame({"item": [item.id for item in items], "prediction": [item.answer for item in items]})
    with_unasked = scores.floors(items, unasked)
    assert with_unasked.loc["no_system_prompt", "followed"] == 1  # here the answers are the right ones
    pd.testing.assert_frame_equal(with_unasked.drop("no_system_prompt"), floors)


def test_following_is_the_mean_over_instructions_as_run_and_over_classes_as_described(monkeypatch):
    """Prompts with a, a, and a b c obey all but the first a: 4 of 5 rules, and 2/3, 1 and 1 of the classes."""
    held = {"0": {"a": False}, "1": {"a": True}, "2": {"a": True, "b": True, "c": True}}
    items = [Item(name, "follow", (), "", meta={"instructions": kinds}) for name, kinds in held.items()]
    monkeypatch.setattr(scores, "checks", lambda item, prediction: item.meta["instructions"])
    rows = pd.DataFrame({"item": list(held), "system": range(3), "error": None, "prediction": "", "order": "normal",
                         "policy": "full", "variant": "default", "ratio": 0.0, "reading": "as_described",
                         "rules": "", "request": "follow"})  # fmt: skip
    for reading, mean in (("as_run", 4 / 5), ("as_described", (2 / 3 + 1 + 1) / 3)):
        assert scores.following(rows, items, reading).following.mean() == pytest.approx(mean)


def test_wrong_handling_of_failures_is_named():
    with pytest.raises(InputError, match="^failed 'ignore': should be 'missing', 'broken' or 'worst'"):
        scores.score(pd.DataFrame({"error": []}), [], failed="ignore")


def test_the_uncompressed_cache_stands_under_every_curve_of_a_reading():
    """SnapKV differs between the readings, TOVA only when fair."""
    run = [("full", "default", 0.0, "as_described"), ("tova", "default", 0.5, "as_described"),
           ("tova", "fair", 0.5, "as_described"), ("snapkv", "default", 0.5, "as_run")]  # fmt: skip
    rows = pd.DataFrame(run, columns=["policy", "variant", "ratio", "reading"]).assign(order="normal", system=0)
    cells = {reading: scores.cells_of(rows, reading) for reading in ("as_run", "as_described")}
    curves = {reading: set(zip(f.policy, f.variant, f.ratio, strict=True)) for reading, f in cells.items()}
    assert curves["as_run"] == {(name, "default", ratio) for name in ("tova", "snapkv") for ratio in (0.0, 0.5)}
    assert curves["as_described"] == {
        ("tova", variant, ratio) for variant in ("default", "fair") for ratio in (0.0, 0.5)
    }
