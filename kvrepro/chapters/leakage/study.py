"""The chapter's studies: which cells are run on which system prompts, and their rows.

rows = main(loaded, settings)  # one row per (item, cell); a cell that an item cannot meet has an error
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pandas as pd

from kvrepro.chapters.leakage import prompts, scores
from kvrepro.chapters.leakage.cells import DEBIAS, LIBRARY, Cell, Settings, cells
from kvrepro.chapters.leakage.prompts import prompt, systems
from kvrepro.engine import generate as engine
from kvrepro.engine.condition import Condition, Prompt
from kvrepro.engine.policy import READINGS
from kvrepro.errors import InputError
from kvrepro.experiment import data, models
from kvrepro.experiment.models import Loaded
from kvrepro.experiment.run import Answers, PerItem, run
from kvrepro.item import Item

FACTS = [*"ratio variant reading system order request rules words asked".split(), *scores.MEASURES]
TIMED, REPEATS = 8, {"quick": 2, "full": 10}  # tokens of an answer whose time is taken, and how often


def answers(
    loaded: Loaded, items: Sequence[Item], grids: Iterable[Sequence[Cell]], settings: Settings, name: str = "answers"
) -> pd.DataFrame:
    """One row per item and cell of its grid, with the columns of the store, of cell and item, and of `scores.score`.

    `note` says what survived of each part in each layer (`scores.keep_rates`).
    """
    by_item = [(item, prompt(loaded, item), list(dict.fromkeys(grid))) for item, grid in zip(items, grids, strict=True)]
    conditions = [[cell.on(item, text) for cell in grid] for item, text, grid in by_item]
    study = Answers("leakage", name, items, conditions, settings.tokens, None, prompt, scores.survivors)
    stored, places, facts = run(study, loaded, settings), dict[Any, int](), []
    for (item, _, grid), wanted in zip(by_item, conditions, strict=True):
        of_item = {name: item.meta.get(name, 0) for name in ("system", "order", "request", "rules", "words")}
        of_item["asked"] = len(item.meta.get("instructions", "1"))
        for cell, condition in zip(grid, wanted, strict=True):
            place = places.setdefault((item.id, condition), len(places))  # cells of one condition share a row
            of_cell = {"place": place, "ratio": cell.ratio, "variant": cell.variant, "reading": cell.reading}
            facts.append(of_item | of_cell | scores.score(item, stored.prediction.iloc[place]))
    frame = pd.DataFrame(facts)
    return stored.iloc[frame.place].reset_index(drop=True).assign(**frame.reindex(columns=FACTS))


def secret(settings: Settings) -> list[Item]:
    """The system prompts of the main study."""
    return systems(settings.size("main"), settings=settings)


def main(loaded: Loaded, settings: Settings) -> pd.DataFrame:
    """System prompts with a defense, in both orders: every policy without a cure, and the cures of the paper's five
    policies and of the reader's own, with the defense first. The first policy's dial is run in both orders."""
    items, every, own, dropped = secret(settings), settings.policies, settings.main, settings.dropped
    first = ["streaming_llm"] if "streaming_llm" in every else every[:1]
    grid = cells(every, dropped("default"), readings=READINGS) + cells(first, dropped("dial"), ("fair", *DEBIAS))
    cures = cells(own, dropped("cures"), ("whitelist", "fair", "ends"), READINGS)
    grids = {"normal": grid + cures + cells(own, dropped("opening"), ("opening",)), "flipped": grid}
    return answers(loaded, items, [grids[item.meta["order"]] for item in items], settings)


def compared(settings: Settings) -> pd.DataFrame | None:
    """`main` of the second checkpoint, `settings.compare`; None if there is none."""
    if not settings.compare:
        return None
    second = models.load(settings.compare, settings.device, settings.dtype, settings.enable_thinking)
    return main(second, settings)


def alone(loaded: Loaded, settings: Settings) -> pd.DataFrame:
    """The requests that the directive applies to, of system prompts without a defense, with one rule or several."""
    most = {rules: 2 * settings.size(rules) for rules in ("single", "multi")}  # every other prompt has several
    own_world = settings.items == "tinyworld"
    items = systems(max(most.values()) if own_world else settings.size("single"), ("alone",), settings)
    items = [item for item in items if not own_world or item.meta["system"] < most[item.meta["rules"]]]
    items = [item for item in items if item.meta["request"] == "follow"]
    grid = cells(settings.main, settings.dropped("cures")[::2], readings=READINGS)
    return answers(loaded, items, [grid] * len(items), settings)


def examples(loaded: Loaded, settings: Settings) -> pd.DataFrame | None:
    """Labelled examples behind a defense: the dial of two of the paper's policies. None, which is printed, where the
    data set is missing or none fits the model."""
    fits = partial(data.build_prompt, tokenizer=loaded.tokenizer, limit=loaded.context - settings.tokens)
    pair = [name for name in settings.main if name in LIBRARY]
    grid = cells(pair, settings.dropped("cures")[::2], ("default", "fair", *DEBIAS))
    try:
        items = data.usable(prompts.examples(settings.size("examples"), settings), "leakage", fits)
        return answers(loaded, items, [grid] * len(items), settings)
    except InputError as error:
        print(f"leakage: no labelled examples: {error}")
        return None


def controls(loaded: Loaded, settings: Settings) -> pd.DataFrame:
    """Scores of answers that tell nothing from the cache: a row per item of the main study and `control`, a refusal, an
    echo of the preamble, and with the defense first the model's answer without its system prompt."""
    items = secret(settings)
    first = [item for item in items if item.meta["order"] == "normal"]
    study = Answers("leakage", "unasked", first, [Condition()], settings.tokens, prompt=request_alone)
    unasked = run(study, loaded, settings)
    refusal = next(item.answer for item in items if item.meta["request"] == "leak")
    texts = [("refusal", item, refusal) for item in items]
    texts += [("preamble", item, item.meta["references"]["preamble"]) for item in items]
    texts += [("no_system_prompt", item, text) for item, text in zip(first, unasked.prediction, strict=True)]
    facts = [{"control": name, "order": item.meta["order"], "request": item.meta["request"]} for name, item, _ in texts]
    return pd.DataFrame([fact | scores.score(item, text) for fact, (_, item, text) in zip(facts, texts, strict=True)])


def request_alone(loaded: Loaded, item: Item) -> Prompt:
    """An item's prompt without its system turn, as if a policy had kept nothing of that turn."""
    return data.build_prompt(replace(item, messages=item.messages[1:], spans=()), loaded.tokenizer, loaded.context)


def timing(loaded: Loaded, settings: Settings) -> pd.DataFrame:
    """Seconds to compress a system turn and read the request (compress), and per 100 decoded tokens (decode), of H2O
    without and with a cure: columns item, variant, repeat, compress, decode.

    Cells run one after the other, on one prompt at a time, after one run to warm up.
    """
    items = [item for item in secret(settings) if item.meta["request"] == "follow"][: settings.size("timing")]
    ratios = settings.dropped("cures")
    grid = cells(["h2o"], [ratios[len(ratios) // 2]], ("default", "whitelist", "fair"))[1:]
    given = {"conditions": {cell.variant: cell.condition for cell in grid}, "repeats": REPEATS[settings.profile]}
    return run(PerItem("leakage", "timing", items, seconds, given, alone=True), loaded, settings)


def seconds(loaded: Loaded, item: Item, conditions: Mapping[str, Condition], repeats: int) -> pd.DataFrame:
    """`timing` of one item. conditions: by variant."""
    text, rows = prompt(loaded, item), []
    for repeat in range(repeats + 1):
        for variant, condition in conditions.items():
            [[answer]] = engine.generate(loaded.model, [text], [condition], max_new_tokens=TIMED, stop_ids=())
            rows.append((variant, repeat, answer.prefill_seconds, 100 * answer.decode_seconds / TIMED))
    return pd.DataFrame(rows, columns=["variant", "repeat", "compress", "decode"]).query("repeat > 0")
