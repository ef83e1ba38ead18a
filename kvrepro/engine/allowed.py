"""What values may be: annotations that pydantic checks strictly, so that 1, 1.0 and True stay different.

With `alpha: Share = 0.5` in a function's signature, a condition's switch `alpha` is checked before anything runs.
"""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import cache, lru_cache
from operator import index
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt
from pydantic import AfterValidator, ConfigDict, InstanceOf, PydanticUserError, TypeAdapter, ValidationError

from kvrepro.errors import InputError


def _odd(number: int) -> int:
    if number % 2 == 0:
        raise ValueError("should be odd")
    return number


Count = Annotated[int, Ge(0)]
Size = Annotated[int, Ge(1)]
Odd = Annotated[int, Ge(1), AfterValidator(_odd)]
Share = Annotated[float, Ge(0), Le(1)]
PositiveShare = Annotated[float, Gt(0), Le(1)]
ProperShare = Annotated[float, Gt(0), Lt(1)]
Weight = Annotated[float, Ge(0)]
Positive = Annotated[float, Gt(0)]
STRICT = ConfigDict(strict=True, allow_inf_nan=False, arbitrary_types_allowed=True)
WORDS = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}


@lru_cache(maxsize=1024)
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(InstanceOf[kind]) if is_dataclass(kind) else TypeAdapter(kind, config=STRICT)


def _problems(kind: Any, name: str, value: object, whose: str) -> Iterator[str]:
    """What is wrong with a value, a line for each element of a list."""
    wanted = next((x for k in (kind, *get_args(kind)) if (x := get_origin(k)) in (list, tuple)), None)
    if wanted is not None and isinstance(value, list | tuple):
        value = wanted(value)
    try:
        _adapter(Literal[kind] if isinstance(kind, tuple) else kind).validate_python(value)
    except ValidationError as error:
        reasons: dict[str, list[str]] = {}
        for one in error.errors(include_url=False):
            reason = one["msg"].removeprefix("Value error, ").removeprefix("Input ")
            reasons.setdefault(f"{one['input']!r:.80}", []).append(reason)
        for given, why in reasons.items():
            yield f"{name} {given}{f' for {whose}' if whose else ''}: {' or '.join(dict.fromkeys(why))}"


def ensure(kind: Any, whose: str = "", **named: object) -> None:
    """Raise InputError for values that are not of that kind: a type hint, or a tuple of words. The message says their
    names, whose they are, and what they may be."""
    if problems := [line for name, value in named.items() for line in _problems(kind, name, value, whose)]:
        raise InputError("; ".join(problems))


@cache
def _hints(kind: type) -> dict[str, Any]:
    every = get_type_hints(kind, include_extras=True)
    return {f.name: every[f.name] for f in fields(kind)}


def ensure_fields(record: object, kind: type, whose: str = "") -> None:
    """Raise one InputError for all fields of a dataclass `kind` that are not what their type hints say."""
    given = ((hint, name, getattr(record, name)) for name, hint in _hints(kind).items())
    if problems := [line for one in given for line in _problems(*one, whose)]:
        raise InputError("; ".join(problems))


def ensure_once_each(**named: object) -> None:
    """Raise InputError for a value that is no list, is empty, or repeats an element."""
    for name, values in named.items():
        if not isinstance(values, list | tuple) or not 0 < len(set(values)) == len(values):
            raise InputError(f"{name} {values!r}: give a list of at least one, each once")


def pythonic(value: Any) -> Any:
    """A number of numpy, or of a tensor without axes, as Python's; anything else unchanged."""
    return value.item() if getattr(value, "ndim", None) == 0 else value


def whole_numbers(name: str, given: Any) -> list[int]:
    """One whole number or several as a list; numpy's and a tensor's too. Raises InputError for anything else, and for
    True and False, which Python takes for numbers."""
    shown = given.tolist() if hasattr(given, "tolist") else given
    try:
        values = [pythonic(value) for value in ([shown] if hasattr(shown, "__index__") else list(shown))]
        if isinstance(given, bytes | bytearray) or any(isinstance(value, bool) for value in values):
            raise TypeError
        return [index(value) for value in values]
    except TypeError:
        raise InputError(f"{name} {shown!r:.60}: give a list of whole numbers") from None


def in_words(kind: Any) -> str:
    """What a type hint allows, in words: `integer, at least 1`, or the choices themselves."""
    try:
        schema = TypeAdapter(kind, config=STRICT).json_schema()
    except PydanticUserError:  # a class that JSON does not have
        schema = {}
    if "enum" in schema:
        return " or ".join(map(str, schema["enum"]))
    return ", ".join([schema.get("type", "any value"), *(f"{WORDS[k]} {v:g}" for k, v in schema.items() if k in WORDS)])
