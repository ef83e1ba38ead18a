import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels_run import DEVICE, DTYPES
from kvrepro_kernels.window_attention import window_attention, window_attention_reference
from kvrepro_kernels.window_rules import NAMES, window_scores_reference
from kvrepro_kernels.window_scores import window_scores

INDICATORS, AGGREGATES, REDUCTIONS, _ = NAMES.values()
RULES = list(itertools.product(INDICATORS, AGGREGATES, REDUCTIONS))
# every aggregate with every reduction, each indicator three or four times
SOME_RULES = [(INDICATORS[i % 5], *rule) for i, rule in enumerate(itertools.product(AGGREGATES, REDUCTIONS))]
# relative to the largest score: products of 16-bit numbers add up in float32, and so does all that follows
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-3, torch.bfloat16: 1e-3}


def problem(batch=1, kv_heads=2, group=2, window=4, tokens=63, dim=64, dtype=torch.float32, seed=None):
    """Random window queries, keys and values."""
    generator = torch.Generator().manual_seed(int(torch.randint(2**40, ())) if seed is None else seed)
    shapes = (batch, kv_heads * group, window, dim), *[(batch, kv_heads, tokens, dim)] * 2
    return [torch.randn(shape, generator=generator).to(DEVICE, dtype) for shape in shapes]


def limits(query, keys, first=None, starts=None):
    """(last visible keys [batch, kv_heads, window], first live ones [batch, kv_heads]); first: what query 0 sees."""
    batch, kv_heads, tokens, _ = keys.shape
    first = torch.full((batch,), tokens - query.shape[2]) if first is None else torch.as_tensor(first)
    last = (first[:, None, None] + torch.arange(query.shape[2], device="cpu")).expand(-1, kv_heads, -1)
    starts = torch.zeros(batch, kv_heads, dtype=torch.int64) if starts is None else torch.as_tensor(starts)
    starts = starts[:, None].expand(-1, kv_heads) if starts.dim() == 1 else starts
    return last.to(DEVICE), starts.to(DEVICE)


def check(query, keys, values, rule, first=None, starts=None, tolerance=None):
    """Kernel against the reference in float64, from the same lse and outputs; its output is poisoned.

    Near probability 1, risk p / (1 - p) multiplies float32's rounding of a logit: what 4e-6 of one change in a score is
    allowed beside the tolerance.
    """
    last, starts = limits(query, keys, first, starts)
    scale = query.shape[-1] ** -0.5
    upcast = [x.double() for x in (query, keys, values)]
    outputs, lse = window_attention_reference(*upcast, scale, last, starts)
    outputs, lse = outputs.to(query.dtype), lse.float()
    heads = query.shape[1] if rule[2] == "none" else keys.shape[1]
    out = torch.full((keys.shape[0], heads, keys.shape[2]), float("nan"), device=DEVICE)
    names = dict(zip(("indicator", "aggregate", "reduction"), rule, strict=True))
    window_scores(query, keys, values, lse, outputs, **names, last=last, starts=starts, out=out)
    shifted = [lse.double() + shift for shift in (0.0, 4e-6, -4e-6)]
    expected, lower, upper = (
        window_scores_reference(*upcast, x, outputs.double(), *rule, scale, last, starts) for x in shifted
    )
    allowed = (tolerance or TOLERANCE[query.dtype]) * expected.abs().max() + (upper - lower).abs()
    assert ((out - expected).abs() <= allowed).all(), (rule, ((out - expected).abs() / allowed).max())
    return out


def test_reference_is_the_formula():
    """Element by element, on one batch row with 2 KV heads of 3 query heads."""
    query, keys, values = (x.double().cpu() for x in problem(group=3, window=3, tokens=9, dim=5))
    last, starts = (x.cpu() for x in limits(query, keys, torch.tensor([6]), torch.tensor([[0, 2]])))
    outputs, lse = window_attention_reference(query, keys, values, 0.5, last, starts)
    scores = {
        rule: window_scores_reference(query, keys, values, lse, outputs, *rule, 0.5, last, starts) for rule in RULES
    }
    for g, j in itertools.product(range(2), range(9)):
        k, v = keys[0, g], values[0, g]
        x = torch.zeros(5, 3, 3, dtype=torch.float64)
        for r, t in itertools.product(range(3), range(3)):
            visible = [i for i in range(9) if starts[0, g] <= i <= 6 + t]
            logits = torch.stack([0.5 * query[0, 3 * g + r, t] @ k[i] for i in visible])
            p = logits.exp() / logits.exp().sum()
            a = sum(p[n] * v[i] for n, i in enumerate(visible))
            torch.testing.assert_close(outputs[0, 3 * g + r, t], a)
            if j in visible:
                pj = p[visible.index(j)]
                risk = (pj / (1 - pj + 1e-6)) ** 2 * (a - v[j]).norm() ** 2
                x[:, r, t] = torch.stack([pj, pj * v[j].norm(), risk, pj * (a @ v[j]), -pj * (pj + 1e-10).log()])
        for (indicator, aggregate, reduction), score in scores.items():
            y = x[INDICATORS.index(indicator)]
            y = {"mean": y.mean(1), "sum": y.sum(1), "max": y.amax(1), "variance": y.var(1)}[aggregate]
            y = {"mean": y.mean(), "max": y.max(), "sum": y.sum(), "none": y}[reduction]
            ours = score[0, 3 * g : 3 * g + 3, j] if reduction == "none" else score[0, g, j]
            torch.testing.assert_close(ours, y, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("rule", SOME_RULES, ids="-".join)
def test_every_rule(rule):
    check(*problem(group=3, window=5, tokens=111), rule, starts=[7])


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dims_and_dtypes(dim, dtype):
    for rule in (("perturbation", "sum", "mean"), ("anchor", "max", "max"), ("value", "variance", "mean")):
        check(*problem(dim=dim, dtype=dtype, tokens=130, window=8), rule)


@pytest.mark.parametrize(
    ("group", "window"), [(1, 1), (1, 64), (16, 1), (16, 64), (4, 8), (7, 3), (5, 32), (3, 33), (4, 64), (16, 5)]
)
def test_groups_and_windows(group, window):
    query, keys, values = problem(group=group, window=window, tokens=70, kv_heads=1)
    for rule in (("perturbation", "sum", "mean"), ("anchor", "max", "max"), ("attention", "mean", "max")):
        check(query, keys, values, rule)
    if window > 1:
        check(query, keys, values, ("value", "variance", "sum"))


@settings(deadline=None, max_examples=15)
@given(data=st.data())
def test_any_shape(data: st.DataObject):
    group, window = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 12))
    batch, kv_heads, tokens = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 2)), data.draw(st.integers(20, 90))
    first = [data.draw(st.integers(5, tokens - window)) for _ in range(batch)]
    starts = [[data.draw(st.integers(0, first[b] - 5)) for _ in range(kv_heads)] for b in range(batch)]
    rule = data.draw(st.sampled_from(RULES))
    if window == 1 and rule[1] == "variance":
        rule = (rule[0], "max", rule[2])
    inputs = problem(batch, kv_heads, group, window, tokens, 16, seed=data.draw(st.integers(0, 1000)))
    check(*inputs, rule, first=first, starts=starts, tolerance=1e-3)  # few keys: p near 1


def test_padding_never_touches_a_live_score():
    """Keys and values in front of a row's start may hold anything, and score 0."""
    query, keys, values = problem(batch=2, tokens=50)
    starts = torch.tensor([[0, 9], [20, 45]])
    clean = check(query, keys, values, ("perturbation", "sum", "mean"), starts=starts)
    for b, g in itertools.product(range(2), range(2)):
        keys[b, g, : starts[b, g]] = float("nan")
        values[b, g, : starts[b, g]] = float("nan")
    last, limits_ = limits(query, keys, starts=starts)
    outputs, lse = window_attention(query, keys.nan_to_num(), values.nan_to_num(), starts=limits_)
    dirty = window_scores(query, keys, values, lse, outputs, starts=limits_, last=last)
    torch.testing.assert_close(dirty, clean, rtol=1e-3, atol=1e-5)  # five keys: p near 1
    for b, g in itertools.product(range(2), range(2)):
        assert (dirty[b, g, : starts[b, g]] == 0).all()


def test_pooled_attention_is_the_formula():
    query, keys, values = problem(kv_heads=1, group=1, window=2, tokens=9, dim=16)
    last, starts = limits(query, keys)
    outputs, lse = window_attention_reference(query, keys, values, 16**-0.5, last, starts)
    p = torch.exp(16**-0.5 * query[0, 0] @ keys[0, 0].T - lse[0, 0, :, None])
    p[0, 8] = 0  # the first query stands before the last token
    for pool_by in ("average", "max"):
        around = [p[:, max(0, j - 1) : j + 2] for j in range(9)]
        expected = torch.stack([x.sum(1) / 3 if pool_by == "average" else x.amax(1) for x in around], -1).amax(0)
        rule = {"indicator": "attention", "aggregate": "max", "reduction": "sum"}
        scores = window_scores(query, keys, values, lse, outputs, **rule, pool=3, pool_by=pool_by)
        torch.testing.assert_close(scores[0, 0], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_window_attention_over_pooled_logits(dtype):
    query, keys, values = problem(2, 2, 3, 5, 90, 32, dtype)
    last, starts = limits(query, keys, starts=[[0, 7], [21, 3]])
    a, lse = window_attention(query, keys, values, starts=starts, pool=7)
    upcast = [x.double() for x in (query, keys, values)]
    outputs, expected = window_attention_reference(*upcast, 32**-0.5, last, starts, 7)
    assert (a - outputs).norm() / outputs.norm() < {torch.float32: 1e-5}.get(dtype, 8e-3)
    assert (lse - expected).abs().max() < (1e-5 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize(("group", "window"), [(1, 1), (4, 8), (3, 33)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_own_lse_and_outputs(group, window, dtype):
    query, keys, values = problem(2, 1, group, window, 100, 80, dtype)
    last, starts = limits(query, keys, starts=[0, 11])
    out = (
        torch.full(query.shape, float("nan"), dtype=dtype, device=DEVICE),
        torch.full(query.shape[:3], float("nan"), device=DEVICE),
    )
    window_attention(query, keys, values, starts=starts, out=out)
    upcast = [x.double() for x in (query, keys, values)]
    outputs, lse = window_attention_reference(*upcast, 80**-0.5, last, starts)
    assert (out[0] - outputs).norm() / outputs.norm() < {torch.float32: 1e-5}.get(dtype, 8e-3)
    assert (out[1] - lse).abs().max() < (1e-5 if dtype == torch.float32 else 1e-2)
    scores = window_scores(query, keys, values, starts=starts, indicator="attention", aggregate="sum", reduction="sum")
    rule = ("attention", "sum", "sum")
    expected = window_scores_reference(*upcast, lse, outputs, *rule, 80**-0.5, last, starts)
    assert (scores - expected).norm() / expected.norm() < TOLERANCE[dtype]
    assert torch.allclose(scores.sum(-1), torch.tensor(float(group * window), device=DEVICE), rtol=1e-2)


def test_a_query_that_sees_nothing():
    query, keys, values = problem(window=3, tokens=10)
    outputs, lse = window_attention(query, keys, values, starts=torch.tensor([9], device=DEVICE))
    assert (lse[:, :, :2] == -torch.inf).all()
    assert (outputs[:, :, :2] == 0).all()
    torch.testing.assert_close(outputs[:, :, 2], values[:, :, 9].repeat_interleave(2, 1))
