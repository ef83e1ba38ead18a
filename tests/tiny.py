"""Tiny random models of four architectures, and prompts for them."""

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PreTrainedModel, Phi3Config, Qwen2Config

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


def prompts(*lengths: int, seed: int = 5) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 120, (n,), generator=generator).tolist() for n in lengths]
