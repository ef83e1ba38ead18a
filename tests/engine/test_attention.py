"""Attention over tokens in several tensors, against plain loops; the attention that a model gets while installed."""

from itertools import pairwise, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import architecture

from kvrepro.engine.attention import Softmax, attend, installed


def naive(query, at, keys, values, positions, scaling, sliding=None, hide=None, softcap=None, sinks=None):
    """(output, p) one query and head after the other."""
    batch, heads, m, _ = query.shape
    group = heads // keys.shape[1]
    out, p = torch.zeros(batch, m, heads, values.shape[3]), torch.zeros(batch, heads, m, keys.shape[2])
    for b, h, i in product(range(batch), range(heads), range(m)):
        seen = [
            j
            for j, where in enumerate(positions[b, h // group].tolist())
            if 0 <= where <= at[b, i]
            and (sliding is None or where > at[b, i] - sliding)
            and (hide is None or not hide[b, h // group, h % group, i, j])
        ]
        if seen:
            logits = keys[b, h // group, seen] @ query[b, h, i] * scaling
            logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
            weights = logits.exp()
            p[b, h, i, seen] = weights / (weights.sum() + (0 if sinks is None else sinks[h].exp()))
            out[b, i, h] = p[b, h, i] @ values[b, h // group]
    return out, p


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 10**6),
    st.tuples(st.integers(1, 3), st.integers(1, 2), st.integers(1, 3), st.integers(1, 9)),
    st.lists(st.integers(0, 12), min_size=1, max_size=3),
    st.sampled_from([None, 1, 3, 50]),
    st.booleans(),
    st.sampled_from([1, 4, 256]),
    st.sampled_from([None, 2.0]),
    st.booleans(),
)
def test_attention_equals_loops(seed, shape, sizes, sliding, hiding, block, softcap, sinking):
    torch.manual_seed(seed)
    batch, kv_heads, group, m = shape
    heads, total = kv_heads * group, sum(sizes)
    if not total:
        return
    query = torch.randn(batch, heads, m, 4)
    parts = []
    for i, size in enumerate(sizes):
        shared = i == len(sizes) - 1  # the last part, as a tail: every head sees every token
        where = torch.randint(-1, 30, (batch, 1 if shared else kv_heads, size))
        parts.append((*torch.randn(2, batch, kv_heads, size, 4), where))
    at = torch.randint(0, 30, (batch, m))
    positions = torch.cat([where.expand(batch, kv_heads, -1) for *_, where in parts], 2)
    hide = torch.rand(batch, kv_heads, group, m, total) < 0.3 if hiding else None
    keys, values = (torch.cat([part[i] for part in parts], 2) for i in (0, 1))
    sinks = torch.randn(heads) if sinking else None
    expected, p = naive(query, at, keys, values, positions, 0.7, sliding, hide, softcap, sinks)
    blocks = []
    how = Softmax(0.7, softcap, sinks) if softcap or sinking else 0.7
    out = attend(query, at, parts, how, sliding, lambda p, rows: blocks.append((p, rows)), hide, block)
    alive = p.sum(-1) > 0  # a query that sees nothing is padding, and its output is not used
    torch.testing.assert_close(out[alive.transpose(1, 2)], expected[alive.transpose(1, 2)], atol=1e-5, rtol=1e-4)
    assert out.isfinite().all()
    torch.testing.assert_close(torch.cat([q for q, _ in blocks], 3).flatten(1, 2)[alive], p[alive])
    assert [rows.start for _, rows in blocks] == list(range(0, m, block))
    assert all(a.stop == b.start for (_, a), (_, b) in pairwise(blocks))
    assert all(q.shape[3] <= block and q.dtype == torch.float32 for q, _ in blocks)


@pytest.mark.parametrize("sliding", [1, 7, 40])
@pytest.mark.parametrize("block", [1, 5, 16])
def test_a_prompt_in_a_layer_that_slides(sliding, block):
    torch.manual_seed(3)
    query, key, value = (torch.randn(1, h, 33, 8) for h in (4, 2, 2))
    at = torch.arange(33)[None]
    expected, _ = naive(query, at, key, value, at[:, None].expand(-1, 2, -1), 0.35, sliding)
    out = attend(query, at, [(key, value, at[:, None])], 0.35, sliding, block=block, prompt=True)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-4)


# ---- in a model


def test_models_get_their_attention_back_even_after_an_error():
    model = architecture("llama")
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    with pytest.raises(RuntimeError, match="needs model"), installed(model):
        model(torch.tensor([[5, 6]]))
    assert model.config._attn_implementation == "eager"
    assert [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()] == hooks
