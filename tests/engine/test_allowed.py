"""What a value may be: numbers, words, types, and how a refusal reads."""

from typing import Annotated, Literal

import pytest
import torch

from kvrepro.engine.allowed import Count, Number, Odd, Share, Size, ensure, ensure_all, holds, of, said
from kvrepro.errors import InputError

Word = Annotated[str, ("a", "b", "c")]


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (Count, [0, 3], [-1, 1.0, True, "1", None]),
        (Size, [1, 2048], [0]),
        (Odd, [1, 7], [0, 2, 7.0]),
        (Share, [0, 1, 0.5], [-1e-9, 1.1, float("nan"), float("inf"), "0.5"]),
        (Number(0, 1, above=True, below=True), [0.5], [0, 1, 0.0, 1.0]),
        (float, [1, 2.5, -3.0], [True, "x", float("nan")]),
        (int, [1, -2], [True, 1.0]),
        (bool, [True, False], [0, 1, None]),
        (str, ["", "x"], [1]),
        (Word, ["a", "c"], ["d", 0, None]),
        ((Size, None), [1, None], [0, False]),
        ((4, None), [4, None], [4.0, 3]),
        (torch.Tensor, [torch.zeros(2), None], []),
        (object, ["anything", None], []),
        (int | None, [3, None, "unknown kinds hold all"], []),
    ],
)
def test_kinds(kind, good, bad):
    assert all(holds(kind, value) for value in good)
    assert not any(holds(kind, value) for value in bad)


def test_a_refusal_names_value_and_way_out():
    with pytest.raises(InputError, match=r"^unknown x 'd' for us: choose one of a, b, c$"):
        ensure(Word, "us", x="d")
    with pytest.raises(InputError, match=r"^n 0: a whole number, at least 1, or None$"):
        ensure((Size, None), n=0)
    assert said(Share) == "a number, at least 0, at most 1"
    assert said(Odd) == "an odd number, at least 1"
    assert said(("a", "b")) == "choose a or b"
    assert said((4, None)) == "4, or None"
    assert said(bool) == "True or False"


def test_the_first_function_that_says_what_a_parameter_is_counts():
    def plain(o, x, y):
        return o

    def first(o, x: Share = 0.5, y: "float" = 0.0):
        return o

    def second(o, x: Count = 1):
        return o

    assert of([plain, first, second], "x") == Share
    assert of([plain, first], "y") is of([], "x") is object


def test_a_range_says_only_the_ends_it_has():
    assert str(Number()) == "a number"
    assert str(Number(most=3)) == "a number, at most 3"
    assert str(Number(0, 1, above=True, below=True)) == "a number, above 0, below 1"


def test_a_choice_of_kinds_holds_any_of_them():
    ensure_all(Literal["a", "b"] | float, x="a")
    ensure_all(Literal["a", "b"] | float, x=0.5)
    with pytest.raises(InputError, match="x 'c': a, or b, or a number"):
        ensure_all(Literal["a", "b"] | float, x="c")
