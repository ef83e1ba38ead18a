"""A paged KV cache as an experiment's instrument, for the engine's loops.

`PagedCache` holds keys and values in blocks and makes the copies that its ledger asks for. `PagedSequence` hands one
sequence of it to the engine, which attends, evicts and decodes as on any cache (`extend`, `generate`).
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from kvrepro.chapters.reclamation.ledger import Copies, Ledger, Sequence
from kvrepro.chapters.reclamation.survivors import GIVEN
from kvrepro.engine.attention import Part, installed
from kvrepro.engine.cache import EngineCache, RaggedLayer, Shown
from kvrepro.engine.condition import Condition, Generation, Prompt
from kvrepro.engine.decode import decode
from kvrepro.engine.evict import EvictionJob, Prompts
from kvrepro.engine.extend import Extend
from kvrepro.engine.facts import ModelFacts
from kvrepro.engine.passes import Call
from kvrepro.engine.policy import Policy, budget_of, find
from kvrepro.engine.rows import Rows, evict_rows
from kvrepro.engine.shapes import KeyValue, Mask, RowInts, TokenInts
from kvrepro.errors import InputError


class PagedCache:
    """Keys and values of many sequences, per layer `[blocks, block_size, kv_heads, dim]`, beside their ledger.

    `PagedSequence` is how the engine sees one of them. Unwritten slots are zero and never gathered.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        blocks: int,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
    ):
        text = config.get_text_config()
        if other := set(getattr(text, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}:
            raise InputError(f"{config.model_type} has layers of kind {min(other)}, which hold no keys to page: "
                             "take a model with attention in every layer")  # fmt: skip
        dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        kv_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        shape = (blocks, block_size, kv_heads, dim)
        self.config, self.ledger = config, Ledger(blocks, block_size)
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(text.num_hidden_layers)]
        self.values = [torch.zeros_like(keys) for keys in self.keys]

    @property
    def stored(self) -> list[Tensor]:
        """Keys of every layer, then values, as flat slots `[blocks * block_size, kv_heads, dim]`."""
        return [x.flatten(0, 1) for x in (*self.keys, *self.values)]

    def copy(self, copies: Copies) -> None:
        """Carry out copies, in every layer: all are read before any is written."""
        if len(copies[0]):
            source, target = (torch.from_numpy(part).to(self.keys[0].device) for part in copies)
            for flat in self.stored:
                flat[target] = flat[source]

    def compact(self, number: int, layout: str) -> Copies:
        """`Ledger.compact`, carried out: the copies that were made."""
        copies = self.ledger.compact(number, layout)[1]
        self.copy(copies)
        return copies


@dataclass(frozen=True)
class Pass:
    """What an eviction and the compaction after it did to a sequence."""

    freed: int  # blocks
    predicted: int  # blocks: those that it shared with nobody, less as many as its survivors in them fill
    copies: int  # slots that moved
    foreign: int  # slots, read or written, of blocks that are not its own alone
    seen: int  # tokens so far
    survivors: np.ndarray  # bool [layers, kv_heads, seen] over true positions


class PagedSequence(EngineCache):
    """One sequence of a paged cache as the engine's loops take a cache: a batch of one row."""

    def __init__(self, pages: PagedCache, sums: Collection[str] = (), layout: str = "none", number: int | None = None):
        """sums: what is added up per token (`policy.SUMS`). layout: the compaction that follows an eviction."""
        super().__init__(pages.config)
        self.pages, self.ledger, self.layout = pages, pages.ledger, layout
        self.number = self.ledger.new() if number is None else number
        self.passes: list[Pass] = []
        self._freed = self.ledger.counters.blocks_freed
        self.ragged = {n: PagedLayer(self, n, sums) for n in range(len(pages.keys))}  # type: ignore[misc]

    @property
    def entry(self) -> Sequence:
        """What the ledger knows of it."""
        return self.ledger.sequences[self.number]

    def fork(self, share: int | None = None, layout: str = "none") -> "PagedSequence":
        """`Ledger.fork`, carried out: another sequence with the same tokens, sums and last queries."""
        number, copies = self.ledger.fork(self.number, share)
        self.pages.copy(copies)
        child = PagedSequence(self.pages, (), layout, number)
        for mine, other in zip(self.ragged.values(), child.ragged.values(), strict=True):
            other.sums.update({name: s.clone() for name, s in mine.sums.items()})
            other.queries, other.query_positions = mine.queries, mine.query_positions
        return child

    def begin(self, tokens: int) -> None:
        """Make room for the next `tokens` in all layers."""
        self._freed = self.ledger.counters.blocks_freed
        slots, copies = self.ledger.append(self.number, tokens)
        self.pages.copy(copies)
        flat, at, alive = self.ledger.living(self.number)
        device = self.pages.keys[0].device
        self.written, self.read, self.at = (torch.from_numpy(x).to(device) for x in (slots, flat, at))
        self.where = torch.from_numpy(np.where(alive, at, -1)).to(device)  # [layers or 1, kv_heads or 1, living]

    def survivors(self) -> np.ndarray:
        """Who is left, bool [layers, kv_heads, seen] over true positions."""
        return np.stack([layer.holds() for layer in self.ragged.values()])

    def evicted(self) -> None:
        """Compact, now that every layer has evicted, and note what the pass did."""
        ledger, entry = self.ledger, self.entry
        mine = ledger.references[entry.blocks] == 1
        living = int((entry.positions >= 0).reshape(-1, ledger.block_size)[mine].sum())
        before = int(mine.sum()) + ledger.counters.blocks_freed - self._freed
        copies = self.pages.compact(self.number, self.layout)
        touched = np.concatenate(copies) // ledger.block_size
        self.passes.append(Pass(
            ledger.counters.blocks_freed - self._freed, before - -(-living // ledger.block_size), len(copies[0]),
            int((~np.isin(touched, entry.blocks[mine])).sum()), entry.seen, self.survivors(),
        ))  # fmt: skip


class PagedLayer:
    """A layer of a `PagedSequence`: what `Extend`, `evict_rows` and `decode` ask of a `RaggedLayer`, from blocks.

    Sums [kv_heads, seen] lie by true position, apart from the blocks, which other sequences may share.
    """

    remember = RaggedLayer.remember

    def __init__(self, sequence: PagedSequence, number: int, sums: Collection[str]):
        self.sequence, self.number, self.tail = sequence, number, 0
        self._keys, self._values = (x[number].flatten(0, 1) for x in (sequence.pages.keys, sequence.pages.values))
        self.shape = (1, self._keys.shape[1])  # batch, kv_heads
        self.keys = self._keys.flatten(0, 1)  # [tokens, dim], as a ragged layer's
        self.sums = {name: torch.zeros(self.shape[1], 0, device=self.keys.device) for name in sums}
        self.tail_sums = self.sums
        self.queries: Tensor | None = None
        self.query_positions: Tensor | None = None

    def append(self, keys: KeyValue, values: KeyValue, positions: TokenInts) -> None:
        """Store the new tokens `[1, kv_heads, new, dim]`; the first layer of a pass makes room for all."""
        new, sequence = keys.shape[2], self.sequence
        if self.number == 0:
            sequence.begin(new)
        self._keys[sequence.written] = keys[0].transpose(0, 1)
        self._values[sequence.written] = values[0].transpose(0, 1)
        self.sums.update({name: torch.nn.functional.pad(s, (0, new)) for name, s in self.sums.items()})
        self.tail += new

    def parts(self) -> list[Part]:
        """What a query attends to: the sequence's living slots in table order, -1 where a head has evicted one."""
        keys, values = (x[self.sequence.read].transpose(0, 1)[None] for x in (self._keys, self._values))
        where = self.sequence.where
        return [(keys, values, where[self.number % len(where)][None])]

    def add(self, name: str, p: Tensor, flat_tokens: int) -> None:
        """Add `p` [1, kv_heads, tokens], in the order of `parts`, to the sum of that name."""
        self.sums[name].index_add_(1, self.sequence.at, p[0])

    def shown(self) -> Shown:
        """The tokens that each head holds, in ascending order; `index` is their position."""
        holds = self.holds()
        flat, where, _ = self.sequence.ledger.living(self.sequence.number)
        slots = np.zeros(holds.shape[1], np.int64)
        slots[where] = flat
        at = np.sort(np.where(holds, np.arange(holds.shape[1]), -1))[:, holds.shape[1] - holds.sum(1).max() :]
        slot, at = (torch.from_numpy(x).to(self.keys.device) for x in (slots[at.clip(min=0)], at))
        heads = torch.arange(len(at), device=at.device)[:, None]
        sums = {n: s.gather(1, at.clamp(min=0)).masked_fill(at < 0, 0)[None] for n, s in self.sums.items()}
        return Shown(self._keys[slot, heads][None], self._values[slot, heads][None], at[None], sums, at[None])

    def holds(self) -> np.ndarray:
        """Who is left in this layer, bool [kv_heads, seen] over true positions."""
        entry = self.sequence.entry
        slots = np.flatnonzero(entry.positions >= 0)
        found = np.zeros((self.shape[1], entry.seen), bool)
        found[:, entry.positions[slots]] = entry.alive[self.number % len(entry.alive)][:, slots]
        return found

    def evict(self, keep: Mask, index: Tensor, masked: bool = False) -> None:
        """Keep what `keep` names of the tokens that `shown` gave. Raises InputError for `masked`."""
        if masked:
            raise InputError("execution masked on a paged cache, which gives memory back: take physical")
        kept = torch.zeros(self.shape[1], self.sequence.entry.seen + 1, dtype=torch.bool, device=index.device)
        kept.scatter_(1, index[0].where(keep[0], -1) + 1, True)
        self._keep(kept[:, 1:].cpu().numpy())

    def slide(self, oldest: RowInts) -> None:
        """Forget the tokens before the row's `oldest` position: a sliding layer never sees them again."""
        self.tail = 0
        self._keep(np.arange(self.sequence.entry.seen) >= int(oldest))

    def _keep(self, keep: np.ndarray) -> None:
        everyone = np.ones((len(self.sequence.ragged), self.shape[1], self.sequence.entry.seen), bool)
        everyone[self.number] = keep
        self.sequence.ledger.evict(self.sequence.number, everyone)

    def held(self) -> Tensor:
        """Tokens of each head, int64 [1, kv_heads]; other heads may hold their slots without them."""
        return torch.from_numpy(self.holds().sum(-1))[None]

    seen = held
    overhead_bytes = 0

    @property
    def bytes(self) -> int:
        """Bytes of this layer's keys and values in the sequence's blocks, those that it shares included."""
        return 2 * self.keys.nbytes * len(self.sequence.entry.blocks) // len(self.sequence.ledger.references)

    @property
    def state_bytes(self) -> int:
        """Bytes of what the next eviction will ask for: sums per token, the last queries."""
        kept = (*self.sums.values(), self.queries, self.query_positions)
        return sum(t.nbytes for t in kept if t is not None)


# ---- the engine on a paged sequence


@dataclass
class LoggedSteps(Call):
    """A call of the engine that keeps the logits of every step. misplaced: the model is told storage indices instead of
    positions."""

    misplaced: bool = False
    logits: list[Tensor] = field(default_factory=list)

    def forward(self, ids: Tensor, positions: Tensor, cache: PagedSequence, attention: Extend) -> Tensor:  # type: ignore[override]
        shift = int((cache.entry.positions >= 0).sum()) - cache.entry.seen if self.misplaced else 0
        self.logits.append(super().forward(ids, positions + shift, cache, attention))
        return self.logits[-1]


def call_for(model: PreTrainedModel, ids: list[int], new_tokens: int = 1, kind: type[Call] = Call, **more: Any) -> Any:
    """A call of the engine for one prompt, which a paged sequence has read or reads."""
    notes = {(0, 0): {"kept_positions": [], "kept_positions_hash": "", "prefill_seconds": 0.0}}
    return kind(model, [Prompt(ids, {})], [], [new_tokens], ModelFacts.of(model), notes=notes, **more)


@torch.inference_mode()
def extend(call: Call, sequence: PagedSequence, ids: list[int], window: int = 0) -> Tensor:
    """Run the next tokens of a sequence through the model, in `installed(model)`: logits [1, vocabulary] of the last.

    window: queries that an eviction will ask for.
    """
    start, device = sequence.entry.seen, sequence.pages.keys[0].device
    positions = torch.arange(start, start + len(ids), device=device)[None]
    return call.forward(torch.tensor([ids], device=device), positions, sequence, Extend(sequence, positions, window))


@torch.inference_mode()
def generate(
    call: Call, sequence: PagedSequence, logits: Tensor, condition: Condition, survivors: Mapping[int, Tensor] | None
) -> Generation:
    """Evict from a sequence that has read its prompt, and decode from `logits`, by the engine's loop: to the
    `survivors` of another run (as `survivors.given` takes them), or as the condition says."""
    policy: Policy = GIVEN
    parameters: dict[str, object] = {"survivors": survivors}
    if not survivors:
        policy = find(condition.policy)
        parameters = policy.reading(condition.reading, condition.switches)
    seen = torch.tensor([sequence.entry.seen], device=logits.device)
    budgets = [budget_of(condition, sequence.entry.seen)]
    job = EvictionJob([condition], policy, parameters, budgets, Prompts.of(call.texts, logits.device))
    rows = Rows([(0, 0)], [job], call.texts, sequence, logits, seen, torch.zeros_like(seen))
    with installed(call.model):
        evict_rows(call.facts, rows, budgets, call.scalings)
        [(_, generation)] = decode(call, rows, ())
    assert isinstance(generation, Generation)  # what fails is raised
    return generation
