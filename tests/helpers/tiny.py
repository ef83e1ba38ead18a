"""Tiny random models of nine architectures, and prompts for them."""

from functools import cache

import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Phi3Config, PreTrainedModel, Qwen2Config

CONFIGS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "mistral": MistralConfig, "phi3": Phi3Config}


def model(kind: str = "qwen2", dtype: torch.dtype = torch.float32, **changes) -> PreTrainedModel:
    """Three layers, width 48, 6 query and 2 KV heads of 8; weights large enough that attention is far from uniform."""
    torch.manual_seed(11)
    shape = {
        "vocab_size": 120, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 6,
        "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.2, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2, "sliding_window": None,
    }  # fmt: skip
    config = CONFIGS[kind](**{**shape, **changes})
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(dtype).eval()


LINEAR = {
    "layer_types": ["linear_attention", "full_attention", "full_attention"], "linear_num_value_heads": 4,
    "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ARCHITECTURES: dict[str, tuple[str, dict]] = {
    "llama": ("LlamaConfig", {}),
    "mistral": ("MistralConfig", {"sliding_window": 32}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {}),
    "phi3": ("Phi3Config", {"sliding_window": None}),
    "gemma3": ("Gemma3TextConfig", {
        "sliding_window": 32, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "query_pre_attn_scalar": 8,
    }),
    "qwen3_moe": ("Qwen3MoeConfig", EXPERTS),
    "qwen3_next": ("Qwen3NextConfig", {**LINEAR, **EXPERTS, "shared_expert_intermediate_size": 32}),
    "qwen3_5": ("Qwen3_5TextConfig", LINEAR),
}  # fmt: skip


@cache
def architecture(name: str, dim: int = 8, layers: int = 3) -> PreTrainedModel:
    """`model`'s shape in any of ARCHITECTURES, made once; a prompt of 70 tokens is longer than the sliding windows."""
    torch.manual_seed(11)
    kind, changes = ARCHITECTURES[name]
    shape = {
        "vocab_size": 120, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": layers,
        "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": dim, "max_position_embeddings": 512,
        "initializer_range": 0.2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    config = getattr(transformers, kind)(**{**shape, **changes})
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()


def prompts(*lengths: int, seed: int = 5) -> list[list[int]]:
    generator = torch.Generator(device="cpu").manual_seed(seed)
    return [torch.randint(3, 120, (n,), generator=generator, device="cpu").tolist() for n in lengths]


def sliding_of(name: str) -> dict[int, int]:
    config = architecture(name).config
    types = getattr(config, "layer_types", None) or ["sliding_attention"] * 3
    return {n: 32 for n, kind in enumerate(types) if kind == "sliding_attention"} if config_slides(name) else {}


def config_slides(name: str) -> bool:
    return name in ("mistral", "gemma3")


def evictable(name: str) -> list[int]:
    """Layers that lose tokens: all that attend, but in a mixed model only those that do not slide."""
    return {"gemma3": [1], "qwen3_next": [1, 2], "qwen3_5": [1, 2]}.get(name, [0, 1, 2])


def triples_of(layer) -> list:
    """All triples of a layer that the chapter on DropKV's bound has seen: by query head, then position."""
    return [layer.triple(head, position) for head in range(len(layer.query)) for position in layer.positions]
