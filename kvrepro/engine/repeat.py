"""KVzip's repetition: the model repeats the context, and the attention that it then pays to each token is noted."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvrepro.engine.attention import attend
from kvrepro.engine.cache import EngineCache
from kvrepro.engine.evict import EvictionJob
from kvrepro.engine.facts import attention_modules
from kvrepro.engine.policy import REPEATED
from kvrepro.engine.prefill import PrefillState
from kvrepro.engine.shapes import KeyValue, PreTrainedModel, Query

REPEAT_CHUNK = 2048


def reconstruct(
    model: PreTrainedModel, prefill: PrefillState, ask: Sequence[int], ids: Tensor, positions: Tensor,
    cache: EngineCache,
) -> None:  # fmt: skip
    """Let the model repeat the context chunk by chunk after the request `ask`, and add the largest attention to each
    token to the observations of the jobs that need it: per KV head, and per query head after a division by the length
    of the layer's input at the query. Source: Kim et al. 2025; KVzip+ as in NVIDIA/kvpress."""
    jobs = [job for job in prefill.jobs if job.repeated and job.error is None]
    for n, o in jobs[0].pending.items():
        rows, kv_heads, tokens = o.positions.shape
        heads = {"reconstruction": kv_heads, "reconstruction_per_norm": kv_heads * o.group}
        needed = set().union(*(job.repeated for job in jobs))
        best = {name: torch.zeros(rows, heads[name], tokens, device=o.positions.device) for name in needed}
        for job in jobs:
            job.pending[n] = replace(job.pending[n], sums={**job.pending[n].sums, **best})
    ask_ids = torch.tensor(list(ask), dtype=torch.long, device=ids.device).expand(len(ids), -1)
    n = ids.shape[1]
    for a in range(0, n, REPEAT_CHUNK):
        part = ids[:, a : a + REPEAT_CHUNK]
        text = torch.cat([ask_ids, part], 1)
        at = prefill.prompt.lengths[:, None] + torch.arange(text.shape[1], device=ids.device)
        probe = _Repeat(jobs[0], at, len(ask), positions[:, a : a + REPEAT_CHUNK] >= 0)
        cache_of_chunk = cache.rows(torch.arange(len(ids), device=ids.device))
        with _lengths(model, probe.lengths):
            model(
                input_ids=text, position_ids=at, past_key_values=cache_of_chunk, use_cache=True, logits_to_keep=1,
                kvrepro=probe,
            )  # fmt: skip


@contextmanager
def _lengths(model: PreTrainedModel, lengths: dict[int, Tensor]) -> Iterator[None]:
    """Note the Euclidean length of each hidden state that an attention layer gets: layer -> float32 [batch, tokens]."""

    def note(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        lengths[module.layer_idx] = (args[0] if args else kwargs["hidden_states"]).float().norm(dim=-1)

    hooks = [m.register_forward_pre_hook(note, with_kwargs=True) for m in attention_modules(model).values()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class _Repeat:
    """Attention of a repeated chunk over the context and itself; its tokens are not stored."""

    def __init__(self, job: EvictionJob, positions: Tensor, request_length: int, real: Tensor):
        self.job, self.positions, self.request_length, self.real = job, positions, request_length, real
        self.lengths: dict[int, Tensor] = {}  # layer -> ||h_t|| of its input, [batch, text]

    def attend(
        self, layer: int, query: Query, key: KeyValue, value: KeyValue, scaling: float, sliding: int | None = None
    ) -> Tensor:
        at, real = self.positions.to(query.device), self.real.to(query.device)
        if layer not in self.job.pending:
            stored = self.job.layers[layer]
            parts = [*stored.parts(), (key, value, at[:, None])]
            return attend(query, at, parts, scaling, sliding)
        o = self.job.pending[layer]
        n = o.positions.shape[2]

        def watch(p: Tensor, queries: slice) -> None:
            first = max(0, self.request_length - queries.start)
            seen = p[:, :, :, first:, :n]
            if seen.shape[3]:
                real_queries = real[:, queries.start + first - self.request_length : queries.stop - self.request_length]
                seen = seen * real_queries[:, None, None, :, None]
                for name in REPEATED & o.sums.keys():
                    if name == "reconstruction":
                        largest = seen.amax((2, 3))
                    else:
                        h = self.lengths[layer][:, queries.start + first : queries.stop]
                        largest = (seen / h[:, None, None, :, None]).amax(3).flatten(1, 2)
                    torch.maximum(o.sums[name], largest, out=o.sums[name])

        parts = [(o.keys, o.values, o.positions), (key, value, at[:, None])]
        return attend(query, at, parts, scaling, sliding, watch)
