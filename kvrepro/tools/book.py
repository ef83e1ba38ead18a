"""The book: re-execute the chapters whose inputs changed, write the generated pages, build the HTML.

`python -m kvrepro.tools.book`, or `make book`. The chapters are the entries of _toc.yml under book/executed: their
executed copies lie there, computed pages in book/generated, the HTML in _build/html. None of these is kept in git.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import nbformat
import papermill
import typer
import yaml
from papermill.exceptions import PapermillExecutionError

from kvrepro.errors import InputError
from kvrepro.paths import ROOT
from kvrepro.tools import pages

INPUTS = (
    "kvrepro/**/*.py",
    "kernels/**/*.py",
    "data/published/*",
    "data/claims/*",
    "data/models/**/*",
    "data/gpu/*",
    "constraints.txt",
)


class Failed(Exception):
    """A chapter or the build came to no end."""


def chapters(root: Path = ROOT) -> list[str]:
    """Names of the chapters that _toc.yml lists, in its order."""
    toc = yaml.safe_load((root / "_toc.yml").read_text())
    files = [entry["file"] for part in toc["parts"] for entry in part["chapters"]]
    return [Path(file).stem for file in files if file.startswith("book/executed/")]


def fingerprint(name: str, parameters: dict[str, Any], root: Path = ROOT) -> str:
    """Hash of what an executed chapter depends on: notebook, parameters and files they name, code, weights, pins."""
    files = {root / "notebooks" / f"{name}.ipynb"} | {file for pattern in INPUTS for file in root.glob(pattern)}
    named = [root / value for value in parameters.values() if isinstance(value, str) and (root / value).exists()]
    files |= {file for path in named for file in [path, *path.rglob("*")]}
    digest = hashlib.sha256(json.dumps([sys.version, parameters], sort_keys=True).encode())
    for file in sorted(file for file in files if file.is_file() and "__pycache__" not in file.parts):
        digest.update(os.path.relpath(file, root).encode() + _hash(file).encode())
    return digest.hexdigest()


def _hash(file: Path) -> str:
    if not file.is_file():
        return "missing"
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def execute(name: str, parameters: dict[str, Any], root: Path = ROOT, force: bool = False) -> bool:
    """Run one chapter into book/executed; False when the copy that lies there already belongs to these inputs.

    The copy is written cell by cell under the name `<chapter>.partial.ipynb` and takes its place when it is complete.
    Raises papermill's PapermillExecutionError for a failing cell.
    """
    source, done = root / "notebooks" / f"{name}.ipynb", root / "book" / "executed" / f"{name}.ipynb"
    if not source.is_file():
        raise InputError(f"_toc.yml lists book/executed/{name}, but {source} does not exist")
    partial, claims = done.with_suffix(".partial.ipynb"), root / "data" / "results" / name / "claims.csv"
    inputs = fingerprint(name, parameters, root)
    if done.is_file() and not force:
        stamp = nbformat.read(done, as_version=4).metadata.get("kvrepro", {})
        if stamp == {"inputs": inputs, "claims": _hash(claims)}:
            return False
    partial.parent.mkdir(parents=True, exist_ok=True)
    # The kernel is this interpreter, whatever kernels the user has installed.
    os.environ.pop("JUPYTER_PATH", None)
    os.environ["JUPYTER_PREFER_ENV_PATH"] = "1"
    quiet = ["--log-level=CRITICAL"]  # the kernel's remarks on its transport; errors of cells come as exceptions
    papermill.execute_notebook(source, partial, parameters, kernel_name="python3", cwd=root, extra_arguments=quiet,
                               progress_bar=False)  # fmt: skip
    notebook = nbformat.read(partial, as_version=4)
    notebook.metadata["kvrepro"] = {"inputs": inputs, "claims": _hash(claims)}
    nbformat.write(notebook, partial)
    partial.replace(done)
    return True


def parse_parameters(texts: Iterable[str], names: Iterable[str], root: Path = ROOT) -> dict[str, dict[str, Any]]:
    """`["n_items=8"]` -> for each chapter the parameters that it has. A name that no chapter has raises InputError."""
    given: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals:
            raise InputError(f"parameter {text!r} is not of the form name=value")
        given[key] = yaml.safe_load(value)
    if not given:
        return {name: {} for name in names}
    known = {name: set(papermill.inspect_notebook(root / "notebooks" / f"{name}.ipynb")) for name in names}
    for key in given:
        if not any(key in keys for keys in known.values()):
            there_are = ", ".join(sorted(set().union(*known.values())))
            raise InputError(f"no chapter has a parameter {key!r}; there are: {there_are}")
    return {name: {key: value for key, value in given.items() if key in keys} for name, keys in known.items()}


def build(root: Path = ROOT) -> Path:
    """jupyter-book over the whole folder, warnings as errors: the index page. Raises Failed with the complaints."""
    tool = Path(sys.executable).with_name("jupyter-book")
    # All pages each time: an incremental build says nothing of the warnings that an earlier one gave.
    command = [str(tool), "build", ".", "--all", "-W", "--keep-going"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    if done.returncode:
        log = (done.stdout + done.stderr).splitlines()
        complaints = [line for line in log if "WARNING" in line or "ERROR" in line] or log[-30:]
        raise Failed("jupyter-book failed:\n" + "\n".join(complaints))
    html = root / "_build" / "html"
    if loaded := outside(html):
        raise Failed("the book would load from the network:\n" + "\n".join(loaded))
    return html / "index.html"


def outside(html: Path) -> list[str]:
    """What the pages under a folder would fetch from elsewhere as a reader opens them; plain links do not count."""
    loads = re.compile(r"""<(?:script|img|iframe|link|source)\b[^>]*?\b(?:src|href)=["'](?:https?:)?//[^"']+""", re.I)
    pages_found = ((page, loads.findall(page.read_text(encoding="utf-8"))) for page in sorted(html.rglob("*.html")))
    return [f"{page.relative_to(html)}: {tag}" for page, tags in pages_found for tag in tags]


def main(
    parameter: Annotated[
        list[str], typer.Option("--parameter", "-p", help="name=value, for the chapters that have it")
    ] = [],  # noqa: B006
    force: Annotated[bool, typer.Option(help="execute chapters even if nothing changed")] = False,
) -> None:
    """Execute what changed, build the book, print where it lies and how long each step took."""
    try:
        names = chapters()
        parameters = parse_parameters(parameter, names)
        # Chapters side by side on one thread each use two cores better than one chapter on two threads.
        cores = os.cpu_count() or 1
        jobs = max(1, min(len(names), cores))
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // jobs)))
        with ProcessPoolExecutor(jobs) as pool:
            done = pool.map(_chapter, names, [parameters[name] for name in names], [force] * len(names))
            failed = [name for name, fine in zip(names, done, strict=True) if not fine]
        if failed:
            raise Failed(f"the book was not built: {', '.join(failed)} failed; finished rows are kept in data/results")
        start = time.perf_counter()
        pages.write([name for name in names if (ROOT / "data" / "claims" / f"{name}.yml").is_file()])
        index = build()
        _report("build", start, "warnings are errors")
    except (InputError, Failed) as error:
        print(error, file=sys.stderr)
        raise typer.Exit(2 if isinstance(error, InputError) else 1) from None
    print(f"the book: {index}")


def _chapter(name: str, parameters: dict[str, Any], force: bool) -> bool:
    start = time.perf_counter()
    try:
        ran = execute(name, parameters, force=force)
    except PapermillExecutionError as error:
        print(f"{name}: {error.ename}: {error.evalue}", file=sys.stderr)
        print(f"what was computed until then: book/executed/{name}.partial.ipynb", file=sys.stderr)
        return False
    _report(name, start, "executed" if ran else "unchanged")
    return True


def _report(step: str, start: float, note: str) -> None:
    print(f"{step:<16}{time.perf_counter() - start:8.1f} s  {note}", flush=True)


if __name__ == "__main__":
    typer.run(main)
