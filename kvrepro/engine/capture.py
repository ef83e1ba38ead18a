"""A decode step of many rows that is captured once and replayed: a CUDA graph, so that a GPU need not wait for Python.

The cache must stay in place meanwhile (`kvrepro.engine.fixed`). On the CPU the same step runs uncaptured, so that tests
can compare it with the plain one.
"""

from dataclasses import replace

import torch
from torch import Tensor

from kvrepro.engine.cache import EngineCache, RaggedLayer
from kvrepro.engine.extend import Extend
from kvrepro.engine.facts import sliding_window
from kvrepro.engine.fixed import FixedLayer
from kvrepro.engine.passes import Call
from kvrepro.engine.rows import Rows
from kvrepro.engine.signals import StepSignals


def can_capture(call: Call, rows: Rows) -> bool:
    """Whether these rows' steps can run without waiting for the device, all tensors staying in place."""
    c, layers = rows.conditions[0], rows.cache.ragged.values()
    if call.backend != "triton" or call.captures < 1 or call.watch is not None:
        return False
    if c.bits is not None or c.execution != "physical" or rows.jobs[0].pages is not None:
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
            fixed = FixedLayer.of(layer, self.slot, room, most, dense, window)
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

    def keep_held(self, rows: Rows) -> bool:
        """Drop tokens that no head holds any longer, in place; False if the rest does not fit."""
        first = next(iter(self.cache.ragged.values()))
        place = first.places(rows.shared.held.any(1))
        if place is None:
            return False
        for layer in self.cache.ragged.values():
            layer.keep(place)
        torch.arange(2, out=self.slot)
        return True

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
