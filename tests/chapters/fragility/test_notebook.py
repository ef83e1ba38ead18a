"""The chapter's notebook by papermill: a checkpoint folder, a JSONL file, one share, few policies, one of one's own."""

import checkpoint
import notebook
import pandas as pd

from kvrepro.experiment import claims, store


def test_the_chapter_runs_on_a_checkpoint_folder_and_a_jsonl_file(tmp_path):
    own = notebook.own_policy(tmp_path)
    given = checkpoint.inputs(tmp_path, checkpoint.questions(2, 1300)) | {"shares": [0.4]}
    given |= {"policies": [own, "critical_ada_kv", "defensive_kv"]}
    given |= {"options": {"answer_tokens": 4, "max_new_tokens": 4, "workers": 1}}
    done = notebook.executed("fragility", tmp_path, given)
    drawn = notebook.drawn(done)
    assert drawn == notebook.described(done)
    assert sum(drawn) == 9
    assert notebook.box(done).startswith("**On this model**")
    table = pd.read_csv(tmp_path / "results" / "fragility" / "claims.csv")
    assert table.columns.tolist() == claims.COLUMNS
    assert "C2 Mine" in set(table.claim)
    assert set(table[table.claim.str.startswith("C2")].verdict) == {"not testable here"}  # two items say nothing
    stored = store.read(tmp_path / "results" / "fragility" / "every")
    assert stored.error.isna().all()
    assert own in set(stored.policy)
