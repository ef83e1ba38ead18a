"""The notebook by papermill: two foreign checkpoints, one share, one prompt, and a policy of one's own."""

import checkpoint
import notebook
import pandas as pd

from kvrepro.chapters.leakage import prompts
from kvrepro.experiment import claims, store


def test_the_notebook_runs_on_two_checkpoints_and_asks_general_claims_of_ones_own_policy(tmp_path):
    policy, results = notebook.own_policy(tmp_path), tmp_path / "results" / "leakage"
    texts = [message["content"] for item in prompts.systems(4) for message in item.messages]
    first, second = (str(checkpoint.save(tmp_path / name, texts)) for name in ("small-qwen2", "another"))
    given = {"model": first, "results": str(results.parent), "n_items": 1, "policies": [policy], "ratios": [0.5]}
    given |= {"options": {"max_new_tokens": 4, "progress": False, "compare": second, "workers": 1}}
    done = notebook.executed("leakage", tmp_path, given)
    drawn = notebook.drawn(done)
    assert drawn == notebook.described(done)
    assert sum(drawn) == 9
    assert notebook.box(done).startswith("**On this model**")
    verdicts = pd.read_csv(results / "claims.csv")
    assert verdicts.columns.tolist() == claims.COLUMNS
    assert {"L3b Mine", "L7 Mine"} <= set(verdicts.claim)
    assert not {"L9 Mine", "L5 Mine"} & set(verdicts.claim)  # these name their policies
    assert set(verdicts[verdicts.claim == "L3b Mine"].verdict) == {"not testable here"}  # a random model
    rows = store.read(results / "answers")
    rows = rows[rows.item.str.startswith("normal-") & (rows.policy == policy) & rows.error.isna()]
    assert rows.groupby("model").size().min() >= 2 * 3  # default, fair and both ends, two requests each
    assert rows.model.nunique() == 2
