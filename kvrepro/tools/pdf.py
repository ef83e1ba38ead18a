"""The whole book as one PDF: `make pdf`, after `make book`. The Chromium of the system prints it as one HTML page."""

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from kvrepro.errors import InputError
from kvrepro.paths import ROOT, replaced
from kvrepro.tools import command
from kvrepro.tools.book import Failed, build, chapters

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PAPER = """<style>@page { size: A4; margin: 16mm 14mm }
html { font-size: 10.5px !important } .bd-article table { font-size: 0.8rem !important }
.toctree-wrapper > section { break-before: page }</style>"""  # each chapter begins on a page of its own


def browser() -> str:
    """The program that prints: $CHROMIUM, or the first of `BROWSERS` that is installed. Raises InputError."""
    named = os.environ.get("CHROMIUM")
    program = next((path for name in ([named] if named else BROWSERS) if (path := shutil.which(name))), None)
    if program is None:
        names = named or ", ".join(BROWSERS)
        raise InputError(f"no browser to print with ({names}): install Chromium, or set $CHROMIUM")
    return program


def one_page(folder: Path, root: Path = ROOT) -> Path:
    """The book as one HTML page in `folder`. Raises Failed."""
    build(root, ["--path-output", str(folder), "--builder", "custom", "--custom-builder", "singlehtml"])
    built = folder / "_build" / "singlehtml"
    text = (built / "book" / "intro.html").read_text(encoding="utf-8").replace("</head>", f"{PAPER}</head>", 1)
    whole = built / "whole.html"  # the page's styles start at this folder, wherever its first file lies
    whole.write_text(linked(text), encoding="utf-8")
    return whole


def linked(text: str) -> str:
    """The page with links to other pages of the book turned into links within it. Links to anything that it does not
    hold, such as files of data, are removed: they would lead to a folder that is deleted after printing."""
    places = set(re.findall(r'\bid="([^"]+)"', text))

    def inside(link: re.Match[str]) -> str:
        place = link[2].partition("#")[2]
        return f'{link[1]} href="#{place}"' if place in places else link[1]

    return re.sub(r'(<a\b[^>]*?) href="(?!https?:)([^"]*)"', inside, text)


def printed(page: Path, to: Path, program: str) -> None:
    """Print an HTML page, with an outline of its headings. Raises Failed."""
    # Without a sandbox: the page is our own, and root, containers and GitHub's runners have none to give.
    command = [program, "--headless", "--no-sandbox", "--disable-gpu", "--no-pdf-header-footer",
               "--generate-pdf-document-outline"]  # fmt: skip
    with replaced(to) as aside:
        done = subprocess.run([*command, f"--print-to-pdf={aside}", page.as_uri()], capture_output=True, text=True)
        if done.returncode or not aside.is_file() or not aside.stat().st_size:
            [*_, last] = ["no reason given", *done.stderr.strip().splitlines()]
            raise Failed(f"{program} printed nothing: {last}")


def main(out: Path = ROOT / "_build" / "kvrepro.pdf") -> None:
    """Print the book as it was last executed."""
    program = browser()
    if missing := [name for name in chapters() if not (ROOT / "book" / "executed" / f"{name}.ipynb").is_file()]:
        raise InputError(f"{missing[0]} was not executed yet: run `make book` first")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        printed(one_page(Path(folder)), out.resolve(), program)
    print(f"the book: {out}, {out.stat().st_size / 1e6:.0f} MB")


if __name__ == "__main__":
    command.run(main)
