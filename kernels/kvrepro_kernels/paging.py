"""Paged compaction: survivors of a block table move to the front of their own blocks, in place.

Request r owns the blocks table[r, 0], table[r, 1], ...; its logical slot i lies in row i % block of block
table[r, i // block].
kept[r, :] names the slots that stay, ascending, -1 behind them; m of them. Afterwards slots 0 to m - 1 hold them:

    repack       slot i holds what slot kept[i] held: the order stays
    fill_holes   a kept slot below m stays where it is, the n-th hole below m takes the n-th kept slot from m on: fewest
                 bytes, and the order is lost

and blocks from ceil(m / block) on are free. Both are safe in place. Holes and movers are disjoint. In a repack every
source is at or behind its target, since kept[i] >= i: programs take chunks of survivors in ascending order, and each
writes only after the chunks whose survivors lie where it writes, none of them later ones, have been read.
"""

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from kvrepro_kernels.launch import check_device
from kvrepro_kernels.paging_kernel import fill, search, shift


def moved_reference(pool: Tensor, table: Tensor, source: Tensor) -> Tensor:
    """The truth for one pool [blocks, block, kv_heads, dim]: slot i of request r takes what slot source[r,i] held."""
    block, out = pool.shape[1], pool.clone()
    for r, slots in enumerate(source.tolist()):
        for i, j in enumerate(slots):
            if j >= 0:
                out[table[r, i // block], i % block] = pool[table[r, j // block], j % block]
    return out


def _check(name: str, keys: Tensor, values: Tensor, table: Tensor, kept: Tensor, check_slots: bool) -> None:
    """Raises ValueError for what does not fit, and with `check_slots` for slots out of range or out of order."""
    if keys.dim() != 4 or values.shape != keys.shape or values.dtype != keys.dtype:
        one, other = (f"{tuple(x.shape)} {x.dtype}" for x in (keys, values))
        raise ValueError(f"keys {one} and values {other} must both be [blocks, block, kv_heads, dim]")
    if not (keys.is_contiguous() and values.is_contiguous()):
        raise ValueError("keys and values are changed in place and must be contiguous")
    if table.dim() != 2 or kept.dim() != 2 or len(table) != len(kept) or table.dtype != torch.int32:
        found = f"{table.dtype} {tuple(table.shape)} and {tuple(kept.shape)}"
        raise ValueError(f"table must be int32 [requests, blocks] and kept [requests, n], not {found}")
    if kept.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"kept must be int32 or int64, not {kept.dtype}")
    check_device(shift, name, (table, kept, keys.view(torch.uint8), values.view(torch.uint8)))
    if not check_slots or not kept.numel():
        return
    slots = table.shape[1] * keys.shape[1]
    low, high = (int(x) for x in kept.aminmax())
    if low < -1 or high >= slots:
        raise ValueError(f"kept slots {low} to {high} do not lie in -1 to {slots - 1}")
    behind, before = kept[:, 1:], kept[:, :-1]
    if not bool(((behind > before) & (before >= 0) | (behind == -1)).all()):
        raise ValueError("kept slots must ascend in every row, with -1 behind them")
    low, high = (int(x) for x in table.aminmax())
    if low < 0 or high >= len(keys):
        raise ValueError(f"table's blocks {low} to {high} do not lie in 0 to {len(keys) - 1}")


def repack(
    keys: Tensor, values: Tensor, table: Tensor, kept: Tensor, *,
    check_slots: bool = True, tuning: dict[str, int] | None = None,
) -> Tensor:  # fmt: skip
    """Move survivors to the front, order preserved, in place; returns the source slots, which are `kept`.

    keys, values: contiguous [blocks, block, kv_heads, dim]. table: int32 [requests, max_blocks], no block in two rows.
    kept: int [requests, n], ascending, -1 behind. check_slots: check their range and order, which waits for the GPU.
    tuning: overrides of the block sizes. Raises ValueError for tensors that do not fit each other.
    """
    _check("repack", keys, values, table, kept, check_slots)
    requests, n = kept.shape
    width = keys.shape[2] * keys.shape[3]
    block_c = min(1024, triton.next_power_of_2(width))
    tuned = {"block_c": block_c, "block_i": 8192 // block_c, "warps": 4} | (tuning or {})
    chunks = triton.cdiv(n, tuned["block_i"])
    programs = requests * chunks * 2 * triton.cdiv(width, tuned["block_c"])
    if programs:
        read_yet = torch.zeros(1 + programs, dtype=torch.int32, device=keys.device)
        shift[(programs,)](
            keys, values, table.contiguous(), kept.contiguous(), read_yet, table.shape[1], n, keys.shape[1], width,
            chunks, BLOCK_I=tuned["block_i"], BLOCK_C=tuned["block_c"], ROUNDS=triton.cdiv(n.bit_length(), 5),
            num_warps=tuned["warps"],
        )  # fmt: skip
    return kept


def fill_holes(
    keys: Tensor, values: Tensor, table: Tensor, kept: Tensor, *,
    check_slots: bool = True, tuning: dict[str, int] | None = None,
) -> Tensor:  # fmt: skip
    """Move only the survivors behind the new end, into the holes before it, in place; arguments as in `repack`.

    Returns the source slots [requests, n], -1 behind: positions[source] are the positions that the slots now hold.
    """
    _check("fill_holes", keys, values, table, kept, check_slots)
    if not kept.numel():
        return kept
    source, *pairs = find_holes(kept, table.shape[1] * keys.shape[1])
    fill_pairs(keys, values, table, pairs, tuning)
    return source


def find_holes(kept: Tensor, slots: int) -> tuple[Tensor, Tensor, Tensor]:
    """source, hole and mover, each [requests, n] like kept, -1 behind the last: what `fill_holes` moves and returns."""
    requests, n = kept.shape
    kept = kept.contiguous()
    source, hole, mover = (torch.empty_like(kept) for _ in range(3))
    search[(triton.cdiv(n, 128), requests)](
        kept, source, hole, mover, slots, n, BLOCK_I=128, STEPS=n.bit_length(), num_warps=4
    )
    return source, hole, mover


def fill_pairs(
    keys: Tensor, values: Tensor, table: Tensor, pairs: Sequence[Tensor], tuning: dict[str, int] | None = None
) -> None:
    """Move each pair's row, unchecked: what `fill_holes` does once it knows the pairs."""
    requests, n = pairs[0].shape
    width = keys.shape[2] * keys.shape[3]
    tuned = {"block_i": 8, "block_c": 1024, "chunks": 2, "warps": 4} | (tuning or {})  # measured on an H200
    per_program = tuned["block_i"] * tuned["chunks"]
    fill[(triton.cdiv(width, tuned["block_c"]) * triton.cdiv(n, per_program), requests, 2)](
        keys, values, table.contiguous(), *(x.contiguous() for x in pairs), table.shape[1], n, keys.shape[1], width,
        per_program, BLOCK_I=tuned["block_i"], BLOCK_C=tuned["block_c"], num_warps=tuned["warps"],
    )  # fmt: skip
