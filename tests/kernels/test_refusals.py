"""What a kernel cannot take is refused in one line, before anything is launched."""

import pytest
import torch
from kernels_run import DEVICE
from kvrepro_kernels import (
    column_mass,
    compact,
    fill_holes,
    largest,
    prefill_attention,
    projected_norm,
    ragged_decode,
    repack,
    rms_norm,
    rotary,
    window_scores,
)


def zeros(*shape):
    return torch.zeros(shape, device=DEVICE)


def turned(*shape):
    """Its innermost dimension is not contiguous."""
    return zeros(*shape[:-2], shape[-1], shape[-2]).mT


KEYS, QUERY, LSE, ROWS = zeros(1, 2, 9, 64), zeros(1, 4, 3, 64), zeros(1, 4, 3), zeros(1, 2, 3).long()
TABLE, KEPT, ANGLES = torch.arange(8, device=DEVICE).int()[None], torch.arange(5, device=DEVICE)[None], zeros(2, 4, 24)
PAGES, TAIL, OFFSETS = zeros(9, 4, 2, 8), zeros(1, 2, 5, 64), torch.tensor([0, 7, 16], device=DEVICE)
MASS = column_mass, {"query": QUERY, "keys": KEYS, "lse": LSE}
COMPACT = compact, {"keys": KEYS, "values": KEYS, "rows": ROWS}
LARGEST = largest, {"scores": zeros(2, 3), "counts": zeros(2).long()}
PAGED = {"keys": PAGES, "values": PAGES, "table": TABLE, "kept": KEPT}
PREFILL = prefill_attention, {"query": zeros(1, 4, 9, 64), "keys": KEYS, "values": KEYS}
NORM = projected_norm, {"values": zeros(1, 2, 9, 16), "output": zeros(2, 16, 24)}
RMS = rms_norm, {"x": zeros(2, 8), "weight": zeros(8), "eps": 1e-6}
TURN = rotary, {"query": zeros(2, 5, 4, 24), "key": zeros(2, 3, 4, 24), "cos": ANGLES, "sin": ANGLES}
STORED = {"keys": zeros(16, 64), "values": zeros(16, 64), "offsets": OFFSETS, "tail_keys": TAIL, "tail_values": TAIL}
DECODE = ragged_decode, {"query": zeros(1, 4, 1, 64), "tail": 3, **STORED}
SCORES = window_scores, {"query": QUERY, "keys": KEYS, "values": KEYS, "lse": LSE, "outputs": QUERY}

REFUSED = [  # a kernel and what it takes; what is given instead; what is said
    (MASS, {"query": zeros(1, 3, 3, 64)}, "does not fit"),
    (MASS, {"query": QUERY.half()}, "cast one"),
    (MASS, {"spans": zeros(1, 8)}, "spans must be"),
    (COMPACT, {"values": KEYS[:, :, 1:]}, "must both be"),
    (COMPACT, {"rows": ROWS[:, :1]}, "rows must be"),
    (COMPACT, {"rows": ROWS + 9}, "do not lie in -1 to 8"),
    (COMPACT, {"keys": turned(1, 2, 9, 64)}, "innermost"),
    (LARGEST, {"scores": zeros(2, 3).double()}, "give float32"),
    (LARGEST, {"scores": turned(2, 3)}, "give float32"),
    (LARGEST, {"firm": zeros(2, 3)}, r"give bool \(2, 3\), contiguous"),
    ((repack, PAGED), {"keys": turned(9, 4, 2, 8)}, "contiguous"),
    ((repack, PAGED), {"kept": KEPT + 28}, "do not lie in -1 to 31"),
    ((repack, PAGED), {"kept": KEPT.flip(1)}, "must ascend"),
    ((fill_holes, PAGED), {"table": TABLE + 9}, "table's blocks"),
    (PREFILL, {"query": QUERY}, "as many queries as keys"),
    (PREFILL, {"backend": "fast"}, "'fast' is not one of cudnn"),
    (NORM, {"output": zeros(2, 8, 24)}, "does not fit"),
    (NORM, {"output": zeros(2, 16, 24).half()}, "cast one"),
    (NORM, {"values": turned(1, 2, 9, 16)}, "dim must be innermost"),
    (RMS, {"weight": zeros(4)}, "must be contiguous"),
    (RMS, {"weight": zeros(8).half()}, "must be contiguous"),
    (RMS, {"x": turned(2, 8)}, "must be contiguous"),
    (TURN, {"key": zeros(1, 3, 4, 24)}, "do not fit"),
    (TURN, {"cos": zeros(2, 2, 24)}, "do not fit"),
    (TURN, {"cos": zeros(2, 4, 8), "sin": zeros(2, 4, 8)}, "do not fit"),
    (TURN, {"cos": ANGLES.double()}, "one dtype"),
    (TURN, {"query": turned(2, 5, 4, 24)}, "innermost"),
    (DECODE, {"tail": 6}, "tail 6 does not lie in 0 to 5"),
    (DECODE, {"query": zeros(1, 4, 2, 64)}, "1, dim"),
    (DECODE, {"offsets": zeros(2).long()}, "offsets must be int64"),
    (DECODE, {"emit": ("min",)}, "not among mean, max"),
    (SCORES, {"indicator": "atention"}, "'atention' is not one of attention"),
    (SCORES, {"values": zeros(1, 2, 8, 64)}, "must both be"),
    (SCORES, {"query": zeros(1, 5, 3, 64)}, "does not fit"),
    (SCORES, {"lse": None}, "give both"),
    (SCORES, {"pool": 4}, "pool is 4"),
    (SCORES, {"query": QUERY[:, :, :1], "aggregate": "variance"}, "at least 2"),
]


@pytest.mark.parametrize(("kernel", "given", "words"), REFUSED, ids=[f"{k.__name__}: {w}" for (k, _), _, w in REFUSED])
def test_bad_input_is_one_line(kernel, given, words):
    launch, fine = kernel
    with pytest.raises(ValueError, match=words) as error:
        launch(**fine | given)
    assert "\n" not in str(error.value)
