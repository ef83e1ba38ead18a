"""Layers over several GPUs answer, keep and count as on one. Needs two GPUs: `pytest tests/engine/test_balanced.py`."""

import pytest
import torch
from conditions import flat

from kvrepro.engine import generate as engine
from kvrepro.engine.catalogue import CATALOGUE
from kvrepro.engine.condition import Condition
from kvrepro.experiment import data, models

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
WINDOW = {name: (("window", 8),) for name, p in CATALOGUE.items() if "window" in p.parameters}
SOME = ("streaming_llm", "h2o", "snapkv", "ada_kv", "cake", "layer_defensive_kv", "scissorhands", "r_kv")


def conditions(names, regime, **fields) -> list[Condition]:
    return [
        flat(name, regime=regime, switches=WINDOW.get(name, ()), **fields)
        for name in names
        if regime in CATALOGUE[name].regimes
    ]


CASES = {
    "once": [Condition(), *conditions(CATALOGUE, "prefill", budget=0.6, until="question")],
    "per head": conditions(["ada_kv"], "prefill", budget=0.3),
    "four bits": conditions(["snapkv"], "prefill", budget=0.3, bits=4),
    "chunked": conditions(SOME, "chunked", budget=200, chunk=300, when="budget"),
    "offline": conditions(SOME, "offline", budget=200),
    "decode cap": conditions(SOME, "decode cap", budget=200, interval=4),
    "per step": conditions(SOME, "per step", budget=200),
}


@pytest.fixture(scope="module")
def pair():
    with torch.device("cpu"):
        return models.load(device="balanced", dtype="float32"), models.load(device="cuda:0", dtype="float32")


def test_layers_lie_on_both(pair):
    spread, _ = pair
    assert {p.device.index for p in spread.model.parameters()} == {0, 1}


@pytest.mark.parametrize("name", CASES)
def test_answers_kept_sets_and_bytes_are_those_of_one_gpu(pair, name):
    items = data.load_items("tinyworld", 3, seed=5, tokens=700)
    answers = []
    for loaded in pair:
        texts = [data.build_prompt(item, loaded.tokenizer, 1500) for item in items]
        given = {"stop_ids": models.stop_ids(loaded), "repeat": loaded.tokenizer("Repeat: ")["input_ids"]}
        with torch.device("cpu"):
            answers.append(engine.generate(loaded.model, texts, CASES[name], max_new_tokens=24, **given))
    for spread, single in zip(*answers, strict=True):
        for c, a, b in zip(CASES[name], spread, single, strict=True):
            for what in ("tokens", "kept_positions_hash", "kept", "bytes_full", "bytes_held"):
                assert getattr(a, what) == getattr(b, what), (c.label, what)
