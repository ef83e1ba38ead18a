"""Ragged storage: checks of its tensors, the result of decoding, the reference (formula: `ragged_decode.py`)."""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from kvrepro_kernels.launch import check_pair

EMITS = ("mean", "max")


@dataclass(frozen=True)
class Decoded:
    """output [batch, heads, 1, dim] in the query's dtype; lse, float32 [batch, heads]; attention: for each name in
    `emit` that of the flat tokens, float32 [total], and of the tail's, float32 [batch, kv_heads, tail]."""

    output: Tensor
    lse: Tensor
    attention: dict[str, tuple[Tensor, Tensor]]


def ragged_decode_reference(
    query: Tensor, keys: Tensor, values: Tensor, offsets: Tensor, tail_keys: Tensor, tail_values: Tensor, tail: int,
    scale: float, emit: tuple[str, ...] = (),
) -> Decoded:  # fmt: skip
    """The reference, one segment after another, in the inputs' dtype (upcast them first)."""
    batch, kv_heads = tail_keys.shape[:2]
    q = query.view(batch * kv_heads, -1, query.shape[-1])
    output, lse = torch.zeros_like(q), q.new_full(q.shape[:2], -torch.inf)
    attention = {name: (q.new_zeros(len(keys)), q.new_zeros(batch, kv_heads, tail)) for name in emit}
    for s, (a, b) in enumerate(pairwise(offsets.tolist())):
        k = torch.cat([keys[a:b], tail_keys.flatten(0, 1)[s, :tail]])
        v = torch.cat([values[a:b], tail_values.flatten(0, 1)[s, :tail]])
        if len(k):
            logits = scale * q[s] @ k.T
            p = logits.softmax(-1)
            output[s], lse[s] = p @ v, logits.logsumexp(-1)
            for name, (flat, dense) in attention.items():
                seen = p.mean(0) if name == "mean" else p.amax(0)
                flat[a:b], dense[divmod(s, kv_heads)] = seen[: b - a], seen[b - a :]
    return Decoded(output.view_as(query), lse.view(batch, -1), attention)


def check_ragged(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    offsets: Tensor,
    tail_keys: Tensor,
    tail_values: Tensor,
    tail: int,
    emit: tuple[str, ...],
) -> None:
    """Raises ValueError for tensors that do not fit each other and for unknown names."""
    batch, heads, _, dim = query.shape
    kv_heads, room = tail_keys.shape[1:3]
    segments = batch * kv_heads
    check_pair(keys, values, f"[total, {dim}]", keys.shape == (len(keys), dim))
    if tail_keys.shape != (batch, kv_heads, room, dim) or tail_values.shape != tail_keys.shape or heads % kv_heads:
        given = f"{tuple(tail_keys.shape)} and {tuple(tail_values.shape)}"
        raise ValueError(f"tail keys and values {given} do not fit query {tuple(query.shape)}")
    if not 0 <= tail <= room:
        raise ValueError(f"tail {tail} does not lie in 0 to {room}, the tail's room")
    if offsets.shape != (segments + 1,) or offsets.dtype != torch.int64:
        raise ValueError(f"offsets must be int64 ({segments + 1},), not {offsets.dtype} {tuple(offsets.shape)}")
    if any(x.dtype != query.dtype for x in (keys, tail_keys, tail_values)):
        raise ValueError(f"query {query.dtype}, keys {keys.dtype} and tail {tail_keys.dtype} must have one dtype")
    if not all(x.is_contiguous() for x in (keys, values, offsets, tail_keys, tail_values)):
        raise ValueError("keys, values, offsets and tail must be contiguous")
    if unknown := set(emit) - set(EMITS):
        raise ValueError(f"emit {sorted(unknown)} is not among {', '.join(EMITS)}")
