"""A chapter's notebook from top to bottom in this process, which has imported all it needs; the book runs them in
kernels."""

import ast
from pathlib import Path
from typing import Any

import IPython.display
import nbformat
from IPython.core.formatters import DisplayFormatter

from kvrepro.experiment import figure

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
Shown = list[dict[str, Any]]  # what a cell displays, by media type


def run(monkeypatch, name: str, given: dict[str, Any]) -> list[tuple[str, Shown]]:
    """(source, what it displays) of every code cell, with these parameters in the place of its own."""
    shown: Shown = []
    formatted = DisplayFormatter().format

    def display(*things, raw=False, **options):
        shown.extend(thing if raw else formatted(thing)[0] for thing in things)

    monkeypatch.setattr(IPython.display, "display", display)
    monkeypatch.setattr(figure, "display", display)
    space: dict[str, Any] = {"display": display}
    found = []
    for cell in nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4).cells:
        if cell.cell_type != "code":
            continue
        body = ast.parse(cell.source).body
        last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
        exec(compile(ast.Module(body, []), f"{name}.ipynb", "exec"), space)
        if last is not None and (value := eval(compile(ast.Expression(last.value), name, "eval"), space)) is not None:
            display(value)
        if "parameters" in cell.metadata.get("tags", []):
            assert set(given) <= set(space)
            space |= given
        found.append((cell.source, list(shown)))
        shown.clear()
    return found
