"""The chapter's rows: common items under the grid and under published methods, on every model of a family."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from kvrepro.chapters.synthesis import grid, kept
from kvrepro.chapters.synthesis.settings import Settings
from kvrepro.engine.condition import Condition, Generation, Prompt
from kvrepro.engine.facts import ModelFacts
from kvrepro.engine.policy import check, is_own
from kvrepro.errors import InputError
from kvrepro.experiment import data, measure, models
from kvrepro.experiment.answers import able
from kvrepro.experiment.models import Loaded
from kvrepro.experiment.run import Answers, run
from kvrepro.item import Item

TASKS = {  # of the embedded world, and what each stands for
    "needle_multikey": "one fact",
    "several": "several facts",
    "entries": "a long answer",
}
ITEMS = f"tinyworld:{','.join(TASKS)}"
BESIDE = {"quick": ("small-mha", "small-gqa-seed-0"), "full": tuple(models.embedded())}  # other models of the run


class Size(NamedTuple):
    """Items; cells of the grid on the first model, and on each of the others.

    The main effects have 21 columns. With 32 cells their shares of variance are far off (small-mha, 48 items: 8 to 15%
    for factors that explain 0 to 4% with 240 cells, and -45% for the rest); from 48 cells on they are not.
    """

    items: int
    cells: int
    others: int


def size(profile: str, n_items: int | None = None, cells: int | None = None) -> Size:
    """The profile's size, with `n_items` and `cells` in place of its numbers where they are given."""
    most, first, others = {"quick": (6, 140, 48), "full": (48, 240, 240)}[profile]
    first = first if cells is None else cells
    return Size(data.AtMost(most) if n_items is None else n_items, first, min(first, others))


def family(model: str, named: Sequence[str] | None, profile: str) -> list[str]:
    """The models of a run: `model`, then those `named`. None: after an embedded model the profile's others, after any
    other model none."""
    if named is None:
        named = [name for name in BESIDE[profile] if name in models.embedded()] if model in models.embedded() else []
    return list(dict.fromkeys([model, *named]))


def questions(loaded: Loaded, items: str, n_items: int, settings: Settings) -> list[Item]:
    """Items as in `data.load_fitting`, with answers cut to `settings.answer_words` words and evidence in proportion:
    long answers of the embedded world follow the order of the prompt. Prompts that are too short for a cell of the grid
    are left out."""
    fitting = data.load_fitting(items, n_items, loaded.tokenizer, settings.tokens, settings.seed)
    cut = [_cut(loaded, item, settings) for item in fitting]
    smallest = _cells(loaded, [with_parts(loaded, item, settings) for item in cut], [min(settings.kept)])
    cells = smallest.drop_duplicates(["scorer", "guard", "regime", "quota"])  # no other factor asks for more tokens
    every = [grid.condition(cell, settings) for cell in cells.to_dict("records")]
    return able(_study(cut, [*every, *kept.conditions(middle(settings))], settings), loaded)


def _cells(loaded: Loaded, prompts: Sequence[Prompt], shares: Sequence[float]) -> pd.DataFrame:
    """The grid's cells for a model and its prompts at these shares."""
    facts, asks = ModelFacts.of(loaded.model), all("question" in prompt.spans for prompt in prompts)
    return grid.cells(shares, kv_heads=max(facts.kv_heads.values()), slides=bool(facts.sliding), asks=asks)


def middle(settings: Settings) -> float:
    """The share at which the heads' kept tokens are looked at."""
    return sorted(settings.kept)[len(settings.kept) // 2]


def _cut(loaded: Loaded, item: Item, settings: Settings) -> Item:
    """The item with its answer cut if it is long, so that generation ends there; a short answer leaves generation room
    for more tokens."""
    words, most = item.answer.split(), settings.answer_words
    answer = " ".join(words[:most])
    tokens = len(loaded.tokenizer.encode(answer, add_special_tokens=False))
    if len(words) <= most or "metric" in item.meta or "answers" in item.meta:
        more = {"max_new_tokens": item.new_tokens(tokens + settings.interval)}
        return replace(item, meta=item.meta | more)
    evidence = [span for span in item.spans if span.name == "evidence"]
    needed = evidence[: math.ceil(len(evidence) * most / len(words))]
    spans = tuple(span for span in item.spans if span.name != "evidence" or span in needed)
    return replace(item, answer=answer, spans=spans, meta=item.meta | {"max_new_tokens": tokens})


def with_parts(loaded: Loaded, item: Item, settings: Settings) -> Prompt:
    """The item's prompt. The text before its question (all text without one) has equal parts, which a quota counts."""
    prompt = data.build_prompt(item, loaded.tokenizer, settings.tokens)
    end = min(prompt.spans.get("question", [len(prompt.ids)]))
    names = grid.part_names(settings)
    edges = [end * i // len(names) for i in range(len(names) + 1)]
    parts = {name: list(range(a, b)) for name, a, b in zip(names, edges[:-1], edges[1:], strict=True)}
    return replace(prompt, spans=prompt.spans | parts)


def kept_of(item: Item, prompt: Prompt, answer: Generation, block_size: int) -> dict[str, Any]:
    """Measures of the tokens that are kept: `held`, their share over heads and layers; `freed` and `freed_compacted`,
    the shares of blocks of `block_size` tokens that are free as they are, and after compaction (a slot is free when no
    head of any layer holds its token); `evidence_heads`, the share of the evidence's tokens that a head holds on
    average."""
    keep = np.concatenate(answer.kept_sets or [])  # [layers * kv_heads, tokens]
    tokens = keep.shape[1]
    living, blocks = keep.any(0), -(-tokens // block_size)
    used = np.add.reduceat(living, np.arange(0, tokens, block_size)) > 0
    evidence = [at for at in prompt.spans.get("evidence", ()) if at < tokens]
    return {
        "held": float(keep.mean()),
        "freed": 1 - int(used.sum()) / blocks,
        "freed_compacted": 1 - -(-int(living.sum()) // block_size) / blocks,
        "evidence_heads": float(keep[:, evidence].mean()) if evidence else math.nan,
    }


def planned(
    loaded: Loaded, prompts: Sequence[Prompt], cells: int, policies: Sequence[str], settings: Settings
) -> list[Condition]:
    """The conditions of a run: the full cache, published methods, and `cells` cells of the grid.

    Methods of the catalogue whose window is larger than their share of the shortest prompt are left out, and a printed
    line says so; a reader's own policy raises InputError instead.
    """
    chosen = grid.design(_cells(loaded, prompts, settings.kept), cells, settings.seed)
    shortest, methods = min(len(prompt.ids) for prompt in prompts), []
    for condition in grid.published(policies, settings):
        try:
            check(condition, shortest)
            methods.append(condition)
        except InputError as error:
            if is_own(condition.policy):
                raise
            print(f"{condition.label} is left out: {error}")
    return [Condition(), *methods, *(grid.condition(cell, settings) for cell in chosen.to_dict("records"))]


def answers(
    loaded: Loaded, items: Sequence[Item], cells: int, policies: Sequence[str], settings: Settings
) -> pd.DataFrame:
    """Rows of one model, as `tidy` gives them."""
    prompts = [with_parts(loaded, item, settings) for item in items]
    conditions = planned(loaded, prompts, cells, policies, settings)
    return tidy(run(_study(items, conditions, settings), loaded, settings))


def tidy(rows: pd.DataFrame) -> pd.DataFrame:
    """The runner's rows with their `grid.levels`, `kept`, `kind` ("full", "published", "grid"), `method`, `score`, and
    what `kept_of` says of the kept set."""
    rows = rows.reset_index(drop=True)
    levels = grid.levels(rows)
    kind = rows.policy.where(rows.policy == "full", "published").mask(levels.scorer.notna(), "grid")
    shown = rows[["model", "item", "task", "prediction", "rest_f1", "evidence_at"]]
    shown = shown.assign(kind=kind, kept=rows.share, method=rows.policy.where(kind == "published"))
    notes = [json.loads(note) if isinstance(note, str) else {} for note in rows.note]  # {}: it failed
    return pd.concat([shown.assign(score=measure.scores(rows)), levels, pd.DataFrame(notes)], axis=1)


def _study(items: Sequence[Item], conditions: Sequence[Condition], settings: Settings) -> Answers:
    prompt_of, note = partial(with_parts, settings=settings), partial(kept_of, block_size=settings.block_size)
    most = max(item.new_tokens(settings.answer_words) for item in items)
    return Answers("synthesis", "grid", items, conditions, most, settings.tokens, prompt_of, note)


def of_family(
    first: Loaded, others: Sequence[str], items: str, size: Size, policies: Sequence[str], settings: Settings
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Rows of every model, and the tables of `kept.of_items` at the middle share. In the quick profile the models after
    the first run fewer policies: `grid.RIVALS` and a reader's own."""
    few = [name for name in policies if name in grid.RIVALS or is_own(name)]
    rows, of_heads = [], []
    for name in [None, *others]:
        loaded = first if name is None else models.load(name, first.device, settings.dtype, settings.enable_thinking)
        chosen = questions(loaded, items, size.items, settings)
        model_policies = list(policies) if name is None or settings.profile == "full" else few
        rows.append(answers(loaded, chosen, size.cells if name is None else size.others, model_policies, settings))
        of_heads.append(kept.of_items(loaded, chosen, middle(settings), settings))
    return pd.concat(rows, ignore_index=True), pd.concat(of_heads, ignore_index=True)
