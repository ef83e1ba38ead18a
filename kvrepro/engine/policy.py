"""Policies as data: their parameters, functions and checks. `kvrepro.engine.evict` applies them."""

import inspect
import math
import re
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

from torch import Tensor

from kvrepro.engine import allocate, allowed, guard
from kvrepro.engine.allowed import Count, Number, Size, ensure, ensure_fields
from kvrepro.engine.condition import Condition
from kvrepro.engine.regime import REGIMES, Chunked, SharedCap
from kvrepro.engine.shapes import Scores
from kvrepro.engine.shared import SLW_SINKS, SWITCHES
from kvrepro.errors import InputError, ensure_known, error_line, suggestion
from kvrepro.paths import ROOT

READINGS = ("as_run", "as_described")
ENGINES = {"window": Size, "recent": Count, "sinks": Count, "page": Size, "dense_layers": Count}  # read by the engine
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
    "reconstruction_per_norm": "largest attention of each query head while the context is repeated, over the length of "
    "the layer's input at the query",
}
REPEATED = {"reconstruction", "reconstruction_per_norm"}  # the sums that need a repetition of the context
GIVEN: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # arguments of each function; what it may also name
    "score": (("o",), ("budget", "guarded", "draws")),
    "shield": (("o", "scores", "budget"), ("guarded",)),
    "allocate": (("scores", "protected", "budget"), ("o",)),
    "across": (("scores", "protected", "budget"), ("observations", "summaries")),
    "summary": (("o",), ()),
    "refine": (("o", "scores", "counts"), ("protected",)),
}
FIELDS = {  # what a condition may say
    "policy": str,
    "budget": (Size, Number(0, 1, above=True), None),
    "prefix": Number(0, 1, below=True),
    "suffix": Number(0, 1, below=True),
    "static_suffix": bool,
    "reading": READINGS,
    "execution": ("physical", "masked"),
    "bits": (4, None),
}
LONGEST_TITLE = 60  # characters, in a figure's legend and in the id of a verdict
MARKUP = frozenset("<>*$[]|`\\")
Parameters = Mapping[str, object]


@dataclass(frozen=True)
class Policy:
    """How a method decides. Each function gets those parameters that it names, with their values in the chosen reading.

    parameters: the paper's; as_run: those in which the public code (`code`) differs. The functions' annotations say
    which values are allowed (`kvrepro.engine.allowed`). Three names mean the same for all policies: the last `window`
    queries are shown to the scorer; the `recent` newest and `sinks` oldest tokens are protected.
    shield(o, scores, budget, ...): a mask of tokens that the method itself protects, before heads get their counts.
    refine(o, scores, counts, ...) -> (scores, exempt tokens): a second stage, after heads got their counts.
    across(scores, protected, budget, ...) -> (scores, counts): budgets that need every layer's scores; lists over
    layers. It may also name `observations`, and `summaries`, the results of `summary(o, ...)` [batch] for each layer.
    Such a policy evicts after the last layer.
    needs: `Observation.sums` that the forward pass must provide (`SUMS`), or only the one that its `signal` names.
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
    budget: str = "uniform"  # or "per layer", "per head", "joint"
    refuses: Mapping[str, str] = field(default_factory=dict)  # regime -> why the policy cannot exist there
    ties: tuple[str, ...] | None = None  # `SharedCap`: sums that order equal scores, before the position does
    together: bool = False  # a GPU may judge several layers as rows of one: no function uses the layer or draws
    frees: bool = True  # False: pages are selected for each query and nothing is evicted

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
        step: Any = parameters["per_head_first_reduction" if self.per_head else "first_reduction"]
        return int(step)

    @property
    def regimes(self) -> tuple[str, ...]:
        """Names of the regimes in which it can run."""
        return tuple(name for name in REGIMES if (name == SharedCap.name) == self.shared and name not in self.refuses)

    @property
    def rule(self) -> str:
        """The first sentences of its functions' docstrings, a line each; the scorer's is its formula."""
        deciding = [f for f in self.functions if f is not allocate.uniform]
        return "\n".join(filter(None, map(first_sentence, deciding)))

    @property
    def files(self) -> tuple[str, ...]:
        """The names of its parameters that name a file, which belongs to one model."""
        return tuple(key for key in {**self.parameters, **self.as_run} if self.kind(key) is str)

    def reading(self, name: str, switches: Sequence[tuple[str, object]] = ()) -> dict[str, object]:
        """Its parameters in a reading, with `switches` in the place of single ones. Raises InputError for unknown
        names and values that are not allowed."""
        ensure(READINGS, reading=name)
        defaults = {**self.parameters, **self.as_run}
        for key, _ in switches:
            if key not in defaults and (self.shared or key not in ("sinks", "recent")):  # the engine protects these
                raise InputError(f"{self.title} has no parameter {key!r}: it has {', '.join(defaults) or 'none'}")
        if len(dict(switches)) < len(switches):
            raise InputError(f"switches {switches} for {self.title} name a parameter twice: drop one")
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
        every = (self.score, self.shield, self.allocate, self.across, self.summary, self.refine)
        return [f for f in every if f is not None]

    def kind(self, parameter: str) -> object:
        """The values that a parameter may have (`allowed.holds`); any, if no function of a reader's own policy says."""
        if self.shared and parameter in SWITCHES:
            return SWITCHES[parameter].allowed
        return ENGINES.get(parameter) or allowed.annotation_of(self.functions, parameter)


def first_sentence(function: Callable[..., Any]) -> str:
    """The first sentence of a function's docstring, without the full stop."""
    first = " ".join((function.__doc__ or "").strip().split("\n\n")[0].split())
    return re.split(r"(?<!\.)\. ", first)[0].rstrip(".")


def call(function: Callable[..., Any], *arguments: object, parameters: Parameters) -> Any:
    """Call `function` with those of `parameters` that it names. A reader's own function gets copies, so that writing in
    place does not change other conditions."""
    given = named(function, parameters)
    if not ours(function):
        arguments, given = copied(arguments), copied(given)
    return function(*arguments, **given)


def named(function: Callable[..., Any], parameters: Parameters) -> dict[str, Any]:
    """Those of `parameters` that `function` names."""
    names = allowed.parameters_of(function)
    return {name: value for name, value in parameters.items() if name in names}


def copied(value: Any) -> Any:
    """A copy of the value with all its tensors copied, also inside lists, mappings and dataclasses."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, Mapping):
        return {name: copied(element) for name, element in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(copied, value))
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: copied(getattr(value, f.name)) for f in fields(value)})
    return value


def ours(function: Callable[..., Any]) -> bool:
    """Does this package define the function? A wrapper that has the name of the function it wraps does not count."""
    module = str(getattr(function, "__module__", None))
    candidate: object = sys.modules.get(module) if module.startswith("kvrepro.") else None
    for name in getattr(function, "__qualname__", "").split("."):
        candidate = getattr(candidate, name, None)
    return candidate is function


OWN: dict[str, Policy] = {}  # policies that a notebook defines, by name
RAN: dict[Path, tuple[dict[Path, int], dict[str, Any]]] = {}  # file -> (edit times of it and its imports, definitions)


def own(name: str, policy: Policy) -> str:
    """Register a policy under a name, for every study of this process, and return the name. A second policy of that
    name replaces the first. Raises InputError for a name of the catalogue."""
    from kvrepro.engine.catalogue import CATALOGUE

    if name in CATALOGUE or name == "full":
        raise InputError(f"policy {name!r} is one of the catalogue's: give your own another name")
    _ensure_own(name, policy)
    OWN[name] = policy
    return name


def is_own(name: str) -> bool:
    """Is it the name of a reader's own policy, and not of the catalogue's?"""
    return name in OWN or ":" in name


def find(name: str) -> Policy:
    """The catalogue's policy of that name, or a reader's own: one of `OWN`, or `path/to/file.py:NAME`.

    Raises InputError for an unknown name, and for a file that fails or does not define the policy.
    """
    from kvrepro.engine.catalogue import CATALOGUE

    policy = CATALOGUE.get(name) or OWN.get(name)
    if policy is not None:
        return policy
    if name == "full":
        raise InputError(
            "policy 'full' evicts nothing: the full cache is run wherever it is compared with, leave it out"
        )
    path, colon, attribute = name.rpartition(":")
    if "credit" in name and not colon:
        raise InputError(f"{name} learns from prompt to prompt: run python -m kvrepro.chapters.protection.credit")
    if not colon:
        names = ["full", *CATALOGUE]
        choices = f"choose one of {', '.join(names)}, or path/to/file.py:NAME"
        raise InputError(f"unknown policy {name!r}{suggestion(name, names)}: {choices}")
    file = None
    with suppress(OSError):  # a name that is too long for a file
        file = next((root / path for root in (Path.cwd(), ROOT) if path and (root / path).is_file()), None)
    if file is None:
        raise InputError(f"policy {name!r}: no file {path} here or in {ROOT}")
    try:
        policy = _defined(file).get(attribute)
    except (Exception, SystemExit) as error:  # whatever a reader's file raises
        raise InputError(f"policy {name!r}: {file.name} raises {error_line(error)}") from error
    if not isinstance(policy, Policy):
        raise InputError(f"policy {name!r}: {file.name} has no Policy called {attribute}")
    _ensure_own(name, policy)
    return policy


def _ensure_own(name: str, policy: Policy) -> None:
    """Raise InputError for fields of a reader's own policy that the engine cannot use, or that no page can show."""
    p, whose = policy, f"policy {name!r}"
    if not (isinstance(p.title, str) and p.title.isprintable() and p.title.strip() and len(p.title) <= LONGEST_TITLE):
        raise InputError(f"{whose}: title {p.title!r:.80}, give 1 to {LONGEST_TITLE} printed signs")
    if marks := sorted(MARKUP.intersection(p.title)):
        raise InputError(f"{whose}: title {p.title!r} holds {' '.join(marks)}, which a page takes for markup")
    for field_name in ("parameters", "as_run"):
        if not isinstance(getattr(p, field_name), Mapping):
            raise InputError(f"{whose}: {field_name} {getattr(p, field_name)!r:.80}, give a dict")
    if not isinstance(p.needs, tuple | list):
        raise InputError(f"{whose}: needs {p.needs!r:.80}, give a tuple")
    ensure_known(f"sum in the needs of {whose}", p.needs, SUMS)
    ensure_known(f"regime that {whose} refuses:", p.refuses, REGIMES)
    if p.shared and (missing := SWITCHES.keys() - p.parameters.keys()):
        raise InputError(f"{whose}: ties are for {SharedCap.name!r}, which also asks for parameters {sorted(missing)}")


def ensure_titles(names: Sequence[str]) -> None:
    """Raise InputError for a reader's own policy that cannot be found or has another policy's title: figures and
    verdicts name policies by their titles."""
    from kvrepro.engine.catalogue import CATALOGUE

    taken = {policy.title: name for name, policy in CATALOGUE.items()}
    for name in filter(is_own, names):
        other = taken.setdefault(find(name).title, name)
        if other != name:
            raise InputError(f"policies {other!r} and {name!r} are both called {find(name).title!r}: rename yours")


def _defined(file: Path) -> dict[str, Any]:
    """The names that a file defines. It is run again if it, or a file that it imports from its folder, was edited."""
    read, definitions = RAN.get(file, ({}, {}))
    if not read or any(not at.is_file() or at.stat().st_mtime_ns != edited for at, edited in read.items()):
        edited = file.stat().st_mtime_ns
        definitions, imported = _run(file)
        RAN[file] = {file: edited} | {at: at.stat().st_mtime_ns for at in imported}, definitions
    return definitions


def _run(file: Path) -> tuple[dict[str, Any], list[Path]]:
    """(names that a file defines, files that it imports from its folder). The folder is on the path while the file
    runs. Modules from there are removed from `sys.modules` afterwards, so that another folder's may have their names.
    """
    path, modules_before, quiet = list(sys.path), set(sys.modules), sys.dont_write_bytecode
    sys.path.insert(0, str(file.parent))
    sys.dont_write_bytecode = True  # Python would not notice that a file was edited within the same second
    imported: list[Path] = []
    try:
        return runpy.run_path(str(file)), imported
    finally:
        sys.path[:], sys.dont_write_bytecode = path, quiet
        for name in set(sys.modules) - modules_before:
            if _lies_in(file.parent, sys.modules[name]):
                source = getattr(sys.modules.pop(name), "__file__", None)
                imported += [Path(source)] if source else []  # a package without __init__.py has none


def _lies_in(folder: Path, module: ModuleType) -> bool:
    """Is the module a file of the folder, or part of a package there? Libraries in a deeper folder do not count."""
    top = folder / module.__name__.partition(".")[0]
    places = [getattr(module, "__file__", None), *getattr(module, "__path__", ())]
    return any(Path(at) == top.with_suffix(".py") or Path(at).is_relative_to(top) for at in places if at)


Reading: TypeAlias = tuple[Policy, Parameters]  # a condition's policy, and its parameters in the condition's reading


def check(condition: Condition, prompt_tokens: int | None = None, whitelist: Sequence[int] = ()) -> None:
    """Raise InputError if no prompt can meet `condition`, or if one of `prompt_tokens` tokens cannot (`check_on`)."""
    reading = checked(condition)
    if prompt_tokens is not None:
        check_on(condition, reading, prompt_tokens, whitelist)


def check_on(condition: Condition, reading: Reading | None, tokens: int, whitelist: Sequence[int] = ()) -> None:
    """Raise InputError if a prompt cannot meet `condition`. reading: what `checked` returned for it. tokens: how many
    tokens of the prompt's compressed part a layer holds. whitelist: the protected ones among them, counted from their
    end: -1 is the last."""
    if reading is not None and reading[0].shared:
        _check_shared(condition, *reading, tokens)
    elif reading is not None:
        _check_budget(condition, *reading, tokens, whitelist)


def checked(condition: Condition) -> Reading | None:
    """A condition's policy and parameters; None for the full cache. Raises InputError if no prompt can meet it."""
    c = condition
    for name, kind in FIELDS.items():
        ensure(kind, c.policy if name == "budget" else "", **{name: getattr(c, name)})
    if c.regime is not None:
        ensure_fields(c.regime, type(c.regime), c.regime.name)
    if c.policy == "full":
        if c.fair is not None or c != Condition(regime=c.regime, bits=c.bits):
            raise InputError(f"policy full keeps every token, got {replace(c, policy='(full)').label!r}: drop the rest")
        return None
    if c.prefix + c.suffix > 1:
        raise InputError(f"prefix {c.prefix:g} + suffix {c.suffix:g} guard more than the whole budget: lower one")
    if c.static_suffix and not c.suffix:
        raise InputError(f"static_suffix for {c.policy} without a suffix: give one, such as suffix=0.1, or drop it")
    policy = find(c.policy)
    parameters = policy.reading(c.reading, c.switches)
    _ensure_callable(c.policy, policy, parameters)
    if c.regime is None:
        instance = REGIMES[policy.regimes[0]].__name__
        raise InputError(f"{c.policy} without a regime: name one, {instance}() for instance")
    if c.regime.name not in policy.regimes:
        why = policy.refuses.get(c.regime.name) or (
            "it chooses one set of tokens for all layers" if policy.shared else "it chooses for each layer"
        )
        raise InputError(f"{c.policy} cannot run in regime {c.regime.name!r}: {why}; take {', '.join(policy.regimes)}")
    if c.budget is None:
        raise InputError(f"budget None for {c.policy}: give a number of tokens, or a share such as 0.2")
    if c.spans and c.fair is None:
        raise InputError(f"spans {c.spans} for {c.policy} without fair, which alone counts them: fair=1, or no spans")
    if c.bits is not None and c.execution == "masked":
        raise InputError(
            f"bits {c.bits} for {c.policy}, whose masked tokens stay in memory: execution physical, or no bits"
        )
    if c.fair is not None and c.fair < 1 and (policy.across is not None or parameters.get("ramps")):
        why = "whose ramps set no quota" if parameters.get("ramps") else "whose budgets wait for every layer"
        raise InputError(f"fair {c.fair:g} for {c.policy}, {why}: fair 1, or none")
    if not policy.frees and (c.prefix or c.suffix or c.whitelist or c.fair is not None or c.execution == "masked"):
        raise InputError(f"{c.policy} chooses pages anew for every query and keeps all: no guards, quotas or masks")
    if policy.shared:
        _check_shared(c, policy, parameters)
    return policy, parameters


def _ensure_callable(name: str, policy: Policy, parameters: Parameters) -> None:
    """Raise InputError for a function of a policy that the engine could not call."""
    for role, (arguments, more) in GIVEN.items():
        function = getattr(policy, role)
        if function is None and role != "score":
            continue
        try:
            given = named(function, {**parameters, **dict.fromkeys(more)})
            inspect.signature(function).bind(*arguments, **given)
        except (TypeError, ValueError) as error:
            problem = f"policy {name!r}: its {role} cannot be called with {', '.join(arguments)}"
            raise InputError(f"{problem} ({error}): what else it asks for stands in `parameters`") from None


def _check_budget(c: Condition, policy: Policy, parameters: Parameters, tokens: int, whitelist: Sequence[int]) -> None:
    """Raise InputError if a prompt of `tokens` compressed tokens cannot meet the budget."""
    at_once = c.every is None
    if at_once and isinstance(c.budget, int) and c.budget >= tokens:
        problem = "nothing leaves; lower it, or say 1.0" if policy.frees else "every page is read; lower it"
        raise InputError(f"budget {c.budget} >= {tokens} tokens to compress: {problem}")
    steps = [tokens]
    if isinstance(c.regime, Chunked) and c.regime.when == "every_chunk":
        steps.append(min(c.regime.chunk, tokens))
    for seen in steps:
        budget = budget_of(c, seen)
        if budget < 1:
            raise InputError(f"budget {c.budget} of {seen} tokens keeps {budget}: raise the share")
        prefix, suffix = guarded(c, budget, parameters)
        sinks, recent = (int(parameters.get(name, 0)) for name in ("sinks", "recent"))  # type: ignore[call-overload]
        first, last = max(prefix, sinks), max(suffix, recent)
        apart = {at for at in whitelist if seen == tokens and first <= seen + at < seen - last}
        needed = first + last + len(apart)
        parts = {"prefix": prefix, "suffix": suffix, "sinks": sinks, "recent": recent, "whitelist": len(apart)}
        named = [f"{count} {name}" for name, count in parts.items() if count]
        if budget < (min(needed, seen) if at_once else needed):  # later evictions also protect tokens yet to come
            problem = f"budget {budget} < {needed} protected tokens ({' + '.join(named)})"
            after = "" if seen == tokens else f" after the first chunk of {seen}"
            raise InputError(f"{problem}{after}: raise the budget of {c.policy}, or protect less")


def _check_shared(c: Condition, policy: Policy, parameters: Parameters, tokens: int | None = None) -> None:
    """Raise InputError for settings that `SharedCap` does not have, and for guards that leave nothing to choose."""
    if isinstance(c.budget, float):
        problem = f"budget {c.budget!r} in regime {SharedCap.name!r}, which takes no share"
        raise InputError(f"{problem}: give {c.policy} a number of tokens, such as 256")
    for name, value in {"whitelist": c.whitelist, "bits": c.bits}.items():
        if value:
            raise InputError(f"{name} {value!r} in regime {SharedCap.name!r}, which has none: leave it out")
    budget = budget_of(c, 0)
    prefix, suffix = guarded(c, budget, parameters)
    needed, parts = prefix + suffix, f"{prefix} prefix + {suffix} suffix"
    if policy.per_head:
        needed, parts = needed + 1, parts + " + 1 chosen by each head"
    if policy.shield is not None:
        needed, parts = max(needed, SLW_SINKS + 1), parts + f", or {SLW_SINKS} sinks + 1 recent"
    if budget < needed:
        problem = f"budget {budget} < {needed} protected tokens ({parts})"
        raise InputError(f"{problem}: raise the budget of {c.policy}, or protect less")
    if tokens is not None and tokens < prefix + suffix:
        problem = f"prompt of {tokens} tokens < {prefix + suffix} protected tokens ({parts})"
        raise InputError(f"{problem}: use a longer prompt, or protect less")
    if c.static_suffix and not policy.per_head and parameters["static_suffix"] == "per_head_only":
        problem = "as run it exists for per-head policies only; set the switch static_suffix to anywhere"
        raise InputError(f"static_suffix with {c.policy}: {problem}")
    if parameters["empty_suffix"] == "keeps_newest" and parameters["guardrail"] == "honours" and prefix and not suffix:
        problem = "everything is protected and nothing can leave; change one of the two"
        raise InputError(f"switches empty_suffix = keeps_newest and guardrail = honours: {problem}")


def budget_of(c: Condition, tokens: int) -> int:
    """Tokens per KV head that `c` keeps of `tokens`: its budget, a share of them rounded down."""
    if c.policy == "full" or c.budget is None:
        return tokens
    return math.floor(c.budget * tokens + 1e-9) if isinstance(c.budget, float) else c.budget


def guarded(c: Condition, budget: int, parameters: Parameters) -> tuple[int, int]:
    """Tokens that the condition guards at the start and at the end of `budget`."""
    rounding = str(parameters.get("n_prot", "floor" if c.reading == "as_run" else "ceil"))
    prefix, suffix = (guard.protected_count(side, budget, rounding) for side in (c.prefix, c.suffix))
    return prefix, suffix


def table() -> list[dict[str, str]]:
    """The catalogue as rows, the policies of `SharedCap` last."""
    from kvrepro.engine.catalogue import CATALOGUE

    columns = ("name", "title", "keeps", "source", "regimes", "budget", "needs", "readings")
    rows = [("full", "Full cache", "everything", "-", "all", "every token", "nothing", "-")]
    for name, p in CATALOGUE.items():
        regimes = ", ".join(p.regimes) if p.refuses or p.shared else "all"
        rows.append((name, p.title, p.rule, p.source, regimes, _budget(p), _needs(p), ", ".join(p.readings)))
    return [dict(zip(columns, row, strict=True)) for row in rows]


def _budget(p: Policy) -> str:
    """The table's words on how a policy's budget may differ between heads and layers, and on what else stays."""
    if not p.frees:
        return "memory stays: pages are chosen per query"
    if p.shared:
        return "tokens per KV head, union trimmed to the budget" if p.per_head else "one set for all heads and layers"
    dense = int({**p.parameters, **p.as_run}.get("dense_layers", 0))  # type: ignore[call-overload]
    return f"{p.budget}; in the authors' code the first {dense} layers stay whole" if dense else p.budget


def _needs(p: Policy) -> str:
    """The table's words on what a policy needs beside keys and values: queries, sums, files."""
    window, run = p.parameters.get("window"), p.as_run.get("window")
    wanted = ["each query as it comes"] if not p.frees else []
    if window:
        other = f" ({run} in the authors’ code)" if run else ""
        wanted += ["the last query" if window == 1 else f"the last {window}{other} queries"]
    files = [f"a {key.removesuffix('_file')} file of the model" for key in p.files]
    return ", ".join(wanted + [SUMS.get(n, n) for n in p.needs] + files) or "nothing"
