"""Guards of the general engine: which tokens they protect, on caches with dead slots and gaps."""

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from observations import observation

from kvrepro.engine import guard

caches = st.builds(
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
@given(caches, st.integers(0, 25))
def test_sinks_and_recent_are_the_ends_of_what_is_held(o, n):
    assert protected(o, guard.sinks(o, n)) == [[head[:n] for head in row] for row in held(o)]
    assert protected(o, guard.recent(o, n)) == [
        [head[len(head) - min(n, len(head)) :] for head in row] for row in held(o)
    ]


@settings(deadline=None, max_examples=40)
@given(caches, st.integers(0, 12), st.integers(0, 12))
def test_ends_are_sinks_and_recent(o, prefix, suffix):
    assert torch.equal(guard.ends(o, prefix, suffix), guard.sinks(o, prefix) | guard.recent(o, suffix))


def test_a_static_suffix_stays_at_the_prompts_end():
    o = observation(batch=1, tokens=20)  # 16 tokens of prompt, 4 generated
    assert protected(o, guard.ends(o, 2, 3, static_prompt_end=16)) == [[[0, 1, 13, 14, 15]] * 2]
    assert protected(o, guard.ends(o, 2, 3)) == [[[0, 1, 17, 18, 19]] * 2]


def test_rows_may_protect_different_numbers():
    o = observation(batch=2, tokens=10)
    assert guard.sinks(o, torch.tensor([0, 3])).sum(-1).tolist() == [[0, 0], [3, 3]]
    ends = guard.ends(o, 0, torch.tensor([1, 2]), static_prompt_end=torch.tensor([4, 6]))
    assert protected(o, ends) == [[[3]] * 2, [[4, 5]] * 2]


@settings(deadline=None, max_examples=40)
@given(caches, st.data())
def test_whitelist_protects_the_marked_positions_that_are_held(o, data):
    seen = data.draw(st.integers(1, int(o.seen.max())))  # the table may end before the newest token
    table = torch.tensor([[data.draw(st.booleans()) for _ in range(seen)] for _ in range(len(o.positions))])
    wanted = [[[p for p in head if p < seen and table[b, p]] for head in row] for b, row in enumerate(held(o))]
    assert protected(o, guard.whitelist(o, table)) == wanted


def test_the_window_is_found_wherever_its_queries_stand():
    spans = torch.tensor([[0] * 5 + [1] * 7])
    where = torch.tensor([[-1, 0, 4, 11]])
    o = observation(batch=1, tokens=12, window=4, query_positions=where, span_local=True, span_of=spans)
    assert protected(o, o.window) == [[[0, 4, 11]] * 2]
    assert not replace(o, query_positions=torch.full((1, 4), -1)).window.any()


def test_the_guarded_share_is_rounded_down_unless_asked_otherwise():
    assert guard.protected_count(0, 256) == 0
    assert guard.protected_count(0.01, 256) == 4  # four at least
    assert (guard.protected_count(0.1, 256), guard.protected_count(0.1, 256, "ceil")) == (25, 26)
    assert guard.protected_count(0.1, 70, "ceil") == 7  # a product of 7.000000000000001
    assert guard.protected_count(1, 256) == 256
