"""The engine's input and output: prompts, conditions with their regimes, and generations."""

import json
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Le, Lt
from pydantic import Field, InstanceOf

from kvrepro.engine.allowed import PositiveShare, Share, Size, ensure_fields, pythonic, whole_numbers
from kvrepro.errors import InputError


@dataclass(frozen=True)
class Regime:
    """The base of all regimes. `name` is shown in rows and labels. Raises InputError for settings of another kind."""

    name: ClassVar[str]

    def __post_init__(self) -> None:
        if type(self) is Regime:
            raise InputError(f"Regime() is none by itself: take {', '.join(r.__name__ for r in REGIMES.values())}")
        ensure_fields(self, type(self), self.name)
        if hasattr(self, "spans"):
            object.__setattr__(self, "spans", tuple(self.spans))


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


Guarded = Annotated[float, Ge(0), Lt(1)]


@dataclass(frozen=True)
class Prompt:
    """Token ids with the generation prompt, the token positions of each named span (equal names merge), and where the
    first turn of each role begins. Raises InputError for text, and for positions outside the prompt."""

    ids: list[int]
    spans: dict[str, list[int]]
    turns: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.ids, str | list) and any(isinstance(i, str) for i in self.ids[:1]):
            raise InputError(f"prompt {''.join(self.ids)[:40]!r} is text: give token ids, tokenizer.encode(...)")  # type: ignore[arg-type]
        object.__setattr__(self, "ids", whole_numbers("prompt", self.ids))
        for field_name in ("spans", "turns"):
            given = getattr(self, field_name)
            if not isinstance(given, Mapping):
                raise InputError(f"{field_name} {given!r:.60}: give a dict, such as {{'question': range(90, 99)}}")
        spans = {name: whole_numbers(f"span {name}", where) for name, where in self.spans.items()}
        object.__setattr__(self, "spans", spans)
        turns = ((name, whole_numbers(f"turn {name}", at)) for name, at in self.turns.items())
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

    Raises one InputError for all fields of another kind; `kvrepro.engine.policy.Rule.of` checks how they go together.
    """

    policy: str = "full"
    budget: Size | PositiveShare | None = None  # tokens kept per KV head; a float: share of the compressed tokens
    regime: InstanceOf[Regime] | None = None  # every policy but "full" needs one
    prefix: Guarded = 0.0  # share of the budget that is guarded at the start
    suffix: Guarded = 0.0  # share of the budget that is guarded at the end
    static_suffix: bool = False  # the guarded suffix stays at the prompt's end; otherwise it follows the newest tokens
    whitelist: tuple[str, ...] = ()  # prompt spans that always survive
    reading: Annotated[str, Field(pattern="^(as_run|as_described)$")] = "as_run"
    switches: tuple[tuple[str, Hashable], ...] = ()  # single parameters of the policy, such as (("window", 16),)
    bits: Annotated[int, Ge(4), Le(4)] | None = None  # 4: surviving keys and values are quantised

    def __post_init__(self) -> None:
        object.__setattr__(self, "budget", pythonic(self.budget))
        ensure_fields(self, Condition)
        for name in ("whitelist", "switches"):
            object.__setattr__(self, name, tuple(getattr(self, name)))

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
        fairness: float | None = getattr(self.regime, "fair", None)
        return fairness

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
        """Short name for tables and messages: `lru C=256 +10%/10%`, then every setting that is not the default.

        Equal labels mean equal conditions, except for a full cache, which only `bits` changes.
        """
        if self.policy == "full":
            return "full cache" + ("" if self.bits is None else f" int{self.bits}")
        r, words = self.regime, []
        if self.prefix or self.suffix:
            words.append(f"+{100 * self.prefix:g}%/{100 * self.suffix:g}%")
        if self.fair is not None:
            words.append("fair" if self.fair == 1 else f"debias {self.fair:g}")
        if r is not None and not isinstance(r, SharedCap):
            words.append(r.name)
        if self.reading != "as_run":
            words.append(self.reading.replace("_", " "))
        if self.until:
            words.append(f"until {self.until}")
        if self.static_suffix:
            words.append("static suffix")
        for f in fields(r) if r is not None else ():
            value = getattr(r, f.name)
            if value != f.default and f.name in REGIME_WORDS:
                words.append(REGIME_WORDS[f.name].format(value).replace("_", " "))
        if self.whitelist:
            words.append(f"whitelist {'+'.join(self.whitelist)}")
        if self.spans:
            words.append(f"spans {'+'.join(self.spans)}")
        if self.bits is not None:
            words.append(f"int{self.bits}")
        words += [f"{name}={value}" for name, value in self.switches]
        held = f"{100 * self.budget:g}%" if isinstance(self.budget, float) else f"C={self.budget}"
        return " ".join([self.policy, held, *words])


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
