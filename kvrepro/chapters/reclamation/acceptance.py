"""The guide's acceptance tests, put to a paged cache: does it say the same when it is compacted, does a shared prefix
still serve the next request, and what does compaction add to the time between tokens? Controls show that they can fail.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from kvrepro.chapters.reclamation.paged import LAYOUTS, MISPLACED, PagedRows, evict_to, read
from kvrepro.chapters.reclamation.survivors import JOINT, POLICIES, cells, condition, kept_sets, label, while_decoding
from kvrepro.engine.attention import installed
from kvrepro.engine.condition import DecodeCap, Prefill
from kvrepro.engine.policy import find
from kvrepro.errors import error_line
from kvrepro.experiment.models import Loaded

PREFIX = 0.6  # of a prompt belongs to another living sequence, too
COMPACTED = (("none", False), ("repack", False), ("fill", False), ("repack", True), ("fill", True))  # layout, shared
IGNORED = "references ignored"  # a control, hole filling that treats no block as shared


def identity(
    loaded: Loaded,
    ids: list[int],
    budget: int = 128,
    policies: Sequence[str] = tuple(POLICIES),
    catalogue: Sequence[str] = (),
    new_tokens: int = 8,
    every: int = 1,
    block_size: int = 16,
) -> pd.DataFrame:
    """Generation that evicts to `budget`, from caches of every layout, which decode as rows of a batch. The chapter's
    policies evict after the prompt and again every `every` tokens, at each granularity; those of the catalogue or a
    reader's own (source "catalogue") compress the prompt once, and generate half as many tokens.

    Rows (source, policy, granularity, layout, shared), with columns of `compared`, or `error`. shared: the first part
    of the prompt belongs to another living sequence, too. identical: 1 if all greedy tokens are those of the cache that
    is not compacted, else 0. as_predicted: share of passes after which the free list had grown as arithmetic says.
    decode_copies: slots that moved after the prompt's own pass; share: what these copies read and write, over what
    attention reads meanwhile. The layout `MISPLACED` is a control on "one set"."""
    cut = int(PREFIX * len(ids))
    prefix, _ = read(loaded.model, ids[:cut], len(ids) - cut + new_tokens, len(COMPACTED) + 3, block_size)
    whole = prefix.fork(cut // block_size)
    with installed(loaded.model):
        logits = whole.extend(ids[cut:])
    chosen: list[tuple[dict[str, Any], Mapping[int, np.ndarray], int]] = []
    for cell, c in cells(policies, JOINT, budget, DecodeCap(every)):
        chosen.append((cell | {"source": "chapter"}, while_decoding(loaded.model, ids, c, new_tokens), new_tokens))
    keeps, tables = kept_sets(loaded, ids, [c for _, c in cells(catalogue, (), budget, Prefill())]), []
    for name, keep in zip(catalogue, keeps, strict=True):
        who = {"source": "catalogue", "policy": label(name), "granularity": find(name).budget}
        if isinstance(keep, Exception):
            tables.append(pd.DataFrame([who | {"error": error_line(keep)}]))
        else:
            chosen.append((who, {len(ids): keep}, max(1, new_tokens // 2)))
    for who, survivors, tokens in chosen:
        tried = [*COMPACTED, *[(MISPLACED, False)] * (who["granularity"] == "one set")]
        table = pd.DataFrame(tried, columns=["layout", "shared"]).assign(**who)
        rows = whole.fork(*(cut // block_size * table.shared), layouts=table.layout)
        answers = rows.generate(logits, survivors, tokens)
        rows.free()
        same = (answers.argmax(2) == answers[0].argmax(1)).all(1)  # the first row is not compacted
        table["identical"] = same.double().tolist()
        table["logit_gap"] = (answers - answers[0]).abs().amax((1, 2)).tolist()
        summed = []
        for passes in map(pd.DataFrame, rows.passes):
            copies, attended = int(passes.copies[1:].sum()), int((passes.seen.diff() * passes.living).sum())
            counts = {"slot_copies": passes.copies.sum(), "shared_slots_touched": passes.foreign.sum()}
            counts |= {"decode_copies": copies, "share": 2 * copies / attended if attended else np.nan}
            summed.append(counts | {"as_predicted": (passes.freed == passes.predicted).mean()})
        tables.append(compared(table.join(pd.DataFrame(summed))))
    return pd.concat(tables, ignore_index=True)


def compared(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of one choice, of which the first is not compacted, with columns that compare them. moved: copies were
    made, so that something could go wrong. pinned: without compaction fewer blocks are free than arithmetic says.
    noticed_*: the test fails, as it should in a control. copies_ratio: copies while decoding, over a repack's."""
    repack = rows[rows.layout == "repack"].set_index("shared").decode_copies.replace(0, np.nan)
    missed = rows.as_predicted < 1
    return rows.assign(
        moved=rows.slot_copies > 0,
        pinned=missed.iloc[0],
        noticed_blocks=1.0 * missed,
        noticed_tokens=1 - rows.identical,
        copies_ratio=rows.decode_copies / rows.shared.map(repack),
    )


def sharing(
    loaded: Loaded, ids: list[int], budget: int = 128, new_tokens: int = 8, every: int = 2, block_size: int = 16
) -> pd.DataFrame:
    """Rows (layout). One request reads the first part of the prompt. A second one shares its whole blocks, reads on,
    evicts to `budget` (by "window", one set) and is compacted. Then a third one shares that prefix. hits: share of the
    prefix's blocks whose keys and values are unchanged, bit by bit; noticed: some are not. logit_gap: the third
    request's logits against those of the same request before anything was evicted. slot_copies: of the second one's
    compactions. The layout `IGNORED` comes last, since it ruins the cache."""
    cut = int(PREFIX * len(ids)) // block_size * block_size
    prefix, _ = read(loaded.model, ids[:cut], len(ids) - cut + new_tokens, 4, block_size)
    ledger, held = prefix.ledger, prefix.entries[0].blocks
    survivors = while_decoding(loaded.model, ids, condition("window", "one set", budget, DecodeCap(every)), new_tokens)

    def read_on(layout: str = "none") -> tuple[PagedRows, Tensor]:
        child = prefix.fork(len(held), layouts=[layout])
        with installed(loaded.model):
            return child, child.extend(ids[cut:])

    def blocks() -> Tensor:
        """A copy of the prefix's keys and values, [2 * layers, blocks, block_size, kv_heads, dim]."""
        return torch.stack([flat.unflatten(0, (-1, block_size))[held] for flat in ledger.stored])

    first, logits_before = read_on()
    first.free()
    before, rows = blocks(), []
    for layout in ("repack", "fill", IGNORED):
        second, logits = read_on(layout)
        if layout == IGNORED:
            ledger.references[:] = ledger.references.clip(max=1)
        second.generate(logits, survivors, new_tokens)
        hits = float((blocks() == before).flatten(2).all(2).all(0).float().mean())
        second.free()
        third, logits_after = read_on()
        third.free()
        gap, copies = float((logits_after - logits_before).abs().max()), sum(x["copies"] for x in second.passes[0])
        rows.append((layout, hits, 1.0 * (hits < 1), gap, copies))
    return pd.DataFrame(rows, columns=["layout", "hits", "noticed", "logit_gap", "slot_copies"])


# ---- time between tokens


def repeats(every: int) -> int:
    return max(2, 24 // every)


def timed(cadences: Sequence[int]) -> int:
    """Most tokens that follow a prompt while it is timed: one to warm up, then the rounds."""
    return 1 + max(repeats(every) * every for every in cadences)


def latency(
    loaded: Loaded, ids: list[int], cadences: Sequence[int], budget: int = 256, block_size: int = 16, seed: int = 0
) -> pd.DataFrame:
    """Time between tokens: rows (every, layout), of the compactions, with `added`: the time over that of a cache which
    evicts as many tokens and is not compacted, less 1; the median over `repeats(every)` rounds. A short prompt has half
    of its tokens as budget. The layouts take turns, so that a busy machine slows all of them."""
    held, tables = min(budget, len(ids) // 2), []
    row, _ = read(loaded.model, ids, timed(cadences), len(LAYOUTS) + 1, block_size)
    with installed(loaded.model):
        for every in cadences:
            caches = {layout: (row.fork(0, layouts=[layout]), np.random.default_rng(seed)) for layout in LAYOUTS}
            for rows, random in caches.values():
                _round(rows, ids, 1, held, random)  # to warm up
            turns = [np.roll(LAYOUTS, -n) for n in range(repeats(every))]
            seconds = pd.DataFrame(
                {x: _round(caches[x][0], ids, every, held, caches[x][1]) for x in turn} for turn in turns
            )
            for rows, _ in caches.values():
                rows.free()
            added = (seconds[["repack", "fill"]].div(seconds.none, axis=0) - 1).median()
            tables.append(pd.DataFrame({"every": every, "layout": added.index, "added": added.to_numpy()}))
    return pd.concat(tables, ignore_index=True)


def _round(rows: PagedRows, ids: list[int], every: int, budget: int, random: np.random.Generator) -> float:
    """Decode `every` tokens, evict random ones and compact: seconds of a step of the model, and of the pass, with its
    bookkeeping, spread over these tokens. A step is the mean of the first and the last; the tokens between are read at
    once. Which tokens they are does not change the time."""
    times = [time.perf_counter()]
    for n in [1, every - 2, 1] if every > 2 else [1] * every:
        int(rows.extend((ids * (1 + n // len(ids)))[:n]).argmax())  # waits for a GPU
        times.append(time.perf_counter())
    [entry], steps = rows.entries, np.diff(times)
    evict_to(rows.ledger, entry, budget, random)
    rows.ledger.compact(entry, *rows.layouts)
    return float(np.mean([steps[0], steps[-1]]) + (time.perf_counter() - times[-1]) / every)
