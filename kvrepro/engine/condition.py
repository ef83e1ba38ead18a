"""The engine's input and output: what values may be, prompts, conditions with their regimes, and generations.

A type hint says what a value may be, and pydantic checks it strictly, so that 1, 1.0 and True stay different. With
`alpha: Share = 0.5` in a function's signature, a condition's switch `alpha` is checked before anything runs.
"""

import json
from collections.abc import Hashable
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache, lru_cache
from operator import index
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin, get_type_hints

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
NotNegative = Annotated[float, Ge(0)]
STRICT = ConfigDict(strict=True, allow_inf_nan=False, arbitrary_types_allowed=True)


@lru_cache(maxsize=1024)
def _adapter(kind: Any) -> TypeAdapter[Any]:
    if isinstance(kind, tuple):
        kind = Literal[kind]
    return TypeAdapter(InstanceOf[kind]) if is_dataclass(kind) else TypeAdapter(kind, config=STRICT)


def _problems(kind: Any, whose: str, name: str, value: object) -> list[str]:
    """What is wrong with a value, a line for each element of a list. A list will do for a tuple, and a tuple for it."""
    wanted = next((x for k in (kind, *get_args(kind)) if (x := get_origin(k)) in (list, tuple)), None)
    if wanted is not None and isinstance(value, list | tuple):
        value = wanted(value)
    try:
        _adapter(kind).validate_python(value)
    except ValidationError as error:
        reasons: dict[str, list[str]] = {}
        for one in error.errors(include_url=False):
            reason = one["msg"].removeprefix("Value error, ").removeprefix("Input ")
            reasons.setdefault(f"{one['input']!r:.80}", []).append(reason)
        owner = f" for {whose}" if whose else ""
        return [f"{name} {given}{owner}: {' or '.join(dict.fromkeys(why))}" for given, why in reasons.items()]
    return []


def ensure(kind: Any, whose: str = "", **named: object) -> None:
    """Raise InputError for values that are not of that kind: a type hint, or a tuple of words. The message says their
    names, whose they are, and what they may be."""
    if problems := [line for name, value in named.items() for line in _problems(kind, whose, name, value)]:
        raise InputError("; ".join(problems))


@cache
def _hints(kind: Any) -> dict[str, Any]:
    every = get_type_hints(kind, include_extras=True)
    return {f.name: every[f.name] for f in fields(kind)}


def ensure_fields(record: Any, whose: str = "") -> None:
    """Raise one InputError for all fields of a dataclass that are not what their type hints say. Lists in the place of
    tuples become tuples."""
    problems = []
    for name, hint in _hints(record.__class__).items():
        value = getattr(record, name)
        problems += _problems(hint, whose, name, value)
        if isinstance(value, list) and get_origin(hint) is tuple:
            object.__setattr__(record, name, tuple(value))
    if problems:
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
        ensure(dict, spans=self.spans, turns=self.turns)
        spans = {name: whole_numbers(f"span {name}", where) for name, where in self.spans.items()}
        turns = [(name, whole_numbers(f"turn {name}", at)) for name, at in self.turns.items()]
        object.__setattr__(self, "ids", whole_numbers("prompt", self.ids))
        object.__setattr__(self, "spans", spans)
        for name, where in [*spans.items(), *turns]:
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
    Raises one InputError for all fields of another kind; `kvrepro.engine.policy.Rule.of` checks how they go
    together."""

    policy: str = "full"
    budget: Size | PositiveShare | None = None  # tokens kept per KV head; a float: share of the compressed tokens
    regime: InstanceOf[Regime] | None = None  # every policy but "full" needs one
    prefix: Annotated[float, Ge(0), Lt(1)] = 0.0  # share of the budget that is guarded at the start
    suffix: Annotated[float, Ge(0), Lt(1)] = 0.0  # share of the budget that is guarded at the end
    static_suffix: bool = False  # the guarded suffix stays at the prompt's end; otherwise it follows the newest tokens
    whitelist: tuple[str, ...] = ()  # prompt spans that always survive
    reading: Annotated[str, Field(pattern="^(as_run|as_described)$")] = "as_run"
    switches: tuple[tuple[str, Hashable], ...] = ()  # single parameters of the policy, such as (("window", 16),)
    bits: Annotated[int, Ge(4), Le(4)] | None = None  # 4: surviving keys and values are quantised

    def __post_init__(self) -> None:
        object.__setattr__(self, "budget", pythonic(self.budget))
        ensure_fields(self)

    def __eq__(self, other: object) -> bool:
        """Budgets of 1, a token, and of 1.0, everything, differ, though Python's numbers are equal."""
        if not isinstance(other, Condition):
            return NotImplemented
        return vars(self) == vars(other) and isinstance(self.budget, int) == isinstance(other.budget, int)

    @property
    def until(self) -> str:
        """The span or turn before which the compressed part of the prompt ends; "": the whole prompt."""
        return getattr(self.regime, "until", "")

    @property
    def fair(self) -> float | None:
        """How strictly budgets are split over the prompt's spans, 1 being fully; None: not at all."""
        return getattr(self.regime, "fair", None)

    @property
    def spans(self) -> tuple[str, ...]:
        """The spans over which budgets are split; (): all."""
        return getattr(self.regime, "spans", ())

    @property
    def every(self) -> int | None:
        """Generated tokens between two evictions; None: nothing leaves after the prompt."""
        if self.policy == "full":
            return None
        return 1 if isinstance(self.regime, PerStep) else getattr(self.regime, "interval", None)

    def columns(self) -> dict[str, object]:
        """The condition as columns of a results row, None for settings that its regime does not have."""
        r = self.regime
        tokens = isinstance(self.budget, int)
        return {
            "policy": self.policy,
            "capacity": self.budget if tokens else None,
            "share": None if tokens else self.budget,
            "prefix": self.prefix,
            "suffix": self.suffix,
            "suffix_mode": "static" if self.static_suffix else "dynamic",
            "regime": None if r is None else r.name,
            "interval": getattr(r, "interval", None),
            "until": self.until,
            "fair": self.fair,
            "spans": json.dumps(self.spans),
            "chunk": getattr(r, "chunk", None),
            "chunk_mode": getattr(r, "when", None),
            "reading": self.reading,
            "execution": "physical",  # evicted tokens leave memory; in other codes' rows they are "masked"
            "switches": json.dumps(dict(self.switches), sort_keys=True),
            "whitelist": json.dumps(self.whitelist),
            "bits": self.bits,
        }

    @property
    def label(self) -> str:
        """Short name for tables and messages: `lru C=256 +10%/10%`, then every setting that is not the default. Equal
        labels mean equal conditions, except for a full cache, which only `bits` changes."""
        if self.policy == "full":
            return "full cache" + ("" if self.bits is None else f" int{self.bits}")
        regime = [(f, getattr(self.regime, f.name, f.default)) for f in fields(self.regime or Prefill)]
        of_regime = {REGIME_WORDS.get(f.name, "").format(value): value != f.default for f, value in regime}
        words = {
            f"+{100 * self.prefix:g}%/{100 * self.suffix:g}%": self.prefix or self.suffix,
            "fair" if self.fair == 1 else f"debias {self.fair or 0:g}": self.fair is not None,
            getattr(self.regime, "name", ""): not isinstance(self.regime, SharedCap),
            self.reading.replace("_", " "): self.reading != "as_run",
            f"until {self.until}": self.until,
            "static suffix": self.static_suffix,
            **{words.replace("_", " "): holds for words, holds in of_regime.items()},
            f"whitelist {'+'.join(self.whitelist)}": self.whitelist,
            f"spans {'+'.join(self.spans)}": self.spans,
            f"int{self.bits}": self.bits is not None,
            **{f"{name}={value}": True for name, value in self.switches},
        }
        held = f"{100 * self.budget:g}%" if isinstance(self.budget, float) else f"C={self.budget}"
        return " ".join([self.policy, held, *(word for word, holds in words.items() if word and holds)])


REGIME_WORDS = {"interval": "every {}", "chunk": "chunks of {}", "when": "{}"}


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
    bytes_state: int = 0  # of those held, what the policy's next eviction would ask for: sums, last queries
    kept_sets: list[Any] | None = None  # per layer, bool [kv_heads, compressed tokens], where the engine was asked to
