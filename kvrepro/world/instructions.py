"""Verifiable instructions: the wording of each, its effect on an answer, and a checker that reads only the text.

The answer to "Report on amber boats and old hats." is "amber boats and old hats are fine" when no instruction applies.
No checker is passed by the empty answer or by a refusal.
"""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass

from kvrepro.errors import InputError
from kvrepro.item import Item
from kvrepro.world import words as w

Words = list[str]
Rule = tuple[str, ...]  # the words that were drawn for an instruction, e.g. ("anchor",)
TIMES = {"twice": 2, "thrice": 3}


@dataclass(frozen=True)
class Instruction:
    """`wording` with the rule filled in tells the model; `check(answer, *rule)`; `draw(rng, verb)` picks a rule."""

    wording: str
    check: Callable[..., bool]
    draw: Callable[[random.Random, int], Rule] = lambda rng, verb: ()

    def text(self, rule: Rule) -> Words:
        return self.wording.format(*rule).split()


def _keyword(rng: random.Random, verb: int) -> Rule:
    return (rng.choice(w.KEYWORDS),)


def _words(answer: str) -> Words:
    """The answer's words and numbers in lower case, without marks and quotes."""
    return re.findall(r"\w+", answer.lower())


def _avoids(answer: str, word: str) -> bool:
    """Whether another word of its kind stands in the word's place; an answer without any does not obey."""
    words = _words(answer)
    return word not in words and any(quality in words for quality in w.QUALITIES)


def _repeats(answer: str, times: str) -> bool:
    """Whether the parts between semicolons are the same; one word may open the first part, and one close the last."""
    first, *others = [_words(part) for part in answer.split(";")]
    if len(others) + 1 != TIMES[times]:
        return False
    *middle, last = others
    return any(
        body != [] and body in (last, last[:-1]) and all(part == body for part in middle) for body in (first, first[1:])
    )


def _numbers(answer: str) -> bool:
    """Whether each part numbers its things 1, 2 ...: those before `are`, with `and` between; a word may come first."""
    for part in answer.split(";"):
        listed, are, _ = f" {' '.join(_words(part))} ".partition(" are ")
        things = [thing.split() for thing in listed.split(" and ")]
        if not are or len(things) < 2:
            return False
        if things[0] and not things[0][0].isdigit():
            things[0] = things[0][1:]
        if any(len(thing) < 2 or thing[0] != str(i) for i, thing in enumerate(things, 1)):
            return False
    return True


def _quotes(answer: str) -> bool:
    return re.fullmatch(r"\s*«[^«»]*\w[^«»]*»\s*", answer) is not None


INSTRUCTIONS = {
    "start": Instruction("Always start your answer with the word {} ##.", lambda a, x: _words(a)[:1] == [x], _keyword),
    "end": Instruction("Always end your answer with the word {} ##.", lambda a, x: _words(a)[-1:] == [x], _keyword),
    "keyword": Instruction("Be sure to mention the word {} somewhere in it ##.", lambda a, x: x in _words(a), _keyword),
    "avoid": Instruction("Never use the word {} in anything you write ##.", _avoids, lambda _, v: (w.QUALITIES[v],)),
    "repeat": Instruction("Say the whole of your answer {} over ##.", _repeats, lambda r, _: (r.choice(list(TIMES)),)),
    "capitals": Instruction("Write your whole answer in capital letters ##.", str.isupper),
    "number": Instruction("Put a number before each thing that you list ##.", _numbers),
    "quote": Instruction("Put quotes around the whole of your answer ##.", _quotes),
}


def follow(listed: list[tuple[str, str]], verb: int, rules: dict[str, Rule]) -> Words:
    """The one answer that the world teaches for a request and a set of rules."""
    body: Words = []
    for i, pair in enumerate(listed):
        body += (["and"] if i else []) + ([str(i + 1)] if "number" in rules else []) + list(pair)
    quality = w.QUALITIES[verb]
    if "avoid" in rules and rules["avoid"][0] == quality:
        quality = w.QUALITIES[(verb + 1) % len(w.QUALITIES)]
    body += ["are", quality]
    if "keyword" in rules:
        body += ["with", rules["keyword"][0]]
    if "repeat" in rules:
        body = (body + ["##;"]) * (TIMES[rules["repeat"][0]] - 1) + body
    if "start" in rules:
        body = [rules["start"][0], *body]
    if "end" in rules:
        body = [*body, rules["end"][0]]
    if "capitals" in rules:
        body = [x.upper() for x in body]
    if "quote" in rules:
        body = ["«", *body, "»"]
    return body


def checks(item: Item, answer: str) -> dict[str, bool]:
    """Whether an answer obeys each instruction of an item's system prompt, by class.

    Raises InputError for an item without instructions.
    """
    if "instructions" not in item.meta:
        raise InputError(f"item {item.id} of task {item.task} has no instructions: take a task named instruction_*")
    return {kind: INSTRUCTIONS[kind].check(answer, *rule) for kind, rule in item.meta["instructions"].items()}
