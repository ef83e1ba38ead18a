"""Wall 1 of the guide on eviction and compaction: what a fused kernel knows, and what one more pass can compute.

A kernel that streams over keys keeps per query a running maximum m, a denominator l and an unnormalised output
(Dao et al. 2022). Cumulative scores sum over queries, so they are no function of that state. But the log-sum-exp
m + log l lets a second pass recompute any probability, tile by tile, and add up its columns.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from kvrepro.chapters.reclamation.peak import Peak


def eager(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Output [queries, dim] and the whole matrix of probabilities [queries, tokens]."""
    scores = q @ k.T / np.sqrt(q.shape[1])
    p = np.exp(scores - scores.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    return p @ v, p


def online(q: np.ndarray, k: np.ndarray, v: np.ndarray, tile: int) -> dict[str, np.ndarray]:
    """The output of `eager` from tiles of `tile` keys, the state that the kernel keeps (maximum, denominator), and the
    most scores that it holds at once (peak)."""
    maximum, denominator = np.full(len(q), -np.inf), np.zeros(len(q))
    gathered, peak = np.zeros((len(q), v.shape[1])), 0
    for start in range(0, len(k), tile):
        scores = q @ k[start : start + tile].T / np.sqrt(q.shape[1])
        peak = max(peak, scores.size)
        higher = np.maximum(maximum, scores.max(1))
        p, shrink = np.exp(scores - higher[:, None]), np.exp(maximum - higher)
        denominator = denominator * shrink + p.sum(1)
        gathered = gathered * shrink[:, None] + p @ v[start : start + tile]
        maximum = higher
    state = {"maximum": maximum, "denominator": denominator, "peak": np.array(peak)}
    return state | {"output": gathered / denominator[:, None]}


def wall() -> pd.DataFrame:
    """The guide's facts about wall 1, in float64, as rows (check, value).

    Two caches differ only in the keys of the two tokens `pair`, which are swapped; the values of the two are equal.
    Nothing that the kernel returns or keeps tells the caches apart, yet the tokens' cumulative scores are swapped.
    """
    tile, pair = 32, (7, 300)
    q, k, v = np.random.default_rng(7).standard_normal((3, 512, 64))  # [tokens, dim] each
    first, state = eager(q, k, v), online(q, k, v, tile)
    high = q + 400.0
    v[pair[0]] = v[pair[1]]
    swapped = k.copy()
    swapped[list(pair)] = k[list(pair[::-1])]
    a, b = online(q, k, v, tile), online(q, swapped, v, tile)
    scores, other = (eager(q, keys, v)[1].sum(0)[list(pair)] for keys in (k, swapped))
    values = {
        "online minus eager": _gap(state["output"], first[0]),
        "online minus eager after 400": _gap(online(high, k, v, tile)["output"], eager(high, k, v)[0]),
        "peak live scores": float(state["peak"]),
        "output of the two caches": _gap(a["output"], b["output"]),
        "running maximum of the two caches": _gap(a["maximum"], b["maximum"]),
        "denominator of the two caches": _gap(a["denominator"], b["denominator"]),
        "scores swapped": _gap(scores, other[::-1]),
        "score gap of the swapped tokens": abs(float(scores[0] - scores[1])),
    }
    return pd.DataFrame({"check": list(values), "value": list(values.values())})


def _gap(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).max())


def column_sums(q: Tensor, k: Tensor, lse: Tensor, tile: int = 32) -> Tensor:
    """Cumulative causal attention per token, float32 [heads, tokens], from one streaming pass.

    q, k [heads, tokens, dim]; lse [heads, tokens], the log-sum-exp of each query's scaled scores. It holds scores of
    `tile` queries x tokens per head at once.
    """
    sums = q.new_zeros(q.shape[0], k.shape[1], dtype=torch.float32)
    for a in range(0, q.shape[1], tile):
        b = min(a + tile, q.shape[1])
        scores = torch.matmul(q[:, a:b], k[:, :b].transpose(1, 2)).mul_(q.shape[-1] ** -0.5)
        p = scores.sub_(lse[:, a:b, None]).exp_()
        p[:, :, a:].tril_()
        sums[:, :b] += p.sum(1)
    return sums


def passes(
    loaded: None, tokens: Sequence[int], heads: int = 3, dim: int = 64, tile: int = 32, repeats: int = 6
) -> pd.DataFrame:
    """What cumulative scores cost on this machine: rows (tokens, way, repeat) with `share_of_matrix` (the most memory
    allocated at once, measured, over the float32 scores of tokens x tokens per head), `score_difference` (from float64
    eager attention), `slower` and `larger` (time and memory over those of fused attention on the same draw).

    Ways: fused attention alone (no scores), the one extra pass by itself, eager attention with its matrix. Causal,
    float32 on the CPU; every repeat draws new queries and keys.
    """
    rows = []
    for n in tokens:
        for repeat in range(repeats):
            q, k, v = torch.randn(3, heads, n, dim, generator=torch.Generator().manual_seed(repeat))
            lse = _fused(q, k, v)[1]
            calls = {
                "fused attention": partial(_fused, q, k, v),
                "one extra pass": partial(column_sums, q, k, lse, tile),
                "eager": partial(_eager, q, k, v),
            }
            if repeat == 0:  # memory does not depend on the draw, and the first call of each warms up
                held = {name: _peak_bytes(call) for name, call in calls.items()}
            exact = _eager(q.double(), k.double(), v.double())
            seconds = {}
            for name, call in calls.items():
                start = time.perf_counter()
                output = call()
                seconds[name] = time.perf_counter() - start
                gap = np.nan if name == "fused attention" else float((output - exact).abs().max())
                rows.append({"tokens": n, "way": name, "repeat": repeat, "score_difference": gap,
                             "share_of_matrix": held[name] / (4 * heads * n * n),
                             "slower": seconds[name] / seconds["fused attention"],
                             "larger": held[name] / held["fused attention"]})  # fmt: skip
    return pd.DataFrame(rows)


def _peak_bytes(call: Callable) -> int:
    """Most bytes that a call allocates at once."""
    with Peak() as peak:
        call()
    return peak.bytes


def _fused(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q[None], k[None], v[None], 0.0, True)
    return out[0], lse[0]


def _eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Column sums of the whole matrix [heads, tokens]."""
    scores = torch.matmul(q, k.transpose(1, 2)) * q.shape[-1] ** -0.5
    p = torch.softmax(scores.masked_fill(torch.ones(scores.shape[1:], dtype=torch.bool).triu(1), -torch.inf), -1)
    torch.matmul(p, v)  # the output, which eager attention computes anyway, counts in its time
    return p.sum(1)
