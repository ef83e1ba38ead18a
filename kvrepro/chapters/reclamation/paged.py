"""A paged KV cache for experiments, on which a model reads, decodes and evicts.

`PagedCache` holds keys and values in blocks and makes the copies that its ledger asks for. `PagedRows` gives sequences
of it to the model (`extend`, `generate`). Which tokens stay has been decided elsewhere.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvrepro.chapters.reclamation.ledger import Copies, Entry, Ledger
from kvrepro.engine.attention import Part, installed
from kvrepro.engine.cache import EngineCache
from kvrepro.engine.condition import Prompt
from kvrepro.engine.facts import ModelFacts
from kvrepro.engine.rows import Call, Extend
from kvrepro.engine.shapes import KeyValue, TokenInts

if TYPE_CHECKING:  # its import takes seconds
    from transformers import PreTrainedModel


class PagedCache:
    """Keys and values of many sequences, per layer `[blocks, block_size, kv_heads, dim]`, and their ledger.

    The engine sees sequences as `PagedRows`. Unwritten slots are zero and never gathered.
    """

    def __init__(self, model: PreTrainedModel, blocks: int, block_size: int):
        text = model.config.get_text_config()
        dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        kv_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        shape = (blocks, block_size, kv_heads, dim)
        self.config, self.ledger = model.config, Ledger(blocks, block_size)
        layers, kind = range(text.num_hidden_layers), {"dtype": model.dtype, "device": model.device}
        self.keys, self.values = ([torch.zeros(shape, **kind) for _ in layers] for _ in range(2))

    @property
    def stored(self) -> list[Tensor]:
        """Keys of every layer, then values, as flat slots `[blocks * block_size, kv_heads, dim]`."""
        return [x.flatten(0, 1) for x in (*self.keys, *self.values)]

    def copy(self, copies: Copies) -> None:
        """Carry out copies in every layer. All slots are read before any is written."""
        if len(copies[0]):
            source, target = (torch.from_numpy(part).to(self.keys[0].device) for part in copies)
            for flat in self.stored:
                flat[target] = flat[source]

    def compact(self, number: int, layout: str) -> tuple[int, Copies]:
        """`Ledger.compact`, carried out."""
        freed, copies = self.ledger.compact(number, layout)
        self.copy(copies)
        return freed, copies


class Pass(NamedTuple):
    """What an eviction and the compaction after it did to a sequence."""

    freed: int  # blocks
    predicted: int  # blocks: those that no other sequence shares, less as many as their survivors fill
    copies: int  # slots that moved
    foreign: int  # slots, read or written, of blocks that other sequences share
    seen: int  # tokens so far
    living: int  # tokens that some head holds


class PagedRows(EngineCache):
    """Sequences of a paged cache that have seen equally many tokens, as a cache of the engine with a row for each."""

    def __init__(self, pages: PagedCache, layouts: Sequence[str] = ("none",), numbers: Sequence[int] = ()):
        """layouts: each row's compaction after an eviction. numbers: of existing sequences; without them new ones
        begin."""
        super().__init__(pages.config)
        self.pages, self.ledger, self.layouts = pages, pages.ledger, list(layouts)
        self.numbers = list(numbers) or [self.ledger.new() for _ in layouts]
        self.passes: list[list[Pass]] = [[] for _ in layouts]
        self.ragged = {n: PagedLayer(self, n) for n in range(len(pages.keys))}

    @property
    def entries(self) -> list[Entry]:
        """Each row's entry in the ledger."""
        return [self.ledger.sequences[number] for number in self.numbers]

    @property
    def seen(self) -> int:
        """Tokens so far; every row has seen as many."""
        return self.entries[0].seen

    def fork(self, *shares: int | None, layouts: Sequence[str] = ("none",)) -> PagedRows:
        """`Ledger.fork` of a single row, with its copies: rows with the same tokens, one for each of `layouts`.
        shares: how many of the first blocks each shares (none given: all)."""
        numbers: list[int] = []
        for share, _ in zip(shares or (None,) * len(layouts), layouts, strict=True):
            number, copies = self.ledger.fork(self.numbers[0], share)
            self.pages.copy(copies)
            numbers.append(number)
        return PagedRows(self.pages, layouts, numbers)

    def free(self) -> None:
        """End the sequences."""
        for number in self.numbers:
            self.ledger.free(number)

    def begin(self, tokens: int) -> None:
        """Make room for the next `tokens` in all layers."""
        written, living = [], []
        for number in self.numbers:
            slots, copies = self.ledger.append(number, tokens)
            self.pages.copy(copies)
            written.append(slots)
            living.append(self.ledger.living(number))
        longest = max(len(flat) for flat, _, _ in living)
        kinds = np.broadcast_shapes(*(alive.shape[:2] for _, _, alive in living))
        read = np.zeros((len(living), longest), np.int64)
        where = np.full((len(living), *kinds, longest), -1)
        for row, (flat, positions, alive) in enumerate(living):
            first = longest - len(flat)
            read[row, first:], where[row, ..., first:] = flat, np.where(alive, positions, -1)
        device = self.pages.keys[0].device
        self.written = torch.from_numpy(np.stack(written)).to(device)  # [rows, tokens]
        self.read = torch.from_numpy(read).to(device)  # [rows, longest]
        self.where = torch.from_numpy(where).to(device)  # [rows, layers or 1, kv_heads or 1, longest]

    def evict(self, keep: np.ndarray) -> None:
        """Evict all tokens but those in `keep`, bool [layers, kv_heads, seen] over true positions, from every row;
        compact; and record what the pass did."""
        size = self.ledger.block_size
        for number, layout, passes in zip(self.numbers, self.layouts, self.passes, strict=True):
            freed = self.ledger.evict(number, keep)
            entry = self.ledger.sequences[number]
            unshared = self.ledger.references[entry.blocks] == 1
            living = (entry.positions >= 0).reshape(-1, size).sum(1)
            predicted = freed + int(unshared.sum()) - -(-int(living[unshared].sum()) // size)
            more, copies = self.pages.compact(number, layout)
            foreign = int((~np.isin(np.concatenate(copies) // size, entry.blocks[unshared])).sum())
            passes.append(Pass(freed + more, predicted, len(copies[0]), foreign, entry.seen, int(living.sum())))


class PagedLayer:
    """A layer of `PagedRows`, in blocks, as `Extend` takes it. Nothing slides: what a sliding layer no longer sees goes
    with the next eviction."""

    sums: Mapping[str, Tensor] = {}
    tail = 0

    def __init__(self, rows: PagedRows, number: int):
        self.cache: Any = weakref.proxy(rows)  # a reference in a circle would keep the pages in memory
        self.number = number
        self.keys, self.values = (x[number].flatten(0, 1) for x in (rows.pages.keys, rows.pages.values))

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


# ---- a model on paged rows


def call_for(model: PreTrainedModel) -> Call:
    """A call of the engine, for its `forward`."""
    return Call(model, [Prompt([0], {})], [], [1], ModelFacts.of(model))


@torch.inference_mode()
def extend(call: Call, rows: PagedRows, ids: Tensor | Sequence[int], misplaced: Sequence[bool] = (False,)) -> Tensor:
    """Run the next tokens [rows, new], or of a single row [new], through the model, in `installed(model)`: logits
    [rows, vocabulary] of the last. misplaced: which rows are told storage indices for positions."""
    tokens = torch.as_tensor(ids, device=rows.pages.keys[0].device).view(len(rows.numbers), -1)
    positions = torch.arange(rows.seen, rows.seen + tokens.shape[1], device=tokens.device).expand(tokens.shape)
    held = [int((e.positions >= 0).sum()) for e in rows.entries]
    shifts = [wrong * (living - rows.seen) for living, wrong in zip(held, misplaced, strict=True)]
    told = positions + positions.new_tensor(shifts)[:, None]
    return call.forward(tokens, told, rows, Extend(call, rows, positions))


def read(
    model: PreTrainedModel, ids: Sequence[int], more: int, copies: int, block_size: int
) -> tuple[Call, PagedRows, Tensor]:
    """Prefill `ids` into a cache with room for `more` tokens and for `copies` of the sequence: a call, a single row,
    logits [1, vocabulary]."""
    blocks = copies * (-(-(len(ids) + more) // block_size) + 1)
    call, row = call_for(model), PagedRows(PagedCache(model, blocks, block_size))
    with installed(model):
        return call, row, extend(call, row, ids)


def generate(
    call: Call, rows: PagedRows, logits: Tensor, survivors: Mapping[int, np.ndarray], new_tokens: int,
    misplaced: Sequence[bool] = (),
) -> Tensor:  # fmt: skip
    """Decode greedily from `logits` [1, vocabulary] on rows that have read their prompt: logits of each step [rows,
    new_tokens, vocabulary]. survivors: bool [evictable layers, kv_heads, seen] by the number of tokens seen, where an
    eviction is due."""
    last, steps, facts = logits.repeat(len(rows.numbers), 1), [], call.facts
    with installed(call.model):
        for step in range(new_tokens + 1):
            if step:
                last = extend(call, rows, last.argmax(1), misplaced or [False] * len(rows.numbers))
                steps.append(last)
            if rows.seen in survivors:
                given = survivors[rows.seen]
                keep = np.ones((len(rows.ragged), *given.shape[1:]), bool)
                for layer, window in facts.sliding.items():
                    keep[layer] = np.arange(rows.seen) >= rows.seen - window + 1
                keep[list(facts.evictable)] = given
                rows.evict(keep)
    return torch.stack(steps, 1)
