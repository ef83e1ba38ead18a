"""The runner's rows with their cells of the grid."""

import json

import numpy as np
import pandas as pd

from kvrepro.chapters.synthesis import grid
from kvrepro.chapters.synthesis.policies import NAMES
from kvrepro.experiment import measure

CELLS = {f"{grid.FILE}:{name}": pair for pair, name in NAMES.items()}  # policy of a cell -> its scorer and split


def tidy(table: pd.DataFrame) -> pd.DataFrame:
    """What a row says of its item and answer, the factors of `grid.FACTORS`, `kept`, `kind` ("full", "published",
    "grid"), `method`, `score`, and what `study.kept_of` says of the kept set."""
    table = table.reset_index(drop=True)
    switches = pd.DataFrame([json.loads(text) for text in table.switches])
    switches = switches.reindex(columns=["aggregate", "pool", "sinks"])
    scorer, split = (table.policy.map({policy: pair[i] for policy, pair in CELLS.items()}) for i in range(2))
    of_grid, full, capped = scorer.notna(), table.policy == "full", table.regime == "decode cap"
    unseen = np.where(table.until == "question", "question unseen", "question seen")
    factors = pd.DataFrame({
        "scorer": scorer, "aggregator": switches["aggregate"], "pooling": switches["pool"],
        "guard": np.where(table.prefix > 0, "ends", np.where(switches.sinks.notna(), "sinks", "none")),
        "split": split.where(scorer != "position"),
        "quota": pd.Series(np.where(table.fair.notna(), "parts", "none")).where(~capped),
        "regime": np.where(capped, "decode cap", unseen),
    }).where(of_grid)  # fmt: skip
    shown = table[["model", "item", "task", "prediction", "rest_f1", "evidence_at"]].assign(
        kind=np.where(full, "full", np.where(of_grid, "grid", "published")), kept=table.share,
        method=table.policy.where(~of_grid & ~full), score=measure.scores(table),
    )  # fmt: skip
    notes = pd.DataFrame([json.loads(note) if isinstance(note, str) else {} for note in table.note])  # {}: it failed
    return pd.concat([shown, factors.astype(object).where(factors.notna(), None), notes], axis=1)
