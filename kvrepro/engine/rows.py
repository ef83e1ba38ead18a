"""Rows, one per (prompt, condition), with their caches: how they are joined, taken apart and evicted from."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvrepro.engine import evict, shared
from kvrepro.engine.attention import Softmax
from kvrepro.engine.cache import EngineCache, Shown, joined_caches
from kvrepro.engine.condition import Condition, Prompt
from kvrepro.engine.evict import EvictionJob, across, attempt, evict_shared, postpone, select_tokens
from kvrepro.engine.facts import ModelFacts
from kvrepro.engine.observe import Observation
from kvrepro.engine.shared import Signals
from kvrepro.errors import InputError

Tag = tuple[int, int]  # (prompt, condition)


@dataclass
class Rows:
    """A batch of rows that can pass through the model together."""

    tags: list[Tag]
    jobs: list[EvictionJob]  # of one row each
    texts: list[Prompt]
    cache: EngineCache
    logits: Tensor  # [batch, vocabulary], of the next token
    seen: Tensor  # int64 [batch], tokens so far
    calls: Tensor  # int64 [batch], evictions so far
    signals: Signals | None = None  # of `SharedCap`
    failed: dict[int, Exception] = field(default_factory=dict)  # by row, of the last eviction

    def __len__(self) -> int:
        return len(self.tags)

    @property
    def conditions(self) -> list[Condition]:
        return [job.condition for job in self.jobs]

    @property
    def budgets(self) -> list[int]:
        """Tokens per KV head of each row."""
        return [job.budgets[0] for job in self.jobs]

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
        return Rows(
            [self.tags[i] for i in rows], [self.jobs[i] for i in rows], [self.texts[i] for i in rows],
            self.cache.rows(index, spend), self.logits[index], self.seen[index], self.calls[index],
            None if self.signals is None else self.signals.take(index),
        )  # fmt: skip


def joined(blocks: list[Rows]) -> Rows:
    """Join blocks that may share a batch into one, which takes over their caches."""
    cat = torch.cat
    return Rows(
        [t for b in blocks for t in b.tags], [j for b in blocks for j in b.jobs], [t for b in blocks for t in b.texts],
        joined_caches([b.cache for b in blocks]), cat([b.logits for b in blocks]), cat([b.seen for b in blocks]),
        cat([b.calls for b in blocks]),
        None if blocks[0].signals is None else shared.joined([b.shared for b in blocks]),
    )  # fmt: skip


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
    return [
        {"kept_positions": np.flatnonzero(union).tolist(), "kept_positions_hash": digest.hexdigest()[:16]}
        | ({"kept_sets": layers} if masks else {})
        for union, digest, layers in zip(unions, digests, sets, strict=True)
    ]


def kept_by_all_layers(signals: Signals) -> list[dict[str, Any]]:
    """`kept_sets` of `SharedCap`: the positions of all heads together, and a hash of those per head."""
    rows = [[head.nonzero()[:, 0].tolist() for head in row] for row in signals.held.cpu()]
    return [
        {
            "kept_positions": sorted(set().union(*heads)),
            "kept_positions_hash": hashlib.sha256(str(heads).encode()).hexdigest()[:16],
        }
        for heads in rows
    ]


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
    evicts = [b not in rows.failed and job.evictor is not None and job.evictor.frees for b, job in enumerate(rows.jobs)]
    parts = _kinds(rows, [b for b in range(len(rows)) if over[b] and evicts[b]], budgets)
    held: dict[int, tuple[Tensor, Tensor]] = {}  # by layer: places in its flat tensors, and which of them stay
    for shown in _shown(facts, rows):
        held |= {layer: (s.index, s.positions >= 0) for layer, s in shown.items()}
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
    for layer, (index, stays) in held.items():
        lost |= ((index >= 0) & ~stays).any(2).any(1).to(lost.device)
        rows.cache.ragged[layer].evict(stays, index)
    return lost


def _shown(facts: ModelFacts, rows: Rows) -> Iterator[dict[int, Shown]]:
    """The tokens of every evictable layer. Neighbouring layers that differ only in their tokens come together,
    padded to one width, up to `TOGETHER` bytes."""
    waiting: dict[int, Shown] = {}
    kind: tuple[Any, ...] = ()
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
            yield _one_width(waiting)
            waiting = {}
        waiting[layer] = shown
    yield _one_width(waiting)


def _one_width(shown: dict[int, Shown]) -> dict[int, Shown]:
    """Pad layers with dead slots in front to the width of the widest."""
    width = max(s.keys.shape[2] for s in shown.values())
    return {layer: s.widened(width) for layer, s in shown.items()}


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
        stored.keep(*stored.chosen(lambda positions: rows.shared.held_at(positions, by_any=True)))


def _kinds(rows: Rows, members: Sequence[int], budgets: Sequence[int]) -> list[tuple[EvictionJob, list[int]]]:
    """Rows that can be decided together as one job each, with their numbers."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for row in members:
        groups.setdefault(rows.jobs[row].kind, []).append(row)
    jobs = []
    for numbers in groups.values():
        part = EvictionJob.joined([rows.jobs[b] for b in numbers], [rows.texts[b] for b in numbers], rows.seen.device)
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
    elif queries is None or at is None:
        raise InputError(f"{part.policy.title} asks for {window} queries, and layer {layer} remembers none")
    else:
        queries, at = queries[members][:, :, -window:], at[members][:, -window:]
    return facts.observe(
        layer, keys[members], part.prompts.seeds, values=shown.values[members], positions=shown.positions[members],
        queries=queries, query_positions=at, seen=rows.seen.to(keys.device)[members],
        scaling=rows.cache.scalings[layer], sums={n: s[members] for n, s in shown.sums.items()},
    )  # fmt: skip
