"""Strips of kept positions: dark where tokens are kept, whatever subset of the readings was run."""

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from kvrepro.chapters.protection import figures
from kvrepro.experiment.figure import HOVER_TEXTS

mpl.use("Agg")


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


def test_every_reading_and_protection_has_its_panel():
    frame = kept()
    frame.attrs["spans"] = {"system": (0, 30), "passage": (31, 1890), "question": (1891, 1918)}
    figure = figures.retention(frame)
    titles = [f"authors' {source}, {state}" for state in ("unprotected", "protected") for source in ("code", "text")]
    assert [axes.get_title(loc="left") for axes in figure.axes] == titles
    described = frame[frame.reading == "as_described"]
    described.attrs = frame.attrs
    assert len(figures.retention(described).axes) == 2


def test_retention_darkens_where_positions_are_kept():
    figure = figures.retention(kept())
    strip = figure.axes[0].images[0].get_array()[0]  # LRU as run, unprotected
    shade = np.asarray(strip).sum(-1)
    inside, outside = shade[int(480 * 800 / 1919) : int(480 * 990 / 1919)], shade[: int(480 * 700 / 1919)]
    assert inside.max() < outside.min()
    texts = [text for _, _, text in HOVER_TEXTS[figure.axes[0]]]
    assert texts[0] == "LRU, tokens 0 to 239: 0% kept"
    assert texts[3] == "LRU, tokens 720 to 959: 80% kept"
    plt.close(figure)


def test_a_kept_question_is_drawn_by_guard_and_by_length():
    rows = [
        {"varied": "length", "policy": "lru", "reading": "as_run", "prefix": 0.0, "guard": guard, "length": 1900,
         "question": question, "rest_f1": guard / 100 + x}
        for question in (12.0, 18.0) for guard in (0, 12, 25) for x in (0.0, 0.2)
    ] + [
        {"varied": "place", "policy": "lru", "reading": "as_run", "prefix": side, "guard": 0, "length": length,
         "question": 12.0, "rest_f1": 0.5 * (length < 1000) + x}
        for side in (0.0, 0.1) for length in (900, 1100) for x in (0.0, 0.2)
    ]  # fmt: skip
    left, right = figures.question(pd.DataFrame(rows)).axes
    names = ["question of 12 tokens", "question of 18 tokens", "authors' code", "protected", "unprotected"]
    assert sorted(text.get_text() for text in left.figure.legends[0].get_texts()) == sorted(names)
    lines = [[part[0].get_xydata() for part in axes.containers if len(part[0].get_xydata())] for axes in (left, right)]
    assert lines[0][0] == pytest.approx(np.array([[0, 0.1], [12, 0.22], [25, 0.35]]))
    assert lines[1][1] == pytest.approx(np.array([[900, 0.6], [1100, 0.1]]))
    assert (left.get_xlabel(), right.get_xlabel()) == ("tokens guarded at the prompt's end", "prompt length (tokens)")
