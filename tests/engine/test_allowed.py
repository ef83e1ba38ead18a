"""What a value may be, and how a refusal reads."""

import math

import numpy as np
import pytest
import torch

from kvrepro.engine.allowed import (
    Count,
    Odd,
    Positive,
    PositiveShare,
    ProperShare,
    Share,
    Size,
    Weight,
    ensure,
    ensure_once_each,
)
from kvrepro.errors import InputError


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (Count, [0, 3], [-1, 1.0, True, "1", None]),
        (Size, [1, 2048, 10**400], [0]),
        (Odd, [1, 7], [0, 2, 7.0]),
        (Share, [0, 1, 0.5, np.float64(0.5)], [-1e-9, 1.1, float("nan"), float("inf"), "0.5", True]),
        (ProperShare, [0.5], [0, 1, 0.0, 1.0]),
        (Weight, [0, 1e300], [-1e-300, math.inf]),
        (Positive, [1e-300, 1], [0, 0.0]),
        (bool, [True, False], [0, 1, None]),
        (("a", "c"), ["a", "c"], ["d", 0, None]),
        (Size | PositiveShare | None, [1, 1.0, None], [0, False, 1.5]),
        (object, ["anything", None], []),
        (list[Size], [[1, 2], (1, 2), []], [[1, 0], 1, "12", None]),
        (torch.Tensor, [torch.zeros(2)], ["x"]),
        (tuple[str, ...], [("a",), ["a"], ()], ["a", (1,), None]),
    ],
)
def test_kinds(kind, good, bad):
    for value in good:
        ensure(kind, x=value)
    for value in bad:
        with pytest.raises(InputError, match="^x "):
            ensure(kind, x=value)


def test_a_refusal_names_value_and_way_out():
    with pytest.raises(InputError, match=r"^x 'd' for us: should be 'a' or 'b'; y 3 for us: should be 'a' or 'b'$"):
        ensure(("a", "b"), "us", x="d", y=3)
    with pytest.raises(InputError, match="^n 0: should be greater than or equal to 1$"):
        ensure(Size | None, n=0)
    with pytest.raises(InputError, match="^k 4: should be odd$"):
        ensure(Odd, k=4)
    with pytest.raises(InputError, match="^x 0: should be greater .* to 1; x 'b': should be a valid integer$"):
        ensure(list[Size], x=[1, 0, "b"])


@pytest.mark.parametrize("wrong", [(), [1, 1], 128, "lru"])
def test_a_list_of_things_once_each(wrong):
    ensure_once_each(capacities=[128, 256], policies=("lru",))
    with pytest.raises(InputError, match=r"capacities .*: give a list of at least one, each once"):
        ensure_once_each(capacities=wrong)
