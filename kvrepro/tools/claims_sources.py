"""Where a claim comes from, as files beside the page: the printed tables, and its rule and its contrast as code."""

from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer, YamlLexer

from kvrepro.paths import DATA, ROOT

PAGES = "../_static/claims"  # of the book, seen from the page of claims
FAMILY = "kvrepro/tools/family_claims.py"


def printed_tables(value: Any) -> Iterator[str]:
    """The files of `data/published` that a claim's `paper` names, at any depth."""
    if isinstance(value, Mapping):
        yield from [value["file"]] if "file" in value else []
        value = list(value.values())
    if isinstance(value, list):
        for part in value:
            yield from printed_tables(part)


def code_of(chapter: str) -> Path:
    """The module that computes the members of a chapter's claims."""
    members = ROOT / "kvrepro" / "chapters" / chapter / "members.py"
    return members if members.is_file() else ROOT / FAMILY


def write(chapters: list[str], books: Mapping[str, Mapping[str, Mapping[str, Any]]], folder: Path) -> None:
    """Write into `folder` each printed table that a claim names, and per chapter its claims file and its members as
    pages whose lines have anchors. books: by chapter, its claims by id."""
    folder.mkdir(parents=True, exist_ok=True)
    for chapter in chapters:
        for name in {name for claim in books[chapter].values() for name in printed_tables(claim["paper"])}:
            (folder / name).write_bytes((DATA / "published" / name).read_bytes())
        for suffix, file, lexer in (
            ("rules", DATA / "claims" / f"{chapter}.yml", YamlLexer()),
            ("members", code_of(chapter), PythonLexer()),
        ):
            look = HtmlFormatter(full=True, lineanchors="L", linenos="inline", title=file.name, encoding="utf-8")
            page = highlight(file.read_text(encoding="utf-8"), lexer, look)
            (folder / f"{chapter}-{suffix}.html").write_bytes(page)


def links(chapter: str, claim: Mapping[str, Any]) -> dict[str, str]:
    """Links in HTML to a claim's printed tables, and to its rule and its computation, by their heading."""
    rules = (DATA / "claims" / f"{chapter}.yml").read_text(encoding="utf-8").splitlines()
    code = code_of(chapter).read_text(encoding="utf-8").splitlines()
    at_rule = next(n for n, line in enumerate(rules, 1) if line.strip() == f"- id: {claim['id']}")
    at_code = [n for n, line in enumerate(code, 1) if f'"{claim["contrast"]}"' in line]
    at_code += [n for n, line in enumerate(code, 1) if line.lstrip().startswith("def members(")]
    tables = [f'<a href="{PAGES}/{name}">{escape(name)}</a>' for name in dict.fromkeys(printed_tables(claim["paper"]))]
    return {
        "Printed table": ", ".join(tables),
        "In code": f'<a href="{PAGES}/{chapter}-rules.html#L-{at_rule}">the rule</a>, '
        f'<a href="{PAGES}/{chapter}-members.html#L-{at_code[0]}">what it compares</a>',
    }
