"""Guards: boolean masks of tokens that a policy may not evict, `[batch, kv_heads, tokens]`. They never touch scores.
Quotas split a budget over the spans of a prompt, so that no instruction is forgotten faster than its neighbours.

    parts = split(o, counts, protected, fair, default)    # tokens that each head may keep of each span
    keep  = select_parts(scores, protected, parts, o)     # the best of each span, as many as its part

Source: leakage paper, sections 5.2 and 5.3, appendix E. A method's own fair variant is its scorer on an observation
that shows each span's last queries (`windows`) and lets them see their own span only (`span_local`): SnapKV and TOVA.
H2O and StreamingLLM (as its public code runs) then score otherwise; K-norm and the others do not change.
"""

import math
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from kvrepro.engine.allocate import ensure_numbers, ensure_room, lexsort
from kvrepro.engine.observe import Observation
from kvrepro.engine.shapes import Counts, Mask, Parts, RowInts, Scores
from kvrepro.errors import InputError

RowCount: TypeAlias = int | RowInts  # the same for every row, or one per row


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
        return o.nothing
    return o.alive & (o.alive.cumsum(-1) <= _rows(o, n))


def recent(o: Observation, n: RowCount) -> Mask:
    """The `n` newest tokens that each head holds; 0 protects none."""
    if isinstance(n, int) and n == 0:
        return o.nothing
    newer = torch.arange(o.positions.shape[-1] - 1, -1, -1, device=o.positions.device)  # tokens lie flush right
    return o.alive & (newer < _rows(o, n))


def ends(o: Observation, prefix: RowCount, suffix: RowCount, static_prompt_end: RowCount | None = None) -> Mask:
    """The `prefix` oldest and the `suffix` newest tokens of each head; a token in both counts once.

    static_prompt_end: tokens of the prompt; the suffix then stays at the prompt's last `suffix` positions, whatever was
    generated since. Source: protection paper, sections 3 and 10.
    """
    if static_prompt_end is None:
        return sinks(o, prefix) | recent(o, suffix)
    end = _rows(o, static_prompt_end)
    return sinks(o, prefix) | (o.alive & (o.positions >= end - _rows(o, suffix)) & (o.positions < end))


def whitelist(o: Observation, table: Tensor) -> Mask:
    """The tokens whose positions are marked in `table`, bool [batch, positions]; later positions are not protected.

    Source: leakage paper, section 5.1 (the set S_req, the same in all layers and heads).
    """
    marked = table.gather(1, o.positions.flatten(1).clamp(0, table.shape[1] - 1)).view_as(o.positions)
    return o.alive & marked & (o.positions < table.shape[1])


def _rows(o: Observation, n: RowCount) -> Tensor | int:
    """`n` as a tensor [batch or 1, 1, 1], or unchanged if it is one number."""
    return n if isinstance(n, int) else n.to(o.positions.device).view(-1, 1, 1)


# ---- quotas


# ---- spans of a prompt


def number(tokens: int, spans: Sequence[Sequence[int]], extended: bool = True) -> Tensor:
    """Which span each of `tokens` positions lies in, int64 [tokens], for `spans` given as positions: any number of
    them, adjacent or not, numbered by their first position; a position in two spans belongs to the later one.

    extended: a position in no span joins the span before it, and positions before the first span join the first
    (Algorithm 1); otherwise such positions are -1. Raises InputError if there are no spans.
    """
    if not spans:
        raise InputError("0 prompt spans: a quota needs at least 1")
    span_of = torch.full((tokens,), -1)
    for i, span in enumerate(sorted(spans, key=min)):
        span_of[torch.as_tensor(span)] = i
    if extended:
        last = torch.where(span_of >= 0, torch.arange(tokens), -1).cummax(0).values
        span_of = torch.where(last >= 0, span_of[last.clamp(min=0)], span_of[span_of >= 0][0])
    return span_of


def windows(span_of: Tensor, window: int) -> Tensor:
    """Positions of the queries that a fair variant shows, int64, ascending: the last of each span, `window` in all.

    Of two spans the first gets floor(window / 2) queries (E.4); of more spans each gets its floored share. A span has
    at least one query, its last token, which is TOVA's anchor (E.7: window 1), and at most as many as it has tokens.
    """
    spans = int(span_of.max()) + 1
    shown = []
    for s in range(spans):
        share = window * (s + 1) // spans - window * s // spans
        shown.append((span_of == s).nonzero()[-max(1, share) :, 0])
    return torch.cat(shown).sort().values


# ---- budgets of spans


def split(
    o: Observation, counts: Counts, protected: Mask, fair: float = 1.0, default: Mask | None = None,
    apart: Mask | None = None, rounding: str = "floor",
) -> Parts:  # fmt: skip
    """Tokens that each head keeps of each span, summing to `counts`: lambda b_fair + (1 - lambda) b_default.

    b_fair: each span's share of the count by its length, the shares' running sum rounded down ("floor": Algorithm 1,
    the remainder goes to the later span) or to the nearest ("round": section 5.2). b_default: what `default`, the
    policy's selection without quotas, keeps of each span; needed for fair < 1. Counting and rounding are done per
    layer and KV head, which the paper leaves open. apart: tokens that are kept first and left out of the shares (E.3:
    StreamingLLM's sinks). A span whose protected tokens exceed its part gets room for them from the other spans.
    Raises InputError if the counts cannot hold the protected tokens.
    """
    counts = torch.minimum(counts, o.alive.sum(-1))
    apart = o.nothing if apart is None else apart
    held = tally(o, apart)
    parts = held + _shares((counts - held.sum(-1)).clamp(min=0), tally(o, o.alive & ~apart), rounding)
    if fair < 1 and default is not None:
        mixed = fair * parts.double() + (1 - fair) * tally(o, default).double()
        parts = _steps((mixed.cumsum(-1) + 0.5 + 1e-9).floor().long())
    return _with_room(parts, tally(o, protected))


def select_parts(scores: Scores, protected: Mask, parts: Parts, o: Observation) -> Mask:
    """Of each span the protected tokens and then the best-scored, `parts` in all; among equals the later stays.

    Raises InputError for NaN scores.
    """
    ensure_numbers(scores)
    span = o.span(o.positions).masked_fill(~o.alive, parts.shape[-1])  # dead slots: a span of their own, part 0
    place = torch.arange(scores.shape[-1], device=scores.device).expand_as(span)
    order = lexsort(span, (~protected).long(), -scores, -place)  # newest first
    parts = torch.nn.functional.pad(parts, (0, 1))
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


def _with_room(parts: Parts, wanted: Parts) -> Parts:
    """Parts of at least `wanted` for each span, at the cost of other spans in proportion to what they can spare."""
    spare, missing = (parts - wanted).clamp(min=0), (wanted - parts).clamp(min=0).sum(-1)
    ensure_room(parts.sum(-1), wanted.sum(-1))
    return torch.maximum(parts, wanted) - _shares(missing, spare, "floor")
