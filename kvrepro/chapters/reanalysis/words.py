"""What the scores are made of: the first word, which the full cache chooses under every policy, and all later words."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from kvrepro.chapters.reanalysis import printed
from kvrepro.experiment import stats

MEASURES = {"token_f1": "token F1", "first_f1": "F1 of the first word alone", "rest_f1": "F1 after the first word"}
CONTROL = "first word of the answer"


def by_table(scores: pd.DataFrame, tables: Sequence[str]) -> pd.DataFrame:
    """Per table and kind of run, each of `MEASURES` with its interval over items; and the control.

    The control answers with the right answer's first word only: its token F1 is what one right word is worth. Columns:
    table, who, value, low, high, n, measure. Answers of one word have no words after the first. The rows that several
    runs have for an item are one cluster.
    """
    rows = pd.concat([printed.runs(scores, table).assign(table=table) for table in tables])
    policy = np.where(rows.policy == "lru", "LRU, ", "other policies, ")
    kind = pd.Series(policy, rows.index) + np.where(rows.prefix > 0, "protected", "unprotected")
    rows = rows.assign(who=kind.mask(rows.policy == "full", "full cache"))
    by = ["table", "who"]
    parts = [stats.means(rows, by, column, clusters="item").assign(measure=name) for column, name in MEASURES.items()]
    control = rows.drop_duplicates(["table", "item"]).assign(who=CONTROL)
    return pd.concat([*parts, stats.means(control, by, "first_gold_f1").assign(measure="token F1")], ignore_index=True)
