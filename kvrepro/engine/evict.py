"""Which tokens stay: the same steps for every regime.

scores, protected = score_and_protect(job, o)               # [batch, kv_heads, tokens] each
counts            = allocate(scores, protected, budget)     # [batch, kv_heads]
kept              = select(scores, protected, counts)

`select_tokens` takes these steps for one layer, `across` for policies that must see every layer before they choose. In
the regime `SharedCap` one observation, made of `signals`, stands for all layers.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from random import Random
from typing import Any

import torch
from torch import Tensor

from kvrepro.engine import allocate, shared
from kvrepro.engine.allocate import select
from kvrepro.engine.cache import RaggedLayer
from kvrepro.engine.condition import Condition, DecodeCap, PerStep, Prompt, SharedCap
from kvrepro.engine.observe import Observation
from kvrepro.engine.policy import SUMS, Policy, call, guarded, named, ours, parameters_of
from kvrepro.engine.shapes import Counts, Mask, Positions, RowFloats, RowInts, Scores, TokenInts
from kvrepro.engine.shared import Reduction, Signals
from kvrepro.errors import InputError

TOGETHER = {"torch": 0, "triton": 2**27}  # bytes of layers that are decided together to save launches, by backend


@dataclass
class Prompts:
    """Positions, spans and whitelists of the tokens to compress: `[batch, tokens]`, flush right, -1 where padded."""

    positions: TokenInts
    spans: Sequence[dict[str, list[int]]]
    seeds: Sequence[int] = ()  # of each row's draws; (): 0

    def __post_init__(self) -> None:
        self.seeds = self.seeds or [0] * len(self.positions)
        self.lengths = (self.positions >= 0).sum(1)

    @classmethod
    def of(cls, texts: Sequence[Prompt], device: torch.device, seeds: Sequence[int] = ()) -> "Prompts":
        """The prompts of whole texts, including what is not compressed."""
        lengths = torch.tensor([len(t.ids) for t in texts], device=device)[:, None]
        at = torch.arange(int(lengths.max()), device=device)
        return cls(torch.where(at < lengths, at, -1), [t.spans for t in texts], seeds)

    def span_of(self, names: tuple[str, ...], extended: bool = True) -> Tensor:
        """The number of the span that each position lies in, int64 [batch, tokens]; see `allocate.number_spans`."""
        rows = []
        for spans, n in zip(self.spans, self.lengths.tolist(), strict=True):
            chosen = [[at for at in spans[name] if at < n] for name in (names or spans)]
            numbers = allocate.number_spans(n, [span for span in chosen if span], extended)
            rows.append(torch.nn.functional.pad(numbers, (0, self.positions.shape[1] - n), value=int(numbers[-1])))
        return torch.stack(rows).to(self.positions.device)

    def whitelisted(self, names: tuple[str, ...]) -> Tensor:
        """Whether each position lies in one of the named spans, bool [batch, tokens]."""
        table = torch.zeros(self.positions.shape, dtype=torch.bool)
        for row, spans in enumerate(self.spans):
            table[row, [at for name in names for at in spans[name] if at < table.shape[1]]] = True
        return table.to(self.positions.device)


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

    @property
    def policy(self) -> Policy:
        assert self.evictor is not None, "everything stays"
        return self.evictor

    @property
    def condition(self) -> Condition:
        """The first row's condition; the others differ at most in budget and guards."""
        return self.conditions[0]

    @property
    def kind(self) -> tuple[Any, ...]:
        """Rows of equal kind can be decided together."""
        c = self.condition
        return c.policy, c.reading, c.switches, c.static_suffix, c.whitelist

    @classmethod
    def joined(cls, jobs: Sequence["EvictionJob"], texts: Sequence[Prompt], device: torch.device) -> "EvictionJob":
        """Rows of one kind as one job; `texts` are their whole prompts."""
        conditions, budgets, draws = (
            [each for job in jobs for each in getattr(job, name)] for name in ("conditions", "budgets", "draws")
        )
        seeds = [seed for job in jobs for seed in job.prompts.seeds]
        prompts = Prompts.of(texts, device, seeds)
        return cls(conditions, jobs[0].evictor, jobs[0].parameters, budgets, prompts, draws)

    def row(self, b: int) -> "EvictionJob":
        """One row alone, with nothing kept yet."""
        p, row = self.prompts, slice(b, b + 1)
        alone = Prompts(p.positions[row], p.spans[row], p.seeds[row])
        return EvictionJob(
            self.conditions[row], self.evictor, self.parameters, self.budgets[row], alone, self.draws[row]
        )

    @cached_property
    def budget(self) -> RowInts:
        """int64 [batch]."""
        return torch.tensor(self.budgets, device=self.prompts.positions.device)

    @cached_property
    def asked(self) -> RowFloats:
        """The budgets before rounding: a condition's share of the tokens to compress. float64 [batch]."""
        rows = zip(self.conditions, self.budgets, self.prompts.lengths.tolist(), strict=True)
        exact = [(c.budget * n if isinstance(c.budget, float) else size, size) for c, size, n in rows]
        asked = [each if int(each + 1e-9) == size else size for each, size in exact]  # size: of a part of the prompt
        return torch.tensor(asked, dtype=torch.float64, device=self.prompts.positions.device)

    def budget_in(self, o: Observation) -> RowInts:
        """`budget` on the device of `o`, repeated for each layer that `o` stands for."""
        return self.budget.to(o.positions.device).repeat(o.count)

    def asked_by(self, function: Callable[..., Any], o: Observation | None = None) -> dict[str, RowFloats]:
        """`asked`, for `o` as `budget_in`, if the function names it: its first use waits for the GPU."""
        if "asked" not in parameters_of(function):
            return {}
        return {"asked": self.asked if o is None else self.asked.to(o.positions.device).repeat(o.count)}

    @property
    def pages(self) -> tuple[int, int, int] | None:
        """(page, dense layers, budget) of a policy that selects pages at each step and evicts nothing."""
        if self.condition.policy == "full" or (self.evictor is not None and self.evictor.frees):
            return None
        return int(self.parameters.get("page", 16)), int(self.parameters.get("dense_layers", 2)), self.budgets[0]

    @property
    def again(self) -> bool:
        """Does it evict again while tokens are generated?"""
        return isinstance(self.condition.regime, DecodeCap | PerStep)

    @property
    def reduction(self) -> Reduction | None:
        """How attention is reduced over layers, where one set of tokens serves all of them."""
        if self.evictor is None or not isinstance(self.condition.regime, SharedCap):
            return None
        return Reduction(self.parameters["score_reduce"], self.parameters["head_map"] if self.policy.per_head else None)

    @property
    def first_step(self) -> int:
        """`SharedCap`: the step of the first reduction."""
        return self.policy.first_step(self.parameters)

    @property
    def repeated(self) -> set[str]:
        """The sums that its policy needs from a repetition of the context."""
        return self.evictor.repeated if self.evictor is not None else set()

    @property
    def waits(self) -> bool:
        """Must every layer be seen before any token can leave?"""
        if self.evictor is None:
            return False
        return self.evictor.across is not None or bool(self.repeated) or self.reduction is not None

    @cached_property
    def together(self) -> bool:
        """May several layers be judged as the rows of one layer? A reader's own functions always see one at a time."""
        if self.evictor is None or self.condition.fair is not None:
            return False
        return self.evictor.together and all(ours(function) for function in self.evictor.functions)

    @property
    def sums(self) -> set[str]:
        """The sums that its policy needs; under `fair`, span-local attention takes the place of all attention."""
        needs = self.evictor.needed(self.parameters) if self.evictor else set()
        if self.condition.fair is not None and "mass" in needs:
            needs.add("span_mass" if self.parameters.get("extended", True) else "marked_mass")
        return needs if self.reduction is None else set()

    @property
    def window(self) -> int:
        """Queries that its policy looks at."""
        return int(self.parameters.get("window", 0) or 0)


@contextmanager
def attempt(job: EvictionJob) -> Iterator[None]:
    """Run a step of a job. An error of its policy becomes `job.error`, and the other jobs go on."""
    try:
        yield
    except torch.OutOfMemoryError:  # concerns the whole batch, not this job
        raise
    except Exception as error:  # a reader's policy may raise anything
        job.error = error
        job.layers.clear()
        job.pending.clear()
        job.judged.clear()


def generator(parameters: Mapping[str, Any], ids: Sequence[int]) -> Random:
    """A row's generator: with seed 42, or with a seed that mixes 42 and the prompt, so that draws differ between items
    but do not depend on their order."""
    if parameters.get("random_seed") == "per_item":
        return Random(42)
    return Random(int.from_bytes(hashlib.sha256(str([42, *ids]).encode()).digest()[:8]))


# ---- the steps of an eviction


def guards(job: EvictionJob, o: Observation, *, follow: bool = False) -> Mask:
    """Tokens that the conditions protect, `[batch, kv_heads, tokens]`. follow: a static suffix follows the newest."""
    device, n = o.positions.device, o.count
    sides = [guarded(c, size, job.parameters) for c, size in zip(job.conditions, job.budgets, strict=True)] * n
    prefix, suffix = sides[0] if len(set(sides)) == 1 else torch.tensor(sides, device=device)[..., None, None].unbind(1)
    static = job.condition.static_suffix and not follow
    end = job.prompts.lengths.to(device).repeat(n)[:, None, None] if static else None
    mask = allocate.ends(o, prefix, suffix, end)
    if job.condition.whitelist:
        mask = mask | allocate.whitelist(o, job.prompts.whitelisted(job.condition.whitelist).to(device).repeat(n, 1))
    if job.parameters.get("empty_suffix") == "keeps_newest" and not job.policy.per_head:
        bare = torch.tensor([bool(first and not last) for first, last in sides], device=device)
        mask = mask | bare[:, None, None]  # as run, an empty suffix slice protects every token
    return mask


def _ensured(policy: Policy, role: str, returned: Any, shape: Sequence[int], kind: torch.dtype | None = None) -> Tensor:
    """What a policy's function `role` returned, expanded to the shape. Raises InputError for anything but a tensor of
    dtype `kind` (None: any that is real) and of this shape, or with 1 in the place of a size."""
    given = tuple(returned.shape) if isinstance(returned, Tensor) else ()
    if len(given) != len(shape) or any(a not in (1, b) for a, b in zip(given, shape, strict=True)):
        description = f"a tensor of shape {given}" if given else f"{type(returned).__name__}"
        wanted = f"[{', '.join(('batch', 'kv_heads', 'tokens')[: len(shape)])}] = {tuple(shape)}"
        raise InputError(f"{policy.title}'s {role} returned {description}, not {wanted}")
    if returned.dtype.is_complex or kind not in (None, returned.dtype):
        wanted = kind or torch.float32
        raise InputError(f"{policy.title}'s {role} returned numbers of type {returned.dtype}, not {wanted}")
    return returned.expand(shape)


def _scored(policy: Policy, o: Observation, parameters: Mapping[str, Any]) -> Any:
    """The policy's scores, shared between conditions if they depend on neither budget nor guards nor draws."""
    given = named(policy.score, parameters)
    varies = {"budget", "asked", "guarded", "draws"}.intersection(given)
    if varies or not all(isinstance(value, str | int | float | tuple | None) for value in given.values()):
        return call(policy.score, o, parameters=given)
    key = (policy.score, *sorted(given.items()))
    if key not in o.scored:
        o.scored[key] = call(policy.score, o, parameters=given)
    return o.scored[key]


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
    """(scores, protected), both `[batch, kv_heads, tokens]`: protected by the conditions and by the method itself."""
    policy, shape = job.policy, o.positions.shape
    budget, (guarded, protected) = job.budget_in(o), protected_by(job, o)
    given = {"budget": budget, "guarded": guarded, "draws": job.draws, **job.asked_by(policy.score, o)}
    try:
        raw_scores = _scored(policy, o, {**job.parameters, **given})
    except KeyError as error:
        if error.args[0] not in SUMS:
            raise
        raise InputError(f"{policy.title} reads sums[{error.args[0]!r}], which its `needs` do not name") from error
    raw_scores = _ensured(policy, "scorer", raw_scores, shape)
    precise = raw_scores.dtype == torch.float64 and job.reduction is not None
    scores = _ranked(raw_scores if precise else raw_scores.float())
    if policy.shield is not None:
        shield = call(policy.shield, o, scores, budget, parameters={**job.parameters, "guarded": guarded})
        shield = _ensured(policy, "shield", shield, shape, torch.bool)
        if job.reduction is None:
            protected = (protected | shield) & o.alive
        else:  # shielded tokens leave as a last resort
            scores = scores.masked_fill(shield, torch.inf)
    if job.reduction is not None and job.reduction.head_map is None and job.parameters["guardrail"] == "ignores":
        scores, protected = scores.masked_fill(protected, torch.inf), o.nothing
    return scores.masked_fill(o.dead, -torch.inf), protected


def _ranked(scores: Tensor) -> Scores:
    """Scores of living tokens: above -inf, which is for dead slots alone."""
    return scores.clamp(min=torch.finfo(torch.float32).min)


def allocated(job: EvictionJob, o: Observation, scores: Scores, protected: Mask) -> Counts:
    """Tokens that each head of a layer keeps."""
    given = {**job.parameters, "o": o, **job.asked_by(job.policy.allocate, o)}
    counts = call(job.policy.allocate, scores, protected, job.budget_in(o), parameters=given)
    counts = _ensured(job.policy, "allocate", counts, scores.shape[:2], torch.int64)
    if not ours(job.policy.allocate) and job.reduction is None:  # a union of heads is trimmed to the budget
        job.counts[o.layer] = torch.minimum(counts, o.alive.sum(-1))
        if o.layer == o.layers - 1:
            _ensure_budget(job, job.counts)
    return counts


def _ensure_budget(job: EvictionJob, counts: Mapping[int, Counts]) -> None:
    """Raise InputError if a reader's own function lets all layers together keep more than the budget. counts: by number
    among the layers that evict; those below `dense_layers` stay whole."""
    dense: Any = job.parameters.get("dense_layers", 0)
    each = [of_layer.to(job.budget.device) for n, of_layer in counts.items() if n >= dense]
    heads, kept = sum(c.shape[1] for c in each), sum(c.sum(1) for c in each)
    over = kept - heads * job.budget
    if bool((over > 0).any()):
        row = int(over.argmax())
        limit = f"{heads} KV heads of all layers x its budget of {job.budgets[row]}"
        raise InputError(f"{job.policy.title}'s counts sum to {int(kept[row])} tokens, more than {limit}: lower them")


def selected(
    job: EvictionJob, o: Observation, scores: Scores, protected: Mask, counts: Counts, default: Mask | None = None
) -> Mask:
    """The tokens that stay, `[batch, kv_heads, tokens]`, `counts` per head; by quotas if the observation is span-local.
    default: what the policy keeps without quotas, which a mixed split needs."""
    policy = job.policy
    if job.reduction is not None:
        return _selected_for_all_layers(job, o, scores, protected, counts)
    quotas = _quotas(job, o, default)
    if policy.refine is None and quotas is None:
        return select(scores, protected, counts)
    refined, more = scores, o.nothing
    if policy.refine is not None:
        refined, more = call(policy.refine, o, scores, counts, parameters={**job.parameters, "protected": protected})
        refined = _ensured(policy, "refine", refined, scores.shape)
        more = _ensured(policy, "refine", more, scores.shape, torch.bool) & o.alive
    if quotas is None:
        return select(refined, protected | more, counts)
    firm = protected_by(job, o)[0] | allocate.sinks(o, job.parameters.get("sinks", 0))
    window = protected & o.window & ~firm  # gives way to the spans' shares, after all other tokens
    protected, refined = protected & ~window, refined.masked_fill(window, torch.finfo(scores.dtype).max)
    parts = allocate.split(o, counts, protected, **quotas)
    first = torch.minimum(parts, allocate.tally(o, protected | more))  # exempt tokens, as far as each span has room
    exempt = allocate.select_parts(scores.masked_fill(~more, torch.finfo(scores.dtype).min), protected, first, o)
    return allocate.select_parts(refined, protected | exempt, parts, o)


def _selected_for_all_layers(job: EvictionJob, o: Observation, scores: Scores, protected: Mask, counts: Counts) -> Mask:
    """`selected` of `SharedCap`: ties in the policy's order; heads that choose for themselves have their union cut."""
    tie_break, budget = job.parameters["tie_break"], job.budget.to(o.positions.device)
    if not job.policy.per_head:
        ties = shared.order(o, scores, job.policy.ties or (), tie_break)
        return select(scores, protected, counts, ties.masked_fill(protected, torch.iinfo(ties.dtype).max))
    heads = select(scores, protected, counts, shared.position_rank(o.positions, tie_break))
    firm = protected
    if job.condition.static_suffix and job.parameters["trim_guard"] == "dynamic":
        firm = guards(job, o, follow=True)
    return shared.trim_union(heads, scores, firm, o, budget, tie_break)


def select_tokens(job: EvictionJob, o: Observation, default: Mask | None = None) -> Mask:
    """The tokens that stay in the layers that `o` shows."""
    scores, protected = score_and_protect(job, o)
    return selected(job, o, scores, protected, allocated(job, o, scores, protected), default)


def _quotas(job: EvictionJob, o: Observation, default: Mask | None) -> dict[str, Any] | None:
    """How `allocate.split` shares a head's budget; None: no quotas. The public code rounds down and sets no quota with
    `ramps`; the paper rounds to the nearest and leaves the sinks out (section 5.2, E.3)."""
    if not o.span_local or job.parameters.get("ramps"):
        return None
    how = {"fair": job.condition.fair, "default": default}
    if job.condition.reading == "as_run":
        return how
    return {**how, "apart": allocate.sinks(o, job.parameters.get("sinks", 0)), "rounding": "round"}


# ---- policies that wait for every layer


def postpone(job: EvictionJob, seen: Mapping[int, Observation], o: Observation) -> None:
    """Let the layers `seen`, together observed as `o`, wait for the others. They are scored at once if their scorer
    needs nothing that comes later."""
    job.pending |= seen
    if not job.repeated and job.reduction is None:
        judge_pending(job, list(seen), o)


def judge_pending(job: EvictionJob, layers: Sequence[int], o: Observation) -> None:
    """Score waiting layers, which are together observed as `o`."""
    n = len(layers)
    scores, protected = score_and_protect(job, o)
    summary = None if job.policy.summary is None else call(job.policy.summary, o, parameters=job.parameters)
    summaries = [None] * n if summary is None else summary.chunk(n)
    for layer, *result in zip(layers, scores.chunk(n), protected.chunk(n), summaries, strict=True):
        job.pending[layer] = replace(job.pending[layer])  # drops cached properties, such as the attention
        job.judged[layer] = tuple(result)


def across(job: EvictionJob) -> dict[int, Mask]:
    """The tokens that stay in each layer, chosen with all layers' scores; layers may lie on several devices."""
    for n, o in job.pending.items():
        if n not in job.judged:
            judge_pending(job, [n], o)
    seen, layers, home = job.pending, job.judged, job.budget.device
    scores, protected = [s.to(home) for s, _, _ in layers.values()], [p.to(home) for _, p, _ in layers.values()]
    if job.policy.across is None:
        counts = [allocated(job, seen[n], s, p) for n, (s, p, _) in layers.items()]
    else:
        summaries = [None if x is None else x.to(home) for _, _, x in layers.values()]
        of_all_layers: dict[str, Any] = {"observations": list(seen.values()), "summaries": summaries}
        of_all_layers |= job.asked_by(job.policy.across)
        returned = call(job.policy.across, scores, protected, job.budget, parameters=job.parameters | of_all_layers)
        scores, counts = returned if ours(job.policy.across) else _ensured_across(job, returned)
    if job.policy.refine is None and job.condition.fair is None and len({s.shape for s in scores}) == 1:
        stays = select(torch.cat(scores), torch.cat(protected), torch.cat(list(counts))).chunk(len(layers))
        return {n: s.to(p.device) for (n, (_, p, _)), s in zip(layers.items(), stays, strict=True)}
    return {
        n: selected(job, seen[n], s.to(p.device), p, count.to(p.device))
        for (n, (_, p, _)), s, count in zip(layers.items(), scores, counts, strict=True)
    }


def _ensured_across(job: EvictionJob, returned: Any) -> tuple[list[Scores], list[Counts]]:
    """(scores, counts) of a reader's own `across`, one of each for every layer. Raises InputError for other tensors."""
    all_scores, all_counts = [], []
    kept: dict[int, Counts] = {}
    for n, scores, counts in zip(job.judged, *returned, strict=True):
        dead, shape = job.pending[n].dead, job.judged[n][0].shape
        scores = _ranked(_ensured(job.policy, "across (scores)", scores, shape).float())
        all_scores.append(scores.masked_fill(dead.to(scores.device), -torch.inf))
        all_counts.append(_ensured(job.policy, "across (counts)", counts, shape[:2], torch.int64))
        kept[len(kept)] = torch.minimum(all_counts[-1], (~all_scores[-1].isneginf()).sum(-1))
    _ensure_budget(job, kept)
    return all_scores, all_counts


def evict_shared(job: EvictionJob, signals: Signals, step: int) -> Signals:
    """The state of rows after a reduction at `step`; rows at or below their budget keep all living tokens."""
    alive = signals.held.any(1)
    over = alive.sum(1) > job.budget
    if not bool(over.any()):
        return signals
    o, place = signals.observe(step)
    stays = select_tokens(job, o)
    heads = stays.shape[1]
    where = place[:, None].expand(-1, heads, -1)
    held = torch.zeros_like(signals.held).scatter(2, where, stays)
    held = torch.where(over[:, None, None], held, alive[:, None])
    gone = alive.sum(1) - held.any(1).sum(1)
    return replace(signals, held=held, evicted=signals.evicted + gone)
