"""A step of many rows captured once and replayed: on a GPU a CUDA graph, so that it need not wait for Python.

The cache must stay in place meanwhile (`kvrepro.engine.fixed`). On the CPU the same step runs as it stands, so that it
can be held to the plain one.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvrepro.engine.attention import with_methods
from kvrepro.engine.cache import EngineCache, RaggedLayer
from kvrepro.engine.extend import Extend
from kvrepro.engine.facts import sliding_window
from kvrepro.engine.fixed import FixedLayer, Slot
from kvrepro.engine.passes import Call, Scaled
from kvrepro.engine.rows import Rows
from kvrepro.engine.signals import StepSignals


def can_capture(call: Call, rows: Rows) -> bool:
    """Whether these rows' steps never wait for the device and keep their tensors in place."""
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
        """window: queries that an eviction asks for. room: tokens until the next one. again: is there a next one?"""
        self.call, self.window, self.batch = call, window, len(rows)
        self.slot = Slot.first(call.device)
        self.cache = EngineCache(call.model.config)
        budget = max(job.budgets[0] for job in rows.jobs if job.evictor is not None) if again else 0
        rows.slide(call.facts)
        for n, layer in rows.cache.ragged.items():
            layer.settle()
            dense, most = rows.signals is not None or sliding_window(call.model.config, n) is not None, budget
            if again and n not in call.facts.evictable:  # it slides, and grows until its window is full
                most = min(call.facts.sliding[n] - 1, int(layer.lengths.max()) + call.max_new_tokens)
            fixed = FixedLayer.of(layer, self.slot, room, most, dense, window)
            self.cache.ragged[n] = rows.cache.ragged[n] = fixed  # in the layer's place: none is held twice
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
        except Exception as error:  # a model that asks the device something: its steps run as they stand
            self.call.captures -= 1
            print(f"a decode step was not captured ({type(error).__name__}: {error})".splitlines()[0])
            return
        self.graph = graph

    def _step(self) -> None:
        if self.signals is not None:
            self.seen = StepSignals(self.signals, len(self.call.facts.attention), newest_held=False)
        attention = Extend(self.cache, self.positions, self.window, None, self.call.backend, self.seen, slides=False)
        with norms_in_one_launch(self.call.model):
            self.logits = self.call.model(
                input_ids=self.token, position_ids=self.positions, past_key_values=self.cache, use_cache=True,
                logits_to_keep=1, kvrepro=Scaled(attention, self.call.scalings),
            ).logits[:, -1]  # fmt: skip
        self.positions.add_(1)
        self.slot.advance()

    def loosen(self, rows: Rows, last: bool = False) -> None:
        """Give `rows` a cache that an eviction can change. last: the step never runs again, and gives up each layer as
        soon as it is copied."""
        layer = self.cache.ragged.pop if last else self.cache.ragged.__getitem__
        for n in list(self.cache.ragged):
            rows.cache.ragged[n] = layer(n).loose()
        rows.slide(self.call.facts)

    def keep_held(self, rows: Rows) -> bool:
        """Drop what no head holds any longer, in place; False if that does not fit."""
        first = next(iter(self.cache.ragged.values()))
        place = first.places(rows.shared.held.any(1))
        if place is None:
            return False
        for layer in self.cache.ragged.values():
            layer.keep(place)
        self.slot.reset()
        return True

    def take_back(self, rows: Rows) -> bool:
        """Hold the rows' cache again, after an eviction; False if it does not fit in place."""
        new = rows.cache.ragged
        if len(rows) != self.batch or not all(layer.fits(new[n]) for n, layer in self.cache.ragged.items()):
            return False
        for n, layer in self.cache.ragged.items():
            layer.load(new[n])
        rows.cache.ragged = dict(self.cache.ragged)
        self.slot.reset()
        return True


@contextmanager
def norms_in_one_launch(model: PreTrainedModel) -> Iterator[None]:
    """On a GPU, the model's RMS norms by a kernel: of those modules that compute the very numbers it computes."""
    with ExitStack() as stack:
        for module in model.modules() if model.device.type == "cuda" else ():
            if _plain_norm(type(module)):  # type: ignore[arg-type]
                stack.enter_context(with_methods(module, forward=partial(_norm, module)))
        yield


def _norm(module: Any, x: Tensor) -> Tensor:
    from kvrepro_kernels import rms_norm

    return rms_norm(x.contiguous(), module.weight, module.variance_epsilon)


@cache
def _plain_norm(kind: Any) -> bool:
    """Whether modules of this class are RMS norms as `kvrepro_kernels.rms_norm` defines them: tried on a few rows."""
    from kvrepro_kernels.rms_norm import rms_norm_reference

    if not kind.__name__.endswith("RMSNorm"):
        return False
    try:
        module = kind(16, eps=1e-5)
        with torch.no_grad():
            module.weight.copy_(torch.linspace(-2, 2, 16))
            x = torch.linspace(-3, 5, 48).view(3, 16)
            known = module.variance_epsilon == 1e-5 and module.weight.dtype == x.dtype
            return bool(known) and torch.equal(module(x), rms_norm_reference(x, module.weight, 1e-5))
    except (TypeError, AttributeError):  # made or called otherwise
        return False
