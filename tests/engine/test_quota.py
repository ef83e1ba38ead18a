"""Guards, on caches with dead slots and gaps, and quotas over prompt spans, against plain counting."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from observations import observation

from kvrepro.engine import allocate
from kvrepro.engine.evict import Prompts
from kvrepro.engine.score import cumulative
from kvrepro.errors import InputError

held_caches = st.builds(
    observation,
    batch=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    tokens=st.integers(8, 20),
    dead=st.integers(0, 9),
    gaps=st.integers(0, 6),
    seed=st.integers(0, 99),
)


def protected(o, mask):
    """Positions that a mask protects, per row and head."""
    return [[o.positions[b, h][mask[b, h]].tolist() for h in range(mask.shape[1])] for b in range(mask.shape[0])]


def held(o):
    return protected(o, o.alive)


@settings(deadline=None, max_examples=40)
@given(held_caches, st.integers(0, 25), st.integers(0, 25))
def test_sinks_and_recent_are_the_ends_of_what_is_held(o, n, m):
    assert protected(o, allocate.sinks(o, n)) == [[head[:n] for head in row] for row in held(o)]
    assert protected(o, allocate.recent(o, m)) == [[head[max(0, len(head) - m) :] for head in row] for row in held(o)]
    assert torch.equal(allocate.ends(o, n, m), allocate.sinks(o, n) | allocate.recent(o, m))


def test_a_static_suffix_stays_at_the_prompts_end():
    o = observation(batch=1, tokens=20)  # 16 tokens of prompt, 4 generated
    assert protected(o, allocate.ends(o, 2, 3, end=16)) == [[[0, 1, 13, 14, 15]] * 2]
    assert protected(o, allocate.ends(o, 2, 3)) == [[[0, 1, 17, 18, 19]] * 2]


@settings(deadline=None, max_examples=40)
@given(held_caches, st.data())
def test_whitelist_protects_the_marked_positions_that_are_held(o, data):
    rows, seen = len(o.positions), data.draw(st.integers(1, int(o.seen.max())))  # spans may end before the newest token
    spans = [{"a": data.draw(st.lists(st.integers(0, seen + 3))), "b": [0]} for _ in range(rows)]
    prompts = Prompts(torch.arange(seen).expand(rows, -1), spans)
    wanted = [[[p for p in head if p < seen and p in spans[b]["a"]] for head in row] for b, row in enumerate(held(o))]
    assert protected(o, prompts.whitelisted(("a",), o)) == wanted


def test_the_window_is_found_wherever_its_queries_stand():
    spans = torch.tensor([[0] * 5 + [1] * 7])
    where = torch.tensor([[-1, 0, 4, 11]])
    o = observation(batch=1, tokens=12, window=4, query_positions=where, span_local=True, span_of=spans)
    assert protected(o, o.window) == [[[0, 4, 11]] * 2]
    assert not replace(o, query_positions=torch.full((1, 4), -1)).window.any()


def test_the_guarded_share_is_rounded_down_unless_asked_otherwise():
    assert [allocate.protected_count(share, 256) for share in (0, 0.01, 0.1, 1)] == [0, 4, 25, 256]  # four at least
    assert allocate.protected_count(0.1, 256, "ceil") == 26
    assert allocate.protected_count(0.1, 70, "ceil") == 7  # a product of 7.000000000000001


# ---- quotas

TOKENS = 24


def spanned(table, **kwargs):
    batch = kwargs.pop("batch", 1)
    span_of = torch.as_tensor(table)
    return observation(batch=batch, tokens=len(table), span_of=span_of.expand(batch, -1), **kwargs)


@st.composite
def caches(draw):
    """Observations with 1 to 5 spans, each present, in any arrangement; counts per head."""
    spans = draw(st.integers(1, 5))
    others = st.lists(st.integers(0, spans - 1), min_size=TOKENS - spans, max_size=TOKENS - spans)
    table = draw(st.permutations([*range(spans), *draw(others)]))
    o = spanned(table, batch=draw(st.integers(1, 2)), dead=draw(st.integers(0, 8)), seed=draw(st.integers(0, 99)))
    counts = torch.tensor([[draw(st.integers(0, TOKENS)) for _ in range(2)] for _ in range(len(o.positions))])
    return o, torch.minimum(counts, o.alive.sum(-1))


@settings(deadline=None, max_examples=60)
@given(caches(), st.sampled_from(["floor", "round"]))
def test_parts_are_shares_by_length_and_sum_to_the_count(given, rounding):
    o, counts = given
    parts, sizes = allocate.split(o, counts, torch.zeros_like(o.alive), rounding=rounding), allocate.tally(o, o.alive)
    assert torch.equal(parts.sum(-1), counts)
    assert (parts <= sizes).all()
    exact = counts[..., None] * sizes / sizes.sum(-1, keepdim=True)
    assert ((parts - exact).abs() < 1 + 1e-9).all()


@settings(deadline=None, max_examples=60)
@given(st.integers(1, TOKENS - 1), st.integers(0, TOKENS))
def test_two_spans_follow_algorithm_1_or_the_rounded_rule(first, count):
    o, counts = spanned([0] * first + [1] * (TOKENS - first)), torch.full((1, 2), count)
    for rounding, early in (("floor", count * first // TOKENS), ("round", math.floor(count * first / TOKENS + 0.5))):
        assert allocate.split(o, counts, torch.zeros_like(o.alive), rounding=rounding)[0, 0].tolist() == [
            early,
            count - early,
        ]


def test_sinks_apart_leave_the_shares():
    """E.3 by hand: 24 tokens, spans of 10 and 14, 4 sinks, budget 12: 8 shared 6:14 gives round(2.4) and the rest."""
    o = spanned([0] * 10 + [1] * 14)
    sinks = allocate.sinks(o, 4)
    parts = allocate.split(o, torch.full((1, 2), 12), sinks, apart=sinks, rounding="round")
    assert parts[0, 0].tolist() == [4 + 2, 6]
    newest = o.positions.float()
    kept = allocate.select_parts(newest, sinks, parts, o)
    assert o.positions[0, 0][kept[0, 0]].tolist() == [0, 1, 2, 3, 8, 9, *range(18, 24)]


@settings(deadline=None, max_examples=60)
@given(caches(), st.sampled_from([0.0, 0.2, 0.5, 0.8, 1.0]), st.integers(0, 9))
def test_debias_lies_between_default_and_fair(given, fair, seed):
    o, counts = given
    noise = torch.rand(o.positions.shape, generator=torch.Generator().manual_seed(seed)).masked_fill(~o.alive, -1)
    default = torch.zeros_like(o.alive)
    for b, h in torch.cartesian_prod(*map(torch.arange, counts.shape)).tolist():
        default[b, h, noise[b, h].topk(int(counts[b, h])).indices] = True
    equal, default_parts = allocate.split(o, counts, torch.zeros_like(o.alive)), allocate.tally(o, default)
    parts = allocate.split(o, counts, torch.zeros_like(o.alive), fair, default)
    assert torch.equal(parts.sum(-1), counts)
    edges = fair * equal.double().cumsum(-1) + (1 - fair) * default_parts.double().cumsum(-1)
    assert torch.equal(parts.cumsum(-1), (edges + 0.5 + 1e-9).floor().long())  # halves go to the earlier spans
    if fair == 0:
        assert torch.equal(allocate.select_parts(noise, torch.zeros_like(o.alive), parts, o), default)


@settings(deadline=None, max_examples=60)
@given(caches(), st.integers(0, 10), st.integers(0, 10), st.integers(0, 9))
def test_the_best_of_each_span_stay_and_the_protected_first(given, sinks, recent, seed):
    o, counts = given
    protected = allocate.ends(o, sinks, recent)
    if (protected.sum(-1) > counts).any():
        with pytest.raises(InputError, match=r"budget \d+ < \d+ protected tokens"):
            allocate.split(o, counts, protected)
        return
    scores = torch.randint(0, 4, o.positions.shape, generator=torch.Generator().manual_seed(seed)).float()
    parts = allocate.split(o, counts, protected)
    kept = allocate.select_parts(scores, protected, parts, o)
    assert torch.equal(allocate.tally(o, kept), parts)
    assert not (kept & ~o.alive).any()
    assert not (protected & ~kept).any()
    for b, h in torch.cartesian_prod(*map(torch.arange, counts.shape)).tolist():
        free = [i for i, p in enumerate(o.positions[b, h].tolist()) if p >= 0 and not protected[b, h, i]]
        for span in o.span_of[0].unique():
            inside = [i for i in free if o.span_of[0, o.positions[b, h, i]] == span]
            stays = [bool(kept[b, h, i]) for i in sorted(inside, key=lambda i: (scores[b, h, i].item(), i))]
            assert stays == sorted(stays)  # worst to best, older before newer: the kept ones come last


def test_only_spans_with_tokens_to_spare_give_some_to_one_that_is_protected_beyond_its_share():
    """Parts of 4, 2 and 2, of which the second span needs both of its own and the third two more."""
    o = spanned([0] * 12 + [1] * 6 + [2] * 6)
    protected = torch.isin(o.positions, torch.tensor([12, 13, 18, 19, 20, 21]))
    assert allocate.split(o, torch.full((1, 2), 8), protected)[0].tolist() == [[2, 2, 4]] * 2


def test_numbering_covers_the_prompt_or_says_where_it_does_not():
    """Header 0, defense 2 to 4, directive 5 to 7, terminator 8: Algorithm 1's extension."""
    spans = [[5, 6, 7], [2, 3, 4]]
    number = allocate.number_spans
    assert number(9, spans).tolist() == [0, 0, 0, 0, 0, 1, 1, 1, 1]
    assert number(9, spans, extended=False).tolist() == [-1, -1, 0, 0, 0, 1, 1, 1, -1]
    assert number(6, [[0, 1, 4], [2]]).tolist() == [0, 0, 1, 1, 0, 0]  # in pieces; 3 joins the one before it
    assert number(5, [[0, 1, 2], [2, 3]]).tolist() == [0, 0, 1, 1, 1]  # a shared token goes to the later
    assert number(4, [[1], [2, 3]]).tolist() == [0, 0, 1, 1]


def test_windows_show_the_end_of_every_span():
    windows, table = allocate.span_windows, torch.tensor([0] * 10 + [1] * 10 + [0] * 4)
    assert windows(table, 5).tolist() == [17, 18, 19, 22, 23]  # floor(5 / 2) for the first, which ends last
    assert windows(table, 1).tolist() == [19, 23]  # TOVA's anchors
    assert windows(torch.tensor([0] * 2 + [1] * 8), 10).tolist() == [0, 1, 5, 6, 7, 8, 9]


@pytest.mark.parametrize("extended", [True, False])
def test_fair_h2o_divides_by_the_queries_that_there_were(extended):
    """Rows of unequal length, dead slots, tokens after the prompt, which belong to its last position."""
    table = torch.tensor([[0, 0, 1, 1, 1, 0, 0, 2, 2, 2], [0, 1, 1, 0, 2, 2, 2, 2, 2, 2]])
    mass = torch.rand(2, 2, 12, generator=torch.Generator().manual_seed(0))
    o = observation(tokens=12, dead=3, span_of=table, sums={"span_mass": mass, "marked_mass": 3 * mass}, seed=1)
    o = replace(o, seen=torch.tensor([10, 8]), span_local=True)
    assert (o.positions < 0).any()
    scores, checked = cumulative.h2o(o) if extended else cumulative.h2o(o, extended=False), 0
    for b, h, i in torch.cartesian_prod(*map(torch.arange, mass.shape)).tolist():
        p = min(int(o.positions[b, h, i]), 9)
        eligible = sum(int(table[b, t] == table[b, p]) for t in range(max(p, 0), int(o.seen[b])))
        if p >= 0 and eligible:
            assert scores[b, h, i] == pytest.approx(float(mass[b, h, i]) * (1 if extended else 3) / eligible)
            checked += 1
    assert checked > 30
