"""Triples (layer, query head, query position) of a real prompt, Table 11's scoring rules and DropKV's four strata.

One plain forward pass; the attention rows of the chosen queries are computed from queries and keys as each layer
passes, for all its heads at once, so that no attention matrix is ever held. Scores here: large = keep. Source: DropKV,
appendices B and C.3.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from kvrepro.chapters.dropkv_bound import bound
from kvrepro.engine.attention import attend_prompt, installed
from kvrepro.engine.evict import call
from kvrepro.engine.facts import attention_modules, output_projection
from kvrepro.engine.observe import Observation
from kvrepro.engine.policy import Policy

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
    w_o: Float[Tensor, "dim hidden"]  # the output projection of this head
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
    def root(self) -> Tensor:
        """L with L L' = W_O W_O' [dim, dim]: r L is as long as r W_O."""
        return torch.linalg.qr(self.w_o.T, mode="r").R.T

    def last(self, queries: int) -> "Triple":
        """The same triple with fewer observed queries."""
        return replace(self, window_p=self.window_p[-queries:])


# ---------------------------------------------------------------- from a model


@dataclass(frozen=True)
class Layer:
    """One layer of a prompt on the model's device: all its heads at once, or triple by triple."""

    number: int
    layers: int  # of the model
    attention: Mapping[int, Float[Tensor, "heads window tokens"]]  # by position, of the queries up to it; float64
    query: Float[Tensor, "heads tokens dim"]
    key: Float[Tensor, "kv_heads tokens dim"]
    value: Float[Tensor, "kv_heads tokens dim"]
    scaling: float
    projection: Float[Tensor, "heads dim hidden"]

    def triple(self, head: int, t: int) -> Triple:
        """The triple of a query head and position."""
        shared, p = head * len(self.key) // len(self.query), self.attention[t][head]
        query, key, value = self.query[head, : t + 1], self.key[shared, : t + 1], self.value[shared, : t + 1]
        w = self.projection[head]
        # what a policy sees at the last token if this query head and its KV head were the whole layer
        at = torch.arange(t + 1, device=key.device)[None]
        seen = Observation(
            self.number,
            self.layers,
            key[None, None],
            value[None, None],
            at[None],
            query[None, None, -len(p) :],
            at[:, -len(p) :],
            torch.tensor([t + 1], device=key.device),
            self.scaling,
            w.float()[None],
        )
        p, v, keys, w_o = (x.double().cpu() for x in (p, value, key, w))
        return Triple(self.number, head, t, p, v, keys, w_o, seen)


def triples(
    model: Any, ids: Sequence[int], positions: Sequence[int], visit: Callable[[Layer], None], *, window: int = 8
) -> None:
    """Hand each layer to `visit` as one forward pass of the prompt `ids` reaches it. positions: of the queries, each at
    least `window`. What `visit` does not keep is freed before the next layer."""
    modules = attention_modules(model)

    class Visiting:
        def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, sliding: int = 0):
            seen = {}
            for t in positions:
                q, k = query[0, :, t - window + 1 : t + 1].double(), key[0, :, : t + 1].double()
                logits = (q.reshape(len(k), -1, k.shape[-1]) @ k.mT * scaling).view(len(q), window, t + 1)
                future = torch.ones_like(logits[0], dtype=torch.bool).triu_(t - window + 2)
                seen[t] = logits.masked_fill_(future, -torch.inf).softmax(-1)
            projection = output_projection(modules[layer])
            visit(Layer(layer, len(modules), seen, query[0], key[0], value[0], scaling, projection))
            return attend_prompt(query, key, value, scaling)

    with torch.inference_mode(), installed(model):
        tokens = torch.tensor([list(ids)], device=model.device)
        model(input_ids=tokens, logits_to_keep=1, kvrepro=Visiting(), use_cache=False)


# ---------------------------------------------------------------- table 11


def _cosine(x: Tensor, y: Tensor) -> Tensor:
    return F.cosine_similarity(x, y.expand_as(x), dim=-1)


def shifts(t: Triple, by: Tensor | None = None) -> Tensor:
    """p / (1 - p + eps) ||a - v_j|| of every query of the window, [window, tokens]; or of vectors (a - v_j) `by`."""
    r = t.window_a[:, None] - t.v
    return t.window_p / (1 - t.window_p + DROPKV_EPS) * (r if by is None else r @ by).norm(dim=-1)


# By the catalogue's names: scores [tokens], large = keep, over the triple's window of queries, as in the table but
# without pooling. PyramidKV differs from SnapKV only by its budgets. Among equal scores StreamingLLM keeps the newest.
RULES: dict[str, Callable[[Triple], Tensor]] = {
    "streaming_llm": lambda t: torch.arange(len(t.p)).double() / len(t.p) + 2.0 * (torch.arange(len(t.p)) < SINKS),
    "key_diff": lambda t: -_cosine(t.keys, t.keys.mean(0)),
    "snapkv": lambda t: t.window_p.sum(0),
    "pyramid_kv": lambda t: t.window_p.sum(0),
    "cake": lambda t: t.window_p.mean(0) + (CAKE_GAMMA * t.window_p.var(0) if len(t.window_p) > 1 else 0.0),
    "critical_kv": lambda t: (t.window_p.mean(0) + CRITICAL_EPS) * (t.v @ t.w_o).abs().sum(-1),
    "andpro": lambda t: (t.window_p * (t.window_a @ t.v.T)).sum(0),
    "dropkv": lambda t: shifts(t).square().sum(0),
}
WEIGHTS: dict[str, Callable[[Triple], Tensor]] = {  # eviction costs over the window, small = evict, [tokens]
    "squared": RULES["dropkv"],
    "linear": lambda t: shifts(t).sum(0),
    "projected": lambda t: shifts(t, t.root).square().sum(0),
}


def scored_alone(policy: Policy) -> bool:
    """Whether a policy's score for one query head says which of a triple's keys it would evict: not if it needs whole
    layers, sums of a whole forward pass, or one choice for all layers, or if it evicts nothing."""
    return policy.frees and not (policy.shared or policy.needs or policy.refine or policy.across)


def scores_of(policy: Policy, t: Triple) -> Tensor:
    """Scores of a policy that is `scored_alone`, from the triple's window of queries: float64 [tokens], large = keep.
    Without pooling and guards: the comparison asks which of twenty keys before the window it would evict."""
    wanted = {"window": len(t.window_p), "pool": "none"}
    switches = tuple((name, value) for name, value in wanted.items() if name in policy.parameters)
    return call(policy.score, t.seen, parameters=policy.reading("as_described", switches))[0, 0].double().cpu()


# ---------------------------------------------------------------- which 20 keys


def strata(t: Triple, candidates: Tensor, size: int = 20, seed: int = 0) -> dict[str, Tensor]:
    """By stratum the numbers of `size` keys out of a pool, ascending; candidates: bool [tokens]. random; tail: the
    lowest p; threshold: the costs nearest to the pool's median; disagreement: ranks by p and by cost that are farthest
    apart; and two that the paper does not have: near, the smallest ||a - v_j||, and aligned, the largest cosine between
    v_j and a."""
    p, r, keys = t.p[candidates], t.r[candidates], candidates.nonzero()[:, 0]
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
    return {name: keys[bound.lowest(order, size)] for name, order in chosen.items()}
