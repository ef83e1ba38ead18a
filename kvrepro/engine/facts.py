"""What the engine must know of a model: which layers hold tokens to evict, their windows, outputs and rotations."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedModel

from kvrepro.engine.observe import Observation


@dataclass(frozen=True)
class ModelFacts:
    """What the engine must know of a model: which layers hold tokens to evict, and each one's output projection."""

    attention: tuple[int, ...]  # numbers of the layers with keys and values
    evictable: tuple[int, ...]
    sliding: dict[int, int]
    outputs: dict[int, Tensor]  # [heads, dim, hidden]
    inverse_frequencies: dict[int, Tensor]  # [rotated / 2] of each evictable layer's rotation, where it has one
    backend: str = "torch"  # what scorers compute with

    def observe(self, layer: int, keys: Tensor, seeds: Sequence[int] | Tensor, **known: Any) -> Observation:
        """An observation of an evictable layer, with what is known of the model."""
        frequencies = self.inverse_frequencies.get(layer)
        return Observation(
            layer=self.evictable.index(layer), layers=len(self.evictable), keys=keys, output=self.outputs[layer],
            inverse_frequencies=None if frequencies is None else frequencies.to(keys.device),
            sliding=self.sliding.get(layer), seed=torch.as_tensor(seeds, device=keys.device), backend=self.backend,
            **known,
        )  # fmt: skip

    @classmethod
    def of(cls, model: PreTrainedModel) -> "ModelFacts":
        """Sliding layers forget on their own: they are evicted only in a model that has no other attention layers."""
        outputs, sliding = {}, {}
        for number, module in attention_modules(model).items():
            weight = module.o_proj.weight  # [hidden, heads * dim]
            outputs[number] = weight.view(weight.shape[0], -1, module.head_dim).permute(1, 2, 0)
            if (window := sliding_window(model.config, number)) is not None:
                sliding[number] = window
        full = tuple(n for n in outputs if n not in sliding)
        evictable = full or tuple(outputs)
        return cls(tuple(outputs), evictable, sliding, outputs, rotations(model, evictable))

    def by(self, backend: str) -> "ModelFacts":
        """The same for scorers that compute with another backend."""
        return replace(self, backend=backend)

    def held(self, tokens: int) -> int:
        """Tokens that an evictable layer holds of so many seen: a sliding one only those that a next query can see."""
        return min([tokens, *(self.sliding[n] - 1 for n in self.evictable if n in self.sliding)])


def attention_modules(model: PreTrainedModel) -> dict[int, Module]:
    """The model's attention modules by layer, in order."""
    found = {m.layer_idx: m for m in model.modules() if hasattr(m, "o_proj") and hasattr(m, "layer_idx")}
    return dict(sorted(found.items()))


def rotations(model: PreTrainedModel, layers: Iterable[int]) -> dict[int, Tensor]:
    """Inverse frequencies [rotated / 2] of each of `layers`; none of a model without rotations.

    Gemma3 has a set of frequencies for each kind of layer, the others one.
    """
    rotary = getattr(model.get_decoder(), "rotary_emb", None)
    kinds = getattr(model.config.get_text_config(), "layer_types", None)
    found = {}
    for layer in layers if rotary is not None else ():
        own = getattr(rotary, f"{kinds[layer]}_inv_freq", None) if kinds else None
        found[layer] = rotary.inv_freq if own is None else own
    return found


def sliding_window(config: Any, layer: int) -> int | None:
    """Tokens that a query of this layer looks back, itself included; None: all."""
    config = config.get_text_config()
    window = getattr(config, "sliding_window", None)
    if window is None or getattr(config, "use_sliding_window", True) is False:
        return None
    types = getattr(config, "layer_types", None)
    return int(window) if types is None or types[layer] == "sliding_attention" else None
