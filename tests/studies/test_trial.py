"""Every chapter runs on a hub-format checkpoint with real items: small here, of true shapes on a GPU."""

import json
import time
import weakref
from pathlib import Path
from types import SimpleNamespace

import checkpoint
import pandas as pd
import pytest
import torch
import typer
from transformers import AutoConfig, AutoModelForCausalLM

from kvrepro.engine.condition import Condition
from kvrepro.engine.regime import Prefill
from kvrepro.errors import InputError
from kvrepro.experiment import data, models
from kvrepro.experiment.run import Answers, Settings, run
from kvrepro.tools import book, command
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
    trial.main("two-layer", "cpu", "float32", [chapter], str(items), n_items=[1], limit=300, out=out)
    [row] = pd.read_csv(out).to_dict("records")
    assert row["results"] > 10
    assert row["failed"] == 0
    assert row["seconds"] > row["in_studies"] > 0


def one_study(name, parameters, space):
    """The cells of a notebook that runs one study and then draws for a while."""
    space["loaded"] = models.load(parameters["model"])
    space["items"] = data.load_items(parameters["items"], parameters["n_items"])
    conditions = [Condition(), Condition("snapkv", 0.5, Prefill(), switches=(("window", 8),))]
    yield "load"
    study = Answers(name, "main", space["items"], conditions, 4, 300)
    space["rows"] = run(study, space["loaded"], Settings(parameters["results"], workers=1, progress=False))
    yield "run"
    time.sleep(0.2)
    yield "draw"


def test_a_larger_size_adds_what_its_studies_take(tmp_path, monkeypatch):
    """On questions from LongBench where the network or `KVREPRO_DATA` has them, in this process."""
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in checkpoint.questions(8)))
    rows = []

    def attempt(name, parameters, counts, limit):
        trial._attempt(SimpleNamespace(send=rows.append), name, parameters, counts, tmp_path / "log")
        return rows

    monkeypatch.setattr(trial, "attempt", attempt)
    monkeypatch.setattr(book, "cells", one_study)
    out = tmp_path / "chapters.csv"
    trial.main(chapter=["fragility"], items=str(tmp_path / "own.jsonl"), n_items=[3, 1], out=out)
    small, large = pd.read_csv(out).to_dict("records")
    assert (small["n_items"], large["n_items"]) == (1, 3)
    assert (small["results"], large["results"]) == (2, 6)
    assert small["failed"] == large["failed"] == 0
    assert small["seconds"] >= small["in_studies"] + 0.1
    assert large["seconds"] - small["seconds"] == pytest.approx(large["in_studies"] - small["in_studies"], abs=0.2)
    assert min(large["prefill"], large["decode"]) >= 0  # of a model so small, tenths of a second: 0 or more


def test_a_larger_size_finds_the_smaller_ones_model_gone(tmp_path, monkeypatch):
    """A notebook's own policy, which stays, must not hold it."""
    earlier, load, alive = [], models.load, []

    def loaded(*given, **options):
        alive.append(sum(model() is not None for model in earlier))
        loaded_model = load(*given, **options)
        earlier.append(weakref.ref(loaded_model.model))
        return loaded_model

    def cells(name, parameters, space):
        exec("def score(o): pass", space)
        policies.append(space["score"])
        space["loaded"] = models.load("tiny-gqa")
        yield ""

    policies, sent = [], []
    monkeypatch.setattr(models, "load", loaded)
    monkeypatch.setattr(book, "cells", cells)
    trial._attempt(SimpleNamespace(send=sent.append), "mine", {"results": str(tmp_path)}, [1, 2], tmp_path / "log")
    assert [row["n_items"] for row in sent] == [1, 2]
    assert alive == [0, 0]


def test_a_chapter_that_cannot_run_fails_the_trial_and_keeps_other_rows(tmp_path):
    items, out = tmp_path / "own.jsonl", tmp_path / "chapters.csv"
    items.write_text('{"context": "The red door is open.", "question": "Which?", "answer": "red", "task": "a"}\n' * 8)
    row = {"shape": ["other"], "device": ["CPU"], "chapter": ["protection"], "n_items": [2], "results": [7]}
    pd.DataFrame(row).to_csv(out, index=False)
    with pytest.raises(typer.Exit) as end:  # such prompts are shorter than what is protected of them
        trial.main("two-layer", "cpu", "float32", ["protection"], str(items), n_items=[2], limit=300, out=out)
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
    ("dtype", "chapter", "message"),
    [
        ("int3", "protection", "dtype 'int3': choose one of float32, bfloat16, float16"),
        ("auto", "protection", "dtype 'auto'"),
        ("float32", "nope", "chapter 'nope': choose one of protection, fragility"),
    ],
)
def test_what_no_trial_can_be_is_refused_and_stores_nothing(dtype, chapter, message, tmp_path):
    with pytest.raises(InputError, match=message):
        trial.main("two-layer", "cpu", dtype, [chapter], "none.jsonl", out=tmp_path / "chapters.csv")
    assert not (tmp_path / "chapters.csv").exists()


def test_an_unknown_shape_is_refused(tmp_path):
    with pytest.raises(InputError, match="shape 'huge': choose one of two-layer, qwen2.5-3b"):
        trial.checkpoint(tmp_path, "huge", ["a"])


@pytest.mark.parametrize(
    ("shape", "device", "message"),
    [("huge", "cpu", "shape 'huge'"), ("two-layer", "cuda:99", "device 'cuda:99' asked for, torch sees")],
)
def test_shape_and_device_are_looked_at_before_items(shape, device, message):
    with pytest.raises(InputError, match=message):
        trial.main(shape, device, items="no/such.jsonl")


@pytest.mark.parametrize(("items", "ends"), [("longbench", "FILE.jsonl"), ("own.jsonl", "cannot download it")])
def test_without_its_usual_items_a_trial_names_the_way_out(items, ends, monkeypatch):
    def load(*_):
        raise InputError("cannot download it")

    monkeypatch.setattr(data, "load_items", load)
    with pytest.raises(InputError) as error:
        trial.main("two-layer", "cpu", "float32", ["protection"], items)
    assert str(error.value).startswith("cannot download it")
    assert str(error.value).endswith(ends)


def test_a_file_to_write_is_sought_where_the_user_stands(tmp_path, monkeypatch):
    (tmp_path / "tables").mkdir()
    monkeypatch.chdir(tmp_path)
    run = command.with_checked_values(lambda out=Path("usual.csv"): out)
    assert run(out=Path("tables/t.csv")) == Path("tables/t.csv")
    for wrong in ("tables", "none/t.csv"):
        with pytest.raises(InputError, match="give a file in a folder that is there"):
            run(out=Path(wrong))
