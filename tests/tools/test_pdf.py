"""The book as one file: a small book of two chapters is printed; what is missing is one line."""

import re

import pytest

from kvrepro.errors import InputError
from kvrepro.tools import pdf

CONFIG = "title: Two chapters\nonly_build_toc_files: true\nexecute: {execute_notebooks: 'off'}\n"
TOC = "format: jb-book\nroot: book/intro\nchapters:\n  - file: book/first\n  - file: book/second\n"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    root = tmp_path_factory.mktemp("book")
    (root / "book").mkdir()
    (root / "_config.yml").write_text(CONFIG)
    (root / "_toc.yml").write_text(TOC)
    for name, text in {"intro": "See {doc}`second`.", "first": "One.", "second": "Two."}.items():
        (root / "book" / f"{name}.md").write_text(f"# The {name} page\n\n{text}\n")
    return pdf.one_page(tmp_path_factory.mktemp("built"), root)


def test_the_page_holds_all_chapters_with_links_inside(page):
    text = page.read_text(encoding="utf-8")
    assert all(f"The {name} page" in text for name in ("intro", "first", "second"))
    assert 'href="#document-book/second"' in text
    styles = re.findall(r'<link[^>]*href="(_static/[^"?]*)', text)
    assert styles
    assert all((page.parent / style).is_file() for style in styles)


def test_a_link_leads_into_the_page_or_out_on_the_web_or_nowhere():
    other = '<a class="x" href="https://example.org#a">web</a><link href="style.css">'
    text = '<p id="a"></p><a href="../claims.html#a">a</a><a title="t" href="data.csv">b</a><a href="#gone">c</a>'
    assert pdf.linked(text + other) == f'<p id="a"></p><a href="#a">a</a><a title="t">b</a><a>c</a>{other}'


def test_each_chapter_begins_on_a_page(page, tmp_path):
    try:
        program = pdf.browser()
    except InputError as missing:
        pytest.skip(str(missing))
    pdf.printed(page, tmp_path / "book.pdf", program)
    written = (tmp_path / "book.pdf").read_bytes()
    assert written.startswith(b"%PDF")
    assert len(re.findall(rb"/Type\s*/Page\b", written)) == 3
    assert list(tmp_path.iterdir()) == [tmp_path / "book.pdf"]


def test_a_browser_prints_for_users_who_have_no_sandbox(page, tmp_path):
    program = tmp_path / "chromium"
    program.write_text("""#!/bin/sh
case "$*" in *--no-sandbox*) ;; *) echo 'No usable sandbox!' >&2; exit 1 ;; esac
for option; do case "$option" in --print-to-pdf=*) echo %PDF > "${option#*=}" ;; esac; done
""")
    program.chmod(0o755)
    pdf.printed(page, tmp_path / "book.pdf", str(program))
    assert (tmp_path / "book.pdf").read_text() == "%PDF\n"


def test_without_a_browser_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setenv("CHROMIUM", "no-such-browser")
    with pytest.raises(InputError, match="no-such-browser.*install Chromium"):
        pdf.browser()


def test_a_browser_that_prints_nothing_is_an_error(page, tmp_path):
    with pytest.raises(pdf.Failed, match="printed nothing: no reason given"):
        pdf.printed(page, tmp_path / "book.pdf", "true")
    assert not (tmp_path / "book.pdf").exists()
