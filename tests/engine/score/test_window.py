"""Each window scorer against its formula once more: Python floats and loops, written from the formula."""

import math
from dataclasses import replace
from itertools import product

import pytest
import torch
from observations import observation

from kvrepro.engine.allocate import select
from kvrepro.engine.score import window
from kvrepro.engine.score.window import How

OBSERVED = [
    dict(group=1, window=3, tokens=12),
    dict(group=2, window=4, tokens=17, dead=6, gaps=3),
    dict(group=3, window=1, tokens=9, gaps=2),
    dict(group=4, window=5, tokens=23, dead=4),
]


def seen_by(**shape):
    return observation(2, 2, dim=4, hidden=5, seed=sum(shape.values()), **shape)


class Head:
    """One row and KV head as lists: p[g][t][j], a[g][t], v[j], W[g]; dead slots left out; `past`: not of the window."""

    def __init__(self, o, b, h):
        self.slots = [j for j, x in enumerate(o.positions[b, h].tolist()) if x >= 0]
        at = [o.positions[b, h, j].item() for j in self.slots]
        when = o.query_positions[b].tolist()
        k, v = ([x[b, h, j].tolist() for j in self.slots] for x in (o.keys, o.values))
        group = o.queries.shape[1] // o.keys.shape[1]
        q = o.queries[b, h * group : (h + 1) * group].tolist()
        self.n, self.v, self.past = len(at), v, [x not in when for x in at]
        self.W = o.output[h * group : (h + 1) * group].tolist()
        self.p = []
        for head in q:
            rows = []
            for query, t in zip(head, when, strict=True):
                e = [math.exp(o.scaling * dot(query, key)) if x <= t else 0.0 for key, x in zip(k, at, strict=True)]
                rows.append([x / sum(e) for x in e])
            self.p.append(rows)
        self.a = [[[dot(row, c) for c in zip(*v, strict=True)] for row in rows] for rows in self.p]

    def norm(self, j):
        """Mean over the group of ||v_j W_O||_1."""
        return mean([sum(abs(dot(self.v[j], c)) for c in zip(*w, strict=True)) for w in self.W])


def dot(x, y):
    return sum(a * b for a, b in zip(x, y, strict=True))


def mean(x):
    return sum(x) / len(x)


def average_pool(row, k):
    padded = [0.0] * (k // 2) + row + [0.0] * (k // 2)
    return [sum(padded[j : j + k]) / k for j in range(len(row))]


def max_pool(row, k):
    return [max(row[max(0, j - k // 2) : j + k // 2 + 1]) for j in range(len(row))]


def columns(rows):
    return [list(c) for c in zip(*rows, strict=True)]


def past_only(head, pool, row, k):
    """The public codes cut the window off before they pool."""
    cut = [x for x, past in zip(row, head.past, strict=True) if past]
    return pool(cut, k) + [0.0] * (head.n - len(cut))


def check(o, got, score=None, *, layer=None, rtol=3e-5):
    """`score(head)`, or `layer(heads of a row)` for each, is a list over alive tokens; `got` agrees on all of them."""
    assert got.dtype == torch.float32
    assert got.shape == o.positions.shape
    assert got.isfinite().all()
    for b in range(got.shape[0]):
        heads = [Head(o, b, h) for h in range(got.shape[1])]
        for h, want in enumerate(layer(heads) if layer else map(score, heads)):
            want = torch.tensor(want, dtype=torch.float64)
            scores_of_head = got[b, h, heads[h].slots].double()
            torch.testing.assert_close(scores_of_head, want, rtol=rtol, atol=1e-6 * want.abs().max().item() + 1e-12)


@pytest.mark.parametrize("shape", OBSERVED)
def test_snapkv_as_run(shape):
    o = seen_by(**shape)

    def score(head):
        by_query_head = [past_only(head, average_pool, [mean(c) for c in columns(rows)], 5) for rows in head.p]
        return [mean(c) for c in columns(by_query_head)]

    check(o, window.snapkv(o), score)


@pytest.mark.parametrize("shape", OBSERVED)
def test_snapkv_as_described_keeps_the_union_of_its_query_heads(shape):
    o = seen_by(**shape)
    got = window.snapkv(o, How("sum", "max", 7, "union"))
    for b, h in product(range(2), range(2)):
        head = Head(o, b, h)
        by_query_head = [past_only(head, max_pool, [sum(c) for c in columns(rows)], 7) for rows in head.p]
        past = [j for j in range(head.n) if head.past[j]]
        lists = [sorted(past, key=lambda j, s=s: (-round(s[j], 7), -j)) for s in by_query_head]
        scores_by_token = {j: got[b, h, head.slots[j]].item() for j in past}
        for top in range(1, len(past) + 1):  # every head's best `top` score above all others
            union = set().union(*[order[:top] for order in lists])
            assert union == {j for j in past if scores_by_token[j] > -top}


@pytest.mark.parametrize("shape", OBSERVED)
def test_pyramid_and_ada_as_described_reduce_the_group_before_pooling(shape):
    o = seen_by(**shape)

    def score(head):
        grouped = [mean(c) for c in columns([[mean(c) for c in columns(rows)] for rows in head.p])]
        return past_only(head, max_pool, grouped, 7)

    check(o, window.snapkv(o, How("mean", "max", 7, "mean", "kv_head")), score)


def variance(x):
    return sum((y - mean(x)) ** 2 for y in x) / (len(x) - 1) if len(x) > 1 else 0.0


@pytest.mark.parametrize("shape", OBSERVED)
def test_cake(shape):
    o = seen_by(**shape)

    def score(head):
        by_query_head = [[mean(c) + 200 * variance(c) for c in columns(rows)] for rows in head.p]
        return [mean(c) for c in columns([past_only(head, average_pool, row, 5) for row in by_query_head])]

    check(o, window.cake(o), score)


@pytest.mark.parametrize("shape", OBSERVED[:2] + OBSERVED[3:])
@pytest.mark.parametrize("tau", [(1.0, 1.0), (1.6, 0.6)])
def test_cake_preference(shape, tau):
    o = seen_by(**shape)
    got = window.cake_preference(o, *tau)
    for b in range(2):
        rows = [(head, rows) for head in (Head(o, b, h) for h in range(2)) for rows in head.p]
        seen = [x for head, group in rows for row in group for x, past in zip(row, head.past, strict=True) if past]
        entropy = -sum(x * math.log(x + 1e-10) for x in seen)
        spread = sum(
            variance(c) for head, group in rows for c, past in zip(columns(group), head.past, strict=True) if past
        )
        want = entropy ** (1 / tau[0]) * spread ** (1 / tau[1])
        assert got[b].item() == pytest.approx(want, rel=1e-4)


@pytest.mark.parametrize("shape", OBSERVED)
def test_andpro_as_described(shape):
    o = seen_by(**shape)

    def score(head):
        by_query_head = [
            [sum(row[j] * dot(a, head.v[j]) for row, a in zip(rows, outs, strict=True)) for j in range(head.n)]
            for rows, outs in zip(head.p, head.a, strict=True)
        ]
        return [mean(c) for c in columns(by_query_head)]

    check(o, window.andpro(o), score)


@pytest.mark.parametrize("shape", [dict(group=2, window=4, tokens=31, dead=5), dict(group=1, window=6, tokens=40)])
def test_andpro_as_run_sums_chunks_against_the_droppable_anchor(shape):
    o = seen_by(**shape)
    w, size = shape["window"], 4

    def score(head):
        chunks = [list(range(c, min(c + size, head.n))) for c in range(0, head.n, size)]
        droppable = [0 < c < len(chunks) - math.ceil(w / size) for c in range(len(chunks))]
        by_query_head = []
        for rows in head.p:
            total = [0.0] * len(chunks)
            for row in rows:
                p = max_pool(row, 7)
                u = [[sum(p[j] * head.v[j][d] for j in chunk) for d in range(4)] for chunk in chunks]
                anchor = [sum(x[d] for x, drop in zip(u, droppable, strict=True) if drop) for d in range(4)]
                total = [s + dot(x, anchor) for s, x in zip(total, u, strict=True)]
            by_query_head.append([total[j // size] if droppable[j // size] else 0.0 for j in range(head.n)])
        return [max(c) for c in columns(by_query_head)]

    check(o, window.andpro(o, How("sum", "max", 7, "max"), chunk=size, window=w), score)


@pytest.mark.parametrize("shape", OBSERVED)
@pytest.mark.parametrize("pool", ["max", "average"])
def test_dropkv(shape, pool):
    o = seen_by(**shape)

    def score(head):
        cost = [0.0] * head.n
        for rows, outs in zip(head.p, head.a, strict=True):
            for row, a in zip(rows, outs, strict=True):
                for j, p in enumerate(row):
                    far = sum((x - y) ** 2 for x, y in zip(a, head.v[j], strict=True))
                    cost[j] += (p / (1 - p + 1e-6)) ** 2 * far / len(head.p)
        return {"max": max_pool, "average": average_pool}[pool](cost, 11)

    check(o, window.dropkv(o, how=How("sum", pool, 11)), score, rtol=1e-3)  # 1 - p in float32


def test_rounding_p_makes_a_near_certain_token_and_its_neighbours_survive():
    """p = 0.9985 becomes 1 in bfloat16, the factor 1e12; average pooling smears it over 11 places."""
    o = observation(1, 1, 1, window=1, tokens=40, dim=4)
    keys = torch.zeros_like(o.keys)
    query = torch.tensor([[[[1.0, 0, 0, 0]]]])
    keys[0, 0, 20, 0] = math.log(0.9985 / 0.0015 * 39) / o.scaling
    o = replace(o, keys=keys, queries=query)
    assert o.attention[..., 20].item() == pytest.approx(0.9985, abs=1e-4)
    exact, rounded = window.dropkv(o), window.dropkv(o, round_p=True, how=How("sum", "average", 11))
    assert exact[0, 0, 20] < 1e7
    best = rounded[0, 0].topk(11).indices
    assert sorted(best.tolist()) == list(range(15, 26))
    assert rounded[0, 0, 15:26].min() > 1e9 * rounded[0, 0, :15].max()


def risk(head, over, rescale):
    """Largest pooled attention over queries and group, no less than the head's mean of it."""
    counted = head.past if over == "past" else [True] * head.n
    pooled = []
    for row in (row for rows in head.p for row in rows):
        cut = [x for x, ok in zip(row, counted, strict=True) if ok]
        new = average_pool(cut, 5)
        if rescale:
            new = [x * sum(cut) / sum(new) for x in new]
        pooled.append(new)
    worst = [max(c) for c in columns(pooled)]
    return [max(x, mean(worst)) for x in worst] + [0.0] * (head.n - len(worst))


@pytest.mark.parametrize("shape", OBSERVED)
@pytest.mark.parametrize("layer_wise", [False, True])
def test_defensive_as_described(shape, layer_wise):
    o = seen_by(**shape)

    def layer(heads):
        total = sum(head.norm(j) for head in heads for j in range(head.n)) if layer_wise else 1.0
        return [[r * head.norm(j) / total for j, r in enumerate(risk(head, "all", False))] for head in heads]

    check(o, window.defensive_kv(o, share="layer" if layer_wise else "none"), layer=layer)


@pytest.mark.parametrize("shape", [dict(group=2, window=3, tokens=20), dict(group=3, window=4, tokens=30)])
@pytest.mark.parametrize("budget", [5, 10, 10.7, 14])
def test_defensive_as_run(shape, budget):
    """The public code's seven steps, on a prompt: both heads hold the same positions. The cap on the first mass counts
    the past alone, int((n - w) (1 - r) - w), and binds at 10 of 20 tokens."""
    o = seen_by(**shape)
    w = shape["window"]

    def layer(heads):
        n = heads[0].n
        norms = [[head.norm(j) for j in range(n - w)] for head in heads]
        scores = [
            [r * norm[j] / sum(other[j] for other in norms) for j, r in enumerate(risk(head, "past", True)[: n - w])]
            for head, norm in zip(heads, norms, strict=True)
        ]
        near = mean([sum(row[n - 2 * w : n - w]) for head in heads for rows in head.p for row in rows])
        top = max(max(row) for row in scores)
        for head, row in zip(heads, scores, strict=True):
            held = [mean([r[j] for rows in head.p for r in rows]) for j in range(n - w)]
            order = sorted(range(n - w), key=lambda j, held=held: -held[j])
            filled, count = 0.0, 0
            for j in order:
                filled += held[j] / sum(held)
                if filled >= 0.9 - near:
                    break
                count += 1
            for j in order[: max(0, min(count, int((n - w) * budget / n - w)))]:
                row[j] = top
        return [row + [top] * w for row in scores]

    asked = torch.tensor([budget] * 2, dtype=torch.float64)
    got = window.defensive_kv(o, asked, How("defensive", "average", rescale=True), share="heads", mass=0.9)
    check(o, got, layer=layer)


def test_the_norm_share_is_by_position_not_by_slot():
    """After an eviction per head, the same position lies in different slots of its heads."""
    o = observation(1, 2, 2, window=2, tokens=12, dead=5, gaps=4, seed=3)
    assert not torch.equal(o.positions[0, 0], o.positions[0, 1])
    plain, shared = window.defensive_kv(o), window.defensive_kv(o, share="heads")
    norm = o.projected_norm.mean(2)[0]
    for h in range(2):
        for j, x in enumerate(o.positions[0, h].tolist()):
            if x >= 0:
                total = sum(norm[i][o.positions[0, i] == x].sum() for i in range(2))
                assert shared[0, h, j].item() == pytest.approx((plain[0, h, j] / total).item(), rel=1e-5)


@pytest.mark.parametrize("shape", OBSERVED)
def test_critical_fills_half_by_score_and_half_by_weighted_score(shape):
    o = seen_by(**shape)
    w = shape["window"]
    scores = window.snapkv(o)
    protected = torch.arange(shape["tokens"]) >= shape["tokens"] - w
    protected = protected.expand_as(scores) & o.alive
    counts = torch.full(scores.shape[:2], w + 4)
    second, exempt = window.critical(o, scores, counts, protected)
    kept = select(second, protected | exempt, counts)
    for b, h in product(range(2), range(2)):
        head = Head(o, b, h)
        s = scores[b, h, head.slots].tolist()
        past = [j for j in range(head.n) if head.past[j]]
        first = sorted(past, key=lambda j: (-s[j], -j))[: max(0, int(0.5 * (w + 4)) - w)]
        left = sorted((j for j in past if j not in first), key=lambda j: (-(s[j] + 1e-4) * head.norm(j), -j))
        want = first + left[: 4 - len(first)] + [j for j in range(head.n) if not head.past[j]]
        assert kept[b, h, head.slots].nonzero()[:, 0].tolist() == sorted(want)


def test_critical_exempts_the_floor_of_heads_with_small_counts():
    o = observation(1, 2, tokens=40)
    scores, none = window.snapkv(o), torch.zeros_like(o.alive)
    counts = torch.tensor([[6, 34]])  # 20 on average
    assert window.critical(o, scores, counts, none)[1].sum(-1).tolist() == [[3, 17]]
    exempt = window.critical(o, scores, counts, none, exempt_floor=0.2)[1]
    assert exempt.sum(-1).tolist() == [[4, 17]]
    assert exempt[0, 0].nonzero()[:, 0].tolist() == sorted(scores[0, 0].topk(4).indices.tolist())


# ---- every row of the catalogue


def test_rows_with_fewer_queries_than_the_window_are_averaged_over_theirs():
    full = observation(1, tokens=20, window=4)
    short = full.last(3)
    none = torch.full((1, 1), -1)
    padded = replace(
        full,
        queries=torch.cat([torch.ones_like(full.queries[:, :, :1]), short.queries], 2),
        query_positions=torch.cat([none, short.query_positions], 1),
    )
    for score in (window.snapkv, window.cake, window.andpro, window.dropkv, window.defensive_kv):
        torch.testing.assert_close(score(padded), score(short), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(window.cake_preference(padded), window.cake_preference(short), rtol=1e-4, atol=1e-5)


def test_span_local_queries_vote_in_their_own_span_only():
    spans = torch.tensor([[0] * 10 + [1] * 10])
    o = observation(1, tokens=20, window=4, span_of=spans, span_local=True)
    o = replace(o, query_positions=torch.tensor([[8, 9, 18, 19]]))
    first = replace(o, queries=o.queries[:, :, :2], query_positions=o.query_positions[:, :2])
    for score, how in ((window.snapkv, How()), (window.cake, How("mean_var"))):
        both, alone = score(o, how), score(first, how)
        torch.testing.assert_close(both[..., :8], alone[..., :8], rtol=1e-4, atol=1e-5)
    assert (window.snapkv(o)[..., [8, 9, 18, 19]] == 0).all()
