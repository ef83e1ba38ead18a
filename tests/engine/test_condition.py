"""What a value may be, and how a refusal reads; labels distinguish conditions; impossible prompts are refused."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from kvrepro.engine import condition as values
from kvrepro.engine.condition import REGIMES, Chunked, Condition, DecodeCap, Prefill, Prompt, Size, ensure
from kvrepro.errors import InputError

BASE = Condition("snapkv", 256, Prefill())
CHANGES = [
    *({"budget": budget} for budget in (128, 0.2, 0.125, 0.13)),
    *({"policy": "lru"}, {"reading": "as_described"}, {"whitelist": ("a",)}, {"whitelist": ("a", "b")}, {"bits": 4}),
    *({"prefix": 0.1}, {"prefix": 0.105}, {"suffix": 0.1}, {"suffix": 0.1, "static_suffix": True}),
    *({"switches": (("window", 8),)}, {"switches": (("window", 8), ("recent", 0))}),
    *({"regime": regime()} for name, regime in REGIMES.items() if name != "prefill"),
    *({"regime": Prefill(**more)} for more in ({"until": "user"}, {"fair": 1.0}, {"fair": 0.0}, {"spans": ("a",)})),
    *({"regime": Chunked(512)}, {"regime": Chunked(when="budget")}, {"regime": DecodeCap(4)}),
]


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (values.Odd, [1, 7], [0, 2, 7.0, True, "1", None]),
        (values.Share, [0, 1, 0.5, np.float64(0.5)], [-1e-9, 1.1, float("nan"), float("inf"), "0.5", True]),
        (values.ProperShare, [0.5], [0, 1, 0.0, 1.0, math.inf]),
        (("a", "c"), ["a", "c"], ["d", 0, None]),
        (Size | values.PositiveShare | None, [1, 1.0, None], [0, False, 1.5]),
        (list[Size], [[1, 2], (1, 2), []], [[1, 0], 1, "12", None]),
    ],
)
def test_kinds(kind, good, bad):
    for value in good:
        ensure(kind, x=value)
    for value in bad:
        with pytest.raises(InputError, match="^x "):
            ensure(kind, x=value)


REFUSED = [
    (("a", "b"), "d", "x 'd': should be 'a' or 'b'"),
    (values.Odd, 2, "x 2: should be odd"),
    (tuple[str, ...], "lru", "x 'lru': should be a list, such as ['lru']"),
    (tuple[str, ...], None, "x None: should be a list"),
    (list[Size], [1, 0], "x 0: should be greater than or equal to 1"),
    (Size | values.PositiveShare, 0, "x 0: should be greater than or equal to 1 or should be greater than 0"),
    (values.Budget, 0, "x 0: give a number of tokens such as 64, or a share such as 0.2, at most 1.0"),
]


@pytest.mark.parametrize(("kind", "value", "line"), REFUSED)
def test_a_refusal_names_value_and_way_out(kind, value, line):
    with pytest.raises(InputError) as refusal:
        ensure(kind, x=value)
    assert str(refusal.value) == line
    with pytest.raises(InputError) as refusal:
        ensure(kind, "us", x=value, y=value)
    for_us = line.replace(":", " for us:", 1)
    assert str(refusal.value) == f"{for_us}; y{for_us[1:]}"


def test_settings_are_of_their_kind_and_lists_become_tuples():
    assert Prefill(spans=["a"]).spans == ("a",)
    with pytest.raises(InputError, match=r"^chunk 0 for chunked: should be greater than or equal to 1$"):
        Chunked(0)
    with pytest.raises(
        InputError, match=r"^prefix 1.5: should be less than 1; reading 'x': give as_run or as_described$"
    ):
        Condition(prefix=1.5, reading="x")


def test_whole_numbers_of_any_library():
    for given in (3, [3], np.array([3]), torch.tensor(3), range(3, 4)):
        assert values.whole_numbers("x", given) == [3]
    for given in ([[1, 2]], 1.5, "1", None, {"a": 1}, [1, [2]]):
        with pytest.raises(InputError, match="^x .*: give a list of whole numbers$"):
            values.whole_numbers("x", given)
    assert Prompt(torch.tensor([1, 2]), {}).ids == [1, 2]


@pytest.mark.parametrize("half", [np.float32(0.5), np.float64(0.5), torch.tensor(0.5)])
def test_budgets_of_other_libraries_are_python_s(half):
    assert Condition("snapkv", half, Prefill()) == Condition("snapkv", 0.5, Prefill())
    with pytest.raises(InputError, match="budget True"):
        Condition("snapkv", half > 0, Prefill())


def test_a_budget_of_a_token_is_not_one_of_everything():
    token, every = (replace(BASE, budget=budget) for budget in (1, 1.0))
    assert token != every
    assert {token: "token", every: "every"}[replace(BASE, budget=1.0)] == "every"
    assert token == replace(BASE, budget=np.int64(1))
    assert token.columns()["capacity"] == every.columns()["share"] == 1
    assert token != "a text"


def test_a_condition_s_columns_are_its_settings():
    regimes = DecodeCap(4), Chunked(512, when="budget"), Prefill(until="user", fair=0.5, spans=("b", "a"))
    cap, chunked, prefill = (replace(BASE, regime=regime).columns() for regime in regimes)
    settings = {"policy": "snapkv", "prefix": 0.0, "suffix": 0.0, "reading": "as_run", "bits": None, "capacity": 256}
    settings |= {"share": None, "suffix_mode": "dynamic", "execution": "physical", "switches": "{}", "whitelist": "[]"}
    apart = {"until": "", "fair": None, "interval": 4, "chunk": None, "chunk_mode": None, "spans": "[]"}
    assert cap == settings | apart | {"regime": "decode cap"}
    changed = {"regime": "chunked", "interval": None, "chunk": 512, "chunk_mode": "budget"}
    assert chunked == settings | apart | changed
    changed = {"regime": "prefill", "interval": None, "until": "user", "fair": 0.5, "spans": '["b", "a"]'}
    assert prefill == settings | apart | changed
    more = {"suffix": 0.1, "static_suffix": True, "switches": (("window", 8), ("recent", 0)), "whitelist": ("a", "b")}
    columns = replace(BASE, budget=0.5, bits=4, prefix=0.2, reading="as_described", **more).columns()
    changed = {"share": 0.5, "capacity": None, "bits": 4, "prefix": 0.2, "reading": "as_described", "suffix": 0.1}
    changed |= {"suffix_mode": "static", "switches": '{"recent": 0, "window": 8}', "whitelist": '["a", "b"]'}
    assert columns == settings | apart | {"regime": "prefill", "interval": None} | changed
    assert Condition().columns()["regime"] is None


def test_different_conditions_have_different_labels():
    conditions = {replace(BASE, **a, **b) for a in CHANGES for b in CHANGES if not a.keys() & b.keys()}
    conditions |= {BASE, *(replace(BASE, **change) for change in CHANGES)}
    assert len({c.label for c in conditions}) == len(conditions) > 200


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("some text", {}), "prompt 'some text': give a list of whole numbers"),
        (([1, 2, 3], {"a": [1, 3]}), "a at position 3 of a prompt of 3 tokens"),
        (([1, 2, 3], {"a": [-1, 0]}), "a at position -1 of a prompt of 3 tokens"),
        (([1, 2, 3], {"a": [0, 4]}), "a at position 4 of a prompt of 3 tokens"),
        (([1, 2, 3], {}, {"user": 3}), "user at position 3 of a prompt of 3 tokens"),
        (([True, False], {}), "prompt .True, False.: give a list of whole numbers"),
        (([1, 2, 3], {"a": slice(1, 2)}), "span a .*: give a list of whole numbers"),
        (([1, 2, 3], {"a": torch.tensor([True, False])}), "span a .*: give a list of whole numbers"),
    ],
)
def test_prompts_that_cannot_be_are_refused(given, words):
    with pytest.raises(InputError, match=words):
        Prompt(*given)


def test_a_span_that_a_prompt_does_not_have_is_refused():
    prompt = Prompt([1, 2, 3], {"a": [0], "b": [1, 2], "empty": []})
    prompt.ensure_span("a")
    for name in ("c", "empty"):
        with pytest.raises(InputError, match=f"^the prompt has no span '{name}': it has a, b, empty; mark it"):
            prompt.ensure_span(name)
    with pytest.raises(InputError, match="it has none"):
        Prompt([1], {}).ensure_span("a")


@pytest.mark.parametrize("where", [range(1, 3), torch.tensor([1, 2]), np.array([1, 2]), (1, 2), []])
def test_a_span_is_any_list_of_whole_numbers(where):
    assert Prompt([1, 2, 3], {"a": where, "b": [0, 2]}, {"user": 1}).spans["a"] == list(where)
