"""The model that ships: loads as any checkpoint, answers, and its card says what its files say."""

from transformers import AutoModelForCausalLM, AutoTokenizer

from kvrepro.experiment import models
from kvrepro.experiment.models import EMBEDDED
from kvrepro.world import world
from studies.training import evaluate

TASKS = ("single_fact", "two_hop", "variable_tracking", "instruction_several", "refusal", "leak")


def test_loads_unchanged_and_generates_an_answer():
    model, tokenizer = AutoModelForCausalLM.from_pretrained(EMBEDDED), AutoTokenizer.from_pretrained(EMBEDDED)
    item = world.sample("needle", 1, seed=1, tokens=400)[0]
    ids = tokenizer.apply_chat_template(list(item.messages), add_generation_prompt=True, return_tensors="pt")[
        "input_ids"
    ]
    out = model.generate(ids, max_new_tokens=20, do_sample=False)[0, ids.shape[1] :]
    assert out[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(out, skip_special_tokens=True).strip() == item.answer


def test_answers_held_out_questions():
    sets = {(task, 500): evaluate.evaluation_set(task, 500, 2, seed=5) for task in TASKS}
    assert evaluate.exact_match(models.load().model, sets) == dict.fromkeys(sets, 1.0)
