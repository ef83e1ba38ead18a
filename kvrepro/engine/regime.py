"""Regimes: when tokens leave, and the settings of each. A condition names its regime; there is no default."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from kvrepro.engine.allowed import Share, Size, ensure_fields
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
