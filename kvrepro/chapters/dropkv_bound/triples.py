"""Triples (layer, query head, query position) of a real prompt, Table 11's scoring rules and DropKV's four strata.

One plain forward pass; the attention rows of the chosen queries are computed from queries and keys as each layer
passes, for all its heads at once, so that no attention matrix is ever held. Scores here: large = keep. Source: DropKV,
appendices B and C.3.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from kvrepro.chapters.dropkv_bound import bound
from kvrepro.engine.attention import attend_prompt, installed
from kvrepro.engine.facts import attention_modules, output_projection
from kvrepro.engine.observe import Observation
from kvrepro.engine.policy import Policy, call

STRATA = ("random", "tail", "threshold", "disagreement")
SINKS, CAKE_GAMMA, CRITICAL_EPS, DROPKV_EPS = 4, 200.0, 1e-4, 1e-6  # the methods' own defaults


@dataclass(frozen=True)
class Triple:
    """One query with the keys that it sees, and the `window` queries up to it. Everything on the CPU, float64."""

    layer: int
    head: int
    position: int  # of the query; its tokens are 0 ... position
    window_p: Float[Tensor, "window tokens"]  # the last row is the query's own; each row sums to 1
    v: Float[Tensor, "tokens dim"]  # of the KV head that the query head shares
    keys: Float[Tensor, "tokens dim"]  # after their rotation
    norm: Float[Tensor, " tokens"]  # ||v_j W_O||_1 of this head
    seen: Observation | None = None  # the same as a policy sees it, as if the query head did not share its KV head

    @property
    def where(self) -> dict[str, int]:
        return {"layer": self.layer, "head": self.head, "position": self.position}

    @property
    def p(self) -> Tensor:
        return self.window_p[-1]

    @cached_property
    def window_a(self) -> Tensor:
        """Outputs of the window's queries, [window, dim]."""
        return self.window_p @ self.v

    @cached_property
    def r(self) -> Tensor:
        """Residuals a - v_j of the query, [tokens, dim]."""
        return self.window_a[-1] - self.v

    @cached_property
    def _root(self) -> Tensor:
        """A square root of W_O W_O' of this head, [dim, dim]."""
        assert self.seen is not None
        w = self.seen.projection[0, 0].double().cpu()
        values, vectors = torch.linalg.eigh(w @ w.T)
        return vectors * values.clamp_min(0).sqrt()

    def projected(self, r: Float[Tensor, "... dim"]) -> Float[Tensor, "... dim"]:
        """Vectors whose lengths are those of r W_O of this head: r L, where L L' = W_O W_O'."""
        return r @ self._root

    def last(self, queries: int) -> "Triple":
        """The same triple with fewer observed queries."""
        return replace(self, window_p=self.window_p[-queries:])


# ---------------------------------------------------------------- from a model


@dataclass(frozen=True)
class Layer:
    """One layer of a prompt on the model's device: all its heads at once, or triple by triple."""

    number: int
    layers: int  # of the model
    positions: Sequence[int]  # of the queries
    window: int
    query: Float[Tensor, "heads tokens dim"]
    key: Float[Tensor, "kv_heads tokens dim"]
    value: Float[Tensor, "kv_heads tokens dim"]
    scaling: float
    projection: Float[Tensor, "hidden heads*dim"]
    seen: dict[int, Tensor] = field(default_factory=dict)  # `attention` by position, once it is computed

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.query.shape[0] // self.key.shape[0]

    def attention(self, t: int) -> Float[Tensor, "heads window tokens"]:
        """Attention weights of the `window` queries up to position t on the tokens 0 ... t, float64."""
        if t not in self.seen:
            q, k = self.query[:, t - self.window + 1 : t + 1].double(), self.key[:, : t + 1].double()
            rows = self._by_kv_head(q) @ k.mT * self.scaling
            rows = rows.view(len(q), self.window, t + 1)
            future = torch.ones_like(rows[0], dtype=torch.bool).triu_(t - self.window + 2)
            self.seen[t] = rows.masked_fill_(future, -torch.inf).softmax(-1)
        return self.seen[t]

    def outputs(self, t: int) -> Float[Tensor, "heads window dim"]:
        """Outputs of the same queries, float64."""
        p = self.attention(t)
        return (self._by_kv_head(p) @ self.value[:, : t + 1].double()).view(*p.shape[:2], -1)

    def triple(self, head: int, t: int) -> Triple:
        """The triple of a query head and position."""
        dim, shared = self.value.shape[-1], head // self.group
        w = self.projection[:, head * dim : (head + 1) * dim].float()
        query, key, value = self.query[head, : t + 1], self.key[shared, : t + 1], self.value[shared, : t + 1]
        norm = (value.float() @ w.T).abs().sum(-1)
        # what a policy sees at the last token if this query head and its KV head were the whole layer
        at = torch.arange(t + 1, device=key.device)[None]
        seen = Observation(
            self.number,
            self.layers,
            key[None, None],
            value[None, None],
            at[None],
            query[None, None, -self.window :],
            at[:, -self.window :],
            torch.tensor([t + 1], device=key.device),
            self.scaling,
            w.T[None],
        )
        p, v, keys, norm = (x.double().cpu() for x in (self.attention(t)[head], value, key, norm))
        return Triple(self.number, head, t, p, v, keys, norm, seen)

    def _by_kv_head(self, rows: Tensor) -> Tensor:
        """[heads, window, ...] as [kv_heads, group * window, ...]."""
        return rows.reshape(len(self.key), self.group * self.window, -1)


def triples(
    model: Any, ids: Sequence[int], positions: Sequence[int], visit: Callable[[Layer], None], *, window: int = 8
) -> None:
    """Hand each layer to `visit` as one forward pass of the prompt `ids` reaches it.

    positions: true positions of the queries, each at least `window`. What `visit` does not keep is freed before the
    next layer.
    """
    modules = attention_modules(model)

    class Visiting:
        def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, sliding: int = 0):
            projection = output_projection(modules[layer]).flatten(0, 1).T
            visit(Layer(layer, len(modules), positions, window, query[0], key[0], value[0], scaling, projection))
            return attend_prompt(query, key, value, scaling)

    with torch.inference_mode(), installed(model):
        tokens = torch.tensor([list(ids)], device=model.device)
        model(input_ids=tokens, logits_to_keep=1, kvrepro=Visiting(), use_cache=False)


# ---------------------------------------------------------------- table 11


def _cosine(x: Tensor, y: Tensor) -> Tensor:
    return F.cosine_similarity(x, y.expand_as(x), dim=-1)


def dropkv(t: Triple) -> Tensor:
    """sum_t (p / (1 - p + eps))^2 ||a_t - v_j||^2 over the window, the eviction cost (small = evict), [tokens]."""
    distance = torch.cdist(t.window_a, t.v, compute_mode="donot_use_mm_for_euclid_dist")  # an expanded square cancels
    return ((t.window_p / (1 - t.window_p + DROPKV_EPS)).square() * distance.square()).sum(-2)


# By the catalogue's names: scores [tokens], large = keep, over the triple's window of queries, as in the table but
# without pooling. PyramidKV differs from SnapKV only by its budgets. Among equal scores StreamingLLM keeps the newest.
RULES: dict[str, Callable[[Triple], Tensor]] = {
    "streaming_llm": lambda t: torch.arange(len(t.p)).double() / len(t.p) + 2.0 * (torch.arange(len(t.p)) < SINKS),
    "key_diff": lambda t: -_cosine(t.keys, t.keys.mean(0)),
    "snapkv": lambda t: t.window_p.sum(0),
    "pyramid_kv": lambda t: t.window_p.sum(0),
    "cake": lambda t: t.window_p.mean(0) + (CAKE_GAMMA * t.window_p.var(0) if len(t.window_p) > 1 else 0.0),
    "critical_kv": lambda t: (t.window_p.mean(0) + CRITICAL_EPS) * t.norm,
    "andpro": lambda t: (t.window_p * (t.window_a @ t.v.T)).sum(0),
    "dropkv": dropkv,
}


WEIGHTS: dict[str, Callable[[Triple], Tensor]] = {  # eviction costs over the window, small = evict, [tokens]
    "squared": dropkv,
    "linear": lambda t: _single_shifts(t, t.window_a[:, None] - t.v).sum(0),
    "projected": lambda t: _single_shifts(t, t.projected(t.window_a[:, None] - t.v)).square().sum(0),
}


def _single_shifts(t: Triple, r: Tensor) -> Tensor:
    """p / (1 - p + eps) ||r_j|| of every query of the window, [window, tokens]."""
    return t.window_p / (1 - t.window_p + DROPKV_EPS) * r.norm(dim=-1)


def scored_alone(policy: Policy) -> bool:
    """Whether a policy's score for one query head says which of a triple's keys it would evict: not if it needs whole
    layers, sums of a whole forward pass, or one choice for all layers, or if it evicts nothing."""
    return policy.frees and not (policy.shared or policy.needs or policy.refine or policy.across)


def scores_of(policy: Policy, t: Triple) -> Tensor:
    """Scores of a policy that is `scored_alone`, from the triple's window of queries: float64 [tokens], large = keep.

    Without pooling, and without guards: the comparison asks which of twenty keys before the window it would evict.
    """
    wanted = {"window": len(t.window_p), "pool": "none"}
    switches = tuple((name, value) for name, value in wanted.items() if name in policy.parameters)
    return call(policy.score, t.seen, parameters=policy.reading("as_described", switches))[0, 0].double().cpu()


# ---------------------------------------------------------------- which 20 keys


def strata(t: Triple, candidates: Tensor, size: int = 20, seed: int = 0) -> dict[str, Tensor]:
    """By stratum `size` key numbers out of the pool `candidates` [pool], ascending.

    random; tail: the lowest p; threshold: the costs nearest to the pool's median; disagreement: ranks by p and by cost
    that are farthest apart; and two that the paper does not have: near, the smallest ||a - v_j||, and aligned, the
    largest cosine between v_j and a.
    """
    p, r = t.p[candidates], t.r[candidates]
    cost = bound.single_cost(p, r)
    by_p, by_cost = (x.argsort(stable=True).argsort(stable=True) for x in (p, cost))
    draw = torch.Generator("cpu").manual_seed(((seed * 1009 + t.layer) * 1009 + t.head) * 1_000_003 + t.position)
    chosen = {
        "random": torch.rand(len(p), generator=draw, device="cpu"),
        "tail": p,
        "threshold": (cost - cost.median()).abs(),
        "disagreement": -(by_p - by_cost).abs().double(),
        "near": r.norm(dim=-1),
        "aligned": -_cosine(t.v[candidates], t.window_a[-1]),
    }
    return {name: candidates[bound.smallest(order, size)] for name, order in chosen.items()}
