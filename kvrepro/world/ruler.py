"""RULER's thirteen tasks as a generator: needles, chains of variables, counted words and questions, at any length.

Tasks, counts, distributions, room for the answer and metrics are the benchmark's; the wording is ours. Source: Hsieh et
al. 2024, arXiv:2404.06654, and github.com/NVIDIA/RULER at c3f5e3b (scripts/synthetic.yaml, scripts/data/synthetic).
"""

import json
import re
import string
import uuid
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any

from kvrepro.errors import InputError, ensure_known
from kvrepro.item import Item, Span, rendered

NOISE = "Rain falls on the roof. The road runs south. Bread is baked at dawn. A clock ticks. Then it all begins again."
DEPTHS = [round(100 * i / 39) for i in range(40)]  # per cent of an essay's sentences before a needle
KINDS = {"number": "number", "uuid": "identifier"}  # kind of value -> its name in a prompt
EXAMPLE_TOKENS = 500  # of the solved example that precedes a chain of variables
PER_TASK = 10  # items of a task, where the user gives no number
LONG = 4096  # tokens of a prompt from which on listed words are repeated as often as in the benchmark
BORROWED = "artifact/data/longbench-balanced.jsonl"  # its passages replace the essays where these cannot be fetched

Fetch = Callable[[str], Path]  # the name of a public file or folder -> where it lies (kvrepro.experiment.data.fetch)
Piece = tuple[str, bool]  # a part of the context, and whether it holds the answer


# ---- what prompts are made of: words, essays, and questions about paragraphs


class Haystack:
    """Running text as words. A sentence ends with a word that ends in a full stop, question or exclamation mark."""

    def __init__(self, text: str, origin: str):  # origin: the source of the text
        self.words, self.origin = text.split(), origin
        self.ends = [i for i, word in enumerate(self.words, 1) if re.search(r"[.!?][\"'”’)\]]*$", word)]

    def sentences(self, n: int) -> list[str]:
        """The first n words, from the start again where the text is shorter; the last sentence may be cut."""
        size, bounds = len(self.words), [0]
        for start in range(0, n, size):
            bounds += [start + end for end in self.ends if start + end < n]
        words = self.words * -(-n // size)
        return [" ".join(words[a:b]) for a, b in zip(bounds, [*bounds[1:], n], strict=True)]


@dataclass(frozen=True)
class AskedQuestion:
    """A question with all its right answers and the numbers of its paragraphs."""

    question: str
    answers: list[str]
    evidence: list[int]  # the paragraphs that answer it
    near: list[int]  # those of the same subject, which are taken as distractors before any others


class Questions:
    """Questions about numbered paragraphs."""

    def __init__(self, paragraphs: Iterable[str]):
        self.paragraphs, self.questions = sorted(set(paragraphs)), list[AskedQuestion]()
        self.number = {text: i for i, text in enumerate(self.paragraphs)}

    def add(self, question: str, answers: list[str], evidence: set[str], subject: set[str]) -> None:
        """A question by the texts of the paragraphs that answer it, and of all of its subject."""
        numbers = (sorted(self.number[text] for text in texts) for texts in (evidence, subject - evidence))
        self.questions.append(AskedQuestion(question, answers, *numbers))


@cache
def words() -> dict[str, list[str]]:
    """English words by kind, "noun", "adjective" and "all" (verbs too), in alphabetical order. Source: wonderwords."""
    from wonderwords import RandomWord

    def words_of(*kinds: str) -> list[str]:
        listed = {word.strip().lower() for word in RandomWord().filter(include_categories=kinds)}
        return sorted(word for word in listed if re.fullmatch("[a-z-]+", word))

    return {"noun": words_of("noun"), "adjective": words_of("adjective"), "all": words_of("noun", "adjective", "verb")}


@cache
def essays(fetch: Fetch) -> Haystack:
    """The benchmark's essays, or else the passages of `BORROWED`, longest first. InputError if both cannot be had."""
    try:
        folder = fetch("essays")
        texts, origin = [file.read_text(encoding="utf-8") for file in sorted(folder.glob("*.txt"))], "essays"
    except InputError as error:
        try:
            lines = fetch(BORROWED).read_text(encoding="utf-8").splitlines()
        except InputError:
            raise error from None
        texts, origin = sorted({json.loads(line)["context"] for line in lines}, key=lambda t: (-len(t), t)), BORROWED
    return Haystack("\n".join(texts), origin)


@cache
def squad(fetch: Fetch) -> Questions:
    """SQuAD 2.0's answerable questions; `near` are the other paragraphs of the same article."""
    articles = json.loads(fetch("squad/dev-v2.0.json").read_text(encoding="utf-8"))["data"]
    read = Questions(paragraph["context"] for article in articles for paragraph in article["paragraphs"])
    for article in articles:
        subject = {paragraph["context"] for paragraph in article["paragraphs"]}
        for paragraph in article["paragraphs"]:
            for row in (row for row in paragraph["qas"] if not row["is_impossible"]):
                answers = list(dict.fromkeys(answer["text"] for answer in row["answers"]))
                read.add(row["question"], answers, {paragraph["context"]}, subject)
    return read


@cache
def hotpotqa(fetch: Fetch) -> Questions:
    """HotpotQA's questions about two paragraphs; `near` are the eight others that the data set gives with them."""
    rows = json.loads(fetch("hotpotqa/hotpot_dev_distractor_v1.json").read_text(encoding="utf-8"))
    texts = [{title: f"{title}\n{''.join(sentences)}" for title, sentences in row["context"]} for row in rows]
    read = Questions(text for by_title in texts for text in by_title.values())
    for row, by_title in zip(rows, texts, strict=True):
        evidence = {by_title[title] for title, _ in row["supporting_facts"] if title in by_title}
        read.add(row["question"], [row["answer"]], evidence, set(by_title.values()))
    return read


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
    filler: str, counts: tuple[int, int, int], kinds: Kinds, rng: Random, n: int, room: int, read: Haystack | None
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
        units, joint = read.sentences(n), " "
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


def common_words(
    rng: Random, n: int, room: int, read: Any, often: int = 30, seldom: int = 3, common: int = 10
) -> Draft:
    """A numbered list with `common` words that occur `often` times each, and n words that occur `seldom` times each."""
    listed = words()["all"].copy()
    rng.shuffle(listed)
    if (more := common + n - len(listed)) > 0:  # where the benchmark takes another list
        listed += _distinct(rng, DRAWN["words"], more)
    top, rest = listed[:common], listed[common : common + n]
    entries = [(word, True) for word in top * often] + [(word, False) for word in rest * seldom]
    rng.shuffle(entries)
    return Draft(
        "Below is a numbered list of words. Some words stand in it more often than the others: keep those in mind.",
        [(f"{i}. {word}", is_common) for i, (word, is_common) in enumerate(entries, 1)],
        " ",
        f"Question: Which {common} words are the most frequent in the list? Reply with these words and nothing else.",
        top,
    )


def frequent_words(rng: Random, n: int, room: int, read: Any, alpha: float = 2.0, letters: int = 6) -> Draft:
    """Made-up words; the k-th occurs n k^-alpha / zeta(alpha) times. The first is dots, and the question asks for the
    next three. There is a word for every 50 tokens of the prompt."""
    from scipy.special import zeta

    draw = partial(_letters, string.ascii_lowercase, letters)
    vocabulary = ["...", *_distinct(rng, draw, max(8, room // 50) - 1)]
    entries = [word for k, word in enumerate(vocabulary, 1) for _ in range(int(n * k**-alpha / zeta(alpha)))]
    rng.shuffle(entries)
    return Draft(
        "The text below is written in code. Count how often each word of the code occurs; dots are no word.",
        [(word, word in vocabulary[1:4]) for word in entries],
        " ",
        "Question: Which three words of the code are the most frequent? Reply with these words and nothing else.",
        vocabulary[1:4],
    )


def paragraphs(rng: Random, n: int, room: int, read: tuple[AskedQuestion, list[str]]) -> Draft:
    """A question, the paragraphs that answer it, and n others, those of its subject first. Paragraphs come again where
    there are too few to fill the prompt."""
    question, listed = read
    first = [*question.evidence, *rng.sample(question.near, len(question.near))]
    others = sorted({*range(len(listed))} - {*first})
    order = first + rng.sample(others, len(others))
    chosen = [order[i % len(order)] for i in range(len(question.evidence) + n)]
    rng.shuffle(chosen)
    return Draft(
        "A question follows the passages below. They hold its answer.",
        [(f"Passage {i}:\n{listed[which]}", which in question.evidence) for i, which in enumerate(chosen, 1)],
        "\n\n",
        f"Question: {question.question}\nReply with the answer from the passages in a few words, without explanation.",
        question.answers,
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


# ---- the metrics


def string_match_all(prediction: str, references: Collection[str]) -> float:
    """Share of the references that the prediction contains, in upper or lower case."""
    return sum(reference.lower() in prediction.lower() for reference in references) / len(references)


def string_match_part(prediction: str, references: Collection[str]) -> float:
    """1 if the prediction contains one of the references, in upper or lower case, else 0."""
    return float(any(reference.lower() in prediction.lower() for reference in references))


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
    reads: Callable[[Fetch], Haystack | Questions] | None = None  # the text that the task needs
    form: str = ""  # what is smaller than in the benchmark


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
# The benchmark's own form of "cwe" for prompts of less than 4,096 tokens
EXAMPLE = partial(common_words, often=3, seldom=1)
FEWER = Task(partial(common_words, often=6, seldom=1), 120, 1, "ruler_all", EXAMPLE, 10, form="fewer repetitions")


def _forms(name: str, tokens: int) -> list[Task]:
    """A task's forms for prompts of so many tokens; the first that fits is taken: whole, smaller, without example."""
    forms = [TASKS[name]]
    if name == "cwe":
        forms = [FEWER] if tokens < LONG else [*forms, FEWER]
    return [*forms, replace(forms[-1], example=None, form="no example")] if forms[-1].example else forms


# ---- the items


def named(tasks: str) -> list[str]:
    """The tasks of "vt,cwe", all thirteen for "". Raises InputError for others."""
    names = list(dict.fromkeys(tasks.split(","))) if tasks else list(TASKS)
    ensure_known("RULER task", names, TASKS)
    return names


def sample(tasks: str, n_items: int | None, seed: int, tokens: int, tokenizer: Any, fetch: Fetch) -> list[Item]:
    """`n_items` items (None: ten of each task), equally over the tasks; the same arguments give the same items.

    tasks: names with commas between them, "" for all thirteen. tokens: of prompt and answer together, by the tokenizer
    and with its chat template; items come as near to it from below as their filler allows. fetch: finds the public
    files essays, squad and hotpotqa where a task reads them.
    Spans: evidence and question. meta: answers, metric (ruler_all or ruler_part), max_new_tokens, prompt_tokens, depths
    (the place of the evidence in the context, 0 to 1), filler (the source of the haystack's text), form (what is
    smaller than in the benchmark). Items whose shortest prompt is too long are left out, which is printed. Raises
    InputError if none is left, for an unknown task, without tokenizer, and where a file cannot be had.
    """
    names = named(tasks)
    if tokenizer is None:
        raise InputError("ruler's items are counted in a model's own tokens: give its tokenizer")
    n_items = n_items or PER_TASK * len(names)
    wanted = names[:n_items]
    read = {name: reads(fetch) for name in wanted if (reads := TASKS[name].reads)}
    drawn = [
        _item(name, i, seed, tokens, tokenizer, read.get(name))
        for at, name in enumerate(wanted)
        for i in range(n_items // len(names) + (at < n_items % len(names)))
    ]
    items = [item for item in drawn if isinstance(item, Item)]
    if too_long := [needed for needed in drawn if isinstance(needed, int)]:
        line = f"ruler: {len(too_long)} of {n_items} items take {min(too_long)} tokens and more > {tokens}"
        if not items:
            raise InputError(f"{line}: ask for more tokens")
        print(f"{line}, they are left out")
    return items


def _item(name: str, i: int, seed: int, tokens: int, tokenizer: Any, read: Any) -> Item | int:
    """The i-th item of a task; where even its shortest prompt is too long, the tokens of that prompt and the answer."""
    identity, given = f"{name}-{tokens}-{seed}-{i}", read
    if isinstance(read, Questions):
        order = Random(f"{name}-{seed}").sample(read.questions, len(read.questions))
        given = order[i % len(order)], read.paragraphs
    for task in _forms(name, tokens):
        draft, size = _filled(task, identity, tokens - task.answer_tokens, given, tokenizer)
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
    meta = {"answers": draft.answers, "metric": task.metric, "max_new_tokens": task.answer_tokens}
    meta |= {"prompt_tokens": size, "depths": [round((start - context) / length, 4) for start, _ in places]}
    meta |= {"filler": read.origin if isinstance(read, Haystack) else "", "form": task.form}
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
