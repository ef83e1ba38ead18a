"""Why one policy's answers are better than another's: what its heads keep, and what that does to attention."""

from collections.abc import Sequence
from typing import Any

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor

from kvrepro.chapters.synthesis.settings import Settings
from kvrepro.engine.attention import attend, attend_prompt, read_once
from kvrepro.engine.condition import Condition
from kvrepro.engine.facts import ModelFacts
from kvrepro.engine.generate import generate
from kvrepro.engine.regime import Prefill
from kvrepro.experiment import data, stats
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
    given = {"policies": COMPARED, "share": share, "tokens": settings.tokens}
    return run(PerItem("synthesis", "kept", items, of_item, given), loaded, settings).assign(model=loaded.name)


def leads(rows: pd.DataFrame, score: str = "score") -> pd.DataFrame:
    """KeyDiff's score minus each other published policy's, item by item: model, kept, rival, value, low, high, n."""
    known = rows[rows.kind == "published"]
    same = ["item", "model", "kept"]
    parts = [
        stats.contrasts(known[known.method == "key_diff"], other, same[1:], score, on=same).assign(rival=name)
        for name, other in known.groupby("method", sort=False)
        if name != "key_diff"
    ]
    found = pd.concat([pd.DataFrame(columns=[*same[1:], "value", "low", "high", "n", "rival"]), *parts])
    return found.sort_values(["model", "kept", "value"], ignore_index=True)


def agreement(rows: pd.DataFrame, score: str = "score") -> pd.DataFrame:
    """Of each item (model, item), Spearman's rank correlation of the score with `evidence_heads`, over its rows."""
    found = [
        (*who, part[score].corr(part.evidence_heads, method="spearman"))
        for who, part in rows.dropna(subset="evidence_heads").groupby(["model", "item"], sort=False)
        if min(part[score].nunique(), part.evidence_heads.nunique()) > 1
    ]
    return pd.DataFrame(found, columns=["model", "item", "value"])


def of_item(loaded: Loaded, item: Item, policies: Sequence[str], share: float, tokens: int) -> pd.DataFrame:
    """Of what each policy keeps of a prompt, as its paper describes it: policy, layer, head (of keys and values), and

    evidence: share of the evidence's tokens; distinct: 1 - the mean cosine of two different kept keys; mass: share of
    the last query's attention, mean over the query heads; shift: length of the change of a query head's output at the
    last query, over its length, mean over the query heads.
    """
    prompt = data.build_prompt(item, loaded.tokenizer, tokens)
    conditions = [Condition(name, share, Prefill(), reading="as_described") for name in policies]
    [answers] = generate(loaded.model, [prompt], conditions, max_new_tokens=1, stop_ids=(), kept_sets=True)
    layers = list(_layers(loaded, prompt.ids).items())
    rows = []
    for name, answer in zip(policies, answers, strict=True):
        for (layer, (key, value, p)), keep in zip(layers, answer.kept_sets, strict=True):
            mask = torch.as_tensor(keep, device=key.device)
            found = _of_layer(key, value, p, mask)
            evidence = mask[:, prompt.spans.get("evidence", [])].float().mean(1)  # nan without evidence
            rows += [
                {"policy": name, "layer": layer, "head": head, "evidence": float(evidence[head])}
                | {measure: float(values[head]) for measure, values in found.items()}
                for head in range(len(mask))
            ]
    return pd.DataFrame(rows)


def _of_layer(key: Tensor, value: Tensor, p: Tensor, kept: Tensor) -> dict[str, Tensor]:
    """Measures of one layer, each [kv_heads]. key, value: [kv_heads, tokens, dim]; p: of the last query, [kv_heads,
    group, tokens]; kept: bool [kv_heads, tokens]."""
    count = kept.sum(1)
    unit = F.normalize(key.float(), dim=-1) * kept[..., None]
    likeness = (unit.sum(1).square().sum(1) - count) / (count * (count - 1)).clamp(min=1)
    left = p * kept[:, None]
    mass = left.sum(-1)
    before, after = p @ value.float(), (left / mass.clamp(min=1e-9)[..., None]) @ value.float()
    shift = (after - before).norm(dim=-1) / before.norm(dim=-1).clamp(min=1e-9)
    return {"distinct": 1 - likeness, "mass": mass.mean(1), "shift": shift.mean(1)}


def _layers(loaded: Loaded, ids: Sequence[int]) -> dict[int, tuple[Tensor, Tensor, Tensor]]:
    """Of every layer that evicts: keys and values [kv_heads, tokens, dim], attention of the last query [kv_heads,
    group, tokens]."""
    found: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
    at = torch.arange(len(ids), device=loaded.model.device)[None]

    class Looking:
        def attend(
            self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: Any, sliding: int | None = None
        ) -> Tensor:
            here, seen = at.to(query.device), []
            parts = [(key, value, here[:, None])]
            attend(query[:, :, -1:], here[:, -1:], parts, scaling, sliding, lambda p, _: seen.append(p[0, :, :, 0]))
            found[layer] = key[0], value[0], seen[0].float()
            plain = sliding is None or sliding >= len(ids)
            return attend_prompt(query, key, value, scaling) if plain else attend(query, here, parts, scaling, sliding)

    read_once(loaded.model, ids, Looking())
    return {layer: found[layer] for layer in ModelFacts.of(loaded.model).evictable}
