"""The cone constant against closed forms and, in few dimensions, against the exact hull; one way against the other."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial import ConvexHull

from kvrepro.chapters.dropkv_bound.bound import ORIGIN, active_sets, cone, interior_points
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
    low, direction = cone(torch.tensor(points * lengths))
    assert low.item() == pytest.approx(math.cos(angle), abs=1e-7)
    assert low > ORIGIN
    assert torch.allclose(direction, torch.tensor(axis), atol=1e-6)


@given(seed=st.integers(0, 10**6), dim=st.integers(2, 4), more=st.integers(0, 20), lean=st.floats(0, 1.5))
@settings(max_examples=60, deadline=None)
def test_the_bound_against_the_hull_s_own_answer(seed, dim, more, lean):
    """A cone is found where there is one. Otherwise c* is minus the distance of the origin from the nearest facet."""
    rng = np.random.default_rng(seed)
    residuals = rng.normal(size=(dim + 1 + more, dim)) + lean * np.eye(dim)[0]
    units = residuals / np.linalg.norm(residuals, axis=1, keepdims=True)
    facet = (-ConvexHull(units, qhull_options="QJ").equations[:, -1]).min()
    for nearest in (active_sets, interior_points):
        low, direction = cone(torch.tensor(residuals), nearest=nearest)
        assert np.linalg.norm(direction) == pytest.approx(1)
        assert (units @ direction.numpy()).min() == pytest.approx(low.item())  # attained
        if facet > 1e-6:
            assert low.item() <= -facet + 1e-6
        elif facet < -1e-6:
            assert low.item() > ORIGIN


def test_batches_and_keys_at_the_output_itself():
    residuals = torch.randn(3, 2, 9, 4, generator=torch.Generator("cpu").manual_seed(0), device="cpu")
    residuals[0, 0, 5] = 0.0  # v_j = a fulfils any cone
    low, direction = cone(residuals)
    alone, _ = cone(torch.cat([residuals[0, 0, :5], residuals[0, 0, 6:]]))
    assert low.shape == (3, 2)
    assert direction.shape == (3, 2, 4)
    assert low[0, 0] == pytest.approx(alone.item())
    assert cone(torch.zeros(3, 4))[0].item() == 1.0


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


@pytest.mark.parametrize("nearest", [active_sets, interior_points])
@pytest.mark.parametrize("name", list(degenerate()))
def test_of_degenerate_sets_too_the_bound_is_attained(name, nearest):
    residuals = degenerate()[name].double()
    low, direction = cone(residuals, nearest=nearest)
    units = torch.nn.functional.normalize(residuals[residuals.norm(dim=-1) > 0], dim=-1)
    assert (units @ direction).min().item() == pytest.approx(low.item(), abs=1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_an_origin_that_rounding_leaves_beside_the_hull_ends_the_search(seed):
    """The nearest point is as short as the tolerance: no column brings it nearer, yet some lie beyond its plane."""
    v = torch.from_numpy(np.random.default_rng(seed).normal(size=(40, 64)))
    low, _ = cone((v.mean(0) - v).float().double(), steps=2)
    assert abs(low.item()) < 1e-6


def test_nothing_is_refused():
    with pytest.raises(InputError, match=r"\(0, 4\)"):
        cone(torch.zeros(0, 4))


@given(seed=st.integers(0, 10**6), dim=st.integers(2, 5), sets=st.integers(1, 4), lean=st.floats(0, 1.5))
@settings(max_examples=30, deadline=None)
def test_many_sets_at_once_give_what_one_by_one_gives(seed, dim, sets, lean):
    rng = np.random.default_rng(seed)
    residuals = torch.tensor(rng.normal(size=(sets, dim + 9, dim)) + lean * np.eye(dim)[0])
    one_by_one, (low, direction) = cone(residuals)[0], cone(residuals, nearest=interior_points)
    inside = one_by_one < ORIGIN
    assert ((low < ORIGIN) == inside).all()
    torch.testing.assert_close(low[~inside], one_by_one[~inside], atol=1e-6, rtol=0)
    torch.testing.assert_close((residuals @ direction[..., None])[..., 0].amin(1) < 0, inside)
