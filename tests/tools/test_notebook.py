"""The shape of the notebooks: what a reader, papermill and the book rely on."""

import re
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = {path.stem: nbformat.read(path, as_version=4) for path in sorted((ROOT / "notebooks").glob("*.ipynb"))}
PAGES = ["claims", "decide", "family", "language_model", "methods", "reliability_cost"]
CHAPTERS = [name for name in NOTEBOOKS if name not in PAGES]


def code(name: str) -> list:
    return [cell for cell in NOTEBOOKS[name].cells if cell.cell_type == "code"]


def prose(name: str) -> str:
    return "\n".join(cell.source for cell in NOTEBOOKS[name].cells if cell.cell_type == "markdown")


def tags(cell) -> list[str]:
    return cell.metadata.get("tags", [])


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_committed_without_outputs_and_begins_with_its_title(name):
    assert all(not cell.outputs and cell.execution_count is None for cell in code(name))
    assert NOTEBOOKS[name].cells[0].source.startswith("# ")


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_text_needs_no_extension_of_jupyter_and_its_links_lead_to_files(name):
    assert not re.findall(r"\{[\w:]+\}`|^:::|^```\{", prose(name), re.M)
    links = re.findall(r"\]\((?!https:|#)([^)]+)\)", prose(name))
    assert all((ROOT / "notebooks" / link).is_file() for link in links), links


@pytest.mark.parametrize("name", CHAPTERS)
def test_a_chapter_has_at_most_ten_parameters_in_one_tagged_cell_right_after_the_imports(name):
    [place] = [i for i, cell in enumerate(code(name)) if "parameters" in tags(cell)]
    assert place == 1
    assert len(re.findall(r"^\w+ = ", code(name)[place].source, re.M)) <= 10


def test_the_contents_list_every_notebook():
    assert set(re.findall(r"book/executed/(\w+)", (ROOT / "_toc.yml").read_text())) == set(NOTEBOOKS)
