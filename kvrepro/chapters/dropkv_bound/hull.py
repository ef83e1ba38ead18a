"""Nearest points to the origin in the hulls of many sets of points at once, on any device, with a certificate for each.

The problem solved is min ||u||^2 / 2 - t over x_i . u >= t; its multipliers are the nearest point's weights. It and its
dual are strictly feasible, so that a primal-dual interior-point method converges for every set. The linear systems have
dim + 1 unknowns whatever the number of points, and a batch takes as many iterations as its slowest set, about twenty.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

ORIGIN = 1e-9  # a nearest point shorter than this is the origin, up to rounding
TOLERANCE = 1e-8  # duality gap at which a nearest point is accepted
BYTES = 2**29  # most of residuals that are solved together; temporaries take about eight times as many
ITERATIONS = 60  # at most; rounding stops progress after about 25


@dataclass
class Nearest:
    """low <= distance from the hull <= high, for each of `sets`; float64.

    low: min_i direction . x_i, attained by a unit vector. high: ||sum_i weights_i x_i||; weights >= 0 sum to 1.
    """

    low: Tensor  # [sets]
    high: Tensor  # [sets]
    direction: Tensor  # [sets, dim]
    weights: Tensor  # [sets, points]


def nearest(points: Tensor, start: Tensor, tolerance: float = TOLERANCE) -> Nearest:
    """Nearest points of sets of points [sets, points, dim], float64, with high - low <= tolerance or high <= ORIGIN.

    Each round solves for the points that lie lowest along the last direction, then checks the answer on all points; the
    next round takes four times as many, the last one all. start: directions [sets, dim] for the first round.
    """
    sets, count, dim = points.shape
    low, high = points.new_zeros(2, sets)
    nearest_points = Nearest(low, high, torch.zeros_like(start), points.new_zeros(sets, count))
    left, size, reach = torch.arange(sets, device=points.device), 4 * (dim + 1), _along(points, start)
    while len(left):
        size = min(size, count)
        lowest = reach.topk(size, largest=False).indices
        candidates = points.gather(1, lowest[..., None].expand(-1, -1, dim))
        weights, direction = interior(candidates, tolerance / 10)
        reach = _along(points, direction)
        low, high = reach.amin(1), (weights[:, None] @ candidates)[:, 0].norm(dim=-1)
        nearest_points.low[left], nearest_points.high[left], nearest_points.direction[left] = low, high, direction
        nearest_points.weights[left] = torch.zeros_like(reach).scatter_(1, lowest, weights)
        again = (high - low > tolerance) & (high > ORIGIN) & (size < count)
        left, points, reach, size = left[again], points[again], reach[again], 4 * size
    return nearest_points


def interior(x: Tensor, tolerance: float) -> tuple[Tensor, Tensor]:
    """Weights [sets, points] and unit directions [sets, dim] of the nearest points of x [sets, points, dim].

    Mehrotra's predictor and corrector. y = (u, t) keeps s_i = x_i . u - t > 0 exactly. The right side of each step does
    not contain w, so the next step corrects rounding errors in u = sum_i w_i x_i and sum_i w_i = 1.
    """
    sets, count, dim = x.shape
    a = torch.cat([x, x.new_full((sets, count, 1), -1.0)], -1)
    w = x.new_full((sets, count), 1 / count)
    mean = x.mean(1)
    y = torch.cat([mean, _along(x, mean).amin(1, keepdim=True) - 0.1], 1)
    only_t = torch.zeros(dim + 1).to(x).index_fill_(0, torch.tensor(dim, device=x.device), 1.0)
    best = (w, x[:, 0] / x[:, 0].norm(dim=-1, keepdim=True).clamp_min(1e-300))
    least, most = torch.full_like(w[:, 0], -torch.inf), torch.full_like(w[:, 0], torch.inf)
    for _ in range(ITERATIONS):
        s, length, share = _along(a, y), y[:, :-1].norm(dim=-1), w / w.sum(1, keepdim=True)
        low = torch.where(length > 0, (s.amin(1) + y[:, -1]) / length, -torch.inf)
        high = (share[:, None] @ x)[:, 0].norm(dim=-1)
        best = (
            torch.where((high < most)[:, None], share, best[0]),
            torch.where((low > least)[:, None], y[:, :-1] / length[:, None], best[1]),
        )
        least, most = torch.maximum(low, least), torch.minimum(high, most)
        mu = (w * s).mean(1, keepdim=True)
        open_ = (most - least > tolerance) & (most > ORIGIN) & (mu[:, 0] > 1e-20)
        if not open_.any():
            break
        step_w, step_y = _step(a, w, s, mu, y - only_t * (y + 1), only_t)
        w, y = torch.where(open_[:, None], w + step_w, w), torch.where(open_[:, None], y + step_y, y)
    return best


def _step(a: Tensor, w: Tensor, s: Tensor, mu: Tensor, gradient: Tensor, only_t: Tensor) -> tuple[Tensor, Tensor]:
    """The steps of w and y. gradient: of ||u||^2 / 2 - t."""
    weight = w / s
    system = a.mT @ (a * weight[..., None]) + torch.diag(1 - only_t)
    root = torch.linalg.cholesky_ex(system).L

    def newton(target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Steps of w, y and s towards w_i s_i = target_i s_i."""
        z = torch.cholesky_solve((a.mT @ target[..., None]) - gradient[..., None], root)
        ds = (a @ z)[..., 0]
        return target - w - weight * ds, z[..., 0], ds

    dw, _, ds = newton(torch.zeros_like(w))
    reach = torch.minimum(_largest_step(w, dw), _largest_step(s, ds)).clamp(max=1)
    aim = mu * (((w + reach * dw) * (s + reach * ds)).mean(1, keepdim=True) / mu) ** 3
    dw, dy, ds = newton((aim - ds * dw) / s)
    reach = (0.995 * torch.minimum(_largest_step(w, dw), _largest_step(s, ds))).clamp(max=1)
    return reach * dw, reach * dy


def _largest_step(value: Tensor, change: Tensor) -> Tensor:
    """The largest multiple of the change that leaves every value at least 0, [sets, 1]."""
    return torch.where(change < 0, -value / change, torch.inf).amin(1, keepdim=True)


def _along(points: Tensor, direction: Tensor) -> Tensor:
    return (points @ direction[..., None])[..., 0]


# ---- cone constants of many sets


def enclosed(sets: Tensor, steps: int) -> tuple[Tensor, ...]:
    """What `bound.cone` says of residuals [sets, tokens, dim]: low, high, direction."""
    size = max(1, BYTES // (8 * sets[0].numel()))
    solutions = [_enclosed(batch, steps) for batch in sets.split(size)]
    return tuple(torch.cat(part) for part in zip(*solutions, strict=True))


def _enclosed(residuals: Tensor, steps: int) -> tuple[Tensor, Tensor, Tensor]:
    length = residuals.norm(dim=-1, keepdim=True)
    zero, first = length[..., 0] == 0, (length > 0).int().argmax(1, keepdim=True)
    units = residuals / length.clamp_min(1e-300)
    # the set's first residual that is not 0 stands in for those that are
    units = torch.where(zero[..., None], units.gather(1, first.expand(-1, -1, units.shape[-1])), units)
    units[zero.all(1)] = torch.eye(units.shape[-1]).to(units)[0]
    near = nearest(units, units.mean(1))
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
    """`bound._ascend` for units [sets, tokens, dim]; a set whose gain is small is not climbed any further."""
    mean = units.mean(1)
    length = mean.norm(dim=-1, keepdim=True)
    u = torch.where(length > ORIGIN, mean / length.clamp_min(1e-300), units[:, 0])
    value, left = (units @ u[..., None])[..., 0].amin(1), torch.arange(len(units), device=units.device)
    for _ in range(steps):
        climbed = units[left]
        shifted = climbed - 1.1 * value[left, None, None] * u[left, None]
        w = nearest(shifted, u[left], 1e-9).direction
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
