"""The theory of DropKV on one query's attention: p [..., tokens] sums to 1, v [..., tokens, dim], a = sum_j p_j v_j.

`...` stands for any batch axes; everything is computed in float64. F(J) = ||Delta(J)||_2 is the shift of the output
when the keys J are evicted and the rest is renormalised (lemma 1). Costs: small = evict.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import torch
from torch import Tensor

from kvrepro.errors import InputError

SUBSETS = 2_000_000  # enumerations beyond this are refused


# ---------------------------------------------------------------- lemma 1


def output(p: Tensor, v: Tensor) -> Tensor:
    """a = sum_j p_j v_j, float64 [..., dim]."""
    return (p.double()[..., None, :] @ v.double())[..., 0, :]


def residuals(p: Tensor, v: Tensor) -> Tensor:
    """r_j = a - v_j, float64 [..., tokens, dim]."""
    return output(p, v)[..., None, :] - v.double()


def shift(p: Tensor, v: Tensor, evicted: Tensor) -> Tensor:
    """Delta(J) = sum_{j in J} p_j r_j / (1 - P_J) of the keys `evicted` (bool [..., tokens]), float64 [..., dim]."""
    gone = p.double() * evicted
    return output(gone, residuals(p, v)) / (1 - gone.sum(-1, keepdim=True))


def shift_by_definition(p: Tensor, v: Tensor, evicted: Tensor) -> Tensor:
    """`shift` without the lemma: attention over the keys that stay, minus attention over all."""
    kept = p.double() * ~evicted
    return output(kept / kept.sum(-1, keepdim=True), v) - output(p, v)


def single_cost(p: Tensor, r: Tensor) -> Tensor:
    """||Delta({j})|| = p_j / (1 - p_j) ||r_j|| of each key alone, float64 [..., tokens]."""
    p = p.double()
    return p / (1 - p) * r.double().norm(dim=-1)


def joint_cost(p: Tensor, r: Tensor, evicted: Tensor) -> Tensor:
    """F(J) of key numbers `evicted` [..., k], float64 [...]; p and r may be those of a pool, for several J at once."""
    sets = evicted.shape[:-1]
    p = p.double().expand(*sets, -1).gather(-1, evicted)
    r = r.double().expand(*sets, -1, -1).gather(-2, evicted[..., None].expand(*evicted.shape, r.shape[-1]))
    return output(p, r).norm(dim=-1) / (1 - p.sum(-1))


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
