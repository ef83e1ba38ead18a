"""The chapter's own drawings: which positions of a prompt survive, and what a kept question is worth."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import AutoLocator, ScalarFormatter

from kvrepro.experiment import stats
from kvrepro.experiment.claims import LABELS
from kvrepro.experiment.figure import STYLE, WIDTH, add_hover_texts, done, estimates, look

BINS, PARTS = 480, 8  # sections of a prompt: those of the drawing, and those of the texts on hover


def retention(kept: pd.DataFrame) -> Figure:
    """Which prompt positions survive the first reduction: one strip per policy, unprotected above protected.

    kept: of `study.retention`. Labels: LRU's longest run of kept positions, and the prompt's spans if it has any.
    """
    tokens, spans = kept.attrs["tokens"], kept.attrs.get("spans", {})
    policies, readings = list(dict.fromkeys(kept.policy)), list(dict.fromkeys(kept.reading))
    size = (WIDTH, 0.7 + 0.5 * len(policies))
    with plt.rc_context(STYLE | {"axes.grid": False}):
        figure, panels = plt.subplots(2, len(readings), figsize=size, squeeze=False, sharex=True, sharey=True)
        for row, column in np.ndindex(panels.shape):
            panel, reading = panels[row, column], readings[column]
            chosen = kept[(kept.reading == reading) & (kept.protected == bool(row))]
            _strips(panel, {policy: chosen[chosen.policy == policy].position for policy in policies}, tokens)
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


def question(rows: pd.DataFrame) -> Figure:
    """LRU's score by the guard at the prompt's end (left) and by the prompt's length (right): is the question kept?

    rows: of `study.question`. Dotted lines, left: the length of each question; right: one thousand tokens, from which
    on the decimal order of the authors' code loses the end of the prompt.
    """
    evicting = rows[rows.policy != "full"]
    by_guard = evicting.varied == "length"
    questions = "question of " + evicting.question.map("{:.0f}".format) + " tokens"
    lines = evicting.reading.map(LABELS).mask(by_guard, questions)
    table = evicting.assign(
        line=lines, protected=by_guard | (evicting.prefix > 0), at=evicting.length.mask(by_guard, evicting.guard)
    )
    table = stats.means(table, ["varied", "line", "protected", "at"], "rest_f1")
    drawing = estimates(
        table.sort_values(["varied", "at"], kind="stable"), "at", "value", colour="line", fill="protected",
        panel="varied", line=True, sharex=False, height=3,
        labels={"value": "token F1 after the first word", "True": "protected", "False": "unprotected"},
    )  # fmt: skip
    marks = {"length": evicting.question[by_guard].unique(), "place": [1000]}
    names = {"length": "tokens guarded at the prompt's end", "place": "prompt length (tokens)"}
    for axes, varied in zip(drawing.axes, sorted(table.varied.unique()), strict=True):
        axes.set_title("", loc="left")
        axes.set_xlabel(names[varied])
        axes.xaxis.set_major_locator(AutoLocator())
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.autoscale(axis="x")
        for place in marks[varied]:
            axes.axvline(place, color="black", lw=0.8, ls=(0, (1, 2)))
    return drawing


def _strips(panel: Axes, kept: Mapping[str, pd.Series], tokens: int) -> None:
    """A strip for each policy, darker where it keeps more. kept: positions by policy."""
    edges = np.linspace(0, tokens, BINS + 1)
    bin_tokens = np.maximum(1, np.histogram(np.arange(tokens), edges)[0])
    image = np.ones((len(kept), BINS, 3))
    for y, (policy, positions) in enumerate(kept.items()):
        share = np.histogram(positions, edges)[0] / bin_tokens
        image[y] = 0.955 - share[:, None] * (0.955 - np.asarray(to_rgb(look(policy).colour)))
        for first, last in pairwise(np.linspace(0, tokens, PARTS + 1).round().astype(int)):
            part_share = np.mean(np.isin(np.arange(first, last), positions))
            text = f"{look(policy).name}, tokens {first:,} to {last - 1:,}: {part_share:.0%} kept"
            add_hover_texts(panel, [(first + last) / 2], [y], [text])
        if policy == "lru" and len(positions):
            _stretch(panel, y, np.sort(positions), tokens)
    panel.imshow(image, aspect="auto", extent=(0, tokens, len(kept) - 0.5, -0.5), interpolation="nearest")
    for y in range(len(kept) - 1):
        panel.axhline(y + 0.5, color="white", lw=3)
    panel.set_yticks(range(len(kept)), [look(policy).name for policy in kept])
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
    """The prompt's spans as a ruler above a panel, each a bar and a name."""
    for i, (name, (first, last)) in enumerate(spans.items()):
        shade = ("#444444", "#AAAAAA")[i % 2]
        panel.axvspan(first, last + 1, ymin=1.015, ymax=1.045, color=shade, clip_on=False, lw=0)
        panel.annotate(
            name, ((first + last) / 2, 1.05), xycoords=("data", "axes fraction"), va="bottom", fontsize=7.5,
            ha="left" if first < 60 else "center", color="#444444", annotation_clip=False,
        )  # fmt: skip
