"""The chapter's studies: the main comparison, prompt lengths, attention at the boundaries, what is kept; published
methods with guards, a single reduction; and those of the full profile, which take minutes even on the embedded model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from kvrepro.chapters.protection import credit as estimator
from kvrepro.chapters.protection import grid
from kvrepro.chapters.protection.settings import Settings
from kvrepro.chat import answer_of
from kvrepro.engine import generate as engine
from kvrepro.engine.allocate import protected_count
from kvrepro.engine.attention import watch_prompt
from kvrepro.engine.condition import Condition, DecodeCap, Prefill, SharedCap
from kvrepro.engine.facts import ModelFacts
from kvrepro.engine.hf import evicting
from kvrepro.errors import InputError
from kvrepro.experiment import data, measure, models
from kvrepro.experiment.answers import able, prompt_limit, unmet
from kvrepro.experiment.models import Loaded
from kvrepro.experiment.run import Answers, PerItem, run
from kvrepro.item import Item

PAPER_TOKENS = 2048  # prompt and answer together, in the paper's harness
WORLD_TOKENS = 1900  # of a prompt of the embedded world
SUITS = {"longbench": "longbench:protection"}  # LongBench's QA sets, with the paper's own prompts
REAL = ("snapkv", "h2o_online", "ada_kv")  # as published, layer by layer, each with its own window
ONCE = "at the prompt's end"
NATIVE = "kvrepro/chapters/protection/policies.py:ADA_KV_NATIVE"
NEEDLES = "ruler:niah_single_1"  # noise around one sentence, which needs no download
NEEDLE_TOKENS, NEEDLE_SHARE, N_NEEDLES = 65_536, 16, 60  # the paper's prompts, 1 / 16 of the cache, its items
TEMPERATURE, SAMPLES = 0.7, 3  # the paper samples with three seeds
N_SLOW = 160  # items of the two slow studies: credit learns item after item, samples come from `generate`


# ---------------------------------------------------------------- the main comparison


def prompt_tokens(loaded: Loaded, items: Sequence[Item], settings: Settings) -> int:
    """Most tokens of a prompt: the paper's limit if an item has a passage to cut, else what the model's context
    leaves."""
    new = settings.max_new_tokens
    room = prompt_limit(loaded, new)
    return min(room, PAPER_TOKENS - new) if any(item.context is not None for item in items) else room


def questions(
    loaded: Loaded, items: str, n_items: int, settings: Settings, conditions: Sequence[Condition] = (Condition(),)
) -> list[Item]:
    """The chapter's items, as in `data.load_items`, that can meet the conditions; of LongBench those that the paper's
    harness asks. Raises InputError if the model's context can hold none of the lengths of `context`, which is computed
    later."""
    possible_lengths(loaded, settings)
    room, items = prompt_limit(loaded, settings.max_new_tokens), data.suited("protection", items, SUITS)
    fitting = data.load_fitting(items, n_items, loaded.tokenizer, room, settings.seed, WORLD_TOKENS)
    fitting = data.not_too_long(fitting, items, loaded.tokenizer, prompt_tokens(loaded, fitting, settings))
    return able(_comparison(loaded, fitting, conditions, settings, "main"), loaded)


def main(
    loaded: Loaded, items: Sequence[Item], conditions: Sequence[Condition], settings: Settings, name: str = "main"
) -> pd.DataFrame:
    """Rows of the main comparison, or of another study by its name; prompts are at most as long as the paper's."""
    return run(_comparison(loaded, items, conditions, settings, name), loaded, settings)


def _comparison(
    loaded: Loaded, items: Sequence[Item], conditions: Sequence[Condition], settings: Settings, name: str
) -> Answers:
    limit = prompt_tokens(loaded, items, settings)
    return Answers("protection", name, items, conditions, settings.max_new_tokens, limit)


def spread(items: Sequence[Item], n: int) -> list[Item]:
    """n of the items at even distances, since items of one task stand together; all of them where there are no more."""
    n = min(n, len(items))
    return [items[i * len(items) // n] for i in range(n)]


# ---------------------------------------------------------------- prompt lengths


def possible_lengths(loaded: Loaded, settings: Settings) -> list[int]:
    """The prompt lengths, in tokens, that the model's context can hold. Raises InputError if it can hold none."""
    new, room = settings.max_new_tokens, loaded.context
    if possible := [length for length in settings.lengths if length + new <= room]:
        return possible
    problem = f"lengths {list(settings.lengths)}: with {new} new tokens none fits {room} positions"
    raise InputError(f"{problem}, give shorter ones")


def context(loaded: Loaded, items: str, n_items: int, reading: str, settings: Settings) -> pd.DataFrame:
    """Rows of `run` at several prompt lengths (tokens), with a column `length`; an eighth of the cache is kept at each.

    items, n_items: as in `data.load_items`; at each length those whose prompts fill it (`data.filling`). Lengths that
    the model's context cannot hold, or that no prompt fills, are left out; if prompts fill none, the longest prompt's
    length is used. Raises InputError if the context can hold no length.
    """
    new, items, filling = settings.max_new_tokens, SUITS.get(items, items), {}

    def fit(length: int) -> list[Item]:
        return data.load_fitting(items, n_items, loaded.tokenizer, length, settings.seed)

    possible = possible_lengths(loaded, settings)
    for length in possible:
        try:
            filling[length] = data.filling(fit(length), items, loaded.tokenizer, length)
        except InputError as error:
            print(f"protection: length {length} is left out: {error}")
    if not filling:
        room = loaded.context - new
        longest = max(len(data.build_prompt(item, loaded.tokenizer, room).ids) for item in fit(room))
        print(f"protection: prompts of {items} fill none of {possible} tokens: asked at {longest}, their longest")
        filling = {longest: data.filling(fit(longest), items, loaded.tokenizer, longest)}
    parts = []
    for length, asked in filling.items():
        limit = length if any(item.context is not None for item in asked) else None
        conditions = grid.context(length, settings.protect_frac, reading)
        study = Answers("protection", f"context-{length}", asked, conditions, new, limit)
        parts.append(run(study, loaded, settings).assign(length=length))
    return pd.concat(parts, ignore_index=True)


# ---------------------------------------------------------------- attention, and what is kept


def attention(loaded: Loaded, items: Sequence[Item], n_items: int, capacity: int, settings: Settings) -> pd.DataFrame:
    """`attention_by_region` of `n_items` of the items, spread evenly, with a column `item`.

    The prefix and the suffix are as long as the guards at that capacity: do guarded tokens get more attention?
    """
    side = protected_count(settings.protect_frac, capacity)
    arguments = {"side": side, "limit": prompt_tokens(loaded, items, settings)}
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
    prompt = data.build_prompt(item, loaded.tokenizer, prompt_tokens(loaded, [item], settings))
    conditions = grid.main(capacities, policies, settings.protect_frac, reading)[1:]
    conditions = [c for c in conditions if c not in unmet(loaded, prompt, [c])]
    [answers] = engine.generate(loaded.model, [prompt.ids], conditions, max_new_tokens=1, stop_ids=(), errors="return")
    rows = [
        (c.policy, c.reading, c.budget, c.prefix > 0, position)
        for c, answer in zip(conditions, answers, strict=True)
        if not isinstance(answer, Exception)  # the main study counts failures
        for position in answer.kept_positions
    ]
    frame = pd.DataFrame(rows, columns=["policy", "reading", "capacity", "protected", "position"])
    frame.attrs["tokens"] = len(prompt.ids)
    frame.attrs["spans"] = {name: (min(at), max(at)) for name, at in prompt.spans.items() if at}
    return frame


# ---------------------------------------------------------------- published methods, and a single reduction


def real(loaded: Loaded, items: Sequence[Item], n_items: int, capacity: int, settings: Settings) -> pd.DataFrame:
    """Published methods as described, on `n_items` of the items, spread evenly: unprotected and protected at both ends,
    each under a cap that holds while decoding too, and reduced once at the prompt's end."""
    conditions = [
        Condition(name, capacity, regime, prefix=side, suffix=side, reading="as_described")
        for name in REAL
        for regime in (DecodeCap(), Prefill())
        for side in (0.0, settings.protect_frac)
    ]
    new, limit = settings.max_new_tokens, prompt_tokens(loaded, items, settings)
    few = spread(items, n_items)
    return run(Answers("protection", "real", few, [Condition(), *conditions], new, limit), loaded, settings)


def once(loaded: Loaded, items: Sequence[Item], rows: pd.DataFrame, capacity: int, settings: Settings) -> pd.DataFrame:
    """LRU, unprotected and protected, reduced once at the prompt's end (regime `ONCE`), and its rows of the main
    comparison, where the cap holds while decoding too."""
    never_again = SharedCap(interval=settings.max_new_tokens + 1)
    conditions = [
        Condition("lru", capacity, never_again, prefix=side, suffix=side, reading="as_run")
        for side in (0.0, settings.protect_frac)
    ]
    reduced_once = main(loaded, items, conditions, settings, "once").assign(regime=ONCE)
    return pd.concat([_lru(rows, capacity), reduced_once], ignore_index=True)


def _lru(rows: pd.DataFrame, capacity: int) -> pd.DataFrame:
    """Rows of the main comparison in the authors' code's reading: LRU at one capacity, and the full cache."""
    rows = rows[(rows.policy == "full") | ((rows.policy == "lru") & (rows.capacity == capacity))]
    return rows[(rows.reading == "as_run") & (rows.suffix_mode == "dynamic")]


# ---------------------------------------------------------------- the studies of the full profile


def of_full_profile(
    loaded: Loaded, items: Sequence[Item], rows: pd.DataFrame, capacity: int, settings: Settings
) -> dict[str, pd.DataFrame]:
    """Ada-KV with equal budgets, learned credit, sampled answers and needles, by name, as far as the model can read the
    prompts. rows: of the main comparison, whose LRU and full cache the credit and the samples are compared with."""
    few = spread(items, N_SLOW)
    lru = _lru(rows, capacity)
    lru = lru[lru.item.isin([item.id for item in few])]
    long = loaded.context >= NEEDLE_TOKENS + settings.max_new_tokens
    asked = [("native", items, capacity, prompt_tokens(loaded, items, settings))]
    if long:
        asked.append(("native-64k", _needles(loaded, settings), NEEDLE_TOKENS // NEEDLE_SHARE, NEEDLE_TOKENS))
    learned, warm = credit(loaded, few, capacity, settings), sampled(loaded, few, capacity, settings)
    tables = {
        "native": pd.concat([native(loaded, *given, settings) for given in asked], ignore_index=True),
        "credit": pd.concat([lru, learned], ignore_index=True),
        "sampling": pd.concat([lru.assign(temperature=0.0), warm], ignore_index=True),
    }
    if long:
        conditions = grid.main([NEEDLE_TOKENS // NEEDLE_SHARE], ("lru", "h2o_simple"), settings.protect_frac, "as_run")
        needles = Answers("protection", "needle", _needles(loaded, settings), conditions, settings.max_new_tokens)
        tables["needle"] = run(needles, loaded, settings)
    return tables


def _needles(loaded: Loaded, settings: Settings) -> list[Item]:
    room = prompt_limit(loaded, settings.max_new_tokens)
    return data.load_fitting(NEEDLES, N_NEEDLES, loaded.tokenizer, room, settings.seed, NEEDLE_TOKENS)


def native(
    loaded: Loaded, name: str, items: Sequence[Item], capacity: int, tokens: int, settings: Settings
) -> pd.DataFrame:
    """Protected Ada-KV, its budgets by entropy ("ada_kv_faithful") or equal ("ada_kv_native"), and the full cache. The
    column `length` is the most tokens of a prompt."""
    side = settings.protect_frac
    both = [grid.capped(policy, capacity, side, side, "as_run") for policy in ("ada_kv_faithful", NATIVE)]
    job = Answers("protection", name, items, [Condition(), *both], settings.max_new_tokens, tokens)
    return run(job, loaded, settings).assign(length=tokens).replace({"policy": {NATIVE: "ada_kv_native"}})


def credit(loaded: Loaded, items: Sequence[Item], capacity: int, settings: Settings) -> pd.DataFrame:
    """Answers of protected LRU with the online credit estimator, which begins untaught and learns from item to item."""
    side, limit = settings.protect_frac, prompt_tokens(loaded, items, settings)
    arguments = {"condition": grid.capped("lru", capacity, side, side, "as_run"), "limit": limit}
    arguments |= {"max_new_tokens": settings.max_new_tokens}
    return run(PerItem("protection", "credit", {"all": tuple(items)}, taught, arguments), loaded, settings)


def taught(
    loaded: Loaded, items: Sequence[Item], condition: Condition, limit: int, max_new_tokens: int
) -> pd.DataFrame:
    """Rows of policy `online_credit`, one for each item, in their order."""
    prompts = [data.build_prompt(item, loaded.tokenizer, limit).ids for item in items]
    stops = models.stop_ids(loaded)
    answers, _ = estimator.run(loaded.model, prompts, condition, max_new_tokens=max_new_tokens, stop_ids=stops)
    rows = []
    for item, prompt, (generation, gate_open) in zip(items, prompts, answers, strict=True):
        counts = {"evicted": generation.evicted, "policy_calls": generation.policy_calls, "gate_open": gate_open}
        rows.append(_row(loaded, item, condition, generation.tokens, prompt) | counts)
    return pd.DataFrame(rows).assign(policy="online_credit")


def sampled(loaded: Loaded, items: Sequence[Item], capacity: int, settings: Settings) -> pd.DataFrame:
    """Answers of LRU, unprotected and protected, `SAMPLES` of each at `TEMPERATURE`."""
    conditions = [grid.capped("lru", capacity, side, side, "as_run") for side in (0.0, settings.protect_frac)]
    arguments = {"conditions": conditions, "temperature": TEMPERATURE, "samples": SAMPLES, "seed": settings.seed}
    limit = prompt_tokens(loaded, items, settings)
    arguments |= {"limit": limit, "max_new_tokens": settings.max_new_tokens}
    return run(PerItem("protection", "sampling", items, samples_of, arguments), loaded, settings)


def samples_of(
    loaded: Loaded, item: Item, conditions: Sequence[Condition], temperature: float, samples: int, seed: int,
    limit: int, max_new_tokens: int,
) -> pd.DataFrame:  # fmt: skip
    """One item's samples, by Hugging Face's own `generate` on the cache that evicts: softmax(logits / temperature)."""
    ids = torch.tensor([data.build_prompt(item, loaded.tokenizer, limit).ids], device=loaded.model.device)
    stops, rows = sorted(models.stop_ids(loaded)), []
    for condition in conditions:
        with evicting(loaded.model, condition, seed=seed), torch.random.fork_rng():
            torch.manual_seed(seed)
            sequences = loaded.model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=temperature, top_k=0, top_p=1.0,
                num_return_sequences=samples, max_new_tokens=max_new_tokens, eos_token_id=stops, pad_token_id=stops[0],
            )  # fmt: skip
        for number, tokens in enumerate(sequences[:, ids.shape[1] :].tolist()):
            length = next((at + 1 for at, token in enumerate(tokens) if token in stops), len(tokens))
            row = _row(loaded, item, condition, tokens[:length], ids[0].tolist())
            rows.append(row | {"seed": number, "temperature": temperature})
    return pd.DataFrame(rows)


def _row(
    loaded: Loaded, item: Item, condition: Condition, tokens: Sequence[int], prompt: Sequence[int]
) -> dict[str, Any]:
    text = answer_of(loaded.tokenizer, tokens, prompt)[0].strip()
    row = condition.columns() | {"item": item.id, "task": item.task, "prediction": text, "answer": item.answer}
    return row | {"n_generated": len(tokens), **measure.all_measures(text, item.answer, item.papers)}
