"""From evicted tokens to freed blocks: the studies of the reclamation chapter, each a tidy table.

`synthetic`, `toy`, `rounds` and `cadence` are index work on a ledger; `arising`, `published` and `occupancy` ask the
engine who stays of a prompt; `identity` and `latency` run a model on a paged cache. `streaming` has what concerns
attention scores, `results` what the tables say. `run` makes them all.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from kvrepro.chapters.reclamation import streaming
from kvrepro.chapters.reclamation.ledger import Ledger
from kvrepro.chapters.reclamation.paged import PagedCache, PagedSequence, Pass, Steps, call_for, extend, generate
from kvrepro.chapters.reclamation.survivors import GRANULARITIES, JOINT, POLICIES, WINDOW, condition
from kvrepro.engine import generate as engine
from kvrepro.engine.allowed import Number, Size, ensure
from kvrepro.engine.attention import installed
from kvrepro.engine.catalogue import CATALOGUE
from kvrepro.engine.condition import Condition, Prompt
from kvrepro.engine.passes import Call
from kvrepro.engine.policy import find
from kvrepro.engine.regime import DecodeCap, Prefill
from kvrepro.errors import InputError
from kvrepro.experiment import data
from kvrepro.experiment import run as runner
from kvrepro.experiment.models import Loaded
from kvrepro.experiment.run import PerItem, Settings
from kvrepro.paths import ROOT

LAYOUTS = ("none", "repack", "fill")
SINKS = 4
KERNELS = ROOT / "data" / "gpu" / "kernels.csv"


@dataclass(frozen=True)
class Sizes:
    """How many prompts each study takes."""

    arising: int
    published: int
    identity: int
    latency: int


SIZES = {"quick": Sizes(8, 6, 6, 6), "full": Sizes(48, 48, 24, 24)}


def size(profile: str, n_items: int | None = None) -> Sizes:
    """The profile's size; `n_items` caps every study."""
    if profile not in SIZES:
        raise InputError(f"unknown profile {profile!r}: choose {' or '.join(SIZES)}")
    ensure((Size, None), n_items=n_items)
    found = SIZES[profile]
    return found if n_items is None else Sizes(*(min(n_items, n) for n in vars(found).values()))


def prompts(loaded: Loaded, items: str, n_items: int, tokens: int, seed: int = 0) -> dict[str, list[int]]:
    """Token ids of `n_items` prompts of at most `tokens`, by item."""
    found = data.load_items(items, n_items, seed=seed, tokens=tokens)
    return {item.id: data.build_prompt(item, loaded.tokenizer, tokens).ids for item in found}


# ---- what a survivor set gives back


def reclaim(keep: np.ndarray, block_size: int = 16) -> dict[str, float]:
    """What a survivor set `[..., tokens]` gives back, as one row.

    living: slots that some head keeps. freed_plain, freed_repack, freed_fill: blocks. share_*: of all blocks.
    copies_*: slots that move, `emptiest` = hole filling that vacates the emptiest blocks. shortfall: share of tokens
    evicted per head, less share of blocks freed by a repack. share_own: freed if each head had a table of its own.
    """
    keep = keep[(None,) * (3 - keep.ndim)]
    tokens = keep.shape[-1]
    blocks = -(-tokens // block_size)
    row: dict[str, float] = {"tokens": tokens, "blocks": blocks, "living": int(keep.any((0, 1)).sum())}
    for layout, compact in (("repack", {}), ("fill", {"vacate": "tail"}), ("emptiest", {"vacate": "emptiest"})):
        ledger = Ledger(blocks, block_size)
        number = ledger.new()
        ledger.append(number, tokens)
        row["freed_plain"] = ledger.evict(number, keep)
        getattr(ledger, "fill" if compact else "repack")(number, **compact)
        row[f"freed_{layout}"] = ledger.counters.blocks_freed
        row[f"copies_{layout}"] = ledger.counters.slot_copies
    row["share_plain"], row["share_repack"] = row["freed_plain"] / blocks, row["freed_repack"] / blocks
    row["evicted"] = 1 - float(keep.mean())
    row["shortfall"] = row["evicted"] - row["share_repack"]
    row["share_own"] = 1 - float(np.ceil(keep.sum(-1) / block_size).sum()) / (blocks * keep.shape[0] * keep.shape[1])
    row["copies_ratio"] = row["copies_fill"] / row["copies_repack"] if row["copies_repack"] else np.nan
    return row


# ---- patterns made by hand


def patterns(tokens: int, random: np.random.Generator, block_size: int = 16) -> dict[str, np.ndarray]:
    """Survivor sets: the guide's three, and others that evict about as much. Bool [tokens]; per head [1, 8, tokens]."""
    at = np.arange(tokens)
    runs = np.repeat(random.random(-(-tokens // 64)) < 0.1, 64)[:tokens]
    lots = random.integers(0, 10, -(-tokens // 10))
    return {
        "every 10th": at % 10 == 0,
        "one per block": at % block_size == 0,
        "one aligned block evicted": at // block_size != 2,
        "one random of ten": at % 10 == lots[at // 10],
        "random 10%": random.random(tokens) < 0.1,
        "random 20%": random.random(tokens) < 0.2,
        "runs of 64": runs,
        "sinks and recency": (at < SINKS) | (at >= tokens - tokens // 10 + SINKS),
        "random 10% per head, 8 heads": random.random((1, 8, tokens)) < 0.1,
    }


def synthetic(tokens: int = 16_000, block_size: int = 16, draws: int = 20, seed: int = 0) -> pd.DataFrame:
    """`reclaim` of every pattern; those drawn by lot `draws` times (column `draw`), the others once."""
    rows = []
    for draw in range(draws):
        for name, keep in patterns(tokens, np.random.default_rng([seed, draw]), block_size).items():
            if draw == 0 or "random" in name or "runs" in name:
                rows.append({"pattern": name, "block_size": block_size, "draw": draw, **reclaim(keep, block_size)})
    return pd.DataFrame(rows)


def by_block_size(
    tokens: int = 16_000, kept: float = 0.1, sizes: Sequence[int] = (1, 2, 4, 8, 16, 32, 64, 128), draws: int = 6
) -> pd.DataFrame:
    """Share of blocks freed by chance alone: survival by lot with probability `kept`, beside (1 - kept)^block_size."""
    rows = []
    for size in sizes:
        for draw in range(draws):
            keep = np.random.default_rng([size, draw]).random(tokens) < kept
            rows.append({"block_size": size, "draw": draw, "expected": (1 - kept) ** size, **reclaim(keep, size)})
    return pd.DataFrame(rows)


TOY = np.isin(np.arange(24), [2, 9, 13, 21], invert=True)


def toy() -> pd.DataFrame:
    """The guide's round of 24 tokens in blocks of 4, as one row."""
    return pd.DataFrame([reclaim(TOY, 4)])


def toy_layouts() -> dict[str, np.ndarray]:
    """The toy's slots, block by block of the pool [6, 4], before and after: true positions, -1 where free or dead."""
    found = {}
    for layout in LAYOUTS:
        ledger = Ledger(6, 4)
        number = ledger.new()
        ledger.append(number, 24)
        ledger.evict(number, TOY)
        if layout != "none":
            getattr(ledger, layout)(number)
        flat, positions, _ = ledger.living(number)
        slots = np.full(24, -1)
        slots[flat] = positions
        found[layout] = slots.reshape(6, 4)
    return found


# ---- patterns as they arise


Cells = list[tuple[dict[str, Any], Condition]]  # columns of a row, and what it asks for


def _cells(policies: Collection[str], granularities: Sequence[str], kept: Sequence[float], tokens: int) -> Cells:
    """The chapter's policies at each granularity (positions choose one set in any case) and share of `tokens`."""
    return [
        ({"policy": p, "granularity": g, "kept": share}, condition(p, g, round(share * tokens), Prefill()))
        for p in policies
        for g in (granularities[:1] if p == "sinks_recency" else granularities)
        for share in kept
    ]


def arising(
    loaded: Loaded,
    ids: list[int],
    kept: Sequence[float] = (0.1, 0.25, 0.5, 0.9),
    policies: Collection[str] = POLICIES,
    granularities: Sequence[str] = GRANULARITIES,
    block_size: int = 16,
) -> pd.DataFrame:
    """`reclaim` of what each policy keeps of a prompt: rows (policy, granularity, kept)."""
    return _reclaimed(loaded, ids, _cells(policies, granularities, kept, len(ids)), block_size)


def _reclaimed(loaded: Loaded, ids: list[int], cells: Cells, block_size: int) -> pd.DataFrame:
    sets = _kept_sets(loaded, ids, [c for _, c in cells])
    rows = [cell | reclaim(keep, block_size) for (cell, _), keep in zip(cells, sets, strict=True)]
    return pd.DataFrame(rows, columns=None if rows else ["policy", "kept"])


PUBLISHED = ("streaming_llm", "tri_attention", "tova", "h2o_online", "snapkv", "ada_kv", "r_kv", "k_norm")


def published(
    loaded: Loaded,
    ids: list[int],
    kept: Sequence[float] = (0.1, 0.5),
    policies: Sequence[str] = PUBLISHED,
    block_size: int = 16,
) -> pd.DataFrame:
    """`reclaim` of what the catalogue's policies keep, with their own heads, windows and layers, after the prefill."""
    asked = [(name, share) for name in policies for share in kept]
    cells: Cells = [({"policy": find(name).title, "kept": share}, _condition(name, share)) for name, share in asked]
    return _reclaimed(loaded, ids, cells, block_size)


# An eighth of DuoAttention's own 128 and 256, as prompts are: it protects them in every head, whatever the budget.
SWITCHES = {"duo_attention": (("sinks", 16), ("recent", 32))}
REQUEST = "Repeat the previous context:"  # of KVzip


def _condition(name: str, budget: int | float) -> Condition:
    return Condition(name, budget, Prefill(), reading="as_described", switches=SWITCHES.get(name, ()))


def _kept_sets(loaded: Loaded, ids: list[int], conditions: Sequence[Condition]) -> list[np.ndarray]:
    """Who stays of a prompt under each condition, bool [layers, kv_heads, tokens]."""
    repeat = loaded.tokenizer.encode(REQUEST, add_special_tokens=False) if loaded.tokenizer else ()
    [answers] = engine.generate(
        loaded.model, [ids], conditions, max_new_tokens=1, stop_ids=(), kept_sets=True, repeat=repeat
    ) if conditions else [()]  # fmt: skip
    return [np.stack(answer.kept_sets) for answer in answers]


def able(
    loaded: Loaded, prompts: Mapping[str, list[int]], policies: Sequence[str], budgets: Sequence[int | float]
) -> list[str]:
    """Those of the catalogue's `policies` that evict and that this model and these prompts can have; a printed line
    says of each other one why not. budgets: of conditions, all of which must be met.

    What was learned of other weights is found out on the first 128 tokens, budgets on the shortest prompt.
    """
    shortest = min(prompts.values(), key=len)
    found = []
    for name in (name for name in policies if find(name).frees and not find(name).shared):
        try:
            asked = [_condition(name, budget) for budget in budgets]
            engine.check_conditions(loaded.model, [Prompt(shortest, {})], asked)
            probe = _condition(name, 0.5)
            _kept_sets(loaded, shortest[:128], [probe])
            found.append(name)
        except InputError as error:
            print(f"{name} is left out: {error}")
    return found


def occupancy(
    loaded: Loaded,
    ids: list[int],
    kept: float = 0.1,
    policies: Collection[str] = POLICIES,
    granularities: Sequence[str] = GRANULARITIES,
    block_size: int = 16,
) -> pd.DataFrame:
    """Living slots of each block of one prompt, evicted, not compacted: rows (policy, granularity, kept, block)."""
    cells, parts = _cells(policies, granularities, [kept], len(ids)), []
    for (cell, _), keep in zip(cells, _kept_sets(loaded, ids, [c for _, c in cells]), strict=True):
        living = np.pad(keep.any((0, 1)), (0, -len(ids) % block_size)).reshape(-1, block_size).sum(1)
        parts.append(pd.DataFrame({**cell, "block": np.arange(len(living)), "living": living}))
    return pd.concat(parts, ignore_index=True).assign(block_size=block_size)


# ---- generation from a compacted cache


def read(
    loaded: Loaded, ids: list[int], more: int = 0, copies: int = 1, block_size: int = 16, sums: Collection[str] = ()
) -> tuple[Call, PagedSequence, Tensor]:
    """Prefill `ids` into a cache with room for `more` tokens and for `copies` of the sequence: a call, the sequence,
    logits [1, vocabulary]. sums: of the policies that are to evict from it."""
    blocks = copies * (-(-(len(ids) + more) // block_size) + 1)
    pages = PagedCache(loaded.model.config, blocks, block_size, loaded.model.dtype, loaded.model.device)
    call, sequence = call_for(loaded.model, ids), PagedSequence(pages, sums)
    with installed(loaded.model):
        logits = extend(call, sequence, ids, WINDOW if sums else 0)
    return call, sequence, logits


@dataclass(frozen=True)
class Choice:
    """Who chooses the survivors of a generation, and how long it is."""

    who: dict[str, str]  # columns source ("chapter" or "catalogue"), policy and granularity
    condition: Condition
    survivors: dict[int, Tensor]  # as `survivors.given` takes them; empty: the condition's policy chooses
    new_tokens: int


def choices(
    loaded: Loaded,
    ids: list[int],
    budget: int,
    policies: Collection[str],
    granularities: Sequence[str],
    catalogue: Sequence[str],
    new_tokens: int,
    every: int,
) -> list[Choice]:
    """The chapter's policies at each granularity, which evict again while decoding, and the catalogue's, which compress
    the prompt once and generate half as many tokens."""
    found = [
        Choice({"source": "chapter", "policy": cell["policy"], "granularity": cell["granularity"]},
               replace(c, regime=DecodeCap(every)), {}, new_tokens)
        for cell, c in _cells(policies, granularities, [1.0], budget)
    ]  # fmt: skip
    asked = [_condition(name, budget) for name in catalogue]
    for c, keep in zip(asked, _kept_sets(loaded, ids, asked), strict=True):
        who = {"source": "catalogue", "policy": find(c.policy).title, "granularity": find(c.policy).budget}
        found.append(Choice(who, c, {len(ids): torch.from_numpy(keep)}, max(1, new_tokens // 2)))
    return found


COMPACTED = (("none", False), ("repack", False), ("fill", False), ("repack", True), ("fill", True))
CONTROL = "storage positions"


def identity(
    loaded: Loaded,
    ids: list[int],
    budget: int = 128,
    policies: Collection[str] = POLICIES,
    granularities: Sequence[str] = JOINT,
    catalogue: Sequence[str] = (),
    new_tokens: int = 8,
    every: int = 2,
    block_size: int = 16,
) -> pd.DataFrame:
    """Generation that evicts to `budget` after the prompt and (the chapter's policies) every `every` tokens, from
    caches of every layout. `choices` says who evicts.

    Rows (source, policy, granularity, layout, shared): `identical` to the uncompacted cache of the same policy (0 or
    1), `logit_gap` to it, `as_predicted` (share of passes after which the free list had grown as arithmetic says),
    `shared_slots_touched` by copies, `prefix_intact` (what the other sequence holds is unchanged, bit by bit), and
    metrics. shared: the first 60% of the prompt belong to another living sequence, too. Layout "storage positions" is
    hole filling without its position map, a control on "one set": new tokens are told their storage index.
    """
    cut, rows = _shared(len(ids)), []
    call, prefix, _ = read(loaded, ids[:cut], len(ids) - cut + new_tokens, 4, block_size, ("mass",))
    whole, evictable = prefix.fork(), list(call.facts.evictable)
    with installed(loaded.model):
        logits = extend(call, whole, ids[cut:], WINDOW)
    held = prefix.ledger.living(prefix.number)[0]
    before = [flat[held] for flat in prefix.pages.stored]
    for c in choices(loaded, ids, budget, policies, granularities, catalogue, new_tokens, every):
        reference: list[Tensor] = []
        for layout, shared in COMPACTED + ((CONTROL, False),) * (c.who["granularity"] == "one set"):
            sequence = whole.fork(cut // block_size if shared else 0, "fill" if layout == CONTROL else layout)
            more = {"scalings": call.scalings, "misplaced": layout == CONTROL}
            steps = call_for(loaded.model, ids, c.new_tokens + 1, Steps, **more)
            generate(steps, sequence, logits, c.condition, c.survivors)
            sequence.ledger.free(sequence.number)
            reference = reference or steps.logits
            if not c.survivors:  # the others evict to the same
                c.survivors.update({p.seen: torch.from_numpy(p.survivors[evictable]) for p in sequence.passes})
            here = {**c.who, "layout": layout, "shared": shared, "tokens": c.new_tokens}
            here |= _agreement(steps.logits, reference)
            here["prefix_intact"] = all(map(torch.equal, before, (flat[held] for flat in prefix.pages.stored)))
            rows.append(here | _summed(sequence.passes))
    return pd.DataFrame(rows)


def _agreement(ours: list[Tensor], reference: list[Tensor]) -> dict[str, float]:
    """Are all greedy tokens the same, 0 or 1, and the largest difference of a logit?"""
    pairs = list(zip(ours, reference, strict=True))
    same = all(int(a.argmax()) == int(b.argmax()) for a, b in pairs)
    return {"identical": float(same), "logit_gap": max(float((a - b).abs().max()) for a, b in pairs)}


def _summed(passes: list[Pass]) -> dict[str, float]:
    return {
        "passes": len(passes),
        "as_predicted": float(np.mean([p.freed == p.predicted for p in passes])),
        "blocks_freed": sum(p.freed for p in passes),
        "slot_copies": sum(p.copies for p in passes),
        "shared_slots_touched": sum(p.foreign for p in passes),
    }


def _shared(tokens: int) -> int:
    """Tokens of a prompt that another sequence holds, too."""
    return int(0.6 * tokens)


# ---- how often


def rounds(
    every: int,
    layout: str,
    budget: int = 2048,
    tokens: int = 1024,
    block_size: int = 16,
    victims: str = "lot",
    seed: int = 0,
) -> pd.DataFrame:
    """Decoding under a budget as index work: a row per token with blocks_held, tokens_alive, copies and freed.

    The cache starts dense at its budget; every `every` tokens it is evicted back to it and compacted by `layout`
    ("none": not at all). victims: "lot" (any token but the newest eight), or "oldest" (sinks and recency).
    """
    if layout not in LAYOUTS or victims not in ("lot", "oldest"):
        raise InputError(f"layout {layout!r}, victims {victims!r}: choose {', '.join(LAYOUTS)}; lot or oldest")
    random, ledger = np.random.default_rng(seed), Ledger(-(-(budget + tokens) // block_size) + 1, block_size)
    number, counters, alive, rows = ledger.new(), ledger.counters, budget, []
    ledger.append(number, budget)
    for t in range(1, tokens + 1):
        ledger.append(number)
        alive += 1
        freed, copies = counters.blocks_freed, counters.slot_copies
        if t % every == 0:
            _evict_to(ledger, number, budget, victims, random)
            alive = budget
            if layout != "none":
                getattr(ledger, layout)(number)
        held = len(ledger.references) - len(ledger.free_list)
        rows.append((t, held, alive, counters.slot_copies - copies, counters.blocks_freed - freed))
    names = ["token", "blocks_held", "tokens_alive", "copies", "freed"]
    frame = pd.DataFrame(rows, columns=names)
    frame.attrs["metrics"] = ledger.metrics(number, budget)
    return frame.assign(every=every, layout=layout, victims=victims, budget=budget, block_size=block_size, draw=seed)


def _evict_to(ledger: Ledger, number: int, budget: int, victims: str, random: np.random.Generator) -> None:
    """Evict a sequence down to `budget` living tokens."""
    s = ledger.sequences[number]
    living = np.sort(s.positions[s.positions >= 0])
    excess = len(living) - budget
    gone = random.choice(living[:-8], excess, replace=False) if victims == "lot" else living[SINKS : SINKS + excess]
    keep = np.ones(s.seen, bool)
    keep[gone] = False
    ledger.evict(number, keep)


def cadence(
    cadences: Sequence[int],
    budget: int = 2048,
    tokens: int = 512,
    block_size: int = 16,
    draws: int = 6,
    victims: str = "lot",
) -> pd.DataFrame:
    """Means over `rounds` of `tokens`, or of one pass: rows (every, layout, draw) with blocks_mean, blocks_max,
    copies_per_token, copies_per_pass, freed_per_pass, and `share`: what copies read and write, over what attention
    reads of the cache, per token."""
    rows = []
    for every in cadences:
        for layout in LAYOUTS:
            for draw in range(draws):
                r = rounds(every, layout, budget, max(tokens, every), block_size, victims, draw)
                passes = max(tokens, every) // every
                rows.append({
                    "every": every, "layout": layout, "draw": draw, "budget": budget,
                    "blocks_mean": r.blocks_held.mean(), "blocks_max": r.blocks_held.max(),
                    "copies_per_token": r.copies.sum() / (passes * every),
                    "copies_per_pass": r.copies.sum() / passes, "freed_per_pass": r.freed.sum() / passes,
                    "share": 2 * r.copies.sum() / (passes * every) / r.tokens_alive.mean(),
                })  # fmt: skip
    return pd.DataFrame(rows)


def latency(
    loaded: Loaded,
    ids: list[int],
    cadences: Sequence[int] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512),
    budget: int = 256,
    block_size: int = 16,
    seed: int = 0,
) -> pd.DataFrame:
    """Time between tokens at each cadence, the three layouts by turns, so that a busy machine is busy for all: a row
    per (every, layout), medians over `repeats(every)` rounds.

    step_ms: the model's, mean of the first and the last token of a round. pass_ms: eviction with its bookkeeping, and
    the compaction; "none" evicts alike. token_ms: step + pass / every; longest_ms: step + pass, the token that waits.
    added: token_ms over that of "none" in the same round, less 1 (missing for "none"). Between the first and the last
    token those of a round are read at once, since which they are decides no time. Victims by lot. The budget is half of
    a prompt that is shorter than two budgets.
    """
    parts, held = [], min(budget, len(ids) // 2)
    call, sequence, logits = read(loaded, ids, timed(cadences), len(LAYOUTS) + 1, block_size)
    for every in cadences:
        frame = pd.DataFrame(_rounds(call, sequence, int(logits.argmax()), ids, every, held, seed))
        frame["token_ms"] = frame.step_ms + frame.pass_ms / every
        frame["longest_ms"] = frame.step_ms + frame.pass_ms
        medians = frame.groupby("layout", sort=False)[["step_ms", "pass_ms", "token_ms", "longest_ms"]].median()
        by_round = frame.pivot_table(index="round", columns="layout", values="token_ms")
        medians["added"] = (by_round.div(by_round["none"], axis=0) - 1).median().drop("none")
        parts.append(medians.reset_index().assign(every=every, rounds=repeats(every), budget=held))
    return pd.concat(parts, ignore_index=True)


def repeats(every: int) -> int:
    """Rounds that are timed at a cadence."""
    return max(2, 24 // every)


def timed(cadences: Sequence[int]) -> int:
    """Tokens that a prompt goes on by at most while it is timed: one to warm up, then the rounds."""
    return 1 + max(repeats(every) * every for every in cadences)


def _rounds(
    call: Call, sequence: PagedSequence, first: int, ids: list[int], every: int, budget: int, seed: int
) -> list[dict[str, Any]]:
    """Rounds of one cadence: layout, round, step_ms, pass_ms."""
    children = {layout: sequence.fork(0) for layout in LAYOUTS}
    random = {layout: np.random.default_rng(seed) for layout in LAYOUTS}
    token = dict.fromkeys(LAYOUTS, first)
    between = (ids * (1 + every // len(ids)))[: max(0, every - 2)]

    def step(layout: str) -> float:
        start = time.perf_counter()
        token[layout] = int(extend(call, children[layout], [token[layout]]).argmax())
        return 1e3 * (time.perf_counter() - start)

    def compact(layout: str) -> float:
        start = time.perf_counter()
        _evict_to(sequence.ledger, children[layout].number, budget, "lot", random[layout])
        sequence.pages.compact(children[layout].number, layout)
        return 1e3 * (time.perf_counter() - start)

    rows = []
    with installed(call.model):
        for layout in LAYOUTS:
            step(layout), compact(layout)
        for round in range(repeats(every)):
            for i in range(len(LAYOUTS)):
                layout = LAYOUTS[(round + i) % len(LAYOUTS)]
                steps = [step(layout)]
                if between:
                    extend(call, children[layout], between)
                steps += [step(layout)] if every > 1 else []
                rows.append({"layout": layout, "round": round, "step_ms": np.mean(steps), "pass_ms": compact(layout)})
    for child in children.values():
        child.ledger.free(child.number)
    return rows


def gauge(every: int = 128, **settings: Any) -> pd.DataFrame:
    """`rounds` at one cadence, every layout."""
    return pd.concat([rounds(every, layout, **settings) for layout in LAYOUTS], ignore_index=True)


def exported(every: int = 128, **settings: Any) -> pd.DataFrame:
    """The metrics that a production engine should export, as `rounds` leaves them: a row each, a column per layout."""
    found = pd.DataFrame({layout: rounds(every, layout, **settings).attrs["metrics"] for layout in LAYOUTS})
    return found.rename(columns={"none": "no compaction", "fill": "hole filling"})


# ---- what copies cost elsewhere


@dataclass(frozen=True)
class Shape:
    """What decides the bytes of a step: a slot's keys and values, and the weights."""

    layers: int
    kv_heads: int
    dim: int
    itemsize: int
    weights: float  # bytes

    @property
    def slot(self) -> int:
        """Bytes of one token's keys and values over all layers."""
        return self.layers * self.kv_heads * self.dim * self.itemsize * 2


SHAPES = {"Qwen3-8B": Shape(36, 8, 128, 2, 16.4e9), "Llama-3.1-8B": Shape(32, 8, 128, 2, 16.1e9)}  # bfloat16


def bandwidths(path: Path = KERNELS) -> dict[str, float]:
    """Bytes per second, read and written, as measured on a GPU: a large `copy`, and the compaction kernels `repack` and
    `fill` at their largest size. Empty where nothing was measured."""
    if not Path(path).is_file():
        return {}
    rows = pd.read_csv(path)
    [ceiling] = rows[rows.variant == "copy of 2 GiB"].to_dict("records")
    per_second = 2 * 2**31 / (ceiling["floor_us"] * 1e-6)  # what every other row's floor was computed from
    found = {"copy": per_second * ceiling["fraction_of_floor"]}
    for layout, variant in (("repack", "repack"), ("fill", "hole filling")):
        mine = rows[(rows.kernel == "compaction") & rows.variant.str.startswith(f"{variant}, keep")]
        found[layout] = per_second * float(mine.loc[mine.floor_us.idxmax()].fraction_of_floor)
    return found


def gpu_passes(path: Path = KERNELS) -> pd.DataFrame:
    """The extra pass beside fused attention as measured on a GPU: rows (shape, tokens) with `attention_us` of the
    fastest backend, `pass_us` and `share`. Empty where nothing was measured."""
    if not Path(path).is_file():
        return pd.DataFrame(columns=["shape", "tokens", "attention_us", "pass_us", "share"])
    rows = pd.read_csv(path)
    passes = rows[(rows.kernel == "column_mass") & (rows.variant == "causal")]
    attention = rows[rows.kernel == "prefill_attention"]
    by = ["shape", "tokens"]
    found = pd.DataFrame(
        {"attention_us": attention.groupby(by).p50_us.min(), "pass_us": passes.groupby(by).p50_us.min()}
    )
    return found.assign(share=found.pass_us / found.attention_us).reset_index()


def cost(
    traffic: pd.DataFrame,
    shape: str = "Qwen3-8B",
    batches: Sequence[int] = (1, 64),
    bandwidth: Mapping[str, float] | None = None,
) -> pd.DataFrame:
    """Cost model of a bandwidth-bound decode: `traffic` (from `cadence`) with, per batch, `step_us` and `copy_us` per
    token, and `added`, their ratio.

    step: weights + batch x budget x slot, at the bandwidth of a plain `copy`; copies: 2 x batch x copies per token x
    slot, at that of the layout's kernel (`bandwidths`). Without bandwidths the times are missing and `added` is the
    ratio of bytes. Launches are not counted.
    """
    if shape not in SHAPES:
        raise InputError(f"unknown shape {shape!r}: choose {', '.join(SHAPES)}")
    s, measured = SHAPES[shape], bandwidth or {}
    parts = []
    for batch in batches:
        step = s.weights + batch * traffic.budget * s.slot
        copied = 2 * batch * traffic.copies_per_token * s.slot
        step_us = 1e6 * step / measured.get("copy", np.nan)
        copy_us = 1e6 * copied / traffic.layout.map(measured).astype(float)
        added = copy_us / step_us if measured else copied / step
        parts.append(traffic.assign(batch=batch, shape=shape, step_us=step_us, copy_us=copy_us, added=added))
    return pd.concat(parts, ignore_index=True)


# ---- all of them


BUDGET = Number(16, whole=True)  # of which eight are the newest, never evicted by lot
KEPT = Number(0, 1, above=True, below=True)


def check(
    loaded: Loaded,
    prompts: Mapping[str, list[int]],
    *,
    kept: Sequence[float],
    capacity: int,
    max_new_tokens: int,
    cadences: Sequence[int],
    timed_cadences: Sequence[int],
    budget: int,
    block_size: int,
    shape: str,
) -> None:
    """Raise InputError for what cannot be met, before anything is computed."""
    ensure(Size, block_size=block_size, max_new_tokens=max_new_tokens, capacity=capacity)
    ensure(BUDGET, budget=budget)
    for name, values, kind in (("kept", kept, KEPT), ("cadences", cadences, Size),
                               ("timed_cadences", timed_cadences, Size)):  # fmt: skip
        if isinstance(values, str) or not isinstance(values, Sequence) or not values:
            raise InputError(f"{name} {values!r}: give a list of at least one")
        for value in values:
            ensure(kind, f"one of {name}", **{name: value})
    if shape not in SHAPES:
        raise InputError(f"unknown shape {shape!r}: choose {', '.join(SHAPES)}")
    shortest, longest = min(map(len, prompts.values())), max(map(len, prompts.values()))
    if capacity >= shortest:
        raise InputError(f"capacity {capacity} >= {shortest} tokens of a prompt: nothing leaves; lower it")
    if round(min(kept) * shortest) < 16:
        raise InputError(
            f"kept {min(kept):g} of {shortest} tokens are {min(kept) * shortest:.0f}, fewer than 16: raise it"
        )
    if block_size > _shared(shortest):
        raise InputError(f"block_size {block_size} > {_shared(shortest)} tokens that prompts share: lower it")
    needed = max(timed(timed_cadences), max_new_tokens)
    if longest + needed > loaded.context:
        raise InputError(
            f"{longest} tokens of a prompt and {needed} after it exceed the model's {loaded.context}: "
            "lower prompt_tokens, timed_cadences or max_new_tokens"
        )


def run(
    loaded: Loaded,
    prompts: Mapping[str, list[int]],
    sizes: Sizes,
    settings: Settings,
    *,
    kept: Sequence[float],
    capacity: int,
    max_new_tokens: int,
    cadences: Sequence[int],
    timed_cadences: Sequence[int],
    budget: int,
    block_size: int,
    shape: str,
) -> dict[str, pd.DataFrame]:
    """Every study's table by the name under which the claims ask for it. Raises InputError for what `check` finds."""
    check(loaded, prompts, kept=kept, capacity=capacity, max_new_tokens=max_new_tokens, cadences=cadences,
          timed_cadences=timed_cadences, budget=budget, block_size=block_size, shape=shape)  # fmt: skip
    shares = sorted({min(kept), 0.5})
    whole = able(loaded, prompts, tuple(CATALOGUE), [capacity])
    some = able(loaded, prompts, [name for name in PUBLISHED if name in whole], shares)
    seed = settings.seed
    index = {  # without a model
        "synthetic": partial(synthetic, seed=seed, block_size=block_size),
        "toy": toy,
        "traffic": partial(cadence, cadences, budget, block_size=block_size),
        "wall": streaming.wall,
        "passes": streaming.passes,
    }
    model: dict[str, tuple[int, Callable, dict[str, Any]]] = {
        "arising": (sizes.arising, arising, {"kept": kept, "policies": POLICIES}),
        "published": (sizes.published, published, {"kept": shares, "policies": some}),
        "identity": (
            sizes.identity,
            identity,
            {"budget": capacity, "policies": POLICIES, "catalogue": whole, "new_tokens": max_new_tokens},
        ),
        "latency": (sizes.latency, latency, {"cadences": timed_cadences, "seed": seed}),
    }
    tables = {
        name: runner.run(PerItem("reclamation", name, {name: study}, index_work), None, settings).drop(columns="item")
        for name, study in index.items()
    }
    for name, (count, study, given) in model.items():
        few = {item: prompts[item] for item in list(prompts)[:count]}
        job = PerItem("reclamation", name, few, study, given | {"block_size": block_size}, alone=name == "latency")
        tables[name] = runner.run(job, loaded, settings)
    return tables


def index_work(loaded: None, study: Callable[[], pd.DataFrame]) -> pd.DataFrame:
    """A study that is index work on a ledger."""
    return study()
