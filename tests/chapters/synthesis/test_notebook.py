"""The notebook by papermill: a foreign checkpoint, a file of questions, a policy of one's own, few cells."""

import checkpoint
import notebook

from kvrepro.experiment import store


def test_the_notebook_runs_on_a_checkpoint_a_jsonl_file_and_a_policy_of_one_s_own(tmp_path):
    policy = notebook.own_policy(tmp_path, window=4)
    given = checkpoint.inputs(tmp_path, checkpoint.questions(2, 2400))
    given |= {"policies": [policy, "key_diff", "dropkv"]}
    settings = {"tokens": 300, "cells": 14, "kept": [0.2, 0.4], "answer_words": 4, "window": 4, "draws": 20}
    given["options"] = settings | {"workers": 1}
    done = notebook.executed("synthesis", tmp_path, given)
    stored = store.read(tmp_path / "results" / "synthesis" / "grid")
    assert stored.error.isna().all()
    assert len(stored) == 2 * (1 + 14 + 3 * 2)
    assert policy in set(stored.policy)
    described = ["mystnb" in cell.metadata and "exercise" not in cell.metadata.tags for cell in done.cells]
    assert all(has for has, wanted in zip(notebook.drawn(done), described, strict=True) if wanted)
    assert sum(described) == 7
    text = notebook.box(done)
    assert "This run cannot say what the model forgets" in text  # a random model answers nothing
    assert "nan" not in text
