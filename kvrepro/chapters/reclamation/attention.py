"""What the guide says of attention: scores are no part of a fused kernel's state (wall 1), a fifth of the tokens gets
most of the attention, and only the newest queries tell where it goes next.

A kernel that streams over keys keeps per query a running maximum m, a denominator l and an unnormalised output
(Dao et al. 2022), of which sums over queries are no function. But the log-sum-exp m + log l lets a second pass
recompute any probability, tile by tile, and add up its columns.
"""

import time
from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import Any
from weakref import WeakSet

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from kvrepro.engine import generate as engine
from kvrepro.engine.attention import watch_prompt
from kvrepro.engine.condition import Condition, Prefill
from kvrepro.engine.facts import ModelFacts
from kvrepro.experiment.models import Loaded

# ---- the first wall, in float64


def eager(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Output [queries, dim] and the whole matrix of probabilities [queries, tokens]."""
    scores = q @ k.T / np.sqrt(q.shape[1])
    p = np.exp(scores - scores.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    return p @ v, p


def online(q: np.ndarray, k: np.ndarray, v: np.ndarray, tile: int) -> dict[str, Any]:
    """The output of `eager` from tiles of `tile` keys, the state that the kernel keeps (maximum, denominator), and the
    most scores that it holds at once (peak)."""
    maximum, denominator, gathered, peak = np.full(len(q), -np.inf), np.zeros(len(q)), np.zeros((len(q), v.shape[1])), 0
    for start in range(0, len(k), tile):
        scores = q @ k[start : start + tile].T / np.sqrt(q.shape[1])
        higher, peak = np.maximum(maximum, scores.max(1)), max(peak, scores.size)
        p, shrink = np.exp(scores - higher[:, None]), np.exp(maximum - higher)
        denominator = denominator * shrink + p.sum(1)
        gathered = gathered * shrink[:, None] + p @ v[start : start + tile]
        maximum = higher
    output = gathered / denominator[:, None]
    return {"output": output, "running maximum": maximum, "denominator": denominator, "peak": float(peak)}


def wall() -> pd.DataFrame:
    """The guide's facts about wall 1 as rows (check, value). Two caches differ only in the keys of the two tokens
    `pair`, which are swapped; their values are equal. Nothing that the kernel returns or keeps tells the caches apart,
    yet the tokens' cumulative scores are swapped."""
    tile, pair = 32, [7, 300]
    q, k, v = np.random.default_rng(7).standard_normal((3, 512, 64))  # [tokens, dim] each
    gaps = {
        name: (online(high, k, v, tile)["output"], eager(high, k, v)[0])
        for name, high in (("online minus eager", q), ("online minus eager after 400", q + 400.0))
    }
    v[pair[0]] = v[pair[1]]
    swapped = k.copy()
    swapped[pair] = k[pair[::-1]]
    a, b = online(q, k, v, tile), online(q, swapped, v, tile)
    scores, other = (eager(q, keys, v)[1].sum(0)[pair] for keys in (k, swapped))
    gaps |= {f"{part} of the two caches": (a[part], b[part]) for part in ("output", "running maximum", "denominator")}
    gaps |= {"scores swapped": (scores, other[::-1]), "score gap of the swapped tokens": (scores[0], scores[1])}
    values = {name: float(np.abs(x - y).max()) for name, (x, y) in gaps.items()} | {"peak live scores": a["peak"]}
    return pd.DataFrame(values.items(), columns=["check", "value"])


# ---- what scores cost


def column_sums(q: Tensor, k: Tensor, lse: Tensor, tile: int = 32) -> Tensor:
    """Cumulative causal attention per token, float32 [heads, tokens], from one streaming pass, which holds scores of
    `tile` queries x tokens per head at once. q, k [heads, tokens, dim]; lse [heads, tokens], the log-sum-exp of each
    query's scaled scores."""
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
    eager attention), `slower` and `larger` (time and memory over those of fused attention alone on the same draw, which
    gives no scores). The extra pass is timed by itself. Causal, float32 on the CPU."""
    rows, held = [], {}
    for n, repeat in product(tokens, range(repeats)):
        q, k, v = torch.randn(3, heads, n, dim, generator=torch.Generator().manual_seed(repeat))
        lse, exact, seconds = _fused(q, k, v)[1], _eager(q.double(), k.double(), v.double()), {}
        calls = {
            "fused attention": partial(_fused, q, k, v),
            "one extra pass": partial(column_sums, q, k, lse, tile),
            "eager": partial(_eager, q, k, v),
        }
        for name, call in calls.items():
            if repeat == 0:  # memory does not depend on the draw, and the first call of each warms up
                with Peak() as peak:
                    call()
                held[name] = peak.bytes
            start = time.perf_counter()
            output = call()
            seconds[name] = time.perf_counter() - start
            row = {"tokens": n, "way": name, "repeat": repeat}
            row["score_difference"] = np.nan if name == "fused attention" else float((output - exact).abs().max())
            row["share_of_matrix"] = held[name] / (4 * heads * n * n)
            row["slower"] = seconds[name] / seconds["fused attention"]
            row["larger"] = held[name] / held["fused attention"]
            rows.append(row)
    return pd.DataFrame(rows)


def _fused(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q[None], k[None], v[None], 0.0, True)
    return out[0], lse[0]


def _eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Column sums of the whole matrix [heads, tokens]."""
    scores = torch.matmul(q, k.transpose(1, 2)) * q.shape[-1] ** -0.5
    p = torch.softmax(scores.masked_fill(torch.ones(scores.shape[1:], dtype=torch.bool).triu(1), -torch.inf), -1)
    torch.matmul(p, v)  # the output, which eager attention computes anyway, counts in its time
    return p.sum(1)


class Peak(TorchDispatchMode):
    """`with Peak() as peak: ...`, then `peak.bytes`: the most bytes that the block had allocated at once on the CPU, in
    storages that operations returned for the first time, until they were freed."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self._held = 0, WeakSet()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = _storages((args, kwargs))
        result = function(*args, **(kwargs or {}))
        self._held |= _storages(result) - given
        self.bytes = max(self.bytes, sum(storage.nbytes() for storage in self._held))
        return result


def _storages(tree: Any) -> set[torch.UntypedStorage]:
    return {leaf.untyped_storage() for leaf in tree_iter(tree) if isinstance(leaf, Tensor)}


# ---- where attention goes while a model reads a prompt; nothing is evicted


def sparsity(
    loaded: Loaded, ids: list[int], windows: Sequence[int] = (1, 4, 8, 16, 25, 50, 100), ahead: int = 16
) -> pd.DataFrame:
    """Rows (what, layer, window, value), each a mean over KV heads; layers that slide are left out. what "heavy
    hitters": share of all attention on the fifth of the tokens that get the most of it. "window": of the attention that
    the last `ahead` queries pay to the history, the share on the fifth of it to which the `window` queries before them
    attend most. "best": the most that as many tokens could get. The history ends where the largest window begins;
    windows for which the prompt is too short are left out. `gain`: value less that of the window of 25."""
    windows = [w for w in windows if 2 * (w + ahead) <= len(ids)]
    most = max(windows, default=0)
    mass: dict[int, Tensor] = {}  # [kv_heads, tokens], by layer
    newest: dict[int, Tensor] = {}  # of the last queries [kv_heads, most + ahead, tokens], by layer

    def see(layer: int, p: Tensor, queries: slice) -> None:
        p = p[0].sum(1)  # [kv_heads, queries, tokens]
        mass[layer] = mass.get(layer, 0) + p.sum(1)
        newest[layer] = torch.cat([newest.get(layer, p[:, :0]), p], 1)[:, -most - ahead :]

    watch_prompt(loaded.model, ids, see)
    sliding, rows = ModelFacts.of(loaded.model).sliding, []
    for layer, received in mass.items():
        if sliding.get(layer, len(ids) + 1) <= len(ids):
            continue
        rows.append(("heavy hitters", layer, 0, _held(received, received)))
        if windows:
            p = newest[layer][..., : len(ids) - most - ahead]  # [kv_heads, queries, history]
            wanted = p[:, -ahead:].sum(1)
            rows.append(("best", layer, 0, _held(wanted, wanted)))
            rows += [("window", layer, w, _held(p[:, -ahead - w : -ahead].sum(1), wanted)) for w in windows]
    table = pd.DataFrame(rows, columns=["what", "layer", "window", "value"])
    of_25 = table[table.window == 25].set_index("layer").value
    return table.assign(gain=table.value.where(table.what == "window") - table.layer.map(of_25))


def _held(scores: Tensor, mass: Tensor) -> float:
    """Share of `mass` [kv_heads, tokens] on the fifth of the tokens with the largest scores, mean over heads."""
    chosen = scores.topk(max(1, round(0.2 * scores.shape[1])), -1).indices
    return float((mass.gather(1, chosen).sum(1) / mass.sum(1)).mean())


def pages(loaded: Loaded, ids: list[int], kept: Sequence[float] = (0.1, 0.5), block_size: int = 16) -> pd.DataFrame:
    """Quest, which selects pages: rows (kept) with `held`, its bytes over those of a cache that evicts nothing, and
    `read`, the share of the tokens that a query reads."""
    page = (("page", block_size),)
    conditions = [Condition(), *(Condition("quest_pages", round(n * len(ids)), Prefill(), switches=page) for n in kept)]
    [[full, *answers]] = engine.generate(loaded.model, [ids], conditions, max_new_tokens=2, stop_ids=())
    held = [answer.bytes_held / full.bytes_held for answer in answers]
    read = [(answer.pages or 0) * block_size / len(ids) for answer in answers]
    return pd.DataFrame({"kept": kept, "held": held, "read": read})
