"""Which tokens stay in each head, and how many: against plain sorts, and sums that must be met."""

import contextvars
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from observations import observation

from kvrepro.engine import allocate
from kvrepro.engine.allocate import by_kernels, largest, select
from kvrepro.errors import InputError


@st.composite
def heads(draw):
    """(scores with ties and dead slots in front, protected, counts) of 1 to 2 rows and heads."""
    batch, kv_heads, tokens = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 9))
    shape = (batch, kv_heads, tokens)
    n = batch * kv_heads * tokens
    scores = torch.tensor(draw(st.lists(st.integers(-2, 2), min_size=n, max_size=n))).view(shape).float()
    protected = torch.tensor(draw(st.lists(st.booleans(), min_size=n, max_size=n))).view(shape)
    dead = torch.tensor(draw(st.lists(st.integers(0, tokens), min_size=batch * kv_heads, max_size=batch * kv_heads)))
    scores[torch.arange(tokens) < dead.view(batch, kv_heads, 1)] = -torch.inf
    least = (protected & ~scores.isneginf()).sum(-1)
    more = torch.tensor(draw(st.lists(st.integers(0, 9), min_size=len(dead), max_size=len(dead))))
    return scores, protected, least + more.view(batch, kv_heads)


@given(heads(), st.none() | st.randoms(use_true_random=False))
@settings(max_examples=300, deadline=None)
def test_matches_a_sort_of_each_head(case, random):
    """Of equals the later stay, or those with the larger ties where these are given."""
    scores, protected, counts = case
    tokens = scores.shape[2]
    order = [random.sample(range(tokens), tokens) if random else range(tokens) for _ in range(counts.numel())]
    ties = torch.tensor([list(row) for row in order]).view_as(scores)
    kept = select(scores, protected, counts, *([ties] if random else []))
    for b, h in torch.cartesian_prod(*map(torch.arange, counts.shape)).tolist():
        alive = [j for j in range(tokens) if scores[b, h, j] > -torch.inf]
        order = sorted(alive, key=lambda j: (not protected[b, h, j], -scores[b, h, j].item(), -ties[b, h, j].item()))
        assert kept[b, h].nonzero()[:, 0].tolist() == sorted(order[: int(counts[b, h])])


def test_neighbouring_numbers_and_many_equals_are_told_apart():
    """Scores that differ in their last bit are not equal; among equals the 100th is later than the 99th."""
    for sign in (1, -1):
        scores = sign * torch.tensor([1.0, 1 + 2**-23, 1 + 2**-22, 1 + 2**-23])
        for more in (scores, scores.flip(0)):
            assert more[largest(more, torch.tensor(1))].item() == more.max()
            assert sorted(more[largest(more, torch.tensor(3))].tolist()) == sorted(more.tolist())[1:]
    assert largest(torch.tensor([0.0, 2e-9, 1e-9]), torch.tensor(1)).tolist() == [False, True, False]
    zeros = torch.tensor([0.0, -0.0, -1.0])  # which are equals
    assert largest(zeros, torch.tensor(1)).tolist() == [False, True, False]
    for n in (40, 200, 20_000):
        kept = largest(torch.zeros(2, n), torch.tensor([3, n - 1]))
        assert [row.nonzero()[:, 0].tolist() for row in kept] == [[n - 3, n - 2, n - 1], list(range(1, n))]


@given(heads())
@settings(max_examples=10, deadline=None)
def test_one_launch_chooses_and_finds_what_is_amiss(case):
    pytest.importorskip("triton", reason="triton is packaged for Linux only")
    scores, protected, counts = case
    dead = torch.tensor([[-torch.inf, 1, 2]]), torch.tensor([2]), torch.tensor([[True, False, False]])
    with by_kernels():
        assert largest(*dead).tolist() == _plainly(largest, *dead).tolist() == [[False, True, True]]
        assert torch.equal(select(scores, protected, counts), _plainly(select, scores, protected, counts))
        assert torch.equal(largest(scores, counts), _plainly(largest, scores, counts))
        short = counts - 1 - (counts > 0).long() * 8
        strange = scores.masked_fill(scores == 1, torch.nan)
        for wrong in ((scores, protected, short), (strange, protected, counts)):
            assert _line(select, *wrong) == _line(_plainly, select, *wrong)


def _plainly(function, *arguments):
    return contextvars.Context().run(function, *arguments)


def _line(function, *arguments):
    """The error that a call raises, if any."""
    try:
        function(*arguments)
    except InputError as error:
        return str(error)


# ---- budgets


@st.composite
def layer(draw, tokens=None):
    """(scores, protected, budget) of 2 rows, 1 to 3 heads: ties, dead slots in front, the newest tokens protected."""
    kv_heads, tokens = draw(st.integers(1, 3)), tokens or draw(st.integers(6, 30))
    g = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    scores = torch.randn(2, kv_heads, tokens, generator=g) * torch.tensor([5.0, 1.0, 0.2])[:kv_heads, None]
    if draw(st.booleans()):
        scores = scores.round()
    dead = torch.randint(0, tokens // 3, (2, kv_heads, 1), generator=g)
    scores[torch.arange(tokens) < dead] = -torch.inf
    protected = (torch.arange(tokens) >= tokens - draw(st.integers(0, 3))).expand_as(scores)
    budget = torch.tensor(draw(st.lists(st.integers(3, tokens // 2), min_size=2, max_size=2)))
    return scores, protected, budget


@given(layer(), st.sampled_from([0.0, 0.2, 0.5, 1.0]), st.booleans())
@settings(max_examples=200, deadline=None)
def test_adaptive_meets_the_budget_and_the_floor(case, floor, blend):
    scores, protected, budget = case
    counts = allocate.adaptive(scores, protected, budget, floor=floor, blend=blend)
    alive = (~scores.isneginf()).sum(-1)
    assert (counts.sum(1) == torch.minimum(budget * scores.shape[1], alive.sum(1))).all()
    assert (counts >= (protected & ~scores.isneginf()).sum(-1)).all()
    assert (counts <= alive).all()
    if not blend:
        assert (counts >= torch.minimum((budget * floor).long()[:, None], alive)).all()
        assert (select(scores, protected, counts).sum(-1) == counts).all()


def test_a_floor_is_a_share_of_the_budget_and_a_fifth_by_itself():
    """A head whose scores are all low gets its floor, even if the product is slightly too small in floating point: 0.29
    * 100."""
    scores = torch.stack([torch.zeros(200), torch.full((200,), 9.0)])[None]
    none = torch.zeros_like(scores).bool()
    for floor, least in ((0.29, 29), (0.0, 0), (0.55, 55), (1.0, 100)):
        assert allocate.adaptive(scores, none, torch.tensor([100]), floor).tolist() == [[least, 200 - least]]
    assert allocate.adaptive(scores, none, torch.tensor([100])).tolist() == [[20, 180]]
    assert allocate.adaptive(scores, none, torch.tensor([100]), blend=True).tolist() == [[20, 180]]
    assert allocate.joint(scores, none, torch.tensor([100])).tolist() == [[0, 200]]


def test_adaptive_against_a_plain_sort():
    scores = torch.randn(1, 3, 20, generator=torch.Generator().manual_seed(2)) + torch.tensor([1.0, 0.0, -1.0])[:, None]
    protected = torch.zeros_like(scores).bool()
    protected[:, :, -2:] = True
    chosen = {(h, j) for h in range(3) for j in (18, 19)}
    for h in range(3):  # two of the floor's int(0.5 * 8) are the protected ones
        chosen |= {(h, j) for j in sorted(range(18), key=lambda j, h=h: -scores[0, h, j])[:2]}
    rest = sorted(((h, j) for h in range(3) for j in range(20)), key=lambda hj: -scores[0, hj[0], hj[1]])
    chosen |= set([hj for hj in rest if hj not in chosen][: 3 * 8 - len(chosen)])
    counts = allocate.adaptive(scores, protected, torch.tensor([8]), floor=0.5)
    assert counts[0].tolist() == [sum(h == head for h, _ in chosen) for head in range(3)]
    assert counts[0, 0] > counts[0, 2] >= 4


def test_the_blend_is_the_original_rounding_where_that_meets_the_sum():
    """cap_h = round(0.8 count_h + 0.2 base), count_h of the top H * base, window on top."""
    scores = torch.randn(1, 2, 40, generator=torch.Generator().manual_seed(0)) * torch.tensor([2.0, 1.0])[:, None]
    protected = (torch.arange(40) >= 36).expand_as(scores)
    base = 10
    top = scores[0, :, :36].flatten().topk(2 * base).indices // 36
    want = [round(0.8 * int((top == h).sum()) + 0.2 * base) + 4 for h in range(2)]
    assert sum(want) == 28
    assert allocate.adaptive(scores, protected, torch.tensor([14]), blend=True)[0].tolist() == want


@given(st.lists(layer(tokens=20), min_size=1, max_size=4), st.integers(3, 18))
@settings(max_examples=60, deadline=None)
def test_budgets_over_layers_meet_the_sum(layers, budget):
    kv_heads = min(s.shape[1] for s, _, _ in layers)
    scores, protected = [s[:, :kv_heads] for s, _, _ in layers], [p[:, :kv_heads] for _, p, _ in layers]
    budget = torch.tensor([budget, 3])
    want = budget * kv_heads * len(layers)
    g = torch.Generator().manual_seed(int(budget[0]))
    summaries = [torch.rand(2, generator=g) ** 4 * 100 for _ in layers]
    alive = [(~s.isneginf()).sum(-1) for s in scores]
    for function, more, most in (
        (allocate.joint_layers, [], sum(a.sum(1) for a in alive)),
        (allocate.cake, [summaries], sum(a.amax(1) for a in alive) * kv_heads),
    ):
        _, counts = function(scores, protected, budget, *more)
        assert (sum(c.sum(1) for c in counts) == torch.minimum(want, most)).all()
        for s, p, c in zip(scores, protected, counts, strict=True):
            assert (select(s, p, c).sum(-1) == torch.minimum(c, (~s.isneginf()).sum(-1))).all()


def test_joint_layers_is_one_sort_of_all():
    """Layers with other numbers of heads and tokens are padded internally, which must not show in the result."""
    g = torch.Generator().manual_seed(5)
    shapes = [(2, 9), (1, 12), (3, 7)]
    scores = [torch.randn(2, *shape, generator=g) - 4 for shape in shapes]  # all below 0, which nothing may stand for
    scores[1][:, :, :2] = -torch.inf
    protected = [torch.rand(2, *shape, generator=g) < 0.2 for shape in shapes]
    budget = torch.tensor([4, 5])
    _, counts = allocate.joint_layers(scores, protected, budget)
    for row in range(2):
        tokens = [
            (bool(p[row, h, t]), float(s[row, h, t]), layer, h)
            for layer, (s, p) in enumerate(zip(scores, protected, strict=True))
            for h in range(s.shape[1])
            for t in range(s.shape[2])
            if s[row, h, t] > -torch.inf
        ]
        best = sorted(tokens)[-int(budget[row]) * 6 :]
        wanted = [[sum(t[2:] == (n, h) for t in best) for h in range(heads)] for n, (heads, _) in enumerate(shapes)]
        assert [c[row].tolist() for c in counts] == wanted
    _, counts = allocate.cake(scores, protected, torch.tensor([8, 8]), [torch.full((2,), x) for x in (1.0, 1.0, 998.0)])
    assert [c[:, 0].tolist() for c in counts] == [[9, 9], [8, 8], [7, 7]]  # the third layer has seven tokens


def test_cake_shares_by_preference_and_spreads_what_a_layer_cannot_hold():
    scores, protected = [torch.randn(1, 2, 20) for _ in range(3)], [torch.zeros(1, 2, 20).bool() for _ in range(3)]
    for p in protected:
        p[..., -4:] = True
    _, counts = allocate.cake(scores, protected, torch.tensor([10]), [torch.tensor([float(x)]) for x in (1, 2, 3)])
    assert [c[0].tolist() for c in counts] == [[7, 7], [10, 10], [13, 13]]  # 18 beside the windows: 3, 6, 9
    _, counts = allocate.cake(scores, protected, torch.tensor([10]), [torch.tensor([float(x)]) for x in (1, 1, 98)])
    assert [int(c[0, 0]) for c in counts] == [5, 5, 20]  # 16 fill the third; 2 are left


def test_cake_as_run_rounds_down_and_hands_on_what_is_left():
    """Limits cut off 2, which go to both places that have room, and then 3, the odd one to the first of these."""
    wish, limit = torch.tensor([[5, 1, 0, 7], [0, 3, 0, 0]]), torch.tensor([[3, 4, 4, 7], [1, 2, 5, 4]])
    assert allocate._floored(wish, limit, torch.tensor([16, 6])).tolist() == [[3, 4, 2, 7], [1, 2, 2, 1]]
    scores, protected = [torch.zeros(1, 2, 20)] * 3, [(torch.arange(20) > 15).expand(1, 2, 20)] * 3
    given = torch.tensor([9]), [torch.tensor([x]) for x in (1.0, 2.0, 3.0)], torch.tensor([32 / 3], dtype=torch.float64)
    _, counts = allocate.cake(scores, protected, *given, floored=True)
    assert [c.tolist() for c in counts] == [[[8, 8]], [[10, 10]], [[14, 14]]]  # 32 less 12: 3, 6 and 10, 1 left over
    _, counts = allocate.cake(scores, protected, *given)
    assert [c[0, 0].item() for c in counts] == [7, 9, 11]  # 27 less 12
    scores, protected = [s.expand(2, 2, 20) for s in scores], [p.expand(2, 2, 20) for p in protected]
    _, counts = allocate.cake(scores, protected, torch.tensor([9, 9]), [torch.tensor([0, x]) for x in (0.1, 0.2, 0.2)])
    assert [c[:, 0].tolist() for c in counts] == [[9, 7], [9, 10], [9, 10]]  # the first row prefers no layer


def test_a_budget_over_heads_is_rounded_after_the_product_where_the_public_code_does():
    scores, asked = torch.rand(1, 2, 40), torch.tensor([14.499999999999998], dtype=torch.float64)
    given = scores, torch.zeros_like(scores).bool(), torch.tensor([14]), asked
    assert allocate.joint(*given, exact=True).sum() == 29
    assert allocate.joint(*given).sum() == 28
    assert allocate.joint(*given[:3], exact=True).sum() == 28


def test_heads_and_layers_can_keep_one_set():
    """Means over heads, or over layers too, which lie flush right; one layer has a dead slot more."""
    dead = -torch.inf
    scores = [torch.tensor([[[1.0, 2, 3], [3, 0, 5]]]), torch.tensor([[[dead, 4, 0, 2], [dead, 2, 2, 2]]])]
    none = [torch.zeros_like(s).bool() for s in scores]
    means, counts = allocate.per_layer(scores, none, torch.tensor([2]))
    assert [s.tolist() for s in means] == [[[[2, 1, 4]] * 2], [[[dead, 3, 1, 2]] * 2]]
    assert [c.tolist() for c in counts] == [[[2, 2]]] * 2
    means, counts = allocate.one_set(scores, none, torch.tensor([2]))
    assert [s.tolist() for s in means] == [[[[2.5, 1, 3]] * 2], [[[dead, 2.5, 1, 3]] * 2]]
    assert [c.tolist() for c in counts] == [[[2, 2]]] * 2


def test_a_pyramid_s_top_layer_has_room_for_what_is_protected():
    scores, protected = torch.zeros(1, 2, 100), torch.zeros(1, 2, 100).bool()
    protected[0, 1, :41], scores[0, 1, :1] = True, -torch.inf  # the first of them is dead
    counts = []
    for layer in range(3):
        o = observation(1, 2, 1, 1, 100, layer=layer, layers=3, seen=torch.tensor([100]))
        counts.append(allocate.pyramid(scores, protected, torch.tensor([50]), o)[0].tolist())
    assert counts == [[60, 60], [50, 50], [40, 40]]
    o = observation(1, 2, 1, 1, 100, layer=0, layers=2, seen=torch.tensor([100]))
    none = torch.zeros_like(protected)
    assert allocate.pyramid(scores, none, torch.tensor([42]), o)[0].tolist() == [82, 82]  # 84 - 42 / 20
    for seen, most in ((1000, 838), (800, 800)):  # 860 - 430 / 20 is 838.5, and no layer keeps more than there are
        o = observation(1, 2, 1, 1, 100, layer=0, layers=2, seen=torch.tensor([seen]))
        assert allocate.pyramid(scores, none, torch.tensor([430]), o)[0].tolist() == [most, most]


def pyramid(layers, seen, budget, window, beta=20, inside=True):
    """A pyramid's counts, [layers, two heads]."""
    none, counts = torch.zeros(1, 2, 4), []
    for layer in range(layers):
        o = observation(1, 2, 1, 1, 4, layer=layer, layers=layers, seen=torch.tensor([seen]))
        counts.append(allocate.pyramid(none, none.bool(), torch.tensor([budget]), o, beta, window, inside))
    return torch.cat(counts)


@given(st.integers(2, 40), st.integers(20, 3000), st.floats(0.02, 1), st.sampled_from([1, 5, 20]), st.booleans())
@settings(max_examples=200, deadline=None)
def test_the_pyramid_meets_the_sum_and_never_rises(layers, seen, share, beta, inside):
    window, budget = 8, max(9, int(share * seen))
    counts = pyramid(layers, seen, budget, window, beta, inside)
    assert counts.sum() == 2 * layers * budget
    assert (counts[:, 0] == counts[:, 1]).all()
    assert (counts[1:] <= counts[:-1]).all()
    assert (counts >= min(budget, window)).all()


def kvpress_pyramid(n, budget, window, beta, layers):
    low = budget / beta
    high = min(2 * budget - low, n - window)
    low = 2 * budget - high
    if not n >= high >= low >= window:
        return [budget] * layers
    return [round(high - l * (high - low) / (layers - 1)) for l in range(layers)]


@pytest.mark.parametrize(
    ("n", "budget", "window"), [(1000, 300, 8), (4000, 400, 8), (100, 80, 8), (1000, 100, 64), (1000, 160, 8)]
)
def test_the_pyramid_inside_is_kvpress(n, budget, window):
    assert pyramid(7, n, budget, window)[:, 0].tolist() == kvpress_pyramid(n, budget, window, 20, 7)


def original_pyramid(n, capacity, window, beta, layers):
    """KVCache-Factory: integers throughout, the window on top; its layers may miss the sum."""
    base = capacity - window
    if n < 2 * base:
        return [capacity] * layers
    high = min(2 * base - base // beta, n - window)
    low = 2 * base - high
    return [high - l * ((high - low) // (layers - 1)) + window for l in range(layers)]


@pytest.mark.parametrize(("n", "budget"), [(1000, 300), (4000, 408), (620, 308), (600, 400), (1000, 100), (600, 308)])
def test_the_pyramid_with_the_window_on_top_is_the_originals_first_half_mirrored(n, budget):
    got, want = pyramid(7, n, budget, 8, inside=False)[:, 0].tolist(), original_pyramid(n, budget, 8, 20, 7)
    assert got[:3] == want[:3]
    assert sum(got) == 7 * budget
    assert max(abs(a - b) for a, b in zip(got, want, strict=True)) <= 6


SCORES, PROTECTED, FOUR = torch.zeros(1, 2, 10), torch.ones(1, 2, 10).bool(), torch.tensor([4])
PROTECTED[0, 0, 0] = False
NAN = torch.tensor([[[0.0, torch.nan]]]), torch.zeros(1, 1, 2).bool(), torch.tensor([[1]])
REFUSED = [
    ("budget 4 < 10 protected tokens: raise the budget", select, (SCORES, PROTECTED, torch.tensor([[9, 4]]))),
    ("1 of 2 scores are NaN", select, NAN),
    ("budget 8 < 19 protected tokens of 2 heads together", allocate.adaptive, (SCORES, PROTECTED, FOUR)),
    ("16 < 38 protected tokens of 4 heads together", allocate.joint_layers, ([SCORES] * 2, [PROTECTED] * 2, FOUR)),
    ("4 < 10 protected tokens of 1 layers", allocate.cake, ([SCORES], [PROTECTED], FOUR, [torch.ones(1)])),
]


@pytest.mark.parametrize(("words", "function", "given"), REFUSED)
def test_what_cannot_be_met_is_refused(words, function, given):
    with pytest.raises(InputError, match=words):
        function(*given)


@given(st.lists(st.tuples(st.floats(0, 50), st.integers(0, 30)), min_size=1, max_size=8), st.integers(0, 100))
@settings(max_examples=200, deadline=None)
def test_spread_sums_exactly_within_the_limits(places, total):
    wish, limit = (torch.tensor([[p[i] for p in places]]) for i in (0, 1))
    got = allocate.spread(wish, limit, torch.tensor([total]))
    assert (got >= 0).all()
    assert (got <= limit).all()
    assert int(got.sum()) == min(total, int(limit.sum()))


SPREAD = [  # wish, limit, total, what comes of them
    ([[2, 4], [1, 3]], [[9, 9], [9, 9]], [3, 8], [[1, 2], [3, 5]]),  # scaled down; what is left goes in equal parts
    ([[0, 4], [9, 9]], [[9, 9], [2, 3]], [4, 30], [[0, 4], [2, 3]]),
    ([[1.2, 1.8], [1.5, 1.5]], [[9, 9], [9, 9]], [3, 3], [[1, 2], [2, 1]]),  # the larger fraction, or the earlier
]


@pytest.mark.parametrize(("wish", "limit", "total", "wanted"), SPREAD)
def test_spread_follows_the_wishes_of_each_row(wish, limit, total, wanted):
    assert allocate.spread(torch.tensor(wish), torch.tensor(limit), torch.tensor(total)).tolist() == wanted


def test_spans_are_numbered_by_their_first_token():
    assert allocate.number_spans(6, [[5, 1], [3]], extended=False).tolist() == [-1, 0, -1, 1, -1, 0]


def test_rows_do_not_see_each_other_and_all_is_made_on_the_device_of_what_is_given():
    scores = torch.randn(2, 2, 40, generator=torch.Generator().manual_seed(1)) * torch.tensor([3.0, 1.0])[:, None]
    protected, budget = (
        torch.arange(40) >= torch.tensor([36, 12])[:, None, None].expand(2, 2, 1),
        torch.tensor([12, 32]),
    )
    o = observation(2, 2, 1, 1, 40, layer=0, layers=3, seen=torch.tensor([40, 90]))
    o = replace(o, span_of=(torch.arange(o.positions.max() + 1) > 20).long().expand(2, -1), span_local=True)
    one = [
        replace(o, **{name: getattr(o, name)[b : b + 1] for name in ("positions", "seen", "span_of")}) for b in (0, 1)
    ]
    with torch.device("meta"):  # the default, on which nothing can be computed
        for function, more in (
            (lambda s, p, n, o: allocate.adaptive(s, p, n, blend=True), [o, *one]),
            (lambda s, p, n, o: allocate.pyramid(s, p, n, o), [o, *one]),
            (lambda s, p, n, o: allocate.split(o, n[:, None].expand(-1, 2), p), [o, *one]),
            (lambda s, p, n, o: allocate.select_parts(s, p & False, allocate.tally(o, p), o), [o, *one]),
            (lambda s, p, n, o: allocate.recent(o, 3) & allocate.largest(s, n[:, None].expand(-1, 2)), [o, *one]),
        ):
            whole, *rows = (
                function(scores[b], protected[b], budget[b], x)
                for b, x in zip((slice(2), slice(1), slice(1, 2)), more, strict=True)
            )
            assert torch.equal(whole, torch.cat(rows))
