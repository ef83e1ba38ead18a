"""The world's tokenizer: one token a word, marks stuck to the word before them, and a chat template of three turns."""

import random
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from kvrepro.world import words as w

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|> {{ message.content }} <|end|> {% endfor %}"
    "{% if add_generation_prompt %}<|assistant|> {% endif %}"
)


@cache
def vocabulary() -> dict[str, int]:
    """Every word of the world's texts with its id, in a fixed order."""
    from kvrepro.world import world

    grammar: set[str] = set()
    for task, build_conversation in world.ALL.items():  # a task's fixed words stand in each of its conversations
        for i in range(40):
            conversation = build_conversation(random.Random(f"{task}-{i}"), 300, False, 2)
            grammar.update(conversation.system, *(words for turn in conversation.turns for words in turn))
    shouted = [x.upper() for x in w.ADJECTIVES + w.NOUNS + w.KEYWORDS + w.QUALITIES + ["and", "are", "with"]]
    ordered = w.SPECIALS + w.MARKS + w.NUMBERS + sorted(grammar) + w.FIRST + w.LAST + w.ADJECTIVES + w.NOUNS + w.LABELS
    ordered += w.VARIABLES + w.KEYWORDS + w.QUALITIES + w.REQUESTS + ["«", "»"] + shouted
    return {word: i for i, word in enumerate(dict.fromkeys(ordered))}


def build() -> "PreTrainedTokenizerFast":
    """The tokenizer in Hugging Face's format. WordPiece over spaces: `boats.` is `boats` and `##.`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from kvrepro.world import world

    core = Tokenizer(models.WordPiece(vocabulary(), unk_token="<|unk|>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="<|unk|>", pad_token="<|pad|>", eos_token="<|end|>",
        additional_special_tokens=["<|system|>", "<|user|>", "<|assistant|>"], model_max_length=world.CONTEXT,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def save(folder: str | Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    build().save_pretrained(folder)
