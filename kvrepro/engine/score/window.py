"""Window scorers: the importance of each token for the last queries.

`windowed` combines an indicator, an aggregator over queries, a pooling over tokens and a reduction over the query heads
of a KV head; `catalogue.WINDOWS` lists the published methods. `aggregate="defensive"` works with every indicator
(DefensiveKV, appendix J). All scores are float32 [batch, kv_heads, tokens], large = keep. Where a method leaves out
the window's own tokens, they score 0, and the guard `recent` keeps them.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from kvrepro.engine.allocate import select
from kvrepro.engine.condition import Count, NotNegative, Odd, Positive, Share, Size
from kvrepro.engine.observe import Observation
from kvrepro.engine.shapes import Counts, Mask, Probabilities, RowFloats, Scores

Indicator = Callable[..., Probabilities]  # of an observation


class How(NamedTuple):
    """How `windowed` reduces importance to a score: the parameters that window scorers share. A policy names those that
    it sets among its own (`kvrepro.engine.policy.named`)."""

    aggregate: Literal["mean", "sum", "max", "mean_var", "defensive"] = "mean"  # over the window's queries
    pool: Literal["none", "average", "max"] = "none"  # along tokens; an average counts zeros beyond the ends
    kernel: Odd = 5  # tokens that are pooled
    group: Literal["mean", "sum", "max", "union"] = "mean"  # over a KV head's query heads
    pool_at: Literal["query", "head", "kv_head"] = "head"  # what is pooled: before which reduction
    over: Literal["past", "all"] = "past"  # the tokens that count: "past" leaves out the window's own
    rescale: bool = False  # a pooled query to its former sum
    gamma: NotNegative = 200.0  # weight of the variance in "mean_var"


# ---- indicators: float32 [batch, kv_heads, group, window, tokens], 0 where the query may not look


def attention(o: Observation) -> Probabilities:
    """p."""
    return o.attention


def attention_norm(o: Observation) -> Probabilities:
    """p ||v W_O||_1."""
    return o.attention * o.projected_norm[..., None, :]


def perturbation(o: Observation, eps: Positive = 1e-6, round_p: bool = False) -> Probabilities:
    """(p / (1 - p + eps))^2 ||a - v||^2: squared change of a head's output, before W_O, if this token alone left.
    round_p: p and a are first rounded to bfloat16. Then p above 0.998 becomes 1 and the factor 1 / eps^2. Source:
    DropKV, Lemma 1 and Algorithm 2; dropkv_cache.py of AozhongZhang/DropKV@67cdfeb."""
    p, a, v = o.attention, o.outputs, o.values.float()
    if round_p:
        p, a = p.bfloat16().float(), a.bfloat16().float()
    far = torch.einsum("bgrwd,bgnd->bgrwn", a, v).mul_(-2)
    far += a.square().sum(-1)[..., None] + v.square().sum(-1)[:, :, None, None]
    return far.clamp_(min=0).mul_((p / (1 - p + eps)).square_())


def anchor(o: Observation) -> Probabilities:
    """p <a, v>: how far this token pulls along the head's output. Source: AnDPro (Geng et al. 2025), equation 15."""
    return torch.einsum("bgrwd,bgnd->bgrwn", o.outputs, o.values.float()).mul_(o.attention)


KERNELS: dict[Indicator, str] = {attention: "attention", perturbation: "perturbation", anchor: "anchor"}


def windowed(o: Observation, importance: Indicator, how: How = How(), **extra: Any) -> Scores:
    """An indicator, with its own parameters `extra`, reduced over the window's queries and a KV head's group. Backend
    triton computes and reduces those of `KERNELS` in a kernel. Of `how`, the aggregate "mean_var" adds gamma times the
    unbiased variance; "defensive" pools first, takes the max over queries and group, and raises it to at least the
    head's mean; the group's "union" is minus the best rank in any query head, so that a KV head keeps the union of
    their choices."""
    defensive = how.aggregate == "defensive"
    if defensive:
        how = how._replace(aggregate="max", pool_at="query", group="max")
    outside = ~(o.past if how.over == "past" else o.alive)
    x = _fused(o, KERNELS[importance], how, outside, extra) if o.by_kernels and importance in KERNELS else None
    if x is None:
        x = importance(o, **extra).masked_fill(outside[:, :, None, None], 0.0)
        if how.pool_at == "query":
            x = _pooled(x, outside, how)
        x = _grouped(_aggregated(o, x, how), outside, how)
    return _no_less_than_mean(x, outside) if defensive else x


def _fused(o: Observation, indicator: str, how: How, outside: Mask, extra: dict[str, Any]) -> Scores | None:
    """`windowed` by passes of a Triton kernel over keys and values. The kernel aggregates over queries and, unless
    pooling comes in between, reduces over the group. None: the kernel does not have this pooling."""
    from kvrepro_kernels import window_scores

    pools_queries = how.pool_at == "query" and how.pool != "none"
    if pools_queries and (how.aggregate != "max" or how.group == "union" or how.rescale):
        return None
    log_sums, outputs = o.attended
    if extra.get("round_p"):
        outputs = outputs.bfloat16().to(outputs)
    extra |= {"indicator": indicator, "scale": o.scaling, "starts": o.starts, "present": o.query_positions.ge(0).sum(1)}
    one_pass = partial(window_scores, o.queries, o.keys, o.values, log_sums, outputs, last=o.last_seen, **extra)
    if pools_queries:
        seen = o.last_in_past if how.over == "past" else o.last_seen  # of the tokens that are pooled
        x = one_pass(aggregate="max", reduction=how.group, pool=how.kernel, pool_by=how.pool, last=seen)
        return x.masked_fill_(outside, 0.0)
    varies, pooled_last = how.aggregate == "mean_var", how.pool == "none" or how.pool_at == "kv_head"
    linear = how.group in ("mean", "sum") and how.pool != "max"
    inside = linear or (how.group != "union" and pooled_last and not varies)
    reduction = how.group if inside else "none"
    x = one_pass(aggregate="mean" if varies else how.aggregate, reduction=reduction)
    if varies and o.queries.shape[2] > 1:
        x += how.gamma * one_pass(aggregate="variance", reduction=reduction)
    if inside:
        return _pooled(x.masked_fill_(outside, 0.0), outside, how)
    return _grouped(x.unflatten(1, (-1, o.group)).masked_fill_(outside[:, :, None], 0.0), outside, how)


def _voters(o: Observation) -> Tensor:
    """Queries that count in a token's mean, bool [batch, kv_heads or 1, 1, window, tokens or 1]: all, with 0 for later
    tokens, under `span_local` those of the token's span."""
    voters = (o.query_positions >= 0)[:, None, None, :, None]
    if o.span_local:
        same_span = o.span(o.positions)[:, :, None, :] == o.span(o.query_positions)[:, None, :, None]
        voters = voters & same_span[:, :, None]
    return voters


def _aggregated(o: Observation, x: Tensor, how: How) -> Tensor:
    """Aggregate over the window's queries: [batch, kv_heads, group, tokens]."""
    if how.aggregate == "sum":
        return x.sum(3)
    if how.aggregate == "max":
        return x.amax(3)
    mean = x.sum(3) / _voters(o).sum(3).clamp(min=1)
    return mean if how.aggregate == "mean" else mean + how.gamma * _variance(o, x)


def _variance(o: Observation, x: Tensor) -> Tensor:
    """The unbiased variance over the queries that count; 0 if there is only one."""
    voters = _voters(o)
    n = voters.sum(3)
    mean = x.sum(3) / n.clamp(min=1)
    return ((x - mean[..., None, :]).square_() * voters).sum(3) / (n - 1).clamp(min=1)


def _no_less_than_mean(x: Scores, outside: Mask) -> Scores:
    """Raise every score to at least its head's mean, DefensiveKV's prior; tokens `outside` are 0 and do not count."""
    mean = x.sum(-1, keepdim=True) / (~outside).sum(-1, keepdim=True).clamp(min=1)
    return torch.maximum(x, mean).masked_fill_(outside, 0.0)


def _pooled(x: Tensor, outside: Mask, how: How) -> Tensor:
    """Pool along tokens. Tokens `outside` count as 0 in an average, are absent from a max, and are 0 afterwards."""
    if how.pool == "none":
        return x
    out = outside.view(*outside.shape[:2], *[1] * (x.dim() - 3), outside.shape[-1])
    y = pooled(x.masked_fill(out, -torch.inf) if how.pool == "max" else x, how.pool, how.kernel).masked_fill_(out, 0.0)
    if how.rescale and how.pool_at == "query":
        return y * (x.sum(-1, keepdim=True) / y.sum(-1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny))
    return y


def pooled(x: Tensor, pool: str, kernel: int) -> Tensor:
    """Pool over `kernel` neighbours along the last axis: their average, with zeros beyond the ends, or the largest."""
    if pool == "none":
        return x
    along = F.avg_pool1d if pool == "average" else F.max_pool1d
    return along(x.reshape(-1, 1, x.shape[-1]), kernel, 1, kernel // 2).view(x.shape)


def _grouped(x: Tensor, outside: Mask, how: How) -> Tensor:
    """Reduce over the query heads of a KV head, with pooling before or after: [batch, kv_heads, tokens]."""
    if how.pool_at == "head":
        x = _pooled(x, outside, how)
    if how.group == "union":
        key = x.masked_fill(outside[:, :, None], -torch.inf).flip(-1)
        order = key.argsort(dim=-1, descending=True, stable=True)
        place = torch.arange(x.shape[-1], device=x.device).expand_as(order)
        x = -torch.empty_like(order).scatter_(-1, order, place).flip(-1).amin(2).float().masked_fill_(outside, 0.0)
    else:
        x = {"mean": x.mean, "sum": x.sum, "max": x.amax}[how.group](2)
    return _pooled(x, outside, how) if how.pool_at == "kv_head" else x


# ---- methods


def snapkv(o: Observation, how: How = How(pool="average")) -> Scores:
    """s_j = mean over the group of Pool_k(mean over the window's queries of p_j), tokens before the window only. The
    original sums instead of averaging, which ranks the same, and gives every query head its own cache; within one KV
    head's budget that is group="union". Also the score of PyramidKV, Ada-KV and CriticalKV's first stage. Source:
    SnapKV (Li et al. 2024), equations 2 and 3; snapkv_press.py of NVIDIA/kvpress@8bb29b9."""
    return windowed(o, attention, how)


def cake(o: Observation, how: How = How("mean_var", "average")) -> Scores:
    """s_j = mean over the group of Pool_k(mean_t p + gamma Var_t p), tokens before the window only. Source: CAKE (Qin
    et al. 2025), equation 11; cake_global_press.py of FFY0/DefensiveKV@9251b95."""
    return windowed(o, attention, how)


def cake_preference(o: Observation, tau1: Positive = 1.0, tau2: Positive = 1.0) -> Tensor:
    """P = H^(1/tau1) V^(1/tau2) of a layer, float32 [batch], from attention p to the tokens before the window. H = -sum
    p ln(p + 1e-10) over heads, queries and tokens; V = sum over heads and tokens of p's unbiased variance over the
    queries. Source: CAKE, equations 5 to 7; cake_global_press.py of FFY0/DefensiveKV@9251b95, which takes tau (1.6,
    0.6) for every model and budget; the original tunes them (Llama-3.1: 1.6, 0.4 at 1,024 tokens)."""
    p = o.attention.masked_fill(~o.past[:, :, None, None], 0.0)
    scatter = _variance(o, p).sum((1, 2, 3))
    entropy = -(p * (p + 1e-10).log_()).sum((1, 2, 3, 4))
    return entropy.clamp(min=0) ** (1 / tau1) * scatter ** (1 / tau2)


def critical(
    o: Observation,
    scores: Scores,
    counts: Counts,
    protected: Mask,
    alpha: Share = 0.5,
    eps: NotNegative = 1e-4,
    exempt_floor: Share = 0.0,
) -> tuple[Scores, Mask]:
    """CriticalKV's two stages: the int(alpha * count) best of each head are exempt, protected tokens first; the rest is
    scored (s_j + eps) times the group's mean of ||v_j W_O||_1.

    Returns (scores, exempt tokens). With Ada-KV's counts it is Critical-AdaKV. There the public code also exempts
    Ada-KV's floor, int(exempt_floor * budget) tokens, which matters in heads with less than floor / alpha of an equal
    share. In the public code the window is kept only if the first stage has room for it; here protected tokens always
    stay.
    Source: CriticalKV (Feng et al. 2025), Algorithm 1; criticalkv_press.py of NVIDIA/kvpress@8bb29b9.
    """
    first = torch.maximum(counts.double() * alpha, counts.double().mean(1, keepdim=True) * exempt_floor)
    first = torch.maximum((first + 1e-9).long(), (protected & o.alive).sum(-1))
    exempt = select(scores.masked_fill(~o.alive, -torch.inf), protected, first)
    return ((scores + eps) * o.mean_projected_norm).masked_fill(~o.alive, -torch.inf), exempt


def andpro(o: Observation, how: How = How("sum", kernel=7), chunk: Count = 0, window: Size = 32) -> Scores:
    """s_j = sum over the window's queries of p_j <a, v_j>, mean over the group.

    chunk > 0 follows the public code. Each row of p is max-pooled over all tokens. The anchor is not a but the sum of
    p v over the droppable chunks of `chunk` tokens, all but the first and the last `window / chunk`, which stay. A
    chunk's tokens share their sum. The public code ranks query heads jointly; here the group's max ranks KV heads. It
    takes a budget of tokens for a number of chunks (128 tokens, window 32: 384 kept); here a budget is tokens. If the
    length is no multiple of `chunk`, the window that stays here holds up to chunk - 1 tokens more than its chunks do.
    Source: AnDPro (Geng et al. 2025), equation 15; snapkv_utils.py of MIRALab-USTC/LLM-AnDPro.
    """
    if not chunk:
        return windowed(o, anchor, how._replace(over="all"))
    number = (o.alive.cumsum(-1) - 1).clamp(min=0) // chunk
    droppable = o.alive & (number > 0) & (number <= number[..., -1:] + window // -chunk)
    outside = ~droppable
    p, v = _pooled(o.attention, ~o.alive, how), o.values.float()
    pull = torch.einsum("bgrwn,bgnd->bgrwd", p * droppable[:, :, None, None], v)
    x = torch.einsum("bgrwd,bgnd->bgrwn", pull, v).mul_(p).masked_fill_(outside[:, :, None, None], 0.0)
    defensive = how.aggregate == "defensive"
    if defensive:
        how = how._replace(aggregate="max", group="max")
    x = _aggregated(o, x, how)
    where = number[:, :, None].expand_as(x)
    together = torch.zeros_like(x).scatter_add_(-1, where, x).gather(-1, where)
    score = _grouped(together, outside, how._replace(pool="none")).masked_fill_(outside, 0.0)
    return _no_less_than_mean(score, outside) if defensive else score


def dropkv(
    o: Observation, eps: Positive = 1e-6, round_p: bool = False, how: How = How("sum", "max", kernel=11)
) -> Scores:
    """s_j = Pool_k(mean over the group, sum over the window's queries, of (p_j / (1 - p_j + eps))^2 ||a - v_j||^2). The
    cost of evicting j, so large = keep. Pooling comes last and runs over all tokens: the window's scores reach k // 2
    places left. The paper's algorithm is per head; the mean over the group stands in the code only. Source: DropKV,
    section 3.3 and Algorithm 1 (max pooling); dropkv_cache.py of AozhongZhang/DropKV@67cdfeb (average pooling, p in
    bfloat16)."""
    return windowed(o, perturbation, how._replace(pool_at="kv_head", over="all"), eps=eps, round_p=round_p)


def defensive_kv(
    o: Observation,
    asked: RowFloats | None = None,
    how: How = How("defensive", "average", over="all"),
    share: Literal["none", "layer", "heads"] = "none",
    mass: Share = 0.0,
) -> Scores:
    """s_j = max(R_j, mean_i R_i) N_j, with R_j the largest pooled attention over queries and group, N_j the group's
    mean of ||v_j W_O||_1.

    share: N unchanged ("none"), divided by its sum over the layer's tokens and KV heads ("layer", Layer-DefensiveKV),
    or by its sum over the KV heads that hold the position ("heads", the public code of both). mass > 0: the tokens with
    the first `mass` of attention, and the window, get the layer's largest score (`_first_mass`).
    Source: DefensiveKV, Algorithms 1 and 2; efficient_defensivekv_press.py and efficient_layer_defensivekv_press.py of
    FFY0/DefensiveKV@9251b95, whose further steps are over="past", rescale, share="heads" and mass=0.9.
    """
    risk = windowed(o, attention, how._replace(group="max", pool_at="query"))
    scores = risk * _norm_over(o, share)
    return _first_mass(o, scores, asked, mass) if mass else scores


def _norm_over(o: Observation, share: str) -> Scores:
    """N_j, or its share of the sum over the layer or over the KV heads that hold its position; 0 in dead slots."""
    norm = o.mean_projected_norm.masked_fill(~o.alive, 0.0)
    if share == "none":
        return norm
    if share == "layer":
        return norm / norm.sum((1, 2), keepdim=True)
    if o.positions.stride(1) == 0:  # all heads hold the same tokens
        return norm / norm.sum(1, keepdim=True).clamp(min=torch.finfo(norm.dtype).tiny)
    where = o.positions.clamp(min=0).flatten(1)
    total = norm.new_zeros(len(norm), int(o.positions.max()) + 1).scatter_add_(1, where, norm.flatten(1))
    return norm / total.gather(1, where).view_as(norm).clamp(min=torch.finfo(norm.dtype).tiny)


def _first_mass(o: Observation, scores: Scores, asked: RowFloats, mass: float) -> Scores:
    """Scores in which the window gets the layer's largest score, and so do the tokens that fill the first `mass` - b of
    each head's mean attention to the past: without the one that crosses it, and at most int(share (n - w) - w) of them,
    where share is asked / n, the share of the head's n tokens that stays, and w the window.

    b is meant as the window's attention. The public code sums it after the window has been cut off, so it is the
    attention on as many tokens before the window, mean over the layer's heads and queries. Only in the public code,
    which takes a negative cap for a slice's end: then nearly all tokens tie. Here it is 0.
    """
    window_size = o.window.sum(-1)
    near = o.past & (o.past.flip(-1).cumsum(-1).flip(-1) <= window_size[..., None])  # as many tokens before the window
    held = windowed(o, attention)
    b = (held * near).sum(-1).mean(1)
    held = held / held.sum(-1, keepdim=True).clamp(min=torch.finfo(held.dtype).tiny)
    filled = (held.sort(-1, descending=True).values.cumsum(-1) < (mass - b)[:, None, None]).sum(-1)
    held_tokens = o.alive.sum(-1)
    of_past = asked[:, None] * (held_tokens - window_size) / held_tokens.clamp(min=1)
    filled = torch.minimum(filled, ((of_past + 1e-9).long() - window_size).clamp(min=0))
    first = select(held.masked_fill(~o.past, -torch.inf), torch.zeros_like(o.past), filled)
    among = (o.past | ~o.past.any(2, keepdim=True).any(1, keepdim=True)) & o.alive  # the past, if there is any
    top = scores.masked_fill(~among, -torch.inf).amax((1, 2), keepdim=True)
    return torch.where(first | o.window, top, scores)
