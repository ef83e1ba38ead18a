"""Pages of the book: a decimal number or a percentage in the prose is cited or a setting; results are computed."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "book").glob("*.md"))
NUMBER = re.compile(r"(?<![\w.-])\d+(?:,\d{3})*\.\d+(?![\w.])|(?<![\w.-])\d+(?:\.\d+)? ?%")
SETTINGS = {  # levels, rules and sizes that a page may name
    "claims": {"95%", "5%", "97%"},
    "decide": {"95%", "20%"},
    "family": {"0.10"},
    "methods": {"2%"},
    "kernels": {"1%", "2%", "5%", "20%", "90%"},
}
TYPED = {  # measured on a GPU, from data/gpu, and still written by hand: no number may join them
    "kernels": set(
        "0.50 0.52 0.57 0.65 0.8 0.85 0.9 1.2 2.3 2.55 2.6 2.9 3.4 3.5 4.27 4.5 5.3 32.8 45.5 61.5 64% 137%".split()
    ),
}


def uncited(text: str) -> set[str]:
    """Decimals and percentages outside of code, links, tables and paragraphs with a citation."""
    text = re.sub(r"(?ms)^(`{3,})[^\n]*\n.*?^\1", "", text)
    numbers: set[str] = set()
    for paragraph in re.split(r"\n\s*\n", text):
        if "{cite" not in paragraph:
            plain = re.sub(r"\{[\w:]+\}`[^`]*`|`[^`]*`|\]\([^)]*\)|<[^>]+>|^\|.*$", "", paragraph, flags=re.M)
            numbers |= set(NUMBER.findall(plain))
    return numbers


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_no_result_is_typed_into_a_page(page):
    assert uncited(page.read_text()) <= SETTINGS.get(page.stem, set()) | TYPED.get(page.stem, set())


def test_what_is_typed_cited_or_code_is_told_apart():
    assert uncited("F1 fell by 3.5 points, 12% of it.") == {"3.5", "12%"}
    assert (
        uncited("It is 3.5 {cite}`a`.\n\n```text\n4.5\n```\n\n`5.5`, Llama-3.1, 2.5B, [x](y-6.5)\n\n| 7.5 |") == set()
    )
