"""Pages of the book that are computed: methods and switches from the code; claims_page: from the last run's results."""

import html
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from kvrepro.chapters.protection import control, credit
from kvrepro.chapters.reanalysis import differences
from kvrepro.engine import allowed, policy
from kvrepro.engine.catalogue import CATALOGUE
from kvrepro.engine.regime import SharedCap
from kvrepro.engine.shared import SWITCHES
from kvrepro.experiment import artifact, claims, judge, wording
from kvrepro.experiment.figure import save
from kvrepro.paths import GPU, ROOT
from kvrepro.tools import (
    claims_page,
    cost,
    coverage,
    decide,
    family_page,
    landing,
    language_model_page,
    reference,
    reliability,
    shortcuts,
)  # fmt: skip
from kvrepro.tools.filterable import table
from kvrepro.tools.rows import words

# Policy -> the tests that hold it to an independent transcription of its formula.
PINNED: dict[str, list[str]] = words("formula_tests")
LETTERS = {"alpha": "α", "beta": "β", "gamma": "γ", "eps": "ε", "mu": "μ", "phi": "φ", "tau": "τ"}


def write(chapters: Sequence[str], root: Path = ROOT) -> None:
    """The tables, sentences and figures that the pages in book/ include, into book/generated."""
    folder = root / "book" / "generated"
    folder.mkdir(parents=True, exist_ok=True)
    tables_of, all_verdicts = reliability.tables(), landing.drawn(claims_page.stored(chapters, root))
    parts: dict[str, Any] = {  # texts, and tables as rows or frames
        **tables(), "control": controlled(), "artifact": differences.table(), "settings": reference.settings(),
        **{name: reference.page(patterns) for name, patterns in reference.PAGES.items()},
        **{name: measured(name) for name in ("kernels", "models", "first_token")},
        "cost": cost.overview(), "cost_all": cost.table(), "cost_failures": cost.failures(),
        "targets": cost.targets(), "floors": cost.floors_sentence(),
        "coverage": coverage.summary(), "error_rates": claims_page.error_rates(),
        "seeds": claims_page.seeds_sentence(), "stability": claims_page.stability(),
        "reliability_summary": reliability.summary(tables_of),
        "reliability_sections": reliability.sections(tables_of),
        "shortcuts_lost": shortcuts.lost_in_words(), "answers": landing.answers(root),
        **claims_page.write(chapters, folder, root),
        **{f"decide_{name}": part for name, part in decide.parts(root).items()},
        **{f"family_{name}": part for name, part in family_page.page().items()},
        **{f"language_model_{name}": part for name, part in language_model_page.page().items()},
    }  # fmt: skip
    figures = {
        "verdicts": all_verdicts, "family": family_page.drawn(family_page.wide(pd.read_csv(family_page.TABLE))),
        "targets": cost.bars(), "floors": cost.floors(), "shortcuts": shortcuts.drawn(),
        "determinism": reliability.drawn(tables_of),
        **{f"language_model_{name}": figure for name, figure in language_model_page.drawn().items()},
    }  # fmt: skip
    for name, figure in figures.items():
        save(figure, folder / f"{name}.svg")
    (folder / "static").mkdir(exist_ok=True)
    all_verdicts.savefig(folder / "static" / "preview.png", dpi=120)
    for name, part in parts.items():
        rows = part.to_dict("records") if isinstance(part, pd.DataFrame) else part
        text = rows if isinstance(rows, str) else table(rows) if rows else "None."
        (folder / f"{name}.md").write_text(text + "\n", encoding="utf-8")


def measured(name: str) -> str:
    """A page of tables measured on a GPU (`data/gpu`), with the names that the book has for the two readings."""
    text = (GPU / f"{name}.md").read_text(encoding="utf-8")
    for reading, label in claims.LABELS.items():
        text = text.replace(f", {reading.replace('_', ' ')}", f", {label}")
    return text.rstrip()


def tables() -> dict[str, list[dict[str, str]]]:
    """The tables of the pages on methods and on readings, as rows."""
    rows = [*policy.table(), credit.ROW]
    general = [row for row in rows if row["regimes"] != SharedCap.name]
    harness = [row for row in rows if row["regimes"] == SharedCap.name]
    unshared = {name: p for name, p in CATALOGUE.items() if not p.shared}  # the others' parameters are the switches
    return {
        "methods": [{"policy": named(row), "keeps": typeset(row["keeps"])} for row in general],
        "harness": [{"policy": named(row), "keeps": typeset(row["keeps"]), "budget": row["budget"]} for row in harness],
        "requirements": [
            {c: row[c] for c in "name regimes budget needs".split()}
            | {"readings": {"as_run, as_described": "both", "-": "-", **claims.LABELS}[row["readings"]]}
            for row in general
        ],
        "tests": [{"policy": name, "tests": breakable("<br>".join(tests))} for name, tests in PINNED.items()],
        "refusals": [
            {"policy": name, "regime": regime, "why not": why}
            for name, p in CATALOGUE.items() for regime, why in p.refuses.items()
        ],
        "parameters": [
            _parameter(name, p, key) for name, p in unshared.items() for key in {**p.parameters, **p.as_run}
        ],
        "codes": [{"policy": name, "public code": breakable(p.code)} for name, p in unshared.items() if p.code],
        "switches": [
            {"switch": name, "authors' code": str(s.as_run), "authors' text": str(s.as_described),
             "what it decides": s.means}
            for name, s in SWITCHES.items()
        ],
    }  # fmt: skip


def controlled() -> str:
    """The page of the protection claims on the authors' own rows: what came out, what did not and why, what was
    mended."""
    claim_of = {claim["id"]: claim for claim in claims.load_claims("protection")["claims"]}
    frame = claims.read(control.TABLE)
    paper = [claims.paper_text(claim_of[row.claim]["paper"], row.unit) for row in frame.itertuples()]
    rows = list(frame.assign(paper=paper).itertuples())
    causes = [control.cause(row, claim_of[row.claim]) for row in rows]
    excused = [name for name, _ in causes if name]
    numbers = ", ".join(f"{text} ({excused.count(name)})" for name, text in control.CAUSES.items())
    unreproduced = [
        {"claim": row.claim, "rows of": row.panel,
         "the paper": wording.printed(row),
         "their rows": wording.shown(row), "rule": row.rule, "verdict": row.verdict,
         "reason": control.CAUSES[name], "in detail": why}
        for row, (name, why) in zip(rows, causes, strict=True) if name
    ]  # fmt: skip
    silent = control.undecided_panels(artifact.scores(), set(frame.panel))
    panels = {row.claim: [r.panel for r in rows if r.claim == row.claim and r.verdict == "reproduced"] for row in rows}
    mended_rules = [
        {"claim": c["id"], "statement": c["statement"], "why": c["changed"], "rule now": judge.rule_text(c),
         "rule before": judge.rule_text({**c, **c["first"]}) if {"rule", "test"} & set(c.get("first", ())) else ""}
        for c in claim_of.values() if "changed" in c
    ]  # fmt: skip
    parts = [
        f"{len(rows)} pairs of a claim and a panel can be decided; {len(rows) - len(excused)} come out *reproduced*. "
        f"The reasons of the others: {numbers}.",
        "## Where a rule does not come out", table(unreproduced),
        "## Rules and statements that were mended", table(mended_rules),
        "## Where it comes out", table([{"claim": c, "rows of": "; ".join(ps)} for c, ps in panels.items() if ps]),
        "## What no published row can decide",
        f"{', '.join(name for name in claim_of if name not in panels)}: their conditions were not published, or not "
        "run.",
        *(f"{panel}: no claim can be tested there, since {why}." for panel, why in silent.items()),
    ]  # fmt: skip
    return "\n\n".join(parts)


def _parameter(name: str, p: policy.Policy, key: str) -> dict[str, str]:
    """A policy's parameter as a row: its value in both readings, and the values that it may have."""
    as_run = str(p.as_run.get(key, "the same")) if p.as_run else "-"
    allows = allowed.in_words(p.kind(key)) + (", or window" if key == "recent" else "")
    described = str(p.parameters.get(key, "-"))
    return {"policy": name, "parameter": key, "authors' text": described, "authors' code": as_run, "may be": allows}


def named(row: Mapping[str, str]) -> str:
    """A policy's name, title and source in one cell."""
    return f"`{row['name']}`<br>{row['title']}<br>{row['source'].removeprefix('-')}".removesuffix("<br>")


def breakable(text: str) -> str:
    """The text with places to break a line behind underscores and double colons."""
    return re.sub(r"(::|_)(?=\w)", r"\1<wbr>", text)


def typeset(formula: str) -> str:
    """A docstring's formula in the signs of mathematics, as HTML inside markdown."""
    text = html.escape(formula.replace(", float32 [batch]", ""), quote=False)
    for plain, sign in ((" * ", " · "), ("&lt;=", "≤"), ("&gt;=", "≥"), ("^2", "²"), ("sum_", "Σ_"), ("\n", "<br>")):
        text = text.replace(plain, sign)
    text = re.sub(r"\|\|([^|]+)\|\|(?:_(\d))?", lambda m: f"‖{m[1]}‖" + (f"<sub>{m[2]}</sub>" if m[2] else ""), text)
    text = re.sub(r"&lt;(\w, \w+)&gt;", r"⟨\1⟩", text)
    text = re.sub(rf"\b({'|'.join(LETTERS)})(?=\b|_|\d)", lambda match: LETTERS[match[0]], text)
    text = re.sub(r"(?<![^\W_])(\w|mean|max|min|Var|Pool|rank)_(\w+?)(?![^\W_])", r"\1<sub>\2</sub>", text)
    text = re.sub(r"\^\(([^)]+)\)", r"<sup>\1</sup>", text)
    return re.sub(r"(?<=[ (])-(?=[ \w(‖])", "−", text)
