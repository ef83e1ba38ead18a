"""From prompts to rows: one pass of a prompt serves all conditions that compress the same part of it, and reduces each
layer as soon as it is computed."""

import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kvrepro.engine import allocate
from kvrepro.engine.attention import attend, attend_prompt, per_token
from kvrepro.engine.cache import EngineCache, RaggedLayer
from kvrepro.engine.condition import Chunked, Condition, Offline, Prompt
from kvrepro.engine.evict import Decisions, EvictionJob, Observed, Prompts, attempt, evict_shared, generator
from kvrepro.engine.facts import ModelFacts, attention_modules
from kvrepro.engine.observe import Observation
from kvrepro.engine.policy import REPEATED, budget_of
from kvrepro.engine.rows import Call, Extend, Row, Rows, evict_rows, kept_sets
from kvrepro.engine.shapes import KeyValue, Mask, Positions, Query
from kvrepro.engine.shared import PromptSignals
from kvrepro.errors import InputError

SPAN_SUMS = {"span_mass", "marked_mass"}
REPEAT_CHUNK = 2048  # tokens that KVzip's repetition reads at a time


def boundary(text: Prompt, c: Condition) -> int:
    """Number of the prompt's first tokens that `c` compresses. The model reads the rest after the compression.

    Raises InputError for a span that the prompt does not have, and where there is nothing to compress or to split.
    """
    for name in {*c.whitelist, *c.spans, *({c.until} - {"", *text.turns})}:
        text.ensure_span(name)
    end = text.turns.get(c.until, min(text.spans.get(c.until) or [len(text.ids)]))
    if end < 1:
        raise InputError(f"{c.until!r} begins at token {end}: nothing stands before it to compress")
    if c.fair is not None and not any(min(text.spans[name]) < end for name in c.spans or text.spans):
        raise InputError(f"fair {c.fair:g} with 0 spans among the {end} tokens to compress: mark some, or drop fair")
    return end


# ---- passes


def read(call: Call, members: list[int], columns: list[int]) -> Iterator[Rows]:
    """Rows of these prompts and conditions, which share a pass (`batches.passes`), after the eviction at the end of
    their compressed parts. Offline, the first prompt's prefix is compressed, and the others get copies. A condition
    that fails is tried again with each prompt alone."""
    c = call.conditions[columns[0]]
    readers = members[:1] if isinstance(c.regime, Offline) else members
    ends = [boundary(call.texts[i], c) for i in readers]
    began = time.perf_counter()
    blocks = (_chunked if isinstance(c.regime, Chunked) else _whole)(call, readers, ends, columns)
    if call.device.type == "cuda":
        torch.cuda.synchronize()
    seconds = (time.perf_counter() - began) / (len(readers) * len(columns))
    for rows in blocks:
        ends_of_rows = [ends[readers.index(i)] for i, _ in rows.tags]
        for row, note in zip(rows.rows, kept_sets(call.facts, rows, ends_of_rows, call.kept_sets), strict=True):
            row.notes = note | {"prefill_seconds": seconds}
    failed = {j: error for j in columns if (error := call.failed.get((readers[0], j))) is not None}
    for i in members[len(readers) :]:
        call.failed |= {(i, j): error for j, error in failed.items()}
        for rows in blocks:
            copied = {"prefill_seconds": 0.0}
            copies = [Row((i, row.tag[1]), call.texts[i], row.job, row.notes | copied) for row in rows.rows]
            yield replace(rows.take(list(range(len(rows)))), rows=copies)
    while blocks:
        yield blocks.pop(0)
    for i in readers if failed and len(readers) > 1 else ():
        for j in failed:
            del call.failed[i, j]
        yield from read(call, [i], list(failed))


def _jobs(call: Call, members: list[int], ends: list[int], columns: list[int], positions: Tensor) -> list[EvictionJob]:
    """One job per condition, with one row for each of these prompts."""
    texts = [call.texts[i] for i in members]
    of_call = call.seed % 2**31 << 32  # a tensor holds numbers below 2^63
    seeds = [zlib.crc32(str(text.ids[:end]).encode()) + of_call for text, end in zip(texts, ends, strict=True)]
    prompts, jobs = Prompts(positions, [text.spans for text in texts], seeds, ends), []
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
    ids, positions = call.padded([call.texts[i].ids[:end] for i, end in zip(members, ends, strict=True)])
    jobs = _jobs(call, members, ends, columns, positions)
    reader, cache = PromptReader(call.facts, jobs), EngineCache(call.model.config)
    before = torch.tensor([call.facts.held(end) for end in ends], device=call.device)[:, None]
    with allocate.by_kernels(reader.kernels):
        logits = call.forward(ids, positions, cache, reader)
        reader.decisions.decide(reader.decisions.joined())
        if repeating := [job for job in jobs if job.repeated and job.error is None]:
            repeat(call, repeating, ids, positions, cache)
        reader.decisions.finish()
        reader.finish_shared(width=max(ends) + call.max_new_tokens)
    finished = []
    for job, j in zip(jobs, columns, strict=True):
        if job.error is not None:
            call.fail({(i, j): job.error for i in members})
            continue
        survivors = cache.rows(torch.arange(len(members), device=call.device))
        survivors.ragged = {n: job.layers[n] for n in sorted(job.layers)}
        kept = torch.cat([survivors.ragged[n].held().to(call.device) for n in call.facts.evictable], 1)
        lost = (kept < before).any(1) if job.signals is None else job.signals.evicted > 0
        rows = [Row((i, j), call.texts[i], job.row(b)) for b, i in enumerate(members)]
        finished.append(Rows(rows, survivors, logits, reader.prompt.lengths.clone(), lost.long(), job.signals))
        job.layers = {}
    return finished


def _chunked(call: Call, members: list[int], ends: list[int], columns: list[int]) -> list[Rows]:
    """Prompts of one length in chunks, each attending to what is left of the earlier ones and to itself."""
    end, texts, facts = ends[0], [call.texts[i] for _ in columns for i in members], call.facts
    jobs = _jobs(call, members, ends, columns, call.padded([text.ids[:end] for text in texts[: len(members)]])[1])
    tags = [(i, j) for j in columns for i in members]
    of_rows = [job.row(b) for job in jobs for b in range(len(members))]
    cache, zeros = EngineCache(call.model.config), torch.zeros(len(tags), dtype=torch.long, device=call.device)
    for n in facts.attention:
        output, kv_heads = facts.outputs[n], facts.kv_heads[n]
        empty = torch.zeros(len(tags), kv_heads, 0, output.shape[1], dtype=call.model.dtype, device=output.device)
        nowhere = empty[..., 0].long()
        sums = {name: nowhere.float() for job in jobs for name in job.sums if n in facts.evictable}
        cache.ragged[n] = RaggedLayer.of(empty, empty, nowhere, nowhere.bool(), sums)
    rows = Rows([*map(Row, tags, texts, of_rows)], cache, torch.empty(0), zeros, zeros)
    window = max(job.window for job in jobs)
    regime: Any = jobs[0].condition.regime  # `last_chunk` evicts after all, `budget` what exceeds the whole budget
    for a in range(0, end, regime.chunk):
        seen = min(end, a + regime.chunk)
        ids, positions = call.padded([text.ids[a:seen] for text in texts], [a] * len(texts))
        rows.logits = call.forward(ids, positions, cache, Extend(call, cache, positions, window))
        rows.seen = zeros + seen
        for job in of_rows:
            job.budgets = [budget_of(job.condition, facts.held(end if regime.when == "budget" else seen))]
        if seen == end or regime.when != "last_chunk":
            rows.evictions = rows.evictions + evict_rows(facts, rows)
    for layer in cache.ragged.values():  # no eviction follows that would need these
        layer.sums, layer.tail_sums, layer.queries, layer.query_positions = {}, {}, None, None
    call.fail({tags[row]: error for row, error in rows.failed.items()})
    living = [row for row in range(len(rows)) if row not in rows.failed]
    return [] if not living else [rows if len(living) == len(rows) else rows.take(living)]


# ---- attention of a whole prompt


class PromptReader:
    """Attention of whole prompts, flush right. Each job keeps its own selection of every layer's tokens."""

    def __init__(self, facts: ModelFacts, jobs: Sequence[EvictionJob]):
        self.jobs, self.prompt = jobs, jobs[0].prompts
        self.shared = [job for job in jobs if job.reduction is not None]
        # `PromptSignals` watches probabilities, which only plain PyTorch shows
        self.facts = replace(facts, backend="torch") if self.shared else facts
        self.kernels = self.facts.backend == "triton"
        self.signals = PromptSignals([job.reduction for job in self.shared if job.reduction is not None])
        self.padded = int(self.prompt.lengths.min()) < self.prompt.positions.shape[1]
        self.seeds = torch.tensor(self.prompt.seeds, device=self.prompt.positions.device)
        evicting = [job for job in jobs if job.evictor is not None]
        for job in evicting:
            _ = job.budget, job.asked  # copied to the device here, since later the copy would wait for the pass
        self.decisions = Decisions(evicting, self.facts.backend, _hold)
        self.sums = {name for job in evicting for name in job.sums - REPEATED}
        self.within: dict[str, Tensor] = {}  # the span that each position lies in, for each sum inside spans
        for spans in [job.condition.spans for job in jobs if job.condition.fair is not None][:1]:
            self.within["span_mass"] = self.prompt.span_of(spans)
            self.within["marked_mass"] = self.prompt.span_of(spans, extended=False)
        self._where: dict[tuple[Any, ...], Positions] = {}  # equal shapes imply equal positions in a pass
        self._queries: dict[int, Tensor] = {}  # positions of the last queries of each span, by window

    def attend(
        self, layer: int, query: Query, key: KeyValue, value: KeyValue, scaling: Any, sliding: int | None = None
    ) -> Tensor:
        positions, evictable = self.prompt.positions.to(query.device), layer in self.facts.evictable
        n = positions.shape[1]
        names = self.sums if evictable else set()
        within = {name: self.within[name].to(positions).gather(1, positions.clamp(min=0)) for name in names & SPAN_SUMS}
        sums = {name: key.new_zeros(*key.shape[:3], dtype=torch.float32) for name in names}
        beyond = sliding is not None and n > sliding
        known = None  # log-sum-exp and outputs, if a kernel gave them

        def watch(p: Tensor, queries: slice) -> None:
            at, tokens = positions[:, queries], p.shape[-1]  # p may lack later tokens
            if self.shared:
                self.signals.see(p, at >= 0 if self.padded else None)
            for name, total in sums.items():
                seen = p
                if (span_of := within.get(name)) is not None:
                    own, others = span_of[:, None, None, queries, None], span_of[:, None, None, None, :tokens]
                    seen = p * ((own == others) | (own < 0) | (others < 0))  # in no span: sees all, is seen by all
                total[..., :tokens] += per_token(name, seen, at, positions[:, None, :tokens], positions.amax(1))

        if beyond or self.shared or (sums and not self.kernels):
            if self.shared:
                self.signals.open(query, key)
            part, watches = (key, value, positions[:, None]), watch if self.shared or sums else None
            out = attend(query, positions, [part], scaling, sliding, watches, prompt=not self.padded)
        else:
            padding = (n - self.prompt.lengths).to(query.device) if self.padded else None
            out, log_sums = self._fast(query, key, value, scaling, padding)
            known = None if log_sums is None else (log_sums, out)
            for name in sums:
                from kvrepro_kernels import column_mass

                sums[name] = column_mass(query, key, log_sums, scale=scaling, starts=padding, spans=within.get(name))
        forgets = beyond and layer in self.facts.sliding  # drops tokens that no later query sees
        held = slice(n - sliding + 1 if forgets else 0, n)
        key, value = key[:, :, held], value[:, :, held]
        where = self._where.setdefault((key.device, *key.shape), positions[:, None, held].expand(*key.shape[:3]))
        for job in self.jobs:
            if job.error is None and (job.evictor is None or not evictable):
                job.layers[layer] = RaggedLayer.of(key, value, where, where >= 0, {})
        if evictable:
            shown = {"values": value, "positions": where, "scaling": scaling}
            shown["sums"] = {name: s[:, :, held] for name, s in sums.items()}
            observed = cache(lambda window, fair: self._observe(layer, query, key, window, fair, shown, known))
            self.decisions.see(layer, key, lambda job, fair: observed(job.window, fair))
        return out

    def _fast(
        self, query: Query, key: KeyValue, value: KeyValue, scaling: Any, padding: Tensor | None
    ) -> tuple[Tensor, Any]:
        """(output, log-sum-exp if by kernels) by a causal attention that knows no padding: the prompts are moved to the
        front, and back. padding: places before each prompt's first token, int64 [batch]; their results are 0 and -inf.
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

    def _observe(
        self, layer: int, query: Query, key: KeyValue, window: int, fair: bool, shown: dict[str, Any], known: Any
    ) -> Observation:
        """The observation of a layer with a window of `window` queries; if `fair`, of each span's last ones, which no
        kernel scores. shown: fields of the observation. known: log-sum-exp and outputs, if a kernel gave them."""
        n, device, facts = self.prompt.positions.shape[1], query.device, self.facts
        first = max(0, n - window)
        more = shown | {"seen": self.prompt.lengths.to(device)}
        if not fair:
            queries = query[:, :, first:].clone()  # a view would keep all queries in memory
            at = self.prompt.positions.to(device)[:, first:]
            if known is not None and window:
                more["log_sums"] = known[0][:, :, first:].clone()
                more["window_outputs"] = known[1][:, first:].transpose(1, 2).contiguous()
        else:
            if window not in self._queries:
                spans = zip(self.within["span_mass"].cpu(), self.prompt.lengths.tolist(), strict=True)
                last = [allocate.span_windows(table[:length], max(window, 1)) for table, length in spans]
                self._queries[window] = pad_sequence(last, True, -1, "left")
            facts, at = replace(facts, backend="torch"), self._queries[window].to(device)
            place = (at + n - self.prompt.lengths[:, None].to(device)).clamp(min=0)
            queries = query.gather(2, place[:, None, :, None].expand(-1, query.shape[1], -1, query.shape[3]))
            more |= {"span_of": self.within["span_mass"].to(device), "span_local": True}
            more["unextended"] = self.within["marked_mass"].to(device) if "marked_mass" in self.sums else None
        return facts.observe(layer, key, self.seeds, queries=queries, query_positions=at, **more)

    def finish_shared(self, width: int) -> None:
        """`SharedCap`: the state after the prompt, and the first reduction where it comes at step 0. width: positions
        that the tables of signals hold, including the answer's tokens."""
        of = cache(lambda reduction, waits: self.signals.signals(reduction, self.prompt.positions, width, waits))
        for job in self.shared:
            signals = job.signals = of(job.reduction, job.first_step > 0)  # never changes in place
            with attempt(job):
                if job.first_step == 0:
                    signals = job.signals = evict_shared(job, signals, 0)
                for layer, o in job.pending.items():
                    stays = signals.held_at(o.positions, by_any=True)
                    job.layers[layer] = RaggedLayer.of(o.keys, o.values, o.positions, stays, {})
            job.pending.clear()


def _hold(job: EvictionJob, observed: Observed, o: Observation, stays: Mask) -> None:
    """Store what stays of the layers `observed`, together seen as `o`, and what the job's next eviction needs."""
    again = job.condition.every is not None
    sums = {name: s for name, s in o.sums.items() if again and name in job.sums}
    whole = RaggedLayer.of(o.keys, o.values, o.positions, stays, sums)
    for (layer, each), stored in zip(observed.items(), whole.layers(o.count), strict=True):
        job.layers[layer] = stored
        if again and job.window:
            stored.remember(each.queries, each.query_positions, job.window)


# ---- KVzip's repetition: the model repeats the context, and the attention that it then pays to each token is noted


def repeat(call: Call, jobs: list[EvictionJob], ids: Tensor, positions: Tensor, cache: EngineCache) -> None:
    """Let the model repeat the context chunk by chunk after the call's request, and add the largest attention to each
    token to the observations of `jobs`: per KV head, and per query head after a division by the length of the layer's
    input at the query. Source: Kim et al. 2025; KVzip+ as in NVIDIA/kvpress."""
    needed = set().union(*(job.repeated for job in jobs))
    for n, o in jobs[0].pending.items():
        rows, kv_heads, tokens = o.positions.shape
        heads = {"reconstruction": kv_heads, "reconstruction_per_norm": kv_heads * o.group}
        best = {name: torch.zeros(rows, heads[name], tokens, device=o.positions.device) for name in needed}
        for job in jobs:
            job.pending[n] = replace(job.pending[n], sums={**job.pending[n].sums, **best})
    request = torch.tensor(call.repeat, dtype=torch.long, device=ids.device).expand(len(ids), -1)
    lengths: dict[int, Tensor] = {}  # by layer: ||h_t|| of its input, [batch, text]

    def note(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        lengths[module.layer_idx] = (args[0] if args else kwargs["hidden_states"]).float().norm(dim=-1)

    hooks = [m.register_forward_pre_hook(note, with_kwargs=True) for m in attention_modules(call.model).values()]
    try:
        for a in range(0, ids.shape[1], REPEAT_CHUNK):
            text = torch.cat([request, ids[:, a : a + REPEAT_CHUNK]], 1)
            at = (positions[:, -1:] + 1) + torch.arange(text.shape[1], device=ids.device)
            repeats = _Repeat(jobs[0], at, len(call.repeat), lengths)
            copy = cache.rows(torch.arange(len(ids), device=ids.device))
            call.forward(text, at, copy, repeats, padded=False)
    finally:
        for hook in hooks:
            hook.remove()


@dataclass
class _Repeat:
    """Attention of a repeated chunk over the context and itself; its tokens are not stored."""

    job: EvictionJob
    positions: Tensor
    request: int  # number of the first tokens, which only ask to repeat
    lengths: dict[int, Tensor]

    def attend(
        self, layer: int, query: Query, key: KeyValue, value: KeyValue, scaling: Any, sliding: int | None = None
    ) -> Tensor:
        at, o = self.positions.to(query.device), self.job.pending.get(layer)
        new = key, value, at[:, None]
        if o is None:
            return attend(query, at, [*self.job.layers[layer].parts(), new], scaling, sliding)

        def watch(p: Tensor, queries: slice) -> None:
            first = max(0, self.request - queries.start)
            seen = p[:, :, :, first:, : o.positions.shape[2]]
            h = self.lengths[layer][:, queries.start + first : queries.stop, None]
            for name in REPEATED & o.sums.keys() if seen.shape[3] else ():
                per_norm = name == "reconstruction_per_norm"
                largest = (seen / h[:, None, None]).amax(3).flatten(1, 2) if per_norm else seen.amax((2, 3))
                torch.maximum(o.sums[name], largest, out=o.sums[name])

        return attend(query, at, [(o.keys, o.values, o.positions), new], scaling, sliding, watch)
