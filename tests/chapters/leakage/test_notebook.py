"""The notebook from top to bottom: two foreign checkpoints, one ratio, one prompt, and a policy of one's own."""

import checkpoint
import notebook
import pandas as pd

from kvrepro.chapters.leakage import prompts
from kvrepro.experiment import claims, store

OWN = """
from kvrepro.engine.policy import Policy

def earliest(o):
    \"\"\"s_j = -j. Source: this test.\"\"\"
    return -o.positions.float()

MINE = Policy("Earliest", "this test", earliest)
"""


def test_the_notebook_runs_on_two_checkpoint_folders_with_a_policy_of_ones_own(tmp_path):
    """Rows, curves and verdict rows of its own; a random model tells nothing, so no verdict claims anything. What the
    second model says stands beside what the first one does."""
    (tmp_path / "own_policy.py").write_text(OWN)
    policy = f"{tmp_path / 'own_policy.py'}:MINE"
    texts = [message["content"] for item in prompts.systems(4) for message in item.messages]
    folders = [str(checkpoint.save(tmp_path / name, texts)) for name in ("small-qwen2", "another")]
    given = {"model": folders[0], "results": str(tmp_path / "results")}
    given |= {"n_items": 1, "policies": [policy], "ratios": [0.5]}
    given |= {"options": {"max_new_tokens": 4, "progress": False, "compare": folders[1]}}
    outputs = [data for _, shown in notebook.run("leakage", given) for data in shown]
    assert sum("image/svg+xml" in data for data in outputs) >= 10
    assert sum("Earliest" in data.get("text/markdown", "") for data in outputs) >= 3
    verdicts = pd.read_csv(tmp_path / "results" / "leakage" / "claims.csv")
    assert verdicts.columns.tolist() == claims.COLUMNS
    assert {"L3b Earliest", "L7 Earliest"} <= set(verdicts.claim)
    assert not {"L9 Earliest", "L5 Earliest"} & set(verdicts.claim)  # these name their policies
    assert set(verdicts[verdicts.claim == "L3b Earliest"].verdict) == {"not testable here"}
    [second] = (tmp_path / "results" / "leakage").glob("claims-*another.csv")
    assert pd.read_csv(second).claim.tolist() == verdicts.claim.tolist()
    assert set(pd.read_csv(second).model).isdisjoint(verdicts.model)
    rows = store.read(tmp_path / "results" / "leakage" / "answers")
    rows = rows[rows.item.str.startswith("normal-") & (rows.policy == policy) & rows.error.isna()]
    assert rows.groupby("model").size().min() >= 2 * 3  # default, fair and both ends, two requests each
    assert rows.model.nunique() == 2
