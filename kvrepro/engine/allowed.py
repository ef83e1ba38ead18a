"""Annotations that say what a value may be: a range of numbers, or one of a few words.

With `alpha: Share = 0.5` in a function's signature, a condition's switch `alpha` is checked before anything runs.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from numbers import Integral
from operator import index
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from kvrepro.errors import InputError


@dataclass(frozen=True)
class Number:
    """Finite numbers from `least` to `most`, both included unless `above` or `below` says otherwise."""

    least: float = -math.inf
    most: float = math.inf
    whole: bool = False
    odd: bool = False
    above: bool = False
    below: bool = False

    def __contains__(self, value: object) -> bool:
        if isinstance(value, bool) or not isinstance(value, int if self.whole else int | float):
            return False
        low = value > self.least if self.above else value >= self.least
        high = value < self.most if self.below else value <= self.most
        finite = isinstance(value, int) or math.isfinite(value)  # whole numbers may lie beyond every float
        return finite and low and high and not (self.odd and value % 2 == 0)

    def __str__(self) -> str:
        kind = "an odd number" if self.odd else "a whole number" if self.whole else "a number"
        least, most = (f"{end:,.0f}" if end % 1 == 0 else f"{end:g}" for end in (self.least, self.most))
        low = "" if self.least == -math.inf else f", {'above' if self.above else 'at least'} {least}"
        high = "" if self.most == math.inf else f", {'below' if self.below else 'at most'} {most}"
        return kind + low + high


Count = Annotated[int, Number(0, whole=True)]
Size = Annotated[int, Number(1, whole=True)]
Odd = Annotated[int, Number(1, whole=True, odd=True)]
Share = Annotated[float, Number(0, 1)]
PositiveShare = Annotated[float, Number(0, 1, above=True)]  # not 0
ProperShare = Annotated[float, Number(0, 1, above=True, below=True)]  # neither 0 nor 1
Weight = Annotated[float, Number(0)]
Positive = Annotated[float, Number(0, above=True)]


def holds(kind: object, value: object) -> bool:
    """Is `value` of that kind: a type hint, a Number, a type, a word or None, or any of a tuple of these?

    A kind that cannot be checked, a tensor for instance, allows everything. True does not count as 1.
    """
    if isinstance(kind := _plain(kind), tuple):
        return any(holds(option, value) for option in kind)
    if isinstance(kind, Number):
        return value in kind
    if isinstance(kind, type):
        return kind not in (bool, str) or isinstance(value, kind)
    return not isinstance(kind, str | int | None) or (type(value) is type(kind) and value == kind)


def ensure(kind: object, whose: str = "", **named: object) -> None:
    """Raise InputError for a value that is not of that kind; the message says its name, whose it is, what it may be.
    Of a list, by its type hint, each element is checked."""
    for name, value in named.items():
        lists = [option for option in (kind, *get_args(kind)) if get_origin(option) in (list, tuple)]
        if not lists and not holds(kind, value):
            raise InputError(f"{name} {value!r}{f' for {whose}' if whose else ''}: {in_words(kind)}")
        if not lists or (value is None and type(None) in get_args(kind)):
            continue
        if not isinstance(value, list | tuple):
            raise InputError(f"{name} {value!r}: give a list")
        for item in value:
            ensure(get_args(lists[0])[0], whose, **{name: item})


def pythonic(value: Any) -> Any:
    """A whole number of numpy as Python's; anything else unchanged."""
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else value


def whole_numbers(name: str, given: Any) -> list[int]:
    """One whole number or several as a list; numpy's and a tensor's too. Raises InputError for anything else."""
    values = given.tolist() if hasattr(given, "tolist") else given
    try:
        return [index(values)] if hasattr(values, "__index__") else [index(value) for value in values]
    except TypeError:
        raise InputError(f"{name} {values!r:.60}: give a list of whole numbers") from None


def ensure_once_each(**named: object) -> None:
    """Raise InputError for a value that is no list, is empty, or repeats an element."""
    for name, values in named.items():
        if not isinstance(values, list | tuple) or not 0 < len(set(values)) == len(values):
            raise InputError(f"{name} {values!r}: give a list of at least one, each once")


def ensure_fields(record: object, kind: type, whose: str = "") -> None:
    """`ensure` for each field of a dataclass `kind`, by its type hint."""
    for name, hint in get_type_hints(kind, include_extras=True).items():
        ensure(hint, whose, **{name: getattr(record, name)})


def in_words(kind: object) -> str:
    """What `kind` allows, in words for a message."""
    kind = _plain(kind)
    if _words(kind):
        return f"choose {' or '.join(kind)}" if len(kind) < 3 else f"choose one of {', '.join(kind)}"  # type: ignore[arg-type]
    if isinstance(kind, tuple):
        return ", or ".join(in_words(option) for option in kind)
    return str({bool: "True or False", str: "a text", object: "any value"}.get(kind, kind))  # type: ignore[call-overload]


def annotation_of(functions: list[Callable[..., Any]], name: str) -> object:
    """The annotation of the parameter `name` in the first of `functions` that has one; else `object`, any value."""
    every = [parameters_of(function) for function in functions]
    hints = [parameters[name].annotation for parameters in every if name in parameters]
    return next((hint for hint in hints if not isinstance(hint, str) and hint != inspect.Parameter.empty), object)


@cache
def parameters_of(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """The parameters that a function names, looked up once per function."""
    return inspect.signature(function).parameters


def _words(kind: object) -> bool:
    return isinstance(kind, tuple) and all(isinstance(word, str) for word in kind)


def _plain(kind: object) -> object:
    """The metadata of an `Annotated` hint, a tuple for a hint with choices, a `Number` for int and float; other kinds
    unchanged."""
    if hasattr(kind, "__metadata__"):
        return kind.__metadata__[0]
    if get_origin(kind) is Literal:
        return get_args(kind)
    if get_origin(kind) in (Union, UnionType):
        options = [_plain(option) for option in get_args(kind)]
        return tuple(x for option in options for x in (option if isinstance(option, tuple) else (option,)))
    plain: dict[object, object] = {int: Number(whole=True), float: Number(), type(None): None}
    return plain.get(kind, kind) if isinstance(kind, type) else kind
