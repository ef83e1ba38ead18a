"""The model that ships: loads as any checkpoint, answers, and its card says what its files say."""

import math

import pandas as pd
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvrepro.experiment import models
from kvrepro.experiment.models import EMBEDDED
from kvrepro.world import world
from studies.training import evaluate

TASKS = ("single_fact", "two_hop", "variable_tracking", "instruction_several", "refusal", "leak")


@pytest.fixture(scope="module")
def loaded():
    return models.load()


def test_loads_unchanged_and_generates_an_answer():
    model, tokenizer = AutoModelForCausalLM.from_pretrained(EMBEDDED), AutoTokenizer.from_pretrained(EMBEDDED)
    item = world.sample("needle", 1, seed=1, tokens=400)[0]
    ids = tokenizer.apply_chat_template(list(item.messages), add_generation_prompt=True, return_tensors="pt")[
        "input_ids"
    ]
    out = model.generate(ids, max_new_tokens=20, do_sample=False)[0, ids.shape[1] :]
    assert out[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(out, skip_special_tokens=True).strip() == item.answer


def test_weights_are_small_bf16_and_grouped():
    config = models.load().model.config
    assert (EMBEDDED / "model.safetensors").stat().st_size <= 10e6
    assert config.num_attention_heads // config.num_key_value_heads >= 2
    assert config.num_key_value_heads >= 2
    assert config.max_position_embeddings == world.CONTEXT
    with safe_open(EMBEDDED / "model.safetensors", "pt") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"BF16"}  # noqa: SIM118


def test_answers_held_out_questions(loaded):
    sets = {(task, 500): evaluate.evaluation_set(task, 500, 2, seed=5) for task in TASKS}
    assert evaluate.exact_match(loaded.model, sets) == dict.fromkeys(sets, 1.0)


def test_a_wrong_token_costs_its_answer_alone():
    turn = torch.tensor([[0, 1, 1, 0, 2, 2], [0, 1, 1, 1, 0, 0]])
    correct = torch.tensor([[0, 1, 1, 0, 1, 0], [1, 1, 1, 1, 0, 0]], dtype=torch.bool)
    right, answers = evaluate.exact(correct, turn, 2)
    assert right.tolist() == [1, 1]
    assert answers.tolist() == [2, 1]


def test_the_figures_reach_what_the_chapters_need():
    """Targets at 1,900 tokens, and every task and length of the world is there."""
    table = pd.read_csv(EMBEDDED / "evaluation.csv").set_index(["task", "tokens"])
    assert set(table.index) == {(task, length) for task in world.ALL for length in evaluate.LENGTHS}
    assert set(table.n) == {200}
    assert (table.low <= table.exact_match).all()
    assert (table.exact_match <= table.high).all()
    assert table.exact_match.xs(1900, level="tokens").min() >= 0.95


def test_sinks_has_every_head_and_their_mean():
    table = pd.read_csv(EMBEDDED / "sinks.csv", dtype={"head": str})
    assert len(table) == 6 * (4 + 1)
    for _, layer in table.groupby("layer"):
        mean = layer[layer["head"] == "mean"].mass.item()
        assert math.isclose(mean, layer[layer["head"] != "mean"].mass.mean(), abs_tol=2e-5)
