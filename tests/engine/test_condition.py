"""Labels that tell conditions apart; prompts that cannot be."""

from dataclasses import fields, replace
from itertools import combinations

import pytest

from kvrepro.engine.condition import Condition, Prompt
from kvrepro.errors import InputError

BASE = Condition("snapkv", 256, regime="prefill")
OTHER = {
    "policy": ["lru"], "capacity": [128], "prefix": [0.1, 0.105], "suffix": [0.1], "suffix_mode": ["static"],
    "interval": [4], "reading": ["as_described"], "execution": ["masked"],
    "switches": [(("window", 8),), (("window", 8), ("recent", 0))], "regime": ["harness", "decode cap"],
    "share": [0.2, 0.125, 0.13], "until": ["question", "user"], "whitelist": [("a",), ("a", "b")], "spans": [("a",)],
    "fair": [1.0, 0.5, 0.0], "chunk": [512], "chunk_mode": ["budget"], "bits": [4],
}  # fmt: skip


def test_different_conditions_have_different_labels():
    changes = [{name: value} for name, values in OTHER.items() for value in values]
    assert set(OTHER) == {f.name for f in fields(Condition)}
    changes += [a | b for a, b in combinations(changes, 2) if a.keys() != b.keys()]
    shares = [c | {"capacity": None} if c.get("share") else c for c in changes]
    conditions = {replace(BASE, **change) for change in [{}, *shares]}
    assert len({c.label for c in conditions}) == len(conditions)


@pytest.mark.parametrize(
    ("condition", "label"),
    [
        (Condition(), "full cache"),
        (Condition(regime="prefill", bits=4), "full cache int4"),
        (Condition("lru", 256, 0.1, 0.1), "lru C=256 +10%/10%"),
        (Condition("snapkv", share=0.29, regime="prefill", until="question"), "snapkv 29% prefill until question"),
        (
            Condition("h2o", share=0.2, regime="prefill", reading="as_described", fair=1.0, spans=("a", "b")),
            "h2o 20% fair prefill as described spans a+b",
        ),
        (Condition("snapkv", 64, regime="decode cap", switches=(("window", 8),)), "snapkv C=64 decode cap window=8"),
    ],
)
def test_labels_are_short(condition, label):
    assert condition.label == label


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("some text", {}), "prompt 'some text' is text: give token ids"),
        ((list("some text"), {}), "prompt 'some text' is text"),
        (([1, 2, 3], {"a": [1, 3]}), "a at position 3 of a prompt of 3 tokens"),
        (([1, 2, 3], {"a": [-1, 0]}), "a at position -1 of a prompt of 3 tokens"),
        (([1, 2, 3], {}, {"user": 3}), "user at position 3 of a prompt of 3 tokens"),
    ],
)
def test_prompts_that_cannot_be_are_refused(given, words):
    with pytest.raises(InputError, match=words):
        Prompt(*given)


def test_an_empty_span_is_a_span():
    assert Prompt([1, 2, 3], {"a": [], "b": [0, 2]}, {"user": 1}).spans["a"] == []
