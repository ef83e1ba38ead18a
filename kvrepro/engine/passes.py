"""From prompts to rows: one pass of a prompt serves all conditions that compress the same part of it."""

import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kvrepro.engine.allocate import by_kernels
from kvrepro.engine.backend import in_few_launches
from kvrepro.engine.cache import EngineCache, Extend, RaggedLayer
from kvrepro.engine.condition import Chunked, Condition, Offline, Prompt, SharedCap
from kvrepro.engine.evict import EvictionJob, Prompts, generator
from kvrepro.engine.facts import ATTENDING, ModelFacts, layer_types
from kvrepro.engine.policy import Policy, budget_of, find
from kvrepro.engine.prefill import PrefillState, reconstruct
from kvrepro.engine.rows import Rows, Tag, evict_rows, kept_by_all_layers, kept_sets
from kvrepro.engine.shapes import PreTrainedModel
from kvrepro.errors import InputError

Prefix = tuple[tuple[Any, ...], int, list[Rows]]  # what identifies it, the prompt that it was read with, its rows


@dataclass
class Call:
    """What one call of `generate` was given, and what its parts share."""

    model: PreTrainedModel
    texts: list[Prompt]
    conditions: list[Condition]
    new_tokens: list[int]  # of the answer to each text, at most
    facts: ModelFacts
    repeat: list[int] = field(default_factory=list)
    kept_sets: bool = False
    backend: str = "torch"
    seed: int = 0
    isolate: bool = False  # a row that fails leaves the others alone; otherwise its error is raised
    notes: dict[Tag, dict[str, Any]] = field(default_factory=dict)  # fields of `Generation` that the prefill fills
    failed: dict[Tag, Exception] = field(default_factory=dict)
    prefixes: dict[tuple[int, ...], Prefix] = field(default_factory=dict)  # offline, the last one, by conditions
    # A study may replace policies of the catalogue, and watch which tokens the rows pick at each step.
    policies: dict[str, Policy] = field(default_factory=dict)
    watch: Callable[[Rows, Tensor], None] | None = None
    captures: int = 3  # failed captures of a step that are still allowed before capturing is given up
    device: torch.device = field(init=False)  # the model's; `model.device` searches the weights at each access

    def __post_init__(self) -> None:
        self.facts, self.device = self.facts.by(self.backend), self.model.device

    def fail(self, errors: dict[Tag, Exception]) -> None:
        """Note the errors of rows, or raise the first."""
        if errors and not self.isolate:
            raise next(iter(errors.values()))
        self.failed |= errors

    @property
    def max_new_tokens(self) -> int:
        """The most tokens of any answer."""
        return max(self.new_tokens, default=0)

    @property
    def token_bytes(self) -> int:
        """Bytes of the keys and values of one token in all layers."""
        layers = sum(2 * self.facts.kv_heads[n] * self.facts.outputs[n].shape[1] for n in self.facts.attention)
        return int(layers * self.model.dtype.itemsize)

    def policy(self, j: int) -> Policy | None:
        """The policy of condition `j`; None for the full cache."""
        name = self.conditions[j].policy
        return None if name == "full" else self.policies.get(name) or find(name)

    def evictor(self, j: int) -> Policy | None:
        """The policy of condition `j` if it evicts, else None."""
        policy = self.policy(j)
        return policy if policy is not None and policy.frees else None

    def forward(self, ids: Tensor, positions: Tensor, cache: EngineCache, attention: Any) -> Tensor:
        """Logits of the next token, [batch, vocabulary]."""
        padding = {"attention_mask": (positions >= 0).long()} if bool((positions < 0).any()) else {}
        return self.run(ids, positions.clamp(min=0), cache, attention, **padding)

    def run(self, ids: Tensor, positions: Tensor, cache: EngineCache, attention: Any, **padding: Tensor) -> Tensor:
        """`forward` without looking for padding, which would wait for the GPU; `padding` is the model's attention mask.
        With backend triton on a GPU, norms and rotations are computed by kernels too."""
        kernels = self.backend == "triton" and self.device.type == "cuda"
        with in_few_launches(self.model) if kernels else nullcontext():
            return self.model(
                input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=1,
                kvrepro=attention, **padding,
            ).logits[:, -1]  # fmt: skip

    def padded(self, texts: Sequence[Sequence[int]], start: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
        """(ids, positions) `[batch, longest]`, padded on the left; position -1 marks padding."""
        ids = [torch.from_numpy(np.array(text, dtype=np.int64)).to(self.device) for text in texts]  # twice as fast
        at = [torch.arange(len(x), device=self.device) + a for x, a in zip(ids, start or [0] * len(ids), strict=True)]
        return pad_sequence(ids, True, 0, "left"), pad_sequence(at, True, -1, "left")


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


def planned(
    call: Call, block: Sequence[int], wanted: Sequence[Sequence[int]], room: float
) -> list[tuple[list[int], list[int]]]:
    """(prompts, conditions) of each forward pass over a block of prompts: conditions that the same prompts have, with
    equal boundaries and, of `Chunked`, equal chunks, as far as their rows take at most `room` bytes."""
    columns_by_pass: dict[tuple[Any, ...], list[int]] = {}
    for j in dict.fromkeys(j for i in block for j in wanted[i]):
        c, members = call.conditions[j], tuple(i for i in block if j in wanted[i])
        ends = tuple(boundary(call.texts[i], c) for i in members)
        chunk = c.regime.chunk if isinstance(c.regime, Chunked) else None
        watched = call.backend == "triton" and isinstance(c.regime, SharedCap)  # plain PyTorch runs this pass
        kind = members, ends, isinstance(c.regime, Offline), chunk, watched
        columns_by_pass.setdefault(kind, []).append(j)
    return [
        part for kind, columns in columns_by_pass.items() for part in fitting(call, list(kind[0]), columns, room)
    ]


def fitting(call: Call, members: list[int], columns: list[int], room: float) -> list[tuple[list[int], list[int]]]:
    """Prompts and conditions of passes whose rows take at most `room` bytes: first the prompts are halved, then the
    conditions of a single prompt; a single row may take more."""
    pairs = [(i, j) for i in members for j in columns]
    if len(pairs) == 1 or call.token_bytes * sum(_row_tokens(call, i, j) for i, j in pairs) <= room:
        return [(members, columns)]
    if len(members) > 1:
        half = len(members) // 2
        return fitting(call, members[:half], columns, room) + fitting(call, members[half:], columns, room)
    half = len(columns) // 2
    return fitting(call, members, columns[:half], room) + fitting(call, members, columns[half:], room)


def room_taken(call: Call, rows: Rows) -> int:
    """Bytes of keys and values that rows hold, on a GPU with those that their answers add until the next eviction; on a
    CPU these have room beside `CPU_ROOM`."""
    if call.device.type == "cpu":
        return rows.cache.bytes
    new = call.new_tokens
    more = [min(new[i], c.every or new[i]) for (i, _), c in zip(rows.tags, rows.conditions, strict=True)]
    return rows.cache.bytes + call.token_bytes * sum(more)


def _row_tokens(call: Call, i: int, j: int) -> int:
    """The most tokens that a layer holds of prompt `i` and its answer under condition `j`."""
    c, text, evictor = call.conditions[j], call.texts[i], call.evictor(j)
    end = boundary(text, c)
    evicts = evictor is not None
    if evictor is not None and isinstance(c.regime, SharedCap):
        evicts &= evictor.first_step(evictor.reading(c.reading, c.switches)) == 0
    kept = min(end, budget_of(c, end)) if evicts else end
    return kept + len(text.ids) - end + call.new_tokens[i]


def read(call: Call, members: list[int], columns: list[int]) -> list[Rows]:
    """Rows of these prompts and conditions after the eviction at the end of their compressed parts."""
    c = call.conditions[columns[0]]
    ends = [boundary(call.texts[i], c) for i in members]
    return (_reused if isinstance(c.regime, Offline) else _passes)(call, members, ends, columns)


def _passes(call: Call, members: list[int], ends: list[int], columns: list[int]) -> list[Rows]:
    """All prompts in one pass if they can share it; a condition that fails is tried again with each prompt alone."""
    chunked = isinstance(call.conditions[columns[0]].regime, Chunked)
    repeated = any(policy.repeated for j in columns if (policy := call.evictor(j)) is not None)
    if chunked or repeated:  # neither a chunk nor a repetition is padded
        rows = []
        for end in dict.fromkeys(ends):
            same_end = [i for i, e in zip(members, ends, strict=True) if e == end]
            rows += _pass(call, same_end, [end] * len(same_end), columns)
        return rows
    rows = _pass(call, members, ends, columns)
    failed = [j for j in columns if len(members) > 1 and (members[0], j) in call.failed]
    for i, end in zip(members, ends, strict=True) if failed else ():
        call.failed = {tag: error for tag, error in call.failed.items() if tag[0] != i or tag[1] not in failed}
        rows += _pass(call, [i], [end], failed)
    return rows


def _reused(call: Call, members: list[int], ends: list[int], columns: list[int]) -> list[Rows]:
    """Compress each prefix once, and give each prompt that begins with it a copy of the survivors."""
    prompts_by_prefix: dict[tuple[Any, ...], list[int]] = {}
    for i, end in zip(members, ends, strict=True):
        text = call.texts[i]
        marked = tuple((name, tuple(at for at in where if at < end)) for name, where in text.spans.items())
        prompts_by_prefix.setdefault((tuple(text.ids[:end]), marked), []).append(i)
    copies = []
    for prefix, same in prompts_by_prefix.items():
        last = call.prefixes.pop(tuple(columns), None)
        if last is None or last[0] != prefix:
            last = prefix, same[0], _passes(call, same[:1], [len(prefix[0])], columns)
        call.prefixes[tuple(columns)] = last
        _, reader, blocks = last
        for i in same:  # an error on a prefix is an error of every prompt with it
            call.failed |= {(i, j): call.failed[reader, j] for j in columns if (reader, j) in call.failed}
            copies += [_copied(call, rows, reader, i) for rows in blocks]
    return copies


def _copied(call: Call, rows: Rows, reader: int, i: int) -> Rows:
    """A copy for prompt `i` of the rows of a prefix, which was read with the prompt `reader`."""
    copy = rows.take(list(range(len(rows))))
    copy.tags, copy.texts = [(i, j) for _, j in rows.tags], [call.texts[i]] * len(rows)
    for _, j in rows.tags:
        call.notes[i, j] = call.notes[reader, j] | ({} if i == reader else {"prefill_seconds": 0.0})
    return copy


def _pass(call: Call, members: list[int], ends: list[int], columns: list[int]) -> list[Rows]:
    """One timed pass, which notes what each row kept."""
    began = time.perf_counter()
    run = _chunked if isinstance(call.conditions[columns[0]].regime, Chunked) else _prefill
    rows_read = run(call, members, ends, columns)
    if call.device.type == "cuda":
        torch.cuda.synchronize()
    seconds = (time.perf_counter() - began) / (len(members) * len(columns))
    for rows in rows_read:
        if rows.signals is not None:
            kept = kept_by_all_layers(rows.signals)
        else:
            kept = kept_sets(call.facts, rows.cache, [ends[members.index(i)] for i, _ in rows.tags], call.kept_sets)
        for tag, note in zip(rows.tags, kept, strict=True):
            call.notes[tag] = note | {"prefill_seconds": seconds}
    return rows_read


def _jobs(
    call: Call, members: list[int], ends: list[int], columns: list[int], positions: Tensor | None = None
) -> list[EvictionJob]:
    """One job per condition, with one row for each of these prompts."""
    texts = [call.texts[i] for i in members]
    if positions is None:
        positions = call.padded([text.ids[:end] for text, end in zip(texts, ends, strict=True)])[1]
    compressed = [text.ids[:end] for text, end in zip(texts, ends, strict=True)]
    of_call = call.seed % 2**31 << 32  # a tensor holds numbers below 2^63
    seeds = [zlib.crc32(str(ids).encode()) + of_call for ids in compressed]  # whatever the place in a batch
    prompts = Prompts(positions, [text.spans for text in texts], seeds)
    jobs = []
    for j in columns:
        c = call.conditions[j]
        policy = call.policy(j)
        parameters = policy.reading(c.reading, c.switches) if policy else {}
        sizes = [budget_of(c, call.facts.held(end)) for end in ends]
        draws = [generator(parameters, text.ids) for text in texts] if policy and policy.shared else []
        jobs.append(EvictionJob([c] * len(members), call.evictor(j), parameters, sizes, prompts, draws))
    return jobs


def _prefill(call: Call, members: list[int], ends: list[int], columns: list[int]) -> list[Rows]:
    """One forward pass for all of `columns`; a layer's full keys and values are freed before the next layer."""
    texts = [call.texts[i] for i in members]
    ids, positions = call.padded([text.ids[:end] for text, end in zip(texts, ends, strict=True)])
    jobs = _jobs(call, members, ends, columns, positions)
    prompts = jobs[0].prompts
    attention = PrefillState(call.facts, prompts, jobs)
    cache = EngineCache(call.model.config)
    held = torch.tensor([call.facts.held(end) for end in ends], device=call.device)[:, None]
    with by_kernels(attention.kernels):
        logits = call.forward(ids, positions, cache, attention)
        attention.decide_waiting()
        if any(job.repeated for job in jobs if job.error is None):
            reconstruct(call.model, attention, call.repeat, ids, positions, cache)
        attention.finish(width=max(ends) + call.max_new_tokens)
    finished = {}
    for job, j in zip(jobs, columns, strict=True):
        if job.error is not None:
            continue
        survivors = cache.rows(torch.arange(len(members), device=call.device))
        survivors.ragged = {n: job.layers[n] for n in sorted(job.layers)}
        seen = torch.cat([survivors.ragged[n].held().to(held.device) for n in call.facts.evictable], 1)
        lost = (seen < held).any(1) if job.signals is None else job.signals.evicted > 0
        tags, single = [(i, j) for i in members], [job.row(b) for b in range(len(members))]
        finished[j] = Rows(tags, single, texts, survivors, logits, prompts.lengths.clone(), lost.long(), job.signals)
        job.layers = {}
    for job, j in zip(jobs, columns, strict=True):
        if job.error is not None:
            call.fail({(i, j): job.error for i in members})
    return [finished[j] for job, j in zip(jobs, columns, strict=True) if job.error is None]


def _chunked(call: Call, members: list[int], ends: list[int], columns: list[int]) -> list[Rows]:
    """The prompt in chunks, each attending to what is left of the earlier ones and to itself."""
    jobs = _jobs(call, members, ends, columns)
    row_jobs = [job.row(b) for job in jobs for b in range(len(members))]
    texts = [call.texts[i] for _ in jobs for i in members]
    ids_of = [call.texts[i].ids[:end] for _ in jobs for i, end in zip(members, ends, strict=True)]
    window = max(job.window for job in jobs)
    chunk = getattr(jobs[0].condition.regime, "chunk", 0)
    cache = EngineCache(call.model.config)
    _open(call, cache, len(texts), {n for job in jobs for n in job.sums})
    lengths = torch.tensor([len(ids) for ids in ids_of], device=call.device)
    tags = [(i, j) for j in columns for i in members]
    rows = Rows(tags, row_jobs, texts, cache, torch.empty(0), torch.zeros_like(lengths), torch.zeros_like(lengths))
    for a in range(0, int(lengths.max()), chunk):
        ids, positions = call.padded([t[a : a + chunk] for t in ids_of], [a] * len(ids_of))
        rows.logits = call.forward(ids, positions, cache, Extend(cache, positions, window))
        rows.seen = torch.minimum(lengths, rows.seen + chunk)
        last = a + chunk >= int(lengths.max())
        budgets = [_chunk_budget(job, call.facts, s, last) for job, s in zip(row_jobs, rows.seen.tolist(), strict=True)]
        rows.calls += evict_rows(call.facts, rows, budgets)
    for layer in cache.ragged.values():  # no eviction follows that would need these
        layer.sums, layer.queries, layer.query_positions = {}, None, None
    call.fail({rows.tags[row]: error for row, error in rows.failed.items()})
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
    when = getattr(job.condition.regime, "when", "last_chunk")
    if last or when == "budget":
        return job.budgets[0]
    return seen if when == "last_chunk" else budget_of(job.condition, facts.held(seen))


def check_shared(model: PreTrainedModel) -> None:
    """Raise InputError for a model in which one set of tokens cannot serve all layers."""
    check_attention_only(model)
    counts = sorted(set(ModelFacts.of(model).kv_heads.values()))
    if len(counts) > 1:
        named = " and ".join(map(str, counts))
        raise InputError(f"layers have {named} KV heads: one set of tokens for all needs equally many in each")


def check_attention_only(model: PreTrainedModel) -> None:
    """Raise InputError for a model with layers that hold no keys and values, or a recurrent state beside them."""
    if unsuitable := ", ".join(sorted(set(layer_types(model.config.get_text_config())) - ATTENDING)):
        raise InputError(f"layers of type {unsuitable} hold no tokens to evict: use an attention-only model")
