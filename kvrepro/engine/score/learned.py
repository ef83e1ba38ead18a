"""What was learned from one model, in files, and is not used with another: DuoAttention's gates, which heads keep
everything; TriAttention's statistics of queries. And KVzip+'s scores.

float32 `[batch, kv_heads, tokens]`, large = keep.
"""

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from kvrepro.engine.allocate import ensure_room
from kvrepro.engine.condition import Count
from kvrepro.engine.observe import Observation
from kvrepro.engine.shapes import Counts, Mask, RowInts, Scores
from kvrepro.errors import InputError
from kvrepro.paths import ROOT

GATES = "data/models/*-gates.json"  # in the project's folder: the one of these files that was made from the model
QUERIES = "data/models/*-queries.json"


@lru_cache(maxsize=32)
def load(path: str) -> dict[str, Tensor]:
    """The lists of numbers in a JSON file, as `studies.duo` and `studies.calibrate` write it, by name. Relative paths
    start at the project's folder."""
    content = json.loads((ROOT / path).read_text())
    return {name: torch.tensor(x) for name, x in content.items() if isinstance(x, list)}


def sampled(outputs: Sequence[Tensor]) -> Float[Tensor, "layers weights"]:
    """Eight weights of each layer's output projection, which identify a model in any dtype."""
    return torch.stack([output[0, 0, :8].float().cpu() for output in outputs])


def fitting(path: str, outputs: Sequence[Tensor], first: int = 0) -> dict[str, Tensor]:
    """The content of the file, or of one that matches a pattern with *, that was made from the model whose layers from
    `first` on have these output projections [heads, dim, hidden]. A half-precision copy counts as the same model, and
    so does one that was tuned without changing them. Raises InputError if there is none."""
    wanted = sampled(outputs)
    for file in sorted(map(str, ROOT.glob(path))) if "*" in path else [path]:
        sample = load(file)["sample"][first : first + len(outputs)]
        if sample.shape == wanted.shape and torch.allclose(sample, wanted, rtol=0.01, atol=1e-6):
            return load(file)
    raise InputError(f"{path} was not made from this model: run python -m studies.duo or studies.calibrate")


# ---- queries before their rotation


def pairs(x: Tensor, rotated: int) -> Complex[Tensor, "..."]:
    """The last axis [dim] as complex numbers [dim / 2]: the `rotated` first elements form pairs, one from each of their
    halves, and so do the elements that the model leaves unrotated. complex64."""
    parts = [part.float().unflatten(-1, (2, -1)) for part in (x[..., :rotated], x[..., rotated:]) if part.shape[-1]]
    return torch.complex(*(torch.cat([part[..., side, :] for part in parts], -1) for side in (0, 1)))


def frequencies(inverse_frequencies: Tensor, dim: int) -> Tensor:
    """Radians per position of each pair, float64 [dim / 2]; 0 for those left unrotated."""
    return torch.nn.functional.pad(inverse_frequencies.double(), (0, dim // 2 - len(inverse_frequencies)))


def kv_zip_plus(o: Observation) -> Scores:
    """s_j = largest attention to j / ||h_t||_2 of a query t while the model repeats the context, times ||W_O v_j||_2.
    h_t: the attention layer's input at t. The largest is taken per query head, with its own W_O, and then over the
    group. Needs `sums["reconstruction_per_norm"]`, `[batch, heads, tokens]`. Source: kvpress KVzipPress,
    `kvzip_plus_normalization`."""
    batch, kv_heads, tokens, _ = o.values.shape
    weight = o.projection
    gram = weight @ weight.mT  # ||v W||^2 = v (W W^T) v, no tokens x hidden
    squared = torch.einsum("bgnd,grde,bgne->bgrn", o.values.float(), gram, o.values.float())
    largest = o.sums["reconstruction_per_norm"].float().view(batch, kv_heads, o.group, tokens)
    return (largest * squared.clamp(min=0).sqrt()).amax(2)


def whole(scores: Scores, protected: Mask, budget: RowInts, o: Observation, dense_layers: Count = 0) -> Counts:
    """Layers below `dense_layers` keep every token, the others `budget` per head: more than the budget in all. Source:
    K-norm (Devoto et al. 2024), which skips layers 0 and 1; KVCache-Factory's L2NormCluster."""
    if o.layer < dense_layers:
        return o.alive.sum(-1)
    return budget[:, None].expand(-1, scores.shape[1])


def duo_attention(
    scores: list[Scores],
    protected: list[Mask],
    budget: RowInts,
    gates_file: str = GATES,
    count: Literal["tokens", "heads"] = "tokens",
    observations: Sequence[Observation] = (),
) -> tuple[list[Scores], list[Counts]]:
    """Heads with the lowest gates keep their protected tokens (sinks and recent ones) only, the others everything.

    The former "stream". count "tokens": the fewest heads stream with which `budget` tokens per head are met on average;
    the last of them also keeps its newest tokens, as many as are left over. count "heads": round(x layers kv_heads)
    heads stream, with x = 1 - budget / tokens, so that more than the budget is kept (public comparisons pass their
    cache ratio in this way). Among equal gates the earlier head streams first. Raises InputError for gates of another
    model. Source: Xiao et al. 2024; kvpress DuoAttentionPress.
    """
    outputs = [o.output for o in observations if o.output is not None]
    gate = fitting(gates_file, outputs)["gates"].clamp(0, 1)
    order = gate.flatten().to(budget.device).argsort(stable=True)  # the order in which heads start to stream
    alive = [~s.isneginf() for s in scores]
    tokens = torch.stack([a.sum(-1) for a in alive], 1).flatten(1)[:, order]  # [batch, layers * kv_heads]
    least = torch.stack([(p & a).sum(-1) for p, a in zip(protected, alive, strict=True)], 1).flatten(1)[:, order]
    if count == "heads":
        share = 1 - budget.double() / tokens.double().mean(1).clamp(min=1)
        streaming = torch.arange(len(order), device=order.device) < (share * len(order)).round()[:, None]
        held = torch.where(streaming, least, tokens)
    else:
        held = _exact_tokens(tokens, least, budget)
    counts = torch.empty_like(held).scatter_(1, order.expand_as(held), held)
    return scores, list(counts.unflatten(1, gate.shape).unbind(1))


def _exact_tokens(tokens: Tensor, least: Tensor, budget: RowInts) -> Tensor:
    """Tokens held by each head, [batch, heads in order]: heads give up tokens in turn until the budget is met."""
    total = budget * tokens.shape[1]
    ensure_room(total, least.sum(1), f" of {tokens.shape[1]} heads together")
    excess = (tokens.sum(1) - total).clamp(min=0)[:, None]
    given = (tokens - least).cumsum(1) - (tokens - least)  # given up by the heads before this one
    return tokens - torch.minimum((excess - given).clamp(min=0), tokens - least)
