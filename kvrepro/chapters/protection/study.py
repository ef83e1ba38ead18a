"""The chapter on protection: its settings, its conditions and its studies, and the authors' own scores beside them."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
import pandas as pd
import torch
from annotated_types import Gt, Lt
from torch import Tensor

from kvrepro.chapters.protection import credit as estimator
from kvrepro.engine import shared
from kvrepro.engine.allocate import protected_count
from kvrepro.engine.attention import watch_prompt
from kvrepro.engine.catalogue import SHARED
from kvrepro.engine.condition import Condition, DecodeCap, Prefill, SharedCap, Size
from kvrepro.engine.facts import ModelFacts
from kvrepro.engine.generate import generate
from kvrepro.engine.hf import evicting
from kvrepro.engine.policy import READINGS, Rule, find, own
from kvrepro.errors import InputError
from kvrepro.experiment import artifact, data, measure, models, stats
from kvrepro.experiment import run as runner
from kvrepro.experiment.answers import prompt_limit
from kvrepro.experiment.models import Loaded
from kvrepro.experiment.run import Answers, PerItem, run
from kvrepro.item import Item, answer_of
from kvrepro.paths import DATA

Conditions: TypeAlias = list[Condition]
Sides: TypeAlias = Sequence[tuple[float, float]]
SEVEN = ("lru", "h2o_simple", "snapkv_simple", "slw", "ada_kv_simple", "quest_simple", "random_sample")  # table 3
FAITHFUL = ("h2o_faithful", "snapkv_faithful", "ada_kv_faithful", "quest_faithful")
REAL = ("snapkv", "h2o_online", "ada_kv")  # as published, layer by layer, each with its own window
# Protected prefixes and suffixes in units of `protect_frac`; the last two match both ends in budget.
ENDS, GUARDS, SIDES = ((0, 0), (1, 1)), ((1, 1),), ((1, 0), (0, 1), (2, 0), (0, 2))
SWEEP = ((0, 0), (0.5, 0.5), (1, 1), (1.5, 1.5), (2, 2))
SIZES = {  # items of each study; main: five for each of eight tasks, in full three times the paper's main panel
    "quick": {"main": 40, "real": 12, "context": 8, "attention": 8},
    "full": {"main": 480, "real": 240, "context": 160, "attention": 32},
}
WORLD_TOKENS = 1900  # of a prompt of the embedded world
SUITS = {"longbench": "longbench:protection"}  # LongBench's QA sets, with the paper's own prompts
ONCE = "at the prompt's end"
NATIVE = own("ada_kv_native", replace(SHARED["ada_kv_faithful"], title="Ada-KV-native", allocate=shared.every_head))
NEEDLES = "ruler:niah_single_1"  # noise around one sentence, which needs no download
NEEDLE_TOKENS, NEEDLE_KEPT, N_NEEDLES = 65_536, 4096, 60  # the paper's prompts, 1 / 16 of the cache, its items
TEMPERATURE, SAMPLES = 0.7, 3  # the paper samples with three seeds
N_SLOW = 160  # items of the two slow studies: credit learns item after item, samples come from `generate`


@dataclass(frozen=True)
class Settings(runner.Settings):
    """Settings of the chapter: its notebook's parameters, and others."""

    items: str = "tinyworld:long"  #: see `data.load_items`
    capacities: tuple[Size, ...] = (128, 256, 512)  #: tokens kept
    policies: tuple[str, ...] = SEVEN
    reading: Literal["both", "as_run", "as_described"] = "both"
    protect_frac: Annotated[float, Gt(0), Lt(0.5)] = 0.10  #: of the capacity, at each end
    max_new_tokens: Size = 128  #: of an answer
    passage_tokens: Size = 2048  #: of prompt and answer, if there is a passage to cut: as in the paper's harness
    lengths: tuple[Size, ...] = (500, 1000, 1900, 3800)  #: prompts of the study of lengths, in tokens

    def ensure_runs(self, policy: str) -> None:
        """Raise InputError for a policy that cannot be run under a cap."""
        for condition in capped([policy], [self.middle], self):
            Rule.of(condition)

    @property
    def middle(self) -> int:
        """The capacity of all studies beside the main comparison."""
        return sorted(self.capacities)[len(self.capacities) // 2]

    def size(self, study: str) -> int:
        """How many items a study takes; `n_items`, of the main comparison, shrinks the others with it."""
        usual, main = SIZES[self.profile][study], SIZES[self.profile]["main"]
        if self.n_items is None:
            return data.AtMost(usual)
        return self.n_items if study == "main" else math.ceil(usual * min(1.0, self.n_items / main))

    def readings(self, policy: str) -> tuple[str, ...]:
        """A policy's readings among those asked for; where it has none of them, its last."""
        existing = READINGS if find(policy).shared else find(policy).readings
        if self.reading == "both":
            return existing
        return (self.reading if self.reading in existing else existing[-1],)


# ---------------------------------------------------------------- conditions


def capped(policies: Iterable[str], capacities: Iterable[int], settings: Settings, sides: Sides = ENDS) -> Conditions:
    """Every policy under the cap, in its readings, at every capacity and with prefixes and suffixes in units of
    `protect_frac`. It keeps one set of tokens for all layers if it is made for that, else one per layer."""
    frac = settings.protect_frac
    return [
        Condition(policy, capacity, regime, prefix=round(a * frac, 6), suffix=round(b * frac, 6), reading=reading)
        for policy in policies
        for regime in [SharedCap() if find(policy).shared else DecodeCap()]
        for reading in settings.readings(policy)
        for capacity in capacities
        for a, b in sides
    ]


def grid(settings: Settings) -> Conditions:
    """All conditions of the main comparison, each once; sizes and sides of guards, the faithful implementations and a
    suffix pinned to the prompt at the middle capacity. The model reads a prompt once for all of them."""
    middle = settings.middle
    conditions = [Condition(), *capped(settings.policies, settings.capacities, settings)]
    conditions += capped(["lru"], [middle], settings, SWEEP) + capped(["lru"], [middle], settings, SIDES)
    conditions += capped(FAITHFUL, [middle], settings, GUARDS)
    for c in capped(["ada_kv_faithful", "lru"], [middle], settings, GUARDS):
        if (c.policy, c.reading) != ("lru", "as_run"):  # which has no such suffix
            conditions.append(replace(c, static_suffix=True))
    for capacity in sorted(settings.capacities):  # guards of as many tokens as at the middle one, where none is rounded
        if (k := middle / capacity) in (0.5, 2.0):
            conditions += capped(["lru"], [capacity], settings, [(k, k)])
    return list(dict.fromkeys(conditions))


# ---------------------------------------------------------------- answers


def questions(loaded: Loaded, settings: Settings) -> list[Item]:
    """The chapter's items whose prompts fit; of LongBench those that the paper's harness asks."""
    room, name = prompt_limit(loaded, settings.max_new_tokens), SUITS.get(settings.items, settings.items)
    if name != settings.items:
        print(f"protection: items {name!r}, which suit this chapter, in the place of {settings.items!r}")
    items = data.load_fitting(name, settings.size("main"), loaded.tokenizer, room, settings.seed, WORLD_TOKENS)
    return data.fitting(items, name, loaded.tokenizer, limit_of(loaded, items, settings))


def limit_of(loaded: Loaded, items: Sequence[Item], settings: Settings) -> int:
    """Most tokens of a prompt: what the model's context leaves, or `passage_tokens` if an item has a passage."""
    room = prompt_limit(loaded, settings.max_new_tokens)
    cut = any(item.context is not None for item in items)
    return min(room, settings.passage_tokens - settings.max_new_tokens) if cut else room


def answers(
    name: str, loaded: Loaded, items: Sequence[Item], conditions: Conditions, settings: Settings
) -> pd.DataFrame:
    """Rows of a study of that name, with `cache_of`; a condition that an item cannot meet is a row with an error."""
    limit = limit_of(loaded, items, settings)
    study = Answers("protection", name, items, conditions, settings.max_new_tokens, limit)
    rows = run(study, loaded, settings)
    return rows.assign(cache=cache_of(rows, settings.protect_frac))


def spread(items: Sequence[Item], n: int) -> list[Item]:
    """n of the items at even distances, since items of one task stand together; all of them where there are no more."""
    n = min(n, len(items))
    return [items[i * len(items) // n] for i in range(n)]


def context(loaded: Loaded, settings: Settings) -> pd.DataFrame:
    """Rows at several prompt lengths (tokens), with a column `length`; an eighth of the cache is kept at each.

    Asked are items whose prompts fill a length (`data.fitting`). Lengths that the model's context cannot hold, or that
    no prompt fills, are left out; where none is left, the longest prompt's length is used.
    """
    name, new, asked = SUITS.get(settings.items, settings.items), settings.max_new_tokens, {}
    room = prompt_limit(loaded, new)

    def fit(length: int) -> list[Item]:
        return data.load_fitting(name, settings.size("context"), loaded.tokenizer, length, settings.seed)

    for length in [length for length in settings.lengths if length <= room]:
        try:
            asked[length] = data.fitting(fit(length), name, loaded.tokenizer, length, data.FILLED)
        except InputError as error:
            print(f"protection: length {length} is left out: {error}")
    if not asked:
        longest = max(len(data.build_prompt(item, loaded.tokenizer, room).ids) for item in fit(room))
        asked = {longest: data.fitting(fit(longest), name, loaded.tokenizer, longest, data.FILLED)}
    parts = []
    for length, items in asked.items():
        conditions = [Condition(), *capped(["lru"], [length // 8], settings)]
        conditions += capped(["h2o_simple", "random_sample"], [length // 8], settings, GUARDS)
        rows = answers(f"context-{length}", loaded, items, conditions, replace(settings, passage_tokens=length + new))
        parts.append(rows.assign(length=length))
    return pd.concat(parts, ignore_index=True)


def real(loaded: Loaded, items: Sequence[Item], settings: Settings) -> pd.DataFrame:
    """Published methods as described: unprotected and protected at both ends, each under a cap that holds while
    decoding too, and reduced once at the prompt's end."""
    conditions = [
        Condition(name, settings.middle, regime, prefix=side, suffix=side, reading="as_described")
        for name in REAL
        for regime in (DecodeCap(), Prefill())
        for side in (0.0, settings.protect_frac)
    ]
    return answers("real", loaded, spread(items, settings.size("real")), [Condition(), *conditions], settings)


def once(loaded: Loaded, items: Sequence[Item], rows: pd.DataFrame, settings: Settings) -> pd.DataFrame:
    """LRU, unprotected and protected, reduced once at the prompt's end (regime `ONCE`), and its rows of the main
    comparison, where the cap holds while decoding too."""
    never_again = SharedCap(interval=settings.max_new_tokens + 1)
    conditions = [replace(c, regime=never_again) for c in _lru_as_run(settings)]
    reduced_once = answers("once", loaded, items, conditions, settings).assign(regime=ONCE)
    return pd.concat([_lru(rows, settings), reduced_once], ignore_index=True)


def _lru_as_run(settings: Settings) -> Conditions:
    """LRU, unprotected and protected, at the middle capacity."""
    return capped(["lru"], [settings.middle], replace(settings, reading="as_run"))


def _lru(rows: pd.DataFrame, settings: Settings) -> pd.DataFrame:
    """Rows of the main comparison as run: LRU at the middle capacity, and the full cache."""
    rows = rows[(rows.policy == "full") | ((rows.policy == "lru") & (rows.capacity == settings.middle))]
    return rows[(rows.reading == "as_run") & (rows.suffix_mode == "dynamic")]


# ---------------------------------------------------------------- attention, and what is kept


def attention(loaded: Loaded, items: Sequence[Item], settings: Settings) -> pd.DataFrame:
    """`attention_by_region` of some of the items, spread evenly, with a column `item`.

    The prefix and the suffix are as long as the guards at the middle capacity: do guarded tokens get more attention?
    """
    side = protected_count(settings.protect_frac, settings.middle)
    arguments = {"side": side, "limit": limit_of(loaded, items, settings)}
    few = spread(items, settings.size("attention"))
    return run(PerItem("protection", "attention", few, attention_by_region, arguments), loaded, settings)


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


def retention(loaded: Loaded, item: Item, settings: Settings) -> pd.DataFrame:
    """Prompt positions that each policy keeps at its first reduction to the middle capacity: columns policy, reading,
    protected, position.

    Where heads choose for themselves, positions that any head keeps count as kept. `attrs["spans"]` holds the first and
    last position of each of the prompt's spans.
    """
    prompt = data.build_prompt(item, loaded.tokenizer, limit_of(loaded, [item], settings))
    conditions = capped(settings.policies, [settings.middle], settings)
    [kept] = generate(loaded.model, [prompt.ids], conditions, max_new_tokens=1, stop_ids=(), errors="return")
    rows = [
        (c.policy, c.reading, c.prefix > 0, position)
        for c, answer in zip(conditions, kept, strict=True)
        if not isinstance(answer, Exception)  # it cannot be met, or has failed, which the main study counts
        for position in answer.kept_positions
    ]
    frame = pd.DataFrame(rows, columns=["policy", "reading", "protected", "position"])
    frame.attrs["spans"] = {name: (min(at), max(at)) for name, at in prompt.spans.items() if at}
    return frame


# ---------------------------------------------------------------- the studies of the full profile


def of_full_profile(
    loaded: Loaded, items: Sequence[Item], rows: pd.DataFrame, settings: Settings
) -> dict[str, pd.DataFrame]:
    """Ada-KV with equal budgets, learned credit, sampled answers and needles, by name, as far as the model can read the
    prompts. rows: of the main comparison, whose LRU and full cache the credit and the samples are compared with."""
    lru, limit = _lru(rows, settings), limit_of(loaded, items, settings)
    few = [item for item in spread(items, N_SLOW) if item.id not in set(lru[lru.error.notna()]["item"])]
    lru = lru[lru.item.isin([item.id for item in few])]
    bare, guarded = _lru_as_run(settings)
    given: dict[str, Any] = {"limit": limit, "max_new_tokens": settings.max_new_tokens}
    learning = PerItem("protection", "credit", {"all": tuple(few)}, taught, given | {"condition": guarded})
    given |= {"conditions": [bare, guarded], "seed": settings.seed, "temperature": TEMPERATURE}
    drawing = PerItem("protection", "sampling", few, samples_of, given)
    learned, warm = run(learning, loaded, settings), run(drawing, loaded, settings)
    tables = {
        "native": native("native", loaded, items, settings.middle, settings).assign(length=limit),
        "credit": pd.concat([lru, learned], ignore_index=True),
        "sampling": pd.concat([lru.assign(temperature=0.0), warm], ignore_index=True),
    }
    room = prompt_limit(loaded, settings.max_new_tokens)
    if room >= NEEDLE_TOKENS:
        needles = data.load_fitting(NEEDLES, N_NEEDLES, loaded.tokenizer, room, settings.seed, NEEDLE_TOKENS)
        kept = capped(["lru", "h2o_simple"], [NEEDLE_KEPT], replace(settings, reading="as_run"))
        tables["needle"] = answers("needle", loaded, needles, [Condition(), *kept], settings)
        at_64k = native("native-64k", loaded, needles, NEEDLE_KEPT, settings).assign(length=NEEDLE_TOKENS)
        tables["native"] = pd.concat([tables["native"], at_64k], ignore_index=True)
    return tables


def native(name: str, loaded: Loaded, items: Sequence[Item], capacity: int, settings: Settings) -> pd.DataFrame:
    """Protected Ada-KV, its budgets by entropy ("ada_kv_faithful") or equal ("ada_kv_native"), and the full cache."""
    both = capped(["ada_kv_faithful", NATIVE], [capacity], replace(settings, reading="as_run"), GUARDS)
    return answers(name, loaded, items, [Condition(), *both], settings)


def taught(
    loaded: Loaded, items: Sequence[Item], condition: Condition, limit: int, max_new_tokens: int
) -> pd.DataFrame:
    """Answers of protected LRU with the online credit estimator, which begins untaught and learns from item to item."""
    prompts = [data.build_prompt(item, loaded.tokenizer, limit).ids for item in items]
    learned, _ = estimator.run(loaded.model, prompts, condition, max_new_tokens, models.stop_ids(loaded))
    rows = []
    for item, prompt, answer in zip(items, prompts, learned, strict=True):
        counts = {"evicted": answer.evicted, "policy_calls": answer.policy_calls}
        rows.append(_row(loaded, item, condition, answer.tokens, prompt) | counts)
    return pd.DataFrame(rows).assign(policy="online_credit")


def samples_of(loaded: Loaded, item: Item, conditions: Conditions, limit: int, seed: int, **how: Any) -> pd.DataFrame:
    """One item's samples, by Hugging Face's own `generate` on the cache that evicts: softmax(logits / temperature).
    how: its arguments `temperature` and `max_new_tokens`. Rows of `SAMPLES` for each condition."""
    ids = torch.tensor([data.build_prompt(item, loaded.tokenizer, limit).ids], device=loaded.model.device)
    stops, rows = sorted(models.stop_ids(loaded)), []
    how |= {"do_sample": True, "top_k": 0, "top_p": 1.0, "num_return_sequences": SAMPLES, "eos_token_id": stops}
    for condition in conditions:
        with evicting(loaded.model, condition, seed=seed), torch.random.fork_rng():
            torch.manual_seed(seed)
            mask = torch.ones_like(ids)
            sequences = loaded.model.generate(ids, attention_mask=mask, pad_token_id=stops[0], **how)
        for number, tokens in enumerate(sequences[:, ids.shape[1] :].tolist()):
            length = next((at + 1 for at, token in enumerate(tokens) if token in stops), len(tokens))
            row = _row(loaded, item, condition, tokens[:length], ids[0].tolist())
            rows.append(row | {"seed": number, "temperature": how["temperature"]})
    return pd.DataFrame(rows)


def _row(
    loaded: Loaded, item: Item, condition: Condition, tokens: Sequence[int], prompt: Sequence[int]
) -> dict[str, Any]:
    text = answer_of(loaded.tokenizer, tokens, prompt)[0].strip()
    row = condition.columns() | {"item": item.id, "task": item.task, "prediction": text, "answer": item.answer}
    return row | {"n_generated": len(tokens), **measure.all_measures(text, item.answer, item.papers)}


# ---------------------------------------------------------------- the authors' rows, and SmolLM2's

SMOL = {  # items -> their name in figures
    "protection-panel": "SmolLM2, questions",
    "ruler:niah_single_1,niah_single_2,niah_multikey_1,niah_multivalue": "SmolLM2, needles",
}
AUTHORS = {  # set of items, model -> its name in figures
    ("longbench-pool", "Qwen/Qwen2.5-3B-Instruct"): "Qwen2.5-3B, questions",
    ("longbench-balanced", "Qwen/Qwen2.5-7B-Instruct"): "Qwen2.5-7B, questions",
    ("niah-64k", "Qwen/Qwen3-4B-Instruct-2507"): "Qwen3-4B, needles",
}
LABELS = {"bare": "no guards", "guards": "guards", "whole": "full cache", "unread": "no passage", "who": ""}
CONDITION = ["who", "policy", "reading", "capacity", "prefix", "suffix"]


def elsewhere() -> pd.DataFrame:
    """Mean scores of conditions on other models, from committed tables: columns who, policy, reading, capacity, prefix,
    suffix, cache (`cache_of`), value, low, high, n. SmolLM2's needles are scored by the share of the numbers found, all
    others by token F1."""
    rows = artifact.scores()
    items = rows["item"].str.rsplit("-", n=1).str[0]
    rows = rows.assign(who=[AUTHORS.get(pair) for pair in zip(items, rows.model, strict=True)]).dropna(subset="who")
    rows = rows[rows.temperature == 0].drop_duplicates([*CONDITION, "item"])
    authors = stats.means(rows.fillna({"capacity": 0}), CONDITION, "token_f1").replace({"capacity": {0: np.nan}})
    smol = pd.read_csv(DATA / "language_model_scores.csv").rename(columns={"kept": "capacity"})
    smol = smol[(smol.chapter == "protection") & smol["items"].isin(SMOL)]
    sides = smol.guard.str.replace("%", "").str.split(" + ", regex=False, expand=True).astype(float) / 100
    smol = smol.assign(who=smol["items"].map(SMOL), prefix=sides[0], suffix=sides[1])
    both = pd.concat([authors, smol[[*CONDITION, "value", "low", "high", "n"]]], ignore_index=True)
    return both.assign(cache=cache_of(both))


def cache_of(rows: pd.DataFrame, frac: float = 0.10) -> pd.Series:
    """What a row's cache is to the paper: `whole`, `bare` (no guards), `guards` (`frac` at both ends), `unread` (the
    passage is not shown), or missing."""
    same = np.isclose(rows.prefix, rows.suffix)
    kinds = {"whole": rows.policy == "full", "unread": rows.policy == "no_passage"}
    kinds |= {"bare": same & np.isclose(rows.prefix, 0), "guards": same & np.isclose(rows.prefix, frac)}
    return pd.Series(np.select(list(kinds.values()), list(kinds), None), rows.index)
