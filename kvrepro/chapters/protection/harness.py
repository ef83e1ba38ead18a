"""Prefill once, evict many: one forward pass of a prompt serves every condition, and all conditions decode together."""

import copy
import hashlib
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from random import Random

import pandas as pd
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvrepro.chapters.protection.attention import PromptAttention
from kvrepro.chapters.protection.decode import Plan, Rows, decode, join, keep_sets, regrouped
from kvrepro.chapters.protection.guard import protected_count
from kvrepro.chapters.protection.observe import after_prompt
from kvrepro.chapters.protection.policy import POLICIES, check
from kvrepro.chapters.protection.reading import Reading
from kvrepro.chapters.protection.slots import from_prompt
from kvrepro.engine.attention import installed
from kvrepro.engine.condition import Condition, Generation
from kvrepro.errors import InputError

BACKEND = "torch"


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
    """Greedy generations `[prompt][condition]` of at most `max_new_tokens`; `prompts` are token ids.

    Rows of similar size, of any prompt and condition, decode in batches of up to `batch_rows`. Raises InputError before
    any computation.
    """
    if batch_rows < 1 or max_new_tokens < 1:
        raise InputError(f"batch_rows {batch_rows}, max_new_tokens {max_new_tokens}: both must be at least 1")
    for prompt in prompts:
        _check_prompt(model, prompt, max_new_tokens)
        for c in conditions:
            check(c, len(prompt))

    waiting: dict[Plan, list[Rows]] = {}
    known: dict[tuple[int, int], dict] = {}  # facts of each (prompt, condition), from its prefill and then its decoding

    def run(plan: Plan, at_least: int) -> None:
        while (count := sum(map(len, waiting[plan]))) >= at_least and count:
            rows = join(waiting[plan])
            waiting[plan] = [_part(rows, range(batch_rows, count))] if count > batch_rows else []
            if count > batch_rows:
                rows = _part(rows, range(batch_rows))
            for tag, facts in decode(model, rows, plan, max_new_tokens, stop_ids).items():
                known[tag].update(facts)

    with installed(model):
        for i, prompt in enumerate(prompts):
            for plan, rows, facts in _prefill(model, i, prompt, conditions, max_new_tokens):
                known.update(facts)
                waiting.setdefault(plan, []).append(rows)
                run(plan, at_least=batch_rows)
        for plan in waiting:
            run(plan, at_least=1)
    return [[Generation(**known[i, j], backend=BACKEND) for j in range(len(conditions))] for i in range(len(prompts))]


def _check_prompt(model: PreTrainedModel, prompt: Sequence[int], max_new_tokens: int) -> None:
    """Raise InputError if the model cannot continue `prompt`."""
    config, n = model.config, len(prompt)
    if n < 2:
        raise InputError(f"prompt of {n} tokens < 2: give a text to continue")
    if not 0 <= min(prompt) <= max(prompt) < config.vocab_size:
        raise InputError(
            f"token id {max(prompt)} outside the model's vocabulary of {config.vocab_size}: other tokenizer?"
        )
    asked = f"{n} prompt + {max_new_tokens} new tokens"
    if n + max_new_tokens > config.max_position_embeddings:
        raise InputError(f"{asked} > the model's {config.max_position_embeddings} positions: shorten one")
    types = set(getattr(config, "layer_types", None) or ["unnamed"])
    if unknown := types - {"full_attention", "sliding_attention", "unnamed"}:
        raise InputError(
            f"layers of type {', '.join(sorted(unknown))} hold no tokens to evict: use an attention-only model"
        )
    window = getattr(config, "sliding_window", None)
    if types != {"full_attention"} and window is not None and n + max_new_tokens > window:
        raise InputError(f"{asked} > the model's sliding window of {window}: shorten the prompt")


def _part(rows: Rows, index: range) -> Rows:
    """Some rows, leaving the others where they are."""
    return replace(rows, cache=copy.copy(rows.cache)).take(torch.tensor(index, device=rows.logits.device))


def _prefill(
    model: PreTrainedModel, number: int, prompt: Sequence[int], conditions: Sequence[Condition], max_new_tokens: int
) -> list[tuple[Plan, Rows, dict]]:
    """One forward pass of a prompt, then the reduction at step 0: rows ready to decode and what is known of them."""
    began = time.perf_counter()
    readings = [c.resolved() for c in conditions]
    attention = PromptAttention(
        sums=any(r.score_reduce == "mean" for r in readings),
        groups=any(r.score_reduce == "max" and r.head_map == "group_mean" for r in readings),
    )
    cache = DynamicCache(config=model.config)
    ids = torch.tensor([list(prompt)], device=model.device)
    logits = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1, kvrepro=attention).logits[0]

    groups: dict[Plan, list[int]] = {}
    for j, (c, reading) in enumerate(zip(conditions, readings, strict=True)):
        groups.setdefault(_plan(c, reading, len(prompt), max_new_tokens), []).append(j)
    ready = []
    for plan, members in groups.items():
        draws = [_generator(readings[j], prompt) for j in members]
        rows = _rows(plan, readings[members[0]], [conditions[j] for j in members], draws, attention, cache, logits)
        rows.tags = [(number, j) for j in members]
        ready.append((plan, rows))
    seconds = (time.perf_counter() - began) / len(conditions)
    return [(plan, rows, _facts(rows, seconds)) for plan, rows in ready]


def _rows(
    plan: Plan,
    reading: Reading,
    conditions: list[Condition],
    draws: list[Random],
    attention: PromptAttention,
    cache: DynamicCache,
    logits: Tensor,
) -> Rows:
    """The rows of one plan after the reduction at step 0, in slots. Readings of one plan reduce attention alike."""
    kv_heads = cache.layers[0].keys.shape[1]
    o = after_prompt(attention, reading, kv_heads, plan.head_map is not None, len(conditions))
    visible = o.alive[:, None].expand(-1, 1 if plan.head_map is None else kv_heads, -1)
    if plan.evicts and plan.first == 0:
        visible = keep_sets(o, conditions, draws, visible.shape[1])
    alive = visible.any(1)
    gone = o.alive.sum(1) - alive.sum(1)
    slots = o.positions
    if plan.execution == "physical":
        slots = alive.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, : int(alive.sum(1).max())]
    return Rows(
        tags=[],
        conditions=conditions,
        draws=draws,
        observation=replace(o, alive=alive).map_slots(lambda v: regrouped(v, slots, plan.width)),
        visible=regrouped(visible, slots, plan.width),
        cache=from_prompt(cache, slots, plan.width),
        logits=logits.expand(len(conditions), -1),
        evicted=gone,
        calls=(gone > 0).long(),
    )


def _facts(rows: Rows, prefill_seconds: float) -> dict[tuple[int, int], dict]:
    """What the prefill tells of each row: seconds, and the positions kept, whose hash also tells heads apart."""
    facts = {}
    positions, visible = rows.observation.positions.cpu(), rows.visible.cpu()
    for tag, where, seen in zip(rows.tags, positions, visible, strict=True):
        heads = [sorted(where[head].tolist()) for head in seen]
        facts[tag] = {
            "kept_positions": sorted(where[seen.any(0)].tolist()),
            "kept_positions_hash": hashlib.sha256(str(heads).encode()).hexdigest()[:16],
            "prefill_seconds": prefill_seconds,
        }
    return facts


def _plan(c: Condition, reading: Reading, n: int, max_new_tokens: int) -> Plan:
    """Rows of equal plans may share a batch; sizes are rounded up so that similar rows meet."""
    total = _round_up(n + max_new_tokens)
    if c.policy == "full":
        return Plan("physical", False, total, total, 1, 0, "max", None)
    per_head = POLICIES[c.policy].allocate is not None
    first = reading.per_head_first_reduction if per_head else reading.first_reduction
    target = _round_up(min(c.capacity or 0, n + max_new_tokens))
    if c.execution == "masked":
        width = total
    elif first:
        width = _round_up(n) + -(-first // c.interval) * c.interval
    else:
        width = target + c.interval
    head_map = reading.head_map if per_head else None
    return Plan(c.execution, True, width, target, c.interval, first, reading.score_reduce, head_map)


def _round_up(size: int, step: int = 64) -> int:
    return -(-size // step) * step


def _generator(reading: Reading, prompt: Sequence[int]) -> Random:
    """Random's generator: seed 42 anew, or mixed with the prompt so that items differ in whatever order they run."""
    if reading.random_seed == "per_item":
        return Random(42)
    return Random(int.from_bytes(hashlib.sha256(str([42, *prompt]).encode()).digest()[:8]))


@torch.inference_mode()
def boundary_attention(
    model: PreTrainedModel, prompt: Sequence[int], fraction: float = 0.1, window: int = 32
) -> pd.DataFrame:
    """Where attention goes at the end of a prompt: a row per layer, query head and region.

    `mass` is the last token's attention, `window_mass` the mean over the last `window` tokens, `uniform` the region's
    share of the tokens. Regions: sink (position 0), prefix and suffix (`fraction` of the prompt at either end, rounded
    up; the sink taken out), middle.
    """
    _check_prompt(model, prompt, 1)
    n = len(prompt)
    side = protected_count(fraction, n, "ceil")
    if not 0 < fraction < 0.5 or 2 * side >= n:
        raise InputError(f"fraction {fraction} of {n} tokens guards {side} per side: take less than half the prompt")
    attention = PromptAttention(keep_queries=window)
    with installed(model):
        ids = torch.tensor([list(prompt)], device=model.device)
        model(input_ids=ids, logits_to_keep=1, use_cache=False, kvrepro=attention)
    parts = []
    regions = {"sink": (0, 1), "prefix": (1, side), "middle": (side, n - side), "suffix": (n - side, n)}
    for region, (a, b) in regions.items():
        mass = attention.window[..., a:b].sum(-1).cpu()  # [layers, heads, window]
        layer, head = torch.meshgrid(*[torch.arange(size, device="cpu") for size in mass.shape[:2]], indexing="ij")
        columns = {"layer": layer, "head": head, "mass": mass[..., -1], "window_mass": mass.mean(-1)}
        part = pd.DataFrame({name: values.flatten().numpy() for name, values in columns.items()})
        parts.append(part.assign(region=region, uniform=(b - a) / n))
    return pd.concat(parts, ignore_index=True)
