"""The notebook by papermill, on a small random Qwen2 in the hub's format and passages of our own."""

import checkpoint
import notebook
import pandas as pd

from kvrepro.experiment import claims, store


def test_the_notebook_runs_on_a_foreign_checkpoint_and_claims_nothing(tmp_path):
    given = checkpoint.inputs(tmp_path, checkpoint.questions(2, 3200))
    given |= {"capacities": [48, 64], "options": {"max_new_tokens": 4, "lengths": [400, 800], "workers": 1}}
    done, results = notebook.executed("protection", tmp_path, given), tmp_path / "results" / "protection"
    assert store.read(results / "main").error.isna().all()
    drawn = notebook.drawn(done)
    assert drawn == notebook.described(done)
    assert sum(drawn) == 8
    assert notebook.box(done).startswith("**On this model**")
    table = pd.read_csv(results / "claims.csv")
    assert table.columns.tolist() == claims.COLUMNS
    assert set(table[table.claim == "P4"].verdict) == {"not testable here"}  # a random model answers nothing
