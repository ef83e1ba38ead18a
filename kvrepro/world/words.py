"""The world's words and fixed sentences, as lists of words. One word is one token; a mark written `##.` sticks to the
word before it."""

import random
from typing import Any

import yaml

from kvrepro.paths import DATA


def _split(text: Any) -> Any:
    """A text as its words; each text of a mapping or a list."""
    if isinstance(text, dict):
        return {name: _split(part) for name, part in text.items()}
    return [_split(part) for part in text] if isinstance(text, list) else text.split()


WORLD = _split(yaml.safe_load((DATA / "words" / "world.yml").read_text(encoding="utf-8")))
FIRST, LAST = WORLD["first names"], WORLD["last names"]
ADJECTIVES = WORLD["adjectives"]
CATEGORIES = WORLD["things"]
NOUNS = [word for words in CATEGORIES.values() for word in words]
LABELS = WORLD["marks"]
VARIABLES = WORLD["variables"]
KEYWORDS = WORLD["keywords"]
QUALITIES = WORLD["qualities"]
REQUESTS = WORLD["requests"]  # the verb of a request sets the default quality word
SENTENCES = WORLD["sentences"]
MARKS = ["##.", "##,", "##:", "##?", "##;"]
SPECIALS = ["<|pad|>", "<|unk|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
NUMBERS = [str(i) for i in range(1, 101)]


def filler_bank() -> list[list[str]]:
    """The fixed bank of filler sentences: low entropy, so that language modelling on filler costs little."""
    rng, seen, bank, filler = random.Random(1), set(), [], WORLD["filler"]
    while len(bank) < 400:
        subject, action, preposition, place, time = (rng.choice(words) for words in filler.values())
        words = ["The", subject, action, preposition, "the", place, time, "##."]
        if tuple(words) not in seen:
            seen.add(tuple(words))
            bank.append(words)
    return bank
