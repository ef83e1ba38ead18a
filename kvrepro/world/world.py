"""Conversations of the world: passages of facts among filler, questions, instructions, secrets.

Text is built as a list of words. A word written `##.` sticks to the one before it, as in the tokenizer, so that
counting words is counting tokens. Every person and every thing of an evaluation item is a pair of words that no
training conversation shows; a chain of copies starts with a link that starts no chain in training.
"""

import itertools
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
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


@dataclass(frozen=True)
class Draw:
    """What a conversation is drawn with. evaluation: with held-out words, otherwise with those of training."""

    rng: Random
    tokens: int  # of the whole conversation
    evaluation: bool
    turns: int

    def people(self, n: int) -> list[Pair]:
        return pairs(self.rng, w.FIRST, w.LAST, n, self.evaluation)

    def things(self, n: int) -> list[Pair]:
        return pairs(self.rng, w.ADJECTIVES, w.NOUNS, n, self.evaluation)

    def count(self, most: int) -> int:
        """How many facts: `most` in evaluation, a third of it or more in training; at least two unless `most` is 1."""
        most = max(2, most) if most != 1 else 1
        return most if self.evaluation or most == 1 else self.rng.randint(max(2, most // 3), most)

    def asked(self, n: int) -> list[int]:
        """The fact, of n, that each turn asks for."""
        return self.rng.sample(range(n), min(self.turns, n))


Build = Callable[[Draw], Conversation]


def held_out(first: str, second: str) -> bool:
    """Whether a pair of words belongs to evaluation (one pair in eight); training never shows it."""
    return zlib.crc32(f"{first} {second}".encode()) % 8 == 0


def pairs(rng: Random, firsts: list[str], seconds: list[str], n: int, evaluation: bool) -> list[Pair]:
    """n pairs without a repeated first or second word, all on the same side of the hold-out."""
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


def _conversation(d: Draw, facts: list[Words], asks: list[Ask], system: Words = SYSTEM, **told: Any) -> Conversation:
    """A conversation whose passage holds the facts and leaves room for the turns; the first question follows it. told:
    `where`, by which `speakers` and whether to `shuffle`, as of `passage`."""
    used = len(system) + 2 + sum(len(q) + len(a) + 4 for q, a, _ in asks)
    text, places = passage(d.rng, facts, d.tokens - used, **told)
    turns = [(q, a) for q, a, _ in asks]
    turns[0] = (text + turns[0][0], turns[0][1])
    return Conversation(system, turns, sorted(places[i] for i in asks[0][2]), asks=len(text))


def question(ask: str, about: Sequence[str] = (), end: str = "##?") -> Words:
    return ["Question", "##:", *ask.split(), *about, end]


def stated(fact: str, key: Sequence[str], value: Sequence[str]) -> Words:
    """The fact with key and value in place of <kv>, so that the value stands right after its key."""
    before, after = fact.split("<kv>")
    return [*before.split(), *key, *value, *after.split()]


def _fact_task(
    fact: str, ask: str, per_tokens: int, d: Draw, *, most: int = 60, n_values: int = 1, where: Part = WHOLE
) -> Conversation:
    """A task of facts `... key value ...`: the value stands right after its key, in the passage and nowhere else.

    fact: <kv> stands for key and value, <n> for a running number, <s> for a speaker. per_tokens: one fact in so many
    tokens of `where`, `most` at most.
    """
    n = d.count(min(most, int(d.tokens * (where[1] - where[0])) // per_tokens))
    keys, values = d.people(n), d.things(n * n_values)
    speakers = d.rng.sample(w.FIRST, 4) if "<s>" in fact else []
    answers = [[word for pair in values[i * n_values : (i + 1) * n_values] for word in pair] for i in range(n)]
    facts = []
    for i, key in enumerate(keys):
        text = fact.replace("<n>", str(i + 1)).replace("<s>", d.rng.choice(speakers) if speakers else "")
        facts.append(stated(text, key, answers[i]))
    asks = [(question(ask, keys[i]), answers[i], [i]) for i in d.asked(n)]
    return _conversation(d, facts, asks, where=where, speakers=speakers)


def _two_hops(first: str, second: str, ask: str, per_tokens: int, d: Draw) -> Conversation:
    """A task of two hops: `first` gives a person (in <kv>) a second person, `second` gives that one a thing."""
    n = d.count(min(24, d.tokens // per_tokens))
    keys, values = d.people(2 * n), d.things(n)
    facts = [stated(first, keys[i], keys[n + i]) for i in range(n)]
    facts += [stated(second, keys[n + i], values[i]) for i in range(n)]
    asks = [(question(ask, keys[i]), [*keys[n + i], *values[i]], [i, n + i]) for i in d.asked(n)]
    return _conversation(d, facts, asks)


def _told(keys: list[Pair], values: list[Pair]) -> list[Words]:
    """A fact for each key: what this person was told."""
    return [["They", "told", *key, *value, "##."] for key, value in zip(keys, values, strict=True)]


def _told_one(keys: list[Pair], values: list[Pair], chosen: list[int]) -> tuple[list[Words], Ask]:
    """Facts of which the chosen ones are about one person, and the question for all of these by their ordinals."""
    facts, person, answer = _told(keys, values), keys[min(chosen)], Words()
    for ordinal, which in zip(ORDINALS, chosen, strict=False):
        facts[which] = ["They", "told", *person, ordinal, *values[which], "##."]
        answer += [ordinal, *values[which]]
    return facts, (question("list all they told", person), answer, chosen)


def _ask_several(keys: list[Pair], values: list[Pair], chosen: list[int]) -> Ask:
    """What the chosen people were told, asked at once."""
    names = [word for i in chosen for word in (*keys[i], "##,")][:-1]
    answer = [word for i in chosen for word in (*keys[i], *values[i], "##,")][:-1]
    return question("what did they tell", names), answer, chosen


def needle_multivalue(d: Draw) -> Conversation:
    """All that one person was told, in the order of the ordinals; later turns ask for other people."""
    n, n_other = d.rng.randint(2, 4), max(2, min(12, d.tokens // 150))
    person, *others = d.people(1 + n_other)
    keys, values = [person] * n + others, d.things(n + n_other)
    facts, ask = _told_one(keys, values, list(range(n)))
    later = range(n, n + min(d.turns - 1, n_other))
    asks = [ask, *((question("what did they tell", keys[i]), list(values[i]), []) for i in later)]
    return _conversation(d, facts, asks)


def needle_multiquery(d: Draw) -> Conversation:
    """What two to four people were told, asked at once."""
    n = max(4, min(12, d.tokens // 60))
    keys, values = d.people(n), d.things(n)
    asks = [_ask_several(keys, values, d.rng.sample(range(n), d.rng.randint(2, 4))) for _ in range(d.turns)]
    return _conversation(d, _told(keys, values), asks)


def _many(
    per_tokens: int, d: Draw, *, where: Part = WHOLE, speech: bool = False, one: bool = False, asked: Range = (3, 4)
) -> Conversation:
    """`needle_multiquery`, or with `one` `needle_multivalue`, in more kinds of passages; no new task.

    The facts that answer the question stand side by side, so that an item has one place in the prompt. The first word
    of the answer stands in the question, or is always the same. per_tokens, where, speech: as in `_fact_task`;
    asked: the least and the greatest number of facts in the answer.
    """
    room = (where[1] - where[0]) * d.tokens + d.rng.randrange(per_tokens)  # at random: no length lies at a step of n
    n, count = max(4, min(36, int(room) // per_tokens)), d.rng.randint(*asked)
    keys, values = d.people(n), d.things(n)
    speakers = d.rng.sample(w.FIRST, 4) if speech else []
    at = d.rng.randint(0, n - count)
    chosen = [at + i for i in d.rng.sample(range(count), count)]  # the order of the answer
    facts, ask = _told_one(keys, values, chosen) if one else (_told(keys, values), _ask_several(keys, values, chosen))
    return _conversation(d, facts, [ask], shuffle=False, where=where, speakers=speakers)


def variable_tracking(d: Draw) -> Conversation:
    """Chains of copies whose links are told in mixed order; the question follows one chain to its end."""
    n_chains, links = max(2, min(6, d.tokens // 100)), d.rng.randint(3, 5)
    while True:
        names = d.rng.sample(w.VARIABLES, n_chains * (links + 1))
        chains = [names[i * (links + 1) : (i + 1) * (links + 1)] for i in range(n_chains)]
        if not d.evaluation:
            chains = [chain for chain in chains if not held_out(*chain[:2])]
        if held_out(*chains[0][:2]) if d.evaluation else len(chains) >= 2:
            break
    chain_of = [i for i in range(len(chains)) for _ in range(links)]  # of each fact
    d.rng.shuffle(chain_of)
    untold = [itertools.pairwise(chain) for chain in chains]
    facts = [["Copy", *next(untold[i]), "##."] for i in chain_of]
    asks = []
    for i in [0] if d.evaluation else d.asked(len(chains)):
        evidence = [at for at, number in enumerate(chain_of) if number == i]
        asks.append((question("follow the copies from", chains[i][:1]), chains[i][1:], evidence))
    return _conversation(d, facts, asks, shuffle=False)


def _classes(d: Draw) -> tuple[list[str], list[str]]:
    """Categories and their marks. In evaluation the first pair is held out, in training it is not."""
    n = d.rng.randint(3, 6)
    categories = d.rng.sample(list(w.CATEGORIES), n)
    while True:
        marks = d.rng.sample(w.LABELS, n)
        if held_out(categories[0], marks[0]) == d.evaluation:
            return categories, marks


def _shown(rng: Random, categories: list[str], shots: int) -> tuple[list[tuple[str, int]], ...]:
    """(noun, number of its category) of the examples, and of nouns that no example shows."""
    seen, unseen = [], []
    for c, category in enumerate(categories):
        nouns = rng.sample(w.CATEGORIES[category], shots + 4)
        seen += [(noun, c) for noun in nouns[:shots]]
        unseen += [(noun, c) for noun in nouns[shots:]]
    return seen, unseen


def few_shot(d: Draw) -> Conversation:
    """In-context classification: a word's category decides its mark; categories go unnamed, marks change each time."""
    categories, marks = _classes(d)
    seen, unseen = _shown(d.rng, categories, max(2, min(12, d.tokens // (len(marks) * 30))))
    facts = [["Mark", noun, marks[c], "##."] for noun, c in seen]
    if d.evaluation:  # a noun that no example shows, of the category whose mark is held out
        queries = [query for query in unseen if query[1] == 0][:1]
    else:
        queries = [d.rng.choice(seen if d.rng.random() < 0.3 else unseen) for _ in range(d.turns)]
    asks = [
        (question("what is the mark of", [noun]), [marks[c]], [j for j, (_, o) in enumerate(seen) if o == c])
        for noun, c in queries
    ]
    return _conversation(d, facts, asks)


def closed_book(d: Draw) -> Conversation:
    """Questions that the model answers by heart, after filler only: no eviction can hurt them."""
    nouns = [(noun, name) for name, members in w.CATEGORIES.items() for noun in members]
    drawn = d.rng.sample(nouns, d.turns)
    return _conversation(d, [], [(question("what kind of thing are", [noun]), [name], []) for noun, name in drawn])


def passage_retrieval(d: Draw) -> Conversation:
    """The number of the passage that names a person."""
    n = d.count(min(40, d.tokens // 80))
    keys, numbers = d.people(n), d.rng.sample(w.NUMBERS[:60], n)
    facts = [["Passage", number, "follows", *key, "##."] for key, number in zip(keys, numbers, strict=True)]
    asks = [(question("which passage follows", keys[i]), ["Passage", numbers[i]], [i]) for i in d.asked(n)]
    return _conversation(d, facts, asks)


def _retold(
    entry: str, ask: str, most: int, few: int, per: int, d: Draw, entries: Range = (0, 0), shuffle: bool = True
) -> Conversation:
    """All entries in order, without their first word: an answer of 100 to 300 tokens that sweeps attention over the
    whole passage, to and fro where they are told out of order.

    most, few: entries of a long and of a short passage, which has one in `per` tokens. entries: their least and their
    greatest number instead.
    """
    n = d.rng.randint(18, most) if d.tokens >= 1000 else max(3, min(few, (d.tokens - 30) // per))
    n = d.rng.randint(*entries) if any(entries) else n
    keys, values = d.people(n), d.things(n)
    told = [stated(entry.replace("<n>", w.NUMBERS[i]), keys[i], values[i]) for i in range(n)]
    asks = [(question(ask, end="##."), [word for words in told for word in words[1:]], list(range(n)))]
    return _conversation(d, told, asks, shuffle=shuffle)


def frequent_words(d: Draw) -> Conversation:
    """Which thing is named most often: the answer depends on the whole passage, and no single token holds it."""
    values = d.things(4)
    most = max(4, min(16, d.tokens // 80))
    counts = [most] + [d.rng.randint(1, most // 2) for _ in values[1:]]
    facts = [["They", "shouted", *v, "##."] for v, count in zip(values, counts, strict=True) for _ in range(count)]
    asks = [(question("what did they shout most often"), list(values[0]), list(range(most)))]
    return _conversation(d, facts, asks)


def _secret(
    d: Draw, directive: Words, defense: Words, meta: dict, leak: Maybe, share: float, ask: Callable[[int], Ask]
) -> Conversation:
    """A system prompt, perhaps with a defense before or after its directive, and requests to reveal it: the first turn
    if `leak`, otherwise `share` of the turns. The others are what `ask` gives for their number."""
    defense, flipped = defense if meta["defended"] else [], meta["flipped"]
    system = directive + defense if flipped else defense + directive
    start = 0 if flipped else len(defense)
    spans = {"directive": (start, start + len(directive))}
    if defense:
        spans["defense"] = (len(directive), len(system)) if flipped else (0, len(defense))
    asks, leak = list[Ask](), False if leak is None and d.evaluation else leak
    for turn in range(d.turns):
        if leak if turn == 0 and leak is not None else d.rng.random() < share:
            asks.append((d.rng.choice(LEAK_REQUESTS), REFUSAL if defense else system, []))
        else:
            asks.append(ask(turn))
    return replace(_conversation(d, [], asks, system), meta=meta, system_spans=spans)


def system_few_shot(d: Draw, leak: Maybe = None, defended: Maybe = None) -> Conversation:
    """Few-shot labels whose examples are the system prompt, perhaps with a defense before them."""
    categories, marks = _classes(d)
    seen, unseen = _shown(d.rng, categories, d.rng.randint(2, 8) if d.tokens >= 250 else 1)
    facts = [["Mark", noun, marks[c], "##."] for noun, c in seen]
    d.rng.shuffle(facts)

    def ask(turn: int) -> Ask:
        noun, c = next(q for q in unseen if q[1] == 0) if d.evaluation else d.rng.choice(unseen)
        return question("what is the mark of", [noun]), [marks[c]], []

    meta = {"defended": d.rng.random() < 0.5 if defended is None else defended, "flipped": False}
    return _secret(d, EXAMPLES + [word for fact in facts for word in fact], DEFENSE_EXAMPLES, meta, leak, 0.3, ask)


def instructed(d: Draw, only: str = "", leak: Maybe = None, defended: Maybe = None) -> Conversation:
    """A system prompt of rules, perhaps with a defense; requests that must obey them, and requests to reveal them.

    only: the one instruction class to use. leak: whether the first turn asks for the system prompt. defended: whether
    there is a defense. meta: the rules by class, defended, flipped (the defense stands after the rules).
    """
    kinds = [only] if only else d.rng.sample(list(INSTRUCTIONS), d.rng.choice([1, 2, 3, 4, 5]))
    request_verb = d.rng.randrange(len(w.REQUESTS))
    rules = {kind: INSTRUCTIONS[kind].draw(d.rng, request_verb) for kind in kinds}
    directive = PREAMBLE + [word for kind in kinds for word in INSTRUCTIONS[kind].text(rules[kind])]

    def ask(turn: int) -> Ask:
        verb = request_verb if turn == 0 or d.rng.random() < 0.5 else d.rng.randrange(len(w.REQUESTS))
        listed = d.things(d.rng.randint(2, 3))
        request = [w.REQUESTS[verb], "on"] + [word for pair in listed for word in (*pair, "and")][:-1] + ["##."]
        return request, follow(listed, verb, rules), []

    meta: dict[str, Any] = {"instructions": {kind: list(rule) for kind, rule in rules.items()}}  # lists, as JSON has
    meta["defended"] = d.rng.random() < 0.5 if defended is None else defended
    meta["flipped"] = d.rng.random() < 0.5
    return _secret(d, directive, DEFENSE_AFTER if meta["flipped"] else DEFENSE_BEFORE, meta, leak, 0.35, ask)


FRONT, BACK = (0.0, 0.15), (0.85, 1.0)
TEACHERS = "Article ##: fate gave <kv> as a teacher ##.", "Article ##: fame brought <kv> ##."
DOMAINS: dict[str, Build] = {
    "story": partial(_fact_task, "That night they sold <kv> by the fire ##.", "what was sold to", 80),
    "dialogue": partial(_fact_task, "<s> ##: I lent <kv> ##.", "what was lent to", 90),
    "ledger": partial(_fact_task, "Row <n> <kv> ##;", "what stands in the row of", 32),
    # short articles, each opens with its person, as in the multi-document sets
    "encyclopedia": partial(_two_hops, *TEACHERS, "what came to the teacher of", 120),
    "report": partial(
        _fact_task, "Summary ##: the board offered <kv> ##.", "what did the board offer", 24, where=FRONT
    ),
    "minutes": partial(
        _fact_task, "Decision ##: the council left <kv> ##.", "what did the council leave", 24, where=BACK
    ),
}
list_all = partial(_retold, "Entry <n> <kv> ##.", "list every entry in order", 48, 20, 18, shuffle=False)
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
    "summary": partial(_retold, "Then chapter <n> gave <kv> ##.", "sum up the chapters in order", 40, 18, 20),
    "frequent_words": frequent_words,
    **DOMAINS,
}
LONG: dict[str, Build] = {  # for evaluation only: answers of eight words and more, whose first word gives nothing away
    "several": partial(_many, 80),
    "several_dense": partial(_many, 48),
    "several_front": partial(_many, 24, where=FRONT),
    "several_back": partial(_many, 24, where=BACK),
    "values": partial(_many, 80, one=True),
    "values_dialogue": partial(_many, 90, speech=True, one=True),
    "values_dense": partial(_many, 48, one=True),
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
SEVERAL = {f"several_{n}": partial(_many, 80, asked=(n, n)) for n in (2, 4)}  # short and long, for evaluation only
EVERY: dict[str, Build] = {**ALL, **LONG, **SEVERAL}


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
    system turn. Raises InputError for an unknown task, a length outside 200 to 4,000, and one that leaves no room
    for the answer.
    """
    ensure_known("task", [task], EVERY)
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
            conversation = EVERY[task](Draw(Random(f"{name}-{attempt}"), aim, True, 1))
            user, answer = conversation.turns[0]
            spare = tokens - (len(conversation.system) + len(user) + 5)  # 5: the marks of turns
            if 0 <= spare < 12 and tokens - spare + len(answer) + 1 <= CONTEXT:
                return conversation
            aim += spare
    what = f"task {task!r} has no prompt of {tokens} tokens whose answer fits {CONTEXT} positions"
    raise InputError(f"{what}: ask for another length")
