"""Every chapter runs on a hub-format checkpoint with real items: small here, of true shapes on a GPU."""

import pandas as pd
import pytest
import torch
import typer
from transformers import AutoConfig, AutoModelForCausalLM

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
    trial.main("two-layer", "cpu", "float32", [chapter], str(items), n_items=1, limit=300, out=out)
    [row] = pd.read_csv(out).to_dict("records")
    assert row["results"] > 10
    assert row["failed"] == 0
    assert row["seconds"] > 0


def test_a_chapter_that_cannot_run_fails_the_trial_and_keeps_other_rows(tmp_path):
    items, out = tmp_path / "own.jsonl", tmp_path / "chapters.csv"
    items.write_text('{"context": "The red door is open.", "question": "Which?", "answer": "red", "task": "a"}\n' * 8)
    row = {"shape": ["other"], "device": ["CPU"], "chapter": ["protection"], "n_items": [2], "results": [7]}
    pd.DataFrame(row).to_csv(out, index=False)
    with pytest.raises(typer.Exit) as end:  # such prompts are shorter than what is protected of them
        trial.main("two-layer", "cpu", "float32", ["protection"], str(items), n_items=2, limit=300, out=out)
    assert end.value.exit_code == 1
    table = pd.read_csv(out)
    assert table.results.tolist()[0] == 7
    assert table.error.notna().tolist() == [False, True]


@pytest.mark.parametrize("shape", trial.SHAPES)
def test_a_shape_is_one_that_transformers_can_build(shape):
    config = AutoConfig.for_model(**{"vocab_size": 4096} | trial.SHAPES[shape])
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(config)
    assert network.config.num_hidden_layers == trial.SHAPES[shape]["num_hidden_layers"]


@pytest.mark.parametrize(
    "given", [{"dtype": "int3"}, {"chapter": ["nope"]}, {"shape": "huge"}, {"device": "cuda:99"}], ids=str
)
def test_what_no_trial_can_be_is_refused_before_items_are_read(given, tmp_path):
    with pytest.raises(InputError):
        trial.main(**given, items="no/such.jsonl", out=tmp_path / "chapters.csv")
    assert not (tmp_path / "chapters.csv").exists()
