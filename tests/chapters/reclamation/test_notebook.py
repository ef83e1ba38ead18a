"""The notebook by papermill: a foreign checkpoint, a single policy, also the reader's own."""

import checkpoint
import notebook
import pandas as pd
import pytest

from kvrepro.experiment import claims

OPTIONS = {"prompt_tokens": 220, "capacity": 64, "max_new_tokens": 2, "acceptance": "policies", "budget": 64}
OPTIONS |= {"cadences": [1, 16], "timed_cadences": [1, 4], "lengths": [32, 64], "workers": 1}


@pytest.mark.parametrize("policy", [pytest.param("window", marks=pytest.mark.slow), "own"])
def test_it_runs_on_a_foreign_checkpoint_with_one_policy(tmp_path, policy):
    own = notebook.own_policy(tmp_path, window=8)
    given = checkpoint.inputs(tmp_path, checkpoint.questions(2)) | {"kept": [0.25], "options": OPTIONS}
    given |= {"policies": [own if policy == "own" else policy]}
    done = notebook.executed("reclamation", tmp_path, given)
    drawn = notebook.drawn(done)
    assert drawn == notebook.described(done)
    assert sum(drawn) == 9
    assert notebook.box(done).startswith("**On this model**")
    table = pd.read_csv(tmp_path / "results" / "reclamation" / "claims.csv")
    assert table.columns.tolist() == claims.COLUMNS
    verdicts = table.set_index("claim").verdict
    assert verdicts[["R1", "R2", "R3", "R4"]].tolist() == ["reproduced"] * 4
    assert verdicts["R6b"] == ("not testable here" if policy == "own" else "reproduced")
    if policy == "own":
        assert verdicts["R6b Mine"] == "reproduced"
