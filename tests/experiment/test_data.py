import copy
import hashlib
import http.server
import json
import re
import threading
from dataclasses import asdict, replace

import checkpoint
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrepro.errors import InputError
from kvrepro.experiment import data, measure
from kvrepro.experiment.data import Item, Span
from kvrepro.experiment.jsonl import item_of as item_of_row
from kvrepro.experiment.prompt import with_context
from kvrepro.paths import ROOT

TOKENIZER = checkpoint.tokenizer()


def jsonl(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def tokens(text):
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


# ---- items


def test_reads_the_formats_of_the_data(tmp_path):
    greeting = {"name": "greeting", "message": 0, "start": 0, "end": 5}
    rows = [
        {"context": "C", "question": "Q", "answer": "A", "domain": "qasper", "word_count": 9},
        {"context": "C", "input": "Q", "answers": ["A", "B"], "dataset": "musique", "length": 9},
        {"context": "C", "prompt": "Q", "answer": "A"},
        {"context": "C", "question": "Q", "answer": ["A"], "meta": {"benchmark": "needles"}},
        {"messages": [{"role": "user", "content": "hello"}], "answer": "A", "task": "chat", "spans": [greeting]},
    ]
    items = data.load_items(jsonl(tmp_path / "some.jsonl", *rows))
    assert [item.task for item in items] == ["qasper", "musique", "items", "items", "chat"]
    assert [item.id for item in items] == [f"some-00{i}" for i in range(5)]
    assert {item.answer for item in items} == {"A"}
    assert items[1].meta["answers"] == ["A", "B"]
    assert all(item.question == "Q" for item in items[:4])
    assert items[4].spans == (Span("greeting", 0, 0, 5),)
    assert not any(item.papers for item in items)


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=30), st.data(), st.integers(0, 3))
@settings(max_examples=50, deadline=None)
def test_a_subset_is_balanced_over_tasks_and_repeatable(tasks, draw, seed):
    items = [Item(str(i), task, (), "") for i, task in enumerate(tasks)]
    n = draw.draw(st.integers(1, len(items)))
    chosen = data.balanced(items, n, seed, "x")
    assert chosen == data.balanced(items, n, seed, "x")
    assert [int(item.id) for item in chosen] == sorted({int(item.id) for item in chosen})
    assert len(chosen) == n
    counts = {task: sum(item.task == task for item in chosen) for task in set(tasks)}
    for task, count in counts.items():  # a task gets fewer than another only when it has no more
        assert count >= min(tasks.count(task), max(counts.values()) - 1)


@pytest.mark.parametrize(
    ("items", "n", "words"),
    [
        ("imagenet", 3, "unknown items 'imagenet'"),
        ("no/such.jsonl", 3, "no file 'no/such.jsonl'"),
        ("ruler:vt,niah_singel_1", 3, "unknown part of ruler 'niah_singel_1', did you mean 'niah_single_1'"),
        ("longbench:protection,qasper", 3, "unknown part of longbench 'protection'"),
        ("tinyworld", 0, "n_items 0: "),
        ("tinyworld", None, "give n_items"),
        ("tinyworld:needle,neddle", 2, "unknown part of tinyworld 'neddle', .*; there are: domains, long, "),
        ("FILE", 3, "n_items is 3 but .* has 1 item: ask for at most 1"),
    ],
)
def test_bad_requests_are_named(tmp_path, items, n, words):
    path = jsonl(tmp_path / "one.jsonl", {"context": "C", "question": "Q", "answer": "A"})
    with pytest.raises(InputError, match=words) as error:
        data.load_items(items.replace("FILE", path), n)
    assert "\n" not in str(error.value)


ROW = {"messages": [{"role": "user", "content": "Q"}], "answer": "A"}


def spans(*changes):
    return {"spans": [{"name": "a", "message": 0, "start": 0, "end": 1} | change for change in changes]}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (spans({}, {"start": -1}), "spans.1.start -1: "),
        (spans({"end": 2}), "span 'a' does not lie within a message"),
        (spans({"message": 4}), "span 'a' does not lie within a message"),
        (spans({"end": 1.0}), "spans.0.end 1.0: should be a valid integer"),
        (spans({"first": 0}), "unknown field 'spans.0.first'"),
        ({"messages": [{"role": "usr", "content": "Q"}]}, "messages.0.role 'usr': "),
        ({"messages": [{"role": "user", "content": None}]}, "messages.0.content None: "),
        ({"messages": "Q"}, "messages 'Q': "),
        ({"context": 5}, "context 5: should be a valid string"),
        ({"max_new_tokens": 0}, "max_new_tokens 0: "),
        ({"papers": "yes"}, "papers 'yes': "),
        ({"answer": None}, "answer None: should be a valid list"),
        ({"metric": "bleu"}, "unknown metric 'bleu'"),
        ({"anwsers": ["B"]}, "unknown field 'anwsers', did you mean 'answers'?"),
        ({"answers": ["B"]}, "fields answers and answer mean the same: give one of them"),
        ({"context": "C"}, "no field 'question'"),
        ({"context": "C", "question": "Q"}, "context beside messages"),
        ({"metric": "classification"}, "answer 'A' scores 0 by metric 'classification' even where"),
        ({"metric": "classification", "all_classes": ["B"]}, "answer 'A' scores 0 by metric 'classification'"),
        ({"meta": {"metric": "classification", "classes": [1]}}, "meta.classes.0 1: should be a valid string"),
        ({"answer": " \n"}, r"answer is ' \n': give texts that are more than punctuation"),
        ({"answer": ["tea", " "]}, "answer is ' ': give texts"),
        ({"meta": {"answers": ["A", ""]}}, "answer is '': give texts"),
        *(
            ({"answer": nothing}, f"answer is {nothing!r}: give texts")
            for nothing in ("-", "- -", "。", "<think>x</think>", "\u200b")
        ),
        *(
            ({"answer": listed}, f"answer {listed!r} is the text of a list")
            for listed in ('["a", 1]', "['a']", "[]", '["tea", null]')
        ),
        ({"metric": "retrieval"}, "answer 'A' scores 0 by metric 'retrieval' even where"),
        ({"metric": "count", "answer": "three"}, "answer 'three' scores 0 by metric 'count'"),
        ({"metric": "qa_f1", "answer": "The."}, "answer 'The.' scores 0 by metric 'qa_f1' even where"),
        ({"metric": "code_similarity", "answer": "# one"}, "answer '# one' scores 0 by metric 'code_similarity'"),
        ({"meta": {"answers": ["B", "C"]}}, "answer 'A' beside meta's answers, which count instead"),
        ({"id": True}, "id True: should be a valid string"),
        ({"task": False}, "task False: should be a valid string"),
        ({"messages": []}, "messages []: give at least one turn; a row needs "),
    ],
)
def test_what_a_row_means_otherwise_is_refused_in_words(tmp_path, change, words):
    assert data.load_items(jsonl(tmp_path / "good.jsonl", ROW | spans({})))[0].spans == (Span("a", 0, 0, 1),)
    with pytest.raises(InputError, match="line 1: " + re.escape(words)) as error:
        data.load_items(jsonl(tmp_path / "bad.jsonl", ROW | change))
    assert "\n" not in str(error.value)


def test_a_line_that_is_no_object_of_json_is_a_bad_row(tmp_path):
    row = b'{"context": "C", "question": "Q", "answer": "'
    for line, words in ((b'A"', "Expecting ',' delimiter"), (b'\xff"}', ".utf-8.* codec can.t decode byte 0xff")):
        (tmp_path / "bad.jsonl").write_bytes(b"\xef\xbb\xbf" + row + b'A"}\r\n' + row + line + b"\r\n")
        with pytest.raises(InputError, match=f"bad.jsonl, line 2: {words}"):
            data.load_items(str(tmp_path / "bad.jsonl"))


@pytest.mark.parametrize("form", ["", "qasper"])
def test_an_item_with_a_passage_can_be_written_and_read(tmp_path, form):
    messages, marked = with_context(Item("q", "t", (), "A", question="Q", form=form), "C")
    item = Item("q", "t", messages, "A", marked, "C", "Q", {"answers": ["A", "B"]}, form)
    items = [item, *data.load_items("tinyworld:needle", 1, tokens=300)]
    assert data.load_items(jsonl(tmp_path / "two.jsonl", *map(asdict, items))) == items
    assert [item.papers for item in items] == [False, True]


def test_a_number_that_nobody_asked_for_takes_what_there_is(tmp_path, capsys):
    path = jsonl(tmp_path / "two.jsonl", ROW, ROW)
    for n, count in ((data.AtMost(8), 2), (data.AtMost(8), 2), (data.AtMost(1), 1)):
        assert len(data.load_fitting(path, n, TOKENIZER, 500)) == count
    assert capsys.readouterr().out == f"{path} has 2 items in all\n"
    with pytest.raises(InputError, match=r"n_items is 8 but .*two.jsonl has 2 items"):
        data.load_fitting(path, 8, TOKENIZER, 500)


def test_all_bad_lines_are_numbered_with_the_first_reason(tmp_path):
    good = ROW | {"id": "a"}
    rows = [good, {"answer": "A"}, ROW | {"id": "b"}, good, ROW | {"answer": 5}]
    with pytest.raises(InputError, match=r"some.jsonl, line 2: no field 'context'.*\(bad lines: 2, 4, 5\)$"):
        data.load_items(jsonl(tmp_path / "some.jsonl", *rows))
    with pytest.raises(InputError, match="line 2: id 'a' stands in an earlier line"):
        data.load_items(jsonl(tmp_path / "some.jsonl", good, good))
    (tmp_path / "none.jsonl").write_text("\n\n")
    with pytest.raises(InputError, match="none.jsonl holds no items"):
        data.load_items(str(tmp_path / "none.jsonl"))


def test_the_page_s_example_is_read(tmp_path):
    page = (ROOT / "book" / "your-model.md").read_text(encoding="utf-8")
    (tmp_path / "own.jsonl").write_text(page.partition("```json\n")[2].partition("```")[0], encoding="utf-8")
    passage, chat = data.load_items(str(tmp_path / "own.jsonl"))
    assert (passage.task, passage.meta["answers"], passage.new_tokens(1)) == ("ships", ["tea", "21 crates of tea"], 8)
    prompt = data.build_prompt(chat, TOKENIZER, 500)
    assert TOKENIZER.decode([prompt.ids[p] for p in prompt.spans["question"]]).strip() == "Which door is open?"
    for metric in measure.METRICS:
        assert f"`{metric}`" in page


# ---- items that fit


def test_the_world_is_asked_for_fewer_tokens_until_a_foreign_tokenizer_s_prompts_fit():
    items = data.load_fitting("tinyworld:needle,two_hop", 4, TOKENIZER, 1900, seed=3)
    assert 0.9 * 1900 < max(len(data.build_prompt(item, TOKENIZER, 10**6).ids) for item in items) <= 1900
    assert [item.task for item in items] == ["needle"] * 2 + ["two_hop"] * 2
    few = data.load_fitting("tinyworld:needle", 2, TOKENIZER, 10**6, tokens=300)
    assert few == data.load_items("tinyworld:needle", 2, tokens=300)
    with pytest.raises(InputError, match="tinyworld:needle has no prompts of about 100 tokens, the nearest have"):
        data.load_fitting("tinyworld:needle", 2, TOKENIZER, 100)


def test_messages_that_do_not_fit_are_left_out_and_passages_are_not(tmp_path, capsys):
    def turn(words):
        return {"messages": [{"role": "user", "content": "word " * words}], "answer": "A"}

    path = jsonl(tmp_path / "own.jsonl", turn(10), turn(400), {"context": "w " * 900, "question": "Q", "answer": "A"})
    assert [item.id for item in data.load_fitting(path, None, TOKENIZER, 200)] == ["own-000", "own-002"]
    left_out = r"1 of 3 items left out, the first because: item own-001 has \d+ prompt tokens > limit 200: raise"
    assert re.search(left_out, capsys.readouterr().out)
    assert len(data.load_fitting(path, None, TOKENIZER, 3000)) == 3
    assert len(data.load_fitting(path, None, TOKENIZER, 200, room=3000)) == 3
    assert not capsys.readouterr().out
    with pytest.raises(InputError, match=r"^item long-000 has \d+ prompt tokens > limit 200: raise"):
        data.load_fitting(jsonl(tmp_path / "long.jsonl", turn(400)), None, TOKENIZER, 200)


# ---- prompts


def passage(words: int, question: str = "Which door is open?") -> Item:
    return item_of_row({"context": " ".join(f"w{i}" for i in range(words)), "question": question, "answer": "x"}, "one")


@pytest.mark.parametrize(("words", "limit"), [(20, 500), (3000, 333)])
def test_a_template_without_a_system_turn_has_its_text_in_the_users(words, limit, capsys):
    data.say_once.cache_clear()
    refuses = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.chat_template = refuses + TOKENIZER.chat_template
    prompts = [data.build_prompt(item, tokenizer, limit) for item in (passage(words), passage(words, "Which?"))]
    assert all(len(prompt.ids) <= limit for prompt in prompts)
    prompt = prompts[0]
    text = TOKENIZER.decode(prompt.ids)
    assert text.startswith(f"<|im_start|>user\n{data.SYSTEM}\n\nPassage: ")
    assert text.endswith("\n\nQuestion: Which door is open?<|im_end|>\n<|im_start|>assistant\n")
    decoded = {name: TOKENIZER.decode([prompt.ids[at] for at in where]) for name, where in prompt.spans.items()}
    assert decoded["system"] == data.SYSTEM
    assert decoded["passage"].startswith("Passage: ")
    assert decoded["question"] == "Question: Which door is open?"
    assert set(prompt.turns) == {"user"}
    assert capsys.readouterr().out.count("takes no turn of the system: its text opens the user's\n") == 1


@pytest.mark.parametrize(("words", "limit"), [(20, 500), (3000, 200), (3000, 333), (3000, 1920)])
def test_a_long_passage_keeps_its_last_tokens_within_the_limit(words, limit):
    """The protocol's arithmetic, written out: budget, last tokens, decode, template, cut at the limit."""
    item = passage(words)
    prompt = data.build_prompt(item, TOKENIZER, limit)
    empty = f"<|im_start|>system\n{data.SYSTEM}<|im_end|>\n<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n"
    budget = limit - len(tokens(empty)) - len(tokens(f"\n\nQuestion: {item.question}")) - len(tokens("Passage: "))
    kept = TOKENIZER.decode(tokens(item.context)[-budget:])
    expected = tokens(
        f"<|im_start|>system\n{data.SYSTEM}<|im_end|>\n<|im_start|>user\nPassage: {kept}\n\n"
        f"Question: {item.question}<|im_end|>\n<|im_start|>assistant\n"
    )
    assert prompt.ids == expected[:limit]
    assert len(prompt.ids) == limit or kept in (item.context, item.context[-len(kept) :])
    assert f"w{words - 1}" in TOKENIZER.decode(prompt.ids)


@given(st.text(alphabet="abé ,“.\n", min_size=1, max_size=40), st.data())
@settings(max_examples=60, deadline=None)
def test_spans_cover_their_characters(content, draw):
    start = draw.draw(st.integers(0, len(content) - 1))
    end = draw.draw(st.integers(start + 1, len(content)))
    item = Item("x", "t", ({"role": "user", "content": content + "!"},), "", (Span("s", 0, start, end),))
    prompt = data.build_prompt(item, TOKENIZER, 500)
    positions = prompt.spans["s"]
    assert positions == list(range(positions[0], positions[-1] + 1))
    assert content[start:end] in TOKENIZER.decode([prompt.ids[p] for p in positions])


def test_spans_of_equal_name_merge():
    messages = ({"role": "system", "content": "one two"}, {"role": "user", "content": "one two"})
    item = Item("x", "t", messages, "", (Span("s", 0, 0, 3), Span("s", 1, 4, 7)))
    prompt = data.build_prompt(item, TOKENIZER, 500)
    assert "".join(TOKENIZER.decode([prompt.ids[p]]) for p in prompt.spans["s"]).replace(" ", "") == "onetwo"


SYSTEM_REFUSED = "{{ raise_exception('system role\\n not supported') }}"
UPPER = "{% for m in messages %}{{ m['content'] | upper }}{% endfor %}"
RED = Item("x", "t", ({"role": "user", "content": "red"},), "", (Span("s", 0, 0, 3),))
PLAIN = TOKENIZER.chat_template


@pytest.mark.parametrize(
    ("template", "item", "limit", "words"),
    [
        (None, RED, 500, "^item x: .*has no chat template"),
        (SYSTEM_REFUSED, RED, 500, "^item x: .*refuses the messages .system role.*: give it roles"),
        ("{{ 1 + messages[0].content }}", RED, 500, "^item x: .*refuses the messages .unsupported op.*: give it roles"),
        (UPPER, RED, 500, "^item x: .*rewrites or moves a user message"),
        (PLAIN, replace(RED, messages=({"role": "user", "content": "  "},), spans=()), 100, "item x is empty"),
        (PLAIN, replace(RED, messages=(), spans=()), 100, "item x is empty"),
        (PLAIN, replace(RED, messages=({"role": "user", "content": "word " * 300},)), 100, "> limit 100"),
        (PLAIN, passage(50), 40, r"^item one: limit 40 leaves no room for the passage beside \d+ other tokens: raise"),
    ],
)
def test_prompts_that_cannot_be_built(template, item, limit, words):
    fast = checkpoint.tokenizer()
    fast.chat_template = template
    with pytest.raises(InputError, match=words) as error:
        data.build_prompt(item, fast, limit)
    assert "\n" not in str(error.value)


# ---- public data


@pytest.fixture
def public(tmp_path, monkeypatch):
    """A manifest with one source of two files, served by a local web server; returns the served folder."""
    served = tmp_path / "served"
    (served / "data").mkdir(parents=True)
    for name in ("a.txt", "b.txt"):
        (served / "data" / name).write_text(f"file {name}\n" * 1000)

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=served)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    files = {
        f"data/{p.name}": {"bytes": p.stat().st_size, "sha256": hashlib.sha256(p.read_bytes()).hexdigest()}
        for p in sorted((served / "data").iterdir())
    }
    url = f"http://127.0.0.1:{server.server_port}/{{path}}"
    entry = {"title": "t", "url": url, "commit": "c", "licence": "l", "citation": "x", "files": files}
    monkeypatch.setattr(data, "sources", lambda: {"letters": entry})
    monkeypatch.setattr(data, "CACHE", tmp_path / "cache")
    monkeypatch.delenv("KVREPRO_DATA", raising=False)
    yield served
    server.shutdown()
    server.server_close()


def test_fetch_downloads_verifies_and_keeps(public, tmp_path):
    path = data.fetch("letters/data/a.txt")
    assert path == tmp_path / "cache" / "letters" / "data" / "a.txt"
    assert path.read_bytes() == (public / "data" / "a.txt").read_bytes()
    (public / "data" / "a.txt").unlink()
    assert data.fetch("letters/data/a.txt") == path  # from the cache
    assert data.fetch("letters") == path.parents[1]
    assert (path.parent / "b.txt").is_file()


def test_a_mirror_comes_first_and_is_not_written(public, tmp_path, monkeypatch):
    mirror = tmp_path / "mirror" / "letters"
    (mirror / "data").mkdir(parents=True)
    (mirror / "data" / "a.txt").write_bytes((public / "data" / "a.txt").read_bytes())
    monkeypatch.setenv("KVREPRO_DATA", str(mirror.parent))
    assert data.fetch("letters/data/a.txt") == mirror / "data" / "a.txt"
    assert data.fetch("letters") == tmp_path / "cache" / "letters"  # the mirror is not complete
    assert sorted(p.name for p in mirror.rglob("*.txt")) == ["a.txt"]


@pytest.mark.parametrize("where", ["cache", "mirror", "served"])
def test_damaged_files_are_refused_and_left(public, tmp_path, monkeypatch, where):
    path = tmp_path / where / ("" if where == "served" else "letters") / "data" / "a.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes((public / "data" / "a.txt").read_bytes().replace(b"file", b"fill"))
    before = path.read_bytes()
    monkeypatch.setenv("KVREPRO_DATA", str(tmp_path / "mirror"))
    with pytest.raises(InputError, match=r"a.txt \(11000 of 11000 bytes\) has another sha256 .*: remove it"):
        data.fetch("letters/data/a.txt")
    assert path.read_bytes() == before


def test_no_network_and_unknown_names_are_one_line(public, monkeypatch):
    (public / "data" / "a.txt").unlink()
    way_out = "set KVREPRO_DATA to a folder that holds it as letters/data/a.txt$"
    with pytest.raises(InputError, match=f"^cannot download http.*{way_out}") as error:
        data.fetch("letters/data/a.txt")
    assert "\n" not in str(error.value)
    for name in ("a.txt", "letters/data/c.txt", "numbers"):
        with pytest.raises(InputError, match=f"'{name}' is not in data/sources.yml"):
            data.fetch(name)
