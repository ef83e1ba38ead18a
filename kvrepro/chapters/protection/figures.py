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

from kvrepro.experiment import stats
from kvrepro.experiment.figure import STYLE, WIDTH, done, look, looks, panels, tell

SIDES = {  # of the study of the question's place: (reading, protected) -> name, colour, marker
    ("as_run", False): ("authors' code, unprotected", "#0072B2", "o"),
    ("as_run", True): ("authors' code, protected", "#0072B2", "s"),
    ("as_described", False): ("authors' text, unprotected", "#E69F00", "D"),
}
BINS, PARTS = 480, 8  # along the prompt: what is drawn, and what is said on hover


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


def question(asked: pd.DataFrame) -> Figure:
    """What LRU gains where the question is kept: by the guard at the prompt's end, and by the prompt's length (right).

    asked: rows of `study.question`. Dotted: the length of each question; one thousand tokens, from which on the decimal
    order of the authors' code loses the end of the prompt.
    """
    figure, (left, right) = panels(2, height=3.0, sharey=True)
    cut = asked[asked.policy != "full"]
    lengths, places = cut[cut.varied == "length"], cut[cut.varied == "place"]
    for (tokens, part), shown in zip(lengths.groupby("question"), looks(["two", "four"]).values(), strict=False):
        _line(left, part, "guard", f"question of {tokens:.0f} tokens", shown.colour, shown.marker)
        left.axvline(tokens, color=shown.colour, lw=0.8, ls=(0, (1, 2)))
    for (reading, guarded), (name, colour, marker) in SIDES.items():
        part = places[(places.reading == reading) & ((places.prefix > 0) == guarded)]
        if len(part):
            _line(right, part, "length", name, colour, marker, hollow=not guarded)
    right.axvline(1000, color="black", lw=0.8, ls=(0, (1, 2)))
    left.set(xlabel="tokens guarded at the prompt's end", ylabel="token F1 after the first word", ylim=(-0.03, 1.03))
    right.set_xlabel("prompt length (tokens)")
    for axes in (left, right):
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), fontsize=7.5)
    return done(figure)


def _line(axes: Axes, rows: pd.DataFrame, x: str, name: str, colour: str, marker: str, hollow: bool = False) -> None:
    at = stats.means(rows, x, "rest_f1").sort_values(x)
    error = [at.value - at.low, at.high - at.value]
    mfc = "white" if hollow else colour
    axes.errorbar(at[x], at.value, error, color=colour, marker=marker, mfc=mfc, lw=1.2, elinewidth=0.8, label=name)


def _strips(panel: Axes, positions: list[np.ndarray], policies: list[str], tokens: int) -> None:
    edges = np.linspace(0, tokens, BINS + 1)
    there = np.maximum(1, np.histogram(np.arange(tokens), edges)[0])
    image = np.ones((len(policies), BINS, 3))
    for y, (policy, here) in enumerate(zip(policies, positions, strict=True)):
        share = np.histogram(here, edges)[0] / there
        image[y] = 0.955 - share[:, None] * (0.955 - np.asarray(to_rgb(look(policy).colour)))
        for first, last in pairwise(np.linspace(0, tokens, PARTS + 1).round().astype(int)):
            kept = np.mean(np.isin(np.arange(first, last), here))
            text = f"{look(policy).name}, tokens {first:,} to {last - 1:,}: {kept:.0%} kept"
            tell(panel, [(first + last) / 2], [y], [text])
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
