"""The decode loop: rows of many prompts and conditions pick tokens together and, every few steps, give up old ones."""

import time
from collections.abc import Collection
from dataclasses import dataclass, replace
from random import Random

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvrepro.chapters.protection import observe
from kvrepro.chapters.protection.attention import DecodeAttention
from kvrepro.chapters.protection.observe import Observation
from kvrepro.chapters.protection.policy import POLICIES, Limits, reduce
from kvrepro.chapters.protection.slots import SlotCache, concatenate
from kvrepro.engine.condition import Condition
from kvrepro.engine.shapes import Mask


@dataclass(frozen=True)
class Plan:
    """What rows must share to decode in one batch."""

    execution: str
    evicts: bool
    width: int  # slots before the first reduction that falls into the decode loop, new tokens included
    target: int  # slots behind which new tokens are stored once the rows are reduced
    interval: int
    first: int  # step of the first reduction
    score_reduce: str
    head_map: str | None  # None: one set of tokens for all heads


@dataclass
class Rows:
    """A batch: one row per (prompt, condition), its tags, state, cache, and the logits of its next token."""

    tags: list[tuple[int, int]]
    conditions: list[Condition]
    draws: list[Random]
    observation: Observation
    visible: Mask  # [batch, 1 or kv_heads, width]: what each head may attend to
    cache: SlotCache
    logits: Tensor  # [batch, vocabulary]
    evicted: Tensor  # [batch] tokens given up so far
    calls: Tensor  # [batch] reductions so far that evicted something

    def __len__(self) -> int:
        return len(self.tags)

    def take(self, index: Tensor) -> "Rows":
        """These rows alone, in this order."""
        rows = index.tolist()
        self.cache.rows(index)
        return replace(
            self,
            tags=[self.tags[i] for i in rows],
            conditions=[self.conditions[i] for i in rows],
            draws=[self.draws[i] for i in rows],
            observation=self.observation.map(lambda v: v[index]),
            visible=self.visible[index],
            logits=self.logits[index],
            evicted=self.evicted[index],
            calls=self.calls[index],
        )


def join(blocks: list[Rows]) -> Rows:
    """Blocks of one plan as one batch."""
    first = blocks[0].observation
    names = [k for k, v in vars(first).items() if isinstance(v, Tensor)]
    together = {k: torch.cat([getattr(b.observation, k) for b in blocks]) for k in names}
    return Rows(
        tags=[t for b in blocks for t in b.tags],
        conditions=[c for b in blocks for c in b.conditions],
        draws=[d for b in blocks for d in b.draws],
        observation=replace(first, **together),
        visible=torch.cat([b.visible for b in blocks]),
        cache=concatenate([b.cache for b in blocks]),
        logits=torch.cat([b.logits for b in blocks]),
        evicted=torch.cat([b.evicted for b in blocks]),
        calls=torch.cat([b.calls for b in blocks]),
    )


def regrouped(v: Tensor, slots: Tensor, width: int) -> Tensor:
    """`v` `[batch, tokens]` or `[batch, heads, tokens]` at `slots` `[batch, moved]`, zero-padded to `width` slots."""
    index = slots if v.dim() == 2 else slots[:, None].expand(-1, v.shape[1], -1)
    return torch.nn.functional.pad(v.gather(-1, index), (0, width - slots.shape[1]))


def keep_sets(o: Observation, conditions: list[Condition], draws: list[Random], heads: int) -> Mask:
    """What every row keeps: rows of one policy and reading are reduced together. Bool `[batch, heads, tokens]`."""
    programs: dict[tuple, list[int]] = {}
    for row, c in enumerate(conditions):
        programs.setdefault((c.policy, c.reading, c.switches, c.suffix_mode), []).append(row)
    keep = o.alive[:, None].repeat(1, heads, 1)
    for (name, *_), rows in programs.items():
        index = torch.tensor(rows, device=keep.device)
        mine = [conditions[i] for i in rows]
        part = o.map(lambda v, index=index: v[index])
        part = replace(part, reading=mine[0].resolved(), draws=tuple(draws[i] for i in rows))
        keep[index] = reduce(POLICIES[name], part, Limits.of(mine, keep.device))
    return keep


def decode(
    model: PreTrainedModel, rows: Rows, plan: Plan, max_new_tokens: int, stop_ids: Collection[int]
) -> dict[tuple[int, int], dict]:
    """Greedy tokens of every row and their cost, by tag. The order within a step is the protection protocol's, section
    3: pick a token, stop if it is one of `stop_ids`, append it, reduce if due, run the model on it, update the signals.
    """
    device = rows.logits.device
    stops = torch.tensor(sorted(stop_ids), dtype=torch.long, device=device)
    tokens = torch.zeros(len(rows), max_new_tokens, dtype=torch.long, device=device)
    seconds, outcomes = 0.0, {}  # of a row still running; steps are shared by the rows present
    active = torch.ones(len(rows), dtype=torch.bool, device=device)
    began = time.perf_counter()

    for t in range(1, max_new_tokens + 1):
        picked = rows.logits.argmax(-1)
        tokens[:, t - 1] = picked
        stopped, broken = active & torch.isin(picked, stops), active & rows.logits.isnan().any(1)
        ended, failed = torch.stack([stopped.any(), broken.any()]).tolist()
        if failed:  # the largest of them is no answer
            raise ArithmeticError(f"{rows.conditions[int(broken.int().argmax())].label}: NaN at new token {t}")
        if ended:
            outcomes |= _finished(rows, stopped, tokens[:, :t], plan, seconds)
            active = active & ~stopped
            if not bool(active.any()):
                break
        due = plan.evicts and t >= plan.first and t % plan.interval == 0
        if int(active.sum()) <= (len(rows) - 1 if due else 0.75 * len(rows)):
            index = active.nonzero()[:, 0]
            rows, picked, tokens, active = rows.take(index), picked[index], tokens[index], active[index]

        slot = rows.cache.slot
        rows.observation = observe.append(replace(rows.observation, step=t), slot, active)
        rows.visible[:, :, slot] = active[:, None]
        if due:
            _reduce(rows)
        if t == max_new_tokens:
            outcomes |= _finished(rows, active, tokens, plan, seconds)
            break

        o = rows.observation
        step = DecodeAttention(rows.visible, model.dtype, len(rows.cache.keys), plan.score_reduce, plan.head_map)
        rows.logits = model(
            input_ids=picked[:, None],
            position_ids=(o.prompt_tokens + t - 1)[:, None],
            past_key_values=rows.cache,
            use_cache=True,
            kvrepro=step,
        ).logits[:, -1]
        rows.observation = observe.attend(o, step.attention, step.per_head)
        rows.cache.slot += 1
        if due and plan.execution == "physical":
            _compact(rows, plan)
        now = time.perf_counter()
        seconds += (now - began) / len(rows)
        began = now
    return outcomes


def _finished(rows: Rows, done: Tensor, tokens: Tensor, plan: Plan, seconds: float) -> dict[tuple[int, int], dict]:
    """What is known of the rows `done` at their end, by tag. A masked row still holds what it evicted."""
    per_token, layers = rows.cache.token_bytes, len(rows.cache.keys)
    kept = rows.visible.sum(-1).float().mean(-1).round().long()
    alive = rows.observation.alive.sum(1)
    seen = alive + rows.evicted
    held = alive if plan.execution == "physical" else seen
    facts = torch.stack([kept, rows.evicted, rows.calls, held * per_token, seen * per_token], 1).tolist()
    return {
        rows.tags[i]: {
            "tokens": tokens[i].tolist(),
            "kept": [facts[i][0]] * layers,
            "evicted": facts[i][1],
            "policy_calls": facts[i][2],
            "bytes_held": facts[i][3],
            "bytes_full": facts[i][4],
            "decode_seconds": seconds,
        }
        for i in done.nonzero()[:, 0].tolist()
    }


def _reduce(rows: Rows) -> None:
    """Reduce every row to its capacity: hide what leaves, count it."""
    o = rows.observation
    keep = keep_sets(o, rows.conditions, rows.draws, rows.visible.shape[1])
    alive = keep.any(1)
    gone = o.alive.sum(1) - alive.sum(1)
    rows.visible = keep
    rows.observation = replace(o, alive=alive)
    rows.evicted = rows.evicted + gone
    rows.calls = rows.calls + (gone > 0)


def _compact(rows: Rows, plan: Plan) -> None:
    """Free the slots behind `plan.target`: living tokens there move into holes in front of it. Rows that began with
    their whole prompt, because their first reduction came late, move into smaller buffers."""
    o, cache = rows.observation, rows.cache
    width = plan.target + plan.interval
    if o.alive.shape[1] != width:
        slots = o.alive.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, : plan.target]
        cache.gather(slots, width)
        cache.slot = int(o.alive.sum(1).max())
        rows.observation = o.map_slots(lambda v: regrouped(v, slots, width))
        rows.visible = regrouped(rows.visible, slots, width)
        return
    if cache.slot <= plan.target:
        return
    tail = slice(plan.target, cache.slot)
    living = o.alive[:, tail]
    holes = o.alive[:, : plan.target].to(torch.uint8).argsort(dim=1, stable=True)  # dead slots first
    source = torch.arange(plan.target, cache.slot, device=living.device).expand_as(living)
    target = torch.where(living, holes.gather(1, (living.cumsum(1) - 1).clamp(min=0)), source)  # the dead stay

    def fill(v: Tensor) -> Tensor:
        a, b = (x if v.dim() == 2 else x[:, None].expand(-1, v.shape[1], -1) for x in (source, target))
        return v.scatter(-1, b, v.gather(-1, a))

    cache.move(source, target)
    cache.slot = plan.target
    rows.observation, rows.visible = o.map_slots(fill), fill(rows.visible)
    rows.observation.alive[:, tail] = False
    rows.visible[:, :, tail] = False
