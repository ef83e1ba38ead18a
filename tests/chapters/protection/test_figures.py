"""Strips of kept positions: dark where tokens are kept, whatever subset of the readings was run."""

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from kvrepro.chapters.protection import figures

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
    one = figures.retention(frame)
    titles = [f"authors' {source}, {state}" for state in ("unprotected", "protected") for source in ("code", "text")]
    assert [axes.get_title(loc="left") for axes in one.axes] == titles
    described = frame[frame.reading == "as_described"]
    described.attrs = frame.attrs
    assert len(figures.retention(described).axes) == 2


def test_retention_darkens_where_positions_are_kept():
    one = figures.retention(kept())
    strip = one.axes[0].images[0].get_array()[0]  # LRU as run, unprotected
    shade = np.asarray(strip).sum(-1)
    inside, outside = shade[int(480 * 800 / 1919) : int(480 * 990 / 1919)], shade[: int(480 * 700 / 1919)]
    assert inside.max() < outside.min()
    plt.close(one)
