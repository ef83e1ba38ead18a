"""Claims of a paper as data: the printed values, and the table of verdicts as the reader sees it.

A claims file (`data/claims/<chapter>.yml`) holds for each claim the printed value, as a reference to a cell of
`data/published/`, the contrast that computes ours, the test and the tolerance. `kvrepro.experiment.judge` decides them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from kvrepro.engine.policy import READINGS as READINGS  # of the verdicts
from kvrepro.errors import InputError
from kvrepro.paths import DATA

LABELS = {"as_run": "authors' code", "as_described": "authors' text"}
NOT_TESTABLE = "not testable here"
FIRST = ", as first written"  # after the id of a claim in its first form
VERDICTS = ("reproduced", "partly", "not reproduced", "inconclusive", NOT_TESTABLE)
STORED = "stored timings"  # the `model` of verdicts that rest on data/gpu, and not on this run
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # that of libyaml takes a quarter of the time
COLUMNS = """
    claim statement paper ours low high test p verdict reading model profile rule needed depends_on_reading unit members
    decided_by n topic source note
""".split()


# ---------------------------------------------------------------- the paper's side


def load_claims(chapter: str) -> dict[str, Any]:
    """Claims of a chapter: `{"sets": {name: [policy, ...]}, "claims": [claim, ...]}`. What they presume is among them.
    Those whose ids are listed under "timed" rest on seconds."""
    text = (DATA / "claims" / f"{chapter}.yml").read_text(encoding="utf-8")
    book: dict[str, Any] = yaml.load(text, Loader=LOADER)
    return book


@lru_cache(maxsize=1)
def one_sided() -> dict[tuple[str, str], dict[str, Any]]:
    """Rows of data/error_rates.csv of rules that could never hold or never fail, by claim and reading."""
    table = pd.read_csv(DATA / "error_rates.csv")
    rows = table[table.can_hold.eq(False) | table.can_fail.eq(False)].to_dict("records")
    return {(row["claim"], row["reading"]): row for row in rows}


@lru_cache(maxsize=64)
def published(file: str) -> pd.DataFrame:
    """One table of printed numbers, every cell as text."""
    return pd.read_csv(DATA / "published" / file, dtype=str, keep_default_na=False)


def cells(file: str, where: Mapping[str, object]) -> pd.DataFrame:
    """The printed rows that match: a value per column, or a list of values; `<column>_starts` for a beginning. Numbers
    match by value, however they are written. Raises InputError where no row matches."""
    table = published(file)
    keep = pd.Series(True, index=table.index)
    for column, wanted in where.items():
        if column.endswith("_starts"):
            keep &= table[column.removesuffix("_starts")].str.startswith(str(wanted))
        else:
            values = wanted if isinstance(wanted, list) else [wanted]
            numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
            texts = [str(value) for value in values if isinstance(value, str | bool)]
            matches = table[column].isin(texts)
            if numbers:
                matches |= pd.to_numeric(table[column], errors="coerce").isin(numbers)
            keep &= matches
    if not keep.any():
        raise InputError(f"no printed number in {file} matches {dict(where)}")
    return table[keep]


def paper_values(spec: Mapping[str, Any]) -> list[float]:
    """The numbers of one `paper` entry: the cells, their differences (`minus`), spread or count (`show`)."""
    rows = cells(spec["file"], spec["where"])
    column, key, show = spec.get("column", "value"), spec.get("by"), spec.get("show")
    if show == "count":
        return [float(len(rows))]
    if "minus" in spec:
        other = cells(spec["file"], spec["minus"])
        matched = {"on": key} if key else {"how": "cross"}
        pairs = rows.merge(other, suffixes=("_a", "_b"), **matched)
        values = (pairs[f"{column}_a"].astype(float) - pairs[f"{column}_b"].astype(float)).tolist()
    elif show == "spread":
        groups = [group for _, group in rows.groupby(key)] if key else [rows]
        values = [np.ptp(group[column].astype(float)).item() for group in groups]
    else:
        values = rows[column].astype(float).tolist()
    return [value * spec.get("scale", 1.0) for value in values]


def paper_text(spec: Mapping[str, Any] | Sequence[Mapping[str, Any]], unit: str = "") -> str:
    """The printed value as readers see it: one number, or the least and the greatest."""
    digits = 1 if unit == "%" else 3
    if isinstance(spec, Mapping) and "text" in spec:
        texts = {}
        for name, cell in spec.get("cells", {}).items():
            places = 0 if cell.get("show") == "count" else cell.get("digits", 3)
            texts[name] = f"{paper_values(cell)[0]:.{places}f}"
        return str(spec["text"]).format(**texts)
    values = list(itertools.chain(*map(paper_values, [spec] if isinstance(spec, Mapping) else spec)))
    counted = unit not in ("F1", "%") and all(float(value).is_integer() for value in values)
    low, high = (f"{value:g}" if counted else f"{value:.{digits}f}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


# ---------------------------------------------------------------- claims that were changed

# A claim that was written or changed when results were known has an entry `exploratory:` or `changed:` with the reason.
# `first:` holds the first form's entries, by which rows are judged too; null takes an entry away. What a claim
# `presumes` is no part of its first form.


def with_first(book: Sequence[Mapping[str, Any]], whose: str = "") -> list[dict[str, Any]]:
    """The claims, each with its first form behind it. whose: the source, whose words claims marked `ours` are not."""
    claims: list[dict[str, Any]] = []
    for claim in book:
        note = f" (Not in the {whose}'s words.)" if whose and "ours" in claim else ""
        claims.append({**claim, "statement": claim["statement"] + note})
        if "first" in claim:
            first = {**claims[-1], "presumes": None, **claim["first"], "id": claim["id"] + FIRST}
            claims.append({name: value for name, value in first.items() if value is not None})
    return claims


def marked(frame: pd.DataFrame, book: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """The table of verdicts without the rows of first forms. Statements give these verdicts instead, and say that a
    claim was written or changed late."""
    is_first = frame.claim.str.endswith(FIRST)
    notes = {claim["id"]: _note(claim, frame[frame.claim == claim["id"] + FIRST]) for claim in book}
    rest = frame[~is_first].reset_index(drop=True)
    return rest.assign(statement=(rest.statement + " " + rest.claim.map(notes).fillna("")).str.rstrip())


def _note(claim: Mapping[str, Any], first: pd.DataFrame) -> str:
    kind = {
        "exploratory": "Exploratory: written when results were known",
        "changed": "Changed when results were known",
        "presumes": "Its premise was added when results were known",
    }
    notes = [text for name, text in kind.items() if name in claim][:1]
    if len(first):
        texts = [f"{label(row.verdict)} with the {LABELS.get(row.reading, '')}" for row in first.itertuples()]
        verdicts = label(first.verdict.iloc[0]) if len(set(first.verdict)) == 1 else ", ".join(texts)
        notes.append(f"as first written ({first.rule.iloc[0]}): {verdicts}")
    return f"({'; '.join(notes)}.)" if notes else ""


# ---------------------------------------------------------------- the table of verdicts


def read(path: Path) -> pd.DataFrame:
    """The table from its file."""
    frame = pd.read_csv(path)
    return frame.fillna(dict.fromkeys(frame.columns.difference(["ours", "low", "high", "p", "n", "needed"]), ""))


def label(verdict: str) -> str:
    """A verdict as readers see it."""
    return {"partly": "partly reproduced"}.get(verdict, verdict)


PLAIN, KEPT = "Hugging Face, sdpa, DynamicCache", "everything kept"  # methods of data/gpu/models.csv: nothing evicted


def over(top: pd.Series, bottom: pd.Series, upper: str = "high") -> tuple[float, float, float, float | None]:
    """The ratio of two timings (seconds, low, high) per row of their batches, its lower and upper end, and the number
    of runs: the smaller of the two, None where a table does not count them. A ratio with a timing that was taken once
    has no ends. upper: the column of the upper end; "seconds" for the median."""
    rows = bottom.batch / top.batch if "batch" in top else 1
    runs = [float(table.runs) for table in (top, bottom) if "runs" in table]
    once = top.low == top.high or bottom.low == bottom.high
    low, high = (np.nan, np.nan) if once else (top.low / bottom[upper], top[upper] / bottom.low)
    return rows * (top.seconds / bottom.seconds), rows * low, rows * high, min(runs, default=None)
