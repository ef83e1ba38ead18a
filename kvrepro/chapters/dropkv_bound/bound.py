"""The theory of DropKV on one query's attention: p [..., tokens] sums to 1, v [..., tokens, dim], a = sum_j p_j v_j.

`...` stands for any batch axes; everything is computed in float64. When the keys J are evicted and the rest is
renormalised, the output shifts by Delta(J) = sum_{j in J} p_j r_j / (1 - P_J), where r_j = a - v_j are the residuals
(lemma 1); F(J) = ||Delta(J)||_2. Costs: small = evict.

The cone constant is c* = max over unit u of min_i cos(u, r_i). If c* > 0, it is the distance of the origin from the
hull of the unit residuals, and the best u points to the hull's nearest point (appendix C.3 leaves the method open). If
the origin lies in the hull, this problem is not convex and hard in general: an ascent gives a local maximum.
"""

import math
from collections.abc import Callable
from functools import lru_cache
from itertools import product

import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor

from kvrepro.errors import InputError

ORIGIN = 1e-9  # a nearest point shorter than this is the origin, up to rounding
TOLERANCE = 1e-8  # duality gap at which a nearest point is accepted
BYTES = 2**29  # most of residuals that are solved together; temporaries take about eight times as many
ITERATIONS = 60  # of the interior point, at most; rounding stops progress after about 25


# ---------------------------------------------------------------- lemma 1


def single_cost(p: Tensor, r: Tensor) -> Tensor:
    """||Delta({j})|| = p_j / (1 - p_j) ||r_j|| of each key alone, float64 [..., tokens]."""
    p = p.double()
    return p / (1 - p) * r.double().norm(dim=-1)


def joint_cost(p: Tensor, r: Tensor, evicted: Tensor) -> Tensor:
    """F(J) of key numbers `evicted` [..., k], float64 [...]; p and r may be those of a pool, for several J at once."""
    sets = evicted.shape[:-1]
    p = p.double().expand(*sets, -1).gather(-1, evicted)
    r = r.double().expand(*sets, -1, -1).gather(-2, evicted[..., None].expand(*evicted.shape, r.shape[-1]))
    return (p[..., None, :] @ r)[..., 0, :].norm(dim=-1) / (1 - p.sum(-1))


def window_cost(p: Tensor, r: Tensor, evicted: Tensor) -> Tensor:
    """sqrt(sum_t F_t(J)^2) over queries: p [..., queries, tokens], r [..., queries, tokens, dim]; float64 [...]."""
    every = evicted[..., None, :].expand(*evicted.shape[:-1], p.shape[-2], -1)
    return joint_cost(p, r, every).square().sum(-1).sqrt()


def smallest(cost: Tensor, k: int) -> Tensor:
    """Numbers of the k keys of least cost, ascending; of equal costs the first. Int64 [..., k]."""
    return cost.argsort(dim=-1, stable=True)[..., :k].sort(-1).values


# ---------------------------------------------------------------- assumptions, theorem 1


def keys_in_pool(size: float | int, keys: int, least: int = 1) -> int:
    """How many of `keys` a pool takes. Raises InputError for less than `least`, or more than there are."""
    count = size if isinstance(size, int) else math.floor(size * keys)
    if not least <= count <= keys:
        wanted = f"pool of {size} among {keys} keys before the window: {least} to {keys} are possible"
        raise InputError(f"{wanted}, take longer prompts or another pool")
    return count


def pool(p: Tensor, size: float | int, window: int = 8) -> Tensor:
    """Numbers of the candidate keys L, ascending, int64 [..., size]: the lowest attention before the last `window`.

    size: a share of the keys before the window (0.95: what a budget of 5% may evict) or their number. The paper says
    "low-attention", and that the final window is left out, but not how many keys.
    """
    tokens = p.shape[-1] - window
    return smallest(p[..., :tokens], keys_in_pool(size, tokens))


def factor(c: Tensor, eps: Tensor, k: int | Tensor) -> Tensor:
    """1 / [c (1 - eps) (1 - k eps)] of theorem 1; infinite where c <= 0 or k eps >= 1."""
    bound = 1 / (c * (1 - eps) * (1 - k * eps))
    return torch.where((c > 0) & (k * eps < 1) & (eps < 1), bound, torch.inf)


# ---------------------------------------------------------------- the cone constant

# points [sets, points, dim], where to look first [sets, dim], tolerance -> nearest points of the hulls to the origin:
# unit directions u [sets, dim], min_i u . x_i and the points' lengths [sets], of which the last is at least as large
Nearest = Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor, Tensor]]


def cone(residuals: Tensor, steps: int = 30, nearest: Nearest | None = None) -> tuple[Tensor, Tensor]:
    """A lower bound on c*, float64 [...], of each set of residuals [..., tokens, dim], and the direction [..., dim], of
    length 1, that attains it. Where c* > 0, it is c* up to `TOLERANCE`.

    Residuals of length 0 lie in every cone and do not count. steps: most ascents where the origin lies in the hull (0:
    the value at the mean direction). nearest: `active_sets`, the usual on a CPU, or `interior_points`.
    """
    *shape, tokens, dim = residuals.shape
    if not residuals.numel():
        raise InputError(f"residuals have shape {tuple(residuals.shape)}: give [..., tokens, dim], none of them empty")
    sets = residuals.detach().double().reshape(-1, tokens, dim)
    nearest = nearest or (active_sets if sets.device.type == "cpu" else interior_points)
    solved = [_cone(batch, steps, nearest) for batch in sets.split(max(1, BYTES // (8 * tokens * dim)))]
    low, direction = (torch.cat(part) for part in zip(*solved, strict=True))
    return low.view(shape), direction.view(*shape, dim)


def _cone(residuals: Tensor, steps: int, nearest: Nearest) -> tuple[Tensor, Tensor]:
    length = residuals.norm(dim=-1, keepdim=True)
    zero, first = length == 0, (length > 0).int().argmax(1, keepdim=True)
    units = residuals / length.clamp_min(1e-300)
    # the set's first residual that is not 0 stands in for those that are
    units = torch.where(zero, units.gather(1, first.expand(-1, -1, units.shape[-1])), units)
    units[zero.all(1)[:, 0]] = torch.eye(units.shape[-1]).to(units)[0]  # every direction fits: v_i = a for all i
    direction, low, high = nearest(units, units.mean(1), TOLERANCE)
    inside = (low <= ORIGIN) & (high <= TOLERANCE)
    if inside.any():
        climbed, value = _ascend(units[inside], steps, nearest)
        better = (high[inside] <= ORIGIN) | (value > low[inside])
        direction[inside] = torch.where(better[:, None], climbed, direction[inside])
        low[inside] = torch.where(better, value, low[inside])
    return low, direction


def _ascend(units: Tensor, steps: int, nearest: Nearest) -> tuple[Tensor, Tensor]:
    """Directions at local maxima of f(u) = min_i u . x_i < 0, from the mean direction (the first x_i if it is 0), and
    the maxima.

    Each step maximises min_i w . (x_i + s u) = f(w) + s w . u for an s above -f(u); w points to the nearest point of a
    hull that the shift has moved off the origin. So f(w) >= f(u) + s (1 - w . u), never less than before.
    """
    mean = units.mean(1)
    length = mean.norm(dim=-1, keepdim=True)
    u = torch.where(length > ORIGIN, mean / length.clamp_min(1e-300), units[:, 0])
    value, left = _along(units, u).amin(1), torch.arange(len(units), device=units.device)
    for _ in range(steps):
        shifted = units[left] - 1.1 * value[left, None, None] * u[left, None]
        w, _, _ = nearest(shifted, u[left], 1e-7)
        gain = _along(units[left], w).amin(1) - value[left]
        better = left[gain > 0]
        u[better], value[better] = w[gain > 0], value[better] + gain[gain > 0]
        left = left[gain > 1e-4]
        if not len(left):
            break
    return u, value


def _along(points: Tensor, direction: Tensor) -> Tensor:
    return (points @ direction[..., None])[..., 0]


def active_sets(points: Tensor, start: Tensor, tolerance: float) -> tuple[Tensor, Tensor, Tensor]:
    """`Nearest` on the CPU, set by set."""
    found = [_active_set(x.numpy(), u.numpy(), tolerance) for x, u in zip(points, start, strict=True)]
    point = torch.from_numpy(np.stack(found))
    length = point.norm(dim=-1)
    direction = point / length.clamp_min(1e-300)[:, None]
    return direction, _along(points, direction).amin(1), length


def _active_set(points: np.ndarray, start: np.ndarray, tolerance: float) -> np.ndarray:
    """Nearest point to the origin in the hull of points [n, dim].

    As in Wolfe's algorithm, each round finds the nearest point in the hull of a few points. Points on the origin's side
    of its supporting plane join these few, points without weight leave, and the distance falls, until none lies beyond
    the plane by more than `tolerance`. The nearest point of a few is, up to scale, the minimum of
    ||sum_i w_i x_i||^2 + (sum_i w_i - 1)^2 over w >= 0, which Lawson and Hanson's active sets solve exactly.
    """
    dim, before = points.shape[1], np.inf
    used = np.argsort(points @ start, kind="stable")[:dim]
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
            return point
        used, before = np.union1d(used, worst), length


def interior_points(points: Tensor, start: Tensor, tolerance: float) -> tuple[Tensor, Tensor, Tensor]:
    """`Nearest` of many sets at once, on any device, by Mehrotra's predictor and corrector; `start` is not needed.

    The problem solved is min ||u||^2 / 2 - t over x_i . u >= t; its multipliers w are the nearest point's weights. It
    and its dual are strictly feasible, so that this converges for every set. y = (u, t) keeps s_i = x_i . u - t > 0
    exactly. The right side of each step does not contain w, so the next step corrects rounding errors in
    u = sum_i w_i x_i and sum_i w_i = 1. The linear systems have dim + 1 unknowns whatever the number of points, and a
    batch takes as many iterations as its slowest set, about twenty.
    """
    sets, count, dim = points.shape
    a = torch.cat([points, points.new_full((sets, count, 1), -1.0)], -1)
    w, mean = points.new_full((sets, count), 1 / count), points.mean(1)
    y = torch.cat([mean, _along(points, mean).amin(1, keepdim=True) - 0.1], 1)
    only_t = torch.zeros(dim + 1).to(points).index_fill_(0, torch.tensor(dim, device=points.device), 1.0)
    direction = points[:, 0] / points[:, 0].norm(dim=-1, keepdim=True).clamp_min(1e-300)
    low, high = torch.full_like(w[:, 0], -torch.inf), torch.full_like(w[:, 0], torch.inf)
    for _ in range(ITERATIONS):
        s, length, share = _along(a, y), y[:, :-1].norm(dim=-1), w / w.sum(1, keepdim=True)
        lowest = torch.where(length > 0, (s.amin(1) + y[:, -1]) / length, -torch.inf)
        direction = torch.where((lowest > low)[:, None], y[:, :-1] / length[:, None], direction)
        low = torch.maximum(low, lowest)
        high = torch.minimum(high, (share[:, None] @ points)[:, 0].norm(dim=-1))
        mu = (w * s).mean(1, keepdim=True)
        open_ = (high - low > tolerance / 100) & (high > ORIGIN) & (mu[:, 0] > 1e-20)
        if not open_.any():
            break
        step_w, step_y = _step(a, w, s, mu, y - only_t * (y + 1), only_t)
        w, y = torch.where(open_[:, None], w + step_w, w), torch.where(open_[:, None], y + step_y, y)
    return direction, _along(points, direction).amin(1), high


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


# ---------------------------------------------------------------- the joint optimum, by enumeration


@lru_cache
def _halves(tokens: int, k: int) -> tuple[tuple[Tensor, Tensor], ...]:
    """All subsets of k out of `tokens`, as pairs of bit matrices [subsets, first half], [subsets, second half]: each
    row of the first combines with each of the second."""
    sizes = tokens // 2, tokens - tokens // 2
    first, second = (torch.tensor(list(product((1.0, 0.0), repeat=n)), dtype=torch.float64) for n in sizes)
    pairs = [(first[first.sum(1) == i], second[second.sum(1) == k - i]) for i in range(k + 1)]
    return tuple((x, y) for x, y in pairs if len(x) and len(y))


def optimum(p: Tensor, r: Tensor, k: int) -> Tensor:
    """The set of least `window_cost` among all subsets of k keys, int64 [..., k]: p [..., queries, tokens] and
    r [..., queries, tokens, dim] of the candidate keys, about twenty."""
    queries, tokens = p.shape[-2:]
    every_p, every_r = p.double().reshape(-1, queries, tokens), r.double().reshape(-1, queries, tokens, r.shape[-1])
    batches = zip(every_p.split(16), every_r.split(16), strict=True)
    return torch.cat([_enumerate(*batch, k) for batch in batches]).view(*p.shape[:-2], k)


def _enumerate(p: Tensor, r: Tensor, k: int) -> Tensor:
    """Int64 [rows, k]: the keys of the best subset of each row.

    (1 - P_J)^2 F(J)^2 = s^T G s, where G is the Gram matrix of p_j r_j and s the subset's bits. Both halves of s are
    enumerated separately and combined, at about 10 operations per subset.
    """
    moved = p[..., None] * r
    gram = moved @ moved.mT  # [rows, queries, tokens, tokens]
    half = p.shape[-1] // 2
    best, bits = torch.full_like(p[:, 0, 0], torch.inf), torch.zeros_like(p[:, 0])
    for x, y in _halves(p.shape[-1], k):
        x, y = x.to(p), y.to(p)
        total = p.new_zeros(len(p), len(x), len(y))
        for g, weight in zip(gram.unbind(1), p.unbind(1), strict=True):
            first, second = (((z @ part) * z).sum(-1) for z, part in ((x, g[:, :half, :half]), (y, g[:, half:, half:])))
            square = 2 * (x @ g[:, :half, half:]) @ y.T  # [rows, subsets of the first half, of the second]
            square.add_(first[:, :, None]).add_(second[:, None, :])
            left = (1 - weight[:, :half] @ x.T)[:, :, None] - (weight[:, half:] @ y.T)[:, None, :]
            total.add_(square.div_(left.square_()))
        value, where = total.flatten(1).min(1)
        chosen = torch.cat([x[where // len(y)], y[where % len(y)]], 1)
        bits = torch.where((value < best)[:, None], chosen, bits)
        best = torch.minimum(best, value)
    return bits.nonzero()[:, 1].view(-1, k)
