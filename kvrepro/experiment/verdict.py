"""A chapter's verdicts in its notebook: tables beside the figures, findings written by hand, the file of all claims.

    judged = Verdicts("protection", loaded, settings)
    judged(rows, "P1", "P2")
    judged.box(rows, f"- LRU scores {value:.2f}.", presumes={"P6": "not reproduced"})
    judged.write({"main": rows, "attention": attention})

Findings name the verdicts that they presume. Where a run comes out differently, its own stand in their place.
"""

import importlib
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import pandas as pd
from IPython.display import Markdown, display
from pandas.io.formats.style import Styler

from kvrepro.experiment import claims, members
from kvrepro.experiment.models import Loaded
from kvrepro.experiment.run import Settings
from kvrepro.paths import write_table

FOUND, HERE = "**What we found**", "**On this model**"  # titles of the box of findings
Tables: TypeAlias = pd.DataFrame | Mapping[str, Any]  # by study; a single one is `main`
Presumed: TypeAlias = Mapping[str, str | Mapping[str, str]]  # claim -> its verdict, or those by reading


def verdicts(
    chapter: str, tables: Tables, loaded: Loaded, settings: Settings, ids: Collection[str] = ()
) -> pd.DataFrame:
    """The table of verdicts, `claims.COLUMNS`: of these claims; where none is named, of all, own policies' too."""
    book = claims.load_claims(chapter)
    premise = {claim["id"]: claim.get("presumes") for claim in book["claims"]}
    wanted = list(ids or premise)
    for name in wanted:  # which grows: a premise has its own
        wanted += [premise[name]] if premise[name] and premise[name] not in wanted else []
    book = {**book, "claims": [claim for claim in book["claims"] if claim["id"] in wanted]}
    module = importlib.import_module(f"kvrepro.chapters.{chapter}.members")
    tidied = module.tidied({"main": tables} if isinstance(tables, pd.DataFrame) else tables, loaded, settings)
    frame = members.verdicts(book, tidied, module, model=loaded.name, profile=settings.profile)
    return pd.concat([frame[frame.claim == name] for name in ids], ignore_index=True) if ids else frame


@dataclass(frozen=True)
class Verdicts:
    """What a chapter's claims come to in one run."""

    chapter: str
    loaded: Loaded
    settings: Settings

    def of(self, tables: Tables, *ids: str) -> pd.DataFrame:
        """`verdicts` on these tables."""
        return verdicts(self.chapter, tables, self.loaded, self.settings, ids)

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

    def write(self, tables: Tables) -> Styler:
        """All verdicts, which also go to the chapter's claims.csv beside the results."""
        frame = self.of(tables)
        write_table(self.settings.folder / self.chapter / "claims.csv", frame, "%.6g")
        return shown(frame)


def found(findings: str, unanswered: str = "") -> Markdown:
    """Findings of a page that judges no claim: numbers of this run. Lines that lack one are left out. unanswered: why
    the model's own answers say nothing (`judge.unanswered`), which then stands first."""
    lines = [line for line in findings.strip().splitlines() if not re.search(r"\bnan\b", line)]
    if unanswered:
        lines.insert(0, f"- **This run cannot say what the model forgets**: {unanswered}. Read its answers first.")
    return Markdown("\n".join([HERE if unanswered else FOUND, "", *lines]))


def holds(frame: pd.DataFrame, presumes: Presumed) -> bool:
    """Whether a table has every verdict that is presumed, in each reading that was run."""
    by_claim = [(presumes[row.claim], row.reading) for row in frame.itertuples()]
    wanted = [verdict if isinstance(verdict, str) else verdict[reading] for verdict, reading in by_claim]
    return set(presumes) == set(frame.claim) and list(frame.verdict) == wanted


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
