from dataclasses import replace

import torch
from observations import observation

from kvrepro.engine.places import Places


def test_layers_that_hold_the_same_tokens_compute_their_places_once():
    o = observation(dead=6)
    shared = Places(o.positions, o.query_positions)
    first, second = (replace(o, shared_places=shared, layer=n) for n in range(2))
    assert first.alive is second.alive
    assert first.places.past is second.places.past
    assert first.last(2).places is second.last(2).places
    assert torch.equal(first.last(2).places.window, o.last(2).places.window)


def test_what_is_put_in_their_place_is_seen():
    o = observation()
    o = replace(o, shared_places=Places(o.positions, o.query_positions))
    assert replace(o, keys=o.keys + 1).places is o.places
    others = {"positions": o.positions + 1, "query_positions": o.query_positions - 1, "sliding": 3, "span_local": True}
    for name, value in others.items():
        changed = replace(o, **{name: value})
        assert changed.places is not o.places
        assert getattr(changed.places, name) is value


def test_slots_that_kernels_are_given():
    at = torch.tensor([[[-1, -1, 2, 5, 7, 8, 9], [0, 2, 3, 4, 6, 8, 9]]])
    places = Places(at, torch.tensor([[8, 9]]))
    assert (places.starts.tolist(), places.present.tolist()) == ([[2, 0]], [2])
    assert places.last_seen.tolist() == [[[5, 6], [5, 6]]]
    assert places.last_before_window.tolist() == [[[4], [4]]]
    assert places.last_in_past.tolist() == [[[4, 4], [4, 4]]]
    assert places.past.sum(-1).tolist() == [[3, 5]]
    assert torch.equal(places.not_past, ~places.past)
    alike = Places(at[:, 1:].expand(-1, 3, -1), torch.tensor([[8, 9]]))  # one row of places for all heads
    assert alike.last_seen.tolist() == [[[5, 6]] * 3]


def test_what_others_derive_is_made_once():
    places, calls = Places(torch.arange(3).view(1, 1, 3), torch.zeros(1, 0, dtype=torch.long)), []
    for _ in range(2):
        assert places.noted("number", lambda: calls.append(1) or 7) == 7
    assert calls == [1]
    assert not places.window.any()
