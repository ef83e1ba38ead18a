"""The engine's input and output: what values may be, prompts, conditions with their regimes, and generations.

A type hint says what a value may be, and pydantic checks it strictly, so that 1, 1.0 and True stay different. With
`alpha: Share = 0.5` in a function's signature, a condition's switch `alpha` is checked before anything runs.
"""

import json
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field, fields
from functools import cache, lru_cache
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin, get_type_hints

import numpy as np
from annotated_types import Ge, Gt, Le, Lt
from pydantic import AfterValidator, ConfigDict, Field, InstanceOf, TypeAdapter, ValidationError

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
Positive = Annotated[float, Gt(0)]
Budget = Annotated[Size | PositiveShare | None, "a number of tokens such as 64, or a share such as 0.2, at most 1.0"]
NotNegative = Annotated[float, Ge(0)]
STRICT = ConfigDict(strict=True, allow_inf_nan=False, arbitrary_types_allowed=True)
_hints = cache(get_type_hints)


@lru_cache(maxsize=1024)
def _adapter(kind: Any) -> TypeAdapter[Any]:
    if isinstance(kind, tuple):
        kind = Literal[kind]
    return TypeAdapter(kind, config=STRICT)


def ensure_all(values: Iterable[tuple[str, Any, object]], whose: str = "") -> None:
    """Raise one InputError for all values (name, kind, value) that are not of their kind, with a reason for each
    element of a list, or the text in a kind's annotation. A list will do for a tuple, and a tuple for a list."""
    reasons: dict[str, list[str]] = {}
    for name, kind, value in values:
        wanted = next((x for k in (kind, *get_args(kind)) if (x := get_origin(k)) in (list, tuple)), None)
        try:
            _adapter(kind).validate_python(wanted(value) if wanted and isinstance(value, list | tuple) else value)
        except ValidationError as error:
            like = f"a list, such as [{value!r:.80}]" if isinstance(value, str | int | float) else "a list"
            wish = next((f"give {text}" for text in getattr(kind, "__metadata__", ()) if isinstance(text, str)), "")
            for one in error.errors(include_url=False):
                reason = one["msg"].removeprefix("Value error, ").removeprefix("Input ")
                reason = wish or reason.replace("a valid tuple", like)
                reasons.setdefault(f"{name} {one['input']!r:.80}" + f" for {whose}" * bool(whose), []).append(reason)
    if reasons:
        raise InputError("; ".join(f"{given}: {' or '.join(dict.fromkeys(why))}" for given, why in reasons.items()))


def ensure(kind: Any, whose: str = "", **named: object) -> None:
    """Raise InputError for values that are not of that kind: a type hint, or a tuple of words. The message says their
    names, whose they are, and what they may be."""
    ensure_all([(name, kind, value) for name, value in named.items()], whose)


def ensure_fields(record: Any, whose: str = "") -> None:
    """`ensure` for the fields of a dataclass and their type hints. Lists in the place of tuples become tuples."""
    known: Any = _hints(record.__class__, include_extras=True)
    hints = {f.name: known[f.name] for f in fields(record)}
    ensure_all([(name, hint, getattr(record, name)) for name, hint in hints.items()], whose)
    for name, hint in hints.items():
        if get_origin(hint) is tuple:
            object.__setattr__(record, name, tuple(getattr(record, name)))


def whole_numbers(name: str, given: Any) -> list[int]:
    """One whole number or several as a list; numpy's and a tensor's too. Raises InputError for anything else."""
    given = given.tolist() if hasattr(given, "tolist") else given
    try:
        values = np.array(given if isinstance(given, int) else list(given))
    except (TypeError, ValueError, RuntimeError):
        values = np.array("")
    if values.ndim > 1 or (values.size and values.dtype.kind not in "iu"):
        raise InputError(f"{name} {given!r:.60}: give a list of whole numbers")
    return list(values.flatten().tolist())


# ---- regimes


@dataclass(frozen=True)
class Regime:
    """The base of all regimes. `name` is shown in rows and labels. Raises InputError for settings of another kind."""

    name: ClassVar[str]

    def __post_init__(self) -> None:
        ensure_fields(self, self.name)


@dataclass(frozen=True)
class Prefill(Regime):
    """Each layer is reduced as soon as the prompt has passed through it."""

    name: ClassVar[str] = "prefill"
    until: str = ""  # compress the tokens before this span ("question") or turn ("user"); "": the whole prompt
    # 1: every span keeps its share, and unmarked text joins the span before it. Below 1: debias, a mixture with the
    # policy's own split.
    fair: Share | None = None
    spans: tuple[str, ...] = ()  # the marked spans that count; (): all


@dataclass(frozen=True)
class Offline(Prefill):
    """A prefix is reduced once and reused by many requests."""

    name: ClassVar[str] = "offline"


@dataclass(frozen=True)
class Chunked(Regime):
    """The prompt comes in chunks that attend to what is left of the earlier ones."""

    name: ClassVar[str] = "chunked"
    chunk: Size = 4096  # tokens
    when: Literal["last_chunk", "budget", "every_chunk"] = "last_chunk"  # to evict; "every_chunk": as in DropKV
    until: str = ""


@dataclass(frozen=True)
class DecodeCap(Regime):
    """A cap on the cache, met again every `interval` generated tokens."""

    name: ClassVar[str] = "decode cap"
    interval: Size = 8
    until: str = ""


@dataclass(frozen=True)
class PerStep(Regime):
    """One token leaves for every token generated."""

    name: ClassVar[str] = "per step"
    until: str = ""


@dataclass(frozen=True)
class SharedCap(Regime):
    """The protection paper's harness: a cap as in `DecodeCap`, but one set of tokens for all layers, chosen by signals
    that are reduced over layers, and met before the step's forward pass."""

    name: ClassVar[str] = "shared cap"
    interval: Size = 8


REGIMES: dict[str, type[Regime]] = {r.name: r for r in (Prefill, Chunked, Offline, DecodeCap, PerStep, SharedCap)}


# ---- what goes in, and what comes out


@dataclass(frozen=True)
class Prompt:
    """Token ids with the generation prompt, the token positions of each named span (equal names merge), and where the
    first turn of each role begins. Raises InputError for text, and for positions outside the prompt."""

    ids: list[int]
    spans: dict[str, list[int]]
    turns: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        spans = {name: whole_numbers(f"span {name}", where) for name, where in self.spans.items()}
        object.__setattr__(self, "ids", whole_numbers("prompt", self.ids))
        object.__setattr__(self, "spans", spans)
        for name, where in [*spans.items(), *((name, [at]) for name, at in self.turns.items())]:
            if where and not 0 <= min(where) <= max(where) < len(self.ids):
                outside = min(where) if min(where) < 0 else max(where)
                raise InputError(f"{name} at position {outside} of a prompt of {len(self.ids)} tokens: mark it anew")

    def ensure_span(self, name: str) -> None:
        """Raise InputError unless the prompt has a span of that name."""
        if not self.spans.get(name):
            has = ", ".join(self.spans) or "none"
            raise InputError(f"the prompt has no span {name!r}: it has {has}; mark it by `spans`, or name another")


@dataclass(frozen=True)
class Condition:
    """One cell of an experiment: which policy evicts, down to which budget, when, and which tokens are protected.
    Raises one InputError for all fields of another kind; `policy.Rule.of` checks how they go together."""

    policy: str = "full"
    budget: Budget = None  # tokens kept per KV head; a float: share of the compressed tokens
    regime: InstanceOf[Regime] | None = None  # every policy but "full" needs one
    prefix: Annotated[float, Ge(0), Lt(1)] = 0.0  # share of the budget that is guarded at the start
    suffix: Annotated[float, Ge(0), Lt(1)] = 0.0  # share of the budget that is guarded at the end
    static_suffix: bool = False  # the guarded suffix stays at the prompt's end; otherwise it follows the newest tokens
    whitelist: tuple[str, ...] = ()  # prompt spans that always survive
    reading: Annotated[str, Field(pattern="^(as_run|as_described)$"), "as_run or as_described"] = "as_run"
    switches: tuple[tuple[str, Hashable], ...] = ()  # single parameters of the policy, such as (("window", 16),)
    bits: Annotated[int, Ge(4), Le(4)] | None = None  # 4: surviving keys and values are quantised

    def __post_init__(self) -> None:
        if getattr(self.budget, "ndim", None) == 0:  # numpy's or a tensor's
            object.__setattr__(self, "budget", self.budget.item())  # type: ignore[union-attr]
        ensure_fields(self)

    def __eq__(self, other: object) -> bool:
        """Budgets of 1, a token, and of 1.0, everything, differ, though Python's numbers are equal."""
        if not isinstance(other, Condition):
            return NotImplemented
        return vars(self) == vars(other) and isinstance(self.budget, int) == isinstance(other.budget, int)

    # of the regime, or what it would mean by itself
    until = property(lambda self: getattr(self.regime, "until", ""))
    fair = property(lambda self: getattr(self.regime, "fair", None))
    spans = property(lambda self: getattr(self.regime, "spans", ()))

    @property
    def every(self) -> int | None:
        """Generated tokens between two evictions; None: nothing leaves after the prompt."""
        if self.policy == "full":
            return None
        return 1 if isinstance(self.regime, PerStep) else getattr(self.regime, "interval", None)

    def columns(self) -> dict[str, object]:
        """The condition as columns of a results row, None for settings that its regime does not have."""
        of_regime = {} if self.regime is None else vars(self.regime)
        tokens = isinstance(self.budget, int)
        same = "policy", "prefix", "suffix", "until", "fair", "reading", "bits"
        return {
            **{name: getattr(self, name) for name in same},
            "capacity": self.budget if tokens else None,
            "share": None if tokens else self.budget,
            "suffix_mode": "static" if self.static_suffix else "dynamic",
            "regime": getattr(self.regime, "name", None),
            "interval": of_regime.get("interval"),
            "chunk": of_regime.get("chunk"),
            "chunk_mode": of_regime.get("when"),
            "execution": "physical",  # evicted tokens leave memory; in other codes' rows they are "masked"
            "spans": json.dumps(self.spans),
            "switches": json.dumps(dict(self.switches), sort_keys=True),
            "whitelist": json.dumps(self.whitelist),
        }

    @property
    def label(self) -> str:
        """Short name for tables and messages: `lru C=256 shared cap prefix=0.1`, with every setting that is not the
        default. Equal labels mean equal conditions, except for a full cache, which only `bits` changes."""
        if self.policy == "full":
            return "full cache" if self.bits is None else f"full cache bits={self.bits}"
        held = f"{100 * self.budget:g}%" if isinstance(self.budget, float) else f"C={self.budget}"
        words = [self.policy, held, getattr(self.regime, "name", "")]
        settings = [(f, vars(record)[f.name]) for record in (self.regime or Prefill(), self) for f in fields(record)]
        apart = "policy", "budget", "regime"
        return " ".join(words + [f"{f.name}={x}" for f, x in settings if x != f.default and f.name not in apart])


@dataclass(frozen=True)
class Generation:
    """The answer of one prompt under one condition, and what it cost."""

    tokens: list[int]  # generated, with the stop token if there was one
    kept: list[int]  # tokens that a head sees at the end, per layer (mean over heads where they differ)
    kept_positions: list[int]  # after the reduction at the prompt's end, of all heads together
    kept_positions_hash: str  # of the same, per head
    evicted: int
    policy_calls: int
    bytes_held: int  # allocated at the end, whatever for: a row's part of its batch
    bytes_full: int  # of keys and values alone, without eviction
    prefill_seconds: float  # shared costs are divided among the rows that share them
    decode_seconds: float
    backend: str
    pages: int | None = None  # that each query head reads at a step, where pages are selected and no token leaves
    kept_sets: list[Any] | None = None  # per layer, bool [kv_heads, compressed tokens], where the engine was asked to
