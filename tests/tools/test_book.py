"""The flow of the book on small notebooks: what is executed, what is skipped, what a failure leaves behind."""

import inspect
import re
import shutil
import signal
import subprocess
import sys
import time
from functools import partial

import nbformat
import pytest
import typer
from papermill.exceptions import PapermillExecutionError
from processes import runs, waited

from kvrepro.engine.catalogue import CATALOGUE, SHARED
from kvrepro.engine.shared import SWITCHES
from kvrepro.errors import InputError
from kvrepro.experiment import workers
from kvrepro.tools import book, command, pages
from kvrepro.tools.processes import in_turn

METHODS = (book.ROOT / "book" / "methods.md").read_text()
TOC = """
format: jb-book
root: book/intro
parts:
  - chapters:
      - file: book/executed/first
      - file: book/methods
"""


@pytest.fixture
def root(tmp_path):
    """A folder with one chapter, whose single result is written to data/results/first."""
    (tmp_path / "_toc.yml").write_text(TOC)
    cells = [
        nbformat.v4.new_code_cell("size = 2", metadata={"tags": ["parameters"]}),
        nbformat.v4.new_code_cell(
            "import pathlib, sys\n"
            "folder = pathlib.Path('data/results/first')\n"
            "folder.mkdir(parents=True, exist_ok=True)\n"
            "(folder / 'claims.csv').write_text(f'{size}')\n"
            "print(sys.executable)\n"
            "assert size < 5, 'too large'"
        ),
    ]
    (tmp_path / "notebooks").mkdir()
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=kernel), tmp_path / "notebooks" / "first.ipynb")
    return tmp_path


def result(root):
    return (root / "data" / "results" / "first" / "claims.csv").read_text()


def test_chapters_are_the_executed_entries_of_the_toc(root):
    assert book.chapters(root) == ["first"]


def test_a_chapter_is_executed_once_and_again_when_something_changes(root):
    assert book.execute("first", {"size": 3}, root)
    assert result(root) == "3"
    assert not book.execute("first", {"size": 3}, root)
    assert book.execute("first", {"size": 4}, root)
    assert result(root) == "4"
    (root / "kvrepro").mkdir()
    (root / "kvrepro" / "engine.py").write_text("x = 1")
    assert book.execute("first", {"size": 4}, root)
    shutil.rmtree(root / "data" / "results")
    assert book.execute("first", {"size": 4}, root), "without its results a chapter is not up to date"
    assert result(root) == "4"


def test_a_file_named_by_a_parameter_is_part_of_the_inputs(root):
    (root / "items.jsonl").write_text("a")
    before = book.fingerprint("first", {"items": "items.jsonl"}, root)
    (root / "items.jsonl").write_text("b")
    assert book.fingerprint("first", {"items": "items.jsonl"}, root) != before


@pytest.mark.parametrize("file", ["data/words/world.yml", "data/words/book.mplstyle", "data/artifact/names.yml"])
def test_words_prompts_and_looks_are_inputs_of_every_chapter(root, file):
    (root / file).parent.mkdir(parents=True)
    (root / file).write_text("a")
    before = book.fingerprint("first", {}, root)
    (root / file).write_text("b")
    assert book.fingerprint("first", {}, root) != before


def test_a_folder_of_results_is_no_input_of_the_chapter_that_writes_it(root, tmp_path):
    given = {"results": str(tmp_path / "rows")}
    before = book.fingerprint("first", given, root)
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "main.parquet").write_bytes(b"rows")
    assert book.fingerprint("first", given, root) == before
    assert book.fingerprint("first", {"results": str(tmp_path / "others")}, root) != before


def test_a_failing_chapter_leaves_what_was_computed_and_the_old_copy(root):
    book.execute("first", {}, root)
    with pytest.raises(PapermillExecutionError, match="too large"):
        book.execute("first", {"size": 7}, root)
    executed = root / "book" / "executed"
    partial = nbformat.read(executed / "first.partial.ipynb", as_version=4)
    assert any("size = 7" in cell.source for cell in partial.cells)
    assert "size = 7" not in (executed / "first.ipynb").read_text()
    assert book.execute("first", {}, root), "the failed run overwrote the results, so the old copy is stale"


def test_the_kernel_is_this_interpreter(root, monkeypatch):
    monkeypatch.setenv("JUPYTER_PATH", str(root))
    other = root / "kernels" / "python3"
    other.mkdir(parents=True)
    (other / "kernel.json").write_text('{"argv": ["/bin/false"], "display_name": "x", "language": "python"}')
    book.execute("first", {}, root)
    printed = nbformat.read(root / "book" / "executed" / "first.ipynb", as_version=4).cells[1].outputs[0].text
    assert printed.strip() == sys.executable


def test_parameters_go_to_the_chapters_that_have_them(root):
    shutil.copy(root / "notebooks" / "first.ipynb", root / "notebooks" / "second.ipynb")
    both = ["first", "second"]
    assert book.parse_parameters([], both, root) == {"first": {}, "second": {}}
    assert book.parse_parameters(["size=3"], both, root) == {"first": {"size": 3}, "second": {"size": 3}}
    chosen = book.parse_parameters(["second.size=[1, 2]", "size=3"], both, root)
    assert chosen == {"first": {"size": 3}, "second": {"size": [1, 2]}}
    for wrong, message in (
        ("sise=3", "unknown parameter of any chapter 'sise', did you mean 'size'?; there are: size"),
        ("second.colour=3", "unknown parameter of second 'colour'; there are: size"),
        ("secnd.size=3", "unknown chapter 'secnd', did you mean 'second'?; there are: first, second"),
        ("size=[1", "'[1' is no YAML value"),
    ):
        with pytest.raises(InputError, match=re.escape(message)):
            book.parse_parameters([wrong], both, root)
    with pytest.raises(InputError, match="name=value"):
        book.parse_parameters(["size"], ["first"], root)


def test_settings_that_are_no_parameters_go_into_the_options():
    texts = ["workers=2", "own_policy.batch_rows=3"]
    assert book.parse_parameters(texts, ["own_policy"]) == {"own_policy": {"options": {"workers": 2, "batch_rows": 3}}}
    with pytest.raises(InputError, match="options: give each setting by its own name"):
        book.parse_parameters(["options={workers: 2}"], ["own_policy"])


def test_a_listed_chapter_without_notebook_is_one_line(root):
    with pytest.raises(InputError, match="second.ipynb does not exist"):
        book.execute("second", {}, root)


def test_a_chapter_that_fails_says_so_in_its_place(root, capsys):
    def executed(size: int):
        [(_, _, ran, error)] = in_turn([("first", partial(book.execute, "first", {"size": size}, root))])
        return ran, error

    ran, error = executed(7)
    assert (ran, error) == (True, "AssertionError: too large")
    book.failed_page("first", error, root)
    [cell] = nbformat.read(root / "book" / "executed" / "first.ipynb", as_version=4).cells
    assert cell.source.startswith("# first\n")
    assert "AssertionError: too large" in cell.source
    assert executed(4) == (True, "")
    assert executed(4) == (False, "")


def test_a_chapter_ends_with_the_build(root):
    """Whoever ends the build ends the chapter's process and its kernel, says so, and leaves no page half written."""
    source = root / "notebooks" / "first.ipynb"
    notebook = nbformat.read(source, as_version=4)
    notebook.cells[1].source = "import os, time; open('pid', 'w').write(str(os.getpid())); time.sleep(600)"
    nbformat.write(notebook, source)
    code = f"""from pathlib import Path
from kvrepro.tools import book, processes
with processes.interruptible():
    list(processes.in_turn([('first', lambda: book.execute('first', {{}}, Path({str(root)!r})))]))"""
    build = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    assert waited((root / "pid").exists, 60)
    time.sleep(0.2)
    kernel = int((root / "pid").read_text())
    build.send_signal(signal.SIGTERM)
    _, output = build.communicate(timeout=10)
    assert output.strip() == "interrupted: what is computed is stored, the next call goes on from there"
    assert build.returncode == 128 + signal.SIGTERM
    assert not runs(kernel)
    assert not (root / "book" / "executed" / "first.ipynb").exists()


def test_a_build_that_fails_says_what_is_missing(tmp_path):
    (tmp_path / "_config.yml").write_text("title: x\nsphinx:\n  extra_extensions: [no_such_extension]\n")
    (tmp_path / "_toc.yml").write_text("format: jb-book\nroot: index\n")
    (tmp_path / "index.md").write_text("# x\n")
    with pytest.raises(book.Failed, match="Could not import extension no_such_extension") as failed:
        book.build(tmp_path)
    assert "Traceback" not in str(failed.value)


def test_pages_are_built_again_only_where_something_changed(root, monkeypatch):
    built = []

    def build(folder):
        (folder / "_build" / "html").mkdir(parents=True, exist_ok=True)
        (folder / "_build" / "html" / "index.html").write_text("")
        built.append(folder)
        if (folder / "book" / "broken.md").exists():
            raise book.Failed("a warning")

    monkeypatch.setattr(book, "build", build)
    monkeypatch.delenv(book.web.SITE_URL, raising=False)
    (root / "book").mkdir()
    assert [book.built(root), book.built(root), book.built(root, force=True)] == [True, False, True]
    (root / "book" / "page.md").write_text("# New")
    assert [book.built(root), book.built(root)] == [True, False]
    monkeypatch.setenv(book.web.SITE_URL, "https://example.org")
    assert book.built(root)
    (root / "book" / "broken.md").write_text("")
    for _ in range(2):  # a build that failed is tried again
        with pytest.raises(book.Failed):
            book.built(root)
    assert len(built) == 6
    (root / "book" / "broken.md").unlink()
    assert book.built(root)
    shutil.rmtree(root / "_build" / "html")
    assert book.built(root)


def test_a_rehearsal_runs_nothing_after_the_studies(root, capsys, monkeypatch):
    source = root / "notebooks" / "first.ipynb"
    notebook = nbformat.read(source, as_version=4)
    notebook.cells[1].source = "from kvrepro.experiment.run import Settings\nSettings().end_studies()\nprint(size)"
    notebook.cells.append(nbformat.v4.new_code_cell("1 / 0"))
    nbformat.write(notebook, source)
    monkeypatch.setenv("KVREPRO_DRY_RUN", "")  # and unset again afterwards
    book.rehearse(["first"], {"first": {"size": 9}}, root)
    assert capsys.readouterr().out.startswith("dry run: nothing was computed")
    notebook.cells[1].source = "1 / 0\nprint('.end_studies()')"
    nbformat.write(notebook, source)
    book.rehearse(["first"], {"first": {}}, root)
    assert capsys.readouterr().out == "first: what follows needs their rows (ZeroDivisionError: division by zero)\n"
    notebook.cells[1].source = "1 / 0"
    nbformat.write(notebook, source)
    book.rehearse(["first"], {"first": {}}, root)
    assert capsys.readouterr().out == "first: has no studies to run\n"


def test_the_next_notebook_in_a_process_may_get_its_workers_ready_again(root):
    workers.studies_ended.set()  # by the studies of the one before
    assert next(book.cells("first", {}, root=root))
    assert not workers.studies_ended.is_set()


@pytest.mark.parametrize("flag", [True, False], ids=["flag", "option"])
def test_the_book_rehearses_when_it_is_asked_to(monkeypatch, flag):
    rehearsed = []
    monkeypatch.setattr(book, "chapters", lambda: ["protection", "reanalysis"])
    monkeypatch.setattr(book, "rehearse", lambda names, parameters: rehearsed.extend(names))
    book.main(parameter=[] if flag else ["dry_run=true"], force=False, workers=None, dry_run=flag)
    assert rehearsed == ["protection", "reanalysis"]


@pytest.fixture
def steps(monkeypatch):
    """What the book's command executes, where nothing is computed."""
    done = []
    monkeypatch.setattr(book, "chapters", lambda: ["protection", "leakage", "reclamation"])

    def in_turn(works, most, shared):
        for name, _ in works:
            done.append(name)
            yield name, 0.0, True, ""

    monkeypatch.setattr(book, "in_turn", in_turn)
    monkeypatch.setattr(book.pages, "write", lambda names: None)
    monkeypatch.setattr(book, "built", lambda force: True)
    return done


@pytest.mark.parametrize(
    ("given", "beginning"),
    [
        ("leakage.policies=[snapkv, nosuch]", "leakage: unknown policy 'nosuch'"),
        ("leakage.policies=snapkv", "leakage: policies 'snapkv': give a list"),
        ("reclamation.n_items=0", "reclamation: n_items 0: a whole number, at least 1"),
        ("leakage.profile=quik", "leakage: profile 'quik'"),
        ("reclamation.capacity=-1", "reclamation: capacity -1"),
    ],
)
def test_a_value_that_any_chapter_refuses_ends_the_command_before_the_first_is_executed(
    steps, capsys, given, beginning
):
    with pytest.raises(SystemExit, match="2"):
        command.run(book.main, arguments=["-p", given, "-p", "protection.n_items=1"])
    error = capsys.readouterr().err
    assert error.startswith(beginning)
    assert error.count("\n") == 1
    assert steps == []


def test_what_is_written_to_a_file_says_when_each_chapter_begins_and_ends(steps, capsys):
    policies = ["reclamation.policies=[sinks_recency, full]", "policies=[snapkv, tova]"]
    book.main(parameter=policies, force=False, workers=None, dry_run=False)
    assert steps == ["protection", "leakage", "reclamation"]
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    begun = [line[0] for line in lines if line[1:] == ["begins"]]
    assert begun == [*steps, "build"]
    assert [line[0] for line in lines if line[2:3] == ["s"]] == begun


@pytest.mark.parametrize(("given", "most"), [
    ({}, 3), ({"model": "small-mqa"}, 3), ({"device": "cuda"}, 1), ({"device": "auto"}, 1), ({"model": "org/large"}, 1),
])  # fmt: skip
def test_one_large_model_is_held_at_a_time(given, most):
    assert book._together({"protection": {}, "leakage": given}) == most


def test_what_a_chapters_own_code_raises_is_left_to_the_chapter(root, monkeypatch):
    notebook = nbformat.read(root / "notebooks" / "first.ipynb", as_version=4)
    notebook.cells[1].source = "1 / 0\nloaded = models.load()"
    nbformat.write(notebook, root / "notebooks" / "first.ipynb")
    book.check("first", {"size": 3}, root)
    notebook.cells[1].source = notebook.cells[1].source.replace("1 / 0", "n_items = size")
    nbformat.write(notebook, root / "notebooks" / "first.ipynb")
    book.check("first", {"size": 3}, root)  # no model is loaded: there is no such name
    with pytest.raises(InputError, match="first: n_items -3"):
        book.check("first", {"size": -3}, root)
    monkeypatch.setattr(book, "ensure", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # a fault of the look itself is none of the chapter's
        book.check("first", {"size": 3}, root)


def test_a_rehearsal_goes_on_after_a_chapter_that_refuses(monkeypatch, capsys):
    rehearsed = []

    def cells(name, parameters, root):
        rehearsed.append(name)
        if name != "leakage":
            raise InputError(f"{name} cannot")
        yield ""

    monkeypatch.setattr(book, "cells", cells)
    monkeypatch.setenv("KVREPRO_DRY_RUN", "")  # and unset again afterwards
    names = ["protection", "leakage", "reclamation"]
    with pytest.raises(typer.Exit) as end:
        book.rehearse(names, dict.fromkeys(names, {}))
    assert (end.value.exit_code, rehearsed) == (2, names)
    assert capsys.readouterr().err == "protection: protection cannot\nreclamation: reclamation cannot\n"
    book.rehearse(["leakage"], {"leakage": {}})


@pytest.mark.parametrize("dry_run", [True, False])
def test_more_workers_than_a_cluster_has_are_refused_once_for_all_chapters(monkeypatch, dry_run):
    monkeypatch.setenv("KVREPRO_WORKERS", "")
    with pytest.raises(InputError, match="^workers 1000000000: a whole number, at least 1, at most 10,000"):
        book.main(parameter=[], force=False, workers=10**9, dry_run=dry_run)


@pytest.mark.filterwarnings("ignore:constrained_layout")  # a figure of no verdicts
def test_pages_name_every_policy_and_every_switch(tmp_path):
    pages.write(["first"], tmp_path)
    text = {file.stem: file.read_text() for file in (tmp_path / "book" / "generated").glob("*.md")}
    per_layer = {name: p for name, p in CATALOGUE.items() if not p.shared}
    for page, entries in (("methods", per_layer), ("harness", SHARED)):
        assert all(f"| `{name}`<br>{entry.title}<br>" in text[page] for name, entry in entries.items())
        assert text[page].count("\n| `") == len(entries) + 1  # the full cache, and the credit estimator
    assert "python -m kvrepro.chapters.protection.credit" in text["harness"]
    assert all(f"| {name} |" in text["requirements"] for name in per_layer)
    assert all(
        f"{{include}} generated/{page}.md" in METHODS for page in ("methods", "requirements", "harness", "tests")
    )
    assert all(f"| {name} |" in text["switches"] for name in SWITCHES)
    assert "has stored verdicts" in text["claims"]
    assert "{include} generated/artifact.md" in (book.ROOT / "book" / "audit.md").read_text()
    assert "HotPotQA" in text["artifact"]


@pytest.mark.parametrize(
    ("plain", "set_"),
    [
        ("s_j = -||k_j||_2", "s<sub>j</sub> = −‖k<sub>j</sub>‖<sub>2</sub>"),
        ("(p_j / (1 - p_j + eps))^2 ||a - v_j||^2", "(p<sub>j</sub> / (1 − p<sub>j</sub> + ε))² ‖a − v<sub>j</sub>‖²"),
        ("sum_f |E q_f||k_f| cos(x)", "Σ<sub>f</sub> |E q<sub>f</sub>||k<sub>f</sub>| cos(x)"),
        ("p_j <a, v_j> < 1, t >= j", "p<sub>j</sub> ⟨a, v<sub>j</sub>⟩ &lt; 1, t ≥ j"),
        ("H^(1/tau1), budget * kv_heads", "H<sup>1/τ1</sup>, budget · kv_heads"),
        ("z-scored `dense_layers`\nb_l", "z-scored `dense_layers`<br>b<sub>l</sub>"),
    ],
)
def test_formulas_are_set_in_signs(plain, set_):
    assert pages.typeset(plain) == set_


def test_what_a_cell_defines_has_a_source_as_in_a_kernel(root):
    """Rows of a reader's policy depend on its source: without one a dry run would miss rows that are stored."""
    source = root / "notebooks" / "first.ipynb"
    notebook = nbformat.read(source, as_version=4)
    notebook.cells[1].source = "def score(o):\n    return o.positions\n"
    nbformat.write(notebook, source)
    space: dict[str, object] = {}
    list(book.cells("first", {}, root=root, space=space))
    assert inspect.getsource(space["score"]) == notebook.cells[1].source


def test_what_a_notebook_displays_goes_to_the_caller_alone(root, capsys):
    source = root / "notebooks" / "first.ipynb"
    notebook = nbformat.read(source, as_version=4)
    notebook.cells[1].source = (
        "from IPython.display import Markdown, display\n"
        "from kvrepro.experiment import figure\n"
        "display(Markdown('one'))\n"
        "figure.show(figure.nothing(), 'two', 'A caption.', 'What one sees of it.')\n"
        "print('three')\n"
        "size\n"
    )
    nbformat.write(notebook, source)
    shown = []
    list(book.cells("first", {}, lambda *things, **_: shown.extend(things), root=root))
    assert (len(shown), shown[0].data, shown[-1]) == (4, "one", 2)
    list(book.cells("first", {}, root=root))
    assert capsys.readouterr().out == "three\n" * 2
