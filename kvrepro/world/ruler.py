"""RULER's thirteen tasks as a generator: needles, chains of variables, counted words and questions, at any length.

Tasks, counts, distributions, room for the answer and metrics are the benchmark's; the wording is ours. Source: Hsieh et
al. 2024, arXiv:2404.06654, and github.com/NVIDIA/RULER at c3f5e3b (scripts/synthetic.yaml, scripts/data/synthetic).
"""

import itertools
import json
import re
import string
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any

from kvrepro.errors import InputError
from kvrepro.item import Item, Span, rendered

NOISE = "Rain falls on the roof. The road runs south. Bread is baked at dawn. A clock ticks. Then it all begins again."
DEPTHS = [round(100 * i / 39) for i in range(40)]  # per cent of an essay's sentences before a needle
KINDS = {"number": "number", "uuid": "identifier"}  # kind of value -> its name in a prompt
EXAMPLE_TOKENS = 500  # of the solved example that precedes a chain of variables
PER_TASK = 10  # items of a task, where the user gives no number

Fetch = Callable[[str], Path]  # the name of a public file or folder -> where it lies (kvrepro.experiment.data.fetch)
Piece = tuple[str, bool]  # a part of the context, and whether it holds the answer
# A question, its answers, the paragraphs that answer it, and all of its subject; and all paragraphs, in order
Question = tuple[str, list[str], set[str], set[str]]
Questions = tuple[list[Question], list[str]]
SENTENCE_END = re.compile(r"[.!?][\"'”’)\]]*$")


# ---- what prompts are made of: words, essays, and questions about paragraphs


def sentences(words: Sequence[str], n: int) -> list[str]:
    """The first n words, from the start again where there are fewer, as sentences; the last one may be cut."""
    taken = list(itertools.islice(itertools.cycle(words), n))
    bounds = [0, *(i for i, word in enumerate(taken[:-1], 1) if SENTENCE_END.search(word)), n]
    return [" ".join(taken[a:b]) for a, b in itertools.pairwise(bounds)]


@cache
def words() -> dict[str, list[str]]:
    """English words by kind, "noun", "adjective" and "all" (verbs too), in alphabetical order. Source: wonderwords."""
    from wonderwords import RandomWord

    def words_of(*kinds: str) -> list[str]:
        listed = {word.strip().lower() for word in RandomWord().filter(include_categories=kinds)}
        return sorted(word for word in listed if re.fullmatch("[a-z-]+", word))

    return {"noun": words_of("noun"), "adjective": words_of("adjective"), "all": words_of("noun", "adjective", "verb")}


@cache
def essays(fetch: Fetch) -> list[str]:
    """The words of the benchmark's essays."""
    return " ".join(file.read_text(encoding="utf-8") for file in sorted(fetch("essays").glob("*.txt"))).split()


@cache
def squad(fetch: Fetch) -> Questions:
    """SQuAD 2.0's answerable questions; of their subject are the paragraphs of the same article."""
    rows: list[Question] = []
    for article in json.loads(fetch("squad/dev-v2.0.json").read_text(encoding="utf-8"))["data"]:
        subject = {paragraph["context"] for paragraph in article["paragraphs"]}
        for paragraph in article["paragraphs"]:
            for row in (row for row in paragraph["qas"] if not row["is_impossible"]):
                answers = list(dict.fromkeys(answer["text"] for answer in row["answers"]))
                rows.append((row["question"], answers, {paragraph["context"]}, subject))
    return rows, sorted(set().union(*(subject for *_, subject in rows)))


@cache
def hotpotqa(fetch: Fetch) -> Questions:
    """HotpotQA's questions about two paragraphs; of their subject are the ten that the data set gives with them."""
    rows: list[Question] = []
    for row in json.loads(fetch("hotpotqa/hotpot_dev_distractor_v1.json").read_text(encoding="utf-8")):
        texts = {title: f"{title}\n{''.join(sentences)}" for title, sentences in row["context"]}
        evidence = {texts[title] for title, _ in row["supporting_facts"] if title in texts}
        rows.append((row["question"], [row["answer"]], evidence, set(texts.values())))
    return rows, sorted(set().union(*(subject for *_, subject in rows)))


# ---- the drafts


@dataclass(frozen=True)
class Draft:
    """A prompt in the making: text before the context, its pieces, the text between them, the question, all answers."""

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


# (random numbers, units of filler, tokens that the prompt may have, what the task reads) -> a draft
Build = Callable[[Random, int, int, Any], Draft]
Kinds = tuple[str, str]  # of `DRAWN`: a name's kind, a value's


def niah(
    filler: str, counts: tuple[int, int, int], kinds: Kinds, rng: Random, n: int, room: int, read: list[str] | None
) -> Draft:
    """Some names have values filed under them; the question asks for some of the names. counts: of names, of each
    one's values, of names asked.

    filler: "noise" (n lines), "essays" (n words), or "needles" (n more names, each with a value of its own).
    """
    count, values, queries = counts
    drawn_names = _distinct(rng, DRAWN[kinds[0]], count + (n if filler == "needles" else 0))
    filed, others = drawn_names[:count], drawn_names[count:]
    drawn = _distinct(rng, DRAWN[kinds[1]], len(filed) * values + len(others))
    values_of = {name: drawn[i * values : (i + 1) * values] for i, name in enumerate(filed)}
    queried, kind = rng.sample(filed, queries), KINDS[kinds[1]]
    needles = [(_needle(kind, name, number), name in queried) for name in filed for number in values_of[name]]
    rng.shuffle(needles)
    if read:
        units, joint = sentences(read, n), " "
        places = [len(units) * depth // 100 for depth in rng.sample(DEPTHS, len(needles))]
    else:
        units, joint = [NOISE] * n, "\n"
        if filler == "needles":
            units = [_needle(kind, name, number) for name, number in zip(others, drawn[-n:], strict=True)]
        places = rng.sample(range(n), len(needles))
    query = queried[0] if queries == 1 else f"{', '.join(queried[:-1])} and {queried[-1]}"
    hidden, which, reply = f"{kind}s are", f"Which {kind}s are", f"all {kind}s"
    if queries * values == 1:
        hidden, which, reply = f"one {kind} is", f"Which {kind} is", f"the {kind}"
    return Draft(
        f"In the text below, {hidden} filed under a name. Remember what is filed where: a question follows the text.",
        _inserted(units, needles, sorted(places)),
        joint,
        f"Question: {which} filed under {query}? Reply with {reply} and nothing else.",
        [number for name in queried for number in values_of[name]],
    )


def variables(rng: Random, n: int, room: int, read: Any, letters: int = 5) -> Draft:
    """A chain of five variables among n lines of noise (n >= 5): the first gets a number, each other one the value of
    the one before. The question asks for all of them."""
    names = _distinct(rng, partial(_letters, string.ascii_uppercase, letters), 5)
    number = str(rng.randint(10000, 99999))
    links = [(f"Let {name} be {before}.", True) for name, before in zip(names, [number, *names], strict=False)]
    return Draft(
        "The text below gives values to variables. A variable may take its value from another one: follow the chain.",
        _inserted([NOISE] * n, links, sorted(rng.sample(range(n), 5))),
        "\n",
        f"Question: Which 5 variables have the value {number}, at first hand or through others? Reply with their names "
        "and nothing else.",
        names,
    )


def common_words(rng: Random, n: int, room: int, read: Any, often: int = 30) -> Draft:
    """A numbered list with ten words that occur `often` times each, and n words that occur three times each."""
    listed = words()["all"].copy()
    rng.shuffle(listed)
    if (more := 10 + n - len(listed)) > 0:  # where the benchmark takes another list
        listed += _distinct(rng, DRAWN["words"], more)
    top, rest = listed[:10], listed[10 : 10 + n]
    entries = [(word, True) for word in top * often] + [(word, False) for word in rest * 3]
    rng.shuffle(entries)
    return Draft(
        "Below is a numbered list of words. Some words stand in it more often than the others: keep those in mind.",
        [(f"{i}. {word}", is_common) for i, (word, is_common) in enumerate(entries, 1)],
        " ",
        "Question: Which 10 words are the most frequent in the list? Reply with these words and nothing else.",
        top,
    )


def frequent_words(rng: Random, n: int, room: int, read: Any) -> Draft:
    """Made-up words of six letters; the k-th occurs n / (k^2 zeta(2)) times. The first is dots, and the question asks
    for the next three. There is a word for every 50 tokens of the prompt."""
    from scipy.special import zeta

    draw = partial(_letters, string.ascii_lowercase, 6)
    vocabulary = ["...", *_distinct(rng, draw, max(8, room // 50) - 1)]
    entries = [word for k, word in enumerate(vocabulary, 1) for _ in range(int(n * k**-2.0 / zeta(2.0)))]
    rng.shuffle(entries)
    return Draft(
        "The text below is written in code. Count how often each word of the code occurs; dots are no word.",
        [(word, word in vocabulary[1:4]) for word in entries],
        " ",
        "Question: Which three words of the code are the most frequent? Reply with these words and nothing else.",
        vocabulary[1:4],
    )


def paragraphs(rng: Random, n: int, room: int, read: tuple[Question, list[str]]) -> Draft:
    """A question, the paragraphs that answer it, and n others, those of its subject first. Paragraphs come again where
    there are too few to fill the prompt."""
    (question, answers, evidence, subject), every = read
    first = [*sorted(evidence), *rng.sample(sorted(subject - evidence), len(subject - evidence))]
    others = [text for text in every if text not in subject]
    order = first + rng.sample(others, len(others))
    chosen = [order[i % len(order)] for i in range(len(evidence) + n)]
    rng.shuffle(chosen)
    return Draft(
        "A question follows the passages below. They hold its answer.",
        [(f"Passage {i}:\n{text}", text in evidence) for i, text in enumerate(chosen, 1)],
        "\n\n",
        f"Question: {question}\nReply with the answer from the passages in a few words, without explanation.",
        answers,
    )


def _needle(kind: str, name: str, value: str) -> str:
    return f"One {kind} filed under {name} is {value}."


def _inserted(units: Sequence[str], pieces: Sequence[Piece], places: Sequence[int]) -> list[Piece]:
    """The units with each piece put before the unit at its place. places: ascending."""
    mixed = [(unit, False) for unit in units]
    for place, piece in zip(reversed(places), reversed(pieces), strict=True):
        mixed.insert(place, piece)
    return mixed


def _letters(alphabet: str, n: int, rng: Random) -> str:
    return "".join(rng.choices(alphabet, k=n))


def _distinct(rng: Random, draw: Callable[[Random], str], n: int) -> list[str]:
    """n different texts, from a function that draws one."""
    texts: dict[str, None] = {}
    while len(texts) < n:
        texts[draw(rng)] = None
    return list(texts)


DRAWN: dict[str, Callable[[Random], str]] = {
    "words": lambda rng: f"{rng.choice(words()['adjective'])}-{rng.choice(words()['noun'])}",
    "number": lambda rng: str(rng.randint(10**6, 10**7 - 1)),
    "uuid": lambda rng: str(uuid.UUID(int=rng.getrandbits(128), version=4)),
}


# ---- the tasks


@dataclass(frozen=True)
class Task:
    """How a task's drafts are built."""

    build: Build
    answer_tokens: int = 128  # room for the answer
    smallest: int = 1  # the fewest units of filler
    metric: str = "ruler_all"
    example: Build | None = None  # of a solved example before the draft
    example_units: int | None = None  # None: as many as EXAMPLE_TOKENS hold
    reads: Callable[[Fetch], list[str] | Questions] | None = None  # the text that the task needs


WORDS, UUIDS = ("words", "number"), ("uuid", "uuid")
IN_ESSAYS = partial(Task, smallest=50, reads=essays)
TASKS = {
    "niah_single_1": Task(partial(niah, "noise", (1, 1, 1), WORDS)),
    "niah_single_2": IN_ESSAYS(partial(niah, "essays", (1, 1, 1), WORDS)),
    "niah_single_3": IN_ESSAYS(partial(niah, "essays", (1, 1, 1), ("words", "uuid"))),
    "niah_multikey_1": IN_ESSAYS(partial(niah, "essays", (4, 1, 1), WORDS)),
    "niah_multikey_2": Task(partial(niah, "needles", (1, 1, 1), WORDS)),
    "niah_multikey_3": Task(partial(niah, "needles", (1, 1, 1), UUIDS)),
    "niah_multivalue": IN_ESSAYS(partial(niah, "essays", (1, 4, 1), WORDS)),
    "niah_multiquery": IN_ESSAYS(partial(niah, "essays", (4, 1, 4), WORDS)),
    "vt": Task(variables, 30, 5, example=partial(variables, letters=3)),
    "cwe": Task(common_words, 120, 1, example=partial(common_words, often=10), example_units=30),
    "fwe": Task(frequent_words, 50, 100),
    "qa_1": Task(paragraphs, 32, 0, "ruler_part", reads=squad),
    "qa_2": Task(paragraphs, 32, 0, "ruler_part", reads=hotpotqa),
}


# ---- the items


def sample(
    names: Sequence[str], n_items: int | None, seed: int, tokens: int, tokenizer: Any, fetch: Fetch
) -> list[Item]:
    """`n_items` items (None: ten of each task), equally over the named tasks; the same arguments give the same items.

    tokens: of prompt and answer together, by the tokenizer and with its chat template; items come as near to it from
    below as their filler allows. fetch: finds the public files essays, squad and hotpotqa where a task reads them.
    Spans: evidence and question. meta: answers, metric (ruler_all or ruler_part), max_new_tokens, prompt_tokens. Items
    whose shortest prompt is too long are left out, which is printed. Raises InputError if none is left, without
    tokenizer, and where a file cannot be had.
    """
    if tokenizer is None:
        raise InputError("ruler's items are counted in a model's own tokens: give its tokenizer")
    n_items, items, too_long = n_items or PER_TASK * len(names), [], []
    for at, name in enumerate(names[:n_items]):
        task = TASKS[name]
        read = task.reads(fetch) if task.reads else None
        for i in range(n_items // len(names) + (at < n_items % len(names))):
            item = _item(name, i, seed, tokens, tokenizer, read)
            size = item.meta["prompt_tokens"] + task.answer_tokens
            items += [item] if size <= tokens else []
            too_long += [size] if size > tokens else []
    if too_long:
        line = f"ruler: {len(too_long)} of {n_items} items take {min(too_long)} tokens and more > {tokens}"
        if not items:
            raise InputError(f"{line}: ask for more tokens")
        print(f"{line}, they are left out")
    return items


def _item(name: str, i: int, seed: int, tokens: int, tokenizer: Any, read: Any) -> Item:
    """The i-th item of a task, or the shortest one where even that is too long."""
    identity, task, given = f"{name}-{tokens}-{seed}-{i}", TASKS[name], read
    if task.build is paragraphs:
        questions, every = read
        given = Random(f"{name}-{seed}").sample(questions, len(questions))[i % len(questions)], every
    draft, size = _filled(task, identity, tokens - task.answer_tokens, given, tokenizer)
    content = draft.content
    spans = [Span("evidence", 0, *place) for place in draft.evidence()]
    spans.append(Span("question", 0, len(content) - len(draft.question), len(content)))
    answer = draft.answers[0] if task.metric == "ruler_part" else ", ".join(draft.answers)
    meta = {"answers": draft.answers, "metric": task.metric, "max_new_tokens": task.answer_tokens}
    meta["prompt_tokens"] = size
    return Item(identity, name, ({"role": "user", "content": content},), answer, tuple(spans), meta=meta, papers=True)


def _filled(task: Task, identity: str, room: int, read: Any, tokenizer: Any) -> tuple[Draft, int]:
    """A task's longest draft that fits, with its solved example, and its tokens. Where none fits, the shortest one."""

    def tokens(draft: Draft) -> int:
        prompt = rendered(tokenizer, [{"role": "user", "content": draft.content}])
        return len(tokenizer(prompt, add_special_tokens=False, verbose=False)["input_ids"])

    def example(n: int) -> Draft:
        return task.example(Random(f"{identity}-example"), n, room, read)

    def whole(n: int) -> Draft:
        draft = task.build(Random(identity), n, room, read)
        return replace(draft, intro=before + draft.intro)

    before = ""
    if task.example:
        units = task.example_units
        shown = example(units) if units else longest(example, tokens, EXAMPLE_TOKENS, task.smallest)[0]
        before = f"{shown.content}\nAnswer: {', '.join(shown.answers)}\n\n"
    return longest(whole, tokens, room, task.smallest)


def longest(
    build: Callable[[int], Draft], tokens: Callable[[Draft], int], room: int, smallest: int
) -> tuple[Draft, int]:
    """The draft with the most units of filler that has at most `room` tokens, and its tokens. It may stay up to
    room / 500 tokens shorter than possible. Where even the smallest draft is too long, that one.

    A search between bounds that guesses by the tokens per unit, because counting the tokens of a long text is slow.
    """
    low, best, size = smallest, build(smallest), 0
    size, high, guess, turn = tokens(best), 0, smallest + 32, 0  # high: too many units; 0: none known
    while size <= room and high != low + 1 and room - size > room // 500:
        draft = build(guess)
        count, turn = tokens(draft), turn + 1
        per_unit = max(0.01, (count - size) / (guess - low))
        if count > room:
            high = guess
        else:
            low, best, size = guess, draft, count
        guess = low + max(1, int((room - size) / per_unit))
        if high:
            guess = min(guess, high - 1) if turn % 4 else (low + high) // 2
    return best, size
