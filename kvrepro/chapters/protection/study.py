"""Studies of a chapter beside its main run: prompt lengths, attention at the boundaries, what is kept."""

from collections.abc import Sequence
from typing import Any

import pandas as pd

from kvrepro.chapters.protection import grid
from kvrepro.engine import generate as engine
from kvrepro.errors import InputError
from kvrepro.experiment import data, stats
from kvrepro.experiment.models import Loaded
from kvrepro.experiment.run import prompt_limit, run
from kvrepro.item import Item


def context(
    chapter: str,
    loaded: Loaded,
    items: str,
    n_items: int,
    lengths: Sequence[int],
    *,
    protect_frac: float = 0.10,
    reading: str = "both",
    max_new_tokens: int = 128,
    seed: int = 0,
    **settings: Any,
) -> pd.DataFrame:
    """Rows of `run` at several prompt lengths (tokens), with a column `length`; an eighth of the cache is kept at each.

    items, n_items, seed: as in `data.load_items`; a passage that is longer than the length is cut to it. Lengths that
    the model's context cannot hold are left out; if none is left, InputError. `settings` go to `run`.
    """
    held = [length for length in lengths if length + max_new_tokens <= loaded.context]
    if not held:
        raise InputError(
            f"no prompt length of {list(lengths)} + {max_new_tokens} new tokens fits {loaded.context} positions"
        )
    parts = []
    for length in held:
        here = data.load_items(items, n_items, seed=seed, tokens=length)
        limit = length if any(item.context is not None for item in here) else None
        conditions = grid.context(length, protect_frac, reading)
        given: dict[str, Any] = {"name": f"context-{length}", "limit": limit, "seed": seed} | settings
        rows = run(chapter, loaded, here, conditions, max_new_tokens=max_new_tokens, **given)
        parts.append(rows.assign(length=length))
    return pd.concat(parts, ignore_index=True)


def attention(
    loaded: Loaded, items: Sequence[Item], n_items: int, positions: int, max_new_tokens: int = 128
) -> pd.DataFrame:
    """`engine.boundary_attention` of `n_items` of the items, spread evenly, with a column `item`.

    The prefix and the suffix are `positions` long, as long as the guards whose use is in question.
    """
    parts = []
    for item in items[:: max(1, len(items) // n_items)][:n_items]:
        prompt = data.build_prompt(item, loaded.tokenizer, prompt_limit(loaded, [item], max_new_tokens))
        found = engine.boundary_attention(loaded.model, prompt.ids, fraction=positions / len(prompt.ids))
        parts.append(found.assign(item=item.id))
    return pd.concat(parts, ignore_index=True)


def retention(
    loaded: Loaded,
    item: Item,
    capacity: int,
    policies: Sequence[str],
    *,
    protect_frac: float = 0.10,
    reading: str = "both",
    max_new_tokens: int = 128,
) -> pd.DataFrame:
    """Prompt positions that each policy keeps at its first reduction: columns policy, reading, protected, position.

    `attrs["tokens"]` is the prompt's length, `attrs["spans"]` the first and last position of each message's spans.
    """
    prompt = data.build_prompt(item, loaded.tokenizer, prompt_limit(loaded, [item], max_new_tokens))
    conditions = grid.main([capacity], policies, protect_frac, reading)[1:]
    [answers] = engine.generate(loaded.model, [prompt.ids], conditions, max_new_tokens=1, stop_ids=())
    rows = [
        {"policy": c.policy, "reading": c.reading, "protected": c.prefix > 0, "position": position}
        for c, answer in zip(conditions, answers, strict=True)
        for position in answer.kept_positions
    ]
    frame = pd.DataFrame(rows)
    frame.attrs["tokens"] = len(prompt.ids)
    frame.attrs["spans"] = {name: (min(at), max(at)) for name, at in prompt.spans.items() if at}
    return frame


def beside(rows: pd.DataFrame, policies: Sequence[str], measure: str = "token_f1") -> pd.DataFrame:
    """Mean of `measure` per policy with its 95% interval over items, and the paired difference to the second policy."""
    wide = rows[rows.policy.isin(policies)].pivot_table(index="item", columns="policy", values=measure)
    table = {}
    for name in policies:
        pair = wide[[name]].set_axis(["a"], axis=1).assign(b=wide[policies[1]])
        gap = stats.contrast(pair, "difference", bounds=stats.UNIT)
        table[name] = {
            measure: str(stats.interval(wide[name], bounds=stats.UNIT)),
            f"minus {policies[1]}": "-" if name == policies[1] else str(gap),
            "tokens kept": round(float(rows[rows.policy == name].kept_mean.mean())),
        }
    return pd.DataFrame(table).T.rename_axis("policy")
