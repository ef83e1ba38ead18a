"""The cache of decoding rows: preallocated slots that evicted tokens leave and new tokens fill."""

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, DynamicLayer

from kvrepro.engine.shapes import KeyValue


class SlotCache(Cache):
    """Per layer keys and values `[batch, kv_heads, width, dim]`; the current token of every row goes into slot `slot`.

    Which slots hold a living token is known by the observation's `alive`. Unused slots are zero, never uninitialised,
    since a masked NaN would still spread.
    """

    def __init__(self, keys: list[Tensor], values: list[Tensor], slot: int):
        super().__init__(layers=[DynamicLayer() for _ in keys])
        self.keys, self.values, self.slot = keys, values, slot

    @property
    def token_bytes(self) -> int:
        """Bytes that one token holds over all layers and heads."""
        return sum(t.shape[1] * t.shape[3] * t.element_size() for t in (*self.keys, *self.values))

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs
    ) -> tuple[Tensor, Tensor]:
        """Store the current token `[batch, kv_heads, 1, dim]` and return all slots, living or not."""
        k, v = self.keys[layer_idx], self.values[layer_idx]
        k[:, :, self.slot] = key_states[:, :, 0]
        v[:, :, self.slot] = value_states[:, :, 0]
        return k, v

    def rows(self, index: Tensor) -> None:
        """Keep these rows only."""
        self.keys = [k[index] for k in self.keys]
        self.values = [v[index] for v in self.values]

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy slots `source` to slots `target`, int64 `[batch, moves]`, in every layer."""
        row = torch.arange(source.shape[0], device=source.device)[:, None]
        for stored in (*self.keys, *self.values):
            stored[row, :, target] = stored[row, :, source]

    def gather(self, slots: Tensor, width: int) -> None:
        """Move `slots`, int64 `[batch, tokens]`, into the first slots of new buffers of `width` slots."""
        self.keys = [_gathered(k, slots, width) for k in self.keys]
        self.values = [_gathered(v, slots, width) for v in self.values]


def _gathered(stored: KeyValue, slots: Tensor, width: int) -> KeyValue:
    """`stored[b, :, slots[b]]` in the first slots of a zeroed buffer."""
    batch, heads, _, dim = stored.shape
    new = stored.new_zeros(batch, heads, width, dim)
    for row in range(batch):
        new[row, :, : slots.shape[1]] = stored[row].index_select(1, slots[row])
    return new


def from_prompt(prompt: DynamicCache, slots: Tensor, width: int) -> SlotCache:
    """Rows of token positions `slots`, int64 `[batch, tokens]`, of one prompt's cache, in buffers of `width` slots."""
    rows = slots.shape[0]
    keys = [_gathered(layer.keys.expand(rows, -1, -1, -1), slots, width) for layer in prompt.layers]
    values = [_gathered(layer.values.expand(rows, -1, -1, -1), slots, width) for layer in prompt.layers]
    return SlotCache(keys, values, slots.shape[1])


def concatenate(caches: list[SlotCache]) -> SlotCache:
    """The rows of caches of equal width as one batch; the next token goes behind the longest."""
    layers = range(len(caches[0].keys))
    keys = [torch.cat([c.keys[i] for c in caches]) for i in layers]
    values = [torch.cat([c.values[i] for c in caches]) for i in layers]
    return SlotCache(keys, values, max(c.slot for c in caches))
