"""Estimates as they are drawn: a point with its interval for every row of the table, where the table says."""

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from kvrepro.engine.policy import OWN, Policy
from kvrepro.experiment import figure

mpl.use("Agg")
SEVEN = ("lru", "h2o_simple", "snapkv_simple", "slw", "ada_kv_simple", "quest_simple", "random_sample")
TABLE = pd.DataFrame(
    [
        (reading, policy, size, protected, 0.1 * i + 0.2 * protected, 0.1 * i, 0.1 * i + 0.3)
        for reading in ("as_run", "as_described")
        for i, policy in enumerate(("lru", "snapkv", "mine"))
        for size in (128, 512)
        for protected in (False, True)
    ],
    columns=["reading", "policy", "capacity", "protected", "value", "low", "high"],
)


def drawn(axes) -> np.ndarray:
    """Value, low and high of every point in a panel."""
    values = []
    for bars in axes.containers:
        line, _, (collection,) = bars
        along = 1 if collection.get_segments()[0][0, 0] == collection.get_segments()[0][1, 0] else 0
        for value, segment in zip(line.get_xydata()[:, along], collection.get_segments(), strict=True):
            values.append((value, *segment[:, along]))
    return np.array(sorted(values))


@pytest.mark.parametrize(("x", "y"), [("capacity", "value"), ("value", "policy")])
@pytest.mark.parametrize("line", [False, True])
def test_every_row_is_a_point_with_its_interval(x, y, line):
    table = TABLE[TABLE.protected]
    grid = figure.intervals(table, x, y, colour="policy", panel="reading", line=line)
    assert [axes.get_title() for axes in grid.axes.flat] == ["authors' code", "authors' text"]
    for axes, (_, part) in zip(grid.axes.flat, table.groupby("reading", sort=False), strict=True):
        assert np.allclose(drawn(axes), np.array(sorted(part[["value", "low", "high"]].itertuples(index=False))))
    plt.close("all")


SCORED = pd.DataFrame({"item": list("abcd"), "token_f1": [1.0, 0.8, 0.9, 0.9], "rest_f1": [1.0, 0.6, np.nan, 0.8]})


def test_answers_that_no_policy_gives_are_lines_with_names():
    first = SCORED.assign(control="first_word", token_f1=0.4, rest_f1=0.0)
    controls = pd.concat([first, SCORED.assign(control="copy", token_f1=0.2)])
    table = figure.floors(controls, SCORED)
    assert dict(zip(table.control, table.value, strict=True)) == pytest.approx(
        {"full": 0.9, "first_word": 0.4, "copy": 0.2}
    )
    assert figure.floors(controls, SCORED, "rest_f1").control.tolist() == ["full", "copy"]  # nothing is drawn at zero
    grid = figure.intervals(TABLE, "capacity", "value", colour="policy", lines=table)
    names = [text.get_text() for text in grid.figure.legends[0].get_texts()]
    assert {"full cache", "first word", "copy"} <= set(names)
    plt.close("all")


def test_policies_look_alike_everywhere_and_apart_from_each_other(monkeypatch):
    monkeypatch.setitem(OWN, "mine", Policy("My own", "me", lambda o: o.positions.float()))
    seven = figure.looks(SEVEN)
    assert len({look.colour for look in seven.values()}) == len({look.marker for look in seven.values()}) == 7
    assert figure.looks(["mine", "lru"])["lru"] == figure.look("lru") == seven["lru"]
    shown = figure.looks(["lru", "mine", "snapkv"])
    assert shown["mine"].name == "My own"
    assert len({look.colour for look in shown.values()}) == 3
    assert [look.name for look in figure.looks([128.0, 0.25]).values()] == ["128", "0.25"]
