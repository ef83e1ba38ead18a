"""Plain attention whose probabilities are seen while they exist, and never stored: prompt and decode step."""

import torch
from torch import Tensor

from kvrepro.engine.shapes import HeadFloats, KeyValue, Mask, Query, TokenFloats


class PromptAttention:
    """Causal attention of one prompt in blocks of queries, with statistics per key column.

    After the forward pass, all float32:
    - `column_max`, `column_sum` (if `sums`) `[layers, heads, tokens]` over queries, and `last` of the last query alone;
    - `group_max` (if `groups`) `[layers, kv_heads, tokens]`: maximum over queries of a KV head's mean over its group;
    - `window` `[layers, heads, queries, tokens]`: the last `keep_queries` in full.
    Memory is block x tokens per head, never tokens x tokens.
    """

    def __init__(self, sums: bool = False, groups: bool = False, keep_queries: int = 1, block: int = 256):
        self.sums, self.groups, self.keep_queries, self.block = sums, groups, keep_queries, block
        self._columns: dict[str, list[Tensor]] = {"max": [], "sum": [], "group": [], "window": []}

    def attend(
        self, layer: int, query: Query, key: KeyValue, value: KeyValue, scaling: float, sliding: int | None = None
    ) -> Tensor:
        (_, heads, n, dim), kv_heads = query.shape, key.shape[1]
        group = heads // kv_heads
        q, k, v = query[0].view(kv_heads, group, n, dim), key[0], value[0]
        out = torch.empty_like(q)
        stats = {
            "max": q.new_zeros(kv_heads, group, n, dtype=torch.float32),
            "sum": q.new_zeros(kv_heads, group, n, dtype=torch.float32),
            "group": q.new_zeros(kv_heads, n, dtype=torch.float32),
            "window": q.new_zeros(kv_heads, group, min(self.keep_queries, n), n, dtype=torch.float32),
        }
        for a in range(0, n, self.block):
            b = min(a + self.block, n)
            scores = torch.bmm(q[:, :, a:b].reshape(kv_heads, -1, dim), k[:, :b].transpose(1, 2)).mul_(scaling)
            scores = scores.view(kv_heads, group, b - a, b)
            future = torch.ones(b - a, b - a, dtype=torch.bool, device=q.device).triu_(1)
            scores[..., a:].masked_fill_(future, torch.finfo(scores.dtype).min)
            p = torch.softmax(scores, -1, dtype=torch.float32)
            out[:, :, a:b] = torch.bmm(p.to(v.dtype).view(kv_heads, -1, b), v[:, :b]).view(kv_heads, group, b - a, dim)
            self._observe(stats, p, a, b, n)
        for name, values in stats.items():
            self._columns[name].append(values)
        return out.permute(2, 0, 1, 3).reshape(1, n, heads, dim)

    def _observe(self, stats: dict[str, Tensor], p: Tensor, a: int, b: int, n: int) -> None:
        """Fold the probabilities `[kv_heads, group, b - a, b]` of queries a..b-1 into the column statistics."""
        seen = stats["max"][..., :b]
        torch.maximum(seen, p.amax(2), out=seen)
        if self.sums:
            stats["sum"][..., :b] += p.sum(2)
        if self.groups:
            seen = stats["group"][..., :b]
            torch.maximum(seen, p.mean(1).amax(1), out=seen)
        start = n - stats["window"].shape[2]
        if b > start:
            stats["window"][:, :, max(a - start, 0) : b - start, :b] = p[:, :, max(start - a, 0) :]

    @property
    def column_max(self) -> Tensor:
        return torch.stack(self._columns["max"]).flatten(1, 2)

    @property
    def column_sum(self) -> Tensor:
        return torch.stack(self._columns["sum"]).flatten(1, 2)

    @property
    def group_max(self) -> Tensor:
        return torch.stack(self._columns["group"])

    @property
    def window(self) -> Tensor:
        return torch.stack(self._columns["window"]).flatten(1, 2)

    @property
    def last(self) -> Tensor:
        return self.window[:, :, -1]


class DecodeAttention:
    """One query per row over the cache slots that `visible` shows, reduced over layers as they pass.

    `attention` [batch, tokens] is the maximum ("max") or mean ("mean") over layers and query heads. With `head_map`,
    `per_head` [batch, kv_heads, tokens] follows one KV head: the query head of the same number ("first_n_kv", the
    artifact's indexing, off for grouped heads), or its group's mean ("group_mean").
    """

    def __init__(self, visible: Mask, dtype: torch.dtype, layers: int, reduce: str, head_map: str | None = None):
        self.bias = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
        self.bias.masked_fill_(~visible, torch.finfo(dtype).min)
        self.layers, self.reduce, self.head_map = layers, reduce, head_map
        self.attention: TokenFloats | None = None
        self.per_head: HeadFloats | None = None

    def attend(
        self, layer: int, query: Query, key: KeyValue, value: KeyValue, scaling: float, sliding: int | None = None
    ) -> Tensor:
        (batch, heads, _, dim), kv_heads = query.shape, key.shape[1]
        q = query.view(batch, kv_heads, heads // kv_heads, dim)
        scores = torch.matmul(q, key.transpose(2, 3)).mul_(scaling).add_(self.bias[:, :, None])
        p = torch.softmax(scores, -1, dtype=torch.float32)
        self.attention = self._fold(self.attention, p.flatten(1, 2), 1)
        if self.head_map == "first_n_kv":
            self.per_head = self._fold(self.per_head, p.flatten(1, 2)[:, None, :kv_heads], 1)
        elif self.head_map == "group_mean":
            self.per_head = self._fold(self.per_head, p.mean(2)[:, None], 1)
        return torch.matmul(p.to(value.dtype), value).view(batch, 1, heads, dim)

    def _fold(self, so_far: Tensor | None, p: Tensor, dim: int) -> Tensor:
        """Reduce over `dim`, then into what earlier layers gave."""
        here = p.amax(dim) if self.reduce == "max" else p.mean(dim) / self.layers
        if so_far is None:
            return here
        return torch.maximum(so_far, here) if self.reduce == "max" else so_far + here
