"""A prompt's forward pass, which serves many conditions and reduces each layer as soon as it is computed."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from kvrepro.engine import evict, quota
from kvrepro.engine.attention import Watch, attend, attend_prompt, per_token
from kvrepro.engine.cache import RaggedLayer
from kvrepro.engine.evict import (
    EvictionJob,
    Prompts,
    across,
    attempt,
    evict_shared,
    postpone,
    prepare,
    select_tokens,
)
from kvrepro.engine.extend import Extend
from kvrepro.engine.facts import ModelFacts
from kvrepro.engine.observe import Observation
from kvrepro.engine.places import Places
from kvrepro.engine.policy import REPEATED
from kvrepro.engine.select import ensured_later, settle
from kvrepro.engine.shapes import KeyValue, Mask, Positions, Query, TokenInts
from kvrepro.engine.signals import PromptSignals, Reduction, Signals

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
        self.streams: dict[torch.device, torch.cuda.Stream] = {}
        self.signals = PromptSignals([reduction for _, reduction in self.shared])
        self.sums = {
            (name, job.condition.spans if name in SPAN_SUMS else None)
            for job in jobs if job.evictor for name in job.sums - REPEATED
        }  # fmt: skip
        span_names = {job.condition.spans for job in jobs if job.condition.fair is not None}
        self._span_of = {names: prompt.span_of(names) for names in span_names}
        self._span_counts = {names: int(span_of.max()) + 1 for names, span_of in self._span_of.items()}
        self._places: dict[tuple[Any, ...], Places] = {}
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
        given = [x for x in (query, key, value, out, log_sums, padding, positions, *sums.values()) if x is not None]
        with self._beside(query.device, given):
            for kind in wanted if log_sums is not None else ():
                sums[kind] = mass_by_kernels(query, key, log_sums, scaling, padding, self._span_at(*kind, positions))
            key, value = key[:, :, held], value[:, :, held]
            where = positions[:, None, held].expand(*key.shape[:3])
            sums = {kind: s[:, :, held] for kind, s in sums.items()}
            self._keep(layer, query, key, value, scaling, where, sums, out, log_sums)
        return out

    @contextmanager
    def _beside(self, device: torch.device, given: Sequence[Tensor]) -> Iterator[None]:
        """Run the block in a second stream on a GPU, so that a layer is reduced while the next ones are computed.
        `join` waits for it. given: tensors that the block reads."""
        if device.type != "cuda":
            yield
            return
        stream = self.streams[device] = _beside(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        for tensor in given:
            tensor.record_stream(stream)
        with torch.cuda.stream(stream):
            yield

    def join(self) -> None:
        """Decide the layers that wait, and make later work on the GPU wait for all reductions."""
        self._decide_waiting()
        for stream in self.streams.values():
            torch.cuda.current_stream(stream.device).wait_stream(stream)

    def _keep(
        self, layer: int, query: Query, key: KeyValue, value: KeyValue, scaling: float, where: Positions,
        sums: Sums, out: Tensor, log_sums: Tensor | None,
    ) -> None:  # fmt: skip
        """Let each job select from a layer, at once or together with later layers."""
        seen: dict[tuple[Any, ...], Observation] = {}
        waits: dict[int, Observation] = {}
        for job in self.jobs:
            if job.evictor is None or layer not in self.facts.evictable:
                every = key.shape[1] * sum(self._held(key.shape[2]))
                job.layers[layer] = RaggedLayer.of(key, value, where, where >= 0, {}, every)
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
            if not (self.most and job.together):
                self._decide(job, {layer: seen[own_kind]}, seen[own_kind], seen[window, None] if mixed else None)
                continue
            waits[window] = seen[own_kind]
            if not self._waiting:
                with attempt(job):
                    prepare(job, seen[own_kind])
        if waits:
            self._wait(layer, waits)

    def _wait(self, layer: int, seen: dict[int, Observation]) -> None:
        """Let a layer wait for the next ones. Before, decide the waiting layers if they cannot be joined with it, or if
        there are as many as `most` bytes hold. seen: its observations by window."""
        for before in list(self._waiting.values())[-1:]:
            unlike = before.keys() != seen.keys() or any(not _alike_seen(before[w], o) for w, o in seen.items())
            room = self.most // (2 * next(iter(seen.values())).keys.nbytes)
            if unlike or len(self._waiting) >= room:
                self._decide_waiting()
        self._waiting[layer] = seen

    def _decide_waiting(self) -> None:
        """Decide the waiting layers as rows of one."""
        waiting, self._waiting = self._waiting, {}
        joined: dict[int, Observation] = {}  # by window
        for job in self.jobs if waiting else ():
            if job.error is not None or not job.together:
                continue
            seen = {layer: seen_by_window[job.window] for layer, seen_by_window in waiting.items()}
            device = next(iter(seen.values())).keys.device
            with self._beside(device, ()):
                if job.window not in joined:
                    joined[job.window] = Observation.together(list(seen.values()))
                self._decide(job, seen, joined[job.window])

    def _held(self, tokens: int) -> list[int]:
        """Tokens of each prompt among the last `tokens` places."""
        return [min(length, tokens) for length in self.lengths]

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
        places = self._places_of(where, self.facts.sliding.get(layer), window, names)
        if names is None:
            queries = query[:, :, max(0, n - window) :].clone()  # a view would keep all queries in memory
            span_of = None
        else:
            span_of = self._span_of[names].to(query.device)
            place = (places.query_positions + n - self.prompt.lengths[:, None].to(query.device)).clamp(min=0)
            queries = query.gather(2, place[:, None, :, None].expand(-1, query.shape[1], -1, query.shape[3]))
        facts = self.facts if names is None else self.facts.by("torch")
        sums_of_window = {name: s for (name, sum_names), s in sums.items() if sum_names in (None, names)}
        return facts.observe(
            layer, key, self.seeds, values=value, positions=places.positions, queries=queries,
            query_positions=places.query_positions, shared_places=places, seen=self.prompt.lengths.to(query.device),
            scaling=scaling, sums=sums_of_window, span_of=span_of,
            unextended=None if names is None else self._within.get(("marked_mass", names)),
            span_count=None if names is None else self._span_counts[names], span_local=names is not None,
        )  # fmt: skip

    def _places_of(self, where: Positions, sliding: int | None, window: int, names: tuple[str, ...] | None) -> Places:
        """The places of layers with tokens at `where`, flush right; equal shapes imply equal positions in a pass."""
        kind = (where.device, *where.shape, sliding, window, names)
        if kind not in self._places:
            if names is None:
                at = self.prompt.positions.to(where.device)[:, max(0, self.prompt.positions.shape[1] - window) :]
            else:  # the last queries of each span, padded in front
                tables = [spans[:n] for spans, n in zip(self._span_of[names].cpu(), self.lengths, strict=True)]
                last_of_spans = [quota.windows(table, max(window, 1)) for table in tables]
                at = pad_sequence(last_of_spans, True, -1, "left").to(where.device)
            self._places[kind] = Places(where, at, sliding, names is not None)
        return self._places[kind]

    def _decide(
        self, job: EvictionJob, seen: dict[int, Observation], o: Observation, plain: Observation | None = None
    ) -> None:
        """Let a job decide the layers `seen`, together observed as `o`. plain: the observation without quotas."""
        with attempt(job), ensured_later(self.kernels) as doubts:
            if job.waits:
                postpone(job, seen, o)
            else:
                self._choose(job, seen, o, plain)
        job.doubts += doubts

    def _choose(
        self, job: EvictionJob, seen: dict[int, Observation], o: Observation, plain: Observation | None
    ) -> None:
        heads, tokens = o.keys.shape[1:3]
        total = job.total(heads, self._held(tokens))
        stays = select_tokens(job, o, None if plain is None else select_tokens(job, plain))
        if total is None:
            for (layer, observation), layer_stays in zip(seen.items(), stays.chunk(o.count), strict=True):
                self._store(job, layer, observation, layer_stays)
            return
        whole = RaggedLayer.of(o.keys, o.values, o.positions, stays, _carried(job, o), total * o.count)
        for (layer, observation), stored in zip(seen.items(), whole.layers(o.count), strict=True):
            self._hold(job, layer, observation, stored)

    def _store(self, job: EvictionJob, layer: int, o: Observation, stays: Mask) -> None:
        masked = job.condition.execution == "masked"
        stored = RaggedLayer.of(o.keys, o.values, o.positions, o.alive if masked else stays, _carried(job, o))
        if masked:
            stored.hidden = ~stays[o.alive]
        self._hold(job, layer, o, stored)

    def _hold(self, job: EvictionJob, layer: int, o: Observation, stored: RaggedLayer) -> None:
        job.layers[layer] = stored
        if job.again and job.window:
            stored.remember(o.queries, o.query_positions, job.window)

    def finish(self, width: int = 0) -> None:
        """Decide for the jobs that wait for every layer's scores.

        width: positions that the tables of signals hold, including the answer's tokens.
        """
        for job in self.jobs:
            if job.waits and job.error is None and job.reduction is None:
                with attempt(job):
                    self._choose_across(job)
        self._choose_for_all_layers(width)

    def settle(self, *jobs: EvictionJob) -> None:
        """Run the postponed checks of these jobs, or of all jobs, which waits for a GPU."""
        for job in jobs or self.jobs:
            doubts, job.doubts = job.doubts, []
            with attempt(job):
                settle(doubts if job.error is None else [])

    def _choose_across(self, job: EvictionJob) -> None:
        """Let a policy with budgets over all layers choose in every layer."""
        with ensured_later(self.kernels) as doubts:
            chosen = across(job)
        job.doubts += doubts
        one_shape = len({(stays.shape, stays.device) for stays in chosen.values()}) == 1
        together = self._places_in(job, chosen) if one_shape and job.condition.execution == "physical" else None
        self.settle(job)
        for layer, stays in chosen.items() if job.error is None else ():
            o = job.pending[layer]
            if together is None:
                self._store(job, layer, o, stays)
            else:
                self._hold(job, layer, o, RaggedLayer.taken(o.keys, o.values, *together[layer], _carried(job, o)))
        job.pending.clear()
        job.judged.clear()

    @staticmethod
    def _places_in(job: EvictionJob, chosen: dict[int, Mask]) -> dict[int, tuple[Tensor, Tensor, Tensor]]:
        """Layer -> (positions of its kept tokens, int32 [kept]; their rows, heads and slots, int64 [kept, 3]; the
        heads' offsets). The layers have one shape and hold the same tokens, so that a GPU finds all places at once."""
        stays = torch.stack(list(chosen.values()))  # [layers, batch, kv_heads, tokens]
        offsets = pad(stays.sum(-1).flatten(1).cumsum(1), (1, 0))
        totals = offsets[:, -1].tolist()
        places = stays.nonzero_static(size=sum(totals))[:, 1:]
        positions = job.pending[next(iter(chosen))].positions[places.unbind(1)].int()
        places_by_layer = zip(positions.split(totals), places.split(totals), offsets, strict=True)
        return dict(zip(chosen, places_by_layer, strict=True))

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
                first = next(iter(job.pending))
                stays = signals.held_at(job.pending[first].positions, by_any=True)
                [places] = self._places_in(job, {first: stays}).values()
                for layer, o in job.pending.items():
                    if job.condition.execution == "masked":
                        self._store(job, layer, o, stays.to(o.keys.device))
                    else:
                        positions, at, offsets = (x.to(o.keys.device) for x in places)
                        job.layers[layer] = RaggedLayer.taken(o.keys, o.values, positions, at, offsets, {})
            job.pending.clear()


def _carried(job: EvictionJob, o: Observation) -> dict[str, Tensor]:
    """The sums that a job's next eviction needs."""
    return {n: s for n, s in o.sums.items() if job.again and n in job.sums}


def _alike_seen(first: Observation, second: Observation) -> bool:
    """Do two layers hold the same tokens, with equal shapes and softmax?"""
    same = first.places is second.places and first.keys.shape == second.keys.shape
    return same and first.scaling == second.scaling and first.softmax is second.softmax


@cache
def _beside(device: torch.device) -> torch.cuda.Stream:
    """One stream for all prompts, so that they share its memory. Its priority is higher than the main stream's, which
    then hardly waits for it at the end."""
    return torch.cuda.Stream(device, priority=-1)


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


class ExtendByKernels(Extend):
    """Attention of a chunk without padding by kernels, to survivors and itself; sliding layers by plain PyTorch."""

    def attend(
        self, layer: int, query: Query, key: KeyValue, value: KeyValue, scaling: float, sliding: int | None = None
    ) -> Tensor:
        from kvrepro_kernels import window_attention

        if sliding is not None:
            return super().attend(layer, query, key, value, scaling, sliding)
        stored, at = self.cache.ragged[layer], self.positions.to(query.device)
        self.cache.scalings[layer] = scaling
        stored.append(key, value, at)
        if self.window:
            stored.remember(query, at, self.window)
        parts = stored.parts()
        keys, values, where = (
            torch.cat([part[i].expand(*stored.shape, *part[i].shape[2:]) for part in parts], 2) for i in range(3)
        )
        starts = (where < 0).sum(-1)
        out, log_sums = window_attention(query, keys, values, scale=scaling, starts=starts)
        for name in stored.sums:  # only "mass": the backend refuses conditions with other sums
            mass = mass_by_kernels(query, keys, log_sums, scaling, starts)
            stored.add(name, mass, 0 if len(parts) == 1 else parts[0][0].shape[2])
        return out.transpose(1, 2)
