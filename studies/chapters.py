"""Runs a chapter's notebook in this process, for studies and tests that need what its cells compute or show."""

import ast
import linecache
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import nbformat

from kvrepro.paths import ROOT

JUDGED = [file.stem for file in sorted((ROOT / "data" / "claims").glob("*.yml")) if file.stem != "family"]


def cells(name: str, parameters: dict[str, Any], display: Callable[..., None]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run a notebook's code cells, with these parameters in the place of its own, and yield after each cell its source
    and all variables so far. display: is called with what a cell shows."""
    space: dict[str, Any] = {"display": display}
    notebook = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
    for number, cell in enumerate(cell for cell in notebook.cells if cell.cell_type == "code"):
        tree, file = ast.parse(cell.source), f"<{name}.ipynb, cell {number}>"
        linecache.cache[file] = len(cell.source), None, cell.source.splitlines(keepends=True), file  # for `inspect`
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        with mock.patch("IPython.display.display", display):
            exec(compile(tree, file, "exec"), space)
            shown = eval(compile(ast.Expression(last.value), file, "eval"), space) if last else None
        if shown is not None:
            display(shown)
        if "parameters" in cell.metadata.get("tags", []):
            space |= parameters
        yield cell.source, space


def run(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """The variables of a notebook after all its cells; what it shows is dropped."""
    *_, (_, space) = cells(name, parameters, lambda *things, **options: None)
    return space
