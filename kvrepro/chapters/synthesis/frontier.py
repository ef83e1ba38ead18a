"""What a score costs: conditions by score, bytes and blocks, and the frontier that no other condition beats."""

from collections.abc import Mapping

import numpy as np
import pandas as pd

from kvrepro.experiment import figure, stats

COSTS = {"held": "keys and values held", "unfreed": "blocks not freed"}  # shares; less is better


def conditions(rows: pd.DataFrame, score: str = "score") -> pd.DataFrame:
    """A row per model and condition: `name`, kind, scorer, mean score with its interval, and means of its costs."""
    keys = ["model", "name", "kind", "scorer"]
    frame = rows.assign(name=_names(rows), unfreed=1 - rows.freed)
    costs = frame.groupby(keys, sort=False, dropna=False)[list(COSTS)].mean()
    return stats.means(frame, keys, score).merge(costs, on=keys)


def _names(rows: pd.DataFrame) -> pd.Series:
    """Each row's condition as text: a published method with its share, or the levels of a cell."""
    cell = pd.Series([_cell(row) for row in rows.to_dict("records")], index=rows.index)
    method = rows.method.map(lambda name: figure.look(name).name, na_action="ignore")
    share = rows.kept.map(lambda kept: f", {kept:.0%}", na_action="ignore").fillna("")
    return (cell.mask(rows.kind == "published", method) + share).mask(rows.kind == "full", "full cache")


def _cell(levels: Mapping[str, object]) -> str:
    """The levels of a cell as words, without those that mean "none"."""
    of_window = f" ({levels['aggregator']}, pooled: {levels['pooling']})" if levels["aggregator"] else ""
    guard = f"guard: {levels['guard']}" if levels["guard"] != "none" else ""
    quota = "quota" if levels["quota"] == "parts" else ""
    words = (f"{levels['scorer']}{of_window}", guard, levels["split"], quota, levels["regime"])
    return ", ".join(str(word) for word in words if word)


def frontier(table: pd.DataFrame, cost: str) -> pd.DataFrame:
    """The rows that no other row beats, by cost: no other is at least as good in score and cost and better in one."""
    ordered = table.sort_values([cost, "value"], ascending=[True, False], kind="stable")
    return ordered[ordered.value > ordered.value.cummax().shift(fill_value=-np.inf)]
