"""Safe budgets with their crosses, and panels that say that they are empty."""

import matplotlib.pyplot as plt
import pandas as pd

from kvrepro.chapters.leakage import drawings
from kvrepro.experiment.figure import HOVER_TEXTS

SAFE = pd.DataFrame(
    [
        ("defense first", "h2o", "default", 0.1, False),
        ("defense first", "snapkv", "default", 0.7, True),
        ("defense first", "snapkv", "whitelist", 0.3, True),
        ("directive first", "h2o", "default", 1.0, True),
    ],
    columns=["order", "policy", "variant", "value", "follows"],
)


def test_safe_budgets_are_written_into_their_cells_with_a_cross_where_little_is_followed():
    left, right = drawings.safe_budget_map(SAFE).axes
    assert [text.get_text() for text in left.texts] == ["10% ×", "70%", "30%"]
    assert [text.get_text() for text in right.texts] == ["100%"]
    assert [label.get_text() for label in left.get_yticklabels()] == ["H2O", "SnapKV"]
    assert left.get_title("left") == "defense first"
    assert HOVER_TEXTS[left] == [(0.5, 0.5, "H2O, default: 10"), (0.5, 1.5, "SnapKV, default: 70"),
                          (1.5, 1.5, "SnapKV, whitelist: 30")]  # fmt: skip


def test_only_a_panel_without_points_says_so():
    drawn, [full, empty] = plt.subplots(1, 2)
    full.plot([0, 1], [0, 1], marker="o")
    empty.axhline(0.5)
    assert drawings.say_empty(drawn, "nothing here") is drawn
    assert [[text.get_text() for text in axes.texts] for axes in (full, empty)] == [[], ["nothing here"]]
    plt.close(drawn)


def test_parts_forgotten_under_two_policies_and_under_more():
    lost = pd.DataFrame([(name, "defense") for name in ("h2o", "snapkv", "tova")], columns=["policy", "part"])
    assert drawings.sooner(lost) == "all 3 policies forget the defense sooner"
    assert drawings.sooner(lost[:2]) == "both policies forget the defense sooner"
    assert drawings.sooner(lost[:1]) == "H2O forgets the defense sooner"


def leakage(**values):
    """Leakage of ten system prompts by variant: all of them score about the given value."""
    noise = [0.01 * (i % 3) for i in range(10)]
    rows = [(name, "h2o", i, "defense first", value + noise[i]) for name, value in values.items() for i in range(10)]
    return pd.DataFrame(rows, columns=["variant", "policy", "system", "order", "value"])


def test_that_the_phrase_matters_is_said_where_the_interval_shows_it():
    matters = {"default": 0.9, "first sentence": 0.8, "whitelist": 0.1}
    assert drawings.phrases(leakage(**matters)) == "It matters which phrase is on the whitelist."
    assert "does not show that it matters" in drawings.phrases(leakage(**{"first sentence": 0.0, "whitelist": 0.0}))
    assert "was not run" in drawings.phrases(leakage(default=0.9, whitelist=0.1))


def test_leakage_by_variant_leaves_out_what_was_not_run():
    table = pd.DataFrame([("a", 0.5, 0.4, 0.6), ("b", 0.1, 0.0, 0.2)], columns=["variant", "value", "low", "high"])
    shown = drawings.listed(table, {"a": "by default", "b": "with one", "c": "with another"})
    assert shown == "50.0% [40.0%, 60.0%] by default and 10.0% [0.0%, 20.0%] with one"
    three = pd.concat([table, table[:1].assign(variant="c")])
    assert ", and 50.0%" in drawings.listed(three, {"a": "by default", "b": "with one", "c": "with another"})
    assert drawings.listed(table[:0], {"a": "by default"}) == ""


def test_the_best_and_the_worst_class_are_compared_within_a_cell_and_only_where_rules_are_many():
    cells = [("h2o", "capitals", 0.5, 0.9, 8), ("h2o", "quotes", 0.5, 0.6, 8), ("h2o", "numbers", 0.5, 0.0, 2),
             ("snapkv", "capitals", 0.5, 0.2, 8), ("snapkv", "quotes", 0.9, 0.1, 8)]  # fmt: skip
    accuracy = pd.DataFrame(cells, columns=["policy", "kind", "ratio", "value", "n"])
    assert drawings.classes_apart(accuracy) == "lie up to 30 points apart (under H2O)"
    tied = pd.concat([accuracy, accuracy[:2].assign(policy="tova")])
    assert drawings.classes_apart(tied) == "lie up to 30 points apart (under H2O, TOVA)"
    assert drawings.classes_apart(accuracy[3:]) == drawings.classes_apart(accuracy[:0]) == "could not be compared"
