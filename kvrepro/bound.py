"""The theory of DropKV on one query's attention: p [..., tokens] sums to 1, v [..., tokens, dim], a = sum_j p_j v_j.

`...` are any batch axes. Everything is exact in float64; float32 input is taken to float64. F(J) = ||Delta(J)||_2 is the
shift of the output when the keys J are evicted and the rest is renormalised (lemma 1). Costs: small = evict.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations

import numpy as np
import torch
from torch import Tensor

from kvrepro.cone import Cone
from kvrepro.errors import InputError

SUBSETS = 2_000_000  # enumerations beyond this are refused


# ---------------------------------------------------------------- lemma 1


def output(p: Tensor, v: Tensor) -> Tensor:
    """a = sum_j p_j v_j, float64 [..., dim]."""
    return (p.double()[..., None] * v.double()).sum(-2)


def residuals(p: Tensor, v: Tensor) -> Tensor:
    """r_j = a - v_j, float64 [..., tokens, dim]."""
    return output(p, v)[..., None, :] - v.double()


def shift(p: Tensor, v: Tensor, evicted: Tensor) -> Tensor:
    """Delta(J) = sum_{j in J} p_j r_j / (1 - P_J) of the keys `evicted` (bool [..., tokens]), float64 [..., dim]."""
    gone = p.double() * evicted
    return (gone[..., None] * residuals(p, v)).sum(-2) / (1 - gone.sum(-1, keepdim=True))


def shift_by_definition(p: Tensor, v: Tensor, evicted: Tensor) -> Tensor:
    """The same without the lemma: attention over the keys that stay, minus attention over all."""
    kept = p.double() * ~evicted
    return output(kept / kept.sum(-1, keepdim=True), v) - output(p, v)


def single_cost(p: Tensor, r: Tensor) -> Tensor:
    """||Delta({j})|| = p_j / (1 - p_j) ||r_j|| of each key alone, float64 [..., tokens]."""
    p = p.double()
    return p / (1 - p) * r.double().norm(dim=-1)


def joint_cost(p: Tensor, r: Tensor, evicted: Tensor) -> Tensor:
    """F(J) of key numbers `evicted` [..., k], float64 [...]; p and r may be those of a pool."""
    p = p.double().gather(-1, evicted)
    r = r.double().gather(-2, evicted[..., None].expand(*evicted.shape, r.shape[-1]))
    return (p[..., None] * r).sum(-2).norm(dim=-1) / (1 - p.sum(-1))


def smallest(cost: Tensor, k: int) -> Tensor:
    """Numbers of the k keys of least cost, ascending; of equal costs the first. Int64 [..., k]."""
    return cost.argsort(dim=-1, stable=True)[..., :k].sort(-1).values


# ---------------------------------------------------------------- assumptions, theorems 1 and 2


def pool(p: Tensor, size: float | int, window: int = 8) -> Tensor:
    """Numbers of the candidate keys L, ascending, int64 [..., size]: the lowest attention outside the last `window`.

    size: a share of the keys outside the window (0.95: what a budget of 5% may evict) or their number. The paper says
    "low-attention", and that the final window is left out, but not how many.
    """
    tokens = p.shape[-1] - window
    count = size if isinstance(size, int) else math.floor(size * tokens)
    if not 1 <= count <= tokens:
        raise InputError(f"pool of {size} among {tokens} keys before the window: ask for 1 to {tokens}, or a share")
    return smallest(p[..., :tokens], count)


def factor(c: Tensor, eps: Tensor, k: int) -> Tensor:
    """1 / [c (1 - eps) (1 - k eps)] of theorem 1; infinite where c <= 0 or k eps >= 1."""
    bound = 1 / (c * (1 - eps) * (1 - k * eps))
    return torch.where((c > 0) & (k * eps < 1) & (eps < 1), bound, torch.inf)


def outside(p: Tensor, r: Tensor, direction: Tensor, c: Tensor) -> Tensor:
    """mu = sum of p_j ||r_j|| over the keys that lie outside the cone (direction, c), assumption 3. Float64 [...]."""
    along, length = (r @ direction[..., None])[..., 0], r.norm(dim=-1)
    return (p * length * (along < c[..., None] * length)).sum(-1)


@dataclass(frozen=True)
class Robust:
    """Theorem 2 with the constants that serve best: F(proxy) <= factor * (F(best) + additive)."""

    value: Tensor  # [...] the right-hand side
    c: Tensor  # [...]
    mu: Tensor  # [...]
    share: Tensor  # [...] mu over sum_j p_j ||r_j|| of the pool


def robust(p: Tensor, r: Tensor, cone: Cone, best: Tensor, k: int, grid: Sequence[float] | None = None) -> Robust:
    """Least right-hand side of theorem 2, 1 / [c (1 - eps) (1 - k eps)] (F(J*) + (1 + c) mu), over directions and c.

    Theorem 2 holds for every unit u and c in (0, 1], with mu as u and c make it. Directions: the cone's, the mean of
    p_j r_j, the mean of r_j / ||r_j||. c: c* where it is positive, and `grid` (0.02 to 0.98). best: F(J*) [...].
    """
    p, r = p.double(), r.double()
    length = r.norm(dim=-1, keepdim=True)
    means = [(p[..., None] * r).sum(-2), (r / length.clamp_min(1e-300)).sum(-2)]
    directions = [cone.direction.to(p), *(mean / mean.norm(dim=-1, keepdim=True).clamp_min(1e-300) for mean in means)]
    eps = p.amax(-1)
    constants = [cone.low.to(p), *(torch.full_like(eps, c) for c in grid or torch.linspace(0.02, 0.98, 25).tolist())]
    found = []
    for u in directions:
        for c in constants:
            safe = c * (1 - 1e-12)  # the keys that define c* lie in its cone
            mu = outside(p, r, u, safe)
            found.append(torch.stack([factor(safe, eps, k) * (best + (1 + safe) * mu), safe, mu]))
    value, c, mu = torch.stack(found).gather(0, torch.stack(found)[:, :1].argmin(0, keepdim=True).expand(1, 3, *eps.shape))[0]
    return Robust(value, c, mu, mu / (p * length[..., 0]).sum(-1))


# ---------------------------------------------------------------- the joint optimum, by enumeration


@lru_cache
def _halves(tokens: int, k: int) -> tuple[tuple[Tensor, Tensor], ...]:
    """Every subset of k out of `tokens`, as pairs of bit matrices [., first half], [., second half] to be combined."""
    first = tokens // 2
    return tuple(
        (_bits(first, i), _bits(tokens - first, k - i)) for i in range(max(0, k - tokens + first), min(first, k) + 1)
    )


def _bits(tokens: int, k: int) -> Tensor:
    chosen = np.array(list(combinations(range(tokens), k)), dtype=int).reshape(math.comb(tokens, k), k)
    bits = np.zeros((len(chosen), tokens))
    np.put_along_axis(bits, chosen, 1.0, 1)
    return torch.from_numpy(bits)


@dataclass(frozen=True)
class Optimum:
    """The set J* of least F and its value."""

    evicted: Tensor  # int64 [..., k]
    value: Tensor  # float64 [...]


def optimum(p: Tensor, r: Tensor, k: int) -> Optimum:
    """Exact minimum of F over all subsets of k keys, p [..., tokens] and r [..., tokens, dim] of the candidate keys.

    (1 - P_J)^2 F(J)^2 = s^T G s, where G is the Gram matrix of p_j r_j and s the subset's bits. Both halves of s are
    enumerated on their own and combined, at about 10 operations per subset.
    """
    tokens = p.shape[-1]
    if not 0 < k <= tokens or math.comb(tokens, k) > SUBSETS:
        raise InputError(f"{k} of {tokens} keys: C({tokens}, {k}) must be between 1 and {SUBSETS} subsets")
    batch = p.shape[:-1]
    p, r = p.double().reshape(-1, tokens), r.double().reshape(-1, tokens, r.shape[-1])
    evicted = torch.cat([_enumerate(*some, k) for some in zip(p.split(16), r.split(16), strict=True)])
    return Optimum(evicted.view(*batch, k), joint_cost(p, r, evicted).view(batch))


def _enumerate(p: Tensor, r: Tensor, k: int) -> Tensor:
    """Int64 [rows, k]: the keys of the best subset of each row."""
    moved = p[..., None] * r
    gram = moved @ moved.mT
    half = p.shape[-1] // 2
    best, bits = torch.full_like(p[:, 0], torch.inf), torch.zeros_like(p)
    for x, y in _halves(p.shape[-1], k):
        x, y = x.to(p), y.to(p)
        square = 2 * (x @ gram[:, :half, half:] @ y.T)  # [rows, subsets of the first half, of the second]
        square += ((x @ gram[:, :half, :half]) * x).sum(-1)[:, :, None]
        square += ((y @ gram[:, half:, half:]) * y).sum(-1)[:, None, :]
        mass = (p[:, :half] @ x.T)[:, :, None] + (p[:, half:] @ y.T)[:, None, :]
        value, where = (square / (1 - mass) ** 2).flatten(1).min(1)
        chosen = torch.cat([x[where // len(y)], y[where % len(y)]], 1)
        bits = torch.where((value < best)[:, None], chosen, bits)
        best = torch.minimum(best, value)
    return bits.nonzero()[:, 1].view(-1, k)


# ---------------------------------------------------------------- NP-hardness


@dataclass(frozen=True)
class Partition:
    """A balanced-partition problem as an eviction problem in one dimension, its solution, and the proxy's answer."""

    numbers: tuple[int, ...]
    p: Tensor  # [2m], all 1 / 2m
    v: Tensor  # [2m, 1], the numbers
    best: Optimum
    proxy: Optimum

    @property
    def balanced(self) -> bool:
        """The certificate: evicting `best` leaves the output where it was, so that both halves have equal sums."""
        half = [self.numbers[j] for j in self.best.evicted.tolist()]
        return 2 * sum(half) == sum(self.numbers)


def partition(numbers: Sequence[int]) -> Partition:
    """2m positive integers; p = 1 / 2m, v = numbers, k = m. The least F is 0 iff they split evenly, m and m (App. C.1).

    Solved by enumeration: up to 2m = 20 numbers.
    """
    if len(numbers) % 2 or not numbers or min(numbers) < 1:
        raise InputError(f"{list(numbers)}: give an even number of positive integers")
    n = len(numbers)
    p = torch.full((n,), 1 / n, dtype=torch.float64)
    v = torch.tensor(numbers, dtype=torch.float64)[:, None]
    r = residuals(p, v)
    chosen = smallest(single_cost(p, r), n // 2)
    return Partition(tuple(numbers), p, v, optimum(p, r, n // 2), Optimum(chosen, joint_cost(p, r, chosen)))
