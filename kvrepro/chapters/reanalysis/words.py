"""What the scores are made of: the first word, which the full cache chooses under every policy, and all later words."""

from collections.abc import Sequence

import pandas as pd

from kvrepro.chapters.reanalysis import printed
from kvrepro.experiment import stats

MEASURES = {"token_f1": "token F1", "first_f1": "F1 of the first word alone", "rest_f1": "F1 after the first word"}
CONTROL = "first word of the answer"


def by_table(scores: pd.DataFrame, tables: Sequence[str] = tuple(printed.TABLES)) -> pd.DataFrame:
    """Per table and kind of run, each of `MEASURES` with its interval over items; and the control.

    The control answers with the right answer's first word only: its token F1 is what one right word is worth. Columns:
    table, who, measure, value, low, high, n. Answers of one word have no words after the first. The rows that several
    runs have for an item are one cluster. No tables give no rows.
    """
    if not tables:
        return pd.DataFrame(columns=["table", "who", "value", "low", "high", "n", "measure"]).astype({"value": float})
    parts = []
    for table in tables:
        rows = printed.runs(scores, table)
        rows = rows.assign(table=table, who=[_run_kind(*pair) for pair in zip(rows.policy, rows.prefix, strict=True)])
        for column, name in MEASURES.items():
            parts.append(stats.means(rows, ["table", "who"], column, clusters="item").assign(measure=name))
        items = rows.drop_duplicates("item").assign(who=CONTROL)
        parts.append(stats.means(items, ["table", "who"], "first_gold_f1").assign(measure="token F1"))
    return pd.concat(parts, ignore_index=True)


def _run_kind(policy: str, prefix: float) -> str:
    if policy == "full":
        return "full cache"
    return f"{'LRU' if policy == 'lru' else 'other policies'}, {'' if prefix else 'un'}protected"


def begun_alike(rows: pd.DataFrame) -> pd.DataFrame:
    """Share of outputs with the same first character as the full cache's output, by file (column `name`), where the
    full cache's run on the same model and items is public."""
    full = rows[rows.policy == "full"].drop_duplicates(["model", "item"])
    greedy = rows[(rows.policy != "full") & (rows.temperature == 0)]
    both = greedy.merge(full, on=["model", "item"], suffixes=("", "_full"))
    both = both.assign(alike=(both.begins == both.begins_full).astype(float))
    return stats.means(both, ["name", "items", "model_name", "policy", "protected"], "alike")
