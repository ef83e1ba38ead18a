"""Scorers that follow attention over many queries, or the last query alone: H2O, Scissorhands, TOVA, Quest; and those
of the protection paper, which rank once for all layers.

float32 `[batch, kv_heads, tokens]`, large = keep. Sums over queries come with the observation; no attention matrix is
built here.
"""

from collections.abc import Callable
from random import Random
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kvrepro.engine import allocate
from kvrepro.engine.condition import Share, Size
from kvrepro.engine.observe import Observation
from kvrepro.engine.score.window import How, attention, windowed
from kvrepro.engine.shapes import KeyValue, Mask, Positions, RowInts, Scores


def by_sum(name: str, meaning: str) -> Callable[[Observation], Scores]:
    """A scorer that ranks by one of `Observation.sums` as it is. meaning: its docstring."""

    def score(o: Observation) -> Scores:
        return o.sums[name].float()

    score.__doc__ = meaning
    return score


def h2o(o: Observation, extended: bool = True) -> Scores:
    """s_j = sum over queries t >= j of p[t, j], mean over the group / number of these queries (offline H2O).

    Needs `sums["mass"]`. A sliding layer's token is divided by the queries that could see it. A prompt split fairly
    over spans counts the queries of j's own span alone, and the rest is not renormalised: `sums["span_mass"]`. The
    public code zeroes attention between *unextended* spans and divides by the same number: without `extended` the sum
    is `sums["marked_mass"]`, where positions in no span see all, are seen by all and are divided by all later queries.
    Source: leakage paper, also E.5; kvpress ObservedAttentionPress, which has no recent window.
    """
    later = (o.seen[:, None, None] - o.positions).clamp(min=1)
    if not o.span_local:
        return o.sums["mass"].float() / (later if o.sliding is None else later.clamp(max=o.sliding))
    real = torch.arange(o.span_of.shape[1], device=o.span_of.device) < o.seen[:, None]
    span_queries = torch.nn.functional.one_hot(o.span_of) * real[..., None]
    later_queries = span_queries.flip(1).cumsum(1).flip(1)  # [batch, seen, spans], itself included
    where = o.positions.flatten(1).clamp(0, o.span_of.shape[1] - 1)
    eligible = later_queries.gather(2, o.span_of[..., None])[..., 0].gather(1, where).view_as(o.positions)
    if not extended and o.unextended is not None:
        marked = o.unextended.to(where.device).gather(1, where).view_as(o.positions) >= 0
        eligible = torch.where(marked, eligible, later)
    return o.sums["span_mass" if extended else "marked_mass"].float() / eligible


h2o_online = by_sum("mass", "s_j = sum over all queries so far of p[t, j], mean over the group: not normalised")


def recent_share(o: Observation, scores: Scores, budget: RowInts, share: Share = 0.5) -> Mask:
    """The newest int(share * budget) tokens: H2O spends this part of its budget on recent tokens. Source: Zhang et al.
    2023: half heavy, half recent."""
    return allocate.recent(o, (budget.double() * share + 1e-9).long()[:, None, None])


def scissorhands(o: Observation, signal: Literal["low", "mass"] = "low") -> Scores:
    """s_j = -(number of the last 400 queries t with p[t, j] < 1 / (t + 1)), summed over the group. The paper drops half
    the cache on overflow; here the budget says how many tokens stay. While a prompt comes in chunks of fewer than 400
    tokens, and while tokens are generated, earlier counts stay, since a sliding window would have to remember every
    query's. Needs `sums["low"]`, or with signal "mass" `sums["mass"]`: a public code accumulates attention instead,
    which is close to H2O. Source: Liu et al. 2023, Algorithm 2; KVCache-Factory."""
    return -o.sums["low"].float() if signal == "low" else o.sums["mass"].float()


def tova(o: Observation) -> Scores:
    """s_j = mean over all query heads of p[last, j], so that every head of a layer keeps the same tokens. With
    `span_local`, each span's last token takes the place of the last one. Source: Oren et al. 2024; TOVA's
    src/tova_cache.py."""
    if o.by_kernels:
        return windowed(o.last(1), attention, How(over="all")).mean(1, keepdim=True).expand_as(o.positions)
    p = o.attention if o.span_local else o.last(1).attention
    return p.mean((1, 2)).sum(1)[:, None].expand_as(o.positions)


def quest(o: Observation, page: Size = 16, group: Literal["max", "mean"] = "max") -> Scores:
    """s_j = upper bound of the last query's logits in j's page: sum_d max(q_d max_d, q_d min_d), largest of the group.
    Pages are `page` true positions wide. Quest evicts nothing and repeats keys for every query head; as an eviction
    policy it needs a reduction over the group ("max" or "mean"), on which the sources are silent. Source: Tang et al.
    2024, Algorithm 1."""
    last = o.queries[:, :, -1].float().unflatten(1, (-1, o.group))
    page_of = o.positions.clamp(min=0) // page
    bounds = _bounds(last, o.keys, o.alive, page_of)
    reduced = bounds.amax(2) if group == "max" else bounds.mean(2)
    return reduced.gather(2, page_of).masked_fill(~o.alive, 0.0) * o.scaling


def pages_read(budget: RowInts, page: int) -> RowInts:
    """Pages that each query head reads at a step: as many as the budget holds, three at least (see `page_mask`)."""
    return (budget // page).clamp(min=3)


def page_mask(
    queries: Float[Tensor, "batch heads dim"], keys: KeyValue, alive: Mask, page: int, budget: RowInts | int
) -> Bool[Tensor, "batch heads tokens"]:
    """Tokens that each query head reads at this step: those of its `pages_read` best pages. A page is `page`
    neighbouring tokens of a row's cache, counted from its first living token; pages rank by `quest`'s upper bound,
    among equals the later first. Nothing is evicted. Source: Tang et al. 2024; Quest's evaluation/quest_attention.py,
    which reads layers 0 and 1 in full."""
    heads, tokens = queries.shape[1], keys.shape[2]
    q = queries.float().unflatten(1, (keys.shape[1], -1))
    page_of = (alive.cumsum(-1) - 1).clamp(min=0) // page
    bounds = _bounds(q, keys, alive, page_of)
    order = bounds.flip(-1).argsort(dim=-1, descending=True, stable=True)
    rank = order.argsort(dim=-1)
    pages = pages_read(torch.as_tensor(budget, device=rank.device), page).view(-1, 1, 1, 1)
    chosen = (rank < pages).flip(-1)
    place = page_of[:, :, None].expand(-1, -1, q.shape[2], -1)
    return (chosen.gather(3, place) & alive[:, :, None]).reshape(-1, heads, tokens)


def _bounds(
    q: Float[Tensor, "batch kv_heads group dim"], keys: KeyValue, alive: Mask, page_of: Positions
) -> Float[Tensor, "batch kv_heads group pages"]:
    """The largest unscaled logit that a key in the bounding box of a page's keys could have; -inf for an empty page."""
    pages = int(page_of.max()) + 1
    index = page_of[..., None].expand(keys.shape)
    tokens = torch.zeros(*keys.shape[:2], pages, device=keys.device).scatter_add_(2, page_of, alive.float())
    empty = tokens[..., None] == 0
    corners = []
    for reduce, outside in (("amax", -torch.inf), ("amin", torch.inf)):
        k = keys.float().masked_fill(~alive[..., None], outside)
        corner = k.new_full((*keys.shape[:2], pages, keys.shape[3]), outside).scatter_reduce(2, index, k, reduce)
        corners.append(corner.masked_fill(empty, 0.0))
    bound = torch.einsum("bgrd,bgpd->bgrp", q.clamp(min=0), corners[0])
    bound += torch.einsum("bgrd,bgpd->bgrp", q.clamp(max=0), corners[1])
    return bound.masked_fill(empty[..., 0][:, :, None], -torch.inf)


# ---- one ranking for all layers (regime SharedCap): L last use, a latest, M largest, S summed attention, t the step


def h2o_simple(o: Observation) -> Scores:
    """0.7 S + 0.1 max(a, M) + 1[t - L <= 64], mass and a bonus for recent use. Artifact's simplified H2O. float64,
    since beside a bonus of 1 small masses would be equal in float32."""
    recent = (o.step - o.sums["last_use"] <= 64).double()
    return 0.7 * o.sums["summed"].double() + 0.1 * torch.maximum(o.sums["latest"], o.sums["largest"]) + recent


def snapkv_simple(o: Observation, snapkv_bonus: str = "peak") -> Scores:
    """S + max(a, M) in the authors' code, S + a in their text. Artifact's simplified SnapKV; paper, Table 19."""
    latest = o.sums["latest"]
    bonus = latest if snapkv_bonus == "current" else torch.maximum(latest, o.sums["largest"])
    return o.sums["summed"] + bonus


def ada_kv_simple(o: Observation) -> Scores:
    """S + 0.5 M. Artifact's simplified Ada-KV; paper, Table 19."""
    return o.sums["summed"] + 0.5 * o.sums["largest"]


def random_sample(o: Observation, budget: RowInts, guarded: Mask, draws: list[Random]) -> Scores:
    """1 for the tokens that a draw without replacement leaves, 0 for those that must go. The draw is `random.sample`
    over the unguarded positions in ascending order. The one scorer with a memory: each row's generator in `draws`
    advances with every call, as in the artifact."""
    scores = torch.ones(o.positions.shape, device=o.positions.device)
    excess = o.alive[:, 0].sum(1) - budget
    for row, generator in enumerate(draws):
        slots = (o.alive[row, 0] & ~guarded[row, 0]).nonzero()[:, 0].tolist()
        scores[row, 0, generator.sample(slots, min(max(0, int(excess[row])), len(slots)))] = 0.0
    return scores
