"""What a policy may look at: one layer's cached tokens, the last queries, and sums from the forward pass."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvrepro.engine.attention import Softmax, scaled, softmax
from kvrepro.engine.shapes import KeyValue, Mask, Positions, Probabilities, Query, RowInts, Scores, WindowPositions
from kvrepro.errors import InputError


@dataclass(frozen=True)
class Observation:
    """One layer of `batch` rows at the moment of an eviction.

    Tokens are in ascending order of their positions, flush right: a head that holds fewer than its neighbours has dead
    slots in front, with position -1. So the last column is the newest token of every row and head.
    """

    layer: int
    layers: int  # evictable layers of the model; `layer` counts among them
    keys: KeyValue  # after their rotation
    values: KeyValue
    positions: Positions  # true positions, -1 where a slot is dead
    queries: Query  # of the window, after their rotation: [batch, heads, window, dim]
    query_positions: WindowPositions  # -1 where a row has fewer queries than the window
    seen: RowInts  # tokens seen so far, kept or not
    scaling: float
    output: Tensor | None = None  # output projection per query head, [heads, dim, hidden]
    sums: Mapping[str, Scores] = field(default_factory=dict)  # per token, as named in a policy's `needs`
    span_of: Any = None  # under quotas, int64 [batch, seen]: number of the prompt span that each position lies in
    unextended: Tensor | None = None  # `span_of` with -1 for the positions that no span marks; None: all are marked
    span_local: bool = False  # fair: queries see their own span only, the window holds each span's last queries
    sliding: int | None = None  # tokens a query of this layer looks back, itself included
    inverse_frequencies: Tensor | None = None  # [dim / 2] of the rotation, radians per position
    seed: int | RowInts = 0  # for draws, one for all rows or one for each
    step: int = 0  # generated tokens so far, in `SharedCap`
    backend: str = "torch"  # "triton": scorers that have a kernel use it, where `by_kernels`
    log_sums: Tensor | None = None  # the window's log-sum-exp from the forward pass, float32 [batch, heads, window]
    window_outputs: Query | None = None  # the window's attention outputs from the forward pass
    softmax: Softmax | None = None  # of a layer that caps its logits or has sinks
    of: tuple["Observation", ...] = ()  # the layers that it stands for, if there are several (`together`)

    @classmethod
    def together(cls, layers: Sequence["Observation"]) -> "Observation":
        """Layers of one shape as one observation, with one layer's rows after the other's.

        It has no layer number, output projection or rotation, which differ between layers.
        """
        width, n = max(o.keys.shape[2] for o in layers), len(layers)
        if n == 1:
            return layers[0]
        layers = [o._widened(width) for o in layers]
        first = layers[0]

        same_in_heads = all(o.positions.stride(1) == 0 for o in layers)  # all heads hold the same tokens
        where = torch.cat([o.positions[:, :1] if same_in_heads else o.positions for o in layers])
        names = "keys", "values", "queries", "query_positions", "log_sums", "window_outputs"
        parts = {name: [getattr(o, name) for o in layers] for name in names}
        fields: dict[str, Any] = {name: torch.cat(x) for name, x in parts.items() if x[0] is not None}
        fields["positions"] = where.expand(-1, first.positions.shape[1], -1)
        fields["sums"] = {x: torch.cat([o.sums[x] for o in layers]) for x in first.sums}
        fields["seed"] = first.seed if isinstance(first.seed, int) else first.seed.repeat(n)
        fields |= {"of": tuple(layers), "seen": first.seen.repeat(n)}
        return replace(first, layer=-1, output=None, inverse_frequencies=None, **fields)

    def _widened(self, width: int) -> "Observation":
        """The same with dead slots in front, `width` in all."""
        more = width - self.keys.shape[2]
        if not more:
            return self
        keys, values = (pad(x, (0, 0, more, 0)) for x in (self.keys, self.values))
        sums = {name: pad(s, (more, 0)) for name, s in self.sums.items()}
        return replace(self, keys=keys, values=values, positions=pad(self.positions, (more, 0), value=-1), sums=sums)

    @property
    def count(self) -> int:
        """The number of layers that it stands for."""
        return max(1, len(self.of))

    @cached_property
    def scored(self) -> dict[Hashable, Scores]:
        """Scores computed so far, by scorer and parameters, for other conditions that need the same."""
        return {}

    @property
    def by_kernels(self) -> bool:
        """Do scorers use their kernels? Plain PyTorch scores what these do not know: a sliding window, queries that see
        their own span only, another softmax."""
        return self.backend == "triton" and self.sliding is None and not self.span_local and self.softmax is None

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return int(self.queries.shape[1] // self.keys.shape[1])

    def last(self, window: int) -> "Observation":
        """This observation with the last `window` queries only."""
        first = max(0, self.queries.shape[2] - window)  # not [-window:], which is everything for 0
        given = {name: getattr(self, name) for name in ("queries", "log_sums", "window_outputs")}
        last = {name: x[:, :, first:] for name, x in given.items() if x is not None}
        return replace(self, query_positions=self.query_positions[:, first:], **last)

    def span(self, positions: Tensor) -> Tensor:
        """Number of the span that each of `positions` [batch, ...] lies in; after the prompt that of its last token."""
        where = positions.flatten(1).clamp(0, self.span_of.shape[1] - 1)
        return self.span_of.gather(1, where).view_as(positions)

    @cached_property
    def spans(self) -> int:
        """The number of spans."""
        return int(self.span_of.max()) + 1

    # ---- masks, bool [batch, kv_heads, tokens]

    @cached_property
    def alive(self) -> Mask:
        return self.positions >= 0

    @cached_property
    def window(self) -> Mask:
        """The tokens of the window: all from its first query on; under `span_local` those at its queries' positions."""
        queries = self.query_positions.contiguous()
        if not queries.shape[1]:
            return torch.zeros_like(self.alive)
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
    def starts(self) -> Tensor:
        """The first living slot of each head, int32 [batch, kv_heads]."""
        return (~self.alive).sum(-1, dtype=torch.int32)

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
    def last_in_past(self) -> Tensor:
        """The last slot before the window's own tokens that each query may see, int32 [batch, kv_heads, window]."""
        return torch.minimum(self.last_seen, self._slots_before(self._first_query) - 1)

    # ---- attention

    @cached_property
    def visible(self) -> Tensor:
        """Whether a query sees a token, under `span_local` of its own span only; bool [batch, kv_heads, window,
        tokens]."""
        causal = self.causal
        if not self.span_local:
            return causal
        return causal & (self.span(self.positions)[:, :, None] == self.span(self.query_positions)[:, None, :, None])

    @cached_property
    def attention(self) -> Probabilities:
        """p, float32 `[batch, kv_heads, group, window, tokens]`: softmax over all tokens that the query saw, including
        the window's own; 0 for other tokens, for absent queries and, under `span_local`, for tokens of other spans,
        without renormalising the rest (leakage paper, appendix E)."""
        if self.queries.shape[2] == 0:
            way_out = "name how many in the policy's parameters, {'window': 16} for instance"
            raise InputError(f"attention without queries: {way_out}")
        batch, kv_heads, _, dim = self.keys.shape
        q = self.queries.view(batch, kv_heads, self.group, -1, dim).float()
        logits = scaled(torch.einsum("bgrwd,bgnd->bgrwn", q, self.keys.float()), self.softmax or self.scaling)
        logits.masked_fill_(~self.causal[:, :, None], -torch.inf)
        p = softmax(logits, self.softmax).nan_to_num_(0.0)  # a row of -inf only: no such query
        return p.masked_fill_(~self.visible[:, :, None], 0.0) if self.span_local else p

    @cached_property
    def outputs(self) -> Tensor:
        """a = sum_j p v, float32 `[batch, kv_heads, group, window, dim]`."""
        return torch.einsum("bgrwn,bgnd->bgrwd", self.attention, self.values.float())

    @cached_property
    def attended(self) -> tuple[Tensor, Query]:
        """(log-sum-exp [batch, heads, window], outputs) of the window, from the forward pass or else by a kernel."""
        if self.log_sums is not None and self.window_outputs is not None:
            return self.log_sums, self.window_outputs
        from kvrepro_kernels import window_attention

        given, places = (self.queries, self.keys, self.values), {"last": self.last_seen, "starts": self.starts}
        outputs, log_sums = window_attention(*given, scale=self.scaling, **places)
        return log_sums, outputs

    @cached_property
    def mean_projected_norm(self) -> Scores:
        """N(j): mean over the group of ||v_j W_O^(h)||_1, float32."""
        if self.backend != "triton":
            return self.projected_norm.mean(2)
        from kvrepro_kernels import projected_norm

        return torch.cat([projected_norm(o.values, o.output) for o in self.of or [self]])

    @property
    def projection(self) -> Tensor:
        """`output`, float32 [kv_heads, group, dim, hidden]. Raises InputError if the layer has none."""
        if self.output is None:
            raise InputError(f"layer {self.layer} has no output projection that is known: take a policy without it")
        return self.output.unflatten(0, (-1, self.group)).float()

    @cached_property
    def projected_norm(self) -> Tensor:
        """N_h(j) = ||v_j W_O^(h)||_1, float32 `[batch, kv_heads, group, tokens]`, in blocks of 256 tokens."""
        if self.of:
            return torch.cat([o.projected_norm for o in self.of])
        batch, kv_heads, tokens, _ = self.values.shape
        w = self.projection
        norm = self.values.new_empty(batch, kv_heads, self.group, tokens, dtype=torch.float32)
        for a in range(0, tokens, 256):
            v = self.values[:, :, a : a + 256].float()
            norm[..., a : a + 256] = torch.einsum("bgnd,grdh->bgrnh", v, w).abs().sum(-1)
        return norm
