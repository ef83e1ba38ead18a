"""The notebook by papermill, on a small random Qwen2 in the hub's format and passages of our own."""

import checkpoint
import notebook
import pandas as pd
import pytest

from kvrepro.experiment import claims, store


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """The executed notebook, and the folder of its results."""
    folder = tmp_path_factory.mktemp("protection")
    given = checkpoint.inputs(folder, checkpoint.questions(2, 3200))
    given |= {"capacities": [48, 64], "options": {"max_new_tokens": 4, "lengths": [400, 800], "workers": 1}}
    done = notebook.executed("protection", folder, given)
    return done, folder / "results" / "protection"


def test_no_result_fails_and_every_section_has_its_figure(done):
    page, results = done
    stored = store.read(results / "main")
    assert stored.error.isna().all()
    drawn = notebook.drawn(page)
    assert drawn == notebook.described(page)
    assert sum(drawn) == 8


def test_findings_of_another_model_give_way_to_a_table_and_claim_nothing(done):
    page, results = done
    assert notebook.box(page).startswith("**On this model**")
    table = pd.read_csv(results / "claims.csv")
    assert table.columns.tolist() == claims.COLUMNS
    assert set(table[table.claim == "P4"].verdict) == {"not testable here"}  # a random model answers nothing
