"""Policies as data: their parameters and functions, where a name leads, and a condition's `Rule`, its policy with
parameters; what cannot work is refused before anything runs. `kvrepro.engine.evict` applies them."""

import inspect
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from kvrepro.engine import allocate
from kvrepro.engine.condition import REGIMES, Chunked, Condition, Count, SharedCap, Size, ensure
from kvrepro.engine.shapes import Scores
from kvrepro.engine.shared import SWITCHES
from kvrepro.errors import InputError, ensure_known, error_line
from kvrepro.paths import ROOT

READINGS = ("as_run", "as_described")
OF_ENGINE = {"window": Size, "recent": Count, "sinks": Count, "page": Size, "dense_layers": Count}  # read by the engine
SUMS = {  # what the forward pass can add up for each token and KV head
    "mass": "attention summed over all queries",
    "span_mass": "attention summed over the queries of its own span",
    "marked_mass": "attention summed over the queries of its own span; unmarked tokens see all and are seen by all",
    "latest": "attention of the latest query, reduced over layers and heads",
    "largest": "largest attention of one step so far, reduced over layers and heads",
    "summed": "attention summed over steps, reduced over layers and heads",
    "prompt": "attention inside the prompt, reduced over layers and heads",
    "last_use": "last step at which attention exceeded 5% of the step's largest",
    "entered": "step at which a token entered",
    "head_latest": "attention of the latest query per KV head, reduced over layers",
    "head_summed": "attention per KV head summed over steps, reduced over layers",
    "low": "count of low attention among the last 400 queries, all heads of the group together",
    "reconstruction": "largest attention while the context is repeated",
    "reconstruction_per_norm": "the same of each query head, over the length of the layer's input at the query",
}
REPEATED = {"reconstruction", "reconstruction_per_norm"}  # the sums that need a repetition of the context
Parameters = Mapping[str, Any]


@dataclass(frozen=True)
class Policy:
    """How a method decides. Each function gets those parameters that it names, with their values in the chosen reading.

    parameters: the paper's; as_run: those in which the public code (`code`) differs. The functions' annotations say
    which values are allowed. For all policies, the last `window` queries are shown to the scorer; the `recent` newest
    and `sinks` oldest tokens are protected.
    shield(o, scores, budget, ...): a mask of tokens that the method itself protects, before heads get their counts.
    refine(o, scores, counts, ...) -> (scores, exempt tokens): a second stage, after heads got their counts.
    across(scores, protected, budget, ...) -> (scores, counts): budgets that need every layer's scores; lists over
    layers. It may also name `observations`, and `summaries`, the results of `summary(o, ...)` [batch] for each layer.
    Such a policy evicts after the last layer.
    needs: `Observation.sums` that the forward pass must provide (`SUMS`), or the one that parameter `signal` names.
    """

    title: str
    source: str
    score: Callable[..., Scores]
    parameters: Parameters = field(default_factory=dict)
    as_run: Parameters = field(default_factory=dict)
    code: str = ""
    allocate: Callable[..., Any] = allocate.uniform
    across: Callable[..., Any] | None = None
    summary: Callable[..., Any] | None = None
    shield: Callable[..., Any] | None = None
    refine: Callable[..., Any] | None = None
    needs: tuple[str, ...] = ()
    budget: str = "uniform"  # how it is shared out, in words for the table of policies
    refuses: Mapping[str, str] = field(default_factory=dict)  # regime -> why the policy cannot exist there
    ties: tuple[str, ...] | None = None  # `SharedCap`: sums that order equal scores, before the position does
    together: bool = False  # a GPU may judge several layers as rows of one: no function uses the layer or draws
    frees: bool = True  # False: pages are selected for each query and nothing is evicted

    def __post_init__(self) -> None:
        ensure_known(f"sum in the needs of policy {self.title!r}", self.needs, SUMS)

    @property
    def readings(self) -> tuple[str, ...]:
        return READINGS if self.as_run else READINGS[1:]

    @property
    def shared(self) -> bool:
        """Does it choose one set of tokens for all layers? Then it exists in `SharedCap` only."""
        return self.ties is not None

    @property
    def per_head(self) -> bool:
        """Does each head choose for itself?"""
        return self.allocate is not allocate.uniform

    def first_step(self, parameters: Parameters) -> int:
        """`SharedCap`: the step of the first reduction, from the parameters of a reading."""
        return int(parameters["per_head_first_reduction"]) if self.per_head else 0

    @property
    def regimes(self) -> tuple[str, ...]:
        """Names of the regimes in which it can run."""
        return tuple(name for name in REGIMES if (name == SharedCap.name) == self.shared and name not in self.refuses)

    @property
    def rule(self) -> str:
        """The first sentences of its functions' docstrings, a line each; the scorer's is its formula."""
        deciding = [f for f in self.functions if f is not allocate.uniform]
        paragraphs = (" ".join((f.__doc__ or "").strip().split("\n\n")[0].split()) for f in deciding)
        return "\n".join(filter(None, (re.split(r"(?<!\.)\. ", text)[0].rstrip(".") for text in paragraphs)))

    def reading(self, name: str, switches: Sequence[tuple[str, object]] = ()) -> dict[str, object]:
        """Its parameters in a reading, with `switches` in the place of single ones. Raises InputError for unknown
        names and values that are not allowed."""
        defaults = {**self.parameters, **self.as_run}
        for key, _ in switches:
            if key not in defaults and (self.shared or key not in ("sinks", "recent")):  # the engine protects these
                raise InputError(f"{self.title} has no parameter {key!r}: it has {', '.join(defaults) or 'none'}")
        parameters = {**(defaults if name == "as_run" else self.parameters), **dict(switches)}
        if parameters.get("recent") == "window":  # the window itself is protected
            parameters["recent"] = parameters.get("window")
        for key, value in parameters.items():
            ensure(self.kind(key), self.title, **{key: value})
        return parameters

    def needed(self, parameters: Parameters) -> set[str]:
        """The sums that it needs with these parameters."""
        signal = str(parameters.get("signal"))
        return {signal} if signal in self.needs else set(self.needs)

    @property
    def repeated(self) -> set[str]:
        """The sums that it needs from a repetition of the context."""
        return REPEATED.intersection(self.needs)

    @property
    def functions(self) -> list[Callable[..., Any]]:
        every = self.score, self.shield, self.allocate, self.across, self.summary, self.refine
        return [function for function in every if function is not None]

    def kind(self, parameter: str) -> Any:
        """The type hint of a parameter; `object`, any value, if no function of a reader's own policy says."""
        hints: dict[str, Any] = {}
        for function in reversed(self.functions):
            for name, p in parameters_of(function).items():
                hints |= type(p.default).__annotations__ if hasattr(p.default, "_fields") else {name: p.annotation}
        if self.shared and parameter in SWITCHES:
            return Literal[SWITCHES[parameter].as_run, SWITCHES[parameter].as_described]
        hint = (hints | OF_ENGINE).get(parameter, object)
        return object if isinstance(hint, str) or hint is inspect.Parameter.empty else hint


@cache
def parameters_of(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """The parameters that a function names, looked up once per function."""
    return inspect.signature(function).parameters


def named(function: Callable[..., Any], parameters: Parameters) -> dict[str, Any]:
    """Those of `parameters` that `function` names; the fields of a `NamedTuple` come as one, beside its defaults."""
    given = {}
    for name, parameter in parameters_of(function).items():
        fields = getattr(parameter.default, "_fields", ())
        if name in parameters:
            given[name] = parameters[name]
        elif fields:
            given[name] = parameter.default._replace(**{f: parameters[f] for f in fields if f in parameters})
    return given


def ours(function: Callable[..., Any]) -> bool:
    """Does this package define the function? A wrapper that has the name of the function it wraps does not count."""
    return str(getattr(function, "__module__", "")).startswith("kvrepro.") and not hasattr(function, "__wrapped__")


OWN: dict[str, Policy] = {}  # policies that a notebook defines, by name


def own(name: str, policy: Policy) -> str:
    """Register a policy under a name, for every study of this process, and return the name. A second policy of that
    name replaces the first. Raises InputError for a name of the catalogue."""
    from kvrepro.engine.catalogue import CATALOGUE

    if name in CATALOGUE or name == "full":
        raise InputError(f"policy {name!r} is one of the catalogue's: give your own another name")
    OWN[name] = policy
    return name


def is_own(name: str) -> bool:
    """Is it the name of a reader's own policy, and not of the catalogue's?"""
    return name in OWN or ":" in name


def find(name: str) -> Policy:
    """The catalogue's policy of that name, or a reader's own: one of `OWN`, or `path/to/file.py:NAME`. Raises
    InputError for an unknown name, and for a file that fails or does not define the policy."""
    from kvrepro.engine.catalogue import CATALOGUE

    if policy := CATALOGUE.get(name) or OWN.get(name):
        return policy
    if name == "full":
        raise InputError("policy 'full' evicts nothing: it is run wherever others are compared with it, leave it out")
    path, colon, attribute = name.rpartition(":")
    if name.endswith(".py"):
        raise InputError(f"policy {name!r} is a file: add the name of a Policy that it defines, as in {name}:NAME")
    if not colon:
        ensure_known("policy", [name], CATALOGUE, also=("path/to/file.py:NAME", "full"))
    file = next((root / path for root in (Path.cwd(), ROOT) if os.path.isfile(root / path)), None)
    if file is None:
        raise InputError(f"policy {name!r}: there is no file {path!r}, give the path of one that is there")
    try:
        found = _defined(file, file.stat().st_mtime_ns).get(attribute)
    except (Exception, SystemExit) as error:  # whatever a reader's file raises
        raise InputError(f"policy {name!r}: {file.name} raises {error_line(error)}") from error
    if not isinstance(found, Policy):
        raise InputError(f"policy {name!r}: {file.name} has no Policy called {attribute}")
    return found


@cache
def _defined(file: Path, edited: int) -> dict[str, Any]:
    """The names that a file defines; it runs once for each time of editing."""
    names: dict[str, Any] = {"__name__": file.stem, "__file__": str(file)}
    exec(compile(file.read_bytes(), str(file), "exec"), names)
    return names


def ensure_titles(names: Sequence[str]) -> None:
    """Raise InputError for a reader's own policy that cannot be found or has another policy's title, by which figures
    and verdicts name it."""
    from kvrepro.engine.catalogue import CATALOGUE

    taken = {policy.title: name for name, policy in CATALOGUE.items()}
    for name, title in [(name, find(name).title) for name in names if is_own(name)]:
        if taken.setdefault(title, name) != name:
            raise InputError(f"policies {taken[title]!r} and {name!r} are both called {title!r}: rename yours")


@dataclass(frozen=True)
class Rule:
    """A condition, its policy, and the policy's parameters in the condition's reading and with its switches."""

    condition: Condition
    policy: Policy
    parameters: dict[str, Any]

    @classmethod
    def of(cls, c: Condition) -> "Rule | None":
        """The rule of a condition; None for the full cache. Raises InputError for one that no prompt can meet."""
        if c.policy == "full":
            if c.budget is not None:
                raise InputError(f"policy full keeps every token, not {c.budget}: leave its budget out")
            return None
        policy = find(c.policy)
        rule = cls(c, policy, policy.reading(c.reading, c.switches))
        for message, wrong in rule._refusals().items():
            if wrong:
                raise InputError(f"{c.policy} {message}")
        return rule

    def _refusals(self) -> dict[str, bool]:
        """What of the condition cannot go together: the message, and whether it is so."""
        c, policy, p, regime = self.condition, self.policy, self.parameters, getattr(self.condition.regime, "name", "")
        regimes, guards = ", ".join(policy.regimes), bool(c.prefix or c.suffix or c.whitelist) or c.fair is not None
        apart = "it chooses one set of tokens for all layers" if policy.shared else "it chooses for each layer"
        why, share = policy.refuses.get(regime, apart), isinstance(c.budget, float)
        mixed, unsplit = c.fair is not None and c.fair < 1, policy.across or policy.repeated or p.get("ramps")
        early = c.static_suffix and not policy.per_head and p.get("static_suffix") == "per_head_only"
        return {
            f"without a regime: name one of {regimes}": not regime,
            f"cannot run in regime {regime!r}: {why}; take {regimes}": regime not in policy.regimes,
            "needs a budget: a number of tokens, or a share such as 0.2": c.budget is None,
            "has no quota to mix in: fair 1, or none": mixed and bool(unsplit),
            "chooses pages anew for every query: no guards or quotas": guards and not policy.frees,
            f"takes a number of tokens in regime {regime!r}, not {c.budget}": policy.shared and share,
            f"has neither whitelist nor bits in regime {regime!r}": policy.shared and bool(c.whitelist or c.bits),
            "has no static_suffix as run: set the switch static_suffix to anywhere": early,
        }

    def ensure_met(self, tokens: int, whitelist: Sequence[int] = ()) -> None:
        """Raise InputError if a prompt cannot meet the condition. tokens: how many tokens of the prompt's compressed
        part a layer holds. whitelist: the protected ones among them, counted from their end: -1 is the last."""
        c, p, at_once = self.condition, self.parameters, self.condition.every is None
        if at_once and isinstance(c.budget, int) and c.budget >= tokens:
            why = "nothing leaves; lower it, or say 1.0" if self.policy.frees else "every page is read; lower it"
            raise InputError(f"budget {c.budget} >= {tokens} tokens to compress: {why}")
        if isinstance(c.regime, Chunked) and c.regime.when == "every_chunk":  # the first one leaves the least room
            tokens, whitelist = min(c.regime.chunk, tokens), ()
        budget = budget_of(c, tokens)
        if budget < 1:
            raise InputError(f"budget {c.budget} of {tokens} tokens keeps {budget}: raise the share")
        prefix, suffix = guarded(c, budget, p)
        sinks, recent = int(p.get("sinks", 0)), int(p.get("recent", 0))
        first, last = max(prefix, sinks), max(suffix, recent)
        apart = len({at for at in whitelist if first <= tokens + at < tokens - last})
        needed = first + last + apart
        if budget < (min(needed, tokens) if at_once else needed):  # later evictions also protect tokens yet to come
            parts = {"prefix": prefix, "suffix": suffix, "sinks": sinks, "recent": recent, "whitelist": apart}
            words = " + ".join(f"{count} {name}" for name, count in parts.items() if count)
            problem = f"budget {budget} < {needed} protected tokens ({words})"
            raise InputError(f"{problem}: raise the budget of {c.policy}, or protect less")


def budget_of(c: Condition, tokens: int) -> int:
    """Tokens per KV head that `c` keeps of `tokens`: its budget, a share of them rounded down."""
    if c.policy == "full" or c.budget is None:
        return tokens
    return math.floor(c.budget * tokens + 1e-9) if isinstance(c.budget, float) else c.budget


def guarded(c: Condition, budget: int, parameters: Parameters) -> tuple[int, int]:
    """Tokens that the condition guards at the start and at the end of `budget`."""
    rounding = str(parameters.get("n_prot", "floor" if c.reading == "as_run" else "ceil"))
    prefix, suffix = (allocate.protected_count(side, budget, rounding) for side in (c.prefix, c.suffix))
    return prefix, suffix
