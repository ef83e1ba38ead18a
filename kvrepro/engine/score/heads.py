"""Heads and layers that keep everything while others give up tokens: DuoAttention; and KVzip's reconstruction scores.

float32 `[batch, kv_heads, tokens]`, large = keep.
"""

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kvrepro.engine.allowed import Count
from kvrepro.engine.observe import Observation
from kvrepro.engine.score.queries import fitting, made_from, reading
from kvrepro.engine.select import ensure_room
from kvrepro.engine.shapes import Counts, Mask, RowInts, Scores
from kvrepro.errors import InputError

EMBEDDED = "data/models/*-gates.json"  # in the project's folder: the one of these files that was made from the model
Counted = Literal["tokens", "heads"]


def kv_zip(o: Observation) -> Scores:
    """s_j = largest attention to j of any query of the group while the model repeats the context.

    Needs `sums["reconstruction"]`. Source: Kim et al. 2025; KVzip's attention/score.py.
    """
    return o.sums["reconstruction"].float()


def kv_zip_plus(o: Observation) -> Scores:
    """s_j = largest attention to j / ||h_t||_2 of a query t while the model repeats the context, times ||W_O v_j||_2.

    h_t: the attention layer's input at t. The largest is taken per query head, with its own W_O, and then over the
    group. Needs `sums["reconstruction_per_norm"]`, `[batch, heads, tokens]`. Source: kvpress KVzipPress,
    `kvzip_plus_normalization`.
    """
    batch, kv_heads, tokens, _ = o.values.shape
    weight = o.projection
    gram = weight @ weight.mT  # ||v W||^2 = v (W W^T) v, no tokens x hidden
    squared = torch.einsum("bgnd,grde,bgne->bgrn", o.values.float(), gram, o.values.float())
    largest = o.sums["reconstruction_per_norm"].float().view(batch, kv_heads, o.group, tokens)
    return (largest * squared.clamp(min=0).sqrt()).amax(2)


def whole(scores: Scores, protected: Mask, budget: RowInts, o: Observation, dense_layers: Count = 0) -> Counts:
    """Layers below `dense_layers` keep every token, the others `budget` per head: more than the budget in all.

    Source: K-norm (Devoto et al. 2024), which skips layers 0 and 1; KVCache-Factory's L2NormCluster.
    """
    if o.layer < dense_layers:
        return o.alive.sum(-1)
    return budget[:, None].expand(-1, scores.shape[1])


# ---- DuoAttention


class Gates(NamedTuple):
    """The learned gates of a model's heads."""

    gate: Tensor  # [layers, kv_heads] in [0, 1]
    sample: Tensor | None  # `queries.sampled` weights of the model, where the file has them

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.gate.shape)


@lru_cache(maxsize=32)
def _learned(path: str) -> Gates:
    """The gates in a file: JSON as `studies.duo` writes it, or the authors' format, a line per layer and no
    sample. Raises InputError for a missing file and for any other content."""
    with reading(path, "gates", "learn them, a row per layer, with python -m studies.duo") as file:
        text, sample = file.read_text(), None
        rows = [line.split() for line in text.splitlines()]
        if file.suffix == ".json":
            content = json.loads(text)
            rows, sample = content["gates"], torch.tensor(content["sample"])
        return Gates(torch.tensor([[float(x) for x in row] for row in rows]).clamp(0, 1), sample)


def duo_attention(
    scores: list[Scores], protected: list[Mask], budget: RowInts, gates_file: str = EMBEDDED,
    count: Counted = "tokens", observations: Sequence[Observation] = (),
) -> tuple[list[Scores], list[Counts]]:  # fmt: skip
    """Heads with the lowest gates keep their protected tokens (sinks and recent ones) only, the others everything.

    The former "stream". count "tokens": the fewest heads stream with which `budget` tokens per head are met on average;
    the last of them also keeps its newest tokens, as many as are left over. count "heads": round(x layers kv_heads)
    heads stream, with x = 1 - budget / tokens, so that more than the budget is kept (public comparisons pass their
    cache ratio in this way). Among equal gates the earlier head streams first. Raises InputError for gates of another
    model. Source: Xiao et al. 2024; kvpress DuoAttentionPress.
    """
    outputs, wanted = [o.output for o in observations], (len(scores), scores[0].shape[1])
    remedy = "run python -m studies.duo"
    gate = fitting(gates_file, _learned, wanted, "layers and KV heads", outputs, remedy).gate
    order = gate.flatten().to(budget.device).argsort(stable=True)  # the order in which heads start to stream
    alive = [~s.isneginf() for s in scores]
    tokens = torch.stack([a.sum(-1) for a in alive], 1).flatten(1)[:, order]  # [batch, layers * kv_heads]
    least = torch.stack([(p & a).sum(-1) for p, a in zip(protected, alive, strict=True)], 1).flatten(1)[:, order]
    held = (_whole_heads if count == "heads" else _exact_tokens)(tokens, least, budget)
    counts = torch.empty_like(held).scatter_(1, order.expand_as(held), held)
    return scores, list(counts.unflatten(1, gate.shape).unbind(1))


def learned(outputs: Sequence[Tensor]) -> bool:
    """Whether one of the shipped files was made from the model with these output projections [heads, dim, hidden]."""
    try:
        return bool(made_from(EMBEDDED, lambda file: _learned(file).sample, outputs, ""))
    except InputError:
        return False


def _whole_heads(tokens: Tensor, least: Tensor, budget: RowInts) -> Tensor:
    """Tokens held by each head, [batch, heads in order]: the first (1 - budget / tokens) of the heads stream."""
    share = 1 - budget.double() / tokens.double().mean(1).clamp(min=1)
    streaming = torch.arange(tokens.shape[1], device=tokens.device) < (share * tokens.shape[1]).round()[:, None]
    return torch.where(streaming, least, tokens)


def _exact_tokens(tokens: Tensor, least: Tensor, budget: RowInts) -> Tensor:
    """Tokens held by each head, [batch, heads in order]: heads give up tokens in turn until the budget is met."""
    total = budget * tokens.shape[1]
    ensure_room(total, least.sum(1), f" of {tokens.shape[1]} heads together")
    excess = (tokens.sum(1) - total).clamp(min=0)[:, None]
    given = (tokens - least).cumsum(1) - (tokens - least)  # given up by the heads before this one
    return tokens - torch.minimum((excess - given).clamp(min=0), tokens - least)
