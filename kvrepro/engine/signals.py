"""Statistics of the attention that each token received so far, over all layers; the policies of `SharedCap` rank by
them.

Source: protection protocol, sections 2, 3 and 7. Tables are indexed by true position, so that no eviction moves them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvrepro.engine.observe import Observation
from kvrepro.engine.shapes import TokenInts

ACCESS = 0.05  # a token counts as used if it gets more than this share of the step's largest attention


@dataclass(frozen=True)
class Reduction:
    """How attention becomes one number per token.

    over: "max", the largest over layers and query heads (and over a prompt's queries), or "mean" (summed over them).
    head_map: None, or how a KV head gets a number of its own: "first_n_kv", that of the query head of the same number
    (the artifact's indexing, off for grouped heads), or "group_mean", the mean of its group.
    """

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
        if r.over == "max":
            by_name = dict.fromkeys(("latest", "largest", "summed"), heads["max"].amax((0, 2)))
        else:
            names = {"summed": "sum", "largest": "max", "latest": "last"}
            by_name = {name: heads[kind].mean((0, 2)) for name, kind in names.items()}
        if r.head_map is not None:
            if waits:
                latest = summed = torch.zeros_like(stacked["group"][0])
            elif r.over == "max":
                first = r.head_map == "first_n_kv"
                latest = summed = (heads["max"][:, :, :kv_heads] if first else stacked["group"]).amax(0)
            else:
                summed, latest = (_to_kv_heads(stacked[kind], r.head_map).mean(0) for kind in ("sum", "last"))
            by_name |= {"head_latest": latest, "head_summed": summed}
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


def _to_kv_heads(p: Tensor, head_map: str) -> Tensor:
    """Reduce [layers, batch, kv_heads, group, tokens] to [layers, batch, kv_heads, tokens] by `Reduction.head_map`."""
    return p.flatten(2, 3)[:, :, : p.shape[2]] if head_map == "first_n_kv" else p.mean(3)


@dataclass(frozen=True)
class Signals:
    """The state of `batch` rows. Steps count from 1, prompt tokens carry step 0."""

    reduction: Reduction
    held: Tensor  # bool [batch, 1 or kv_heads, width]: whether a head may still see a token
    tables: dict[
        str, Tensor
    ]  # [batch, width] by position, per KV head [batch, kv_heads, width]; names of `policy.SUMS`
    lengths: Tensor  # int64 [batch], tokens of the prompt
    evicted: Tensor  # int64 [batch]

    @property
    def bytes(self) -> int:
        """Bytes of one row's tables."""
        return sum(t[0].numel() * t.element_size() for t in (self.held, *self.tables.values()))

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
        alive_slots = alive.gather(1, place)
        heads = self.held.shape[1]

        def shown(x: Tensor) -> Tensor:
            at = place if x.dim() == 2 else place[:, None].expand(-1, x.shape[1], -1)
            values = x.gather(-1, at)
            return values[:, None] if x.dim() == 2 else values

        sums = {name: shown(table) for name, table in self.tables.items()}
        nothing = sums["latest"].new_zeros(len(place), heads, most, 0)
        observation = Observation(
            layer=0, layers=1, keys=nothing, values=nothing,
            positions=torch.where(alive_slots, place, -1)[:, None].expand(-1, heads, -1), queries=nothing[:, :, :0],
            query_positions=place[:, :0], seen=self.lengths + step, scaling=1.0, sums=sums, step=step,
        )  # fmt: skip
        return observation, place


def joined(blocks: Sequence[Signals]) -> Signals:
    """The rows of several states of one reduction as one batch."""
    width = max(s.held.shape[-1] for s in blocks)

    def wide(t: Tensor) -> Tensor:
        return torch.nn.functional.pad(t, (0, width - t.shape[-1])) if t.dim() > 1 else t

    tables = {name: torch.cat([wide(s.tables[name]) for s in blocks]) for name in blocks[0].tables}
    held, lengths, evicted = (
        torch.cat([wide(getattr(s, name)) for s in blocks]) for name in ("held", "lengths", "evicted")
    )
    return Signals(blocks[0].reduction, held, tables, lengths, evicted)


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
        p, self.where, self.group = p[:, :, :, 0], where, p.shape[2]
        over = torch.amax if self.r.over == "max" else torch.mean
        if self.shared:
            self._fold("all", over(p.flatten(1, 2), 1))
            return
        self._fold("all", over(p, 2))
        self._fold("head", p.flatten(1, 2)[:, : p.shape[1]] if self.r.head_map == "first_n_kv" else p.mean(2))

    def _fold(self, name: str, reduced: Tensor) -> None:
        """Combine a layer's numbers with those of earlier layers: by the maximum, or as a part of the mean."""
        reduced = reduced if self.r.over == "max" else reduced / self.layers
        if name in self.folded:
            before = self.folded[name]
            reduced = torch.maximum(before, reduced) if self.r.over == "max" else before + reduced
        self.folded[name] = reduced

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
