"""Drawings that `kvrepro.experiment.figure` lacks: a heat map with marks in its cells, and panels without data."""

import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure

from kvrepro.experiment import figure, stats


def safe_budget_map(table: pd.DataFrame) -> Figure:
    """Leak-safe budgets (`study.safe_budgets`) in percent, policies by cures, a panel per order.

    A cross marks a budget at which the model follows less than half of what it follows uncompressed; blank: not run.
    """
    orders, cures, policies = (list(dict.fromkeys(table[name])) for name in ("order", "variant", "policy"))
    names = [figure.look(name).name for name in policies]
    drawn, panels = figure.panels(len(orders), 0.9 + 0.32 * len(policies), sharey=True)
    for axes, order in zip(panels, orders, strict=True):
        mark = table.follows.map({True: "", False: " ×"})
        part = table.assign(percent=100 * table.value, mark=mark)[table.order == order]
        wide = part.pivot_table(index="policy", columns="variant", values=["percent", "mark"], aggfunc="first")
        percent, mark = (wide[column].reindex(policies, columns=cures) for column in ("percent", "mark"))
        written = percent.round().map("{:.0f}%".format) + mark.fillna("")
        percent, written = percent.set_axis(names), written.set_axis(names)
        sns.heatmap(percent, annot=written, fmt="", annot_kws={"size": 8}, linewidths=0.5, cbar=False, vmin=0, vmax=100,
                    cmap="crest", ax=axes)  # fmt: skip
        down, across = percent.notna().to_numpy().nonzero()
        labels = [f"{names[y]}, {cures[x]}: {percent.iloc[y, x]:.0f}%" for y, x in zip(down, across, strict=True)]
        figure.add_hover_texts(axes, across + 0.5, down + 0.5, labels)
        axes.set_title(order, loc="left", fontsize=9, fontweight="bold")
        axes.set(xlabel="", ylabel="")
        axes.tick_params(labelsize=8.5, rotation=0)
        axes.grid(visible=False)
    return drawn


def uncured(table: pd.DataFrame) -> pd.DataFrame:
    """The leak-safe budgets without a cure, the defense first, the smallest at the top."""
    return table[(table.order == "defense first") & (table.variant == "default")].sort_values("value")


def sooner(lost: pd.DataFrame) -> str:
    """How many policies forget which part sooner, in words that end a sentence. lost: of `study.forgotten_first`."""
    phrases = {"defense": "the defense sooner", "directive": "the directive sooner", "both": "both at once"}
    phrases |= {"neither": "neither"}
    counts = []
    for part, phrase in phrases.items():
        names = [figure.look(name).name for name in lost.policy[lost.part == part]]
        if names and len(names) == len(lost):
            return f"all {len(lost)} policies forget {phrase}" if len(lost) > 1 else f"{names[0]} forgets {phrase}"
        if names:
            counts.append(f"{len(names)} {'forgets' if len(names) == 1 else 'forget'} {phrase} ({', '.join(names)})")
    listed = ", and ".join(text for text in (", ".join(counts[:-1]), *counts[-1:]) if text)
    return f"of {len(lost)} policies, {listed}" if counts else stats.NOT_RUN


def say_empty(drawn: Figure, text: str) -> Figure:
    """The figure with a text in each panel where nothing was drawn."""
    for axes in drawn.axes:
        if not any(line.get_marker() not in ("None", "") for line in axes.lines):
            axes.text(0.5, 0.5, text, ha="center", va="center", transform=axes.transAxes, fontsize=7.5, color="#595959")
    return drawn
