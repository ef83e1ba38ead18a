import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels_run import DEVICE, DTYPES
from kvrepro_kernels.ragged_decode import Decoded, ragged_decode, ragged_decode_reference

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}  # of ||ours - truth|| / ||truth||
NAN = float("nan")


def problem(lengths, kv_heads, group=2, dim=64, room=5, tail=3, dtype=torch.float32, seed=None):
    """Random query and storage of len(lengths) segments; the tail's unused rows are NaN."""
    generator = torch.Generator().manual_seed(int(torch.randint(2**40, ())) if seed is None else seed)
    batch = len(lengths) // kv_heads
    shapes = [(batch, kv_heads * group, 1, dim)] + [(sum(lengths), dim)] * 2 + [(batch, kv_heads, room, dim)] * 2
    query, keys, values, tail_keys, tail_values = (
        torch.randn(shape, generator=generator).to(DEVICE, dtype) for shape in shapes
    )
    for x in (tail_keys, tail_values):
        x[:, :, tail:] = NAN
    offsets = torch.tensor([0, *lengths], device=DEVICE).cumsum(0)
    stored = {"keys": keys, "values": values, "offsets": offsets, "tail_keys": tail_keys, "tail_values": tail_values}
    return {"query": query, "tail": tail, **stored}


def check(inputs, emit=("mean", "max"), tuning=None) -> Decoded:
    """Every output, poisoned first, against the reference in float64."""
    query = inputs["query"]
    batch, heads, _, dim = query.shape
    kv_heads = inputs["tail_keys"].shape[1]
    upcast = {k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in inputs.items()}
    truth = ragged_decode_reference(**upcast, scale=dim**-0.5, emit=emit)

    def poisoned(*shape):
        return torch.full(shape, NAN, device=DEVICE)

    tail = batch, kv_heads, inputs["tail"]
    emitted = {name: (poisoned(len(inputs["keys"])), poisoned(*tail)) for name in emit}
    out = Decoded(torch.full_like(query, NAN), poisoned(batch, heads), emitted)
    ragged_decode(**inputs, emit=emit, out=out, tuning=tuning)
    tolerance = TOLERANCE[query.dtype]

    def close(ours, exact):
        assert not ours.isnan().any()
        assert (ours - exact).norm() <= tolerance * exact.norm()

    close(out.output, truth.output)
    assert torch.equal(out.lse.isfinite(), truth.lse.isfinite())
    close(out.lse.nan_to_num(0, 0, 0), truth.lse.nan_to_num(0, 0, 0))
    for name in emit:
        for ours, exact in zip(out.attention[name], truth.attention[name], strict=True):
            close(ours, exact)
    return out


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dims_and_dtypes(dim, dtype):
    check(problem([1, 63, 111, 300], 2, dim=dim, dtype=dtype))


@pytest.mark.parametrize("group", [1, 3, 4, 7, 8, 16])
def test_groups(group):
    check(problem([70, 9, 1], 3, group))


def test_segments_may_be_empty_and_the_tail_too():
    assert (check(problem([0, 20, 0, 130], 2, tail=0)).output[0, :2] == 0).all()
    check(problem([0, 20, 0, 130], 2, tail=5))
    check(problem([0, 0], 2, tail=1))
    check(problem([0, 0], 2, tail=0))


@settings(deadline=None, max_examples=10)
@given(data=st.data())
def test_any_ragged_shape(data: st.DataObject):
    kv_heads, batch = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    lengths = [data.draw(st.integers(0, 120)) for _ in range(kv_heads * batch)]
    room = data.draw(st.integers(0, 40))
    group, tail, seed = (data.draw(st.integers(low, high)) for low, high in ((1, 5), (0, room), (0, 1000)))
    inputs = problem(lengths, kv_heads, group, 16, room, tail, seed=seed)
    check(inputs, tuning=dict(smallest_share=data.draw(st.sampled_from([16, 64, 256])), block_t=16, emit_block=64))


@pytest.mark.parametrize("counted", [0, 1, 3, 5])
def test_the_tail_may_be_counted_on_the_device(counted):
    inputs = problem([7, 0, 90, 33], 2, room=5, tail=counted, seed=counted)
    emit = ("mean", "max")
    truth = ragged_decode(**inputs, emit=emit)
    behind = {name: torch.nn.functional.pad(inputs[name], (0, 0, 0, 11), value=NAN) for name in ("keys", "values")}
    used = torch.tensor([counted], device=DEVICE)
    decoded = ragged_decode(**inputs | behind | {"tail": 5, "used": used}, emit=emit)
    torch.testing.assert_close(decoded.output, truth.output)
    torch.testing.assert_close(decoded.lse, truth.lse)
    for name in emit:
        (flat, tail), (flat_truth, tail_truth) = decoded.attention[name], truth.attention[name]
        torch.testing.assert_close(flat[: len(flat_truth)], flat_truth)
        torch.testing.assert_close(tail[:, :, :counted], tail_truth)
        assert not tail[:, :, counted:].any()
