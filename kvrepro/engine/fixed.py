"""A layer whose tensors stay at their addresses while single tokens come in, as a captured step requires.

Between two evictions it takes the place of a `RaggedLayer`. A step neither waits for the device nor changes a shape.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvrepro.engine.attention import Part
from kvrepro.engine.cache import RaggedLayer, bytes_of
from kvrepro.engine.quantise import Packed
from kvrepro.engine.shapes import KeyValue, Mask, Query, RowInts, TokenInts, WindowPositions


@dataclass
class FixedLayer:
    """Keys and values of one attention layer for `batch` rows: a flat part, and a tail with room for `room` tokens.

    dense: all heads have equally many places in the flat part, `[batch, kv_heads, longest]` head after head, flush
    right; a place without a token has position -1. Otherwise segments lie one after the other as in a `RaggedLayer`,
    perhaps with room behind the last.
    """

    dense: bool
    keys: Tensor  # [places, dim]
    values: Tensor
    positions: Tensor  # int32 [places]
    offsets: Tensor  # int64 [batch * kv_heads + 1]
    shape: tuple[int, int]  # batch, kv_heads
    sums: dict[str, Tensor]  # float32 [places]
    slot: Tensor  # int64 [2]: the next token's place in the tail, and the tail's length with it; shared by all layers
    tail_keys: KeyValue  # [batch, kv_heads, room, dim]
    tail_values: KeyValue
    tail_positions: TokenInts  # [batch, room], -1 where nothing is stored
    tail_sums: dict[str, Tensor]  # [batch, kv_heads, room]
    queries: Query | None
    query_positions: WindowPositions | None
    most: int = 0  # tokens of a head for which the flat part needs room

    @classmethod
    def of(cls, layer: RaggedLayer, slot: Tensor, room: int, most: int, dense: bool, window: int) -> "FixedLayer":
        """A settled layer's tokens with room for `room` new ones. most: the most tokens of a head after later
        evictions; 0: there are none, and the flat part is not copied. window: queries to remember."""
        keys, values, positions, sums = _tokens(layer)
        batch, heads = layer.shape
        if dense:
            keys, values, positions, sums = _padded(layer, max(most, int(layer.lengths.max())))
        elif (missing := batch * heads * most - len(keys)) > 0:
            keys, values = (pad(x, (0, 0, 0, missing)) for x in (keys, values))
            positions, sums = pad(positions, (0, missing)), {name: pad(s, (0, missing)) for name, s in sums.items()}
        tail_keys, tail_values = (keys.new_zeros(batch, heads, room, keys.shape[1]) for _ in range(2))
        tail_positions = torch.full((batch, room), -1, device=keys.device)
        tail_sums = {name: torch.zeros(batch, heads, room, device=keys.device) for name in sums}
        queries, at = layer.queries, layer.query_positions
        if window and queries is not None and (missing := window - queries.shape[2]) > 0:
            queries, at = pad(queries, (0, 0, missing, 0)), pad(at, (missing, 0), value=-1)
        return cls(dense, keys, values, positions, layer.offsets.clone(), layer.shape, sums, slot, tail_keys,
                   tail_values, tail_positions, tail_sums, queries, at, most)  # fmt: skip

    def fits(self, layer: RaggedLayer) -> bool:
        """Is there room for a later state of the same rows, and not much more room than it needs?"""
        heads = self.shape[0] * self.shape[1]
        return self._suits(int(layer.lengths.max()) * heads if self.dense else len(layer.keys))

    def _suits(self, tokens: int) -> bool:
        """Does the flat part have places for `tokens` tokens, but at most twice as many, or as `most` requires?"""
        places, needed = len(self.keys), self.shape[0] * self.shape[1] * self.most
        return tokens <= places and (places // 2 <= tokens or places <= needed)

    def load(self, layer: RaggedLayer) -> None:
        """Copy in a later state of the same rows, which is settled and `fits`."""
        width = len(self.keys) // (self.shape[0] * self.shape[1])
        keys, values, positions, sums = _padded(layer, width) if self.dense else _tokens(layer)
        self.offsets.copy_(layer.offsets)
        for tensor, new in ((self.keys, keys), (self.values, values), (self.positions, positions)):
            tensor[: len(new)] = new
        for name, s in sums.items():
            self.sums[name][: len(s)] = s
            self.tail_sums[name].zero_()
        self.tail_positions.fill_(-1)
        if self.queries is not None and self.query_positions is not None and layer.queries is not self.queries:
            self.queries.copy_(layer.queries)
            self.query_positions.copy_(layer.query_positions)

    def slide(self, oldest: RowInts) -> None:
        """Drop the tokens of a dense layer before each row's `oldest` position; their places stay empty."""
        before = oldest.to(self.positions.device)[:, None]
        flat = self.positions.view(self.shape[0], -1)
        flat.masked_fill_(flat < before, -1)
        self.tail_positions.masked_fill_(self.tail_positions < before, -1)

    def loose(self) -> RaggedLayer:
        """The same tokens as a `RaggedLayer`, settled."""
        if self.dense:
            flat = self._flat()
            tail = (self.tail_keys, self.tail_values, self.tail_positions[:, None].expand(*self.shape, -1))
            keys, values, positions = (torch.cat(pair, 2) for pair in zip(flat, tail, strict=True))
            sums = {
                name: torch.cat([s.view(*self.shape, -1), self.tail_sums[name]], 2) for name, s in self.sums.items()
            }
            loose_layer = RaggedLayer.of(keys, values, positions, positions >= 0, sums)
        else:
            total = int(self.offsets[-1])
            sums = {name: s[:total] for name, s in self.sums.items()}
            loose_layer = RaggedLayer(
                self.keys[:total], self.values[:total], self.positions[:total], self.offsets.clone(), self.shape, sums,
                None, self.tail_keys, self.tail_values, self.tail_positions, self.tail_sums,
            )  # fmt: skip
            loose_layer.settle()
        loose_layer.queries, loose_layer.query_positions = self.queries, self.query_positions
        return loose_layer

    def keep(self, place: Tensor) -> None:
        """Keep the tokens of a dense layer at `place` [batch, width] of each head, counted through the flat part and
        then the tail; -1 leaves a place empty."""
        tail = (self.tail_keys, self.tail_values, self.tail_positions[:, None].expand(*self.shape, -1))
        index = place.clamp(min=0)[:, None].expand(*self.shape, -1)
        for tensor, old, new in zip((self.keys, self.values, self.positions), self._flat(), tail, strict=True):
            whole = torch.cat([old, new.to(old.dtype)], 2)
            at = index if whole.dim() == 3 else index[..., None].expand(*index.shape, whole.shape[3])
            tensor.copy_(whole.gather(2, at).flatten(0, 2))
        self.positions.masked_fill_((place < 0)[:, None].expand(*self.shape, -1).flatten(), -1)
        self.tail_positions.fill_(-1)

    def places(self, held: Mask) -> Tensor | None:
        """The `place` for `keep` of the tokens that `held` [batch, positions] marks; None if they do not fit. It holds
        for all layers, which hold the same tokens."""
        at = torch.cat([self._flat()[2][:, 0].long(), self.tail_positions], 1)  # heads hold the same tokens
        stays = held.gather(1, at.clamp(min=0)) & (at >= 0)
        heads = self.shape[0] * self.shape[1]
        if not self._suits(int(stays.sum(1).max()) * heads):
            return None
        width = len(self.keys) // heads
        order = stays.to(torch.uint8).argsort(dim=1, stable=True)[:, at.shape[1] - width :]
        return torch.where(stays.gather(1, order), order, -1)

    def _flat(self) -> Part:
        """The flat part of a dense layer as `[batch, kv_heads, longest, ...]`."""
        return tuple(x.view(*self.shape, -1, *x.shape[1:]) for x in (self.keys, self.values, self.positions))

    # ---- what it holds

    def held(self) -> Tensor:
        """Tokens held, int64 [batch, kv_heads]."""
        flat = (
            (self.positions >= 0).view(*self.shape, -1).sum(-1) if self.dense else self.offsets.diff().view(self.shape)
        )
        return flat + (self.tail_positions >= 0).sum(1)[:, None]

    seen = held  # nothing is hidden

    def _count(self) -> int:
        return int(self.held().sum())

    @property
    def bytes(self) -> int:
        """Bytes of the tokens' keys and values, without the room that a captured step keeps free."""
        return int(2 * self._count() * self.keys.shape[1] * self.keys.dtype.itemsize)

    @property
    def overhead_bytes(self) -> int:
        """Bytes of positions and offsets."""
        return 4 * self._count() + bytes_of(self.offsets, self.tail_positions)

    @property
    def state_bytes(self) -> int:
        """Bytes of what the next eviction needs: sums per token, the last queries."""
        return 4 * self._count() * len(self.sums) + bytes_of(self.queries, self.query_positions)

    # ---- the interface of `RaggedLayer` that a step of the model uses

    @property
    def tail(self) -> int:
        """Places of the tail."""
        return int(self.tail_positions.shape[1])

    @property
    def used(self) -> Tensor:
        """How many places of the tail hold a token once the step's is stored, int64 [1]."""
        return self.slot[1:]

    def append(self, keys: KeyValue, values: KeyValue, positions: TokenInts) -> None:
        """One new token `[batch, kv_heads, 1, dim]` of every row."""
        self.tail_keys.index_copy_(2, self.slot[:1], keys)
        self.tail_values.index_copy_(2, self.slot[:1], values)
        self.tail_positions.index_copy_(1, self.slot[:1], positions)

    def remember(self, queries: Query, positions: WindowPositions, window: int) -> None:
        """Keep the last `window` queries of each row, if an eviction of this layer will need them."""
        if self.queries is None or self.query_positions is None:
            return
        self.queries.copy_(torch.cat([self.queries[:, :, 1:], queries], 2))
        self.query_positions.copy_(torch.cat([self.query_positions[:, 1:], positions], 1))

    def parts(self) -> list[Part]:
        """What a query attends to: the flat part and the tail, of a dense layer."""
        tail = (self.tail_keys, self.tail_values, self.tail_positions[:, None])
        return [self._flat(), tail] if len(self.keys) else [tail]

    def add(self, name: str, p: Tensor, flat_tokens: int) -> None:
        """Add `p` [batch, kv_heads, tokens], in the order of `parts`, to the sum of that name."""
        self.sums[name] += p[..., :flat_tokens].flatten()
        self.tail_sums[name] += p[..., flat_tokens:]


Tokens = tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]  # keys, values, positions, sums


def _tokens(layer: RaggedLayer) -> Tokens:
    if isinstance(layer.keys, Packed) or isinstance(layer.values, Packed):
        raise TypeError("what is packed in few bits moves when a token is stored: run it uncaptured")
    return layer.keys, layer.values, layer.positions, layer.sums


def _padded(layer: RaggedLayer, longest: int) -> Tokens:
    """A layer's tokens with `longest` places per head, flush right."""
    keys, values, positions, sums = _tokens(layer)
    index = layer.index()
    index = pad(index, (longest - index.shape[2], 0), value=-1).flatten()
    if not len(keys):  # no place to point at
        keys, values, positions = (x.new_zeros(1, *x.shape[1:]) for x in (keys, values, positions))
        sums = {name: s.new_zeros(1) for name, s in sums.items()}
    dead, place = index < 0, index.clamp(min=0)
    sums = {name: s[place].masked_fill(dead, 0) for name, s in sums.items()}
    return keys[place], values[place], positions[place].masked_fill(dead, -1), sums
