"""The cone constant against closed forms, an active-set solver and, in few dimensions, the exact hull."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import nnls
from scipy.spatial import ConvexHull

from kvrepro.chapters.dropkv_bound.bound import ORIGIN, cone


def nearest(residuals: np.ndarray) -> float:
    """Distance of the origin from the hull of the unit residuals, by Lawson and Hanson's active sets: up to scale, the
    nearest point is the minimum of ||sum_i w_i x_i||^2 + (sum_i w_i - 1)^2 over w >= 0."""
    lengths = np.linalg.norm(residuals, axis=1)
    units = residuals[lengths > 0] / lengths[lengths > 0, None]
    weights, _ = nnls(np.vstack([units.T, np.ones(len(units))]), np.eye(units.shape[1] + 1)[-1])
    return float(np.linalg.norm(weights @ units) / weights.sum())


@pytest.mark.parametrize("angle", [0.1, 1.0, 1.5])
def test_a_right_circular_cone_has_the_cosine_of_its_angle(angle):
    axis, rng = np.eye(6)[2], np.random.default_rng(1)
    side = rng.normal(size=(7, 6)) * (1 - axis)
    side /= np.linalg.norm(side, axis=1, keepdims=True)
    points = math.cos(angle) * axis + math.sin(angle) * np.concatenate([side, -side])
    lengths = rng.uniform(0.1, 9, (len(points), 1))  # lengths do not matter
    assert cone(torch.tensor(points * lengths)).item() == pytest.approx(math.cos(angle), abs=1e-9)


@given(seed=st.integers(0, 10**6), dim=st.integers(2, 4), more=st.integers(0, 20), lean=st.floats(0, 1.5))
@settings(max_examples=60, deadline=None)
def test_the_bound_against_the_hull_s_own_answer(seed, dim, more, lean):
    """A cone is found where there is one. Otherwise c* is minus the distance of the origin from the nearest facet."""
    residuals = np.random.default_rng(seed).normal(size=(dim + 1 + more, dim)) + lean * np.eye(dim)[0]
    units = residuals / np.linalg.norm(residuals, axis=1, keepdims=True)
    facet = (-ConvexHull(units, qhull_options="QJ").equations[:, -1]).min()
    low = cone(torch.tensor(residuals)).item()
    if facet > 1e-6:
        assert low <= -facet + 1e-6
    elif facet < -1e-6:
        assert low == pytest.approx(nearest(residuals), abs=1e-8)


@given(seed=st.integers(0, 10**6), dim=st.integers(2, 64), sets=st.integers(1, 4), lean=st.floats(0, 1.5))
@settings(max_examples=30, deadline=None)
def test_many_sets_at_once_give_what_one_by_one_gives(seed, dim, sets, lean):
    residuals = np.random.default_rng(seed).normal(size=(sets, dim + 9, dim)) + lean * np.eye(dim)[0]
    exact, low = np.array([nearest(one) for one in residuals]), cone(torch.tensor(residuals)).numpy()
    assert ((low > ORIGIN) == (exact > ORIGIN)).all()
    assert low[low > ORIGIN] == pytest.approx(exact[low > ORIGIN], abs=1e-8)


def test_batches_and_keys_at_the_output_itself():
    residuals = torch.from_numpy(np.random.default_rng(0).normal(size=(3, 2, 9, 4)) + 3)
    residuals[0, 0, 5] = 0.0  # v_j = a fulfils any cone
    low = cone(residuals)
    assert low.shape == (3, 2)
    assert low[0, 0].item() == pytest.approx(nearest(residuals[0, 0].numpy()))
    assert low[0, 0] > 0.1
    assert cone(torch.zeros(3, 4)).item() == 1.0


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
def test_of_degenerate_sets_too_the_constant_is_found(name):
    residuals = degenerate()[name]
    low, exact = cone(residuals).item(), nearest(residuals.numpy())
    assert low == pytest.approx(exact, abs=1e-7) if exact > 1e-6 else -1 - 1e-12 <= low <= 1e-6


@pytest.mark.parametrize("seed", range(4))
def test_an_origin_that_rounding_leaves_beside_the_hull_ends_the_search(seed):
    """The nearest point is as short as the tolerance: no column brings it nearer, yet some lie beyond its plane."""
    v = torch.from_numpy(np.random.default_rng(seed).normal(size=(40, 64)))
    assert cone((v.mean(0) - v).float().double()).item() < 1e-6
