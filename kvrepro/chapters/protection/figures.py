"""The chapter's one drawing that is no estimate: which positions of a prompt survive."""

from __future__ import annotations

from collections.abc import Mapping

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from kvrepro.experiment.figure import STYLE, WIDTH, done, look

BINS = 480  # along the prompt


def retention(kept: pd.DataFrame) -> Figure:
    """Which prompt positions survive the first reduction: one strip per policy, unprotected above protected.

    kept: rows of `study.retention`. LRU's longest stretch is labelled, and so are the prompt's parts, where it says.
    """
    tokens, spans = kept.attrs["tokens"], kept.attrs.get("spans", {})
    policies, readings = list(dict.fromkeys(kept.policy)), list(dict.fromkeys(kept.reading))
    size = (WIDTH, 0.7 + 0.5 * len(policies))
    with plt.rc_context(STYLE | {"axes.grid": False}):
        figure, panels = plt.subplots(2, len(readings), figsize=size, squeeze=False, sharex=True, sharey=True)
        for row, column in np.ndindex(panels.shape):
            panel, reading = panels[row, column], readings[column]
            chosen = kept[(kept.reading == reading) & (kept.protected == bool(row))]
            _strips(panel, [chosen[chosen.policy == one].position.to_numpy() for one in policies], policies, tokens)
            title = f"{look(reading).name}, {'protected' if row else 'unprotected'}"
            panel.set_title(title, pad=18 if spans and not row else 4)
            for first, last in spans.values():
                if last - first < 0.05 * tokens:
                    panel.axvline((first + last) / 2, color="black", lw=0.8, ls=(0, (1, 2)), zorder=2)
            if not row:
                _spans(panel, spans)
        for panel in panels[-1]:
            panel.set_xlabel("position in the prompt (tokens)")
    return done(figure)


def _strips(panel: Axes, positions: list[np.ndarray], policies: list[str], tokens: int) -> None:
    edges = np.linspace(0, tokens, BINS + 1)
    there = np.maximum(1, np.histogram(np.arange(tokens), edges)[0])
    image = np.ones((len(policies), BINS, 3))
    for y, (policy, here) in enumerate(zip(policies, positions, strict=True)):
        share = np.histogram(here, edges)[0] / there
        image[y] = 0.955 - share[:, None] * (0.955 - np.asarray(to_rgb(look(policy).colour)))
        if policy == "lru" and len(here):
            _stretch(panel, y, np.sort(here), tokens)
    panel.imshow(image, aspect="auto", extent=(0, tokens, len(policies) - 0.5, -0.5), interpolation="nearest")
    for y in range(len(policies) - 1):
        panel.axhline(y + 0.5, color="white", lw=3)
    panel.set_yticks(range(len(policies)), [look(one).name for one in policies])
    panel.tick_params(axis="y", length=0)
    panel.spines[["left", "bottom"]].set_visible(False)


def _stretch(panel: Axes, y: int, positions: np.ndarray, tokens: int) -> None:
    """First and last position of the longest run of kept positions, written beside it."""
    runs = np.split(positions, np.flatnonzero(np.diff(positions) > 1) + 1)
    longest = max(runs, key=len)
    first, last = longest[0], longest[-1]
    beyond = last < tokens * 0.7
    x = last + 0.015 * tokens if beyond else first - 0.015 * tokens
    panel.text(x, y, f"{first} to {last}", ha="left" if beyond else "right", va="center", fontsize=8, zorder=3)


def _spans(panel: Axes, spans: Mapping[str, tuple[int, int]]) -> None:
    """Parts of the prompt as a ruler above a panel: a bar and a name each."""
    for i, (name, (first, last)) in enumerate(spans.items()):
        shade = ("#444444", "#AAAAAA")[i % 2]
        panel.axvspan(first, last + 1, ymin=1.015, ymax=1.045, color=shade, clip_on=False, lw=0)
        panel.annotate(
            name, ((first + last) / 2, 1.05), xycoords=("data", "axes fraction"), va="bottom", fontsize=7.5,
            ha="left" if first < 60 else "center", color="#444444", annotation_clip=False,
        )  # fmt: skip
