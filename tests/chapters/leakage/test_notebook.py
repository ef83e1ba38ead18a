"""The notebook from top to bottom: a foreign checkpoint, one ratio, few prompts, and a policy of one's own."""

from pathlib import Path

import checkpoint
import pandas as pd
import papermill

from kvrepro.chapters.leakage import prompts
from kvrepro.experiment import claims, store

NOTEBOOK = Path(__file__).resolve().parents[3] / "notebooks" / "leakage.ipynb"
OWN = """
from kvrepro.engine.policy import Policy

def earliest(o):
    \"\"\"s_j = -j. Source: this test.\"\"\"
    return -o.positions.float()

MINE = Policy("Earliest", "this test", earliest)
"""


def test_the_notebook_runs_on_a_checkpoint_folder_with_a_policy_of_ones_own(tmp_path):
    """Rows, curves and verdict rows of its own; a random model tells nothing, so no verdict claims anything."""
    (tmp_path / "own_policy.py").write_text(OWN)
    mine = f"{tmp_path / 'own_policy.py'}:MINE"
    texts = [message["content"] for item in prompts.systems(4) for message in item.messages]
    given = {"model": str(checkpoint.save(tmp_path / "small-qwen2", texts)), "results": str(tmp_path / "results")}
    given |= {"n_items": 2, "policies": [mine], "ratios": [0.5]}
    given |= {"options": {"max_new_tokens": 4, "marks": 1, "timed": 1, "repeats": 1, "progress": False}}
    executed = papermill.execute_notebook(NOTEBOOK, tmp_path / "out.ipynb", given, kernel_name="python3",
                                          progress_bar=False)  # fmt: skip
    outputs = [o.get("data", {}) for c in executed.cells if c.cell_type == "code" for o in c.outputs]
    assert sum("image/png" in data for data in outputs) >= 12
    assert sum("Earliest" in data.get("text/markdown", "") for data in outputs) >= 3
    verdicts = pd.read_csv(tmp_path / "results" / "leakage" / "claims.csv")
    assert verdicts.columns.tolist() == claims.COLUMNS
    assert {"L3b Earliest", "L7 Earliest"} <= set(verdicts.claim)
    assert not {"L9 Earliest", "L5 Earliest"} & set(verdicts.claim)  # these name their policies
    assert set(verdicts[verdicts.claim == "L3b Earliest"].verdict) == {"not testable here"}
    rows = store.read(tmp_path / "results" / "leakage" / "main-normal.parquet")
    assert rows[rows.policy == mine].error.isna().sum() >= 2 * 2 * 3  # default, fair and both ends, two requests each
