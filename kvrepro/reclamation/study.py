"""From evicted tokens to freed blocks: the studies of the reclamation chapter, each a tidy table, and their verdicts.

`synthetic`, `toy`, `rounds` and `cadence` are index work on a ledger; `arising`, `occupancy`, `identity` and `latency`
run a model on a paged cache. `streaming` has what concerns attention scores.
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

from kvrepro import claims, data, engine
from kvrepro.attention import installed
from kvrepro.condition import Condition
from kvrepro.errors import InputError
from kvrepro.models import ROOT, Loaded
from kvrepro.policy import find
from kvrepro.reclamation.paged import NONE, Ledger, PagedCache, Signals, forward

POLICIES = ("sinks_recency", "cumulative", "window", "redundancy")
GRANULARITIES = ("one set", "per layer", "per head")
LAYOUTS = ("none", "repack", "fill")
SINKS, WINDOW = 4, 32
KERNELS = ROOT / "data" / "gpu" / "kernels.csv"


@dataclass(frozen=True)
class Size:
    """How many prompts each study takes."""

    arising: int
    published: int
    identity: int


SIZES = {"quick": Size(8, 6, 6), "full": Size(48, 48, 24)}


def size(profile: str, n_items: int | None = None) -> Size:
    """The profile's size; `n_items` caps every study."""
    if profile not in SIZES:
        raise InputError(f"unknown profile {profile!r}: choose {' or '.join(SIZES)}")
    found = SIZES[profile]
    return found if n_items is None else Size(*(min(n_items, n) for n in vars(found).values()))


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

    granularity: "one set" and "per layer" rank by mean scores over what they do not separate.
    """
    if granularity not in GRANULARITIES:
        raise InputError(f"unknown granularity {granularity!r}: choose {', '.join(GRANULARITIES)}")
    flat, at, alive = cache.ledger.living(number)
    order = np.argsort(at)
    flat, positions = torch.from_numpy(flat[order]), torch.from_numpy(at[order])
    keys = torch.stack([k.flatten(0, 1)[flat.to(k.device)].transpose(0, 1) for k in cache.keys]).cpu()
    scores, newest = scores_of(policy, keys, signals, positions, budget)
    means = {"one set": (0, 1), "per layer": (1,), "per head": ()}[granularity]
    scores = scores.mean(means, keepdim=True) if means else scores
    scores = scores.clone()
    scores[..., len(positions) - newest :] = torch.inf
    if policy == "sinks_recency":
        scores[..., positions < SINKS] = torch.inf
    held = torch.from_numpy(alive[..., order])
    scores, held = torch.broadcast_tensors(scores, held)
    best = scores.masked_fill(~held, -torch.inf).argsort(dim=-1, descending=True, stable=True)[..., :budget]
    keep = torch.zeros(*scores.shape[:2], cache.ledger.sequences[number].seen, dtype=torch.bool)
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
                rows.append({"pattern": name, "draw": draw, **reclaim(keep, block_size)})
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
    asked = [(policy, share) for policy in policies for share in kept]
    conditions = [Condition(policy, share=share, regime="prefill", reading="as_described") for policy, share in asked]
    rows = []
    for item, ids in prompts.items():
        [answers] = engine.generate(loaded.model, [ids], conditions, max_new_tokens=1, stop_ids=(), kept_sets=True)
        for (policy, share), answer in zip(asked, answers, strict=True):
            here = {"item": item, "policy": find(policy).title, "kept": share}
            rows.append(here | reclaim(np.stack(answer.kept_sets), block_size))
    return pd.DataFrame(rows)


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


def identity(
    loaded: Loaded,
    prompts: Mapping[str, list[int]],
    budget: int = 128,
    policies: Sequence[str] = POLICIES,
    granularities: Sequence[str] = ("one set", "per head"),
    new_tokens: int = 24,
    every: int = 8,
    block_size: int = 16,
) -> pd.DataFrame:
    """Generation that evicts to `budget` after the prompt and every `every` tokens, from caches of every layout.

    Rows (item, policy, granularity, layout, shared): `identical` to the uncompacted cache of the same policy (0 or 1),
    `logit_gap` to it, `as_predicted` (share of passes after which the free list had grown as arithmetic says),
    `shared_slots_touched` by copies, `prefix_intact` (what the other sequence holds is unchanged, bit by bit), and
    metrics. shared: the first 60% of the prompt belong to another living sequence, too. Layout "storage positions" is
    hole filling without its position map: new tokens are told their storage index.
    """
    rows = []
    for item, ids in prompts.items():
        cut = int(0.6 * len(ids))
        r = read(loaded, ids[:cut], len(ids) - cut + new_tokens, copies=4, block_size=block_size)
        cache, prefix = r.cache, r.number
        number = cache.fork(prefix)
        with installed(loaded.model):
            first = int(forward(loaded.model, cache, number, ids[cut:], r.signals).argmax())
        held = cache.ledger.living(prefix)[0]
        before = [flat[held] for flat in cache.stored]
        for policy in policies:
            for granularity in granularities[:1] if policy == "sinks_recency" else granularities:
                reference: list[Tensor] = []
                keeps: list[np.ndarray] = []  # the uncompacted run's survivors, which the others evict to as well
                for layout, shared in (("none", False), ("repack", False), ("fill", False), ("repack", True),
                                       ("fill", True), ("storage positions", False)):  # fmt: skip
                    child = cache.fork(number, cut // block_size if shared else 0)
                    if layout == "none":
                        signals = r.signals.copy()
                        decide = partial(survivors, policy, granularity, budget, cache, child, signals)
                    else:
                        signals, decide = None, partial(next, iter(keeps))
                    logits, facts = _generate(loaded, cache, child, first, new_tokens, every, layout, decide, signals)
                    cache.ledger.free(child)
                    reference, keeps = reference or logits, facts.pop("keeps")
                    same = [int(a.argmax()) == int(b.argmax()) for a, b in zip(logits, reference, strict=True)]
                    gap = max(float((a - b).abs().max()) for a, b in zip(logits, reference, strict=True))
                    here = {"item": item, "policy": policy, "granularity": granularity, "layout": layout}
                    intact = all(torch.equal(a, b[held]) for a, b in zip(before, cache.stored, strict=True))
                    rows.append(here | {"shared": shared, "identical": float(all(same)), "logit_gap": gap,
                                        "prefix_intact": intact, **facts})  # fmt: skip
    return pd.DataFrame(rows)


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
    """Means over `rounds`: rows (every, layout, draw) with blocks_mean, blocks_max, copies_per_token, copies_per_pass,
    freed_per_pass, and `share`: what copies read and write, over what attention reads of the cache, per token."""
    rows = []
    for every in cadences:
        for layout in LAYOUTS:
            for draw in range(draws):
                r = rounds(every, layout, budget, tokens, block_size, victims, draw)
                passes = tokens // every
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
    cadences: Sequence[int] = (1, 8, 32, 128),
    budget: int = 256,
    least: int = 128,
    block_size: int = 16,
    seed: int = 0,
) -> pd.DataFrame:
    """Real decoding at each cadence: a row per token with `step_ms` of the model, `pass_ms` of bookkeeping and copies
    (0 when none is due) and, where due, `added` = pass / (cadence x step).

    Victims by lot, since their choice is not what is timed. At least `least` tokens and two passes each.
    """
    longest = max(least, 2 * max(cadences))
    if len(ids) + longest > loaded.context:
        raise InputError(f"{len(ids)} + {longest} tokens do not fit {loaded.context}: shorten prompt or cadences")
    r = read(loaded, ids, longest, copies=2, block_size=block_size)
    parts = []
    for every in cadences:
        for layout in LAYOUTS:
            number, random, token, rows = r.cache.fork(r.number, 0), np.random.default_rng(seed), r.next_token, []
            _evict_to(r.cache.ledger, number, budget, "lot", random)
            if layout != "none":
                getattr(r.cache, layout)(number)
            with installed(loaded.model):
                for t in range(1, max(least, 2 * every) + 1):
                    start = time.perf_counter()
                    token = int(forward(loaded.model, r.cache, number, [token]).argmax())
                    middle = time.perf_counter()
                    if t % every == 0:
                        _evict_to(r.cache.ledger, number, budget, "lot", random)
                        if layout != "none":
                            getattr(r.cache, layout)(number)
                    rows.append((t, 1e3 * (middle - start), 1e3 * (time.perf_counter() - middle) * (t % every == 0),
                                 len(r.cache.ledger.sequences[number].blocks)))  # fmt: skip
            r.cache.ledger.free(number)
            frame = pd.DataFrame(rows, columns=["token", "step_ms", "pass_ms", "blocks_held"])
            due = frame.token % every == 0
            frame["added"] = (frame.pass_ms / (every * frame.step_ms.median())).where(due)
            parts.append(frame.assign(every=every, layout=layout, budget=budget))
    return pd.concat(parts, ignore_index=True)


def gauge(every: int = 128, **settings: Any) -> pd.DataFrame:
    """`rounds` at one cadence, every layout."""
    return pd.concat([rounds(every, layout, **settings) for layout in LAYOUTS], ignore_index=True)


def exported(every: int = 128, **settings: Any) -> pd.DataFrame:
    """The metrics that a production engine should export, as `rounds` leaves them: a row each, a column per layout."""
    return pd.DataFrame({layout: rounds(every, layout, **settings).attrs["metrics"] for layout in LAYOUTS})


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


# ---- verdicts


def verdicts(tables: Mapping[str, pd.DataFrame], model: str, profile: str) -> pd.DataFrame:
    """Verdict of every claim of data/claims/reclamation.yml, in the columns of `kvrepro.claims`.

    tables: the studies by the name under which the claims ask for them. A study that was not run is said so.
    """
    rows = [claims.claim_row(claim, _members(claim, tables)) for claim in claims.load_claims("reclamation")["claims"]]
    frame = pd.DataFrame(rows).reindex(columns=claims.COLUMNS + claims.EXTRA)
    frame.loc[frame.n == 1, "test"] = "exact"
    return frame.assign(reading="any", model=model, profile=profile)


def _members(claim: Mapping, tables: Mapping[str, pd.DataFrame]) -> pd.DataFrame | str:
    """One row per member: member, value, low, high, n, p, state; or the reason why there is none."""
    if claim["contrast"] == "none":
        return claim["why"]
    table = tables.get(claim["study"])
    if table is None:
        return f"the study {claim['study']!r} was not run"
    found = []
    for member in claim.get("members", [{"label": "all"}]):
        where = {**claim.get("where", {}), **member.get("where", {})}
        rows = table[np.logical_and.reduce([table[c] == v for c, v in where.items()])] if where else table
        values = rows[member.get("column", claim.get("column"))].dropna().astype(float)
        if values.empty:
            return f"no row of {claim['study']!r} has " + ", ".join(f"{c} {v}" for c, v in where.items())
        constant = bool((values == values.iloc[0]).all()) and len(values) >= claims.MIN_ITEMS  # nothing to resample
        exact = constant or len(values) == 1
        value, low, high = [values.iloc[0]] * 3 if exact else claims.estimate(values.to_frame("a"), "mean")
        state = claims.judge(claim["rule"], value, low, high, None)
        found.append({"member": member["label"], "value": value, "low": low, "high": high, "n": len(values),
                      "p": np.nan, "state": state})  # fmt: skip
    return pd.DataFrame(found)


def acceptance(rows: pd.DataFrame) -> pd.DataFrame:
    """`identity` as the guide's acceptance test reads it: a row per layout, with and without a shared prefix."""
    names = {"repack": "repack", "fill": "hole filling", "storage positions": "hole filling, no position map"}
    return (
        rows[rows.layout.isin(names)]
        .groupby(["layout", "shared"])
        .agg(
            generations=("identical", "size"),
            identical=("identical", "sum"),
            largest_logit_gap=("logit_gap", "max"),
            passes=("passes", "sum"),
            as_predicted=("as_predicted", "mean"),
            blocks_freed=("blocks_freed", "sum"),
            slot_copies=("slot_copies", "sum"),
            shared_slots_touched=("shared_slots_touched", "sum"),
        )
        .rename(index=names)
    )


def numbers(frame: pd.DataFrame, tables: Mapping[str, pd.DataFrame]) -> dict[str, str]:
    """What the prose may quote, as text: `<claim>` and `<claim>-verdict` of each claim, and the chapter's findings."""
    found = {row.claim: claims.shown(row, with_unit=True) or "no value" for row in frame.itertuples()}
    found |= {f"{row.claim}-verdict": row.verdict for row in frame.itertuples()}
    synthetic, arising, identity = tables["synthetic"], tables["arising"], tables["identity"]
    traffic, passes = tables["traffic"], tables["passes"]
    found["claims"] = str(len(frame))
    found["lot"] = _percent(synthetic[synthetic.pattern == "random 10%"].share_plain, 1)
    found["kept"] = f"{arising.kept.min():.0%}"
    for policy in POLICIES:
        mine = arising[arising.policy == policy]
        one = mine[(mine.granularity == "one set") & (mine.kept == arising.kept.min())]
        found[f"plain-{policy}"], found[f"ratio-{policy}"] = _percent(one.share_plain), _percent(one.copies_ratio)
        found[f"emptiest-{policy}"] = _percent(one.copies_emptiest / one.copies_repack)
        heads = mine[mine.granularity == "per head"]
        found[f"head-{policy}"] = _percent(heads[heads.kept == arising.kept.min()].share_repack)
        found[f"half-{policy}"] = _percent(heads[heads.kept == 0.5].share_repack)
    real, control = identity[identity.layout.isin(["repack", "fill"])], identity[identity.layout == "storage positions"]
    found["generations"], found["passes"] = f"{len(real):,}", f"{real.passes.sum():,}"
    for layout in ("repack", "fill"):
        found[f"gap-{layout}"] = f"{real[real.layout == layout].logit_gap.max():.1g}"
        for every in (1, 128):
            here = traffic[(traffic.layout == layout) & (traffic.every == every)]
            found[f"{layout}-{every}"] = _percent(here.share, 1)
    found["control"] = f"{control.identical.sum():.0f} of {len(control)}"
    longest = passes[passes.tokens == passes.tokens.max()].groupby("way").seconds.median()
    found["longest"] = f"{passes.tokens.max():,}"
    found["extra-times"] = f"{longest['one extra pass'] / longest['fused attention']:.1f}"
    found["eager-times"] = f"{longest['eager'] / longest['fused attention']:.1f}"
    gpu, measured = gpu_passes(), bandwidths()
    found["gpu-pass"] = _percent(gpu[gpu.tokens == gpu.tokens.max()].share)
    found["gpu-tokens"] = f"{gpu.tokens.max():,.0f}" if len(gpu) else "no value"
    for name in ("copy", "repack", "fill"):
        found[f"bandwidth-{name}"] = f"{measured[name] / 1e12:.1f}" if measured else "no value"
    return found


def _percent(shares: pd.Series, digits: int = 0) -> str:
    return "no value" if shares.dropna().empty else f"{shares.mean():.{digits}%}"


def save(tables: Mapping[str, pd.DataFrame], folder: Path) -> None:
    """Each table as `<name>.parquet`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, table in tables.items():
        table.to_parquet(folder / f"{name}.parquet")
