"""Eviction while the model runs: who attends during a prompt, during what follows it, and what leaves when.

`Prefill` lets one forward pass of a prompt serve many conditions, each layer reduced as soon as it is computed.
`Extend` lets rows that hold a cache of their own go on, by a chunk, a question or one token. `reduce` evicts from
such rows.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedModel

from kvrepro.engine import allocate, guard, quota
from kvrepro.engine.attention import attend, attend_prompt
from kvrepro.engine.cache import SLIDE, EngineCache, RaggedLayer
from kvrepro.engine.condition import Condition
from kvrepro.engine.condition import Prompt as Text
from kvrepro.engine.observe import Observation
from kvrepro.engine.policy import Policy, call, counts_of, guarded, judge, keep
from kvrepro.engine.select import best
from kvrepro.engine.shapes import KeyValue, Mask, Query, RowInts, Scores, TokenInts
from kvrepro.errors import InputError

DECODING = ("decode cap", "per step")  # regimes that evict again while tokens are generated
LOW_QUERIES = 400  # Scissorhands' history window
SPAN_SUMS = {"span_mass", "marked_mass"}
REPEATED = {"reconstruction", "reconstruction_per_norm"}  # what comes of repeating the context


@dataclass(frozen=True)
class Facts:
    """What the engine must know of a model: which layers hold tokens to evict, and each one's output projection."""

    attention: tuple[int, ...]  # numbers of the layers with keys and values
    evictable: tuple[int, ...]
    sliding: dict[int, int]
    outputs: dict[int, Tensor]  # [heads, dim, hidden]
    inverse_frequencies: dict[int, Tensor]  # [rotated / 2] of each evictable layer's rotation, where it has one

    def frequencies(self, layer: int, device: torch.device) -> Tensor | None:
        """The rotation's, where a layer lies."""
        found = self.inverse_frequencies.get(layer)
        return None if found is None else found.to(device)

    @classmethod
    def of(cls, model: PreTrainedModel) -> "Facts":
        """Sliding layers forget on their own: they are evicted only in a model that has no other attention layers."""
        outputs, sliding = {}, {}
        for number, module in attention_modules(model).items():
            weight = module.o_proj.weight  # [hidden, heads * dim]
            outputs[number] = weight.view(weight.shape[0], -1, module.head_dim).permute(1, 2, 0)
            if (window := sliding_window(model.config, number)) is not None:
                sliding[number] = window
        full = tuple(n for n in outputs if n not in sliding)
        evictable = full or tuple(outputs)
        return cls(tuple(outputs), evictable, sliding, outputs, rotations(model, evictable))

    def held(self, tokens: int) -> int:
        """Tokens that an evictable layer holds of so many seen: a sliding one only those that a next query can see."""
        return min([tokens, *(self.sliding[n] - 1 for n in self.evictable if n in self.sliding)])


def attention_modules(model: PreTrainedModel) -> dict[int, Module]:
    """The model's attention modules by layer, in order."""
    found = {m.layer_idx: m for m in model.modules() if hasattr(m, "o_proj") and hasattr(m, "layer_idx")}
    return dict(sorted(found.items()))


def rotations(model: PreTrainedModel, layers: Iterable[int]) -> dict[int, Tensor]:
    """Inverse frequencies [rotated / 2] of each of `layers`; none of a model without rotations.

    Gemma3 has a set of frequencies for each kind of layer, the others one.
    """
    rotary = getattr(model.get_decoder(), "rotary_emb", None)
    kinds = getattr(model.config.get_text_config(), "layer_types", None)
    found = {}
    for layer in layers if rotary is not None else ():
        own = getattr(rotary, f"{kinds[layer]}_inv_freq", None) if kinds else None
        found[layer] = rotary.inv_freq if own is None else own
    return found


def sliding_window(config, layer: int) -> int | None:
    """Tokens that a query of this layer looks back, itself included; None: all."""
    config = config.get_text_config()
    window = getattr(config, "sliding_window", None)
    if window is None or getattr(config, "use_sliding_window", True) is False:
        return None
    types = getattr(config, "layer_types", None)
    return window if types is None or types[layer] == "sliding_attention" else None


@dataclass
class Job:
    """One condition on its way through a prompt: what it keeps of each layer, and what must wait for the last one."""

    condition: Condition
    policy: Policy | None  # None: everything stays
    parameters: dict
    sizes: list[int]  # each row's budget
    device: torch.device
    layers: dict[int, RaggedLayer] = field(default_factory=dict)
    waiting: dict[int, "Waiting"] = field(default_factory=dict)
    text: Text | None = None  # of a job that stands for one row: what `reduce` protects of its prompt
    seed: int = 0  # of such a job

    @cached_property
    def budget(self) -> RowInts:
        """int64 [batch]."""
        return torch.tensor(self.sizes, device=self.device)

    @property
    def deferred(self) -> bool:
        """Must every layer be seen before anything can leave?"""
        return self.policy is not None and (self.policy.across is not None or bool(self.repeated))

    @property
    def repeated(self) -> set[str]:
        """What it must know of a repetition of the context."""
        return REPEATED.intersection(self.policy.needs) if self.policy is not None else set()

    def same_count(self, tokens: int) -> int | None:
        """The number that every head of every row keeps of `tokens`, where the method lets that be known beforehand."""
        c, p = self.condition, self.policy
        plain = p.allocate is allocate.uniform and p.refine is None and c.fair is None and c.execution == "physical"
        if not plain or len(set(self.sizes)) > 1 or self.sizes[0] > tokens:
            return None
        return self.sizes[0]

    @property
    def window(self) -> int:
        return int(self.parameters.get("window", 0) or 0)


@dataclass
class Waiting:
    """A layer whose eviction waits for the others."""

    observation: Observation
    scores: Scores | None = None
    protected: Mask | None = None
    summary: Tensor | None = None


class Prompt:
    """Positions, spans and whitelists of the tokens to compress: `[batch, tokens]`, flush right, -1 where padded."""

    def __init__(self, positions: TokenInts, spans: Sequence[dict[str, list[int]]], seeds: Sequence[int] = ()):
        self.positions, self.spans = positions, spans
        self.seeds = list(seeds) or [0] * len(positions)
        self.lengths = (positions >= 0).sum(1)

    @classmethod
    def of(cls, texts: Sequence[Text], device: torch.device) -> "Prompt":
        """Of whole texts, whatever is compressed."""
        lengths = torch.tensor([len(t.ids) for t in texts], device=device)[:, None]
        at = torch.arange(int(lengths.max()), device=device)
        return cls(torch.where(at < lengths, at, -1), [t.spans for t in texts])

    def span_of(self, names: tuple[str, ...], extended: bool = True) -> Tensor:
        """Number of the span that each position lies in, int64 [batch, tokens], as `quota.number` counts."""
        rows = []
        for spans, n in zip(self.spans, self.lengths.tolist(), strict=True):
            chosen = [[at for at in spans[name] if at < n] for name in (names or spans)]
            numbers = quota.number(n, [span for span in chosen if span], extended)
            rows.append(torch.nn.functional.pad(numbers, (0, self.positions.shape[1] - n), value=int(numbers[-1])))
        return torch.stack(rows).to(self.positions.device)

    def whitelisted(self, names: tuple[str, ...]) -> Tensor:
        """Bool [batch, tokens] by position."""
        table = torch.zeros(self.positions.shape, dtype=torch.bool)
        for row, spans in enumerate(self.spans):
            table[row, [at for name in names for at in spans[name] if at < table.shape[1]]] = True
        return table.to(self.positions.device)


class Prefill:
    """Attention of whole prompts, flush right, of which each job keeps its part of every layer."""

    def __init__(self, facts: Facts, prompt: Prompt, jobs: Sequence[Job], backend: str = "torch"):
        self.facts, self.prompt, self.jobs, self.backend = facts, prompt, jobs, backend
        self.padded = bool((prompt.positions < 0).any())
        self.doubts: list[Tensor] = []
        if backend == "triton" and self.padded:
            raise InputError("backend triton takes prompts of one length together: use prompt_rows=1")
        self.sums = {n for job in jobs if job.policy for n in sums_of(job)} - REPEATED
        self.span_names = {job.condition.spans for job in jobs if job.condition.fair is not None}
        self._span_of = {names: prompt.span_of(names) for names in self.span_names}
        self._marked = {  # one set of spans passes at a time
            name: extended if name == "span_mass" else prompt.span_of(names, extended=False)
            for names, extended in self._span_of.items()
            for name in SPAN_SUMS
        }

    def attend(
        self, layer: int, query: Query, key: KeyValue, value: KeyValue, scaling: float, sliding: int | None = None
    ) -> Tensor:
        positions = self.prompt.positions.to(query.device)
        n = positions.shape[1]
        wanted = self.sums if layer in self.facts.evictable else set()
        sums = {name: key.new_zeros(*key.shape[:3], dtype=torch.float32) for name in wanted}
        beyond = sliding is not None and n > sliding
        log_sums = None
        if self.backend == "triton":
            out, log_sums, sums = _attend_triton(query, key, value, scaling, wanted)
        elif self.padded or sums or beyond:
            watch = _Watch(sums, positions, self._marked) if sums else None
            out = attend(query, positions, [(key, value, positions[:, None])], scaling, sliding, watch)
        else:
            out = attend_prompt(query, key, value, scaling)

        held = slice(max(0, n - sliding + 1), n) if beyond else slice(0, n)  # what a next query could still see
        key, value = key[:, :, held], value[:, :, held]
        where = positions[:, None, held].expand(*key.shape[:3])
        sums = {name: s[:, :, held] for name, s in sums.items()}
        seen: dict[tuple, Observation] = {}
        for job in self.jobs:
            if job.policy is None or layer not in self.facts.evictable:
                everything = (key, value, where)
                job.layers[layer] = (
                    RaggedLayer.of(*everything, where >= 0, {})
                    if self.padded
                    else RaggedLayer.at(*everything, None, {})
                )
                continue
            fair = job.condition.fair is not None
            kind = (job.window, job.condition.spans if fair else None)
            if kind not in seen:
                o = self._observe(layer, query, key, value, where, sums, scaling, sliding, *kind)
                if log_sums is not None and job.window:
                    ends = log_sums[:, :, -job.window :], out[:, -job.window :].transpose(1, 2)
                    o = replace(o, backend="triton", log_sums=ends[0], window_outputs=ends[1])
                seen[kind] = o
            default = None
            if fair and job.condition.fair < 1:  # what the policy keeps without quotas
                plain = self._observe(layer, query, key, value, where, sums, scaling, sliding, job.window, None)
                default = kept(job, plain, self.prompt)
            self._decide(job, layer, seen[kind], default)
        return out

    def _observe(self, layer, query, key, value, where, sums, scaling, sliding, window, names) -> Observation:
        """What a window of `window` queries sees; for `names`, the last queries of each of these spans."""
        positions = self.prompt.positions.to(query.device)
        batch, n = positions.shape
        if names is None:
            first = max(0, n - window)  # a copy: a layer that waits must not hold on to all queries
            queries, at = query[:, :, first:].clone(), positions[:, first:]
            span_of = None
        else:
            span_of = self._span_of[names].to(query.device)
            chosen = [
                quota.windows(span_of[b, :length].cpu(), max(window, 1))
                for b, length in enumerate(self.prompt.lengths.tolist())
            ]
            width = max(map(len, chosen))
            at = torch.stack([torch.nn.functional.pad(c, (width - len(c), 0), value=-1) for c in chosen]).to(
                positions.device
            )
            place = (at + n - self.prompt.lengths[:, None].to(query.device)).clamp(min=0)
            queries = query.gather(2, place[:, None, :, None].expand(-1, query.shape[1], -1, query.shape[3]))
        return Observation(
            layer=self.facts.evictable.index(layer), layers=len(self.facts.evictable), keys=key, values=value,
            positions=where, queries=queries, query_positions=at, seen=self.prompt.lengths.to(query.device),
            scaling=scaling, output=self.facts.outputs[layer], sums=sums, span_of=span_of,
            span_local=names is not None, sliding=sliding,
            inverse_frequencies=self.facts.frequencies(layer, key.device),
            seed=torch.tensor(self.prompt.seeds, device=key.device),
        )  # fmt: skip

    def _decide(self, job: Job, layer: int, o: Observation, default: Mask | None) -> None:
        if job.deferred:
            job.waiting[layer] = Waiting(o)
            if not job.repeated:
                _judge_waiting(job, layer, self.prompt)
            return
        if not self.padded and (count := job.same_count(o.keys.shape[2])) is not None:
            place, doubt = best(*judged(job, o, self.prompt), count)
            self.doubts.append(doubt)
            job.layers[layer] = RaggedLayer.at(o.keys, o.values, o.positions, place, self._carried(job, o))
            self._remember(job, layer, o)
            return
        self._store(job, layer, o, kept(job, o, self.prompt, default))

    def _store(self, job: Job, layer: int, o: Observation, stays: Mask) -> None:
        masked = job.condition.execution == "masked"
        stored = RaggedLayer.of(o.keys, o.values, o.positions, o.alive if masked else stays, self._carried(job, o))
        if masked:
            stored.hidden = ~stays[o.alive]
        job.layers[layer] = stored
        self._remember(job, layer, o)

    @staticmethod
    def _carried(job: Job, o: Observation) -> dict[str, Tensor]:
        again = job.condition.regime in DECODING  # otherwise nobody asks for them any more
        return {n: s for n, s in o.sums.items() if again and n in sums_of(job)}

    @staticmethod
    def _remember(job: Job, layer: int, o: Observation) -> None:
        if job.condition.regime in DECODING and job.window:
            job.layers[layer].remember(o.queries, o.query_positions, job.window)

    def finish(self) -> None:
        """Evict what had to wait for every layer's scores; say what a GPU found amiss on the way."""
        if self.doubts and bool(torch.stack([doubt.cpu() for doubt in self.doubts]).any()):
            asked = ", ".join(job.condition.label for job in self.jobs if job.policy)
            raise InputError(f"more protected tokens than the budget holds, or NaN scores, in one of {asked}")
        for job in self.jobs:
            if not job.deferred:
                continue
            for layer in job.waiting:
                if job.waiting[layer].scores is None:
                    _judge_waiting(job, layer, self.prompt)
            for layer, stays in across(job).items():
                self._store(job, layer, job.waiting[layer].observation, stays)
            job.waiting.clear()


def sums_of(job: Job) -> set[str]:
    """The sums that a job's policy needs; under `fair`, span-local attention takes the place of all attention."""
    signal = job.parameters.get("signal")  # Scissorhands: one of two
    needs = {name for name in job.policy.needs if signal in (None, name)} if job.policy else set()
    if job.condition.fair is not None and "mass" in needs:
        needs.add("span_mass" if job.parameters.get("extended", True) else "marked_mass")
    return needs


def judged(job: Job, o: Observation, prompt: Prompt) -> tuple[Scores, Mask]:
    """(scores, protected) of a layer's tokens, by the policy and by the condition."""
    by_condition = guards(job.condition, o, job.sizes, prompt)
    return judge(job.policy, job.parameters, o, job.budget.to(o.keys.device), by_condition)


def kept(job: Job, o: Observation, prompt: Prompt, default: Mask | None = None) -> Mask:
    """Who stays in a layer; by quotas where the observation is span-local."""
    scores, protected = judged(job, o, prompt)
    counts = counts_of(job.policy, job.parameters, o, scores, protected, job.budget.to(o.keys.device))
    return keep(job.policy, job.parameters, o, scores, protected, counts, _quotas(job, o, default))


def _quotas(job: Job, o: Observation, default: Mask | None) -> dict | None:
    """How `quota.split` shares a head's budget: the public code rounds down and sets its ramps no quota, the paper
    rounds to the nearest and leaves the sinks out (section 5.2, E.3)."""
    if not o.span_local or job.parameters.get("ramps"):
        return None
    if job.condition.reading == "as_run":
        return {"fair": job.condition.fair, "default": default}
    sinks = guard.sinks(o, job.parameters.get("sinks", 0))
    return {"fair": job.condition.fair, "default": default, "apart": sinks, "rounding": "round"}


def _judge_waiting(job: Job, layer: int, prompt: Prompt) -> None:
    w = job.waiting[layer]
    o = w.observation
    w.scores, w.protected = judged(job, o, prompt)
    if job.policy.summary is not None:
        w.summary = call(job.policy.summary, o, parameters=job.parameters)
    w.observation = replace(o)  # without the attention that it remembers


def across(job: Job) -> dict[int, Mask]:
    """Who stays in each layer, once all layers have their scores; layers may lie on several devices."""
    layers = list(job.waiting.values())
    home = job.budget.device
    scores, protected = [w.scores.to(home) for w in layers], [w.protected.to(home) for w in layers]
    if job.policy.across is None:
        counts = [
            counts_of(job.policy, job.parameters, w.observation, w.scores, w.protected, job.budget.to(w.scores.device))
            for w in layers
        ]
    else:
        extra = {**job.parameters, "observations": [w.observation for w in layers]}
        scores, counts = call(
            job.policy.across,
            scores,
            protected,
            job.budget,
            [None if w.summary is None else w.summary.to(home) for w in layers],
            parameters=extra,
        )
    return {
        layer: keep(
            job.policy,
            job.parameters,
            w.observation,
            s.to(w.scores.device),
            w.protected,
            count.to(w.scores.device),
            _quotas(job, w.observation, None),
        )  # fmt: skip
        for (layer, w), s, count in zip(job.waiting.items(), scores, counts, strict=True)
    }


def guards(c: Condition, o: Observation, sizes: Sequence[int], prompt: Prompt) -> Mask:
    """Tokens that the condition protects, `[batch, kv_heads, tokens]`, in rows that keep `sizes` tokens per head."""
    sides = [guarded(c, size) for size in sizes]
    device = o.keys.device
    prefix, suffix = sides[0] if len(set(sides)) == 1 else torch.tensor(sides, device=device).unbind(1)
    end = prompt.lengths.to(device) if c.suffix_mode == "static" else None
    mask = guard.ends(o, prefix, suffix, end)
    if c.whitelist:
        mask = mask | guard.whitelist(o, prompt.whitelisted(c.whitelist).to(device))
    return mask


class _Watch:
    """Adds up attention per key while its probabilities exist."""

    def __init__(self, sums: dict[str, Tensor], positions: TokenInts, marked: dict[str, Tensor]):
        self.sums, self.positions, self.marked = sums, positions, marked
        self.last = positions.amax(1)

    def __call__(self, p: Tensor, queries: slice) -> None:
        there = (self.positions[:, queries] >= 0)[:, None, None, :, None]
        if "mass" in self.sums:
            self.sums["mass"] += (p * there).mean(2).sum(2)
        for name in SPAN_SUMS & self.sums.keys():
            of = self.marked[name].to(p.device).gather(1, self.positions.clamp(min=0))
            asked, of = of[:, None, None, queries, None], of[:, None, None, None, :]
            same = (asked == of) | (asked < 0) | (of < 0)  # what lies in no span sees all, and is seen by all
            self.sums[name] += (p * (there & same)).mean(2).sum(2)
        if "low" in self.sums:
            at = self.positions[:, queries]
            late = (at > self.last[:, None] - LOW_QUERIES)[:, None, None, :, None]
            sees = self.positions[:, None, None, None, :] <= at[:, None, None, :, None]
            low = (p < 1.0 / (at + 1).clamp(min=1)[:, None, None, :, None]) & late & there & sees
            self.sums["low"] += low.float().sum((2, 3))  # whole numbers: ties stay ties, whatever the batch


def _attend_triton(query: Query, key: KeyValue, value: KeyValue, scaling: float, wanted: set[str]):
    """(output, log-sum-exp, sums) of a whole prompt: torch's fastest attention that keeps the log-sum-exp, and
    attention summed per key by a kernel."""
    from kvrepro_kernels import column_mass, prefill_attention

    if missing := wanted - {"mass"}:
        raise InputError(f"backend triton has no kernel for {sorted(missing)[0]!r}: use backend torch")
    done = prefill_attention(query, key, value, scale=scaling)
    sums = {"mass": column_mass(query, key, done.lse, scale=scaling)} if wanted else {}
    return done.output.transpose(1, 2), done.lse, sums


class Extend:
    """Attention of new tokens `[batch, new]` of rows that hold a cache: each layer stores them, then attends."""

    def __init__(
        self,
        cache: EngineCache,
        positions: TokenInts,
        window: int = 0,
        pages: tuple[int, int, int] | None = None,
        backend: str = "torch",
    ):
        self.cache, self.positions, self.window, self.pages, self.backend = cache, positions, window, pages, backend

    def attend(
        self, layer: int, query: Query, key: KeyValue, value: KeyValue, scaling: float, sliding: int | None = None
    ) -> Tensor:
        stored = self.cache.ragged[layer]
        at = self.positions.to(query.device)
        stored.append(key, value, at)
        if self.window:
            stored.remember(query, at, self.window)
        if self.backend == "triton" and query.shape[2] == 1:
            return self._decode(stored, query, scaling)
        parts = stored.parts()
        watch = None
        if "low" in stored.sums and query.shape[2] >= LOW_QUERIES:  # older queries have left the window
            for low in (stored.sums["low"], stored.tail_sums["low"]):
                low.zero_()
        if stored.sums:
            last = at.amax(1)[:, None]
            flat = 0 if len(parts) == 1 else parts[0][0].shape[2]

            def watch(p: Tensor, queries: slice) -> None:
                now = at[:, queries]
                there = (now >= 0)[:, None, None, :, None]
                for name in stored.sums:
                    counted = p
                    if name == "low":
                        late = (now > last - LOW_QUERIES)[:, None, None, :, None]
                        where = torch.cat([x.expand(*stored.shape, -1) for _, _, x in parts], 2)
                        sees = (where[:, :, None, None] >= 0) & (where[:, :, None, None] <= now[:, None, None, :, None])
                        counted = (p < 1.0 / (now + 1).clamp(min=1)[:, None, None, :, None]) & sees & late
                    counted = (counted * there).float()
                    stored.add(name, counted.sum((2, 3)) if name == "low" else counted.mean(2).sum(2), flat)

        out = attend(query, at, parts, scaling, sliding, watch, self._unchosen(layer, query, parts))
        if sliding is not None and stored.tail >= SLIDE:
            stored.slide(at.amax(1) - sliding + 2)  # what the next query cannot see
        return out

    def _decode(self, stored: RaggedLayer, query: Query, scaling: float) -> Tensor:
        """One token per row by the ragged decode kernel, which emits each kept token's attention where it is summed."""
        from kvrepro_kernels import ragged_decode

        done = ragged_decode(
            query, stored.keys, stored.values, stored.offsets, stored.tail_keys, stored.tail_values, stored.tail,
            scale=scaling, emit=("mean",) if stored.sums else (),
        )  # fmt: skip
        for name in stored.sums:  # "mass" alone: the others were refused
            flat, tail = done.attention["mean"]
            stored.sums[name] += flat
            stored.tail_sums[name] += tail
        return done.output.transpose(1, 2)

    def _unchosen(self, layer: int, query: Query, parts) -> Tensor | None:
        """Quest: tokens of pages that this step's query does not select, [batch, kv_heads, group, 1, tokens]."""
        if self.pages is None:
            return None
        from kvrepro.engine.score.cumulative import page_mask

        page, dense_layers, budget = self.pages
        if list(self.cache.ragged).index(layer) < dense_layers:
            return None
        keys = torch.cat([k for k, _, _ in parts], 2)
        alive = torch.cat([w.expand(*keys.shape[:2], -1) for _, _, w in parts], 2) >= 0
        chosen = page_mask(query[:, :, -1], keys, alive, page, budget)
        return ~chosen.unflatten(1, (keys.shape[1], -1))[:, :, :, None]


def reduce(
    facts: Facts, cache: EngineCache, conditions: Sequence[Condition], jobs: Sequence[Job], seen: RowInts,
    budgets: RowInts, scalings: dict[int, float],
) -> Tensor:  # fmt: skip
    """Evict from rows that hold a cache, each down to its budget; rows of equal condition are decided together.

    Returns which rows lost tokens, bool [batch]. A row that has seen no more than its budget loses none.
    """
    groups: dict[Condition, list[int]] = {}
    for row, (c, over) in enumerate(zip(conditions, (seen > budgets).tolist(), strict=True)):
        if over:
            groups.setdefault(c, []).append(row)
    lost = torch.zeros_like(seen, dtype=torch.bool)
    held = {}
    for layer in facts.evictable if groups else ():
        stored = cache.ragged[layer]
        if layer in facts.sliding:
            stored.slide(seen.to(stored.positions.device) - facts.sliding[layer] + 1)
        keys, values, positions, sums, index = stored.shown()
        stays = positions >= 0
        held[layer] = (index, stays)
        for c, members in groups.items():
            job = jobs[members[0]]
            if job.policy is None or not job.policy.frees:
                continue
            rows = torch.tensor(members, device=keys.device)
            window = job.window
            queries = (
                stored.queries[rows][:, :, -window:]
                if window
                else keys.new_zeros(len(members), facts.outputs[layer].shape[0], 0, keys.shape[3])
            )
            at = stored.query_positions[rows][:, -window:] if window else rows.new_zeros(len(members), 0)
            o = Observation(
                layer=facts.evictable.index(layer), layers=len(facts.evictable), keys=keys[rows], values=values[rows],
                positions=positions[rows], queries=queries, query_positions=at,
                seen=seen.to(keys.device)[rows], scaling=scalings[layer], output=facts.outputs[layer],
                sums={n: s[rows] for n, s in sums.items()},
                sliding=facts.sliding.get(layer), inverse_frequencies=facts.frequencies(layer, keys.device),
                seed=torch.tensor([jobs[row].seed for row in members], device=keys.device),
            )  # fmt: skip
            sizes = [int(budgets[row]) for row in members]
            part = Job(c, job.policy, job.parameters, sizes, keys.device, waiting=job.waiting)
            prompt = Prompt.of([jobs[row].text for row in members], keys.device)
            if part.deferred:
                part.waiting[layer] = Waiting(o)
                _judge_waiting(part, layer, prompt)
                continue
            stays[rows] = kept(part, o, prompt)
    for c, members in groups.items():
        job = jobs[members[0]]
        if job.deferred:
            rows = torch.tensor(members, device=seen.device)
            sizes = [int(budgets[row]) for row in members]
            part = Job(c, job.policy, job.parameters, sizes, seen.device, waiting=job.waiting)
            for layer, mine in across(part).items():
                held[layer][1][rows] = mine
            job.waiting.clear()
    for layer, (index, stays) in held.items():
        lost |= ((index >= 0) & ~stays).any(2).any(1).to(lost.device)
        cache.ragged[layer].evict(stays, index, masked=conditions[0].execution == "masked")
    return lost
