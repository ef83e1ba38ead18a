"""DropKV against its peers on answers: the question visible, the prompt reduced once, 5 to 30% of it kept.

Every method looks through the last 8 queries and pools over 11 tokens, where it does either (DropKV, section 5).
"""

from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache

from kvrepro import claims, data
from kvrepro.attention import installed
from kvrepro.catalogue import CATALOGUE
from kvrepro.condition import Condition
from kvrepro.data import Item
from kvrepro.dropkv_bound import bound
from kvrepro.dropkv_bound.study import interval
from kvrepro.dropkv_bound.triples import Triple, dropkv, pooled, triples
from kvrepro.errors import InputError
from kvrepro.models import Loaded
from kvrepro.run import run

PEERS = ("dropkv", "snapkv", "pyramid_kv", "streaming_llm", "key_diff", "cake", "critical_kv", "andpro")
VARIANTS: dict[str, tuple[str, dict[str, object]]] = {
    "DropKV, average pooling": ("dropkv", {"pool": "average"}),
    "DropKV, no pooling": ("dropkv", {"pool": "none"}),
    "DropKV, bf16 attention": ("dropkv", {"round_p": True}),
    "DropKV, adaptive heads": ("kvrepro/dropkv_bound/policies.py:PER_HEAD", {}),
    "DropKV, adaptive layers": ("kvrepro/dropkv_bound/policies.py:PER_LAYER", {}),
    "AnDPro, max pooling": ("andpro", {"pool": "max"}),
}
RETRIEVAL = "tinyworld:needle,needle_multikey,needle_multivalue,needle_multiquery,variable_tracking,frequent_words"
MEASURE = "token_f1"


def condition(policy: str, share: float, **switches: object) -> Condition:
    """`share` of the prompt kept under the paper's settings; `switches` go beyond them."""
    known = CATALOGUE[policy].parameters if policy in CATALOGUE else CATALOGUE["dropkv"].parameters
    paper = {name: value for name, value in {"window": 8, "kernel": 11}.items() if name in known}
    given = tuple(sorted((paper | switches).items()))
    return Condition(policy, share=share, regime="prefill", reading="as_described", switches=given)


def grid(shares: Sequence[float], peers: Sequence[str] = PEERS, variants: bool = True) -> dict[str, list[Condition]]:
    """Conditions by the name they have in tables: the full cache, the peers at every share, variants at the least."""
    if unknown := [one for one in peers if one not in CATALOGUE]:
        raise InputError(f"unknown policy {unknown[0]!r}: choose from {', '.join(CATALOGUE)}")
    found = {"full": [Condition(regime="prefill")]}
    found |= {peer: [condition(peer, share) for share in shares] for peer in peers}
    more = VARIANTS.items() if variants else ()
    return found | {name: [condition(policy, min(shares), **switches)] for name, (policy, switches) in more}


def answers(
    loaded: Loaded,
    items: str,
    n_items: int,
    *,
    shares: Sequence[float] = (0.05, 0.10, 0.30),
    lengths: Sequence[int] = (),
    tokens: int = 1900,
    chapter: str = "dropkv_bound",
    max_new_tokens: int = 48,
    seed: int = 0,
    **settings,
) -> pd.DataFrame:
    """Rows of `run` with `method` (its name in tables) and `length`: the whole grid at `tokens`, and at each other of
    `lengths` that the model holds, with half the items, DropKV, SnapKV and AnDPro at the smallest share."""
    parts = []
    for length in dict.fromkeys([tokens, *lengths]):
        if length + max_new_tokens > loaded.context:
            continue
        whole = length == tokens
        asked = grid(shares) if whole else grid(shares[:1], ("dropkv", "snapkv", "andpro"), variants=False)
        found = data.load_items(items, n_items if whole else max(1, n_items // 2), seed, length)
        order = [(name, one) for name, conditions in asked.items() for one in conditions]
        limit = length if any(item.context is not None for item in found) else None
        rows = run(
            chapter, loaded, found, [one for _, one in order], name=f"quality-{length}", seed=seed, limit=limit,
            max_new_tokens=max_new_tokens, **settings,
        )  # fmt: skip
        parts.append(rows.assign(method=[name for name, _ in order] * len(found), length=length))
    if not parts:
        raise InputError(f"prompts of {tokens} tokens do not fit the model's context of {loaded.context}: set tokens")
    rows = pd.concat(parts, ignore_index=True)
    return rows.assign(share=rows["share"].astype(float).fillna(1.0))


def _wide(rows: pd.DataFrame, length: int) -> pd.DataFrame:
    """F1 by item (rows) and (method, share); an item without a value anywhere drops out."""
    here = rows[rows.length == length]
    return here.set_index(["item", "method", "share"])[MEASURE].unstack(["method", "share"]).dropna()  # noqa: PD010


def main_length(rows: pd.DataFrame) -> int:
    """The prompt length that all methods were run at."""
    return int(rows.groupby("length").method.nunique().idxmax())


def differences(rows: pd.DataFrame, against: str, share: float, length: int | None = None) -> pd.DataFrame:
    """Per item DropKV's F1 minus another method's at a share (the full cache's: "full"): item, difference."""
    wide = _wide(rows, main_length(rows) if length is None else length)
    other = ("full", 1.0) if against == "full" else (against, share)
    if missing := [one for one in (("dropkv", share), other) if one not in wide]:
        raise InputError(
            f"not run: {missing[0][0]} at {missing[0][1]:.0%}; the rows hold {sorted(rows.method.unique())}"
        )
    return (wide["dropkv", share] - wide[other]).rename("difference").reset_index()


def table(rows: pd.DataFrame, length: int | None = None) -> pd.DataFrame:
    """Mean F1 per method and share, and DropKV's lead at that share, each with its interval over items."""
    length = main_length(rows) if length is None else length
    wide = _wide(rows, length)
    found = []
    for method, share in wide.columns:
        value, low, high, n = interval(wide[method, share].rename("f1").reset_index(), ["f1"], np.mean)
        row = {"method": method, "share": share, "f1": value, "low": low, "high": high, "items": n}
        if method != "dropkv":
            lead = differences(rows, method, min(wide["dropkv"].columns) if method == "full" else share, length)
            names = ("lead", "lead_low", "lead_high")
            row |= dict(zip(names, interval(lead, ["difference"], np.mean)[:3], strict=True))
        found.append(row)
    return pd.DataFrame(found)


def shown(rows: pd.DataFrame, length: int | None = None) -> pd.DataFrame:
    """`table` for the eye: a row per method, F1 with its interval at each share."""
    found = table(rows, length)
    text = [claims._text((one.f1, one.low, one.high), "F1") for one in found.itertuples()]
    wide = found.assign(text=text).pivot_table(index="method", columns="share", values="text", aggfunc="first")
    order = found[found.share == found.share.min()].sort_values("f1", ascending=False).method
    wide = wide.reindex(["full", *order]).fillna("")
    return wide.rename(columns=lambda share: "all" if share == 1 else f"{share:.0%}").rename_axis(
        columns="F1, share kept"
    )


def by_length(rows: pd.DataFrame) -> pd.DataFrame:
    """F1 with its interval per method and prompt length (tokens), at the smallest share kept."""
    parts = [
        table(rows[rows.length == length], length).assign(length=length) for length in sorted(rows.length.unique())
    ]
    found = pd.concat(parts)
    found = found[found.method.isin(["full", "dropkv", "snapkv", "andpro"])]
    found = found[(found.share == found.share.min()) | (found.method == "full")]
    text = [claims._text((one.f1, one.low, one.high), "F1") for one in found.itertuples()]
    wide = found.assign(text=text).pivot_table(index="method", columns="length", values="text", aggfunc="first")
    return wide.rename(columns="{:,}".format).rename_axis(columns="F1, prompt tokens")


def numbers(rows: pd.DataFrame) -> dict[str, str]:
    """What the prose may quote: the smallest share and, as `f1-<method>` (lower case, hyphens), F1 there."""
    found = table(rows)
    least = found[(found.share == found.share.min()) | (found.method == "full")]
    names = least.method.str.lower().str.replace(",", "").str.replace(" ", "-")
    text = {
        f"f1-{name}": claims._text((one.f1, one.low, one.high), "F1")
        for name, one in zip(names, least.itertuples(), strict=True)
    }
    return text | {"least-share": f"{found.share.min():.0%}", "answered": str(found["items"].max())}


def losses(rows: pd.DataFrame, share: float = 0.05) -> pd.DataFrame:
    """Per item the F1 that DropKV loses against the full cache at a share, for `tables.prediction`."""
    found = differences(rows, "full", share)
    return pd.DataFrame({"item": found["item"], "loss": -found.difference})


# ---------------------------------------------------------------- one layer at a time


class _OneLayer:
    """Attention of new tokens over a cached prompt, of which the query heads of one layer see only what each kept."""

    layer = -1
    evicted: Tensor  # bool [heads, tokens]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, sliding: int = 0) -> Tensor:
        heads, new, tokens = query.shape[1], query.shape[2], key.shape[2]
        seen = None
        if new < tokens:
            seen = torch.ones(1, heads, new, tokens, dtype=torch.bool, device=query.device).tril(tokens - new)
            if layer == self.layer:
                seen[..., : self.evicted.shape[1]] &= ~self.evicted.to(query.device)[:, None]
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=seen, is_causal=seen is None, scale=scaling, enable_gqa=True
        )
        return out.transpose(1, 2)


def layer_losses(
    loaded: Loaded, items: Sequence[Item], *, share: float = 0.05, window: int = 8, kernel: int = 11, limit: int = 0
) -> pd.DataFrame:
    """What the answer loses when DropKV reduces the heads of one layer to `share` of the prompt, all else whole.

    Each query head evicts by its own scores, as the theory has it. Columns item, layer, loss: mean negative
    log-likelihood of the right answer's tokens, minus the same with the full cache, nats per token.
    """
    rows = []
    for item in items:
        ids = data.build_prompt(item, loaded.tokenizer, limit or loaded.context).ids
        answer = loaded.tokenizer(item.answer, add_special_tokens=False)["input_ids"]
        gone = len(ids) - max(int(share * len(ids)), window)
        evicted: dict[int, Tensor] = {}

        def visit(found: Iterator[Triple], gone: int = gone, evicted: dict = evicted) -> None:
            for t in found:
                mask = torch.zeros(1, len(t.p), dtype=torch.bool)
                mask[0, bound.smallest(pooled(dropkv(t), kernel)[:-window], gone)] = True
                evicted[t.layer] = torch.cat([evicted[t.layer], mask]) if t.layer in evicted else mask

        triples(loaded.model, ids, [len(ids) - 1], visit, window=window)
        found = _answer_losses(loaded, ids, answer, evicted)
        rows += [{"item": item.id, "layer": layer, "loss": loss} for layer, loss in found.items()]
    return pd.DataFrame(rows)


@torch.inference_mode()
def _answer_losses(loaded: Loaded, ids: list[int], answer: list[int], evicted: dict[int, Tensor]) -> dict[int, float]:
    model, one = loaded.model, _OneLayer()
    cache = DynamicCache(config=model.config)
    last = len(ids) - 1  # the prompt's last token is read again each time: it too sees only what is kept
    tokens = torch.tensor([[ids[last], *answer[:-1]]], device=model.device)
    right = torch.tensor(answer, device=model.device)

    def loss() -> float:
        logits = model(tokens, past_key_values=cache, use_cache=True, kvrepro=one).logits[0].float()
        cache.crop(-tokens.shape[1])
        return F.cross_entropy(logits, right).item()

    with installed(model):
        start = torch.tensor([ids[:last]], device=model.device)
        model(start, past_key_values=cache, use_cache=True, logits_to_keep=1, kvrepro=one)
        whole = loss()
        found = {}
        for one.layer, mask in evicted.items():
            one.evicted = mask[:, :last]
            found[one.layer] = loss() - whole
    return found
