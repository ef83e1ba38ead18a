"""The notebook by papermill: two foreign checkpoints, one share, one prompt, and a policy of one's own."""

import checkpoint
import notebook
import pandas as pd
import pytest

from kvrepro.chapters.leakage import prompts
from kvrepro.experiment import claims, store


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """The executed notebook, the folder of its results, and the name of the policy."""
    folder = tmp_path_factory.mktemp("leakage")
    policy = notebook.own_policy(folder)
    texts = [message["content"] for item in prompts.systems(4) for message in item.messages]
    first, second = (str(checkpoint.save(folder / name, texts)) for name in ("small-qwen2", "another"))
    given = {"model": first, "results": str(folder / "results"), "n_items": 1, "policies": [policy], "ratios": [0.5]}
    given |= {"options": {"max_new_tokens": 4, "progress": False, "compare": second, "workers": 1}}
    done = notebook.executed("leakage", folder, given)
    return done, folder / "results" / "leakage", policy


def test_every_section_has_its_figure(done):
    page, *_ = done
    drawn = notebook.drawn(page)
    assert drawn == notebook.described(page)
    assert sum(drawn) == 9


def test_general_claims_are_asked_of_ones_own_policy_and_a_random_model_claims_nothing(done):
    page, results, _ = done
    assert notebook.box(page).startswith("**On this model**")
    verdicts = pd.read_csv(results / "claims.csv")
    assert verdicts.columns.tolist() == claims.COLUMNS
    assert {"L3b Mine", "L7 Mine"} <= set(verdicts.claim)
    assert not {"L9 Mine", "L5 Mine"} & set(verdicts.claim)  # these name their policies
    assert set(verdicts[verdicts.claim == "L3b Mine"].verdict) == {"not testable here"}


def test_both_checkpoints_answer_with_every_cure(done):
    _, results, policy = done
    rows = store.read(results / "answers")
    rows = rows[rows.item.str.startswith("normal-") & (rows.policy == policy) & rows.error.isna()]
    assert rows.groupby("model").size().min() >= 2 * 3  # default, fair and both ends, two requests each
    assert rows.model.nunique() == 2
