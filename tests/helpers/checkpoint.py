"""A small random checkpoint in the hub's format: Qwen2, grouped heads, byte-level BPE, ChatML-like template."""

from collections.abc import Iterable
from pathlib import Path

from kvrepro.tools import trial

TEXTS = [
    "The lighthouse keeper counted seven ships before the fog came in over the harbour.",
    "Passage: the red door is open. Question: which door is open? Answer: the red door.",
    "Reply with a short, factual answer only. A café, a naïve façade, 1,920 tokens — and “quotes”.",
]


def tokenizer(texts: Iterable[str] = TEXTS, vocabulary: int = 500):
    """Byte-level BPE trained on the texts."""
    return trial.tokenizer(texts, vocabulary)


def save(folder: Path, texts: Iterable[str] = TEXTS, vocabulary: int = 500, context: int = 2048) -> Path:
    """Write a random 2-layer Qwen2 (6 query heads, 2 KV heads) and its tokenizer to `folder`."""
    return trial.checkpoint(folder, "two-layer", texts, vocabulary, max_position_embeddings=context)
