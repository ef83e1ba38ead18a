"""The book: re-execute the chapters whose inputs changed, write the generated pages, build the HTML.

`python -m kvrepro.tools.book`, or `make book`. The chapters are the entries of _toc.yml under book/executed: their
executed copies lie there, computed pages in book/generated, the HTML in _build/html. None of these is kept in git.
"""

import ast
import collections
import contextlib
import hashlib
import importlib
import io
import itertools
import json
import linecache
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import nbformat
import papermill
import typer
import yaml
from nbconvert.preprocessors.coalescestreams import CoalesceStreamsPreprocessor

from kvrepro.engine.allowed import Size, ensure
from kvrepro.engine.policy import find
from kvrepro.errors import InputError, Stopped, ensure_known, error_line
from kvrepro.experiment import claims, models, run, workers
from kvrepro.experiment.parameters import read
from kvrepro.paths import ROOT
from kvrepro.tools import command, edition, pages, web
from kvrepro.tools.processes import in_turn, interruptible

INPUTS = """kvrepro/**/*.py kernels/**/*.py data/published/* data/claims/* data/models/**/* data/gpu/*
data/artifact/* data/words/* data/error_rates.csv constraints.txt""".split()
PAGES = """_config.yml _toc.yml *.md constraints.txt book/**/* data/*.csv data/*/*.csv kvrepro/tools/*.py""".split()
FIRST_PAGE = "_build/html/index.html"
SHOWS = "kvrepro.experiment.figure.display"  # what figures are shown by
STUDIES_END = ".end_studies()"  # in the cell that runs a notebook's studies, as its last line
PARAMETER = "name=value for all chapters that have it, or chapter.name=value; relative paths start in the clone"


class Failed(Stopped):
    """A chapter or the build failed."""


def chapters(root: Path = ROOT) -> list[str]:
    """Names of the chapters that _toc.yml lists, in its order."""
    if not (root / "_toc.yml").is_file():
        raise InputError("the book is built in a clone of the repository; without one, run `kvrepro notebooks`")
    toc = yaml.safe_load((root / "_toc.yml").read_text())
    files = [entry["file"] for part in toc["parts"] for entry in part["chapters"]]
    return [Path(file).stem for file in files if file.startswith("book/executed/")]


def judged() -> list[str]:
    """The chapters that have claims."""
    return [name for name in chapters() if (ROOT / "data" / "claims" / f"{name}.yml").is_file()]


def studied(root: Path = ROOT) -> list[str]:
    """The chapters that have studies to run."""
    files = sorted((root / "notebooks").glob("*.ipynb"))
    return [file.stem for file in files if STUDIES_END in file.read_text(encoding="utf-8")]


def fingerprint(name: str, parameters: dict[str, Any], root: Path = ROOT) -> str:
    """Hash of what an executed chapter depends on: its notebook, its parameters and the files that they name, code,
    weights, words, and pinned versions. The results, which the chapter writes, do not count."""
    named = [root / value for key, value in parameters.items() if key != "results" and isinstance(value, str)]
    files = {file for path in named if path.exists() for file in [path, *path.rglob("*")]}
    return _hash_of([parameters], {root / "notebooks" / f"{name}.ipynb", *_found(INPUTS, root), *files}, root)


def _found(patterns: Iterable[str], root: Path) -> set[Path]:
    return {file for pattern in patterns for file in root.glob(pattern)}


def _hash_of(facts: list[Any], files: Iterable[Path], root: Path) -> str:
    """Hash of the version of Python, of facts, and of files with their names."""
    digest = hashlib.sha256(json.dumps([sys.version, *facts], sort_keys=True).encode())
    for file in sorted(file for file in files if file.is_file() and "__pycache__" not in file.parts):
        digest.update(os.path.relpath(file, root).encode() + _hash(file).encode())
    return digest.hexdigest()


def _hash(file: Path) -> str:
    if not file.is_file():
        return "missing"
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _source(name: str, root: Path) -> Path:
    """A chapter's notebook. Raises InputError where it does not exist."""
    source = root / "notebooks" / f"{name}.ipynb"
    if not source.is_file():
        raise InputError(f"_toc.yml lists book/executed/{name}, but {source} does not exist")
    return source


def execute(name: str, parameters: dict[str, Any], root: Path = ROOT, force: bool = False) -> bool:
    """Run one chapter into book/executed; False when the copy that lies there already belongs to these inputs.

    The copy is written cell by cell under the name `<chapter>.partial.ipynb` and takes its place when it is complete.
    Raises papermill's PapermillExecutionError for a failing cell.
    """
    source, done = _source(name, root), root / "book" / "executed" / f"{name}.ipynb"
    partial = done.with_suffix(".partial.ipynb")
    claims = root / parameters.get("results", edition.RESULTS) / name / "claims.csv"
    inputs = fingerprint(name, parameters, root)
    if done.is_file() and not force:
        stamp = nbformat.read(done, as_version=4).metadata.get("kvrepro", {})
        if stamp == {"inputs": inputs, "claims": _hash(claims)}:
            return False
    partial.parent.mkdir(parents=True, exist_ok=True)
    # The kernel is this interpreter, whatever kernels the user has installed.
    os.environ.pop("JUPYTER_PATH", None)
    os.environ["JUPYTER_PREFER_ENV_PATH"] = "1"
    # The next chapter's workers take the cores while this one draws: threads that wait for each other would slow both.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    workers.keep_blocks()
    # Without the kernel's remarks on its transport, and on its own tasks as it ends; errors of cells are exceptions.
    at_its_end = '__import__("atexit").register(__import__("logging").disable)'
    quiet = ["--log-level=CRITICAL", f"--IPKernelApp.exec_lines={at_its_end}"]
    given = dict(kernel_name="python3", cwd=root, extra_arguments=quiet, progress_bar=False)
    # A cell's outputs are written when it ends. Without this option, the notebook is written as a cell begins, too.
    papermill.execute_notebook(source, partial, parameters, request_save_on_cell_execute=False, **given)
    notebook = nbformat.read(partial, as_version=4)
    notebook, _ = CoalesceStreamsPreprocessor().preprocess(notebook, {})  # what was printed in a row is one block
    edition.edit(notebook, name, partial.parent)
    notebook.metadata["kvrepro"] = {"inputs": inputs, "claims": _hash(claims)}
    nbformat.write(notebook, partial)
    partial.replace(done)
    return True


def parse_parameters(texts: Iterable[str], names: Iterable[str], root: Path = ROOT) -> dict[str, dict[str, Any]]:
    """The parameters of each chapter from texts such as "n_items=8" or "leakage.items=ifeval", as `by_chapter`. Values
    are read as YAML. Of a name that is given twice the last one counts."""
    values = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals:
            raise InputError(f"parameter {text!r} is not of the form name=value")
        values[key] = read(value)
    return by_chapter(values, names, root)


def by_chapter(values: Mapping[str, Any], names: Iterable[str], root: Path = ROOT) -> dict[str, dict[str, Any]]:
    """The parameters of each chapter, from for instance `{"n_items": 8, "leakage.items": "ifeval"}`: those for all
    chapters that it has, and those that name it. Settings that are no parameters of a chapter's notebook go into its
    `options`. Raises InputError for a name that no chapter has."""
    parameters_of = {name: set(papermill.inspect_notebook(_source(name, root))) for name in names}
    options = {name: settings_of(name) - has if "options" in has else set() for name, has in parameters_of.items()}
    chosen: dict[str, dict[str, Any]] = {name: {} for name in parameters_of}
    for key in sorted(values, key=lambda key: "." in key):  # a parameter that names a chapter replaces one for all
        prefix, dot, name = key.rpartition(".")
        if name == "options":
            raise InputError("options: give each setting by its own name, seed=1 for instance")
        if dot:
            ensure_known("chapter", [prefix], parameters_of)
        wanted = [prefix] if dot else list(parameters_of)
        possible = set().union(*(parameters_of[chapter] | options[chapter] for chapter in wanted))
        if not dot and name in parameters_of:
            raise InputError(f"{name!r} is a chapter: give its parameters as {name}.n_items, for instance")
        ensure_known(f"parameter of {prefix or 'any chapter'}", [name], sorted(possible))
        for chapter in wanted:
            if name in parameters_of[chapter]:
                chosen[chapter][name] = values[key]
            elif name in options[chapter]:
                chosen[chapter].setdefault("options", {})[name] = values[key]
    return chosen


def settings_of(chapter: str) -> set[str]:
    """Names of a chapter's settings, which its notebook takes as `options`."""
    try:
        module = importlib.import_module(f"kvrepro.chapters.{chapter}.settings")
    except ModuleNotFoundError:
        module = run
    return {f.name for f in fields(module.Settings)}


def failed_page(name: str, error: str, root: Path = ROOT) -> None:
    """A page in a failed chapter's place: its title, and what went wrong. The next build tries the chapter again."""
    source = nbformat.read(_source(name, root), as_version=4)
    first = next((cell.source for cell in source.cells if cell.cell_type == "markdown"), f"# {name}")
    text = (
        f"{first.splitlines()[0]}\n\n:::{{error}}\nThis chapter did not come to its end when the book was built:\n\n"
        f"```text\n{error}\n```\n\nWhat it had computed is stored, and the next build goes on from there.\n:::"
    )
    page = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(text)], metadata=source.metadata)
    done = root / "book" / "executed" / f"{name}.ipynb"
    done.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(page, done)


def built(root: Path = ROOT, force: bool = False) -> bool:
    """Build the HTML, unless what lies there was built from the same files. Returns whether it was built."""
    stamp = root / "_build" / "inputs.sha256"
    names = (web.SITE_URL, "GITHUB_REPOSITORY")
    inputs = _hash_of([os.environ.get(name) for name in names], _found(PAGES, root), root)
    same = stamp.is_file() and (root / FIRST_PAGE).is_file() and stamp.read_text() == inputs
    if same and not force:
        return False
    stamp.unlink(missing_ok=True)
    build(root)
    stamp.write_text(inputs)
    return True


def build(root: Path = ROOT, options: Sequence[str] = ("--all", "-W", "--keep-going")) -> None:
    """jupyter-book over the whole folder, with warnings as errors if nothing else is asked for: then all pages each
    time, since an incremental build says nothing of earlier warnings. Raises Failed with the complaints."""
    tool = Path(sys.executable).with_name("jupyter-book")
    done = subprocess.run([str(tool), "build", ".", *options], cwd=root, capture_output=True, text=True)
    if done.returncode:
        log = (done.stdout + done.stderr.partition("Traceback (most recent call last)")[0]).splitlines()
        complaints = [line for line in log if "WARNING" in line or "ERROR" in line] or log[-30:]
        raise Failed("\n".join(["jupyter-book failed:", *complaints]))


@interruptible()
def main(
    parameter: Annotated[list[str], typer.Option("-p", "--parameter", help=PARAMETER)] = [],  # noqa: B006
    force: Annotated[bool, typer.Option(help="execute chapters even if nothing changed")] = False,
    workers: Annotated[int | None, typer.Option(help="processes of each chapter; otherwise all cores or GPUs")] = None,
    dry_run: Annotated[bool, typer.Option(help="say what each chapter would compute, and stop")] = False,
) -> None:
    """Execute what changed, build the book, print where it lies and how long each step took.

    Each chapter computes with all workers, beside another one if models are small, so that no core is idle; those that
    measure time come last, and compute alone. One that fails leaves the others in the book, which says so on its page;
    the exit status is 1 then. An interrupt ends all processes; the exit status is 128 + its number.
    """
    if workers is not None:
        os.environ["KVREPRO_WORKERS"] = str(workers)
    failed = []
    names = chapters()
    parameters = parse_parameters(parameter, names)
    wanted = any(given.get("options", {}).get("dry_run") for given in parameters.values())
    usual = run.Settings()  # refuses what the environment says of workers, once for all chapters
    if dry_run or wanted or usual.dry_run:
        rehearse(names, parameters)
        return
    for name in names:
        check(name, parameters[name])
    timed = [name for name in judged() if "timed" in claims.load_claims(name)]  # they measure time
    works = _works(sorted(names, key=timed.__contains__), parameters, force)
    for name, seconds, ran, error in in_turn(works, _together(parameters), set(names).difference(timed)):
        if error:
            failed.append(name)
            until = f"computed until then: book/executed/{name}.partial.ipynb"
            print(f"{name}: {error}\n{name}: {until}", file=sys.stderr)
            failed_page(name, error)
        _report(name, seconds, "failed" if error else "executed" if ran else "unchanged")
    start = _begin("build")
    pages.write(judged())
    note = "warnings are errors" if built(force=force) else "unchanged"
    _report("build", time.perf_counter() - start, note)
    print(f"the book: {ROOT / FIRST_PAGE}")
    if failed:
        print(f"{', '.join(failed)} failed: the book says so in their place", file=sys.stderr)
        raise typer.Exit(1)


def check(name: str, parameters: dict[str, Any], root: Path = ROOT) -> None:
    """Raise InputError, with the chapter's name, for values of parameters that it would refuse before a model is
    loaded: its cells up to there are run, and its policies are looked up."""
    source = _source(name, root).read_text()
    loads = next((call for call in ("models.load(", "artifact.scores(") if call in source), None)
    if not parameters or loads is None:
        return
    try:
        usual, space = _until(name, {}, root, loads), _until(name, parameters, root, loads)
        ensure(Size | None, n_items=space.get("n_items"))
        for parameter in {"policies", "rivals"} & set(usual) & set(space):
            ensure(list[str], **{parameter: space[parameter]})
            for policy in sorted(set(space[parameter]) - set(usual[parameter]) - {"full"}):
                find(policy)
    except InputError as error:
        raise InputError(f"{name}: {error}") from None


def _until(name: str, parameters: dict[str, Any], root: Path, loads: str) -> dict[str, Any]:
    """A notebook's variables before the statement that holds `loads`; {} where its own code fails. That code may raise
    anything: the chapter is executed all the same, and its page shows the error."""
    space: dict[str, Any] = {}
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            collections.deque(cells(name, parameters, root=root, space=space, until=loads), 0)
    except InputError:
        raise
    except Exception:
        return {}
    return space


def rehearse(names: Sequence[str], parameters: dict[str, dict[str, Any]], root: Path = ROOT) -> None:
    """Print what chapters would compute: their cells run, in dry run, up to the one that ends it. One that refuses its
    parameters says why, and the exit status is 2 in the end."""
    os.environ["KVREPRO_DRY_RUN"] = "1"
    refused = False
    for name in names:
        if name not in studied(root):
            print(f"{name}: has no studies to run")
            continue
        try:
            collections.deque(cells(name, parameters[name], root=root), 0)
        except SystemExit:  # the end of a dry run
            continue
        except InputError as error:
            print(f"{name}: {error}", file=sys.stderr, flush=True)
            refused = True
        except Exception as error:
            print(f"{name}: what follows needs their rows ({error_line(error)})")
    if refused:
        raise typer.Exit(2)


def cells(
    name: str, parameters: dict[str, Any], display: Callable[..., None] = lambda *things, **options: None,
    root: Path = ROOT, space: dict[str, Any] | None = None, until: str = "",
) -> Iterator[str]:  # fmt: skip
    """Run a notebook's code cells in this process, one by one, with these parameters in the place of its own. Yields
    each cell's source. display: is called with what a cell shows; space: holds their variables; until: the first
    statement that holds this text ends the run. Without a notebook, IPython's own `display` would print how objects
    of Python are written."""
    workers.studies_ended.clear()  # an earlier notebook's studies may have ended in this process
    space = {} if space is None else space
    space["display"] = display
    for number, cell in enumerate(nbformat.read(_source(name, root), as_version=4).cells):
        if cell.cell_type == "code":
            tree, file = ast.parse(cell.source), f"<{name}.ipynb, cell {number}>"
            # Like a kernel: rows depend on the source of what a notebook defines, which `inspect` then finds.
            linecache.cache[file] = len(cell.source), None, cell.source.splitlines(keepends=True), file
            body = list(itertools.takewhile(lambda line: not until or until not in ast.unparse(line), tree.body))
            whole = len(body) == len(tree.body)
            last = body.pop() if whole and body and isinstance(body[-1], ast.Expr) else None
            with mock.patch("IPython.display.display", display), mock.patch(SHOWS, display):
                exec(compile(ast.Module(body, []), file, "exec"), space)
                shown = eval(compile(ast.Expression(last.value), file, "eval"), space) if last else None
            if shown is not None:
                display(shown)
            if not whole:
                return
            if "parameters" in cell.metadata.get("tags", []):
                if unknown := sorted(set(parameters) - set(space)):
                    raise InputError(f"{name} has no parameter {unknown[0]!r}")
                space |= parameters
            yield cell.source


def _works(names: Sequence[str], parameters: dict[str, Any], force: bool) -> Iterator[tuple[str, Callable[[], bool]]]:
    """Each chapter's name and the function that executes it. Says that a chapter begins when it is asked for."""
    for name in names:
        _begin(name)
        yield name, partial(execute, name, parameters[name], force=force)


def _together(parameters: dict[str, Any]) -> int:
    """How many chapters may hold a model at a time: 3 where models are small and no GPU is shared, so that they compute
    while the one before draws its figures and the next one loads what it needs; otherwise 1."""
    small = all(given.get("model", models.DEFAULT) in models.embedded() for given in parameters.values())
    return 3 if small and all(given.get("device", "cpu") == "cpu" for given in parameters.values()) else 1


def _begin(step: str) -> float:
    """The time, in seconds. Where no live line is shown, print that the step begins."""
    if not (sys.stdout.isatty() and sys.stderr.isatty()):
        print(f"{step:<16} begins", flush=True)
    return time.perf_counter()


def _report(step: str, seconds: float, note: str) -> None:
    print(f"{step:<16}{seconds:8.1f} s  {note}", flush=True)


if __name__ == "__main__":
    command.run(main)
