"""Runs a chapter's notebook in this process, for studies that need what its cells compute."""

import contextlib
import io
from typing import Any

import nbformat
import yaml

from kvrepro.paths import ROOT

JUDGED = [file.stem for file in sorted((ROOT / "data" / "claims").glob("*.yml")) if file.stem != "family"]


def run(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """The variables of a notebook after all its cells, with these parameters in the place of its own."""
    space: dict[str, Any] = {"display": lambda *things, **options: None}
    with contextlib.redirect_stdout(io.StringIO()):
        for cell in nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4).cells:
            if cell.cell_type == "code":
                exec(compile(cell.source, f"{name}.ipynb", "exec"), space)
                if "parameters" in cell.metadata.get("tags", []):
                    space |= parameters
    return space


def given(texts: list[str]) -> dict[str, Any]:
    """Parameters from texts such as "n_items=8", values as YAML."""
    return {name: yaml.safe_load(value) for name, _, value in (text.partition("=") for text in texts)}
