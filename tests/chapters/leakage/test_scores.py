"""Measures of answers that are written down here."""

import pandas as pd
import pytest

from kvrepro.chapters.leakage import prompts, scores


def test_following_is_the_mean_over_rules_as_run_and_over_classes_as_described():
    """Prompts with a, a, and a b c obey all but the first a: 4 of 5 rules, and 2/3, 1 and 1 of the classes."""
    passed = [{"a": False}, {"a": True}, {"a": True, "b": True, "c": True}]
    rows = pd.DataFrame({"system": range(3), "order": "normal", "passed": passed})
    assert scores.following(rows, pooled=True).mean() == pytest.approx(4 / 5)
    assert scores.following(rows, pooled=False).mean() == pytest.approx((2 / 3 + 1 + 1) / 3)


def test_an_answer_that_failed_counts_as_described_unless_its_budget_was_too_small():
    """It has the worst scores; as run it is left out."""
    [follow, leak] = prompts.systems(1, orders=("normal",))
    assert scores.score(follow, None)["followed"] == 0
    assert set(scores.score(leak, None).values()) == {1.0}
    cell = {"policy": "tova", "variant": "default", "ratio": 0.5, "reading": "as_described", "order": "normal"}
    errors = [None, "RuntimeError: memory", "InputError: budget 6 < 7 protected tokens"]
    rows = pd.DataFrame([cell | {"error": error} | scores.score(leak, None) for error in errors])
    assert [len(scores.in_reading(rows, reading)) for reading in ("as_run", "as_described")] == [1, 2]


def test_the_uncompressed_cache_stands_under_every_curve_of_a_reading():
    """SnapKV differs between the readings, TOVA only when fair."""
    run = [("full", "default", 0.0, "as_described"), ("snapkv", "default", 0.5, "as_run")]
    run += [("tova", variant, 0.5, "as_described") for variant in ("default", "fair")]
    rows = pd.DataFrame(run, columns=["policy", "variant", "ratio", "reading"]).assign(order="normal", error=None)
    rows = rows.assign(tells_directive=0.0, tells_rules=0.0)
    cells = {reading: scores.in_reading(rows, reading) for reading in ("as_run", "as_described")}
    curves = {reading: set(zip(f.policy, f.variant, f.ratio, strict=True)) for reading, f in cells.items()}
    assert curves["as_run"] == {(name, "default", ratio) for name in ("tova", "snapkv") for ratio in (0.0, 0.5)}
    assert curves["as_described"] == {
        ("tova", variant, ratio) for variant in ("default", "fair") for ratio in (0.0, 0.5)
    }
