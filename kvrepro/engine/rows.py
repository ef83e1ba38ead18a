"""Rows, one per (prompt, condition), with their caches: how the model reads on for them, and how they lose tokens."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kvrepro.engine import evict, shared
from kvrepro.engine.attention import LOW_QUERIES, Softmax, attend, per_token
from kvrepro.engine.backend import in_few_launches
from kvrepro.engine.cache import SLIDE, EngineCache, Shown, joined_caches
from kvrepro.engine.condition import Condition, Prompt
from kvrepro.engine.evict import EvictionJob, across, attempt, evict_shared, postpone, select_tokens
from kvrepro.engine.facts import ModelFacts
from kvrepro.engine.observe import Observation
from kvrepro.engine.policy import Rule
from kvrepro.engine.score.cumulative import page_mask
from kvrepro.engine.shapes import KeyValue, PreTrainedModel, Query, TokenInts
from kvrepro.engine.shared import Signals, StepSignals
from kvrepro.errors import InputError

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
    prefix: Any = None  # offline, the last one: what identifies it, the prompt that it was read with, its rows
    watch: Callable[["Rows", Tensor], None] | None = None  # for a study: sees the token that each row picks at a step
    captures: int = 3  # failed captures of a step that are still allowed before capturing is given up

    def __post_init__(self) -> None:
        self.facts = self.facts.by(self.backend)
        self.device = self.model.device  # which searches the weights at each access
        self.rules = [Rule.of(c) for c in self.conditions]  # None: the full cache
        self.max_new_tokens = max(self.new_tokens, default=0)

    def fail(self, errors: dict[Tag, Exception]) -> None:
        """Note the errors of rows, or raise the first."""
        if errors and not self.isolate:
            raise next(iter(errors.values()))
        self.failed |= errors

    @property
    def token_bytes(self) -> int:
        """Bytes of the keys and values of one token in all layers."""
        layers = sum(2 * self.facts.kv_heads[n] * self.facts.outputs[n].shape[1] for n in self.facts.attention)
        return int(layers * self.model.dtype.itemsize)

    def forward(self, ids: Tensor, positions: Tensor, cache: EngineCache, attention: Any) -> Tensor:
        """Logits of the next token, [batch, vocabulary]."""
        padding = {"attention_mask": (positions >= 0).long()} if bool((positions < 0).any()) else {}
        return self.run(ids, positions.clamp(min=0), cache, attention, **padding)

    def run(self, ids: Tensor, positions: Tensor, cache: EngineCache, attention: Any, **padding: Tensor) -> Tensor:
        """`forward` without looking for padding, which would wait for the GPU; `padding` is the model's attention mask.
        With backend triton on a GPU, norms and rotations are computed by kernels too."""
        kernels = self.backend == "triton" and self.device.type == "cuda"
        more = {"past_key_values": cache, "use_cache": True, "logits_to_keep": 1, "kvrepro": attention, **padding}
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
    calls: Tensor  # int64 [batch], evictions so far
    signals: Signals | None = None  # of `SharedCap`
    failed: dict[int, Exception] = field(default_factory=dict)  # by row, of the last eviction

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def tags(self) -> list[Tag]:
        return [row.tag for row in self.rows]

    @property
    def first(self) -> EvictionJob:
        """The job of the first row; those of a batch that decodes are of one kind."""
        return self.rows[0].job

    @property
    def budgets(self) -> list[int]:
        """Tokens per KV head of each row."""
        return [row.job.budgets[0] for row in self.rows]

    @property
    def window(self) -> int:
        """Queries that the rows' policies look at."""
        return max(row.job.window for row in self.rows)

    @property
    def shared(self) -> Signals:
        assert self.signals is not None, "of `SharedCap` alone"
        return self.signals

    def slide(self, facts: ModelFacts) -> None:
        """Drop tokens of sliding layers that the next query does not see."""
        for layer, window in facts.sliding.items():
            self.cache.ragged[layer].slide(self.seen - window + 1)

    def take(self, rows: list[int], spend: bool = False) -> "Rows":
        """A copy of these rows. spend: this batch is no longer needed and frees its memory (`EngineCache.rows`)."""
        index = torch.tensor(rows, device=self.logits.device)
        cache, signals = self.cache.rows(index, spend), self.signals and self.signals.take(index)
        mine = [self.rows[i] for i in rows]
        return Rows(mine, cache, self.logits[index], self.seen[index], self.calls[index], signals)

    @classmethod
    def joined(cls, blocks: list["Rows"]) -> "Rows":
        """Join blocks that may share a batch into one, which takes over their caches."""
        cat, signals = torch.cat, blocks[0].signals and shared.joined([b.shared for b in blocks])
        rows, cache = [row for b in blocks for row in b.rows], joined_caches([b.cache for b in blocks])
        logits, seen, calls = cat([b.logits for b in blocks]), cat([b.seen for b in blocks]), [b.calls for b in blocks]
        return cls(rows, cache, logits, seen, cat(calls), signals)


class Extend:
    """Attention of new tokens `[batch, new]` of rows that hold a cache: each layer stores them, then attends."""

    def __init__(
        self,
        call: Call,
        cache: EngineCache,
        positions: TokenInts,
        window: int = 0,
        pages: tuple[int, int, int] | None = None,
        step: StepSignals | None = None,
        decodes: bool = False,
    ):
        """window: queries that a later eviction needs. pages: (page, dense layers, budget) of Quest. step: of
        `SharedCap`, sums up a decode step's attention over layers and hides tokens. decodes: the tokens are one of
        every row, and with backend triton a kernel reads them where no layer slides."""
        self.call, self.cache, self.positions = call, cache, positions
        self.by_kernel = decodes and call.backend == "triton" and step is None
        self.window, self.pages, self.step = window, pages, step

    def attend(
        self, layer: int, query: Query, key: KeyValue, value: KeyValue, scaling: Any, sliding: int | None = None
    ) -> Tensor:
        stored, step = self.cache.ragged[layer], self.step
        at = self.positions.to(query.device)
        self.cache.scalings[layer] = scaling
        stored.append(key, value, at)
        if self.window:
            stored.remember(query, at, self.window)
        if self.by_kernel and sliding is None:
            return _by_kernel(stored, query, scaling)
        parts, sums = stored.parts(), list(stored.sums)
        if "low" in sums and query.shape[2] >= LOW_QUERIES:  # older queries have left the window
            stored.sums["low"].zero_(), stored.tail_sums["low"].zero_()
        where = newest = None
        if sums or step is not None or self.pages is not None:
            where = torch.cat([tokens.expand(*key.shape[:2], -1) for _, _, tokens in parts], 2)
            newest = at.amax(1) if sums else None

        def watch(p: Tensor, queries: slice) -> None:
            if step is not None:
                step.see(p, where)
            for name in sums:
                stored.add(name, per_token(name, p, at[:, queries], where, newest))

        watches = watch if sums or step is not None else None
        hide = self._unchosen(layer, query, parts, where) if step is None else step.hidden(where)
        out = attend(query, at, parts, scaling, sliding, watches, hide)
        if layer in self.call.facts.sliding and stored.tail >= SLIDE and stored.slot is None:
            stored.slide(at.amax(1) - sliding + 2)  # the first position that the next query sees
        return out

    def _unchosen(self, layer: int, query: Query, parts: Any, where: Any) -> Tensor | None:
        """Quest: tokens of pages that this step's query does not select, bool [batch, kv_heads, group, 1, tokens]."""
        if self.pages is None:
            return None
        page, dense_layers, budget = self.pages
        if list(self.cache.ragged).index(layer) < dense_layers:
            return None
        keys = torch.cat([k for k, _, _ in parts], 2)
        chosen = page_mask(query[:, :, -1], keys, where >= 0, page, budget)
        return ~chosen.unflatten(1, (keys.shape[1], -1))[:, :, :, None]


def _by_kernel(stored: Any, query: Query, scaling: float) -> Tensor:
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


def kept_sets(facts: ModelFacts, cache: EngineCache, ends: Sequence[int], masks: bool) -> list[dict[str, Any]]:
    """The positions that each row holds before its end: those of all heads together, a hash of those per layer and
    head and, with `masks`, a mask [kv_heads, end] per layer."""
    digests = [hashlib.sha256() for _ in ends]
    unions = [np.zeros(end, bool) for end in ends]
    sets: list[list[Any]] = [[] for _ in ends]
    for n in facts.evictable:
        layer = cache.ragged[n]
        counts, positions = layer.lengths.cpu().numpy(), layer.positions.cpu().numpy()
        for row, at in enumerate(np.split(positions, counts.sum(1).cumsum()[:-1])):
            digests[row].update(counts[row].tobytes() + at.tobytes())
            unions[row][at] = True
            if masks:
                mask = np.zeros((len(counts[row]), ends[row]), bool)
                mask[np.arange(len(mask)).repeat(counts[row]), at] = True
                sets[row].append(mask)
    kept = [_kept(np.flatnonzero(union).tolist(), digest) for union, digest in zip(unions, digests, strict=True)]
    return [each | {"kept_sets": layers} for each, layers in zip(kept, sets, strict=True)] if masks else kept


def kept_by_all_layers(signals: Signals) -> list[dict[str, Any]]:
    """`kept_sets` of `SharedCap`: the positions of all heads together, and a hash of those per head."""
    rows = [[head.nonzero()[:, 0].tolist() for head in row] for row in signals.held.cpu()]
    return [_kept(sorted(set().union(*heads)), hashlib.sha256(str(heads).encode())) for heads in rows]


def _kept(positions: list[int], digest: Any) -> dict[str, Any]:
    return {"kept_positions": positions, "kept_positions_hash": digest.hexdigest()[:16]}


# ---- evicting again


def evict_rows(facts: ModelFacts, rows: Rows, budgets: Sequence[int]) -> Tensor:
    """Evict from rows, each down to its budget; rows of one kind are decided together.

    An error of a policy is noted in `rows.failed` for its rows. Returns which rows lost tokens, bool [batch]. A row
    that has seen no more tokens than its budget loses none.
    """
    lost = torch.zeros_like(rows.seen, dtype=torch.bool)
    over = [tokens > budget for tokens, budget in zip(rows.seen.tolist(), budgets, strict=True)]
    if not any(over):
        return lost
    evictors = [row.job.evictor for row in rows.rows]
    evicts = [b not in rows.failed and evictor is not None and evictor.frees for b, evictor in enumerate(evictors)]
    parts = _kinds(rows, [b for b in range(len(rows)) if over[b] and evicts[b]], budgets)
    held: dict[int, tuple[Tensor, Tensor]] = {}  # by layer: its tokens' places, and which of them stay
    for shown in _shown(facts, rows):
        held |= {layer: (s.places, s.positions >= 0) for layer, s in shown.items()}
        for part, members in parts:
            index = torch.tensor(members, device=next(iter(shown.values())).keys.device)
            for layers in [list(shown)] if part.together else [[layer] for layer in shown]:
                if part.error is not None:
                    continue
                with attempt(part):
                    seen = {n: _observed(facts, rows, n, shown[n], part, index) for n in layers}
                    o = Observation.together(list(seen.values()))
                    if part.waits:
                        postpone(part, seen, o)
                        continue
                    for n, part_stays in zip(layers, select_tokens(part, o).chunk(len(layers)), strict=True):
                        held[n][1][index] = part_stays
    for part, members in parts:
        with attempt(part):
            for layer, part_stays in across(part).items() if part.pending else ():
                held[layer][1][torch.tensor(members, device=part_stays.device)] = part_stays
        if part.error is not None:
            rows.failed |= dict.fromkeys(members, part.error)
    for layer, (places, stays) in held.items():
        lost |= ((places >= 0) & ~stays).any(2).any(1).to(lost.device)
        rows.cache.ragged[layer].keep(places, stays & (places >= 0))
    return lost


def _shown(facts: ModelFacts, rows: Rows) -> Iterator[dict[int, Shown]]:
    """The tokens of every evictable layer. Neighbouring layers that differ only in their tokens come together,
    padded to one width, up to `TOGETHER` bytes."""
    waiting: dict[int, Shown] = {}
    kind: tuple[Any, ...] = ()

    def of_one_width() -> dict[int, Shown]:
        width = max(s.keys.shape[2] for s in waiting.values())
        return {layer: s.widened(width) for layer, s in waiting.items()}

    for layer in facts.evictable:
        stored, window = rows.cache.ragged[layer], facts.sliding.get(layer)
        if window is not None:
            stored.slide(rows.seen - window + 1)
        shown, rule = stored.shown(), rows.cache.scalings[layer]
        if isinstance(rule, Softmax):
            rule = id(rule)  # a layer's sinks are its own
        before, kind = kind, (shown.keys.device, stored.shape, shown.keys.shape[3], window, rule)
        bytes_each = 2 * max(s.keys.nbytes for s in (shown, *waiting.values()))
        if waiting and (kind != before or (len(waiting) + 1) * bytes_each > evict.TOGETHER[facts.backend]):
            yield of_one_width()
            waiting = {}
        waiting[layer] = shown
    yield of_one_width()


def evict_rows_shared(rows: Rows, step: int) -> Tensor:
    """`evict_rows` of `SharedCap`, by `rows.signals` and before the step's forward pass. The newest token may be
    evicted before any layer has stored it; the next pass then hides it and drops it afterwards. `keep_held` removes
    evicted tokens from the cache."""
    before = rows.shared.evicted
    for part, members in _kinds(rows, range(len(rows)), rows.budgets):
        index, s = torch.tensor(members, device=before.device), rows.shared
        with attempt(part):
            reduced = evict_shared(part, s.take(index), step)
            held, evicted = s.held.index_copy(0, index, reduced.held), s.evicted.index_copy(0, index, reduced.evicted)
            rows.signals = replace(s, held=held, evicted=evicted)
        if part.error is not None:
            rows.failed |= dict.fromkeys(members, part.error)
    return rows.shared.evicted > before


def keep_held(rows: Rows) -> None:
    """Evict from every layer the tokens that no head holds; a token stays in memory while any head may see it."""
    for stored in rows.cache.ragged.values():
        places, positions = stored.places()
        stored.keep(places, rows.shared.held_at(positions, by_any=True))


def _kinds(rows: Rows, members: Sequence[int], budgets: Sequence[int]) -> list[tuple[EvictionJob, list[int]]]:
    """Rows that can be decided together as one job each, with their numbers."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for row in members:
        groups.setdefault(rows.rows[row].job.kind, []).append(row)
    jobs = []
    for numbers in groups.values():
        some = [rows.rows[b] for b in numbers]
        part = EvictionJob.joined([row.job for row in some], [row.text for row in some], rows.seen.device)
        part.budgets = [budgets[b] for b in numbers]
        jobs.append((part, numbers))
    return jobs


def _observed(
    facts: ModelFacts, rows: Rows, layer: int, shown: Shown, part: EvictionJob, members: Tensor
) -> Observation:
    """The observation of a layer of these rows for the policy of `part`. members: the numbers of the rows."""
    stored, keys, window = rows.cache.ragged[layer], shown.keys, part.window
    queries, at = stored.queries, stored.query_positions
    if not window:
        queries = keys.new_zeros(len(members), facts.outputs[layer].shape[0], 0, keys.shape[3])
        at = members.new_zeros(len(members), 0)
    elif queries is None:
        raise InputError(f"{part.policy.title} asks for {window} queries, and layer {layer} remembers none")
    else:
        queries, at = queries[members][:, :, -window:], at[members][:, -window:]
    more = {"values": shown.values[members], "positions": shown.positions[members], "query_positions": at}
    more |= {"seen": rows.seen.to(keys.device)[members], "scaling": rows.cache.scalings[layer], "queries": queries}
    sums = {name: s[members] for name, s in shown.sums.items()}
    return facts.observe(layer, keys[members], part.prompts.seeds, sums=sums, **more)
