"""Notebooks: their shape, prose without pasted numbers, and one run on foreign input from top to bottom."""

import ast
import json
import re
from pathlib import Path

import checkpoint
import nbformat
import notebook as run_here
import pandas as pd
import papermill
import pytest

from kvrepro.experiment import claims, figure, stats
from kvrepro.tools import edition

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SETTINGS = {  # numbers that a chapter's prose may name: its source's example and its own settings
    "reclamation": {"20", "24", "64", "128", "512", "000"},
    "fragility": {"32", "40"},
    "dropkv_bound": {"100"},
    "reanalysis": {"5", "20", "162", "481"},
}
NO_MODEL = {"reanalysis": {"measure", "margin", "tables"}}  # chapters that read stored rows: their parameters
PROTECTION = nbformat.read(ROOT / "notebooks" / "protection.ipynb", as_version=4)
CHAPTERS = [path for path in NOTEBOOKS if path.stem != "own_policy"]


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def notebook(request):
    return nbformat.read(request.param, as_version=4)


@pytest.fixture(params=CHAPTERS, ids=lambda path: path.stem)
def chapter(request):
    return nbformat.read(request.param, as_version=4)


def calls(notebook, name: str) -> list[ast.Call]:
    """Calls of `figure.<name>` in a notebook's cells."""
    trees = [ast.parse(cell.source) for cell in code(notebook)]
    every = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [node for node in every if ast.unparse(node.func) == f"figure.{name}"]


def code(notebook) -> list:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def tags(cell) -> list:
    return cell.metadata.get("tags", [])


def sentences(notebook) -> str:
    """All prose, that of cells which compute it and of figures included, without what is computed or quoted."""
    texts = [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]
    for cell in code(notebook):
        if not {"parameters", "exercise"} & set(tags(cell)):
            nodes = list(ast.walk(ast.parse(cell.source)))
            texts += [
                part.value
                for string in nodes
                if isinstance(string, ast.JoinedStr)
                for part in ast.iter_child_nodes(string)
                if isinstance(part, ast.Constant)
            ]
    for call in calls(notebook, "show"):
        constants = [node.value for node in ast.walk(call) if isinstance(node, ast.Constant)]
        texts += [text for text in constants if isinstance(text, str)]
    return re.sub(r"`[^`]*`|\]\(https:[^)]*\)", "", "\n".join(texts))


def test_committed_without_outputs(notebook):
    assert all(not cell.outputs and cell.execution_count is None for cell in code(notebook))


def test_text_needs_no_extension_of_jupyter(notebook):
    prose = [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]
    assert not re.findall(r"\{[\w:]+\}`|^:::|^```\{", "\n".join(prose), re.M)
    pages = re.findall(r"\]\((?!https:|#)([^)]+)\)", "\n".join(prose))
    assert all((ROOT / "notebooks" / page).is_file() for page in pages), pages


def test_at_most_ten_parameters_in_one_tagged_cell_and_the_rest_are_options(notebook, request):
    [tagged] = [cell for cell in code(notebook) if "parameters" in tags(cell)]
    names = set(re.findall(r"^(\w+) = ", tagged.source, re.M))
    every = {"model", "items", "n_items", "profile", "results", "device", "options"}
    assert names >= NO_MODEL.get(request.node.callspec.id, every)
    assert len(names) <= 10
    assert code(notebook).index(tagged) == 1  # right after the imports


def test_a_dry_run_ends_each_notebook_once_its_studies_are_estimated(notebook):
    ends = [i for i, cell in enumerate(notebook.cells) if ".end_studies()" in cell.source]
    assert len(ends) == any("models.load(" in cell.source for cell in notebook.cells)


def test_a_dry_run_is_no_failure_to_papermill(tmp_path):
    sources = ["from kvrepro.experiment.run import Settings", "Settings(dry_run=True).end_studies()", "1 / 0"]
    metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=metadata), tmp_path / "in.ipynb")
    done = papermill.execute_notebook(tmp_path / "in.ipynb", tmp_path / "out.ipynb", progress_bar=False)
    assert [cell.execution_count for cell in done.cells] == [1, 2, None]


def test_findings_come_first_and_are_computed(notebook):
    cells = code(notebook)
    [place] = [i for i, cell in enumerate(cells) if "wording.findings(" in cell.source]
    assert place <= 5
    call = re.search(r"wording\.findings\((.*)\)", cells[place].source, re.S)[1]
    assert 3 <= len(ast.parse(f"f({call})").body[0].value.args) <= 5


def test_each_figure_has_a_name_of_its_own_a_caption_an_alternative_text_and_data(notebook):
    names, texts = [], []
    for call in calls(notebook, "show"):
        given = call.args + [keyword.value for keyword in call.keywords]
        assert len(given) == 5, ast.unparse(call)
        names.append(ast.literal_eval(given[1]))
        texts.append(ast.unparse(given[3]))
    assert names
    assert len(set(names)) == len(names)
    assert len(set(texts)) == len(texts)


def test_a_chapter_ends_with_three_exercises_solved_and_with_its_provenance(notebook):
    cells = notebook.cells
    solved = [i for i, cell in enumerate(cells) if "exercise" in tags(cell)]
    assert len(solved) == 3
    for i in solved:
        assert cells[i].cell_type == "code"
        assert "hide-cell" in tags(cells[i])
        assert cells[i - 1].cell_type == "markdown"
    heading = next(i for i, cell in enumerate(cells) if cell.source.startswith("## Exercises"))
    assert heading < solved[0]
    assert re.match(r"provenance\(\"\w+\"", cells[-1].source)
    assert cells[-2].source.startswith(edition.LAST)


def test_cells_are_short_enough_to_change(notebook):
    for cell in code(notebook):
        if "hide-input" not in tags(cell):
            assert len(cell.source.splitlines()) <= 30, cell.source
        for node in ast.walk(ast.parse(cell.source)):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < 25


def test_no_result_is_typed_into_the_prose(chapter, request):
    text = sentences(chapter)
    assert not re.findall(r"\d\.\d", text)
    assert "glue:" not in "".join(cell.source for cell in chapter.cells)
    # what remains are settings and names: 10% at each end, 90% and 95% intervals, capacities, lengths, a table, bits
    numbers = set(re.findall(r"(?<![\w-])\d+(?!\w|-gram)", text))
    allowed = {"0", "1", "2", "3", "4", "7", "8", "9", "10", "16", "90", "95", "256", "769", "1000"}
    assert numbers <= allowed | SETTINGS.get(request.node.callspec.id, set())


def test_the_book_says_code_and_text_of_the_authors(chapter):
    assert not re.search(r"\bas (run|described)\b", sentences(chapter), re.I)


def test_the_chapter_runs_on_a_checkpoint_folder_and_a_jsonl_file(tmp_path):
    """A small random Qwen2 in the hub's format on passages of our own: no errors, verdicts that claim nothing."""
    given = checkpoint.inputs(tmp_path, checkpoint.questions(3, 12_000))
    given |= {"capacities": [48, 64], "options": {"max_new_tokens": 4, "lengths": [400, 800]}}
    outputs = [data for _, shown in run_here.run("protection", given) for data in shown]
    assert sum("image/svg+xml" in data for data in outputs) >= 14
    table = pd.read_csv(tmp_path / "results" / "protection" / "claims.csv")
    assert table.columns.tolist() == claims.COLUMNS
    assert set(table[table.claim == "P4"].verdict) == {"not testable here"}  # a random model answers nothing
    stored = pd.read_parquet(tmp_path / "results" / "protection" / "main.parquet")
    assert stored.error.isna().all()
    assert stored.groupby("item").prompt_tokens.first().between(1900, 2044).all()


def test_the_largest_gain_leaves_out_a_policy_without_any_value():
    """One's own policy may have answered nothing: the exercise then shows the others."""
    [exercise] = [cell.source for cell in code(PROTECTION) if "largest = gains.loc[" in cell.source]
    columns = ["item", "policy", "protected", "token_f1"]
    few = [(item, "lru", side, 0.2 + side / 2) for item in ("a", "b") for side in (False, True)]
    few += [(item, "mine", side, float("nan")) for item in ("a", "b") for side in (False, True)]
    main = pd.DataFrame(few, columns=columns).assign(reading="as_run", task="one", capacity=128)
    space = {"main": main, "middle": 128, "stats": stats, "figure": figure}
    exec(exercise, space)
    assert space["largest"].policy.tolist() == ["lru"]


@pytest.mark.parametrize("rivals", [["snapkv"], ["random"]])
def test_a_policy_is_not_said_to_equal_chance_where_no_random_choice_was_run(tmp_path, rivals):
    items = tmp_path / "two.jsonl"  # fewer than the page takes where nobody says how many
    row = {"context": "Ship 3 brought tea. " * 60, "question": "What did ship 3 bring?", "answer": "tea"}
    items.write_text(f"{json.dumps(row)}\n" * 2)
    given = {"rivals": rivals, "items": str(items), "results": str(tmp_path)}
    shown = [data for _, shown in run_here.run("own_policy", given) for data in shown]
    [box] = [text for data in shown if "What we found" in (text := data.get("text/markdown", ""))]
    assert ("chance is not known" in box) == ("random" not in rivals)
    assert ("a random choice (" in box) == ("random" in rivals)
    assert "- \n" not in box
