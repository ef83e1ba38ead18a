"""Guards, quotas and budgets: which tokens stay in each head, given scores, protected tokens and counts.

Guards are masks `[batch, kv_heads, tokens]` of tokens that may not leave. Budgets are counts `[batch, kv_heads]` that
include them. `budget` int64 [batch] is what a KV head keeps on average: the counts of a layer sum to budget * kv_heads,
those of a pyramid and of the functions over all layers only over all layers together. A slot scored -inf is dead.

Quotas split a budget over the spans of a prompt, so that no instruction is forgotten faster than its neighbours
(leakage paper, sections 5.2 and 5.3, appendix E):

    parts = split(o, counts, protected, fair, default)    # tokens that each head may keep of each span
    keep  = select_parts(scores, protected, parts, o)     # the best of each span, as many as its part
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Annotated, TypeAlias

import torch
from annotated_types import Ge
from torch import Tensor
from torch.nn.functional import pad

from kvrepro.engine.condition import Count, Share
from kvrepro.engine.observe import Observation
from kvrepro.engine.shapes import Counts, Mask, Parts, RowFloats, RowInts, Scores
from kvrepro.errors import InputError, PolicyError

RowCount: TypeAlias = int | Tensor  # the same for every row, or one per row: [batch, 1, 1]
_kernels: ContextVar[bool] = ContextVar("kernels", default=False)


@contextmanager
def by_kernels(use: bool = True) -> Iterator[None]:
    """Inside the block kernels select where they can, if `use` is true."""
    before = _kernels.set(use)
    try:
        yield
    finally:
        _kernels.reset(before)


def select(scores: Scores, protected: Mask, counts: Counts, ties: Tensor | None = None) -> Mask:
    """A mask of the protected tokens of each head, then its best-scored; among equals the later token, or the one with
    the larger `ties`, int64, distinct. Exactly `counts` [batch, kv_heads] tokens per head. A slot scored -inf is dead
    and never kept; a head with fewer tokens than its count keeps them all. Raises InputError for a count below the
    protected tokens, and for NaN scores."""
    if ties is None and _by_kernel(scores):  # one launch, which also finds what `ensure_room` and `ensure_numbers` do
        problems = scores.new_zeros(counts.numel(), 3, dtype=torch.int32)
        kept = largest(scores, counts, protected, problems)
        if not problems[:, :2].any():
            return kept
    dead = scores.isneginf()
    firm = protected & ~dead
    ensure_room(counts, firm.sum(-1))
    ensure_numbers(scores)
    scores = scores.masked_fill(firm, torch.inf)
    if ties is not None:
        rank = lexsort(scores, ties).argsort(dim=-1)
        return (rank >= scores.shape[-1] - counts[..., None]) & ~dead
    return largest(scores, counts)


def largest(scores: Tensor, counts: Tensor, firm: Mask | None = None, problems: Tensor | None = None) -> Mask:
    """A mask of the `counts` [...] largest of scores [..., tokens], or [..., more axes, tokens] all together; never
    -inf. `firm` tokens come first, and among equals the later one. All rows are sorted as one, with the row's number in
    front of each key, because a GPU sorts rows one after another. problems: what the kernel finds amiss."""
    flat = scores.flatten(counts.dim())
    if _by_kernel(flat):
        from kvrepro_kernels import largest as by_kernel

        rows = flat.reshape(-1, flat.shape[-1]).contiguous()
        protected = None if firm is None else firm.reshape(rows.shape).contiguous()
        return by_kernel(rows, counts.flatten(), protected, problems=problems).view_as(scores)
    if firm is not None:
        flat = flat.masked_fill(firm.reshape(flat.shape) & ~flat.isneginf(), torch.inf)
    n = flat.shape[-1]
    bits = (flat + 0.0).view(torch.int32)  # + 0.0 turns -0 into 0
    bits = torch.where(bits < 0, bits ^ torch.iinfo(torch.int32).max, bits)  # in the order of scores
    place = n.bit_length()
    order = (bits.long() + 2**31 << place) + torch.arange(n, device=flat.device)
    order += (torch.arange(counts.numel(), device=order.device) << 32 + place).view(*counts.shape, 1)
    best = order.flatten().sort().values.view_as(order)
    last = best.gather(-1, (n - counts[..., None]).clamp(0, n - 1))
    return ((order >= last) & (counts > 0)[..., None] & ~flat.isneginf()).view_as(scores)


def _by_kernel(scores: Tensor) -> bool:
    """May a kernel select by these scores?"""
    if not _kernels.get():
        return False
    from kvrepro_kernels import LONGEST

    return scores.dtype == torch.float32 and bool(scores.shape[-1] <= LONGEST)


def ensure_room(counts: Tensor, needed: Tensor, whose: str = "") -> None:
    """Raise InputError, with both numbers, if more tokens are protected than a count has room for."""
    if (needed > counts).any():
        room, needed = counts.expand_as(needed).flatten(), needed.flatten()
        worst = (needed - room).argmax()
        message = f"budget {int(room[worst])} < {int(needed[worst])} protected tokens{whose}"
        raise InputError(f"{message}: raise the budget, or protect less")


def ensure_numbers(scores: Scores) -> None:
    """Raise PolicyError if a score is NaN: such a token cannot be ranked."""
    if nan_count := int(scores.isnan().sum()):
        raise PolicyError(f"{nan_count} of {scores.numel()} scores are NaN: mend the scorer")


def lexsort(*keys: Tensor) -> Tensor:
    """Places along the last axis in ascending order of the first key, equals in the order of the next key; stable."""
    order = keys[-1].argsort(dim=-1, stable=True)
    for key in reversed(keys[:-1]):
        order = order.gather(-1, key.gather(-1, order).argsort(dim=-1, stable=True))
    return order


# ---- guards


def protected_count(fraction: float, budget: int, rounding: str = "floor") -> int:
    """Tokens guarded on one side: `fraction` of `budget`, at least 4, and 0 if the fraction is 0. Protection paper,
    section 3 (26 of 256: "ceil"); the artifact rounds down (25 of 256)."""
    if fraction == 0:
        return 0
    # The tiny slack keeps products such as 0.1 * 70 = 7.000000000000001 from rounding up to 8.
    return max(4, math.floor(fraction * budget) if rounding == "floor" else math.ceil(fraction * budget - 1e-9))


def sinks(o: Observation, n: RowCount) -> Mask:
    """The `n` oldest tokens that each head holds; 0 protects none. StreamingLLM (Xiao et al. 2023) keeps 4."""
    if isinstance(n, int) and n == 0:
        return torch.zeros_like(o.alive)
    return o.alive & (o.alive.cumsum(-1) <= n)


def recent(o: Observation, n: RowCount) -> Mask:
    """The `n` newest tokens that each head holds; 0 protects none."""
    if isinstance(n, int) and n == 0:
        return torch.zeros_like(o.alive)
    newer = torch.arange(o.positions.shape[-1] - 1, -1, -1, device=o.positions.device)  # tokens lie flush right
    return o.alive & (newer < n)


def ends(o: Observation, prefix: RowCount, suffix: RowCount, end: RowCount | None = None) -> Mask:
    """The `prefix` oldest and the `suffix` newest tokens of each head. end: tokens of the prompt, at whose
    end a static suffix stays, whatever was generated since. Source: protection paper, sections 3 and 10."""
    last = recent(o, suffix) if end is None else o.alive & (o.positions >= end - suffix) & (o.positions < end)
    return sinks(o, prefix) | last


# ---- quotas over the spans of a prompt


def number_spans(tokens: int, spans: Sequence[Sequence[int]], extended: bool = True) -> Tensor:
    """Which span each of `tokens` positions lies in, int64 [tokens]. Spans are lists of positions, adjacent or not,
    numbered by their first one; of two spans at one position the later counts. extended: a position in no span joins
    the span before it, or else the first (Algorithm 1); otherwise it is -1."""
    span_of = torch.full((tokens,), -1)
    for i, span in enumerate(sorted(spans, key=min)):
        span_of[torch.as_tensor(span)] = i
    if extended:
        last = torch.where(span_of >= 0, torch.arange(tokens), -1).cummax(0).values
        span_of = torch.where(last >= 0, span_of[last.clamp(min=0)], span_of[span_of >= 0][0])
    return span_of


def span_windows(span_of: Tensor, window: int) -> Tensor:
    """Positions of the queries that a fair variant shows, int64, ascending: the last of each span, `window` in all. Of
    two spans the first gets floor(window / 2) queries (E.4); of more spans each gets its floored share. A span has at
    least one query, its last token, which is TOVA's anchor (E.7: window 1), and at most as many as it has tokens."""
    spans = int(span_of.max()) + 1
    ends = [window * s // spans for s in range(spans + 1)]
    shown = [(span_of == s).nonzero()[-max(1, ends[s + 1] - ends[s]) :, 0] for s in range(spans)]
    return torch.cat(shown).sort().values


def split(
    o: Observation,
    counts: Counts,
    protected: Mask,
    fair: float = 1.0,
    default: Mask | None = None,
    apart: Mask | None = None,
    rounding: str = "floor",
) -> Parts:
    """Tokens that each head keeps of each span, summing to `counts`: fair * b_fair + (1 - fair) * b_default.

    b_fair: each span's share of the count by its length, the shares' running sum rounded down ("floor": Algorithm 1,
    the remainder goes to the later span) or to the nearest ("round": section 5.2), per layer and KV head, which the
    paper leaves open. b_default: what `default`, the policy's selection without quotas, keeps of each span. apart:
    tokens that are kept first and left out of the shares (E.3: StreamingLLM's sinks). A span gets room for all its
    protected tokens, from the others. Raises InputError if the counts cannot hold the protected tokens.
    """
    counts = torch.minimum(counts, o.alive.sum(-1))
    apart = torch.zeros_like(o.alive) if apart is None else apart
    held = tally(o, apart)
    parts = held + _shares((counts - held.sum(-1)).clamp(min=0), tally(o, o.alive & ~apart), rounding)
    if fair < 1 and default is not None:
        mixed = fair * parts.double() + (1 - fair) * tally(o, default).double()
        parts = _steps((mixed.cumsum(-1) + 0.5 + 1e-9).floor().long())
    wanted = tally(o, protected)
    ensure_room(parts.sum(-1), wanted.sum(-1))
    missing = (wanted - parts).clamp(min=0).sum(-1)
    return torch.maximum(parts, wanted) - _shares(missing, (parts - wanted).clamp(min=0), "floor")


def select_parts(scores: Scores, protected: Mask, parts: Parts, o: Observation) -> Mask:
    """Of each span the protected tokens and then the best-scored, `parts` in all; among equals the later stays. Raises
    InputError for NaN scores."""
    ensure_numbers(scores)
    span = o.span(o.positions).masked_fill(~o.alive, parts.shape[-1])  # dead slots: a span of their own, part 0
    place = torch.arange(scores.shape[-1], device=scores.device).expand_as(span)
    order = lexsort(span, (~protected).long(), -scores, -place)  # newest first
    parts = pad(parts, (0, 1))
    sizes = torch.zeros_like(parts).scatter_add_(2, span, torch.ones_like(span))
    start = (sizes.cumsum(-1) - sizes).gather(2, span.gather(2, order))
    rank = place - start  # inside the span
    return torch.zeros_like(protected).scatter_(2, order, rank < parts.gather(2, span.gather(2, order)))


def tally(o: Observation, mask: Mask) -> Parts:
    """The number of living tokens of `mask` in each span."""
    counts = torch.zeros(*mask.shape[:2], o.spans, dtype=torch.long, device=mask.device)
    return counts.scatter_add_(2, o.span(o.positions), (mask & o.alive).long())


def _shares(total: Tensor, sizes: Tensor, rounding: str) -> Tensor:
    """Integers in proportion to `sizes` that sum to `total`; none exceeds its size unless all sizes do not suffice."""
    edges, all_of_them = sizes.cumsum(-1) * total[..., None], sizes.sum(-1, keepdim=True).clamp(min=1)
    return _steps(edges // all_of_them if rounding == "floor" else (2 * edges + all_of_them) // (2 * all_of_them))


def _steps(edges: Tensor) -> Tensor:
    return edges.diff(dim=-1, prepend=torch.zeros_like(edges[..., :1]))


# ---- budgets


def uniform(scores: Scores, protected: Mask, budget: RowInts) -> Counts:
    """The same `budget` for every head of every layer."""
    return budget[:, None].expand(-1, scores.shape[1])


def pyramid(
    scores: Scores,
    protected: Mask,
    budget: RowInts,
    o: Observation,
    beta: Annotated[float, Ge(1)] = 20,
    recent: Count = 0,
    inside: bool = True,
) -> Counts:
    """b_l = high - l (high - low) / (L - 1) tokens for layer l of L, with low = B / beta and high = 2 B - low.

    high is at most the number of tokens outside the window, low at least the number that a layer protects. Layers l
    and L - 1 - l always share 2 B; the public codes may miss it by a few. inside: B is the whole budget, and every
    layer gets B unless seen >= high >= low >= recent. Otherwise the `recent` tokens come on top of B, divisions are
    rounded down, and a prompt shorter than 2 B gets equal layers.
    Source: PyramidKV (Cai et al. 2024); pyramidkv_press.py of NVIDIA/kvpress@8bb29b9 (inside),
    pyramidkv_utils.py of Zefan-Cai/KVCache-Factory@c97f9d7 (on top).
    """
    apart = 0 if inside else recent
    share, room = (budget - apart).double(), (o.seen - recent).double()
    low = share / beta if inside else (share / beta).floor()
    high = torch.minimum(2 * share - low, room)
    low = 2 * share - high
    steep = (o.seen >= high) & (high >= low) & (low >= recent) if inside else o.seen >= 2 * share
    held = (protected & ~scores.isneginf()).sum(-1).amax(1) - apart
    low = torch.maximum(low, torch.minimum(held.double(), share))
    high = 2 * share - low
    step = (high - low) / max(o.layers - 1, 1)
    count = (high - min(o.layer, o.layers - 1 - o.layer) * (step if inside else step.floor())).round()
    if 2 * o.layer > o.layers - 1:
        count = 2 * share - count
    count = torch.where(steep & (2 * o.layer != o.layers - 1), count, share).long() + apart
    return uniform(scores, protected, count)


def adaptive(scores: Scores, protected: Mask, budget: RowInts, floor: Share = 0.2, blend: bool = False) -> Counts:
    """As many tokens for a head as it has among the best budget * kv_heads of its layer, and at least its floor.

    Default: each head first keeps its int(floor * budget) best tokens, protected ones first; the layer's best tokens
    fill the rest. blend: beside its protected tokens, a head gets (1 - floor) of its number among the layer's best and
    `floor` of an equal share, rounded to the exact sum by largest remainders; no single token is guaranteed.
    Source: Ada-KV (Feng et al. 2024), Algorithm 1; adakv_press.py of NVIDIA/kvpress@8bb29b9 (default), snapkv_utils.py
    of FFY0/AdaKV (blend).
    """
    firm = protected & ~scores.isneginf()
    held = firm.sum(-1)
    total = budget * scores.shape[1]
    ensure_room(total, held.sum(-1), f" of {scores.shape[1]} heads together")
    if not blend:
        if floor:
            firm = select(scores, protected, torch.maximum((budget.double() * floor + 1e-9).long()[:, None], held))
        return largest(scores, total, firm).sum(-1)
    free, scores = budget[:, None] - held, scores.masked_fill(protected, -torch.inf)
    among_best = largest(scores, free.sum(-1)).sum(-1)
    wish = (1 - floor) * among_best.double() + floor * free.double()
    return held + spread(wish, (~scores.isneginf()).sum(-1), free.sum(-1))


def joint(
    scores: Scores, protected: Mask, budget: RowInts, asked: RowFloats | None = None, exact: bool = False
) -> Counts:
    """As many tokens for a head as it has among the best budget * kv_heads of its layer; no floor. exact: rounded down
    after the product, as in efficient_ada_scorer_press.py of FFY0/DefensiveKV@9251b95. Source: DefensiveKV, Algorithm
    1."""
    (_, [counts]) = joint_layers([scores], [protected], budget, asked, exact)
    return counts


# ---- over all layers


def joint_layers(
    scores: list[Scores], protected: list[Mask], budget: RowInts, asked: RowFloats | None = None, exact: bool = False
) -> tuple[list[Scores], list[Counts]]:
    """As many tokens for a head as it has among the best budget * kv_heads * layers of all layers; no floor. exact: as
    in `joint`. Source: Layer-DefensiveKV, Algorithm 2, line 12; efficient_ada_global_scorer_press.py of
    FFY0/DefensiveKV@9251b95."""
    together, firm = _together(scores, protected)
    heads = [s.shape[1] for s in scores]
    total = (asked * sum(heads) + 1e-9).long() if exact and asked is not None else budget * sum(heads)
    ensure_room(total, firm.sum((1, 2, 3)), f" of {sum(heads)} heads together")
    counts = largest(together, total, firm).sum(-1)
    return scores, [counts[:, layer, :n] for layer, n in enumerate(heads)]


def per_layer(scores: list[Scores], protected: list[Mask], budget: RowInts) -> tuple[list[Scores], list[Counts]]:
    """The mean score over a layer's heads, for all of them: they keep the same tokens."""
    means = [s.mean(1, keepdim=True).expand_as(s) for s in scores]
    return means, list(map(uniform, scores, protected, [budget] * len(scores)))


def one_set(scores: list[Scores], protected: list[Mask], budget: RowInts) -> tuple[list[Scores], list[Counts]]:
    """The mean score over heads and layers, for all of them: they keep the same tokens. Layers hold the same tokens,
    flush right, but may differ in the number of dead slots before them."""
    width = min(s.shape[-1] for s in scores)
    mean = torch.stack([s[..., -width:].mean(1, keepdim=True) for s in scores]).mean(0)
    shared = [pad(mean, (s.shape[-1] - width, 0), value=-torch.inf).expand_as(s) for s in scores]
    return shared, list(map(uniform, scores, protected, [budget] * len(scores)))


def cake(
    scores: list[Scores],
    protected: list[Mask],
    budget: RowInts,
    summaries: list[Tensor],
    asked: RowFloats | None = None,
    floored: bool = False,
) -> tuple[list[Scores], list[Counts]]:
    """b_l = P_l / sum P * (C - w) L tokens beside the w protected ones for each head of layer l, `summaries` = P.

    What a layer gets beyond its number of tokens is spread evenly over the other layers; the sum C L is met exactly
    (largest remainders). The original shrinks earlier layers as each new one arrives, which ends in the same tokens.
    floored: as in the public code, C is the budget as it is asked for, every b_l is rounded down, and what is left over
    goes evenly to the layers that have room, the odd tokens to the first of them.
    Source: CAKE (Qin et al. 2025), equations 5 to 9; cake_scorer_press.py of FFY0/DefensiveKV@9251b95.
    """
    together, firm = _together(scores, protected)
    held, tokens = firm.sum(-1).amax(2), (~together.isneginf()).sum(-1).amax(2)
    total = (asked * len(scores) + 1e-9).long() if floored and asked is not None else budget * len(scores)
    ensure_room(total, held.sum(1), f" of {len(scores)} layers together")
    wish = torch.stack(list(summaries), 1).double()
    wish = torch.where(wish.sum(1, keepdim=True) > 0, wish, torch.ones_like(wish))
    free, room = total - held.sum(1), tokens - held
    wish = wish / wish.sum(1, keepdim=True) * free[:, None]
    counts = held + (_floored(wish.long(), room, free) if floored else spread(wish, room, free))
    return scores, list(map(uniform, scores, protected, counts.T))


# ---- whole numbers that sum to a total, and layers as one tensor


def _floored(wish: Tensor, limit: Tensor, total: RowInts) -> Tensor:
    """Whole wishes [batch, places] up to their limits, and the rest of `total` as CAKE's public code shares it out:
    first what limits cut off, then what rounding left over, both evenly over the places that are below their limit."""
    counts = torch.minimum(wish, limit)
    for more in ((wish - counts).sum(1), total - wish.sum(1)):
        below = counts < limit
        number = below.sum(1, keepdim=True).clamp(min=1)
        first = below.cumsum(1) <= more[:, None] % number
        counts = counts + below * (more[:, None] // number + first.long())
    return torch.minimum(counts, limit)


def spread(wish: Tensor, limit: Tensor, total: RowInts) -> Tensor:
    """Integers near `wish` [batch, places], none above its `limit`, that sum to `total` [batch], or to the limits' sum
    if that is less. Wishes that exceed the total are scaled down; what a limit cuts off goes in equal parts to the
    places below their limits; fractions are rounded by largest remainders."""
    limit = limit.clamp(min=0)
    total = torch.minimum(total, limit.sum(1)).clamp(min=0)
    share = torch.minimum(wish.double().clamp(min=0), limit)
    share = share * (total / share.sum(1).clamp(min=1e-30)).clamp(max=1)[:, None]
    gaps = (limit - share).sort(1).values
    wider = torch.arange(gaps.shape[1], 0, -1, device=gaps.device)  # places with this gap or a larger one
    missing = (total - share.sum(1))[:, None]
    more = ((missing - (gaps.cumsum(1) - gaps)) / wider).amax(1, keepdim=True)  # for each, once narrower gaps are full
    share = torch.minimum(share + more.clamp(min=0), limit)
    whole = torch.minimum((share + 1e-9).floor().long(), limit)
    short = total - whole.sum(1)
    part = ((share - whole) * 2**30).round()  # so that rounding errors break no ties: the earlier place wins
    remainder = torch.where(whole < limit, part, -torch.inf)
    place = remainder.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    return whole + (place < short[:, None]).long()


def _together(scores: list[Scores], protected: list[Mask]) -> tuple[Tensor, Mask]:
    """(scores of all layers [batch, layers, kv_heads, tokens], -inf where a layer has fewer; its living protected)."""
    heads, tokens = (max(s.shape[axis] for s in scores) for axis in (1, 2))
    missing = [(tokens - s.shape[2], 0, 0, heads - s.shape[1]) for s in scores]
    if any(map(any, missing)):
        scores = [pad(s, more, value=-torch.inf) for s, more in zip(scores, missing, strict=True)]
        protected = [pad(p, more) for p, more in zip(protected, missing, strict=True)]
    together = torch.stack(scores, 1)
    return together, torch.stack(protected, 1) & ~together.isneginf()
