"""From evicted tokens to freed blocks: the studies of the reclamation chapter, each a tidy table.

`synthetic`, `toy` and `cadence` are index work on a ledger; `arising`, `published` and `occupancy` ask the engine who
stays of a prompt; `identity` and `latency` run a model on a paged cache. `streaming` has what concerns attention
scores. `run` makes them all.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from kvrepro.chapters.reclamation import arithmetic, quoted, sharing, sparsity, streaming, survivors
from kvrepro.chapters.reclamation.ledger import Ledger
from kvrepro.chapters.reclamation.paged import LoggedSteps, PagedCache, PagedRows, Pass, call_for, extend, generate
from kvrepro.chapters.reclamation.settings import Settings
from kvrepro.chapters.reclamation.survivors import GRANULARITIES, JOINT, POLICIES, WINDOW, condition, label
from kvrepro.engine import generate as engine
from kvrepro.engine.allowed import Size, ensure
from kvrepro.engine.attention import installed
from kvrepro.engine.catalogue import CATALOGUE
from kvrepro.engine.condition import Condition, Prompt
from kvrepro.engine.facts import ModelFacts
from kvrepro.engine.passes import Call, check_shared
from kvrepro.engine.policy import find, is_own
from kvrepro.engine.regime import DecodeCap, Prefill
from kvrepro.errors import InputError
from kvrepro.experiment import data
from kvrepro.experiment import run as runner
from kvrepro.experiment.answers import REPEAT
from kvrepro.experiment.models import Loaded
from kvrepro.experiment.run import PerItem

COMPARED_LAYOUTS = ("none", "repack", "fill")  # of `ledger.LAYOUTS`
SINKS = 4
SIZES = {  # prompts of each study
    "quick": {"arising": 24, "published": 6, "identity": 6, "latency": 6, "sharing": 3, "sparsity": 24, "pages": 3},
    "full": {"arising": 48, "published": 48, "identity": 24, "latency": 24, "sharing": 24, "sparsity": 48, "pages": 24},
}


def prompts(loaded: Loaded, items: str, n_items: int | None, settings: Settings) -> dict[str, list[int]]:
    """Token ids by item, of `n_items` prompts (None: as many as the profile says).

    Messages that hold no passage to be cut may be as long as the model's context has room for. Where all layers slide,
    none is longer than what they hold: budgets are shares of it.
    """
    ensure((Size, None), n_items=n_items)
    held, count = ModelFacts.of(loaded.model).held, n_items or data.AtMost(SIZES[settings.profile]["arising"])
    most = settings.prompt_tokens
    tokens, room = held(most), held(max(most, loaded.context - _needed(settings)))
    if tokens < most:
        print(f"reclamation: prompts of {tokens:,} tokens at most, since no layer of this model holds more")
    found = data.load_fitting(items, count, loaded.tokenizer, tokens, settings.seed, room=room)
    limits = {item.id: room if item.context is None else tokens for item in found}
    return {item.id: data.build_prompt(item, loaded.tokenizer, limits[item.id]).ids for item in found}


def _needed(settings: Settings) -> int:
    """Tokens that prompts go on by at most."""
    return max(timed(settings.timed_cadences), settings.max_new_tokens)


# ---- what a survivor set gives back


def reclaim(keep: np.ndarray, block_size: int = 16) -> dict[str, float]:
    """What a survivor set `[..., tokens]` gives back, as one row.

    living: slots that some head keeps. freed_plain, freed_repack, freed_fill: blocks. share_*: of all blocks.
    copies_*: slots that move, `emptiest` = hole filling that vacates the emptiest blocks. shortfall: share of tokens
    evicted per head, less share of blocks freed by a repack. freed_packed: if each head packs its own survivors into
    the first of the request's blocks, so that the fullest head decides. share_own: freed if each head had a table of
    its own.
    """
    keep = keep[(None,) * (3 - keep.ndim)]
    tokens = keep.shape[-1]
    blocks = -(-tokens // block_size)
    row: dict[str, float] = {"tokens": tokens, "blocks": blocks, "living": int(keep.any((0, 1)).sum())}
    for layout in ("repack", "fill", "emptiest"):
        ledger, number = dense(tokens, block_size)
        row["freed_plain"] = ledger.evict(number, keep)
        ledger.compact(number, layout)
        row[f"freed_{layout}"] = ledger.counters.blocks_freed
        row[f"copies_{layout}"] = ledger.counters.slot_copies
    row["share_plain"], row["share_repack"] = row["freed_plain"] / blocks, row["freed_repack"] / blocks
    row["evicted"] = 1 - float(keep.mean())
    row["shortfall"] = row["evicted"] - row["share_repack"]
    row["freed_packed"] = blocks - -(-int(keep.sum(-1).max()) // block_size)
    row["share_packed"] = row["freed_packed"] / blocks
    row["share_own"] = 1 - float(np.ceil(keep.sum(-1) / block_size).sum()) / (blocks * keep.shape[0] * keep.shape[1])
    row["copies_ratio"] = row["copies_fill"] / row["copies_repack"] if row["copies_repack"] else np.nan
    return row


def dense(tokens: int, block_size: int, room: int = 0) -> tuple[Ledger, int]:
    """A ledger with room for more tokens, and the sequence in it."""
    ledger = Ledger(-(-(tokens + room) // block_size), block_size)
    number = ledger.new()
    ledger.append(number, tokens)
    return ledger, number


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


def toy() -> pd.DataFrame:
    """The guide's round of 24 tokens in blocks of 4, as one row."""
    return pd.DataFrame([reclaim(np.isin(np.arange(24), [2, 9, 13, 21], invert=True), 4)])


# ---- patterns as they arise


Cells = list[tuple[dict[str, Any], Condition]]  # columns of a row, and what it asks for


def _cells(policies: Collection[str], granularities: Sequence[str], kept: Sequence[float], tokens: int) -> Cells:
    """Policies at each granularity (positions choose one set in any case) and share of `tokens`."""
    return [
        ({"policy": label(p), "granularity": g, "kept": share}, condition(p, g, round(share * tokens), Prefill()))
        for p in policies
        for g in (granularities[:1] if p == "sinks_recency" else granularities)
        for share in kept
    ]


def arising(
    loaded: Loaded, ids: list[int], kept: Sequence[float], policies: Collection[str], block_size: int = 16
) -> pd.DataFrame:
    """`reclaim` of what each policy keeps of a prompt: rows (policy, granularity, kept)."""
    return _reclaimed(loaded, ids, _cells(policies, GRANULARITIES, kept, len(ids)), block_size)


def _reclaimed(loaded: Loaded, ids: list[int], cells: Cells, block_size: int) -> pd.DataFrame:
    sets = _kept_sets(loaded, ids, [c for _, c in cells])
    return pd.DataFrame([cell | reclaim(keep, block_size) for (cell, _), keep in zip(cells, sets, strict=True)])


def published(
    loaded: Loaded, ids: list[int], kept: Sequence[float], policies: Sequence[str], block_size: int = 16
) -> pd.DataFrame:
    """`reclaim` of what policies keep with their own heads, windows and layers, after the prefill."""
    cells: Cells = [({"policy": label(p), "kept": share}, _once(p, share)) for p in policies for share in kept]
    return _reclaimed(loaded, ids, cells, block_size)


def _once(policy: str, budget: int | float) -> Condition:
    """A policy as it was published, which compresses the prompt once."""
    return condition(policy, "per head", budget, Prefill())


def _kept_sets(loaded: Loaded, ids: list[int], conditions: Sequence[Condition]) -> list[np.ndarray]:
    """Who stays of a prompt under each condition, bool [layers, kv_heads, tokens]."""
    repeat = loaded.tokenizer.encode(REPEAT, add_special_tokens=False) if loaded.tokenizer else ()
    [answers] = engine.generate(
        loaded.model, [ids], conditions, max_new_tokens=1, stop_ids=(), kept_sets=True, repeat=repeat
    ) if conditions else [()]  # fmt: skip
    return [np.stack(answer.kept_sets) for answer in answers]


def able(
    loaded: Loaded, prompts: Mapping[str, list[int]], policies: Sequence[str], budgets: Sequence[int | float]
) -> list[str]:
    """Those of `policies` that this model and these prompts can have; a printed line says of each other one of the
    catalogue why not. A reader's own that cannot be had raises InputError. budgets: of conditions, all of which must be
    met.

    What was learned of other weights is found out on the first 128 tokens, budgets on the shortest prompt.
    """
    shortest, found = min(prompts.values(), key=len), []
    for name in policies:
        try:
            asked = [_once(name, budget) for budget in budgets]
            engine.check_conditions(loaded.model, [Prompt(shortest, {})], asked)
            if not find(name).frees:
                raise InputError("it chooses pages anew for every query and frees nothing")
            _kept_sets(loaded, shortest[:128], [_once(name, 0.5)])
            found.append(name)
        except InputError as error:
            if is_own(name):
                raise
            print(f"{name} is left out: {error}")
    return found


def occupancy(
    loaded: Loaded, ids: list[int], kept: float, policies: Collection[str], block_size: int = 16
) -> pd.DataFrame:
    """Living slots of each block of one prompt, evicted, not compacted: rows (policy, granularity, kept, block)."""
    cells, parts = _cells(policies, GRANULARITIES, [kept], len(ids)), []
    for (cell, _), keep in zip(cells, _kept_sets(loaded, ids, [c for _, c in cells]), strict=True):
        living = np.pad(keep.any((0, 1)), (0, -len(ids) % block_size)).reshape(-1, block_size).sum(1)
        parts.append(pd.DataFrame({**cell, "block": np.arange(len(living)), "living": living}))
    return pd.concat(parts, ignore_index=True)


# ---- generation from a compacted cache


def read(
    loaded: Loaded, ids: list[int], more: int = 0, copies: int = 1, block_size: int = 16, sums: Collection[str] = ()
) -> tuple[Call, PagedRows, Tensor]:
    """Prefill `ids` into a cache with room for `more` tokens and for `copies` of the sequence: a call, a single row,
    logits [1, vocabulary]. sums: of the policies that are to evict from it."""
    blocks = copies * (-(-(len(ids) + more) // block_size) + 1)
    pages = PagedCache(loaded.model.config, blocks, block_size, loaded.model.dtype, loaded.model.device)
    call, row = call_for(loaded.model, ids), PagedRows(pages, sums)
    with installed(loaded.model):
        logits = extend(call, row, ids, WINDOW if sums else 0)
    return call, row, logits


@dataclass(frozen=True)
class Choice:
    """Who chooses the survivors of a generation, and how long it is."""

    who: dict[str, str]  # columns source ("chapter", or "catalogue", as are a reader's own), policy and granularity
    condition: Condition
    survivors: dict[int, Tensor]  # as `survivors.given` takes them; empty: the condition's policy chooses
    new_tokens: int


def choices(
    loaded: Loaded, ids: list[int], budget: int, policies: Collection[str], catalogue: Sequence[str], new_tokens: int,
    every: int,
) -> list[Choice]:  # fmt: skip
    """The chapter's policies at each granularity, which evict again while decoding, and those of the catalogue or a
    reader's own, which compress the prompt once and generate half as many tokens."""
    found = [
        Choice({"source": "chapter", "policy": cell["policy"], "granularity": cell["granularity"]},
               replace(c, regime=DecodeCap(every)), {}, new_tokens)
        for cell, c in _cells(policies, JOINT, [1.0], budget)
    ]  # fmt: skip
    asked = [_once(name, budget) for name in catalogue]
    for name, c, keep in zip(catalogue, asked, _kept_sets(loaded, ids, asked), strict=True):
        who = {"source": "catalogue", "policy": label(name), "granularity": find(name).budget}
        found.append(Choice(who, c, {len(ids): torch.from_numpy(keep)}, max(1, new_tokens // 2)))
    return found


COMPACTED = (("none", False), ("repack", False), ("fill", False), ("repack", True), ("fill", True))
CONTROL = "storage positions"
TOGETHER = {"cpu": 1, "cuda": 12}  # choices, each with all its layouts, in a batch, whose rows pad each other


def identity(
    loaded: Loaded,
    ids: list[int],
    budget: int = 128,
    policies: Collection[str] = POLICIES,
    catalogue: Sequence[str] = (),
    new_tokens: int = 8,
    every: int = 2,
    block_size: int = 16,
) -> pd.DataFrame:
    """Generation that evicts to `budget` after the prompt and (the chapter's policies) every `every` tokens, from
    caches of every layout. `choices` says who evicts; who stays is found once, and all layouts of some choices decode
    as rows of a batch.

    Rows (source, policy, granularity, layout, shared): `identical` to the uncompacted cache of the same policy (0 or
    1), `logit_gap` to it, `as_predicted` (share of passes after which the free list had grown as arithmetic says),
    `shared_slots_touched` by copies, `prefix_intact` (what the other sequence holds is unchanged, bit by bit, by any
    row of the batch), and metrics. shared: the first 60% of the prompt belong to another living sequence, too. Layout
    "storage positions" is hole filling without its position map, a control on "one set": new tokens are told their
    storage index.
    """
    cut, found = _shared(len(ids)), []
    together = _together(loaded, len(ids) + new_tokens)
    copies = together * (len(COMPACTED) + 1) + 2
    call, prefix, _ = read(loaded, ids[:cut], len(ids) - cut + new_tokens, copies, block_size, ("mass",))
    whole, evictable = prefix.fork(), list(call.facts.evictable)
    with installed(loaded.model):
        logits = extend(call, whole, ids[cut:], WINDOW)
    held = prefix.ledger.living(prefix.numbers[0])[0]
    before = [flat[held] for flat in prefix.pages.stored]
    for some in _batches(choices(loaded, ids, budget, policies, catalogue, new_tokens, every), together):
        more: dict[str, Any] = {"new_tokens": some[0].new_tokens + 1, "scalings": call.scalings}
        if unknown := [c for c in some if not c.survivors]:
            alone = whole.fork(*[0] * len(unknown), layouts=["none"] * len(unknown))
            generate(call_for(loaded.model, ids, **more), alone, logits, [c.condition for c in unknown])
            alone.free()
            for c, passes in zip(unknown, alone.passes, strict=True):
                c.survivors.update({p.seen: torch.from_numpy(p.survivors[evictable]) for p in passes})
        tried = [
            (c, layout, shared)
            for c in some
            for layout, shared in COMPACTED + ((CONTROL, False),) * (c.who["granularity"] == "one set")
        ]
        shares = [cut // block_size if shared else 0 for _, _, shared in tried]
        rows = whole.fork(*shares, layouts=["fill" if layout == CONTROL else layout for _, layout, _ in tried])
        misplaced = [layout == CONTROL for _, layout, _ in tried]
        steps = call_for(loaded.model, ids, kind=LoggedSteps, misplaced=misplaced, **more)
        generate(steps, rows, logits, [c.condition for c, _, _ in tried], [c.survivors for c, _, _ in tried])
        rows.free()
        intact = all(map(torch.equal, before, (flat[held] for flat in prefix.pages.stored)))
        each = torch.stack(steps.logits, 1)  # [rows, steps, vocabulary]
        reference: dict[int, Tensor] = {}  # of each choice its first row, which is not compacted
        for (c, layout, shared), ours, passes in zip(tried, each, rows.passes, strict=True):
            agreement = _agreement(ours, reference.setdefault(id(c), ours))
            here = {**c.who, "layout": layout, "shared": shared, "tokens": c.new_tokens}
            found.append(here | agreement | {"prefix_intact": intact} | _summed(passes))
    return pd.DataFrame(found)


def _together(loaded: Loaded, tokens: int) -> int:
    """Choices that decode together: as many as `TOGETHER` says, or as there is room for their layouts."""
    device, each = loaded.model.device, (len(COMPACTED) + 1) * tokens * call_for(loaded.model, []).token_bytes
    return max(1, min(TOGETHER[device.type], int(engine.room_of(device) // each)))


def _batches(every: Sequence[Choice], most: int) -> list[list[Choice]]:
    """Choices of one source that decode together, up to `most`."""
    found: list[list[Choice]] = []
    for c in every:
        if not found or len(found[-1]) == most or found[-1][0].who["source"] != c.who["source"]:
            found.append([])
        found[-1].append(c)
    return found


def _agreement(ours: Tensor, reference: Tensor) -> dict[str, float]:
    """Are all greedy tokens the same, 0 or 1, and the largest difference of a logit? Logits [steps, vocabulary]."""
    same = torch.equal(ours.argmax(1), reference.argmax(1))
    return {"identical": float(same), "logit_gap": float((ours - reference).abs().max())}


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
    every: int, layout: str, budget: int = 2048, tokens: int = 1024, block_size: int = 16, seed: int | None = 0
) -> pd.DataFrame:
    """Decoding under a budget as index work: a row per token with blocks_held, tokens_alive, copies and freed.

    The cache starts dense at its budget; every `every` tokens it is evicted back to it, by lot (or, without a seed, the
    oldest behind four sinks), and compacted by `layout` ("none": not at all). attrs["metrics"]: what an engine should
    export (`Ledger.metrics`).
    """
    random = None if seed is None else np.random.default_rng(seed)
    ledger, number = dense(budget, block_size, tokens + block_size)
    counters, alive, rows = ledger.counters, budget, []
    for t in range(1, tokens + 1):
        ledger.append(number)
        alive += 1
        freed, copies = counters.blocks_freed, counters.slot_copies
        if t % every == 0:
            _evict_to(ledger, number, budget, random)
            ledger.compact(number, layout)
            alive = budget
        held = len(ledger.references) - len(ledger.free_list)
        rows.append((t, held, alive, counters.slot_copies - copies, counters.blocks_freed - freed))
    names = ["token", "blocks_held", "tokens_alive", "copies", "freed"]
    frame = pd.DataFrame(rows, columns=names).assign(layout=layout)
    frame.attrs["metrics"] = ledger.metrics(number, budget)
    return frame


def _evict_to(ledger: Ledger, number: int, budget: int, random: np.random.Generator | None) -> None:
    """Evict a sequence down to `budget` living tokens: by lot, where the newest eight stay; without `random` the oldest
    behind four sinks."""
    s = ledger.sequences[number]
    living = np.sort(s.positions[s.positions >= 0])
    keep = np.ones(s.seen, bool)
    gone = max(0, len(living) - budget)  # a layer that slides forgets on its own
    keep[random.choice(living[:-8], gone, replace=False) if random else living[SINKS : SINKS + gone]] = False
    ledger.evict(number, keep)


SPAN = 512  # tokens that the chapter decodes to compare layouts


def cadence(
    cadences: Sequence[int], budget: int = 2048, tokens: int = SPAN, block_size: int = 16, draws: int = 6,
    oldest: bool = False,
) -> pd.DataFrame:  # fmt: skip
    """Means over `rounds` of `tokens`, or of one pass: rows (every, layout, draw) with blocks_mean, blocks_max,
    copies_per_token, copies_per_pass, freed_per_pass, and `share`: what copies read and write, over what attention
    reads of the cache, per token. oldest: victims are not drawn, and there is one draw."""
    rows = []
    for every in cadences:
        passes = max(tokens, every) // every
        for layout in COMPARED_LAYOUTS:
            for draw in [None] if oldest else range(draws):
                r = rounds(every, layout, budget, max(tokens, every), block_size, draw)
                rows.append({
                    "every": every, "layout": layout, "draw": draw or 0, "budget": budget,
                    "blocks_mean": r.blocks_held.mean(), "blocks_max": r.blocks_held.max(),
                    "copies_per_token": r.copies.sum() / (passes * every),
                    "copies_per_pass": r.copies.sum() / passes, "freed_per_pass": r.freed.sum() / passes,
                    "share": 2 * r.copies.sum() / (passes * every) / r.tokens_alive.mean(),
                })  # fmt: skip
    return pd.DataFrame(rows)


def latency(
    loaded: Loaded, ids: list[int], cadences: Sequence[int], budget: int = 256, block_size: int = 16, seed: int = 0
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
    call, row, logits = read(loaded, ids, timed(cadences), len(COMPARED_LAYOUTS) + 1, block_size)
    for every in cadences:
        frame = pd.DataFrame(_rounds(call, row, int(logits.argmax()), ids, every, held, seed))
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
    call: Call, row: PagedRows, first: int, ids: list[int], every: int, budget: int, seed: int
) -> list[dict[str, Any]]:
    """Rounds of one cadence: layout, round, step_ms, pass_ms."""
    children = {layout: row.fork(0) for layout in COMPARED_LAYOUTS}
    random = {layout: np.random.default_rng(seed) for layout in COMPARED_LAYOUTS}
    token = dict.fromkeys(COMPARED_LAYOUTS, first)
    between = (ids * (1 + every // len(ids)))[: max(0, every - 2)]

    def step(layout: str) -> float:
        start = time.perf_counter()
        token[layout] = int(extend(call, children[layout], [token[layout]]).argmax())
        return 1e3 * (time.perf_counter() - start)

    def compact(layout: str) -> float:
        start = time.perf_counter()
        [number] = children[layout].numbers
        _evict_to(row.ledger, number, budget, random[layout])
        row.pages.compact(number, layout)
        return 1e3 * (time.perf_counter() - start)

    rows = []
    with installed(call.model):
        for layout in COMPARED_LAYOUTS:
            step(layout), compact(layout)
        for round in range(repeats(every)):
            for i in range(len(COMPARED_LAYOUTS)):
                layout = COMPARED_LAYOUTS[(round + i) % len(COMPARED_LAYOUTS)]
                steps = [step(layout)]
                if between:
                    extend(call, children[layout], between)
                steps += [step(layout)] if every > 1 else []
                rows.append({"layout": layout, "round": round, "step_ms": np.mean(steps), "pass_ms": compact(layout)})
    for child in children.values():
        child.free()
    return rows


# ---- all of them


def check(loaded: Loaded, prompts: Mapping[str, list[int]], settings: Settings) -> None:
    """Raise InputError for what these prompts, this model or these policies cannot meet."""
    check_shared(loaded.model)
    few, many = (end(prompts, key=lambda name: len(prompts[name])) for end in (min, max))
    shortest, longest, short = len(prompts[few]), len(prompts[many]), f"item {few}: "
    least, shared = min(settings.kept), _shared(shortest)
    needed = _needed(settings)
    named = [label(name) for name in settings.policies]
    if twice := {name for name in named if named.count(name) > 1}:
        raise InputError(f"two of the policies are called {min(twice)}: give each a title of its own")
    if settings.capacity >= shortest:
        raise InputError(
            f"{short}capacity {settings.capacity} >= {shortest} tokens of a prompt: nothing leaves; lower it"
        )
    if round(least * shortest) < 16:
        raise InputError(
            f"{short}kept {least:g} of {shortest} tokens are {least * shortest:.0f}, fewer than 16: raise it"
        )
    if settings.block_size > shared:
        raise InputError(f"{short}block_size {settings.block_size} > {shared} tokens that prompts share: lower it")
    if longest + needed > loaded.context:
        raise InputError(
            f"item {many}: {longest} tokens of a prompt and {needed} after it exceed the model's {loaded.context}: "
            "lower prompt_tokens, timed_cadences or max_new_tokens"
        )


def run(loaded: Loaded, prompts: Mapping[str, list[int]], settings: Settings) -> dict[str, pd.DataFrame]:
    """Every study's table by the name under which the claims ask for it. Raises InputError for what `check` finds."""
    check(loaded, prompts, settings)
    tables, block_size = {}, settings.block_size
    index: dict[str, Callable[[], pd.DataFrame]] = {  # without a model
        "synthetic": partial(synthetic, seed=settings.seed, block_size=block_size),
        "toy": toy,
        "traffic": partial(cadence, settings.cadences, settings.budget, block_size=block_size),
        "oldest": partial(cadence, settings.cadences, settings.budget, block_size=block_size, oldest=True),
        "wall": streaming.wall,
        "passes": partial(streaming.passes, settings.lengths),
        "memory": arithmetic.memory,
    }
    asked = asked_of(loaded, prompts, settings)
    for name, study in index.items():
        job = PerItem("reclamation", name, {name: study}, index_work)
        tables[name] = runner.run(job, None, settings).drop(columns="item")
    for name, (study, given) in asked.items():
        most = None if name == "arising" else SIZES[settings.profile][name]
        items = dict(islice(prompts.items(), most))
        job = PerItem("reclamation", name, items, study, given | {"block_size": block_size}, alone=name == "latency")
        tables[name] = runner.run(job, loaded, settings)
    if settings.quoted:
        problems = quoted.study(data.load_items(settings.quoted), settings.quoted_tokens)
        tables["quoted"] = quoted.table(runner.run(problems, loaded, settings))
    return tables


def asked_of(
    loaded: Loaded, prompts: Mapping[str, list[int]], settings: Settings
) -> dict[str, tuple[Callable[..., pd.DataFrame], dict[str, Any]]]:
    """The studies with a model: what computes them, and what it is given. Policies that this model cannot have are left
    out. Raises InputError where none is left."""
    policies, shares = settings.policies, sorted({min(settings.kept), 0.5})
    catalogue = [name for name, p in CATALOGUE.items() if p.frees and not p.shared]
    once = survivors.published(policies)
    tried = dict.fromkeys([*(catalogue if settings.acceptance == "catalogue" else ()), *once])
    whole = able(loaded, prompts, list(tried), [settings.capacity])
    some = able(loaded, prompts, [name for name in once if name in whole], shares)
    varied = [name for name in survivors.varied(policies) if name in POLICIES or name in some]
    if not some or not varied:
        raise InputError(f"policies {', '.join(policies)}: this model can have none of them")
    sources = {name: POLICIES.get(name, (name,)) for name in varied}  # whose code decides their rows
    chapters = {name: source for name, source in sources.items() if name in POLICIES}
    answers = {"budget": settings.capacity, "new_tokens": settings.max_new_tokens}
    return {
        "arising": (arising, {"kept": settings.kept, "policies": sources}),
        "published": (published, {"kept": shares, "policies": some}),
        "identity": (identity, {"policies": chapters, "catalogue": whole, **answers}),
        "latency": (latency, {"cadences": settings.timed_cadences, "seed": settings.seed}),
        "sharing": (sharing.sharing, {"policies": sharing.EVICTS, **answers}),
        "sparsity": (sparsity.sparsity, {}),
        "pages": (sparsity.pages, {"kept": shares, "policy": "quest_pages"}),
    }


def index_work(loaded: None, study: Callable[[], pd.DataFrame]) -> pd.DataFrame:
    """A study that is index work on a ledger."""
    return study()
