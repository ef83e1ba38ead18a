"""The guide's statements about memory, computed from the shapes of models; nothing is run."""

import pandas as pd

SHAPES = {  # layers, query heads, KV heads, dimension of a head, parameters; from the models' published configurations
    "Qwen3-8B": (36, 32, 8, 128, 8.19e9),
    "Qwen3-32B": (64, 64, 8, 128, 32.8e9),
    "Llama-3.1-8B": (32, 32, 8, 128, 8.03e9),
    "Llama-3.1-70B": (80, 64, 8, 128, 70.6e9),
    "Qwen2.5-3B": (36, 16, 2, 128, 3.09e9),
    "Qwen2.5-14B": (48, 40, 8, 128, 14.8e9),
}
UNITS = {"24 x 10^9 bytes": 24e9, "24 x 2^30 bytes": 24 * 2**30}
VOCABULARY, WIDTH = 151_936, 5_120  # of Qwen3-32B, whose embeddings and output layer are two matrices
GROUP = 128  # weights that share a scale of 16 bits and a zero of four. Source: AWQ, Lin et al. 2024


def memory() -> pd.DataFrame:
    """Rows (check, model, value). "smaller by GQA": the cache if there were as many KV heads as query heads, over the
    model's. "tokens in <memory>": tokens that fit beside Qwen3-32B's weights at four bits, with nothing else in memory.
    Either all weights have four bits, or as in checkpoints the embeddings and the output layer have 16, and the others
    have scales and zeros."""
    rows = [("smaller by GQA", model, heads / kv) for model, (_, heads, kv, _, _) in SHAPES.items()]
    model = "Qwen3-32B"
    layers, _, kv_heads, dim, parameters = SHAPES[model]
    token = 2 * 2 * layers * kv_heads * dim  # bytes of its keys and values
    ends = 2 * VOCABULARY * WIDTH
    weights = {
        "": 2 * ends + (parameters - ends) * (4 + 20 / GROUP) / 8,
        ", four bits for every weight": parameters / 2,
    }
    rows += [
        (f"tokens in {name}{variant}", model, (memory_bytes - weight_bytes) // token)
        for variant, weight_bytes in weights.items() for name, memory_bytes in UNITS.items()
    ]  # fmt: skip
    return pd.DataFrame(rows, columns=["check", "model", "value"])
