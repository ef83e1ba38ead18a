"""Why one policy's answers are better than another's: what its heads keep, and how that changes attention."""

from collections.abc import Sequence
from typing import Any

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor

from kvrepro.chapters.synthesis.settings import Settings
from kvrepro.engine.attention import attend, read_once
from kvrepro.engine.condition import Condition, Prefill
from kvrepro.engine.facts import ModelFacts
from kvrepro.engine.generate import generate
from kvrepro.experiment import data
from kvrepro.experiment.models import Loaded
from kvrepro.experiment.run import PerItem, run
from kvrepro.item import Item

COMPARED = ("key_diff", "dropkv", "snapkv", "random")
MEASURES = {
    "evidence": "evidence's tokens held",
    "distinct": "unlikeness of kept keys",
    "mass": "attention of the last query held",
    "shift": "shift of a head's output",
}


def of_items(loaded: Loaded, items: Sequence[Item], share: float, settings: Settings) -> pd.DataFrame:
    """`of_item` of each item, with the model's name."""
    arguments = {"policies": COMPARED, "share": share, "tokens": settings.tokens}
    return run(PerItem("synthesis", "kept", items, of_item, arguments), loaded, settings).assign(model=loaded.name)


def conditions(share: float, policies: Sequence[str] = COMPARED) -> list[Condition]:
    """Each policy as its paper describes it, at one share."""
    return [Condition(name, share, Prefill(), reading="as_described") for name in policies]


def of_item(loaded: Loaded, item: Item, policies: Sequence[str], share: float, tokens: int) -> pd.DataFrame:
    """What each policy, as its paper describes it, keeps of a prompt: rows (policy, layer, head of keys and values).

    evidence: share of the evidence's tokens; distinct: 1 - the mean cosine of two different kept keys; mass: share of
    the last query's attention, mean over the query heads; shift: length of the change of a query head's output at the
    last query, over the output's length, mean over the query heads.
    """
    prompt = data.build_prompt(item, loaded.tokenizer, tokens)
    [answers] = generate(
        loaded.model, [prompt], conditions(share, policies), max_new_tokens=1, stop_ids=(), kept_sets=True
    )
    layers = list(_layers(loaded, prompt.ids).items())
    parts = []
    for name, answer in zip(policies, answers, strict=True):
        for (layer, (key, value, p)), keep in zip(layers, answer.kept_sets, strict=True):
            mask = torch.as_tensor(keep, device=key.device)
            evidence = mask[:, prompt.spans.get("evidence", [])].float().mean(1)  # nan without evidence
            measures = {"evidence": evidence} | _of_layer(key, value, p, mask)
            columns = {measure: values.tolist() for measure, values in measures.items()}
            parts.append(pd.DataFrame({"policy": name, "layer": layer, "head": range(len(mask)), **columns}))
    return pd.concat(parts, ignore_index=True)


def _of_layer(key: Tensor, value: Tensor, p: Tensor, kept: Tensor) -> dict[str, Tensor]:
    """Measures of one layer, each [kv_heads]. key, value: [kv_heads, tokens, dim]; p: the last query's attention,
    [kv_heads, group, tokens]; kept: bool [kv_heads, tokens]."""
    count = kept.sum(1)
    unit = F.normalize(key.float(), dim=-1) * kept[..., None]
    likeness = (unit.sum(1).square().sum(1) - count) / (count * (count - 1)).clamp(min=1)
    left = p * kept[:, None]
    mass = left.sum(-1)
    before, after = p @ value.float(), (left / mass.clamp(min=1e-9)[..., None]) @ value.float()
    shift = (after - before).norm(dim=-1) / before.norm(dim=-1).clamp(min=1e-9)
    return {"distinct": 1 - likeness, "mass": mass.mean(1), "shift": shift.mean(1)}


def _layers(loaded: Loaded, ids: Sequence[int]) -> dict[int, tuple[Tensor, Tensor, Tensor]]:
    """By layer, of those that evict: keys and values [kv_heads, tokens, dim], the last query's attention [kv_heads,
    group, tokens]."""
    seen: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    class Looking:
        def attend(
            self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: Any, sliding: int | None = None
        ):
            at = torch.arange(len(ids), device=query.device)[None]
            parts, last = [(key, value, at[:, None])], []
            attend(query[:, :, -1:], at[:, -1:], parts, scaling, sliding, lambda p, _: last.append(p[0, :, :, 0]))
            seen[layer] = key[0], value[0], last[0].float()
            return attend(query, at, parts, scaling, sliding, prompt=True)

    read_once(loaded.model, ids, Looking())
    return {layer: seen[layer] for layer in ModelFacts.of(loaded.model).evictable}
