"""Any regime once more, slowly: the whole text again for every token, and a table of who may look at whom.

Nothing is cached, batched or freed: `visible[layer]` [kv_heads, queries, tokens] hides what was evicted when a query
came. Written from the regimes' definitions, not from the engine, so that the two can disagree.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import AttentionInterface

Decide = Callable[..., Tensor]  # (q, k, v, held, scaling, budget) -> who stays, bool [kv_heads, tokens]


reading: list["Slow"] = []  # whose text passes through a model now


def _look_up(module, query, key, value, attention_mask, *, scaling, **more):
    return reading[-1](module, query, key, value, scaling, **more), None


AttentionInterface.register("slow", _look_up)


class Slow:
    """One text in one model. `windows`: tokens that a query of each sliding layer looks back, by layer."""

    def __init__(self, model, ids: Sequence[int], windows: dict[int, int] | None = None, evictable: Sequence[int] = ()):
        self.model, self.ids, self.windows = model, list(ids), windows or {}
        config = model.config.get_text_config()
        types = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
        self.layers = [n for n, kind in enumerate(types) if kind not in ("linear_attention", "conv", "mlp")]
        self.evictable = list(evictable) or self.layers
        self.kv_heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
        self.length = 0  # tokens read so far
        self.held = {n: torch.zeros(self.kv_heads, 0, dtype=torch.bool) for n in self.layers}
        self.visible = {n: torch.zeros(self.kv_heads, 0, 0, dtype=torch.bool) for n in self.layers}
        self.seen: dict[int, tuple[Tensor, Tensor, Tensor, float]] = {}
        self.history: list[dict[int, Tensor]] = []

    def __call__(self, module, query, key, value, scaling, **_):
        """Eager attention through the table."""
        n = module.layer_idx
        self.seen[n] = (query[0], key[0], value[0], scaling)
        group = query.shape[1] // key.shape[1]
        k, v = (x.repeat_interleave(group, 1) for x in (key, value))
        mask = self.visible[n].repeat_interleave(group, 0)
        p = torch.softmax((query @ k.mT * scaling).masked_fill(~mask, -torch.inf), -1)
        return (p @ v).transpose(1, 2)

    def read(self, tokens: int) -> Tensor:
        """The next tokens of the text, all at once: logits [vocabulary] after the last."""
        before, self.length = self.length, self.length + tokens
        q, k = torch.arange(self.length)[:, None], torch.arange(self.length)[None, :]
        for n in self.layers:
            self.held[n] = torch.nn.functional.pad(self.held[n], (0, tokens), value=True)
            table = torch.zeros(self.kv_heads, self.length, self.length, dtype=torch.bool)
            table[:, :before, :before] = self.visible[n]
            table[:, before:] = self.held[n][:, None] & (k <= q)[before:]
            if n in self.windows:
                table &= k > q - self.windows[n]
            self.visible[n] = table
        was = self.model.config._attn_implementation
        self.model.set_attn_implementation("slow")
        reading.append(self)
        try:
            with torch.no_grad():
                return self.model(torch.tensor([self.ids[: self.length]]), use_cache=False).logits[0, -1]
        finally:
            reading.pop()
            self.model.set_attn_implementation(was)

    def evict(self, decide: Decide, budget: int) -> None:
        """Who stays, by `decide`, of what each head holds and could still be seen by the next query, once the text is
        longer than the budget."""
        if self.length <= budget:
            return
        for n in self.evictable:
            q, k, v, scaling = self.seen[n]
            held = self.held[n].clone()
            if n in self.windows:
                held[:, : max(0, self.length - self.windows[n] + 1)] = False
            self.held[n] = decide(q, k, v, held, scaling, budget)
        self.history.append({n: self.held[n].clone() for n in self.evictable})


def run(
    slow: Slow,
    decide: Decide | None,
    *,
    budget: int,
    new_tokens: int,
    until: int | None = None,
    chunk: int | None = None,
    chunk_budget: Callable[[int], int] | None = None,
    every: int | None = None,
) -> tuple[list[int], Tensor]:
    """(greedy tokens, the logits that the last one was taken from); leaves the text in `slow` at its end.

    until: tokens to compress (None: all). chunk: read them in chunks; after each but the last the heads are cut to
    `chunk_budget(tokens read)`, if given. every: evict again after so many generated tokens.
    """
    n = len(slow.ids)
    end = n if until is None else until
    logits = None
    for a in range(0, end, chunk or end):
        logits = slow.read(min(chunk or end, end - a))
        if slow.length < end and chunk_budget is not None and decide is not None:
            slow.evict(decide, chunk_budget(slow.length))
    if decide is not None:
        slow.evict(decide, budget)
    if end < n:
        logits = slow.read(n - end)
    tokens: list[int] = []
    for step in range(1, new_tokens + 1):
        tokens.append(int(logits.argmax()))
        if step == new_tokens:
            return tokens, logits
        slow.ids.append(tokens[-1])
        logits = slow.read(1)
        if every and step % every == 0 and decide is not None:
            slow.evict(decide, budget)
    raise AssertionError("new_tokens is at least 1")


def newest(sinks: int = 0) -> Decide:
    """The `sinks` oldest and the newest that a head holds."""

    def decide(q, k, v, held, scaling, budget):
        kept = torch.zeros_like(held)
        for head in range(len(held)):
            at = held[head].nonzero()[:, 0].tolist()
            first = at[:sinks]
            rest = at[sinks:]
            kept[head, first + rest[max(0, len(rest) - (budget - len(first))) :]] = True
        return kept

    return decide


def looked_at(window: int, unequal: int = 0, sliding: int | None = None) -> Decide:
    """The `window` newest, then the most attended to by the last `window` queries among what is held, averaged over
    queries and heads of a group; head 0 keeps `unequal` more than `budget`, the last head as many less."""

    def decide(q, k, v, held, scaling, budget):
        kept = torch.zeros_like(held)
        kv_heads, length = held.shape
        group = len(q) // kv_heads
        for head in range(kv_heads):
            at = held[head].nonzero()[:, 0]
            count = budget + (unequal if head == 0 else -unequal if head == kv_heads - 1 else 0)
            score = torch.zeros(len(at), dtype=torch.float64)
            for h in range(head * group, (head + 1) * group):
                for position in range(max(0, length - window), length):
                    logits = (k[head, at] @ q[h, position] * scaling).double()
                    hidden = (at > position) | (at <= position - (sliding or length))
                    score += torch.softmax(logits.masked_fill(hidden, -torch.inf), 0)
            score[at >= length - window] = torch.inf
            order = sorted(range(len(at)), key=lambda i: (-float(score[i]), -int(at[i])))
            kept[head, at[order[:count]]] = True
        return kept

    return decide
