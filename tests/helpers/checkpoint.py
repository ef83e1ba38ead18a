"""A small random checkpoint in the hub's format: Qwen2, grouped heads, byte-level BPE, ChatML-like template."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from studies import trial

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


def questions(n: int, characters: int = 2000) -> list[dict[str, str]]:
    """Made-up questions on passages of so many characters, as rows for a .jsonl file."""
    sentences = [f"Ship {i} brought {i * 7} crates of tea to the harbour. " for i in range(n)]
    passages = [(text * (characters // len(text) + 1))[:characters] for text in sentences]
    asked = [{"question": f"What did ship {i} bring?", "answer": f"{i * 7} crates"} for i in range(n)]
    return [{"context": text, **row} for text, row in zip(passages, asked, strict=True)]


def inputs(folder: Path, rows: Sequence[dict[str, str]]) -> dict[str, Any]:
    """A notebook's parameters for these rows, as own.jsonl, on a checkpoint that knows their words; all in `folder`."""
    items = folder / "own.jsonl"
    items.write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = save(folder / "small-qwen2", [row["context"] for row in rows])
    return {"model": str(model), "items": str(items), "n_items": len(rows), "results": str(folder / "results")}
