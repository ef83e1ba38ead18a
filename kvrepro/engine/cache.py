"""The ragged cache: each head holds as many tokens as its budget says, and evicted tokens leave memory.

A layer's survivors lie in flat tensors `[tokens of all rows and heads, dim]`, head after head ("head-major"), with
offsets. Tokens that came after the last eviction lie in a dense tail, because all heads hold the same new tokens.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache

from kvrepro.engine.attention import LOW_QUERIES, Part, attend, per_token
from kvrepro.engine.score.cumulative import page_mask
from kvrepro.engine.shapes import KeyValue, Mask, Query, RowInts, TokenInts, WindowPositions
from kvrepro.engine.shared import StepSignals
from kvrepro.errors import InputError

NO_TOKENS, NO_POSITIONS = torch.empty(0, 0, 0, 0), torch.empty(0, 0, dtype=torch.long)  # of an empty tail
ROOM = 256  # when the tail grows it gets one spare slot per ROOM tokens that a head holds
SLIDE = 16  # tokens in the tail after which a sliding layer drops what is out of its window
# transformers' defaults for caches that it quantises by optimum-quanto
GROUP = 64  # numbers that share a scale and a shift
RESIDUAL = 128  # newest tokens stay in the model's dtype until there are so many


class Packed:
    """A tensor `[tokens, dim]` in 4 bits, a scale and a shift for each 64 numbers; `dense()` gives it back, with every
    number rounded to one of its group's 16 levels. Raises InputError for a head whose dim does not fit the groups."""

    def __init__(self, dense: Tensor):
        if dense.shape[1] % GROUP:
            raise InputError(f"head dim {dense.shape[1]} is no multiple of {GROUP}, which share a scale: use bits=None")
        self.shape, self.dtype, groups = dense.shape, dense.dtype, dense.reshape(-1, GROUP)
        self.shift = -groups.amin(1, keepdim=True)
        self.scale = (groups.amax(1, keepdim=True) + self.shift) / 15
        levels = ((groups + self.shift) / self.scale).round().clamp(0, 15).to(torch.uint8)
        self.codes = levels[:, ::2] << 4 | levels[:, 1::2]

    def dense(self) -> Tensor:
        levels = torch.stack([self.codes >> 4, self.codes & 15], -1).flatten(1)
        return (self.scale * levels - self.shift).view(self.shape)

    def __len__(self) -> int:
        return int(self.shape[0])

    @property
    def bytes(self) -> int:
        """Bytes of codes, scales and shifts."""
        return sum(t.numel() * t.element_size() for t in (self.codes, self.scale, self.shift))


class Shown(NamedTuple):
    """The tokens of a layer, `[batch, kv_heads, tokens, ...]`, flush right; dead slots have position -1."""

    keys: KeyValue
    values: KeyValue
    positions: Tensor
    sums: dict[str, Tensor]
    index: Tensor  # places in the flat tensors, -1 in dead slots

    def widened(self, width: int) -> "Shown":
        """The same with dead slots in front, `width` in all."""
        more = width - self.keys.shape[2]
        if not more:
            return self
        keys, values = (pad(x, (0, 0, more, 0)) for x in (self.keys, self.values))
        positions, index = (pad(x, (more, 0), value=-1) for x in (self.positions, self.index))
        return Shown(keys, values, positions, {name: pad(s, (more, 0)) for name, s in self.sums.items()}, index)


@dataclass
class RaggedLayer:
    """Keys and values of one attention layer for `batch` rows. Segment s = row * kv_heads + head of the flat tensors
    runs from offsets[s] to offsets[s + 1], in ascending order of positions."""

    keys: Tensor | Packed  # [total, dim]
    values: Tensor | Packed
    positions: Tensor  # int32 [total]
    offsets: Tensor  # int64 [batch * kv_heads + 1]
    shape: tuple[int, int]  # batch, kv_heads
    sums: dict[str, Tensor]  # per token, float32 [total]
    tail_keys: KeyValue = NO_TOKENS  # [batch, kv_heads, room, dim]
    tail_values: KeyValue = NO_TOKENS
    tail_positions: TokenInts = NO_POSITIONS  # [batch, used], -1 where a row got padding
    tail_sums: dict[str, Tensor] = field(default_factory=dict)  # [batch, kv_heads, used]
    queries: Query | None = None  # the last queries seen, for a policy with a window that evicts again
    query_positions: WindowPositions | None = None

    @classmethod
    def of(
        cls, keys: KeyValue, values: KeyValue, positions: Tensor, keep: Mask, sums: dict[str, Tensor]
    ) -> "RaggedLayer":  # fmt: skip
        """The tokens that `keep` [batch, kv_heads, tokens] marks; positions and sums have the same shape."""
        where = keep.nonzero().unbind(1)
        flat_sums = {name: s[where] for name, s in sums.items()}
        return cls(
            keys[where], values[where], positions[where].int(), _offsets(keep.sum(-1)), keys.shape[:2], flat_sums
        )

    def layers(self, n: int) -> list["RaggedLayer"]:
        """Split the rows of `n` layers, one layer's rows after the other's, into the layers; nothing is copied."""
        if n == 1:
            return [self]
        shape, lengths = (self.shape[0] // n, self.shape[1]), self.offsets.diff().view(n, -1)
        totals = lengths.sum(1).tolist()
        keys, values, where = (_dense(x).split(totals) for x in (self.keys, self.values, self.positions))
        sums = {name: s.split(totals) for name, s in self.sums.items()}
        return [
            RaggedLayer(keys[i], values[i], where[i], _offsets(lengths[i]), shape, {x: s[i] for x, s in sums.items()})
            for i in range(n)
        ]

    @property
    def lengths(self) -> Tensor:
        """Tokens of each head in the flat part, int64 [batch, kv_heads]."""
        return self.offsets.diff().view(self.shape)

    @property
    def used(self) -> Tensor | None:
        """None: the tail's length is known to the CPU; a `FixedLayer` counts on the device."""
        return None

    @property
    def tail(self) -> int:
        """Tokens in the tail."""
        return int(self.tail_positions.shape[1])

    def held(self) -> Tensor:
        """Tokens held, int64 [batch, kv_heads]."""
        if not self.tail:
            return self.lengths
        return self.lengths + (self.tail_positions >= 0).sum(1)[:, None]

    @property
    def bytes(self) -> int:
        """Bytes of keys and values as allocated, the tail's room included."""
        tensors = (self.keys, self.values, self.tail_keys, self.tail_values)
        return sum(t.bytes if isinstance(t, Packed) else bytes_of(t) for t in tensors)

    @property
    def overhead_bytes(self) -> int:
        """Bytes of positions and offsets."""
        return bytes_of(self.positions, self.offsets, self.tail_positions)

    @property
    def state_bytes(self) -> int:
        """Bytes of what the next eviction needs: sums per token, the last queries."""
        return bytes_of(*self.sums.values(), *self.tail_sums.values(), self.queries, self.query_positions)

    def append(self, keys: KeyValue, values: KeyValue, positions: TokenInts) -> None:
        """New tokens `[batch, kv_heads, new, dim]` of every row; position -1 marks padding."""
        new, used = keys.shape[2], self.tail
        if used + new > self.tail_keys.shape[2]:
            room = used + new + len(self.positions) // (ROOM * self.shape[0] * self.shape[1])
            grown = [keys.new_zeros(*keys.shape[:2], room, keys.shape[3]) for _ in range(2)]
            if used:
                grown[0][:, :, :used], grown[1][:, :, :used], _ = self.newest()
            self.tail_keys, self.tail_values = grown
        self.tail_keys[:, :, used : used + new] = keys
        self.tail_values[:, :, used : used + new] = values
        self.tail_positions = positions if not used else torch.cat([self.tail_positions, positions], 1)
        zeros = keys.new_zeros(*keys.shape[:3], dtype=torch.float32)
        before = self.tail_sums
        self.tail_sums = {n: zeros.clone() if not used else torch.cat([before[n], zeros], 2) for n in self.sums}

    def newest(self) -> Part:
        """The tail, without its spare room."""
        used = slice(0, self.tail)
        return self.tail_keys[:, :, used], self.tail_values[:, :, used], self.tail_positions[:, None]

    def parts(self) -> list[Part]:
        """What a query attends to: the flat part, flush right per head, and the tail."""
        index = self.index()
        parts: list[Part] = []
        if index.shape[2]:
            parts.append((self._padded(self.keys, index), self._padded(self.values, index), self._positions(index)))
        return [*parts, self.newest()] if self.tail else parts

    def index(self) -> Tensor:
        """Places in the flat tensors, int64 [batch, kv_heads, longest], flush right, -1 before a head's first token."""
        longest = int(self.lengths.max()) if len(self.keys) else 0
        place = self.offsets[1:, None] - longest + torch.arange(longest, device=self.offsets.device)
        return torch.where(place >= self.offsets[:-1, None], place, -1).view(*self.shape, longest)

    def _padded(self, flat: Tensor | Packed, index: Tensor) -> Tensor:
        flat = _dense(flat)
        if index.numel() == len(flat):  # equal lengths: a view
            return flat.view(*index.shape, *flat.shape[1:])
        return flat.index_select(0, index.clamp(min=0).flatten()).view(*index.shape, *flat.shape[1:])

    def _positions(self, index: Tensor) -> Tensor:
        return self._padded(self.positions, index).long().masked_fill(index < 0, -1)

    def settle(self) -> None:
        """Move the tail into the flat part."""
        if self.tail:
            self.keep(*self.chosen(lambda positions: positions >= 0))

    def shown(self) -> "Shown":
        """All tokens, after `settle`."""
        self.settle()
        index = self.index()
        sums = {n: self._padded(s, index).masked_fill(index < 0, 0) for n, s in self.sums.items()}
        return Shown(
            self._padded(self.keys, index), self._padded(self.values, index), self._positions(index), sums, index
        )  # fmt: skip

    def evict(self, keep: Mask, index: Tensor) -> None:
        """Keep those tokens that `keep` marks among the ones that `shown` returned, with its `index`."""
        stays = keep & (index >= 0)
        source = index[stays]
        self.keep(source, self.positions[source], _offsets(stays.sum(-1)))

    def chosen(self, keep: Callable[[Tensor], Mask]) -> tuple[Tensor, Tensor, Tensor]:
        """(source, positions, offsets) of the tokens that `keep` chooses, a function from positions [batch, kv_heads,
        tokens] to a mask. `source` counts through the flat part and then the tail; it fits other layers that hold the
        same tokens."""
        place, positions = self._places()
        mask = keep(positions) & (positions >= 0)
        return place[mask], positions[mask].int(), _offsets(mask.sum(-1))

    def _places(self) -> tuple[Tensor, Tensor]:
        """(place of each token, counted through the flat part and then the tail; its position), both int64 [batch,
        kv_heads, tokens]; the position is -1 where there is no token."""
        index = self.index()
        positions = self._positions(index)
        if not self.tail:
            return index, positions
        tail = torch.arange(self.shape[0] * self.shape[1] * self.tail, device=index.device).view(*self.shape, self.tail)
        newest = self.tail_positions[:, None].expand(-1, self.shape[1], -1)
        return torch.cat([index, len(self.positions) + tail], 2), torch.cat([positions, newest], 2)

    def keep(self, source: Tensor, positions: Tensor, offsets: Tensor) -> None:
        """Keep what `chosen` chose of this layer, or of one with the same tokens in the same places."""
        vars(self).update(self._taken(source), positions=positions, offsets=offsets)
        self.tail_keys, self.tail_values, self.tail_positions, self.tail_sums = NO_TOKENS, NO_TOKENS, NO_POSITIONS, {}

    def _taken(self, source: Tensor) -> dict[str, Any]:
        """The fields `keys`, `values` and `sums` of the tokens at `source`."""
        keys, values, _ = self.newest()

        def taken(flat: Tensor | Packed, tail: Tensor) -> Tensor:
            flat = _dense(flat)
            return (torch.cat([flat, tail.flatten(0, 2)]) if self.tail else flat).index_select(0, source)

        sums = {n: taken(s, self.tail_sums[n] if self.tail else s) for n, s in self.sums.items()}
        return {"keys": taken(self.keys, keys), "values": taken(self.values, values), "sums": sums}

    def slide(self, oldest: RowInts) -> None:
        """Drop the tokens before each row's `oldest` position, which a sliding layer never sees again. Settles."""
        packed = isinstance(self.keys, Packed)
        self.settle()
        index = self.index()
        gone = self._positions(index) < oldest.to(index.device)[:, None, None]
        if bool((gone & (index >= 0)).any()):
            self.evict(~gone, index)
        if packed:
            self.quantise()

    def quantise(self) -> None:
        """Hold the flat part in 4 bits, and the tail once it has RESIDUAL tokens, as transformers' cache does.

        After an eviction all survivors are packed at once, the tail's too. That moves some that were packed before: in
        float32 by rounding alone, in 16 bits by parts of a level, because a group's scale is rounded to the dtype.
        """
        if isinstance(self.keys, Packed) and self.tail < RESIDUAL:
            return
        self.settle()
        self.keys, self.values = Packed(_dense(self.keys)), Packed(_dense(self.values))

    def remember(self, queries: Query, positions: WindowPositions, window: int) -> None:
        """Keep copies of the last `window` queries of each row, padding in front."""
        if self.queries is not None:
            queries = torch.cat([self.queries, queries], 2)
            positions = torch.cat([self.query_positions, positions], 1)
        last = (positions >= 0).to(torch.uint8).argsort(dim=1, stable=True)[:, -window:]
        self.query_positions = positions.gather(1, last)
        self.queries = queries.gather(2, last[:, None, :, None].expand(-1, queries.shape[1], -1, queries.shape[3]))

    def add(self, name: str, p: Tensor, flat_tokens: int) -> None:
        """Add `p` [batch, kv_heads, tokens], in the order of `parts`, to the sum of that name."""
        if flat_tokens:
            index = self.index()
            self.sums[name].index_add_(0, index[index >= 0], p[..., :flat_tokens][index >= 0])
        if self.tail:
            self.tail_sums[name] += p[..., flat_tokens:]

    def rows(self, rows: Tensor) -> "RaggedLayer":
        """A copy of these rows, in this order."""
        if isinstance(self.keys, Packed) and len(rows) == self.shape[0] == 1:
            return copy.copy(self)  # packed tensors never change in place
        rows = rows.to(self.positions.device)
        place, positions = (x[rows] for x in self._places())
        exists = positions >= 0
        return RaggedLayer(
            **self._taken(place[exists]), positions=positions[exists].int(), offsets=_offsets(exists.sum(-1)),
            shape=(len(rows), self.shape[1]), queries=None if self.queries is None else self.queries[rows],
            query_positions=None if self.query_positions is None else self.query_positions[rows],
        )  # fmt: skip


def bytes_of(*tensors: Tensor | None) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def _offsets(lengths: Tensor) -> Tensor:
    """Where each segment begins, and at the end where the last one ends."""
    return pad(lengths.flatten().cumsum(0), (1, 0))


def _dense(stored: Tensor | Packed) -> Tensor:
    return stored.dense() if isinstance(stored, Packed) else stored


def concatenated(layers: list[RaggedLayer]) -> RaggedLayer:
    """The rows of several caches of one layer as one batch. Settles."""
    if len(layers) == 1:
        return layers[0]
    for layer in layers:
        layer.settle()
    lengths = torch.cat([layer.lengths for layer in layers])
    names = set().union(*(layer.sums for layer in layers))
    remembered = [x.queries for x in layers if x.queries is not None]
    window = max((queries.shape[2] for queries in remembered), default=0)

    def widened(x: RaggedLayer) -> tuple[Tensor, Tensor]:
        """Its queries behind padding, so that all layers have the same number."""
        queries, positions = x.queries, x.query_positions
        if queries is None:
            queries = remembered[0][:1, :, :0].expand(x.shape[0], -1, -1, -1)
            positions = x.offsets.new_empty(x.shape[0], 0)
        missing = window - queries.shape[2]
        return pad(queries, (0, 0, missing, 0)), pad(positions, (missing, 0), value=-1)

    queries = [widened(x) for x in layers] if window else []
    return RaggedLayer(
        torch.cat([_dense(x.keys) for x in layers]), torch.cat([_dense(x.values) for x in layers]),
        torch.cat([x.positions for x in layers]), _offsets(lengths), (len(lengths), lengths.shape[1]),
        {n: torch.cat([x.sums.get(n, x.positions.new_zeros(len(x.positions), dtype=torch.float32)) for x in layers])
         for n in names},
        queries=torch.cat([q for q, _ in queries]) if window else None,
        query_positions=torch.cat([at for _, at in queries]) if window else None,
    )  # fmt: skip


class EngineCache(DynamicCache):
    """The cache that the model gets. New keys and values of attention layers pass through it unchanged; the attention
    object stores them in `ragged`. Recurrent layers keep their states here as usual."""

    def __init__(self, config: Any):
        super().__init__(config=config)
        self.ragged: dict[int, Any] = {}  # RaggedLayer, or FixedLayer while a step is captured
        self.scalings: dict[int, Any] = {}  # float or `Softmax`, of each layer that has read on

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """The new keys and values, unchanged."""
        return key_states, value_states

    @property
    def bytes(self) -> int:
        """Bytes of all keys and values as allocated."""
        return sum(layer.bytes for layer in self.ragged.values())

    def quantise(self) -> None:
        """Hold all layers in 4 bits."""
        for layer in self.ragged.values():
            layer.quantise()

    def rows(self, rows: Tensor, spend: bool = False) -> "EngineCache":
        """A copy of these rows, in this order. spend: this cache is done, and frees each layer once it is copied."""
        taken, layer = copy.copy(self), self.ragged.pop if spend else self.ragged.__getitem__
        taken.ragged = {number: layer(number).rows(rows) for number in list(self.ragged)}
        taken.layers = [_states([layer], lambda t: t.index_select(0, rows.to(t.device))) for layer in self.layers]
        return taken


def joined_caches(caches: list[EngineCache]) -> EngineCache:
    """The rows of several caches as one batch, which takes their layers one by one to save memory."""
    whole = copy.copy(caches[0])
    whole.ragged = {n: concatenated([cache.ragged.pop(n) for cache in caches]) for n in list(caches[0].ragged)}
    layers = zip(*(cache.layers for cache in caches), strict=True)
    whole.layers = [_states(same_layers, lambda *states: torch.cat(states)) for same_layers in layers]
    return whole


def _states(layers: Sequence[Any], change: Callable[..., Tensor]) -> Any:
    """A copy of the first of these layers with `change(states of all of them)` for each recurrent state."""
    new = copy.copy(layers[0])
    for name in vars(new) if hasattr(new, "recurrent_states") else ():
        values = [vars(layer)[name] for layer in layers]
        if isinstance(values[0], Tensor):
            setattr(new, name, change(*values))
        elif isinstance(values[0], dict):
            states = {k: change(*(v[k] for v in values)) for k, state in values[0].items() if isinstance(state, Tensor)}
            setattr(new, name, values[0] | states)
    return new


class Extend:
    """Attention of new tokens `[batch, new]` of rows that hold a cache: each layer stores them, then attends."""

    def __init__(self, cache: EngineCache, positions: TokenInts, window: int = 0,
                 pages: tuple[int, int, int] | None = None, backend: str = "torch",
                 step: StepSignals | None = None, slides: bool = True):  # fmt: skip
        """window: queries that a later eviction needs. pages: (page, dense layers, budget) of Quest. backend: "triton"
        computes single tokens by a kernel where no layer slides. step: of `SharedCap`, sums up
        a decode step's attention over layers and hides tokens. slides: sliding layers drop tokens that no later query
        sees; otherwise, as in a captured step where no tensor may move, they only hide them."""
        self.step, self.slides = step, slides
        self.cache, self.positions, self.window, self.pages, self.backend = cache, positions, window, pages, backend

    def attend(
        self, layer: int, query: Query, key: KeyValue, value: KeyValue, scaling: float, sliding: int | None = None
    ) -> Tensor:
        stored, step = self.cache.ragged[layer], self.step
        at = self.positions.to(query.device)
        self.cache.scalings[layer] = scaling
        stored.append(key, value, at)
        if self.window:
            stored.remember(query, at, self.window)
        if self.backend == "triton" and query.shape[2] == 1 and step is None and sliding is None:
            return self._decode(stored, query, scaling)
        parts = stored.parts()
        watch = None
        if "low" in stored.sums and query.shape[2] >= LOW_QUERIES:  # older queries have left the window
            for low in (stored.sums["low"], stored.tail_sums["low"]):
                low.zero_()
        hide = self._unchosen(layer, query, parts)
        if stored.sums or step is not None:
            where = torch.cat([tokens.expand(*stored.shape, -1) for _, _, tokens in parts], 2)
        if stored.sums:
            newest, flat = at.amax(1), 0 if len(parts) == 1 else parts[0][0].shape[2]

            def watch(p: Tensor, queries: slice) -> None:
                for name in stored.sums:
                    stored.add(name, per_token(name, p, at[:, queries], where, newest), flat)

        if step is not None:
            hide = step.hidden(where)

            def watch(p: Tensor, queries: slice) -> None:
                step.see(p, where)

        out = attend(query, at, parts, scaling, sliding, watch, hide)
        if sliding is not None and self.slides and stored.tail >= SLIDE:
            stored.slide(at.amax(1) - sliding + 2)  # the first position that the next query sees
        return out

    def _decode(self, stored: Any, query: Query, scaling: float) -> Tensor:
        """One token per row by the ragged decode kernel, which also returns each token's attention if it is summed."""
        from kvrepro_kernels import ragged_decode

        done = ragged_decode(
            query, stored.keys, stored.values, stored.offsets, stored.tail_keys, stored.tail_values, stored.tail,
            used=stored.used, scale=scaling, emit=("mean",) if stored.sums else (),
        )  # fmt: skip
        for name in stored.sums:  # only "mass": the backend refuses conditions with other sums
            flat, tail = done.attention["mean"]
            stored.sums[name] += flat
            stored.tail_sums[name] += tail
        return done.output.transpose(1, 2)

    def _unchosen(self, layer: int, query: Query, parts: Any) -> Tensor | None:
        """Quest: tokens of pages that this step's query does not select, bool [batch, kv_heads, group, 1, tokens]."""
        if self.pages is None:
            return None
        page, dense_layers, budget = self.pages
        if list(self.cache.ragged).index(layer) < dense_layers:
            return None
        keys = torch.cat([k for k, _, _ in parts], 2)
        alive = torch.cat([w.expand(*keys.shape[:2], -1) for _, _, w in parts], 2) >= 0
        chosen = page_mask(query[:, :, -1], keys, alive, page, budget)
        return ~chosen.unflatten(1, (keys.shape[1], -1))[:, :, :, None]
