"""The world's tokenizer: the shipped one is what the code builds; its chat template is the training rows' format."""

import random

import pytest
from transformers import AutoTokenizer

from kvrepro.experiment.models import EMBEDDED
from kvrepro.world import world
from studies.training import rows
from studies.training.rows import build, vocabulary

SHIPPED = AutoTokenizer.from_pretrained(EMBEDDED)


def test_the_shipped_vocabulary_is_the_worlds():
    assert SHIPPED.get_vocab() == vocabulary() == build().get_vocab()
    assert SHIPPED.chat_template == build().chat_template
    assert SHIPPED.model_max_length == world.CONTEXT


def test_a_mark_is_a_token_of_its_own():
    assert SHIPPED.tokenize("Sorry, I cannot.") == ["Sorry", "##,", "I", "cannot", "##."]
    assert SHIPPED.convert_ids_to_tokens(SHIPPED("the internet").input_ids) == ["the", "<|unk|>"]


@pytest.mark.parametrize("task", list(world.ALL))
def test_the_chat_template_gives_the_rows_of_training(task):
    conversation = world.ALL[task](world.Draw(random.Random(3), 400, False, 3))
    messages = [{"role": "system", "content": world.pretty(conversation.system)}]
    for user, answer in conversation.turns:
        messages += [{"role": "user", "content": world.pretty(user)}]
        messages += [{"role": "assistant", "content": world.pretty(answer)}]
    ids, turn = rows.encode(conversation)
    assert SHIPPED.apply_chat_template(messages, return_dict=False) == ids
    assert SHIPPED.unk_token_id not in ids
    prompt = SHIPPED.apply_chat_template(messages[:2], add_generation_prompt=True, return_dict=False)
    assert prompt == ids[: turn.index(1)]
    answer = [token for token, i in zip(ids, turn, strict=True) if i == 1]
    assert answer == [*SHIPPED(messages[2]["content"]).input_ids, SHIPPED.eos_token_id]
