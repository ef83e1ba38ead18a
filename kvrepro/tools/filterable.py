"""Tables of the book: plain ones, and those that readers sort and filter in the page: HTML that is whole without a
script, and book/_static/tables.js.

DataTables, which itables brings, weighs 0.7 MB, more than the rest of the page, and does not load from a file.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from html import escape
from typing import NamedTuple


class TableCell(NamedTuple):
    """HTML, and the key that it is sorted and filtered by; None for its text."""

    html: str
    key: object = None


def table(rows: Sequence[Mapping[str, object]]) -> str:
    """A few rows of equal keys as a markdown table."""
    lines = [rows[0], ["---"] * len(rows[0]), *([str(v).replace("|", "\\|") for v in row.values()] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def interactive(
    rows: Sequence[Mapping[str, object]], at: str, label: str, filters: Collection[str] = (),
    minor: Collection[str] = (), wide: Collection[str] = (),
) -> str:  # fmt: skip
    """Rows of equal keys, for markdown. Values are text, or a `TableCell`.

    at: the table's id in the page. label: its content, for screen readers. filters: columns with a menu of their
    values. minor: columns that a narrow screen leaves out. wide: columns of sentences.
    """
    columns = list(rows[0])
    marks = [" data-filter" if name in filters else "" for name in columns]
    heads = "".join(f'<th scope="col"{mark}>{escape(name)}</th>' for name, mark in zip(columns, marks, strict=True))
    body = "\n".join("<tr>" + "".join(map(_cell, row.values())) + "</tr>" for row in rows)

    def selector(names: Collection[str]) -> str:
        return ",".join(f"#{at} :is(th,td):nth-child({columns.index(name) + 1})" for name in names if name in columns)

    style = f"{selector(wide)} {{ min-width: min(9rem, 35vw); overflow-wrap: anywhere }}\n" if wide else ""
    style += f"@media (max-width: 720px) {{ {selector(minor)} {{ display: none }} }}\n" if minor else ""
    return raw(
        f"<style>\n{style}</style>\n"
        f'<div class="filterable" id="{at}" role="region" aria-label="{escape(label)}" tabindex="0">\n<table>\n'
        f"<thead><tr>{heads}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>\n</div>"
    )


def raw(html: str) -> str:
    """HTML as a block of markdown, whatever backticks it has."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", html)), default=0))
    return f"{fence}{{raw}} html\n{html}\n{fence}"


def _cell(value: object) -> str:
    """A value as a cell of the table, in HTML."""
    if not isinstance(value, TableCell):
        return f"<td>{escape(str(value), quote=False)}</td>"
    key = "" if value.key is None else f' data-key="{escape(str(value.key))}"'
    return f"<td{key}>{value.html}</td>"
