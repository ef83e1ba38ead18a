"""Attention of rows that hold a cache and read on: a chunk, a question or one token."""

from typing import Any

import torch
from torch import Tensor

from kvrepro.engine.attention import LOW_QUERIES, attend, per_token
from kvrepro.engine.cache import SLIDE, EngineCache, RaggedLayer
from kvrepro.engine.fixed import FixedLayer
from kvrepro.engine.score.cumulative import page_mask
from kvrepro.engine.shapes import KeyValue, Query, TokenInts
from kvrepro.engine.signals import StepSignals


class Extend:
    """Attention of new tokens `[batch, new]` of rows that hold a cache: each layer stores them, then attends."""

    def __init__(self, cache: EngineCache, positions: TokenInts, window: int = 0,
                 pages: tuple[int, int, int] | None = None, backend: str = "torch",
                 step: StepSignals | None = None, slides: bool = True):  # fmt: skip
        """window: queries that a later eviction needs. pages: (page, dense layers, budget) of Quest. step: of
        `SharedCap`, sums up a decode step's attention over layers and hides tokens. slides: sliding layers drop tokens
        that no later query sees; otherwise, as in a captured step where no tensor may move, they only hide them."""
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

    def _decode(self, stored: RaggedLayer | FixedLayer, query: Query, scaling: float) -> Tensor:
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
