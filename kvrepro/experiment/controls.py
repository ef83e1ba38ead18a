"""Control answers, which no policy gives: those that know only the first word, or no passage at all.

A score says something about a cache only where it is above the scores of these.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from kvrepro.engine.condition import Condition
from kvrepro.experiment import data, measure
from kvrepro.experiment.answers import references
from kvrepro.experiment.models import Loaded
from kvrepro.experiment.run import Answers, Settings, run
from kvrepro.item import Item
from kvrepro.world import world

REFUSAL = world.pretty(world.REFUSAL)


def of_items(
    chapter: str, items: Sequence[Item], loaded: Loaded, settings: Settings, max_new_tokens: int
) -> pd.DataFrame:
    """A row for each item and control: item, task, control, prediction, answer, and the measures' columns.

    Controls: `first_word`, only the answer's first word, which comes from the full cache wherever tokens leave after
    the question; `copy`, that word and the words that follow its first place in the prompt; `refusal`; and
    `no_passage`, the model's answer to the question alone, which is stored beside the chapter's rows as `controls`.
    """
    questions = [data.without_passage(item) for item in items]
    rows = run(Answers(chapter, "controls", questions, [Condition()], max_new_tokens), loaded, settings)
    without_passage = dict(zip(rows["item"], rows.prediction, strict=True))
    return pd.DataFrame([
        {"item": item.id, "task": item.task, "control": name, "prediction": text, "answer": item.answer}
        | measure.all_measures(text, references(item), item.papers)
        | measure.official(text, references(item), item.meta)
        for item in items
        for name, text in (
            ("first_word", " ".join(item.answer.split()[:1])), ("copy", copied(item)), ("refusal", REFUSAL),
            ("no_passage", without_passage[item.id]),
        )
        if isinstance(text, str)  # there is no text where the generation failed, and in a dry run
    ])  # fmt: skip


def copied(item: Item) -> str:
    """The answer's first word and those that follow its first place in the messages, as many as the answer has."""
    answer = item.answer.split()
    words = " ".join(message["content"] for message in item.messages).split()
    at = next((i for i, word in enumerate(words) if answer and word.strip(".,;:?") == answer[0].strip(".,;:?")), None)
    return " ".join(answer[:1] if at is None else [answer[0], *words[at + 1 : at + len(answer)]])
