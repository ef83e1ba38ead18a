"""A chapter's notebook from top to bottom in this process, and what its cells display."""

import ast
import linecache
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import nbformat
from IPython.core.formatters import DisplayFormatter

from kvrepro.paths import ROOT

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


def run_cells(name: str, given: dict[str, Any], display: Callable[..., None]) -> Iterator[str]:
    """Run a notebook's code cells in this process, with these parameters in the place of its own, and yield each cell's
    source. display: is called with what a cell shows."""
    space: dict[str, Any] = {"display": display}
    notebook = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
    for number, cell in enumerate(cell for cell in notebook.cells if cell.cell_type == "code"):
        tree, file = ast.parse(cell.source), f"<{name}.ipynb, cell {number}>"
        linecache.cache[file] = len(cell.source), None, cell.source.splitlines(keepends=True), file  # for `inspect`
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        shows = ("IPython.display.display", "kvrepro.experiment.figure.display")
        with mock.patch(shows[0], display), mock.patch(shows[1], display):
            exec(compile(tree, file, "exec"), space)
            shown = eval(compile(ast.Expression(last.value), file, "eval"), space) if last else None
        if shown is not None:
            display(shown)
        if "parameters" in cell.metadata.get("tags", []):
            space |= given
        yield cell.source


def run(name: str, given: dict[str, Any]) -> list[tuple[str, Shown]]:
    """(source, what it displays) of every code cell, with these parameters in the place of its own."""
    shown: Shown = []
    formatted = DisplayFormatter().format

    def display(*things, raw=False, **options):
        shown.extend(thing if raw else formatted(thing)[0] for thing in things)

    cells = []
    for source in run_cells(name, given, display):
        cells.append((source, list(shown)))
        shown.clear()
    return cells
