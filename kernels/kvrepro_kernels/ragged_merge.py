"""Second kernel of ragged decode (formula: `ragged_decode.py`): merges the pieces and, if wanted, emits attention."""

import triton
import triton.language as tl

from kvrepro_kernels.ragged_attend import segment_of


@triton.jit
def _merge(
    part_outputs, part_lse, outputs, lse, offsets, segment, row, tail, share,
    GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """One query head: the pieces of its segment become its output and log-sum-exp."""
    dim = tl.arange(0, BLOCK_D)  # [D]
    low = tl.load(offsets + segment) + segment * tail
    high = tl.load(offsets + segment + 1) + (segment + 1) * tail
    filled = high > low  # a segment may be empty
    begin = (low // share).to(tl.int32)
    end = tl.where(filled, ((high + share - 1) // share).to(tl.int32), begin)  # programs begin to end - 1 left a piece
    top = -float("inf")
    mass = 0.0
    out = tl.zeros((BLOCK_D,), tl.float32)
    for at in tl.range(begin, end, BLOCK_P):
        p = at + tl.arange(0, BLOCK_P)  # [P]
        part = (p + segment).to(tl.int64) * GROUP + row
        log_sum = tl.load(part_lse + part, mask=p < end, other=float("-inf"))  # [P]
        read = (p < end)[:, None] & (dim[None, :] < DIM)
        piece = tl.load(part_outputs + part[:, None] * DIM + dim[None, :], mask=read, other=0.0)  # [P, D]
        higher = tl.maximum(top, tl.max(log_sum, 0))
        weight = tl.exp2(log_sum - higher)
        shrink = tl.exp2(top - higher)
        mass = mass * shrink + tl.sum(weight, 0)
        out = out * shrink + tl.sum(piece * weight[:, None], 0)
        top = higher
    at = (segment * GROUP + row).to(tl.int64)
    out = tl.where(filled, out / mass, 0.0)
    tl.store(outputs + at * DIM + dim, out.to(outputs.dtype.element_ty), mask=dim < DIM)
    tl.store(lse + at, tl.where(filled, (top + tl.log2(mass)) * 0.6931471805599453, float("-inf")))


@triton.jit
def _emit(
    logits, part_lse, offsets, flat_mean, tail_mean, flat_max, tail_max, block, segments, room, tail, share,
    GROUP: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_P: tl.constexpr,
    MEAN: tl.constexpr, MAX: tl.constexpr,
):  # fmt: skip
    """One block of the list of all tokens: logits become probabilities, reduced over the group."""
    row = tl.arange(0, BLOCK_R)  # [R]
    at = block.to(tl.int64) * BLOCK_T
    place = at + tl.arange(0, BLOCK_T)  # [T]
    end = tl.minimum(at + BLOCK_T, tl.load(offsets + segments) + segments * tail)
    read = (place < end)[:, None] & (row[None, :] < GROUP)
    tile = tl.load(logits + place[:, None] * GROUP + row[None, :], mask=read, other=float("-inf"))  # [T, R]
    while at < end:
        segment, begin, low, length = segment_of(at, offsets, segments, tail, BLOCK_S)
        stop = begin + length + tail
        top = tl.full((BLOCK_R,), float("-inf"), tl.float32)
        mass = tl.zeros((BLOCK_R,), tl.float32)
        last = ((stop + share - 1) // share).to(tl.int32)
        for first in tl.range((begin // share).to(tl.int32), last, BLOCK_P):
            p = first + tl.arange(0, BLOCK_P)  # [P]
            part = (p + segment).to(tl.int64)[:, None] * GROUP + row[None, :]
            log_sum = tl.load(part_lse + part, mask=(p < last)[:, None] & (row[None, :] < GROUP), other=float("-inf"))
            higher = tl.where(row < GROUP, tl.maximum(top, tl.max(log_sum, 0)), 0.0)
            mass = mass * tl.exp2(top - higher) + tl.sum(tl.exp2(log_sum - higher[None, :]), 0)
            top = higher
        p = tl.exp2(tile - tl.where(row < GROUP, top + tl.log2(mass), 0.0)[None, :])  # [T, R]
        in_segment = (place >= at) & (place < stop)
        flat = in_segment & (place < begin + length)
        dense = in_segment & (place >= begin + length)
        to_flat = low + place - begin
        to_tail = segment * room + place - begin - length
        if MEAN:
            mean = tl.sum(p, 1) / GROUP
            tl.store(flat_mean + to_flat, mean, mask=flat)
            tl.store(tail_mean + to_tail, mean, mask=dense)
        if MAX:
            most = tl.max(p, 1)
            tl.store(flat_max + to_flat, most, mask=flat)
            tl.store(tail_max + to_tail, most, mask=dense)
        at = stop


@triton.jit(do_not_specialize=["segments", "room", "tail"])
def finish(
    part_outputs, part_lse, logits, offsets, used, outputs, lse, flat_mean, tail_mean, flat_max, tail_max,
    segments, room, tail, share,
    GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_S: tl.constexpr, COUNTED: tl.constexpr, MEAN: tl.constexpr, MAX: tl.constexpr,
):  # fmt: skip
    """The first segments * GROUP programs merge; the others, if there are any, emit the attention of a block each.
    room: places of a segment in the tail's attention."""
    if COUNTED:
        tail = tl.load(used).to(tl.int32)
    program = tl.program_id(0)
    if program < segments * GROUP:
        _merge(
            part_outputs, part_lse, outputs, lse, offsets, program // GROUP, program % GROUP, tail, share,
            GROUP, DIM, BLOCK_D, BLOCK_P,
        )  # fmt: skip
    elif MEAN or MAX:
        _emit(
            logits, part_lse, offsets, flat_mean, tail_mean, flat_max, tail_max, program - segments * GROUP,
            segments, room, tail, share, GROUP, BLOCK_T, BLOCK_R, BLOCK_S, BLOCK_P, MEAN, MAX,
        )  # fmt: skip
