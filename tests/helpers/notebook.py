"""A chapter's notebook from top to bottom, in this process or by papermill, and what its cells display."""

from pathlib import Path
from typing import Any

import papermill
from IPython.core.formatters import DisplayFormatter

from kvrepro.paths import ROOT
from studies import chapters

MINE = """
from kvrepro.engine.observe import Observation
from kvrepro.engine.policy import Policy
from kvrepro.engine.shapes import Scores


def times_value(o: Observation) -> Scores:
    '''s_j = mean attention of the window to token j, times ||v_j||_2.'''
    return o.attention.mean((2, 3)) * o.values.float().norm(dim=-1)


MINE = Policy("Mine", "a test", times_value, parameters={"window": WINDOW, "recent": "window"})
"""
Shown = list[dict[str, Any]]  # what a cell displays, by media type


def own_policy(folder: Path, window: int = 16) -> str:
    """The name of a policy of one's own, called Mine, whose file is written into the folder."""
    (folder / "mine.py").write_text(MINE.replace("WINDOW", str(window)))
    return f"{folder / 'mine.py'}:MINE"


def run(name: str, given: dict[str, Any]) -> list[tuple[str, Shown]]:
    """(source, what it displays) of every code cell, with these parameters in the place of its own."""
    shown: Shown = []
    formatted = DisplayFormatter().format

    def display(*things, raw=False, **options):
        shown.extend(thing if raw else formatted(thing)[0] for thing in things)

    cells = []
    for source, _ in chapters.cells(name, given, display):
        cells.append((source, list(shown)))
        shown.clear()
    return cells


def executed(name: str, folder: Path, given: dict[str, Any]) -> Any:
    """The notebook by papermill, with these parameters; its copy lies in the folder."""
    source = ROOT / "notebooks" / f"{name}.ipynb"
    return papermill.execute_notebook(source, folder / "out.ipynb", given, cwd=ROOT, progress_bar=False)


def drawn(done: Any) -> list[bool]:
    """Whether each cell of an executed notebook drew a figure."""
    return [any("image/svg+xml" in o.get("data", {}) for o in cell.get("outputs", [])) for cell in done.cells]


def described(done: Any) -> list[bool]:
    """Whether each cell says in its metadata what its figure shows."""
    return ["mystnb" in cell.metadata for cell in done.cells]


def box(done: Any) -> str:
    """The text of the box of findings."""
    [cell] = [cell for cell in done.cells if "findings" in cell.metadata.get("tags", [])]
    return str(cell.outputs[0].data["text/markdown"])
