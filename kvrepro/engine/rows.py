"""Rows, one per (prompt, condition), with their caches: how the model reads on for them, and how they lose tokens."""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kvrepro.engine import shared
from kvrepro.engine.attention import LOW_QUERIES, attend, per_token
from kvrepro.engine.backend import in_few_launches
from kvrepro.engine.cache import SLIDE, EngineCache, Shown, joined_caches
from kvrepro.engine.condition import Condition, Prompt
from kvrepro.engine.evict import Decisions, EvictionJob, Observed, attempt, evict_shared
from kvrepro.engine.facts import ModelFacts
from kvrepro.engine.observe import Observation
from kvrepro.engine.policy import Rule
from kvrepro.engine.score.cumulative import page_mask
from kvrepro.engine.shapes import KeyValue, Mask, PreTrainedModel, Query, TokenInts
from kvrepro.engine.shared import StepSignals

Tag = tuple[int, int]  # (prompt, condition)


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
    failed: dict[Tag, Exception] = field(default_factory=dict)
    watch: Callable[["Rows", Tensor], None] | None = None  # for a study: sees the token that each row picks at a step
    captures: int = 3  # failed captures of a step that are still allowed before capturing is given up

    def __post_init__(self) -> None:
        self.facts = replace(self.facts, backend=self.backend)
        self.device = self.model.device  # which searches the weights at each access
        self.rules = [Rule.of(c) for c in self.conditions]  # None: the full cache
        self.max_new_tokens = max(self.new_tokens, default=0)
        numbers = sum(2 * self.facts.kv_heads[n] * self.facts.outputs[n].shape[1] for n in self.facts.attention)
        self.token_bytes = numbers * self.model.dtype.itemsize  # of one token's keys and values in all layers

    def fail(self, errors: dict[Tag, Exception]) -> None:
        """Note the errors of rows, or raise the first."""
        if errors and not self.isolate:
            raise next(iter(errors.values()))
        self.failed |= errors

    def forward(
        self, ids: Tensor, positions: Tensor, cache: EngineCache, attention: Any, padded: bool = True
    ) -> Tensor:
        """Logits of the next token, [batch, vocabulary]. With backend triton on a GPU, norms and rotations are computed
        by kernels too. padded: look for padding, which waits for the GPU."""
        more = {"past_key_values": cache, "use_cache": True, "logits_to_keep": 1, "kvrepro": attention}
        if padded and bool((positions < 0).any()):
            more["attention_mask"], positions = (positions >= 0).long(), positions.clamp(min=0)
        kernels = self.backend == "triton" and self.device.type == "cuda"
        with in_few_launches(self.model) if kernels else nullcontext():
            return self.model(input_ids=ids, position_ids=positions, **more).logits[:, -1]

    def padded(self, texts: Sequence[Sequence[int]], start: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
        """(ids, positions) `[batch, longest]`, padded on the left; position -1 marks padding."""
        ids = [torch.from_numpy(np.array(text, dtype=np.int64)).to(self.device) for text in texts]  # twice as fast
        at = [torch.arange(len(x), device=self.device) + a for x, a in zip(ids, start or [0] * len(ids), strict=True)]
        return pad_sequence(ids, True, 0, "left"), pad_sequence(at, True, -1, "left")


@dataclass
class Row:
    """A prompt under a condition."""

    tag: Tag
    text: Prompt
    job: EvictionJob  # of this row alone
    notes: dict[str, Any] = field(default_factory=dict)  # what its `Generation` says of the prompt's pass


@dataclass
class Rows:
    """A batch of rows that can pass through the model together."""

    rows: list[Row]
    cache: EngineCache
    logits: Tensor  # [batch, vocabulary], of the next token
    seen: Tensor  # int64 [batch], tokens so far
    evictions: Tensor  # int64 [batch], those that have freed tokens so far
    signals: Any = None  # `Signals` of `SharedCap`
    failed: dict[int, Exception] = field(default_factory=dict)  # by row, of the last eviction

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def tags(self) -> list[Tag]:
        return [row.tag for row in self.rows]

    @property
    def job(self) -> EvictionJob:
        """The job of the first row; those of a batch that decodes are of one kind."""
        return self.rows[0].job

    def slide(self, facts: ModelFacts) -> None:
        """Drop tokens of sliding layers that the next query does not see."""
        for layer, window in facts.sliding.items():
            self.cache.ragged[layer].slide(self.seen - window + 1)

    def take(self, rows: list[int], spend: bool = False) -> "Rows":
        """A copy of these rows. spend: this batch is no longer needed and frees its memory (`EngineCache.rows`)."""
        index = torch.tensor(rows, device=self.logits.device)
        cache, signals = self.cache.rows(index, spend), self.signals and self.signals.take(index)
        mine = [self.rows[i] for i in rows]
        return Rows(mine, cache, self.logits[index], self.seen[index], self.evictions[index], signals)

    @classmethod
    def joined(cls, blocks: list["Rows"]) -> "Rows":
        """Join blocks that may share a batch into one, which takes over their caches."""
        signals = blocks[0].signals and shared.joined([b.signals for b in blocks])
        rows, cache = [row for b in blocks for row in b.rows], joined_caches([b.cache for b in blocks])
        logits, seen, done = (torch.cat([getattr(b, name) for b in blocks]) for name in ("logits", "seen", "evictions"))
        return cls(rows, cache, logits, seen, done, signals)


@dataclass
class Extend:
    """Attention of new tokens `[batch, new]` of rows that hold a cache: each layer stores them, then attends."""

    call: Call
    cache: EngineCache
    positions: TokenInts
    window: int = 0  # queries that a later eviction needs
    pages: tuple[int, int, int] | None = None  # (page, dense layers, budget) of Quest
    of_step: StepSignals | None = None  # `SharedCap`: sums up a step's attention over layers, and hides tokens
    decodes: bool = False  # one token of every row: with backend triton a kernel reads them where no layer slides

    def attend(
        self, layer: int, query: Query, key: KeyValue, value: KeyValue, scaling: Any, sliding: int | None = None
    ) -> Tensor:
        stored, of_step = self.cache.ragged[layer], self.of_step
        at = self.positions.to(query.device)
        self.cache.scalings[layer] = scaling
        stored.append(key, value, at)
        if self.window:
            stored.remember(query, at, self.window, alone=self.decodes)
        if self.decodes and self.call.backend == "triton" and of_step is None and sliding is None:
            return _attend_by_kernel(stored, query, scaling)
        parts, sums = stored.parts(), list(stored.sums)
        if "low" in sums and query.shape[2] >= LOW_QUERIES:  # older queries have left the window
            stored.sums["low"].zero_(), stored.tail_sums["low"].zero_()
        where: Any = None
        if sums or of_step is not None or self.pages is not None:
            where = torch.cat([tokens.expand(*key.shape[:2], -1) for _, _, tokens in parts], 2)

        def watch(p: Tensor, queries: slice) -> None:
            if of_step is not None:
                of_step.see(p, where)
            for name in sums:
                stored.add(name, per_token(name, p, at[:, queries], where, at.amax(1)))

        hide = None if of_step is None else of_step.hidden(where)
        if self.pages is not None and list(self.cache.ragged).index(layer) >= self.pages[1]:
            keys = torch.cat([k for k, _, _ in parts], 2)  # tokens of pages that the query does not select are hidden
            chosen = page_mask(query[:, :, -1], keys, where >= 0, self.pages[0], self.pages[2])
            hide = ~chosen.unflatten(1, (keys.shape[1], -1))[:, :, :, None]
        out = attend(query, at, parts, scaling, sliding, watch if sums or of_step is not None else None, hide)
        if layer in self.call.facts.sliding and stored.tail >= SLIDE and stored.slot is None:
            stored.slide(at.amax(1) - sliding + 2)  # the first position that the next query sees
        return out


def _attend_by_kernel(stored: Any, query: Query, scaling: float) -> Tensor:
    """One token per row by the ragged decode kernel, which also returns each token's attention if it is summed."""
    from kvrepro_kernels import ragged_decode

    fixed = stored.slot is not None
    tail = stored.tail_keys, stored.tail_values, stored.tail_keys.shape[2] if fixed else stored.tail
    flat, used = (stored.keys, stored.values, stored.offsets), stored.slot[1:] if fixed else None
    emit: Any = ("mean",) if stored.sums else ()
    done = ragged_decode(query, *flat, *tail, used=used, scale=scaling, emit=emit)
    for name in stored.sums:  # only "mass": the backend refuses conditions with other sums
        of_flat, of_tail = done.attention["mean"]
        stored.sums[name] += of_flat
        stored.tail_sums[name] += of_tail
    return done.output.transpose(1, 2)


# ---- what was kept


def kept_sets(facts: ModelFacts, rows: Rows, ends: Sequence[int], masks: bool) -> list[dict[str, Any]]:
    """The positions that each row holds before its end: those of all heads together, a hash of those per layer and
    head and, with `masks`, a mask [kv_heads, end] per layer; of `SharedCap`, whose layers hold the same, no masks."""
    digests = [hashlib.sha256() for _ in ends]
    unions = [np.zeros(end, bool) for end in ends]
    more: list[dict[str, Any]] = [{"kept_sets": []} if masks and rows.signals is None else {} for _ in ends]
    if rows.signals is not None:
        for row, held in enumerate(rows.signals.held.cpu().numpy()):
            digests[row].update(str([np.flatnonzero(head).tolist() for head in held]).encode())
            unions[row] = held.any(0)
    for n in facts.evictable if rows.signals is None else ():
        layer = rows.cache.ragged[n]
        counts, positions = layer.lengths.cpu().numpy(), layer.positions.cpu().numpy()
        for row, at in enumerate(np.split(positions, counts.sum(1).cumsum()[:-1])):
            digests[row].update(counts[row].tobytes() + at.tobytes())
            unions[row][at] = True
            if masks:
                mask = np.zeros((len(counts[row]), ends[row]), bool)
                mask[np.arange(len(mask)).repeat(counts[row]), at] = True
                more[row]["kept_sets"].append(mask)
    for row, (union, digest) in enumerate(zip(unions, digests, strict=True)):
        more[row] |= {"kept_positions": np.flatnonzero(union).tolist(), "kept_positions_hash": digest.hexdigest()[:16]}
    return more


# ---- which tokens leave


def evict_rows(facts: ModelFacts, rows: Rows) -> Tensor:
    """Evict from the rows that have seen more tokens than their budgets; rows of one kind are decided together. An
    error of a policy is noted in `rows.failed` for its rows. Returns which rows lost tokens, bool [batch]."""
    lost = torch.zeros_like(rows.seen, dtype=torch.bool)
    over = [row for row, tokens in enumerate(rows.seen.tolist()) if tokens > rows.rows[row].job.budgets[0]]
    if not over:
        return lost
    parts = _kinds(rows, [b for b in over if b not in rows.failed and rows.rows[b].job.evictor is not None])
    members = {id(part): index for part, index in parts}
    held: dict[int, tuple[Tensor, Tensor]] = {}  # by layer: its tokens' places, and which of them stay

    def hold(part: EvictionJob, observed: Observed, _: Observation, stays: Mask) -> None:
        for layer, of_layer in zip(observed, stays.chunk(len(observed)), strict=True):
            stay = held[layer][1]
            stay[members[id(part)].to(stay.device)] = of_layer[..., of_layer.shape[2] - stay.shape[2] :]

    decisions = Decisions([part for part, _ in parts], facts.backend, hold)
    for layer in facts.evictable:
        stored = rows.cache.ragged[layer]
        if layer in facts.sliding:
            stored.slide(rows.seen - facts.sliding[layer] + 1)
        shown = stored.shown()
        held[layer] = shown.places, shown.positions >= 0
        decisions.see(layer, shown.keys, partial(_observed, facts, rows, layer, shown, members))
    decisions.finish()
    for part, index in parts:
        rows.failed |= {} if part.error is None else dict.fromkeys(index.tolist(), part.error)
    for layer, (places, stays) in held.items():
        lost |= ((places >= 0) & ~stays).any(2).any(1).to(lost.device)
        rows.cache.ragged[layer].keep(places, stays & (places >= 0))
    return lost


def _observed(
    facts: ModelFacts, rows: Rows, layer: int, shown: Shown, members: Mapping[int, Tensor], part: EvictionJob, _: bool
) -> Observation:
    """The observation of a layer for the policy of `part`. members: the numbers of the rows of each part."""
    stored, index, window = rows.cache.ragged[layer], members[id(part)].to(shown.keys.device), part.window
    keys, at = shown.keys[index], index.new_zeros(len(index), 0)
    queries = keys.new_zeros(len(index), facts.outputs[layer].shape[0], 0, keys.shape[3])
    if window:
        queries, at = stored.queries[index][:, :, -window:], stored.query_positions[index][:, -window:]
    more = {"values": shown.values[index], "positions": shown.positions[index], "query_positions": at}
    more |= {"seen": rows.seen.to(keys.device)[index], "scaling": rows.cache.scalings[layer], "queries": queries}
    sums = {name: s[index] for name, s in shown.sums.items()}
    return facts.observe(layer, keys, part.prompts.seeds, sums=sums, **more)


def evict_rows_shared(rows: Rows, step: int) -> Tensor:
    """`evict_rows` of `SharedCap`, by `rows.signals` and before the step's forward pass. The newest token may be
    evicted before any layer has stored it; the next pass then hides it and drops it afterwards. `keep_held` removes
    evicted tokens from the cache."""
    before = rows.signals.evicted
    for part, index in _kinds(rows, range(len(rows))):
        s = rows.signals
        with attempt(part):
            reduced = evict_shared(part, s.take(index), step)
            held, evicted = s.held.index_copy(0, index, reduced.held), s.evicted.index_copy(0, index, reduced.evicted)
            rows.signals = replace(s, held=held, evicted=evicted)
        rows.failed |= {} if part.error is None else dict.fromkeys(index.tolist(), part.error)
    return rows.signals.evicted > before


def keep_held(rows: Rows) -> None:
    """Evict from every layer the tokens that no head holds; a token stays in memory while any head may see it."""
    for stored in rows.cache.ragged.values():
        places, positions = stored.places()
        stored.keep(places, rows.signals.held_at(positions, by_any=True))


def _kinds(rows: Rows, numbers: Iterable[int]) -> list[tuple[EvictionJob, Tensor]]:
    """Rows that can be decided together as one job each, with their numbers."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for row in numbers:
        groups.setdefault(rows.rows[row].job.kind, []).append(row)
    jobs = []
    for group in groups.values():
        some = [rows.rows[b] for b in group]
        part = EvictionJob.joined([row.job for row in some], [row.text for row in some], rows.seen.device)
        jobs.append((part, torch.tensor(group, device=rows.seen.device)))
    return jobs
