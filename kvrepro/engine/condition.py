"""What is asked of the engine, and what comes back."""

from collections.abc import Hashable
from dataclasses import dataclass, field

from kvrepro.chapters.protection.guard import protected_count
from kvrepro.chapters.protection.reading import Reading, resolve
from kvrepro.errors import InputError


@dataclass(frozen=True)
class Prompt:
    """Token ids with the generation prompt, the token positions of each named span (equal names merge), and where the
    first turn of each role begins. Raises InputError for text, and for positions outside the prompt."""

    ids: list[int]
    spans: dict[str, list[int]]
    turns: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if any(isinstance(i, str) for i in self.ids[:1]):
            raise InputError(f"prompt {''.join(self.ids)[:40]!r} is text: give token ids, tokenizer.encode(...)")  # type: ignore[arg-type]
        for name, where in [*self.spans.items(), *((name, [at]) for name, at in self.turns.items())]:
            if where and not 0 <= min(where) <= max(where) < len(self.ids):
                strange = min(where) if min(where) < 0 else max(where)
                raise InputError(f"{name} at position {strange} of a prompt of {len(self.ids)} tokens: mark it anew")


@dataclass(frozen=True)
class Condition:
    """One cell of an experiment. `capacity` counts tokens kept; fractions of it are guarded at either end.

    Raises InputError for names and switches that are no tuples; `kvrepro.engine.policy.check` looks at the rest.
    """

    policy: str = "full"
    capacity: int | None = None
    prefix: float = 0.0
    suffix: float = 0.0
    suffix_mode: str = "dynamic"  # follows the generated tokens; "static" stays at the prompt's end
    interval: int = 8  # generated tokens between reductions
    reading: str = "as_run"
    execution: str = "physical"  # rows leave memory; "masked" keeps and hides them
    switches: tuple[tuple[str, object], ...] = ()  # single switches of the reading, or parameters of the policy
    regime: str = "harness"  # the protection paper's; or one of `kvrepro.engine.policy.REGIMES`
    share: float | None = None  # instead of `capacity`: this share of the compressed tokens, rounded down
    until: str = ""  # compress what stands before this span ("question") or turn ("user"); "": the whole prompt
    whitelist: tuple[str, ...] = ()  # prompt spans that always survive
    # fair 1: every span keeps its share, and text without a mark joins the span before it; below 1: debias, mixed with
    # the default's split. spans: which of the marked ones count; (): all.
    spans: tuple[str, ...] = ()
    fair: float | None = None
    chunk: int = 4096  # tokens per chunk, regime "chunked"
    chunk_mode: str = "last_chunk"  # when chunks evict: "last_chunk", "budget" or "every_chunk" (DropKV)
    bits: int | None = None  # 4: what survives is quantised

    def __post_init__(self) -> None:
        for name in ("whitelist", "spans"):
            value = getattr(self, name)
            if not isinstance(value, tuple) or not all(isinstance(span, str) for span in value):
                raise InputError(f"{name} {value!r}: give a tuple of span names")
        for pair in self.switches if isinstance(self.switches, tuple) else [None]:
            shaped = isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)
            if not shaped or not isinstance(pair[1], Hashable):
                raise InputError(f"switches {self.switches!r}: give a tuple of pairs, (('window', 16),) for instance")

    def resolved(self) -> Reading:
        """The harness's reading with this condition's overrides; elsewhere switches are the policy's parameters."""
        return resolve(self.reading, self.switches if self.regime == "harness" else ())

    def guards(self) -> tuple[int, int]:
        """Tokens guarded at the start and at the end."""
        capacity, rounding = self.capacity or 0, self.resolved().n_prot
        prefix, suffix = (protected_count(side, capacity, rounding) for side in (self.prefix, self.suffix))
        return prefix, suffix

    @property
    def label(self) -> str:
        """Short name for tables and messages: `lru C=256 +10%/10%`, then whatever is not the default.

        Equal labels are equal conditions, but for a full cache, which nothing changes except `bits`.
        """
        if self.policy == "full":
            return "full cache" + ("" if self.bits is None else f" int{self.bits}")
        sides = f"+{100 * self.prefix:g}%/{100 * self.suffix:g}%" if self.prefix or self.suffix else ""
        held = f"{100 * self.share:g}%" if self.capacity is None and self.share is not None else f"C={self.capacity}"
        fair = "" if self.fair is None else "fair" if self.fair == 1 else f"debias {self.fair:g}"
        said = {
            "regime": self.regime,
            "reading": self.reading.replace("_", " "),
            "until": f"until {self.until}",
            "suffix_mode": f"{self.suffix_mode} suffix",
            "interval": f"every {self.interval}",
            "chunk": f"chunks of {self.chunk}",
            "chunk_mode": self.chunk_mode.replace("_", " "),
            "execution": self.execution,
            "whitelist": f"whitelist {'+'.join(self.whitelist)}",
            "spans": f"spans {'+'.join(self.spans)}",
            "bits": f"int{self.bits}",
            "switches": " ".join(f"{name}={value}" for name, value in self.switches),
        }
        other = [text for name, text in said.items() if getattr(self, name) != getattr(Condition, name)]
        return " ".join(filter(None, [self.policy, held, sides, fair, *other]))


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
    peak_bytes: int | None = None  # of the prefill, above the weights: measured where the engine was asked to
    pages: int | None = None  # that each query head reads at a step, where pages are selected and no token leaves
    bytes_state: int = 0  # of those held, what the policy's next eviction would ask for: sums, last queries
    kept_sets: list | None = None  # per layer, bool [kv_heads, compressed tokens], where the engine was asked for it
