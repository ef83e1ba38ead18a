"""Tables of the project: those that studies measure, row by row (CSV), and those of words (YAML)."""

import datetime
import importlib.metadata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from kvrepro.paths import DATA, write_table


def words(name: str) -> Any:
    """The content of data/words/<name>.yml."""
    return yaml.safe_load((DATA / "words" / f"{name}.yml").read_text(encoding="utf-8"))


def answers_of(folder: Path) -> pd.DataFrame:
    """All answers in a chapter's folder of results, each once."""
    frames = [pd.read_parquet(file) for file in sorted(folder.glob("**/*.parquet"))]
    answers = [frame for frame in frames if {"key", "prediction"} <= set(frame)]
    return pd.concat(answers, ignore_index=True).drop_duplicates("key") if answers else pd.DataFrame({"error": []})


def replace_rows(table: Path, rows: pd.DataFrame, key: Sequence[str], digits: int = 6) -> None:
    """Write rows into a table of the project (CSV) in the place of those with the same values in the columns `key`.
    digits: significant digits of its numbers."""
    old = pd.read_csv(table) if table.is_file() else rows[:0]
    same = pd.MultiIndex.from_frame(old[list(key)]).isin(pd.MultiIndex.from_frame(rows[list(key)]))
    whole = pd.concat([part for part in (old[~same], rows) if len(part)] or [rows], ignore_index=True)
    write_table(table, whole, f"%.{digits}g")


def versions(*packages: str) -> dict[str, str]:
    """The packages' versions, and today's date."""
    return {name: importlib.metadata.version(name) for name in packages} | {"date": f"{datetime.date.today()}"}
