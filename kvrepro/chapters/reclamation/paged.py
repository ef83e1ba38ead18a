"""A paged KV cache for experiments, on which the engine attends, evicts and decodes as on any cache.

`PagedCache` holds keys and values in blocks and makes the copies that its ledger asks for. `PagedRows` gives sequences
of it to the engine (`extend`, `generate`).
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from kvrepro.chapters.reclamation.ledger import Copies, Entry, Ledger
from kvrepro.chapters.reclamation.survivors import GIVEN, WINDOW
from kvrepro.engine.attention import Part, installed
from kvrepro.engine.cache import EngineCache, RaggedLayer, Shown
from kvrepro.engine.condition import Condition, Generation, Prompt
from kvrepro.engine.decode import decode
from kvrepro.engine.evict import EvictionJob, Prompts
from kvrepro.engine.extend import Extend
from kvrepro.engine.facts import ModelFacts
from kvrepro.engine.passes import Call
from kvrepro.engine.policy import Policy, find
from kvrepro.engine.rows import Rows, evict_rows
from kvrepro.engine.rule import budget_of
from kvrepro.engine.shapes import KeyValue, Mask, RowInts, TokenInts

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


@dataclass(frozen=True)
class Pass:
    """What an eviction and the compaction after it did to a sequence."""

    freed: int  # blocks
    predicted: int  # blocks: those that no other sequence shares, less as many as their survivors fill
    copies: int  # slots that moved
    foreign: int  # slots, read or written, of blocks that other sequences share
    seen: int  # tokens so far
    survivors: np.ndarray  # bool [layers, kv_heads, seen] over true positions


class PagedRows(EngineCache):
    """Sequences of a paged cache that have seen equally many tokens, as a cache of the engine with a row for each."""

    def __init__(
        self, pages: PagedCache, sums: Collection[str] = (), layouts: Sequence[str] = ("none",),
        numbers: Sequence[int] = (),
    ):  # fmt: skip
        """sums: what is added up per token (`policy.SUMS`). layouts: each row's compaction after an eviction. numbers:
        of existing sequences; without them new ones begin."""
        super().__init__(pages.config)
        self.pages, self.ledger, self.layouts = pages, pages.ledger, list(layouts)
        self.numbers = list(numbers) or [self.ledger.new() for _ in layouts]
        self.passes: list[list[Pass]] = [[] for _ in layouts]
        self._freed = [0] * len(layouts)  # blocks, since the last tokens came
        self.keeps: np.ndarray | None = None  # bool [rows, layers, kv_heads, seen]: evictions not yet in the ledger
        self.ragged = {n: PagedLayer(self, n, sums) for n in range(len(pages.keys))}  # type: ignore[misc]

    @property
    def entries(self) -> list[Entry]:
        """Each row's entry in the ledger."""
        return [self.ledger.sequences[number] for number in self.numbers]

    @property
    def seen(self) -> int:
        """Tokens so far; every row has seen as many."""
        return self.entries[0].seen

    def fork(self, *shares: int | None, layouts: Sequence[str] = ("none",)) -> PagedRows:
        """`Ledger.fork` of a single row, with its copies: rows with the same tokens, sums and last queries, one for
        each of `layouts`. shares: how many of the first blocks each shares (none given: all)."""
        numbers: list[int] = []
        for share, _ in zip(shares or (None,) * len(layouts), layouts, strict=True):
            number, copies = self.ledger.fork(self.numbers[0], share)
            self.pages.copy(copies)
            numbers.append(number)
        child = PagedRows(self.pages, (), layouts, numbers)
        child.scalings = self.scalings
        for layer, copy in zip(self.ragged.values(), child.ragged.values(), strict=True):
            copy.sums.update({name: s.repeat(len(numbers), 1, 1) for name, s in layer.sums.items()})
            if layer.queries is not None and layer.query_positions is not None:
                copy.queries = layer.queries.expand(len(numbers), -1, -1, -1)
                copy.query_positions = layer.query_positions.expand(len(numbers), -1)
        return child

    def free(self) -> None:
        """End the sequences."""
        for number in self.numbers:
            self.ledger.free(number)

    def begin(self, tokens: int) -> None:
        """Make room for the next `tokens` in all layers."""
        self.settle()
        self._freed = [0] * len(self.numbers)
        written, living = [], []
        for number in self.numbers:
            slots, copies = self.ledger.append(number, tokens)
            self.pages.copy(copies)
            written.append(slots)
            living.append(self.ledger.living(number))
        longest = max(len(flat) for flat, _, _ in living)
        kinds = np.broadcast_shapes(*(alive.shape[:2] for _, _, alive in living))
        read, at = np.zeros((2, len(living), longest), np.int64)
        where = np.full((len(living), *kinds, longest), -1)
        for row, (flat, positions, alive) in enumerate(living):
            first = longest - len(flat)
            read[row, first:], at[row, first:] = flat, positions
            where[row, ..., first:] = np.where(alive, positions, -1)
        device = self.pages.keys[0].device
        self.written = torch.from_numpy(np.stack(written)).to(device)  # [rows, tokens]
        self.read, self.at = torch.from_numpy(read).to(device), torch.from_numpy(at).to(device)  # [rows, longest]
        self.where = torch.from_numpy(where).to(device)  # [rows, layers or 1, kv_heads or 1, longest]

    def survivors(self) -> np.ndarray:
        """Which tokens are left, bool [rows, layers, kv_heads, seen] over true positions."""
        return np.stack([layer.holds() for layer in self.ragged.values()], 1)

    def settle(self) -> None:
        """Enter into the ledger what the layers have evicted."""
        if self.keeps is not None:
            for row, (number, keep) in enumerate(zip(self.numbers, self.keeps, strict=True)):
                self._freed[row] += self.ledger.evict(number, keep)
        self.keeps = None

    def evicted(self) -> None:
        """Compact, now that every layer has evicted, and record what the pass did."""
        self.settle()
        survivors = self.survivors()
        for row, (number, entry) in enumerate(zip(self.numbers, self.entries, strict=True)):
            unshared = self.ledger.references[entry.blocks] == 1
            living = int((entry.positions >= 0).reshape(-1, self.ledger.block_size)[unshared].sum())
            before = int(unshared.sum()) + self._freed[row]
            freed, copies = self.pages.compact(number, self.layouts[row])
            self._freed[row] += freed
            touched = np.concatenate(copies) // self.ledger.block_size
            self.passes[row].append(Pass(
                self._freed[row], before - -(-living // self.ledger.block_size), len(copies[0]),
                int((~np.isin(touched, entry.blocks[unshared])).sum()), entry.seen, survivors[row],
            ))  # fmt: skip


class PagedLayer:
    """A layer of `PagedRows`, in blocks; to `Extend`, `evict_rows` and `decode` it is a `RaggedLayer`.

    Sums [rows, kv_heads, seen] are by true position, outside the blocks, which other sequences may share.
    """

    remember = RaggedLayer.remember

    def __init__(self, rows: PagedRows, number: int, sums: Collection[str]):
        self.cache: Any = weakref.proxy(rows)  # a reference in a circle would keep the pages in memory
        self.number, self.tail = number, 0
        self._keys, self._values = (x[number].flatten(0, 1) for x in (rows.pages.keys, rows.pages.values))
        self.shape = (len(rows.numbers), self._keys.shape[1])  # batch, kv_heads
        self.keys = self._keys.flatten(0, 1)  # [tokens, dim], as a ragged layer's
        self.sums = {name: torch.zeros(*self.shape, 0, device=self.keys.device) for name in sums}
        self.tail_sums = self.sums
        self.queries: Tensor | None = None
        self.query_positions: Tensor | None = None

    def append(self, keys: KeyValue, values: KeyValue, positions: TokenInts) -> None:
        """Store the new tokens `[rows, kv_heads, new, dim]`; the first layer of a pass makes room for all."""
        new = keys.shape[2]
        if self.number == 0:
            self.cache.begin(new)
        self._keys[self.cache.written] = keys.transpose(1, 2)
        self._values[self.cache.written] = values.transpose(1, 2)
        self.sums.update({name: torch.nn.functional.pad(s, (0, new)) for name, s in self.sums.items()})
        self.tail += new

    def parts(self) -> list[Part]:
        """Keys, values and positions that a query attends to: each row's living slots in table order, flush right;
        position -1 where a head has evicted the token."""
        keys, values = (x[self.cache.read].transpose(1, 2) for x in (self._keys, self._values))
        where = self.cache.where
        return [(keys, values, where[:, self.number % where.shape[1]])]

    def add(self, name: str, p: Tensor, flat_tokens: int) -> None:
        """Add `p` [rows, kv_heads, tokens], in the order of `parts`, to the sum of that name."""
        self.sums[name].scatter_add_(2, self.cache.at[:, None].expand(p.shape), p)

    def shown(self) -> Shown:
        """The tokens that each head holds, by ascending position; `index` is the position."""
        holds = self.holds()
        seen = holds.shape[2]
        slots = np.zeros((len(holds), seen), np.int64)
        for row, number in enumerate(self.cache.numbers):
            flat, positions, _ = self.cache.ledger.living(number)
            slots[row, positions] = flat
        held = np.sort(np.where(holds, np.arange(seen), -1))[..., seen - holds.sum(-1).max() :]
        slot = np.take_along_axis(slots[:, None], held.clip(min=0), 2)
        slot, at = (torch.from_numpy(x).to(self.keys.device) for x in (slot, held))
        heads = torch.arange(at.shape[1], device=at.device)[:, None]
        sums = {n: s.gather(2, at.clamp(min=0)).masked_fill(at < 0, 0) for n, s in self.sums.items()}
        return Shown(self._keys[slot, heads], self._values[slot, heads], at, sums, at)

    def holds(self) -> np.ndarray:
        """Which tokens are left in this layer, bool [rows, kv_heads, seen] over true positions."""
        holds = np.zeros((*self.shape, self.cache.seen), bool)
        for row, entry in enumerate(self.cache.entries):
            slots = np.flatnonzero(entry.positions >= 0)
            holds[row][:, entry.positions[slots]] = entry.alive[self.number % len(entry.alive)][:, slots]
        return holds if self.cache.keeps is None else holds & self.cache.keeps[:, self.number]

    def evict(self, keep: Mask, index: Tensor, masked: bool = False) -> None:
        """Of the tokens that `shown` gave, hold on to those in `keep`. Evicted tokens always leave memory."""
        kept = torch.zeros(*self.shape, self.cache.seen + 1, dtype=torch.bool, device=index.device)
        kept.scatter_(2, index.where(keep, -1) + 1, True)
        self._keep(kept[..., 1:].cpu().numpy())

    def slide(self, oldest: RowInts) -> None:
        """Forget the tokens before each row's `oldest` position: a sliding layer never sees them again."""
        self.tail = 0
        self._keep((np.arange(self.cache.seen) >= oldest.cpu().numpy()[:, None])[:, None])
        self.cache.settle()

    def _keep(self, keep: np.ndarray) -> None:
        """keep: bool [rows, kv_heads or 1, seen]."""
        if self.cache.keeps is None:
            self.cache.keeps = np.ones((self.shape[0], len(self.cache.ragged), self.shape[1], self.cache.seen), bool)
        self.cache.keeps[:, self.number] &= keep

    def held(self) -> Tensor:
        """How many tokens each head holds, int64 [rows, kv_heads]; more slots may be in use, for other heads."""
        return torch.from_numpy(self.holds().sum(-1))

    seen = held
    bytes = state_bytes = overhead_bytes = 0  # blocks are what is counted here


# ---- the engine on paged rows


@dataclass
class LoggedSteps(Call):
    """A call of the engine that keeps the logits of every step. misplaced: for each row, whether the model gets storage
    indices instead of positions."""

    misplaced: Sequence[bool] = ()
    logits: list[Tensor] = field(default_factory=list)

    def forward(self, ids: Tensor, positions: Tensor, cache: PagedRows, attention: Extend) -> Tensor:  # type: ignore[override]
        if any(self.misplaced):
            shifts = [int((e.positions >= 0).sum()) - e.seen for e in cache.entries]
            moved = positions.new_tensor([s * m for s, m in zip(shifts, self.misplaced, strict=True)])
            positions = positions + moved[:, None]
        self.logits.append(super().forward(ids, positions, cache, attention))
        return self.logits[-1]


def call_for(model: PreTrainedModel, ids: list[int], new_tokens: int = 1, kind: type[Call] = Call, **more: Any) -> Any:
    """A call of the engine for one prompt."""
    return kind(model, [Prompt(ids, {})], [], [new_tokens], ModelFacts.of(model), **more)


@torch.inference_mode()
def extend(call: Call, rows: PagedRows, ids: list[int], window: int = 0) -> Tensor:
    """Run the next tokens of a single row through the model, in `installed(model)`: logits [1, vocabulary] of the last.

    window: queries that an eviction will ask for.
    """
    device = rows.pages.keys[0].device
    positions = torch.arange(rows.seen, rows.seen + len(ids), device=device)[None]
    return call.forward(torch.tensor([ids], device=device), positions, rows, Extend(rows, positions, window))


def read(
    model: PreTrainedModel, ids: list[int], more: int, copies: int, block_size: int, sums: Collection[str] = ()
) -> tuple[Call, PagedRows, Tensor]:
    """Prefill `ids` into a cache with room for `more` tokens and for `copies` of the sequence: a call, a single row,
    logits [1, vocabulary]. sums: those that the policies need which evict from it."""
    blocks = copies * (-(-(len(ids) + more) // block_size) + 1)
    call, row = call_for(model, ids), PagedRows(PagedCache(model, blocks, block_size), sums)
    with installed(model):
        logits = extend(call, row, ids, WINDOW if sums else 0)
    return call, row, logits


@torch.inference_mode()
def generate(
    call: Call, paged: PagedRows, logits: Tensor, conditions: Sequence[Condition],
    survivors: Sequence[Mapping[int, Tensor]] = (),
) -> list[Generation]:  # fmt: skip
    """Evict from rows that have read their prompt, and decode from `logits` [1, vocabulary], by the engine's loop. Each
    row keeps the `survivors` of another run (as `survivors.given` takes them), or what its condition's policy keeps."""
    budgets = [budget_of(c, paged.seen) for c in conditions]
    prompts = Prompts.of(call.texts, logits.device)
    jobs = []
    for row, (c, budget) in enumerate(zip(conditions, budgets, strict=True)):
        policy: Policy = GIVEN if survivors else find(c.policy)
        parameters = {"survivors": survivors[row]} if survivors else policy.reading(c.reading, c.switches)
        jobs.append(EvictionJob([c], policy, parameters, [budget], prompts))
    for layer in paged.ragged.values() if survivors else ():  # given survivors need no sums
        layer.sums.clear()
    seen = torch.full((len(jobs),), paged.seen, device=logits.device)
    tags = [(0, row) for row in range(len(jobs))]
    call.notes |= {tag: {"kept_positions": [], "kept_positions_hash": "", "prefill_seconds": 0.0} for tag in tags}
    start = logits.repeat(len(jobs), 1)
    rows = Rows(tags, jobs, call.texts * len(jobs), paged, start, seen, torch.zeros_like(seen))
    with installed(call.model):
        evict_rows(call.facts, rows, budgets)
        call.fail({tags[row]: error for row, error in rows.failed.items()})
        by_tag = dict(decode(call, rows, ()))
    return [by_tag[tag] for tag in tags]
