"""The chapter's studies: the main comparison, prompt lengths, attention at the boundaries, what is kept."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from kvrepro.chapters.protection import grid
from kvrepro.chapters.protection.settings import Settings
from kvrepro.engine import generate as engine
from kvrepro.engine.attention import watch_prompt
from kvrepro.engine.condition import Condition
from kvrepro.engine.facts import ModelFacts
from kvrepro.engine.guard import protected_count
from kvrepro.errors import InputError
from kvrepro.experiment import data
from kvrepro.experiment.answers import able, met_by, prompt_limit
from kvrepro.experiment.models import Loaded
from kvrepro.experiment.run import Answers, PerItem, run
from kvrepro.item import Item

PAPER_TOKENS = 2048  # prompt and answer together, in the paper's harness
WORLD_TOKENS = 1900  # of a prompt of the embedded world
SUITS = {"longbench": "longbench:protection"}  # LongBench's QA sets, with the paper's own prompts


def paper_limit(loaded: Loaded, items: Sequence[Item], max_new_tokens: int) -> int:
    """Most tokens of a prompt: the paper's limit if an item has a passage to cut, else what the model's context
    leaves."""
    room = prompt_limit(loaded, max_new_tokens)
    return min(room, PAPER_TOKENS - max_new_tokens) if any(item.context is not None for item in items) else room


def questions(
    loaded: Loaded, items: str, n_items: int, settings: Settings, conditions: Sequence[Condition] = (Condition(),)
) -> list[Item]:
    """The chapter's items, as in `data.load_items`, that can meet the conditions; of LongBench those that the paper's
    harness asks. Raises InputError if the model's context can hold none of the lengths of `context`, which is computed
    later."""
    possible_lengths(loaded, settings)
    room, items = prompt_limit(loaded, settings.max_new_tokens), data.suited("protection", items, SUITS)
    fitting = data.load_fitting(items, n_items, loaded.tokenizer, room, settings.seed, WORLD_TOKENS)
    limit = paper_limit(loaded, fitting, settings.max_new_tokens)
    fitting = data.not_too_long(fitting, items, loaded.tokenizer, limit)
    return able(_comparison(loaded, fitting, conditions, settings, "main"), loaded)


def possible_lengths(loaded: Loaded, settings: Settings) -> list[int]:
    """The prompt lengths, in tokens, that the model's context can hold. Raises InputError if it can hold none."""
    new, room = settings.max_new_tokens, loaded.context
    if possible := [length for length in settings.lengths if length + new <= room]:
        return possible
    problem = f"lengths {list(settings.lengths)}: with {new} new tokens none fits {room} positions"
    raise InputError(f"{problem}, give shorter ones")


def main(
    loaded: Loaded, items: Sequence[Item], conditions: Sequence[Condition], settings: Settings, name: str = "main"
) -> pd.DataFrame:
    """Rows of the main comparison, or of another study by its name; prompts are at most as long as the paper's."""
    return run(_comparison(loaded, items, conditions, settings, name), loaded, settings)


def _comparison(
    loaded: Loaded, items: Sequence[Item], conditions: Sequence[Condition], settings: Settings, name: str
) -> Answers:
    limit = paper_limit(loaded, items, settings.max_new_tokens)
    return Answers("protection", name, items, conditions, settings.max_new_tokens, limit)


def of_length(loaded: Loaded, items: str, n_items: int, length: int, settings: Settings) -> list[Item]:
    """Items as in `data.load_items` whose prompts fill `length` tokens (`data.filling`). Where no prompt does, the list
    is empty, and a printed line says so."""
    try:
        fitting = data.load_fitting(items, n_items, loaded.tokenizer, length, settings.seed)
        return data.filling(fitting, items, loaded.tokenizer, length)
    except InputError as error:
        print(f"protection: length {length} is left out: {error}")
        return []


def context(loaded: Loaded, items: str, n_items: int, reading: str, settings: Settings) -> pd.DataFrame:
    """Rows of `run` at several prompt lengths (tokens), with a column `length`; an eighth of the cache is kept at each.

    items, n_items: as in `data.load_items`; at each length those whose prompts fill it (`of_length`). Lengths that the
    model's context cannot hold, or that no prompt fills, are left out; if prompts fill none, the longest prompt's
    length is used. Raises InputError if the context can hold no length.
    """
    new, items = settings.max_new_tokens, SUITS.get(items, items)
    possible = possible_lengths(loaded, settings)
    by_length = {length: of_length(loaded, items, n_items, length, settings) for length in possible}
    if not any(by_length.values()):
        room = loaded.context - new
        fitting = data.load_fitting(items, n_items, loaded.tokenizer, room, settings.seed)
        longest = max(len(data.build_prompt(item, loaded.tokenizer, room).ids) for item in fitting)
        print(f"protection: prompts of {items} fill none of {possible} tokens: asked at {longest}, their longest")
        by_length = {longest: of_length(loaded, items, n_items, longest, settings)}
    parts = []
    for length, filling in by_length.items():
        if filling:
            limit = length if any(item.context is not None for item in filling) else None
            conditions = grid.context(length, settings.protect_frac, reading)
            study = Answers("protection", f"context-{length}", filling, conditions, new, limit)
            parts.append(run(study, loaded, settings).assign(length=length))
    return pd.concat(parts, ignore_index=True)


def spread(items: Sequence[Item], n: int) -> list[Item]:
    """n of the items at even distances, since items of one task stand together; all of them where there are no more."""
    n = min(n, len(items))
    return [items[i * len(items) // n] for i in range(n)]


def attention(loaded: Loaded, items: Sequence[Item], n_items: int, capacity: int, settings: Settings) -> pd.DataFrame:
    """`attention_by_region` of `n_items` of the items, spread evenly, with a column `item`.

    The prefix and the suffix are as long as the guards at that capacity: do guarded tokens get more attention?
    """
    side = protected_count(settings.protect_frac, capacity)
    arguments = {"side": side, "limit": paper_limit(loaded, items, settings.max_new_tokens)}
    job = PerItem("protection", "attention", spread(items, n_items), attention_by_region, arguments)
    return run(job, loaded, settings)


def attention_by_region(loaded: Loaded, item: Item, side: int, limit: int) -> pd.DataFrame:
    """Where the tokens of an item's prompt attend: a row per layer, query head and region.

    `mass` is the attention that the region gets, the mean over all queries, and `uniform` what it would get if each
    query attended evenly to the tokens that it sees. Regions: sink (position 0), prefix and suffix (`side` tokens at
    either end; the sink taken out), middle. Raises InputError for a prompt without a middle.
    """
    ids = data.build_prompt(item, loaded.tokenizer, limit).ids
    n = len(ids)
    if 2 * side >= n:
        raise InputError(f"{side} tokens at either end leave no middle of {n}: lower the capacity or protect_frac")
    regions = {"sink": (0, 1), "prefix": (1, side), "middle": (side, n - side), "suffix": (n - side, n)}
    masses: dict[int, Tensor] = {}

    def see(layer: int, p: Tensor, queries: slice) -> None:
        heads = p[0].flatten(0, 1).sum(1)  # [heads, tokens]: of this block of queries
        part = torch.stack([heads[:, a:b].sum(-1) for a, b in regions.values()]).cpu() / n
        masses[layer] = masses[layer] + part if layer in masses else part

    watch_prompt(loaded.model, ids, see)
    sliding = ModelFacts.of(loaded.model).sliding
    newest = np.arange(n)  # the last position that each query sees, its own
    parts = []
    for layer, of_layer in sorted(masses.items()):
        oldest = np.maximum(newest - sliding.get(layer, n) + 1, 0)
        for (region, (a, b)), mass in zip(regions.items(), of_layer.numpy(), strict=True):
            visible = np.clip(np.minimum(newest + 1, b) - np.maximum(oldest, a), 0, None)
            even = (visible / (newest + 1 - oldest)).mean()
            part = pd.DataFrame({"layer": layer, "head": range(len(mass)), "mass": mass})
            parts.append(part.assign(region=region, uniform=even))
    return pd.concat(parts, ignore_index=True)


def retention(
    loaded: Loaded, item: Item, capacities: Sequence[int], policies: Sequence[str], reading: str, settings: Settings
) -> pd.DataFrame:
    """Prompt positions that each policy keeps at its first reduction: columns policy, reading, capacity, protected,
    position.

    Where heads choose for themselves, positions that any head keeps count as kept. A policy that protects more tokens
    than a capacity has no rows there. `attrs["tokens"]` is the prompt's length, `attrs["spans"]` the first and last
    position of each of its spans.
    """
    prompt = data.build_prompt(item, loaded.tokenizer, paper_limit(loaded, [item], settings.max_new_tokens))
    conditions = grid.main(capacities, policies, settings.protect_frac, reading)[1:]
    conditions = met_by(loaded, prompt, conditions)
    [answers] = engine.generate(loaded.model, [prompt.ids], conditions, max_new_tokens=1, stop_ids=(), errors="return")
    columns = ["policy", "reading", "capacity", "protected", "position"]
    rows = [
        (c.policy, c.reading, c.budget, c.prefix > 0, position)
        for c, answer in zip(conditions, answers, strict=True)
        if not isinstance(answer, Exception)  # the main study counts failures
        for position in answer.kept_positions
    ]
    frame = pd.DataFrame(rows, columns=columns)
    frame.attrs["tokens"] = len(prompt.ids)
    frame.attrs["spans"] = {name: (min(at), max(at)) for name, at in prompt.spans.items() if at}
    return frame
