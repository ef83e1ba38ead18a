"""The chapter's studies: the main comparison, prompt lengths, attention at the boundaries, what is kept."""

import json
from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvrepro.chapters.protection import grid
from kvrepro.chapters.protection.settings import Settings
from kvrepro.engine import generate as engine
from kvrepro.engine.attention import watch_prompt
from kvrepro.engine.condition import Condition, Generation, Prompt
from kvrepro.engine.guard import protected_count
from kvrepro.engine.policy import check
from kvrepro.errors import InputError
from kvrepro.experiment import data, measure
from kvrepro.experiment.answers import prompt_limit
from kvrepro.experiment.models import Loaded
from kvrepro.experiment.run import Answers, PerItem, run
from kvrepro.item import Item

PAPER_TOKENS = 2048  # prompt and answer together, in the paper's harness
WORLD_TOKENS = 1900  # of a prompt of the embedded world
ASKED = ("several_2", "several_4")  # the world's tasks with short and with long questions
SHORT = 32  # most new tokens where the question varies: its answers are short
SUITS = {"longbench": "longbench:protection"}  # the paper asks LongBench's QA sets, in its own way


def paper_limit(loaded: Loaded, items: Sequence[Item], max_new_tokens: int) -> int:
    """Most tokens of a prompt: the paper's where there is a passage to cut, else what the model's context leaves."""
    room = prompt_limit(loaded, max_new_tokens)
    return min(room, PAPER_TOKENS - max_new_tokens) if any(item.context is not None for item in items) else room


def questions(loaded: Loaded, items: str, n_items: int, settings: Settings) -> list[Item]:
    """The chapter's items, as in `data.load_items`; of LongBench those that the paper's harness asks."""
    room, items = prompt_limit(loaded, settings.max_new_tokens), data.suited("protection", items, SUITS)
    found = data.load_fitting(items, n_items, loaded.tokenizer, room, settings.seed, WORLD_TOKENS)
    return data.not_too_long(found, items, loaded.tokenizer, paper_limit(loaded, found, settings.max_new_tokens))


def main(
    loaded: Loaded, items: Sequence[Item], conditions: Sequence[Condition], settings: Settings, name: str = "main"
) -> pd.DataFrame:
    """Rows of the main comparison, or of another study by its name, prompts as long as the paper's."""
    limit = paper_limit(loaded, items, settings.max_new_tokens)
    return run(Answers("protection", name, items, conditions, settings.max_new_tokens, limit), loaded, settings)


def of_length(loaded: Loaded, items: str, n_items: int, length: int, settings: Settings) -> list[Item]:
    """Items as in `data.load_items` whose prompts are `data.filling` so many tokens; none, which is printed, where no
    prompt does."""
    try:
        found = data.load_fitting(items, n_items, loaded.tokenizer, length, settings.seed)
        return data.filling(found, items, loaded.tokenizer, length)
    except InputError as error:
        print(f"protection: length {length} is left out: {error}")
        return []


def context(loaded: Loaded, items: str, n_items: int, reading: str, settings: Settings) -> pd.DataFrame:
    """Rows of `run` at several prompt lengths (tokens), with a column `length`; an eighth of the cache is kept at each.

    items, n_items: as in `data.load_items`; of each length those whose prompts fill it (`of_length`). Lengths that the
    model's context cannot hold, or that no prompt fills, are left out; where prompts fill none, that of the longest is
    asked. InputError if the context can hold none.
    """
    new, items = settings.max_new_tokens, SUITS.get(items, items)
    held = [length for length in settings.lengths if length + new <= loaded.context]
    if not held:
        raise InputError(f"no prompt of {list(settings.lengths)} + {new} new tokens fits {loaded.context} positions")
    asked = {length: of_length(loaded, items, n_items, length, settings) for length in held}
    if not any(asked.values()):
        room = loaded.context - new
        found = data.load_fitting(items, n_items, loaded.tokenizer, room, settings.seed)
        longest = max(len(data.build_prompt(item, loaded.tokenizer, room).ids) for item in found)
        print(f"protection: prompts of {items} fill none of {held} tokens: asked at {longest}, their longest")
        asked = {longest: of_length(loaded, items, n_items, longest, settings)}
    parts = []
    for length, here in asked.items():
        if here:
            limit = length if any(item.context is not None for item in here) else None
            conditions = grid.context(length, settings.protect_frac, reading)
            study = Answers("protection", f"context-{length}", here, conditions, new, limit)
            parts.append(run(study, loaded, settings).assign(length=length))
    return pd.concat(parts, ignore_index=True)


def question(loaded: Loaded, items: str, n_items: int, capacity: int, settings: Settings) -> pd.DataFrame:
    """Rows of `run` where the question's length and its place vary, with the columns `varied` and `guard` (tokens at
    the prompt's end), `question` (its tokens, the mean), `held` (share of them that is kept) and `length` (of prompts).

    "length": questions of the world for two and for four facts, against guards that hold less or more of them. Others
    ask what they ask. "place": prompts of several lengths; the decimal order of positions, which breaks LRU's ties in
    the authors' code, holds the end of a prompt of less than a thousand tokens, and loses the end of a longer one. A
    length that no prompt fills is left out.
    """
    world = items.partition(":")[0] == "tinyworld"
    asked = [f"tinyworld:{name}" for name in ASKED] if world else [SUITS.get(items, items)]
    usual = [("length", name, WORLD_TOKENS, grid.guards(capacity)) for name in asked]
    lengths = [length for length in settings.places if length + SHORT <= loaded.context]
    placed = [("place", asked[0], length, grid.places(capacity, settings.protect_frac)) for length in lengths]
    parts, new = [], min(settings.max_new_tokens, SHORT)
    room = prompt_limit(loaded, new)
    for i, (varied, name, tokens, conditions) in enumerate(usual + placed):
        if varied == "place":
            here = of_length(loaded, name, n_items, tokens, settings)
        else:
            here = data.load_fitting(name, n_items, loaded.tokenizer, room, settings.seed, tokens)
        if not here:
            continue
        limit = min(tokens, room) if any(item.context is not None for item in here) else None
        if limit is not None:
            here = data.not_too_long(here, name, loaded.tokenizer, limit)
        study = Answers("protection", f"question-{i}", here, conditions, new, limit, note=held_question)
        parts.append(run(study, loaded, settings).assign(varied=varied, length=tokens))
    rows = pd.concat(parts, ignore_index=True)
    notes = pd.DataFrame([json.loads(note) if isinstance(note, str) else {} for note in rows.note], index=rows.index)
    rows = rows.join(notes.reindex(columns=["question", "held"]))
    rows["question"] = rows.groupby(["varied", "task", "length"]).question.transform("mean").round(1)
    return rows.assign(guard=(rows.suffix * capacity).astype(int))


def held_question(item: Item, prompt: Prompt, answer: Generation) -> dict[str, float]:
    """`question`: its tokens; `held`: the share of them that some layer and head holds after the first reduction."""
    at = prompt.spans.get("question", [])
    return {"question": len(at), "held": measure.evidence_coverage(at, answer.kept_positions, len(prompt.ids))}


def spread(items: Sequence[Item], n: int) -> list[Item]:
    """n of the items, spread evenly, since those of a task stand together; all of them where they are no more."""
    n = min(n, len(items))
    return [items[i * len(items) // n] for i in range(n)]


def attention(loaded: Loaded, items: Sequence[Item], n_items: int, capacity: int, settings: Settings) -> pd.DataFrame:
    """`boundary_attention` of `n_items` of the items, spread evenly, with a column `item`.

    The prefix and the suffix are as long as the guards of that capacity, whose use is in question.
    """
    positions, limit = int(settings.protect_frac * capacity), paper_limit(loaded, items, settings.max_new_tokens)
    given = {"positions": positions, "limit": limit}
    return run(PerItem("protection", "attention", spread(items, n_items), boundary_attention, given), loaded, settings)


def boundary_attention(loaded: Loaded, item: Item, positions: int, limit: int) -> pd.DataFrame:
    """Of one item's prompt."""
    prompt = data.build_prompt(item, loaded.tokenizer, limit)
    return attention_by_region(loaded.model, prompt.ids, fraction=positions / len(prompt.ids))


def attention_by_region(model: PreTrainedModel, prompt: Sequence[int], fraction: float = 0.1) -> pd.DataFrame:
    """Where attention goes at the end of a prompt: a row per layer, query head and region.

    `mass` is the last token's attention, `uniform` the region's share of the tokens. Regions: sink (position 0), prefix
    and suffix (`fraction` of the prompt at either end, rounded up; the sink taken out), middle.
    """
    n = len(prompt)
    side = protected_count(fraction, n, "ceil")
    if not 0 < fraction < 0.5 or 2 * side >= n:
        raise InputError(f"fraction {fraction} of {n} tokens guards {side} per side: take less than half the prompt")
    seen: dict[int, Tensor] = {}

    def see(layer: int, p: Tensor, queries: slice) -> None:
        seen[layer] = p[0, :, :, -1].flatten(0, 1).cpu()  # of the prompt's last query, which comes last

    watch_prompt(model, prompt, see)
    last = torch.stack([seen[layer] for layer in sorted(seen)])  # [layers, heads, tokens]
    parts = []
    regions = {"sink": (0, 1), "prefix": (1, side), "middle": (side, n - side), "suffix": (n - side, n)}
    for region, (a, b) in regions.items():
        mass = last[..., a:b].sum(-1).numpy()  # [layers, heads]
        layer, head = np.indices(mass.shape)
        part = pd.DataFrame({"layer": layer.ravel(), "head": head.ravel(), "mass": mass.ravel()})
        parts.append(part.assign(region=region, uniform=(b - a) / n))
    return pd.concat(parts, ignore_index=True)


def retention(
    loaded: Loaded, item: Item, capacity: int, policies: Sequence[str], reading: str, settings: Settings
) -> pd.DataFrame:
    """Prompt positions that each policy keeps at its first reduction: columns policy, reading, protected, position.

    Of a policy whose heads choose for themselves, the positions that any of them keeps; none of one that protects more
    than the capacity. `attrs["tokens"]` is the prompt's length, `attrs["spans"]` the first and last position of each
    message's spans.
    """
    prompt = data.build_prompt(item, loaded.tokenizer, paper_limit(loaded, [item], settings.max_new_tokens))
    asked = grid.main([capacity], policies, settings.protect_frac, reading)[1:]
    conditions = [condition for condition in asked if _met(condition, len(prompt.ids))]
    [answers] = engine.generate(loaded.model, [prompt.ids], conditions, max_new_tokens=1, stop_ids=(), errors="return")
    rows = [
        {"policy": c.policy, "reading": c.reading, "protected": c.prefix > 0, "position": position}
        for c, answer in zip(conditions, answers, strict=True)
        if not isinstance(answer, Exception)  # which the main study counts
        for position in answer.kept_positions
    ]
    frame = pd.DataFrame(rows, columns=["policy", "reading", "protected", "position"])
    frame.attrs["tokens"] = len(prompt.ids)
    frame.attrs["spans"] = {name: (min(at), max(at)) for name, at in prompt.spans.items() if at}
    return frame


def _met(condition: Condition, tokens: int) -> bool:
    """Can a prompt of so many tokens meet it?"""
    try:
        check(condition, tokens)
    except InputError:
        return False
    return True
