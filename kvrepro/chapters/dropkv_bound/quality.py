"""DropKV against its peers on answers: the question visible, the prompt reduced once, 5 to 30% of it kept.

Every method looks through the last 8 queries and pools over 11 tokens, where it does either (DropKV, section 5).
"""

from collections.abc import Mapping, Sequence
from itertools import chain

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache

from kvrepro.chapters.dropkv_bound import bound
from kvrepro.chapters.dropkv_bound.settings import Settings
from kvrepro.chapters.dropkv_bound.triples import Layer, triples
from kvrepro.engine.attention import installed
from kvrepro.engine.condition import Condition
from kvrepro.engine.facts import ModelFacts
from kvrepro.engine.policy import find, is_own
from kvrepro.engine.regime import Prefill
from kvrepro.engine.rule import check
from kvrepro.engine.score.window import pooled
from kvrepro.experiment import data, measure
from kvrepro.experiment.judge import NotTestable
from kvrepro.experiment.models import Loaded
from kvrepro.experiment.run import Answers, PerItem, run
from kvrepro.item import Item

PEERS = ("snapkv", "pyramid_kv", "streaming_llm", "key_diff", "cake", "critical_kv", "andpro")
BY_LENGTH = ("snapkv", "andpro")  # and a reader's own policies
VARIANTS: dict[str, tuple[str, dict[str, object]]] = {
    "DropKV, average pooling": ("dropkv", {"pool": "average"}),
    "DropKV, no pooling": ("dropkv", {"pool": "none"}),
    "DropKV, bf16 attention": ("dropkv", {"round_p": True}),
    "DropKV, adaptive heads": ("kvrepro/chapters/dropkv_bound/policies.py:PER_HEAD", {}),
    "DropKV, adaptive layers": ("kvrepro/chapters/dropkv_bound/policies.py:PER_LAYER", {}),
    "AnDPro, max pooling": ("andpro", {"pool": "max"}),
}
RETRIEVAL = "tinyworld:needle,needle_multikey,needle_multivalue,needle_multiquery,variable_tracking,frequent_words"
MEASURE = "score"


def peers_of(policies: Sequence[str]) -> list[str]:
    """The policies to compare with DropKV, each once. Raises InputError for a name that is not a policy's."""
    peers = [name for name in dict.fromkeys(policies) if name not in ("full", "dropkv")]
    for name in peers:
        find(name)  # raises
    return peers


def condition(policy: str, share: float, settings: Settings, **switches: object) -> Condition:
    """Keep `share` of the prompt, with the window and kernel of DropKV's paper; `switches` add to these."""
    parameters = find(policy).parameters
    of_paper = {name: getattr(settings, name) for name in ("window", "kernel") if name in parameters}
    all_switches = tuple(sorted((of_paper | switches).items()))
    return Condition(policy, share, Prefill(), reading="as_described", switches=all_switches)


def grid(settings: Settings, peers: Sequence[str] = PEERS) -> dict[str, list[Condition]]:
    """Conditions by their name in tables: the full cache, DropKV and its peers at every share, variants at the least
    share."""
    conditions = {"full": [Condition()]}
    conditions |= {peer: [condition(peer, share, settings) for share in settings.shares] for peer in ("dropkv", *peers)}
    return conditions | {name: [condition(policy, settings.least, settings, **switches)]
                    for name, (policy, switches) in VARIANTS.items()}  # fmt: skip


def answers(
    loaded: Loaded, items: Sequence[Item], by_length: Mapping[int, Sequence[Item]], peers: Sequence[str],
    settings: Settings,
) -> pd.DataFrame:  # fmt: skip
    """Rows of `run` with `method` (its name in tables), `length` and `score` (`measure.scores`).

    `items`, cut to `settings.tokens`, are answered under the whole grid; those of each other length
    (`study.questions_by_length`) under DropKV, SnapKV, AnDPro and the reader's own policies at the smallest share.
    Raises InputError before the run for a condition that cannot be met.
    """
    whole, planned = grid(settings, peers), []
    few = ["full", "dropkv", *(name for name in peers if name in BY_LENGTH or is_own(name))]
    least = {name: sorted(whole[name], key=lambda c: c.budget or 1)[:1] for name in few}
    for length, questions in {**by_length, settings.tokens: items}.items():
        cut = any(item.context is not None for item in questions)
        if questions is not items and not cut and {item.id for item in questions} <= {item.id for item in items}:
            continue  # messages cannot be cut: the same prompts are answered at `settings.tokens`
        part = whole if questions is items else least
        names = [name for name, conditions in part.items() for _ in conditions]
        conditions = list(chain(*part.values()))
        shortest = min(len(data.build_prompt(item, loaded.tokenizer, length).ids) for item in questions)
        for c in conditions:
            check(c, shortest)
        limit = length if cut else None
        study = Answers("dropkv_bound", f"quality-{length}", questions, conditions, settings.max_new_tokens, limit)
        planned.append((study, names * len(questions), length))
    parts = [run(study, loaded, settings).assign(method=names, length=n) for study, names, n in planned]
    rows = pd.concat(parts, ignore_index=True)
    return rows.assign(share=rows["share"].astype(float).fillna(1.0), score=measure.scores(rows))


def main(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of the prompt length at which all methods were run."""
    return rows[rows.length == rows.groupby("length").method.nunique().idxmax()]


def pair(rows: pd.DataFrame, against: str, share: float) -> pd.DataFrame:
    """Score of DropKV (a) and of another method, or "full" (b), at a share, by item that has both."""
    sides, rows = {}, main(rows)
    for name, method, side_share in (("a", "dropkv", share), ("b", against, 1.0 if against == "full" else share)):
        of_side = rows[(rows.method == method) & (rows["share"] == side_share)]
        if of_side.empty:
            raise NotTestable(f"not run: {method} at {side_share:.0%}")
        sides[name] = of_side.set_index("item")[MEASURE]
    return pd.DataFrame(sides).dropna()


def losses(rows: pd.DataFrame, share: float) -> pd.DataFrame:
    """The score that each item loses with DropKV at a share, against the full cache. Columns item, loss."""
    scores = pair(rows, "full", share)
    return (scores.b - scores.a).rename("loss").reset_index()


# ---------------------------------------------------------------- one layer, or one head of it, at a time

PACKED = 512  # tokens of copies of the answer in one pass


class _Packed:
    """Attention of several copies of the answer over one cached prompt, a sequence of copies x new tokens.

    A copy (layer, head) sees itself and the prompt; in its own layer and head (-1: all heads) only what eviction leaves
    of this. evicted: of each layer, bool [heads, prompt].
    """

    def __init__(self, evicted: dict[int, Tensor], copies: Sequence[tuple[int, int]], new: int):
        self.evicted, self.copies, self.new = evicted, torch.tensor(copies).T, new
        same = torch.arange(len(copies)).repeat_interleave(new)
        self.own = (same[:, None] == same).tril()

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, sliding: int = 0) -> Tensor:
        device = query.device  # the layers of a large model lie on several
        layers, heads = self.copies.to(device)
        head_numbers = torch.arange(query.shape[1], device=device)[:, None]
        touched = (layers == layer) & ((heads == head_numbers) | (heads < 0))
        past = ~(touched[..., None] & self.evicted[layer][:, None]).repeat_interleave(self.new, 1)
        seen = torch.cat([past, self.own.to(device).expand(len(past), -1, -1)], -1)[None]
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2)


def answer_losses(loaded: Loaded, items: Sequence[Item], settings: Settings) -> tuple[pd.DataFrame, pd.DataFrame]:
    """What the answer loses when DropKV keeps the smallest share of the prompt in one layer, or in one head of a layer.

    Two frames: item, layer, loss; and item, layer, head, loss. All other layers and heads stay whole, and each query
    head evicts by its own scores, as in the theory. loss: mean negative log-likelihood of the right answer's tokens,
    minus the same with the full cache, nats per token.
    """
    given = {"share": settings.least, "window": settings.window, "kernel": settings.kernel, "limit": settings.tokens}
    rows = run(PerItem("dropkv_bound", "answer-losses", items, answer_loss, given), loaded, settings)
    return rows[rows["head"] < 0].drop(columns="head"), rows[rows["head"] >= 0]


def answer_loss(loaded: Loaded, item: Item, share: float, window: int, kernel: int, limit: int) -> pd.DataFrame:
    """`answer_losses` of one item. Columns layer, head (-1: all of the layer), loss."""
    ids = data.build_prompt(item, loaded.tokenizer, limit).ids
    answer = loaded.tokenizer(item.answer, add_special_tokens=False)["input_ids"]
    gone = len(ids) - max(int(share * len(ids)), window)
    evicted: dict[int, Tensor] = {}

    def visit(layer: Layer) -> None:
        cost = layer.cost(len(ids) - 1)
        cheapest = bound.smallest(pooled(cost, "max", kernel)[:, :-window], gone)
        evicted[layer.number] = torch.zeros_like(cost, dtype=torch.bool).scatter_(1, cheapest, True)

    slides = bool(ModelFacts.of(loaded.model).sliding)  # a cache that slides cannot be cut back
    cache = DynamicCache(config=None if slides else loaded.model.config)
    triples(loaded.model, ids, [len(ids) - 1], visit, window=window, cache=cache)
    cache.crop(-1)  # the prompt's last token is read again by every copy: it too sees only what is kept
    return _answer_losses(loaded, ids, answer, evicted, cache)


@torch.inference_mode()
def _answer_losses(
    loaded: Loaded, ids: list[int], answer: list[int], evicted: dict[int, Tensor], cache: DynamicCache
) -> pd.DataFrame:
    """Columns layer, head (-1: all of the layer), loss. cache: the prompt without its last token."""
    model, last = loaded.model, len(ids) - 1
    evicted = {layer: mask[:, :last] for layer, mask in evicted.items()}
    copies = [(layer, head) for layer, mask in evicted.items() for head in range(-1, len(mask))]
    tokens = torch.tensor([[ids[last], *answer[:-1]]], device=model.device)
    right = torch.tensor(answer, device=model.device)
    position_ids = torch.arange(last, last + len(answer), device=model.device)[None]
    losses: list[float] = []
    with installed(model):
        all_copies = [(-1, -1), *copies]  # first nothing is evicted
        size = max(1, PACKED // len(answer))
        for batch in (all_copies[i : i + size] for i in range(0, len(all_copies), size)):
            n, packed = len(batch), _Packed(evicted, batch, len(answer))
            logits = model(
                tokens.repeat(1, n), position_ids=position_ids.repeat(1, n), past_key_values=cache, use_cache=True,
                kvrepro=packed,
            ).logits[0].float()  # fmt: skip
            cache.crop(-n * len(answer))
            losses += F.cross_entropy(logits, right.repeat(n), reduction="none").view(n, -1).mean(1).tolist()
    frame = pd.DataFrame(copies, columns=["layer", "head"])
    return frame.assign(loss=np.array(losses[1:]) - losses[0])
