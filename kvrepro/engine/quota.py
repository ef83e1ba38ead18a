"""Quotas split a budget over the spans of a prompt, so that no instruction is forgotten faster than its neighbours.

    parts = split(o, counts, protected, fair, default)    # tokens that each head may keep of each span
    keep  = select(scores, protected, parts, o)           # the best of each span, as many as its part

Source: leakage paper, sections 5.2 and 5.3, appendix E. A method's own fair variant is its scorer on an observation
that shows each span's last queries (`windows`) and lets them see their own span only (`span_local`): SnapKV and TOVA.
H2O and StreamingLLM (as its public code runs) then score otherwise; K-norm and the others do not change.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvrepro.engine.observe import Observation
from kvrepro.engine.select import ensure_numbers, ensure_room, lexsort
from kvrepro.engine.shapes import Counts, Mask, Parts, Scores
from kvrepro.errors import InputError

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
    apart = o.places.nothing if apart is None else apart
    held = tally(o, apart)
    parts = held + _shares((counts - held.sum(-1)).clamp(min=0), tally(o, o.alive & ~apart), rounding)
    if fair < 1 and default is not None:
        mixed = fair * parts.double() + (1 - fair) * tally(o, default).double()
        parts = _steps((mixed.cumsum(-1) + 0.5 + 1e-9).floor().long())
    return _with_room(parts, tally(o, protected))


def select(scores: Scores, protected: Mask, parts: Parts, o: Observation) -> Mask:
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
