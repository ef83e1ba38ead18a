"""The ragged cache: each head holds as many tokens as its budget says, and evicted tokens leave memory.

A layer's survivors lie in flat tensors `[tokens of all rows and heads, dim]`, head after head ("head-major"), with
offsets. Tokens that came after the last eviction lie in a dense tail, because all heads hold the same new tokens.
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache

from kvrepro.engine.attention import Part
from kvrepro.engine.shapes import Counts, KeyValue, Mask, Query, RowInts, TokenInts, WindowPositions
from kvrepro.errors import InputError

ROOM = 256  # when the tail grows it gets one spare slot per ROOM tokens that a head holds
SLIDE = 16  # tokens in the tail after which a sliding layer drops what is out of its window
# transformers' defaults for caches that it quantises by optimum-quanto
GROUP = 64  # numbers that share a scale and a shift
RESIDUAL = 128  # newest tokens stay in the model's dtype until there are so many
FLAT = ("keys", "values", "positions")  # of a `RaggedLayer`
STATES = ("conv_states", "recurrent_states")  # of a recurrent layer, as transformers' cache calls them


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
        self.nbytes = sum(int(part.nbytes) for part in (self.codes, self.scale, self.shift))

    def dense(self) -> Tensor:
        levels = torch.stack([self.codes >> 4, self.codes & 15], -1).flatten(1)
        return (self.scale * levels - self.shift).view(self.shape)


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

    A captured step needs tensors that stay in place (`fix`). Then a number on the device says where the next token goes
    in the tail, and there is room behind the last segment, or all have one width, with position -1 before their tokens.
    """

    keys: Tensor | Packed  # [total, dim]
    values: Tensor | Packed
    positions: Tensor  # int32 [total]
    offsets: Tensor  # int64 [batch * kv_heads + 1]
    shape: tuple[int, int]  # batch, kv_heads
    sums: dict[str, Tensor]  # per token, float32 [total]
    queries: Query | None = None  # the last queries seen, for a policy with a window that evicts again
    query_positions: Any = None  # `WindowPositions` of these
    tail: int = field(init=False)  # tokens in the tail
    tail_keys: KeyValue = field(init=False)  # [batch, kv_heads, room, dim]
    tail_values: KeyValue = field(init=False)
    tail_positions: TokenInts = field(init=False)  # [batch, tail, or room if fixed], -1 where there is no token
    tail_sums: dict[str, Tensor] = field(init=False)  # [batch, kv_heads, the same]
    slot: Tensor | None = None  # if fixed, int64 [2]: the next token's place in the tail, and the tail's length with it
    width: int = 0  # if fixed: places of each head, where all have equally many
    most: int = 0  # if fixed: tokens of a head for which there is room
    room: InitVar[int] = 0  # of the tail

    def __post_init__(self, room: int) -> None:
        batch, heads = self.shape
        self.tail, size = 0, (batch, heads, room, self.keys.shape[1])
        self.tail_keys, self.tail_values = (self.positions.new_zeros(size, dtype=self.keys.dtype) for _ in range(2))
        self.tail_positions = self.offsets.new_full((batch, room), -1)
        self.tail_sums = {name: s.new_zeros(batch, heads, room) for name, s in self.sums.items()}

    @classmethod
    def of(
        cls, keys: KeyValue, values: KeyValue, positions: Tensor, keep: Mask, sums: dict[str, Tensor]
    ) -> "RaggedLayer":
        """The tokens that `keep` [batch, kv_heads, tokens] marks; positions and sums have the same shape."""
        where = keep.nonzero().unbind(1)
        flat = {"keys": keys[where], "values": values[where], "positions": positions[where].int()}
        return cls._from(flat | {name: s[where] for name, s in sums.items()}, keep.sum(-1))

    @classmethod
    def _from(cls, flat: dict[str, Tensor], lengths: Counts, *queries: Any) -> "RaggedLayer":
        """Of flat tensors by name, the number of tokens of each head, and the last queries and their positions."""
        keys, values, positions = (flat.pop(name) for name in FLAT)
        return cls(keys, values, positions, _offsets(lengths), tuple(lengths.shape), flat, *queries)

    def _flat(self) -> dict[str, Tensor]:
        """Keys, values, positions and sums by name, none of them packed."""
        tensors = (x.dense() if isinstance(x, Packed) else x for x in (self.keys, self.values, self.positions))
        return dict(zip(FLAT, tensors, strict=True)) | self.sums

    def _tail(self) -> dict[str, Tensor]:
        """The same of the tail without its spare room, [batch, kv_heads, tail, ...]."""
        positions = self.tail_positions[:, None].expand(-1, self.shape[1], -1)
        tensors = {"keys": self.tail_keys, "values": self.tail_values, "positions": positions, **self.tail_sums}
        return {name: x[:, :, : self.tail] for name, x in tensors.items()}

    def layers(self, n: int) -> list["RaggedLayer"]:
        """Split the rows of `n` layers, one layer's rows after the other's, into the layers; nothing is copied."""
        if n == 1:
            return [self]
        segments = self.lengths.numel() // n
        offsets = self.offsets.unfold(0, segments + 1, segments)
        offsets = offsets - offsets[:, :1]
        totals, shape = offsets[:, -1].tolist(), (self.shape[0] // n, self.shape[1])
        flat = {name: x.split(totals) for name, x in self._flat().items()}
        sums = [{name: flat[name][i] for name in self.sums} for i in range(n)]
        tensors = [{name: flat[name][i] for name in FLAT} for i in range(n)]
        return [RaggedLayer(**tensors[i], offsets=offsets[i], shape=shape, sums=sums[i]) for i in range(n)]

    def rows(self, rows: Tensor) -> "RaggedLayer":
        """A copy of these rows, in this order."""
        if isinstance(self.keys, Packed) and len(rows) == self.shape[0] == 1:
            return copy.copy(self)  # packed tensors never change in place
        rows = rows.to(self.positions.device)
        places = self.places()[0][rows]
        queries = () if self.queries is None else (self.queries[rows], self.query_positions[rows])
        return RaggedLayer._from(self._taken(places[places >= 0]), (places >= 0).sum(-1), *queries)

    # ---- what it holds

    @property
    def lengths(self) -> Tensor:
        """Places of each head in the flat part, int64 [batch, kv_heads]."""
        return self.offsets.diff().view(self.shape)

    def held(self) -> Tensor:
        """Tokens held, int64 [batch, kv_heads]."""
        flat = (self.positions >= 0).view(*self.shape, -1).sum(-1) if self.width else self.lengths
        return flat + (self.tail_positions >= 0).sum(1)[:, None] if self.tail_positions.shape[1] else flat

    def _bytes(self, flat: Iterable[Any], tail: Iterable[Tensor]) -> int:
        """Bytes of these tensors as allocated; of a fixed layer, which has free room, of its tokens alone."""
        if self.slot is None:
            return sum(int(x.nbytes) for x in (*flat, *tail))
        return int(self.held().sum()) * sum(int(x.dtype.itemsize * x.shape[1:].numel()) for x in flat)

    @property
    def bytes(self) -> int:
        """Bytes of keys and values, the tail's room included."""
        return self._bytes((self.keys, self.values), (self.tail_keys, self.tail_values))

    @property
    def other_bytes(self) -> int:
        """Bytes of positions and offsets, and of what the next eviction needs: sums per token, the last queries."""
        others = self.offsets, self.tail_positions, self.queries, self.query_positions
        flat = self._bytes([self.positions, *self.sums.values()], self.tail_sums.values())
        return flat + sum(int(x.nbytes) for x in others if x is not None)

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

    def remember(self, queries: Query, positions: WindowPositions, window: int, alone: bool = False) -> None:
        """Keep the last `window` queries of each row, padding in front; a fixed layer only if it has some. alone:
        one query of each row, without padding."""
        if self.queries is not None:
            first = max(0, self.queries.shape[2] + 1 - window) if alone else 0
            queries = torch.cat([self.queries[:, :, first:], queries], 2)
            positions = torch.cat([self.query_positions[:, first:], positions], 1)
        elif self.slot is not None:
            return
        if not alone:
            last = (positions >= 0).to(torch.uint8).argsort(dim=1, stable=True)[:, -window:]
            positions = positions.gather(1, last)
            queries = queries.gather(2, last[:, None, :, None].expand(-1, queries.shape[1], -1, queries.shape[3]))
        if self.slot is not None and self.queries is not None:
            self.queries.copy_(queries)
            self.query_positions.copy_(positions)
        else:
            self.queries, self.query_positions = queries, positions

    def _widen(self, window: int) -> None:
        """Put padding before the last queries, `window` in all."""
        if self.queries is not None and (missing := window - self.queries.shape[2]) > 0:
            self.queries = pad(self.queries, (0, 0, missing, 0))
            self.query_positions = pad(self.query_positions, (missing, 0), value=-1)

    def add(self, name: str, p: Tensor) -> None:
        """Add `p` [batch, kv_heads, tokens], in the order of `parts`, to the sum of that name."""
        flat, newest = p.split([p.shape[2] - self.tail, self.tail], 2)
        index = self._index()
        self.sums[name].index_add_(0, index[index >= 0], flat[index >= 0])
        self.tail_sums[name] += newest

    # ---- what is shown of it

    def parts(self) -> list[Part]:
        """What a query attends to: the flat part, flush right per head, and the tail, with its room if fixed."""
        flat, tail = self._flat(), (self.tail_keys, self.tail_values, self.tail_positions[:, None])
        if self.width:
            return [tuple(flat[name].unflatten(0, (*self.shape, -1)) for name in FLAT), tail]
        index, parts = self._index(), []
        if index.shape[2]:
            keys, values = (self._padded(flat[name], index) for name in FLAT[:2])
            parts.append((keys, values, self._positions(index)))
        return [*parts, tuple(x[:, :, : self.tail] for x in tail)] if self.tail else parts

    def shown(self) -> Shown:
        """All tokens, if the tail holds no padding."""
        index, tail = self._index(), self._tail()
        places, positions = self.places(index)
        tokens = {name: self._padded(x, index) for name, x in self._flat().items() if name != "positions"}
        if self.tail:
            tokens = {name: torch.cat([x, tail[name]], 2) for name, x in tokens.items()}
        keys, values = tokens.pop("keys"), tokens.pop("values")
        sums = {name: s.masked_fill(places < 0, 0) for name, s in tokens.items()}
        return Shown(keys, values, positions, sums, places)

    def places(self, index: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(place of each token, counted through the flat part and then the tail; its position), both int64 [batch,
        kv_heads, tokens], flush right, -1 where there is no token. index: `_index`, if it is known."""
        places = self._index() if index is None else index
        positions = self._positions(places)
        if self.tail:
            tail = torch.arange(self.shape[0] * self.shape[1] * self.tail, device=places.device)
            places = torch.cat([places, len(self.positions) + tail.view(*self.shape, -1)], 2)
            positions = torch.cat([positions, self._tail()["positions"]], 2)
        return places.masked_fill(positions < 0, -1), positions

    def _index(self) -> Tensor:
        """Places in the flat tensors, int64 [batch, kv_heads, longest], flush right, -1 before a head's first token."""
        longest = self.width or (int(self.lengths.max()) if len(self.positions) else 0)
        place = self.offsets[1:, None] - longest + torch.arange(longest, device=self.offsets.device)
        return torch.where(place >= self.offsets[:-1, None], place, -1).view(*self.shape, longest)

    def _padded(self, flat: Tensor, index: Tensor) -> Tensor:
        if index.numel() == len(flat) and (self.slot is None or self.width):  # equal lengths: a view
            return flat.view(*index.shape, *flat.shape[1:])
        return flat.index_select(0, index.clamp(min=0).flatten()).view(*index.shape, *flat.shape[1:])

    def _positions(self, index: Tensor) -> Tensor:
        return self._padded(self.positions, index).long().masked_fill(index < 0, -1)

    # ---- what leaves

    def keep(self, places: Tensor, stays: Mask) -> None:
        """Keep the tokens that `stays` marks among `places`, all in the flat part, packed if it was. A fixed layer
        keeps its tensors if they suffice and are not twice as large as needed; otherwise it is fixed no more."""
        kept, lengths = self._taken(places[stays]), stays.sum(-1)
        if self.slot is not None:
            segments, room = lengths.numel(), len(self.positions)
            needed = segments * int(lengths.max()) if self.width else len(kept["positions"])
            if needed <= room and (room // 2 <= needed or room <= segments * self.most):
                self._store(kept, _offsets(lengths))
                return
        packed = isinstance(self.keys, Packed)
        vars(self).update(vars(RaggedLayer._from(kept, lengths, self.queries, self.query_positions)))
        if packed:
            self.quantise()

    def _taken(self, source: Tensor) -> dict[str, Tensor]:
        """The tensors of `_flat` of the tokens at these places."""
        flat, tail = self._flat(), self._tail()
        if self.tail:
            flat = {name: torch.cat([x, tail[name].flatten(0, 2)]) for name, x in flat.items()}
        taken = {name: x.index_select(0, source) for name, x in flat.items()}
        return taken | {"positions": taken["positions"].int()}

    def settle(self, loosen: bool = False) -> None:
        """Move the tail into the flat part. loosen: be fixed no more."""
        if self.tail or (loosen and self.slot is not None):
            places, _ = self.places()
            self.slot = None if loosen else self.slot
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
            self.keep(places, stays)

    def quantise(self) -> None:
        """Hold the flat part in 4 bits, and the tail once it has RESIDUAL tokens, as transformers' cache does. After an
        eviction all survivors are packed anew, which in 16 bits moves some by parts of a level."""
        packed = isinstance(self.keys, Packed)
        if not packed or self.tail >= RESIDUAL:
            self.settle()
        if not packed:
            self.keys, self.values = (Packed(self._flat()[name]) for name in FLAT[:2])

    # ---- tensors that stay in place

    def fix(self, slot: Tensor, room: int, most: int, wide: bool, window: int) -> None:
        """Move all tokens into tensors that stay in place, with room for `room` new ones, where `slot` says. most:
        tokens of a head after later evictions. wide: all heads get equally many places. window: queries to remember."""
        self.settle(loosen=True)
        segments, offsets, kept = self.shape[0] * self.shape[1], self.offsets, self._flat()
        width = max(most, 1, int(self.lengths.max())) if wide else 0
        places = max(len(self.positions), segments * max(width, most))
        empty = {name: x.new_zeros(places, *x.shape[1:]) for name, x in kept.items()}
        keys, values, positions = (empty.pop(name) for name in FLAT)
        own = width * torch.arange(segments + 1, device=offsets.device) if wide else offsets.clone()
        more = self.shape, empty, self.queries, self.query_positions, slot, width, most, room
        vars(self).update(vars(RaggedLayer(keys, values, positions, own, *more)))
        self._store(kept, offsets)
        self._widen(window)

    def _store(self, kept: dict[str, Tensor], offsets: Tensor) -> None:
        """Write tokens, which have these `offsets`, into the tensors in place."""
        tokens = len(kept["positions"])
        if self.width:
            shift = (self.offsets - offsets)[1:].repeat_interleave(offsets.diff(), output_size=tokens)
            where: Any = torch.arange(tokens, device=shift.device) + shift
            self.positions.fill_(-1)
        else:
            where = slice(0, tokens)
            self.offsets.copy_(offsets)
        for name, x in self._flat().items():
            x[where] = kept[name]
        for s in self.tail_sums.values():
            s.zero_()
        self.tail = 0
        self.tail_positions.fill_(-1)


def _offsets(lengths: Tensor) -> Tensor:
    """Where each segment begins, and at the end where the last one ends."""
    return pad(lengths.flatten().cumsum(0), (1, 0))


def concatenated(layers: list[RaggedLayer]) -> RaggedLayer:
    """The rows of several caches of one layer as one batch, which takes them over."""
    if len(layers) == 1:
        return layers[0]
    remembered = [layer.queries for layer in layers if layer.queries is not None]
    names = set().union(*(layer.sums for layer in layers))
    for layer in layers:
        layer.settle()
        zeros = layer.positions.new_zeros(len(layer.positions), dtype=torch.float32)
        layer.sums = {name: layer.sums.get(name, zeros) for name in names}
        if layer.queries is None and remembered:
            layer.queries = remembered[0][:1, :, :0].expand(layer.shape[0], -1, -1, -1)
            layer.query_positions = layer.offsets.new_empty(layer.shape[0], 0)
        layer._widen(max((queries.shape[2] for queries in remembered), default=0))
    flat = [layer._flat() for layer in layers]
    tokens = {name: torch.cat([each[name] for each in flat]) for name in flat[0]}
    last = [(layer.queries, layer.query_positions) for layer in layers if layer.queries is not None]
    lengths = torch.cat([layer.lengths for layer in layers])
    return RaggedLayer._from(tokens, lengths, *(torch.cat(x) for x in zip(*last, strict=True)))


class EngineCache(DynamicCache):
    """The cache that the model gets. New keys and values of attention layers pass through it unchanged; the attention
    object stores them in `ragged`. Recurrent layers keep their states here as usual."""

    def __init__(self, config: Any):
        super().__init__(config=config)
        self.ragged: dict[int, Any] = {}  # a `RaggedLayer` each, or what appends and shows its parts as one
        self.scalings: dict[int, Any] = {}  # float or `Softmax`, of each layer that has read on

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
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
    for name in STATES if hasattr(new, "recurrent_states") else ():
        first, *others = (getattr(layer, name) for layer in layers)
        states = {x: change(t, *(other[x] for other in others)) for x, t in first.items() if t is not None}
        setattr(new, name, first | states)
    return new
