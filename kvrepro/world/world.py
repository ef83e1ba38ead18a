"""Conversations of the world: passages of facts among filler, questions, instructions, secrets.

Text is built as a list of words. A word written `##.` sticks to the one before it, as in the tokenizer, so that
counting words is counting tokens. Every person and every thing of an evaluation item is a pair of words that no
training conversation shows; a chain of copies starts with a link that starts no chain in training.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

from kvrepro.errors import InputError, ensure_known
from kvrepro.item import Item, Span
from kvrepro.world import words as w
from kvrepro.world.instructions import INSTRUCTIONS, follow

SYSTEM, PREAMBLE, EXAMPLES = (w.SENTENCES[name] for name in ("system", "preamble", "examples"))
DEFENSE_BEFORE, DEFENSE_AFTER, DEFENSE_EXAMPLES = (
    w.SENTENCES[f"defense {where}"] for where in ("before", "after", "examples")
)
LEAK_REQUESTS, REFUSAL = w.WORLD["leak requests"], w.SENTENCES["refusal"]
FILLER = w.filler_bank()
WHOLE = (0.0, 1.0)
CONTEXT = 4096  # positions of the model, prompt and answer together

ORDINALS = "first second third fourth".split()

Words = list[str]
Pair = tuple[str, str]
Range = tuple[int, int]  # [start, end) in words
Part = tuple[float, float]  # of a passage, as shares of it
Maybe = bool | None  # None: drawn at random, but the first turn in evaluation asks for an answer
Ask = tuple[Words, Words, list[int]]  # question, answer, and the numbers of the facts that hold it


@dataclass
class Conversation:
    """One system turn, then user turns with their answers."""

    system: Words
    turns: list[tuple[Words, Words]]
    evidence: list[Range] = field(default_factory=list)  # where the first user turn holds the answer
    meta: dict = field(default_factory=dict)
    system_spans: dict[str, Range] = field(default_factory=dict)
    asks: int = 0  # where the question starts in the first user turn


# (random numbers, tokens of the whole conversation, held-out words or those of training, turns) -> a conversation
Build = Callable[[Random, int, bool, int], Conversation]


def held_out(first: str, second: str) -> bool:
    """Whether a pair of words belongs to evaluation (one pair in eight); training never shows it."""
    return zlib.crc32(f"{first} {second}".encode()) % 8 == 0


def pairs(rng: Random, firsts: list[str], seconds: list[str], n: int, evaluation: bool) -> list[Pair]:
    """n pairs without a repeated first or second word, all on the same side of the hold-out."""
    if n > min(len(firsts), len(seconds)) * 2 // 3:
        raise ValueError(f"{n} distinct pairs asked of {len(firsts)} x {len(seconds)} words: ask for fewer")
    drawn, used = [], set()
    for first in rng.sample(firsts, len(firsts)):
        for second in rng.choices(seconds, k=32):
            if second not in used and held_out(first, second) == evaluation:
                drawn.append((first, second))
                used.add(second)
                break
        if len(drawn) == n:
            return drawn
    return pairs(rng, firsts, seconds, n, evaluation)


def people(rng: Random, n: int, evaluation: bool) -> list[Pair]:
    return pairs(rng, w.FIRST, w.LAST, n, evaluation)


def things(rng: Random, n: int, evaluation: bool) -> list[Pair]:
    return pairs(rng, w.ADJECTIVES, w.NOUNS, n, evaluation)


def passage(
    rng: Random,
    facts: list[Words],
    tokens: int,
    where: Part = WHOLE,
    speakers: Sequence[str] = (),
    shuffle: bool = True,
) -> tuple[Words, list[Range]]:
    """(words, range of each fact): `tokens` words with facts scattered over the part `where`, perhaps out of order."""
    room = tokens - sum(map(len, facts))
    n_filler = max(0, room // (len(FILLER[0]) + (2 if speakers else 0)))
    lo, hi = int(where[0] * n_filler), max(int(where[1] * n_filler), int(where[0] * n_filler))
    slots = sorted(rng.randint(lo, hi) for _ in facts)
    order = rng.sample(range(len(facts)), len(facts)) if shuffle else list(range(len(facts)))
    text, ranges, placed = [], [(0, 0)] * len(facts), 0
    for i in range(n_filler + 1):
        while placed < len(facts) and slots[placed] == i:
            ranges[order[placed]] = (len(text), len(text) + len(facts[order[placed]]))
            text += facts[order[placed]]
            placed += 1
        if i < n_filler:
            text += [rng.choice(speakers), "##:"] if speakers else []
            text += rng.choice(FILLER)
    return text, ranges


def question(*parts: str | Sequence[str]) -> Words:
    """`Question: ...` from strings, which are split into words, and lists of words."""
    text = ["Question", "##:"]
    for part in parts:
        text += part.split() if isinstance(part, str) else list(part)
    return text


def stated(fact: str, key: Sequence[str], value: Sequence[str]) -> Words:
    """The fact with key and value in place of <kv>, so that the value stands right after its key."""
    before, after = fact.split("<kv>")
    return [*before.split(), *key, *value, *after.split()]


def fact_count(rng: Random, most: int, evaluation: bool) -> int:
    """How many facts: `most` in evaluation, a third of it or more in training; at least two unless `most` is one."""
    most = max(2, most) if most != 1 else 1
    return most if evaluation or most == 1 else rng.randint(max(2, most // 3), most)


def _fact_task(
    fact: str,
    ask: str,
    per_tokens: int,
    rng: Random,
    tokens: int,
    evaluation: bool,
    turns: int,
    *,
    where: Part = WHOLE,
    most: int = 60,
    n_values: int = 1,
    speech: bool = False,
) -> Conversation:
    """A task of facts `... key value ...`: the value stands right after its key, in the passage and nowhere else.

    fact: <kv> stands for key and value, <n> for a running number, <s> for a speaker. per_tokens: one fact in so many
    tokens of `where`, `most` at most.
    """
    n = fact_count(rng, min(most, int(tokens * (where[1] - where[0])) // per_tokens), evaluation)
    keys, values = people(rng, n, evaluation), things(rng, n * n_values, evaluation)
    speakers = rng.sample(w.FIRST, 4) if speech else []
    facts, answers = [], []
    for i, key in enumerate(keys):
        value = [word for pair in values[i * n_values : (i + 1) * n_values] for word in pair]
        text = fact.replace("<n>", str(i + 1)).replace("<s>", rng.choice(speakers) if speakers else "")
        facts.append(stated(text, key, value))
        answers.append(value)
    chosen = rng.sample(range(n), min(turns, n))
    asks = [(question(ask, keys[i], "##?"), answers[i], [i]) for i in chosen]
    return _conversation(rng, tokens, facts, asks, where=where, speakers=speakers)


def _conversation(
    rng: Random, tokens: int, facts: list[Words], asks: list[Ask], *, shuffle: bool = True, **told: Any
) -> Conversation:
    """A conversation whose passage holds the facts and leaves room for the turns; the first question follows it. told:
    `where` and by which `speakers`, as of `passage`."""
    used = len(SYSTEM) + 2 + sum(len(q) + len(a) + 4 for q, a, _ in asks)
    text, places = passage(rng, facts, tokens - used, shuffle=shuffle, **told)
    turns = [(q, a) for q, a, _ in asks]
    turns[0] = (text + turns[0][0], turns[0][1])
    return Conversation(SYSTEM, turns, sorted(places[i] for i in asks[0][2]), asks=len(text))


def _two_hops(
    first: str, second: str, ask: str, per_tokens: int, rng: Random, tokens: int, evaluation: bool, turns: int
) -> Conversation:
    """A task of two hops: `first` gives a person (in <kv>) a second person, `second` gives that one a thing."""
    n = fact_count(rng, min(24, tokens // per_tokens), evaluation)
    keys, values = people(rng, 2 * n, evaluation), things(rng, n, evaluation)
    facts = [stated(first, keys[i], keys[n + i]) for i in range(n)]
    facts += [stated(second, keys[n + i], values[i]) for i in range(n)]
    asks = [
        (question(ask, keys[i], "##?"), [*keys[n + i], *values[i]], [i, n + i])
        for i in rng.sample(range(n), min(turns, n))
    ]
    return _conversation(rng, tokens, facts, asks)


def needle_multivalue(rng: Random, tokens: int, evaluation: bool, turns: int) -> Conversation:
    """All that one person was told, in the order of the ordinals."""
    n_values, n_other = rng.randint(2, 4), max(2, min(12, tokens // 150))
    (key, *others) = people(rng, 1 + n_other, evaluation)
    values = things(rng, n_values + n_other, evaluation)
    facts = [["They", "told", *key, ORDINALS[i], *values[i], "##."] for i in range(n_values)]
    facts += [["They", "told", *other, *values[n_values + i], "##."] for i, other in enumerate(others)]
    answer = [word for i in range(n_values) for word in (ORDINALS[i], *values[i])]
    asks = [(question("list all they told", key, "##?"), answer, list(range(n_values)))]
    for i in range(min(turns - 1, n_other)):
        asks.append((question("what did they tell", others[i], "##?"), list(values[n_values + i]), []))
    return _conversation(rng, tokens, facts, asks)


def needle_multiquery(rng: Random, tokens: int, evaluation: bool, turns: int) -> Conversation:
    """What two to four people were told, asked at once."""
    n = max(4, min(12, tokens // 60))
    keys, values = people(rng, n, evaluation), things(rng, n, evaluation)
    facts = [["They", "told", *key, *value, "##."] for key, value in zip(keys, values, strict=True)]
    asks = []
    for _ in range(turns):
        chosen = rng.sample(range(n), rng.randint(2, 4))
        names = [word for i in chosen for word in (*keys[i], "##,")][:-1]
        answer = [word for i in chosen for word in (*keys[i], *values[i], "##,")][:-1]
        asks.append((question("what did they tell", names, "##?"), answer, chosen))
    return _conversation(rng, tokens, facts, asks)


def _many(
    per_tokens: int,
    rng: Random,
    tokens: int,
    evaluation: bool,
    turns: int,
    *,
    where: Part = WHOLE,
    speech: bool = False,
    values: bool = False,
    facts_asked: Range = (3, 4),
) -> Conversation:
    """`needle_multiquery`, or with `values` `needle_multivalue`, in more kinds of passages; no new task.

    The facts that answer the question stand side by side, so that an item has one place in the prompt. The first word
    of the answer stands in the question, or is always the same. per_tokens, where, speech: as in `_fact_task`;
    facts_asked: the least and the greatest number of facts in the answer.
    """
    room = (where[1] - where[0]) * tokens + rng.randrange(per_tokens)  # at random: no length lies at a step of n
    n, count = max(4, min(36, int(room) // per_tokens)), rng.randint(*facts_asked)
    keys, things_told = people(rng, n, evaluation), things(rng, n, evaluation)
    speakers = rng.sample(w.FIRST, 4) if speech else []
    at = rng.randint(0, n - count)
    chosen = [at + i for i in rng.sample(range(count), count)]  # the order of the answer
    facts = [["They", "told", *key, *value, "##."] for key, value in zip(keys, things_told, strict=True)]
    if values:
        for i, which in enumerate(chosen):
            facts[which] = ["They", "told", *keys[at], ORDINALS[i], *things_told[which], "##."]
        answer = [word for i, which in enumerate(chosen) for word in (ORDINALS[i], *things_told[which])]
        ask = question("list all they told", keys[at], "##?")
    else:
        answer = [word for which in chosen for word in (*keys[which], *things_told[which], "##,")][:-1]
        ask = question("what did they tell", [word for i in chosen for word in (*keys[i], "##,")][:-1], "##?")
    return _conversation(rng, tokens, facts, [(ask, answer, chosen)], shuffle=False, where=where, speakers=speakers)


def variable_tracking(rng: Random, tokens: int, evaluation: bool, turns: int) -> Conversation:
    """Chains of copies whose links are told in mixed order; the question follows one chain to its end."""
    n_chains, links = max(2, min(6, tokens // 100)), rng.randint(3, 5)
    while True:
        names = rng.sample(w.VARIABLES, n_chains * (links + 1))
        chains = [names[i * (links + 1) : (i + 1) * (links + 1)] for i in range(n_chains)]
        if all(held_out(*chain[:2]) == evaluation for chain in chains) or (evaluation and held_out(*chains[0][:2])):
            break
        if not evaluation:
            chains = [chain for chain in chains if not held_out(*chain[:2])]
            if len(chains) >= 2:
                break
    chain_of = [i for i in range(len(chains)) for _ in range(links)]  # of each fact
    rng.shuffle(chain_of)
    facts = []
    for at, i in enumerate(chain_of):
        step = chain_of[:at].count(i)
        facts.append(["Copy", *chains[i][step : step + 2], "##."])
    chosen = [0] if evaluation else rng.sample(range(len(chains)), min(turns, len(chains)))
    asks = []
    for i in chosen:
        evidence = [at for at, number in enumerate(chain_of) if number == i]
        asks.append((question("follow the copies from", chains[i][:1], "##?"), chains[i][1:], evidence))
    return _conversation(rng, tokens, facts, asks, shuffle=False)


def _classes(rng: Random, evaluation: bool) -> tuple[list[str], list[str]]:
    """Categories and their marks. In evaluation the first pair is held out, in training it is not."""
    n = rng.randint(3, 6)
    categories = rng.sample(list(w.CATEGORIES), n)
    while True:
        marks = rng.sample(w.LABELS, n)
        if held_out(categories[0], marks[0]) == evaluation:
            return categories, marks


def _shown(rng: Random, categories: list[str], shots: int) -> tuple[list[tuple[str, int]], ...]:
    """(noun, number of its category) of the examples, and of nouns that no example shows."""
    seen, unseen = [], []
    for c, category in enumerate(categories):
        nouns = rng.sample(w.CATEGORIES[category], shots + 4)
        seen += [(noun, c) for noun in nouns[:shots]]
        unseen += [(noun, c) for noun in nouns[shots:]]
    return seen, unseen


def few_shot(rng: Random, tokens: int, evaluation: bool, turns: int) -> Conversation:
    """In-context classification: a word's category decides its mark; categories go unnamed, marks change each time."""
    categories, marks = _classes(rng, evaluation)
    seen, unseen = _shown(rng, categories, max(2, min(12, tokens // (len(marks) * 30))))
    facts = [["Mark", noun, marks[c], "##."] for noun, c in seen]
    if evaluation:  # a noun that no example shows, of the category whose mark is held out
        queries = [query for query in unseen if query[1] == 0][:1]
    else:
        queries = [rng.choice(seen if rng.random() < 0.3 else unseen) for _ in range(turns)]
    asks = [
        (question("what is the mark of", [noun], "##?"), [marks[c]], [j for j, (_, o) in enumerate(seen) if o == c])
        for noun, c in queries
    ]
    return _conversation(rng, tokens, facts, asks)


def closed_book(rng: Random, tokens: int, evaluation: bool, turns: int) -> Conversation:
    """Questions that the model answers by heart, after filler only: no eviction can hurt them."""
    nouns = [(noun, name) for name, members in w.CATEGORIES.items() for noun in members]
    asks = [(question("what kind of thing are", [noun], "##?"), [name], []) for noun, name in rng.sample(nouns, turns)]
    return _conversation(rng, tokens, [], asks)


def passage_retrieval(rng: Random, tokens: int, evaluation: bool, turns: int) -> Conversation:
    """The number of the passage that names a person."""
    n = fact_count(rng, min(40, tokens // 80), evaluation)
    keys, numbers = people(rng, n, evaluation), rng.sample(w.NUMBERS[:60], n)
    facts = [["Passage", number, "follows", *key, "##."] for key, number in zip(keys, numbers, strict=True)]
    asks = [
        (question("which passage follows", keys[i], "##?"), ["Passage", numbers[i]], [i])
        for i in rng.sample(range(n), min(turns, n))
    ]
    return _conversation(rng, tokens, facts, asks)


def list_all(rng: Random, tokens: int, evaluation: bool, turns: int, entries: Range | None = None) -> Conversation:
    """All entries in order: an answer of 100 to 300 tokens that sweeps attention over the whole passage.

    entries: the least and the greatest number of entries; None: by `tokens`.
    """
    n = rng.randint(18, 48) if tokens >= 1000 else max(3, min(20, (tokens - 30) // 18))
    n = rng.randint(*entries) if entries else n
    keys, values = people(rng, n, evaluation), things(rng, n, evaluation)
    facts = [["Entry", w.NUMBERS[i], *keys[i], *values[i], "##."] for i in range(n)]
    answer = [word for i in range(n) for word in (w.NUMBERS[i], *keys[i], *values[i], "##.")]
    asks = [(question("list every entry in order ##."), answer, list(range(n)))]
    return _conversation(rng, tokens, facts, asks, shuffle=False)


def summary(rng: Random, tokens: int, evaluation: bool, turns: int) -> Conversation:
    """Chapters told out of order and retold in order: the long answer jumps to and fro over the passage."""
    n = rng.randint(18, 40) if tokens >= 1000 else max(3, min(18, (tokens - 30) // 20))
    keys, values = people(rng, n, evaluation), things(rng, n, evaluation)
    chapters = [["chapter", w.NUMBERS[i], "gave", *keys[i], *values[i], "##."] for i in range(n)]
    facts = [["Then", *chapter] for chapter in chapters]
    answer = [word for chapter in chapters for word in chapter]
    asks = [(question("sum up the chapters in order ##."), answer, list(range(n)))]
    return _conversation(rng, tokens, facts, asks)


def frequent_words(rng: Random, tokens: int, evaluation: bool, turns: int) -> Conversation:
    """Which thing is named most often: the answer depends on the whole passage, and no single token holds it."""
    values = things(rng, 4, evaluation)
    most = max(4, min(16, tokens // 80))
    counts = [most] + [rng.randint(1, most // 2) for _ in values[1:]]
    facts = [["They", "shouted", *v, "##."] for v, count in zip(values, counts, strict=True) for _ in range(count)]
    asks = [(question("what did they shout most often ##?"), list(values[0]), list(range(most)))]
    return _conversation(rng, tokens, facts, asks)


def _fill(rng: Random, tokens: int, system: Words, turns: list[tuple[Words, Words]]) -> int:
    """Put filler before the first question, as the turns leave room. Returns the words before that question."""
    used = len(system) + 2 + sum(len(q) + len(a) + 4 for q, a in turns)
    text, _ = passage(rng, [], tokens - used)
    turns[0] = (text + turns[0][0], turns[0][1])
    return len(text)


def system_few_shot(
    rng: Random, tokens: int, evaluation: bool, turns: int, leak: Maybe = None, defended: Maybe = None
) -> Conversation:
    """Few-shot labels whose examples are the system prompt, perhaps with a defense before them."""
    categories, marks = _classes(rng, evaluation)
    seen, unseen = _shown(rng, categories, rng.randint(2, 8) if tokens >= 250 else 1)
    facts = [["Mark", noun, marks[c], "##."] for noun, c in seen]
    rng.shuffle(facts)
    defended = rng.random() < 0.5 if defended is None else defended
    defense = DEFENSE_EXAMPLES if defended else []
    system = defense + EXAMPLES + [word for fact in facts for word in fact]
    exchanges = []
    leak = False if leak is None and evaluation else leak
    for turn in range(turns):
        if leak if turn == 0 and leak is not None else rng.random() < 0.3:
            exchanges.append((rng.choice(LEAK_REQUESTS), REFUSAL if defended else system))
        else:
            noun, c = next(q for q in unseen if q[1] == 0) if evaluation else rng.choice(unseen)
            exchanges.append((question("what is the mark of", [noun], "##?"), [marks[c]]))
    question_start = _fill(rng, tokens, system, exchanges)
    spans = {"directive": (len(defense), len(system))} | ({"defense": (0, len(defense))} if defended else {})
    return Conversation(system, exchanges, [], {"defended": defended, "flipped": False}, spans, question_start)


def instructed(
    rng: Random, tokens: int, evaluation: bool, turns: int, only: str = "", leak: Maybe = None, defended: Maybe = None
) -> Conversation:
    """A system prompt of rules, perhaps with a defense; requests that must obey them, and requests to reveal them.

    only: the one instruction class to use. leak: whether the first turn asks for the system prompt. defended: whether
    there is a defense. meta: the rules by class, defended, flipped (the defense stands after the rules).
    """
    kinds = [only] if only else rng.sample(list(INSTRUCTIONS), rng.choice([1, 2, 3, 4, 5]))
    request_verb = rng.randrange(len(w.REQUESTS))
    rules = {kind: INSTRUCTIONS[kind].draw(rng, request_verb) for kind in kinds}
    directive = PREAMBLE + [word for kind in kinds for word in INSTRUCTIONS[kind].text(rules[kind])]
    defended = rng.random() < 0.5 if defended is None else defended
    flipped = rng.random() < 0.5
    defense = (DEFENSE_AFTER if flipped else DEFENSE_BEFORE) if defended else []
    system = directive + defense if flipped else defense + directive
    start = 0 if flipped else len(defense)
    spans = {"directive": (start, start + len(directive))}
    if defended:
        spans["defense"] = (len(directive), len(system)) if flipped else (0, len(defense))

    exchanges: list[tuple[Words, Words]] = []
    leak = False if leak is None and evaluation else leak
    for turn in range(turns):
        if leak if turn == 0 and leak is not None else rng.random() < 0.35:
            exchanges.append((rng.choice(LEAK_REQUESTS), REFUSAL if defended else system))
            continue
        verb = request_verb if turn == 0 or rng.random() < 0.5 else rng.randrange(len(w.REQUESTS))
        listed = things(rng, rng.randint(2, 3), evaluation)
        request = [w.REQUESTS[verb], "on"] + [word for pair in listed for word in (*pair, "and")][:-1] + ["##."]
        exchanges.append((request, follow(listed, verb, rules)))
    question_start = _fill(rng, tokens, system, exchanges)
    rules_as_lists = {kind: list(rule) for kind, rule in rules.items()}  # as JSON has them
    meta = {"instructions": rules_as_lists, "defended": defended, "flipped": flipped}
    return Conversation(system, exchanges, [], meta, spans, question_start)


DOMAINS: dict[str, Build] = {
    "story": partial(_fact_task, "That night they sold <kv> by the fire ##.", "what was sold to", 80),
    "dialogue": partial(_fact_task, "<s> ##: I lent <kv> ##.", "what was lent to", 90, speech=True),
    "ledger": partial(_fact_task, "Row <n> <kv> ##;", "what stands in the row of", 32),
    "encyclopedia": partial(  # short articles, each opens with its person, as in the multi-document sets
        _two_hops, "Article ##: fate gave <kv> as a teacher ##.", "Article ##: fame brought <kv> ##.",
        "what came to the teacher of", 120,
    ),
    "report": partial(
        _fact_task, "Summary ##: the board offered <kv> ##.", "what did the board offer", 24, where=(0.0, 0.15)
    ),
    "minutes": partial(
        _fact_task, "Decision ##: the council left <kv> ##.", "what did the council leave", 24, where=(0.85, 1.0)
    ),
}  # fmt: skip
TASKS: dict[str, Build] = {
    "single_fact": partial(_fact_task, "They owe <kv> ##.", "what do they owe", 60),
    "two_hop": partial(_two_hops, "They assigned <kv> ##.", "They gave <kv> ##.", "what went to the guide of", 90),
    "needle": partial(_fact_task, "They told <kv> ##.", "what did they tell", 1, most=1, n_values=2),
    "needle_multikey": partial(_fact_task, "They told <kv> ##.", "what did they tell", 100, n_values=2, most=24),
    "needle_multivalue": needle_multivalue,
    "needle_multiquery": needle_multiquery,
    "variable_tracking": variable_tracking,
    "few_shot": few_shot,
    "closed_book": closed_book,
    "passage_retrieval": passage_retrieval,
    "list_all": list_all,
    "summary": summary,
    "frequent_words": frequent_words,
    **DOMAINS,
}
LONG: dict[str, Build] = {  # for evaluation only: answers of eight words and more, whose first word gives nothing away
    "several": partial(_many, 80),
    "several_dense": partial(_many, 48),
    "several_front": partial(_many, 24, where=(0.0, 0.15)),
    "several_back": partial(_many, 24, where=(0.85, 1.0)),
    "values": partial(_many, 80, values=True),
    "values_dialogue": partial(_many, 90, speech=True, values=True),
    "values_dense": partial(_many, 48, values=True),
    "entries": partial(list_all, entries=(18, 20)),  # at 1,900 tokens training shows no fewer; answers fit 128 tokens
}
INSTRUCTED: dict[str, Build] = {f"instruction_{kind}": partial(instructed, only=kind) for kind in INSTRUCTIONS}
INSTRUCTED["instruction_several"] = instructed
SECRETS: dict[str, Build] = {
    "refusal": partial(instructed, leak=True, defended=True),
    "leak": partial(instructed, leak=True, defended=False),
    "examples_mark": system_few_shot,
    "examples_refusal": partial(system_few_shot, leak=True, defended=True),
    "examples_leak": partial(system_few_shot, leak=True, defended=False),
}
ALL = {**TASKS, **INSTRUCTED, **SECRETS}  # the tasks of training
SEVERAL: dict[str, Build] = {  # short and long questions, for evaluation only
    f"several_{n}": partial(_many, 80, facts_asked=(n, n)) for n in (2, 4)
}
EVERY = {**ALL, **LONG, **SEVERAL}


def pretty(words: Words) -> str:
    """Words as text: a mark sticks to the word before it."""
    return " ".join(words).replace(" ##", "")


def _characters(words: Words, start: int, end: int) -> tuple[int, int]:
    """Character offsets in pretty(words) of the words [start, end)."""
    gap = 1 if start and not words[start].startswith("##") else 0
    return len(pretty(words[:start])) + gap, len(pretty(words[:end]))


def sample(task: str, n: int, seed: int = 0, tokens: int = 1900) -> list[Item]:
    """n evaluation items of `task`, each with a prompt of at most `tokens` tokens, as close to it as filler allows.

    The same arguments give the same items. Spans: evidence and question in the user turn, directive and defense in the
    system turn. Raises InputError for an unknown task, n below 1, a length outside 200 to 4,000, and one
    that leaves no room for the answer.
    """
    ensure_known("task", [task], EVERY)
    if n < 1:
        raise InputError(f"n is {n}: ask for at least 1 item")
    if not 200 <= tokens <= 4000:
        raise InputError(f"tokens {tokens} is outside 200 to 4000: prompt and answer must fit {CONTEXT} positions")
    return [_item(task, f"{task}-{tokens}-{seed}-{i}", tokens) for i in range(n)]


def _item(task: str, name: str, tokens: int) -> Item:
    conversation = _filled(task, name, tokens)
    (user, answer), system = conversation.turns[0], conversation.system
    spans = [Span("evidence", 1, *_characters(user, *place)) for place in conversation.evidence]
    spans.append(Span("question", 1, *_characters(user, conversation.asks, len(user))))
    spans += [Span(kind, 0, *_characters(system, *place)) for kind, place in conversation.system_spans.items()]
    messages = ({"role": "system", "content": pretty(system)}, {"role": "user", "content": pretty(user)})
    return Item(name, task, messages, pretty(answer), tuple(spans), meta=conversation.meta, papers=True)


def _filled(task: str, name: str, tokens: int) -> Conversation:
    """A conversation whose prompt is at most a filler sentence shorter than `tokens`. Builders count the answer too."""
    for attempt in range(100):
        aim = tokens
        for _ in range(6):
            conversation = EVERY[task](Random(f"{name}-{attempt}"), aim, True, 1)
            user, answer = conversation.turns[0]
            spare = tokens - (len(conversation.system) + len(user) + 5)  # 5: the marks of turns
            if 0 <= spare < 12 and tokens - spare + len(answer) + 1 <= CONTEXT:
                return conversation
            aim += spare
    what = f"task {task!r} has no prompt of {tokens} tokens whose answer fits {CONTEXT} positions"
    raise InputError(f"{what}: ask for another length")
