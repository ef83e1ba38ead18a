"""Prose of the book: a number is cited, or it is a size, a level or part of a rule; results are computed."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*(ROOT / "book").glob("*.md"), *(ROOT / "notebooks").glob("*.ipynb")])
NUMBER = re.compile(r"(?<![\w.,/-])\d+(?:,\d{3})*(?:\.\d+)?(?: ?%)?(?![\w-]|,\d|\.\d)")
TYPED = {  # no result: sizes, levels, exit codes, numbers of tables and theorems, and what follows from a paper's rule
    "audit": "1,919 256 1000 769 999 77 99 8 9",  # which positions a comparison as decimal strings keeps
    "claims": "95% 5% 6 200 93 97%",
    "cluster": "20 4,750 200 1,920",
    "cost": "28 2026 16 900 32",
    "decide": "95% 32,768 20%",
    "families": "32 16 2",
    "family": "0 0.10",
    "kernels": "1% 2% 5% 20% 90% 4 6 8 11 12 32 64 128 500 512 1 2,048 4,096 32,768 131,072",
    "language-model": "32 2.0 256",
    "methods": "2",
    "model": "32",
    "own-code": "256 100 1",
    "your-model": "2 135 32 0 1 49 4,096",
    "dropkv_bound": "95% 1 2",
    "fragility": "95%",
    "leakage": "95% 0 1 2",
    "protection": "95% 0 3 1000 769 7 8 9",
    "reanalysis": "162 481 256 1",
    "reclamation": "95% 16 24 16,000",
    "synthesis": "1",
}


def prose(page: Path) -> str:
    """The text of a page, or of a notebook's cells in Markdown."""
    if page.suffix == ".md":
        return page.read_text(encoding="utf-8")
    cells = json.loads(page.read_text(encoding="utf-8"))["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


def uncited(text: str) -> set[str]:
    """Numbers outside of code, formulas, links, tables, a list's own numbers and paragraphs with a citation."""
    text = re.sub(r"(?ms)^(`{3,})[^\n]*\n.*?^\1", "", text)
    text = re.sub(r"(?s)\$\$.*?\$\$|\$[^$]*\$", "", text)
    text = re.sub(r"(?m)^(\*\*)?\d+\. ", "", text)
    numbers: set[str] = set()
    for paragraph in re.split(r"\n\s*\n", text):
        if "{cite" not in paragraph:
            plain = re.sub(r"\{[\w:]+\}`[^`]*`|`[^`]*`|\]\([^)]*\)|<[^>]+>|^\|.*$", "", paragraph, flags=re.M)
            numbers |= set(NUMBER.findall(plain))
    return numbers


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_no_result_is_typed_into_a_page(page):
    """A number that joins a page is computed, or joins `TYPED`; one that leaves the page leaves `TYPED` too."""
    assert uncited(prose(page)) == set(TYPED.get(page.stem, "").split())


def test_what_is_typed_cited_or_code_is_told_apart():
    assert uncited("F1 fell by 3.5 points, 12% of it, in 7 of 1,919 rows.") == {"3.5", "12%", "7", "1,919"}
    plain = "2. It is 3.5 {cite}`a`.\n\n```text\n4.5\n```\n\n`5.5`, $6$, Llama-3.1, 2.5B, [x](y-6.5)\n\n| 7.5 |"
    assert uncited(plain) == set()


def test_the_positions_that_decimal_strings_keep_are_those_that_pages_name():
    kept = sorted(range(1919), key=str)[-256:]
    assert sorted(kept) == [8, 9, *range(77, 100), *range(769, 1000)]
