"""Claims of a source as data (`data/claims/<chapter>.yml`), and the table of verdicts as the reader sees it.

A claim has what the source says and printed, the contrast that computes ours, the test and the tolerance.
`kvrepro.experiment.judge` decides. A claim that was written or changed when results were known has an entry
`exploratory:` or `changed:` with the reason. `first:` holds the first form's entries, by which rows are judged too;
null takes an entry away. What a claim `presumes` is no part of its first form.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import pandas as pd
import yaml

from kvrepro.paths import DATA

LABELS = {"as_run": "authors' code", "as_described": "authors' text"}
NOT_TESTABLE = "not testable here"
FIRST = ", as first written"  # after the id of a claim in its first form
VERDICTS = ("reproduced", "partly", "not reproduced", "inconclusive", NOT_TESTABLE)
LATE = {
    "exploratory": "Exploratory: written when results were known",
    "changed": "Changed when results were known",
    "presumes": "Its premise was added when results were known",
}
STORED = "stored timings"  # the `model` of verdicts that rest on data/gpu, and not on this run
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # that of libyaml takes a quarter of the time
COLUMNS = """
    claim statement paper ours low high test p verdict reading model profile rule unit members decided_by n topic source
    note
""".split()


def load_claims(chapter: str) -> dict[str, Any]:
    """Claims of a chapter: `{"sets": {name: [policy, ...]}, "claims": [claim, ...]}`. Those whose ids are listed under
    "timed" rest on seconds. `whose`: the source, whose words claims marked `ours` are not; statements then say so."""
    text = (DATA / "claims" / f"{chapter}.yml").read_text(encoding="utf-8")
    book: dict[str, Any] = yaml.load(text, Loader=LOADER)
    for claim in book["claims"]:
        claim["statement"] += f" (Not in the {book['whose']}'s words.)" if "ours" in claim and "whose" in book else ""
    return book


@lru_cache(maxsize=64)
def published(file: str) -> pd.DataFrame:
    """One table of printed numbers, every cell as text."""
    return pd.read_csv(DATA / "published" / file, dtype=str, keep_default_na=False)


def first_form(claim: Mapping[str, Any]) -> dict[str, Any]:
    """What a claim was before results were known."""
    first = {**claim, "presumes": None, **claim["first"], "id": claim["id"] + FIRST}
    return {name: value for name, value in first.items() if value is not None}


def note(claim: Mapping[str, Any], first: Sequence[Mapping[str, Any]]) -> str:
    """That a claim was written or changed late, and what came of its first form, of which these are rows."""
    notes = [text for name, text in LATE.items() if name in claim][:1]
    if first:
        verdicts = list(dict.fromkeys(row["verdict"] for row in first))
        texts = [f"{row['verdict']} with the {LABELS.get(row['reading'], '')}" for row in first]
        notes.append(f"as first written ({first[0]['rule']}): {', '.join(texts if verdicts[1:] else verdicts)}")
    return f" ({'; '.join(notes)}.)" if notes else ""


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
