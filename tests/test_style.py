"""How code is written: short functions."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LONGEST, LONGEST_SCORER = 50, 25  # lines, without the docstring

MODULES = sorted(file for folder in ("kvrepro", "kernels", "examples") for file in (ROOT / folder).rglob("*.py"))


@cache
def source(file):
    return file.read_text(encoding="utf-8")


@cache
def nodes(code):
    return list(ast.walk(ast.parse(code)))


def lines(function):
    doc = function.body[0] if ast.get_docstring(function) else None
    return function.end_lineno - function.lineno + 1 - (doc.end_lineno - doc.lineno + 1 if doc else 0)


def too_long(code, most):
    """Functions with more lines than `most`, unless their docstring, or a comment beside it, says why they are long."""
    rows = code.splitlines()
    sizes = {f: lines(f) for f in nodes(code) if isinstance(f, ast.FunctionDef)}
    heads = {f: "\n".join(rows[f.lineno - 1 : f.body[0].end_lineno]) for f in sizes}
    return {f.name: size for f, size in sizes.items() if size > most and not re.search(r"\blong\b", heads[f].lower())}


@pytest.mark.parametrize(
    "file",
    [file for file in MODULES if not file.stem.endswith("_kernel")],  # a kernel is one function
    ids=lambda file: str(file.relative_to(ROOT)),
)
def test_functions_are_short(file):
    assert too_long(source(file), LONGEST_SCORER if file.parent.name == "score" else LONGEST) == {}
