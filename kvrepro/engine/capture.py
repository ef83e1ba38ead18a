"""A decode step of many rows that is captured once and replayed: a CUDA graph, so that a GPU need not wait for Python.

The cache stays in place meanwhile: between two evictions a `FixedLayer` takes the place of each `RaggedLayer`, and a
step neither waits for the device nor changes a shape. On the CPU the same step runs uncaptured, so that tests can
compare it with the plain one.
"""

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvrepro.engine.attention import Part
from kvrepro.engine.cache import NO_POSITIONS, EngineCache, Extend, Packed, RaggedLayer, bytes_of
from kvrepro.engine.facts import sliding_window
from kvrepro.engine.passes import Call
from kvrepro.engine.rows import Rows
from kvrepro.engine.shapes import KeyValue, Query, RowInts, TokenInts, WindowPositions
from kvrepro.engine.shared import StepSignals


@dataclass
class FixedLayer(RaggedLayer):
    """A layer with a tail of fixed room, in which position -1 marks a place where nothing is stored.

    dense: all heads have equally many places in the flat part, flush right; a place without a token has position -1.
    Otherwise segments lie one after the other as in a `RaggedLayer`, perhaps with room behind the last.
    """

    dense: bool = False
    slot: Tensor = NO_POSITIONS  # int64 [2]: the next token's place in the tail, and the tail's length with it; shared
    most: int = 0  # tokens of a head for which the flat part needs room

    @classmethod
    def fixed(cls, layer: RaggedLayer, slot: Tensor, room: int, most: int, dense: bool, window: int) -> "FixedLayer":
        """A settled layer's tokens with room for `room` new ones. most: the most tokens of a head after later
        evictions; 0: there are none, and the flat part is not copied. window: queries to remember."""
        keys, values, positions, sums = _tokens(layer)
        batch, heads = layer.shape
        offsets = layer.offsets.clone()
        if dense:
            width = max(most, int(layer.lengths.max()))
            keys, values, positions, sums = _padded(layer, width)
            offsets = width * torch.arange(batch * heads + 1, device=offsets.device)
        elif (missing := batch * heads * most - len(keys)) > 0:
            keys, values = (pad(x, (0, 0, 0, missing)) for x in (keys, values))
            positions, sums = pad(positions, (0, missing)), {name: pad(s, (0, missing)) for name, s in sums.items()}
        tail_keys, tail_values = (keys.new_zeros(batch, heads, room, keys.shape[1]) for _ in range(2))
        tail_positions = torch.full((batch, room), -1, device=keys.device)
        tail_sums = {name: torch.zeros(batch, heads, room, device=keys.device) for name in sums}
        queries, at = layer.queries, layer.query_positions
        if window and queries is not None and (missing := window - queries.shape[2]) > 0:
            queries, at = pad(queries, (0, 0, missing, 0)), pad(at, (missing, 0), value=-1)
        return cls(keys, values, positions, offsets, layer.shape, sums, tail_keys, tail_values, tail_positions,
                   tail_sums, queries, at, dense, slot, most)  # fmt: skip

    def fits(self, layer: RaggedLayer) -> bool:
        """Is there room for a later state of the same rows, and not much more room than it needs?"""
        heads, places = self.shape[0] * self.shape[1], len(self.keys)
        tokens = int(layer.lengths.max()) * heads if self.dense else len(layer.keys)
        return tokens <= places and (places // 2 <= tokens or places <= heads * self.most)

    def load(self, layer: RaggedLayer) -> None:
        """Copy in a later state of the same rows, which is settled and `fits`."""
        width = len(self.keys) // (self.shape[0] * self.shape[1])
        keys, values, positions, sums = _padded(layer, width) if self.dense else _tokens(layer)
        if not self.dense:
            self.offsets.copy_(layer.offsets)
        for tensor, new in ((self.keys, keys), (self.values, values), (self.positions, positions)):
            tensor[: len(new)] = new  # type: ignore[index]
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
        loose = RaggedLayer(**{f.name: getattr(self, f.name) for f in fields(RaggedLayer)})
        loose.settle()
        return loose

    def _flat(self) -> Part:
        """The flat part of a dense layer as `[batch, kv_heads, longest, ...]`."""
        return tuple(x.view(*self.shape, -1, *x.shape[1:]) for x in (self.keys, self.values, self.positions))  # type: ignore[union-attr]

    # ---- what it holds

    def held(self) -> Tensor:
        """Tokens held, int64 [batch, kv_heads]."""
        flat = (self.positions >= 0).view(*self.shape, -1).sum(-1) if self.dense else self.lengths
        return flat + (self.tail_positions >= 0).sum(1)[:, None]

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


def can_capture(call: Call, rows: Rows) -> bool:
    """Whether these rows' steps can run without waiting for the device, all tensors staying in place."""
    c, layers = rows.conditions[0], rows.cache.ragged.values()
    if call.backend != "triton" or call.captures < 1 or call.watch is not None:
        return False
    if c.bits is not None or rows.jobs[0].pages is not None:
        return False
    recurrent = any(hasattr(layer, "recurrent_states") for layer in rows.cache.layers)
    return not recurrent and all(type(x) is RaggedLayer and x.offsets.device == call.device for x in layers)


class CapturedStep:
    """The model's pass over one token per row of `rows`, whose cache it holds until `loosen`."""

    def __init__(self, call: Call, rows: Rows, window: int, room: int, again: bool):
        """window: queries that an eviction needs. room: tokens until the next eviction. again: will there be one?"""
        self.call, self.window, self.batch = call, window, len(rows)
        self.slot = torch.arange(2, device=call.device)  # the next token's place in all tails, and their length with it
        self.cache = EngineCache(call.model.config)
        self.cache.scalings = rows.cache.scalings
        budget = max(job.budgets[0] for job in rows.jobs if job.evictor is not None) if again else 0
        rows.slide(call.facts)
        for n, layer in rows.cache.ragged.items():
            layer.settle()
            dense, most = rows.signals is not None or sliding_window(call.model.config, n) is not None, budget
            if again and n not in call.facts.evictable:  # a sliding layer, which grows until its window is full
                most = min(call.facts.sliding[n] - 1, int(layer.lengths.max()) + call.max_new_tokens)
            fixed = FixedLayer.fixed(layer, self.slot, room, most, dense, window)
            self.cache.ragged[n] = rows.cache.ragged[n] = fixed  # replaces the layer, so that memory holds none twice
        self.token = torch.zeros(self.batch, 1, dtype=torch.long, device=call.device)
        self.positions = rows.seen[:, None].clone()
        self.signals = None
        if rows.signals is not None:
            self.signals = replace(rows.signals, held=rows.signals.held.clone())
        self.seen: StepSignals | None = None
        self.logits: Tensor | None = None
        self.graph: torch.cuda.CUDAGraph | None = None
        self.warm = False

    def run(self, rows: Rows, token: Tensor) -> Tensor:
        """Logits [batch, vocabulary] after `token` [batch]; they stay valid until the next call."""
        self.token.copy_(token[:, None])
        if self.signals is not None:
            self.signals.held.copy_(rows.shared.held)
        if self.graph is None and self.warm and self.call.device.type == "cuda":
            self._capture()
        if self.graph is None:
            self._step()
        else:
            self.graph.replay()
        self.warm = True
        return self.logits

    def _capture(self) -> None:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._step()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a model that waits for the device: its steps run uncaptured
            self.call.captures -= 1
            print(f"a decode step was not captured ({type(error).__name__}: {error})".splitlines()[0])
            return
        self.graph = graph

    def _step(self) -> None:
        if self.signals is not None:
            self.seen = StepSignals(self.signals, len(self.call.facts.attention), newest_held=False)
        attention = Extend(self.cache, self.positions, self.window, None, self.call.backend, self.seen, slides=False)
        self.logits = self.call.run(self.token, self.positions, self.cache, attention)
        self.positions.add_(1)
        self.slot.add_(1)

    def loosen(self, rows: Rows, last: bool = False) -> None:
        """Give `rows` a cache that an eviction can change. last: the step ends, and frees each layer once copied."""
        layer = self.cache.ragged.pop if last else self.cache.ragged.__getitem__
        for n in list(self.cache.ragged):
            rows.cache.ragged[n] = layer(n).loose()
        rows.slide(self.call.facts)

    def take_back(self, rows: Rows) -> bool:
        """Hold the rows' cache again, after an eviction; False if it does not fit in place."""
        new = rows.cache.ragged
        if len(rows) != self.batch or not all(layer.fits(new[n]) for n, layer in self.cache.ragged.items()):
            return False
        for n, layer in self.cache.ragged.items():
            layer.load(new[n])
        rows.cache.ragged = dict(self.cache.ragged)
        torch.arange(2, out=self.slot)
        return True
