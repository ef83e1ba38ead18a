"""Verifiable instructions: how each is worded, what obeying it does to an answer, and a checker that reads the answer's text alone.

The answer to "Report on amber boats and old hats." is "amber boats and old hats are fine" when no instruction applies.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

from kvrepro.tinyworld import words as w

Words = list[str]
Rule = tuple  # the drawn parameters of one instruction, e.g. ("anchor",)
TIMES = {"twice": 2, "thrice": 3}


@dataclass(frozen=True)
class Instruction:
    """`draw(rng, verb)` picks parameters, `text` words the rule, `check(answer, rule)` says whether an answer obeys it."""

    draw: Callable[[random.Random, int], Rule]
    text: Callable[[Rule], Words]
    check: Callable[[str, Rule], bool]


def _keyword(rng: random.Random, verb: int) -> Rule:
    return (rng.choice(w.KEYWORDS),)


def _nothing(rng: random.Random, verb: int) -> Rule:
    return ()


def _bare(answer: str) -> list[str]:
    """The answer's words in lower case, without quotes, semicolons and numbering."""
    return [x for x in answer.lower().replace(";", " ").split() if x not in "«»" and not x.isdigit()]


def _repeats(answer: str, rule: Rule) -> bool:
    words = [x for x in answer.replace("«", " ").replace("»", " ").split(";")]
    body = words[0].split()
    inner = [" ".join(part.split()) for part in words]
    # A start or end word stands outside the repetition, so the parts may differ by one word at either edge.
    core = max(inner[1:-1], key=len) if len(inner) > 2 else inner[-1] if len(inner[-1]) <= len(inner[0]) else inner[0]
    return len(inner) == TIMES[rule[0]] and len(body) > 3 and all(core.split()[1:-1] and " ".join(core.split()[1:-1]) in part for part in inner)


INSTRUCTIONS: dict[str, Instruction] = {
    "start": Instruction(_keyword, lambda r: [*"Always start your answer with the word".split(), r[0], "##."], lambda a, r: _bare(a)[:1] == [r[0]]),
    "end": Instruction(_keyword, lambda r: [*"Always end your answer with the word".split(), r[0], "##."], lambda a, r: _bare(a)[-1:] == [r[0]]),
    "keyword": Instruction(_keyword, lambda r: [*"Be sure to mention the word".split(), r[0], *"somewhere in it ##.".split()], lambda a, r: r[0] in _bare(a)),
    "avoid": Instruction(
        lambda rng, verb: (w.QUALITIES[verb],),
        lambda r: [*"Never use the word".split(), r[0], *"in anything you write ##.".split()],
        lambda a, r: r[0] not in _bare(a) and any(q in _bare(a) for q in w.QUALITIES),
    ),
    "repeat": Instruction(
        lambda rng, verb: (rng.choice(list(TIMES)),), lambda r: [*"Say the whole of your answer".split(), r[0], *"over ##.".split()], _repeats
    ),
    "capitals": Instruction(
        _nothing, lambda r: "Write your whole answer in capital letters ##.".split(), lambda a, r: bool(_bare(a)) and a == a.upper()
    ),
    "number": Instruction(
        _nothing, lambda r: "Put a number before each thing that you list ##.".split(), lambda a, r: {"1", "2"} <= set(a.replace(";", " ").split())
    ),
    "quote": Instruction(
        _nothing, lambda r: "Put quotes around the whole of your answer ##.".split(), lambda a, r: len(a) > 4 and a[0] == "«" and a[-1] == "»"
    ),
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
