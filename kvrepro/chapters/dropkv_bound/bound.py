"""The theory of DropKV on one query's attention: p [..., tokens] sums to 1, v [..., tokens, dim], a = sum_j p_j v_j.

`...` stands for any batch axes; everything is computed in float64. When the keys J are evicted and the rest is
renormalised, the output shifts by Delta(J) = sum_{j in J} p_j r_j / (1 - P_J), where r_j = a - v_j are the residuals
(lemma 1); F(J) = ||Delta(J)||_2. Costs: small = evict.

The cone constant is c* = max over unit u of min_i cos(u, r_i). If c* > 0, it is the distance of the origin from the
hull of the unit residuals, and the best u points to the hull's nearest point (appendix C.3 leaves the method open). If
the origin lies in the hull, -c* is its distance from the hull's boundary. This problem is not convex and hard in
general, so that c* is only enclosed: `low` by ascent, `high` by a simplex.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor

from kvrepro.chapters.dropkv_bound import hull
from kvrepro.chapters.dropkv_bound.hull import ORIGIN, TOLERANCE
from kvrepro.errors import InputError

SUBSETS = 2_000_000  # enumerations beyond this are refused


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


def pool(p: Tensor, size: float | int, window: int = 8) -> Tensor:
    """Numbers of the candidate keys L, ascending, int64 [..., size]: the lowest attention before the last `window`.

    size: a share of the keys before the window (0.95: what a budget of 5% may evict) or their number. The paper says
    "low-attention", and that the final window is left out, but not how many keys.
    """
    tokens = p.shape[-1] - window
    count = size if isinstance(size, int) else math.floor(size * tokens)
    if not 1 <= count <= tokens:
        raise InputError(f"pool of {size} among {tokens} keys before the window: ask for 1 to {tokens}, or a share")
    return smallest(p[..., :tokens], count)


def factor(c: Tensor, eps: Tensor, k: int | Tensor) -> Tensor:
    """1 / [c (1 - eps) (1 - k eps)] of theorem 1; infinite where c <= 0 or k eps >= 1."""
    bound = 1 / (c * (1 - eps) * (1 - k * eps))
    return torch.where((c > 0) & (k * eps < 1) & (eps < 1), bound, torch.inf)


# ---------------------------------------------------------------- the cone constant


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


def cone(residuals: Tensor, steps: int = 30) -> Cone:
    """Enclose c* of each set of residuals [..., tokens, dim], set by set on the CPU, many at once on a GPU (`hull`);
    residuals of length 0 lie in every cone and are left out. steps: most ascents where the origin lies in the hull (0:
    `low` is the value at the mean direction).
    """
    *shape, tokens, dim = residuals.shape
    if not residuals.numel():
        raise InputError(f"residuals have shape {tuple(residuals.shape)}: give [..., tokens, dim], none of them empty")
    sets = residuals.detach().double().reshape(-1, tokens, dim)
    if sets.device.type == "cpu":
        solutions = zip(*(_enclosed(points.numpy(), steps) for points in sets), strict=True)
        low, high, direction = (torch.from_numpy(np.stack(part)) for part in solutions)
    else:
        low, high, direction = hull.enclosed(sets, steps)
    return Cone(low.view(shape), high.view(shape), direction.view(*shape, dim))


def _enclosed(residuals: np.ndarray, steps: int) -> tuple:
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


# ---------------------------------------------------------------- the joint optimum, by enumeration


@lru_cache
def _halves(tokens: int, k: int) -> tuple[tuple[Tensor, Tensor], ...]:
    """All subsets of k out of `tokens`, as pairs of bit matrices [subsets, first half], [subsets, second half]: each
    row of the first combines with each of the second."""
    sizes = tokens // 2, tokens - tokens // 2
    first, second = (torch.tensor(list(product((1.0, 0.0), repeat=n)), dtype=torch.float64) for n in sizes)
    pairs = [(first[first.sum(1) == i], second[second.sum(1) == k - i]) for i in range(k + 1)]
    return tuple((x, y) for x, y in pairs if len(x) and len(y))


@dataclass(frozen=True)
class Optimum:
    """The set J* of least F and its value."""

    evicted: Tensor  # int64 [..., k]
    value: Tensor  # float64 [...]


def optimum(p: Tensor, r: Tensor, k: int) -> Optimum:
    """Exact minimum of F over all subsets of k keys, p [..., tokens] and r [..., tokens, dim] of the candidate keys.

    (1 - P_J)^2 F(J)^2 = s^T G s, where G is the Gram matrix of p_j r_j and s the subset's bits. Both halves of s are
    enumerated separately and combined, at about 10 operations per subset.
    """
    best = window_optimum(p[..., None, :], r[..., None, :, :], k)
    return Optimum(best.evicted, joint_cost(p, r, best.evicted))


def window_optimum(p: Tensor, r: Tensor, k: int) -> Optimum:
    """`optimum` of `window_cost`: p [..., queries, tokens], r [..., queries, tokens, dim]."""
    queries, tokens = p.shape[-2:]
    if not 0 < k <= tokens or math.comb(tokens, k) > SUBSETS:
        raise InputError(f"{k} of {tokens} keys: C({tokens}, {k}) must be between 1 and {SUBSETS} subsets")
    axes = p.shape[:-2]
    p, r = p.double().reshape(-1, queries, tokens), r.double().reshape(-1, queries, tokens, r.shape[-1])
    evicted = torch.cat([_enumerate(*batch, k) for batch in zip(p.split(16), r.split(16), strict=True)])
    return Optimum(evicted.view(*axes, k), window_cost(p, r, evicted).view(axes))


def _enumerate(p: Tensor, r: Tensor, k: int) -> Tensor:
    """Int64 [rows, k]: the keys of the best subset of each row."""
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
