"""The chapter runs from top to bottom on a foreign model, with a file of questions and a policy of one's own."""

from pathlib import Path

import checkpoint
import nbformat
import pandas as pd
import papermill

from kvrepro.experiment import claims

NOTEBOOK = Path(__file__).resolve().parents[3] / "notebooks" / "dropkv_bound.ipynb"
MINE = """
from kvrepro.engine.policy import Policy


def attention_times_value(o):
    return o.attention.mean((2, 3)) * o.values.float().norm(dim=-1)


MINE = Policy("Mine", "a test", attention_times_value, parameters={"window": 16, "recent": "window"})
"""


def test_the_chapter_runs_on_a_checkpoint_with_one_policy_of_one_s_own(tmp_path):
    policy = tmp_path / "mine.py"
    policy.write_text(MINE)
    given = checkpoint.inputs(tmp_path, checkpoint.questions(3, 3200))
    given |= {"policies": [f"{policy}:MINE"], "pools": [0.9], "shares": [0.2]}
    given["options"] = {"tokens": 300, "lengths": [200], "triples": 6, "positions": 1, "max_new_tokens": 4}
    executed = papermill.execute_notebook(
        NOTEBOOK, tmp_path / "out.ipynb", given, kernel_name="python3", progress_bar=False
    )
    outputs = [output for cell in executed.cells if cell.cell_type == "code" for output in cell.outputs]
    assert len([o for o in outputs if "image/svg+xml" in o.get("data", {})]) == 17
    text = nbformat.writes(executed)
    assert "What we found" in text
    table = pd.read_csv(tmp_path / "results" / "dropkv_bound" / "claims.csv")
    assert table.columns.tolist() == claims.COLUMNS
    assert {"D8 Mine", "D5 Mine"} <= set(table.claim)
    assert set(table.verdict[table.claim.isin(["D4b", "D8", "D8 Mine"])]) == {"not testable here"}  # three items
