"""Which tokens stay: the same steps for every regime.

scores, protected = score_and_protect(job, o)                   # [batch, kv_heads, tokens] each
counts            = allocated(job, o, scores, protected)        # [batch, kv_heads]
kept              = selected(job, o, scores, protected, counts) # [batch, kv_heads, tokens]

`select_tokens` takes these steps for one layer, `across` for policies that must see every layer first, and `Decisions`
leads jobs through the layers. In the regime `SharedCap` one observation, made of `signals`, stands for all layers.
"""

import hashlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from random import Random
from typing import Any

import torch
from torch import Tensor

from kvrepro.engine import allocate, shared
from kvrepro.engine.cache import RaggedLayer
from kvrepro.engine.condition import Condition, Prompt, SharedCap
from kvrepro.engine.observe import Observation
from kvrepro.engine.policy import Parameters, Policy, guarded, named, ours, parameters_of
from kvrepro.engine.shapes import Counts, Mask, Positions, RowFloats, RowInts, Scores, TokenInts
from kvrepro.engine.shared import Reduction, Signals
from kvrepro.errors import InputError, PolicyError

TOGETHER = {"torch": 0, "triton": 2**28}  # bytes of layers that are decided together to save launches, by backend
Observed = dict[int, Observation]  # layers, as a job observes them


@dataclass
class Prompts:
    """Positions, spans and whitelists of the tokens to compress: `[batch, tokens]`, flush right, -1 where padded."""

    positions: TokenInts
    spans: Sequence[dict[str, list[int]]]
    seeds: Sequence[int] = ()  # of each row's draws; (): 0
    ends: Sequence[int] = ()  # tokens that a condition compresses of each row; (): all

    def __post_init__(self) -> None:
        self.seeds = self.seeds or [0] * len(self.positions)
        self.lengths = (self.positions >= 0).sum(1)
        self.ends = self.ends or self.lengths.tolist()

    @classmethod
    def of(cls, texts: Sequence[Prompt], device: torch.device, *of_rows: Sequence[int]) -> "Prompts":
        """The prompts of whole texts, including what is not compressed. of_rows: `seeds` and `ends`."""
        lengths = torch.tensor([len(t.ids) for t in texts], device=device)[:, None]
        at = torch.arange(int(lengths.max()), device=device)
        return cls(torch.where(at < lengths, at, -1), [t.spans for t in texts], *of_rows)

    def span_of(self, names: tuple[str, ...], extended: bool = True) -> Tensor:
        """The number of the span that each position lies in, int64 [batch, tokens]; see `allocate.number_spans`."""
        rows = []
        for spans, n in zip(self.spans, self.lengths.tolist(), strict=True):
            chosen = [[at for at in spans[name] if at < n] for name in (names or spans)]
            numbers = allocate.number_spans(n, [span for span in chosen if span], extended)
            rows.append(torch.nn.functional.pad(numbers, (0, self.positions.shape[1] - n), value=int(numbers[-1])))
        return torch.stack(rows).to(self.positions.device)

    def whitelisted(self, names: tuple[str, ...], o: Observation) -> Mask:
        """The tokens of `o` that lie in one of the named spans. Source: leakage paper, section 5.1 (the set S_req)."""
        table = torch.zeros(len(self.positions), self.positions.shape[1] + 1, dtype=torch.bool)  # the last: all later
        for row, spans in zip(table[:, :-1], self.spans, strict=True):
            row[[at for name in names for at in spans[name] if at < len(row)]] = True
        at = o.positions.flatten(1).clamp(0, table.shape[1] - 1)
        return o.alive & table.to(at.device).repeat(o.count, 1).gather(1, at).view_as(o.positions)


@dataclass
class EvictionJob:
    """Rows of one policy whose conditions, one per row, differ at most in budget and guards."""

    conditions: list[Condition]
    evictor: Policy | None  # None: everything stays
    parameters: dict[str, Any]
    budgets: list[int]  # tokens per KV head
    prompts: Prompts
    draws: list[Random] = field(default_factory=list)  # a generator per row, for policies that draw
    layers: dict[int, RaggedLayer] = field(default_factory=dict)  # the kept tokens of the layers decided so far
    pending: dict[int, Observation] = field(default_factory=dict)  # the layers whose evictions wait for the others
    judged: dict[int, tuple[Scores, Mask, Tensor | None]] = field(default_factory=dict)  # scores, protected, summary
    counts: dict[int, Counts] = field(default_factory=dict)  # of a reader's own `allocate`, by layer
    signals: Signals | None = None  # of `SharedCap`, after the prompt
    error: Exception | None = None  # raised by its policy
    # positions and `span_local` of the last `protected_by`, and its result
    protected: tuple[Positions, bool, Mask, Mask] | None = None

    def __post_init__(self) -> None:
        c, p = self.conditions[0], self.evictor
        self.condition = c  # the others differ at most in budget and guards
        self.kind = c.policy, c.reading, c.switches, c.static_suffix, c.whitelist  # equal: can be decided together
        self.window = int(self.parameters.get("window", 0) or 0)  # queries that its policy looks at
        self.repeated = p.repeated if p else set()  # the sums that its policy needs from a repetition of the context
        self.reduction: Reduction | None = None  # of attention over layers, if one set of tokens serves all of them
        self.first_step = 0  # `SharedCap`: of the first reduction
        if p and isinstance(c.regime, SharedCap):
            per_head = self.parameters["head_map"] if p.per_head else None
            self.reduction = Reduction(self.parameters["score_reduce"], per_head)
            self.first_step = p.first_step(self.parameters)
        self.pages: tuple[int, int, int] | None = None  # (page, dense layers, budget) of what evicts nothing
        if p is None and c.policy != "full":
            self.pages = self.parameters["page"], self.parameters["dense_layers"], self.budgets[0]
        # must every layer be seen before any token can leave?
        self.waits = p is not None and (p.across is not None or bool(self.repeated) or self.reduction is not None)
        self.own = p is not None and not all(map(ours, p.functions))  # a reader's functions decide
        # may several layers be judged as the rows of one? A reader's own functions always see one at a time
        self.together = p is not None and p.together and c.fair is None and not self.own
        self.sums = p.needed(self.parameters) if p and self.reduction is None else set()  # that its policy needs
        if c.fair is not None and "mass" in self.sums:  # span-local attention takes the place of all attention
            self.sums.add("span_mass" if self.parameters.get("extended", True) else "marked_mass")

    @property
    def policy(self) -> Policy:
        assert self.evictor is not None, "everything stays"
        return self.evictor

    @classmethod
    def joined(cls, jobs: Sequence["EvictionJob"], texts: Sequence[Prompt], device: torch.device) -> "EvictionJob":
        """Rows of one kind as one job; `texts` are their whole prompts."""
        conditions, budgets, draws = (
            [each for job in jobs for each in getattr(job, name)] for name in ("conditions", "budgets", "draws")
        )
        seeds, ends = ([each for job in jobs for each in getattr(job.prompts, name)] for name in ("seeds", "ends"))
        prompts = Prompts.of(texts, device, seeds, ends)
        return cls(conditions, jobs[0].evictor, jobs[0].parameters, budgets, prompts, draws)

    def row(self, b: int) -> "EvictionJob":
        """One row alone, with nothing kept yet."""
        p, at, draws = self.prompts, slice(b, b + 1), self.draws[b : b + 1]
        alone = Prompts(p.positions[at], p.spans[at], p.seeds[at], p.ends[at])
        return EvictionJob(self.conditions[at], self.evictor, self.parameters, self.budgets[at], alone, draws)

    @cached_property
    def budget(self) -> RowInts:
        """int64 [batch]."""
        return torch.tensor(self.budgets, device=self.prompts.positions.device)

    @cached_property
    def asked(self) -> RowFloats:
        """The budgets before rounding: a condition's share of the tokens to compress. float64 [batch]."""
        rows = zip(self.conditions, self.budgets, self.prompts.ends, strict=True)
        exact = [(c.budget * n if isinstance(c.budget, float) else size, size) for c, size, n in rows]
        asked = [each if int(each + 1e-9) == size else size for each, size in exact]  # else a chunk's, or a window's
        return torch.tensor(asked, dtype=torch.float64, device=self.prompts.positions.device)

    def budget_in(self, o: Observation) -> RowInts:
        """`budget` on the device of `o`, repeated for each layer that `o` stands for."""
        return self.budget.to(o.positions.device).repeat(o.count)

    def asked_by(self, function: Callable[..., Any], o: Observation) -> dict[str, RowFloats]:
        """`asked`, for `o` as `budget_in`, if the function names it."""
        if "asked" not in parameters_of(function):
            return {}
        return {"asked": self.asked.to(o.positions.device).repeat(o.count)}


@contextmanager
def attempt(job: EvictionJob) -> Iterator[None]:
    """Run a step of a job. An error of its policy becomes `job.error`, and the other jobs go on."""
    try:
        yield
    except torch.OutOfMemoryError:  # concerns the whole batch, not this job
        raise
    except Exception as error:  # a reader's policy may raise anything
        job.error = error
        if isinstance(error, InputError) and job.own:
            job.error = PolicyError(str(error)).with_traceback(error.__traceback__)
        for known in (job.layers, job.pending, job.judged):
            known.clear()


def generator(parameters: Mapping[str, Any], ids: Sequence[int]) -> Random:
    """A row's generator: with seed 42, or with a seed that mixes 42 and the prompt, so that draws differ between items
    but do not depend on their order."""
    if parameters.get("random_seed") == "per_item":
        return Random(42)
    return Random(int.from_bytes(hashlib.sha256(str([42, *ids]).encode()).digest()[:8]))


# ---- the steps of an eviction


def call(function: Callable[..., Any], *arguments: object, parameters: Parameters) -> Any:
    """Call `function` with those of `parameters` that it names. A reader's own function gets copies, so that writing in
    place does not change other conditions."""
    given = named(function, parameters)
    if not ours(function):
        arguments, given = copied(arguments), copied(given)
    return function(*arguments, **given)


def copied(value: Any) -> Any:
    """A copy of the value with all its tensors copied, also inside lists, mappings and an observation."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, Observation):
        return replace(value, **{f.name: copied(getattr(value, f.name)) for f in fields(value)})
    if isinstance(value, Mapping):
        return {name: copied(element) for name, element in value.items()}
    return type(value)(map(copied, value)) if type(value) in (list, tuple) else value


def guards(job: EvictionJob, o: Observation, *, follow: bool = False) -> Mask:
    """Tokens that the conditions protect, `[batch, kv_heads, tokens]`. follow: a static suffix follows the newest."""
    device, n = o.positions.device, o.count
    sides = [guarded(c, size, job.parameters) for c, size in zip(job.conditions, job.budgets, strict=True)] * n
    prefix, suffix = sides[0] if len(set(sides)) == 1 else torch.tensor(sides, device=device)[..., None, None].unbind(1)
    static = job.condition.static_suffix and not follow
    end = job.prompts.lengths.to(device).repeat(n)[:, None, None] if static else None
    mask = allocate.ends(o, prefix, suffix, end)
    if job.condition.whitelist:
        mask = mask | job.prompts.whitelisted(job.condition.whitelist, o)
    if job.parameters.get("empty_suffix") == "keeps_newest" and not job.policy.per_head:
        bare = torch.tensor([bool(first and not last) for first, last in sides], device=device)
        mask = mask | bare[:, None, None]  # as run, an empty suffix slice protects every token
    return mask


def _ensured(job: EvictionJob, role: str, given: Any, shape: Sequence[int], kind: torch.dtype | None = None) -> Tensor:
    """What a policy's function `role` returned, expanded to the shape. Raises InputError for anything but a tensor of
    dtype `kind` (None: any that is real) and of this shape, or with 1 in the place of a size."""
    sizes = given.shape if isinstance(given, Tensor) else ()
    fits = len(sizes) == len(shape) and all(a in (1, b) for a, b in zip(sizes, shape, strict=True))
    if not fits or given.dtype.is_complex or kind not in (None, given.dtype):
        what = f"{given.dtype} {tuple(sizes)}" if isinstance(given, Tensor) else type(given).__name__
        raise InputError(f"{job.policy.title}'s {role} returned {what}, not {kind or torch.float32} {tuple(shape)}")
    return given.expand(shape)


def _ranked(job: EvictionJob, role: str, given: Any, o: Observation) -> Scores:
    """The scores that `role` returned: above -inf for living tokens, and -inf for dead slots alone."""
    scores = _ensured(job, role, given, o.positions.shape)
    scores = scores if scores.dtype == torch.float64 and job.reduction is not None else scores.float()
    return scores.clamp(min=torch.finfo(torch.float32).min).masked_fill((~o.alive).to(scores.device), -torch.inf)


def protected_by(job: EvictionJob, o: Observation) -> tuple[Mask, Mask]:
    """(tokens that the conditions protect; those together with the method's own recent tokens and sinks), both `[batch,
    kv_heads, tokens]`. They do not depend on scores, so layers that hold the same tokens share the result."""
    if job.protected is None or job.protected[0] is not o.positions or job.protected[1] != o.span_local:
        by_conditions = guards(job, o).expand(o.positions.shape)
        newest = job.parameters.get("recent", 0)
        recent = o.window if o.span_local and newest else allocate.recent(o, newest)
        by_either = (by_conditions | recent | allocate.sinks(o, job.parameters.get("sinks", 0))) & o.alive
        job.protected = o.positions, o.span_local, by_conditions, by_either
    return job.protected[2:]


def score_and_protect(job: EvictionJob, o: Observation) -> tuple[Scores, Mask]:
    """(scores, protected), both `[batch, kv_heads, tokens]`: protected by the conditions and by the method itself.
    Scores are shared between conditions if they depend on neither budget nor guards nor draws."""
    policy, budget, (guarded, protected) = job.policy, job.budget_in(o), protected_by(job, o)
    varying = {"budget": budget, "guarded": guarded, "draws": job.draws, **job.asked_by(policy.score, o)}
    given = named(policy.score, {**job.parameters, **varying})
    shareable = not varying.keys() & given.keys() and all(isinstance(value, Hashable) for value in given.values())
    known, key = (o.scored, (policy.score, *sorted(given.items()))) if shareable else ({}, None)
    if key not in known:
        known[key] = call(policy.score, o, parameters=given)
    scores = _ranked(job, "scorer", known[key], o)
    if policy.shield is not None:
        shield = call(policy.shield, o, scores, budget, parameters={**job.parameters, "guarded": guarded})
        shield = _ensured(job, "shield", shield, o.positions.shape, torch.bool) & o.alive
        if job.reduction is None:
            protected = protected | shield
        else:  # shielded tokens leave as a last resort
            scores = scores.masked_fill(shield, torch.inf)
    if job.reduction is not None and job.reduction.head_map is None and job.parameters["guardrail"] == "ignores":
        scores, protected = scores.masked_fill(protected, torch.inf), torch.zeros_like(o.alive)
    return scores, protected


def allocated(job: EvictionJob, o: Observation, scores: Scores, protected: Mask) -> Counts:
    """Tokens that each head of a layer keeps."""
    given = {**job.parameters, "o": o, **job.asked_by(job.policy.allocate, o)}
    counts = call(job.policy.allocate, scores, protected, job.budget_in(o), parameters=given)
    counts = _ensured(job, "allocate", counts, scores.shape[:2], torch.int64)
    if not ours(job.policy.allocate) and job.reduction is None:  # a union of heads is trimmed to the budget
        job.counts[o.layer] = counts
        if o.layer == o.layers - 1:
            _ensure_budget(job)
    return counts


def _ensure_budget(job: EvictionJob) -> None:
    """Raise InputError if a reader's own function lets all layers together keep more than the budget."""
    counts = torch.cat([of_layer.to(job.budget.device) for of_layer in job.counts.values()], 1)
    heads, kept = counts.shape[1], counts.sum(1)
    if bool((kept > heads * job.budget).any()):
        limit = f"{heads} KV heads of all layers x its budget of {job.budgets}"
        raise InputError(f"{job.policy.title}'s counts sum to {kept.tolist()} tokens, more than {limit}: lower them")


def selected(
    job: EvictionJob, o: Observation, scores: Scores, protected: Mask, counts: Counts, default: Mask | None = None
) -> Mask:
    """The tokens that stay, `[batch, kv_heads, tokens]`, `counts` per head; by quotas if the observation is span-local.
    default: what the policy keeps without quotas, which a mixed split needs."""
    policy, p = job.policy, job.parameters
    if job.reduction is not None:
        return _selected_for_all_layers(job, o, scores, protected, counts)
    quotas = o.span_local and not p.get("ramps")  # with ramps, the public code sets none
    if policy.refine is None and not quotas:
        return allocate.select(scores, protected, counts)
    refined, more = scores, torch.zeros_like(o.alive)
    if policy.refine is not None:
        refined, more = call(policy.refine, o, scores, counts, parameters={**p, "protected": protected})
        refined = _ensured(job, "refine", refined, scores.shape)
        more = _ensured(job, "refine", more, scores.shape, torch.bool) & o.alive
    if not quotas:
        return allocate.select(refined, protected | more, counts)
    sinks, lowest = allocate.sinks(o, p.get("sinks", 0)), torch.finfo(scores.dtype).min
    window = protected & o.window & ~(protected_by(job, o)[0] | sinks)
    # the window gives way to the spans' shares, after all other tokens
    protected, refined = protected & ~window, refined.masked_fill(window, -lowest)
    # the public code rounds down; the paper rounds to the nearest and leaves the sinks out (section 5.2, E.3)
    how = {} if job.condition.reading == "as_run" else {"apart": sinks, "rounding": "round"}
    parts = allocate.split(o, counts, protected, job.condition.fair, default, **how)
    first = torch.minimum(parts, allocate.tally(o, protected | more))  # exempt tokens, as far as each span has room
    exempt = allocate.select_parts(scores.masked_fill(~more, lowest), protected, first, o)
    return allocate.select_parts(refined, protected | exempt, parts, o)


def _selected_for_all_layers(job: EvictionJob, o: Observation, scores: Scores, protected: Mask, counts: Counts) -> Mask:
    """`selected` of `SharedCap`: ties in the policy's order, shielded tokens by age in either reading; heads that
    choose for themselves have their union cut."""
    tie_break = job.parameters["tie_break"]
    if not job.policy.per_head:
        by_age = shared.tie_key(o, ("last_use", "entered"), "integer")
        ties = torch.where(scores.isposinf(), by_age, shared.tie_key(o, job.policy.ties or (), tie_break))
        return allocate.select(scores, protected, counts, ties.masked_fill(protected, torch.iinfo(ties.dtype).max))
    heads = allocate.select(scores, protected, counts, shared.position_rank(o.positions, tie_break))
    if job.condition.static_suffix and job.parameters["trim_guard"] == "dynamic":
        protected = guards(job, o, follow=True)
    return shared.trim_union(heads, scores, protected, o, job.budget_in(o), tie_break)


def select_tokens(job: EvictionJob, o: Observation, default: Mask | None = None) -> Mask:
    """The tokens that stay in the layers that `o` shows."""
    scores, protected = score_and_protect(job, o)
    return selected(job, o, scores, protected, allocated(job, o, scores, protected), default)


# ---- policies that wait for every layer


def postpone(job: EvictionJob, observed: Observed, o: Observation, last: bool = False) -> None:
    """Let the layers `observed`, together seen as `o`, wait for the others. They are scored at once, unless their
    scorer needs what comes later. last: nothing more will come."""
    job.pending |= observed
    if not last and (job.repeated or job.reduction is not None):
        return
    scores, protected = score_and_protect(job, o)
    summary = None if job.policy.summary is None else call(job.policy.summary, o, parameters=job.parameters)
    summaries = [None] * len(observed) if summary is None else summary.chunk(len(observed))
    results = zip(scores.chunk(len(observed)), protected.chunk(len(observed)), summaries, strict=True)
    job.judged |= dict(zip(observed, results, strict=True))
    job.pending |= {n: replace(each) for n, each in observed.items()}  # drops cached properties, such as the attention


def across(job: EvictionJob) -> dict[int, Mask]:
    """The tokens that stay in each layer, chosen with all layers' scores; layers may lie on several devices."""
    for n, o in job.pending.items():
        if n not in job.judged:
            postpone(job, {n: o}, o, last=True)
    seen, home, function = job.pending, job.budget.device, job.policy.across
    scores, protected = [s.to(home) for s, _, _ in job.judged.values()], [p.to(home) for _, p, _ in job.judged.values()]
    if function is None:
        counts = [allocated(job, seen[n], s, p) for n, (s, p, _) in job.judged.items()]
    else:
        summaries = [None if x is None else x.to(home) for _, _, x in job.judged.values()]
        given = {"observations": list(seen.values()), "summaries": summaries, "asked": job.asked}
        scores, counts = call(function, scores, protected, job.budget, parameters=job.parameters | given)
        if not ours(function):
            scores, counts = _ensured_across(job, scores, counts)
    if job.policy.refine is None and job.condition.fair is None and len({s.shape for s in scores}) == 1:
        stays = allocate.select(torch.cat(scores), torch.cat(protected), torch.cat(counts)).chunk(len(scores))
        return {n: s.to(o.positions.device) for (n, o), s in zip(seen.items(), stays, strict=True)}
    return {
        n: selected(job, o, *(x.to(o.positions.device) for x in of))
        for (n, o), *of in zip(seen.items(), scores, protected, counts, strict=True)
    }


def _ensured_across(
    job: EvictionJob, scores: Sequence[Any], counts: Sequence[Any]
) -> tuple[list[Scores], list[Counts]]:
    """What a reader's own `across` returned, one of each for every layer. Raises InputError for other tensors."""
    seen = list(job.pending.values())
    ranked = [_ranked(job, "across (scores)", s, o) for o, s in zip(seen, scores, strict=True)]
    for i, (s, count) in enumerate(zip(ranked, counts, strict=True)):
        job.counts[i] = _ensured(job, "across (counts)", count, s.shape[:2], torch.int64)
    _ensure_budget(job)
    return ranked, list(job.counts.values())


def evict_shared(job: EvictionJob, signals: Signals, step: int) -> Signals:
    """The state of rows after a reduction at `step`; rows at or below their budget keep all living tokens."""
    alive = signals.held.any(1)
    over = alive.sum(1) > job.budget
    if not bool(over.any()):
        return signals
    o, place = signals.observe(step)
    stays = select_tokens(job, o)
    held = torch.zeros_like(signals.held).scatter(2, place[:, None].expand_as(stays), stays)
    held = torch.where(over[:, None, None], held, alive[:, None])
    gone = alive.sum(1) - held.any(1).sum(1)
    return replace(signals, held=held, evicted=signals.evicted + gone)


# ---- layer after layer


@dataclass
class Decisions:
    """Lets jobs decide layer after layer which tokens stay. Neighbouring layers that are alike are decided as rows of
    one, up to `TOGETHER` bytes of them."""

    jobs: Sequence[EvictionJob]
    backend: str
    hold: Callable[[EvictionJob, Observed, Observation, Mask], None]  # is told what stays of layers, also as one
    waiting: dict[int, list[Observation | None]] = field(default_factory=dict)  # by layer, as each job observes it
    alike: list[Any] = field(default_factory=list)  # what the waiting layers have in common

    def see(self, layer: int, keys: Tensor, observe: Callable[[EvictionJob, bool], Observation]) -> None:
        """A layer with its keys. observe: how a job observes it, with the quotas of its condition or without."""
        waits: list[Observation | None] = [None] * len(self.jobs)
        most = TOGETHER[self.backend]
        for number, job in enumerate(self.jobs):
            with attempt(job):
                fair = job.condition.fair
                o = observe(job, fair is not None) if job.error is None else None
                if o is not None and most and job.together:
                    waits[number] = o
                elif o is not None:  # a mixed split also needs the policy's choice without quotas
                    plain = None if fair in (None, 1) else select_tokens(job, observe(job, False))
                    self.decide([(job, {layer: o}, o, plain)])
        alike = [o and (o.keys.device, o.keys[:, :, :0].shape, o.sliding, o.scaling, id(o.softmax)) for o in waits]
        if alike != self.alike or (len(self.waiting) + 1) * 2 * keys.nbytes > most:
            self.decide(self.joined())
        if any(waits):
            self.waiting[layer], self.alike = waits, alike

    def joined(self) -> Iterator[tuple[EvictionJob, Observed, Observation, None]]:
        """The waiting layers of each job, and together as one observation; they wait no more."""
        waiting, self.waiting = self.waiting, {}
        known: dict[int, Observation] = {}  # jobs may share observations
        for job, *layers in zip(self.jobs, *waiting.values(), strict=True):
            observed = {n: o for n, o in zip(waiting, layers, strict=True) if o is not None}
            if observed and job.error is None:
                first = id(layers[0])
                if first not in known:
                    known[first] = Observation.together(list(observed.values()))
                yield job, dict(zip(observed, known[first].of or [known[first]], strict=True)), known[first], None

    def decide(self, ready: Iterable[tuple[EvictionJob, Observed, Observation, Mask | None]]) -> None:
        """Decide layers of jobs, together observed as one; the masks are what stays without quotas."""
        for job, observed, o, plain in ready:
            with attempt(job):
                if job.waits:
                    postpone(job, observed, o)
                else:
                    self.hold(job, observed, o, select_tokens(job, o, plain))

    def finish(self) -> None:
        """Decide what waits, also for policies that had to see every layer."""
        self.decide(self.joined())
        for job in [job for job in self.jobs if job.pending and job.reduction is None]:
            with attempt(job):
                for layer, stays in across(job).items():
                    self.hold(job, {layer: job.pending[layer]}, job.pending[layer], stays)
            job.pending.clear()
            job.judged.clear()
