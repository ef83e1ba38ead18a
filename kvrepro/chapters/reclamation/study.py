"""From evicted tokens to freed blocks: the studies of the reclamation chapter, each a tidy table.

`synthetic`, `toy` and `cadence` need only a ledger, no model; `arising`, `published` and `occupancy` ask the engine
which tokens of a prompt stay; `identity` and `latency` run a model on a paged cache. `run` makes all tables, with those
of `streaming`, `sharing`, `sparsity` and `arithmetic`.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, islice, pairwise
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from kvrepro.chapters.reclamation import arithmetic, quoted, sharing, sparsity, streaming, survivors
from kvrepro.chapters.reclamation.ledger import Ledger
from kvrepro.chapters.reclamation.paged import LoggedSteps, PagedRows, Pass, call_for, extend, generate, read
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
from kvrepro.engine.regime import Chunked, DecodeCap, Prefill, Regime
from kvrepro.errors import InputError, counted, error_line
from kvrepro.experiment import data
from kvrepro.experiment import run as runner
from kvrepro.experiment.answers import REPEAT
from kvrepro.experiment.models import Loaded
from kvrepro.experiment.per_item import ONE
from kvrepro.experiment.run import PerItem

COMPARED_LAYOUTS = ("none", "repack", "fill")  # of `ledger.LAYOUTS`
SIZES = {  # prompts of each study; a claim on two cases needs seven (`stats.fewest`)
    "quick": {
        "arising": 24, "decoding": 12, "published": 6, "identity": 7, "latency": 7, "sharing": 3, "sparsity": 24,
        "pages": 3,
    },
    "full": {
        "arising": 48, "decoding": 24, "published": 48, "identity": 24, "latency": 24, "sharing": 24, "sparsity": 48,
        "pages": 24,
    },
}  # fmt: skip
DECODING = Chunked(16, "budget")  # a prompt is read as if its tokens were generated, and evicts every 16 of them


def prompts(loaded: Loaded, items: str, n_items: int | None, settings: Settings) -> dict[str, list[int]]:
    """Token ids by item, of `n_items` prompts (None: as many as the profile says).

    Messages without a passage to cut may be as long as the model's context allows. If all layers have a sliding window,
    no prompt is longer than the window, since budgets are shares of what the layers hold. Prompts too short for the
    settings, or too long, are left out (`data.usable`).
    """
    ensure(Size | None, n_items=n_items)
    held, count = ModelFacts.of(loaded.model).held, n_items or data.AtMost(SIZES[settings.profile]["arising"])
    most = settings.prompt_tokens
    tokens, room = held(most), held(max(most, loaded.context - _needed(settings)))
    if tokens < most:
        print(f"reclamation: prompts of {tokens:,} tokens at most, since no layer of this model holds more")
    fitting = data.load_fitting(items, count, loaded.tokenizer, tokens, settings.seed, room=room)
    ids = {
        item.id: data.build_prompt(item, loaded.tokenizer, room if item.context is None else tokens).ids
        for item in fitting
    }
    fitting = data.usable(
        fitting, "reclamation", lambda item: _check_length(item.id, len(ids[item.id]), settings, loaded.context)
    )
    return {item.id: ids[item.id] for item in fitting}


def _check_length(name: str, tokens: int, settings: Settings, context: int) -> None:
    """Raise InputError for a prompt that is too short for the settings, or too long for the model's context."""
    least, shared, needed = min(settings.kept), _shared(tokens), _needed(settings)
    if settings.capacity >= tokens:
        why = f"capacity {settings.capacity} >= {tokens} tokens of a prompt: nothing leaves; lower it"
    elif round(least * tokens) < 16:
        why = f"kept {least:g} of {tokens} tokens are {least * tokens:.0f}, fewer than 16: raise it"
    elif settings.block_size > shared:
        why = f"block_size {settings.block_size} > {shared} tokens that prompts share: lower it"
    elif tokens + needed > context:
        exceeding = f"{tokens} tokens of a prompt and {needed} after it exceed the model's {context}"
        why = f"{exceeding}: lower prompt_tokens, timed_cadences or max_new_tokens"
    else:
        return
    raise InputError(f"item {name}: {why}")


def _needed(settings: Settings) -> int:
    """Most tokens that follow a prompt."""
    return max(timed(settings.timed_cadences), settings.max_new_tokens)


# ---- what a survivor set gives back


def reclaim(keep: np.ndarray, block_size: int = 16) -> dict[str, float]:
    """What a survivor set `[..., tokens]` gives back, as one row.

    living: slots that some head keeps. freed_*: blocks freed by eviction alone ("plain") or with a compaction.
    share_*: freed_* over all blocks. copies_*: slots that move; "emptiest" is hole filling that vacates the emptiest
    blocks. shortfall: share of tokens evicted per head, less share of blocks freed by a repack. freed_packed: blocks
    freed if each head packs its own survivors into the first of the request's blocks, so that the fullest head decides.
    share_own: share freed if each head had a block table of its own.
    """
    keep = keep[(None,) * (3 - keep.ndim)]
    tokens = keep.shape[-1]
    blocks = -(-tokens // block_size)
    row: dict[str, float] = {"tokens": tokens, "blocks": blocks, "living": int(keep.any((0, 1)).sum())}
    for layout in ("repack", "fill", "emptiest"):
        ledger, number = dense(tokens, block_size)
        row["freed_plain"] = ledger.evict(number, keep)
        ledger.compact(number, layout)
        row[f"freed_{layout}"] = ledger.freed
        row[f"copies_{layout}"] = ledger.copied
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
    position = np.arange(tokens)
    runs = np.repeat(random.random(-(-tokens // 64)) < 0.1, 64)[:tokens]
    lots = random.integers(0, 10, -(-tokens // 10))
    return {
        "every 10th": position % 10 == 0,
        "one per block": position % block_size == 0,
        "one aligned block evicted": position // block_size != 2,
        "one random of ten": position % 10 == lots[position // 10],
        "random 10%": random.random(tokens) < 0.1,
        "random 20%": random.random(tokens) < 0.2,
        "runs of 64": runs,
        "sinks and recency": (position < 4) | (position >= tokens - tokens // 10 + 4),
        "random 10% per head, 8 heads": random.random((1, 8, tokens)) < 0.1,
        "random victims while decoding": decoded(tokens, tokens // 10, random),
    }


def decoded(tokens: int, budget: int, random: np.random.Generator) -> np.ndarray:
    """Survivors of decoding under a budget, bool [tokens]: each new token takes the place of one drawn at random.

    Once the first tokens are gone, a token of age t is alive with probability exp(-t / budget), so that on average
    budget / b * H_b blocks of b tokens hold some, with the harmonic number H_b = 1 + 1/2 + ... + 1/b.
    """
    place = np.append(np.arange(budget), random.integers(budget, size=tokens - budget))  # into which each token goes
    _, age = np.unique(place[::-1], return_index=True)  # of the newest token in each place
    return np.isin(np.arange(tokens), tokens - 1 - age)


def synthetic(tokens: int = 16_000, block_size: int = 16, draws: int = 20, seed: int = 0) -> pd.DataFrame:
    """`reclaim` of every pattern: `draws` times (column `draw`) if it is random, else once."""
    rows = []
    for draw in range(draws):
        for name, keep in patterns(tokens, np.random.default_rng([seed, draw]), block_size).items():
            if draw == 0 or "random" in name or "runs" in name:
                rows.append({"pattern": name, "block_size": block_size, "draw": draw, **reclaim(keep, block_size)})
    return pd.DataFrame(rows)


def toy() -> pd.DataFrame:
    """`reclaim` of the guide's example: 24 tokens in blocks of 4, of which four are evicted."""
    return pd.DataFrame([reclaim(np.isin(np.arange(24), [2, 9, 13, 21], invert=True), 4)])


# ---- patterns that policies make


Cells = list[tuple[dict[str, Any], Condition]]  # first columns of a row, and its condition
# An item's table; by name, beside `FAILED`, where policies raised on it.
Tables: TypeAlias = pd.DataFrame | dict[str, pd.DataFrame]
FAILED = "failed"


def _cells(
    policies: Collection[str], granularities: Sequence[str], kept: Sequence[float], tokens: int, regime: Regime
) -> Cells:
    """Policies at each granularity and share of `tokens`; "sinks_recency", which looks at positions only, chooses the
    same tokens at all of them and has the first."""
    return [
        ({"policy": label(p), "granularity": g, "kept": share}, condition(p, g, round(share * tokens), regime))
        for p in policies
        for g in (granularities[:1] if p == "sinks_recency" else granularities)
        for share in kept
    ]


def arising(
    loaded: Loaded, ids: list[int], kept: Sequence[float], policies: Collection[str], block_size: int = 16,
    granularities: Sequence[str] = GRANULARITIES, regime: Regime = Prefill(),  # noqa: B008
) -> Tables:  # fmt: skip
    """`reclaim` of what each policy keeps of a prompt: rows (policy, granularity, kept). regime: when it evicts."""
    return _reclaimed(loaded, ids, _cells(policies, granularities, kept, len(ids), regime), block_size)


def _reclaimed(loaded: Loaded, ids: list[int], cells: Cells, block_size: int) -> Tables:
    rows, failed = [], []
    for (cell, _), keep in zip(cells, _kept_sets(loaded, ids, [c for _, c in cells]), strict=True):
        if isinstance(keep, Exception):
            failed.append(cell | {"error": error_line(keep)})
        else:
            rows.append(cell | reclaim(keep, block_size))
    return _tables(rows, failed)


def _tables(rows: Sequence[Mapping[str, Any]], failed: Sequence[Mapping[str, Any]]) -> Tables:
    return {ONE: pd.DataFrame(rows), FAILED: pd.DataFrame(failed)} if failed else pd.DataFrame(rows)


def _without_failed(name: str, tables: Tables) -> pd.DataFrame:
    """A study's table; prints which policies raised on some of its items, whose rows it lacks."""
    if isinstance(tables, pd.DataFrame):
        return tables
    for policy, rows in tables[FAILED].groupby("policy"):
        items = rows["item"].unique()
        where = f"{counted(len(items), 'item')}, the first {items[0]}"
        print(f"reclamation/{name}: {policy} is left out of {where}: {rows.error.iloc[0]}")
    return tables[ONE]


def published(
    loaded: Loaded, ids: list[int], kept: Sequence[float], policies: Sequence[str], block_size: int = 16
) -> Tables:
    """`reclaim` of what policies keep with their own heads, windows and layers, after the prefill."""
    cells: Cells = [({"policy": label(p), "kept": share}, _once(p, share)) for p in policies for share in kept]
    return _reclaimed(loaded, ids, cells, block_size)


def _once(policy: str, budget: int | float) -> Condition:
    """A policy as it was published, which compresses the prompt once."""
    return condition(policy, "per head", budget, Prefill())


def _kept_sets(loaded: Loaded, ids: list[int], conditions: Sequence[Condition]) -> list[np.ndarray | Exception]:
    """Which tokens of a prompt stay under each condition, bool [layers, kv_heads, tokens], or what a policy raised."""
    if not conditions:
        return []
    repeat = loaded.tokenizer.encode(REPEAT, add_special_tokens=False) if loaded.tokenizer else ()
    [answers] = engine.generate(
        loaded.model, [ids], conditions, max_new_tokens=1, stop_ids=(), kept_sets=True, repeat=repeat, errors="return"
    )
    return [answer if isinstance(answer, Exception) else np.stack(answer.kept_sets or ()) for answer in answers]


def runnable(
    loaded: Loaded, prompts: Mapping[str, list[int]], policies: Sequence[str], budgets: Sequence[int | float]
) -> list[str]:
    """Those of `policies` that run with this model, these prompts and all of these budgets. For each other one of the
    catalogue a printed line says why not; a reader's own policy that cannot run raises InputError.

    Budgets are checked on the shortest prompt. A trial on its first 128 tokens shows whether what a policy has learned
    fits the model's weights; a reader's own policy is tried on the longest prompt.
    """
    shortest, longest, possible = min(prompts.values(), key=len), max(prompts.values(), key=len), []
    for name in policies:
        try:
            conditions = [_once(name, budget) for budget in budgets]
            engine.check_conditions(loaded.model, [Prompt(shortest, {})], conditions)
            if not find(name).frees:
                raise InputError("it chooses pages anew for every query and frees nothing")
            [keep] = _kept_sets(loaded, longest if is_own(name) else shortest[:128], [_once(name, 0.5)])
            if isinstance(keep, Exception):
                raise keep
            possible.append(name)
        except InputError as error:
            if is_own(name):
                raise
            print(f"{name} is left out: {error}")
        except Exception as error:
            if not is_own(name):
                raise
            raise InputError(f"{name} raised {error_line(error)}: mend it, or leave it out of `policies`") from error
    return possible


def occupancy(
    loaded: Loaded, ids: list[int], kept: float, policies: Collection[str], block_size: int = 16
) -> pd.DataFrame:
    """Living slots of each block of one prompt after eviction, before compaction: rows (policy, granularity, kept,
    block). A policy that raises has none."""
    cells, parts = _cells(policies, GRANULARITIES, [kept], len(ids), Prefill()), []
    for (cell, _), keep in zip(cells, _kept_sets(loaded, ids, [c for _, c in cells]), strict=True):
        if isinstance(keep, Exception):
            continue
        living = np.pad(keep.any((0, 1)), (0, -len(ids) % block_size)).reshape(-1, block_size).sum(1)
        parts.append(pd.DataFrame({**cell, "block": np.arange(len(living)), "living": living}))
    return pd.concat(parts, ignore_index=True)


# ---- generation from a compacted cache


@dataclass(frozen=True)
class Choice:
    """Which policy chooses the survivors of a generation, and how long the generation is."""

    who: dict[str, str]  # columns source ("chapter"; "catalogue", also for a reader's own), policy and granularity
    condition: Condition
    survivors: dict[int, Tensor]  # as `survivors.given` takes them; empty: the condition's policy chooses
    new_tokens: int


def choices(
    loaded: Loaded, ids: list[int], budget: int, policies: Collection[str], catalogue: Sequence[str], new_tokens: int,
    every: int,
) -> tuple[list[Choice], list[dict[str, Any]]]:  # fmt: skip
    """The chapter's policies at each granularity, which evict again while decoding, and those of the catalogue or a
    reader's own, which compress the prompt once and generate half as many tokens. Then rows of policies that raised."""
    failed, chosen = [], [
        Choice({"source": "chapter", "policy": cell["policy"], "granularity": cell["granularity"]}, c, {}, new_tokens)
        for cell, c in _cells(policies, JOINT, [1.0], budget, DecodeCap(every))
    ]  # fmt: skip
    conditions = [_once(name, budget) for name in catalogue]
    for name, c, keep in zip(catalogue, conditions, _kept_sets(loaded, ids, conditions), strict=True):
        who = {"source": "catalogue", "policy": label(name), "granularity": find(name).budget}
        if isinstance(keep, Exception):
            failed.append(who | {"error": error_line(keep)})
            continue
        chosen.append(Choice(who, c, {len(ids): torch.from_numpy(keep)}, max(1, new_tokens // 2)))
    return chosen, failed


COMPACTED = (("none", False), ("repack", False), ("fill", False), ("repack", True), ("fill", True))  # layout, shared
CONTROL = "storage positions"
TOGETHER = {"cpu": 1, "cuda": 12}  # choices in a batch, each with all its layouts; more would pad each other's rows


def identity(
    loaded: Loaded, ids: list[int], budget: int = 128, policies: Collection[str] = POLICIES,
    catalogue: Sequence[str] = (), new_tokens: int = 8, every: int = 1, block_size: int = 16,
) -> Tables:  # fmt: skip
    """Generation that evicts to `budget` after the prompt and (the chapter's policies) every `every` tokens, from
    caches of every layout. `choices` says which policies evict; each one's survivors are determined once, and all
    layouts of several choices decode as rows of a batch.

    Rows (source, policy, granularity, layout, shared): `identical` to the uncompacted cache of the same policy (0 or
    1), `logit_gap` to it, `as_predicted` (share of passes after which the free list had grown as arithmetic says),
    `shared_slots_touched` by copies, `prefix_intact` (what the other sequence holds is unchanged, bit by bit, by any
    row of the batch), and metrics. shared: the first 60% of the prompt belong to another living sequence, too. Layout
    "storage positions" is hole filling without its position map, a control on "one set": new tokens are told their
    storage index.
    """
    cut, table = _shared(len(ids)), []
    together = _together(loaded, len(ids) + new_tokens)
    copies = together * (len(COMPACTED) + 1) + 2
    call, prefix, _ = read(loaded.model, ids[:cut], len(ids) - cut + new_tokens, copies, block_size, ("mass",))
    whole, evictable = prefix.fork(), list(call.facts.evictable)
    with installed(loaded.model):
        logits = extend(call, whole, ids[cut:], WINDOW)
    held = prefix.ledger.living(prefix.numbers[0])[0]
    before = [flat[held] for flat in prefix.pages.stored]
    chosen, failed = choices(loaded, ids, budget, policies, catalogue, new_tokens, every)
    for batch in _batches(chosen, together):
        new = batch[0].new_tokens + 1
        if undecided := [c for c in batch if not c.survivors]:
            alone = whole.fork(*[0] * len(undecided), layouts=["none"] * len(undecided))
            generate(call_for(loaded.model, ids, new), alone, logits, [c.condition for c in undecided])
            alone.free()
            for c, passes in zip(undecided, alone.passes, strict=True):
                c.survivors.update({p.seen: torch.from_numpy(p.survivors[evictable]) for p in passes})
        tried = [
            (c, layout, shared)
            for c in batch
            for layout, shared in COMPACTED + ((CONTROL, False),) * (c.who["granularity"] == "one set")
        ]
        shares = [cut // block_size if shared else 0 for _, _, shared in tried]
        rows = whole.fork(*shares, layouts=["fill" if layout == CONTROL else layout for _, layout, _ in tried])
        misplaced = [layout == CONTROL for _, layout, _ in tried]
        steps = call_for(loaded.model, ids, new, LoggedSteps, misplaced=misplaced)
        generate(steps, rows, logits, [c.condition for c, _, _ in tried], [c.survivors for c, _, _ in tried])
        rows.free()
        intact = all(map(torch.equal, before, (flat[held] for flat in prefix.pages.stored)))
        row_logits = torch.stack(steps.logits, 1)  # [rows, steps, vocabulary]
        reference: dict[int, Tensor] = {}  # the first row of each choice, which is not compacted
        for (c, layout, shared), ours, passes in zip(tried, row_logits, rows.passes, strict=True):
            agreement = _agreement(ours, reference.setdefault(id(c), ours))
            cell = {**c.who, "layout": layout, "shared": shared, "tokens": c.new_tokens}
            table.append(cell | agreement | {"prefix_intact": intact} | _summed(passes))
    return _tables(table, failed)


def _together(loaded: Loaded, tokens: int) -> int:
    """How many choices decode together: as many as `TOGETHER` says, or as memory has room for with their layouts."""
    device, choice_bytes = loaded.model.device, (len(COMPACTED) + 1) * tokens * call_for(loaded.model, []).token_bytes
    return max(1, min(TOGETHER[device.type], int(engine.room_of(device) // choice_bytes)))


def _batches(every: Sequence[Choice], most: int) -> list[list[Choice]]:
    """Batches of at most `most` choices, each of one source: those of a source generate equally many tokens."""
    batches = []
    for _, group in groupby(every, key=lambda c: c.who["source"]):
        source = list(group)
        batches += [source[i : i + most] for i in range(0, len(source), most)]
    return batches


def _agreement(ours: Tensor, reference: Tensor) -> dict[str, float]:
    """`identical`: 1 if all greedy tokens are the same, else 0; `logit_gap`: the largest difference of a logit. Both
    are logits [steps, vocabulary]."""
    same = torch.equal(ours.argmax(1), reference.argmax(1))
    return {"identical": float(same), "logit_gap": float((ours - reference).abs().max())}


def _summed(passes: list[Pass]) -> dict[str, float]:
    """Columns of a row that summarise its passes. decode_copies: slots that moved after the prompt's own pass; share:
    what these copies read and write, over what attention reads meanwhile."""
    later = passes[1:]
    read = sum((b.seen - a.seen) * int(b.survivors.any((0, 1)).sum()) for a, b in pairwise(passes))
    return {
        "passes": len(passes),
        "as_predicted": float(np.mean([p.freed == p.predicted for p in passes])),
        "blocks_freed": sum(p.freed for p in passes),
        "slot_copies": sum(p.copies for p in passes),
        "decode_copies": sum(p.copies for p in later),
        "share": 2 * sum(p.copies for p in later) / read if read else np.nan,
        "shared_slots_touched": sum(p.foreign for p in passes),
    }


def _shared(tokens: int) -> int:
    """How many tokens of a prompt another sequence holds, too."""
    return int(0.6 * tokens)


# ---- how often


def rounds(
    every: int, layout: str, budget: int = 2048, tokens: int = 1024, block_size: int = 16, seed: int = 0
) -> pd.DataFrame:
    """Decoding under a budget as index work: a row per token with blocks_held, tokens_alive, copies and freed.

    The cache starts dense at its budget. Every `every` tokens random tokens leave, so that it is at its budget again,
    and it is compacted by `layout` ("none": not at all).
    """
    random = np.random.default_rng(seed)
    ledger, number = dense(budget, block_size, tokens + block_size)
    alive, rows = budget, []
    for t in range(1, tokens + 1):
        ledger.append(number)
        alive += 1
        freed, copied = ledger.freed, ledger.copied
        if t % every == 0:
            _evict_to(ledger, number, budget, random)
            ledger.compact(number, layout)
            alive = budget
        rows.append((t, ledger.held, alive, ledger.copied - copied, ledger.freed - freed))
    names = ["token", "blocks_held", "tokens_alive", "copies", "freed"]
    return pd.DataFrame(rows, columns=names).assign(layout=layout)


def _evict_to(ledger: Ledger, number: int, budget: int, random: np.random.Generator) -> None:
    """Evict a sequence down to `budget` living tokens: random ones, but none of the newest eight."""
    s = ledger.sequences[number]
    living = np.sort(s.positions[s.positions >= 0])
    keep = np.ones(s.seen, bool)
    gone = max(0, len(living) - budget)  # a layer that slides forgets on its own
    keep[random.choice(living[:-8], gone, replace=False)] = False
    ledger.evict(number, keep)


SPAN = 512  # tokens that the chapter decodes to compare layouts


def cadence(
    cadences: Sequence[int], budget: int = 2048, tokens: int = SPAN, block_size: int = 16, draws: int = 6
) -> pd.DataFrame:
    """Means over `rounds` of `tokens` (at least one pass): rows (every, layout, draw) with blocks_mean, blocks_max,
    copies_per_token, copies_per_pass, freed_per_pass, and `share`: what copies read and write, over what attention
    reads of the cache, per token."""
    rows = []
    for every in cadences:
        passes = max(tokens, every) // every
        for layout in COMPARED_LAYOUTS:
            for draw in range(draws):
                r = rounds(every, layout, budget, max(tokens, every), block_size, draw)
                rows.append({
                    "every": every, "layout": layout, "draw": draw, "budget": budget,
                    "blocks_mean": r.blocks_held.mean(), "blocks_max": r.blocks_held.max(),
                    "copies_per_token": r.copies.sum() / (passes * every),
                    "copies_per_pass": r.copies.sum() / passes, "freed_per_pass": r.freed.sum() / passes,
                    "share": 2 * r.copies.sum() / (passes * every) / r.tokens_alive.mean(),
                })  # fmt: skip
    return pd.DataFrame(rows)


def latency(
    loaded: Loaded, ids: list[int], cadences: Sequence[int], budget: int = 256, block_size: int = 16, seed: int = 0
) -> pd.DataFrame:
    """Time between tokens at each cadence: a row per (every, layout), medians over `repeats(every)` rounds. The three
    layouts take turns, so that a busy machine slows all of them.

    step_ms: the model's time for a token, mean of a round's first and last. pass_ms: eviction with its bookkeeping, and
    the compaction; "none" evicts too. token_ms: step + pass / every; longest_ms: step + pass, for the token that waits.
    added: token_ms over that of "none" in the same round, less 1 (missing for "none"). The tokens between a round's
    first and last are read at once: which tokens they are does not change the time. Random tokens are evicted. A prompt
    shorter than two budgets has half of its tokens as budget.
    """
    parts, held = [], min(budget, len(ids) // 2)
    call, row, logits = read(loaded.model, ids, timed(cadences), len(COMPARED_LAYOUTS) + 1, block_size)
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
    """How many rounds are timed at a cadence."""
    return max(2, 24 // every)


def timed(cadences: Sequence[int]) -> int:
    """Most tokens that follow a prompt while it is timed: one to warm up, then the rounds."""
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


# ---- all studies


def run(loaded: Loaded, prompts: Mapping[str, list[int]], settings: Settings) -> dict[str, pd.DataFrame]:
    """Every study's table, by the name that the claims use. Raises InputError for settings that do not suit these
    prompts, this model or these policies."""
    check_shared(loaded.model)
    labels = [label(name) for name in settings.policies]
    if repeated := {name for name in labels if labels.count(name) > 1}:
        raise InputError(f"two of the policies are called {min(repeated)}: give each a title of its own")
    for name, ids in prompts.items():
        _check_length(name, len(ids), settings, loaded.context)
    tables, block_size = {}, settings.block_size
    without_model: dict[str, Callable[[], pd.DataFrame]] = {
        "synthetic": partial(synthetic, seed=settings.seed, block_size=block_size),
        "toy": toy,
        "traffic": partial(cadence, settings.cadences, settings.budget, block_size=block_size),
        "wall": streaming.wall,
        "passes": partial(streaming.passes, settings.lengths),
        "memory": arithmetic.memory,
    }
    with_model = model_studies(loaded, prompts, settings)
    for name, study in without_model.items():
        job = PerItem("reclamation", name, {name: study}, index_work)
        tables[name] = runner.run(job, None, settings).drop(columns="item")
    for name, (study, arguments) in with_model.items():
        most = None if name == "arising" else SIZES[settings.profile][name]
        items = dict(islice(prompts.items(), most))
        arguments = arguments if name == "sparsity" else arguments | {"block_size": block_size}
        job = PerItem("reclamation", name, items, study, arguments, alone=name == "latency")
        tables[name] = _without_failed(name, runner.run(job, loaded, settings))
    if settings.quoted:
        problems = quoted.study(data.load_items(settings.quoted), settings.quoted_tokens)
        tables["quoted"] = quoted.table(runner.run(problems, loaded, settings))
    return tables


def model_studies(
    loaded: Loaded, prompts: Mapping[str, list[int]], settings: Settings
) -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """The studies with a model: the function that computes each, and its arguments. Policies that cannot run with this
    model are left out. Raises InputError where none is left."""
    policies, shares = settings.policies, sorted({min(settings.kept), 0.5})
    catalogue = [name for name, p in CATALOGUE.items() if p.frees and not p.shared]
    compressing_once = survivors.published(policies)
    tried = dict.fromkeys([*(catalogue if settings.acceptance == "catalogue" else ()), *compressing_once])
    accepted = runnable(loaded, prompts, list(tried), [settings.capacity])
    at_shares = runnable(loaded, prompts, [name for name in compressing_once if name in accepted], shares)
    varied = [name for name in survivors.varied(policies) if name in POLICIES or name in at_shares]
    if not at_shares or not varied:
        raise InputError(f"policies {', '.join(policies)}: this model can have none of them")
    sources = {name: POLICIES.get(name, (name,)) for name in varied}  # the policies whose code decides their rows
    chapters = {name: source for name, source in sources.items() if name in POLICIES}
    decode = {name: source for name, source in sources.items() if DECODING.name not in find(source[0]).refuses}
    decoding = {"kept": shares[:1], "policies": decode, "granularities": ["per head"], "regime": DECODING}
    answers = {"budget": settings.capacity, "new_tokens": settings.max_new_tokens}
    return {
        "arising": (arising, {"kept": settings.kept, "policies": sources}),
        **({"decoding": (arising, decoding)} if decode else {}),
        "published": (published, {"kept": shares, "policies": at_shares}),
        "identity": (identity, {"policies": chapters, "catalogue": accepted, **answers}),
        "latency": (latency, {"cadences": settings.timed_cadences, "seed": settings.seed}),
        "sharing": (sharing.sharing, {"policies": sharing.EVICTS, **answers}),
        "sparsity": (sparsity.sparsity, {}),
        "pages": (sparsity.pages, {"kept": shares, "policy": "quest_pages"}),
    }


def index_work(loaded: None, study: Callable[[], pd.DataFrame]) -> pd.DataFrame:
    """A study that is index work on a ledger."""
    return study()
