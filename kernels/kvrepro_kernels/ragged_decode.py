"""Ragged decode: one query per head attends to kept lists of unequal length, and may say how much it looked at each.

Segment s = batch row * kv_heads + KV head holds the flat rows offsets[s] to offsets[s + 1] - 1, then `tail` rows of a
dense tail, where decoding appends. For the query heads h of that KV head, over both parts together,

    p[h,j] = softmax_j(scale <q[h], k[j]>)     out[h] = sum_j p[h,j] v[j]     attention[s,j] = mean or max over h of p

Split-K over shares: the list of all tokens is cut into equal shares, whatever the segments, so that no program waits
for a long head. A program streams its share segment by segment and leaves a piece for each; a second kernel merges a
segment's pieces. With attention asked for, the first kernel leaves its logits behind, and further programs of the
second turn them into probabilities. Every kept token is visible, and the order inside a segment does not matter.
"""

import math
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from kvrepro_kernels.launch import check_device, multiprocessors, precision
from kvrepro_kernels.ragged_attend import attend_share
from kvrepro_kernels.ragged_merge import finish

EMITS = ("mean", "max")


@dataclass(frozen=True)
class Decoded:
    """output [batch, heads, 1, dim] in the query's dtype; lse, float32 [batch, heads]; per name asked for in `emit`,
    the attention of the flat tokens, float32 [total], and of the tail's, float32 [batch, kv_heads, tail]."""

    output: Tensor
    lse: Tensor
    attention: dict[str, tuple[Tensor, Tensor]]


def ragged_decode_reference(
    query: Tensor, keys: Tensor, values: Tensor, offsets: Tensor, tail_keys: Tensor, tail_values: Tensor, tail: int,
    scale: float, emit: tuple[str, ...] = (),
) -> Decoded:  # fmt: skip
    """The truth, one segment after another, in the inputs' dtype (upcast first)."""
    batch, kv_heads = tail_keys.shape[:2]
    q = query.view(batch * kv_heads, -1, query.shape[-1])
    output, lse = torch.zeros_like(q), q.new_full(q.shape[:2], -torch.inf)
    flat = {name: q.new_zeros(len(keys)) for name in emit}
    dense = {name: q.new_zeros(batch * kv_heads, tail) for name in emit}
    bounds = offsets.tolist()
    for s, (a, b) in enumerate(zip(bounds, bounds[1:], strict=False)):
        k = torch.cat([keys[a:b], tail_keys.flatten(0, 1)[s, :tail]])
        v = torch.cat([values[a:b], tail_values.flatten(0, 1)[s, :tail]])
        if len(k):
            logits = scale * q[s] @ k.T
            p = logits.softmax(-1)
            output[s], lse[s] = p @ v, logits.logsumexp(-1)
            for name in emit:
                seen = p.mean(0) if name == "mean" else p.amax(0)
                flat[name][a:b], dense[name][s] = seen[: b - a], seen[b - a :]
    attention = {name: (flat[name], dense[name].view(batch, kv_heads, tail)) for name in emit}
    return Decoded(output.view_as(query), lse.view(batch, -1), attention)


def _check(
    query: Tensor, keys: Tensor, values: Tensor, offsets: Tensor, tail_keys: Tensor, tail_values: Tensor, tail: int,
    emit: tuple[str, ...],
) -> None:  # fmt: skip
    """Raises ValueError for tensors that do not fit each other and for unknown names."""
    batch, heads, _, dim = query.shape
    kv_heads, room = tail_keys.shape[1:3]
    segments, total = batch * kv_heads, keys.shape[0]
    if keys.shape != (total, dim) or values.shape != keys.shape or values.dtype != keys.dtype:
        one, other = (f"{tuple(x.shape)} {x.dtype}" for x in (keys, values))
        raise ValueError(f"keys {one} and values {other} must both be [total, {dim}]")
    if tail_keys.shape != (batch, kv_heads, room, dim) or tail_values.shape != tail_keys.shape or heads % kv_heads:
        found = f"{tuple(tail_keys.shape)} and {tuple(tail_values.shape)}"
        raise ValueError(f"tail keys and values {found} do not fit query {tuple(query.shape)}")
    if not 0 <= tail <= room:
        raise ValueError(f"tail {tail} does not lie in 0 to {room}, the tail's room")
    if offsets.shape != (segments + 1,) or offsets.dtype != torch.int64:
        raise ValueError(f"offsets must be int64 ({segments + 1},), not {offsets.dtype} {tuple(offsets.shape)}")
    if any(x.dtype != query.dtype for x in (keys, tail_keys, tail_values)):
        raise ValueError(f"query {query.dtype}, keys {keys.dtype} and tail {tail_keys.dtype} must have one dtype")
    if not all(x.is_contiguous() for x in (keys, values, offsets, tail_keys, tail_values)):
        raise ValueError("keys, values, offsets and tail must be contiguous")
    unknown = set(emit) - set(EMITS)
    if unknown:
        raise ValueError(f"emit {sorted(unknown)} is not among {', '.join(EMITS)}")


def ragged_decode(
    query: Tensor, keys: Tensor, values: Tensor, offsets: Tensor,
    tail_keys: Tensor | None = None, tail_values: Tensor | None = None, tail: int = 0, *,
    used: Tensor | None = None, kv_heads: int | None = None, scale: float | None = None, emit: tuple[str, ...] = (),
    out: Decoded | None = None, tuning: dict[str, int] | None = None,
) -> Decoded:  # fmt: skip
    """Decode attention over ragged storage; see `Decoded` for what it returns.

    query: [batch, heads, 1, dim]. keys, values: contiguous [total, dim], segment after segment. offsets: int64
    [batch * kv_heads + 1], ascending from 0 to total; not checked, since that would wait for the GPU.
    tail_keys, tail_values: contiguous [batch, kv_heads, room, dim], of which the first `tail` rows count, in every
    segment. used: int64 [1], how many of the `tail` rows count, known to the device alone, so that a captured launch
    serves every step; then keys and values may have room behind offsets[-1]. kv_heads: needed without a tail. scale: of
    the logits, by default dim**-0.5. emit: any of "mean" and "max" over the group. out: tensors to write into. tuning:
    overrides of `ragged_decode_tuning`.
    Raises ValueError for tensors that do not fit each other, unknown names and CPU tensors uninterpreted.
    Long, because two launches name everything that their kernels are given.
    """
    if tail_keys is None and kv_heads is None:
        raise ValueError("give a tail or kv_heads: without both, the number of KV heads is unknown")
    if query.dim() != 4 or query.shape[2] != 1:
        raise ValueError(f"query must be [batch, heads, 1, dim], not {tuple(query.shape)}")
    batch, heads, _, dim = query.shape
    if tail_keys is None or tail_values is None:
        tail_keys = tail_values = keys.new_empty(batch, kv_heads, 0, dim)
    kv_heads, room = tail_keys.shape[1:3]
    segments, total = batch * kv_heads, keys.shape[0]
    _check(query, keys, values, offsets, tail_keys, tail_values, tail, emit)
    group = heads // kv_heads
    query = query.contiguous()
    empty = torch.empty(0, dtype=torch.float32, device=keys.device)
    if out is None:
        attention = {name: (empty.new_empty(total), empty.new_zeros(batch, kv_heads, tail)) for name in emit}
        out = Decoded(torch.empty_like(query), empty.new_empty(batch, heads), attention)
    check_device(
        attend_share, "ragged_decode", (query, keys, values, offsets, tail_keys, tail_values, out.output, out.lse)
    )
    if not segments:
        return out

    tuned = ragged_decode_tuning(dim, keys.dtype) | (tuning or {})
    tokens = total + segments * tail
    share = triton.cdiv(tokens, multiprocessors(keys.device) * tuned["per_multiprocessor"])
    share = max(tuned["smallest_share"], triton.cdiv(share, tuned["block_t"]) * tuned["block_t"])
    programs = triton.cdiv(tokens, share)
    block_s = 4 ** max(2, math.ceil((segments - 1).bit_length() / 2))  # so few that batch sizes compile little anew
    block_d = triton.next_power_of_2(dim)
    part_outputs = empty.new_empty(programs + segments, group, dim)
    part_lse = empty.new_empty(programs + segments, group)
    logits = empty.new_empty(tokens * group) if emit else empty
    if tokens:
        attend_share[(programs,)](
            query, keys, values, offsets, tail_keys, tail_values, offsets if used is None else used,
            part_outputs, part_lse, logits, segments, room, tail, share,
            (dim**-0.5 if scale is None else scale) * math.log2(math.e),
            GROUP=group, DIM=dim, BLOCK_D=block_d, BLOCK_T=tuned["block_t"],
            BLOCK_R=max(16, triton.next_power_of_2(group)), BLOCK_S=block_s, COUNTED=used is not None, EMIT=bool(emit),
            PRECISION=precision(keys.dtype), STAGES=tuned["stages"], num_warps=tuned["warps"],
        )  # fmt: skip
    block_p = min(64, max(16, triton.next_power_of_2(programs // segments + 2)))  # pieces of an average segment
    flat_mean, tail_mean = out.attention.get("mean", (empty, empty))
    flat_max, tail_max = out.attention.get("max", (empty, empty))
    blocks = triton.cdiv(tokens, tuned["emit_block"]) if emit else 0
    finish[(segments * group + blocks,)](
        part_outputs, part_lse, logits, offsets, offsets if used is None else used,
        out.output, out.lse, flat_mean, tail_mean, flat_max, tail_max, segments, tail, tail, share,
        GROUP=group, DIM=dim, BLOCK_D=block_d, BLOCK_P=block_p, BLOCK_T=tuned["emit_block"],
        BLOCK_R=triton.next_power_of_2(group), BLOCK_S=block_s, COUNTED=used is not None, MEAN="mean" in emit,
        MAX="max" in emit, num_warps=4,
    )  # fmt: skip
    return out


def ragged_decode_tuning(dim: int, dtype: torch.dtype) -> dict[str, int]:
    """Block sizes by shape; measured on an H200 for bfloat16 and 128 dims."""
    wide = dim > 128 or dtype == torch.float32
    block_t = 32 if wide else 64
    return {
        "block_t": block_t,
        "warps": 4,
        "stages": 2 if wide else 3,
        "per_multiprocessor": 2,  # shares of one multiprocessor
        "smallest_share": 2 * block_t,
        "emit_block": 1024,
    }
