"""The models' tokenizer, one token a word, and their training rows: conversations as token ids, answers marked."""

from functools import cache
from random import Random

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvrepro.world import words as w
from kvrepro.world import world
from kvrepro.world.world import ALL, Conversation, Draw

PAD = w.SPECIALS.index("<|pad|>")
TASK_NAMES = list(ALL)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|> {{ message.content }} <|end|> {% endfor %}"
    "{% if add_generation_prompt %}<|assistant|> {% endif %}"
)


@cache
def vocabulary() -> dict[str, int]:
    """Every word of the world's texts with its id, in a fixed order."""
    grammar: set[str] = set()
    for task, build_conversation in world.ALL.items():  # a task's fixed words stand in each of its conversations
        for i in range(40):
            conversation = build_conversation(Draw(Random(f"{task}-{i}"), 300, False, 2))
            grammar.update(conversation.system, *(words for turn in conversation.turns for words in turn))
    shouted = [x.upper() for x in w.ADJECTIVES + w.NOUNS + w.KEYWORDS + w.QUALITIES + ["and", "are", "with"]]
    ordered = w.SPECIALS + w.MARKS + w.NUMBERS + sorted(grammar) + w.FIRST + w.LAST + w.ADJECTIVES + w.NOUNS + w.LABELS
    ordered += w.VARIABLES + w.KEYWORDS + w.QUALITIES + w.REQUESTS + ["«", "»"] + shouted
    return {word: i for i, word in enumerate(dict.fromkeys(ordered))}


def build() -> PreTrainedTokenizerFast:
    """The tokenizer in Hugging Face's format. WordPiece over spaces: `boats.` is `boats` and `##.`."""
    core = Tokenizer(models.WordPiece(vocabulary(), unk_token="<|unk|>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    tokens = {"unk_token": "<|unk|>", "pad_token": "<|pad|>", "eos_token": "<|end|>"}
    tokens["additional_special_tokens"] = ["<|system|>", "<|user|>", "<|assistant|>"]
    sizes = {"model_max_length": world.CONTEXT, "clean_up_tokenization_spaces": False}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, **tokens, **sizes)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def encode(conversation: Conversation) -> tuple[list[int], list[int]]:
    """(ids, turn): turn is 0 outside answers and i+1 on the tokens of answer i, its end token included."""
    words = ["<|system|>", *conversation.system, "<|end|>"]
    turn = [0] * len(words)
    for i, (user, answer) in enumerate(conversation.turns):
        words += ["<|user|>", *user, "<|end|>", "<|assistant|>", *answer, "<|end|>"]
        turn += [0] * (len(user) + 3) + [i + 1] * (len(answer) + 1)
    vocab = vocabulary()
    return [vocab[word] for word in words], turn


def row(rng: Random, task: str, length: int, evaluation: bool, turns: int) -> tuple[list[int], list[int]]:
    """A conversation of at most `length` tokens (fewer turns if it does not fit), not padded."""
    while True:
        ids, turn = encode(ALL[task](Draw(rng, length, evaluation, turns)))
        if len(ids) <= length:
            return ids, turn
        turns = max(1, turns - 1)


def repeated(rng: Random, length: int) -> tuple[list[int], list[int]]:
    """A random sequence twice, the plainest task of induction. The second time counts as the answer."""
    half = length // 2
    first = [rng.randrange(len(w.SPECIALS), len(vocabulary())) for _ in range(half)]
    return first + first, [0] * half + [1] * half


def batch(
    rng: Random, shares: np.ndarray, length: int, tokens: int, warm: float = 0, evaluation: bool = False, turns: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """ids, turn, task of tokens // length rows: int16 [rows, length] twice, int16 [rows].

    shares: weight of each task; warm: share of repeated sequences, whose task is -1.
    """
    n = tokens // length
    ids, turn = np.full((n, length), PAD, np.int16), np.zeros((n, length), np.int16)
    tasks = np.asarray(rng.choices(range(len(TASK_NAMES)), weights=shares.tolist(), k=n), np.int16)
    for r in range(n):
        if rng.random() < warm:
            x, y = repeated(rng, length)
            tasks[r] = -1
        else:
            whole = evaluation or length <= 128 or rng.random() < 0.7
            most = length if whole else rng.randint(length * 5 // 8, length)
            x, y = row(rng, TASK_NAMES[tasks[r]], most, evaluation, turns or max(1, min(10, length // 50)))
        ids[r, : len(x)], turn[r, : len(y)] = x, y
    return ids, turn, tasks
