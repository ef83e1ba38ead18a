"""A prompt's forward pass: one serves many conditions, each layer reduced as soon as it is computed."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvrepro.engine import quota
from kvrepro.engine.attention import Watch, attend, attend_prompt
from kvrepro.engine.cache import RaggedLayer
from kvrepro.engine.evict import REPEATED, Job, PendingLayer, Prompts, across, evict_shared, judge_pending, judged, kept
from kvrepro.engine.facts import ModelFacts
from kvrepro.engine.observe import Observation
from kvrepro.engine.select import best
from kvrepro.engine.shapes import KeyValue, Mask, Positions, Query, TokenInts
from kvrepro.engine.signals import PromptSignals
from kvrepro.errors import InputError

LOW_QUERIES = 400  # Scissorhands' history window
SPAN_SUMS = {"span_mass", "marked_mass"}


class Prefill:
    """Attention of whole prompts, flush right, of which each job keeps its part of every layer."""

    def __init__(self, facts: ModelFacts, prompt: Prompts, jobs: Sequence[Job], backend: str = "torch",
                 isolate: bool = False):  # fmt: skip
        """isolate: what a policy raises becomes its job's `error`, and the others go on."""
        self.facts, self.prompt, self.jobs, self.backend, self.isolate = facts, prompt, jobs, backend, isolate
        self.padded = bool((prompt.positions < 0).any())
        self.doubts: list[tuple[Job, Tensor]] = []
        if backend == "triton" and self.padded:
            raise InputError("backend triton takes prompts of one length together: use prompt_rows=1")
        self.shared = [job for job in jobs if job.reduction is not None]
        self.signals = PromptSignals([job.reduction for job in self.shared]) if self.shared else None
        self.sums = {n for job in jobs if job.policy for n in job.sums} - REPEATED
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
        elif self.padded or sums or beyond or self.signals:
            watch = self._watch(query, key, sums, positions)
            part = (key, value, positions[:, None])
            out = attend(query, positions, [part], scaling, sliding, watch, prompt=not self.padded)
        else:
            out = attend_prompt(query, key, value, scaling)

        held = slice(max(0, n - sliding + 1), n) if beyond else slice(0, n)  # what a next query could still see
        key, value = key[:, :, held], value[:, :, held]
        where = positions[:, None, held].expand(*key.shape[:3])
        sums = {name: s[:, :, held] for name, s in sums.items()}
        seen: dict[tuple[Any, ...], Observation] = {}
        for job in self.jobs:
            if job.policy is None or layer not in self.facts.evictable:
                everything = (key, value, where)
                job.layers[layer] = (
                    RaggedLayer.of(*everything, where >= 0, {})
                    if self.padded
                    else RaggedLayer.at(*everything, None, {})
                )
                continue
            if job.error is not None:
                continue
            fair = job.condition.fair is not None
            kind = (job.window, job.condition.spans if fair else None)
            if kind not in seen:
                o = self._observe(layer, query, key, value, where, sums, scaling, sliding, *kind)
                if log_sums is not None and job.window:
                    ends = log_sums[:, :, -job.window :], out[:, -job.window :].transpose(1, 2)
                    o = replace(o, backend="triton", log_sums=ends[0], window_outputs=ends[1])
                seen[kind] = o
            plain = None
            if fair and job.condition.fair < 1:  # what the policy sees without quotas
                plain = self._observe(layer, query, key, value, where, sums, scaling, sliding, job.window, None)
            self._attempt(job, self._decide, layer, seen[kind], plain)
        return out

    def _watch(self, query: Query, key: KeyValue, sums: dict[str, Tensor], positions: TokenInts) -> Watch | None:
        """What looks at a layer's probabilities while they exist."""
        add = _Watch(sums, positions, self._marked) if sums else None
        if self.signals is None:
            return add
        self.signals.open(query, key)

        def watch(p: Tensor, queries: slice) -> None:
            self.signals.see(p, positions[:, queries] >= 0 if self.padded else None)
            if add is not None:
                add(p, queries)

        return watch

    def _observe(
        self, layer: int, query: Query, key: KeyValue, value: KeyValue, where: Positions, sums: dict[str, Tensor],
        scaling: float, sliding: int | None, window: int, names: tuple[str, ...] | None,
    ) -> Observation:  # fmt: skip
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

    def _attempt(self, job: Job, step: Callable[..., None], *arguments: object) -> None:
        """Do a step for a job; what it raises costs this job, unless it is to be raised."""
        try:
            step(job, *arguments)
        except Exception as error:  # a reader's policy may raise anything
            if not self.isolate:
                raise
            self._fail(job, error)

    @staticmethod
    def _fail(job: Job, error: Exception) -> None:
        job.error = error
        job.layers.clear()
        job.pending.clear()

    def _decide(self, job: Job, layer: int, o: Observation, plain: Observation | None) -> None:
        if job.waits:
            job.pending[layer] = PendingLayer(o)
            if not job.repeated and job.reduction is None:
                judge_pending(job, layer)
            return
        if not self.padded and (count := job.same_count(o.keys.shape[2])) is not None:
            place, doubt = best(*judged(job, o), count)
            self.doubts.append((job, doubt))
            job.layers[layer] = RaggedLayer.at(o.keys, o.values, o.positions, place, self._carried(job, o))
            self._remember(job, layer, o)
            return
        self._store(job, layer, o, kept(job, o, None if plain is None else kept(job, plain)))

    def _store(self, job: Job, layer: int, o: Observation, stays: Mask) -> None:
        masked = job.condition.execution == "masked"
        stored = RaggedLayer.of(o.keys, o.values, o.positions, o.alive if masked else stays, self._carried(job, o))
        if masked:
            stored.hidden = ~stays[o.alive]
        job.layers[layer] = stored
        self._remember(job, layer, o)

    @staticmethod
    def _carried(job: Job, o: Observation) -> dict[str, Tensor]:
        return {n: s for n, s in o.sums.items() if job.again and n in job.sums}

    @staticmethod
    def _remember(job: Job, layer: int, o: Observation) -> None:
        if job.again and job.window:
            job.layers[layer].remember(o.queries, o.query_positions, job.window)

    def finish(self, width: int = 0) -> None:
        """Evict what had to wait for every layer's scores; say what a GPU found amiss on the way.

        width: positions that the tables of signals hold, the answer's tokens included.
        """
        for job, doubt in self.doubts:
            if job.error is None and bool(doubt):
                error = InputError(f"{job.condition.label}: more protected tokens than its budget holds, or NaN scores")
                if not self.isolate:
                    raise error
                self._fail(job, error)
        for job in self.jobs:
            if job.waits and job.error is None:
                choose = (self._choose_for_all_layers, width) if job.reduction else (self._choose_across,)
                self._attempt(job, *choose)

    def _choose_across(self, job: Job) -> None:
        """Budgets that need every layer's scores."""
        for layer in job.pending:
            if job.pending[layer].scores is None:
                judge_pending(job, layer)
        for layer, stays in across(job).items():
            self._store(job, layer, job.pending[layer].observation, stays)
        job.pending.clear()

    def _choose_for_all_layers(self, job: Job, width: int) -> None:
        """`SharedCap`: the state after the prompt, and the first reduction where it comes at step 0."""
        first = job.first_step
        signals = self.signals.signals(job.reduction, self.prompt.positions, width, first > 0, job.draws)
        job.signals = evict_shared(job, signals, 0) if first == 0 else signals
        place = None
        if first == 0 and not self.padded and job.condition.execution == "physical":
            place = _alike(job.signals.held.any(1))
        for layer, pending in job.pending.items():
            o = pending.observation
            if place is None:
                self._store(job, layer, o, job.signals.held_at(o.positions, by_any=True))
            else:
                index = place[:, None].expand(-1, o.keys.shape[1], -1).to(o.keys.device)
                job.layers[layer] = RaggedLayer.at(o.keys, o.values, o.positions, index, {})
        job.pending.clear()


def _alike(held: Tensor) -> Tensor | None:
    """Places of the tokens that rows hold, int64 [batch, kept], where all rows hold equally many."""
    counts = held.sum(1)
    if bool((counts != counts[0]).any()):
        return None
    return held.nonzero()[:, 1].view(len(held), -1)


class _Watch:
    """Adds up attention per key while its probabilities exist."""

    def __init__(self, sums: dict[str, Tensor], positions: TokenInts, marked: dict[str, Tensor]):
        self.sums, self.positions, self.marked = sums, positions, marked
        self.last = positions.amax(1)

    def __call__(self, p: Tensor, queries: slice) -> None:
        there = (self.positions[:, queries] >= 0)[:, None, None, :, None]
        n = p.shape[-1]  # later tokens may be left out
        if "mass" in self.sums:
            self.sums["mass"][..., :n] += (p * there).mean(2).sum(2)
        for name in SPAN_SUMS & self.sums.keys():
            of = self.marked[name].to(p.device).gather(1, self.positions.clamp(min=0))
            asked, of = of[:, None, None, queries, None], of[:, None, None, None, :n]
            same = (asked == of) | (asked < 0) | (of < 0)  # what lies in no span sees all, and is seen by all
            self.sums[name][..., :n] += (p * (there & same)).mean(2).sum(2)
        if "low" in self.sums:
            at = self.positions[:, queries]
            late = (at > self.last[:, None] - LOW_QUERIES)[:, None, None, :, None]
            sees = self.positions[:, None, None, None, :n] <= at[:, None, None, :, None]
            low = (p < 1.0 / (at + 1).clamp(min=1)[:, None, None, :, None]) & late & there & sees
            self.sums["low"][..., :n] += low.float().sum((2, 3))  # whole numbers: ties stay ties, whatever the batch


def _attend_triton(
    query: Query, key: KeyValue, value: KeyValue, scaling: float, wanted: set[str]
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """(output, log-sum-exp, sums) of a whole prompt: torch's fastest attention that keeps the log-sum-exp, and
    attention summed per key by a kernel."""
    from kvrepro_kernels import column_mass, prefill_attention

    if missing := wanted - {"mass"}:
        raise InputError(f"backend triton has no kernel for {sorted(missing)[0]!r}: use backend torch")
    done = prefill_attention(query, key, value, scale=scaling)
    sums = {"mass": column_mass(query, key, done.lse, scale=scaling)} if wanted else {}
    return done.output.transpose(1, 2), done.lse, sums
