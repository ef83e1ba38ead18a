"""DropKV against its peers on answers: the question visible, the prompt reduced once, 5 to 30% of it kept.

Every method looks through the last 8 queries and pools over 11 tokens, where it does either (DropKV, section 5).
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache

from kvrepro.chapters.dropkv_bound import bound
from kvrepro.chapters.dropkv_bound.triples import Triple, dropkv, pooled, triples
from kvrepro.engine.attention import installed
from kvrepro.engine.catalogue import CATALOGUE
from kvrepro.engine.condition import Condition
from kvrepro.engine.regime import Prefill
from kvrepro.errors import InputError
from kvrepro.experiment import claims, data, stats
from kvrepro.experiment.judge import NotTestable
from kvrepro.experiment.models import Loaded
from kvrepro.experiment.run import Answers, PerItem, Settings, run
from kvrepro.experiment.stats import UNIT
from kvrepro.item import Item

PEERS = ("dropkv", "snapkv", "pyramid_kv", "streaming_llm", "key_diff", "cake", "critical_kv", "andpro")
VARIANTS: dict[str, tuple[str, dict[str, object]]] = {
    "DropKV, average pooling": ("dropkv", {"pool": "average"}),
    "DropKV, no pooling": ("dropkv", {"pool": "none"}),
    "DropKV, bf16 attention": ("dropkv", {"round_p": True}),
    "DropKV, adaptive heads": ("kvrepro/chapters/dropkv_bound/policies.py:PER_HEAD", {}),
    "DropKV, adaptive layers": ("kvrepro/chapters/dropkv_bound/policies.py:PER_LAYER", {}),
    "AnDPro, max pooling": ("andpro", {"pool": "max"}),
}
RETRIEVAL = "tinyworld:needle,needle_multikey,needle_multivalue,needle_multiquery,variable_tracking,frequent_words"
MEASURE = "token_f1"
NAMES = {  # of rules and policies, as the reader sees them
    "full": "full cache",
    "dropkv": "DropKV",
    "attention": "attention",
    "random": "random",
    "keydiff": "KeyDiff",
    "snapkv": "SnapKV",
    "pyramidkv": "PyramidKV",
    "cake": "CAKE",
    "criticalkv": "CriticalKV",
    "andpro": "AnDPro",
    "streaming_llm": "StreamingLLM",
    "key_diff": "KeyDiff",
    "pyramid_kv": "PyramidKV",
    "critical_kv": "CriticalKV",
}


def condition(policy: str, share: float, **switches: object) -> Condition:
    """`share` of the prompt kept under the paper's settings; `switches` go beyond them."""
    known = CATALOGUE[policy].parameters if policy in CATALOGUE else CATALOGUE["dropkv"].parameters
    paper = {name: value for name, value in {"window": 8, "kernel": 11}.items() if name in known}
    given = tuple(sorted((paper | switches).items()))
    return Condition(policy, share, Prefill(), reading="as_described", switches=given)


def grid(shares: Sequence[float], peers: Sequence[str] = PEERS, variants: bool = True) -> dict[str, list[Condition]]:
    """Conditions by the name they have in tables: the full cache, the peers at every share, variants at the least."""
    if unknown := [one for one in peers if one not in CATALOGUE]:
        raise InputError(f"unknown policy {unknown[0]!r}: choose from {', '.join(CATALOGUE)}")
    found = {"full": [Condition()]}
    found |= {peer: [condition(peer, share) for share in shares] for peer in peers}
    more = VARIANTS.items() if variants else ()
    return found | {name: [condition(policy, min(shares), **switches)] for name, (policy, switches) in more}


def answers(
    loaded: Loaded,
    items: Sequence[Item],
    by_length: Mapping[int, Sequence[Item]],
    settings: Settings,
    *,
    shares: Sequence[float] = (0.05, 0.10, 0.30),
    tokens: int = 1900,
    max_new_tokens: int = 48,
) -> pd.DataFrame:
    """Rows of `run` with `method` (its name in tables) and `length`: the whole grid over `items`, cut to `tokens`, and
    DropKV, SnapKV and AnDPro at the smallest share over those of each other length (`study.questions_by_length`)."""
    parts = []
    for length, found in {tokens: items, **{n: some for n, some in by_length.items() if n != tokens}}.items():
        whole = found is items
        cut = any(item.context is not None for item in found)
        if not whole and not cut and {item.id for item in found} <= {item.id for item in items}:
            continue  # messages as they are, answered already
        asked = grid(shares) if whole else grid([min(shares)], ("dropkv", "snapkv", "andpro"), variants=False)
        order = [(name, one) for name, conditions in asked.items() for one in conditions]
        conditions, limit = [one for _, one in order], length if cut else None
        study = Answers("dropkv_bound", f"quality-{length}", found, conditions, max_new_tokens, limit)
        parts.append(
            run(study, loaded, settings).assign(method=[name for name, _ in order] * len(found), length=length)
        )
    rows = pd.concat(parts, ignore_index=True)
    return rows.assign(share=rows["share"].astype(float).fillna(1.0))


def _wide(rows: pd.DataFrame, length: int) -> pd.DataFrame:
    """F1 by item (rows) and (method, share); nan where a row failed."""
    here = rows[rows.length == length]
    return here.set_index(["item", "method", "share"])[MEASURE].unstack(["method", "share"])  # noqa: PD010


def main_length(rows: pd.DataFrame) -> int:
    """The prompt length that all methods were run at."""
    return int(rows.groupby("length").method.nunique().idxmax())


def pair(rows: pd.DataFrame, against: str, share: float, length: int | None = None) -> pd.DataFrame:
    """Per item that has both, F1 of DropKV (a) and of another method (b) at a share (the full cache's: "full")."""
    wide = _wide(rows, main_length(rows) if length is None else length)
    other = ("full", 1.0) if against == "full" else (against, share)
    if missing := [one for one in (("dropkv", share), other) if one not in wide]:
        raise NotTestable(f"not run: {missing[0][0]} at {missing[0][1]:.0%}")
    return pd.DataFrame({"a": wide["dropkv", share], "b": wide[other]}).dropna()


def at_share(rows: pd.DataFrame, share: float) -> pd.DataFrame:
    """F1 by item (rows) and method, DropKV and its peers, at one share."""
    wide = _wide(rows, main_length(rows))
    if ("dropkv", share) not in wide:
        raise NotTestable(f"not run: dropkv at {share:.0%}")
    here = wide.xs(share, axis=1, level="share")
    return here[[name for name in PEERS if name in here]]


def table(rows: pd.DataFrame, length: int | None = None) -> pd.DataFrame:
    """Mean F1 per method and share, and DropKV's lead at that share, each with its interval over items."""
    length = main_length(rows) if length is None else length
    wide = _wide(rows, length)
    found = []
    for method, share in wide.columns:
        e = stats.interval(wide[method, share], bounds=UNIT)
        row = {"method": method, "share": share, "f1": e.value, "low": e.low, "high": e.high, "items": e.n}
        if method != "dropkv":
            both = pair(rows, method, min(wide["dropkv"].columns) if method == "full" else share, length)
            lead = stats.contrast(both, "difference", bounds=UNIT)
            row |= dict(zip(("lead", "lead_low", "lead_high"), lead.triple, strict=True))
        found.append(row)
    return pd.DataFrame(found)


def shown(rows: pd.DataFrame, length: int | None = None) -> pd.DataFrame:
    """`table` for the eye: a row per method, F1 with its interval at each share."""
    found = table(rows, length)
    text = [claims.text_of((one.f1, one.low, one.high)) for one in found.itertuples()]
    wide = found.assign(text=text).pivot_table(index="method", columns="share", values="text", aggfunc="first")
    order = found[found.share == found.share.min()].sort_values("f1", ascending=False).method
    wide = wide.reindex(["full", *order]).fillna("").rename(index=NAMES)
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
    text = [claims.text_of((one.f1, one.low, one.high)) for one in found.itertuples()]
    wide = found.assign(text=text).pivot_table(index="method", columns="length", values="text", aggfunc="first")
    wide = wide.reindex(["full", "dropkv", "snapkv", "andpro"]).dropna(how="all").rename(index=NAMES)
    return wide.rename(columns="{:,}".format).rename_axis(columns="F1, prompt tokens")


def numbers(rows: pd.DataFrame) -> dict[str, str]:
    """What the prose may quote: the smallest share and, as `f1-<method>` (lower case, hyphens), F1 there."""
    found = table(rows)
    least = found[(found.share == found.share.min()) | (found.method == "full")]
    names = least.method.str.lower().str.replace(",", "").str.replace(" ", "-")
    text = {
        f"f1-{name}": claims.text_of((one.f1, one.low, one.high))
        for name, one in zip(names, least.itertuples(), strict=True)
    }
    return text | {"least-share": f"{found.share.min():.0%}", "answered": str(found["items"].max())}


def losses(rows: pd.DataFrame, share: float = 0.05) -> pd.DataFrame:
    """Per item the F1 that DropKV loses against the full cache at a share, for `tables.prediction`."""
    both = pair(rows, "full", share)
    return (both.b - both.a).rename("loss").reset_index()


# ---------------------------------------------------------------- one layer, or one head of it, at a time

PACKED = 512  # tokens of copies of the answer in one pass


class _Packed:
    """Attention of several copies of the answer over one cached prompt, a sequence of copies x new tokens.

    A copy sees itself and of the prompt what its own eviction leaves: `layers` [copies], and `heads` [copies], where
    -1 means all heads of the layer.
    """

    def __init__(self, evicted: dict[int, Tensor], prompt: int):
        self.evicted, self.prompt = evicted, prompt  # layer -> bool [heads, prompt]
        self.layers = self.heads = torch.zeros(0, dtype=torch.long)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, sliding: int = 0) -> Tensor:
        seen = None
        if key.shape[2] > query.shape[2]:
            copies, count = len(self.layers), query.shape[1]
            new = query.shape[2] // copies
            gone = torch.zeros(count, copies, self.prompt, dtype=torch.bool)
            if layer in self.evicted:
                every = torch.arange(count)[:, None]
                touched = (self.layers == layer) & ((self.heads == every) | (self.heads < 0))
                gone = touched[..., None] & self.evicted[layer][:, None]
            own = torch.block_diag(*[torch.ones(new, new)] * copies).bool().tril()
            past = ~gone[:, :, None].expand(-1, -1, new, -1).reshape(count, copies * new, self.prompt)
            seen = torch.cat([past, own.expand(count, -1, -1)], -1)[None].to(query.device)
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=seen, is_causal=seen is None, scale=scaling, enable_gqa=True
        )
        return out.transpose(1, 2)


def answer_losses(
    loaded: Loaded, items: Sequence[Item], settings: Settings, *, share: float = 0.05, window: int = 8,
    kernel: int = 11, limit: int | None = None,
) -> tuple[pd.DataFrame, pd.DataFrame]:  # fmt: skip
    """What the answer loses when DropKV reduces one layer to `share` of the prompt, or one head of it, all else whole.

    Two frames: item, layer, loss; and item, layer, head, loss. Each query head evicts by its own scores, as the theory
    has it. loss: mean negative log-likelihood of the right answer's tokens, minus the same with the full cache, nats
    per token.
    """
    given = {"share": share, "window": window, "kernel": kernel, "limit": limit or loaded.context}
    found = run(PerItem("dropkv_bound", "answer-losses", items, answer_loss, given), loaded, settings)
    layers, heads = (found[found["head"] < 0], found[found["head"] >= 0])
    return (
        layers[["item", "layer", "loss"]].reset_index(drop=True),
        heads[["layer", "head", "loss", "item"]].reset_index(drop=True),
    )


def answer_loss(loaded: Loaded, item: Item, share: float, window: int, kernel: int, limit: int) -> pd.DataFrame:
    """Of one item: layer, head (-1: all of the layer), loss."""
    ids = data.build_prompt(item, loaded.tokenizer, limit).ids
    answer = loaded.tokenizer(item.answer, add_special_tokens=False)["input_ids"]
    gone = len(ids) - max(int(share * len(ids)), window)
    evicted: dict[int, Tensor] = {}

    def visit(found: Iterator[Triple]) -> None:
        for t in found:
            mask = torch.zeros(1, len(t.p), dtype=torch.bool)
            mask[0, bound.smallest(pooled(dropkv(t), kernel)[:-window], gone)] = True
            evicted[t.layer] = torch.cat([evicted[t.layer], mask]) if t.layer in evicted else mask

    cache = DynamicCache(config=loaded.model.config)
    triples(loaded.model, ids, [len(ids) - 1], visit, window=window, cache=cache)
    cache.crop(-1)  # the prompt's last token is read again by every copy: it too sees only what is kept
    return _answer_losses(loaded, ids, answer, evicted, cache)


@torch.inference_mode()
def _answer_losses(
    loaded: Loaded, ids: list[int], answer: list[int], evicted: dict[int, Tensor], cache: DynamicCache
) -> pd.DataFrame:
    """Columns layer, head (-1: all of the layer), loss. cache: the prompt without its last token."""
    model, last = loaded.model, len(ids) - 1
    one = _Packed({layer: mask[:, :last] for layer, mask in evicted.items()}, last)
    copies = [(layer, head) for layer, mask in evicted.items() for head in range(-1, len(mask))]
    tokens = torch.tensor([[ids[last], *answer[:-1]]], device=model.device)
    right = torch.tensor(answer, device=model.device)
    places = torch.arange(last, last + len(answer), device=model.device)[None]
    found: list[float] = []
    with installed(model):
        asked = [(-1, -1), *copies]  # first nothing is evicted
        size = max(1, PACKED // len(answer))
        for some in (asked[i : i + size] for i in range(0, len(asked), size)):
            one.layers, one.heads = torch.tensor(some).T
            n = len(some)
            logits = model(
                tokens.repeat(1, n), position_ids=places.repeat(1, n), past_key_values=cache, use_cache=True,
                kvrepro=one,
            ).logits[0].float()  # fmt: skip
            cache.crop(-n * len(answer))
            found += F.cross_entropy(logits, right.repeat(n), reduction="none").view(n, -1).mean(1).tolist()
    frame = pd.DataFrame(copies, columns=["layer", "head"])
    return frame.assign(loss=np.array(found[1:]) - found[0])
