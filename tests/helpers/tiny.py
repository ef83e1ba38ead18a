"""Tiny random models of nine architectures, and prompts for them."""

from functools import cache
from typing import Any

import torch
from families import build
from transformers import PreTrainedModel

SHAPE = {"vocab_size": 120, "hidden_size": 48, "num_attention_heads": 6, "head_dim": 8, "initializer_range": 0.2}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {  # the family, and what is more
    "llama": ("Llama", {}),
    "mistral": ("Mistral, sliding window", {}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "phi3": ("Phi-3", {}),
    "gemma3": ("Gemma 3, text", {"query_pre_attn_scalar": 8}),
    "qwen3_moe": ("Qwen3-MoE", {}),
    "qwen3_next": ("Qwen3-Next", {}),
    "qwen3_5": ("Qwen3.5", {}),
}


def model(kind: str = "qwen2", dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    """Three layers, width 48, 6 query and 2 KV heads of 8; weights large enough that attention is far from uniform. No
    layer slides unless `changes` say so."""
    family, more = ARCHITECTURES[kind]
    return build(family, **{**SHAPE, **more, "sliding_window": None, **changes}).to(dtype)


@cache
def architecture(name: str, dim: int = 8, layers: int = 3) -> PreTrainedModel:
    """The same, made once; in two architectures layers slide, whose windows a prompt of 70 tokens exceeds."""
    family, more = ARCHITECTURES[name]
    return build(family, **{**SHAPE, **more, "head_dim": dim, "num_hidden_layers": layers})


def prompts(*lengths: int, seed: int = 5) -> list[list[int]]:
    generator = torch.Generator(device="cpu").manual_seed(seed)
    return [torch.randint(3, 120, (n,), generator=generator, device="cpu").tolist() for n in lengths]


def sliding_of(name: str) -> dict[int, int]:
    """The layers that slide, and their windows."""
    return {"mistral": {0: 32, 1: 32, 2: 32}, "gemma3": {0: 32, 2: 32}}.get(name, {})


def evictable(name: str) -> list[int]:
    """Layers that lose tokens: all that attend, but in a mixed model only those that do not slide."""
    return {"gemma3": [1], "qwen3_next": [1, 2], "qwen3_5": [1, 2]}.get(name, [0, 1, 2])


def triples_of(layer) -> list:
    """All triples of a layer that the chapter on DropKV's bound has seen: by query head, then position."""
    return [layer.triple(head, position) for head in range(len(layer.query)) for position in layer.attention]
