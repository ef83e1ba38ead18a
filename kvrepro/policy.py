"""A policy is data; `keep` applies one. `python -m kvrepro.policy` lists the catalogue.

scores    = policy.score(observation)                       # [batch, kv_heads, tokens]
protected = guards(observation)                             # the same shape, bool
counts    = policy.allocate(scores, protected, budget)      # [batch, kv_heads]
kept      = select(scores, protected, counts)
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvrepro import allocate
from kvrepro.errors import InputError
from kvrepro.shapes import Scores

REGIMES = {
    "prefill": "each layer is reduced as soon as the prompt has passed through it",
    "chunked": "the prompt comes in chunks that attend to what is left of the earlier ones",
    "offline": "a prefix is reduced once and reused by many requests",
    "decode cap": "a cap on the cache, met again every `interval` generated tokens",
    "per step": "one token leaves for every token generated",
}
READINGS = ("as_run", "as_described")
Parameters = Mapping[str, object]


@dataclass(frozen=True)
class Policy:
    """How a method decides. Every function takes the parameters it names, from `parameters` in the reading asked for.

    parameters: the paper's; as_run: those in which the public code (`code`) differs. Three names mean the same for
    all: `window` queries are shown to the scorer, `recent` newest and `sinks` oldest tokens are protected.
    shield(o, scores, budget, ...): tokens exempt on the method's own account, before heads get their counts.
    refine(o, scores, counts, ...) -> (scores, exempt tokens): a second stage, once heads know their counts.
    across(scores, protected, budget, summaries, ...) -> (scores, counts): budgets that need every layer's scores, lists
    over layers; `summary(o, ...)` [batch] is what it is told of each layer. Such a policy evicts after the last layer.
    needs: `Observation.sums` that the forward pass must provide (`kvrepro.attention.SUMS`).
    """

    title: str
    source: str
    score: Callable[..., Scores]
    parameters: Parameters = field(default_factory=dict)
    as_run: Parameters = field(default_factory=dict)
    code: str = ""
    allocate: Callable = allocate.uniform
    across: Callable | None = None
    summary: Callable | None = None
    shield: Callable | None = None
    refine: Callable | None = None
    needs: tuple[str, ...] = ()
    budget: str = "uniform"  # or "per layer", "per head", "joint"
    refuses: Mapping[str, str] = field(default_factory=dict)  # regime -> why the policy cannot exist there
    frees: bool = True  # False: pages are selected for each query and nothing is evicted

    @property
    def readings(self) -> tuple[str, ...]:
        return READINGS if self.as_run else READINGS[1:]

    @property
    def regimes(self) -> tuple[str, ...]:
        return tuple(regime for regime in REGIMES if regime not in self.refuses)

    @property
    def formula(self) -> str:
        """The first sentence of its scorer."""
        return (self.score.__doc__ or "").strip().split("\n\n")[0].split(". ")[0].replace("\n", " ").rstrip(".")

    def reading(self, name: str, switches: Sequence[tuple[str, object]] = ()) -> dict[str, object]:
        """Its parameters in a reading, single ones overridden. Raises InputError for what it does not know."""
        if name not in READINGS:
            raise InputError(f"unknown reading {name!r}: choose one of {', '.join(READINGS)}")
        known = {**self.parameters, **self.as_run}
        for key, _ in switches:
            if key not in known:
                raise InputError(f"{self.title} has no parameter {key!r}: it has {', '.join(known) or 'none'}")
        base = {**self.parameters, **self.as_run} if name == "as_run" else dict(self.parameters)
        return {**base, **dict(switches)}


def call(function: Callable, *arguments: object, parameters: Parameters):
    """`function` with the parameters that it names."""
    names = inspect.signature(function).parameters
    return function(*arguments, **{k: v for k, v in parameters.items() if k in names})
