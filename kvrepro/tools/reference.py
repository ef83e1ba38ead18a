"""The API reference of the book: signatures and docstrings, read from the source without importing it."""

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import TypeGuard

from kvrepro.experiment import run
from kvrepro.paths import ROOT
from kvrepro.tools import claims_page

PAGES = {  # page: patterns of the files that it shows, from the project's folder
    "api-engine": ("kvrepro/engine/*.py",),
    "api-scores": ("kvrepro/engine/score/*.py",),
    "api-experiment": ("kvrepro/__init__.py", "kvrepro/item.py", "kvrepro/chat.py", "kvrepro/experiment/*.py"),
    "api-world": ("kvrepro/world/*.py",),
    "api-tools": ("kvrepro/tools/**/*.py",),
    "api-kernels": ("kernels/kvrepro_kernels/**/*.py",),
}


def page(patterns: tuple[str, ...], root: Path = ROOT) -> str:
    """Markdown of every module that a pattern matches, with its public classes and functions."""
    modules = [module for pattern in patterns for module in sorted(root.glob(pattern))]
    return "\n".join(line for module in modules for line in _module(module, root))


def settings() -> str:
    """Markdown: a table of every settings class, field by field, with the comments beside the fields. A chapter's table
    leaves out the fields of all chapters."""
    shared = {field.name for field in fields(run.Settings)}
    parts = [_settings("Of every chapter", run.Settings, set())]
    for name in sorted(path.parent.name for path in ROOT.glob("kvrepro/chapters/*/settings.py")):
        module = importlib.import_module(f"kvrepro.chapters.{name}.settings")
        parts.append(_settings(claims_page.title(name), module.Settings, shared))
    return "\n".join(parts)


def _settings(title: str, settings_class: type, shared: set[str]) -> str:
    """A section with one class's table. shared: names of fields to leave out."""
    sources = "\n".join(inspect.getsource(base) for base in settings_class.__mro__ if base is not object)
    lines = [f"## {title}", "", "| setting | default | what it is |", "| --- | --- | --- |"]
    for field in (field for field in fields(settings_class) if field.name not in shared):  # type: ignore[arg-type]
        comment = re.search(rf"^    {field.name}: [^#]*#: (.*)", sources, re.M)
        lines.append(f"| `{field.name}` | `{field.default!r}` | {markdown(comment[1] if comment else '').strip()} |")
    return "\n".join(lines) + "\n"


def _module(path: Path, root: Path) -> Iterator[str]:
    """Heading, docstring and members; nothing for a module without public members."""
    source = path.read_text(encoding="utf-8")
    tree, lines = ast.parse(source), source.splitlines()
    members = [node for node in tree.body if _public(node)]
    if not members:
        return
    name = ".".join(path.relative_to(root).with_suffix("").parts).removeprefix("kernels.").removesuffix(".__init__")
    yield f"## {name}\n\n{markdown(ast.get_docstring(tree))}"
    for node in members:
        yield f"### {node.name}\n\n```python\n{signature(node, lines)}\n```\n\n{markdown(ast.get_docstring(node))}"
        if isinstance(node, ast.ClassDef):
            for method in (inner for inner in node.body if _public(inner) and ast.get_docstring(inner)):
                yield f"```python\n{signature(method, lines)}\n```\n\n{markdown(ast.get_docstring(method))}"


def _public(node: ast.stmt) -> TypeGuard[ast.FunctionDef | ast.ClassDef]:
    return isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")


def signature(node: ast.FunctionDef | ast.ClassDef, lines: list[str]) -> str:
    """The `def` line as written; of a class also its decorators and its fields with their defaults and comments.
    lines: of the source."""
    head = lines[node.lineno - 1 : max(node.lineno, node.body[0].lineno - 1)]
    if isinstance(node, ast.FunctionDef):
        return re.sub(r":( *#.*| \.\.\.)?$", "", textwrap.dedent("\n".join(head)))
    fields = (field for field in node.body if isinstance(field, ast.AnnAssign))
    written = [line for field in fields for line in lines[field.lineno - 1 : field.end_lineno]]
    return "\n".join([*(f"@{ast.unparse(decorator)}" for decorator in node.decorator_list), *head, *written])


def markdown(docstring: str | None) -> str:
    """A docstring as Markdown: `code` stays code, indented blocks stay as they are, and no other sign is markup."""
    blocks = []
    for block in (docstring or "").split("\n\n"):
        if block.startswith("    "):
            blocks.append(f"```text\n{block}\n```")
        else:
            pieces = re.split(r"(`[^`]*`)", block)  # every second piece is code
            pieces[::2] = [re.sub(r"([\\*_<>$\[\]{}|#~^])", r"\\\1", piece) for piece in pieces[::2]]
            blocks.append("".join(pieces))
    return "\n\n".join(blocks) + "\n"
