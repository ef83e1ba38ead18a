"""Figures: every panel has labelled axes and something in it, whatever subset of the readings was run."""

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import synthetic

from kvrepro.chapters.protection import figures

mpl.use("Agg")
RESULTS = synthetic.results(n_items=8, noise=0.2)
MAIN = ["quality", "lift", "sensitivity", "sides", "convergence", "items", "first_word", "repetition"]


def kept() -> pd.DataFrame:
    """A band for one reading, the newest tokens for the other."""
    rows = [
        {"policy": policy, "reading": reading, "protected": protected, "position": position}
        for policy in ("lru", "random")
        for reading, start in (("as_run", 769), ("as_described", 1663))
        for protected in (False, True)
        for position in range(start, start + 256)
    ]
    frame = pd.DataFrame(rows)
    frame.attrs["tokens"] = 1919
    return frame


def drawn(one: plt.Figure) -> None:
    """No panel empty, every outer axis labelled, every panel inside the book's width."""
    one.canvas.draw()
    assert one.get_size_inches()[0] == pytest.approx(figures.WIDTH)
    for axes in one.axes:
        assert axes.lines or axes.patches or axes.images or axes.collections or axes.containers
        place = axes.get_subplotspec()
        assert axes.get_xlabel() or not place.is_last_row()
        named = axes.get_ylabel() or any(label.get_text()[:1].isalpha() for label in axes.get_yticklabels())
        assert named or not place.is_first_col()
    plt.close(one)


@pytest.mark.parametrize("name", MAIN)
@pytest.mark.parametrize("readings", [("as_run", "as_described"), ("as_described",)])
def test_main_figures(name, readings):
    results = RESULTS[RESULTS.reading.isin(readings) | (RESULTS.policy == "full")]
    drawn(getattr(figures, name)(results))


@pytest.mark.parametrize("name", MAIN)
def test_other_fractions_and_capacities(name):
    results = RESULTS.assign(prefix=RESULTS.prefix / 2, suffix=RESULTS.suffix / 2)
    drawn(getattr(figures, name)(results, protect_frac=0.05))


def test_attention_scaling_and_retention():
    drawn(figures.boundary_attention(synthetic.attention()))
    drawn(figures.scaling(synthetic.scaling()))
    frame = kept()
    frame.attrs["spans"] = {"system": (0, 30), "passage": (31, 1890), "question": (1891, 1918)}
    drawn(figures.retention(frame))


def test_every_estimate_carries_its_interval():
    """One error bar per policy, capacity and protection, and it is as wide as the bootstrap says."""
    one = figures.quality(RESULTS)
    panel = one.axes[0]
    assert len(panel.containers) == 7 * 3 * 2
    widths = [np.ptp(bar[2][0].get_segments()[0][:, 1]) for bar in panel.containers]
    assert min(widths) > 0
    plt.close(one)


def test_retention_darkens_where_positions_are_kept():
    one = figures.retention(kept())
    strip = one.axes[0].images[0].get_array()[0]  # LRU as run, unprotected
    shade = np.asarray(strip).sum(-1)
    inside, outside = shade[int(480 * 800 / 1919) : int(480 * 990 / 1919)], shade[: int(480 * 700 / 1919)]
    assert inside.max() < outside.min()
    plt.close(one)


def test_domain_table_has_a_row_per_domain_and_both_readings():
    table = figures.domains(RESULTS).data
    assert len(table) == 6
    assert {first for first, _ in table.columns} == {"", "as run", "as described"}
    means = {name: table["as run", name].str.split().str[0].astype(float) for name in ("protected", "unprotected")}
    lift = (means["protected"] - means["unprotected"]).to_numpy()
    assert table["as run", "lift"].to_numpy() == pytest.approx(lift, abs=0.011)  # the means are shown to 0.01
    assert table["as run", "protected"].str.contains(r"\(\d.* to |too few").all()  # each with its interval


def test_one_colour_and_marker_per_policy():
    seven = list(synthetic.SEVEN)
    assert len({figures.COLOURS[one] for one in seven}) == len({figures.MARKERS[one] for one in seven}) == 7
