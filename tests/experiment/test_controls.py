"""Answers that no policy gives, of the world's items and of items with a passage."""

import pandas as pd
import pytest

from kvrepro.experiment import controls, data, measure, models, prompt
from kvrepro.experiment.run import Settings
from kvrepro.item import Item, Span

CONTROLS = ["first_word", "copy", "refusal", "no_passage"]


@pytest.fixture(scope="module")
def tiny():
    return models.load("small-gqa")


def item(text: str, answer: str) -> Item:
    at = text.index("Question")
    return Item("i", "t", ({"role": "user", "content": text},), answer, (Span("question", 0, at, len(text)),))


def test_a_copy_begins_at_the_first_word_and_is_as_long_as_the_answer():
    assert (
        controls.copied(item("Red doors open. Big red doors are. Question: which?", "red doors now"))
        == "red doors are."
    )
    assert controls.copied(item("The red door is open here. Question: which?", "red door")) == "red door"
    assert controls.copied(item("No such word. Question: which?", "red door")) == "red"
    assert controls.copied(item("Nothing. Question: which?", "")) == ""


def test_without_its_passage_an_item_asks_its_question_alone():
    [needle] = data.load_items("tinyworld:needle", 1, seed=3, tokens=400)
    alone = data.without_passage(needle)
    assert alone.messages[0] == needle.messages[0]
    assert alone.messages[1]["content"].startswith("Question: what did they tell")
    assert [span.name for span in alone.spans] == ["question"]
    assert needle.answer.split()[0] not in alone.messages[1]["content"]
    passage = "The red door is open. " * 9
    with_passage = Item(
        "p", "t", prompt.passage_messages(passage, "Which?")[0], "red", context=passage, question="Which?"
    )
    assert data.without_passage(with_passage).messages[1]["content"] == "Passage: \n\nQuestion: Which?"
    message_only = Item("m", "t", ({"role": "user", "content": "Say it."},), "it")
    assert data.without_passage(message_only) == message_only


def test_every_control_is_a_row_with_its_scores_and_is_stored(tiny, tmp_path):
    items = data.load_items("tinyworld:several,story", 4, seed=3, tokens=300)
    settings = Settings(tmp_path, progress=False)
    rows = controls.of_items("mine", items, tiny, settings, max_new_tokens=24)
    assert rows.groupby("item").control.agg(list).tolist() == [CONTROLS] * 4
    for row in rows.itertuples():
        assert row.token_f1 == measure.token_f1(row.prediction, row.answer)
    first = rows[rows.control == "first_word"]
    assert (first.rest_f1 == 0).all()
    expected = {len(item.answer.split()): 2 / (1 + len(item.answer.replace(",", "").split())) for item in items}
    assert first.token_f1.tolist() == pytest.approx([expected[len(item.answer.split())] for item in items])
    assert (rows[rows.control == "refusal"].token_f1 == 0).all()
    assert (rows[rows.control == "no_passage"].exact_match == 0).all()  # the answer stands in the passage alone
    pd.testing.assert_frame_equal(rows, controls.of_items("mine", items, tiny, settings, max_new_tokens=24))
