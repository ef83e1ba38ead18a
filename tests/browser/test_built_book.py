"""The built book in a real browser: `make check-book`, after `make book`.

Pictures of pages are not compared with stored ones: fonts differ between machines, and numbers between runs. What is
compared are the boxes that the style sheet decides, and how light or dark a page is. Pictures to look at are written to
`_build/browser`.
"""

import functools
import http.server
import io
import os
import re
import threading
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from urllib.parse import unquote, urlsplit

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from kvrepro.errors import InputError
from kvrepro.paths import ROOT
from kvrepro.tools import pdf

BOOK = Path(os.environ.get("KVREPRO_BOOK", ROOT / "_build" / "html"))
PAGES = sorted(str(page.relative_to(BOOK)) for page in BOOK.rglob("*.html") if "_static" not in page.parts)
PAGES = [page for page in PAGES if page != "index.html"]  # it leads on to the first page
CHAPTERS = [page for page in PAGES if "/executed/" in page]
WIDE, PHONE = {"width": 1400, "height": 900}, {"width": 390, "height": 844}
MOST = 1_000_000  # bytes of a page without its figures
FIRST, ADVICE = "book/intro.html", "book/decide.html"
SHOWN = [FIRST, ADVICE, *CHAPTERS[:1]]  # one of each kind
WEIGHT = """() => [performance.getEntriesByType('navigation')[0], ...performance.getEntriesByType('resource').filter(
    one => !/_images|_downloads/.test(one.name))].reduce((sum, one) => sum + one.encodedBodySize, 0)"""
THEME = "theme => Object.assign(document.documentElement.dataset, {theme, mode: theme})"
TOO_WIDE = "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"
OPEN = "open => document.querySelectorAll('.claims details').forEach(one => { one.open = open; })"
MADE_HIGHER = """() => [...document.querySelectorAll('.bd-article :is(h1, h2, h3)')].filter(heading => {
    const before = heading.offsetHeight; heading.querySelector('a.headerlink')?.remove();
    return heading.offsetHeight < before; }).map(heading => heading.textContent)"""
BOXES = """() => Object.fromEntries(Object.entries({sidebar: '.bd-sidebar-primary', header: '.bd-header-article',
    article: '.bd-article', contents: '.bd-sidebar-secondary', footer: '.bd-footer-content'}).map(([name, one]) => {
    const box = document.querySelector(one).getBoundingClientRect(); return [name, [box.left, box.right]]; }))"""
AXE = """options => axe.run(document, {resultTypes: ['violations'], ...options}).then(found => found.violations.flatMap(
    one => one.nodes.map(node => `${one.id}: ${node.html.slice(0, 160)}`)))"""
CONTRAST, OTHERS = {"runOnly": ["color-contrast"]}, {"rules": {"color-contrast": {"enabled": False}}}
SCROLLED = {"runOnly": ["scrollable-region-focusable"]}  # depends on the width, as does what is around a page's text
# Contrast takes seconds for thousands of elements: of those with the same ancestors, classes and style, four are seen.
FEWER = """() => { const counts = {};
    const hide = (element, ancestors) => {
        const own = `${ancestors}>${element.tagName}.${element.className}${element.getAttribute('style')}`;
        counts[own] = (counts[own] || 0) + 1;
        const inside = [...element.children].map(child => hide(child, own));
        if (!inside.every(Boolean) || counts[own] <= 4) return false;
        element.style.visibility = 'hidden';
        return true; };
    hide(document.body, ''); }"""
BOXES_AT = {  # from where to where each part of a page reaches, by the width of the screen, in pixels
    1400: {"sidebar": (0, 280), "header": (280, 1128), "article": (280, 1128), "contents": (1128, 1400)},
    390: {"header": (0, 390), "article": (0, 390)},
}  # fmt: skip

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not PAGES, reason=f"no book at {BOOK}: run make book first"),
]


@pytest.fixture(scope="session")
def address() -> Iterator[str]:
    """Where the book is served."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *logged: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(BOOK)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()


@pytest.fixture(scope="session")
def browser():
    """The system's Chromium."""
    sync_api = pytest.importorskip("playwright.sync_api")
    try:
        program = pdf.browser()
    except InputError as error:
        pytest.skip(str(error))
    with sync_api.sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])


@pytest.fixture
def tab(browser):
    """A new tab as wide as a laptop, and what went wrong in it."""
    context = browser.new_context(viewport=WIDE, color_scheme="light", reduced_motion="reduce")
    page = context.new_page()
    page.wrong = []
    page.on("console", lambda message: page.wrong.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: page.wrong.append(str(error)))
    page.on("response", lambda answer: page.wrong.append(answer.url) if answer.status >= 400 else None)
    yield page
    context.close()


@pytest.fixture(scope="session")
def axe() -> str:
    """The script of axe-core."""
    package = pytest.importorskip("axe_playwright_python")
    return (Path(package.__file__).parent / "axe.min.js").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", PAGES)
def test_a_page_works_for_everybody(tab, address, axe, name):
    """Nothing is logged as an error, nothing comes from elsewhere, little is loaded, nothing is wider than the screen,
    and axe finds no violation: light and dark, wide and narrow."""
    requested = []
    tab.on("request", lambda request: requested.append(request.url))
    tab.goto(address + name, wait_until="load")
    outside = [url for url in requested if not url.startswith((address, "data:", "blob:"))]
    assert not outside
    assert not tab.wrong
    if name != "search.html":  # it loads the index of all words
        assert tab.evaluate(WEIGHT) <= MOST
    tab.evaluate(axe)
    violations = {"wide": tab.evaluate(AXE, OTHERS)}
    assert tab.evaluate(TOO_WIDE) <= 0
    tab.set_viewport_size(PHONE)
    tab.evaluate("reach()")  # what scrolls now; the page does so itself a moment later
    violations["phone"] = tab.evaluate(AXE, OTHERS if name in SHOWN else SCROLLED)
    tab.evaluate(OPEN, True)
    assert tab.evaluate(TOO_WIDE) <= 0
    tab.evaluate(OPEN, False)
    tab.evaluate(FEWER)
    if name in SHOWN:
        violations["contrast on a phone"] = tab.evaluate(AXE, CONTRAST)
    tab.set_viewport_size(WIDE)
    violations["contrast"] = tab.evaluate(AXE, CONTRAST)
    tab.evaluate(THEME, "dark")
    violations["contrast in the dark"] = tab.evaluate(AXE, CONTRAST)
    assert {where: listed for where, listed in violations.items() if listed} == {}


def text_of(page: str) -> str:
    return (BOOK / page).read_text(encoding="utf-8")


def test_no_link_is_dead():
    """Every link inside the book leads to a file, and to a place in it."""
    places = {page: set(re.findall(r'\bid="([^"]+)"', text_of(page))) for page in PAGES}
    dead = []
    for page in PAGES:
        tags = re.findall(r"<(?:a|img|script|link|source)\b[^>]*>", text_of(page))
        for url in {unescape(url) for tag in tags for url in re.findall(r'\s(?:href|src)="([^"]+)"', tag)}:
            parts = urlsplit(url)
            if parts.scheme or parts.netloc:
                continue
            target = os.path.normpath(Path(page).parent / unquote(parts.path)) if parts.path else page
            place = unquote(parts.fragment)
            if place and target not in places and (BOOK / target).suffix == ".html" and (BOOK / target).exists():
                places[target] = set(re.findall(r'\bid="([^"]+)"', text_of(target)))  # a listing of code
            if not (BOOK / target).exists() or (place and place not in places.get(target, ())):
                dead.append(f"{page}: {url}")
    assert len(PAGES) > 10
    assert dead == []


def test_every_picture_has_a_text_of_its_own():
    """Figures of the book are described, each in its own words."""
    figures = [figure for page in PAGES for figure in re.findall(r"<figure\b.*?</figure>", text_of(page), re.S)]
    images = [image for figure in figures for image in re.findall(r"<img\b[^>]*>", figure)]
    texts = [(re.findall(r'\balt="([^"]*)"', image) or [""])[0] for image in images]
    assert texts
    assert all(len(text) > 20 and not text.endswith((".svg", ".png")) for text in texts)
    assert len(set(texts)) == len(texts)


def test_search_finds_what_a_chapter_is_about(tab, address):
    tab.goto(f"{address}search.html?q=eviction")
    tab.wait_for_selector("#search-results li a", timeout=20_000)
    assert tab.locator("#search-results li").count() > 3
    tab.wait_for_selector("#search-results li p.context")
    quoted = tab.locator("#search-results li p.context").all_inner_texts()
    assert not any("Contents" in text for text in quoted), "of the text, not of the lists around it"
    assert not tab.wrong


def test_a_word_of_the_glossary_is_explained_to_mouse_and_keyboard(tab, address):
    tab.goto(address + FIRST)
    word = tab.locator("a.term").first
    meaning = tab.locator("a.term + .tip").first
    assert meaning.is_hidden()
    word.hover()
    assert meaning.is_visible()
    tab.mouse.move(0, 0)
    assert meaning.is_hidden()
    word.focus()
    assert len(meaning.get_attribute("aria-label")) > 20
    assert meaning.is_visible()
    tab.keyboard.press("Escape")
    assert meaning.is_hidden()


def test_the_keyboard_reaches_the_text_first(tab, address):
    """The first stop skips the navigation; every stop can be seen."""
    tab.goto(address + FIRST)
    tab.keyboard.press("Tab")
    assert "main-content" in tab.evaluate("document.activeElement.getAttribute('href')")
    for _ in range(12):
        tab.keyboard.press("Tab")
        shown = "getComputedStyle(document.activeElement).outlineStyle"
        assert tab.evaluate("document.activeElement.tagName") != "BODY"
        assert tab.evaluate(shown) != "none"


@pytest.mark.parametrize("name", CHAPTERS[:1])
def test_a_figures_point_says_its_value_on_hover(tab, address, name):
    tab.goto(address + name)
    point = tab.locator(".points i").first
    point.scroll_into_view_if_needed()
    point.hover(force=True)
    script = "point => [getComputedStyle(point, '::after').display, getComputedStyle(point, '::after').content]"
    display, text = point.evaluate(script)
    assert display == "block"
    assert re.search(r"\d", text)


def test_the_link_of_a_heading_adds_no_line_to_it(tab, address):
    for name in [FIRST, *CHAPTERS]:
        tab.goto(address + name)
        assert tab.locator(".bd-article h1 a.headerlink").count() == 1
        assert tab.evaluate(MADE_HIGHER) == [], name


def test_a_box_of_findings_is_short(tab, address):
    """Three to five sentences in each chapter, and they end as sentences do."""
    for name in CHAPTERS:
        tab.goto(address + name)
        texts = tab.locator(".admonition.tip").first.locator("li").all_inner_texts()
        sentences = [sentence for text in texts for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z])", text.strip())]
        assert 3 <= len(sentences) <= 5, (name, sentences)
        assert all(sentence.endswith(".") for sentence in sentences), name


def test_rows_are_filtered(tab, address):
    tab.goto(address + ADVICE)
    rows = tab.locator("div.filterable tbody tr")
    every = rows.count()
    if not every:
        pytest.skip("no table of advice: the chapter on synthesis has no results")
    tab.locator("form.filters input[type=search]").fill("both ends shared")
    left = [row for row in rows.all() if row.is_visible()]
    assert 0 < len(left) < every
    assert all("both ends" in row.inner_text() for row in left)


def test_a_phone_reaches_every_column_of_the_advice_beside_the_name_of_its_row(browser, address):
    context = browser.new_context(viewport=PHONE)
    page = context.new_page()
    page.goto(address + ADVICE)
    name, *others = page.locator("div.filterable th").all() or [None]
    if name is None:
        pytest.skip("no table of advice: the chapter on synthesis has no results")
    for head in others:
        head.scroll_into_view_if_needed()
        left, right = name.bounding_box(), head.bounding_box()
        assert 0 <= left["x"] < left["x"] + left["width"] <= right["x"] + 1
        assert right["x"] + right["width"] <= PHONE["width"]
    assert page.evaluate(TOO_WIDE) <= 0
    context.close()


@pytest.mark.parametrize("name", SHOWN)
def test_pages_read_without_scripts(browser, address, name):
    context = browser.new_context(viewport=WIDE, java_script_enabled=False)
    page = context.new_page()
    page.goto(address + name)
    assert page.locator("main h1:visible").count() == 1
    assert len(page.locator("main").inner_text()) > 1500
    context.close()


def test_print_shows_the_text_alone(tab, address):
    tab.goto(address + FIRST)
    tab.emulate_media(media="print")
    assert tab.locator(".bd-sidebar-primary").is_hidden()
    assert tab.locator("h1:visible").count() == 1
    assert tab.locator(".bd-article p").first.is_visible()


@pytest.mark.parametrize("name", CHAPTERS[:1])
def test_print_unfolds_what_is_folded_and_is_light(browser, address, name):
    context = browser.new_context(viewport={"width": 700, "height": 1000}, color_scheme="dark")
    page = context.new_page()
    page.goto(address + name)
    page.emulate_media(media="print")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    folded = page.locator("main details > :not(summary)")
    assert folded.count()
    assert all(element.is_visible() for element in folded.all()[:5])
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.evaluate(TOO_WIDE) <= 0
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    context.close()


@pytest.mark.parametrize("name", SHOWN)
@pytest.mark.parametrize(("width", "theme"), [(1400, "light"), (1400, "dark"), (390, "light")])
def test_a_page_looks_as_it_should(browser, address, name, width, theme):
    """Its parts stand where the style sheet puts them, the page is as light or dark as asked; a picture is kept."""
    context = browser.new_context(viewport={"width": width, "height": 1600}, color_scheme=theme)
    page = context.new_page()
    page.goto(address + name)
    boxes = page.evaluate(BOXES)
    picture = page.screenshot()
    folder = BOOK.parent / "browser"
    folder.mkdir(exist_ok=True)
    (folder / f"{re.sub(r'[^a-z_]+', '-', name.removesuffix('.html'))}-{width}-{theme}.png").write_bytes(picture)
    light = np.asarray(Image.open(io.BytesIO(picture)).convert("L")).mean()
    assert light > 200 if theme == "light" else light < 70
    for part, (left, right) in BOXES_AT[width].items():
        assert boxes[part] == pytest.approx((left, right), abs=24), part
    context.close()


def test_figures_data_hold_their_estimates_between_their_limits():
    """In one unit, so that who takes the data need not guess."""
    tables = {file: pd.read_csv(file) for file in sorted(BOOK.rglob("_downloads/**/*.csv"))}
    wrong = []
    for file, table in tables.items():
        if {"value", "low", "high"} <= set(table):
            complete = table.dropna(subset=["value", "low", "high"])
            slack = 1e-6 * (1 + complete.value.abs())
            outside = (complete.value < complete.low - slack) | (complete.value > complete.high + slack)
            wrong += [f"{file.name}: {outside.sum()} of {len(complete)}"] * bool(outside.any())
    assert tables
    assert not wrong


@pytest.mark.parametrize("page", PAGES)
def test_no_page_shows_an_objects_name_or_a_path_of_the_machine(page):
    text = (BOOK / page).read_text(encoding="utf-8")
    assert not re.findall(rf"PosixPath|&lt;\w+ object at|{re.escape(str(ROOT))}", text)
