"""Prefill once, evict many: one forward pass of a prompt serves every condition, and all conditions decode together."""

import hashlib
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from random import Random

import pandas as pd
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvrepro.attention import PromptAttention, installed
from kvrepro.cache import from_prompt
from kvrepro.decode import Outcome, Plan, Rows, decode, join, keep_sets
from kvrepro.errors import InputError
from kvrepro.observe import after_prompt
from kvrepro.policy import CATALOGUE, Condition, check

BACKEND = "torch"


@dataclass(frozen=True)
class Generation:
    """The answer of one prompt under one condition, and what it cost."""

    tokens: list[int]  # generated, with the stop token if there was one
    kept: list[int]  # tokens that a head sees at the end, per layer (mean over heads where they differ)
    kept_positions: list[int]  # after the prompt's reduction, of all heads together
    kept_positions_hash: str  # of the same, per head
    evicted: int
    policy_calls: int
    bytes_held: int  # keys and values at the end
    bytes_full: int  # the same without eviction
    prefill_seconds: float  # shared costs are divided among the rows that share them
    decode_seconds: float
    backend: str


@torch.inference_mode()
def generate(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    conditions: Sequence[Condition],
    *,
    max_new_tokens: int,
    stop_ids: Collection[int],
    batch_rows: int = 64,
) -> list[list[Generation]]:
    """Greedy generations `[prompt][condition]`; `prompts` are token ids, at most `max_new_tokens` are generated.

    Rows of similar size decode in batches of up to `batch_rows`. Raises InputError before any computation.
    """
    for prompt in prompts:
        _check_prompt(model, prompt, max_new_tokens)
        for c in conditions:
            check(c, len(prompt))
    if batch_rows < 1:
        raise InputError(f"batch_rows {batch_rows} < 1: decode at least one row at a time")

    results: dict[tuple[int, int], Generation] = {}
    waiting: dict[Plan, list[Rows]] = {}
    notes: dict[tuple[int, int], dict] = {}

    def run(plan: Plan, at_least: int) -> None:
        while (count := sum(map(len, waiting[plan]))) >= at_least and count:
            rows = join(waiting[plan])
            rest = torch.arange(min(batch_rows, count), count)
            waiting[plan] = [_part(rows, rest)] if len(rest) else []
            rows = rows if not len(rest) else _part(rows, torch.arange(batch_rows))
            per_token, layers = rows.cache.token_bytes, len(rows.cache.keys)
            for tag, outcome in decode(model, rows, plan, max_new_tokens, stop_ids).items():
                results[tag] = _generation(outcome, notes.pop(tag), per_token, layers)

    with installed(model):
        for i, prompt in enumerate(prompts):
            for plan, rows in _prefill(model, i, prompt, conditions, max_new_tokens, notes):
                waiting.setdefault(plan, []).append(rows)
                run(plan, at_least=batch_rows)
        for plan in waiting:
            run(plan, at_least=1)
    return [[results[i, j] for j in range(len(conditions))] for i in range(len(prompts))]


def _part(rows: Rows, index: Tensor) -> Rows:
    """A copy of some rows that leaves the original alone."""
    import copy

    return replace(rows, cache=copy.copy(rows.cache)).take(index.to(rows.logits.device))


def _check_prompt(model: PreTrainedModel, prompt: Sequence[int], max_new_tokens: int) -> None:
    config, n = model.config, len(prompt)
    if n < 2:
        raise InputError(f"prompt of {n} tokens < 2: give a text to continue")
    if max_new_tokens < 1:
        raise InputError(f"max_new_tokens {max_new_tokens} < 1: generate at least one token")
    if not 0 <= min(prompt) <= max(prompt) < config.vocab_size:
        raise InputError(f"token id {max(prompt)} outside the model's vocabulary of {config.vocab_size}: wrong tokenizer?")
    if n + max_new_tokens > config.max_position_embeddings:
        raise InputError(
            f"{n} prompt + {max_new_tokens} new tokens > the model's {config.max_position_embeddings} positions: shorten one"
        )
    types = set(getattr(config, "layer_types", None) or ["full_attention"])
    if unknown := types - {"full_attention", "sliding_attention"}:
        raise InputError(f"layers of type {', '.join(sorted(unknown))}: only attention layers can be evicted")
    window = getattr(config, "sliding_window", None)
    slides = "sliding_attention" in types or getattr(config, "layer_types", None) is None
    if slides and window is not None and n + max_new_tokens > window:
        raise InputError(f"{n} prompt + {max_new_tokens} new tokens > sliding window {window}: use a shorter prompt")


def _prefill(model, number, prompt, conditions, max_new_tokens, notes) -> list[tuple[Plan, Rows]]:
    """One forward pass of a prompt, then the reduction at step 0: rows ready to decode, by plan."""
    began = time.perf_counter()
    readings = [c.resolved() for c in conditions]
    sums = any(r.score_reduce == "mean" for r in readings)
    groups = any(r.score_reduce == "max" and r.head_map == "group_mean" for r in readings)
    ids = torch.tensor([list(prompt)], device=model.device)
    attention = PromptAttention(sums=sums, groups=groups)
    cache = DynamicCache(config=model.config)
    logits = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1, kvrepro=attention).logits
    kv_heads = cache.layers[0].keys.shape[1]

    plans: dict[Plan, list[int]] = {}
    for j, (c, reading) in enumerate(zip(conditions, readings, strict=True)):
        plans.setdefault(_plan(c, reading, len(prompt), max_new_tokens), []).append(j)
    ready = []
    for plan, members in plans.items():
        mine = [conditions[j] for j in members]
        draws = [_generator(readings[j], prompt) for j in members]
        heads = 1 if plan.head_map is None else kv_heads
        # Readings within a plan reduce attention alike, so any of them builds the observation.
        o = after_prompt(attention, readings[members[0]], kv_heads, plan.head_map is not None, len(members))
        keep = o.alive[:, None].expand(-1, heads, -1)
        if plan.evicts and plan.first == 0:
            keep = keep_sets(o, mine, draws, heads)
        alive = keep.any(1)
        o = replace(o, alive=alive)
        for j, held, here in zip(members, keep.cpu(), alive.cpu(), strict=True):
            notes[number, j] = {
                "kept_positions": here.nonzero()[:, 0].tolist(),
                "kept_positions_hash": hashlib.sha256(held.nonzero().numpy().tobytes()).hexdigest()[:16],
            }
        gone = len(prompt) - alive.sum(1)
        slots = torch.arange(len(prompt), device=alive.device).expand_as(alive)
        if plan.execution == "physical" and plan.evicts and plan.first == 0:
            slots = alive.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, : int(alive.sum(1).max())]

        def place(v: Tensor, slots=slots, width=plan.width) -> Tensor:
            index = slots if v.dim() == 2 else slots[:, None].expand(-1, v.shape[1], -1)
            return torch.nn.functional.pad(v.gather(-1, index), (0, width - index.shape[-1]))

        rows = Rows(
            tags=[(number, j) for j in members],
            conditions=mine,
            draws=draws,
            observation=o.map_slots(place),
            visible=place(keep),
            cache=from_prompt(cache, slots, plan.width),
            logits=logits[:, -1].expand(len(members), -1),
            evicted=gone,
            calls=(gone > 0).long(),
        )
        ready.append((plan, rows))
    seconds = (time.perf_counter() - began) / len(conditions)
    for j in range(len(conditions)):
        notes[number, j]["prefill_seconds"] = seconds
    return ready


def _plan(c: Condition, reading, n: int, max_new_tokens: int) -> Plan:
    """Rows that may share a batch have equal plans; sizes are rounded up so that similar rows meet."""
    if c.policy == "full":
        return Plan("physical", False, _round_up(n + max_new_tokens), 0, 1, 0, "max", None)
    per_head = CATALOGUE[c.policy].allocate is not None
    first = reading.per_head_first_reduction if per_head else reading.first_reduction
    first_call = -(-first // c.interval) * c.interval
    target = _round_up(min(c.capacity, n + max_new_tokens))
    if c.execution == "masked":
        width = _round_up(n + max_new_tokens)
    elif first:
        width = _round_up(n) + first_call
    else:
        width = target + c.interval
    head_map = reading.head_map if per_head else None
    return Plan(c.execution, True, width, target, c.interval, first, reading.score_reduce, head_map)


def _round_up(size: int, step: int = 64) -> int:
    return -(-size // step) * step


def _generator(reading, prompt: Sequence[int]) -> Random:
    """Random's generator: seed 42 anew, or mixed with the prompt so that items differ in any order of work."""
    if reading.random_seed == "per_item":
        return Random(42)
    digest = hashlib.sha256(str([42, *prompt]).encode()).digest()
    return Random(int.from_bytes(digest[:8]))


def _generation(outcome: Outcome, note: dict, per_token: int, layers: int) -> Generation:
    return Generation(
        tokens=outcome.tokens,
        kept=[round(outcome.kept)] * layers,
        kept_positions=note["kept_positions"],
        kept_positions_hash=note["kept_positions_hash"],
        evicted=outcome.evicted,
        policy_calls=outcome.calls,
        bytes_held=outcome.stored * per_token,
        bytes_full=outcome.seen * per_token,
        prefill_seconds=note["prefill_seconds"],
        decode_seconds=outcome.seconds,
        backend=BACKEND,
    )


@torch.inference_mode()
def boundary_attention(
    model: PreTrainedModel, prompt: Sequence[int], fraction: float = 0.1, window: int = 32
) -> pd.DataFrame:
    """Where attention goes at the end of a prompt: per layer, query head and region the `mass` of the last token and the
    `window_mass`, its mean over the last `window` tokens.

    Regions: sink (position 0), prefix and suffix (ceil(fraction x tokens) positions at either end, the sink taken out),
    middle. `uniform` is the region's share of the tokens: what even attention would give.
    """
    _check_prompt(model, prompt, 1)
    n = len(prompt)
    side = -(-int(fraction * n * 1000) // 1000)
    if not 0 < fraction < 0.5 or side < 2:
        raise InputError(f"fraction {fraction} of {n} tokens: take between 2 tokens and half the prompt per side")
    attention = PromptAttention(keep_queries=window)
    ids = torch.tensor([list(prompt)], device=model.device)
    with installed(model):
        model(input_ids=ids, logits_to_keep=1, use_cache=False, kvrepro=attention)
    regions = {"sink": (0, 1), "prefix": (1, side), "middle": (side, n - side), "suffix": (n - side, n)}
    p = attention.window.cpu()
    records = []
    for region, (a, b) in regions.items():
        mass = p[..., a:b].sum(-1)
        for layer, head in torch.cartesian_prod(torch.arange(p.shape[0]), torch.arange(p.shape[1])).tolist():
            records.append(
                {
                    "layer": layer,
                    "head": head,
                    "region": region,
                    "mass": float(mass[layer, head, -1]),
                    "window_mass": float(mass[layer, head].mean()),
                    "uniform": (b - a) / n,
                }
            )
    return pd.DataFrame(records)
