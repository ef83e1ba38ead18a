"""The built book in a browser: no dead link, no error, nothing from elsewhere or too wide, accessible, searchable."""

import functools
import http.server
import os
import re
import shutil
import threading
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).resolve().parents[2]
BOOK = ROOT / "_build" / "html"
PAGES = [str(page.relative_to(BOOK)) for page in sorted((BOOK / "book").rglob("*.html"))]
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
LOOKED_AT = ("intro", "protection", "decide", "api", "kernels")  # at contrast, and on a phone: one page of each kind
WIDE, PHONE = {"width": 1400, "height": 1000}, {"width": 390, "height": 800}
TOO_WIDE = "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"
THEME = "theme => Object.assign(document.documentElement.dataset, {theme, mode: theme})"
AXE = """options => axe.run(document, {resultTypes: ['violations'], ...options}).then(found => found.violations.flatMap(
    one => one.nodes.map(node => `${one.id}: ${node.html.slice(0, 160)}`)))"""
CONTRAST, OTHERS = {"runOnly": ["color-contrast"]}, {"rules": {"color-contrast": {"enabled": False}}}

pytestmark = [pytest.mark.browser, pytest.mark.skipif(not PAGES, reason=f"no book at {BOOK}: run make book first")]


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
    program = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if program is None:
        pytest.skip("no Chromium is installed")
    with sync_api.sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])


@pytest.fixture
def tab(browser):
    """A new tab as wide as a laptop, what went wrong in it, and what it asked for."""
    context = browser.new_context(viewport=WIDE, color_scheme="light", reduced_motion="reduce")
    page = context.new_page()
    page.wrong, page.requested = [], []
    page.on("console", lambda message: page.wrong.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: page.wrong.append(str(error)))
    page.on("response", lambda answer: page.wrong.append(answer.url) if answer.status >= 400 else None)
    page.on("request", lambda request: page.requested.append(request.url))
    yield page
    context.close()


@pytest.fixture(scope="session")
def axe() -> str:
    """The script of axe-core."""
    package = pytest.importorskip("axe_playwright_python")
    return (Path(package.__file__).parent / "axe.min.js").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", PAGES)
def test_a_page_works_for_everybody(tab, address, axe, name):
    """Nothing is logged as an error, nothing comes from elsewhere, nothing is wider than the screen, and axe finds no
    violation, light and dark, wide and narrow."""
    tab.goto(address + name, wait_until="load")
    tab.wait_for_timeout(1200)  # tables are drawn by then
    assert not [url for url in tab.requested if not url.startswith((address, "data:", "blob:"))]
    assert not tab.wrong
    assert tab.evaluate(TOO_WIDE) <= 0
    tab.evaluate(axe)
    violations = {"wide": tab.evaluate(AXE, OTHERS)}
    for theme in ("light", "dark") if Path(name).stem in LOOKED_AT else ():
        tab.evaluate(THEME, theme)
        violations[f"contrast, {theme}"] = tab.evaluate(AXE, CONTRAST)
    tab.set_viewport_size(PHONE)
    tab.wait_for_timeout(300)
    assert tab.evaluate(TOO_WIDE) <= 0
    if Path(name).stem in LOOKED_AT:
        violations["phone"] = tab.evaluate(AXE, OTHERS)
    assert {where: listed for where, listed in violations.items() if listed} == {}


def test_no_link_is_dead():
    """Every link inside the book leads to a file, and to a place in it."""
    texts = {page: (BOOK / page).read_text(encoding="utf-8") for page in PAGES}
    places = {page: set(re.findall(r'\bid="([^"]+)"', text)) for page, text in texts.items()}
    dead = []
    for page, text in texts.items():
        tags = re.findall(r"<(?:a|img|script|link|source)\b[^>]*>", text)
        for url in {unescape(url) for tag in tags for url in re.findall(r'\s(?:href|src)="([^"]+)"', tag)}:
            parts = urlsplit(url)
            if parts.scheme or parts.netloc:
                continue
            target = os.path.normpath(Path(page).parent / unquote(parts.path)) if parts.path else page
            place = unquote(parts.fragment)
            if not (BOOK / target).exists() or (place and target in places and place not in places[target]):
                dead.append(f"{page}: {url}")
    assert len(PAGES) > 10
    assert dead == []


def test_search_finds_what_a_chapter_is_about(tab, address):
    tab.goto(f"{address}search.html?q=eviction")
    tab.wait_for_selector("#search-results li a", timeout=20_000)
    assert tab.locator("#search-results li").count() > 3
    assert not tab.wrong
