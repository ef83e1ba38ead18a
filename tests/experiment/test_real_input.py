"""The whole way: long passages, a checkpoint in the hub's format, the protocol's prompts, the engine, rows."""

import json
from dataclasses import replace

import checkpoint
import pytest

from kvrepro.engine.condition import Condition, SharedCap
from kvrepro.experiment import data, measure, models
from kvrepro.experiment.run import Answers, Settings, run

CAP, ENDS = SharedCap(), {"prefix": 0.1, "suffix": 0.1}

SHIPS = " ".join(f"Ship {i} reached the harbour with {i * 7 % 90} crates of tea." for i in range(400))
DOORS = "The red door is open. " * 900
OWN = [
    {"context": SHIPS, "question": "How many crates of tea did ship 399 bring?", "answer": "3", "domain": "harbour"},
    {"context": DOORS, "question": "Which door is open?", "answer": "the red door", "domain": "doors"},
]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("own") / "own.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in OWN))
    return path


@pytest.fixture(scope="module")
def loaded(source, tmp_path_factory):
    texts = [item.context for item in data.load_items(str(source))]
    return models.load(str(checkpoint.save(tmp_path_factory.mktemp("hub") / "small-qwen2", texts, vocabulary=2000)))


def test_items_that_say_how_long_their_answers_are_and_how_they_are_scored(source, loaded, tmp_path):
    """Beside items that do not: each row has its own length and limit, and the official score where there is one."""
    plain = data.load_items(str(source), 2)
    rows = [
        replace(item, id=f"{item.id}-{new}", meta=item.meta | {"max_new_tokens": new, "metric": "rouge"})
        for item in plain
        for new in (2, 9)
    ]
    conditions = [Condition(), Condition("lru", 128, CAP)]
    study = Answers("protection", "lengths", [rows[0], *plain, *rows[1:]], conditions, 5, loaded.context - 5)
    frame = run(study, loaded, Settings(tmp_path, progress=False))
    of_rouge = frame[frame.metric == "rouge"]
    assert frame[frame.metric.isna()].max_new_tokens.tolist() == [5] * 4
    assert of_rouge.max_new_tokens.tolist() == [int(name.rpartition("-")[2]) for name in of_rouge["item"]]
    assert (frame.n_generated <= frame.max_new_tokens).all()
    assert of_rouge[of_rouge.max_new_tokens == 9].n_generated.max() > 5
    assert (frame.limit == loaded.context - frame.max_new_tokens.clip(lower=5)).all()
    assert of_rouge.official.between(0, 1).all()
    assert frame.official.isna().tolist() == frame.metric.isna().tolist()
    expected = [measure.rouge_longbench(row.prediction, row.answer) for row in of_rouge.itertuples()]
    assert of_rouge.official.tolist() == pytest.approx(expected)
    alone = run(replace(study, name="alone", items=[rows[1]]), loaded, Settings(tmp_path, progress=False))
    columns = ["item", "policy", "prediction", "kept_hash", "official", "key"]
    together = frame[frame["item"] == rows[1].id]
    assert alone[columns].equals(together[columns].reset_index(drop=True))
