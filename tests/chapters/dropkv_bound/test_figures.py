"""Distributions of the bound's chapter: complete, labelled, and drawn from the frames' own numbers."""

import numpy as np
import pandas as pd
import pytest

from kvrepro.chapters.dropkv_bound import figures
from kvrepro.experiment import figure


def rows() -> pd.DataFrame:
    values = [0.5, 2.0, 8.0, np.inf]
    return pd.DataFrame({"pool": ["a"] * 4 + ["b"] * 4, "factor": values + [50.0, 200.0, 2000.0, np.inf]})


def test_curves_end_at_the_share_with_a_value_and_what_lies_beyond_is_told():
    printed = [(pd.Series([10.0, 12.0]), 0.5), (pd.Series([90.0, 99.0]), pd.Series([0.7, 0.8]))]
    drawing = figures.distribution(rows(), "factor", "the factor", printed, limits=(1, 1000))
    [axes] = drawing.axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("the factor", "share of triples")
    assert drawing.get_size_inches()[0] == pytest.approx(figure.WIDTH)
    [legend] = drawing.legends
    names = [text.get_text() for text in legend.get_texts()]
    assert names == ["a, 25% further left", "b, 25% further right", "paper, three models at 128K"]
    curves = [line for line in axes.get_lines() if line.get_drawstyle() == "steps-post"]
    assert [line.get_ydata().max() for line in curves] == [0.75, 0.75]
    marks = [line.get_ydata().tolist() for line in axes.get_lines() if line.get_marker() == "x"]
    assert marks == [[0.5, 0.5], [0.7, 0.8]]
    drawing.canvas.draw()


def test_numbers_of_logarithmic_axes_are_written_out():
    drawing, [axes] = figure.panels(1)
    axes.set(xscale="log", yscale="log", ylim=(1e-3, 1e3))
    figures.plain(drawing, 0.9, 20)
    drawing.canvas.draw()
    shown = [tick.get_text() for tick in axes.get_xticklabels()]
    assert {"1", "2", "5", "10", "20"} <= set(shown)
    assert axes.get_xlim() == (0.9, 20)
    assert {"0.01", "100"} <= {tick.get_text() for tick in axes.get_yticklabels()}
