"""The frontier's staircase; which points a panel holds."""

import pandas as pd

from kvrepro.chapters.synthesis import figures
from kvrepro.experiment.figure import HOVER_TEXTS

TABLE = pd.DataFrame(
    [
        ("a", "full", None, "full cache", 1.0, 1.0, 1.0, 1.0),
        ("a", "grid", "attention", "cheap", 0.1, 0.9, 0.2, 0.4),
        ("a", "grid", "random", "beaten", 0.2, 0.8, 0.1, 0.1),
        ("a", "published", None, "SnapKV, 20%", 0.2, 0.5, 0.8, 0.6),
        ("b", "grid", "position", "alone", 0.1, 0.3, 0.5, 0.2),
    ],
    columns=["model", "kind", "scorer", "name", "held", "unfreed", "value", "evidence_heads"],
)


def points(axes) -> int:
    return sum(len(line.get_xdata()) for line in axes.lines if line.get_linestyle() == "None")


def test_each_model_has_a_panel_per_cost_and_a_frontier():
    drawn = figures.frontiers(TABLE)
    bytes_a, bytes_b, blocks_a, blocks_b = drawn.axes
    assert [points(axes) for axes in drawn.axes] == [3, 1, 3, 1]  # no full cache
    assert HOVER_TEXTS[bytes_a] == [(0.1, 0.2, "cheap: 0.20, at 10%"), (0.2, 0.1, "beaten: 0.10, at 20%"),
                             (0.2, 0.8, "SnapKV, 20%: 0.80, at 20%")]  # fmt: skip
    [stairs] = [line for line in bytes_a.lines if line.get_linestyle() == "-"]
    assert stairs.get_ydata().tolist() == [0.2, 0.8]
    [stairs] = [line for line in blocks_a.lines if line.get_linestyle() == "-"]
    assert stairs.get_ydata().tolist() == [0.8]  # it costs fewest blocks and scores most
    assert (bytes_a.get_title("left"), bytes_b.get_title("left"), blocks_a.get_title("left")) == ("a", "b", "")
    assert (bytes_b.get_xlabel(), blocks_b.get_xlabel()) == ("keys and values held", "blocks not freed")


def test_evidence_is_drawn_of_cells_of_the_grid_alone():
    assert [points(axes) for axes in figures.evidence(TABLE).axes] == [2, 1]
