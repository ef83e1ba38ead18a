"""From evicted tokens to freed blocks: the studies of the reclamation chapter, each a tidy table.

`synthetic`, `toy`, `rounds` and `cadence` are index work on a ledger; `arising`, `occupancy`, `identity` and `latency`
run a model on a paged cache. `streaming` has what concerns attention scores, `results` what the tables say. `run` makes
them all.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d, max_pool1d, normalize

from kvrepro.chapters.reclamation import streaming
from kvrepro.chapters.reclamation.paged import NONE, Ledger, PagedCache, Signals, forward
from kvrepro.engine import generate as engine
from kvrepro.engine.allowed import Number, Size, ensure
from kvrepro.engine.attention import installed
from kvrepro.engine.catalogue import CATALOGUE
from kvrepro.engine.condition import Condition, Prompt
from kvrepro.engine.policy import find
from kvrepro.engine.regime import Prefill
from kvrepro.errors import InputError
from kvrepro.experiment import data
from kvrepro.experiment import run as runner
from kvrepro.experiment.models import Loaded
from kvrepro.experiment.run import PerItem, Settings
from kvrepro.paths import ROOT

POLICIES = ("sinks_recency", "cumulative", "window", "redundancy")
GRANULARITIES = ("one set", "per layer", "per head")
JOINT = (*GRANULARITIES, "joint")
LAYOUTS = ("none", "repack", "fill")
SINKS, WINDOW = 4, 32
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


# ---- survivors


def scores_of(policy: str, keys: Tensor, signals: Signals, positions: Tensor, budget: int) -> tuple[Tensor, int]:
    """Score of each living token, [layers, kv_heads, tokens] in ascending order of positions, and how many of the
    newest are kept whatever their score. keys [layers, kv_heads, tokens, dim].

    sinks_recency: the position; its four oldest are protected apart (StreamingLLM). cumulative: attention summed over
    all queries, half the budget to the newest (H2O). window: that of the last 32 queries, average-pooled over 5
    (SnapKV). redundancy: 0.1 importance (last 8 queries, max-pooled over 7, as a share) - 0.9 softmax of the mean
    cosine similarity to all keys (R-KV, without its exemption of recent duplicates).
    """
    if policy == "sinks_recency":
        return positions.float()[None, None], 0
    if policy == "cumulative":
        return signals.cumulative[..., positions], budget // 2
    if policy == "window":
        voted = signals.recent.sum(0)[..., positions]
        return avg_pool1d(voted, 5, 1, 2), min(WINDOW, budget // 2)
    if policy == "redundancy":
        newest = [int(p) % len(signals.recent) for p in positions[-8:]]
        voted = max_pool1d(signals.recent[newest].sum(0)[..., positions], 7, 1, 3)
        unit = normalize(keys.float(), dim=-1)
        alike = torch.einsum("lgnd,lgd->lgn", unit, unit.mean(2))  # cosine to each key, averaged
        return 0.1 * voted / voted.sum(-1, keepdim=True) - 0.9 * torch.softmax(alike, -1), 8
    raise InputError(f"unknown policy {policy!r}: choose {', '.join(POLICIES)}")


def survivors(
    policy: str, granularity: str, budget: int, cache: PagedCache, number: int, signals: Signals
) -> np.ndarray:
    """What a policy keeps of a sequence: bool `[layers or 1, kv_heads or 1, seen]` over true positions, `budget` each.

    granularity: "one set" and "per layer" rank by mean scores over what they do not separate; "joint" ranks the tokens
    of all heads and layers together, so that some keep more than `budget` and others less.
    """
    if granularity not in JOINT:
        raise InputError(f"unknown granularity {granularity!r}: choose {', '.join(JOINT)}")
    flat, at, alive = cache.ledger.living(number)
    order = np.argsort(at)
    flat, positions = torch.from_numpy(flat[order]), torch.from_numpy(at[order])
    keys = torch.stack([k.flatten(0, 1)[flat.to(k.device)].transpose(0, 1) for k in cache.keys]).cpu()
    scores, newest = scores_of(policy, keys, signals, positions, budget)
    means = {"one set": (0, 1), "per layer": (1,)}.get(granularity, ())
    scores = scores.mean(means, keepdim=True) if means else scores
    scores = scores.clone()
    scores[..., len(positions) - newest :] = torch.inf
    if policy == "sinks_recency":
        scores[..., positions < SINKS] = torch.inf
    held = torch.from_numpy(alive[..., order])
    scores, held = torch.broadcast_tensors(scores, held)
    scores = scores.masked_fill(~held, -torch.inf)
    keep = torch.zeros(*scores.shape[:2], cache.ledger.sequences[number].seen, dtype=torch.bool)
    if granularity == "joint":
        best = scores.flatten().argsort(descending=True, stable=True)[: budget * scores[..., 0].numel()]
        chosen = torch.zeros(scores.numel(), dtype=torch.bool).scatter_(0, best, True).view_as(scores)
        keep[..., positions] = chosen & held
    else:
        best = scores.argsort(dim=-1, descending=True, stable=True)[..., :budget]
        keep.scatter_(-1, positions[best], True)
    return keep.numpy()


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


@dataclass
class Read:
    """A prompt that a model has read: its sequence in a paged cache, what its tokens received, the next token."""

    cache: PagedCache
    number: int
    signals: Signals
    next_token: int


def read(loaded: Loaded, ids: list[int], more: int = 0, copies: int = 1, block_size: int = 16) -> Read:
    """Prefill `ids` into a cache with room for `more` tokens and for `copies` of the sequence."""
    blocks = copies * (-(-(len(ids) + more) // block_size) + 1)
    cache = PagedCache(loaded.model.config, blocks, block_size, loaded.model.dtype, loaded.model.device)
    signals = Signals(len(cache.keys), cache.keys[0].shape[2], len(ids) + more, WINDOW)
    number = cache.ledger.new()
    with installed(loaded.model):
        logits = forward(loaded.model, cache, number, ids, signals)
    return Read(cache, number, signals, int(logits.argmax()))


def arising(
    loaded: Loaded,
    prompts: Mapping[str, list[int]],
    kept: Sequence[float] = (0.1, 0.25, 0.5, 0.9),
    policies: Sequence[str] = POLICIES,
    granularities: Sequence[str] = GRANULARITIES,
    block_size: int = 16,
) -> pd.DataFrame:
    """`reclaim` of what each policy keeps of each prompt: rows (item, policy, granularity, kept)."""
    rows = []
    for item, ids in prompts.items():
        r = read(loaded, ids, block_size=block_size)
        for policy in policies:
            for granularity in granularities[:1] if policy == "sinks_recency" else granularities:
                for share in kept:
                    keep = survivors(policy, granularity, round(share * len(ids)), r.cache, r.number, r.signals)
                    here = {"item": item, "policy": policy, "granularity": granularity, "kept": share}
                    rows.append(here | reclaim(keep, block_size))
    return pd.DataFrame(rows)


PUBLISHED = ("streaming_llm", "tri_attention", "tova", "h2o_online", "snapkv", "ada_kv", "r_kv", "k_norm")


def published(
    loaded: Loaded,
    prompts: Mapping[str, list[int]],
    kept: Sequence[float] = (0.1, 0.5),
    policies: Sequence[str] = PUBLISHED,
    block_size: int = 16,
) -> pd.DataFrame:
    """`reclaim` of what the catalogue's policies keep, with their own heads, windows and layers, after the prefill."""
    asked = [(name, share) for name in policies for share in kept]
    conditions = [_condition(name, share) for name, share in asked]
    rows = []
    for item, ids in prompts.items():
        for (name, share), keep in zip(asked, _kept_sets(loaded, ids, conditions), strict=True):
            here = {"item": item, "policy": find(name).title, "kept": share}
            rows.append(here | reclaim(keep, block_size))
    return pd.DataFrame(rows, columns=None if rows else ["item", "policy", "kept"])


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
    for name in (name for name in policies if find(name).frees):
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
    policies: Sequence[str] = POLICIES,
    granularities: Sequence[str] = GRANULARITIES,
    block_size: int = 16,
) -> pd.DataFrame:
    """Living slots of each block of one prompt, evicted, not compacted: rows (policy, granularity, block, living)."""
    r = read(loaded, ids, block_size=block_size)
    parts = []
    for policy in policies:
        for granularity in granularities[:1] if policy == "sinks_recency" else granularities:
            keep = survivors(policy, granularity, round(kept * len(ids)), r.cache, r.number, r.signals)
            living = np.pad(keep.any((0, 1)), (0, -len(ids) % block_size)).reshape(-1, block_size).sum(1)
            here = {"policy": policy, "granularity": granularity, "block": np.arange(len(living)), "living": living}
            parts.append(pd.DataFrame(here))
    return pd.concat(parts, ignore_index=True).assign(block_size=block_size)


# ---- generation from a compacted cache


@dataclass(frozen=True)
class Choice:
    """Who chooses the survivors of a generation, how often, and how long it is."""

    source: str  # "chapter" or "catalogue"
    policy: str
    granularity: str
    keep: np.ndarray | None  # of the prompt, once; None: chosen again at every pass
    new_tokens: int
    every: int


def choices(
    loaded: Loaded,
    ids: list[int],
    budget: int,
    policies: Sequence[str],
    granularities: Sequence[str],
    catalogue: Sequence[str],
    new_tokens: int,
    every: int,
) -> list[Choice]:
    """The chapter's policies at each granularity, which evict again while decoding, and the catalogue's, which compress
    the prompt once and generate half as many tokens."""
    pairs = [(p, g) for p in policies for g in (granularities[:1] if p == "sinks_recency" else granularities)]
    found = [Choice("chapter", p, g, None, new_tokens, every) for p, g in pairs]
    half = max(1, new_tokens // 2)
    sets = _kept_sets(loaded, ids, [_condition(name, budget) for name in catalogue])
    return found + [
        Choice("catalogue", find(name).title, find(name).budget, keep, half, half)
        for name, keep in zip(catalogue, sets, strict=True)
    ]


COMPACTED = (("none", False), ("repack", False), ("fill", False), ("repack", True), ("fill", True))


def identity(
    loaded: Loaded,
    prompts: Mapping[str, list[int]],
    budget: int = 128,
    policies: Sequence[str] = POLICIES,
    granularities: Sequence[str] = JOINT,
    catalogue: Sequence[str] = (),
    new_tokens: int = 8,
    every: int = 2,
    block_size: int = 16,
) -> pd.DataFrame:
    """Generation that evicts to `budget` after the prompt and (the chapter's policies) every `every` tokens, from
    caches of every layout. `choices` says who evicts.

    Rows (item, source, policy, granularity, layout, shared): `identical` to the uncompacted cache of the same policy (0
    or 1), `logit_gap` to it, `as_predicted` (share of passes after which the free list had grown as arithmetic says),
    `shared_slots_touched` by copies, `prefix_intact` (what the other sequence holds is unchanged, bit by bit), and
    metrics. shared: the first 60% of the prompt belong to another living sequence, too. Layout "storage positions" is
    hole filling without its position map, a control on "one set": new tokens are told their storage index.
    """
    rows = []
    for item, ids in prompts.items():
        cut = _shared(ids)
        r = read(loaded, ids[:cut], len(ids) - cut + new_tokens, copies=4, block_size=block_size)
        cache, prefix = r.cache, r.number
        number = cache.fork(prefix)
        with installed(loaded.model):
            first = int(forward(loaded.model, cache, number, ids[cut:], r.signals).argmax())
        held = cache.ledger.living(prefix)[0]
        before = [flat[held] for flat in cache.stored]
        for c in choices(loaded, ids, budget, policies, granularities, catalogue, new_tokens, every):
            reference: list[Tensor] = []
            keeps: list[np.ndarray] = []  # the uncompacted run's survivors, which the others evict to as well
            control = (("storage positions", False),) if c.granularity == "one set" else ()
            for layout, shared in COMPACTED + control:
                child = cache.fork(number, cut // block_size if shared else 0)
                signals = None
                if layout != "none":
                    decide: Callable[[], np.ndarray] = partial(next, iter(keeps))
                elif c.keep is not None:
                    decide = partial(next, iter([c.keep]))
                else:
                    signals = r.signals.copy()
                    decide = partial(survivors, c.policy, c.granularity, budget, cache, child, signals)
                logits, facts = _generate(loaded, cache, child, first, c.new_tokens, c.every, layout, decide, signals)
                cache.ledger.free(child)
                reference, keeps = reference or logits, facts.pop("keeps")
                same = [int(a.argmax()) == int(b.argmax()) for a, b in zip(logits, reference, strict=True)]
                gap = max(float((a - b).abs().max()) for a, b in zip(logits, reference, strict=True))
                intact = all(torch.equal(a, b[held]) for a, b in zip(before, cache.stored, strict=True))
                here = {"item": item, "source": c.source, "policy": c.policy, "granularity": c.granularity}
                rows.append(here | {"layout": layout, "shared": shared, "tokens": c.new_tokens,
                                    "identical": float(all(same)), "logit_gap": gap, "prefix_intact": intact,
                                    **facts})  # fmt: skip
    return pd.DataFrame(rows)


def _shared(ids: list[int]) -> int:
    """Tokens of a prompt that another sequence holds, too."""
    return int(0.6 * len(ids))


def _generate(
    loaded: Loaded,
    cache: PagedCache,
    number: int,
    token: int,
    new_tokens: int,
    every: int,
    layout: str,
    decide: Callable[[], np.ndarray],
    signals: Signals | None,
) -> tuple[list[Tensor], dict[str, Any]]:
    """Logits of every generated token, and what the passes did; `decide` says what each pass keeps."""
    ledger, size = cache.ledger, cache.ledger.block_size
    logits: list[Tensor] = []
    passes, keeps = [], []
    with installed(loaded.model):
        for t in range(new_tokens):
            if t % every == 0:
                shared, free = np.flatnonzero(ledger.references > 1), len(ledger.free_list)
                own, _ = _own(ledger, number)
                keeps.append(decide())
                ledger.evict(number, keeps[-1])
                copies = (
                    NONE if layout == "none" else getattr(ledger, "repack" if layout == "repack" else "fill")(number)[1]
                )
                cache.copy(copies)
                touched = int(np.isin(np.concatenate(copies) // size, shared).sum())
                freed, predicted = len(ledger.free_list) - free, own - -(-_own(ledger, number)[1] // size)
                passes.append((freed, freed == predicted, len(copies[0]), touched))
            s = ledger.sequences[number]
            shift = int((s.positions >= 0).sum()) - s.seen if layout == "storage positions" else 0
            logits.append(forward(loaded.model, cache, number, [token], signals, shift))
            token = int(logits[-1].argmax())
    freed, right, moved, touched = np.array(passes).T
    facts = {"passes": len(passes), "as_predicted": right.mean(), "blocks_freed": freed.sum(),
             "slot_copies": moved.sum(), "shared_slots_touched": touched.sum(), "keeps": keeps}  # fmt: skip
    return logits, facts


def _own(ledger: Ledger, number: int) -> tuple[int, int]:
    """Blocks that a sequence shares with nobody, and the living slots in them."""
    s = ledger.sequences[number]
    own = ledger.references[s.blocks] == 1
    return int(own.sum()), int((s.positions >= 0).reshape(-1, ledger.block_size)[own].sum())


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
    prompts: Mapping[str, list[int]],
    cadences: Sequence[int] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512),
    budget: int = 256,
    block_size: int = 16,
    seed: int = 0,
) -> pd.DataFrame:
    """Time between tokens at each cadence, the three layouts by turns, so that a busy machine is busy for all: a row
    per (item, every, layout), medians over `repeats(every)` rounds.

    step_ms: the model's, mean of the first and the last token of a round. pass_ms: eviction with its bookkeeping, and
    the compaction; "none" evicts alike. token_ms: step + pass / every; longest_ms: step + pass, the token that waits.
    added: token_ms over that of "none" in the same round, less 1 (missing for "none"). Between the first and the last
    token those of a round are read at once, since which they are decides no time. Victims by lot. The budget is half of
    a prompt that is shorter than two budgets.
    """
    parts = []
    for item, ids in prompts.items():
        r, held = read(loaded, ids, timed(cadences), len(LAYOUTS) + 1, block_size), min(budget, len(ids) // 2)
        for every in cadences:
            frame = pd.DataFrame(_rounds(loaded, r, ids, every, held, seed))
            frame["token_ms"] = frame.step_ms + frame.pass_ms / every
            frame["longest_ms"] = frame.step_ms + frame.pass_ms
            medians = frame.groupby("layout", sort=False)[["step_ms", "pass_ms", "token_ms", "longest_ms"]].median()
            by_round = frame.pivot_table(index="round", columns="layout", values="token_ms")
            medians["added"] = (by_round.div(by_round["none"], axis=0) - 1).median().drop("none")
            parts.append(medians.reset_index().assign(item=item, every=every, rounds=repeats(every), budget=held))
    return pd.concat(parts, ignore_index=True)


def repeats(every: int) -> int:
    """Rounds that are timed at a cadence."""
    return max(2, 24 // every)


def timed(cadences: Sequence[int]) -> int:
    """Tokens that a prompt goes on by at most while it is timed: one to warm up, then the rounds."""
    return 1 + max(repeats(every) * every for every in cadences)


def _rounds(loaded: Loaded, r: Read, ids: list[int], every: int, budget: int, seed: int) -> list[dict[str, Any]]:
    """Rounds of one cadence: layout, round, step_ms, pass_ms."""
    children = {layout: r.cache.fork(r.number, 0) for layout in LAYOUTS}
    random = {layout: np.random.default_rng(seed) for layout in LAYOUTS}
    token = dict.fromkeys(LAYOUTS, r.next_token)
    between = (ids * (1 + every // len(ids)))[: max(0, every - 2)]

    def step(layout: str) -> float:
        start = time.perf_counter()
        token[layout] = int(forward(loaded.model, r.cache, children[layout], [token[layout]]).argmax())
        return 1e3 * (time.perf_counter() - start)

    def compact(layout: str) -> float:
        start = time.perf_counter()
        _evict_to(r.cache.ledger, children[layout], budget, "lot", random[layout])
        if layout != "none":
            getattr(r.cache, layout)(children[layout])
        return 1e3 * (time.perf_counter() - start)

    rows = []
    with installed(loaded.model):
        for layout in LAYOUTS:
            step(layout), compact(layout)
        for round in range(repeats(every)):
            for i in range(len(LAYOUTS)):
                layout = LAYOUTS[(round + i) % len(LAYOUTS)]
                steps = [step(layout)]
                if between:
                    forward(loaded.model, r.cache, children[layout], between)
                steps += [step(layout)] if every > 1 else []
                rows.append({"layout": layout, "round": round, "step_ms": np.mean(steps), "pass_ms": compact(layout)})
    for number in children.values():
        r.cache.ledger.free(number)
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
    if block_size > int(0.6 * shortest):
        raise InputError(f"block_size {block_size} > {int(0.6 * shortest)} tokens that prompts share: lower it")
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
    whole = able(loaded, prompts, tuple(CATALOGUE), [{"capacity": capacity}])
    some = able(loaded, prompts, [name for name in PUBLISHED if name in whole], [{"share": share} for share in shares])
    seed = settings.seed
    index = {  # without a model
        "synthetic": partial(synthetic, seed=seed, block_size=block_size),
        "toy": toy,
        "traffic": partial(cadence, cadences, budget, block_size=block_size),
        "wall": streaming.wall,
        "passes": streaming.passes,
    }
    model: dict[str, tuple[int, Callable, dict[str, Any]]] = {
        "arising": (sizes.arising, arising, {"kept": kept}),
        "published": (sizes.published, published, {"kept": shares, "policies": some}),
        "identity": (sizes.identity, identity, {"budget": capacity, "catalogue": whole, "new_tokens": max_new_tokens}),
        "latency": (sizes.latency, latency, {"cadences": timed_cadences, "seed": seed}),
    }
    tables = {
        name: runner.run(PerItem("reclamation", name, {name: study}, index_work), None, settings).drop(columns="item")
        for name, study in index.items()
    }
    for name, (count, study, given) in model.items():
        few = {item: prompts[item] for item in list(prompts)[:count]}
        more = given | {"study": study, "block_size": block_size}
        job = PerItem("reclamation", name, few, of_prompt, more, alone=name == "latency")
        tables[name] = runner.run(job, loaded, settings)
    return tables


def index_work(loaded: None, study: Callable[[], pd.DataFrame]) -> pd.DataFrame:
    """A study that is index work on a ledger."""
    return study()


def of_prompt(loaded: Loaded, ids: list[int], study: Callable[..., pd.DataFrame], **given: Any) -> pd.DataFrame:
    """A study of one prompt."""
    return study(loaded, {"": ids}, **given).drop(columns="item", errors="ignore")
