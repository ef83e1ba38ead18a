"""The run, against an engine that answers from a table; the real engine joins in test_real_input."""

import json

import checkpoint
import pandas as pd
import pytest

from kvrepro.engine import generate as engine
from kvrepro.engine.condition import Condition, Generation
from kvrepro.errors import InputError
from kvrepro.experiment import models, run, store
from kvrepro.experiment.data import Item

ITEMS = [
    Item(f"item-{i}", "doors", ({"role": "user", "content": f"Which door is open, {i}?"},), "the red door")
    for i in range(5)
]
CONDITIONS = [Condition(), Condition("lru", 16, 0.1, 0.1), Condition("h2o", 16, switches=(("tie_break", "integer"),))]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return models.load(str(checkpoint.save(tmp_path_factory.mktemp("hub") / "small", context=256)))


class FakeEngine:
    """Answers "the red door"; fails where told; remembers what it was asked."""

    def __init__(self, loaded, fail_on=()):
        self.answer = [*loaded.tokenizer(" the red door")["input_ids"], loaded.tokenizer.eos_token_id]
        self.tokenizer, self.fail_on, self.calls = loaded.tokenizer, fail_on, []

    def generate(self, model, prompts, conditions, *, max_new_tokens, stop_ids, batch_rows, repeat):
        texts = [self.tokenizer.decode(prompt.ids) for prompt in prompts]
        if any(f"open, {i}?" in text for i in self.fail_on for text in texts):
            raise RuntimeError("out of memory\nand a long story")
        self.calls.append((len(prompts), list(conditions)))
        generation = Generation(
            tokens=self.answer, kept=[16, 17], kept_positions=[0, 1], kept_positions_hash="abc", evicted=3,
            policy_calls=1, bytes_held=10, bytes_full=20, prefill_seconds=0.1, decode_seconds=0.2, backend="fake",
        )  # fmt: skip
        return [[generation for _ in conditions] for _ in prompts]


@pytest.fixture
def fake(loaded, monkeypatch):
    made = FakeEngine(loaded)
    monkeypatch.setattr(engine, "generate", made.generate)
    return made


def go(loaded, tmp_path, items=ITEMS, conditions=CONDITIONS, **options):
    return run.run("doors", loaded, items, conditions, name="main", results=tmp_path, max_new_tokens=8, **options)


def test_one_row_per_item_and_condition_in_order(loaded, fake, tmp_path, capsys):
    frame = go(loaded, tmp_path, profile="full", seed=7)
    assert list(frame.columns) == store.COLUMNS
    assert list(zip(frame["item"], frame["policy"], strict=True)) == [
        (i.id, c.policy) for i in ITEMS for c in CONDITIONS
    ]
    first = frame.iloc[0]
    assert (first.prediction, first.answer, first.token_f1, first.exact_match) == ("the red door", "the red door", 1, 1)
    assert first.n_generated == len(fake.answer)  # with the stop token
    assert (list(first.kept), first.kept_mean) == ([16, 17], 16.5)
    assert (first.chapter, first["name"], first.profile, first.seed) == ("doors", "main", "full", 7)
    assert (first["model_hash"], first["dtype"], first["device"]) == (loaded.hash, "float32", "cpu")
    assert pd.isna(first.capacity)
    assert frame.iloc[1].capacity == 16
    assert json.loads(frame.iloc[2].switches) == {"tie_break": "integer"}
    assert frame["error"].isna().all()
    assert "15 rows, 15 computed now, 0 failed" in capsys.readouterr().out


def test_a_second_run_computes_nothing(loaded, fake, tmp_path):
    first = go(loaded, tmp_path)
    fake.calls.clear()
    pd.testing.assert_frame_equal(go(loaded, tmp_path), first)
    assert not fake.calls


def test_only_missing_conditions_are_asked_for(loaded, fake, tmp_path):
    go(loaded, tmp_path, items=ITEMS[:2], conditions=CONDITIONS[:2])
    fake.calls.clear()
    go(loaded, tmp_path)
    assert fake.calls == [(2, CONDITIONS[2:]), (3, CONDITIONS)]


@pytest.mark.parametrize("what", ["model_hash", "data_hash", "engine_hash", "max_new_tokens", "switches"])
def test_a_change_makes_rows_stale(loaded, fake, tmp_path, monkeypatch, what):
    go(loaded, tmp_path, items=ITEMS[:1])
    real = run._heads

    def changed(*arguments):
        other = {what: {"max_new_tokens": 9}.get(what, "changed")}
        return [head | other | {"key": store.digest(head | other)} for head in real(*arguments)]

    monkeypatch.setattr(run, "_heads", changed)
    fake.calls.clear()
    go(loaded, tmp_path, items=ITEMS[:1])
    assert fake.calls == [(1, CONDITIONS)]
    rows = 6 if what in ("max_new_tokens", "switches") else 3  # another configuration stands beside, a stale row goes
    assert len(store.read(tmp_path / "doors" / "main.parquet")) == rows


def test_the_key_hashes_what_decides_a_row(loaded, fake, tmp_path):
    base = go(loaded, tmp_path, items=ITEMS[:1])["key"]
    assert base.is_unique
    other = Item(ITEMS[0].id, "doors", ITEMS[0].messages, "the blue door")
    assert not set(go(loaded, tmp_path, items=[other])["key"]) & set(base)
    assert list(go(loaded, tmp_path, items=ITEMS[:1], profile="full", seed=3)["key"]) == list(base)


def test_a_failed_item_is_rows_with_its_error_and_the_run_goes_on(loaded, fake, tmp_path, capsys):
    fake.fail_on = (1, 3)
    frame = go(loaded, tmp_path)
    failed = frame[frame["error"].notna()]
    assert set(failed["item"]) == {"item-1", "item-3"}
    assert len(failed) == 6
    assert set(failed["error"]) == {"RuntimeError: out of memory"}
    assert failed["token_f1"].isna().all()
    assert frame[frame["error"].isna()]["token_f1"].eq(1).all()
    assert "15 rows, 15 computed now, 6 failed" in capsys.readouterr().out
    fake.fail_on, fake.calls = (), []
    assert go(loaded, tmp_path)["error"].isna().all()  # tried again, and only those
    assert sum(n * len(c) for n, c in fake.calls) == 6


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
    stored = len(store.read(tmp_path / "doors" / "main.parquet"))
    assert stored == 2 * len(CONDITIONS)
    fake.calls.clear()
    go(loaded, tmp_path)
    assert sum(n * len(c) for n, c in fake.calls) == 15 - stored


def test_several_references_count(loaded, fake, tmp_path):
    item = Item("two", "doors", ITEMS[0].messages, "the blue door", meta={"answers": ["the blue door", "the red door"]})
    assert go(loaded, tmp_path, items=[item])["exact_match"].eq(1).all()


LONG = Item("long", "doors", ({"role": "user", "content": "door " * 300},), "x")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"conditions": [Condition("best", 16)]}, "unknown policy 'best'"),
        ({"conditions": [Condition("lru", 4, 0.1, 0.1)]}, "budget 4 < 8 protected"),
        ({"conditions": []}, "5 items x 0 conditions"),
        ({"items": []}, "0 items x 3 conditions"),
        ({"items": [ITEMS[0], ITEMS[0]]}, "2 items share 1 ids"),
        ({"items": [*ITEMS, Item("blank", "t", ({"role": "user", "content": " "},), "")]}, "item blank is empty"),
        ({"items": [*ITEMS, LONG]}, "item long has .* > limit 248"),
        ({"limit": 250}, "limit 250 . 8 new tokens > context 256"),
        ({"conditions": [Condition("lru", 200, 0.45, 0.45)]}, "prompt of .* tokens < 180 protected"),
    ],
)
def test_bad_input_is_one_line_and_costs_nothing(loaded, fake, tmp_path, change, words):
    with pytest.raises(InputError, match=words) as error:
        go(loaded, tmp_path, **change)
    assert "\n" not in str(error.value)
    assert not fake.calls
    assert not list(tmp_path.iterdir())


def test_prompts_with_a_passage_stop_at_the_papers_length(loaded):
    passage = Item("p", "t", (), "a", context="c", question="q")
    assert run.prompt_limit(loaded, ITEMS, 8) == 248
    assert run.prompt_limit(loaded, [passage], 8, limit=100) == 100

    class Long:
        context, name = 32_768, "long"

    assert run.prompt_limit(Long, [passage], 128) == 1920
    assert run.prompt_limit(Long, ITEMS, 128) == 32_640


def test_budgets_that_are_never_met_are_said(loaded, tmp_path, capsys):
    conditions = [Condition(), Condition("lru", 200), Condition("lru", 16)]
    go(loaded, tmp_path, conditions=conditions, progress=False)
    assert "1 conditions evicted nothing from any item, lru C=200" in capsys.readouterr().out
