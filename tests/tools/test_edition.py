"""The book's edition of a notebook: what stands where, what is folded, what becomes of a figure."""

import json
import re
from unittest.mock import patch

import matplotlib.pyplot as plt
import nbformat
import numpy as np
import pandas as pd
import pytest

from kvrepro.errors import InputError
from kvrepro.experiment import figure, wording
from kvrepro.tools import edition

ALT = "Two points: 'a' stands higher than \"b\", at 3: the most."


def shown(*names, data=None):
    """The outputs of a cell that shows figures of these names, as Jupyter stores them."""
    drawing, axes = plt.subplots()
    axes.plot([1, 2], [3, 1])
    outputs = []

    def display(shown, raw=False, metadata=None):
        bundle = shown if raw else {"text/markdown": shown.data}
        outputs.append(nbformat.v4.new_output("display_data", data=bundle, metadata=metadata))

    with patch.object(figure, "display", display):
        for name in names:
            figure.show(figure.done(drawing), name, f"What {name} *shows*.", ALT, data)
    return outputs


def code(source, outputs=(), *tags):
    return nbformat.v4.new_code_cell(source, outputs=list(outputs), metadata={"tags": list(tags)} if tags else {})


def markdown(text):
    return nbformat.v4.new_markdown_cell(text)


def printed(text):
    return nbformat.v4.new_output("display_data", data={"text/markdown": text})


def edited(tmp_path, *cells):
    notebook = nbformat.v4.new_notebook(cells=list(cells))
    edition.edit(notebook, "first", tmp_path)
    nbformat.validate(notebook)
    return notebook.cells


def test_in_jupyter_a_figure_stands_above_its_caption():
    picture, caption = shown("by-length")
    assert picture.data["image/svg+xml"].startswith("<svg")
    assert "background: white" in picture.data["image/svg+xml"]
    assert caption.data["text/markdown"] == "**Figure.** What by-length *shows*."


def test_a_figure_becomes_files_and_a_directive_with_label_alt_text_and_data(tmp_path):
    table = pd.DataFrame({"policy": ["a", "b"], "value": [3.0, 1 / 3]})
    [cell] = edited(tmp_path, code("draw()", shown("by-length", data=table)))
    [output] = cell.outputs
    text = output.data["text/markdown"]
    assert text.startswith("::::{figure} figures/first-by-length.svg\n")
    options = dict(re.findall(r"^(\w+): (.*)$", text, re.M))
    assert json.loads(options["name"]) == "fig-first-by-length"
    assert json.loads(options["alt"]) == ALT
    assert "What by-length *shows*. {download}`Data (CSV) <figures/first-by-length.csv>`" in text
    assert "background" not in (tmp_path / "figures" / "first-by-length.svg").read_text()
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "figures" / "first-by-length.csv"), table, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "caption", "alt", "message"),
    [
        ("By length", "c", ALT, "lower-case words"),
        ("a_b", "c", ALT, "lower-case words"),
        ("a", "  ", ALT, "needs a caption"),
        ("a", "c", "a plot", "says what one sees"),
    ],
)
def test_what_a_figure_lacks_is_said(name, caption, alt, message):
    with pytest.raises(InputError, match=message):
        figure.show(plt.figure(), name, caption, alt)


def test_many_points_become_a_picture_between_vector_axes():
    drawing, axes = plt.subplots()
    axes.set_title("many")
    assert "<image" not in figure.vector(drawing)
    axes.scatter(*np.random.default_rng(0).random((2, 10_000)))
    written = figure.vector(figure.done(drawing))
    assert "<image" in written
    assert len(written) < figure.LARGE
    assert "<use" in written, "the axes stay vectors"


def test_findings_come_first_and_what_led_to_them_is_folded_at_the_end(tmp_path):
    box = code("found", [printed(wording.findings("It holds.").data)], "hide-input")
    last = code("provenance()", [printed("- **Code**: here")], "remove-input")
    cells = edited(
        tmp_path, markdown("# Title"), code("import a"), markdown("## Policy"), code("def policy", [], "show-input"),
        code("run()", [printed("planned")], "hide-cell"), box,
        markdown("## Data"), code("table", [printed("rows")]), markdown(edition.LAST), last,
    )  # fmt: skip
    kinds = [(cell.cell_type, cell.source.splitlines()[0]) for cell in cells]
    assert kinds == [
        ("markdown", "# Title"), ("code", "found"), ("markdown", "## Policy"),
        ("code", "def policy"), ("markdown", "## Data"), ("code", "table"),
        ("markdown", edition.LAST), ("code", "import a"), ("code", "provenance()"),
    ]  # fmt: skip
    assert [edition.tags(cell) for cell in cells if cell.cell_type == "code"] == [
        ["remove-input"], ["show-input"], ["hide-input"], ["hide-cell"], ["remove-input"],
    ]  # fmt: skip
    [shown] = cells[1].outputs
    assert shown.data["text/markdown"] == ":::{admonition} What we found\n:class: tip\n\n\n- It holds.\n:::"
    assert cells[7].source == "import a\n\nrun()\n\nfound"
    assert [output.data["text/markdown"] for output in cells[7].outputs] == ["planned"]


def test_code_in_a_row_is_folded_behind_one_button(tmp_path):
    cells = edited(
        tmp_path, code("a", [printed("1")]), code("b", [printed("2")]), markdown("x"), code("c"),
        code("d", [], "hide-cell"), code("e", [], "show-input"),
    )  # fmt: skip
    assert [cell.source for cell in cells] == ["a\n\nb", "x", "c", "d", "e"]
    assert [output.data["text/markdown"] for output in cells[0].outputs] == ["1", "2"]
    assert [edition.tags(cell) for cell in cells if cell.cell_type == "code"][1:] == [
        ["hide-input"], ["hide-cell"], ["show-input"],
    ]  # fmt: skip


def test_a_table_beside_a_figure_is_folded_and_a_reference_gets_its_label(tmp_path):
    table = nbformat.v4.new_output("display_data", data={"text/html": "<table><tr></tr><tr></tr><tr></tr></table>"})
    alone = nbformat.v4.new_output("display_data", data={"text/html": "<table><tr></tr></table>"})
    references = [markdown("See [Figure](#fig-by-length)."), code("said", [printed("In [Figure](#fig-by-length).")])]
    cells = edited(
        tmp_path, code("a", [alone], "show-input"), code("b", [table]), code("c", shown("by-length")), *references
    )
    assert cells[0].outputs[0].data["text/html"] == "<table><tr></tr></table>"
    folded = cells[1].outputs[0].data["text/html"]
    assert folded.startswith('<details class="numbers"><summary>The numbers: 2 rows</summary>')
    assert cells[2].source == "See {numref}`fig-first-by-length`."
    assert cells[3].outputs[0].data["text/markdown"] == "In {numref}`fig-first-by-length`."


def test_a_figure_that_this_run_lacks_is_no_reference(tmp_path):
    draws = 'if len(rows):\n    figure.show(drawing, "by-length", caption)'
    cells = edited(tmp_path, code(draws), markdown("See [the figure](#fig-by-length), and [Figure](#fig-by-lenght)."))
    assert cells[1].source == "See the figure (not drawn in this run), and {numref}`fig-first-by-lenght`."


def test_a_link_to_a_source_is_cited_and_pages_of_the_book_lie_beside_the_chapters_folder(tmp_path):
    [cell] = edited(
        tmp_path,
        markdown(
            "[*SnapKV*](https://arxiv.org/abs/2404.14469) is in [the audit](../book/audit.md), "
            "[next](own_policy.ipynb); [elsewhere](https://example.org). See [the figure](#fig-by-length)."
        ),
    )
    assert cell.source == (
        "*SnapKV* {cite}`snapkv` is in [the audit](../audit.md), [next](own_policy.ipynb); "
        "[elsewhere](https://example.org). See {numref}`fig-first-by-length`."
    )
