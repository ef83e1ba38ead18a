"""Drawings that `kvrepro.experiment.figure` lacks: a heat map with marks in its cells, and panels without data."""

from collections.abc import Mapping, Sequence

import pandas as pd
from matplotlib.figure import Figure

from kvrepro.experiment import figure, stats


def safe_budget_map(table: pd.DataFrame) -> Figure:
    """Leak-safe budgets (`study.safe_budgets`) in percent, policies by cures, a panel per order.

    A cross marks a budget at which the model follows less than half of what it follows uncompressed; blank: not run.
    """
    cures, policies = (list(dict.fromkeys(table[name])) for name in ("variant", "policy"))
    height = 0.9 + 0.32 * len(policies)
    drawn = figure.heat(
        table, "variant", "policy", panel="order", percent=True, form=".0f", height=height, labels={"variant": ""},
        vmin=0, vmax=100,
    )  # fmt: skip
    for axes, (_, part) in zip(drawn.axes, table.groupby("order", sort=False), strict=True):
        little = part[~part.follows]
        crossed = {(cures.index(x) + 0.5, policies.index(y) + 0.5) for x, y in little[["variant", "policy"]].to_numpy()}
        for text in axes.texts:
            text.set_text(f"{text.get_text()}%{' ×' * (text.get_position() in crossed)}")
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
            every = "both policies" if len(lost) == 2 else f"all {len(lost)} policies"
            return f"{every} forget {phrase}" if len(lost) > 1 else f"{names[0]} forgets {phrase}"
        if names:
            counts.append(f"{len(names)} {'forgets' if len(names) == 1 else 'forget'} {phrase} ({', '.join(names)})")
    if not counts:
        return "no policy can be judged"
    return f"of {len(lost)} policies, {_joined(counts, ', and ')}"


def classes_apart(accuracy: pd.DataFrame) -> str:
    """How far the best and the worst class lie apart at most, and under which policies, in words that end a
    sentence. accuracy: `stats.means` by policy, class and ratio; classes with too few rules for an interval do not
    count."""
    cells = accuracy[accuracy.n >= stats.MIN_ITEMS].groupby(["policy", "ratio"], sort=False).value
    gaps = (cells.max() - cells.min())[cells.size() > 1]
    if gaps.empty:
        return "could not be compared"
    widest = gaps[gaps > gaps.max() - 1e-6]  # several may tie
    names = (figure.look(name).name for name in dict.fromkeys(widest.index.get_level_values("policy")))
    return f"lie up to {100 * gaps.max():.0f} points apart (under {', '.join(names)})"


def phrases(rows: pd.DataFrame) -> str:
    """Whether it matters for leakage which phrase a whitelist keeps: the first sentence or the prohibition. rows: a
    system prompt's leakage (`value`) by `variant`, under one policy with one share dropped."""
    first, prohibition = (rows[rows.variant == name] for name in ("first sentence", "whitelist"))
    gaps = stats.contrasts(first, prohibition, "policy", "value", on=["system", "order"], clusters="system")
    if gaps.empty or pd.isna(gaps.value.iloc[0]):
        return "Whether it matters which phrase is on the whitelist was not run."
    low, high = gaps.low.iloc[0], gaps.high.iloc[0]
    if low > 0 or high < 0:
        return "It matters which phrase is on the whitelist."
    return "This run does not show that it matters which phrase is on the whitelist."


def listed(leakage: pd.DataFrame, ways: Mapping[str, str]) -> str:
    """Leakage by variant in words, without those that were not run: `80% by default and 2% with the prohibition kept`.
    ways: variant -> how the sentence names it."""
    values = {variant: stats.as_text(leakage, "%", variant=variant) for variant in ways}
    parts = [f"{value} {ways[variant]}" for variant, value in values.items() if value != stats.NO_VALUE]
    return _joined(parts, ", and " if len(parts) > 2 else " and ")


def _joined(parts: Sequence[str], last: str) -> str:
    """The parts with commas between them, and `last` before the last one."""
    return last.join(text for text in (", ".join(parts[:-1]), *parts[-1:]) if text)


def say_empty(drawn: Figure, text: str) -> Figure:
    """The figure with a text in each panel where nothing was drawn."""
    for axes in drawn.axes:
        if not any(line.get_marker() not in ("None", "") for line in axes.lines):
            axes.text(0.5, 0.5, text, ha="center", va="center", transform=axes.transAxes, fontsize=7.5, color="#595959")
    return drawn
