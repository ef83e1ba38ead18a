"""What a value may be: numbers, words, types, and how a refusal reads."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Optional

import pytest
import torch

from kvrepro.engine.allowed import (
    Count,
    Number,
    Odd,
    Positive,
    Share,
    Size,
    Weight,
    annotation_of,
    ensure,
    ensure_fields,
    ensure_once_each,
    holds,
    in_words,
)
from kvrepro.errors import InputError

Word = Annotated[str, ("a", "b", "c")]


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (Count, [0, 3], [-1, 1.0, True, "1", None]),
        (Size, [1, 2048, 10**400], [0]),
        (Odd, [1, 7], [0, 2, 7.0]),
        (Share, [0, 1, 0.5], [-1e-9, 1.1, float("nan"), float("inf"), "0.5"]),
        (Number(0, 1, above=True, below=True), [0.5], [0, 1, 0.0, 1.0]),
        (Weight, [0, 1e300], [-1e-300, math.inf]),
        (Positive, [1e-300, 1], [0, 0.0]),
        (Number(2, 4, whole=True), [2, 3, 4], [1, 5, 3.0, 10**400]),
        (Number(-3, 3, odd=True), [-3, 1, 1.5, 3], [0, 2.0, -2, math.nan]),
        (float, [1, 2.5, -3.0], [True, "x", float("nan")]),
        (int, [1, -2], [True, 1.0]),
        (bool, [True, False], [0, 1, None]),
        (str, ["", "x"], [1]),
        (Word, ["a", "c"], ["d", 0, None]),
        ((Size, None), [1, None], [0, False]),
        ((4, None), [4, None], [4.0, 3]),
        (torch.Tensor, [torch.zeros(2), None], []),
        (object, ["anything", None], []),
        (int | None, [3, None], ["3", 1.5]),
        (list | Callable[[int], int], ["unknown kinds hold all"], []),
        (None, [None], [0, False, "", "None"]),
        ("a", ["a"], ["b", None]),
        (1, [1], [True, 1.0, 2]),
        ((), [], [None, 1]),
        (2.5, [2.5, "no word and no number either"], []),
        ((Share, "auto", bool), [0.5, 1, "auto", True], [2, "none", None]),
    ],
)
def test_kinds(kind, good, bad):
    assert all(holds(kind, value) for value in good)
    assert not any(holds(kind, value) for value in bad)


def test_a_refusal_names_value_and_way_out():
    with pytest.raises(InputError, match=r"^x 'd' for us: choose one of a, b, c$"):
        ensure(Word, "us", x="d")
    with pytest.raises(InputError, match=r"^n 0: a whole number, at least 1, or None$"):
        ensure((Size, None), n=0)
    assert in_words(Share) == "a number, at least 0, at most 1"
    assert in_words(Odd) == "an odd number, at least 1"
    assert in_words(("a", "b")) == "choose a or b"
    assert in_words((4, None)) == "4, or None"
    assert in_words(bool) == "True or False"


def test_the_first_function_that_says_what_a_parameter_is_counts():
    def plain(o, x, y):
        return o

    def first(o, x: Share = 0.5, y: "float" = 0.0):
        return o

    def second(o, x: Count = 1):
        return o

    assert annotation_of([plain, first, second], "x") == Share
    assert annotation_of([plain, first], "y") is annotation_of([], "x") is object


def test_a_range_says_only_the_ends_it_has():
    assert str(Number()) == "a number"
    assert str(Number(most=3)) == "a number, at most 3"
    assert str(Number(0, 1, above=True, below=True)) == "a number, above 0, below 1"


def test_a_choice_of_kinds_holds_any_of_them():
    ensure(Literal["a", "b"] | float, x="a")
    ensure(Literal["a", "b"] | float, x=0.5)
    with pytest.raises(InputError, match="x 'c': a, or b, or a number"):
        ensure(Literal["a", "b"] | float, x="c")


def refused(call: Callable[[], Any]) -> str:
    """The message of a refusal; empty if nothing is refused."""
    try:
        call()
    except InputError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("kind", "value", "text"),
    [
        (Size, 3, ""),
        (Size, 0, "x 0: a whole number, at least 1"),
        (Positive, 0.0, "x 0.0: a number, above 0"),
        (("a", "b"), "c", "x 'c': choose a or b"),
        (Word, "d", "x 'd': choose one of a, b, c"),
        (("a",), "b", "x 'b': choose a"),
        (("a", None), "b", "x 'b': a, or None"),
        ((bool, 4), "b", "x 'b': True or False, or 4"),
        (str, 1, "x 1: a text"),
        (bool, 1, "x 1: True or False"),
        (int, "1", "x '1': a whole number"),
        (Number(1.5, 1e7, odd=True), 0, "x 0: an odd number, at least 1.5, at most 10,000,000"),
    ],
)
def test_every_refusal_in_words(kind, value, text):
    assert refused(lambda: ensure(kind, x=value)) == text
    assert refused(lambda: ensure(kind, "us", x=value)) == text.replace(": ", " for us: ", 1)


def test_a_parameter_without_a_type_takes_any_value():
    assert holds(object, None)
    assert in_words(object) == "any value"


def test_each_name_is_held_to_its_kind():
    assert refused(lambda: ensure(list[int], "us", x=[1, "1"])) == "x '1' for us: a whole number"
    assert refused(lambda: ensure(Size, "it", n=1, m=0)) == "m 0 for it: a whole number, at least 1"
    assert refused(lambda: ensure(Size | None, n=None, m=0)) == "m 0: a whole number, at least 1, or None"


@pytest.mark.parametrize(
    ("hint", "value", "text"),
    [
        (Optional[Size], None, ""),  # noqa: UP045
        (Size | None, None, ""),
        (Size | None, 0, "x 0: a whole number, at least 1, or None"),
        (Optional[Share], 2, "x 2: a number, at least 0, at most 1, or None"),  # noqa: UP045
        (Literal["a", "b", "c"], "c", ""),
        (Literal["a", "b", "c"], "d", "x 'd': choose one of a, b, c"),
        (Literal["a", "b"] | None, "d", "x 'd': a, or b, or None"),
        (Literal["a"] | Literal["b"] | bool, 1, "x 1: a, or b, or True or False"),
        (list[Size], [1, 2], ""),
        (list[Size], [], ""),
        (list[Size], [1, 0], "x 0: a whole number, at least 1"),
        (list[Size], 1, "x 1: give a list"),
        (list[Size], "12", "x '12': give a list"),
        (list[Size], None, "x None: give a list"),
        (list[Size] | None, None, ""),
        (list[Size] | None, (3, 0), "x 0: a whole number, at least 1"),
        (tuple[Literal["a", "b"], ...], ["a", "c"], "x 'c': choose a or b"),
        (tuple[list[Share], ...], [[0.5], [2]], "x 2: a number, at least 0, at most 1"),
        (list[int | None], [1, None, 0.5], "x 0.5: a whole number, or None"),
        (torch.Tensor, "anything", ""),
    ],
)
def test_hints_of_choices_and_lists(hint, value, text):
    assert refused(lambda: ensure(hint, x=value)) == text


def test_every_field_of_a_record_is_held_to_its_hint():
    @dataclass
    class Record:
        size: Size
        words: list[Literal["a", "b"]]
        share: Share | None = None

    assert refused(lambda: ensure_fields(Record(1, ["a"]), Record)) == ""
    assert refused(lambda: ensure_fields(Record(0, ["a"]), Record)) == "size 0: a whole number, at least 1"
    message = refused(lambda: ensure_fields(Record(0, ["a"]), Record, "mine"))
    assert message == "size 0 for mine: a whole number, at least 1"
    assert refused(lambda: ensure_fields(Record(1, ["a", "c"]), Record)) == "words 'c': choose a or b"
    wrong = "share 2: a number, at least 0, at most 1, or None"
    assert refused(lambda: ensure_fields(Record(1, [], 2), Record)) == wrong


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (Number(whole=True), "a whole number"),
        (Number(1, 9, whole=True, odd=True), "an odd number, at least 1, at most 9"),
        (Number(-1, above=True), "a number, above -1"),
        (Number(most=0.123456789, below=True), "a number, below 0.123457"),
        (int, "a whole number"),
        (float, "a number"),
        (str, "a text"),
        (("a", "b", "c"), "choose one of a, b, c"),
        (("a", 1, None), "a, or 1, or None"),
        ((Size, str), "a whole number, at least 1, or a text"),
        ("a", "a"),
    ],
)
def test_kinds_in_words(kind, text):
    assert in_words(kind) == text


@pytest.mark.parametrize("wrong", [(), [1, 1], 128, "lru"])
def test_a_list_of_things_once_each(wrong):
    ensure_once_each(capacities=[128, 256], policies=("lru",))
    with pytest.raises(InputError, match=r"capacities .*: give a list of at least one, each once"):
        ensure_once_each(capacities=wrong)
