"""A small random checkpoint in the hub's format: Qwen2, grouped heads, byte-level BPE, ChatML-like template."""

from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXTS = [
    "The lighthouse keeper counted seven ships before the fog came in over the harbour.",
    "Passage: the red door is open. Question: which door is open? Answer: the red door.",
    "Reply with a short, factual answer only. A café, a naïve façade, 1,920 tokens — and “quotes”.",
]


def tokenizer(texts: Iterable[str] = TEXTS, vocabulary: int = 500) -> PreTrainedTokenizerFast:
    """Byte-level BPE trained on the texts; any text can be encoded and comes back unchanged."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = TEMPLATE
    return fast


def save(folder: Path, texts: Iterable[str] = TEXTS, vocabulary: int = 500, context: int = 2048) -> Path:
    """Write a random 2-layer Qwen2 (6 query heads, 2 KV heads) and its tokenizer to `folder`."""
    fast = tokenizer(texts, vocabulary)
    config = Qwen2Config(
        vocab_size=len(fast), hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=context, bos_token_id=None,
        eos_token_id=fast.eos_token_id, pad_token_id=fast.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder
