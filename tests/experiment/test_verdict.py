"""Verdicts in a notebook: what findings presume, and what stands in their place where it does not hold."""

import ast
from pathlib import Path

import nbformat
import pandas as pd
import pytest

from kvrepro.experiment import verdict
from kvrepro.experiment.run import Settings
from kvrepro.experiment.verdict import Verdicts, holds

ROOT = Path(__file__).resolve().parents[2]
ROW = {"statement": "It falls.", "paper": "0.1", "ours": 0.2, "low": 0.1, "high": 0.3, "unit": "F1", "note": ""}
ROWS = [
    ROW | {"claim": "P1", "reading": "as_run", "verdict": "partly"},
    ROW | {"claim": "P1", "reading": "as_described", "verdict": "not reproduced"},
    ROW | {"claim": "P2", "reading": "any", "verdict": "not testable here", "ours": float("nan"), "note": "not run"},
]
TABLE = pd.DataFrame(ROWS)


def presumed() -> list[tuple[str, dict]]:
    """(chapter, what a box presumes) of all notebooks."""
    found = []
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        for cell in nbformat.read(path, as_version=4).cells:
            for node in ast.walk(ast.parse(cell.source if cell.cell_type == "code" else "")):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "box":
                    [given] = [word.value for word in node.keywords if word.arg == "presumes"]
                    found.append((path.stem, ast.literal_eval(given)))
    return found


@pytest.mark.parametrize(("chapter", "presumes"), presumed())
def test_findings_presume_the_verdicts_that_ship(chapter, presumes):
    shipped = pd.read_csv(ROOT / "data" / "oracle" / chapter / "claims.csv")
    assert presumes
    assert holds(shipped[shipped.claim.isin(presumes)], presumes)


@pytest.mark.parametrize(
    ("presumes", "held"),
    [
        ({"P1": {"as_run": "partly", "as_described": "not reproduced"}}, True),
        ({"P1": "partly"}, False),
        ({"P2": "not testable here"}, True),
        ({"P2": "not testable here", "P3": "partly"}, False),
    ],
)
def test_a_verdict_that_differs_or_is_missing_is_noticed(presumes, held):
    assert holds(TABLE[TABLE.claim.isin(presumes)], presumes) == held


@pytest.mark.parametrize(
    ("text", "presumes", "title"),
    [
        ("- It scores 0.20.", {"P2": "not testable here"}, verdict.FOUND),
        ("- It scores 0.20.", {"P2": "reproduced"}, verdict.HERE),
        ("- It scores nan.", {"P2": "not testable here"}, verdict.HERE),
        ("- Nanometres count.", {"P2": "not testable here"}, verdict.FOUND),
    ],
)
def test_a_box_shows_findings_only_where_they_hold(monkeypatch, text, presumes, title):
    shown = []
    monkeypatch.setattr(verdict, "display", lambda what, metadata: shown.append((what.data, metadata["kvrepro"])))
    monkeypatch.setattr(verdict, "verdicts", lambda *given: TABLE[TABLE.claim.isin(given[-1])])
    judged = Verdicts("protection", None, Settings())
    judged.box(pd.DataFrame(), text, presumes)
    [(box, facts)] = shown
    assert box.startswith(title)
    assert (text in box) == facts["held"] == (title == verdict.FOUND)
    assert facts["presumes"] == presumes


def test_findings_without_claims_leave_out_lines_that_lack_a_number():
    text = "- LRU scores nan.\n- SnapKV scores 0.20."
    assert verdict.found(text).data == f"{verdict.FOUND}\n\n- SnapKV scores 0.20."
    warned = verdict.found(text, "the full cache scores 0").data
    assert warned.startswith(f"{verdict.HERE}\n\n- **This run cannot say")
    assert warned.endswith("- SnapKV scores 0.20.")
