"""How far the paper's conclusions reach: published methods with guards, a single reduction, Ada-KV with equal budgets,
the learned credit, sampled answers, needles at 64K tokens.

Each is a study of its own. Only the full profile runs all of them; the quick one runs the first two, since the others
take minutes even on the embedded model. `members.evaluate` takes their rows by the study's name:
`more={"credit": ...}`.
"""

from collections.abc import Sequence
from typing import Any

import pandas as pd
import torch

from kvrepro.chapters.protection import credit as estimator
from kvrepro.chapters.protection import grid, study
from kvrepro.chapters.protection.settings import Settings
from kvrepro.chat import answer_of
from kvrepro.engine.condition import Condition, DecodeCap, Prefill, SharedCap
from kvrepro.engine.hf import evicting
from kvrepro.experiment import data, measure, models
from kvrepro.experiment.models import Loaded
from kvrepro.experiment.run import Answers, PerItem, run
from kvrepro.item import Item

REAL = ("snapkv", "h2o_online", "ada_kv")  # as published, layer by layer, each with its own window
ONCE = "at the prompt's end"
NATIVE = "kvrepro/chapters/protection/policies.py:ADA_KV_NATIVE"
NEEDLES = "ruler:niah_single_1"  # noise around one sentence, which needs no download
NEEDLE_TOKENS, NEEDLE_SHARE, N_NEEDLES = 65_536, 16, 60  # the paper's prompts, 1 / 16 of the cache, its items
TEMPERATURE, SAMPLES = 0.7, 3  # the paper samples with three seeds
N_SLOW = 160  # items of the two slow studies: credit learns item after item, samples come from `generate`


def studies(
    loaded: Loaded, items: Sequence[Item], rows: pd.DataFrame, capacity: int, settings: Settings
) -> dict[str, pd.DataFrame]:
    """The studies of the full profile whose prompts the model can read, by name. rows: of the main comparison, whose
    LRU and full cache the credit and the samples are compared with."""
    slow_items = study.spread(items, N_SLOW)
    lru = _lru(rows, capacity)
    lru = lru[lru.item.isin([item.id for item in slow_items])]
    tables = {"native": native(loaded, items, capacity, settings)}
    learned = credit(loaded, slow_items, capacity, settings)
    tables["credit"] = pd.concat([lru, learned], ignore_index=True)
    samples = sampled(loaded, slow_items, capacity, settings)
    tables["sampling"] = pd.concat([lru.assign(temperature=0.0), samples], ignore_index=True)
    if loaded.context >= NEEDLE_TOKENS + settings.max_new_tokens:
        tables["needle"] = needle(loaded, settings)
    return tables


def real(loaded: Loaded, items: Sequence[Item], n_items: int, capacity: int, settings: Settings) -> pd.DataFrame:
    """Published methods as described, on `n_items` of the items, spread evenly: unprotected and protected at both ends,
    each under a cap that holds while decoding too, and reduced once at the prompt's end."""
    conditions = [
        Condition(name, capacity, regime, prefix=side, suffix=side, reading="as_described")
        for name in REAL
        for regime in (DecodeCap(), Prefill())
        for side in (0.0, settings.protect_frac)
    ]
    new = settings.max_new_tokens
    limit = study.paper_limit(loaded, items, new)
    few = study.spread(items, n_items)
    job = Answers("protection", "real", few, [Condition(), *conditions], new, limit, gaps=True)
    return run(job, loaded, settings)


def once(loaded: Loaded, items: Sequence[Item], rows: pd.DataFrame, capacity: int, settings: Settings) -> pd.DataFrame:
    """LRU, unprotected and protected, reduced once at the prompt's end (regime `ONCE`), and its rows of the main
    comparison, where the cap holds while decoding too."""
    never_again = SharedCap(interval=settings.max_new_tokens + 1)
    conditions = [
        Condition("lru", capacity, never_again, prefix=side, suffix=side, reading="as_run")
        for side in (0.0, settings.protect_frac)
    ]
    reduced_once = study.main(loaded, items, conditions, settings, "once").assign(regime=ONCE)
    return pd.concat([_lru(rows, capacity), reduced_once], ignore_index=True)


def _lru(rows: pd.DataFrame, capacity: int) -> pd.DataFrame:
    """Rows of the main comparison in the authors' code's reading: LRU at one capacity, and the full cache."""
    rows = rows[(rows.policy == "full") | ((rows.policy == "lru") & (rows.capacity == capacity))]
    return rows[(rows.reading == "as_run") & (rows.suffix_mode == "dynamic")]


def native(loaded: Loaded, items: Sequence[Item], capacity: int, settings: Settings) -> pd.DataFrame:
    """Protected Ada-KV, its budgets by entropy ("ada_kv_faithful") or equal ("ada_kv_native"), and the full cache.

    Also on needles, if the model reads 64K tokens. The column `length` is the most tokens of a prompt.
    """
    new, limit = settings.max_new_tokens, study.paper_limit(loaded, items, settings.max_new_tokens)
    studies: list[tuple[str, Sequence[Item], int, int]] = [("native", items, capacity, limit)]
    if loaded.context >= NEEDLE_TOKENS + new:
        needles = _needles(loaded, settings, NEEDLE_TOKENS, N_NEEDLES)
        studies.append(("native-64k", needles, NEEDLE_TOKENS // NEEDLE_SHARE, NEEDLE_TOKENS))
    parts, side = [], settings.protect_frac
    for name, study_items, size, length in studies:
        both = [grid.capped(policy, size, side, side, "as_run") for policy in ("ada_kv_faithful", NATIVE)]
        rows = run(Answers("protection", name, study_items, [Condition(), *both], new, length), loaded, settings)
        parts.append(rows.assign(length=length))
    return pd.concat(parts, ignore_index=True).replace({"policy": {NATIVE: "ada_kv_native"}})


def _lengths(loaded: Loaded, items: Sequence[Item], settings: Settings) -> dict[str, Any]:
    new = settings.max_new_tokens
    return {"limit": study.paper_limit(loaded, items, new), "max_new_tokens": new}


def _row(
    loaded: Loaded, item: Item, condition: Condition, tokens: Sequence[int], prompt: Sequence[int]
) -> dict[str, Any]:
    text = answer_of(loaded.tokenizer, tokens, prompt)[0].strip()
    row = condition.columns() | {"item": item.id, "task": item.task, "prediction": text, "answer": item.answer}
    return row | {"n_generated": len(tokens), **measure.all_measures(text, item.answer, item.papers)}


# ---- the learned credit


def credit(loaded: Loaded, items: Sequence[Item], capacity: int, settings: Settings) -> pd.DataFrame:
    """Answers of protected LRU with the online credit estimator, which begins untaught and learns from item to item."""
    condition = grid.capped("lru", capacity, settings.protect_frac, settings.protect_frac, "as_run")
    arguments = _lengths(loaded, items, settings) | {"condition": condition}
    return run(PerItem("protection", "credit", {"all": tuple(items)}, taught, arguments), loaded, settings)


def taught(
    loaded: Loaded, items: Sequence[Item], condition: Condition, limit: int, max_new_tokens: int
) -> pd.DataFrame:
    """Rows of policy `online_credit`, one for each item, in their order."""
    prompts = [data.build_prompt(item, loaded.tokenizer, limit).ids for item in items]
    stops = models.stop_ids(loaded)
    answers, _ = estimator.run(loaded.model, prompts, condition, max_new_tokens=max_new_tokens, stop_ids=stops)
    rows = []
    for item, prompt, answer in zip(items, prompts, answers, strict=True):
        generation, gate_open = answer
        counts = {"evicted": generation.evicted, "policy_calls": generation.policy_calls, "gate_open": gate_open}
        rows.append(_row(loaded, item, condition, generation.tokens, prompt) | counts)
    return pd.DataFrame(rows).assign(policy="online_credit")


# ---- sampling


def sampled(loaded: Loaded, items: Sequence[Item], capacity: int, settings: Settings) -> pd.DataFrame:
    """Answers of LRU, unprotected and protected, `SAMPLES` of each at `TEMPERATURE`."""
    conditions = [grid.capped("lru", capacity, side, side, "as_run") for side in (0.0, settings.protect_frac)]
    arguments = {"conditions": conditions, "temperature": TEMPERATURE, "samples": SAMPLES, "seed": settings.seed}
    arguments |= _lengths(loaded, items, settings)
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


# ---- needles


def needle(loaded: Loaded, settings: Settings, tokens: int = NEEDLE_TOKENS, n_items: int = N_NEEDLES) -> pd.DataFrame:
    """LRU and H2O on needles in `tokens` tokens, unprotected and protected, with a sixteenth of the cache."""
    items = _needles(loaded, settings, tokens, n_items)
    conditions = grid.main([tokens // NEEDLE_SHARE], ("lru", "h2o_simple"), settings.protect_frac, "as_run")
    return run(Answers("protection", "needle", items, conditions, settings.max_new_tokens), loaded, settings)


def _needles(loaded: Loaded, settings: Settings, tokens: int, n_items: int) -> list[Item]:
    room = loaded.context - settings.max_new_tokens
    return data.load_fitting(NEEDLES, n_items, loaded.tokenizer, room, settings.seed, tokens)
