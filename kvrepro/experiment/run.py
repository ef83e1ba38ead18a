"""One call per experiment: items x conditions -> results rows, stored as they arrive."""

import datetime
import json
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import pandas as pd
from tqdm import tqdm

from kvrepro.engine import generate as engine
from kvrepro.engine import policy
from kvrepro.engine.condition import Condition, Generation
from kvrepro.errors import InputError
from kvrepro.experiment import data, measure, models, store
from kvrepro.experiment.data import Prompt
from kvrepro.experiment.models import Loaded
from kvrepro.item import Item
from kvrepro.paths import ROOT

PAPER_TOKENS = 2048  # prompt and answer together, protection paper's harness


def run(
    chapter: str,
    loaded: Loaded,
    items: Sequence[Item],
    conditions: Sequence[Condition],
    *,
    name: str,
    max_new_tokens: int = 128,
    limit: int | None = None,
    results: str | Path = "data/results",
    profile: str = "quick",
    seed: int = 0,
    batch_rows: int = 64,
    progress: bool = True,
) -> pd.DataFrame:
    """A frame with one row per (item, condition), columns as in `kvrepro.experiment.store.SCHEMA`.

    Rows are written to `results`/`chapter`/`name`.parquet group by group (a relative `results` counts from the
    project's root); those already there with the same configuration, model, prompt and engine source are not computed
    again. An item that fails gives rows with `error` and null measures, and the run goes on. `limit`: see
    `prompt_limit`. `profile` and `seed` (of the items) are only noted. Raises InputError, before anything is
    computed, for whatever `check` finds.
    """
    started = time.perf_counter()
    conditions = list(dict.fromkeys(conditions))
    prompts = check(loaded, items, conditions, max_new_tokens=max_new_tokens, limit=limit)
    decisive = {
        "model": loaded.name,
        "model_hash": loaded.hash,
        "engine_hash": store.engine_hash(),
        "dtype": loaded.dtype,
        "device": loaded.device,
        "max_new_tokens": max_new_tokens,
    }
    noted = {"chapter": chapter, "name": name, "profile": profile, "seed": seed}
    heads = []
    for item, prompt in zip(items, prompts, strict=True):
        most = {"limit": prompt_limit(loaded, [item], max_new_tokens, limit)}
        heads.append(_heads(item, prompt, conditions, decisive | most, noted))
    keys = [row["key"] for rows in heads for row in rows]
    stop = models.stop_ids(loaded)

    with store.Store(ROOT / results, chapter, name) as table:
        todo = set(table.missing(keys))
        with tqdm(total=len(todo), desc=f"{chapter}/{name}", unit="row", disable=not progress) as bar:
            for members, columns in _groups(heads, todo, batch_rows):
                asked = [conditions[c] for c in columns]
                for i, answers in _generate(loaded, prompts, members, asked, max_new_tokens, stop, batch_rows):
                    rows = [
                        _row(loaded, items[i], heads[i][c], answer) for c, answer in zip(columns, answers, strict=True)
                    ]
                    table.add(rows)
                    bar.update(len(rows))
        frame = table.frame()
    frame = frame.set_index("key", drop=False).loc[keys].reset_index(drop=True).assign(profile=profile, seed=seed)
    failed = int(frame["error"].notna().sum())
    seconds = time.perf_counter() - started
    print(f"{chapter}/{name}: {len(keys)} rows, {len(todo)} computed now, {failed} failed, {seconds:.0f} s")
    asked = [c for _ in items for c in conditions]
    evicted = frame.evicted.groupby([asked.index(c) for c in asked]).max()  # of each condition, over the items
    idle = [asked[j] for j in evicted.index[evicted == 0] if asked[j].policy != "full" and asked[j].share != 1]
    if idle:
        print(f"{len(idle)} conditions evicted nothing from any item, {idle[0].label} for one: budgets never met")
    return frame


def check(
    loaded: Loaded,
    items: Sequence[Item],
    conditions: Sequence[Condition],
    *,
    max_new_tokens: int = 128,
    limit: int | None = None,
) -> list[Prompt]:
    """The items' prompts, if every item and condition can be met; raises InputError otherwise. Computes nothing."""
    if not items or not conditions:
        raise InputError(f"{len(items)} items x {len(conditions)} conditions: give at least one of each")
    if max_new_tokens < 1:
        raise InputError(f"max_new_tokens is {max_new_tokens}: ask for at least 1")
    identities = {item.id for item in items}
    if len(identities) < len(items):
        raise InputError(f"{len(items)} items share {len(identities)} ids: give every item its own")
    for condition in conditions:
        policy.check(condition)
    prompts = [
        data.build_prompt(item, loaded.tokenizer, prompt_limit(loaded, [item], max_new_tokens, limit)) for item in items
    ]
    shortest = min(len(prompt.ids) for prompt in prompts)
    for condition in conditions:
        if condition.regime == "harness":
            policy.check(condition, shortest)
    engine.check_conditions(loaded.model, prompts, [c for c in conditions if c.regime != "harness"])
    return prompts


def prompt_limit(loaded: Loaded, items: Sequence[Item], max_new_tokens: int, limit: int | None = None) -> int:
    """Most tokens of a prompt: `limit`, else what the model's context leaves, and no more than the paper's
    2048 - max_new_tokens for items with a passage to cut."""
    room = loaded.context - max_new_tokens
    if room < 1 or (limit is not None and limit > room):
        wanted = f"limit {limit} + {max_new_tokens}" if limit is not None else f"{max_new_tokens}"
        raise InputError(f"{wanted} new tokens > context {loaded.context} of {loaded.name}: lower them")
    if limit is not None:
        return limit
    return min(room, PAPER_TOKENS - max_new_tokens) if any(item.context is not None for item in items) else room


def _groups(heads: list[list[dict]], todo: set[str], batch_rows: int) -> Iterator[tuple[list[int], tuple[int, ...]]]:
    """(items, conditions) to compute together and then store: neighbouring items that miss the same conditions.

    Four batches' worth, because the engine batches rows of like shape only, about four shapes to a chapter.
    """
    group: list[int] = []
    columns: tuple[int, ...] = ()
    for i, rows in enumerate(heads):
        missing = tuple(c for c, row in enumerate(rows) if row["key"] in todo)
        if group and (missing != columns or (len(group) + 1) * len(columns) > 4 * batch_rows):
            yield group, columns
            group = []
        if missing:
            group, columns = [*group, i], missing
    if group:
        yield group, columns


def _generate(
    loaded: Loaded,
    prompts: Sequence[Prompt],
    members: Sequence[int],
    conditions: Sequence[Condition],
    max_new_tokens: int,
    stop: Collection[int],
    batch_rows: int,
) -> Iterator[tuple[int, Sequence[Generation | Exception]]]:
    """(item, its generations or the exception that it raised); when a group fails, its items are tried one by one."""

    asked = [prompts[i] for i in members]
    repeat = loaded.tokenizer.encode("Repeat the previous context: ", add_special_tokens=False)
    try:
        found = engine.generate(
            loaded.model,
            asked,
            conditions,
            max_new_tokens=max_new_tokens,
            stop_ids=stop,
            batch_rows=batch_rows,
            repeat=repeat,
        )
    except InputError:  # bad input that only the engine can see: no item would fare better
        raise
    except Exception as error:  # whatever an item raises becomes its rows' error
        if len(members) == 1:
            yield members[0], [error] * len(conditions)
        else:
            for i in members:
                yield from _generate(loaded, prompts, [i], conditions, max_new_tokens, stop, batch_rows)
    else:
        yield from zip(members, found, strict=True)


def _heads(item: Item, prompt: Prompt, conditions: Sequence[Condition], decisive: dict, noted: dict) -> list[dict]:
    """What is known of an item's rows before they are computed; `key` hashes all that decides the rest."""
    decisive = decisive | {"item": item.id, "data_hash": store.digest(prompt.ids, _references(item))}
    noted = noted | {"task": item.task, "answer": item.answer, "prompt_tokens": len(prompt.ids)}
    heads = []
    for condition in conditions:
        settings = asdict(condition) | {"switches": json.dumps(dict(condition.switches), sort_keys=True)}
        settings |= {name: json.dumps(getattr(condition, name)) for name in ("whitelist", "spans")}
        own = {"policy_source": source} if (source := policy.source_of(condition)) else {}
        heads.append(settings | decisive | noted | {"key": store.digest(settings | decisive | own)})
    return heads


def _references(item: Item) -> list[str]:
    return item.meta.get("answers", [item.answer])


def _row(loaded: Loaded, item: Item, head: dict, answer: Generation | Exception) -> dict:
    import torch
    import transformers

    row = head | {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    if isinstance(answer, Exception):
        return row | {"error": f"{type(answer).__name__}: {answer}".splitlines()[0]}
    prediction = loaded.tokenizer.decode(answer.tokens, skip_special_tokens=True).strip()
    return row | {
        "prediction": prediction,
        **measure.all_measures(prediction, _references(item)),
        "n_generated": len(answer.tokens),
        "kept": [round(count) for count in answer.kept],
        "kept_mean": sum(answer.kept) / len(answer.kept),
        "kept_hash": answer.kept_positions_hash,
        "evicted": answer.evicted,
        "policy_calls": answer.policy_calls,
        "pages": answer.pages,
        "bytes_held": answer.bytes_held,
        "bytes_state": answer.bytes_state,
        "bytes_full": answer.bytes_full,
        "peak_bytes": answer.peak_bytes,
        "prefill_seconds": answer.prefill_seconds,
        "decode_seconds": answer.decode_seconds,
        "backend": answer.backend,
    }
