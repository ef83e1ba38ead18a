"""How often the 95% intervals of `kvrepro.experiment.stats` cover the truth, beside the rules that were not chosen.

Populations are like the project's data: F1 per item (many zeros and ones, the rest in between), paired differences of
them, ratios of their means, values without bounds (symmetric ones, and others with a long tail), and medians and
quantiles of clustered values. Writes data/coverage.csv: a row per quantity, population, n and rule.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import pandas as pd
import typer
from scipy import stats as scipy_stats

from kvrepro.experiment import stats
from kvrepro.experiment.stats import UNIT
from kvrepro.paths import DATA, write_table

SIZES = (6, 8, 12, 20, 48, 100, 200)
PARTIAL = np.array([0.2, 0.29, 0.33, 0.4, 0.5, 0.57, 0.67, 0.8])  # token F1 of answers that are partly right
UNBOUNDED = "mean without bounds"
Draw = Callable[[np.random.Generator, int], pd.DataFrame]  # a sample of n items
Ends = tuple[float, float]


# ---- populations


def scores(rng: np.random.Generator, n: int, zeros: float, ones: float) -> pd.DataFrame:
    """Column a: a share of zeros, of the rest a share of ones, else partly right."""
    right = np.where(rng.random(n) < ones, 1.0, rng.choice(PARTIAL, n))
    return pd.DataFrame({"a": np.where(rng.random(n) < zeros, 0.0, right)})


def pairs(rng: np.random.Generator, n: int, ties: float, wins: float) -> pd.DataFrame:
    """Columns a and b: F1 of two conditions with a share of ties, of the rest a share where a is better."""
    low, gap = scores(rng, n, 0.6, 0.3).a, rng.choice([0.2, 0.33, 0.5, 1.0], n)
    high = np.minimum(1.0, low + gap)
    tied, won = rng.random(n) < ties, rng.random(n) < wins
    return pd.DataFrame({"a": np.where(won & ~tied, high, low), "b": np.where(won | tied, low, high)})


def shares(rng: np.random.Generator, n: int, zeros: float, ceiling: float) -> pd.DataFrame:
    """Columns a and full: F1 of a condition and of the full cache."""
    full = scores(rng, n, 1 - ceiling, 0.9).a
    return pd.DataFrame({"a": full * scores(rng, n, zeros, 0.6).a, "full": full})


def free(rng: np.random.Generator, n: int, sigma: float) -> pd.DataFrame:
    """Column a: values without bounds, log-normal; normal where sigma is 0."""
    values = rng.normal(size=n)
    return pd.DataFrame({"a": np.exp(sigma * values) if sigma else values})


def clusters(rng: np.random.Generator, n: int, rows: int) -> pd.DataFrame:
    """Column x: ratios above 1 with a long tail, `rows` to a prompt (the index), prompts alike within."""
    shift = np.repeat(rng.normal(0, 0.4, n), rows)
    values = 1 + np.exp(-3 + shift + 1.2 * rng.normal(size=n * rows))
    return pd.DataFrame({"x": values}, pd.Index(np.repeat(np.arange(n), rows), name="prompt"))


def several(rng: np.random.Generator, n: int, apart: float) -> pd.DataFrame:
    """Five columns of the same items, whose means lie `apart` of a standard deviation from each other."""
    values = 0.5 * rng.normal(size=(n, 1)) + rng.normal(size=(n, 5)) + apart * np.arange(5)
    return pd.DataFrame(values, columns=[*"vwxyz"])


POPULATIONS: dict[str, dict[str, Draw]] = {
    "mean": {f"{z:.0%} zeros, {o:.0%} of the rest ones": partial(scores, zeros=z, ones=o)
             for z, o in itertools.product((0.02, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95), (0.0, 0.5, 1.0))},
    "difference": {f"{t:.0%} ties, {w:.0%} of the rest wins": partial(pairs, ties=t, wins=w)
                   for t, w in itertools.product((0.0, 0.5, 0.75, 0.9), (0.5, 0.75, 1.0))},
    "share_of_ceiling": {f"{z:.0%} zeros, ceiling {c:.0%}": partial(shares, zeros=z, ceiling=c)
                         for z, c in itertools.product((0.1, 0.5, 0.8), (0.6, 0.95))},
    UNBOUNDED: {f"log-normal, sigma {s:g}" if s else "normal": partial(free, sigma=s) for s in (0.0, 0.5, 1.0)},
    **{quantity: {f"{rows} rows to a prompt": partial(clusters, rows=rows) for rows in (4, 24)}
       for quantity in ("median", "95th percentile over median")},
    "largest mean": {f"five means, {apart:g} sd apart": partial(several, apart=apart) for apart in (0.0, 0.1)},
}  # fmt: skip
RESAMPLED: dict[str, Callable[[np.ndarray], float]] = {
    "median": lambda v: float(np.median(v)),
    "95th percentile over median": lambda v: float(np.quantile(v, 0.95) / np.median(v)),
    "largest mean": lambda v: float(v.mean(0).max()),
}


# ---- rules


def _differences(f: pd.DataFrame) -> np.ndarray:
    """Column a, minus column b if there is one."""
    a = f["a"].to_numpy()
    return a - f["b"].to_numpy() if "b" in f else a


def chosen(quantity: str, f: pd.DataFrame) -> Ends:
    """The interval that `kvrepro.experiment.stats` gives."""
    if quantity in RESAMPLED:
        labels, limits = (f.index, (1.0, np.inf)) if f.index.name == "prompt" else (None, stats.ANY)
        e = stats.contrast(f, RESAMPLED[quantity], labels, limits=limits)
    elif quantity == UNBOUNDED:
        e = stats.interval(f.a)
    else:
        e = stats.contrast(f, quantity, bounds=UNIT)
    return e.low, e.high


def student(quantity: str, f: pd.DataFrame) -> Ends:
    """Student's t on the mean."""
    return scipy_stats.ttest_1samp(_differences(f), 0.0).confidence_interval()


def bca(quantity: str, f: pd.DataFrame) -> Ends:
    """scipy's bootstrap of the mean, bias-corrected and accelerated."""
    x = _differences(f)
    if not np.ptp(x):
        return x[0], x[0]
    rng = np.random.default_rng(1)
    return scipy_stats.bootstrap((x,), np.mean, n_resamples=500, method="BCa", rng=rng).confidence_interval


RULES: dict[str, Callable[[str, pd.DataFrame], Ends]] = {"chosen": chosen, "Student's t": student, "BCa": bca}


# ---- simulation


def truth(quantity: str, draw: Draw) -> float:
    """The population's value, from many items."""
    f = draw(np.random.default_rng(0), 200_000)
    if quantity in RESAMPLED:
        return RESAMPLED[quantity](f.to_numpy())
    return float(f.a.mean() / f.full.mean()) if quantity == "share_of_ceiling" else float(_differences(f).mean())


def cover(quantity: str, name: str, n: int, rules: Sequence[str], repeats: int) -> pd.DataFrame:
    """A row per rule for one cell: the share of repeats whose interval covers the truth, and the mean width."""
    draw, rng = POPULATIONS[quantity][name], np.random.default_rng([0, n])
    value = truth(quantity, draw)
    samples = [draw(rng, n) for _ in range(repeats)]
    rows = []
    for rule in rules:
        ends = np.array([RULES[rule](quantity, f) for f in samples])
        inside = (ends[:, 0] <= value + 1e-9) & (value - 1e-9 <= ends[:, 1])
        rows.append((quantity, name, n, rule, inside.mean(), np.diff(ends, axis=1).mean(), repeats))
    return pd.DataFrame(rows, columns=["quantity", "population", "n", "rule", "coverage", "width", "repeats"])


def main() -> None:
    """Simulate, write the table, and print each rule's coverage by quantity and n. Rules that resample are slow: they
    get fewer repeats, and the quantities in `RESAMPLED` no more than 48 items."""
    parts = []
    for quantity, n in itertools.product(POPULATIONS, SIZES):
        slow = quantity in RESAMPLED
        for name in POPULATIONS[quantity] if not (slow and n > 48) else ():
            parts.append(cover(quantity, name, n, ["chosen"], 200 if slow else 2000))
            if quantity in ("mean", "difference", UNBOUNDED):
                parts.append(cover(quantity, name, n, ["Student's t"], 2000))
                if n in (6, 12, 48):
                    parts.append(cover(quantity, name, n, ["BCa"], 300))
    coverages = pd.concat(parts, ignore_index=True)
    write_table(DATA / "coverage.csv", coverages)
    shown = coverages.groupby(["quantity", "rule", "n"]).coverage.agg(["min", "mean", "max"]).round(3)
    typer.echo(shown.to_string())


if __name__ == "__main__":
    typer.run(main)
