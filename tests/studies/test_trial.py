"""Every chapter runs on a hub-format checkpoint with real items: small here, of true shapes on a GPU."""

import pandas as pd
import pytest

from kvrepro.errors import InputError
from kvrepro.experiment import data
from studies import trial


@pytest.fixture(scope="module")
def longbench():
    """The protection paper's items, where the network or `KVREPRO_DATA` has them."""
    try:
        return data.fetch("artifact/data/longbench-balanced.jsonl"), data.fetch("ifeval")
    except InputError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("chapter", trial.CHAPTERS)
def test_a_chapter_runs_on_two_layers_and_a_real_item(chapter, longbench, tmp_path):
    items, _ = longbench
    out = tmp_path / "chapters.csv"
    trial.main("two-layer", "cpu", "float32", [chapter], str(items), n_items=1, out=out)
    [row] = pd.read_csv(out).to_dict("records")
    assert row["results"] > 8
    assert row["failed"] == 0
    assert row["seconds"] > 0
