"""`SharedCap`: statistics of the attention that each token received so far, over all layers, by which its policies
rank; and what it adds to a policy: orders among equal scores, shields, and a union over heads.

The protection paper and its artifact differ in twelve choices. Each is a parameter of every policy of this regime
(`SWITCHES`): its value "as_run" is what the artifact's code does, "as_described" what the paper's text says. Source:
artifact commit 496739f against the paper's sections 2, 3, 7 and 10, Table 19. Tables of signals are indexed by true
position, so that no eviction moves them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from kvrepro.engine.allocate import lexsort
from kvrepro.engine.observe import Observation
from kvrepro.engine.shapes import Mask, RowInts, Scores, TokenInts


@dataclass(frozen=True)
class Switch:
    """A choice on which the paper and its artifact differ."""

    as_run: Any
    as_described: Any
    means: str


SWITCHES = {
    "tie_break": Switch("string", "integer", "order among equals: decimal string of the position, or its number"),
    "guardrail": Switch("ignores", "honours", "does the last trim to capacity respect protected tokens?"),
    "n_prot": Switch("floor", "ceil", "rounding of fraction x capacity, at least 4"),
    "empty_suffix": Switch("keeps_newest", "right", "a prefix alone: all are protected and the newest stay, or not"),
    "per_head_first_reduction": Switch(8, 0, "step of the first reduction, per-head policies"),
    "score_reduce": Switch("max", "mean", "attention: maxima over layers, heads, queries, or means over queries"),
    "head_map": Switch("first_n_kv", "group_mean", "a KV head's attention: query head of its number, or group mean"),
    "static_suffix": Switch("per_head_only", "anywhere", "where a suffix fixed at the prompt's end exists"),
    "trim_guard": Switch("dynamic", "same", "suffix that a union's trim spares: newest, or the policy's own"),
    "random_seed": Switch("per_item", "by_prompt", "seed 42 anew for every item, or mixed with the prompt"),
    "snapkv_bonus": Switch("peak", "current", "SnapKV's second term: largest attention so far, or the latest"),
    "slw_window": Switch("last_access", "position", "StreamingLLM's window: last used tokens, or newest tokens"),
}
AS_RUN = {name: switch.as_run for name, switch in SWITCHES.items()}
AS_DESCRIBED = {name: switch.as_described for name, switch in SWITCHES.items()}
FIELD_BITS = 21  # steps and positions below two million fit one field of a packed int64 key
SLW_SINKS = 4


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


def sinks_and_window(
    o: Observation,
    scores: Scores,
    budget: RowInts,
    guarded: Mask,
    tie_break: str = "string",
    slw_window: str = "last_access",
) -> Mask:
    """StreamingLLM's own shield, without the guarded tokens. As run, it takes the 4 oldest unguarded tokens, by (I,
    position), and the `budget - 4` latest, by (L, I, position): with guards more than there is room for, so that LRU's
    order decides. As described, the 4 first tokens stay, and the newest of the others as far as the budget has room
    beside them and the guards: the order is that of positions alone, so that attention cannot hold a token in the
    middle. Artifact's SLW; paper, section 6 (the sink+window exception) and Table 19."""
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
    largest or to the smallest until they sum to B * kv_heads. B is the budget beside the protected tokens, H_h the
    natural entropy of the head's scores normalised over the other tokens (uniform where all are 0). "Faithful" Ada-KV
    in the artifact."""
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


# ---- the signals themselves

ACCESS = 0.05  # a token counts as used if it gets more than this share of the step's largest attention


@dataclass(frozen=True)
class Reduction:
    """How attention becomes one number per token. over: "max", the largest over layers and query heads (and over a
    prompt's queries), or "mean" (summed over them). head_map: None, or how a KV head gets a number of its own:
    "first_n_kv", that of the query head of the same number (the artifact's indexing, off for grouped heads), or
    "group_mean", the mean of its group."""

    over: str
    head_map: str | None = None


class PromptSignals:
    """Sums and maxima of a prompt's probabilities for each key and layer, so that probabilities need not be stored."""

    def __init__(self, reductions: Sequence[Reduction]):
        self.means = any(r.over == "mean" for r in reductions)
        self.groups = any(r.over == "max" and r.head_map == "group_mean" for r in reductions)
        self.layers: list[dict[str, Tensor]] = []

    def open(self, query: Tensor, key: Tensor) -> None:
        """Begin a layer."""
        batch, kv_heads, tokens, _ = key.shape
        zeros = query.new_zeros(batch, kv_heads, query.shape[1] // kv_heads, tokens, dtype=torch.float32)
        self.layers.append({"max": zeros, "sum": zeros.clone(), "last": zeros.clone(), "group": zeros[:, :, 0].clone()})

    def see(self, p: Tensor, real: Tensor | None) -> None:
        """Add the probabilities of a block of queries, [batch, kv_heads, group, queries, tokens or the first of them].
        real: which queries are no padding, bool [batch, queries]; None: all."""
        p, seen, n = p if real is None else p * real[:, None, None, :, None], self.layers[-1], p.shape[-1]

        def larger(name: str, x: Tensor) -> None:
            part = seen[name][..., :n]
            torch.maximum(part, x, out=part)

        larger("max", p.amax(3))
        if self.means:
            seen["sum"][..., :n] += p.sum(3)
            seen["last"].zero_()[..., :n] = p[:, :, :, -1]
        if self.groups:
            larger("group", p.mean(2).amax(2))

    def signals(self, r: Reduction, positions: TokenInts, width: int, waits: bool) -> "Signals":
        """The state of every row after its prompt, whose tokens all entered, and were last used, at step 0.

        "max": latest, largest and summed are all the largest attention that any query pays to the token. "mean": summed
        is the attention's mean over layers and heads, summed over queries; largest is the mean of each head's largest;
        latest is the last query's. Per KV head the same over layers only, but 0 if the first reduction `waits` for
        decode steps, since the artifact then keeps no prompt signal per head. positions: [batch, tokens], -1 where
        padded. width: of the tables.
        """
        stacked = {name: torch.stack([layer[name] for layer in self.layers]) for name in self.layers[0]}
        kv_heads = stacked["max"].shape[2]
        heads = {name: x.flatten(2, 3) for name, x in stacked.items() if name != "group"}  # [layers, batch, heads, n]
        over = torch.amax if r.over == "max" else torch.mean
        kinds = {"latest": "last", "largest": "max", "summed": "sum"}
        kinds = dict.fromkeys(kinds, "max") if r.over == "max" else kinds
        by_name = {name: over(heads[kind], (0, 2)) for name, kind in kinds.items()}
        for name in ("latest", "summed") if r.head_map is not None else ():
            of_head = heads[kinds[name]][:, :, :kv_heads]
            if r.head_map == "group_mean":
                of_head = stacked["group"] if r.over == "max" else stacked[kinds[name]].mean(3)
            by_name[f"head_{name}"] = torch.zeros_like(of_head[0]) if waits else over(of_head, 0)
        real = positions >= 0
        tables = {name: _by_position(x, positions, width) for name, x in by_name.items()}
        steps = torch.zeros(len(positions), width, dtype=torch.long, device=positions.device)
        tables |= {"prompt": tables["summed"], "last_use": steps, "entered": steps}
        entered = _by_position(real, positions, width)
        held = entered[:, None].expand(-1, 1 if r.head_map is None else kv_heads, -1).clone()
        return Signals(r, held, tables, real.sum(1), torch.zeros_like(real[:, 0], dtype=torch.long))


def _by_position(x: Tensor, positions: Tensor, width: int) -> Tensor:
    """Move [batch, ..., tokens] into a table [batch, ..., width] by position, 0 elsewhere. positions: for each head or
    for all heads, -1 where there is no token."""
    place = torch.where(positions >= 0, positions, width)
    at = place[:, None].expand_as(x) if place.dim() < x.dim() else place
    return x.new_zeros(*x.shape[:-1], width + 1).scatter(-1, at, x)[..., :width]


@dataclass(frozen=True)
class Signals:
    """The state of `batch` rows. Steps count from 1, prompt tokens carry step 0."""

    reduction: Reduction
    held: Tensor  # bool [batch, 1 or kv_heads, width]: whether a head may still see a token
    tables: dict[str, Tensor]  # as in `policy.SUMS`: [batch, width] by position, or [batch, kv_heads, width]
    lengths: Tensor  # int64 [batch], tokens of the prompt
    evicted: Tensor  # int64 [batch]

    def take(self, rows: Tensor) -> "Signals":
        """The state of these rows, in this order."""
        tables = {name: table[rows] for name, table in self.tables.items()}
        return Signals(self.reduction, self.held[rows], tables, self.lengths[rows], self.evicted[rows])

    def held_at(self, positions: Tensor, by_any: bool = False) -> Tensor:
        """Whether the heads, or with `by_any` any head, hold `positions` [batch, kv_heads, tokens]; False for -1."""
        held = self.held.any(1, keepdim=True) if by_any else self.held
        table = held.expand(-1, positions.shape[1], -1)
        return table.gather(2, positions.clamp(min=0).to(table.device)).to(positions.device) & (positions >= 0)

    def enter(self, step: int) -> "Signals":
        """The state after the token picked at `step` has entered every row; no query has seen it yet."""
        at = (self.lengths + step - 1)[:, None]
        now = torch.full_like(at, step)
        held = self.held.scatter(2, at[:, None].expand(-1, self.held.shape[1], -1), True)
        entered = {name: self.tables[name].scatter(1, at, now) for name in ("last_use", "entered")}
        return replace(self, held=held, tables=self.tables | entered)

    def attended(self, step: int, attention: Tensor, per_head: Tensor | None) -> "Signals":
        """The state after a forward pass. attention: the newest query's [batch, width]. per_head: the same [batch,
        kv_heads, width], where heads choose for themselves."""
        before, used = self.tables, (attention > ACCESS * attention.amax(1, keepdim=True)) & self.held.any(1)
        new = {
            "last_use": torch.where(used, step, before["last_use"]),
            "latest": attention,
            "largest": torch.maximum(before["largest"], attention),
            "summed": before["summed"] + attention,
        }
        if per_head is not None:
            new |= {"head_latest": per_head, "head_summed": before["head_summed"] + per_head}
        return replace(self, tables=before | new)

    def observe(self, step: int) -> tuple[Observation, Tensor]:
        """(the observation for a policy, one "layer" for the whole model; the place of each slot's token in the tables,
        int64 [batch, tokens], flush right)."""
        alive = self.held.any(1)
        most = int(alive.sum(1).max())
        place = alive.to(torch.uint8).argsort(dim=1, stable=True)[:, alive.shape[1] - most :]
        tables = {name: t if t.dim() == 3 else t[:, None] for name, t in self.tables.items()}
        sums = {name: t.gather(2, place[:, None].expand(-1, t.shape[1], -1)) for name, t in tables.items()}
        nothing = sums["latest"].new_zeros(len(place), self.held.shape[1], most, 0)
        positions = torch.where(alive.gather(1, place), place, -1)[:, None].expand(nothing.shape[:3])
        cache = {"layer": 0, "layers": 1, "keys": nothing, "values": nothing, "positions": positions, "scaling": 1.0}
        queries = {"queries": nothing[:, :, :0], "query_positions": place[:, :0], "seen": self.lengths + step}
        return Observation(**cache, **queries, sums=sums, step=step), place


def joined(blocks: Sequence[Signals]) -> Signals:
    """The rows of several states of one reduction as one batch."""
    width = max(s.held.shape[-1] for s in blocks)

    def wide(t: Tensor) -> Tensor:
        return torch.nn.functional.pad(t, (0, width - t.shape[-1])) if t.dim() > 1 else t

    tables = {name: torch.cat([wide(s.tables[name]) for s in blocks]) for name in blocks[0].tables}
    more = {name: torch.cat([wide(getattr(s, name)) for s in blocks]) for name in ("held", "lengths", "evicted")}
    return Signals(blocks[0].reduction, tables=tables, **more)


class StepSignals:
    """Attention of one decode step, reduced over the layers as they pass."""

    def __init__(self, signals: Signals, layers: int, newest_held: bool):
        """newest_held: whether no row evicted its newest token before the step."""
        self.signals, self._hide = signals, None
        self.r, self.width, self.layers = signals.reduction, signals.held.shape[-1], layers
        self.shared = signals.held.shape[1] == 1  # one set of tokens for all heads
        self.sees_all = self.shared and newest_held
        self.where: Tensor  # positions of the tokens, the same in all layers
        self.group = 1
        self.folded: dict[str, Tensor] = {}

    def hidden(self, where: Tensor) -> Tensor | None:
        """The tokens at positions `where` that the newest query may not see, bool [batch, kv_heads, 1, 1, tokens]:
        those that only other heads hold, and its own if it was evicted before any layer stored it. None: it sees
        all."""
        if self.sees_all:
            return None
        if self._hide is None or self._hide.device != where.device:
            self._hide = ~self.signals.held_at(where)[:, :, None, None]
        return self._hide

    def see(self, p: Tensor, where: Tensor) -> None:
        """Add a layer's probabilities [batch, kv_heads, group, 1, tokens] over tokens at positions `where` [batch,
        kv_heads, tokens]."""
        p, self.where, self.group, largest = p[:, :, :, 0], where, p.shape[2], self.r.over == "max"
        over = torch.amax if largest else torch.mean
        reduced = {"all": over(p.flatten(1, 2), 1) if self.shared else over(p, 2)}
        if not self.shared:
            first = self.r.head_map == "first_n_kv"
            reduced["head"] = p.flatten(1, 2)[:, : p.shape[1]] if first else p.mean(2)
        for name, x in reduced.items():  # combined with those of earlier layers
            before = self.folded.get(name, torch.zeros_like(x))
            self.folded[name] = torch.maximum(before, x) if largest else before + x / self.layers

    def tables(self) -> tuple[Tensor, Tensor | None]:
        """(attention [batch, width], per KV head [batch, kv_heads, width] or None) by position."""
        if self.shared:
            return _by_position(self.folded["all"], self.where[:, 0], self.width), None
        by_kv_head = _by_position(self.folded["all"], self.where, self.width)
        attention = by_kv_head.amax(1) if self.r.over == "max" else by_kv_head.mean(1)
        owner = torch.arange(by_kv_head.shape[1], device=by_kv_head.device)  # whose tokens a number's query head sees
        if self.r.head_map == "first_n_kv":
            owner = owner // self.group
        return attention, _by_position(self.folded["head"], self.where[:, owner], self.width)
