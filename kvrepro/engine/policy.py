"""A policy is data; `evict` says how one is applied."""

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
from kvrepro.errors import InputError, ensure_known, told
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
REPEATED = {"reconstruction", "reconstruction_per_norm"}  # of these, what comes of repeating the context
GIVEN: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # what a policy's functions get, and may name besides
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
LONGEST_TITLE = 60  # signs, in a figure's legend and in the id of a verdict
MARKUP = frozenset("<>*$[]|`\\")
Parameters = Mapping[str, object]


@dataclass(frozen=True)
class Policy:
    """How a method decides. Every function takes the parameters it names, from `parameters` in the reading asked for.

    parameters: the paper's; as_run: those in which the public code (`code`) differs. The functions' annotations say
    what each may be (`kvrepro.engine.allowed`). Three names mean the same for all: the last `window` queries are shown
    to the scorer; the `recent` newest and `sinks` oldest tokens are protected.
    shield(o, scores, budget, ...): tokens exempt on the method's own account, before heads get their counts.
    refine(o, scores, counts, ...) -> (scores, exempt tokens): a second stage, once heads know their counts.
    across(scores, protected, budget, ...) -> (scores, counts): budgets that need every layer's scores, lists over
    layers; it may name `summaries`, what `summary(o, ...)` [batch] says of each, and `observations`. Such a policy
    evicts after the last layer.
    needs: `Observation.sums` that the forward pass must provide (`SUMS`); needs_if: sum -> (parameter, value) of those
    that only one value of a parameter asks for.
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
    needs_if: Mapping[str, tuple[str, object]] = field(default_factory=dict)
    budget: str = "uniform"  # or "per layer", "per head", "joint"
    refuses: Mapping[str, str] = field(default_factory=dict)  # regime -> why the policy cannot exist there
    ties: tuple[str, ...] | None = None  # of `SharedCap`: sums that order equal scores, before the position does
    together: bool = False  # a GPU may judge several layers as rows of one: nothing asks for the layer or for draws
    frees: bool = True  # False: pages are selected for each query and nothing is evicted

    @property
    def readings(self) -> tuple[str, ...]:
        return READINGS if self.as_run else READINGS[1:]

    @property
    def shared(self) -> bool:
        """Does it choose one set of tokens for all layers? Then it exists in `SharedCap` only."""
        return self.ties is not None

    @property
    def regimes(self) -> tuple[str, ...]:
        """Names of the regimes in which it can run."""
        return tuple(name for name in REGIMES if (name == SharedCap.name) == self.shared and name not in self.refuses)

    @property
    def rule(self) -> str:
        """The first sentences of its scorer, its formula, and of what else decides, a line each."""
        deciding = [f for f in self.functions if f is not allocate.uniform]
        return "\n".join(filter(None, map(first_sentence, deciding)))

    @property
    def files(self) -> tuple[str, ...]:
        """Its parameters that name a file, which belongs to one model."""
        return tuple(key for key in {**self.parameters, **self.as_run} if self.kind(key) is str)

    def reading(self, name: str, switches: Sequence[tuple[str, object]] = ()) -> dict[str, object]:
        """Its parameters in a reading, single ones overridden. Raises InputError for what it does not know."""
        ensure(READINGS, reading=name)
        known = {**self.parameters, **self.as_run}
        for key, _ in switches:
            if key not in known and (self.shared or key not in ("sinks", "recent")):  # which others can protect
                raise InputError(f"{self.title} has no parameter {key!r}: it has {', '.join(known) or 'none'}")
        if len(dict(switches)) < len(switches):
            raise InputError(f"switches {switches} for {self.title} name a parameter twice: drop one")
        found = {**(known if name == "as_run" else self.parameters), **dict(switches)}
        if found.get("recent") == "window":  # the window itself is protected
            found["recent"] = found.get("window")
        for key, value in found.items():
            ensure(self.kind(key), self.title, **{key: value})
        return found

    def needed(self, parameters: Parameters) -> set[str]:
        """The sums that it needs with these parameters."""
        asked = {name: self.needs_if.get(name) for name in self.needs}
        return {name for name, only in asked.items() if only is None or parameters.get(only[0]) == only[1]}

    @property
    def repeated(self) -> set[str]:
        """What it must know of a repetition of the context."""
        return REPEATED.intersection(self.needs)

    @property
    def functions(self) -> list[Callable[..., Any]]:
        every = (self.score, self.shield, self.allocate, self.across, self.summary, self.refine)
        return [f for f in every if f is not None]

    def kind(self, parameter: str) -> object:
        """What a parameter may be (`allowed.holds`); anything, where no function of a reader's own policy says."""
        if self.shared and parameter in SWITCHES:
            return SWITCHES[parameter].allowed
        return ENGINES.get(parameter) or allowed.of(self.functions, parameter)


def first_sentence(function: Callable[..., Any]) -> str:
    """Of its docstring, without the full stop."""
    first = " ".join((function.__doc__ or "").strip().split("\n\n")[0].split())
    return re.split(r"(?<!\.)\. ", first)[0].rstrip(".")


def call(function: Callable[..., Any], *arguments: object, parameters: Parameters) -> Any:
    """`function` with the parameters that it names. A reader's own is shown copies: what it writes in place must not
    reach other conditions."""
    given = named(function, parameters)
    if not ours(function):
        arguments, given = copied(arguments), copied(given)
    return function(*arguments, **given)


def named(function: Callable[..., Any], parameters: Parameters) -> dict[str, Any]:
    """Those of `parameters` that `function` names."""
    names = allowed.parameters_of(function)
    return {name: value for name, value in parameters.items() if name in names}


def copied(value: Any) -> Any:
    """The same, with every tensor in memory of its own: of lists, mappings and dataclasses, too."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, Mapping):
        return {name: copied(one) for name, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(copied, value))
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: copied(getattr(value, f.name)) for f in fields(value)})
    return value


def ours(function: Callable[..., Any]) -> bool:
    """Does this package define it? A wrapper may go by the name of what it wraps, and is another function."""
    module = str(getattr(function, "__module__", None))
    found: object = sys.modules.get(module) if module.startswith("kvrepro.") else None
    for name in getattr(function, "__qualname__", "").split("."):
        found = getattr(found, name, None)
    return found is function


OWN: dict[str, Policy] = {}  # policies that a notebook defines, by name
RAN: dict[Path, tuple[dict[Path, int], dict[str, Any]]] = {}  # when what a file read was edited, and what it defines


def own(name: str, policy: Policy) -> str:
    """Make a policy known to every study of this process under a name, which it returns; defining it again replaces it.

    Raises InputError for a name of the catalogue.
    """
    from kvrepro.engine.catalogue import CATALOGUE

    if name in CATALOGUE or name == "full":
        raise InputError(f"policy {name!r} is one of the catalogue's: give your own another name")
    _ensure_own(name, policy)
    OWN[name] = policy
    return name


def is_own(name: str) -> bool:
    """Is it a reader's own policy, and none of the catalogue's?"""
    return name in OWN or ":" in name


def find(name: str) -> Policy:
    """The catalogue's policy of that name, or a reader's own: one of `OWN`, or `path/to/file.py:NAME`.

    Raises InputError for a name that none has.
    """
    from kvrepro.engine.catalogue import CATALOGUE

    found = CATALOGUE.get(name) or OWN.get(name)
    if found is not None:
        return found
    path, colon, attribute = name.rpartition(":")
    if "credit" in name and not colon:
        raise InputError(f"{name} learns from prompt to prompt: run python -m kvrepro.chapters.protection.credit")
    if not colon:
        known = ", ".join(["full", *CATALOGUE])
        raise InputError(f"unknown policy {name!r}: choose one of {known}, or path/to/file.py:NAME")
    file = None
    with suppress(OSError):  # a name that is too long for a file
        file = next((root / path for root in (Path.cwd(), ROOT) if path and (root / path).is_file()), None)
    if file is None:
        raise InputError(f"policy {name!r}: no file {path} here or in {ROOT}")
    try:
        found = _defined(file).get(attribute)
    except (Exception, SystemExit) as error:  # whatever a reader's file raises
        raise InputError(f"policy {name!r}: {file.name} raises {told(error)}") from error
    if not isinstance(found, Policy):
        raise InputError(f"policy {name!r}: {file.name} has no Policy called {attribute}")
    _ensure_own(name, found)
    return found


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
    """Raise InputError for a reader's own policy that cannot be found, or is called as another one: figures and
    verdicts name policies by their titles."""
    from kvrepro.engine.catalogue import CATALOGUE

    taken = {policy.title: name for name, policy in CATALOGUE.items()}
    for name in filter(is_own, names):
        other = taken.setdefault(find(name).title, name)
        if other != name:
            raise InputError(f"policies {other!r} and {name!r} are both called {find(name).title!r}: rename yours")


def _defined(file: Path) -> dict[str, Any]:
    """What a file defines, which is run again when it was edited, or what it imports from its folder."""
    read, found = RAN.get(file, ({}, {}))
    if not read or any(not at.is_file() or at.stat().st_mtime_ns != edited for at, edited in read.items()):
        edited = file.stat().st_mtime_ns
        found, imported = _run(file)
        RAN[file] = {file: edited} | {at: at.stat().st_mtime_ns for at in imported}, found
    return found


def _run(file: Path) -> tuple[dict[str, Any], list[Path]]:
    """What a file defines, and its neighbours that it imports: its folder is on the path while it runs, and what it
    imports from there is forgotten afterwards, so that another file's neighbour may have the same name."""
    path, known, quiet = list(sys.path), set(sys.modules), sys.dont_write_bytecode
    sys.path.insert(0, str(file.parent))
    sys.dont_write_bytecode = True  # Python takes a file that was edited within a second for the compiled one
    imported: list[Path] = []
    try:
        return runpy.run_path(str(file)), imported
    finally:
        sys.path[:], sys.dont_write_bytecode = path, quiet
        for name in set(sys.modules) - known:
            if _lies_in(file.parent, sys.modules[name]):
                source = getattr(sys.modules.pop(name), "__file__", None)
                imported += [Path(source)] if source else []  # a package without __init__.py has none


def _lies_in(folder: Path, module: ModuleType) -> bool:
    """Is it a file of the folder, or of a package that lies there? Libraries in a folder below it are not."""
    top = folder / module.__name__.partition(".")[0]
    places = [getattr(module, "__file__", None), *getattr(module, "__path__", ())]
    return any(Path(at) == top.with_suffix(".py") or Path(at).is_relative_to(top) for at in places if at)


Known: TypeAlias = tuple[Policy, Parameters]  # a condition's policy, and its parameters in the condition's reading


def check(condition: Condition, prompt_tokens: int | None = None, whitelist: Sequence[int] = ()) -> None:
    """Raise InputError if `condition` cannot be met, by any prompt or by one (`check_on`)."""
    known = checked(condition)
    if prompt_tokens is not None:
        check_on(condition, known, prompt_tokens, whitelist)


def check_on(condition: Condition, known: Known | None, tokens: int, whitelist: Sequence[int] = ()) -> None:
    """Raise InputError if `condition`, of which `checked` gave `known`, cannot be met by a prompt of whose compressed
    part layers hold so many tokens. whitelist: the protected ones among them, counted from their end: -1 is the last.
    """
    if known is not None and known[0].shared:
        _check_shared(condition, *known, tokens)
    elif known is not None:
        _check_budget(condition, *known, tokens, whitelist)


def checked(condition: Condition) -> Known | None:
    """A condition's policy and parameters; None for the full cache. Raises InputError for what no prompt can meet."""
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
            what = f"policy {name!r}: its {role} cannot be called with {', '.join(arguments)}"
            raise InputError(f"{what} ({error}): what else it asks for stands in `parameters`") from None


def _check_budget(c: Condition, policy: Policy, parameters: Parameters, tokens: int, whitelist: Sequence[int]) -> None:
    """Raise InputError for a budget that a prompt of so many tokens cannot meet."""
    at_once = c.every is None
    if at_once and isinstance(c.budget, int) and c.budget >= tokens:
        what = "nothing leaves; lower it, or say 1.0" if policy.frees else "every page is read; lower it"
        raise InputError(f"budget {c.budget} >= {tokens} tokens to compress: {what}")
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
        named = [f"{many} {name}" for name, many in parts.items() if many]
        if budget < (min(needed, seen) if at_once else needed):  # tokens that are yet to come are protected as well
            what = f"budget {budget} < {needed} protected tokens ({' + '.join(named)})"
            after = "" if seen == tokens else f" after the first chunk of {seen}"
            raise InputError(f"{what}{after}: raise the budget or lower the guards")


def _check_shared(c: Condition, policy: Policy, parameters: Parameters, tokens: int | None = None) -> None:
    """Raise InputError for what `SharedCap` does not have, and for guards that leave nothing to choose."""
    given = {"whitelist": c.whitelist, "bits": c.bits, "budget": c.budget if isinstance(c.budget, float) else None}
    for name, value in given.items():
        if value:
            what = f"{name} {value!r} in regime {SharedCap.name!r}"
            raise InputError(f"{what}, which has no such thing: take DecodeCap()")
    per_head, budget = policy.allocate is not allocate.uniform, budget_of(c, 0)
    prefix, suffix = guarded(c, budget, parameters)
    needed, parts = prefix + suffix, f"{prefix} prefix + {suffix} suffix"
    if per_head:
        needed, parts = needed + 1, parts + " + 1 chosen by each head"
    if policy.shield is not None:
        needed, parts = max(needed, SLW_SINKS + 1), parts + f", or {SLW_SINKS} sinks + 1 recent"
    if budget < needed:
        what = f"budget {budget} < {needed} protected tokens ({parts})"
        raise InputError(f"{what}: raise the budget or lower the guards")
    if tokens is not None and tokens < prefix + suffix:
        what = f"prompt of {tokens} tokens < {prefix + suffix} protected tokens ({parts})"
        raise InputError(f"{what}: use a longer prompt or lower the guards")
    if c.static_suffix and not per_head and parameters["static_suffix"] == "per_head_only":
        what = "as run it exists for per-head policies only; set the switch static_suffix to anywhere"
        raise InputError(f"static_suffix with {c.policy}: {what}")
    if parameters["empty_suffix"] == "keeps_newest" and parameters["guardrail"] == "honours" and prefix and not suffix:
        what = "everything is protected and nothing can leave; change one of the two"
        raise InputError(f"switches empty_suffix = keeps_newest and guardrail = honours: {what}")


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
    """What may differ, and where more than the budget stays."""
    if not p.frees:
        return "memory stays: pages are chosen per query"
    if p.shared:
        per_head = p.allocate is not allocate.uniform
        return "tokens per KV head, union trimmed to the budget" if per_head else "one set for all heads and layers"
    dense = int({**p.parameters, **p.as_run}.get("dense_layers", 0))  # type: ignore[call-overload]
    return f"{p.budget}; in the authors' code the first {dense} layers stay whole" if dense else p.budget


def _needs(p: Policy) -> str:
    """What the forward pass hands over beside keys and values, and the files of a policy."""
    window, run = p.parameters.get("window"), p.as_run.get("window")
    asked = ["each query as it comes"] if not p.frees else []
    if window:
        other = f" ({run} in the authors’ code)" if run else ""
        asked += ["the last query" if window == 1 else f"the last {window}{other} queries"]
    files = [f"a {key.removesuffix('_file')} file of the model" for key in p.files]
    return ", ".join(asked + [SUMS.get(n, n) for n in p.needs] + files) or "nothing"
