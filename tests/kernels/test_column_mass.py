import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels_run import DEVICE, DTYPES
from kvrepro_kernels.column_mass import column_mass, column_mass_reference
from kvrepro_kernels.prefill_attention import prefill_attention_reference


def problem(batch=1, kv_heads=2, group=2, tokens=70, dim=64, dtype=torch.float32, seed=None):
    """Random queries and keys, and the log-sum-exp of their causal attention, computed in float64."""
    generator = torch.Generator().manual_seed(int(torch.randint(2**40, ())) if seed is None else seed)
    query = torch.randn(batch, kv_heads * group, tokens, dim, generator=generator).to(DEVICE, dtype)
    keys = torch.randn(batch, kv_heads, tokens, dim, generator=generator).to(DEVICE, dtype)
    _, lse = prefill_attention_reference(query.double(), keys.double(), keys.double(), dim**-0.5)
    return query, keys, lse


def check(query, keys, lse, starts=None, spans=None):
    """Kernel, its output poisoned, against the reference in float64."""
    batch, kv_heads, tokens, dim = keys.shape
    out = torch.full((batch, kv_heads, tokens), float("nan"), device=DEVICE)
    column_mass(query, keys, lse.float(), starts=starts, spans=spans, out=out)
    zeros = torch.zeros(batch, kv_heads, dtype=torch.long, device=DEVICE)
    first = zeros if starts is None else starts[:, None].expand(batch, kv_heads)
    upcast = query.double(), keys.double(), lse.float().double()
    truth = column_mass_reference(*upcast, dim**-0.5, first, spans)
    assert (out - truth).norm() <= 1e-5 * truth.norm()  # dots of 16-bit numbers add up in float32
    return out


def test_reference_is_the_formula():
    query, keys, lse = (x.double().cpu() for x in problem(group=3, tokens=6, dim=4))
    spans = torch.tensor([[0, 0, 1, 1, 0, 2]])
    zeros = torch.zeros(1, 2, dtype=torch.long)
    for span in (None, spans, spans - 1):
        mass = column_mass_reference(query, keys, lse, 0.5, zeros, span)
        for g in range(2):
            for j in range(6):
                total = 0.0
                for h in (3 * g, 3 * g + 1, 3 * g + 2):
                    for i in range(j, 6):
                        p = torch.softmax(torch.stack([0.5 * query[0, h, i] @ keys[0, g, n] for n in range(i + 1)]), 0)
                        apart = span is not None and span[0, i] != span[0, j] and min(span[0, i], span[0, j]) >= 0
                        total += 0.0 if apart else p[j]
                torch.testing.assert_close(mass[0, g, j], torch.as_tensor(total / 3))


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dims_and_dtypes(dim, dtype):
    check(*problem(tokens=150, dim=dim, dtype=dtype))


@pytest.mark.parametrize("tokens", [1, 63, 111, 300])
@pytest.mark.parametrize("group", [1, 5])
def test_odd_lengths_and_groups(tokens, group):
    out = check(*problem(tokens=tokens, group=group, kv_heads=1))
    assert out.sum().item() == pytest.approx(tokens, rel=1e-5)  # every query gives away 1


@settings(deadline=None, max_examples=15)
@given(data=st.data())
def test_any_shape(data: st.DataObject):
    tokens, batch = data.draw(st.integers(1, 150)), data.draw(st.integers(1, 2))
    kv_heads, group = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 3))
    query, keys, lse = problem(batch, kv_heads, group, tokens, 16, seed=data.draw(st.integers(0, 1000)))
    queries = data.draw(st.integers(1, tokens))  # a later chunk of the prompt
    starts = torch.tensor([data.draw(st.integers(0, tokens - 1)) for _ in range(batch)], device=DEVICE)
    spans = torch.tensor([[data.draw(st.integers(-1, 2)) for _ in range(tokens)] for _ in range(batch)], device=DEVICE)
    spans = data.draw(st.sampled_from([None, spans]))
    check(query[:, :, -queries:], keys, lse[:, :, -queries:], starts, spans)
