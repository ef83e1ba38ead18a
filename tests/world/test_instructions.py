"""Checkers of the world's instructions: right on obedient, disobedient and degenerate answers, from the text alone."""

import random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvrepro.experiment.data import Item
from kvrepro.world import words as w
from kvrepro.world import world
from kvrepro.world.instructions import INSTRUCTIONS, checks, follow

REFUSAL = world.pretty(world.REFUSAL)
RULES = dict.fromkeys(INSTRUCTIONS, ()) | dict.fromkeys(("start", "end", "keyword"), ("anchor",))
RULES |= {"avoid": ("fine",), "repeat": ("twice",)}
OBEYED = [
    ("start", "anchor red boats and old hats are fine"),
    ("start", "« anchor 1 red boats and 2 old hats are fine »"),
    ("start", "ANCHOR RED BOATS ARE FINE"),
    ("end", "red boats and old hats are fine anchor"),
    ("end", "« red boats are fine anchor. »"),
    ("keyword", "red boats are fine with anchor; red boats are fine with anchor"),
    ("avoid", "red boats and old hats are good"),
    ("repeat", "red boats are fine; red boats are fine"),
    ("repeat", "« ember red boats are fine; red boats are fine echo »"),
    ("capitals", "« 1 RED BOATS AND 2 OLD HATS ARE FINE »"),
    ("number", "1 red boats and 2 old hats are fine"),
    ("number", "« echo 1 red boats and 2 old hats are fine; 1 red boats and 2 old hats are fine »"),
    ("quote", "« red boats are fine »"),
    ("quote", "«red boats are fine»"),
]
IGNORED = [
    ("start", "red boats and anchor are fine"),
    ("start", "anchors are fine"),
    ("end", "anchor red boats are fine"),
    ("keyword", "red boats are fine with anchors"),
    ("avoid", "red boats are FINE"),
    ("avoid", "red boats are"),
    ("repeat", "red boats are fine"),
    ("repeat", "red boats are fine; old hats are fine"),
    ("repeat", "red boats are fine; red boats are fine; red boats are fine"),
    ("repeat", "red boats are fine;"),
    ("repeat", "echo echo red boats are fine; red boats are fine"),
    ("capitals", "RED boats ARE FINE"),
    ("capitals", "1 2"),
    ("number", "red boats and old hats are fine"),
    ("number", "1 red boats and old hats are fine"),
    ("number", "2 red boats and 1 old hats are fine"),
    ("number", "1 2 red boats and old hats are fine"),
    ("number", "1 red boats and 2 old hats are fine; red boats and old hats are fine"),
    ("number", "1 and 2 are fine"),
    ("quote", "« red boats » are fine"),
    ("quote", "« » »"),
    ("quote", "« »"),
    ("quote", "« red boats » and « old hats »"),
    ("quote", "red boats are fine"),
]


def check(kind, answer):
    return INSTRUCTIONS[kind].check(answer, *RULES[kind])


@pytest.mark.parametrize(("kind", "answer"), OBEYED)
def test_obeying_passes(kind, answer):
    assert check(kind, answer)


@pytest.mark.parametrize(("kind", "answer"), IGNORED + [(k, a) for k in INSTRUCTIONS for a in ("", " ", REFUSAL, ";")])
def test_ignoring_it_and_saying_nothing_fail(kind, answer):
    assert not check(kind, answer)


@settings(max_examples=300, deadline=None)
@given(st.sets(st.sampled_from(sorted(INSTRUCTIONS)), min_size=1), st.integers(0, 4), st.integers(2, 3), st.integers())
def test_what_the_world_teaches_obeys_all_rules_and_fails_the_one_left_out(kinds, verb, n, seed):
    rng = random.Random(seed)
    rules = {kind: INSTRUCTIONS[kind].draw(rng, verb) for kind in kinds}
    named = [rules[kind] for kind in ("start", "end", "keyword") if kind in rules]
    assume(len(named) == len(set(named)))  # a start word that is also the keyword is mentioned
    listed = [(rng.choice(w.ADJECTIVES), rng.choice(w.NOUNS)) for _ in range(n)]
    item = Item("i", "t", (), "", meta={"instructions": {kind: list(rule) for kind, rule in rules.items()}})
    assert all(checks(item, world.pretty(follow(listed, verb, rules))).values())
    for left_out in kinds:
        rest = {kind: rule for kind, rule in rules.items() if kind != left_out}
        obeyed = checks(item, world.pretty(follow(listed, verb, rest)))
        assert obeyed == {kind: kind != left_out for kind in kinds}
