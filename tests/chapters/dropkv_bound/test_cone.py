"""The cone constant against closed forms and, in few dimensions, against the exact hull."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial import ConvexHull

from kvrepro.chapters.dropkv_bound.cone import ORIGIN, cone, nearest
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
    found = cone(torch.tensor(points * lengths))
    assert found.low.item() == pytest.approx(math.cos(angle), abs=1e-7)
    assert found.high.item() == pytest.approx(math.cos(angle), abs=1e-7)
    assert found.low > ORIGIN
    assert torch.allclose(found.direction, torch.tensor(axis), atol=1e-6)


def test_opposite_residuals_have_no_cone():
    """In one dimension both signs give c* = -1, certified by the segment between them."""
    found = cone(torch.tensor([[2.0], [-3.0]]))
    assert (found.low.item(), found.high.item()) == pytest.approx((-1, -1))
    assert found.high <= ORIGIN
    assert found.low <= ORIGIN


def test_a_regular_simplex_is_solved_exactly():
    """Corners of a regular simplex around the origin: the best direction points at a corner's back, c* = -1 / dim."""
    for dim in (2, 3, 5):
        corners = np.linalg.svd(np.eye(dim + 1) - 1 / (dim + 1))[0][:, :dim]
        found = cone(torch.tensor(corners))
        assert found.low.item() == pytest.approx(-1 / dim)
        assert found.high.item() == pytest.approx(-1 / dim)


@given(seed=st.integers(0, 10**6), dim=st.integers(2, 4), more=st.integers(0, 20), lean=st.floats(0, 1.5))
@settings(max_examples=60, deadline=None)
def test_the_enclosure_holds_the_hull_s_own_answer(seed, dim, more, lean):
    """c* > 0: low = high. Otherwise c* = minus the distance of the origin from the nearest facet lies in between."""
    rng = np.random.default_rng(seed)
    residuals = rng.normal(size=(dim + 1 + more, dim)) + lean * np.eye(dim)[0]
    units = residuals / np.linalg.norm(residuals, axis=1, keepdims=True)
    facets = -ConvexHull(units, qhull_options="QJ").equations[:, -1]
    found = cone(torch.tensor(residuals))
    weights = found.weights.numpy()
    assert weights.min() >= 0
    assert weights.sum() == pytest.approx(1)
    assert np.linalg.norm(found.direction) == pytest.approx(1)
    assert (units @ found.direction.numpy()).min() == pytest.approx(found.low.item())  # attained
    if facets.min() > 1e-6:
        assert found.low.item() - 1e-6 <= -facets.min() <= found.high.item() + 1e-6
        assert found.high <= ORIGIN
    elif facets.min() < -1e-6:
        assert found.high.item() - found.low.item() < 1e-7
        assert np.linalg.norm(weights @ units) == pytest.approx(found.high.item())
        assert found.low > ORIGIN


def test_ascent_raises_the_lower_bound():
    residuals = torch.tensor(np.random.default_rng(3).normal(size=(200, 8)))
    started, climbed = cone(residuals, steps=0), cone(residuals)
    assert climbed.low > started.low + 0.05
    assert climbed.low <= climbed.high == started.high


def test_columns_are_generated_to_the_exact_optimum():
    """Many more points than one system takes: the supporting plane leaves none behind."""
    points = np.random.default_rng(4).normal(size=(3000, 12)) + 4 * np.eye(12)[0]
    weights, chosen = nearest(points)
    point = weights @ points[chosen]
    assert (points @ point).min() >= point @ point - 1e-7 * np.linalg.norm(point)
    assert chosen.size <= 13


def test_batches_and_keys_at_the_output_itself():
    residuals = torch.randn(3, 2, 9, 4, generator=torch.Generator("cpu").manual_seed(0), device="cpu")
    residuals[0, 0, 5] = 0.0  # v_j = a fulfils any cone
    found = cone(residuals)
    alone = cone(torch.cat([residuals[0, 0, :5], residuals[0, 0, 6:]]))
    assert found.low.shape == (3, 2)
    assert found.direction.shape == (3, 2, 4)
    assert found.weights.shape == (3, 2, 9)
    assert found.low[0, 0] == pytest.approx(alone.low.item())
    assert found.weights[0, 0, 5] == 0
    assert cone(torch.zeros(3, 4)).low.item() == 1.0


def test_nothing_to_enclose_is_refused():
    with pytest.raises(InputError, match=r"\(0, 4\)"):
        cone(torch.zeros(0, 4))
