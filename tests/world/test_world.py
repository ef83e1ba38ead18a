"""The synthetic world: same bytes, right lengths, right spans, answers that follow from the text, held-out words."""

import hashlib
import itertools
import json
import os
import random
import re
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrepro.experiment import data
from kvrepro.world import words as w
from kvrepro.world import world
from studies.training import rows
from studies.training.rows import build

TOKENIZER = build()
KINDS = [(set(w.FIRST), set(w.LAST)), (set(w.ADJECTIVES), set(w.NOUNS))]
FACTS = """single_fact needle needle_multikey story dialogue ledger report minutes passage_retrieval
    frequent_words""".split()
CLI = [sys.executable, "-m", "kvrepro", "items"]


def run(*arguments, **environment):
    environment = {**os.environ, **environment}
    return subprocess.run([*CLI, *arguments], capture_output=True, text=True, env=environment, timeout=60)


def text(item, name):
    return [item.messages[s.message]["content"][s.start : s.end] for s in item.spans if s.name == name]


def word_pairs(conversation):
    """People and things, as pairs of words, wherever a conversation says them."""
    texts = [conversation.system, *itertools.chain.from_iterable(conversation.turns)]
    for words in texts:
        for pair in itertools.pairwise(words):
            if any(pair[0] in firsts and pair[1] in seconds for firsts, seconds in KINDS):
                yield pair


# ---- the same arguments, the same bytes


def test_same_seed_same_bytes_whatever_the_hash_seed():
    arguments = ("tinyworld:instruction_several", "-n", "3", "--seed", "7", "--tokens", "1900")
    first, second = run(*arguments, PYTHONHASHSEED="1"), run(*arguments, PYTHONHASHSEED="2")
    assert first.returncode == 0
    assert first.stdout == second.stdout
    lines = [json.loads(line) for line in first.stdout.splitlines()]
    assert [line["id"] for line in lines] == [item.id for item in world.sample("instruction_several", 3, 7, 1900)]
    assert len({line["messages"][1]["content"] for line in lines}) == 3
    assert world.sample("needle", 2, 8)[0].messages != world.sample("needle", 2, 7)[0].messages


def test_training_text_is_the_text_the_shipped_model_saw():
    """Vocabulary and random stream must not move under the weights."""
    digest = hashlib.sha256()
    rng = random.Random(5)
    for length in (256, 1024):
        for array in rows.batch(rng, np.ones(len(world.ALL)), length, 65_536, warm=0.2):
            digest.update(array.tobytes())
    assert digest.hexdigest()[:16] == "02de5e2c8c872108"


# ---- length


@pytest.mark.parametrize("tokens", [200, 233, 500, 1000, 1900, 3800])
def test_prompts_fill_their_length_and_answers_fit_the_context(tokens):
    for task in world.EVERY:
        for item in world.sample(task, 2, seed=1, tokens=tokens):
            ids = data.build_prompt(item, TOKENIZER, world.CONTEXT).ids
            assert tokens - 12 < len(ids) <= tokens, (task, len(ids))
            assert len(ids) + len(TOKENIZER(item.answer).input_ids) + 1 <= world.CONTEXT, task


# ---- what the text says


@pytest.mark.parametrize("task", list(world.EVERY))
def test_text_is_known_to_the_tokenizer_and_comes_back(task):
    for item in world.sample(task, 5, seed=2, tokens=400):
        for part in [item.answer, *(message["content"] for message in item.messages)]:
            ids = TOKENIZER(part).input_ids
            assert TOKENIZER.unk_token_id not in ids
            assert TOKENIZER.decode(ids) == part


@pytest.mark.parametrize("task", list(world.EVERY))
def test_spans_point_at_the_text_they_name(task):
    for item in world.sample(task, 5, seed=2, tokens=400):
        user, (question,) = item.messages[1]["content"], text(item, "question")
        assert user.endswith(question)
        assert question.startswith(("Question: ", *w.REQUESTS, *(world.pretty(r[:2]) for r in world.LEAK_REQUESTS)))
        for fact in text(item, "evidence"):
            assert fact == fact.strip()
            assert fact.endswith((".", ";"))
        system = item.messages[0]["content"]
        assert len(text(item, "defense")) == bool(item.meta.get("defended"))
        if directive := text(item, "directive"):
            assert set(" ".join(directive + text(item, "defense")).split()) == set(system.split())
            assert text(item, "defense") in ([], *([world.pretty(d)] for d in DEFENSES))
        else:
            assert system == world.pretty(world.SYSTEM)


DEFENSES = (world.DEFENSE_BEFORE, world.DEFENSE_AFTER, world.DEFENSE_EXAMPLES)


@pytest.mark.parametrize("task", FACTS)
def test_the_evidence_names_the_answer_which_stands_nowhere_else(task):
    for item in world.sample(task, 10, seed=4, tokens=600):
        evidence, user = text(item, "evidence"), item.messages[1]["content"]
        assert all(item.answer in fact for fact in evidence)
        assert len(re.findall(rf"{item.answer}\b", user)) == len(evidence)
        if task != "frequent_words":
            (fact,), (question,) = evidence, text(item, "question")
            person = " ".join(question.rstrip("?").split()[-2:])
            assert person in fact
            assert user.count(person) == 2  # in the fact and in the question


def test_longer_answers_follow_from_the_passage():
    for item in world.sample("list_all", 3, seed=4, tokens=1900):
        assert item.answer == " ".join(text(item, "evidence")).replace("Entry ", "")
    for item in world.sample("summary", 3, seed=4, tokens=1900):
        facts = sorted(text(item, "evidence"), key=lambda fact: int(fact.split()[2]))
        assert item.answer == " ".join(facts).replace("Then ", "")
    for item in world.sample("variable_tracking", 5, seed=4, tokens=600):
        name = text(item, "question")[0].rstrip("?").split()[-1]
        links = dict(fact.rstrip(".").split()[1:] for fact in text(item, "evidence"))
        chain = []
        while name in links:
            name = links[name]
            chain.append(name)
        assert item.answer == " ".join(chain)
    for item in world.sample("needle_multivalue", 5, seed=4, tokens=600):
        values = {fact.rstrip(".").split()[4]: fact.rstrip(".").split()[5:] for fact in text(item, "evidence")}
        assert item.answer == " ".join(" ".join([o, *values[o]]) for o in world.ORDINALS if o in values)
    for item in world.sample("needle_multiquery", 5, seed=4, tokens=600):
        facts = {fact.removeprefix("They told ").rstrip(".") for fact in text(item, "evidence")}
        assert set(item.answer.split(", ")) == facts


# ---- held out


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(list(world.EVERY)), st.integers(0, 2**32), st.sampled_from([128, 256, 700, 2000]), st.integers(1, 6)
)
def test_people_and_things_are_on_one_side_of_the_hold_out(task, seed, tokens, turns):
    for evaluation in (False, True):
        draw = world.Draw(random.Random(seed), tokens, evaluation, 1 if evaluation else turns)
        conversation = world.EVERY[task](draw)
        assert all(world.held_out(*pair) == evaluation for pair in word_pairs(conversation))
