"""Scores of the authors' public rows and of SmolLM2-135M, from committed tables, to stand beside a run's own."""

import numpy as np
import pandas as pd

from kvrepro.experiment import artifact, stats
from kvrepro.paths import DATA

NEEDLES, QUESTIONS = "ruler:niah_single_1,niah_single_2,niah_multikey_1,niah_multivalue", "protection-panel"
SMOL = {QUESTIONS: "SmolLM2, questions", NEEDLES: "SmolLM2, needles"}
AUTHORS = {  # set of items, model -> its name here
    ("longbench-pool", "Qwen/Qwen2.5-3B-Instruct"): "Qwen2.5-3B, questions",
    ("longbench-balanced", "Qwen/Qwen2.5-7B-Instruct"): "Qwen2.5-7B, questions",
    ("niah-64k", "Qwen/Qwen3-4B-Instruct-2507"): "Qwen3-4B, needles",
}
LABELS = {"bare": "no guards", "guards": "guards", "whole": "full cache", "unread": "no passage", "who": ""}
CONDITION = ["who", "policy", "reading", "capacity", "prefix", "suffix"]


def scores() -> pd.DataFrame:
    """Mean scores of conditions: columns who, policy, reading, capacity, prefix, suffix, cache (`cache_of`), value,
    low, high, n. SmolLM2's needles are scored by the share of the numbers found, all others by token F1."""
    rows = artifact.scores()
    items = rows["item"].str.rsplit("-", n=1).str[0]
    rows = rows.assign(who=[AUTHORS.get(pair) for pair in zip(items, rows.model, strict=True)]).dropna(subset="who")
    rows = rows[rows.temperature == 0].drop_duplicates([*CONDITION, "item"])
    authors = stats.means(rows.fillna({"capacity": 0}), CONDITION, "token_f1").replace({"capacity": {0: np.nan}})
    smol = pd.read_csv(DATA / "language_model_scores.csv").rename(columns={"kept": "capacity"})
    smol = smol[(smol.chapter == "protection") & smol["items"].isin(SMOL)]
    sides = smol.guard.str.replace("%", "").str.split(" + ", regex=False, expand=True).astype(float) / 100
    smol = smol.assign(who=smol["items"].map(SMOL), prefix=sides[0], suffix=sides[1])
    both = pd.concat([authors, smol[[*CONDITION, "value", "low", "high", "n"]]], ignore_index=True)
    return both.assign(cache=cache_of(both))


def cache_of(rows: pd.DataFrame, frac: float = 0.10) -> pd.Series:
    """What a row's cache is to the paper: `whole`, `bare` (no guards), `guards` (`frac` at both ends), `unread` (the
    passage is not shown), or missing."""
    same = np.isclose(rows.prefix, rows.suffix)
    kinds = {"whole": rows.policy == "full", "unread": rows.policy == "no_passage"}
    kinds |= {"bare": same & np.isclose(rows.prefix, 0), "guards": same & np.isclose(rows.prefix, frac)}
    return pd.Series(np.select(list(kinds.values()), list(kinds), None), rows.index)
