"""The cone constant c* = max over unit u of min_i cos(u, r_i), bounded from both sides.

If c* > 0, it is the distance of the origin from the hull of the unit residuals, and the best u points to the hull's
nearest point (DropKV, appendix C.3, leaves the method open). If the origin lies in the hull, -c* is its distance from
the hull's boundary. This problem is not convex and hard in general, so that c* is only enclosed: `low` by ascent,
`high` by a simplex.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor

from kvrepro.chapters.dropkv_bound import hull
from kvrepro.chapters.dropkv_bound.hull import ORIGIN, TOLERANCE
from kvrepro.engine.allowed import ensure
from kvrepro.errors import InputError


@dataclass(frozen=True)
class Cone:
    """low <= c* <= high for each of `...` sets of residuals, float64.

    low: min_i cos(direction, r_i), attained. high: length of the nearest point of the hull of r_i / ||r_i|| where that
    is not the origin (then high - low is its duality gap), else minus the radius of a ball around the origin that lies
    in the hull.
    """

    low: Tensor  # [...]
    high: Tensor  # [...]
    direction: Tensor  # [..., dim], unit length


def cone(residuals: Tensor, *, steps: int = 30, backend: str = "") -> Cone:
    """Enclose c* of each set of residuals [..., tokens, dim]; residuals of length 0 lie in every cone and are left out.

    steps: most ascents where the origin lies in the hull (0: `low` is the value at the mean direction).
    backend: "exact" solves set by set on the CPU, by active sets; "batched" solves many at once on the residuals'
    device (`hull.nearest`), to the same gap, `TOLERANCE`; "" takes "exact" for tensors on the CPU, where it needs a
    third of the time, else "batched".
    """
    if residuals.ndim < 2 or not residuals.numel():
        raise InputError(f"residuals have shape {tuple(residuals.shape)}: give [..., tokens, dim], none of them empty")
    ensure(("", *SOLVERS), backend=backend)
    flat = residuals.detach().double().flatten(0, -3) if residuals.ndim > 2 else residuals.double()[None]
    solve = SOLVERS[backend or ("exact" if residuals.device.type == "cpu" else "batched")]
    shape = residuals.shape[:-2]
    return Cone(*(part.reshape((*shape, *part.shape[1:])) for part in solve(flat, steps)))


def _exact(sets: Tensor, steps: int) -> Iterator[Tensor]:
    solutions = [_exact_set(points.numpy(), steps) for points in sets.cpu()]
    return (torch.from_numpy(np.stack(part)) for part in zip(*solutions, strict=True))


def _exact_set(residuals: np.ndarray, steps: int) -> tuple:
    length = np.linalg.norm(residuals, axis=1)
    used = length > 0
    if not used.any():  # every direction fits: v_i = a for all i
        return np.float64(1.0), np.float64(1.0), np.eye(residuals.shape[1])[0]
    units = residuals[used] / length[used, None]
    part, chosen = nearest(units)
    point = part @ units[chosen]
    high = np.linalg.norm(point)
    if high > ORIGIN:
        direction = point / high
        low = (units @ direction).min()
        if low > ORIGIN or high > TOLERANCE:
            return low, high, direction
    climbed, radius = _ascend(units, steps), _ball(units[chosen], high)
    if high <= ORIGIN or (units @ climbed).min() > low:
        direction, low = climbed, (units @ climbed).min()
    return low, -radius if radius or high <= ORIGIN else high, direction


def nearest(
    points: np.ndarray, tolerance: float = TOLERANCE, start: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Nearest point to the origin in the hull of points [n, dim]: its weights > 0, which sum to 1, and the numbers of
    the points that have them. start: numbers of the points to begin with.

    As in Wolfe's algorithm, each round finds the nearest point in the hull of a few points. Points on the origin's side
    of its supporting plane join these few, points without weight leave, and the distance falls, until none lies beyond
    the plane by more than `tolerance`. The nearest point of a few is, up to scale, the minimum of
    ||sum_i w_i x_i||^2 + (sum_i w_i - 1)^2 over w >= 0, which Lawson and Hanson's active sets solve exactly.
    """
    dim = points.shape[1]
    used = np.argsort(points @ points.mean(0), kind="stable")[:dim] if start is None else start
    before = np.inf
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
        if length <= ORIGIN or not worst.size or length >= before:  # no nearer: rounding hides the rest
            return weights, used
        used, before = np.union1d(used, worst), length


def _ascend(units: np.ndarray, steps: int) -> np.ndarray:
    """A direction at a local maximum of f(u) = min_i u . x_i < 0, from the mean direction (the first x_i if it is 0).

    Each step maximises min_i w . (x_i + s u) = f(w) + s w . u for an s above -f(u); w points to the nearest point of a
    hull that the shift has moved off the origin. So f(w) >= f(u) + s (1 - w . u), never less than before.
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
    slack: distance of the weighted sum from the origin, due to rounding; it is subtracted.
    """
    corners, dim = simplex.shape
    if corners != dim + 1:
        return 0.0
    coordinates = np.linalg.inv(np.vstack([simplex.T, np.ones(corners)]))
    radius = (coordinates[:, -1] / np.linalg.norm(coordinates[:, :-1], axis=1)).min()
    return max(radius - slack, 0.0)


# ---------------------------------------------------------------- many sets at once


def _batched(sets: Tensor, steps: int) -> Iterator[Tensor]:
    size = max(1, BYTES // (8 * sets[0].numel()))
    solutions = [_batched_sets(batch, steps) for batch in sets.split(size)]
    return (torch.cat(part) for part in zip(*solutions, strict=True))


def _batched_sets(residuals: Tensor, steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """`_exact_set` for residuals [sets, tokens, dim]."""
    length = residuals.norm(dim=-1, keepdim=True)
    zero, first = length[..., 0] == 0, (length > 0).int().argmax(1, keepdim=True)
    units = residuals / length.clamp_min(1e-300)
    # the set's first residual that is not 0 stands in for those that are
    units = torch.where(zero[..., None], units.gather(1, first.expand(-1, -1, units.shape[-1])), units)
    units[zero.all(1)] = torch.eye(units.shape[-1]).to(units)[0]
    near = hull.nearest(units, units.mean(1))
    inside = ((near.low <= ORIGIN) & (near.high <= TOLERANCE)).nonzero()[:, 0]
    if len(inside):
        held = units[inside]
        direction = _ascend_many(held, steps)
        low = (held @ direction[..., None])[..., 0].amin(1)
        better = (near.high[inside] <= ORIGIN) | (low > near.low[inside])
        near.direction[inside[better]], near.low[inside[better]] = direction[better], low[better]
        radius = _depth(held, near.weights[inside])
        near.high[inside] = torch.where(radius > 0, -radius, near.high[inside])
    return near.low, near.high, near.direction


def _ascend_many(units: Tensor, steps: int) -> Tensor:
    """`_ascend` for units [sets, tokens, dim]; a set whose gain is small is not climbed any further."""
    mean = units.mean(1)
    length = mean.norm(dim=-1, keepdim=True)
    u = torch.where(length > ORIGIN, mean / length.clamp_min(1e-300), units[:, 0])
    value, left = (units @ u[..., None])[..., 0].amin(1), torch.arange(len(units), device=units.device)
    for _ in range(steps):
        climbed = units[left]
        shifted = climbed - 1.1 * value[left, None, None] * u[left, None]
        w = hull.nearest(shifted, u[left], 1e-9).direction
        gain = (climbed @ w[..., None])[..., 0].amin(1) - value[left]
        better = left[gain > 0]
        u[better], value[better] = w[gain > 0], value[better] + gain[gain > 0]
        left = left[gain > 1e-4]
        if not len(left):
            break
    return u


def _depth(units: Tensor, weights: Tensor) -> Tensor:
    """A lower bound on -c*, [sets], at least 0, from weights whose mean point m = sum_i w_i x_i is next to the origin.

    For each unit u the numbers u . x_i have the mean u . m and lie between -b and 1. Their variance is at most
    (1 - u . m)(b + u . m) (Bhatia and Davis), and at least the least eigenvalue of the points' covariance.
    """
    mean = (weights[:, None] @ units)[:, 0]
    covariance = units.mT @ (units * weights[..., None]) - mean[:, :, None] * mean[:, None]
    slack = mean.norm(dim=-1)
    return (_least_eigenvalue(covariance) / (1 + slack) - slack).clamp_min(0)


def _least_eigenvalue(matrices: Tensor) -> Tensor:
    """Least eigenvalues [sets] of positive semidefinite matrices [sets, dim, dim], from below, to 1e-7 of the least
    number on the diagonal.

    By bisection: a matrix less a smaller multiple of the identity has a Cholesky factor. A GPU factors many matrices at
    once, but computes the eigenvalues of one after the other.
    """
    diagonal = matrices.diagonal(dim1=1, dim2=2)
    low, high = torch.zeros_like(diagonal[:, 0]), diagonal.amin(1)
    for _ in range(24):
        middle = (low + high) / 2
        shifted = matrices - torch.diag_embed(middle[:, None].expand_as(diagonal))
        definite = torch.linalg.cholesky_ex(shifted).info == 0
        low, high = torch.where(definite, middle, low), torch.where(definite, high, middle)
    return low


SOLVERS = {"exact": _exact, "batched": _batched}
BYTES = 2**29  # most of residuals that are solved together; temporaries take about eight times as many
