"""RULER's thirteen tasks as a generator: needles, chains of variables, counted words and questions, at any length.

Tasks, counts, distributions, room for the answer and metrics are the benchmark's, the wording is ours. Source: Hsieh et
al. 2024, arXiv:2404.06654, and github.com/NVIDIA/RULER at c3f5e3b (scripts/synthetic.yaml, scripts/data/synthetic).
"""

import random
import string
import uuid
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from kvrepro.chat import rendered
from kvrepro.errors import InputError, ensure_known
from kvrepro.item import Item, Span
from kvrepro.world import ruler_text as text
from kvrepro.world.ruler_text import Fetch, Haystack, Questions

NOISE = "Rain falls on the roof. The road runs south. Bread is baked at dawn. A clock ticks. Then it all begins again."
DEPTHS = [round(100 * i / 39) for i in range(40)]  # per cent of an essay's sentences before a needle
KINDS = {"number": "number", "uuid": "identifier"}  # how a prompt calls a kind of value
EXAMPLE_TOKENS = 500  # of the solved example that precedes a chain of variables
PER_TASK = 10  # items, where no number is asked for
LONG = 4096  # tokens from which on words are counted with the benchmark's repetitions

Piece = tuple[str, bool]  # a part of the context, and whether it holds the answer


@dataclass(frozen=True)
class Draft:
    """A prompt in the making: what precedes the context, its pieces, what joins them, the question, all answers."""

    intro: str
    pieces: list[Piece]
    joint: str
    question: str
    answers: list[str]

    @property
    def content(self) -> str:
        return f"{self.intro}\n\n{self.joint.join(piece for piece, _ in self.pieces)}\n\n{self.question}"

    def evidence(self) -> list[tuple[int, int]]:
        """Where the pieces that hold the answer lie, [start, end) in characters of the content."""
        at, places = len(self.intro) + 2, []
        for piece, holds in self.pieces:
            if holds:
                places.append((at, at + len(piece)))
            at += len(piece) + len(self.joint)
        return places


@dataclass(frozen=True)
class Given:
    """What one item's draft is made from, beside random numbers and the number of units."""

    room: int  # tokens of the prompt
    index: int  # of the question among those that were read
    read: Any = None  # a Haystack, or Questions


Build = Callable[[random.Random, int, Given], Draft]  # n: units of filler


# ---- the drafts


def niah(
    rng: random.Random, n: int, given: Given, filler: str, names: int = 1, values: int = 1, queries: int = 1,
    key: str = "words", value: str = "number",
) -> Draft:  # fmt: skip
    """`values` values are filed under each of `names` names, and asked for `queries` of them.

    filler: "noise" (n lines), "essays" (n words), or "needles" (n more names, each with a value of its own).
    """
    filed = _distinct(rng, key, max(names, queries) + (n if filler == "needles" else 0))
    kept, others = filed[: max(names, queries)], filed[max(names, queries) :]
    drawn = _distinct(rng, value, len(kept) * values + len(others))
    found = {name: drawn[i * values : (i + 1) * values] for i, name in enumerate(kept)}
    asked, kind = rng.sample(kept, queries), KINDS[value]
    needles = [(_needle(kind, name, one), name in asked) for name in kept for one in found[name]]
    rng.shuffle(needles)
    if filler == "essays":
        units, joint = given.read.sentences(n), " "
        places = [len(units) * depth // 100 for depth in rng.sample(DEPTHS, len(needles))]
    else:
        units, joint = [NOISE] * n, "\n"
        if filler == "needles":
            units = [_needle(kind, name, one) for name, one in zip(others, drawn[-n:], strict=True)]
        places = rng.sample(range(n), len(needles))
    query = asked[0] if queries == 1 else f"{', '.join(asked[:-1])} and {asked[-1]}"
    if queries * values == 1:
        hidden, which, reply = f"one {kind} is", f"Which {kind} is", f"the {kind}"
    else:
        hidden, which, reply = f"{kind}s are", f"Which {kind}s are", f"all {kind}s"
    return Draft(
        f"In the text below, {hidden} filed under a name. Remember what is filed where: a question follows the text.",
        _inserted(units, needles, sorted(places)),
        joint,
        f"Question: {which} filed under {query}? Reply with {reply} and nothing else.",
        [one for name in asked for one in found[name]],
    )


def variables(rng: random.Random, n: int, given: Given, letters: int = 5) -> Draft:
    """A number is given to a variable, then each variable's value to the next one, five in all, among n lines of
    noise, at least as many. All of them are asked for."""
    names = _distinct(rng, partial(_letters, string.ascii_uppercase, letters), 5)
    number = str(rng.randint(10000, 99999))
    told = [(f"Let {name} be {before}.", True) for name, before in zip(names, [number, *names], strict=False)]
    return Draft(
        "The text below gives values to variables. A variable may take its value from another one: follow the chain.",
        _inserted([NOISE] * n, told, sorted(rng.sample(range(n), 5))),
        "\n",
        f"Question: Which 5 variables have the value {number}, at first hand or through others? Reply with their names "
        "and nothing else.",
        names,
    )


def common_words(rng: random.Random, n: int, given: Given, often: int = 30, seldom: int = 3, common: int = 10) -> Draft:
    """A numbered list of `common` words that stand in it `often` times each, and n words that do so `seldom` times."""
    listed = text.words()["all"].copy()
    rng.shuffle(listed)
    if (more := common + n - len(listed)) > 0:  # the benchmark takes another list then
        listed += _distinct(rng, "words", more)
    top, rest = listed[:common], listed[common : common + n]
    entries = [(word, True) for word in top * often] + [(word, False) for word in rest * seldom]
    rng.shuffle(entries)
    return Draft(
        "Below is a numbered list of words. Some words stand in it more often than the others: keep those in mind.",
        [(f"{i}. {word}", often_there) for i, (word, often_there) in enumerate(entries, 1)],
        " ",
        f"Question: Which {common} words are the most frequent in the list? Reply with these words and nothing else.",
        top,
    )


def frequent_words(rng: random.Random, n: int, given: Given, alpha: float = 2.0, letters: int = 6) -> Draft:
    """Made-up words, the k-th of which stands n k^-alpha / zeta(alpha) times in the text; the first is dots, the next
    three are asked for. There is a word for every 50 tokens of the prompt."""
    from scipy.special import zeta

    made = ["...", *_distinct(rng, partial(_letters, string.ascii_lowercase, letters), max(8, given.room // 50) - 1)]
    entries = [word for k, word in enumerate(made, 1) for _ in range(int(n * k**-alpha / zeta(alpha)))]
    rng.shuffle(entries)
    return Draft(
        "The text below is written in code. Count how often each word of the code occurs; dots are no word.",
        [(word, word in made[1:4]) for word in entries],
        " ",
        "Question: Which three words of the code are the most frequent? Reply with these words and nothing else.",
        made[1:4],
    )


def paragraphs(rng: random.Random, n: int, given: Given) -> Draft:
    """A question, the paragraphs that answer it, and as many others as make n more, those of its subject first; where
    all paragraphs there are do not fill the prompt, they come again."""
    asked, listed = given.read.asked[given.index], given.read.paragraphs
    first = [*asked.evidence, *rng.sample(asked.near, len(asked.near))]
    others = sorted({*range(len(listed))} - {*first})
    order = first + rng.sample(others, len(others))
    chosen = [order[i % len(order)] for i in range(len(asked.evidence) + n)]
    rng.shuffle(chosen)
    return Draft(
        "A question follows the passages below. They hold its answer.",
        [(f"Passage {i}:\n{listed[which]}", which in asked.evidence) for i, which in enumerate(chosen, 1)],
        "\n\n",
        f"Question: {asked.question}\nReply with the answer from the passages in a few words, without explanation.",
        asked.answers,
    )


def _needle(kind: str, name: str, value: str) -> str:
    return f"One {kind} filed under {name} is {value}."


def _inserted(units: Sequence[str], pieces: Iterable[Piece], places: Sequence[int]) -> list[Piece]:
    """The units with each piece before the unit of its place; places ascend."""
    mixed: list[Piece] = []
    begin = 0
    for place, piece in zip(places, pieces, strict=True):
        mixed += [(unit, False) for unit in units[begin:place]]
        mixed.append(piece)
        begin = place
    return mixed + [(unit, False) for unit in units[begin:]]


def _letters(alphabet: str, n: int, rng: random.Random) -> str:
    return "".join(rng.choices(alphabet, k=n))


def _distinct(rng: random.Random, kind: str | Callable[[random.Random], str], n: int) -> list[str]:
    """n different texts of a kind: "words" (amber-otter), "number" (seven digits), "uuid", or what a function draws."""
    draw = DRAWN[kind] if isinstance(kind, str) else kind
    found: dict[str, None] = {}
    while len(found) < n:
        found[draw(rng)] = None
    return list(found)


DRAWN: dict[str, Callable[[random.Random], str]] = {
    "words": lambda rng: f"{rng.choice(text.words()['adjective'])}-{rng.choice(text.words()['noun'])}",
    "number": lambda rng: str(rng.randint(10**6, 10**7 - 1)),
    "uuid": lambda rng: str(uuid.UUID(int=rng.getrandbits(128), version=4)),
}


# ---- the metrics


def string_match_all(prediction: str, references: Collection[str]) -> float:
    """Share of the references that stand in the prediction, whatever their case."""
    return sum(reference.lower() in prediction.lower() for reference in references) / len(references)


def string_match_part(prediction: str, references: Collection[str]) -> float:
    """1 if one of the references stands in the prediction, whatever its case, else 0."""
    return float(any(reference.lower() in prediction.lower() for reference in references))


# ---- the tasks


@dataclass(frozen=True)
class Task:
    """How a task's drafts are built, tokens for its answer, the fewest units it may have; a solved example before it,
    and of how many units (None: as many as 500 tokens hold)."""

    build: Build
    answer_tokens: int = 128
    smallest: int = 1
    metric: str = "ruler_all"
    example: Build | None = None
    example_units: int | None = None
    reads: Callable[[Fetch], Haystack | Questions] | None = None  # the text that it needs
    form: str = ""  # what was made smaller than the benchmark has it


def _essay_task(**how: Any) -> Task:
    return Task(partial(niah, filler="essays", **how), smallest=50, reads=text.essays)


TASKS = {
    "niah_single_1": Task(partial(niah, filler="noise")),
    "niah_single_2": _essay_task(),
    "niah_single_3": _essay_task(value="uuid"),
    "niah_multikey_1": _essay_task(names=4),
    "niah_multikey_2": Task(partial(niah, filler="needles")),
    "niah_multikey_3": Task(partial(niah, filler="needles", key="uuid", value="uuid")),
    "niah_multivalue": _essay_task(values=4),
    "niah_multiquery": _essay_task(queries=4),
    "vt": Task(variables, 30, 5, example=partial(variables, letters=3)),
    "cwe": Task(common_words, 120, 1, example=partial(common_words, often=10), example_units=30),
    "fwe": Task(frequent_words, 50, 100),
    "qa_1": Task(paragraphs, 32, 0, "ruler_part", reads=text.squad),
    "qa_2": Task(paragraphs, 32, 0, "ruler_part", reads=text.hotpotqa),
}
SHORT = {  # the benchmark's own for prompts of less than 4,096 tokens
    "cwe": Task(
        partial(common_words, often=6, seldom=1), 120, 1, form="fewer repetitions",
        example=partial(common_words, often=3, seldom=1), example_units=10,
    ),
}  # fmt: skip


def _forms(name: str, tokens: int) -> list[Task]:
    """A task as it may be asked in so many tokens, the first that fits is taken: whole, smaller, without example."""
    forms = [] if name in SHORT and tokens < LONG else [TASKS[name]]
    forms += [SHORT[name]] if name in SHORT else []
    return [*forms, replace(forms[-1], example=None, form="no example")] if forms[-1].example else forms


# ---- the items


def named(tasks: str) -> list[str]:
    """The tasks of "vt,cwe", all thirteen for "". Raises InputError for others."""
    names = list(dict.fromkeys(tasks.split(","))) if tasks else list(TASKS)
    ensure_known("RULER task", names, TASKS)
    return names


def sample(tasks: str, n_items: int | None, seed: int, tokens: int, tokenizer: Any, fetch: Fetch) -> list[Item]:
    """`n_items` items (None: ten of each task), equally over the tasks; the same arguments give the same items.

    tasks: names with commas between them, "" for all thirteen. tokens: of a prompt of that tokenizer, its chat template
    and the room for the answer included; items come as near to it from below as their filler allows. fetch finds the
    public files essays, squad and hotpotqa where a task reads them. Spans: evidence and question. meta: answers, metric
    (ruler_all or ruler_part), max_new_tokens, prompt_tokens, depths (where in the context the evidence stands, 0 to 1),
    filler (whose running text is the haystack), form (what is smaller than in the benchmark: "fewer repetitions", "no
    example"). Items whose shortest prompt is too long are left out, which is printed. Raises InputError if none is
    left, for an unknown task, without tokenizer or chat template, and where a file cannot be had.
    """
    names = named(tasks)
    if tokenizer is None:
        raise InputError("ruler's items are counted in a model's own tokens: give its tokenizer")
    if tokenizer.chat_template is None:
        raise InputError(
            f"tokenizer {tokenizer.name_or_path} has no chat template: use an instruction-tuned checkpoint"
        )
    n_items = n_items or PER_TASK * len(names)
    counts = [n_items // len(names) + (i < n_items % len(names)) for i in range(len(names))]
    wanted = [(name, count) for name, count in zip(names, counts, strict=True) if count]
    read = {name: TASKS[name].reads(fetch) for name, _ in wanted if TASKS[name].reads}
    made = [_item(name, i, seed, tokens, tokenizer, read.get(name)) for name, count in wanted for i in range(count)]
    items = [item for item in made if isinstance(item, Item)]
    needed = [one for one in made if isinstance(one, int)]
    if needed:
        told = f"ruler: {len(needed)} of {n_items} items take {min(needed)} tokens and more > {tokens}"
        if not items:
            raise InputError(f"{told}: ask for more tokens")
        print(f"{told}, they are left out")
    return items


def _item(name: str, i: int, seed: int, tokens: int, tokenizer: Any, read: Haystack | Questions | None) -> Item | int:
    """The i-th item of a task, or how many tokens its shortest prompt and its answer take, where these are too many."""
    identity, index = f"{name}-{tokens}-{seed}-{i}", 0
    if isinstance(read, Questions):
        order = random.Random(f"{name}-{seed}").sample(range(len(read.asked)), len(read.asked))
        index = order[i % len(order)]
    for task in _forms(name, tokens):
        draft, size = _filled(task, identity, Given(tokens - task.answer_tokens, index, read), tokenizer)
        if size <= tokens - task.answer_tokens:
            break
    else:
        return size + task.answer_tokens
    content, context = draft.content, len(draft.intro) + 2
    length = len(content) - context - len(draft.question) - 2
    places = draft.evidence()
    spans = [Span("evidence", 0, *place) for place in places]
    spans.append(Span("question", 0, len(content) - len(draft.question), len(content)))
    answer = draft.answers[0] if task.metric == "ruler_part" else ", ".join(draft.answers)
    meta = {
        "answers": draft.answers, "metric": task.metric, "max_new_tokens": task.answer_tokens, "prompt_tokens": size,
        "depths": [round((start - context) / length, 4) for start, _ in places],
        "filler": read.origin if isinstance(read, Haystack) else "", "form": task.form,
    }  # fmt: skip
    return Item(identity, name, ({"role": "user", "content": content},), answer, tuple(spans), meta=meta)


def _filled(task: Task, identity: str, given: Given, tokenizer: Any) -> tuple[Draft, int]:
    """A task's longest draft with its solved example, and its tokens: more than the room has where none fits."""

    def tokens(draft: Draft) -> int:
        messages = [{"role": "user", "content": draft.content}]
        prompt = rendered(tokenizer, messages)
        return len(tokenizer(prompt, add_special_tokens=False, verbose=False)["input_ids"])

    def example(n: int) -> Draft:
        return task.example(random.Random(f"{identity}-example"), n, given)

    def whole(n: int) -> Draft:
        draft = task.build(random.Random(identity), n, given)
        return replace(draft, intro=before + draft.intro)

    before = ""
    if task.example:
        units = task.example_units
        shown = example(units) if units else longest(example, tokens, EXAMPLE_TOKENS, task.smallest)[0]
        before = f"{shown.content}\nAnswer: {', '.join(shown.answers)}\n\n"
    return longest(whole, tokens, given.room, task.smallest)


def longest(
    build: Callable[[int], Draft], tokens: Callable[[Draft], int], room: int, smallest: int
) -> tuple[Draft, int]:
    """The draft of most units that has at most `room` tokens, or of nearly most (room / 500 tokens), and its tokens.

    A search between bounds that guesses by the tokens of a unit, since counting a long text takes its time. Where the
    smallest draft has too many tokens, that one.
    """
    low, best, size = smallest, build(smallest), 0
    size, high, guess, turn = tokens(best), 0, smallest + 32, 0  # high: too many units; 0: none known
    while size <= room and high != low + 1 and room - size > room // 500:
        draft = build(guess)
        found, turn = tokens(draft), turn + 1
        per_unit = max(0.01, (found - size) / (guess - low))
        if found > room:
            high = guess
        else:
            low, best, size = guess, draft, found
        guess = low + max(1, int((room - size) / per_unit))
        if high:
            guess = min(guess, high - 1) if turn % 4 else (low + high) // 2
    return best, size
