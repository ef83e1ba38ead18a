"""First kernel of ragged decode (formula: `ragged_decode.py`): a program streams a share of the list of all tokens."""

import triton
import triton.language as tl


@triton.jit
def segment_of(place, offsets, segments, tail, BLOCK_S: tl.constexpr):
    """The segment of a place in the list of all tokens, every segment's tail behind its flat part.

    Returns segment, its first place, its first flat row, and its number of flat rows.
    """
    s = tl.arange(0, BLOCK_S)  # [S]
    low = tl.load(offsets + s, mask=s < segments, other=0)  # [S]
    high = tl.load(offsets + s + 1, mask=s < segments, other=0)  # [S]
    segment = tl.sum(((s < segments) & (high + (s + 1) * tail <= place)).to(tl.int32), 0)
    row = tl.sum(tl.where(s == segment, low, 0), 0)
    return segment, row + segment * tail, row, tl.sum(tl.where(s == segment, high - low, 0), 0)


@triton.jit
def _stream(
    q, keys, values, logits_out, count, top, mass, out, row, step, dim, scale,
    GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_T: tl.constexpr, EMIT: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Online softmax over `count` consecutive rows: running maximum top [R] in base 2, mass [R], out [R, D]."""
    for at in tl.range(0, count, BLOCK_T, num_stages=STAGES):
        valid = at + step < count
        read = valid[:, None] & (dim[None, :] < DIM)
        place = (at + step)[:, None] * DIM + dim[None, :]  # a share is far below 2**31 elements
        key = tl.load(keys + place, mask=read, other=0.0)  # [T, D]
        value = tl.load(values + place, mask=read, other=0.0)  # [T, D]
        logits = tl.dot(q, tl.trans(key), input_precision=PRECISION) * scale  # [R, T]
        if EMIT:
            where = (at + step)[None, :] * GROUP + row[:, None]
            mask = valid[None, :] & (row[:, None] < GROUP)
            tl.store(logits_out + where, logits, mask=mask, eviction_policy="evict_last")  # read again soon
        logits = tl.where(valid[None, :], logits, float("-inf"))
        higher = tl.maximum(top, tl.max(logits, 1))
        p = tl.exp2(logits - higher[:, None])
        shrink = tl.exp2(top - higher)
        mass = mass * shrink + tl.sum(p, 1)
        out = tl.dot(p.to(value.dtype), value, out * shrink[:, None], input_precision=PRECISION)
        top = higher
    return top, mass, out


@triton.jit(do_not_specialize=["segments", "room", "tail"])  # neither rows nor lengths compile it anew
def attend_share(
    query, keys, values, offsets, tail_keys, tail_values, used, part_outputs, part_lse, logits,
    segments, room, tail, share, scale,
    GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_S: tl.constexpr, COUNTED: tl.constexpr, EMIT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    if COUNTED:
        tail = tl.load(used).to(tl.int32)
    row = tl.arange(0, BLOCK_R)  # [R], query head in the group
    dim = tl.arange(0, BLOCK_D)  # [D]
    step = tl.arange(0, BLOCK_T)  # [T]
    mask = (row[:, None] < GROUP) & (dim[None, :] < DIM)
    place = tl.program_id(0).to(tl.int64) * share
    end = tl.minimum(place + share, tl.load(offsets + segments) + segments * tail)
    while place < end:
        segment, begin, low, length = segment_of(place, offsets, segments, tail, BLOCK_S)
        q = tl.load(query + (segment * GROUP + row)[:, None] * DIM + dim[None, :], mask=mask, other=0.0)  # [R, D]
        top = tl.full((BLOCK_R,), float("-inf"), tl.float32)
        mass = tl.zeros((BLOCK_R,), tl.float32)
        out = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
        stop = tl.minimum(end, begin + length + tail)
        at = low + place - begin
        top, mass, out = _stream(
            q, keys + at * DIM, values + at * DIM, logits + place * GROUP,
            (tl.minimum(stop, begin + length) - place).to(tl.int32), top, mass, out, row, step, dim, scale,
            GROUP, DIM, BLOCK_T, EMIT, PRECISION, STAGES,
        )  # fmt: skip
        place = tl.maximum(place, begin + length)
        at = segment.to(tl.int64) * room + place - begin - length
        top, mass, out = _stream(
            q, tail_keys + at * DIM, tail_values + at * DIM, logits + place * GROUP,
            (stop - place).to(tl.int32), top, mass, out, row, step, dim, scale,
            GROUP, DIM, BLOCK_T, EMIT, PRECISION, STAGES,
        )  # fmt: skip
        part = (tl.program_id(0) + segment).to(tl.int64) * GROUP + row  # no two pieces have the same sum
        tl.store(part_lse + part, top + tl.log2(mass), mask=row < GROUP)
        tl.store(part_outputs + part[:, None] * DIM + dim[None, :], out / mass[:, None], mask=mask)
        place = stop
