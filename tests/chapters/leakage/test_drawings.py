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
