"""A paged KV cache for experiments: which blocks a sequence holds, and what eviction and compaction give back.

A block is `block_size` slots; a slot holds one token's keys and values of all layers and KV heads, so it is dead only
when every head of every layer has evicted it. After Kwon et al. 2023, section 4, and the guide on eviction and
compaction, "Architecture". A `Ledger` is index work and needs no model. `PagedRows` gives its sequences to a model,
which reads, decodes and evicts on them; which tokens stay has been decided elsewhere.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvrepro.engine.attention import Part, installed
from kvrepro.engine.cache import EngineCache
from kvrepro.engine.condition import Prompt
from kvrepro.engine.facts import ModelFacts
from kvrepro.engine.rows import Call, Extend
from kvrepro.engine.shapes import KeyValue, PreTrainedModel, TokenInts
from kvrepro.errors import InputError

LAYOUTS = ("none", "repack", "fill")
MISPLACED = "storage positions"  # a control, hole filling whose new tokens are told their storage index for a position


@dataclass(eq=False)
class Entry:
    """One sequence. Slot s of its block table is at offset s % block_size of block `blocks[s // block_size]`."""

    blocks: np.ndarray  # int64 [blocks]
    positions: np.ndarray  # int64 [slots]: the position map. True position of the slot's token, -1 = dead or unwritten
    alive: np.ndarray  # bool [layers or 1, kv_heads or 1, slots]: the heads that still attend to it; 1 stands for all
    tail: int = 0  # the next slot to write
    seen: int = 0  # tokens so far, evicted ones included = the next token's true position


class Ledger:
    """Sequences in `blocks` blocks. Their slots are also numbered flat: block * block_size + offset.

    stored: tensors [flat slots, ...], such as keys and values, in which a token moves when its slot does.
    """

    def __init__(self, blocks: int, block_size: int = 16, stored: Sequence[Tensor] = ()):
        self.block_size, self.stored = block_size, stored
        self.references = np.zeros(blocks, np.int64)
        self.free_list = list(range(blocks))[::-1]  # the lowest block goes first
        self.freed = 0  # blocks so far, by eviction or compaction, not by the end of a sequence
        self.copied = 0  # slots so far, by compaction

    def new(self, tokens: int = 0) -> Entry:
        """A sequence that has seen so many tokens."""
        s = Entry(np.empty(0, np.int64), np.empty(0, np.int64), np.empty((1, 1, 0), bool))
        self.append(s, tokens)
        return s

    def fork(self, parent: Entry, share: int = 0) -> Entry:
        """A sequence with the same tokens. It shares the first `share` blocks, but none that the parent may yet write
        to, and has copies of the others."""
        share = min(share, parent.tail // self.block_size)
        child = replace(parent, blocks=np.append(parent.blocks[:share], self._take(len(parent.blocks) - share)))
        self.references[parent.blocks[:share]] += 1
        slots = np.arange(share * self.block_size, len(parent.positions))
        self._copy(self._flat(parent, slots), self._flat(child, slots))
        return child

    def append(self, s: Entry, tokens: int = 1) -> np.ndarray:
        """Make room for the next `tokens`: their flat slots."""
        fresh = max(0, -(-(s.tail + tokens - len(s.positions)) // self.block_size))
        s.blocks = np.append(s.blocks, self._take(fresh))
        s.positions = np.append(s.positions, np.full(fresh * self.block_size, -1))
        s.alive = np.append(s.alive, np.zeros((*s.alive.shape[:2], fresh * self.block_size), bool), -1)
        slots = np.arange(s.tail, s.tail + tokens)
        s.positions[slots] = np.arange(s.seen, s.seen + tokens)
        s.alive[..., slots] = True
        s.tail, s.seen = s.tail + tokens, s.seen + tokens
        return self._flat(s, slots)

    def evict(self, s: Entry, keep: np.ndarray) -> int:
        """Evict all tokens but those in `keep`, bool `[..., seen]` over true positions, broadcast to [layers or 1,
        kv_heads or 1]. Returns the number of blocks freed: those in which all slots are dead."""
        keep = keep[(None,) * (3 - keep.ndim)]
        s.alive = s.alive & keep[..., s.positions.clip(min=0)] & (s.positions >= 0)
        s.positions = np.where(s.alive.any((0, 1)), s.positions, -1)
        return self._drop(s)

    def compact(self, s: Entry, layout: str) -> tuple[int, np.ndarray]:
        """Blocks freed, and the flat slots [2, copies] from and to which tokens moved. Blocks up to the last shared one
        stay; of the slots behind it, with n survivors, a "repack" moves all forward in order, and hole filling (any
        other name) only those behind the first n slots, into holes among these: the position map remembers the order
        of the text. "none" does nothing."""
        if layout == "none":
            return 0, np.empty((2, 0), np.int64)
        start = self.block_size * int(1 + np.flatnonzero(self.references[s.blocks] > 1).max(initial=-1))
        living = start + np.flatnonzero(s.positions[start:] >= 0)
        source, target = living, np.arange(start, start + len(living))
        if layout != "repack":
            source, target = np.setdiff1d(source, target), np.setdiff1d(target, source)
        source, target = source[source != target], target[source != target]
        copies = np.stack([self._flat(s, source), self._flat(s, target)])
        self._copy(*copies)
        positions, alive = s.positions.copy(), s.alive.copy()
        positions[source], alive[..., source] = -1, False
        positions[target], alive[..., target] = s.positions[source], s.alive[..., source]
        s.positions, s.alive = positions, alive
        freed = self._drop(s)
        s.tail = max(start, 1 + int(np.flatnonzero(s.positions >= 0).max(initial=-1)))
        self.copied += len(source)
        return freed, copies

    def living(self, s: Entry) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Living tokens in table order: their flat slots, true positions, and who is `alive`."""
        slots = np.flatnonzero(s.positions >= 0)
        return self._flat(s, slots), s.positions[slots], s.alive[..., slots]

    def _take(self, blocks: int) -> np.ndarray:
        """Blocks off the free list. Raises InputError, and changes nothing, where too few are free."""
        if blocks > len(self.free_list):
            raise InputError(f"{blocks} blocks are needed, {len(self.free_list)} of {len(self.references)} are free")
        taken = np.array([self.free_list.pop() for _ in range(blocks)], np.int64)
        self.references[taken] = 1
        return taken

    def release(self, blocks: np.ndarray) -> int:
        """Give up one reference each. Returns how many blocks became free."""
        self.references[blocks] -= 1
        gone = blocks[self.references[blocks] == 0].tolist()
        self.free_list.extend(gone[::-1])
        return len(gone)

    def _flat(self, s: Entry, slots: np.ndarray) -> np.ndarray:
        return s.blocks[slots // self.block_size] * self.block_size + slots % self.block_size

    def _copy(self, source: np.ndarray, target: np.ndarray) -> None:
        for tensor in self.stored:
            tensor[torch.from_numpy(target)] = tensor[torch.from_numpy(source)]

    def _drop(self, s: Entry) -> int:
        """Give up a sequence's dead blocks. Returns how many became free."""
        living = (s.positions >= 0).reshape(-1, self.block_size).any(1)
        slots, gone = np.repeat(living, self.block_size), s.blocks[~living]
        s.tail = s.tail - len(gone) * self.block_size if living[-1:].any() else int(slots.sum())
        s.blocks, s.positions, s.alive = s.blocks[living], s.positions[slots], s.alive[..., slots]
        freed = self.release(gone)
        self.freed += freed
        return freed


def evict_to(ledger: Ledger, s: Entry, budget: int, random: np.random.Generator) -> None:
    """Evict a sequence down to `budget` living tokens: random ones, but none of the newest eight."""
    living = np.sort(s.positions[s.positions >= 0])
    keep = np.ones(s.seen, bool)
    gone = max(0, len(living) - budget)  # a layer that slides forgets on its own
    keep[random.choice(living[:-8], gone, replace=False)] = False
    ledger.evict(s, keep)


# ---- a model on paged sequences


class PagedRows(EngineCache):
    """Sequences of a ledger that have seen equally many tokens, as a cache of the engine with a row for each. The
    ledger stores the layers' keys, then their values, [flat slots, kv_heads, dim] each. layouts: each row's compaction
    after an eviction."""

    def __init__(self, call: Call, ledger: Ledger, entries: Sequence[Entry], layouts: Sequence[str] = ("none",)):
        super().__init__(call.model.config)
        self.call, self.ledger, self.entries, self.layouts = call, ledger, list(entries), list(layouts)
        self.passes: list[list[dict[str, int]]] = [[] for _ in entries]  # of each row, what `evict` records
        self.ragged = {n: PagedLayer(self, n) for n in range(len(ledger.stored) // 2)}

    @property
    def seen(self) -> int:
        return self.entries[0].seen

    def fork(self, *shares: int, layouts: Sequence[str] = ("none",)) -> PagedRows:
        """`Ledger.fork` of a single row: a row for each of `shares`, numbers of blocks."""
        entries = [self.ledger.fork(self.entries[0], share) for share in shares]
        return PagedRows(self.call, self.ledger, entries, layouts)

    def free(self) -> None:
        for entry in self.entries:
            self.ledger.release(entry.blocks)

    def begin(self, tokens: int) -> None:
        """Make room for the next `tokens` in all layers."""
        written = np.stack([self.ledger.append(entry, tokens) for entry in self.entries])
        living = [self.ledger.living(entry) for entry in self.entries]
        longest, kinds = max(len(flat) for flat, _, _ in living), self.entries[0].alive.shape[:2]
        read, where = np.zeros((len(living), longest), np.int64), np.full((len(living), *kinds, longest), -1)
        for row, (flat, positions, alive) in enumerate(living):
            read[row, longest - len(flat) :] = flat
            where[row, ..., longest - len(flat) :] = np.where(alive, positions, -1)
        # [rows, tokens]; [rows, longest]; [rows, layers or 1, kv_heads or 1, longest]
        self.written, self.read, self.where = (torch.from_numpy(x).to(self.call.device) for x in (written, read, where))

    @torch.inference_mode()
    def extend(self, ids: Tensor | Sequence[int]) -> Tensor:
        """Run the next tokens [rows, new], or of a single row [new], through the model, in `installed(model)`: logits
        [rows, vocabulary] of the last."""
        tokens = torch.as_tensor(ids, device=self.call.device).view(len(self.entries), -1)
        positions = torch.arange(self.seen, self.seen + tokens.shape[1], device=tokens.device).expand(tokens.shape)
        told = positions.clone()
        for row, (entry, layout) in enumerate(zip(self.entries, self.layouts, strict=True)):
            if layout == MISPLACED:
                told[row] += int((entry.positions >= 0).sum()) - self.seen
        return self.call.forward(tokens, told, self, Extend(self.call, self, positions))

    def evict(self, keep: np.ndarray) -> None:
        """Evict all tokens but those in `keep`, bool [layers, kv_heads, seen] over true positions, from every row;
        compact; and record the pass: blocks freed, and predicted (those that no other sequence shares, less as many as
        their survivors fill); slots that moved, and those from or to blocks that other sequences share."""
        size = self.ledger.block_size
        for entry, layout, passes in zip(self.entries, self.layouts, self.passes, strict=True):
            freed = self.ledger.evict(entry, keep)
            own = self.ledger.references[entry.blocks] == 1
            own_blocks, living = entry.blocks[own], (entry.positions >= 0).reshape(-1, size).sum(1)
            predicted = freed + len(own_blocks) - -(-int(living[own].sum()) // size)
            more, copies = self.ledger.compact(entry, layout)
            foreign = int((~np.isin(copies // size, own_blocks)).sum())
            record = {"seen": entry.seen, "living": int(living.sum()), "freed": freed + more, "predicted": predicted}
            passes.append(record | {"copies": copies.shape[1], "foreign": foreign})

    def generate(self, logits: Tensor, survivors: Mapping[int, np.ndarray], new_tokens: int) -> Tensor:
        """Decode greedily from `logits` [1, vocabulary] on rows that have read their prompt: logits of each step [rows,
        new_tokens, vocabulary]. survivors: bool [evictable layers, kv_heads, seen] by the number of tokens seen, where
        an eviction is due."""
        last, steps, facts = logits.repeat(len(self.entries), 1), [], self.call.facts
        with installed(self.call.model):
            for step in range(new_tokens + 1):
                if step:
                    last = self.extend(last.argmax(1))
                    steps.append(last)
                if (given := survivors.get(self.seen)) is not None:
                    keep = np.ones((len(self.ragged), *given.shape[1:]), bool)
                    for layer, window in facts.sliding.items():
                        keep[layer] = np.arange(self.seen) >= self.seen - window + 1
                    keep[list(facts.evictable)] = given
                    self.evict(keep)
        return torch.stack(steps, 1)


class PagedLayer:
    """A layer of `PagedRows`, as `Extend` takes it. What a sliding layer no longer sees goes with the next eviction."""

    sums: Mapping[str, Tensor] = {}
    tail = 0

    def __init__(self, rows: PagedRows, number: int):
        self.cache: Any = weakref.proxy(rows)  # a reference in a circle would keep the tensors in memory
        self.number, stored = number, rows.ledger.stored
        self.keys, self.values = stored[number], stored[len(stored) // 2 + number]

    def append(self, keys: KeyValue, values: KeyValue, positions: TokenInts) -> None:
        """Store the new tokens `[rows, kv_heads, new, dim]`; the first layer of a pass makes room for all."""
        if self.number == 0:
            self.cache.begin(keys.shape[2])
        self.keys[self.cache.written] = keys.transpose(1, 2)
        self.values[self.cache.written] = values.transpose(1, 2)

    def parts(self) -> list[Part]:
        """Keys, values and positions that a query attends to: each row's living slots in table order, flush right;
        position -1 where a head has evicted the token."""
        keys, values = (x[self.cache.read].transpose(1, 2) for x in (self.keys, self.values))
        where = self.cache.where
        return [(keys, values, where[:, self.number % where.shape[1]])]


def empty(model: PreTrainedModel, blocks: int, block_size: int) -> PagedRows:
    """A single row that has seen nothing, in a cache of so many blocks."""
    call = Call(model, [Prompt([0], {})], [], [1], ModelFacts.of(model))
    heads = [(call.facts.kv_heads[n], call.facts.outputs[n].shape[1]) for n in call.facts.attention]
    stored = [torch.zeros(blocks * block_size, *x, dtype=model.dtype, device=call.device) for x in 2 * heads]
    ledger = Ledger(blocks, block_size, stored)
    return PagedRows(call, ledger, [ledger.new()])


def read(model: PreTrainedModel, ids: list[int], more: int, copies: int, block_size: int) -> tuple[PagedRows, Tensor]:
    """A single row that has read `ids`, in a cache with room for `more` tokens and for `copies` of the sequence; and
    logits [1, vocabulary]."""
    row = empty(model, copies * (-(-(len(ids) + more) // block_size) + 1), block_size)
    with installed(model):
        return row, row.extend(ids)
