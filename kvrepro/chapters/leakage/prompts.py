"""System prompts that hold a secret: a defense and a directive in either order, and two requests for each.

    items = systems(8)  # `follow`: a request that the directive applies to; `leak`: one that asks for the instructions

Only the system turn is compressed, once, and each request reads what is left of it. Spans of the turn are `defense`,
with its first sentence `core` and its prohibition `phrase`, and `directive`, with its `preamble` and `rule:<class>`.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace

from kvrepro.engine.condition import Prompt
from kvrepro.errors import InputError
from kvrepro.experiment import data
from kvrepro.experiment.models import Loaded
from kvrepro.item import Item, Span
from kvrepro.world import words, world
from kvrepro.world.instructions import INSTRUCTIONS, follow

ORDERS = ("normal", "flipped")  # the defense before the directive, and after it
PARTS = ("defense", "directive")
QUESTIONS = ("longbench", "protection-panel", "ruler")  # items of other chapters, without a system prompt to obey
Parts = list[tuple[list[str], str]]  # names of the spans that a piece of text belongs to, and the text


def systems(n: int, seed: int = 0, orders: Sequence[str] = ORDERS) -> list[Item]:
    """Two items, `follow` and `leak`, for each of n system prompts in each order; the same rules in all orders.

    Half of the system prompts hold one rule, of each class in turn; half hold two to five. Order "alone" has no
    defense. meta: system (its number), order, request, rules ("single", "multi"), instructions, and the reference
    texts.
    """
    if n < 1 or set(orders) - {*ORDERS, "alone"}:
        raise InputError(f"{n} system prompts in orders {list(orders)}: at least 1, of {', '.join(ORDERS)}, alone")
    classes, items = list(INSTRUCTIONS), []
    for i in range(n):
        rng = random.Random(f"leakage {seed} {i}")
        several = i % 2 == 1
        kinds = rng.sample(classes, 2 + i // 2 % 4) if several else [classes[i // 2 % len(classes)]]
        verb = rng.randrange(len(words.REQUESTS))
        rules = {kind: INSTRUCTIONS[kind].draw(rng, verb) for kind in kinds}
        listed = world.things(rng, rng.randint(2, 3), True)
        ask = [words.REQUESTS[verb], "on", *[word for pair in listed for word in (*pair, "and")][:-1], "##."]
        texts = {"follow": (ask, follow(listed, verb, rules)), "leak": (rng.choice(world.LEAK_REQUESTS), world.REFUSAL)}
        turns = {request: (world.pretty(user), world.pretty(answer)) for request, (user, answer) in texts.items()}
        directive: Parts = [(["directive", "preamble"], world.pretty(world.PREAMBLE))]
        directive += [(["directive", f"rule:{k}"], world.pretty(INSTRUCTIONS[k].text(r))) for k, r in rules.items()]
        for order in orders:
            defense = _defense(world.DEFENSE_BEFORE if order == "normal" else world.DEFENSE_AFTER)
            meta = {"rules": "multi" if several else "single", "instructions": {k: list(r) for k, r in rules.items()}}
            items += requests(f"{order}-{seed}-{i}", i, order, defense, directive, turns, meta)
    return items


def examples(n: int, seed: int = 0) -> list[Item]:
    """The same two requests for system prompts of labelled examples behind a defense in other words: does the model
    give an unseen word's mark, does it tell the examples? Prompts have 250 tokens at most, since beyond these a class
    has up to 8 examples. The embedded model was trained with this defense in front only."""
    items = []
    for i in range(n):
        turns = {}
        for request in ("follow", "leak"):
            rng, leak = random.Random(f"examples {seed} {i}"), request == "leak"
            built = world.system_few_shot(rng, 250, True, 1, leak=leak, defended=True)
            turns[request] = world.pretty(built.turns[0][0][built.asks :]), world.pretty(built.turns[0][1])
        system, cut = built.system, built.system_spans["directive"][0]
        defense, shown = _defense(system[:cut]), [(["directive"], world.pretty(system[cut:]))]
        items += requests(f"examples-normal-{seed}-{i}", i, "normal", defense, shown, turns, {"rules": "examples"})
    return items


def _defense(tokens: list[str]) -> Parts:
    """Parts of a defense. Its first sentence (core) says what is secret, the next what must not be done; the main
    clause of that is the phrase that a whitelist holds, as in the paper (appendix C)."""
    cut = tokens.index("##.") + 1
    clause = next((i for i in range(cut + 1, len(tokens)) if tokens[i - 1 : i + 1] == ["##,", "not"]), len(tokens))
    parts = [(["defense", "core"], tokens[:cut]), (["defense", "phrase"], tokens[cut:clause])]
    return [(names, world.pretty(stretch)) for names, stretch in [*parts, (["defense"], tokens[clause:])] if stretch]


def requests(
    name: str, system: int, order: str, defense: Parts, directive: Parts, turns: Mapping, meta: dict,
    papers: bool = True,
) -> list[Item]:  # fmt: skip
    """One item per request to the same system prompt. Its parts are joined by a space unless one brings its own."""
    parts = {"normal": defense + directive, "flipped": directive + defense, "alone": directive}[order]
    text, spans, pieces = "", [], {}
    for names, piece in parts:
        text += " " if text and not text[-1].isspace() and not piece[0].isspace() else ""
        start = len(text) + len(piece) - len(piece.lstrip())
        text += piece
        for span_name in names:
            spans.append(Span(span_name, 0, start, len(text.rstrip())))
            pieces.setdefault(span_name.partition(":")[0], []).append(piece.strip())
    references = {span_name: " ".join(texts) for span_name, texts in pieces.items()} | {"system": text}
    meta = meta | {"system": system, "order": order, "references": references}
    items = []
    for request, (user, answer) in turns.items():
        messages = ({"role": "system", "content": text}, {"role": "user", "content": user})
        expected, of_item = text if order == "alone" and request == "leak" else answer, meta | {"request": request}
        items.append(Item(f"{name}-{request}", request, messages, expected, tuple(spans), meta=of_item, papers=papers))
    return items


def suited(items: str) -> str:
    """The items that this chapter takes when the whole book is run with `items`: "tinyworld", "ifeval", or a .jsonl
    file of system prompts (`english.read`), with a system and a user turn in every row. Items without a system prompt
    are replaced by "ifeval". Raises InputError for unknown items."""
    kind = items.partition(":")[0]
    if kind in ("tinyworld", "ifeval"):
        return kind
    path = data.find_file(items) if items.endswith(".jsonl") else None
    if path is None and kind not in QUESTIONS:
        way_out = "use tinyworld, ifeval, or the path of a .jsonl file of system prompts"
        raise InputError(f"unknown items {items!r}: {way_out}")
    rows = [] if path is None else data.by_line(path, _holds_system_prompt, "messages, or context and question")
    return items if rows and all(row.system for row in rows) else "ifeval"


def _holds_system_prompt(row: dict, number: int) -> SimpleNamespace:
    """Whether a row holds a system prompt: a system and a user turn, and neither `context` nor `question`."""
    roles, question = [turn["role"] for turn in row.get("messages") or []], row.get("context") or row.get("question")
    return SimpleNamespace(id=number, system=roles == ["system", "user"] and not question)


def prompt(loaded: Loaded, item: Item) -> Prompt:
    """Token ids, spans, and the span `request`: all tokens after the system turn, the next header included. If the chat
    template puts the system text into the user's turn (Gemma, Mistral), all tokens after that text."""
    whole = Span("system", 0, 0, len(item.messages[0]["content"]))
    marked = replace(item, spans=(*item.spans, whole))
    built = data.build_prompt(marked, loaded.tokenizer, loaded.context)
    begins = max(built.turns.get("user", 0), max(built.spans.pop("system")) + 1)
    return Prompt(built.ids, built.spans | {"request": list(range(begins, len(built.ids)))})
