"""How much the choices matter in which the public code and the paper differ."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from kvrepro.chapters.leakage import scores
from kvrepro.chapters.leakage.cells import FAIR_DIFFERS
from kvrepro.chapters.leakage.runs import ChapterRows
from kvrepro.experiment import claims, figure, stats


def measured(chapter: ChapterRows) -> pd.DataFrame:
    """Means of a measure for each of two ways to set a switch, a row per switch and measure. At the ratio that was run
    without the preamble, the defense first."""
    main, bare, worst = (
        scores.score(rows[rows.order == "normal"], chapter.items, failed)
        for rows, failed in ((chapter.main, "missing"), (chapter.bare, "missing"), (chapter.main, "worst"))
    )
    kept = scores.keep_rates(chapter.main[chapter.main.order == "normal"])
    first = "streaming_llm" if "streaming_llm" in set(main.policy) else chapter.bare.policy.iloc[-1]
    cell = {"policy": first, "ratio": chapter.bare.ratio.max(), "variant": "default", "reading": "as_described"}
    gaps = main[scores.unmet(main)].sort_values("ratio")
    gap = gaps.iloc[-1][list(cell)].to_dict() if len(gaps) else cell
    rows: list[tuple[str, str, str, list]] = [
        ("preamble", "leakage by reference, with and without it", first,
         [(main, "tells_directive", {}), (main, "told", {})]),
        ("preamble", "leakage, prompt with and without it", first, [(main, "told", {}), (bare, "told", {})]),
        ("preamble", "following, prompt with and without it", first, [(main, "followed", {}), (bare, "followed", {})]),
        ("keep rate of the defense", "all outside the directive, the defense", first,
         [(kept, "kept", {"part": part}) for part in ("outside", "defense")]),
        *[(switch, "leakage", name, [(main, "told", {"variant": v, "reading": reading}) for reading in claims.READINGS])
          for switch, name, v in (("SnapKV window", "snapkv", "default"),
                                  *[("fair variants", name, "fair") for name in FAIR_DIFFERS])],
        ("failed items", f"{gap['variant']}, {gap['ratio']:.0%} dropped, leakage: left out, counted as failed",
         gap["policy"], [(main, "told", gap), (worst, "told", gap)]),
        ("accuracy", "strict and loose", first, [(main, "followed", {}), (main, "followed_loose", {})]),
    ]  # fmt: skip
    table = []
    for switch, label, name, pair in rows:
        ways = [_mean(part, column, cell | {"policy": name} | where) for part, column, where in pair]
        table.append((switch, label, figure.look(name).name, *ways))
    columns = ["switch", f"measured at {cell['ratio']:.0%} dropped", "policy", "first way", "second way"]
    return pd.DataFrame(table, columns=columns).set_index("switch")


def _mean(rows: pd.DataFrame, measure: str, where: Mapping[str, Any]) -> str:
    """Mean of a measure over the system prompts of one cell, with its interval, as text."""
    for name, value in where.items():
        rows = rows[rows[name] == value]
    return stats.as_text(stats.means(rows, "order", measure, clusters="system")) if len(rows) else "not run"
