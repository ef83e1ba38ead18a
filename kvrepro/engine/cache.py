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

from kvrepro.engine.attention import Part
from kvrepro.engine.shapes import KeyValue, Mask, Query, RowInts, TokenInts, WindowPositions
from kvrepro.errors import InputError

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

    @property
    def bytes(self) -> int:
        """Bytes of codes, scales and shifts."""
        return bytes_of(self.codes, self.scale, self.shift)


class Shown(NamedTuple):
    """The tokens of a layer, `[batch, kv_heads, tokens, ...]`, flush right; dead slots have position -1."""

    keys: KeyValue
    values: KeyValue
    positions: Tensor
    sums: dict[str, Tensor]
    places: Tensor  # in the flat part and then the tail


@dataclass
class RaggedLayer:
    """Keys and values of one attention layer for `batch` rows. Segment s = row * kv_heads + head of the flat tensors
    runs from offsets[s] to offsets[s + 1], in ascending order of positions.

    A captured step needs tensors that stay in place (`fix`). Then a number on the device says where in a tail with room
    the next token goes, and there may be room behind the last segment; or all segments have the same width, with
    position -1 before their tokens.
    """

    keys: Tensor | Packed  # [total, dim]
    values: Tensor | Packed
    positions: Tensor  # int32 [total]
    offsets: Tensor  # int64 [batch * kv_heads + 1]
    shape: tuple[int, int]  # batch, kv_heads
    sums: dict[str, Tensor]  # per token, float32 [total]
    queries: Query | None = None  # the last queries seen, for a policy with a window that evicts again
    query_positions: WindowPositions | None = None
    tail: int = field(init=False)  # tokens in the tail
    tail_keys: KeyValue = field(init=False)  # [batch, kv_heads, room, dim]
    tail_values: KeyValue = field(init=False)
    tail_positions: TokenInts = field(init=False)  # [batch, tail, or room if fixed], -1 where there is no token
    tail_sums: dict[str, Tensor] = field(init=False)  # [batch, kv_heads, the same]
    slot: Tensor | None = None  # if fixed, int64 [2]: the next token's place in the tail, and the tail's length with it
    width: int = 0  # if fixed: places of each head, where all have equally many
    most: int = 0  # if fixed: tokens of a head for which there is room

    def __post_init__(self) -> None:
        self._empty_tail()

    def _empty_tail(self) -> None:
        batch, heads = self.shape
        empty = self.positions.new_empty(batch, heads, 0, self.keys.shape[1], dtype=self.keys.dtype)
        self.tail, self.tail_keys, self.tail_values = 0, empty, empty
        self.tail_positions = self.offsets.new_empty(batch, 0)
        self.tail_sums = {name: s.new_empty(batch, heads, 0) for name, s in self.sums.items()}

    @classmethod
    def of(
        cls, keys: KeyValue, values: KeyValue, positions: Tensor, keep: Mask, sums: dict[str, Tensor]
    ) -> "RaggedLayer":
        """The tokens that `keep` [batch, kv_heads, tokens] marks; positions and sums have the same shape."""
        where = keep.nonzero().unbind(1)
        flat_sums = {name: s[where] for name, s in sums.items()}
        offsets = _offsets(keep.sum(-1))
        return cls(keys[where], values[where], positions[where].int(), offsets, keys.shape[:2], flat_sums)

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

    def rows(self, rows: Tensor) -> "RaggedLayer":
        """A copy of these rows, in this order."""
        if isinstance(self.keys, Packed) and len(rows) == self.shape[0] == 1:
            return copy.copy(self)  # packed tensors never change in place
        rows = rows.to(self.positions.device)
        places, _ = self.places()
        places = places[rows]
        taken, offsets = self._taken(places[places >= 0]), _offsets((places >= 0).sum(-1))
        if self.queries is not None and self.query_positions is not None:
            taken |= {"queries": self.queries[rows], "query_positions": self.query_positions[rows]}
        return RaggedLayer(**taken, offsets=offsets, shape=(len(rows), self.shape[1]))

    # ---- what it holds

    @property
    def lengths(self) -> Tensor:
        """Places of each head in the flat part, int64 [batch, kv_heads]."""
        return self.offsets.diff().view(self.shape)

    def held(self) -> Tensor:
        """Tokens held, int64 [batch, kv_heads]."""
        flat = (self.positions >= 0).view(*self.shape, -1).sum(-1) if self.width else self.lengths
        return flat + (self.tail_positions >= 0).sum(1)[:, None]

    def _bytes(self, each: int, *tensors: Any) -> int:
        """Bytes of these tensors; of a fixed layer, which has free room, `each` bytes for each of its tokens."""
        return each * int(self.held().sum()) if self.slot is not None else bytes_of(*tensors)

    @property
    def bytes(self) -> int:
        """Bytes of keys and values as allocated, the tail's room included; of a fixed layer, of its tokens alone."""
        tensors = self.keys, self.values, self.tail_keys, self.tail_values
        return self._bytes(2 * self.keys.shape[1] * self.keys.dtype.itemsize, *tensors)

    @property
    def overhead_bytes(self) -> int:
        """Bytes of positions and offsets."""
        return self._bytes(4, self.positions) + bytes_of(self.offsets, self.tail_positions)

    @property
    def state_bytes(self) -> int:
        """Bytes of what the next eviction needs: sums per token, the last queries."""
        sums = self._bytes(4 * len(self.sums), *self.sums.values(), *self.tail_sums.values())
        return sums + bytes_of(self.queries, self.query_positions)

    # ---- new tokens

    def append(self, keys: KeyValue, values: KeyValue, positions: TokenInts) -> None:
        """New tokens `[batch, kv_heads, new, dim]` of every row, one if fixed; position -1 marks padding."""
        if self.slot is not None:
            self.tail_keys.index_copy_(2, self.slot[:1], keys)
            self.tail_values.index_copy_(2, self.slot[:1], values)
            self.tail_positions.index_copy_(1, self.slot[:1], positions)
            return
        used, new, room = self.tail, keys.shape[2], self.tail_keys.shape[2]
        self.tail += new
        if self.tail > room:
            more = self.tail + len(self.positions) // (ROOM * self.shape[0] * self.shape[1]) - room
            self.tail_keys, self.tail_values = (pad(x, (0, 0, 0, more)) for x in (self.tail_keys, self.tail_values))
        self.tail_keys[:, :, used : self.tail] = keys
        self.tail_values[:, :, used : self.tail] = values
        self.tail_positions = torch.cat([self.tail_positions, positions], 1)
        self.tail_sums = {name: pad(s, (0, new)) for name, s in self.tail_sums.items()}

    def remember(self, queries: Query, positions: WindowPositions, window: int) -> None:
        """Keep the last `window` queries of each row, padding in front; a fixed layer only if it has some already."""
        alone = queries.shape[2] == 1  # and no padding
        if self.queries is not None and self.query_positions is not None:
            first = max(0, self.queries.shape[2] + 1 - window) if alone else 0
            queries = torch.cat([self.queries[:, :, first:], queries], 2)
            positions = torch.cat([self.query_positions[:, first:], positions], 1)
        elif self.slot is not None:
            return
        if not alone:
            last = (positions >= 0).to(torch.uint8).argsort(dim=1, stable=True)[:, -window:]
            positions = positions.gather(1, last)
            queries = queries.gather(2, last[:, None, :, None].expand(-1, queries.shape[1], -1, queries.shape[3]))
        if self.slot is not None and self.queries is not None and self.query_positions is not None:
            self.queries.copy_(queries)
            self.query_positions.copy_(positions)
        else:
            self.queries, self.query_positions = queries, positions

    def add(self, name: str, p: Tensor) -> None:
        """Add `p` [batch, kv_heads, tokens], in the order of `parts`, to the sum of that name."""
        flat, newest = p.split([p.shape[2] - self.tail, self.tail], 2)
        index = self._index()
        self.sums[name].index_add_(0, index[index >= 0], flat[index >= 0])
        self.tail_sums[name] += newest

    # ---- what is shown of it

    def newest(self) -> Part:
        """The tail, without its spare room."""
        used = slice(0, self.tail)
        return self.tail_keys[:, :, used], self.tail_values[:, :, used], self.tail_positions[:, None, used]

    def parts(self) -> list[Part]:
        """What a query attends to: the flat part, flush right per head, and the tail, with its room if fixed."""
        if self.width:
            keys, values, positions = (
                x.view(*self.shape, -1, *x.shape[1:]) for x in (_dense(self.keys), _dense(self.values), self.positions)
            )
            return [(keys, values, positions), (self.tail_keys, self.tail_values, self.tail_positions[:, None])]
        index = self._index()
        parts: list[Part] = []
        if index.shape[2]:
            parts.append((self._padded(self.keys, index), self._padded(self.values, index), self._positions(index)))
        return [*parts, self.newest()] if self.tail else parts

    def shown(self) -> Shown:
        """All tokens, if the tail holds no padding."""
        index, (new_keys, new_values, _) = self._index(), self.newest()
        places, positions = self._places(index)
        keys, values = (self._padded(x, index) for x in (self.keys, self.values))
        sums = {name: self._padded(s, index) for name, s in self.sums.items()}
        if self.tail:
            keys, values = torch.cat([keys, new_keys], 2), torch.cat([values, new_values], 2)
            sums = {name: torch.cat([s, self.tail_sums[name][..., : self.tail]], 2) for name, s in sums.items()}
        sums = {name: s.masked_fill(places < 0, 0) for name, s in sums.items()}
        return Shown(keys, values, positions, sums, places)

    def places(self) -> tuple[Tensor, Tensor]:
        """(place of each token, counted through the flat part and then the tail; its position), both int64 [batch,
        kv_heads, tokens], flush right, -1 where there is no token."""
        return self._places(self._index())

    def _places(self, places: Tensor) -> tuple[Tensor, Tensor]:
        positions = self._positions(places)
        if self.tail:
            tail = torch.arange(self.shape[0] * self.shape[1] * self.tail, device=places.device)
            places = torch.cat([places, len(self.positions) + tail.view(*self.shape, -1)], 2)
            positions = torch.cat([positions, self.newest()[2].expand(-1, self.shape[1], -1)], 2)
        return places.masked_fill(positions < 0, -1), positions

    def _index(self) -> Tensor:
        """Places in the flat tensors, int64 [batch, kv_heads, longest], flush right, -1 before a head's first token."""
        longest = self.width or (int(self.lengths.max()) if len(self.positions) else 0)
        place = self.offsets[1:, None] - longest + torch.arange(longest, device=self.offsets.device)
        return torch.where(place >= self.offsets[:-1, None], place, -1).view(*self.shape, longest)

    def _padded(self, flat: Tensor | Packed, index: Tensor) -> Tensor:
        flat = _dense(flat)
        if index.numel() == len(flat) and (self.slot is None or self.width):  # equal lengths: a view
            return flat.view(*index.shape, *flat.shape[1:])
        return flat.index_select(0, index.clamp(min=0).flatten()).view(*index.shape, *flat.shape[1:])

    def _positions(self, index: Tensor) -> Tensor:
        return self._padded(self.positions, index).long().masked_fill(index < 0, -1)

    # ---- what leaves

    def keep(self, places: Tensor, stays: Mask) -> None:
        """Keep the tokens that `stays` marks among `places`, all in the flat part. A fixed layer keeps its tensors if
        they suffice and are not twice as large as needed; otherwise it is fixed no more."""
        kept, offsets = self._taken(places[stays]), _offsets(stays.sum(-1))
        if self.slot is not None and self._fits(len(kept["positions"]), offsets):
            self._store(kept, offsets)
            return
        vars(self).update(kept, offsets=offsets, slot=None, width=0)
        self._empty_tail()

    def _taken(self, source: Tensor) -> dict[str, Any]:
        """The fields `keys`, `values`, `positions` and `sums` of the tokens at these places."""

        def taken(flat: Tensor | Packed, tail: Tensor) -> Tensor:
            flat = _dense(flat)
            return (torch.cat([flat, tail.flatten(0, 2)]) if self.tail else flat).index_select(0, source)

        keys, values, positions = self.newest()
        return {
            "keys": taken(self.keys, keys),
            "values": taken(self.values, values),
            "positions": taken(self.positions, positions.expand(-1, self.shape[1], -1)).int(),
            "sums": {name: taken(s, self.tail_sums[name][..., : self.tail]) for name, s in self.sums.items()},
        }

    def settle(self) -> None:
        """Move the tail into the flat part."""
        if self.tail:
            places, _ = self.places()
            self.keep(places, places >= 0)

    def slide(self, oldest: RowInts) -> None:
        """Drop the tokens before each row's `oldest` position, which a sliding layer never sees again. Settles; a fixed
        layer only empties their places."""
        oldest = oldest.to(self.positions.device)[:, None]
        if self.slot is not None:
            flat = self.positions.view(self.shape[0], -1)
            flat.masked_fill_(flat < oldest, -1)
            self.tail_positions.masked_fill_(self.tail_positions < oldest, -1)
            return
        places, positions = self.places()
        stays = (places >= 0) & (positions >= oldest[:, None])
        if self.tail or bool(((places >= 0) & ~stays).any()):
            packed = isinstance(self.keys, Packed)
            self.keep(places, stays)
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

    # ---- tensors that stay in place

    def fix(self, slot: Tensor, room: int, most: int, wide: bool, window: int) -> None:
        """Move all tokens into tensors that stay in place, with room for `room` new ones, where `slot` says.

        most: the most tokens of a head after later evictions, if there are any. wide: all heads get equally many
        places. window: queries to remember.
        """
        self.loosen()
        (batch, heads), offsets = self.shape, self.offsets
        kept = {name: getattr(self, name) for name in ("keys", "values", "positions", "sums")}
        self.slot, self.most, self.width = slot, most, max(most, 1, int(self.lengths.max())) if wide else 0
        self.offsets = self.width * torch.arange(batch * heads + 1, device=offsets.device) if wide else offsets.clone()
        places = max(len(self.positions), batch * heads * max(self.width, most))
        for name in ("keys", "values", "positions"):
            setattr(self, name, kept[name].new_zeros(places, *kept[name].shape[1:]))
        self.sums = {name: s.new_zeros(places) for name, s in self.sums.items()}
        self.tail_keys, self.tail_values = (
            kept["keys"].new_zeros(batch, heads, room, self.keys.shape[1]) for _ in range(2)
        )
        self.tail_positions = offsets.new_zeros(batch, room)
        self.tail_sums = {name: s.new_zeros(batch, heads, room) for name, s in self.sums.items()}
        self._store(kept, offsets)
        if self.queries is not None and self.query_positions is not None:
            missing = max(0, window - self.queries.shape[2])
            self.queries = pad(self.queries, (0, 0, missing, 0))
            self.query_positions = pad(self.query_positions, (missing, 0), value=-1)

    def loosen(self) -> None:
        """Settle, and be fixed no more."""
        if self.slot is not None or self.tail:
            places, _ = self.places()
            self.slot = None
            self.keep(places, places >= 0)

    def _fits(self, tokens: int, offsets: Tensor) -> bool:
        """Is there room in place for segments with these `offsets`, and not much more than they need?"""
        segments, places = self.shape[0] * self.shape[1], len(self.positions)
        if self.width:
            tokens = segments * int(offsets.diff().max())
        return tokens <= places and (places // 2 <= tokens or places <= segments * self.most)

    def _store(self, kept: dict[str, Any], offsets: Tensor) -> None:
        """Write tokens, which have these `offsets`, into the tensors in place."""
        tokens = len(kept["positions"])
        where: Any = slice(0, tokens)
        if self.width:
            shift = (self.offsets - offsets)[1:].repeat_interleave(offsets.diff(), output_size=tokens)
            where = torch.arange(tokens, device=shift.device) + shift
            self.positions.fill_(-1)
        else:
            self.offsets.copy_(offsets)
        for name in ("keys", "values", "positions"):
            getattr(self, name)[where] = kept[name]
        for name, s in kept["sums"].items():
            self.sums[name][where] = s
            self.tail_sums[name].zero_()
        self.tail = 0
        self.tail_positions.fill_(-1)


def bytes_of(*tensors: Tensor | Packed | None) -> int:
    return sum(t.bytes if isinstance(t, Packed) else t.nbytes for t in tensors if t is not None)


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
    cat, lengths = torch.cat, torch.cat([layer.lengths for layer in layers])
    names = set().union(*(layer.sums for layer in layers))
    zeros = [layer.positions.new_zeros(len(layer.positions), dtype=torch.float32) for layer in layers]
    remembered = [x.queries for x in layers if x.queries is not None]
    window = max((queries.shape[2] for queries in remembered), default=0)

    def queries_of(layer: RaggedLayer) -> tuple[Tensor, Tensor]:
        """Its queries behind padding, so that all layers have the same number."""
        queries, positions = layer.queries, layer.query_positions
        if queries is None:
            queries = remembered[0][:1, :, :0].expand(layer.shape[0], -1, -1, -1)
            positions = layer.offsets.new_empty(layer.shape[0], 0)
        missing = window - queries.shape[2]
        return pad(queries, (0, 0, missing, 0)), pad(positions, (missing, 0), value=-1)

    queries, positions = zip(*map(queries_of, layers), strict=True) if window else (None, None)
    return RaggedLayer(
        cat([_dense(x.keys) for x in layers]),
        cat([_dense(x.values) for x in layers]),
        cat([x.positions for x in layers]),
        _offsets(lengths),
        (len(lengths), lengths.shape[1]),
        {name: cat([x.sums.get(name, z) for x, z in zip(layers, zeros, strict=True)]) for name in names},
        queries=queries and cat(queries),
        query_positions=positions and cat(positions),
    )


class EngineCache(DynamicCache):
    """The cache that the model gets. New keys and values of attention layers pass through it unchanged; the attention
    object stores them in `ragged`. Recurrent layers keep their states here as usual."""

    def __init__(self, config: Any):
        super().__init__(config=config)
        self.ragged: dict[int, Any] = {}  # a `RaggedLayer` each, or what appends and shows its parts as one
        self.scalings: dict[int, Any] = {}  # float or `Softmax`, of each layer that has read on

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """The new keys and values, unchanged."""
        return key_states, value_states

    @property
    def recurrent(self) -> bool:
        """Does the model have layers with states in the place of tokens?"""
        return any(hasattr(layer, "recurrent_states") for layer in self.layers)

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
