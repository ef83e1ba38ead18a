"""A chapter's verdicts in its notebook: tables beside the figures, findings written by hand, the file of all claims.

    judged = Verdicts("protection", loaded, settings)
    judged(rows, "P1", "P2")
    judged.box(rows, f"- LRU scores {value:.2f}.", presumes={"P6": "not reproduced"})
    judged.write({"main": rows, "attention": attention})

A study's tables go by their names; a single table is the study `main`. Findings and titles name the verdicts that they
presume. Where a run comes out differently, its own verdicts stand in their place.
"""

import importlib
import re
from collections.abc import Collection, Mapping
from typing import Any, TypeAlias

import pandas as pd
from IPython.display import Markdown, display
from pandas.io.formats.style import Styler

from kvrepro.experiment import claims, members
from kvrepro.experiment.models import Loaded
from kvrepro.experiment.run import Settings
from kvrepro.paths import write_table

FOUND, HERE = "**What we found**", "**On this model**"  # titles of the box of findings
Tables: TypeAlias = pd.DataFrame | Mapping[str, Any]
Presumed: TypeAlias = Mapping[str, str | Mapping[str, str]]  # claim -> its verdict, or those by reading


def verdicts(
    chapter: str, tables: Mapping[str, Any], loaded: Loaded | None, settings: Settings, only: Collection[str] = ()
) -> pd.DataFrame:
    """The table of verdicts, `claims.COLUMNS`: of the claims in `only` and those that they presume, or of all; and of
    those about a reader's own policies."""
    book = claims.load_claims(chapter)
    premise = {claim["id"]: claim.get("presumes") for claim in book["claims"]}
    wanted = list(only or premise)
    for name in wanted:  # which grows: a premise has its own
        wanted += [premise[name]] if premise[name] and premise[name] not in wanted else []
    book = {**book, "claims": [claim for claim in book["claims"] if claim["id"] in wanted]}
    module = importlib.import_module(f"kvrepro.chapters.{chapter}.members")
    assert loaded is not None  # only tests judge without a model, by tables of their own
    tidied = module.tidied(tables, loaded, settings)
    return members.verdicts(book, tidied, module, model=loaded.name, profile=settings.profile)


class Verdicts:
    """What a chapter's claims come to, on the tables of one run."""

    def __init__(self, chapter: str, loaded: Loaded | None, settings: Settings) -> None:
        self.chapter, self.loaded, self.settings = chapter, loaded, settings
        self.tables: Mapping[str, Any] = {}
        self.known: dict[str, pd.DataFrame] = {}  # verdicts by claim, on these tables

    def of(self, tables: Tables, *ids: str) -> pd.DataFrame:
        """The verdicts of these claims, `claims.COLUMNS`; of all claims, those about a reader's own policies too, where
        none is named. Each is judged once as long as the same tables are given."""
        tables = {"main": tables} if isinstance(tables, pd.DataFrame) else dict(tables)
        if set(tables) != set(self.tables) or any(table is not self.tables[name] for name, table in tables.items()):
            self.tables, self.known = tables, {}
        book = [claim["id"] for claim in claims.load_claims(self.chapter)["claims"]]
        if rest := [name for name in ids or book if name not in self.known]:
            new = verdicts(self.chapter, tables, self.loaded, self.settings, rest)
            self.known |= {str(name): rows for name, rows in new.groupby("claim", sort=False)}
        names = ids or [*book, *(name for name in self.known if name not in book)]
        return pd.concat([self.known[name] for name in names], ignore_index=True)

    def __call__(self, tables: Tables, *ids: str) -> Styler:
        """The verdicts as a small table: what the paper says and printed, what we measure, and the verdict."""
        return shown(self.of(tables, *ids))

    def box(self, tables: Tables, findings: str, presumes: Presumed) -> None:
        """Show findings, or this run's verdicts where one that they presume differs or a number is missing."""
        frame = self.of(tables, *presumes)
        held = holds(frame, presumes) and not re.search(r"\bnan\b", findings)
        text = findings.strip() if held else shown(frame).to_html()
        metadata = {"kvrepro": {"presumes": dict(presumes), "held": held}}
        display(Markdown(f"{FOUND if held else HERE}\n\n{text}"), metadata=metadata)

    def says(self, tables: Tables, title: str, **presumes: str | Mapping[str, str]) -> str:
        """A figure's title, empty where a verdict that it presumes differs: `judged.says(rows, "...", P6="partly")`."""
        return title if holds(self.of(tables, *presumes), presumes) else ""

    def write(self, tables: Tables) -> Styler:
        """All verdicts, which also go to the chapter's claims.csv beside the results."""
        frame = self.of(tables)
        path = self.settings.folder / self.chapter / "claims.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_table(path, frame, "%.6g")
        return shown(frame)


def found(findings: str, unanswered: str = "") -> Markdown:
    """Findings of a page that judges no claim: numbers of this run. Lines that lack one are left out.

    unanswered: why the model's own answers say nothing (`judge.unanswered`), which then stands first.
    """
    lines = [line for line in findings.strip().splitlines() if not re.search(r"\bnan\b", line)]
    if unanswered:
        lines.insert(0, f"- **This run cannot say what the model forgets**: {unanswered}. Read its answers first.")
    return Markdown("\n".join([HERE if unanswered else FOUND, "", *lines]))


def holds(frame: pd.DataFrame, presumes: Presumed) -> bool:
    """Whether a table has every verdict that is presumed, in each reading that was run."""
    held = []
    for row in frame.itertuples():
        wanted = presumes[row.claim]
        held.append(row.verdict == (wanted if isinstance(wanted, str) else wanted[row.reading]))
    return set(presumes) == set(frame.claim) and all(held)


def shown(frame: pd.DataFrame) -> Styler:
    """A table of verdicts as readers see it; where a claim cannot be tested, why stands in place of our number."""
    ours = [
        f"{row.ours:.3g} {row.unit} [{row.low:.3g}, {row.high:.3g}]" if pd.notna(row.ours) else row.note
        for row in frame.itertuples()
    ]
    verdict = frame.verdict.replace("partly", "partly reproduced")
    table = frame.assign(ours=ours, verdict=verdict, reading=frame.reading.map(claims.LABELS))
    columns = ["claim", "statement", "paper", "reading", "ours", "verdict"]
    table = table[columns].dropna(axis="columns", how="all")
    return table.fillna("").set_index(columns[:3]).style.set_table_attributes('class="dataframe verdicts"')
