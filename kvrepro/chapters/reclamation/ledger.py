"""The ledger of a paged KV cache: which blocks a sequence holds, and what compaction gives back.

It holds indices only (block tables, reference counts, free list, the true position of every slot), in numpy, so that
patterns over many thousand tokens need no model. `kvrepro.chapters.reclamation.paged` holds the keys and values.

A block is `block_size` slots; a slot holds one token's keys and values of all layers and KV heads, so it is dead only
when every head of every layer has evicted it. After Kwon et al. 2023, section 4, and the guide on eviction and
compaction, "Architecture".
"""

from dataclasses import dataclass, replace

import numpy as np

from kvrepro.engine.condition import ensure
from kvrepro.errors import InputError

Copies = tuple[np.ndarray, np.ndarray]  # flat slots (block * block_size + offset): read all of the first, then write
LAYOUTS = ("none", "repack", "fill")
NONE: Copies = (np.empty(0, np.int64), np.empty(0, np.int64))


@dataclass(frozen=True)
class Entry:
    """One sequence. Its slots are numbered along its block table: slot s is at offset s % block_size of block
    `blocks[s // block_size]`."""

    blocks: np.ndarray  # int64 [blocks]
    positions: np.ndarray  # int64 [slots]: the position map. True position of the slot's token, -1 = dead or unwritten
    alive: np.ndarray  # bool [layers or 1, kv_heads or 1, slots]: the heads that still attend to it; 1 stands for all
    tail: int = 0  # the next slot to write
    seen: int = 0  # tokens so far, evicted ones included = the next token's true position


class Ledger:
    """The ledger of `blocks` blocks. Methods that move tokens return copies, which the caller must make at once."""

    def __init__(self, blocks: int, block_size: int = 16):
        self.block_size = block_size
        self.references = np.zeros(blocks, np.int64)
        self.free_list = list(range(blocks))[::-1]  # the lowest block goes first
        self.sequences: dict[int, Entry] = {}
        self.freed = 0  # blocks so far, by eviction or compaction, not by the end of a sequence
        self.copied = 0  # slots so far, by compaction
        self._next = 0

    # ---- sequences

    def new(self) -> int:
        """Number of a new, empty sequence."""
        empty = Entry(np.empty(0, np.int64), np.empty(0, np.int64), np.empty((1, 1, 0), bool))
        return self._add(empty)

    def fork(self, number: int, share: int | None = None) -> tuple[int, Copies]:
        """A new sequence with the same tokens, and the copies to make. It shares the first `share` blocks (None: all,
        and nothing is copied until one of the two writes) and has copies of the others."""
        parent = self.sequences[number]
        share = len(parent.blocks) if share is None else share
        child = replace(parent, blocks=np.append(parent.blocks[:share], self._take(len(parent.blocks[share:]))))
        self.references[parent.blocks[:share]] += 1
        slots = np.flatnonzero(parent.positions >= 0)
        slots = slots[slots >= share * self.block_size]
        return self._add(child), (self._flat(parent, slots), self._flat(child, slots))

    def free(self, number: int) -> None:
        """End a sequence; blocks that nobody else holds return to the pool."""
        self._release(self.sequences.pop(number).blocks)

    def append(self, number: int, tokens: int = 1) -> tuple[np.ndarray, Copies]:
        """Make room for the next `tokens`: their flat slots [tokens], and the copies to make before writing.

        A last block that is shared and not yet full is replaced by a copy.
        """
        s, size = self.sequences[number], self.block_size
        copy_last = s.tail < len(s.positions) and self.references[s.blocks[-1]] > 1
        fresh = max(0, -(-(s.tail + tokens - len(s.positions)) // size))
        taken, copies = self._take(fresh + copy_last), NONE
        if copy_last:
            inside = np.flatnonzero(s.positions[-size:] >= 0)
            copies = (s.blocks[-1] * size + inside, taken[0] * size + inside)
            self._release(s.blocks[-1:])
        s = replace(
            s,
            blocks=np.append(s.blocks[: len(s.blocks) - copy_last], taken),
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
        """Evict all tokens but those in `keep`. Returns the number of blocks freed: those in which all slots are dead.

        keep: bool `[..., seen]` over true positions, broadcast to [layers or 1, kv_heads or 1]; what was evicted before
        stays evicted. Raises InputError for another length.
        """
        s = self.sequences[number]
        keep = keep[(None,) * (3 - keep.ndim)]
        if keep.shape[-1] != s.seen:
            raise InputError(f"keep has {keep.shape[-1]} positions, the sequence has seen {s.seen}: give one each")
        alive = s.alive & keep[..., s.positions.clip(min=0)] & (s.positions >= 0)
        dead = (s.positions >= 0) & ~alive.any((0, 1))
        self.sequences[number] = replace(s, positions=np.where(dead, -1, s.positions), alive=alive)
        return self._drop(number)

    def compact(self, number: int, layout: str) -> tuple[int, Copies]:
        """Compaction: (blocks freed, copies). Blocks up to the last shared one stay; of the slots behind it, with n
        survivors, a "repack" moves all forward in order, and hole filling ("fill") only those that lie behind the first
        n slots, into holes among these: the position map remembers the order of the text. "none" does nothing."""
        ensure(LAYOUTS, layout=layout)
        if layout == "none":
            return 0, NONE
        s = self.sequences[number]
        start = self.block_size * int(1 + np.flatnonzero(self.references[s.blocks] > 1).max(initial=-1))
        living = start + np.flatnonzero(s.positions[start:] >= 0)
        dense = np.arange(start, start + len(living))
        if layout == "repack":
            source, target = living[living != dense], dense[living != dense]
        else:
            source, target = np.setdiff1d(living, dense), np.setdiff1d(dense, living)
        positions, alive = s.positions.copy(), s.alive.copy()
        positions[source], alive[..., source] = -1, False
        positions[target], alive[..., target] = s.positions[source], s.alive[..., source]
        self.sequences[number] = replace(s, positions=positions, alive=alive)
        freed, kept = self._drop(number), self.sequences[number]
        last = int(np.flatnonzero(kept.positions >= 0).max(initial=-1))
        self.sequences[number] = replace(kept, tail=last + 1)
        self.copied += len(source)
        return freed, (self._flat(s, source), self._flat(s, target))

    # ---- state

    def living(self, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Living tokens in table order: flat slots [n], true positions [n], alive [layers or 1, kv_heads or 1, n]."""
        s = self.sequences[number]
        slots = np.flatnonzero(s.positions >= 0)
        return self._flat(s, slots), s.positions[slots], s.alive[..., slots]

    # ---- inside

    def _add(self, s: Entry) -> int:
        self._next += 1
        self.sequences[self._next] = s
        return self._next

    def _take(self, blocks: int) -> np.ndarray:
        """Blocks off the free list. Raises InputError, and changes nothing, where too few are free."""
        if blocks > len(self.free_list):
            raise InputError(f"{blocks} blocks are needed, {len(self.free_list)} of {len(self.references)} are free")
        taken = np.array([self.free_list.pop() for _ in range(blocks)], np.int64)
        self.references[taken] = 1
        return taken

    def _release(self, blocks: np.ndarray) -> int:
        """Give up one reference each; blocks that no sequence holds are free again. Returns how many became free."""
        self.references[blocks] -= 1
        gone = blocks[self.references[blocks] == 0].tolist()
        self.free_list.extend(gone[::-1])
        return len(gone)

    def _flat(self, s: Entry, slots: np.ndarray) -> np.ndarray:
        return s.blocks[slots // self.block_size] * self.block_size + slots % self.block_size

    def _drop(self, number: int) -> int:
        """Give up a sequence's blocks in which all slots are dead. Returns how many became free."""
        s, size = self.sequences[number], self.block_size
        living = (s.positions >= 0).reshape(-1, size).any(1)
        slots = np.repeat(living, size)
        kept = replace(s, blocks=s.blocks[living], positions=s.positions[slots], alive=s.alive[..., slots])
        tail = len(kept.positions) if not living[-1:].any() else s.tail - int((~living).sum()) * size
        self.sequences[number] = replace(kept, tail=tail)
        freed = self._release(s.blocks[~living])
        self.freed += freed
        return freed


def evict_to(ledger: Ledger, number: int, budget: int, random: np.random.Generator) -> None:
    """Evict a sequence down to `budget` living tokens: random ones, but none of the newest eight."""
    s = ledger.sequences[number]
    living = np.sort(s.positions[s.positions >= 0])
    keep = np.ones(s.seen, bool)
    gone = max(0, len(living) - budget)  # a layer that slides forgets on its own
    keep[random.choice(living[:-8], gone, replace=False)] = False
    ledger.evict(number, keep)
