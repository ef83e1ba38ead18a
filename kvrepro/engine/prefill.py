"""From prompts to rows: one pass of a prompt serves all conditions that compress the same part of it, and reduces each
layer as soon as it is computed."""

import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kvrepro.engine import allocate, evict
from kvrepro.engine.allocate import by_kernels
from kvrepro.engine.attention import Watch, attend, attend_prompt, per_token
from kvrepro.engine.cache import EngineCache, RaggedLayer
from kvrepro.engine.condition import Chunked, Condition, Offline, Prompt
from kvrepro.engine.evict import (
    EvictionJob,
    Prompts,
    across,
    attempt,
    evict_shared,
    generator,
    postpone,
    select_tokens,
)
from kvrepro.engine.facts import ModelFacts, attention_modules
from kvrepro.engine.observe import Observation
from kvrepro.engine.policy import REPEATED, budget_of
from kvrepro.engine.rows import Call, Extend, Row, Rows, evict_rows, kept_by_all_layers, kept_sets
from kvrepro.engine.shapes import KeyValue, Positions, PreTrainedModel, Query, TokenInts
from kvrepro.engine.shared import PromptSignals, Reduction, Signals
from kvrepro.errors import InputError

REPEAT_CHUNK = 2048  # tokens that KVzip's repetition reads at a time
SPAN_SUMS = {"span_mass", "marked_mass"}
Kind = tuple[str, tuple[str, ...] | None]  # a sum's name and, of sums inside spans, the spans' names
Sums = dict[Kind, Tensor]


def boundary(text: Prompt, c: Condition) -> int:
    """Number of the prompt's first tokens that `c` compresses. The model reads the rest after the compression.

    Raises InputError for a span that the prompt does not have, and where there is nothing to compress or to split.
    """
    n = len(text.ids)
    for name in {*c.whitelist, *c.spans, *({c.until} - {"", *text.turns})}:
        text.ensure_span(name)
    end = n
    if c.until:
        end = text.turns[c.until] if c.until in text.turns else min(text.spans[c.until])
    if end < 1:
        raise InputError(f"{c.until!r} begins at token {end}: nothing stands before it to compress")
    if c.fair is not None and not any(min(text.spans[name]) < end for name in c.spans or text.spans):
        raise InputError(f"fair {c.fair:g} with 0 spans among the {end} tokens to compress: mark some, or drop fair")
    return end


# ---- passes


def read(call: Call, members: list[int], columns: list[int]) -> list[Rows]:
    """Rows of these prompts and conditions, which are planned for one pass, after the eviction at the end of their
    compressed parts. Offline, each prefix is compressed once, and each prompt that begins with it gets a copy."""
    c = call.conditions[columns[0]]
    ends = [boundary(call.texts[i], c) for i in members]
    if not isinstance(c.regime, Offline):
        return _pass(call, members, ends, columns)
    prompts_by_prefix: dict[tuple[Any, ...], list[int]] = {}
    for i, end in zip(members, ends, strict=True):
        text = call.texts[i]
        marked = tuple((name, tuple(at for at in where if at < end)) for name, where in text.spans.items())
        prompts_by_prefix.setdefault((tuple(columns), tuple(text.ids[:end]), marked), []).append(i)
    copies = []
    for prefix, same in prompts_by_prefix.items():
        if call.prefix is None or call.prefix[0] != prefix:
            call.prefix = None  # frees its memory
            call.prefix = prefix, same[0], _pass(call, same[:1], [len(prefix[1])], columns)
        _, reader, blocks = call.prefix
        for i in same:  # an error on a prefix is an error of every prompt with it
            call.failed |= {(i, j): call.failed[reader, j] for j in columns if (reader, j) in call.failed}
            copies += [_copied(call, rows, reader, i) for rows in blocks]
    return copies


def _copied(call: Call, rows: Rows, reader: int, i: int) -> Rows:
    """A copy for prompt `i` of the rows of a prefix, which was read with the prompt `reader`."""
    copy, free = rows.take(list(range(len(rows)))), {} if i == reader else {"prefill_seconds": 0.0}
    copy.rows = [Row((i, row.tag[1]), call.texts[i], row.job, row.notes | free) for row in rows.rows]
    return copy


def _pass(call: Call, members: list[int], ends: list[int], columns: list[int]) -> list[Rows]:
    """One pass, and a note of what each row kept and how long it took. A condition that fails is tried again with each
    prompt alone."""
    began = time.perf_counter()
    run = _chunked if isinstance(call.conditions[columns[0]].regime, Chunked) else _whole
    blocks = run(call, members, ends, columns)
    if call.device.type == "cuda":
        torch.cuda.synchronize()
    seconds = (time.perf_counter() - began) / (len(members) * len(columns))
    for rows in blocks:
        if rows.signals is not None:
            kept = kept_by_all_layers(rows.signals)
        else:
            kept = kept_sets(call.facts, rows.cache, [ends[members.index(i)] for i, _ in rows.tags], call.kept_sets)
        for row, note in zip(rows.rows, kept, strict=True):
            row.notes = note | {"prefill_seconds": seconds}
    failed = [j for j in columns if len(members) > 1 and (members[0], j) in call.failed]
    for i, end in zip(members, ends, strict=True) if failed else ():
        call.failed = {tag: error for tag, error in call.failed.items() if tag[0] != i or tag[1] not in failed}
        blocks += _pass(call, [i], [end], failed)
    return blocks


def _jobs(call: Call, members: list[int], ends: list[int], columns: list[int], positions: Tensor) -> list[EvictionJob]:
    """One job per condition, with one row for each of these prompts."""
    texts = [call.texts[i] for i in members]
    of_call = call.seed % 2**31 << 32  # a tensor holds numbers below 2^63
    compressed = [text.ids[:end] for text, end in zip(texts, ends, strict=True)]
    seeds = [zlib.crc32(str(ids).encode()) + of_call for ids in compressed]  # whatever the place in a batch
    prompts = Prompts(positions, [text.spans for text in texts], seeds)
    jobs = []
    for j in columns:
        c, rule = call.conditions[j], call.rules[j]
        evictor = rule.policy if rule is not None and rule.policy.frees else None
        parameters = rule.parameters if rule is not None else {}
        sizes = [budget_of(c, call.facts.held(end)) for end in ends]
        draws = [generator(parameters, text.ids) for text in texts] if rule is not None and rule.policy.shared else []
        jobs.append(EvictionJob([c] * len(members), evictor, parameters, sizes, prompts, draws))
    return jobs


def _whole(call: Call, members: list[int], ends: list[int], columns: list[int]) -> list[Rows]:
    """One forward pass for all of `columns`; a layer's full keys and values are freed before the next layer."""
    texts = [call.texts[i] for i in members]
    ids, positions = call.padded([text.ids[:end] for text, end in zip(texts, ends, strict=True)])
    jobs = _jobs(call, members, ends, columns, positions)
    reader, cache = PromptReader(call.facts, jobs), EngineCache(call.model.config)
    held = torch.tensor([call.facts.held(end) for end in ends], device=call.device)[:, None]
    with by_kernels(reader.kernels):
        logits = call.forward(ids, positions, cache, reader)
        reader.decide_waiting()
        if any(job.repeated for job in jobs if job.error is None):
            repeat(call, reader, ids, positions, cache)
        reader.finish(width=max(ends) + call.max_new_tokens)
    finished = []
    for job, j in zip(jobs, columns, strict=True):
        if job.error is None:
            survivors = cache.rows(torch.arange(len(members), device=call.device))
            survivors.ragged = {n: job.layers[n] for n in sorted(job.layers)}
            seen = torch.cat([survivors.ragged[n].held().to(held.device) for n in call.facts.evictable], 1)
            lost = (seen < held).any(1) if job.signals is None else job.signals.evicted > 0
            rows = [Row((i, j), text, job.row(b)) for b, (i, text) in enumerate(zip(members, texts, strict=True))]
            lengths = reader.prompt.lengths.clone()
            finished.append(Rows(rows, survivors, logits, lengths, lost.long(), job.signals))
            job.layers = {}
    for job, j in zip(jobs, columns, strict=True):
        call.fail({} if job.error is None else {(i, j): job.error for i in members})
    return finished


def _chunked(call: Call, members: list[int], ends: list[int], columns: list[int]) -> list[Rows]:
    """Prompts of one length in chunks, each attending to what is left of the earlier ones and to itself."""
    end, texts = ends[0], [call.texts[i] for _ in columns for i in members]
    jobs = _jobs(call, members, ends, columns, call.padded([text.ids[:end] for text in texts[: len(members)]])[1])
    own = [
        Row((i, j), call.texts[i], job.row(b))
        for job, j in zip(jobs, columns, strict=True)
        for b, i in enumerate(members)
    ]
    cache = EngineCache(call.model.config)
    _open(call, cache, len(own), {name for job in jobs for name in job.sums})
    none = torch.zeros(len(own), dtype=torch.long, device=call.device)
    rows = Rows(own, cache, torch.empty(0), none, none)
    regime: Any = jobs[0].condition.regime
    for a in range(0, end, regime.chunk):
        seen = min(end, a + regime.chunk)
        ids, positions = call.padded([text.ids[a:seen] for text in texts], [a] * len(texts))
        rows.logits = call.forward(ids, positions, cache, Extend(call, cache, positions, rows.window))
        rows.seen = none + seen
        budgets = [_chunk_budget(row.job, call.facts, seen, last=seen == end) for row in own]
        rows.calls = rows.calls + evict_rows(call.facts, rows, budgets)
    for layer in cache.ragged.values():  # no eviction follows that would need these
        layer.sums, layer.tail_sums, layer.queries, layer.query_positions = {}, {}, None, None
    call.fail({own[row].tag: error for row, error in rows.failed.items()})
    alive = [row for row in range(len(rows)) if row not in rows.failed]
    return [] if not alive else [rows if len(alive) == len(rows) else rows.take(alive)]


def _open(call: Call, cache: EngineCache, batch: int, sums: set[str]) -> None:
    """Empty layers for `batch` rows."""
    for n in call.facts.attention:
        output, kv_heads = call.facts.outputs[n], call.facts.kv_heads[n]
        empty = torch.zeros(batch, kv_heads, 0, output.shape[1], dtype=call.model.dtype, device=output.device)
        none = torch.zeros(batch, kv_heads, 0, dtype=torch.long, device=output.device)
        empty_sums = {name: none.float() for name in sums if n in call.facts.evictable}
        cache.ragged[n] = RaggedLayer.of(empty, empty, none, none.bool(), empty_sums)


def _chunk_budget(job: EvictionJob, facts: ModelFacts, seen: int, last: bool) -> int:
    """Tokens to keep after a chunk, given the tokens seen so far. Source: DropKV's standalone cache.

    last_chunk: all, until the last chunk. every_chunk: the share of the tokens seen, or the budget. budget: the budget
    as soon as it is exceeded.
    """
    regime: Any = job.condition.regime
    if last or regime.when == "budget":
        return job.budgets[0]
    return seen if regime.when == "last_chunk" else budget_of(job.condition, facts.held(seen))


# ---- attention of a whole prompt


class PromptReader:
    """Attention of whole prompts, flush right. Each job keeps its own selection of every layer's tokens."""

    def __init__(self, facts: ModelFacts, jobs: Sequence[EvictionJob]):
        self.shared = [(job, reduction) for job in jobs if (reduction := job.reduction) is not None]
        # `PromptSignals` watches probabilities, which only plain PyTorch shows
        self.facts = facts.by("torch") if self.shared else facts
        self.prompt, self.jobs = jobs[0].prompts, jobs
        self.lengths = self.prompt.lengths.tolist()
        self.padded = min(self.lengths) < self.prompt.positions.shape[1]
        self.kernels = self.facts.backend == "triton"
        self.most = evict.TOGETHER[self.facts.backend]
        self.seeds = torch.tensor(self.prompt.seeds, device=self.prompt.positions.device)
        self.signals = PromptSignals([reduction for _, reduction in self.shared])
        self.sums: set[Kind] = set()
        for job in jobs:
            names = job.sums - REPEATED if job.evictor else ()
            self.sums |= {(name, job.condition.spans if name in SPAN_SUMS else None) for name in names}
        quotas = {job.condition.spans for job in jobs if job.condition.fair is not None}
        self._span_of = {names: self.prompt.span_of(names) for names in quotas}
        self._span_counts = {names: int(span_of.max()) + 1 for names, span_of in self._span_of.items()}
        self._within: dict[Kind, Tensor] = {  # the span that each position lies in, for sums inside spans
            (name, names): self._span_of[names] if name == "span_mass" else self.prompt.span_of(names, extended=False)
            for name, names in self.sums
            if names is not None
        }
        self._where: dict[tuple[Any, ...], Positions] = {}  # equal shapes imply equal positions in a pass
        self._queries: dict[tuple[Any, ...], Tensor] = {}
        self._waiting: dict[int, dict[int, Observation]] = {}  # layer -> window -> observation, to be decided together

    def attend(
        self, layer: int, query: Query, key: KeyValue, value: KeyValue, scaling: Any, sliding: int | None = None
    ) -> Tensor:
        positions = self.prompt.positions.to(query.device)
        n = positions.shape[1]
        wanted = self.sums if layer in self.facts.evictable else set()
        sums = {} if self.kernels else {kind: key.new_zeros(*key.shape[:3], dtype=torch.float32) for kind in wanted}
        beyond = sliding is not None and n > sliding
        log_sums = None
        if sums or beyond or self.shared:
            watch = self._watch(query, key, sums, positions)
            part = (key, value, positions[:, None])
            out = attend(query, positions, [part], scaling, sliding, watch, prompt=not self.padded)
        else:
            padding = (n - self.prompt.lengths).to(query.device) if self.padded else None
            out, log_sums = self._whole(query, key, value, scaling, padding)
            for kind in wanted:
                from kvrepro_kernels import column_mass

                spans = self._span_at(kind, positions)
                sums[kind] = column_mass(query, key, log_sums, scale=scaling, starts=padding, spans=spans)
        forgets = beyond and layer in self.facts.sliding  # drops tokens that no later query sees
        held = slice(n - sliding + 1 if forgets else 0, n)
        key, value = key[:, :, held], value[:, :, held]
        where = self._where.setdefault((key.device, *key.shape), positions[:, None, held].expand(*key.shape[:3]))
        sums = {kind: s[:, :, held] for kind, s in sums.items()}
        shown = {"values": value, "positions": where, "scaling": scaling}
        self._keep(layer, query, key, shown, sums, None if log_sums is None else (log_sums, out))
        return out

    def _whole(
        self, query: Query, key: KeyValue, value: KeyValue, scaling: Any, padding: Tensor | None
    ) -> tuple[Tensor, Any]:
        """(output, log-sum-exp if by kernels) by a causal attention that knows no padding. The prompts are moved to the
        front, where no query sees the padding behind them, and back.

        padding: number of places before each prompt's first token, int64 [batch], whose results are 0 and -inf.
        """
        if padding is not None:
            at = torch.arange(query.shape[2], device=query.device)
            front, back = ((at + shift) % len(at) for shift in (padding[:, None], -padding[:, None]))  # [batch, tokens]
            query, key, value = (x.take_along_dim(front[:, None, :, None], 2) for x in (query, key, value))
        log_sums = None
        if self.kernels:
            from kvrepro_kernels import prefill_attention

            done = prefill_attention(query, key, value, scale=scaling)  # torch's fastest that keeps the log-sum-exp
            out, log_sums = done.output.transpose(1, 2), done.lse
        else:
            out = attend_prompt(query, key, value, scaling)
        if padding is not None:
            empty = at < padding[:, None]
            out = out.take_along_dim(back[:, :, None, None], 1).masked_fill(empty[:, :, None, None], 0.0)
            if log_sums is not None:
                log_sums = log_sums.take_along_dim(back[:, None], 2).masked_fill(empty[:, None], -torch.inf)
        return out, log_sums

    def _keep(
        self, layer: int, query: Query, key: KeyValue, shown: dict[str, Any], sums: Sums, ends: Any | None
    ) -> None:
        """Let each job select from a layer, at once or together with later layers. shown: fields of its observations.
        ends: its log-sum-exp and outputs, if they are known."""
        waits: dict[int, Observation] = {}

        @cache
        def observed(window: int, names: tuple[str, ...] | None) -> Observation:
            more = shown | {"sums": {name: s for (name, spans), s in sums.items() if spans in (None, names)}}
            if ends is not None and window and names is None:
                more["log_sums"] = ends[0][:, :, -window:].clone()
                more["window_outputs"] = ends[1][:, -window:].transpose(1, 2).contiguous()
            return self._observe(layer, query, key, window, names, more)

        for job in self.jobs:
            if job.evictor is None or layer not in self.facts.evictable:
                where = shown["positions"]
                job.layers[layer] = RaggedLayer.of(key, shown["values"], where, where >= 0, {})
            elif job.error is None:
                fair = job.condition.fair
                o = observed(job.window, None if fair is None else job.condition.spans)
                if self.most and job.together:
                    waits[job.window] = o
                else:  # a mixed split also needs the policy's choice without quotas
                    mixed = fair is not None and fair < 1
                    self._decide(job, {layer: o}, o, observed(job.window, None) if mixed else None)
        if waits:
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
            if job.error is None and job.together:
                seen = {layer: seen_by_window[job.window] for layer, seen_by_window in waiting.items()}
                if job.window not in joined:
                    joined[job.window] = Observation.together(list(seen.values()))
                self._decide(job, seen, joined[job.window])

    def _span_at(self, kind: Kind, positions: TokenInts) -> Tensor | None:
        """The span that each of the tokens lies in, int64 [batch, tokens], for a sum inside spans; None for others."""
        within = self._within.get(kind)
        return None if within is None else within.to(positions.device).gather(1, positions.clamp(min=0))

    def _watch(self, query: Query, key: KeyValue, sums: Sums, positions: TokenInts) -> Watch | None:
        """A function that adds a layer's probabilities to `sums` and signals; None: nothing needs them."""
        if self.shared:
            self.signals.open(query, key)
        elif not sums:
            return None
        newest = positions.amax(1)
        span_at = {kind: self._span_at(kind, positions) for kind in sums}

        def watch(p: Tensor, queries: slice) -> None:
            at, n = positions[:, queries], p.shape[-1]  # p may lack later tokens
            if self.shared:
                self.signals.see(p, at >= 0 if self.padded else None)
            for kind, span_of in span_at.items():
                seen = p
                if span_of is not None:
                    own, others = span_of[:, None, None, queries, None], span_of[:, None, None, None, :n]
                    seen = p * ((own == others) | (own < 0) | (others < 0))  # in no span: sees all, is seen by all
                sums[kind][..., :n] += per_token(kind[0], seen, at, positions[:, None, :n], newest)

        return watch

    def _observe(
        self, layer: int, query: Query, key: KeyValue, window: int, names: tuple[str, ...] | None, more: dict[str, Any]
    ) -> Observation:
        """The observation of a layer with a window of `window` queries. names: the window holds the last queries of
        each of these spans, which no kernel scores. more: fields of the observation."""
        n, facts, device = self.prompt.positions.shape[1], self.facts, query.device
        if names is None:
            queries = query[:, :, max(0, n - window) :].clone()  # a view would keep all queries in memory
            at = self.prompt.positions.to(device)[:, max(0, n - window) :]
        else:
            if (window, names) not in self._queries:  # positions of the last queries of each span, padded in front
                tables = [spans[:n] for spans, n in zip(self._span_of[names].cpu(), self.lengths, strict=True)]
                last = [allocate.span_windows(table, max(window, 1)) for table in tables]
                self._queries[window, names] = pad_sequence(last, True, -1, "left")
            facts, at = self.facts.by("torch"), self._queries[window, names].to(device)
            place = (at + n - self.prompt.lengths[:, None].to(device)).clamp(min=0)
            queries = query.gather(2, place[:, None, :, None].expand(-1, query.shape[1], -1, query.shape[3]))
            more |= {"span_of": self._span_of[names].to(device), "span_count": self._span_counts[names]}
            more |= {"unextended": self._within.get(("marked_mass", names)), "span_local": True}
        more |= {"queries": queries, "query_positions": at, "seen": self.prompt.lengths.to(device)}
        return facts.observe(layer, key, self.seeds, **more)

    def _decide(
        self, job: EvictionJob, seen: dict[int, Observation], o: Observation, plain: Observation | None = None
    ) -> None:
        """Let a job decide the layers `seen`, together observed as `o`. plain: the observation without quotas."""
        with attempt(job):
            if job.waits:
                postpone(job, seen, o)
            else:
                stays = select_tokens(job, o, None if plain is None else select_tokens(job, plain))
                _hold(job, seen, o, stays)

    def finish(self, width: int = 0) -> None:
        """Decide for the jobs that wait for every layer's scores. `SharedCap`: the state after the prompt, and the
        first reduction where it comes at step 0.

        width: positions that the tables of signals hold, including the answer's tokens.
        """
        for job in self.jobs:
            if job.waits and job.error is None and job.reduction is None:
                with attempt(job):
                    for layer, stays in across(job).items():
                        _hold(job, {layer: job.pending[layer]}, job.pending[layer], stays)
                job.pending.clear()
                job.judged.clear()
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


def _hold(job: EvictionJob, seen: dict[int, Observation], o: Observation, stays: Tensor) -> None:
    """Store what stays of the layers `seen`, together observed as `o`, and what the job's next eviction needs."""
    again = job.condition.every is not None
    sums = {name: s for name, s in o.sums.items() if again and name in job.sums}
    whole = RaggedLayer.of(o.keys, o.values, o.positions, stays, sums)
    for (layer, each), stored in zip(seen.items(), whole.layers(o.count), strict=True):
        job.layers[layer] = stored
        if again and job.window:
            stored.remember(each.queries, each.query_positions, job.window)


def _alike_seen(first: Observation, second: Observation) -> bool:
    """Do two layers hold the same tokens, with equal shapes and softmax?"""
    same = first.positions is second.positions and first.sliding == second.sliding
    return same and first.scaling == second.scaling and first.softmax is second.softmax


# ---- KVzip's repetition: the model repeats the context, and the attention that it then pays to each token is noted


def repeat(call: Call, reader: PromptReader, ids: Tensor, positions: Tensor, cache: EngineCache) -> None:
    """Let the model repeat the context chunk by chunk after the call's request, and add the largest attention to each
    token to the observations of the jobs that need it: per KV head, and per query head after a division by the length
    of the layer's input at the query. Source: Kim et al. 2025; KVzip+ as in NVIDIA/kvpress."""
    jobs = [job for job in reader.jobs if job.repeated and job.error is None]
    for n, o in jobs[0].pending.items():
        rows, kv_heads, tokens = o.positions.shape
        heads = {"reconstruction": kv_heads, "reconstruction_per_norm": kv_heads * o.group}
        needed = set().union(*(job.repeated for job in jobs))
        best = {name: torch.zeros(rows, heads[name], tokens, device=o.positions.device) for name in needed}
        for job in jobs:
            job.pending[n] = replace(job.pending[n], sums={**job.pending[n].sums, **best})
    request = torch.tensor(call.repeat, dtype=torch.long, device=ids.device).expand(len(ids), -1)
    for a in range(0, ids.shape[1], REPEAT_CHUNK):
        text = torch.cat([request, ids[:, a : a + REPEAT_CHUNK]], 1)
        at = reader.prompt.lengths[:, None] + torch.arange(text.shape[1], device=ids.device)
        repeats = _Repeat(jobs[0], at, len(call.repeat), positions[:, a : a + REPEAT_CHUNK] >= 0)
        with _lengths(call.model, repeats.lengths):
            call.run(text, at, cache.rows(torch.arange(len(ids), device=ids.device)), repeats)


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
        self, layer: int, query: Query, key: KeyValue, value: KeyValue, scaling: Any, sliding: int | None = None
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
