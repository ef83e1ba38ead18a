"""Chapters: their shape, prose without pasted numbers, and one run on foreign input from top to bottom."""

import json
import re
from pathlib import Path

import checkpoint
import nbformat
import pandas as pd
import papermill
import pytest
import synthetic

from kvrepro.chapters.protection import figures, members
from kvrepro.experiment import claims

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = [path for path in sorted((ROOT / "notebooks").glob("*.ipynb")) if path.stem != "own_policy"]
PARAMETERS = set("model items n_items max_new_tokens device dtype seed profile results".split())


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def notebook(request):
    return nbformat.read(request.param, as_version=4)


def code(notebook) -> list:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def prose(notebook) -> str:
    """The text without what is computed or quoted: glue, citations, links, code."""
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    return re.sub(r"\{[\w:]+\}`[^`]*`|`[^`]*`", "", text)


def test_committed_without_outputs(notebook):
    assert all(not cell.outputs and cell.execution_count is None for cell in code(notebook))


def test_short_and_without_logic_of_its_own(notebook):
    assert 8 <= len(code(notebook)) <= 15
    for cell in code(notebook):
        assert not re.search(r"^\s*(def|class|for|while|if|with) |lambda|%", cell.source, re.M), cell.source


def test_parameters_are_one_tagged_cell(notebook):
    tagged = [cell for cell in code(notebook) if "parameters" in cell.metadata.get("tags", [])]
    assert len(tagged) == 1
    names = set(re.findall(r"^(\w+) = ", tagged[0].source, re.M))
    assert names >= PARAMETERS
    assert code(notebook).index(tagged[0]) == 1  # right after the imports


def test_no_result_is_typed_into_the_prose(notebook):
    text = prose(notebook)
    assert not re.findall(r"\d\.\d", text)
    # what remains are settings and names: 10% at each end, 90% and 95% intervals, capacities, lengths, a table, bits
    numbers = set(re.findall(r"(?<![\w-])\d+(?!\w|-gram)", text))
    assert numbers <= {"0", "1", "2", "3", "7", "8", "9", "10", "16", "90", "95", "256", "769", "1000"}


def test_every_glued_number_is_computed():
    chapter = nbformat.read(ROOT / "notebooks" / "protection.ipynb", as_version=4)
    wanted = set(re.findall(r"\{glue:\w+\}`([^`:]+)", "\n".join(cell.source for cell in chapter.cells)))
    results = synthetic.results(n_items=80, readings=("as_run",))
    found = members.numbers(members.evaluate(results), results)
    assert wanted <= set(found)
    assert {found[f"P1-{reading}-verdict"] for reading in claims.READINGS} == {"reproduced", "not run"}


def test_every_figure_has_a_caption_and_a_text_alternative():
    chapter = nbformat.read(ROOT / "notebooks" / "protection.ipynb", as_version=4)
    drawing = [i for i, cell in enumerate(chapter.cells) if cell.cell_type == "code" and "figures." in cell.source]
    shown = [i for i in drawing if not re.fullmatch(r"from .*", chapter.cells[i].source, re.S)]
    assert len(shown) >= 9
    for i in shown:
        if "figures.domains" in chapter.cells[i].source and "figures.lift" not in chapter.cells[i].source:
            continue
        assert len(chapter.cells[i].metadata["mystnb"]["image"]["alt"]) > 40
        assert "*Figure.* " in chapter.cells[i - 1].source


def test_every_figure_of_the_module_is_used():
    chapter = "\n".join(cell.source for cell in nbformat.read(ROOT / "notebooks" / "protection.ipynb", 4).cells)
    public = [name for name, made in vars(figures).items() if getattr(made, "__module__", "") == figures.__name__]
    assert [name for name in public if not name.startswith("_") and f"figures.{name}(" not in chapter] == []


def test_the_chapter_runs_on_a_checkpoint_folder_and_a_jsonl_file(tmp_path):
    """A small random Qwen2 in the hub's format on passages of our own: no errors, verdicts that claim nothing."""
    rows = [
        {"context": f"Ship {i} brought {i * 7} crates of tea to the harbour. " * 300, "domain": "harbour",
         "question": f"What did ship {i} bring?", "answer": f"{i * 7} crates"}
        for i in range(3)
    ]  # fmt: skip
    items = tmp_path / "own.jsonl"
    items.write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder = checkpoint.save(tmp_path / "small-qwen2", [row["context"] for row in rows])
    given = {"model": str(folder), "items": str(items), "results": str(tmp_path / "results"), "max_new_tokens": 4}
    given |= {"capacities": [48, 64], "lengths": [400, 800], "n_items": 3}
    executed = papermill.execute_notebook(
        ROOT / "notebooks" / "protection.ipynb",
        tmp_path / "out.ipynb",
        given,
        kernel_name="python3",
        progress_bar=False,
    )
    images = [o for cell in code(executed) for o in cell.outputs if "image/png" in o.get("data", {})]
    assert len(images) == 11
    table = pd.read_csv(tmp_path / "results" / "protection" / "claims.csv")
    assert table.columns.tolist() == claims.COLUMNS
    assert set(table[table.claim == "P4"].verdict) == {"not testable here"}  # a random model answers nothing
    stored = pd.read_parquet(tmp_path / "results" / "protection" / "main.parquet")
    assert stored.error.isna().all()
    assert stored.groupby("item").prompt_tokens.first().between(1900, 2044).all()
