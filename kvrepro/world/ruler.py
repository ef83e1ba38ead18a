"""RULER's thirteen tasks as a generator: needles, chains of variables, counted words and questions, at any length.

Tasks, counts, distributions, room for the answer and metrics are the benchmark's; the wording is ours. Source: Hsieh et
al. 2024, arXiv:2404.06654, and github.com/NVIDIA/RULER at c3f5e3b (scripts/synthetic.yaml, scripts/data/synthetic).
"""

import json
import random
import re
import string
import uuid
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from kvrepro.chat import rendered
from kvrepro.errors import InputError, ensure_known
from kvrepro.item import Item, Span

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


@dataclass(frozen=True)
class Haystack:
    """Running text as words."""

    words: Sequence[str]
    ends: Sequence[int]  # of sentences: the number of words before each end
    origin: str  # the source of the text

    def sentences(self, n: int) -> list[str]:
        """The first n words, from the start again where the text is shorter; the last sentence may be cut."""
        size, bounds = len(self.words), [0]
        for start in range(0, n, size):
            bounds += [start + end for end in self.ends if start + end < n]
        words = [*self.words] * -(-n // size)
        return [" ".join(words[a:b]) for a, b in zip(bounds, [*bounds[1:], n], strict=True)]


@dataclass(frozen=True)
class AskedQuestion:
    """A question with all its right answers and the numbers of its paragraphs."""

    question: str
    answers: list[str]
    evidence: list[int]  # the paragraphs that answer it
    near: list[int]  # those of the same subject, which are taken as distractors before any others


@dataclass(frozen=True)
class Questions:
    """Questions about numbered paragraphs."""

    paragraphs: list[str]
    questions: list[AskedQuestion]


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
    return haystack("\n".join(texts), origin)


def haystack(text: str, origin: str) -> Haystack:
    """A text as words. A sentence ends with a word that ends in a full stop, question mark or exclamation mark."""
    listed = text.split()
    return Haystack(listed, [i for i, word in enumerate(listed, 1) if re.search(r"[.!?][\"'”’)\]]*$", word)], origin)


@cache
def squad(fetch: Fetch) -> Questions:
    """SQuAD 2.0's answerable questions; `near` are the other paragraphs of the same article."""
    articles = json.loads(fetch("squad/dev-v2.0.json").read_text(encoding="utf-8"))["data"]
    contexts = [[paragraph["context"] for paragraph in article["paragraphs"]] for article in articles]
    number = _numbers(context for article in contexts for context in article)
    questions = []
    for article, texts in zip(articles, contexts, strict=True):
        for paragraph in article["paragraphs"]:
            own_number = number[paragraph["context"]]
            near = sorted({number[text] for text in texts} - {own_number})
            for row in paragraph["qas"]:
                if not row["is_impossible"]:
                    answers = list(dict.fromkeys(answer["text"] for answer in row["answers"]))
                    questions.append(AskedQuestion(row["question"], answers, [own_number], near))
    return Questions(list(number), questions)


@cache
def hotpotqa(fetch: Fetch) -> Questions:
    """HotpotQA's questions about two paragraphs; `near` are the eight others that the data set gives with them."""
    rows = json.loads(fetch("hotpotqa/hotpot_dev_distractor_v1.json").read_text(encoding="utf-8"))
    texts = [{title: f"{title}\n{''.join(sentences)}" for title, sentences in row["context"]} for row in rows]
    number = _numbers(text for by_title in texts for text in by_title.values())
    questions = []
    for row, by_title in zip(rows, texts, strict=True):
        titles = {title for title, _ in row["supporting_facts"]}
        evidence = sorted({number[text] for title, text in by_title.items() if title in titles})
        near = sorted({number[text] for text in by_title.values()} - set(evidence))
        questions.append(AskedQuestion(row["question"], [row["answer"]], evidence, near))
    return Questions(list(number), questions)


def _numbers(texts: Iterable[str]) -> dict[str, int]:
    """Each distinct text, in alphabetical order, with its number."""
    return {text: i for i, text in enumerate(sorted(set(texts)))}


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


@dataclass(frozen=True)
class Material:
    """What an item's draft is made from, in addition to random numbers and the number of units."""

    room: int  # tokens that the prompt may have
    index: int  # of the question in `read`
    read: Any = None  # a Haystack, or Questions


Build = Callable[[random.Random, int, Material], Draft]  # n: units of filler


def niah(
    rng: random.Random,
    n: int,
    material: Material,
    filler: str,
    names: int = 1,
    values: int = 1,
    queries: int = 1,
    key: str = "words",
    value: str = "number",
) -> Draft:
    """Each of `names` names has `values` values filed under it; the question asks for `queries` of the names.

    filler: "noise" (n lines), "essays" (n words), or "needles" (n more names, each with a value of its own).
    """
    count = max(names, queries)
    drawn_names = _distinct(rng, key, count + (n if filler == "needles" else 0))
    filed, others = drawn_names[:count], drawn_names[count:]
    drawn = _distinct(rng, value, len(filed) * values + len(others))
    values_of = {name: drawn[i * values : (i + 1) * values] for i, name in enumerate(filed)}
    queried, kind = rng.sample(filed, queries), KINDS[value]
    needles = [(_needle(kind, name, number), name in queried) for name in filed for number in values_of[name]]
    rng.shuffle(needles)
    if filler == "essays":
        units, joint = material.read.sentences(n), " "
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


def variables(rng: random.Random, n: int, material: Material, letters: int = 5) -> Draft:
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
    rng: random.Random, n: int, material: Material, often: int = 30, seldom: int = 3, common: int = 10
) -> Draft:
    """A numbered list with `common` words that occur `often` times each, and n words that occur `seldom` times each."""
    listed = words()["all"].copy()
    rng.shuffle(listed)
    if (more := common + n - len(listed)) > 0:  # where the benchmark takes another list
        listed += _distinct(rng, "words", more)
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


def frequent_words(rng: random.Random, n: int, material: Material, alpha: float = 2.0, letters: int = 6) -> Draft:
    """Made-up words; the k-th occurs n k^-alpha / zeta(alpha) times. The first is dots, and the question asks for the
    next three. There is a word for every 50 tokens of the prompt."""
    from scipy.special import zeta

    draw = partial(_letters, string.ascii_lowercase, letters)
    vocabulary = ["...", *_distinct(rng, draw, max(8, material.room // 50) - 1)]
    entries = [word for k, word in enumerate(vocabulary, 1) for _ in range(int(n * k**-alpha / zeta(alpha)))]
    rng.shuffle(entries)
    return Draft(
        "The text below is written in code. Count how often each word of the code occurs; dots are no word.",
        [(word, word in vocabulary[1:4]) for word in entries],
        " ",
        "Question: Which three words of the code are the most frequent? Reply with these words and nothing else.",
        vocabulary[1:4],
    )


def paragraphs(rng: random.Random, n: int, material: Material) -> Draft:
    """A question, the paragraphs that answer it, and n others, those of its subject first. Paragraphs come again where
    there are too few to fill the prompt."""
    question, listed = material.read.questions[material.index], material.read.paragraphs
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


def _inserted(units: Sequence[str], pieces: Iterable[Piece], places: Sequence[int]) -> list[Piece]:
    """The units with each piece put before the unit at its place. places: ascending."""
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
    texts: dict[str, None] = {}
    while len(texts) < n:
        texts[draw(rng)] = None
    return list(texts)


DRAWN: dict[str, Callable[[random.Random], str]] = {
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


TASKS = {
    "niah_single_1": Task(partial(niah, filler="noise")),
    "niah_single_2": Task(partial(niah, filler="essays"), smallest=50, reads=essays),
    "niah_single_3": Task(partial(niah, filler="essays", value="uuid"), smallest=50, reads=essays),
    "niah_multikey_1": Task(partial(niah, filler="essays", names=4), smallest=50, reads=essays),
    "niah_multikey_2": Task(partial(niah, filler="needles")),
    "niah_multikey_3": Task(partial(niah, filler="needles", key="uuid", value="uuid")),
    "niah_multivalue": Task(partial(niah, filler="essays", values=4), smallest=50, reads=essays),
    "niah_multiquery": Task(partial(niah, filler="essays", queries=4), smallest=50, reads=essays),
    "vt": Task(variables, 30, 5, example=partial(variables, letters=3)),
    "cwe": Task(common_words, 120, 1, example=partial(common_words, often=10), example_units=30),
    "fwe": Task(frequent_words, 50, 100),
    "qa_1": Task(paragraphs, 32, 0, "ruler_part", reads=squad),
    "qa_2": Task(paragraphs, 32, 0, "ruler_part", reads=hotpotqa),
}
# The benchmark's own form of "cwe" for prompts of less than 4,096 tokens
FEWER = replace(
    TASKS["cwe"],
    build=partial(common_words, often=6, seldom=1),
    form="fewer repetitions",
    example=partial(common_words, often=3, seldom=1),
    example_units=10,
)


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
    counts = [n_items // len(names) + (i < n_items % len(names)) for i in range(len(names))]
    wanted = [(name, count) for name, count in zip(names, counts, strict=True) if count]
    read = {name: TASKS[name].reads(fetch) for name, _ in wanted if TASKS[name].reads}
    items: list[Item] = []
    too_long: list[int] = []  # tokens that items need which do not fit
    for name, count in wanted:
        for i in range(count):
            item = _item(name, i, seed, tokens, tokenizer, read.get(name))
            if isinstance(item, Item):
                items.append(item)
            else:
                too_long.append(item)
    if too_long:
        line = f"ruler: {len(too_long)} of {n_items} items take {min(too_long)} tokens and more > {tokens}"
        if not items:
            raise InputError(f"{line}: ask for more tokens")
        print(f"{line}, they are left out")
    return items


def _item(name: str, i: int, seed: int, tokens: int, tokenizer: Any, read: Haystack | Questions | None) -> Item | int:
    """The i-th item of a task; where even its shortest prompt is too long, the tokens of that prompt and the answer."""
    identity, index = f"{name}-{tokens}-{seed}-{i}", 0
    if isinstance(read, Questions):
        order = random.Random(f"{name}-{seed}").sample(range(len(read.questions)), len(read.questions))
        index = order[i % len(order)]
    for task in _forms(name, tokens):
        draft, size = _filled(task, identity, Material(tokens - task.answer_tokens, index, read), tokenizer)
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


def _filled(task: Task, identity: str, material: Material, tokenizer: Any) -> tuple[Draft, int]:
    """A task's longest draft that fits, with its solved example, and its tokens. Where none fits, the shortest one."""

    def tokens(draft: Draft) -> int:
        messages = [{"role": "user", "content": draft.content}]
        prompt = rendered(tokenizer, messages)
        return len(tokenizer(prompt, add_special_tokens=False, verbose=False)["input_ids"])

    def example(n: int) -> Draft:
        return task.example(random.Random(f"{identity}-example"), n, material)

    def whole(n: int) -> Draft:
        draft = task.build(random.Random(identity), n, material)
        return replace(draft, intro=before + draft.intro)

    before = ""
    if task.example:
        units = task.example_units
        shown = example(units) if units else longest(example, tokens, EXAMPLE_TOKENS, task.smallest)[0]
        before = f"{shown.content}\nAnswer: {', '.join(shown.answers)}\n\n"
    return longest(whole, tokens, material.room, task.smallest)


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
