"""Regimes: when tokens leave, and what each regime lets one choose. A condition names one; none is the default."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from kvrepro.engine.allowed import Share, Size
from kvrepro.errors import InputError


@dataclass(frozen=True)
class Regime:
    """What all regimes share: the name that rows and labels show."""

    name: ClassVar[str]

    def __post_init__(self) -> None:
        if type(self) is Regime:
            raise InputError(f"Regime() is none by itself: take {', '.join(r.__name__ for r in REGIMES.values())}")


@dataclass(frozen=True)
class Prefill(Regime):
    """Each layer is reduced as soon as the prompt has passed through it."""

    name: ClassVar[str] = "prefill"
    until: str = ""  # compress what stands before this span ("question") or turn ("user"); "": the whole prompt
    # 1: every span keeps its share, and text without a mark joins the span before it; below 1: debias, mixed with the
    # default's split. spans: which of the marked ones count; (): all.
    fair: Share | None = None
    spans: tuple[str, ...] = ()


@dataclass(frozen=True)
class Offline(Prefill):
    """A prefix is reduced once and reused by many requests."""

    name: ClassVar[str] = "offline"


@dataclass(frozen=True)
class Chunked(Regime):
    """The prompt comes in chunks that attend to what is left of the earlier ones."""

    name: ClassVar[str] = "chunked"
    chunk: Size = 4096  # tokens
    when: Literal["last_chunk", "budget", "every_chunk"] = "last_chunk"  # chunks evict; "every_chunk": as in DropKV
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
