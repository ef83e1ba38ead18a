"""The notebook: its shape, and runs on a foreign checkpoint, with a single policy, also the reader's own."""

import re
from pathlib import Path

import checkpoint
import notebook
import pandas as pd
import pytest

from kvrepro.experiment import claims

OPTIONS = {"prompt_tokens": 220, "capacity": 64, "max_new_tokens": 2, "acceptance": "policies", "cadences": [1, 16],
           "timed_cadences": [1, 4], "budget": 64, "lengths": [32, 64], "progress": False}  # fmt: skip


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """Parameters of a run on a small random Qwen2 in the hub's format, with real questions."""
    folder = tmp_path_factory.mktemp("run")
    notebook.own_policy(folder, window=8)
    return checkpoint.inputs(folder, checkpoint.questions(2)) | {"kept": [0.25], "options": OPTIONS}


@pytest.mark.parametrize("policy", [pytest.param("window", marks=pytest.mark.slow), "{folder}/mine.py:MINE"])
def test_it_runs_on_a_foreign_checkpoint_with_one_policy(given, policy):
    results = Path(given["results"])
    given = {**given, "policies": [policy.format(folder=results.parent)]}
    cells = notebook.run("reclamation", given)
    images = [sum("image/svg+xml" in data for data in shown) for _, shown in cells]
    assert images == ["figure.show(" in source for source, _ in cells]
    table = pd.read_csv(results / "reclamation" / "claims.csv")
    assert table.columns.tolist() == claims.COLUMNS
    verdicts = table.set_index("claim").verdict
    assert verdicts[["R1", "R2", "R3", "R4", "R6b"]].tolist() == ["reproduced"] * 4 + [
        "reproduced" if policy == "window" else "not testable here"
    ]
    shown = " ".join(data.get("text/html", "") + data.get("text/markdown", "") for _, cell in cells for data in cell)
    if policy != "window":
        assert verdicts["R6b Mine"] == "reproduced"
        assert shown.count("Mine") > 10
    assert not re.search(r"\bnan\b", re.sub(r"<[^>]*>", "", shown))
