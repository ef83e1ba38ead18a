"""A policy is data; `keep` applies one. `python -m kvrepro.engine.policy` lists the catalogue.

scores    = policy.score(observation)                       # [batch, kv_heads, tokens]
protected = guards(observation)                             # the same shape, bool
counts    = policy.allocate(scores, protected, budget)      # [batch, kv_heads]
kept      = select(scores, protected, counts)
"""

import hashlib
import inspect
import math
import re
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch

from kvrepro.chapters.protection import policy as protection
from kvrepro.chapters.protection.guard import protected_count
from kvrepro.engine import allocate, allowed, guard, quota
from kvrepro.engine.allowed import Count, Number, Size, ensure
from kvrepro.engine.condition import Condition
from kvrepro.engine.observe import Observation
from kvrepro.engine.select import select
from kvrepro.engine.shapes import Counts, Mask, RowInts, Scores
from kvrepro.errors import InputError
from kvrepro.paths import ROOT

REGIMES = {
    "prefill": "each layer is reduced as soon as the prompt has passed through it",
    "chunked": "the prompt comes in chunks that attend to what is left of the earlier ones",
    "offline": "a prefix is reduced once and reused by many requests",
    "decode cap": "a cap on the cache, met again every `interval` generated tokens",
    "per step": "one token leaves for every token generated",
}
CHUNK_MODES = ("last_chunk", "budget", "every_chunk")
READINGS = ("as_run", "as_described")
ENGINES = {"window": Size, "recent": Count, "sinks": Count, "page": Size, "dense_layers": Count}  # read by the engine
SUMS = {  # what the forward pass can add up for each token and KV head
    "mass": "attention summed over all queries",
    "span_mass": "attention summed over the queries of its own span",
    "marked_mass": "attention summed over the queries of its own span; unmarked tokens see all and are seen by all",
    "low": "count of low attention among the last 400 queries, all heads of the group together",
    "reconstruction": "largest attention while the context is repeated",
    "reconstruction_per_norm": "largest attention of each query head while the context is repeated, over the length of "
    "the layer's input at the query",
}
FIELDS = {  # what a condition may say
    "policy": str,
    "regime": ("harness", *REGIMES),
    "capacity": (Size, None),
    "share": (Number(0, 1, above=True), None),
    "prefix": Number(0, 1, below=True),
    "suffix": Number(0, 1, below=True),
    "suffix_mode": ("dynamic", "static"),
    "interval": Size,
    "reading": READINGS,
    "execution": ("physical", "masked"),
    "until": str,
    "fair": (Number(0, 1), None),
    "chunk": Size,
    "chunk_mode": CHUNK_MODES,
    "bits": (4, None),
}
Parameters = Mapping[str, object]


@dataclass(frozen=True)
class Policy:
    """How a method decides. Every function takes the parameters it names, from `parameters` in the reading asked for.

    parameters: the paper's; as_run: those in which the public code (`code`) differs. The functions' annotations say
    what each may be (`kvrepro.engine.allowed`). Three names mean the same for all: `window` queries are shown to the
    scorer,
    `recent` newest and `sinks` oldest tokens are protected.
    shield(o, scores, budget, ...): tokens exempt on the method's own account, before heads get their counts.
    refine(o, scores, counts, ...) -> (scores, exempt tokens): a second stage, once heads know their counts.
    across(scores, protected, budget, summaries, ...) -> (scores, counts): budgets that need every layer's scores, lists
    over layers; `summary(o, ...)` [batch] is what it is told of each layer. Such a policy evicts after the last layer.
    needs: `Observation.sums` that the forward pass must provide (`SUMS`).
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
    kernel: bool = False  # has its scorer a Triton kernel?
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
        return first_sentence(self.score)

    @property
    def rule(self) -> str:
        """Its formula, and the first sentences of what else decides, a line each."""
        budgets = None if self.allocate is allocate.uniform else self.allocate
        parts = (self.score, self.shield, budgets, self.across, self.summary, self.refine)
        return "\n".join(filter(None, map(first_sentence, filter(None, parts))))

    @property
    def files(self) -> tuple[str, ...]:
        """Its parameters that name a file, which belongs to one model."""
        return tuple(key for key in {**self.parameters, **self.as_run} if self.kind(key) is str)

    def reading(self, name: str, switches: Sequence[tuple[str, object]] = ()) -> dict[str, object]:
        """Its parameters in a reading, single ones overridden. Raises InputError for what it does not know."""
        if name not in READINGS:
            raise InputError(f"unknown reading {name!r}: choose one of {', '.join(READINGS)}")
        known = {**self.parameters, **self.as_run}
        for key, _ in switches:
            if key not in known and key not in ("sinks", "recent"):  # which every policy can protect
                raise InputError(f"{self.title} has no parameter {key!r}: it has {', '.join(known) or 'none'}")
        if len(dict(switches)) < len(switches):
            raise InputError(f"switches {switches} for {self.title} name a parameter twice: drop one")
        found = {**(known if name == "as_run" else self.parameters), **dict(switches)}
        if found.get("recent") == "window":  # the window itself is protected
            found["recent"] = found.get("window")
        for key, value in found.items():
            ensure(self.kind(key), self.title, **{key: value})
        return found

    @property
    def functions(self) -> list[Callable]:
        every = (self.score, self.allocate, self.across, self.summary, self.shield, self.refine)
        return [f for f in every if f is not None]

    def kind(self, parameter: str) -> object:
        """What a parameter may be (`allowed.holds`); anything, where no function of a reader's own policy says."""
        return ENGINES.get(parameter) or allowed.of(self.functions, parameter)


def first_sentence(function: Callable) -> str:
    """Of its docstring, without the full stop."""
    first = " ".join((function.__doc__ or "").strip().split("\n\n")[0].split())
    return re.split(r"(?<!\.)\. ", first)[0].rstrip(".")


def call(function: Callable, *arguments: object, parameters: Parameters):
    """`function` with the parameters that it names."""
    names = inspect.signature(function).parameters
    return function(*arguments, **{k: v for k, v in parameters.items() if k in names})


def find(name: str) -> Policy:
    """The catalogue's policy of that name, or a reader's own, named as `path/to/file.py:NAME`.

    Raises InputError for a name that neither has.
    """
    from kvrepro.engine.catalogue import CATALOGUE

    if name in CATALOGUE:
        return CATALOGUE[name]
    path, colon, attribute = name.rpartition(":")
    if not colon:
        protection.refuse_credit(name)
        if name in protection.POLICIES:
            raise InputError(f"{name} looks at all layers together while decoding: it exists in regime harness only")
        raise InputError(
            f"unknown policy {name!r}: choose one of full, {', '.join(CATALOGUE)}, or path/to/file.py:NAME"
        )
    file = _file(path)
    if file is None:
        raise InputError(f"policy {name!r}: no file {path} here or in {ROOT}")
    try:
        beside = tuple((path.name, path.stat().st_mtime_ns) for path in sorted(file.parent.glob("*.py")))
        found = _run(file, beside).get(attribute)
    except Exception as error:  # whatever a reader's file raises
        raise InputError(f"policy {name!r}: {file.name} raises {type(error).__name__}: {error}") from error
    if not isinstance(found, Policy):
        raise InputError(f"policy {name!r}: {file.name} has no Policy called {attribute}")
    return found


def source_of(c: Condition) -> str:
    """What decides beside the engine's code: a reader's own policy, as a file or typed into a notebook, and files that
    its parameters name, gates for instance; "" where there is nothing of the kind."""
    from kvrepro.engine.catalogue import CATALOGUE

    if c.policy == "full" or c.regime == "harness":
        return ""
    policy, found = find(c.policy), ""
    if c.policy in CATALOGUE and not policy.score.__module__.startswith("kvrepro."):
        found = inspect.getsource(policy.score) + repr((policy.parameters, policy.as_run))
    values = policy.reading(c.reading, c.switches).values()
    named = [c.policy.rpartition(":")[0], *(value for value in values if isinstance(value, str))]
    return found + "".join(_digest(file, file.stat().st_mtime_ns) for file in map(_file, named) if file)


@cache
def _run(file: Path, beside: tuple) -> dict:
    """What a file defines. It may import its neighbours: its folder is on the path while it runs, and what it imports
    from there is forgotten afterwards, so that another file's neighbour may have the same name."""
    path, known, quiet = list(sys.path), set(sys.modules), sys.dont_write_bytecode
    sys.path.insert(0, str(file.parent))
    sys.dont_write_bytecode = True  # Python takes a file that was edited within a second for the compiled one
    try:
        return runpy.run_path(str(file))
    finally:
        sys.path[:], sys.dont_write_bytecode = path, quiet
        for name in set(sys.modules) - known:
            if Path(getattr(sys.modules[name], "__file__", None) or "/").parent == file.parent:
                del sys.modules[name]


@cache
def _digest(file: Path, changed: int) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _file(path: str) -> Path | None:
    return next((r / path for r in (Path.cwd(), ROOT) if path and (r / path).is_file()), None)


def judge(
    policy: Policy, parameters: Parameters, o: Observation, budget: RowInts, guarded: Mask
) -> tuple[Scores, Mask]:
    """(scores, protected), both `[batch, kv_heads, tokens]`: `guarded` by the condition, and the method's own."""
    shape = o.positions.shape
    try:
        found = call(policy.score, o, parameters={**parameters, "budget": budget})
    except KeyError as error:
        if error.args[0] not in SUMS:
            raise
        raise InputError(f"{policy.title} reads sums[{error.args[0]!r}], which its `needs` do not name") from error
    given = tuple(getattr(found, "shape", ()))
    if len(given) != 3 or any(a not in (1, b) for a, b in zip(given, shape, strict=True)):
        what = f"scores of shape {given}" if given else f"{type(found).__name__}"
        raise InputError(f"{policy.title}'s scorer returned {what}, not [batch, kv_heads, tokens] = {tuple(shape)}")
    scores = found.float().clamp(min=torch.finfo(torch.float32).min).expand(shape)  # -inf is for dead slots alone
    newest = parameters.get("recent", 0)
    recent = guard.window_of(o) if o.span_local and newest else guard.recent(o, newest)
    protected = (guarded | recent | guard.sinks(o, parameters.get("sinks", 0))).expand(shape) & o.alive
    if policy.shield is not None:
        protected = protected | call(policy.shield, o, scores, budget, parameters=parameters)
    return scores.masked_fill(~o.alive, -torch.inf), protected & o.alive


def keep(
    policy: Policy, parameters: Parameters, o: Observation, scores: Scores, protected: Mask, counts: Counts,
    quotas: Mapping | None = None,
) -> Mask:  # fmt: skip
    """Who stays, `[batch, kv_heads, tokens]`, `counts` per head; `quotas` says how `quota.split` shares each head's
    count over the spans of a prompt."""
    refined, more = scores, torch.zeros_like(protected)
    if policy.refine is not None:
        refined, more = call(policy.refine, o, scores, counts, parameters={**parameters, "protected": protected})
        more = more & o.alive
    if quotas is None:
        return select(refined, protected | more, counts)
    parts = quota.split(o, counts, protected, **quotas)
    first = torch.minimum(parts, quota.tally(o, protected | more))  # the first stage, as far as each span's part goes
    exempt = quota.select(scores.masked_fill(~more, torch.finfo(scores.dtype).min), protected, first, o)
    return quota.select(refined, protected | exempt, parts, o)


def counts_of(
    policy: Policy, parameters: Parameters, o: Observation, scores: Scores, protected: Mask, budget: RowInts
) -> Counts:
    """Each head's count in one layer."""
    return call(policy.allocate, scores, protected, budget, parameters={**parameters, "o": o})


def check(condition: Condition, prompt_tokens: int | None = None, whitelist: Sequence[int] = ()) -> None:
    """Raise InputError if `condition` cannot be met (on a prompt of whose compressed part layers hold so many tokens).

    whitelist: the protected ones among them, counted from their end: -1 is the last.
    """
    c = condition
    for name, kind in FIELDS.items():
        ensure(kind, c.policy if name in ("capacity", "share") else "", **{name: getattr(c, name)})
    if c.regime == "harness":
        foreign = {n: getattr(c, n) for n in ("share", "until", "whitelist", "spans", "fair", "bits")}
        for name, value in foreign.items():
            if value not in (None, "", ()):
                raise InputError(
                    f"{name} {value!r} in regime harness, which has no such thing: name a regime, e.g. prefill"
                )
        return protection.check(c, prompt_tokens)
    if c.policy == "full":
        if c.capacity is not None or c.share is not None or c.prefix or c.suffix or c.whitelist or c.fair is not None:
            raise InputError(f"policy full keeps every token, got {c.label!r} with a budget or guards: drop them")
        if c.switches:
            raise InputError(f"policy full has no parameters, got {dict(c.switches)}: drop them")
        return None
    policy = find(c.policy)
    parameters = policy.reading(c.reading, c.switches)
    if c.regime in policy.refuses:
        raise InputError(f"{c.policy} cannot run in regime {c.regime!r}: {policy.refuses[c.regime]}")
    if (c.capacity is None) == (c.share is None):
        raise InputError(f"capacity {c.capacity}, share {c.share} for {c.policy}: give one of the two")
    if c.fair is not None and c.regime not in ("prefill", "offline"):
        raise InputError(f"fair splits budgets over spans at a prompt's end: prefill or offline, not {c.regime}")
    if c.fair is not None and c.fair < 1 and policy.across is not None:
        raise InputError(f"fair {c.fair:g} for {c.policy}, whose budgets wait for every layer: fair 1, or none")
    if c.fair is not None and c.fair < 1 and parameters.get("ramps"):
        raise InputError(f"fair {c.fair:g} for {c.policy} as run, whose ramps set no quota: reading as_described, or 1")
    if not policy.frees and (c.prefix or c.suffix or c.whitelist or c.fair is not None or c.execution == "masked"):
        raise InputError(f"{c.policy} chooses pages anew for every query and keeps all: no guards, quotas or masks")
    if prompt_tokens is None:
        return None
    at_once = c.regime in ("prefill", "offline", "chunked")
    if at_once and c.capacity is not None and c.capacity >= prompt_tokens:
        what = "nothing leaves; lower it, or say share=1.0" if policy.frees else "every page is read; lower it"
        raise InputError(f"capacity {c.capacity} >= {prompt_tokens} tokens to compress: {what}")
    tokens = [prompt_tokens]
    if c.regime == "chunked" and c.chunk_mode == "every_chunk":
        tokens.append(min(c.chunk, prompt_tokens))
    for seen in tokens:
        budget = capacity_of(c, seen)
        if budget < 1:
            raise InputError(f"share {c.share} of {seen} tokens keeps {budget}: raise the share")
        prefix, suffix = guarded(c, budget)
        parts = {"prefix": prefix, "suffix": suffix, **{k: int(parameters.get(k, 0)) for k in ("sinks", "recent")}}  # type: ignore[call-overload]
        first, last = max(prefix, parts["sinks"]), max(suffix, parts["recent"])
        named = [f"{v} {k}" for k, v in parts.items() if v]
        needed = first + last
        if seen == prompt_tokens:
            apart = {at for at in whitelist if first <= seen + at < seen - last}
            named += [f"{len(apart)} whitelist"] if apart else []
            needed += len(apart)
        if budget < (min(needed, seen) if at_once else needed):  # tokens that are yet to come are protected as well
            what = f"budget {budget} < {needed} protected tokens ({' + '.join(named)})"
            after = "" if seen == prompt_tokens else f" after the first chunk of {seen}"
            raise InputError(f"{what}{after}: raise the budget or lower the guards")
    return None


def capacity_of(c: Condition, tokens: int) -> int:
    """Tokens per KV head that `c` keeps of `tokens`: its capacity, or its share rounded down."""
    if c.policy == "full":
        return tokens
    return c.capacity if c.capacity is not None else math.floor(c.share * tokens + 1e-9)


def guarded(c: Condition, budget: int) -> tuple[int, int]:
    """Tokens that the condition guards at the start and at the end of `budget`."""
    rounding = c.resolved().n_prot
    prefix, suffix = (protected_count(side, budget, rounding) for side in (c.prefix, c.suffix))
    return prefix, suffix


def table() -> list[dict[str, str]]:
    """The catalogue as rows, the protection paper's harness last."""
    from kvrepro.engine.catalogue import CATALOGUE

    columns = ("name", "title", "keeps", "source", "regimes", "budget", "needs", "readings")
    rows = [("full", "Full cache", "everything", "-", "all", "every token", "nothing", "-")]
    for name, p in CATALOGUE.items():
        regimes = "all" if not p.refuses else ", ".join(p.regimes)
        rows.append((name, p.title, p.rule, p.source, regimes, _budget(p), _needs(p), ", ".join(p.readings)))
    for name, q in protection.POLICIES.items():
        keeps = q.formula if q.allocate is None else f"{q.formula}\n{first_sentence(q.allocate)}"
        rows.append((name, q.title, keeps, q.source, "harness", q.budget, "attention of every step", q.readings))
    rows.append(protection.CREDIT)
    return [dict(zip(columns, row, strict=True)) for row in rows]


def _budget(p: Policy) -> str:
    """What may differ, and where more than the budget stays."""
    if not p.frees:
        return "memory stays: pages are chosen per query"
    dense = int({**p.parameters, **p.as_run}.get("dense_layers", 0))  # type: ignore[call-overload]
    return f"{p.budget}; as run the first {dense} layers stay whole" if dense else p.budget


def _needs(p: Policy) -> str:
    """What the forward pass hands over beside keys and values, and the files of a policy."""
    window, run = p.parameters.get("window"), p.as_run.get("window")
    asked = ["each query as it comes"] if not p.frees else []
    if window:
        asked += ["the last query" if window == 1 else f"the last {window}{f' (as run {run})' if run else ''} queries"]
    files = [f"a {key.removesuffix('_file')} file of the model" for key in p.files]
    return ", ".join(asked + [SUMS.get(n, n) for n in p.needs] + files) or "nothing"


def main() -> None:
    """Print the catalogue: plain columns that read the same on 80 columns and through a pipe."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    for name, widths in (
        ("", {"name": 19, "source": None, "regimes": 10, "budget": 9, "readings": 12}),
        ("harness", {"name": 19, "source": None, "budget": 26}),
    ):
        view = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), expand=True)
        for column, width in widths.items():
            view.add_column(column, width=width, no_wrap=column == "name", overflow="fold")
        for row in table():
            if (row["regimes"] == "harness") == bool(name):
                view.add_row(*(Text(row[column].replace("as_run, as_described", "both")) for column in widths))
        Console().print(*([Text("\nRegime harness, both readings:")] if name else []), view)


if __name__ == "__main__":
    main()
