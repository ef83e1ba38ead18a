"""The chapter runs from top to bottom on a foreign model, with a file of questions and a policy of one's own."""

import checkpoint
import notebook
import pandas as pd

from kvrepro.experiment import claims


def test_the_chapter_runs_on_a_checkpoint_with_one_policy_of_one_s_own(tmp_path):
    given = checkpoint.inputs(tmp_path, checkpoint.questions(3, 3200))
    given |= {"policies": [notebook.own_policy(tmp_path)], "pools": [0.9], "shares": [0.2]}
    given["options"] = {"tokens": 300, "lengths": [200], "triples": 6, "positions": 1, "max_new_tokens": 4}
    done = notebook.executed("dropkv_bound", tmp_path, given)
    drawn = [has for has, wanted in zip(notebook.drawn(done), notebook.described(done), strict=True) if wanted]
    assert drawn == [True] * 7
    assert "On this model" in notebook.box(done)
    table = pd.read_csv(tmp_path / "results" / "dropkv_bound" / "claims.csv")
    assert table.columns.tolist() == claims.COLUMNS
    assert {"D8 Mine", "D5 Mine"} <= set(table.claim)
    assert set(table.verdict[table.claim.isin(["D4b", "D8", "D8 Mine"])]) == {"not testable here"}  # three items
