"""What `SharedCap` adds to a policy: orders among equal scores, shields, and a union over heads.

The protection paper and its artifact differ in thirteen choices. Each is a parameter of every policy of this regime
(`SWITCHES`): its value "as_run" is what the artifact's code does, "as_described" what the paper's text says. Source:
artifact commit 496739f against the paper's sections 3, 7 and 10, Table 19.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from kvrepro.engine.observe import Observation
from kvrepro.engine.select import lexsort
from kvrepro.engine.shapes import Mask, RowInts, Scores, TokenInts


@dataclass(frozen=True)
class Switch:
    """A choice on which the paper and its artifact differ. also: further values that may be of interest."""

    as_run: object
    as_described: object
    means: str
    also: tuple[Any, ...] = ()

    @property
    def allowed(self) -> tuple[Any, ...]:
        """The values that it can have."""
        return tuple(dict.fromkeys((self.as_run, self.as_described, *self.also)))


SWITCHES = {
    "tie_break": Switch("string", "integer", "order among equals: decimal string of the position, or its number"),
    "guardrail": Switch("ignores", "honours", "does the last trim to capacity respect protected tokens?"),
    "n_prot": Switch("floor", "ceil", "rounding of fraction x capacity, at least 4"),
    "empty_suffix": Switch(
        "keeps_newest", "right", "a prefix without a suffix: everything counts as protected and the newest stay, or not"
    ),
    "first_reduction": Switch(0, 0, "step of the first reduction, policies with one set for all heads", also=(8,)),
    "per_head_first_reduction": Switch(8, 0, "step of the first reduction, per-head policies"),
    "score_reduce": Switch(
        "max", "mean", "attention: maxima over layers, heads, queries, or means summed over queries"
    ),
    "head_map": Switch("first_n_kv", "group_mean", "a KV head's attention: query head of its number, or group mean"),
    "static_suffix": Switch("per_head_only", "anywhere", "where a suffix fixed at the prompt's end exists"),
    "trim_guard": Switch(
        "dynamic", "same", "suffix that the per-head union's trim spares: newest, or the policy's own"
    ),
    "random_seed": Switch("per_item", "by_prompt", "seed 42 anew for every item, or mixed with the prompt"),
    "snapkv_bonus": Switch("peak", "current", "SnapKV's second term: largest attention so far, or the latest"),
    "slw_window": Switch("last_access", "position", "StreamingLLM's window: last used tokens, or newest tokens"),
}
AS_RUN = {name: switch.as_run for name, switch in SWITCHES.items()}
AS_DESCRIBED = {name: switch.as_described for name, switch in SWITCHES.items()}
FIELD_BITS = 21  # steps and positions below two million fit one field of a packed int64 key
SLW_SINKS = 4


# ---- orders among equals


@cache
def _string_order(size: int, device: torch.device) -> Tensor:
    """Rank of each position `0 .. size-1` by its decimal string, int64 [size]: 0, 1, 10, 100, 1000, 1001, ..."""
    return torch.tensor(sorted(range(size), key=str), device=device).argsort()


def position_rank(positions: TokenInts, tie_break: str) -> TokenInts:
    """Order among equals: by the position's number ("integer"), or by its decimal string ("string", the artifact's)."""
    if tie_break == "integer":
        return positions
    size = 1 << max(int(positions.max()) + 1, 1024).bit_length()  # few sizes, so that the table is sorted once
    return _string_order(size, positions.device)[positions.clamp(min=0)]


def tie_key(o: Observation, names: Sequence[str], tie_break: str) -> Tensor:
    """One int64 key per token [batch, 1 or kv_heads, tokens] for the lexicographic order (sums `names`, position)."""
    key = torch.zeros_like(o.positions)
    for name in names:
        key = (key | o.sums[name]) << FIELD_BITS
    return key | position_rank(o.positions, tie_break)


def order(o: Observation, scores: Scores, ties: Sequence[str], tie_break: str = "string") -> Tensor:
    """Order among equal scores, large = stays: by `ties`, then by position. Shielded tokens (score inf), which leave as
    a last resort, are ordered by last use, entry and the position's number in either reading."""
    by_age = tie_key(o, ("last_use", "entered"), "integer")
    return torch.where(scores.isposinf(), by_age, tie_key(o, ties, tie_break))


# ---- shields


def sinks_and_window(
    o: Observation, scores: Scores, budget: RowInts, guarded: Mask, tie_break: str = "string",
    slw_window: str = "last_access",
) -> Mask:  # fmt: skip
    """StreamingLLM's own shield, without the guarded tokens.

    As run, it takes the 4 oldest unguarded tokens, by (I, position), and the `budget - 4` latest, by (L, I, position):
    with guards more than there is room for, so that LRU's order decides. As described, the 4 first tokens stay, and the
    newest of the others as far as the budget has room beside them and the guards: the order is that of positions alone,
    so that attention cannot hold a token in the middle. Artifact's SLW; paper, section 6 (the sink+window exception)
    and Table 19.
    """
    free, place = o.alive & ~guarded, tie_key(o, (), tie_break)
    if slw_window == "position":
        sinks = rank(place, o.alive) < SLW_SINKS
        rest = free & ~sinks
        room = budget[:, None] - (guarded | sinks).sum(-1)
        return (free & sinks) | (rest & (rank(place, rest) >= (rest.sum(-1) - room)[..., None]))
    oldest = rank(tie_key(o, ("entered",), tie_break), free)
    latest = rank(tie_key(o, ("last_use", "entered"), tie_break), free)
    window = free.sum(-1) - (budget - SLW_SINKS)[:, None]
    return free & ((oldest < SLW_SINKS) | (latest >= window[..., None]))


def rank(key: Tensor, among: Mask) -> Tensor:
    """Place of each token of `among` in ascending order of `key`; the others come after all of them."""
    order = key.masked_fill(~among, torch.iinfo(key.dtype).max).argsort(dim=-1, stable=True)
    return order.argsort(dim=-1).masked_fill(~among, key.shape[-1])


# ---- policies that choose per head


def every_head(scores: Scores, protected: Mask, budget: RowInts, o: Observation) -> Tensor:
    """The whole budget to each head; their union is trimmed to it. "Faithful" QUEST in the artifact."""
    held = protected.sum(-1)
    return held + _free_budget(protected, budget, o)[:, None].expand(-1, scores.shape[1])


def by_entropy(scores: Scores, protected: Mask, budget: RowInts, o: Observation) -> Tensor:
    """Focused heads get more: B_h = round(B * kv_heads * (1/H_h) / sum(1/H)), at least 1, then one by one from the
    largest or to the smallest until they sum to B * kv_heads.

    B is the budget beside the protected tokens, H_h the natural entropy of the head's scores normalised over the other
    tokens (uniform where all are 0). "Faithful" Ada-KV in the artifact.
    """
    free = o.alive & ~protected
    mass = scores.masked_fill(~free, 0.0)
    total = mass.sum(-1, keepdim=True)
    p = torch.where(total > 0, mass / total, free / free.sum(-1, keepdim=True).clamp(min=1))
    inverse = 1.0 / torch.special.entr(p).sum(-1).clamp(min=1e-9)
    goal = _free_budget(protected, budget, o) * scores.shape[1]
    counts = (inverse / inverse.sum(-1, keepdim=True) * goal[:, None]).round().long().clamp(min=1)
    while bool((missing := goal - counts.sum(-1)).any()):
        head = torch.where(missing < 0, counts.argmax(-1), counts.argmin(-1))
        counts = counts.scatter_add(1, head[:, None], missing.sign()[:, None])
    return protected.sum(-1) + counts


def _free_budget(protected: Mask, budget: RowInts, o: Observation) -> RowInts:
    """What is left of `budget` beside the protected tokens, which are the same in all heads."""
    return torch.minimum(budget - protected[:, 0].sum(1), (o.alive & ~protected)[:, 0].sum(1))


def trim_union(heads: Mask, scores: Scores, firm: Mask, o: Observation, budget: RowInts, tie_break: str) -> Mask:
    """The heads' selections with their union cut to `budget`. Tokens that the fewest heads selected leave first, then
    those with the lower score summed over heads, then by position; `firm` tokens stay."""
    votes = heads.sum(1)
    overflow = (votes.count_nonzero(1) - budget).clamp(min=0)
    open_to = (votes > 0) & ~firm[:, 0]
    total = scores.masked_fill(~o.alive, 0.0).sum(1)
    ranks = lexsort((~open_to).long(), votes, total, position_rank(o.positions[:, 0], tie_break)).argsort(dim=-1)
    return heads & ~(open_to & (ranks < overflow[:, None]))[:, None]
