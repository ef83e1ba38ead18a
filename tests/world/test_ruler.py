"""RULER's items: a solver that knows only the text answers all thirteen tasks; counts, lengths, spans and metrics."""

import itertools
import json
import re
from collections import Counter

import checkpoint
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrepro.errors import InputError
from kvrepro.experiment import data, measure
from kvrepro.world import ruler, world
from studies.training.rows import build

TOKENIZERS = {"words": build(), "bytes": checkpoint.tokenizer()}
ESSAY = " ".join(world.pretty(sentence) for sentence in world.FILLER)
NAMES = [
    f"{first}{last}" for first in "Abo Bexi Cadu Delo Epa Fira".split() for last in "dale ford ham mere wick".split()
]
UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
NEEDLE = re.compile(r"One (number|identifier) filed under (\S+) is (\S+)\.(?=\s)")


@pytest.fixture(scope="module")
def fetch(tmp_path_factory):
    """Files of the public ones' form: two essays, six articles of five towns, questions over two paragraphs of ten."""
    folder = tmp_path_factory.mktemp("public")
    for name in ("essays", "squad", "hotpotqa"):
        (folder / name).mkdir()
    half = ESSAY.index(".", len(ESSAY) // 2) + 1
    (folder / "essays" / "b.txt").write_text(ESSAY[half:])
    (folder / "essays" / "a.txt").write_text(ESSAY[:half])

    def town(name):
        answers = [{"text": f"Miss {name[::-1]}"}, {"text": f"Miss {name[::-1]}"}, {"text": name[::-1]}]
        answerable = {"question": f"Who rules {name}?", "answers": answers, "is_impossible": False}
        nobody = {"question": f"Who left {name}?", "answers": [], "is_impossible": True}
        return {
            "context": f"In {name} it rains. Miss {name[::-1]} rules {name}. {ESSAY[:300]}",
            "qas": [answerable, nobody],
        }

    articles = [{"paragraphs": [town(name) for name in NAMES[i : i + 5]]} for i in range(0, 30, 5)]
    (folder / "squad" / "dev-v2.0.json").write_text(json.dumps({"data": articles}))

    def row(i):
        around = [NAMES[(i + j) % 30] for j in range(8)]
        context = [[f"Hall {i}", [f"Hall {i} is old.", f" Architect {i} built hall {i}."]]]
        context += [[name, [f"{name} is a town.", " It has a well."]] for name in around]
        context += [[f"Architect {i}", [f"Architect {i} was born in {NAMES[i]}hill."]]]
        facts = [[f"Hall {i}", 1], [f"Architect {i}", 0]]
        question = f"Where was the builder of hall {i} born?"
        return {"question": question, "answer": f"{NAMES[i]}hill", "context": context, "supporting_facts": facts}

    (folder / "hotpotqa" / "hotpot_dev_distractor_v1.json").write_text(json.dumps([row(i) for i in range(30)]))
    return folder.joinpath


def content(item):
    return item.messages[0]["content"]


def parts(item):
    """The context and the question, the solved example left out."""
    body = content(item).rpartition("\nAnswer: ")[2]
    body, _, question = body.rpartition("Question: ")
    return body, question


def texts(item, name):
    return [content(item)[span.start : span.end] for span in item.spans if span.name == name]


def solve(task, body, question):
    """All that answers the question, read from the text alone."""
    if task.startswith("niah"):
        names = re.split(", | and ", re.search(r"filed under (.*?)\?", question)[1])
        return [value for name in names for _, key, value in NEEDLE.findall(body) if key == name]
    if task == "vt":
        reached = [re.search(r"value (\d+),", question)[1]]
        for name, value in re.findall(r"Let (\w+) be (\w+)\.", body):
            reached += [name] if value in reached else []
        return reached[1:]
    if task == "cwe":
        return [word for word, _ in Counter(re.findall(r"\d+\. (\S+)", body)).most_common(10)]
    if task == "fwe":
        words = Counter(re.findall(r"(?<!\S)[a-z]{6}(?!\S)", body.partition("\n\n")[2] or body))
        return [word for word, _ in words.most_common(3)]
    if task == "qa_1":
        town = re.search(r"Who rules (\w+)", question)[1]
        return re.findall(rf"(\S+ \S+) rules {town}\.", body)[:1]
    hall = re.search(r"builder of (hall \d+) born", question)[1]
    builder = re.search(rf"(Architect \d+) built {hall}\.", body)[1]
    return re.findall(rf"{builder} was born in (\w+)\.", body)[:1]


def tokens_of(item, at, limit):
    """Tokens of the prompt with the room for its answer, counted by what builds prompts."""
    return len(data.build_prompt(item, at, limit).ids) + item.meta["max_new_tokens"]


@pytest.fixture(scope="module", params=TOKENIZERS)
def items(request, fetch):
    """Three items of each task."""
    at = TOKENIZERS[request.param]
    return at, ruler.sample(list(ruler.TASKS), 39, 7, 8192, at, fetch)


# ---- answers follow from the text, and from the evidence alone


def scorer(item):
    """score(prediction, references), by the metric that its row would have."""
    return lambda prediction, answers: measure.official(prediction, answers, item.meta)["official"]


def test_the_solver_answers_all_thirteen_tasks(items):
    at, drawn = items
    assert Counter(item.task for item in drawn) == dict.fromkeys(ruler.TASKS, 3)
    for item in drawn:
        prediction = solve(item.task, *parts(item))
        score = scorer(item)
        assert score(", ".join(prediction), item.meta["answers"]) == 1, item.id
        assert set(prediction) == set(item.meta["answers"]) or item.task == "qa_1", item.id
        assert score(item.answer, item.meta["answers"]) == 1
        assert score("I do not know", item.meta["answers"]) == 0


def test_the_evidence_alone_answers_and_without_it_nothing_does(items):
    for item in items[1]:
        body, question = parts(item)
        score = scorer(item)
        evidence = texts(item, "evidence")
        assert score(", ".join(solve(item.task, "\n".join([*evidence, ""]), question)), item.meta["answers"]) == 1, (
            item.id
        )
        for piece in {*evidence}:
            body = body.replace(piece, "")
        if item.task not in ("vt", "qa_2"):
            assert score(", ".join(solve(item.task, body, question)), item.meta["answers"]) == 0, item.id
        assert texts(item, "question") == [f"Question: {question}"]


# ---- what the benchmark defines


NIAH = {  # task -> names filed (None: as many as lines), values of each, names asked, of what a value consists
    "niah_single_1": (1, 1, 1, r"\d{7}"), "niah_single_2": (1, 1, 1, r"\d{7}"), "niah_single_3": (1, 1, 1, UUID),
    "niah_multikey_1": (4, 1, 1, r"\d{7}"), "niah_multikey_2": (None, 1, 1, r"\d{7}"),
    "niah_multikey_3": (None, 1, 1, UUID), "niah_multivalue": (1, 4, 1, r"\d{7}"),
    "niah_multiquery": (4, 1, 4, r"\d{7}"),
}  # fmt: skip


def test_needles_are_as_many_and_of_the_kind_that_the_benchmark_says(items):
    for item in (item for item in items[1] if item.task in NIAH):
        names, values, queries, form = NIAH[item.task]
        body, _ = parts(item)
        needles = NEEDLE.findall(body)
        filed = Counter(name for _, name, _ in needles)
        assert len(filed) == (body.strip().count("\n") - 1 if names is None else names)
        assert set(filed.values()) == {values}
        assert len({value for *_, value in needles}) == len(needles)
        assert len(item.meta["answers"]) == queries * values == len(texts(item, "evidence"))
        assert all(re.fullmatch(form, value) for *_, value in needles)


# ---- lengths


@pytest.mark.parametrize(("name", "tokens"), [("words", 4096), ("bytes", 4096), ("words", 8192), ("bytes", 32768)])
def test_prompts_fill_the_length_and_never_exceed_it(fetch, name, tokens):
    at = TOKENIZERS[name]
    for item in ruler.sample(list(ruler.TASKS), 13, 2, tokens, at, fetch):
        used = tokens_of(item, at, tokens)
        assert used == item.meta["prompt_tokens"] + item.meta["max_new_tokens"]
        assert 0.95 * tokens <= used <= tokens, item.id


@given(st.lists(st.integers(1, 9), min_size=40, max_size=400), st.integers(20, 2000), st.integers(1, 40))
def test_longest_is_the_longest(units, room, smallest):
    total = [0, *itertools.accumulate(units + [9] * 2000)]
    n, size = ruler.longest(lambda n: n, lambda n: total[n], room, smallest)
    assert size == total[n]
    assert size <= room or n == smallest
    assert n >= smallest
    if total[smallest] <= room:
        assert total[n + 1] > room or room - size <= room // 500


@given(st.lists(st.sampled_from(["one", "two.", 'three?"', "four"]), min_size=1), st.integers(1, 60))
def test_sentences_are_the_first_words_again_and_again(listed, n):
    sentences = ruler.sentences(listed, n)
    assert " ".join(sentences).split() == [listed[i % len(listed)] for i in range(n)]
    assert all(re.search(r"[.?]", sentence.split()[-1]) for sentence in sentences[:-1])


# ---- seeds, sources, bad input


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer": None}, "give its tokenizer"),
        ({"tokens": 300}, r"1 of 1 items take \d+ tokens and more > 300: ask for more tokens"),
    ],
)
def test_bad_input_is_one_line(changes, message):
    usual = {"names": ["vt"], "n_items": 1, "seed": 0, "tokens": 1000, "tokenizer": TOKENIZERS["bytes"], "fetch": None}
    with pytest.raises(InputError, match=message) as error:
        ruler.sample(**usual | changes)
    assert "\n" not in str(error.value)
