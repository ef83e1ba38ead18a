"""The attention function "kvrepro", which a model uses while it is `installed`.

Each call of the model names the object that computes attention: `model(..., kvrepro=object)`. Its method
`attend(layer, query, key, value, scaling)` gets the new tokens' queries and keys after their rotation and returns the
output `[batch, queries, heads, dim]`. A layer with a sliding window also passes `sliding=`, its width. `scaling` is a
`Softmax` where logits are more than the products times a factor. `attend` applies its own causal mask: no mask function
is registered, so Hugging Face builds none.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from threading import RLock
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import Module

from kvrepro.engine.shapes import KeyValue, Positions, PreTrainedModel, Probabilities, Query, RowInts, WindowPositions

LOW_QUERIES = 400  # Scissorhands' history window
_turns: WeakKeyDictionary[Module, Any] = WeakKeyDictionary()  # a lock for threads that share a model


@dataclass(frozen=True)
class Softmax:
    """How a layer turns products q.k into probabilities, where that takes more than a factor. It is no number, so that
    code which only knows factors raises an error."""

    scaling: float
    softcap: float | None = None  # logits become softcap * tanh(logits / softcap). Source: Gemma 2
    sinks: Tensor | None = None  # [heads]: a further logit, whose probability goes to no token. Source: GPT-OSS


def scaled(products: Tensor, rule: float | Softmax) -> Tensor:
    """Logits of products q.k, in place."""
    if not isinstance(rule, Softmax):
        return products.mul_(rule)
    logits = products.mul_(rule.scaling)
    return logits if rule.softcap is None else logits.div_(rule.softcap).tanh_().mul_(rule.softcap)


def softmax(logits: Tensor, rule: float | Softmax | None = None) -> Tensor:
    """p, float32 like `logits` [batch, kv_heads, group, queries, tokens]."""
    sinks = rule.sinks if isinstance(rule, Softmax) else None
    if sinks is None:
        return torch.softmax(logits, -1, dtype=torch.float32)
    sinks = sinks.to(logits).view(1, *logits.shape[1:3], 1, 1).expand(*logits.shape[:-1], 1)
    return torch.softmax(torch.cat([logits, sinks], -1), -1, dtype=torch.float32)[..., :-1]


def _attention(
    module: Any, query: Query, key: KeyValue, value: KeyValue, attention_mask: Any, *, scaling: float, **given: Any
) -> tuple[Tensor, None]:
    attending = given.get("kvrepro") or _attending.get()
    if attending is None:
        raise RuntimeError('attention "kvrepro" needs model(..., kvrepro=<who attends>); see kvrepro.engine.attention')
    softcap, sinks, sliding = given.get("softcap"), given.get("s_aux"), given.get("sliding_window")
    rule = scaling if softcap is None and sinks is None else Softmax(scaling, softcap, sinks)
    window = {} if sliding is None else {"sliding": sliding}
    return attending.attend(module.layer_idx, query, key, value, rule, **window), None


_attending: ContextVar[Any] = ContextVar("attending", default=None)  # for families that drop unknown arguments


@contextmanager
def alone(module: Module) -> Iterator[None]:
    """Inside the block other threads that share the module wait, and it computes as in evaluation, without dropout;
    afterwards every part is as it was."""
    with _turns.setdefault(module, RLock()):
        training = [part for part in module.modules() if part.training]
        for part in training:  # not by `eval`, which some adapters answer by merging weights
            part.training = False
        try:
            yield
        finally:
            for part in training:
                part.training = True


@contextmanager
def installed(model: PreTrainedModel) -> Iterator[None]:
    """Switch `model` to this attention, and back at the end; kernels start on its GPU meanwhile. It is `alone`."""
    from transformers import AttentionInterface

    AttentionInterface.register("kvrepro", _attention)

    def note(_: Any, __: Any, given: dict[str, Any]) -> None:
        _attending.set(given.get("kvrepro"))

    def forget(*_: Any) -> None:  # the object holds a cache, whose memory would stay taken
        _attending.set(None)

    with alone(model):
        before = model.config._attn_implementation
        hooks = [
            model.register_forward_pre_hook(note, with_kwargs=True),
            model.register_forward_hook(forget, always_call=True),
        ]
        model.set_attn_implementation("kvrepro")
        try:
            with torch.cuda.device(model.device) if model.device.type == "cuda" else nullcontext():
                yield
        finally:
            for hook in hooks:
                hook.remove()
            model.set_attn_implementation(before)


@torch.inference_mode()
def read_once(model: PreTrainedModel, ids: Sequence[int], attending: Any) -> None:
    """Run `model` on one prompt while the object `attending` computes its attention; no cache is kept."""
    with installed(model):
        tokens = torch.tensor([list(ids)], device=model.device)
        model(input_ids=tokens, logits_to_keep=1, use_cache=False, kvrepro=attending)


MOST_SCORES = 2**28  # computed at a time: 1 GiB in float32
Part = tuple[Tensor, ...]  # keys, values, positions [batch, 1 or kv_heads, tokens], -1 where dead
Watch = Callable[[Tensor, slice], None]  # sees p [batch, kv_heads, group, queries, tokens] of a block of queries


def attend(
    query: Query,
    query_positions: WindowPositions,
    parts: Sequence[Part],
    scaling: float | Softmax,
    sliding: int | None = None,
    watch: Watch | None = None,
    hide: Tensor | None = None,
    block: int = 256,
    prompt: bool = False,
) -> Tensor:
    """Attention over tokens that lie in several tensors: `[batch, queries, heads, dim]`.

    A query sees the tokens at or before its position, in a sliding layer the last `sliding` of them; `hide` [batch,
    kv_heads, group, queries, tokens] hides more. Probabilities are float32 and exist for `block` queries at a time, or
    for fewer where they would exceed MOST_SCORES.
    prompt: the tokens are the queries' own, in order, in one part. Then a block computes nothing for later tokens and,
    without `watch`, nothing for tokens before its sliding window.
    """
    batch, heads, m, dim = query.shape
    kv_heads = parts[0][0].shape[1]
    group = heads // kv_heads
    q = query.view(batch, kv_heads, group, m, dim)
    width = max(at.shape[1] for _, _, at in parts)  # 1 where all heads hold the same tokens
    positions = torch.cat([at.expand(batch, width, -1) for _, _, at in parts], -1)
    out = query.new_empty(batch, kv_heads, group, m, dim)
    block = max(1, min(block, MOST_SCORES // (batch * heads * max(1, positions.shape[-1]))))
    for a in range(0, m, block):
        b = min(a + block, m)
        flat = q[:, :, :, a:b].reshape(batch, kv_heads, -1, dim)
        visible, key_positions = parts, positions
        if prompt:
            first = 0 if sliding is None or watch is not None else max(0, a - sliding + 1)
            visible = [(keys[:, :, first:b], values[:, :, first:b], at) for keys, values, at in parts]
            key_positions = positions[..., first:b]
        products = [flat @ keys.transpose(2, 3) for keys, _, _ in visible]
        scores = scaled(products[0] if len(products) == 1 else torch.cat(products, -1), scaling)
        scores = scores.view(batch, kv_heads, group, b - a, -1)
        at = query_positions[:, None, a:b, None]
        seen = (key_positions[:, :, None] >= 0) & (key_positions[:, :, None] <= at)
        if sliding is not None:
            seen &= key_positions[:, :, None] > at - sliding
        lowest = torch.finfo(scores.dtype).min
        scores.masked_fill_(~seen[:, :, None], lowest)
        if hide is not None:
            scores.masked_fill_(hide[:, :, :, a:b], lowest)
        p = softmax(scores, scaling)
        if hide is not None and sliding is not None:  # a query that sees no token of its window gets a zero output
            p.masked_fill_((scores == lowest).all(-1, keepdim=True), 0.0)
        if watch is not None:
            watch(p, slice(a, b))
        weights = p.to(query.dtype).flatten(2, 3).split([values.shape[2] for _, values, _ in visible], -1)
        result = sum(w @ values for w, (_, values, _) in zip(weights, visible, strict=True))
        out[:, :, :, a:b] = result.view(batch, kv_heads, group, b - a, dim)
    return out.permute(0, 3, 1, 2, 4).reshape(batch, m, heads, dim)


def per_token(name: str, p: Probabilities, at: WindowPositions, where: Positions, newest: RowInts) -> Tensor:
    """What a block of queries adds to each token's sum of that name: the attention it gets, mean over the group; for
    "low" the number of query heads that pay less than 1 / (t + 1), over positions t among the LOW_QUERIES up to
    `newest`.

    at: positions of the queries; where: positions of the tokens, for each KV head or for all.
    """
    query = at[:, None, None, :, None]
    if name != "low":
        real = (at >= 0).to(p)[:, None, None, None]
        return (real @ p)[:, :, :, 0].mean(2)
    tokens = where[:, :, None, None]
    sees = (tokens >= 0) & (tokens <= query) & (query > newest[:, None, None, None, None] - LOW_QUERIES) & (query >= 0)
    low = (p < 1.0 / (query + 1).clamp(min=1)) & sees
    return low.float().sum((2, 3))  # whole numbers: ties stay ties, whatever the batch


def watch_prompt(model: PreTrainedModel, ids: Sequence[int], see: Callable[[int, Tensor, slice], None]) -> None:
    """Run `model` on one prompt and show `see` each layer's probabilities [1, kv_heads, group, queries, tokens] of a
    block of queries (a slice of the prompt) while they exist."""

    def show(layer: int, query: Query, key: KeyValue, value: KeyValue, scaling: Any, **sliding: Any) -> Tensor:
        at = torch.arange(len(ids), device=query.device)[None]
        part = key, value, at[:, None]
        return attend(query, at, [part], scaling, watch=lambda p, queries: see(layer, p, queries), **sliding)

    read_once(model, ids, SimpleNamespace(attend=show))


def attend_prompt(query: Query, key: KeyValue, value: KeyValue, scaling: float | Softmax) -> Tensor:
    """Causal attention of a whole prompt without padding, by torch's fused attention where it has the softmax."""
    if isinstance(scaling, Softmax):
        at = torch.arange(query.shape[2], device=query.device).expand(len(query), -1)
        return attend(query, at, [(key, value, at[:, None])], scaling, prompt=True)
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
    )
    return out.transpose(1, 2)
