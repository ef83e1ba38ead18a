"""What a policy may look at: the state of every cached token of every row, kept in cache slots.

A slot's place means nothing (eviction leaves holes, new tokens fill them): `positions` holds the true positions.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

import torch
from torch import Tensor

from kvrepro.chapters.protection.attention import PromptAttention
from kvrepro.chapters.protection.reading import Reading
from kvrepro.engine.shapes import HeadFloats, RowInts, TokenFloats, TokenInts, TokenMask


@dataclass(frozen=True)
class Observation:
    """State of `batch` rows at one decode step, float32 and int64.

    Steps count generated tokens from 1; prompt tokens carry step 0. Attention is already reduced over layers and heads,
    as the reading's `score_reduce` says. Slots outside `alive` hold no token.
    """

    step: int
    positions: TokenInts
    alive: TokenMask
    last_access: TokenInts  # L: last step at which attention exceeded 5% of the step's largest
    inserted: TokenInts  # I
    current: TokenFloats  # a: attention of the latest query
    peak: TokenFloats  # M: largest attention of one step so far
    cumulative: TokenFloats  # S: attention summed over steps
    prefill: TokenFloats  # Pf: attention inside the prompt, 0 for generated tokens
    prompt_tokens: RowInts
    head_current: HeadFloats | None = None  # a and S per KV head, for policies that choose per head
    head_cumulative: HeadFloats | None = None
    # Set while rows of one reading are scored: what the guards leave to the policy, how many tokens must go, and a
    # generator per row (for Random).
    reading: Reading | None = None
    evictable: TokenMask | None = None
    excess: RowInts | None = None
    draws: tuple[Random, ...] = ()

    def map(self, change: Callable[[Tensor], Tensor]) -> "Observation":
        """The same observation with `change` applied to every tensor."""
        return replace(self, **{k: change(v) for k, v in vars(self).items() if isinstance(v, Tensor)})

    def map_slots(self, change: Callable[[Tensor], Tensor]) -> "Observation":
        """The same observation with `change` applied to every tensor that has a slot axis (the last one)."""
        return self.map(lambda v: change(v) if v.dim() > 1 else v)


def after_prompt(prompt: PromptAttention, reading: Reading, kv_heads: int, per_head: bool, rows: int) -> Observation:
    """The state of `rows` equal rows after the prefill: every prompt token inserted and accessed at step 0.

    score_reduce "max": a = M = S = Pf = the largest attention that any query of any head and layer pays to the token.
    "mean": S = Pf = its mean over layers and heads, summed over queries; M the mean of each head's largest; a the last
    query's. Per KV head the same over layers only; zero if the first reduction waits for decode steps, as the artifact
    then keeps no prefill signal per head. Protection protocol, sections 2 and 7.
    """
    layers, heads, n = prompt.column_max.shape
    device = prompt.column_max.device

    if reading.score_reduce == "max":
        current = peak = cumulative = prompt.column_max.amax((0, 1))
    else:
        cumulative = prompt.column_sum.mean((0, 1))
        peak = prompt.column_max.mean((0, 1))
        current = prompt.last.mean((0, 1))

    head_current = head_cumulative = None
    if per_head:
        if reading.per_head_first_reduction > 0:
            head_current = head_cumulative = torch.zeros(kv_heads, n, device=device)
        elif reading.score_reduce == "max":
            first = reading.head_map == "first_n_kv"
            head_current = head_cumulative = (prompt.column_max[:, :kv_heads] if first else prompt.group_max).amax(0)
        else:
            head_cumulative = _to_kv_heads(prompt.column_sum, reading.head_map, kv_heads).mean(0)
            head_current = _to_kv_heads(prompt.last, reading.head_map, kv_heads).mean(0)

    def repeat(v: Tensor | None) -> Tensor | None:
        return None if v is None else v.expand(rows, *v.shape)

    zeros = torch.zeros(n, dtype=torch.long, device=device)
    return Observation(
        step=0,
        positions=repeat(torch.arange(n, device=device)),
        alive=repeat(torch.ones(n, dtype=torch.bool, device=device)),
        last_access=repeat(zeros),
        inserted=repeat(zeros),
        current=repeat(current),
        peak=repeat(peak),
        cumulative=repeat(cumulative),
        prefill=repeat(cumulative),
        prompt_tokens=torch.full((rows,), n, device=device),
        head_current=repeat(head_current),
        head_cumulative=repeat(head_cumulative),
        reading=reading,
    )


def _to_kv_heads(p: Tensor, head_map: str, kv_heads: int) -> Tensor:
    """`[layers, heads, tokens]` per query head as `[layers, kv_heads, tokens]`."""
    return p[:, :kv_heads] if head_map == "first_n_kv" else p.unflatten(1, (kv_heads, -1)).mean(2)


def append(o: Observation, slot: int, rows: Tensor) -> Observation:
    """The token picked at `o.step` enters `slot` of the rows in the boolean mask `rows`, seen by no attention yet."""
    o = o.map_slots(Tensor.clone)
    o.positions[:, slot] = o.prompt_tokens + o.step - 1
    o.alive[:, slot] = rows
    o.last_access[:, slot] = o.step
    o.inserted[:, slot] = o.step
    for signal in (o.current, o.peak, o.cumulative, o.prefill, o.head_current, o.head_cumulative):
        if signal is not None:
            signal[..., slot] = 0.0
    return o


def attend(o: Observation, attention: TokenFloats, per_head: HeadFloats | None = None) -> Observation:
    """After a forward pass: `attention` [batch, tokens] of the current query updates a, M, S and, above 5% of the row's
    largest, the last access; `per_head` [batch, kv_heads, tokens] its own a and S."""
    accessed = (attention > 0.05 * attention.amax(1, keepdim=True)) & o.alive
    o = replace(
        o,
        last_access=torch.where(accessed, o.step, o.last_access),
        current=attention,
        peak=torch.maximum(o.peak, attention),
        cumulative=o.cumulative + attention,
    )
    if per_head is not None:
        o = replace(o, head_current=per_head, head_cumulative=o.head_cumulative + per_head)
    return o
