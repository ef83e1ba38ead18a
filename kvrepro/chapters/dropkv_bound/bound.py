"""The theory of DropKV on one query's attention: p [..., tokens] sums to 1, v [..., tokens, dim], a = sum_j p_j v_j.

`...` stands for any batch axes, all numbers are float64, and a set of keys is a mask, bool [..., tokens]. When the keys
J are evicted and the rest is renormalised, the output shifts by Delta(J) = sum_{j in J} p_j r_j / (1 - P_J), where
r_j = a - v_j are the residuals (lemma 1); F(J) = ||Delta(J)||_2. Costs: small = evict.

The cone constant is c* = max over unit u of min_i cos(u, r_i). If c* > 0, it is the distance of the origin from the
hull of the unit residuals, and the best u points to the hull's nearest point (appendix C.3 leaves the method open). If
the origin lies in the hull, this problem is not convex and hard in general.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from kvrepro.errors import InputError

ORIGIN = 1e-9  # a nearest point shorter than this is the origin, up to rounding
GAP = 1e-11  # between primal and dual value, at which a nearest point is accepted
BYTES = 2**29  # most of residuals that are solved together; temporaries take about eight times as many
ITERATIONS = 60  # of the interior point, at most; rounding stops progress after about 25


# ---------------------------------------------------------------- lemma 1


def single_cost(p: Tensor, r: Tensor) -> Tensor:
    """||Delta({j})|| = p_j / (1 - p_j) ||r_j|| of each key alone, [..., tokens]."""
    return p / (1 - p) * r.norm(dim=-1)


def cost(p: Tensor, r: Tensor, evicted: Tensor) -> Tensor:
    """sqrt(sum_t F_t(J)^2) over queries, [...]: p [..., queries, tokens], r [..., queries, tokens, dim], J `evicted`
    [..., tokens]. All may be those of a pool, for several J at once."""
    gone = p * evicted[..., None, :]
    return ((gone[..., None, :] @ r)[..., 0, :].norm(dim=-1) / (1 - gone.sum(-1))).norm(dim=-1)


def lowest(cost: Tensor, k: int) -> Tensor:
    """The k keys of least cost; of equal costs the first."""
    return cost.argsort(dim=-1, stable=True).argsort(dim=-1) < k


# ---------------------------------------------------------------- assumptions, theorem 1


def keys_in_pool(size: float | int, keys: int, least: int = 1) -> int:
    """How many of `keys` a pool takes. Raises InputError for less than `least`, or more than there are."""
    count = size if isinstance(size, int) else math.floor(size * keys)
    if not least <= count <= keys:
        wanted = f"pool of {size} among {keys} keys before the window: {least} to {keys} are possible"
        raise InputError(f"{wanted}, take longer prompts or another pool")
    return count


def pool(p: Tensor, size: float | int, window: int = 8) -> Tensor:
    """The candidate keys L: those of lowest attention before the last `window`.

    size: a share of the keys before the window (0.95: what a budget of 5% may evict) or their number. The paper says
    "low-attention", and that the final window is left out, but not how many keys.
    """
    before = p[..., : p.shape[-1] - window]
    return F.pad(lowest(before, keys_in_pool(size, before.shape[-1])), (0, window))


def factor(c: Tensor, eps: Tensor, k: int) -> Tensor:
    """1 / [c (1 - eps) (1 - k eps)] of theorem 1; infinite where c <= 0 or k eps >= 1."""
    bound = 1 / (c * (1 - eps) * (1 - k * eps))
    return torch.where((c > 0) & (k * eps < 1) & (eps < 1), bound, torch.inf)


# ---------------------------------------------------------------- the cone constant


def cone(residuals: Tensor) -> Tensor:
    """The cone constant [...] of each set of residuals [..., tokens, dim]; those of length 0 lie in every cone and do
    not count. Where it is not positive, the largest min_i cos(u, r_i) of the directions u that the search met, which it
    is at least."""
    *shape, tokens, dim = residuals.shape
    batches = residuals.reshape(-1, tokens, dim).split(max(1, BYTES // (8 * tokens * dim)))
    return torch.cat([_cone(batch) for batch in batches]).view(shape)


def _cone(residuals: Tensor) -> Tensor:
    """Of many sets at once [sets, tokens, dim], on any device, by Mehrotra's predictor and corrector.

    The problem solved is min ||u||^2 / 2 - t over x_i . u >= t for the unit residuals x; its multipliers w are the
    nearest point's weights. It and its dual are strictly feasible, so that this converges for every set. y = (u, t)
    keeps s_i = x_i . u - t > 0 exactly. The right side of each step does not contain w, so the next step corrects
    rounding errors in u = sum_i w_i x_i and sum_i w_i = 1. The linear systems have dim + 1 unknowns whatever the number
    of points, and a batch takes as many iterations as its slowest set, about twenty.
    """
    long = residuals.norm(dim=-1) > 0
    first = long.int().argmax(1)[:, None, None].expand(-1, -1, residuals.shape[-1])
    # the set's first residual that is not 0 stands in for those that are
    x = F.normalize(torch.where(long[..., None], residuals, residuals.gather(1, first)), dim=-1, eps=1e-300)
    a = torch.cat([x, torch.full_like(x[..., :1], -1.0)], -1)
    w = torch.full_like(x[..., 0], 1 / x.shape[1])
    y = torch.cat([x.mean(1), _along(x, x.mean(1)).amin(1, keepdim=True) - 0.1], 1)
    low, high = _along(x, x[:, 0]).amin(1), torch.full_like(w[:, 0], torch.inf)
    for _ in range(ITERATIONS):
        s, length = _along(a, y), y[:, :-1].norm(dim=-1)
        low = torch.maximum(low, torch.where(length > 0, (s.amin(1) + y[:, -1]) / length, -1.0))
        high = torch.minimum(high, (w[:, None] @ x)[:, 0].norm(dim=-1) / w.sum(1))
        mu = (w * s).mean(1, keepdim=True)
        open_ = ((high - low > GAP) & (high > ORIGIN))[:, None] & (mu > 1e-20)
        if not open_.any():
            break
        step_w, step_y = _step(a, w, s, mu, y)
        w, y = torch.where(open_, w + step_w, w), torch.where(open_, y + step_y, y)
    return low.where(long.any(1), 1.0)  # every direction fits where v_i = a for all i


def _along(points: Tensor, direction: Tensor) -> Tensor:
    return (points @ direction[..., None])[..., 0]


def _step(a: Tensor, w: Tensor, s: Tensor, mu: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The steps of w and y."""
    weight, of_u = w / s, torch.ones_like(y[0])
    of_u[-1] = 0
    gradient = y * of_u + of_u - 1  # of ||u||^2 / 2 - t
    root = torch.linalg.cholesky_ex(a.mT @ (a * weight[..., None]) + of_u.diag()).L

    def newton(target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Steps of w, y and s towards w_i s_i = target_i s_i."""
        dy = torch.cholesky_solve((_along(a.mT, target) - gradient)[..., None], root)[..., 0]
        ds = _along(a, dy)
        return target - w - weight * ds, dy, ds

    def reach(dw: Tensor, ds: Tensor) -> Tensor:
        """The largest multiple of the steps that leaves every w and s at least 0, [sets, 1]."""
        w_and_s, change = torch.cat([w, s], 1), torch.cat([dw, ds], 1)
        return torch.where(change < 0, -w_and_s / change, torch.inf).amin(1, keepdim=True)

    dw, _, ds = newton(torch.zeros_like(w))
    far = reach(dw, ds).clamp(max=1)
    aim = mu * (((w + far * dw) * (s + far * ds)).mean(1, keepdim=True) / mu) ** 3
    dw, dy, ds = newton((aim - far * ds * dw) / s)  # corrected in full, some sets would go round in circles
    far = (0.995 * reach(dw, ds)).clamp(max=1)
    return far * dw, far * dy


# ---------------------------------------------------------------- the joint optimum, by enumeration


def optimum(p: Tensor, r: Tensor, k: int) -> Tensor:
    """The set of least `cost` among all subsets of k keys, [..., tokens]: p [..., queries, tokens] and
    r [..., queries, tokens, dim] of the candidate keys, about twenty.

    (1 - P_J)^2 F(J)^2 = s^T G s, where G is the Gram matrix of p_j r_j and s the subset's bits. Both halves of s are
    enumerated separately and combined, at about 10 operations per subset and query.
    """
    half = p.shape[-1] // 2
    moved = p[..., None] * r
    gram = moved @ moved.mT  # [..., queries, tokens, tokens]
    best, found = p.new_full(p.shape[:-2], torch.inf), torch.zeros_like(p[..., 0, :])
    number = torch.arange(2 ** (p.shape[-1] - half), device=p.device)[:, None]
    bits = (number >> torch.arange(p.shape[-1] - half, device=p.device) & 1).to(p)
    first, second = bits[: 2**half, :half], bits
    for i in range(k + 1):
        x, y = first[first.sum(1) == i], second[second.sum(1) == k - i]
        if len(x) and len(y):
            of_x, of_y = (
                (z @ part * z).sum(-1) for z, part in ((x, gram[..., :half, :half]), (y, gram[..., half:, half:]))
            )
            square = 2 * (x @ gram[..., :half, half:]) @ y.T  # [..., queries, subsets of the first half, of the second]
            square.add_(of_x[..., None]).add_(of_y[..., None, :])
            left = (1 - p[..., :half] @ x.T)[..., None] - (p[..., half:] @ y.T)[..., None, :]
            value, where = square.div_(left.square_()).sum(-3).flatten(-2).min(-1)
            chosen = torch.cat([x[where // len(y)], y[where % len(y)]], -1)
            found = torch.where((value < best)[..., None], chosen, found)
            best = torch.minimum(best, value)
    return found > 0
