"""A paged KV cache as an experiment's instrument: which blocks a sequence holds, and what compaction gives back.

`Ledger` keeps the books in numpy (block tables, reference counts, free list, the true position of every slot) and never
sees a tensor, so that patterns over many thousand tokens are index work. `PagedCache` holds the keys and values and
makes the copies that its ledger asks for; `forward` and `generate` run a Hugging Face model on it.

A block is `block_size` slots; a slot holds one token's keys and values of all layers and KV heads, so it is dead only
when every head of every layer has evicted it. After Kwon et al. 2023, section 4, and the guide on eviction and
compaction, "Architecture".
"""

from collections.abc import Collection
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch
from torch import Tensor
from transformers import Cache, DynamicLayer, PretrainedConfig, PreTrainedModel

from kvrepro.engine.attention import installed
from kvrepro.engine.shapes import KeyValue, Query
from kvrepro.errors import InputError

Copies = tuple[np.ndarray, np.ndarray]  # flat slots (block * block_size + offset): read all of the first, then write
NONE: Copies = (np.empty(0, np.int64), np.empty(0, np.int64))


@dataclass(frozen=True)
class Sequence:
    """One sequence's view. Slots count along its block table: slot s is offset s % block_size of `blocks[s // ...]`."""

    blocks: np.ndarray  # int64 [blocks]
    positions: np.ndarray  # int64 [slots]: the position map. True position of the slot's token, -1 = dead or unwritten
    alive: np.ndarray  # bool [layers or 1, kv_heads or 1, slots]: who still attends to it; 1 stands for all
    tail: int = 0  # the next slot to write
    seen: int = 0  # tokens so far, evicted ones included = the next token's true position


@dataclass
class Counters:
    """What an engine should export. All but the last three only grow."""

    passes: int = 0  # compactions
    blocks_freed: int = 0  # by eviction or compaction, not by the end of a sequence
    slot_copies: int = 0  # by compaction
    cow_copies: int = 0  # by writing into a shared block
    evicted_tokens: int = 0  # slots that died
    blocks_free: int = 0
    blocks_held: int = 0
    tokens_alive: int = 0  # a token that two sequences share counts twice


class Ledger:
    """The books of `blocks` blocks. A method that must copy returns the copies; the caller carries them out at once."""

    def __init__(self, blocks: int, block_size: int = 16):
        if blocks < 1 or block_size < 1:
            raise InputError(f"{blocks} blocks of {block_size} slots: both must be at least 1")
        self.block_size = block_size
        self.references = np.zeros(blocks, np.int64)
        self.free_list = list(range(blocks))[::-1]  # the lowest block goes first
        self.sequences: dict[int, Sequence] = {}
        self.counters = Counters()
        self._next = 0

    # ---- sequences

    def new(self) -> int:
        """Number of a new, empty sequence."""
        empty = Sequence(np.empty(0, np.int64), np.empty(0, np.int64), np.empty((1, 1, 0), bool))
        return self._add(empty)

    def fork(self, number: int, share: int | None = None) -> tuple[int, Copies]:
        """A new sequence with the same tokens, and the copies to make. It shares the first `share` blocks (None: all,
        and nothing is copied until one of the two writes) and has copies of the others. Too few free: InputError."""
        parent = self.sequences[number]
        share = len(parent.blocks) if share is None else share
        common, others = parent.blocks[:share], parent.blocks[share:]
        if len(others) > len(self.free_list):
            raise InputError(f"{len(others)} blocks to copy, {len(self.free_list)} are free: share more, or free some")
        self.references[common] += 1
        child = replace(parent, blocks=np.append(common, self._take(len(others))))
        slots = np.flatnonzero(parent.positions >= 0)
        slots = slots[slots >= share * self.block_size]
        return self._add(child), (self._flat(parent, slots), self._flat(child, slots))

    def free(self, number: int) -> None:
        """End a sequence; blocks that nobody else holds return to the pool."""
        self._release(self.sequences.pop(number).blocks)

    def append(self, number: int, tokens: int = 1) -> tuple[np.ndarray, Copies]:
        """Room for the next `tokens`: their flat slots [tokens], and the copies to be made before anything is written.

        A last block that is shared and not yet full is replaced by a copy. Too few free blocks raise InputError, and
        nothing is changed.
        """
        s, size = self.sequences[number], self.block_size
        copy_last = s.tail < len(s.positions) and self.references[s.blocks[-1]] > 1
        fresh = max(0, -(-(s.tail + tokens - len(s.positions)) // size))
        if fresh + copy_last > len(self.free_list):
            raise InputError(
                f"{tokens} tokens need {fresh + copy_last} blocks, {len(self.free_list)} of {len(self.references)} are "
                "free: evict, free a sequence, or make the cache larger"
            )
        copies = NONE
        if copy_last:
            inside = np.flatnonzero(s.positions[-size:] >= 0)
            [block] = self._take(1)
            copies = (s.blocks[-1] * size + inside, block * size + inside)
            self._release(s.blocks[-1:])
            s = replace(s, blocks=np.append(s.blocks[:-1], block))
            self.counters.cow_copies += len(inside)
        s = replace(
            s,
            blocks=np.append(s.blocks, self._take(fresh)),
            positions=np.append(s.positions, np.full(fresh * size, -1)),
            alive=np.append(s.alive, np.zeros((*s.alive.shape[:2], fresh * size), bool), -1),
        )
        slots = np.arange(s.tail, s.tail + tokens)
        s.positions[slots] = np.arange(s.seen, s.seen + tokens)
        s.alive[..., slots] = True
        self.sequences[number] = replace(s, tail=s.tail + tokens, seen=s.seen + tokens)
        return self._flat(s, slots), copies

    # ---- eviction and compaction

    def evict(self, number: int, keep: np.ndarray) -> int:
        """Keep what `keep` says, for ever. Returns the blocks freed: those whose every slot is dead.

        keep: bool `[..., seen]` over true positions, broadcast to [layers or 1, kv_heads or 1]; what was evicted before
        stays evicted. Another length raises InputError.
        """
        s = self.sequences[number]
        keep = keep[(None,) * (3 - keep.ndim)]
        if keep.shape[-1] != s.seen:
            raise InputError(f"keep has {keep.shape[-1]} positions, the sequence has seen {s.seen}: give one each")
        alive = s.alive & keep[..., s.positions.clip(min=0)] & (s.positions >= 0)
        dead = (s.positions >= 0) & ~alive.any((0, 1))
        self.counters.evicted_tokens += int(dead.sum())
        self.sequences[number] = replace(s, positions=np.where(dead, -1, s.positions), alive=alive)
        return self._drop(number)

    def repack(self, number: int) -> tuple[int, Copies]:
        """Order-preserving compaction: (blocks freed, copies). Survivors slide forward in order, as far as the next
        shared block, which stays where it is."""
        s = self.sequences[number]
        shared = np.repeat(self.references[s.blocks] > 1, self.block_size)  # per slot
        run = np.cumsum(shared)  # own slots between two shared blocks have one number
        source = np.flatnonzero((s.positions >= 0) & ~shared)
        starts = {int(r): int(np.flatnonzero((run == r) & ~shared)[0]) for r in np.unique(run[source])}
        rank = np.arange(len(source)) - np.searchsorted(run[source], run[source])
        target = np.array([starts[int(r)] for r in run[source]], np.int64) + rank
        return self._compact(number, s, source, target)

    def fill(self, number: int, vacate: str = "tail") -> tuple[int, Copies]:
        """Hole filling: (blocks freed, copies). Of n survivors those behind the first n slots move into holes before
        them; the order of the text is left to the position map.

        vacate: "tail" empties the last blocks, "emptiest" those with the fewest survivors (any block can go: a table
        is a list of numbers). Shared blocks come first in the new table; none is moved, read or written.
        """
        if vacate not in ("tail", "emptiest"):
            raise InputError(f"vacate is {vacate!r}: choose 'tail' or 'emptiest'")
        s, size = self.sequences[number], self.block_size
        shared = self.references[s.blocks] > 1
        living = (s.positions >= 0).reshape(-1, size).sum(1)
        order = np.lexsort((-living if vacate == "emptiest" else living * 0, ~shared))
        s = _blocks_of(s, order, size)
        first = int(shared.sum()) * size
        own = s.positions[first:] >= 0
        dense = int(own.sum())
        source = first + dense + np.flatnonzero(own[dense:])
        target = first + np.flatnonzero(~own[:dense])
        return self._compact(number, s, source, target)

    # ---- what there is

    def living(self, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Living tokens in table order: flat slots [n], true positions [n], alive [layers or 1, kv_heads or 1, n]."""
        s = self.sequences[number]
        slots = np.flatnonzero(s.positions >= 0)
        return self._flat(s, slots), s.positions[slots], s.alive[..., slots]

    def metrics(self, number: int | None = None, budget: int | None = None) -> dict[str, float]:
        """The counters by name, blocks freed and slots copied per pass (missing before the first); with a sequence and
        its budget in tokens also `budget_occupancy`, alive / budget."""
        c = self.counters
        c.blocks_free = len(self.free_list)
        c.blocks_held = len(self.references) - c.blocks_free
        c.tokens_alive = sum(int((s.positions >= 0).sum()) for s in self.sequences.values())
        found: dict[str, float] = asdict(c)
        found["freed_per_pass"] = c.blocks_freed / c.passes if c.passes else np.nan
        found["copies_per_pass"] = c.slot_copies / c.passes if c.passes else np.nan
        if number is not None and budget is not None:
            found["budget_occupancy"] = int((self.sequences[number].positions >= 0).sum()) / budget
        return found

    # ---- inside

    def _add(self, s: Sequence) -> int:
        self._next += 1
        self.sequences[self._next] = s
        return self._next

    def _take(self, blocks: int) -> np.ndarray:
        taken = np.array([self.free_list.pop() for _ in range(blocks)], np.int64)
        self.references[taken] = 1
        return taken

    def _release(self, blocks: np.ndarray) -> int:
        """Give up one reference each; blocks that nobody holds are free again. Returns how many."""
        self.references[blocks] -= 1
        gone = blocks[self.references[blocks] == 0].tolist()
        self.free_list.extend(gone[::-1])
        return len(gone)

    def _flat(self, s: Sequence, slots: np.ndarray) -> np.ndarray:
        return s.blocks[slots // self.block_size] * self.block_size + slots % self.block_size

    def _drop(self, number: int) -> int:
        """Give up the blocks of a sequence whose every slot is dead."""
        s, size = self.sequences[number], self.block_size
        living = (s.positions >= 0).reshape(-1, size).any(1)
        kept = _blocks_of(s, np.flatnonzero(living), size)
        tail = len(kept.positions) if not living[-1:].any() else s.tail - int((~living).sum()) * size
        self.sequences[number] = replace(kept, tail=tail)
        freed = self._release(s.blocks[~living])
        self.counters.blocks_freed += freed
        return freed

    def _compact(self, number: int, s: Sequence, source: np.ndarray, target: np.ndarray) -> tuple[int, Copies]:
        moved = source != target
        source, target = source[moved], target[moved]
        positions, alive = s.positions.copy(), s.alive.copy()
        positions[source], alive[..., source] = -1, False
        positions[target], alive[..., target] = s.positions[source], s.alive[..., source]
        self.sequences[number] = replace(s, positions=positions, alive=alive)
        freed, kept = self._drop(number), self.sequences[number]
        last = np.flatnonzero(kept.positions >= 0)[-1:]
        self.sequences[number] = replace(kept, tail=int(last[0]) + 1 if len(last) else 0)
        self.counters.passes += 1
        self.counters.slot_copies += len(source)
        return freed, (self._flat(s, source), self._flat(s, target))


def _blocks_of(s: Sequence, order: np.ndarray, size: int) -> Sequence:
    """The sequence with these entries of its block table, in this order."""
    slots = (order[:, None] * size + np.arange(size)).ravel()
    return replace(s, blocks=s.blocks[order], positions=s.positions[slots], alive=s.alive[..., slots])


class PagedCache(Cache):
    """Keys and values, per layer `[blocks, block_size, kv_heads, dim]`, beside their ledger.

    One sequence passes through the model at a time (`forward`). Unwritten slots are zero and never gathered.
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
        layers, kv_heads = text.num_hidden_layers, text.num_key_value_heads
        dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        super().__init__(layers=[DynamicLayer() for _ in range(layers)])
        self.ledger = Ledger(blocks, block_size)
        shape = (blocks, block_size, kv_heads, dim)
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        self._written = self._read = torch.empty(0, dtype=torch.long)

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

    def fork(self, number: int, share: int | None = None) -> int:
        """`Ledger.fork`, carried out: the new sequence's number."""
        child, copies = self.ledger.fork(number, share)
        self.copy(copies)
        return child

    def repack(self, number: int) -> int:
        """`Ledger.repack`, carried out: blocks freed."""
        freed, copies = self.ledger.repack(number)
        self.copy(copies)
        return freed

    def fill(self, number: int, vacate: str = "tail") -> int:
        """`Ledger.fill`, carried out: blocks freed."""
        freed, copies = self.ledger.fill(number, vacate)
        self.copy(copies)
        return freed

    def begin(self, number: int, tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """Make room for `tokens` of a sequence: positions [n] and alive [.., .., n] of all that is attended to."""
        slots, copies = self.ledger.append(number, tokens)
        self.copy(copies)
        flat, positions, alive = self.ledger.living(number)
        device = self.keys[0].device
        self._written, self._read = torch.from_numpy(slots).to(device), torch.from_numpy(flat).to(device)
        return positions, alive

    def update(
        self, key_states: KeyValue, value_states: KeyValue, layer_idx: int, *args, **kwargs
    ) -> tuple[KeyValue, KeyValue]:
        """Store the new tokens `[1, kv_heads, new, dim]`; return the living `[1, kv_heads, n, dim]`, in table order."""
        for stored, new in ((self.keys[layer_idx], key_states), (self.values[layer_idx], value_states)):
            stored.view(-1, *stored.shape[2:])[self._written] = new[0].transpose(0, 1)
        k, v = (x[layer_idx].flatten(0, 1)[self._read].transpose(0, 1)[None] for x in (self.keys, self.values))
        return k, v


class Signals:
    """Attention that each true position received, per layer and KV head (mean over its query heads).

    `cumulative` float32 [layers, kv_heads, width] sums over all queries so far (the running sum of H2O); `recent`
    [window, layers, kv_heads, width] holds the last `window` queries, that of position p in row p % window.
    """

    def __init__(self, layers: int, kv_heads: int, width: int, window: int = 32):
        self.cumulative = torch.zeros(layers, kv_heads, width)
        self.recent = torch.zeros(window, layers, kv_heads, width)

    def copy(self) -> "Signals":
        """The same, for a sequence that goes on by itself."""
        other = Signals(1, 1, 1)
        other.cumulative, other.recent = self.cumulative.clone(), self.recent.clone()
        return other

    def observe(self, layer: int, p: Tensor, queries: np.ndarray, keys: np.ndarray) -> None:
        """Add probabilities p [kv_heads, queries, keys] of these true positions."""
        at = torch.from_numpy(keys)
        self.cumulative[layer].index_add_(1, at, p.sum(1).float().cpu())
        window = len(self.recent)
        for row, query in list(enumerate(queries))[-window:]:
            here = self.recent[query % window, layer]
            here.zero_()
            here[:, at] = p[:, row].float().cpu()


class PagedAttention:
    """Attention over gathered slots, masked by true positions and by who is alive, in blocks of queries."""

    def __init__(
        self, positions: np.ndarray, alive: np.ndarray, new: int, signals: Signals | None = None, block: int = 256
    ):
        newest = np.sort(positions)[len(positions) - new :]
        self.positions, self.alive, self.queries = positions, torch.from_numpy(alive), newest
        self.signals, self.block = signals, block

    def attend(
        self, layer: int, query: Query, key: KeyValue, value: KeyValue, scaling: float, sliding: int | None = None
    ) -> Tensor:
        (_, heads, n, dim), kv_heads = query.shape, key.shape[1]
        q, k, v = query[0].view(kv_heads, heads // kv_heads, n, dim), key[0][:, None], value[0][:, None]
        alive = self.alive[layer % len(self.alive)].to(q.device)  # [kv_heads or 1, tokens]
        positions = torch.from_numpy(self.positions).to(q.device)
        out = torch.empty_like(q)
        for a in range(0, n, self.block):
            rows = self.queries[a : a + self.block]
            at = torch.from_numpy(rows).to(q.device)[:, None]
            seen = positions <= at  # [queries, tokens]
            if sliding is not None:
                seen &= positions > at - sliding
            scores = torch.matmul(q[:, :, a : a + self.block], k.transpose(2, 3)) * scaling
            scores = scores.masked_fill(~(seen & alive[:, None])[:, None], -torch.inf)
            p = torch.softmax(scores, -1, dtype=torch.float32)
            out[:, :, a : a + self.block] = torch.matmul(p.to(v.dtype), v)
            if self.signals is not None:
                self.signals.observe(layer, p.mean(1), rows, self.positions)
        return out.permute(2, 0, 1, 3).reshape(1, n, heads, dim)


@torch.inference_mode()
def forward(
    model: PreTrainedModel,
    cache: PagedCache,
    number: int,
    ids: list[int],
    signals: Signals | None = None,
    shift: int = 0,
) -> Tensor:
    """Run the next tokens of a sequence through the model, in `installed(model)`: logits of the last, [vocabulary].

    `shift` is added to the true positions that the model is told: 0, except to show what a wrong position map does.
    """
    positions, alive = cache.begin(number, len(ids))
    attention = PagedAttention(positions, alive, len(ids), signals)
    device = cache.keys[0].device
    return model(
        input_ids=torch.tensor([ids], device=device),
        position_ids=torch.from_numpy(attention.queries).to(device)[None] + shift,
        past_key_values=cache,
        use_cache=True,
        kvrepro=attention,
    ).logits[0, -1]


def generate(
    model: PreTrainedModel,
    cache: PagedCache,
    number: int,
    ids: list[int],
    max_new_tokens: int,
    stop_ids: Collection[int] = (),
) -> list[int]:
    """Greedy tokens after `ids`, from what the cache holds."""
    tokens: list[int] = []
    with installed(model):
        while len(tokens) < max_new_tokens and not (tokens and tokens[-1] in stop_ids):
            tokens.append(int(forward(model, cache, number, tokens[-1:] or ids).argmax()))
    return tokens
