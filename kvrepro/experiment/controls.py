"""Answers that no policy gives: what an answer is worth that knows the first word alone, or no passage at all.

A score says something about a cache only as far as it stands above these.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from kvrepro.engine.condition import Condition
from kvrepro.engine.generate import generate
from kvrepro.experiment import data, measure, models
from kvrepro.experiment.answers import references
from kvrepro.experiment.models import Loaded
from kvrepro.experiment.run import PerItem, Settings, run
from kvrepro.item import Item
from kvrepro.world import world

CONTROLS = {
    "first_word": "the answer's first word alone, which the full cache gives wherever tokens leave after the question",
    "copy": "that word, and what follows it where the prompt has it first",
    "refusal": "a refusal",
    "no_passage": "what the model says to the question alone",
}
REFUSAL = world.pretty(world.REFUSAL)


def of_items(
    chapter: str, items: Sequence[Item], loaded: Loaded, settings: Settings, max_new_tokens: int
) -> pd.DataFrame:
    """`of_item` of each, stored beside the chapter's rows as `controls`."""
    return run(PerItem(chapter, "controls", items, of_item, {"max_new_tokens": max_new_tokens}), loaded, settings)


def of_item(loaded: Loaded, item: Item, max_new_tokens: int = 128) -> pd.DataFrame:
    """A row for each of `CONTROLS` with the columns control, prediction, answer and those of `measure.all_measures`.

    The last is generated, from an empty cache but for the question; the others are computed.
    """
    given = {
        "first_word": " ".join(item.answer.split()[:1]),
        "copy": copied(item),
        "refusal": REFUSAL,
        "no_passage": _without_passage(loaded, item, max_new_tokens),
    }
    return pd.DataFrame(
        {"control": name, "prediction": text, "answer": item.answer}
        | measure.all_measures(text, references(item))
        | measure.official(text, references(item), item.meta)
        for name, text in given.items()
    )


def copied(item: Item) -> str:
    """The answer's first word and the words that follow its first occurrence in the messages, as many as it has."""
    answer = item.answer.split()
    told = " ".join(message["content"] for message in item.messages).split()
    at = next((i for i, word in enumerate(told) if answer and word.strip(".,;:?") == answer[0].strip(".,;:?")), None)
    return " ".join(answer[:1] if at is None else [answer[0], *told[at + 1 : at + len(answer)]])


def _without_passage(loaded: Loaded, item: Item, max_new_tokens: int) -> str:
    """The model's answer to the question alone; of an item without a passage its answer to all of it."""
    new = item.new_tokens(max_new_tokens)
    prompt = data.build_prompt(data.without_passage(item), loaded.tokenizer, loaded.context - new)
    stop = models.stop_ids(loaded)
    [[answer]] = generate(loaded.model, [prompt], [Condition()], max_new_tokens=new, stop_ids=stop)
    return str(loaded.tokenizer.decode(answer.tokens, skip_special_tokens=True)).strip()
