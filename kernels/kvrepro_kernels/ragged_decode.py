"""Ragged decode: one query per head attends to kept lists of unequal length, optionally returning its attention.

Segment s = batch row * kv_heads + KV head holds the flat rows offsets[s] to offsets[s + 1] - 1, then `tail` rows of a
dense tail, where decoding appends. For the query heads h of that KV head, over both parts together,

    p[h,j] = softmax_j(scale <q[h], k[j]>)     out[h] = sum_j p[h,j] v[j]     attention[s,j] = mean or max over h of p

Split-K over shares: the list of all tokens is cut into equal shares, regardless of segments, so that no program waits
for a long head. A program streams its share segment by segment and writes a piece for each; a second kernel merges a
segment's pieces. If attention is to be returned, the first kernel also writes its logits, and further programs of the
second turn them into probabilities. Every kept token is visible, and the order inside a segment does not matter.
"""

import math

import torch
from torch import Tensor

from kvrepro_kernels.launch import base_2, cdiv, check_device, constants, even_share, next_power_of_2
from kvrepro_kernels.ragged_attend import attend_share
from kvrepro_kernels.ragged_merge import finish
from kvrepro_kernels.ragged_storage import Decoded, check_ragged, ragged_decode_reference

__all__ = ["Decoded", "ragged_decode", "ragged_decode_reference", "ragged_decode_tuning"]


def ragged_decode(
    query: Tensor, keys: Tensor, values: Tensor, offsets: Tensor,
    tail_keys: Tensor | None = None, tail_values: Tensor | None = None, tail: int = 0, *,
    used: Tensor | None = None, kv_heads: int | None = None, scale: float | None = None, emit: tuple[str, ...] = (),
    out: Decoded | None = None, tuning: dict[str, int] | None = None,
) -> Decoded:  # fmt: skip
    """Decode attention over ragged storage; `Decoded` describes the result.

    query: [batch, heads, 1, dim]. keys, values: contiguous [total, dim], segment after segment. offsets: int64 [batch *
    kv_heads + 1], ascending from 0 to total; not checked, since that would wait for the GPU. tail_keys, tail_values:
    contiguous [batch, kv_heads, room, dim], of which the first `tail` rows count, in every segment. used: int64 [1],
    how many of the `tail` rows count; the kernel reads it on the device, so that a captured launch serves every step.
    Then keys and values may have room behind offsets[-1]. kv_heads: needed without a tail. scale: of the logits, by
    default dim**-0.5. emit: any of "mean" and "max" over the group. out: tensors to write into. tuning: overrides of
    `ragged_decode_tuning`. Raises ValueError for tensors that do not fit each other, unknown names and CPU tensors
    uninterpreted. The function is long because two launches list all arguments of their kernels.
    """
    if query.dim() != 4 or query.shape[2] != 1:
        raise ValueError(f"query must be [batch, heads, 1, dim], not {tuple(query.shape)}")
    batch, heads, _, dim = query.shape
    if tail_keys is None or tail_values is None:
        if kv_heads is None:
            raise ValueError("give a tail or kv_heads: without both, the number of KV heads is unknown")
        tail_keys = tail_values = keys.new_empty(batch, kv_heads, 0, dim)
    check_ragged(query, keys, values, offsets, tail_keys, tail_values, tail, emit)
    kv_heads, room = tail_keys.shape[1:3]
    segments, group = batch * kv_heads, heads // kv_heads
    query = query.contiguous()
    empty = torch.empty(0, dtype=torch.float32, device=keys.device)
    if out is None:
        attention = {name: (empty.new_empty(len(keys)), empty.new_zeros(batch, kv_heads, tail)) for name in emit}
        out = Decoded(torch.empty_like(query), empty.new_empty(batch, heads), attention)
    check_device(
        attend_share, "ragged_decode", (query, keys, values, offsets, tail_keys, tail_values, out.output, out.lse)
    )
    if not segments:
        return out

    tuned = ragged_decode_tuning(dim, keys.dtype) | (tuning or {})
    tokens = len(keys) + segments * tail
    share = max(tuned["smallest_share"], even_share(tokens, 1, keys.device, tuned))
    programs = cdiv(tokens, share)
    counts = offsets if used is None else used  # a stand-in that is never read
    block_s = 4 ** max(2, math.ceil((segments - 1).bit_length() / 2))  # few values, so that kernels recompile rarely
    both = {"GROUP": group, "BLOCK_S": block_s, "COUNTED": used is not None}
    part_outputs = empty.new_empty(programs + segments, group, dim)
    part_lse = empty.new_empty(programs + segments, group)
    logits = empty.new_empty(tokens * group) if emit else empty
    parts = part_outputs, part_lse, logits
    if tokens:
        tensors = query, keys, values, offsets, tail_keys, tail_values, counts
        shares = segments, room, tail, share, base_2(scale, dim)
        blocks = {"BLOCK_T": tuned["block_t"], "BLOCK_R": max(16, next_power_of_2(group)), "EMIT": bool(emit)}
        attend_share[(programs,)](*tensors, *parts, *shares, **blocks, **both, **constants(dim, keys.dtype, tuned))
    pieces = programs // segments + 2  # of an average segment
    emitting = cdiv(tokens, tuned["emit_block"]) if emit else 0
    emitted = *out.attention.get("mean", (empty, empty)), *out.attention.get("max", (empty, empty))
    blocks = {"DIM": dim, "BLOCK_D": next_power_of_2(dim), "BLOCK_P": min(64, max(16, next_power_of_2(pieces)))}
    blocks |= {"BLOCK_T": tuned["emit_block"], "BLOCK_R": next_power_of_2(group), "num_warps": 4}
    asked = {"MEAN": "mean" in emit, "MAX": "max" in emit, **both}
    written = offsets, counts, out.output, out.lse, *emitted
    finish[(segments * group + emitting,)](*parts, *written, segments, tail, tail, share, **blocks, **asked)
    return out


def ragged_decode_tuning(dim: int, dtype: torch.dtype) -> dict[str, int]:
    """Block sizes by shape; measured on an H200 for bfloat16 and 128 dims."""
    wide = dim > 128 or dtype == torch.float32
    block_t = 32 if wide else 64
    blocks = {"block_t": block_t, "smallest_share": 2 * block_t, "emit_block": 1024}
    return blocks | {"warps": 4, "stages": 2 if wide else 3, "per_multiprocessor": 2}
