"""Whatever stands in a reader's files: items, or a parameter, or one line that says why not."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrepro import cli
from kvrepro.errors import InputError
from kvrepro.experiment import data
from kvrepro.experiment.settings import Settings
from kvrepro.item import Item

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FIELD = st.sampled_from(
    ["id", "task", "context", "question", "answer", "answers", "messages", "spans", "meta", "metric"]
)
SPAN = st.fixed_dictionaries(
    {"name": st.text(max_size=3) | JSON, "message": st.integers(-1, 2) | JSON, "start": JSON, "end": JSON}
)
TURN = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant"]) | JSON, "content": st.text(max_size=9) | JSON}
)
ROW = st.dictionaries(FIELD, st.text(max_size=20) | st.lists(TURN | SPAN | JSON, max_size=3) | JSON, max_size=6)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("read")


def refused_or(read):
    """What was read, or None where it was refused in one line."""
    message = "one line"
    try:
        return read()
    except InputError as error:
        message = str(error)
    assert "\n" not in message
    return None


@settings(max_examples=150, deadline=None)
@given(rows=st.lists(ROW.map(json.dumps).map(str.encode) | st.binary(max_size=40), min_size=1, max_size=3))
def test_any_lines_are_items_or_one_error(rows, place):
    (place / "own.jsonl").write_bytes(b"\n".join(rows))
    items = refused_or(lambda: data.load_items(str(place / "own.jsonl")))
    for item in items or []:
        assert isinstance(item, Item)
        assert item.id.isprintable()
        assert not set("<>`${}[]|*\\") & set(item.id + item.task)
        assert all(0 <= s.start < s.end <= len(item.messages[s.message]["content"]) for s in item.spans)


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=60) | JSON.map(json.dumps) | st.text("[]{}&*!a:1,-'\"# \n", max_size=30))
def test_any_text_is_a_value_or_one_error(text):
    value = refused_or(lambda: cli.read_value(text))
    refused_or(lambda: Settings.of({"seed": value}, n_items=value, policies=value, results=value))
