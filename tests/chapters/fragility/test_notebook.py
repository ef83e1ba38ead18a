"""The chapter's notebook on foreign input: a checkpoint folder, a JSONL file, one share, one policy, and one's own."""

import checkpoint
import notebook
import pandas as pd
import pytest

from kvrepro.experiment import claims, store


@pytest.mark.parametrize("with_own", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_chapter_runs_on_a_checkpoint_folder_and_a_jsonl_file(tmp_path, with_own):
    policy = notebook.own_policy(tmp_path)
    given = checkpoint.inputs(tmp_path, checkpoint.questions(2, 1300)) | {"shares": [0.4]}
    given |= {"policies": [policy, "critical_ada_kv", "defensive_kv"] if with_own else ["snapkv"]}
    given |= {"options": {"answer_tokens": 4, "max_new_tokens": 4, "progress": False, "window": 16, "single": 8}}
    outputs = [data for _, shown in notebook.run("fragility", given) for data in shown]
    assert sum("image/svg+xml" in data for data in outputs) == 15
    table = pd.read_csv(tmp_path / "results" / "fragility" / "claims.csv")
    assert table.columns.tolist() == claims.COLUMNS
    assert ("C2 Mine" in set(table.claim)) == with_own
    assert set(table[table.claim.str.startswith("C2")].verdict) == {"not testable here"}  # two items say nothing
    stored = store.read(tmp_path / "results" / "fragility" / "every")
    assert stored.error.isna().all()
    assert (policy in set(stored.policy)) == with_own
    assert ("Mine" in " ".join(data.get("text/html", "") + data.get("text/plain", "") for data in outputs)) == with_own
