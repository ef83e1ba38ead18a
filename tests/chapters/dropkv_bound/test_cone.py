"""The cone constant against closed forms and, in few dimensions, against the exact hull."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial import ConvexHull

from kvrepro.chapters.dropkv_bound import hull
from kvrepro.chapters.dropkv_bound.bound import ORIGIN, cone
from kvrepro.errors import InputError


def around(axis: np.ndarray, angle: float, count: int, seed: int = 0) -> np.ndarray:
    """Unit vectors at an exact angle to the axis, in `count` directions that balance each other."""
    rng = np.random.default_rng(seed)
    side = rng.normal(size=(count, axis.size))
    side -= np.outer(side @ axis, axis)
    side /= np.linalg.norm(side, axis=1, keepdims=True)
    side = np.concatenate([side, -side])
    return math.cos(angle) * axis + math.sin(angle) * side


@pytest.mark.parametrize("angle", [0.1, 1.0, 1.5])
def test_a_right_circular_cone_has_the_cosine_of_its_angle(angle):
    axis = np.eye(6)[2]
    points = around(axis, angle, 7)
    lengths = np.random.default_rng(1).uniform(0.1, 9, (len(points), 1))  # lengths do not matter
    enclosed = cone(torch.tensor(points * lengths))
    assert enclosed.low.item() == pytest.approx(math.cos(angle), abs=1e-7)
    assert enclosed.high.item() == pytest.approx(math.cos(angle), abs=1e-7)
    assert enclosed.low > ORIGIN
    assert torch.allclose(enclosed.direction, torch.tensor(axis), atol=1e-6)


@given(seed=st.integers(0, 10**6), dim=st.integers(2, 4), more=st.integers(0, 20), lean=st.floats(0, 1.5))
@settings(max_examples=60, deadline=None)
def test_the_enclosure_holds_the_hull_s_own_answer(seed, dim, more, lean):
    """c* > 0: low = high. Otherwise c* = minus the distance of the origin from the nearest facet lies in between."""
    rng = np.random.default_rng(seed)
    residuals = rng.normal(size=(dim + 1 + more, dim)) + lean * np.eye(dim)[0]
    units = residuals / np.linalg.norm(residuals, axis=1, keepdims=True)
    facets = -ConvexHull(units, qhull_options="QJ").equations[:, -1]
    enclosed = cone(torch.tensor(residuals))
    assert np.linalg.norm(enclosed.direction) == pytest.approx(1)
    assert (units @ enclosed.direction.numpy()).min() == pytest.approx(enclosed.low.item())  # attained
    if facets.min() > 1e-6:
        assert enclosed.low.item() - 1e-6 <= -facets.min() <= enclosed.high.item() + 1e-6
        assert enclosed.high <= ORIGIN
    elif facets.min() < -1e-6:
        assert enclosed.high.item() - enclosed.low.item() < 1e-7
        assert enclosed.low > ORIGIN


def test_batches_and_keys_at_the_output_itself():
    residuals = torch.randn(3, 2, 9, 4, generator=torch.Generator("cpu").manual_seed(0), device="cpu")
    residuals[0, 0, 5] = 0.0  # v_j = a fulfils any cone
    enclosed = cone(residuals)
    alone = cone(torch.cat([residuals[0, 0, :5], residuals[0, 0, 6:]]))
    assert enclosed.low.shape == (3, 2)
    assert enclosed.direction.shape == (3, 2, 4)
    assert enclosed.low[0, 0] == pytest.approx(alone.low.item())
    assert cone(torch.zeros(3, 4)).low.item() == 1.0


def degenerate() -> dict[str, torch.Tensor]:
    draw = torch.Generator("cpu").manual_seed(3)
    v = torch.randn(30, 6, generator=draw, dtype=torch.float64, device="cpu")
    flat = torch.cat([v[:, :3], torch.zeros_like(v[:, 3:])], 1)
    line = torch.linspace(0, 3, 9)[:, None] * v[0]
    return {
        "one key": v[:1],
        "one key, often": v[:1].expand(9, -1),
        "two opposite": torch.stack([v[0], -v[0]]),
        "collinear": line + v[0],
        "collinear, both ways": line - v[0],
        "a plane's hull holds the origin": flat,
        "p near 1": (1 - 1e-9) * v[0] + 1e-9 * v.mean(0) - v,
        "p near 0": v[0] - 1e-12 * v,
        "zeros among them": v * (torch.arange(30) % 3 > 0)[:, None],
        "next to the origin": flat + 1e-8 * v[0],
    }


@pytest.mark.parametrize("name", list(degenerate()))
def test_degenerate_sets_are_enclosed(name):
    residuals = degenerate()[name].double()
    enclosed, units = cone(residuals), torch.nn.functional.normalize(residuals[residuals.norm(dim=-1) > 0], dim=-1)
    assert enclosed.low <= enclosed.high + 1e-8
    assert (units @ enclosed.direction).min().item() == pytest.approx(enclosed.low.item(), abs=1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_an_origin_that_rounding_leaves_beside_the_hull_ends_the_search(seed):
    """The nearest point is as short as the tolerance: no column brings it nearer, yet some lie beyond its plane."""
    v = torch.from_numpy(np.random.default_rng(seed).normal(size=(40, 64)))
    r = (v.mean(0) - v).float().double()
    enclosed = cone(r, steps=2)
    assert abs(enclosed.low.item()) < 1e-6
    assert abs(enclosed.high.item()) < 1e-6


def test_nothing_to_enclose_is_refused():
    with pytest.raises(InputError, match=r"\(0, 4\)"):
        cone(torch.zeros(0, 4))


@given(seed=st.integers(0, 10**6), dim=st.integers(2, 5), sets=st.integers(1, 4), lean=st.floats(0, 1.5))
@settings(max_examples=30, deadline=None)
def test_many_sets_at_once_are_enclosed_as_one_by_one(seed, dim, sets, lean):
    rng = np.random.default_rng(seed)
    residuals = torch.tensor(rng.normal(size=(sets, dim + 9, dim)) + lean * np.eye(dim)[0])
    one_by_one, (low, high, direction) = cone(residuals), hull.enclosed(residuals, 30)
    inside = one_by_one.low < ORIGIN
    assert ((low < ORIGIN) == inside).all()
    torch.testing.assert_close(low[~inside], one_by_one.low[~inside], atol=1e-6, rtol=0)
    torch.testing.assert_close((residuals @ direction[..., None])[..., 0].amin(1) < 0, inside)
    assert (low <= one_by_one.high + 1e-6).all()
    assert (one_by_one.low <= high + 1e-6).all()
