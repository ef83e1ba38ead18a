"""The decode loop: rows of many prompts and conditions pick tokens together, and every few steps give up some of them."""

import time
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from random import Random

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvrepro import observe
from kvrepro.attention import DecodeAttention
from kvrepro.cache import SlotCache, concatenate
from kvrepro.observe import Observation
from kvrepro.policy import CATALOGUE, Condition, Limits, reduce
from kvrepro.shapes import Mask


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


@dataclass
class Outcome:
    """What is known of a row when it has finished."""

    tokens: list[int]
    kept: float  # tokens that a head sees, mean over heads
    seen: int  # tokens that have entered the cache, the prompt's included
    stored: int  # of those, how many still take memory
    evicted: int
    calls: int
    seconds: float


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
        keep[index] = reduce(CATALOGUE[name], part, Limits.of(mine, keep.device))
    return keep


def decode(model: PreTrainedModel, rows: Rows, plan: Plan, max_new_tokens: int, stop_ids: Collection[int]) -> dict:
    """Greedy tokens of every row, `{tag: Outcome}`. The step order is the protection protocol's, section 3:
    pick a token, stop if it is one of `stop_ids`, append it, reduce if due, run the model on it, update the signals."""
    device = rows.logits.device
    stops = torch.tensor(sorted(stop_ids), dtype=torch.long, device=device)
    state = _State(tokens=torch.zeros(len(rows), max_new_tokens, dtype=torch.long, device=device))
    active = torch.ones(len(rows), dtype=torch.bool, device=device)
    began = time.perf_counter()

    for t in range(1, max_new_tokens + 1):
        picked = rows.logits.argmax(-1)
        state.tokens[:, t - 1] = picked
        stopped = active & torch.isin(picked, stops)
        if bool(stopped.any()):
            state.finish(rows, stopped, t, plan)
            active = active & ~stopped
            if not bool(active.any()):
                break
        due = plan.evicts and t >= plan.first and t % plan.interval == 0
        if int(active.sum()) <= (len(rows) - 1 if due else 0.75 * len(rows)):
            index = active.nonzero()[:, 0]
            rows, picked, state.tokens, active = rows.take(index), picked[index], state.tokens[index], active[index]

        slot = rows.cache.slot
        rows.observation = observe.append(replace(rows.observation, step=t), slot, active)
        rows.visible[:, :, slot] = active[:, None]
        if due:
            _reduce(rows)
        if t == max_new_tokens:
            state.finish(rows, active, t, plan)
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
        state.seconds += (now - began) / len(rows)
        began = now
    return state.outcomes


@dataclass
class _State:
    """Tokens so far, seconds of a row still running (steps are shared by the rows present), and who has finished."""

    tokens: Tensor
    seconds: float = 0.0
    outcomes: dict = field(default_factory=dict)

    def finish(self, rows: Rows, done: Tensor, t: int, plan: Plan) -> None:
        alive = rows.observation.alive.sum(1)
        seen = alive + rows.evicted
        columns = (
            rows.visible.sum(-1).float().mean(-1),
            seen,
            alive if plan.execution == "physical" else seen,
            rows.evicted,
            rows.calls,
        )
        facts = list(zip(*(c.tolist() for c in columns), strict=True))
        for i in done.nonzero()[:, 0].tolist():
            self.outcomes[rows.tags[i]] = Outcome(self.tokens[i, :t].tolist(), *facts[i], self.seconds)


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
    """Free the slots behind `plan.target`: living tokens there move into holes in front. The first time, rows that began
    with their whole prompt move into smaller buffers."""
    o, alive, width = rows.observation, rows.observation.alive, plan.target + plan.interval
    if alive.shape[1] != width:
        slots = alive.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, : plan.target]
        rows.cache.gather(slots, width)

        def narrow(v: Tensor) -> Tensor:
            index = slots if v.dim() == 2 else slots[:, None].expand(-1, v.shape[1], -1)
            return torch.nn.functional.pad(v.gather(-1, index), (0, width - index.shape[-1]))

        rows.observation, rows.visible = o.map_slots(narrow), narrow(rows.visible)
        rows.cache.slot = min(plan.target, int(alive.sum(1).max()))
        return
    tail = slice(plan.target, rows.cache.slot)
    if rows.cache.slot <= plan.target:
        return
    living = alive[:, tail]
    holes = alive[:, : plan.target].to(torch.uint8).argsort(dim=1, stable=True)  # dead slots first
    source = torch.arange(plan.target, rows.cache.slot, device=alive.device).expand_as(living)
    nth = (living.cumsum(1) - 1).clamp(min=0)
    target = torch.where(living, holes.gather(1, nth), source)  # the dead stay where they are
    rows.cache.move(source, target)

    def fill(v: Tensor) -> Tensor:
        a, b = (x if v.dim() == 2 else x[:, None].expand(-1, v.shape[1], -1) for x in (source, target))
        return v.scatter(-1, b, v.gather(-1, a))

    rows.observation, rows.visible = o.map_slots(fill), fill(rows.visible)
    rows.observation.alive[:, tail] = False
    rows.visible[:, :, tail] = False
    rows.cache.slot = plan.target
