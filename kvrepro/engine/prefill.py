"""A prompt's forward pass, which serves many conditions and reduces each layer as soon as it is computed."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kvrepro.engine import evict, guard
from kvrepro.engine.attention import Watch, attend, attend_prompt, per_token
from kvrepro.engine.cache import EngineCache, RaggedLayer
from kvrepro.engine.evict import EvictionJob, Prompts, across, attempt, evict_shared, postpone, select_tokens
from kvrepro.engine.facts import ModelFacts, attention_modules
from kvrepro.engine.observe import Observation
from kvrepro.engine.policy import REPEATED
from kvrepro.engine.shapes import KeyValue, Positions, PreTrainedModel, Query, TokenInts
from kvrepro.engine.shared import PromptSignals, Reduction, Signals

SPAN_SUMS = {"span_mass", "marked_mass"}
SUMS_BY_KERNELS = {"mass", *SPAN_SUMS}
Sums = dict[tuple[str, tuple[str, ...] | None], Tensor]  # by name and, of sums inside spans, the spans' names


class PrefillState:
    """Attention of whole prompts, flush right. Each job keeps its own selection of every layer's tokens."""

    def __init__(self, facts: ModelFacts, prompt: Prompts, jobs: Sequence[EvictionJob]):
        self.shared = [(job, reduction) for job in jobs if (reduction := job.reduction) is not None]
        self.facts, self.prompt, self.jobs = facts, prompt, jobs
        if self.shared:  # `PromptSignals` watches probabilities, which only plain PyTorch shows
            self.facts = facts.by("torch")
        self.lengths = prompt.lengths.tolist()
        self.padded = min(self.lengths) < prompt.positions.shape[1]
        self.kernels = self.facts.backend == "triton"
        self.most = evict.TOGETHER[self.facts.backend]
        self.seeds = torch.tensor(prompt.seeds, device=prompt.positions.device)
        self.signals = PromptSignals([reduction for _, reduction in self.shared])
        self.sums = {
            (name, job.condition.spans if name in SPAN_SUMS else None)
            for job in jobs if job.evictor for name in job.sums - REPEATED
        }  # fmt: skip
        span_names = {job.condition.spans for job in jobs if job.condition.fair is not None}
        self._span_of = {names: prompt.span_of(names) for names in span_names}
        self._span_counts = {names: int(span_of.max()) + 1 for names, span_of in self._span_of.items()}
        self._where: dict[tuple[Any, ...], Positions] = {}  # equal shapes imply equal positions in a pass
        self._queries: dict[tuple[Any, ...], Tensor] = {}
        self._waiting: dict[int, dict[int, Observation]] = {}  # layer -> window -> observation, to be decided together
        self._within = {  # the span that each position lies in, for sums inside spans
            (name, names): self._span_of[names] if name == "span_mass" else prompt.span_of(names, extended=False)
            for name, names in self.sums
            if names is not None
        }

    def attend(
        self, layer: int, query: Query, key: KeyValue, value: KeyValue, scaling: float, sliding: int | None = None
    ) -> Tensor:
        positions = self.prompt.positions.to(query.device)
        n = positions.shape[1]
        wanted = self.sums if layer in self.facts.evictable else set()
        sums = {} if self.kernels else {kind: key.new_zeros(*key.shape[:3], dtype=torch.float32) for kind in wanted}
        beyond = sliding is not None and n > sliding
        padding = (n - self.prompt.lengths).to(query.device) if self.padded else None
        log_sums = None
        if sums or beyond or self.shared:
            watch = self._watch(query, key, sums, positions)
            part = (key, value, positions[:, None])
            out = attend(query, positions, [part], scaling, sliding, watch, prompt=not self.padded)
        else:
            whole = attend_by_kernels if self.kernels else _attend_plainly
            out, log_sums = without_padding(whole, padding, query, key, value, scaling)

        forgets = beyond and layer in self.facts.sliding  # drops tokens that no later query sees
        held = slice(n - sliding + 1, n) if forgets else slice(0, n)
        for kind in wanted if log_sums is not None else ():
            sums[kind] = mass_by_kernels(query, key, log_sums, scaling, padding, self._span_at(*kind, positions))
        key, value = key[:, :, held], value[:, :, held]
        where = self._where.setdefault((key.device, *key.shape), positions[:, None, held].expand(*key.shape[:3]))
        sums = {kind: s[:, :, held] for kind, s in sums.items()}
        self._keep(layer, query, key, value, scaling, where, sums, out, log_sums)
        return out

    def _keep(
        self, layer: int, query: Query, key: KeyValue, value: KeyValue, scaling: float, where: Positions,
        sums: Sums, out: Tensor, log_sums: Tensor | None,
    ) -> None:  # fmt: skip
        """Let each job select from a layer, at once or together with later layers."""
        seen: dict[tuple[Any, ...], Observation] = {}
        waits: dict[int, Observation] = {}
        for job in self.jobs:
            if job.evictor is None or layer not in self.facts.evictable:
                job.layers[layer] = RaggedLayer.of(key, value, where, where >= 0, {})
                continue
            if job.error is not None:
                continue
            fair, window = job.condition.fair, job.window
            own_kind = window, None if fair is None else job.condition.spans
            mixed = fair is not None and fair < 1  # also needs the policy's choice without quotas
            for kind in {own_kind, (window, None)} if mixed else {own_kind}:
                if kind in seen:
                    continue
                seen[kind] = self._observe(layer, query, key, value, where, sums, scaling, *kind)
                if log_sums is not None and window and kind[1] is None:
                    ends = log_sums[:, :, -window:].clone(), out[:, -window:].transpose(1, 2).contiguous()
                    seen[kind] = replace(seen[kind], log_sums=ends[0], window_outputs=ends[1])
            if self.most and job.together:
                waits[window] = seen[own_kind]
            else:
                self._decide(job, {layer: seen[own_kind]}, seen[own_kind], seen[window, None] if mixed else None)
        if not waits:
            return
        for before in list(self._waiting.values())[-1:]:
            unlike = before.keys() != waits.keys() or any(not _alike_seen(before[w], o) for w, o in waits.items())
            if unlike or len(self._waiting) >= self.most // (2 * key.nbytes):
                self.decide_waiting()
        self._waiting[layer] = waits

    def decide_waiting(self) -> None:
        """Decide the waiting layers as rows of one."""
        waiting, self._waiting = self._waiting, {}
        joined: dict[int, Observation] = {}  # by window
        for job in self.jobs if waiting else ():
            if job.error is not None or not job.together:
                continue
            seen = {layer: seen_by_window[job.window] for layer, seen_by_window in waiting.items()}
            if job.window not in joined:
                joined[job.window] = Observation.together(list(seen.values()))
            self._decide(job, seen, joined[job.window])

    def _span_at(self, name: str, spans: tuple[str, ...] | None, positions: TokenInts) -> Tensor | None:
        """The span that each of the tokens lies in, int64 [batch, tokens], for a sum inside spans; None for others."""
        if spans is None:
            return None
        return self._within[name, spans].to(positions.device).gather(1, positions.clamp(min=0))

    def _watch(self, query: Query, key: KeyValue, sums: Sums, positions: TokenInts) -> Watch | None:
        """A function that adds a layer's probabilities to `sums` and signals; None: nothing needs them."""
        if self.shared:
            self.signals.open(query, key)
        elif not sums:
            return None
        newest = positions.amax(1)
        within = {kind: span_of for kind in sums if (span_of := self._span_at(*kind, positions)) is not None}

        def watch(p: Tensor, queries: slice) -> None:
            at, n = positions[:, queries], p.shape[-1]  # p may lack later tokens
            if self.shared:
                self.signals.see(p, at >= 0 if self.padded else None)
            for kind in sums.keys() - within.keys():
                sums[kind][..., :n] += per_token(kind[0], p, at, positions[:, None, :n], newest)
            for kind, span_of in within.items():
                seeing, seen = span_of[:, None, None, queries, None], span_of[:, None, None, None, :n]
                same = (seeing == seen) | (seeing < 0) | (seen < 0)  # a token in no span sees all and is seen by all
                sums[kind][..., :n] += per_token(kind[0], p * same, at, positions[:, None, :n], newest)

        return watch

    def _observe(
        self, layer: int, query: Query, key: KeyValue, value: KeyValue, where: Positions, sums: Sums,
        scaling: float, window: int, names: tuple[str, ...] | None,
    ) -> Observation:  # fmt: skip
        """The observation of a layer with a window of `window` queries. names: the window holds the last queries of
        each of these spans, which no kernel scores."""
        n = self.prompt.positions.shape[1]
        if names is None:
            queries = query[:, :, max(0, n - window) :].clone()  # a view would keep all queries in memory
            span_of, at = None, self.prompt.positions.to(where.device)[:, max(0, n - window) :]
        else:
            span_of, at = self._span_of[names].to(query.device), self._last_of_spans(window, names).to(query.device)
            place = (at + n - self.prompt.lengths[:, None].to(query.device)).clamp(min=0)
            queries = query.gather(2, place[:, None, :, None].expand(-1, query.shape[1], -1, query.shape[3]))
        facts = self.facts if names is None else self.facts.by("torch")
        sums_of_window = {name: s for (name, sum_names), s in sums.items() if sum_names in (None, names)}
        return facts.observe(
            layer, key, self.seeds, values=value, positions=where, queries=queries,
            query_positions=at, seen=self.prompt.lengths.to(query.device),
            scaling=scaling, sums=sums_of_window, span_of=span_of,
            unextended=None if names is None else self._within.get(("marked_mass", names)),
            span_count=None if names is None else self._span_counts[names], span_local=names is not None,
        )  # fmt: skip

    def _last_of_spans(self, window: int, names: tuple[str, ...]) -> Tensor:
        """Positions of the last queries of each span, padded in front."""
        if (window, names) not in self._queries:
            tables = [spans[:n] for spans, n in zip(self._span_of[names].cpu(), self.lengths, strict=True)]
            last_of_spans = [guard.windows(table, max(window, 1)) for table in tables]
            self._queries[window, names] = pad_sequence(last_of_spans, True, -1, "left")
        return self._queries[window, names]

    def _decide(
        self, job: EvictionJob, seen: dict[int, Observation], o: Observation, plain: Observation | None = None
    ) -> None:
        """Let a job decide the layers `seen`, together observed as `o`. plain: the observation without quotas."""
        with attempt(job):
            if job.waits:
                postpone(job, seen, o)
                return
            stays = select_tokens(job, o, None if plain is None else select_tokens(job, plain))
            whole = RaggedLayer.of(o.keys, o.values, o.positions, stays, _carried(job, o))
            for (layer, each), stored in zip(seen.items(), whole.layers(o.count), strict=True):
                _hold(job, layer, each, stored)

    def finish(self, width: int = 0) -> None:
        """Decide for the jobs that wait for every layer's scores.

        width: positions that the tables of signals hold, including the answer's tokens.
        """
        for job in self.jobs:
            if job.waits and job.error is None and job.reduction is None:
                with attempt(job):
                    for layer, stays in across(job).items():
                        o = job.pending[layer]
                        _hold(job, layer, o, RaggedLayer.of(o.keys, o.values, o.positions, stays, _carried(job, o)))
                job.pending.clear()
                job.judged.clear()
        self._choose_for_all_layers(width)

    def _choose_for_all_layers(self, width: int) -> None:
        """`SharedCap`: the state after the prompt, and the first reduction where it comes at step 0."""
        states: dict[tuple[Reduction, int], Signals] = {}  # they never change in place
        for job, reduction in self.shared:
            state = reduction, job.first_step
            if state not in states:
                states[state] = self.signals.signals(reduction, self.prompt.positions, width, waits=state[1] > 0)
            signals = job.signals = states[state]
            with attempt(job):
                if job.first_step == 0:
                    signals = job.signals = evict_shared(job, signals, 0)
                for layer, o in job.pending.items():
                    stays = signals.held_at(o.positions, by_any=True)
                    job.layers[layer] = RaggedLayer.of(o.keys, o.values, o.positions, stays, {})
            job.pending.clear()


def _carried(job: EvictionJob, o: Observation) -> dict[str, Tensor]:
    """The sums that a job's next eviction needs."""
    return {n: s for n, s in o.sums.items() if job.again and n in job.sums}


def _hold(job: EvictionJob, layer: int, o: Observation, stored: RaggedLayer) -> None:
    job.layers[layer] = stored
    if job.again and job.window:
        stored.remember(o.queries, o.query_positions, job.window)


def _alike_seen(first: Observation, second: Observation) -> bool:
    """Do two layers hold the same tokens, with equal shapes and softmax?"""
    same = first.positions is second.positions and first.sliding == second.sliding
    return same and first.scaling == second.scaling and first.softmax is second.softmax


def _attend_plainly(query: Query, key: KeyValue, value: KeyValue, scaling: float) -> tuple[Tensor, None]:
    return attend_prompt(query, key, value, scaling), None


def attend_by_kernels(query: Query, key: KeyValue, value: KeyValue, scaling: float) -> tuple[Tensor, Tensor]:
    """(output, log-sum-exp) of whole prompts: torch's fastest attention that keeps the log-sum-exp."""
    from kvrepro_kernels import prefill_attention

    done = prefill_attention(query, key, value, scale=scaling)
    return done.output.transpose(1, 2), done.lse


def without_padding(
    attention: Callable[..., tuple[Tensor, Tensor | None]], padding: Tensor | None, query: Query, key: KeyValue,
    value: KeyValue, scaling: float,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """(output, log-sum-exp) by a causal `attention` that knows no padding. The prompts are moved to the front, where no
    query sees the padding behind them, and back.

    padding: number of places before each prompt's first token, int64 [batch], whose results are 0 and -inf. None: no
    padding.
    """
    if padding is None:
        return attention(query, key, value, scaling)
    n = query.shape[2]
    at = torch.arange(n, device=query.device)
    front, back = (at + padding[:, None]) % n, (at - padding[:, None]) % n  # [batch, tokens]
    out, log_sums = attention(*(x.take_along_dim(front[:, None, :, None], 2) for x in (query, key, value)), scaling)
    empty = at < padding[:, None]
    out = out.take_along_dim(back[:, :, None, None], 1).masked_fill(empty[:, :, None, None], 0.0)
    if log_sums is not None:
        log_sums = log_sums.take_along_dim(back[:, None], 2).masked_fill(empty[:, None], -torch.inf)
    return out, log_sums


def mass_by_kernels(
    query: Query, key: KeyValue, log_sums: Tensor, scaling: float, starts: Tensor | None = None,
    spans: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attention that each key got from the queries, which are the last of the tokens. starts: the first living key of
    each head. spans: the span of each token; attention between spans does not count, but a negative span sees all and
    is seen by all."""
    from kvrepro_kernels import column_mass

    return column_mass(query, key, log_sums, scale=scaling, starts=starts, spans=spans)


# ---- KVzip's repetition: the model repeats the context, and the attention that it then pays to each token is noted

REPEAT_CHUNK = 2048


def reconstruct(
    model: PreTrainedModel, prefill: PrefillState, ask: Sequence[int], ids: Tensor, positions: Tensor,
    cache: EngineCache,
) -> None:  # fmt: skip
    """Let the model repeat the context chunk by chunk after the request `ask`, and add the largest attention to each
    token to the observations of the jobs that need it: per KV head, and per query head after a division by the length
    of the layer's input at the query. Source: Kim et al. 2025; KVzip+ as in NVIDIA/kvpress."""
    jobs = [job for job in prefill.jobs if job.repeated and job.error is None]
    for n, o in jobs[0].pending.items():
        rows, kv_heads, tokens = o.positions.shape
        heads = {"reconstruction": kv_heads, "reconstruction_per_norm": kv_heads * o.group}
        needed = set().union(*(job.repeated for job in jobs))
        best = {name: torch.zeros(rows, heads[name], tokens, device=o.positions.device) for name in needed}
        for job in jobs:
            job.pending[n] = replace(job.pending[n], sums={**job.pending[n].sums, **best})
    ask_ids = torch.tensor(list(ask), dtype=torch.long, device=ids.device).expand(len(ids), -1)
    n = ids.shape[1]
    for a in range(0, n, REPEAT_CHUNK):
        part = ids[:, a : a + REPEAT_CHUNK]
        text = torch.cat([ask_ids, part], 1)
        at = prefill.prompt.lengths[:, None] + torch.arange(text.shape[1], device=ids.device)
        probe = _Repeat(jobs[0], at, len(ask), positions[:, a : a + REPEAT_CHUNK] >= 0)
        cache_of_chunk = cache.rows(torch.arange(len(ids), device=ids.device))
        with _lengths(model, probe.lengths):
            model(
                input_ids=text, position_ids=at, past_key_values=cache_of_chunk, use_cache=True, logits_to_keep=1,
                kvrepro=probe,
            )  # fmt: skip


@contextmanager
def _lengths(model: PreTrainedModel, lengths: dict[int, Tensor]) -> Iterator[None]:
    """Note the Euclidean length of each hidden state that an attention layer gets: layer -> float32 [batch, tokens]."""

    def note(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        lengths[module.layer_idx] = (args[0] if args else kwargs["hidden_states"]).float().norm(dim=-1)

    hooks = [m.register_forward_pre_hook(note, with_kwargs=True) for m in attention_modules(model).values()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class _Repeat:
    """Attention of a repeated chunk over the context and itself; its tokens are not stored."""

    def __init__(self, job: EvictionJob, positions: Tensor, request_length: int, real: Tensor):
        self.job, self.positions, self.request_length, self.real = job, positions, request_length, real
        self.lengths: dict[int, Tensor] = {}  # layer -> ||h_t|| of its input, [batch, text]

    def attend(
        self, layer: int, query: Query, key: KeyValue, value: KeyValue, scaling: float, sliding: int | None = None
    ) -> Tensor:
        at, real = self.positions.to(query.device), self.real.to(query.device)
        if layer not in self.job.pending:
            stored = self.job.layers[layer]
            parts = [*stored.parts(), (key, value, at[:, None])]
            return attend(query, at, parts, scaling, sliding)
        o = self.job.pending[layer]
        n = o.positions.shape[2]

        def watch(p: Tensor, queries: slice) -> None:
            first = max(0, self.request_length - queries.start)
            seen = p[:, :, :, first:, :n]
            if seen.shape[3]:
                real_queries = real[:, queries.start + first - self.request_length : queries.stop - self.request_length]
                seen = seen * real_queries[:, None, None, :, None]
                for name in REPEATED & o.sums.keys():
                    if name == "reconstruction":
                        largest = seen.amax((2, 3))
                    else:
                        h = self.lengths[layer][:, queries.start + first : queries.stop]
                        largest = (seen / h[:, None, None, :, None]).amax(3).flatten(1, 2)
                    torch.maximum(o.sums[name], largest, out=o.sums[name])

        parts = [(o.keys, o.values, o.positions), (key, value, at[:, None])]
        return attend(query, at, parts, scaling, sliding, watch)
