"""A chapter's notebook from top to bottom in this process, and what its cells display."""

from typing import Any

import IPython.display
from IPython.core.formatters import DisplayFormatter

from kvrepro.experiment import figure
from kvrepro.tools import book

Shown = list[dict[str, Any]]  # what a cell displays, by media type


def run(monkeypatch, name: str, given: dict[str, Any]) -> list[tuple[str, Shown]]:
    """(source, what it displays) of every code cell, with these parameters in the place of its own."""
    shown: Shown = []
    formatted = DisplayFormatter().format

    def display(*things, raw=False, **options):
        shown.extend(thing if raw else formatted(thing)[0] for thing in things)

    monkeypatch.setattr(IPython.display, "display", display)
    monkeypatch.setattr(figure, "display", display)
    found = []
    for source in book.cells(name, given, display=display):
        found.append((source, list(shown)))
        shown.clear()
    return found
