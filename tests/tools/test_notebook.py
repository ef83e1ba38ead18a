"""Notebooks: their shape, prose without pasted numbers, and one run on foreign input from top to bottom."""

import ast
import re
from pathlib import Path

import checkpoint
import nbformat
import pandas as pd
import papermill
import pytest

from kvrepro.experiment import claims

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SETTINGS = {  # numbers that a chapter's prose may name: its source's example and its own settings
    "reclamation": {"20", "24", "64", "128", "512", "000"},
    "fragility": {"32"},
    "reanalysis": {"5", "20", "162", "481"},
}
NO_MODEL = {"reanalysis": {"measure", "margin", "tables"}}  # chapters that read stored rows: their parameters
CHAPTERS = [path for path in NOTEBOOKS if path.stem != "own_policy"]


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def notebook(request):
    return nbformat.read(request.param, as_version=4)


@pytest.fixture(params=CHAPTERS, ids=lambda path: path.stem)
def chapter(request):
    return nbformat.read(request.param, as_version=4)


def code(notebook) -> list:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def tags(cell) -> list:
    return cell.metadata.get("tags", [])


def sentences(notebook) -> str:
    """All prose, that of cells which compute it included, without what is computed or quoted."""
    texts = [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]
    for cell in code(notebook):
        if "hide-input" in tags(cell) and "parameters" not in tags(cell):
            strings = [node for node in ast.walk(ast.parse(cell.source)) if isinstance(node, ast.JoinedStr)]
            texts += [
                part.value
                for string in strings
                for part in ast.iter_child_nodes(string)
                if isinstance(part, ast.Constant)
            ]
    return re.sub(r"\{[\w:]+\}`[^`]*`|`[^`]*`", "", "\n".join(texts))


def test_committed_without_outputs(notebook):
    assert all(not cell.outputs and cell.execution_count is None for cell in code(notebook))


def test_at_most_ten_parameters_in_one_tagged_cell_and_the_rest_are_options(notebook, request):
    [tagged] = [cell for cell in code(notebook) if "parameters" in tags(cell)]
    names = set(re.findall(r"^(\w+) = ", tagged.source, re.M))
    every = {"model", "items", "n_items", "profile", "results", "device", "options"}
    assert names >= NO_MODEL.get(request.node.callspec.id, every)
    assert len(names) <= 10
    assert code(notebook).index(tagged) == 1  # right after the imports


def test_a_dry_run_ends_each_notebook_once_its_studies_are_estimated(notebook):
    ends = [i for i, cell in enumerate(notebook.cells) if ".end_dry_run()" in cell.source]
    assert len(ends) == any("models.load(" in cell.source for cell in notebook.cells)


def test_a_dry_run_is_no_failure_to_papermill(tmp_path):
    sources = ["from kvrepro.experiment.run import Settings", "Settings(dry_run=True).end_dry_run()", "1 / 0"]
    metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=metadata), tmp_path / "in.ipynb")
    done = papermill.execute_notebook(tmp_path / "in.ipynb", tmp_path / "out.ipynb", progress_bar=False)
    assert [cell.execution_count for cell in done.cells] == [1, 2, None]


def test_findings_come_first_and_are_computed(chapter):
    cells = code(chapter)
    [found] = [i for i, cell in enumerate(cells) if "claims.findings(" in cell.source]
    assert found <= 5
    assert all({"hide-input", "hide-cell"} & set(tags(cell)) for cell in cells[: found + 1])
    call = re.search(r"claims\.findings\((.*)\)", cells[found].source, re.S)[1]
    assert len(ast.parse(f"f({call})").body[0].value.args) == 3


def test_each_step_shows_data_and_one_figure(chapter):
    shown = [cell for cell in code(chapter) if not {"hide-input", "hide-cell"} & set(tags(cell))]
    figures = [i for i, cell in enumerate(shown) if "mystnb" in cell.metadata]
    assert len(figures) >= 6
    for i in figures:
        assert len(shown[i].metadata["mystnb"]["image"]["alt"]) > 40
    tables = sum(".head(10)" in cell.source or ".sample(10" in cell.source for cell in shown)
    assert tables >= max(6, len(figures) / 2)
    alts = [cell.metadata["mystnb"]["image"]["alt"] for cell in shown if "mystnb" in cell.metadata]
    assert len(set(alts)) == len(alts)


def test_cells_are_short_enough_to_change(notebook):
    for cell in code(notebook):
        if "hide-input" not in tags(cell):
            assert len(cell.source.splitlines()) <= 30, cell.source
        for node in ast.walk(ast.parse(cell.source)):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < 25


def test_every_cell_has_data_before_it_and_a_caption(chapter):
    captions = "\n".join(cell.source for cell in chapter.cells if cell.cell_type == "markdown").count("*Figure.* ")
    assert captions >= sum("mystnb" in cell.metadata for cell in code(chapter))


def test_no_result_is_typed_into_the_prose(chapter, request):
    text = sentences(chapter)
    assert not re.findall(r"\d\.\d", text)
    assert "glue:" not in "".join(cell.source for cell in chapter.cells)
    # what remains are settings and names: 10% at each end, 90% and 95% intervals, capacities, lengths, a table, bits
    numbers = set(re.findall(r"(?<![\w-])\d+(?!\w|-gram)", text))
    known = {"0", "1", "2", "3", "4", "7", "8", "9", "10", "16", "90", "95", "256", "769", "1000"}
    assert numbers <= known | SETTINGS.get(request.node.callspec.id, set())


def test_the_book_says_code_and_text_of_the_authors(chapter):
    assert not re.search(r"\bas (run|described)\b", sentences(chapter), re.I)


def test_the_chapter_runs_on_a_checkpoint_folder_and_a_jsonl_file(tmp_path):
    """A small random Qwen2 in the hub's format on passages of our own: no errors, verdicts that claim nothing."""
    given = checkpoint.inputs(tmp_path, checkpoint.questions(3, 12_000))
    given |= {"capacities": [48, 64], "options": {"max_new_tokens": 4, "lengths": [400, 800]}}
    executed = papermill.execute_notebook(
        ROOT / "notebooks" / "protection.ipynb",
        tmp_path / "out.ipynb",
        given,
        kernel_name="python3",
        progress_bar=False,
    )
    images = [o for cell in code(executed) for o in cell.outputs if "image/png" in o.get("data", {})]
    assert len(images) == 15
    table = pd.read_csv(tmp_path / "results" / "protection" / "claims.csv")
    assert table.columns.tolist() == claims.COLUMNS
    assert set(table[table.claim == "P4"].verdict) == {"not testable here"}  # a random model answers nothing
    stored = pd.read_parquet(tmp_path / "results" / "protection" / "main.parquet")
    assert stored.error.isna().all()
    assert stored.groupby("item").prompt_tokens.first().between(1900, 2044).all()
