"""The judge of the chapters that have not moved to `judge` yet. Goes with the last of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
import pandas as pd

from kvrepro.errors import InputError
from kvrepro.experiment.claims import (  # noqa: F401
    beside,
    cells,
    glue,
    load_claims,
    overview,
    paper_text,
    paper_values,
    published,
    summary,
    table,
    write,
)

READINGS = ("as_run", "as_described")
VERDICTS = ("reproduced", "partly", "not reproduced", "not testable here")
COLUMNS = ["claim", "statement", "paper", "ours", "low", "high", "test", "p", "verdict", "reading", "model", "profile"]
EXTRA = ["rule", "needed", "depends_on_reading", "unit", "members", "decided_by", "n", "topic", "source", "note"]
NEEDS_CEILING = {
    "mean",
    "difference",
    "share_of_ceiling",
    "spread",
    "lift_minus_spread",
    "share_of_limit",
    "correlation",
}
MIN_CEILING = 0.10  # lower bound of the full cache's F1 below which a quality claim says nothing
MIN_SINK = 0.10  # attention mass on position 0, in some layer, from which on a model is said to have a sink
MIN_ITEMS = 6  # below that no two-sided sign or rank test of pairs can reach 5%, and an interval says less still
DRAWS = 10_000


class Missing(Exception):
    """The results hold no row for a cell that a claim needs."""


# ---------------------------------------------------------------- the paper's side


def _ratio(top: np.ndarray, bottom: np.ndarray) -> np.ndarray:
    return np.divide(top, bottom, out=np.full_like(top, np.nan), where=bottom > 0)


def _spread(means: Mapping[str, np.ndarray]) -> np.ndarray:
    across = np.stack([value for name, value in means.items() if name.startswith("a:")])
    return across.max(0) - across.min(0)


def _correlation(means: Mapping[str, np.ndarray]) -> np.ndarray:
    x, y = (
        np.stack([value for name, value in sorted(means.items()) if name.startswith(axis)]) for axis in ("x:", "y:")
    )
    x, y = x - x.mean(0), y - y.mean(0)
    return _ratio((x * y).sum(0), np.sqrt((x**2).sum(0) * (y**2).sum(0)))


# Every contrast is a function of column means, so that one matrix of resampled means gives its interval.
CONTRASTS = {
    "mean": lambda m: m["a"],
    "difference": lambda m: m["a"] - m["b"],
    "share_of_ceiling": lambda m: _ratio(m["a"] - m.get("b", 0.0), m["full"]),
    "spread": _spread,
    "lift_minus_spread": lambda m: m["a"] - m["b"] - _spread(m),
    "share_of_limit": lambda m: m["a"],
    "same_kept": lambda m: m["a"],
    "reinvoked": lambda m: m["a"],
    "correlation": _correlation,
    "sink_share": lambda m: _ratio(m["sink"], m["sink"] + m["prefix"]),
    "boundary_density": lambda m: _ratio(m["mass"], m["share"]),
}


@lru_cache(maxsize=16)
def _weights(n: int, seed: int) -> np.ndarray:
    """Bootstrap weights [DRAWS, n]: how often each item was drawn, over n."""
    return np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=DRAWS) / n


def estimate(frame: pd.DataFrame, contrast: str, *, level: float = 0.95, seed: int = 42) -> tuple[float, float, float]:
    """Value and percentile interval of a contrast over items (rows are items, resampled together)."""
    compute, values = CONTRASTS[contrast], frame.to_numpy(float)
    means = [values.mean(0, keepdims=True), _weights(len(frame), seed) @ values]
    point, draws = (compute(dict(zip(frame.columns, part.T, strict=True))) for part in means)
    decided = len(frame) >= MIN_ITEMS and np.isfinite(draws).any()
    low, high = np.nanpercentile(draws, [50 - 50 * level, 50 + 50 * level]) if decided else (np.nan, np.nan)
    return float(point[0]), float(low), float(high)


# ---------------------------------------------------------------- verdicts


def judge(rule: Mapping, value: float, low: float, high: float, p: float | None) -> str:
    """`holds`, `fails` or `undecided` for one member, by its interval [low, high] and, where there is one, its p."""
    (kind, bound), significant = next(iter(rule.items())), p is None or p < 0.05
    if np.isnan(low) or np.isnan(high):
        return "undecided"
    if kind == "at_least":
        return (
            "holds" if low > bound and significant else "fails" if high < bound or low == high == bound else "undecided"
        )
    if kind == "at_most":
        return "holds" if high < bound and significant else "fails" if low > bound else "undecided"
    if kind == "between":
        return (
            "holds"
            if bound[0] <= low and high <= bound[1]
            else "fails"
            if high < bound[0] or low > bound[1]
            else "undecided"
        )
    if kind == "no_difference":
        return "fails" if significant else "holds" if -bound < low and high < bound else "undecided"
    if kind == "equivalent":
        return "holds" if significant else "fails" if high < -bound or low > bound else "undecided"
    raise InputError(f"unknown rule {kind!r}: known are at_least, at_most, between, no_difference, equivalent")


def verdict(states: Sequence[str]) -> str:
    """Verdict of a claim from its members: it is reproduced where all hold, and not where none does or most fail."""
    holds, fails = states.count("holds"), states.count("fails")
    if not holds + fails:
        return "not testable here"
    if holds == len(states):
        return "reproduced"
    return "not reproduced" if not holds or fails > len(states) / 2 else "partly"


def _against(rule: Mapping, value: float, low: float, high: float) -> float:
    """How far a member speaks against its claim, for choosing the one to show."""
    kind, bound = next(iter(rule.items()))
    if kind == "at_least":
        return -low
    if kind == "at_most":
        return high
    if kind == "between":
        return max(bound[0] - low, high - bound[1])
    return max(abs(low), abs(high))


TESTS = {
    "wilcoxon_holm": "Wilcoxon, Holm",
    "tost": "paired TOST",
    "sign": "sign test over domains",
    None: "bootstrap interval",
}


def claim_row(claim: Mapping, found: pd.DataFrame | str) -> dict:
    """One row of the claims table, from the members or from the reason why there are none."""
    unit = claim.get("unit", "F1")
    row = {
        "claim": claim["id"],
        "statement": claim["statement"],
        "paper": paper_text(claim["paper"], unit),
        "test": TESTS[claim.get("test")],
        "unit": unit,
        "topic": claim["topic"],
        "source": claim["source"],
        "note": claim.get("why", ""),
        "rule": "",
        "needed": np.nan,
    }
    if isinstance(found, str):
        return row | {"verdict": "not testable here", "note": found, "test": "none", "members": "", "decided_by": ""}
    order = found.assign(
        rank=found.state.map({"fails": 0, "undecided": 1, "holds": 2}),
        against=[-_against(claim["rule"], m.value, m.low, m.high) for m in found.itertuples()],
    ).sort_values(["rank", "against"])
    worst, scale = order.iloc[0], 100.0 if unit == "%" else 1.0
    counts = found.state.value_counts()
    if counts.get("undecided", 0) == len(found):
        row["note"] = f"the interval straddles the tolerance with {int(worst.n)} items"
    return row | {
        "ours": worst.value * scale,
        "low": worst.low * scale,
        "high": worst.high * scale,
        "p": worst.p,
        "n": int(worst.n),
        "verdict": verdict(found.state.tolist()),
        "members": ", ".join(
            f"{counts[state]} {state}" for state in ("holds", "undecided", "fails") if state in counts
        ),
        "decided_by": worst.member if len(found) > 1 else "",
    }


def _depends(states: Sequence[Mapping[str, str]]) -> str:
    """Does the reading decide? yes: a member holds in one and fails in the other; unclear: it is open in one."""
    if len(states) < 2 or not all(states):
        return ""
    pairs = [{one[member] for one in states if member in one} for member in states[0]]
    return "yes" if {"holds", "fails"} in pairs else "unclear" if any(len(pair) > 1 for pair in pairs) else "no"


def _text(values: tuple[float, ...], unit: str) -> str:
    """A value with its interval, in a unit."""
    value, low, high = values
    if np.isnan(value):
        return "no value"
    if value == low == high and float(value).is_integer():  # counted, not estimated
        return f"{value:g}" + ("" if unit == "F1" else f" {unit}")
    if unit not in ("F1", "%") and 0 < np.nanmax(np.abs(values)) < 5e-4:  # errors of rounding: zeros would hide them
        said = [f"{one:.1g}" for one in values]
        return (said[0] if value == low == high else f"{said[0]} [{said[1]}, {said[2]}]") + f" {unit}"
    digits = 1 if unit == "%" else 3
    interval = "too few items" if np.isnan(low) else f"{low:.{digits}f}, {high:.{digits}f}"
    return f"{value:.{digits}f} [{interval}]" + ("" if unit == "F1" else f" {unit}")


def shown(row, with_unit: bool = False) -> str:
    """Ours with its interval; empty where there is none."""
    if pd.isna(row.ours):
        return ""
    text = _text((row.ours, row.low, row.high), row.unit)
    return text if with_unit else text.removesuffix(f" {row.unit}")
