"""Which tokens survive: a policy of the catalogue or of a reader chooses them at one of four granularities.

A granularity is an `across` of the policy: heads or layers that choose together do so by their mean scores.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from kvrepro.engine import generate as engine
from kvrepro.engine.allocate import joint_layers, one_set, per_layer
from kvrepro.engine.attention import installed
from kvrepro.engine.condition import Condition, Prompt, Regime
from kvrepro.engine.decode import decode
from kvrepro.engine.facts import ModelFacts
from kvrepro.engine.policy import find, own
from kvrepro.engine.prefill import read
from kvrepro.engine.rows import Call, Rows
from kvrepro.engine.rows import kept_sets as kept_by_layer
from kvrepro.engine.shapes import PreTrainedModel
from kvrepro.errors import InputError
from kvrepro.experiment.answers import REPEAT
from kvrepro.experiment.models import Loaded

Cells: TypeAlias = list[tuple[dict[str, Any], Condition]]  # first columns of a row, and its condition

POLICIES = {  # the chapter's names: the catalogue's policy, the reading
    "sinks_recency": ("streaming_llm", "as_described"),  # 4 sinks
    "cumulative": ("h2o_online", "as_described"),  # half the budget for the newest
    "window": ("snapkv", "as_run"),  # average-pooled over 5
    "redundancy": ("r_kv", "as_described"),
}
PUBLISHED = ("streaming_llm", "tri_attention", "tova", "h2o_online", "snapkv", "ada_kv", "r_kv", "k_norm")
# Protected in every head, whatever the budget; an eighth of the usual, since the chapter's prompts are short.
SWITCHES = {"duo_attention": (("sinks", 16), ("recent", 32))}
ACROSS = {"one set": one_set, "per layer": per_layer, "per head": None, "joint": joint_layers}
JOINT = tuple(ACROSS)
GRANULARITIES = JOINT[:3]


def condition(policy: str, granularity: str, budget: int | float, regime: Regime) -> Condition:
    """A policy (of `POLICIES`, the catalogue or a reader) at a granularity. "per head" is the policy as published.
    "sinks_recency" looks at positions only, so that all heads choose the same set anyway. "window" looks at 32 queries,
    or half of a small budget."""
    name, reading = POLICIES.get(policy, (policy, "as_described"))
    switches = (("window", min(32, int(budget) // 2)),) if policy == "window" else SWITCHES.get(name, ())
    if granularity != "per head" and policy != "sinks_recency":
        name = own(f"{name}, {granularity}", replace(find(name), across=ACROSS[granularity]))
    return Condition(name, budget, regime, reading=reading, switches=switches)


def cells(policies: Sequence[str], granularities: Sequence[str], budget: int | float, regime: Regime) -> Cells:
    """Policies at each granularity, or as published if there is none; "sinks_recency", which chooses the same tokens at
    all of them, has the first."""
    return [
        ({"policy": label(p)} | ({"granularity": g} if granularities else {}), condition(p, g, budget, regime))
        for p in policies
        for g in (granularities or ["per head"])[: 1 if p == "sinks_recency" else None]
    ]


def kept_sets(loaded: Loaded, ids: list[int], conditions: Sequence[Condition]) -> list[np.ndarray | Exception]:
    """Which tokens of a prompt stay under each condition, bool [layers, kv_heads, tokens], or why there are none: the
    prompt or the model cannot meet it, or its policy raised."""
    kept: dict[Condition, np.ndarray | Exception] = {}
    for c in conditions:
        try:
            engine.unmet(loaded.model, [Prompt(ids, {})], [[c]], [1])
        except InputError as error:  # no prompt can meet it, or the model cannot run it
            kept[c] = error
    met = [c for c in conditions if c not in kept]
    repeat = loaded.tokenizer.encode(REPEAT, add_special_tokens=False) if loaded.tokenizer else ()
    how: dict[str, Any] = {"max_new_tokens": 1, "stop_ids": (), "kept_sets": True, "repeat": repeat, "errors": "return"}
    [answers] = engine.generate(loaded.model, [ids], met, **how) if met else [[]]
    for c, answer in zip(met, answers, strict=True):
        kept[c] = answer if isinstance(answer, Exception) else np.stack(answer.kept_sets or ())
    return [kept[c] for c in conditions]


@torch.inference_mode()
def while_decoding(model: PreTrainedModel, ids: list[int], c: Condition, new_tokens: int) -> dict[int, np.ndarray]:
    """Which tokens stay after each eviction of a generation, bool [layers, kv_heads, seen], by the tokens seen."""
    facts, kept = ModelFacts.of(model), {}

    def watch(rows: Rows, picked: Tensor) -> None:
        seen = int(rows.seen[0])
        if (seen - len(ids)) % (c.every or new_tokens + 1) == 0:
            [sets] = kept_by_layer(facts, rows, [seen], True)
            kept[seen] = np.stack(sets["kept_sets"])

    call = Call(model, [Prompt(ids, {})], [c], [new_tokens + 1], facts, watch=watch)
    with installed(model):
        [rows] = read(call, [0], [0])
        list(decode(call, rows, ()))
    return kept


def label(policy: str) -> str:
    """A policy's name in tables: one of `POLICIES` as it is, any other by its title."""
    return policy if policy in POLICIES else find(policy).title
