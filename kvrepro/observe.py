"""What a policy may look at: the state of every cached token of every row, kept in cache slots.

A slot's place means nothing (eviction leaves holes, new tokens fill them): `positions` holds the true positions.
"""

from dataclasses import dataclass, replace
from random import Random

import torch
from torch import Tensor

from kvrepro.reading import Reading
from kvrepro.shapes import HeadFloats, RowInts, TokenFloats, TokenInts, TokenMask


@dataclass(frozen=True)
class Observation:
    """State of `batch` rows that share one reading of the signals, at one decode step.

    Steps count generated tokens from 1; prompt tokens carry step 0. Attention is already reduced over layers and heads
    as `reading.score_reduce` says. Slots outside `alive` hold no token.
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
    reading: Reading | None = None  # set while rows of one reading are scored
    evictable: TokenMask | None = None  # set while scored: what the guards leave to the policy
    excess: RowInts | None = None  # set while scored: how many tokens must go
    draws: tuple[Random, ...] = ()  # one generator per row, for Random only

    def map(self, change) -> "Observation":
        """The same observation with `change` applied to every tensor that has a row axis."""
        return replace(self, **{k: change(v) for k, v in vars(self).items() if isinstance(v, Tensor)})


def append(o: Observation, slot: int, rows: Tensor) -> Observation:
    """The token picked at `o.step` enters `slot` of each row of the boolean mask `rows`, unseen by any attention so far."""

    def put(values: Tensor, value) -> Tensor:
        values = values.clone()
        values[..., slot] = value
        return values

    return replace(
        o,
        positions=put(o.positions, o.prompt_tokens + o.step - 1),
        alive=put(o.alive, rows),
        last_access=put(o.last_access, o.step),
        inserted=put(o.inserted, o.step),
        current=put(o.current, 0.0),
        peak=put(o.peak, 0.0),
        cumulative=put(o.cumulative, 0.0),
        prefill=put(o.prefill, 0.0),
        head_current=None if o.head_current is None else put(o.head_current, 0.0),
        head_cumulative=None if o.head_cumulative is None else put(o.head_cumulative, 0.0),
    )


def attend(o: Observation, attention: TokenFloats, per_head: HeadFloats | None = None) -> Observation:
    """After a forward pass: `attention` [batch, tokens] of the current query updates a, M, S and, above 5% of the row's
    largest, the last access. `per_head` [batch, kv_heads, tokens] likewise."""
    accessed = (attention > 0.05 * attention.amax(1, keepdim=True)) & o.alive
    o = replace(
        o,
        last_access=torch.where(accessed, o.step, o.last_access),
        current=attention,
        peak=torch.maximum(o.peak, attention),
        cumulative=o.cumulative + attention,
    )
    if per_head is not None and o.head_cumulative is not None:
        o = replace(o, head_current=per_head, head_cumulative=o.head_cumulative + per_head)
    return o
