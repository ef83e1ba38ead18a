"""RULER's items: a solver that knows only the text answers all thirteen tasks; counts, lengths, spans and metrics."""

import itertools
import json
import random
import re
import time
import uuid
from collections import Counter

import checkpoint
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrepro.errors import InputError
from kvrepro.experiment import data, measure
from kvrepro.world import ruler, ruler_text, tokenizer, world

TOKENIZERS = {"words": tokenizer.build(), "bytes": checkpoint.tokenizer()}
ESSAY = " ".join(world.pretty(sentence) for sentence in world.FILLER)
NAMES = [
    f"{first}{last}" for first in "Abo Bexi Cadu Delo Epa Fira".split() for last in "dale ford ham mere wick".split()
]
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
    """Three items of each task at 4,096 tokens."""
    at = TOKENIZERS[request.param]
    return at, ruler.sample("", 39, 7, 4096, at, fetch)


# ---- answers follow from the text, and from the evidence alone


def scorer(item):
    """score(prediction, references), by the metric that its row would have."""
    score = measure.METRICS[item.meta["metric"]]
    return lambda prediction, answers: score(prediction, answers, ())


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
        assert all(0 <= depth <= 1 for depth in item.meta["depths"])
        assert item.meta["depths"] == sorted(item.meta["depths"])
        assert len(item.meta["depths"]) == len(evidence)


def test_evidence_reaches_the_tokens_of_the_prompt(fetch):
    at = TOKENIZERS["bytes"]
    for item in ruler.sample("niah_single_1,vt,fwe", 3, 1, 2000, at, fetch):
        prompt = data.build_prompt(item, at, 2000)
        decoded = at.decode([prompt.ids[i] for i in prompt.spans["evidence"]])
        assert all(answer in decoded for answer in item.meta["answers"])
        assert at.decode([prompt.ids[i] for i in prompt.spans["question"]]).strip() == texts(item, "question")[0]


# ---- what the benchmark defines


NIAH = {  # task -> names filed (None: as many as lines), values of each, names asked, form of name and of value
    "niah_single_1": (1, 1, 1, "words", "number"), "niah_single_2": (1, 1, 1, "words", "number"),
    "niah_single_3": (1, 1, 1, "words", "uuid"), "niah_multikey_1": (4, 1, 1, "words", "number"),
    "niah_multikey_2": (None, 1, 1, "words", "number"), "niah_multikey_3": (None, 1, 1, "uuid", "uuid"),
    "niah_multivalue": (1, 4, 1, "words", "number"), "niah_multiquery": (4, 1, 4, "words", "number"),
}  # fmt: skip
FORMS = {
    "words": lambda text: re.fullmatch(r"[a-z-]+-[a-z-]+", text),
    "number": lambda text: re.fullmatch(r"[1-9]\d{6}", text),
    "uuid": lambda text: uuid.UUID(text).version == 4 and str(uuid.UUID(text)) == text,
}


def test_needles_are_as_many_and_of_the_kind_that_the_benchmark_says(items):
    for item in items[1]:
        if item.task not in NIAH:
            continue
        names, values, queries, name_form, value_form = NIAH[item.task]
        body, _ = parts(item)
        needles = NEEDLE.findall(body)
        filed = Counter(name for _, name, _ in needles)
        if names is None:
            assert len(filed) == len(needles) == body.strip().count("\n") - 1
        else:
            assert len(filed) == names
        assert set(filed.values()) == {values}
        assert len({value for *_, value in needles}) == len(needles)
        assert len(item.meta["answers"]) == queries * values == len(texts(item, "evidence"))
        assert all(FORMS[name_form](name) and FORMS[value_form](value) for _, name, value in needles)
        assert (ruler.NOISE in body) == (item.task == "niah_single_1")
        assert item.meta["max_new_tokens"] == 128


def test_needles_stand_between_the_essays_sentences(fetch):
    [item] = ruler.sample("niah_multivalue", 1, 3, 8192, TOKENIZERS["bytes"], fetch)
    context = parts(item)[0].split("\n\n")[1]
    rest = re.sub(r"(^| )One number filed under \S+ is \d+\.", "", context).strip()
    assert rest == " ".join((f"{ESSAY} " * 9).split()[: len(rest.split())])
    before = [len(re.findall(r"[a-z]\.", context[: m.start()])) for m in NEEDLE.finditer(f"{context} ")]
    share = [100 * n / len(re.findall(r"\.", rest)) for n in before]
    assert all(any(abs(s - depth) < 1 for depth in ruler.DEPTHS) for s in share)
    assert len(ruler.DEPTHS) == len(set(ruler.DEPTHS)) == 40
    assert ruler.DEPTHS[0] == 0
    assert ruler.DEPTHS[-1] == 100


def test_a_chain_has_five_variables_in_order_and_a_solved_example(items):
    for item in (item for item in items[1] if item.task == "vt"):
        assignments = re.findall(r"Let (\w+) be (\w+)\.", parts(item)[0])
        assert [name for name, _ in assignments] == item.meta["answers"]
        assert [value for _, value in assignments[1:]] == item.meta["answers"][:-1]
        assert len(assignments) == 5
        assert all(re.fullmatch("[A-Z]{5}", name) for name, _ in assignments)
        assert re.fullmatch(r"[1-9]\d{4}", assignments[0][1])
        example, _, answer = content(item).split("\n\nThe text below")[0].rpartition("\nAnswer: ")
        assert solve("vt", *example.rpartition("Question: ")[::2]) == answer.split(", ")
        assert all(re.fullmatch("[A-Z]{3}", name) for name in answer.split(", "))


def test_common_words_occur_as_often_as_the_benchmark_says(items):
    at, drawn = items
    for item in (item for item in drawn if item.task == "cwe"):
        entries = re.findall(r"(\d+)\. (\S+)", parts(item)[0])
        often, seldom = (30, 3) if at is TOKENIZERS["words"] else (6, 1)  # 300 entries of bytes fill no 4,096 tokens
        counts = Counter(word for _, word in entries)
        assert [int(number) for number, _ in entries] == list(range(1, len(entries) + 1))
        assert sorted(word for word in counts if counts[word] == often) == sorted(item.meta["answers"])
        assert Counter(counts.values()) == {often: 10, seldom: len(counts) - 10}
        shown = Counter(re.findall(r"\d+\. (\S+)", content(item).rpartition("\nAnswer: ")[0]))
        assert Counter(shown.values()) == ({10: 10, 3: 30} if often == 30 else {3: 10, 1: 10})


def test_more_words_than_the_list_has_are_made_of_two():
    n = len(ruler_text.words()["all"])
    draft = ruler.common_words(random.Random(1), n, None, often=2, seldom=1)
    assert len({piece.split(" ")[1] for piece, _ in draft.pieces}) == n + 10


def test_coded_words_follow_the_zeta_distribution(items):
    at, drawn = items
    for item in (item for item in drawn if item.task == "fwe"):
        words = parts(item)[0].split("\n\n")[1].split(" ")
        counts = Counter(words)
        assert counts.most_common(1)[0][0] == "..."
        del counts["..."]
        ranked = [words.count("..."), *(n for _, n in counts.most_common())]
        assert all(abs(n - ranked[0] / k**2) < 1 for k, n in enumerate(ranked, 1))
        assert ranked[3] > ranked[4]
        total = ranked[0] * sum(1 / k**2 for k in range(1, 10**5))  # the first has 1 / zeta(2) of all
        assert len(words) <= total + 2
    draft = ruler.frequent_words(random.Random(1), 20000, ruler.Material(room=5000, index=0))
    assert len({word for word, _ in draft.pieces}) == 5000 // 50


def test_paragraphs_of_the_same_subject_come_first(fetch):
    at = TOKENIZERS["bytes"]
    for tokens in (2000, 4096):
        [item] = ruler.sample("qa_1", 1, 5, tokens, at, fetch)
        body, question = parts(item)
        towns = re.findall(r"In (\w+) it rains", body)
        assert [int(i) for i in re.findall(r"Passage (\d+):\n", body)] == list(range(1, len(towns) + 1))
        town = NAMES.index(re.search(r"rules (\w+)\?", question)[1])
        article = set(NAMES[town - town % 5 : town - town % 5 + 5])
        assert len(set(towns)) == len(towns)
        assert len(set(towns) & article) == min(5, len(towns))
    assert len(towns) > 5
    [item] = ruler.sample("qa_2", 1, 5, 2000, at, fetch)
    titles = re.findall(r"Passage \d+:\n(.*)", content(item))
    assert sum(title.startswith(("Hall", "Architect")) for title in titles) >= 2
    assert len(texts(item, "evidence")) == 2


def test_answers_that_cannot_be_had_are_not_asked(fetch):
    questions = ruler_text.squad(fetch)
    assert len(questions.questions) == len(questions.paragraphs) == 30
    assert not any("left" in row.question for row in questions.questions)
    assert all(len(row.answers) == 2 for row in questions.questions)  # each text once


# ---- lengths


@pytest.mark.parametrize(("name", "tokens"), [("words", 4096), ("bytes", 4096), ("words", 8192), ("bytes", 32768)])
def test_prompts_fill_the_length_and_never_exceed_it(fetch, name, tokens):
    at = TOKENIZERS[name]
    for item in ruler.sample("", 13, 2, tokens, at, fetch):
        used = tokens_of(item, at, tokens)
        assert used == item.meta["prompt_tokens"] + item.meta["max_new_tokens"]
        assert 0.95 * tokens <= used <= tokens, item.id


@pytest.mark.slow
@pytest.mark.parametrize("task", ruler.TASKS)
def test_128_thousand_tokens_take_seconds(fetch, task):
    at, tokens, began = TOKENIZERS["bytes"], 131072, time.process_time()
    [item] = ruler.sample(task, 1, 0, tokens, at, fetch)
    assert time.process_time() - began < 10
    assert 0.99 * tokens <= tokens_of(item, at, tokens) <= tokens


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
    hay = ruler_text.haystack(" ".join(listed), "test")
    sentences = hay.sentences(n)
    assert " ".join(sentences).split() == [listed[i % len(listed)] for i in range(n)]
    ends = [sentence.split()[-1] for sentence in sentences]
    assert all(re.search(r"[.?]", end) for i, end in enumerate(ends) if len(sentences[: i + 1]) < len(sentences)) or (
        n > len(listed)
    )


# ---- seeds, sources, bad input


def test_same_seed_same_items_other_seed_others(fetch):
    at = TOKENIZERS["words"]
    ours, same, more, other = (
        ruler.sample("", n, seed, 1900, at, fetch) for n, seed in ((13, 1), (13, 1), (26, 1), (13, 2))
    )
    assert ours == same
    assert {item.id for item in ours} < {item.id for item in more}
    assert all(item in more for item in ours)
    assert not {content(item) for item in ours} & {content(item) for item in other}
    assert len({content(item) for item in more}) == 26


def test_load_items_asks_for_some_tasks_or_all(fetch):
    at = TOKENIZERS["words"]
    drawn = data.load_items("ruler:niah_single_1,vt", 5, 3, 1000, at)
    assert [item.task for item in drawn] == ["niah_single_1"] * 3 + ["vt"] * 2
    assert drawn == ruler.sample("niah_single_1,vt", 5, 3, 1000, at, fetch)
    assert Counter(item.task for item in data.load_items("ruler:vt,fwe", None, 3, 400, at)) == {"vt": 10, "fwe": 10}


def test_short_prompts_do_with_less_and_what_is_too_long_is_left_out(fetch, capsys):
    at, forms = TOKENIZERS["words"], {}
    for tokens in (280, 450, 700, 4096):
        drawn = ruler.sample("vt,cwe,fwe", 3, 0, tokens, at, fetch)
        forms[tokens] = {item.task: item.meta["form"] for item in drawn}
        for item in drawn:
            assert item.meta["prompt_tokens"] + item.meta["max_new_tokens"] <= tokens
            assert set(solve(item.task, *parts(item))) == set(item.meta["answers"])
            assert ("\nAnswer: " in content(item)) == (item.task != "fwe" and item.meta["form"] != "no example")
    assert "cwe" not in forms[280]
    assert forms[450] == {"vt": "no example", "cwe": "no example", "fwe": ""}
    assert forms[700] == {"vt": "", "cwe": "fewer repetitions", "fwe": ""}
    assert forms[4096] == dict.fromkeys(("vt", "cwe", "fwe"), "")
    assert re.match(r"ruler: 1 of 3 items take \d+ tokens and more > 280, they are left out\n", capsys.readouterr().out)


def test_passages_of_items_stand_in_for_essays(fetch, tmp_path):
    rows = [{"context": "A short one."}, {"context": "A much longer passage stands first. It has two sentences."}]
    (tmp_path / "items.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def offline(name):
        if name == ruler_text.BORROWED:
            return tmp_path / "items.jsonl"
        raise InputError(f"cannot download {name}: connect to the network")

    [item] = ruler.sample("niah_single_2", 1, 0, 1000, TOKENIZERS["words"], offline)
    assert item.meta["filler"] == ruler_text.BORROWED
    assert "A much longer passage stands first. It has two sentences. A short one. A much" in content(item)
    assert ruler.sample("niah_single_2", 1, 0, 1000, TOKENIZERS["words"], fetch)[0].meta["filler"] == "essays"
    with pytest.raises(InputError, match="cannot download squad"):
        ruler.sample("qa_1", 1, 0, 1000, TOKENIZERS["words"], offline)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tasks": "vt,niah_singel_1"}, "unknown RULER task 'niah_singel_1', did you mean 'niah_single_1'"),
        ({"tokenizer": None}, "give its tokenizer"),
        ({"tokens": 300}, r"1 of 1 items take 713 tokens and more > 300: ask for more tokens"),
    ],
)
def test_bad_input_is_one_line(changes, message):
    arguments = {
        "tasks": "vt",
        "n_items": 1,
        "seed": 0,
        "tokens": 1000,
        "tokenizer": TOKENIZERS["bytes"],
        "fetch": None,
    }
    with pytest.raises(InputError, match=message) as error:
        ruler.sample(**arguments | changes)
    assert "\n" not in str(error.value)


def test_metrics_are_the_benchmarks():
    assert ruler.string_match_all("It is ALPHA, then beta.", ["alpha", "Beta", "gamma", "delta"]) == 0.5
    assert ruler.string_match_part("It is ALPHA.", ["gamma", "alpha"]) == 1
    assert ruler.string_match_part("It is ALPHA.", ["gamma", "delta"]) == 0
    assert ruler.string_match_all("1234567", ["234"]) == 1  # a part of a word counts, as there
