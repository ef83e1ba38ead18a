"""The notebook from top to bottom: a foreign checkpoint, a file of questions, a policy of one's own, few cells."""

import checkpoint
import notebook

from kvrepro.experiment import stats, store


def test_the_notebook_runs_on_a_checkpoint_a_jsonl_file_and_a_policy_of_one_s_own(tmp_path):
    policy = notebook.own_policy(tmp_path, window=4)
    given = checkpoint.inputs(tmp_path, checkpoint.questions(2, 2400))
    given |= {"policies": [policy, "key_diff", "dropkv"]}
    given["options"] = {"tokens": 300, "cells": 14, "kept": [0.2, 0.4], "answer_words": 4, "window": 4, "draws": 20}
    cells = notebook.run("synthesis", given)
    outputs = [data for _, shown in cells for data in shown]
    drawn = [source for source, _ in cells if "figure.show(" in source]
    assert sum("image/svg+xml" in data for data in outputs) == len(drawn) >= 10
    stored = store.read(tmp_path / "results" / "synthesis" / "grid")
    assert stored.error.isna().all()
    assert len(stored) == 2 * (1 + 14 + 3 * 2)
    assert policy in set(stored.policy)
    text = " ".join(data.get("text/html", "") + data.get("text/markdown", "") for data in outputs)
    assert stats.NO_VALUE not in text
    assert "nan" not in " ".join(data.get("text/markdown", "") + data.get("text/plain", "") for data in outputs)
    assert "This run cannot say what the model forgets" in text  # a random model answers nothing
