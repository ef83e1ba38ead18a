"""The chapter runs from top to bottom on a foreign model, with a file of questions and a policy of one's own."""

import checkpoint
import notebook
import pandas as pd
import papermill

from kvrepro.experiment import claims
from kvrepro.paths import ROOT


def test_the_chapter_runs_on_a_checkpoint_with_one_policy_of_one_s_own(tmp_path):
    given = checkpoint.inputs(tmp_path, checkpoint.questions(3, 3200))
    given |= {"policies": [notebook.own_policy(tmp_path)], "pools": [0.9], "shares": [0.2]}
    given["options"] = {"tokens": 300, "lengths": [200], "triples": 6, "positions": 1, "max_new_tokens": 4}
    source, copy = ROOT / "notebooks" / "dropkv_bound.ipynb", tmp_path / "out.ipynb"
    done = papermill.execute_notebook(source, copy, given, cwd=ROOT, progress_bar=False)
    shown = [[output.get("data", {}) for output in cell.get("outputs", [])] for cell in done.cells]
    drawn = [any("image/svg+xml" in data for data in of_cell) for of_cell in shown]
    described = [drawn[number] for number, cell in enumerate(done.cells) if "mystnb" in cell.metadata]
    assert described == [True] * 7
    assert any("On this model" in data.get("text/markdown", "") for of_cell in shown for data in of_cell)
    table = pd.read_csv(tmp_path / "results" / "dropkv_bound" / "claims.csv")
    assert table.columns.tolist() == claims.COLUMNS
    assert {"D8 Mine", "D5 Mine"} <= set(table.claim)
    assert set(table.verdict[table.claim.isin(["D4b", "D8", "D8 Mine"])]) == {"not testable here"}  # three items
