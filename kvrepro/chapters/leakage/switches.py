"""What the choices move in which the public code and the paper differ: those that were run both ways."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from kvrepro.chapters.leakage import scores
from kvrepro.chapters.leakage.cells import FAIR_DIFFERS
from kvrepro.chapters.leakage.runs import ChapterRows
from kvrepro.experiment import claims, figure, stats


def measured(found: ChapterRows) -> pd.DataFrame:
    """The switches that were run both ways, with what they move: rows (switch, measure), columns the two ways. At the
    ratio that was run without the preamble, the defense first."""
    main, bare, worst = (
        scores.score(rows[rows.order == "normal"], found.items, failed)
        for rows, failed in ((found.main, "missing"), (found.bare, "missing"), (found.main, "worst"))
    )
    kept = scores.keep_rates(found.main[found.main.order == "normal"])
    first = "streaming_llm" if "streaming_llm" in set(main.policy) else found.bare.policy.iloc[-1]
    here = {"policy": first, "ratio": found.bare.ratio.max(), "variant": "default", "reading": "as_described"}
    gaps = main[scores.unmet(main)].sort_values("ratio")
    gap = gaps.iloc[-1][list(here)].to_dict() if len(gaps) else here
    rows: list[tuple[str, str, str, list]] = [
        ("preamble", "leakage by reference, with and without it", first,
         [(main, "tells_directive", {}), (main, "told", {})]),
        ("preamble", "leakage, prompt with and without it", first, [(main, "told", {}), (bare, "told", {})]),
        ("preamble", "following, prompt with and without it", first, [(main, "followed", {}), (bare, "followed", {})]),
        ("keep rate of the defense", "all outside the directive, the defense", first,
         [(kept, "kept", {"part": part}) for part in ("outside", "defense")]),
        *[(switch, "leakage", name, [(main, "told", {"variant": variant, "reading": one}) for one in claims.READINGS])
          for switch, name, variant in (("SnapKV window", "snapkv", "default"),
                                        *[("fair variants", name, "fair") for name in FAIR_DIFFERS])],
        ("failed items", f"{gap['variant']}, {gap['ratio']:.0%} dropped, leakage: left out, counted as failed",
         gap["policy"], [(main, "told", gap), (worst, "told", gap)]),
        ("accuracy", "strict and loose", first, [(main, "followed", {}), (main, "followed_loose", {})]),
    ]  # fmt: skip
    table = [
        (switch, what, figure.look(name).name, *[_said(a, by, here | {"policy": name} | b) for a, by, b in pair])
        for switch, what, name, pair in rows
    ]
    columns = ["switch", f"measured at {here['ratio']:.0%} dropped", "policy", "first way", "second way"]
    return pd.DataFrame(table, columns=columns).set_index("switch")


def _said(rows: pd.DataFrame, measure: str, where: Mapping[str, Any]) -> str:
    """Mean of a measure over the system prompts of one cell."""
    for name, value in where.items():
        rows = rows[rows[name] == value]
    return stats.told(stats.means(rows, "order", measure, clusters="system")) if len(rows) else "not run"
