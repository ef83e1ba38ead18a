"""The chapter's rows: common items under the grid and under published methods, on every model of a family."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from kvrepro.chapters.synthesis import grid, kept, stored
from kvrepro.chapters.synthesis.settings import Settings
from kvrepro.engine.allowed import Size as Whole
from kvrepro.engine.allowed import ensure, ensure_all
from kvrepro.engine.condition import Condition, Generation, Prompt
from kvrepro.engine.policy import check, is_own
from kvrepro.errors import InputError
from kvrepro.experiment import data, models
from kvrepro.experiment.models import Loaded
from kvrepro.experiment.run import Answers, run
from kvrepro.item import Item

TASKS = {  # of the embedded world: what they stand for
    "needle_multikey": "one fact",
    "several": "several facts",
    "entries": "a long answer",
}
ITEMS = f"tinyworld:{','.join(TASKS)}"
BESIDE = {"quick": ("small-mha", "small-gqa-seed-0"), "full": tuple(models.embedded())}  # the model that is asked for


class Size(NamedTuple):
    """Items; cells of the grid on the first model, and on each of the others.

    The main effects have 21 columns. With 32 cells their shares of variance were far off (of small-mha with 48 items:
    8 to 15% for factors that explain 0 to 4% of 240 cells, and -45% for the rest); from 48 cells on they are not.
    """

    items: int
    cells: int
    others: int


SIZES = {"quick": Size(data.AtMost(6), 140, 48), "full": Size(data.AtMost(48), 240, 240)}


def size(profile: str, n_items: int | None = None, cells: int | None = None) -> Size:
    """The profile's size; `n_items` and `cells` set their numbers."""
    ensure((Whole, None), n_items=n_items, cells=cells)
    found = SIZES[profile]
    found = found if n_items is None else found._replace(items=n_items)
    return found if cells is None else found._replace(cells=cells, others=min(cells, found.others))


def family(model: str, named: Sequence[str] | None, profile: str) -> list[str]:
    """The models of a run, `model` first; None: beside an embedded one the profile's others, beside any other none."""
    ensure_all(list[str] | None, family=named)
    if named is None:
        named = [name for name in BESIDE[profile] if name in models.embedded()] if model in models.embedded() else []
    return list(dict.fromkeys([model, *named]))


def questions(loaded: Loaded, items: str, n_items: int, settings: Settings) -> list[Item]:
    """Items as in `data.load_fitting`; answers of more than `settings.answer_words` words are cut there, and with them
    the evidence, in proportion, since long answers of the embedded world follow the order of the prompt."""
    found = data.load_fitting(items, n_items, loaded.tokenizer, settings.tokens, settings.seed)
    return [_cut(loaded, item, settings) for item in found]


def _cut(loaded: Loaded, item: Item, settings: Settings) -> Item:
    """An item whose generation ends with its answer, cut or not; one that is not has room to say more."""
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
    """The item's prompt; what stands before its question, or all of it, in equal parts that a quota can count."""
    prompt = data.build_prompt(item, loaded.tokenizer, settings.tokens)
    end = min(prompt.spans.get("question", [len(prompt.ids)]))
    names = grid.part_names(settings)
    edges = [end * i // len(names) for i in range(len(names) + 1)]
    parts = {name: list(range(a, b)) for name, a, b in zip(names, edges[:-1], edges[1:], strict=True)}
    return replace(prompt, spans=prompt.spans | parts)


def kept_of(item: Item, prompt: Prompt, answer: Generation, block_size: int) -> dict[str, Any]:
    """Of who stayed of the compressed tokens: `held`, the share over heads and layers; `freed` and `freed_compacted`,
    shares of the blocks of `block_size` tokens that are free as they stand, and when the living are moved together
    (a slot is free when no head of any layer holds its token); `evidence_heads`, the share of the evidence's tokens
    that a head holds, on average, and `evidence_best`, the head that holds most."""
    keep = np.concatenate(answer.kept_sets or [])  # [layers * kv_heads, tokens]
    tokens = keep.shape[1]
    living, blocks = keep.any(0), -(-tokens // block_size)
    used = np.add.reduceat(living, np.arange(0, tokens, block_size)) > 0
    evidence = [at for at in prompt.spans.get("evidence", ()) if at < tokens]
    of_heads = keep[:, evidence].mean(1) if evidence else np.full(len(keep), math.nan)
    found = {"held": float(keep.mean()), "freed": 1 - int(used.sum()) / blocks}
    found["freed_compacted"] = 1 - -(-int(living.sum()) // block_size) / blocks
    return found | {"evidence_heads": float(of_heads.mean()), "evidence_best": float(of_heads.max())}


def planned(
    loaded: Loaded, prompts: Sequence[Prompt], cells: int, policies: Sequence[str], settings: Settings
) -> list[Condition]:
    """What is asked: the full cache, published methods, and so many cells of the grid.

    Left out are cells that look away from the question, where prompts do not mark one, and methods of the catalogue
    whose own window is more than a share of the shortest prompt; these are printed.
    """
    there = grid.cells_of(loaded.model, settings.kept)
    if any("question" not in prompt.spans for prompt in prompts):
        there = there[there.regime != "question unseen"]
    chosen = grid.design(there, cells, settings.seed)
    of_grid = [grid.condition(cell, settings) for cell in chosen.to_dict("records")]
    shortest = min(len(prompt.ids) for prompt in prompts)
    known = [c for c in grid.published(policies, settings) if _met(c, shortest)]
    return [Condition(), *known, *of_grid]


def _met(condition: Condition, tokens: int) -> bool:
    """Can a prompt of so many tokens meet it? A reader's own policy that it cannot raises InputError."""
    try:
        check(condition, tokens)
    except InputError as error:
        if is_own(condition.policy):
            raise
        print(f"{condition.label} is left out: {error}")
        return False
    return True


def answers(
    loaded: Loaded, items: Sequence[Item], cells: int, policies: Sequence[str], settings: Settings
) -> pd.DataFrame:
    """Rows of one model, as `stored.tidy` gives them; of a dry run those of its estimate."""
    prompts = [with_parts(loaded, item, settings) for item in items]
    asked = planned(loaded, prompts, cells, policies, settings)
    made, note = partial(with_parts, settings=settings), partial(kept_of, block_size=settings.block_size)
    most = max(item.new_tokens(settings.answer_words) for item in items)
    study = Answers("synthesis", "grid", items, asked, most, settings.tokens, made, note)
    rows = run(study, loaded, settings)
    return rows if settings.dry_run else stored.tidy(rows)


def of_family(
    first: Loaded, others: Sequence[str], items: str, size: Size, policies: Sequence[str], settings: Settings
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Rows of every model, and what `kept.of_items` says of it at the middle share. On others than the first, in the
    quick profile, of the published methods only `grid.RIVALS` run, and a reader's own."""
    middle = sorted(settings.kept)[len(settings.kept) // 2]
    few = [name for name in policies if name in grid.RIVALS or is_own(name)]
    rows, found = [], []
    for name in [None, *others]:
        loaded = first if name is None else models.load(name, first.device, settings.dtype)
        asked = questions(loaded, items, size.items, settings)
        mine = list(policies) if name is None or settings.profile == "full" else few
        rows.append(answers(loaded, asked, size.cells if name is None else size.others, mine, settings))
        found.append(kept.of_items(loaded, asked, middle, settings))
    return pd.concat(rows, ignore_index=True), pd.concat(found, ignore_index=True)


def loses_most(task: str, loss: float) -> str:
    """Where a condition loses most against the full cache, and how much, `a long answer (-0.80)`."""
    return f"{TASKS.get(task, task)} (-{loss:.2f})" if loss > 0.005 else "nothing here"
