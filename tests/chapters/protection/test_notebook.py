"""The notebook by papermill, on a small random Qwen2 in the hub's format and passages of our own."""

import checkpoint
import pandas as pd
import papermill
import pytest

from kvrepro.experiment import claims, store
from kvrepro.paths import ROOT


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """The executed notebook, and the folder of its results."""
    folder = tmp_path_factory.mktemp("protection")
    given = checkpoint.inputs(folder, checkpoint.questions(2, 3200))
    given |= {"capacities": [48, 64], "options": {"max_new_tokens": 4, "lengths": [400, 800], "workers": 1}}
    notebook = papermill.execute_notebook(
        ROOT / "notebooks" / "protection.ipynb", folder / "out.ipynb", given, cwd=ROOT, progress_bar=False
    )
    return notebook, folder / "results" / "protection"


def test_no_result_fails_and_every_section_has_its_figure(done):
    notebook, results = done
    stored = store.read(results / "main")
    assert stored.error.isna().all()
    drawn = [any("image/svg+xml" in o.get("data", {}) for o in cell.get("outputs", [])) for cell in notebook.cells]
    described = ["mystnb" in cell.metadata for cell in notebook.cells]
    assert drawn == described
    assert sum(drawn) == 8


def test_findings_of_another_model_give_way_to_a_table_and_claim_nothing(done):
    notebook, results = done
    [box] = [cell for cell in notebook.cells if "findings" in cell.metadata.get("tags", [])]
    assert box.outputs[0].data["text/markdown"].startswith("**On this model**")
    table = pd.read_csv(results / "claims.csv")
    assert table.columns.tolist() == claims.COLUMNS
    assert set(table[table.claim == "P4"].verdict) == {"not testable here"}  # a random model answers nothing
