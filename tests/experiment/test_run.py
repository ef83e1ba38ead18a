"""The run, against an engine that answers from a table; the real engine joins in test_real_input and test_pool."""

import json
import os
import tempfile
from dataclasses import replace

import checkpoint
import numpy as np
import pandas as pd
import pytest
import torch

from kvrepro.engine import generate as engine
from kvrepro.engine.condition import Condition, DecodeCap, Generation, Prefill, SharedCap
from kvrepro.errors import InputError, Stopped
from kvrepro.experiment import answers, data, measure, models, run, store
from kvrepro.experiment.answers import Asked
from kvrepro.experiment.data import Item
from kvrepro.experiment.prompt import passage_messages
from kvrepro.experiment.run import Answers, PerItem, Settings
from kvrepro.experiment.store import COLUMNS

ITEMS = [
    Item(f"item-{i}", "doors", ({"role": "user", "content": f"Which door is open, {i}?"},), "the red door")
    for i in range(5)
]
CONDITIONS = [
    Condition(),
    Condition("lru", 16, SharedCap(), prefix=0.1, suffix=0.1),
    Condition("h2o_simple", 16, SharedCap(), switches=(("tie_break", "integer"),)),
]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return models.load(str(checkpoint.save(tmp_path_factory.mktemp("hub") / "small", context=256)))


class FakeEngine:
    """Answers "the red door"; fails where told (an item's number, a policy's name); remembers what it was asked."""

    def __init__(self, loaded, fail_on=()):
        self.answer = [*loaded.tokenizer(" the red door")["input_ids"], loaded.tokenizer.eos_token_id]
        self.tokenizer, self.fail_on, self.calls = loaded.tokenizer, fail_on, []

    def generate(self, model, prompts, conditions, **given):
        for prompt, conditions_of_item in zip(prompts, conditions, strict=True):
            text = self.tokenizer.decode(prompt.ids)
            seen = {*(i for i in range(9) if f"open, {i}?" in text), *(c.policy for c in conditions_of_item)}
            if any(set(failing if isinstance(failing, tuple) else [failing]) <= seen for failing in self.fail_on):
                raise RuntimeError("out of memory\nand a long story")
        assert all(conditions_of_item == conditions[0] for conditions_of_item in conditions)
        self.calls.append((len(prompts), conditions[0]))
        kept = {"kept": [16, 17], "kept_positions": [0, 1], "kept_positions_hash": "abc", "evicted": 3}
        cost = {"policy_calls": 1, "bytes_held": 10, "bytes_full": 20, "prefill_seconds": 0.1, "decode_seconds": 0.2}
        generation = Generation(tokens=self.answer, backend="fake", **kept, **cost)
        return [[generation for _ in conditions_of_item] for conditions_of_item in conditions]


@pytest.fixture
def fake(loaded, monkeypatch):
    fake_engine = FakeEngine(loaded)
    monkeypatch.setattr(engine, "generate", fake_engine.generate)
    return fake_engine


def go(loaded, tmp_path, items=ITEMS, conditions=CONDITIONS, limit=None, **options):
    study = Answers("doors", "main", items, conditions, 8, limit)
    return run.run(study, loaded, Settings(results=tmp_path, **options))


def test_rows_say_where_the_evidence_stood_and_how_much_of_it_is_held(loaded):
    items = data.load_items("tinyworld:needle", 1, seed=3, tokens=300)
    tiny = models.load("small-gqa")
    conditions = [Condition(), Condition("streaming_llm", 64, DecodeCap())]
    conditions += [Condition("random", 0.5, Prefill(until="question"))]
    with tempfile.TemporaryDirectory() as folder:
        rows = run.run(Answers("mine", "main", items, conditions, 4), tiny, Settings(folder, progress=False))
        plain = run.run(Answers("mine", "other", ITEMS[:1], [Condition()], 4), loaded, Settings(folder, progress=False))
    prompt = data.build_prompt(items[0], tiny.tokenizer, 400)
    at = prompt.spans["evidence"]
    assert rows.evidence_at.tolist() == pytest.approx([sum(at) / len(at) / (len(prompt.ids) - 1)] * 3)
    newest = [i >= len(prompt.ids) - 60 or i < 4 for i in at]
    assert rows.evidence_coverage.tolist()[:2] == [1.0, sum(newest) / len(at)]
    assert 0.9 < rows.evidence_coverage[2] <= 1  # sixteen heads that draw apart hold nearly all, between them
    assert plain[["evidence_at", "evidence_coverage"]].isna().all(axis=None)


def test_one_row_per_item_and_condition_in_order(loaded, fake, tmp_path, capsys):
    frame = go(loaded, tmp_path, profile="full", seed=7)
    assert list(frame.columns) == COLUMNS
    assert list(zip(frame["item"], frame["policy"], strict=True)) == [
        (i.id, c.policy) for i in ITEMS for c in CONDITIONS
    ]
    first = frame.iloc[0]
    assert (first.prediction, first.answer, first.token_f1, first.exact_match) == ("the red door", "the red door", 1, 1)
    assert first.n_generated == len(fake.answer)  # with the stop token
    assert (list(first.kept), first.kept_mean) == ([16, 17], 16.5)
    assert (first.chapter, first["name"], first.profile, first.seed) == ("doors", "main", "full", 7)
    assert (first["model_hash"], first["dtype"], first["device"]) == (loaded.hash, "float32", "cpu")
    assert frame.capacity.fillna(0).tolist()[:3] == [0, 16, 16]
    assert json.loads(frame.iloc[2].switches) == {"tie_break": "integer"}
    assert frame["error"].isna().all()
    assert "15 rows, 15 computed now, 0 failed" in capsys.readouterr().out


def test_only_missing_conditions_are_asked_for(loaded, fake, tmp_path):
    go(loaded, tmp_path, items=ITEMS[:2], conditions=CONDITIONS[:2])
    fake.calls.clear()
    first = go(loaded, tmp_path, batch_rows=3)  # a job for each item
    assert fake.calls == [(1, CONDITIONS[2:])] * 2 + [(1, CONDITIONS)] * 3
    pd.testing.assert_frame_equal(go(loaded, tmp_path), first)
    assert len(fake.calls) == 5  # nothing was computed again


@pytest.mark.parametrize("what", ["model", "data", "code", "length"])
def test_a_change_makes_rows_stale(loaded, fake, tmp_path, monkeypatch, what):
    go(loaded, tmp_path, items=ITEMS[:1])
    fake.calls.clear()
    if what == "code":
        monkeypatch.setattr(answers, "code_of", lambda *_: "other")
    item = replace(ITEMS[0], answer="the blue door") if what == "data" else ITEMS[0]
    study = Answers("doors", "main", [item], CONDITIONS, 9 if what == "length" else 8)
    run.run(study, replace(loaded, hash="other") if what == "model" else loaded, Settings(tmp_path, progress=False))
    assert fake.calls == [(1, CONDITIONS)]
    rows = 3 if what == "code" else 6  # what other code decided goes, all else stands beside
    assert len(store.read(tmp_path / "doors" / "main")) == rows


# ---- models that think before they answer


def test_a_thinking_block_is_no_answer(loaded, fake, tmp_path):
    fake.answer = loaded.tokenizer("<think>\nblue?\n</think>\n\nthe red door")["input_ids"]
    rows = go(loaded, tmp_path, items=ITEMS[:2])
    assert {*rows.prediction} == {"the red door"}
    assert {*rows.thought} == {"\nblue?\n"}
    assert rows.token_f1.tolist() == [1.0] * 6
    fake.answer = loaded.tokenizer("<think>\nthe red door")["input_ids"]
    rows = go(loaded, tmp_path, items=ITEMS[2:3])
    assert (rows.prediction.tolist(), rows.token_f1.tolist()) == ([""] * 3, [0.0] * 3)


def test_what_fails_is_one_row_and_the_run_goes_on(loaded, fake, tmp_path, capsys):
    fake.fail_on = [(3, "lru")]
    frame = go(loaded, tmp_path)
    failed = frame[frame["error"].notna()]
    assert list(zip(failed["item"], failed["policy"], strict=True)) == [("item-3", "lru")]
    assert set(failed["error"]) == {"RuntimeError: out of memory"}
    assert failed["token_f1"].isna().all()
    assert frame[frame["error"].isna()]["token_f1"].eq(1).all()
    assert frame.attrs["failed"] == [f"{CONDITIONS[1].label} on item-3: RuntimeError: out of memory"]
    printed = capsys.readouterr().out
    assert "15 rows, 15 computed now, 1 failed" in printed
    assert f", the first {frame.attrs['failed'][0]}\n" in printed
    fake.fail_on, fake.calls = (), []
    assert go(loaded, tmp_path)["error"].isna().all()  # tried again, and only those
    assert fake.calls == [(1, [CONDITIONS[1]])]


@pytest.mark.parametrize("short", [{(0, 1), (2, 1), (4, 0)}, {(3, 0)}])
def test_rows_of_a_batch_without_memory_are_tried_again_and_no_others(loaded, capsys, monkeypatch, short):
    sizes = []

    def generate(model, prompts, conditions, **given):
        sizes.append(sum(map(len, conditions)))
        assert given.get("prompt_rows") == (None if len(sizes) == 1 else 16)
        full = torch.OutOfMemoryError("full")
        return [
            [full if len(sizes) == 1 and (i, j) in short else (i, j) for j in columns]
            for i, columns in zip(prompts, conditions, strict=True)
        ]

    monkeypatch.setattr(engine, "generate", generate)
    asked = [Asked((i, j), None, i, j, {"max_new_tokens": 4}) for i in range(5) for j in range(2)]
    monkeypatch.setattr(answers, "answer_row", lambda loaded, a, outcome, note: (a.place, outcome))
    rows = answers.rows_of(loaded, asked, {})
    assert sorted(rows) == [(a.place, a.place) for a in asked]
    assert sizes[0] == 10
    assert sum(sizes[1:]) == len(short)
    assert f"out of memory with {len(short)} row" in capsys.readouterr().out


@pytest.mark.parametrize("culprit", ["lru", 1])
def test_a_study_of_which_many_fail_ends_when_the_rest_is_stored(loaded, fake, tmp_path, culprit):
    """A condition that always raises, or an item: its own rows are lost, and no others."""
    fake.fail_on = [culprit]
    lost = {"lru": 5, 1: 3}[culprit]
    with pytest.raises(Stopped, match=rf"doors/main: {lost} of 15 rows failed, the first .* out of memory$"):
        go(loaded, tmp_path)
    rows = store.read(tmp_path / "doors" / "main")
    assert len(rows) == 15
    failed = rows[rows["error"].notna()]
    assert len(failed) == lost
    assert set(failed["policy"]) == {"lru"} if culprit == "lru" else set(failed["item"]) == {"item-1"}


def test_what_an_item_cannot_meet_is_a_row_with_an_error_and_no_failure(loaded, tmp_path, capsys):
    conditions = [CONDITIONS[0], Condition("snapkv", 80, Prefill())]
    long = Item("long", "doors", ({"role": "user", "content": "Which door is open? " * 12},), "x")
    frame = go(loaded, tmp_path, items=[ITEMS[0], long], conditions=conditions)
    assert frame["error"].fillna("").str.startswith("InputError: budget 80 >=").tolist() == [False, True, False, False]
    assert frame.attrs["failed"] == []
    assert "1 of 4 rows cannot be: snapkv C=80 prefill on item-0: InputError: budget" in capsys.readouterr().out
    go(loaded, tmp_path, items=[ITEMS[0], long], conditions=conditions)
    assert "4 rows, 0 computed now" in capsys.readouterr().out


def test_what_was_stored_before_an_interrupt_stays(loaded, fake, tmp_path, monkeypatch):
    real, seen = fake.generate, []

    def interrupted(*arguments, **options):
        seen.append(1)
        if len(seen) == 3:
            raise KeyboardInterrupt
        return real(*arguments, **options)

    monkeypatch.setattr(engine, "generate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        go(loaded, tmp_path, batch_rows=1, progress=False)
    monkeypatch.setattr(engine, "generate", real)
    stored = len(store.read(tmp_path / "doors" / "main"))
    assert stored == 2 * len(CONDITIONS)
    fake.calls.clear()
    go(loaded, tmp_path)
    assert sum(n * len(c) for n, c in fake.calls) == 15 - stored


LONG = Item("long", "doors", ({"role": "user", "content": "door " * 300},), "x")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"conditions": [Condition("best", 16, SharedCap())]}, "unknown policy 'best'"),
        ({"conditions": [Condition("lru", 4, SharedCap(), prefix=0.1, suffix=0.1)]}, "budget 4 < 8 protected"),
        ({"conditions": []}, "5 items x 0 conditions"),
        ({"items": []}, "0 items x 3 conditions"),
        ({"items": [ITEMS[0], ITEMS[0]]}, "2 items share 1 ids"),
        ({"items": [*ITEMS, Item("blank", "t", ({"role": "user", "content": " "},), "x")]}, "item blank is empty"),
        ({"items": [*ITEMS, LONG]}, "item long has .* > limit 248"),
        ({"items": [replace(LONG, answer=" ")]}, "item long: answer is ' ': give texts that are more"),
        ({"items": [replace(LONG, answer=None)]}, "item long: answer None: should be a valid list"),
        ({"items": [replace(LONG, messages=({"role": "user", "content": None},))]}, "item long: messages.*None"),
        ({"limit": 250}, "250 prompt . 8 new tokens > context 256"),
        ({"conditions": [Condition("snapkv", 80, Prefill())], "items": ITEMS[:1]}, "^item item-0: budget 80 >= "),
    ],
)
def test_bad_input_is_one_line_and_costs_nothing(loaded, fake, tmp_path, change, words):
    with pytest.raises(InputError, match=words) as error:
        go(loaded, tmp_path, **change)
    assert "\n" not in str(error.value)
    assert not fake.calls
    assert not list(tmp_path.iterdir())


def test_prompts_are_as_long_as_the_context_leaves_or_as_is_asked(loaded, fake, tmp_path):
    passage = Item("p", "t", ITEMS[0].messages, "a", context="door " * 300, question="Which?")
    frame = go(loaded, tmp_path, items=[ITEMS[0], passage])
    assert set(frame["limit"]) == {248}
    assert frame["prompt_tokens"].max() == 248
    cut = dict(zip(frame["item"], frame["cut"], strict=True))
    assert cut["item-0"] == 0
    assert 0 < cut["p"] < 300
    assert go(loaded, tmp_path, items=[passage], limit=100)["prompt_tokens"].max() <= 100


# ---- whatever else is computed per item


def lengths(loaded, item, times=1):
    """Characters of an item's text."""
    if item.id in os.environ.get("BROKEN", "").split():  # no global: its value would be part of the key
        raise RuntimeError("boom\nat length")
    SEEN.append(item.id)
    return pd.DataFrame({"length": [len(item.messages[0]["content"]) * times], "model": [loaded.name]})


SEEN: list[str] = []


def named(loaded, value):
    return {"squares": pd.DataFrame({"square": [value**2]}), "all": pd.DataFrame({"x": np.arange(value)})}


def per_item(loaded, tmp_path, items=ITEMS, **parameters):
    SEEN.clear()
    return run.run(PerItem("doors", "lengths", items, lengths, parameters), loaded, Settings(results=tmp_path))


def test_tables_of_items_are_joined_stored_and_read_back(loaded, tmp_path):
    first = per_item(loaded, tmp_path)
    assert first["item"].tolist() == [item.id for item in ITEMS]
    assert set(first["task"]) == {"doors"}
    assert first.length.eq(len(ITEMS[0].messages[0]["content"])).all()
    assert len(SEEN) == 5
    pd.testing.assert_frame_equal(per_item(loaded, tmp_path), first)
    assert SEEN == []
    assert per_item(loaded, tmp_path, times=2).length.eq(2 * first.length).all()
    assert len(SEEN) == 5
    per_item(loaded, tmp_path, items=[*ITEMS[:2], Item("new", "doors", ITEMS[0].messages, "x")])
    assert SEEN == ["new"]


def test_several_tables_keep_their_names_and_need_no_model(tmp_path):
    tables = run.run(PerItem("doors", "squares", {"a": 3, "b": 2}, named), None, Settings(results=tmp_path))
    assert tables["squares"].to_dict("list") == {"square": [9, 4], "item": ["a", "b"]}
    assert tables["all"]["item"].tolist() == ["a", "a", "a", "b", "b"]
    assert tables["all"].attrs["failed"] == []


def test_an_item_that_fails_costs_itself(loaded, tmp_path, capsys, monkeypatch):
    eleven = [replace(ITEMS[0], id=f"item-{i}") for i in range(11)]
    monkeypatch.setenv("BROKEN", "item-4 item-5")
    with pytest.raises(Stopped, match="2 of 11 items failed, the first item-4: RuntimeError: boom"):
        per_item(loaded, tmp_path, items=eleven)
    monkeypatch.setenv("BROKEN", "item-4")
    frame = per_item(loaded, tmp_path, items=eleven)
    assert SEEN == ["item-5"]
    assert len(frame) == 10
    assert frame.attrs["failed"] == ["item-4: RuntimeError: boom"]
    assert "item-4: RuntimeError: boom" in capsys.readouterr().out


# ---- answers that no policy gives


def test_a_copy_begins_at_the_first_word_and_is_as_long_as_the_answer():
    def copied(text, answer):
        return run.copied(Item("i", "t", ({"role": "user", "content": text},), answer))

    assert copied("Red doors open. Big red doors are. Question: which?", "red doors now") == "red doors are."
    assert copied("The red door is open here. Question: which?", "red door") == "red door"
    assert copied("No such word. Question: which?", "red door") == "red"
    assert copied("Nothing. Question: which?", "") == ""


def test_without_its_passage_an_item_asks_its_question_alone():
    [needle] = data.load_items("tinyworld:needle", 1, seed=3, tokens=400)
    alone = data.without_passage(needle)
    assert alone.messages[0] == needle.messages[0]
    assert alone.messages[1]["content"].startswith("Question: what did they tell")
    assert [span.name for span in alone.spans] == ["question"]
    assert needle.answer.split()[0] not in alone.messages[1]["content"]
    passage = "The red door is open. " * 9
    messages, _ = passage_messages(passage, "Which?")
    with_passage = Item("p", "t", messages, "red", context=passage, question="Which?")
    assert data.without_passage(with_passage).messages[1]["content"] == "Passage: \n\nQuestion: Which?"
    message_only = Item("m", "t", ({"role": "user", "content": "Say it."},), "it")
    assert data.without_passage(message_only) == message_only


def test_every_control_is_a_row_with_its_scores_and_is_stored(tmp_path):
    tiny, items = models.load("small-gqa"), data.load_items("tinyworld:several,story", 4, seed=3, tokens=300)
    settings = Settings(tmp_path, progress=False)
    rows = run.controls("mine", items, tiny, settings, max_new_tokens=24)
    assert rows.groupby("item").control.agg(list).tolist() == [["first_word", "copy", "refusal", "no_passage"]] * 4
    for row in rows.itertuples():
        assert row.token_f1 == measure.token_f1(row.prediction, row.answer)
    first = rows[rows.control == "first_word"]
    assert (first.rest_f1 == 0).all()
    expected = {len(item.answer.split()): 2 / (1 + len(item.answer.replace(",", "").split())) for item in items}
    assert first.token_f1.tolist() == pytest.approx([expected[len(item.answer.split())] for item in items])
    assert (rows[rows.control == "refusal"].token_f1 == 0).all()
    assert (rows[rows.control == "no_passage"].exact_match == 0).all()  # the answer stands in the passage alone
    pd.testing.assert_frame_equal(rows, run.controls("mine", items, tiny, settings, max_new_tokens=24))
