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
