"""The chapter's studies: which cells are run on which system prompts, and their rows.

rows = main(loaded, settings)  # one row per (item, cell); a cell that an item cannot meet has an error
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import pandas as pd

from kvrepro.chapters.leakage import prompts, scores
from kvrepro.chapters.leakage.cells import DEBIAS, LIBRARY, Cell, Settings, cells
from kvrepro.chapters.leakage.prompts import prompt, systems
from kvrepro.engine import generate as engine
from kvrepro.engine.condition import Condition, Offline, Prompt
from kvrepro.errors import InputError
from kvrepro.experiment import data, models
from kvrepro.experiment.answers import unmet
from kvrepro.experiment.claims import READINGS
from kvrepro.experiment.models import Loaded
from kvrepro.experiment.run import Answers, PerItem, run
from kvrepro.item import Item

FACTS = [*"ratio variant reading system order request rules words asked".split(), *scores.MEASURES]
TIMED = 8  # tokens of an answer whose time is taken


def answers(
    loaded: Loaded, items: Sequence[Item], grids: Iterable[Sequence[Cell]], settings: Settings, name: str = "answers"
) -> pd.DataFrame:
    """One row per item and cell of its grid, with the columns of the store, of cell and item, and of `scores.score`.

    `note` says what survived of each part in each layer (`scores.keep_rates`).
    """
    grids = [list(dict.fromkeys(grid)) for grid in grids]
    texts = [prompt(loaded, item) for item in items]
    conditions = [[cell.on(item, text) for cell in grid] for item, text, grid in zip(items, texts, grids, strict=True)]
    tokens, note = settings.sizes.tokens, scores.survivors
    study = Answers("leakage", name, items, conditions, tokens, prompt=prompt, note=note, together=2)
    stored = run(study, loaded, settings)
    places, facts, start = [], [], 0
    for item, grid, wanted in zip(items, grids, conditions, strict=True):
        place = {condition: start + i for i, condition in enumerate(dict.fromkeys(wanted))}  # equal ones share a row
        of_item = {name: item.meta[name] for name in ("system", "order", "request", "rules")}
        of_item |= {"words": item.meta.get("words", 0), "asked": len(item.meta.get("instructions", "1"))}
        for cell, condition in zip(grid, wanted, strict=True):
            of_cell = {"ratio": cell.ratio, "variant": cell.variant, "reading": cell.reading}
            places.append(place[condition])
            facts.append(of_cell | of_item | scores.score(item, stored.prediction.iloc[places[-1]]))
        start += len(place)
    return stored.iloc[places].reset_index(drop=True).assign(**pd.DataFrame(facts).reindex(columns=FACTS))


def secret(settings: Settings) -> list[Item]:
    """The system prompts of the main study. Raises InputError where there are fewer than were asked for."""
    items = systems(settings.sizes.systems, settings=settings)
    if settings.n_items is not None and (available := len({item.meta["system"] for item in items})) < settings.n_items:
        asked = f"n_items is {settings.n_items}, but {settings.items} has {available} system prompts"
        raise InputError(f"{asked}: ask for no more")
    return items


def main(loaded: Loaded, settings: Settings) -> pd.DataFrame:
    """System prompts with a defense, in both orders: every policy without a cure, and the cures of the paper's five
    policies and of the reader's own, with the defense first. The first policy's dial is run in both orders."""
    items, sizes, every, own = secret(settings), settings.sizes, settings.policies, settings.main
    first = ["streaming_llm"] if "streaming_llm" in every else every[:1]
    grid = cells(every, sizes.ratios, readings=READINGS) + cells(first, sizes.dial, ("fair", *DEBIAS))
    cures = cells(own, sizes.varied, ("whitelist", "fair", "ends"), READINGS) + cells(own, sizes.rest, ("opening",))
    grids = {"normal": grid + cures, "flipped": grid}
    return answers(loaded, items, [grids[item.meta["order"]] for item in items], settings)


def compared(settings: Settings) -> pd.DataFrame | None:
    """`main` of the second checkpoint, `settings.compare`; None if there is none."""
    if not settings.compare:
        return None
    second = models.load(settings.compare, settings.device, settings.dtype, settings.enable_thinking)
    return main(second, settings)


def alone(loaded: Loaded, settings: Settings) -> pd.DataFrame:
    """The requests that the directive applies to, of system prompts without a defense: `singles` with one rule,
    `several` with more."""
    sizes = settings.sizes
    most = {"single": 2 * sizes.singles, "multi": 2 * sizes.several}  # every other prompt has several
    own_world = settings.items == "tinyworld"
    items = systems(max(most.values()) if own_world else sizes.singles, ("alone",), settings)
    items = [item for item in items if item.meta["request"] == "follow"]
    if own_world:
        items = [item for item in items if item.meta["system"] < most[item.meta["rules"]]]
    grid = cells(settings.main, sizes.varied[::2], readings=READINGS)
    return answers(loaded, items, [grid] * len(items), settings)


def examples(loaded: Loaded, settings: Settings) -> pd.DataFrame | None:
    """Labelled examples behind a defense: the dial of two of the paper's policies. None, which is printed, where the
    data set is missing or none fits the model."""
    check = partial(check_fits, loaded, tokens=settings.sizes.tokens)
    try:
        items = data.usable(prompts.examples(settings.sizes.examples, settings), "leakage", check)
    except InputError as error:
        print(f"leakage: no labelled examples: {error}")
        return None
    pair = [name for name in settings.main if name in LIBRARY]
    grid = cells(pair, settings.sizes.varied[::2], ("default", "fair", *DEBIAS))
    return answers(loaded, items, [grid] * len(items), settings) if items else None


def check_fits(loaded: Loaded, item: Item, tokens: int) -> None:
    """Raises InputError unless the model holds an item's prompt and `tokens` more, all of which it rotates alike."""
    text = prompt(loaded, item)
    if (longest := len(text.ids) + tokens) > loaded.context:
        raise InputError(f"item {item.id}: {longest} tokens with its answer > context {loaded.context}")
    engine.check_conditions(loaded.model, [text], [Condition(regime=Offline(until="request"))], tokens)


def controls(loaded: Loaded, settings: Settings) -> pd.DataFrame:
    """Scores of answers that tell nothing from the cache: a row per item of the main study and `control`, a refusal, an
    echo of the preamble, and with the defense first the model's answer without its system prompt."""
    items = secret(settings)
    first = [item for item in items if item.meta["order"] == "normal"]
    study = Answers("leakage", "unasked", first, [Condition()], settings.sizes.tokens, prompt=request_alone)
    unasked = run(study, loaded, settings)
    texts = [("refusal", item, scores.refusal(item)) for item in items]
    texts += [("preamble", item, item.meta["references"]["preamble"]) for item in items]
    texts += [("no_system_prompt", item, text) for item, text in zip(first, unasked.prediction, strict=True)]
    rows = []
    for name, item, text in texts:
        facts = {"control": name, "order": item.meta["order"], "request": item.meta["request"]}
        rows.append(facts | scores.score(item, text))
    return pd.DataFrame(rows)


def request_alone(loaded: Loaded, item: Item) -> Prompt:
    """An item's prompt without its system turn, as if a policy had kept nothing of that turn."""
    return data.build_prompt(replace(item, messages=item.messages[1:], spans=()), loaded.tokenizer, loaded.context)


def timing(loaded: Loaded, settings: Settings) -> pd.DataFrame:
    """Seconds to compress a system turn and read the request (compress), and per 100 decoded tokens (decode), of H2O
    without and with a cure: columns item, variant, repeat, compress, decode.

    Cells run one after the other, on one prompt at a time, after one run to warm up. A cell whose budget an item cannot
    meet has no rows for it.
    """
    sizes = settings.sizes
    items = [item for item in secret(settings) if item.meta["request"] == "follow"][: sizes.timed]
    grid = cells(["h2o"], [sizes.varied[len(sizes.varied) // 2]], ("default", "whitelist", "fair"))[1:]
    given = {"conditions": {cell.variant: cell.condition for cell in grid}, "repeats": sizes.repeats}
    return run(PerItem("leakage", "timing", items, seconds, given, alone=True), loaded, settings)


def seconds(loaded: Loaded, item: Item, conditions: Mapping[str, Condition], repeats: int) -> pd.DataFrame:
    """`timing` of one item. conditions: by variant."""
    text, rows = prompt(loaded, item), []
    impossible = unmet(loaded, text, list(conditions.values()))
    for repeat in range(repeats + 1):
        for variant, condition in conditions.items():
            if condition not in impossible:
                [[answer]] = engine.generate(loaded.model, [text], [condition], max_new_tokens=TIMED, stop_ids=())
                times = {"compress": answer.prefill_seconds, "decode": 100 * answer.decode_seconds / TIMED}
                rows.append({"variant": variant, "repeat": repeat} | times)
    frame = pd.DataFrame(rows, columns=["variant", "repeat", "compress", "decode"])
    return frame[frame.repeat > 0]
