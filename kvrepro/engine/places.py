"""The positions of a layer's tokens and of the window's queries, with masks and counts that depend only on them.

Most layers of a model hold the same tokens. In a prompt's pass they share one `Places`, so that its masks are computed
once and not in every layer.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from kvrepro.engine.shapes import Mask, Positions, RowInts, WindowPositions

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Places:
    """The positions of an observation's tokens and queries; fields as in `Observation`."""

    positions: Positions
    query_positions: WindowPositions
    sliding: int | None = None
    span_local: bool = False

    @cached_property
    def _noted(self) -> dict[Hashable, object]:
        return {}

    def noted(self, name: Hashable, make: Callable[[], T]) -> T:
        """A value that another module derives from these places by `make`, computed once for each name."""
        if name not in self._noted:
            self._noted[name] = make()
        return self._noted[name]  # type: ignore[return-value]

    def repeated(self, n: int) -> "Places":
        """The places of `n` layers that hold the same tokens, one layer's rows after the other's."""
        same_in_heads = self.positions.stride(1) == 0  # all heads hold the same tokens
        where = self.positions[:, :1] if same_in_heads else self.positions
        positions = where.repeat(n, 1, 1).expand(-1, self.positions.shape[1], -1)
        return replace(self, positions=positions, query_positions=self.query_positions.repeat(n, 1))

    # ---- masks, bool [batch, kv_heads, tokens]

    @cached_property
    def alive(self) -> Mask:
        return self.positions >= 0

    @cached_property
    def dead(self) -> Mask:
        return ~self.alive

    @cached_property
    def nothing(self) -> Mask:
        """No token at all."""
        return torch.zeros_like(self.alive)

    @cached_property
    def window(self) -> Mask:
        """The tokens of the window: all from its first query on; under `span_local` those at its queries' positions."""
        queries = self.query_positions.contiguous()
        if not queries.shape[1]:
            return self.nothing
        if not self.span_local:  # the last tokens seen, without gaps
            return self.alive & (self.positions >= self._first_query[..., None])
        where = self.positions.flatten(1)  # both ascend
        place = torch.searchsorted(queries, where).clamp(max=queries.shape[1] - 1)
        return (queries.gather(1, place) == where).view_as(self.positions) & self.alive

    @cached_property
    def past(self) -> Mask:
        """The tokens outside the window."""
        return self.alive & ~self.window

    @cached_property
    def not_past(self) -> Mask:
        return ~self.past

    @cached_property
    def causal(self) -> Tensor:
        """Whether a query may see a token: not later and, in a sliding layer, within its window; bool [batch, kv_heads,
        window, tokens]."""
        token, query = self.positions[:, :, None], self.query_positions[:, None, :, None]
        seen = (token >= 0) & (token <= query)
        if self.sliding is not None:
            seen = seen & (token > query - self.sliding)
        return seen

    # ---- counts and slots

    @cached_property
    def _first_query(self) -> Tensor:
        """Position of the window's first query, int64 [batch, 1]."""
        real = self.query_positions >= 0
        return self.query_positions.masked_fill(~real, torch.iinfo(torch.long).max).amin(1, keepdim=True)

    @cached_property
    def present(self) -> RowInts:
        """The number of each row's queries, without padding."""
        return (self.query_positions >= 0).sum(1)

    @cached_property
    def starts(self) -> Tensor:
        """The first living slot of each head, int32 [batch, kv_heads]."""
        return self.dead.sum(-1, dtype=torch.int32)

    def _slots_before(self, positions: Tensor) -> Tensor:
        """Slots of each head, dead ones too, before each of `positions` [batch, n]: int32 [batch, kv_heads, n]."""
        where = self.positions if self.positions.stride(1) else self.positions[:, :1]  # all heads hold the same tokens
        wanted = positions[:, None].expand(-1, where.shape[1], -1)
        slots = torch.searchsorted(where.contiguous(), wanted.contiguous(), out_int32=True)
        return slots.expand(-1, self.positions.shape[1], -1).contiguous()

    @cached_property
    def last_seen(self) -> Tensor:
        """The last slot that each query may see, int32 [batch, kv_heads, window]."""
        return self._slots_before(self.query_positions + 1) - 1

    @cached_property
    def last_before_window(self) -> Tensor:
        """The last slot before the window's own tokens, int32 [batch, kv_heads, 1]."""
        return self._slots_before(self._first_query) - 1

    @cached_property
    def last_in_past(self) -> Tensor:
        """The last slot before the window's own tokens that each query may see, int32 [batch, kv_heads, window]."""
        return torch.minimum(self.last_seen, self.last_before_window)
