"""The cone constant c* = max over unit u of min_i cos(u, r_i), from both sides: a value attained, one never exceeded.

For c* > 0 it is the distance of the origin from the hull of the unit residuals, and the direction is its nearest point
(DropKV, appendix C.3, leaves the method open). If the origin lies in the hull, -c* is its distance from the hull's
boundary: not convex, and hard in general, so that c* is then enclosed only: `low` by ascent, `high` by a simplex.
"""

from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor

from kvrepro.errors import InputError

ORIGIN = 1e-9  # a nearest point shorter than this is the origin, up to rounding


@dataclass(frozen=True)
class Cone:
    """low <= c* <= high for each of `...` sets of residuals, float64.

    low: min_i cos(direction, r_i), attained. high: length of the hull's point sum_i weights_i r_i / ||r_i|| where that
    is not the origin (then high - low is the duality gap of the nearest point), else minus the radius of a ball around
    the origin that lies in the hull. weights >= 0 sum to 1.
    """

    low: Tensor  # [...]
    high: Tensor  # [...]
    direction: Tensor  # [..., dim], unit length
    weights: Tensor  # [..., tokens]


def cone(residuals: Tensor, *, tolerance: float = 1e-8, steps: int = 30) -> Cone:
    """Enclose c* of each set of residuals [..., tokens, dim]; residuals of length 0 fulfil any cone and are left out.

    tolerance: duality gap at which the nearest point is taken. steps: at most so many ascents where the origin lies in
    the hull (0: `low` is the value at the mean direction).
    """
    if residuals.ndim < 2 or not residuals.numel():
        raise InputError(f"residuals have shape {tuple(residuals.shape)}: give [..., tokens, dim], none of them empty")
    sets = residuals.detach().double().cpu().flatten(0, -3) if residuals.ndim > 2 else residuals.double().cpu()[None]
    found = [_one(points.numpy(), tolerance, steps) for points in sets]
    batch = residuals.shape[:-2]
    low, high, direction, weights = (torch.from_numpy(np.stack(part)) for part in zip(*found, strict=True))
    return Cone(
        low.view(batch), high.view(batch), direction.view(*batch, -1), weights.view(*batch, residuals.shape[-2])
    )


def _one(residuals: np.ndarray, tolerance: float, steps: int) -> tuple:
    length = np.linalg.norm(residuals, axis=1)
    used = np.flatnonzero(length > 0)
    weights = np.zeros(len(residuals))
    if not used.size:  # every direction fits: v_i = a for all i
        return np.float64(1.0), np.float64(1.0), np.eye(residuals.shape[1])[0], weights
    units = residuals[used] / length[used, None]
    part, chosen = nearest(units, tolerance)
    weights[used[chosen]] = part
    point = part @ units[chosen]
    high = np.linalg.norm(point)
    if high > ORIGIN:
        direction = point / high
        return (units @ direction).min(), high, direction, weights
    direction = _ascend(units, steps)
    return (units @ direction).min(), -_ball(units[chosen], high), direction, weights


def nearest(
    points: np.ndarray, tolerance: float = 1e-8, start: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Nearest point to the origin in the hull of points [n, dim]: weights > 0 (they sum to 1) of the points `chosen`.

    As in Wolfe's algorithm, the nearest point of a few is found, points on the origin's side of its supporting plane
    join, points without weight leave, and the distance falls, until none lies beyond the plane by more than
    `tolerance`. The nearest point of a few: min ||sum_i w_i x_i||^2 + (sum_i w_i - 1)^2 over w >= 0 has its solution
    up to scale, and Lawson and Hanson's active sets solve it exactly. start: numbers of points to begin with.
    """
    dim = points.shape[1]
    used = np.argsort(points @ points.mean(0), kind="stable")[:dim] if start is None else start
    while True:
        system = np.vstack([points[used].T, np.ones(len(used))])
        weights, _ = nnls(system, np.append(np.zeros(dim), 1.0))
        weights /= weights.sum()
        used, weights = used[weights > 0], weights[weights > 0]
        point = weights @ points[used]
        length = np.linalg.norm(point)
        beyond = points @ point - length**2
        worst = np.argsort(beyond, kind="stable")[:dim]
        worst = np.setdiff1d(worst[beyond[worst] < -tolerance * length], used)
        if length <= ORIGIN or not worst.size:
            return weights, used
        used = np.union1d(used, worst)


def _ascend(units: np.ndarray, steps: int) -> np.ndarray:
    """A direction at a local maximum of f(u) = min_i u . x_i < 0, from the mean direction (the first x_i if it is 0).

    Each step maximises min_i w . (x_i + s u) = f(w) + s w . u for an s above -f(u): the nearest point of a hull that
    the shift has moved off the origin. So f(w) >= f(u) + s (1 - w . u), never less than before.
    """
    mean = units.mean(0)
    u = mean / np.linalg.norm(mean) if np.linalg.norm(mean) > ORIGIN else units[0]
    value, chosen = (units @ u).min(), np.zeros(0, dtype=int)
    for _ in range(steps):
        shifted = units - 1.1 * value * u
        lowest = np.argsort(shifted @ u, kind="stable")[: units.shape[1]]
        weights, chosen = nearest(shifted, 1e-7, start=np.union1d(lowest, chosen))
        w = weights @ shifted[chosen]
        w /= np.linalg.norm(w)
        gain = (units @ w).min() - value
        if gain > 0:
            u, value = w, value + gain
        if gain <= 1e-4:
            break
    return u


def _ball(simplex: np.ndarray, slack: float) -> float:
    """Radius of a ball around the origin inside the simplex [dim + 1, dim] that holds it; 0 for fewer corners.

    The barycentric coordinates l_j(x) = l_j(0) + g_j . x are at least 0 up to the distance l_j(0) / ||g_j||.
    `slack`: how far rounding has left the weighted sum from the origin, taken off.
    """
    corners, dim = simplex.shape
    if corners != dim + 1:
        return 0.0
    coordinates = np.linalg.inv(np.vstack([simplex.T, np.ones(corners)]))
    radius = (coordinates[:, -1] / np.linalg.norm(coordinates[:, :-1], axis=1)).min()
    return max(radius - slack, 0.0)
