"""The guide's acceptance tests, put to a paged cache: does it say the same when it is compacted, does a prefix that
requests share still serve the next one, and what does compaction add to the time between tokens? Controls show that the
tests can fail.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from kvrepro.chapters.reclamation.paged import LAYOUTS, PagedRows, evict_to, read
from kvrepro.chapters.reclamation.survivors import JOINT, POLICIES, cells, condition, kept_sets, label, while_decoding
from kvrepro.engine.attention import installed
from kvrepro.engine.condition import DecodeCap, Prefill
from kvrepro.engine.policy import find
from kvrepro.errors import error_line
from kvrepro.experiment.models import Loaded

PREFIX = 0.6  # of a prompt belongs to another living sequence, too
COMPACTED = (("none", False), ("repack", False), ("fill", False), ("repack", True), ("fill", True))  # layout, shared
CONTROL = "storage positions"
IGNORED = "references ignored"


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
    reader's own compress the prompt once, and generate half as many tokens.

    Rows (source, policy, granularity, layout, shared), with columns of `_summed` and `compared`, or `error`. source:
    "chapter", or "catalogue", also for a reader's own. shared: the first part of the prompt belongs to another living
    sequence, too. identical: 1 if all greedy tokens are those of the cache that is not compacted, else 0; logit_gap:
    the largest difference of a logit. Layout "storage positions" is hole filling without its position map, a control on
    "one set": new tokens are told their storage index.
    """
    cut = int(PREFIX * len(ids))
    prefix, _ = read(loaded.model, ids[:cut], len(ids) - cut + new_tokens, len(COMPACTED) + 3, block_size)
    whole = prefix.fork(cut // block_size)
    with installed(loaded.model):
        logits = whole.extend(ids[cut:])
    chosen: list[tuple[dict[str, Any], Mapping[int, np.ndarray], int]] = [
        ({"source": "chapter"} | cell, while_decoding(loaded.model, ids, c, new_tokens), new_tokens)
        for cell, c in cells(policies, JOINT, budget, DecodeCap(every))
    ]
    tables = []
    keeps = kept_sets(loaded, ids, [condition(name, "per head", budget, Prefill()) for name in catalogue])
    for name, keep in zip(catalogue, keeps, strict=True):
        who = {"source": "catalogue", "policy": label(name), "granularity": find(name).budget}
        if isinstance(keep, Exception):
            tables.append(pd.DataFrame([who | {"error": error_line(keep)}]))
        else:
            chosen.append((who, {len(ids): keep}, max(1, new_tokens // 2)))
    for who, survivors, tokens in chosen:
        tried = [*COMPACTED, *[(CONTROL, False)] * (who["granularity"] == "one set")]
        layouts, misplaced = [layout for layout, _ in tried], [layout == CONTROL for layout, _ in tried]
        rows = whole.fork(
            *(cut // block_size * shared for _, shared in tried),
            layouts=["fill" if layout == CONTROL else layout for layout in layouts],
        )
        answers = rows.generate(logits, survivors, tokens, misplaced)
        rows.free()
        table = pd.DataFrame({**who, "layout": layouts, "shared": [shared for _, shared in tried]})
        same = (answers.argmax(2) == answers[0].argmax(1)).all(1)  # the first row is not compacted
        table["identical"] = same.double().tolist()
        table["logit_gap"] = (answers - answers[0]).abs().amax((1, 2)).tolist()
        summed = pd.DataFrame([_summed(pd.DataFrame(passes)) for passes in rows.passes])
        tables.append(compared(pd.concat([table, summed], axis=1)))
    return pd.concat(tables, ignore_index=True)


def _summed(passes: pd.DataFrame) -> dict[str, float]:
    """Columns of a row that summarise its passes. as_predicted: share of passes after which the free list had grown as
    arithmetic says; decode_copies: slots that moved after the prompt's own pass; share: what these copies read and
    write, over what attention reads meanwhile; shared_slots_touched: by copies."""
    copies = int(passes.copies[1:].sum())
    read = int((passes.seen.diff() * passes.living).sum())
    return {
        "as_predicted": float((passes.freed == passes.predicted).mean()),
        "slot_copies": int(passes.copies.sum()),
        "decode_copies": copies,
        "share": 2 * copies / read if read else np.nan,
        "shared_slots_touched": int(passes.foreign.sum()),
    }


def compared(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of one choice, of which the first is not compacted, with columns that compare them.

    moved: copies were made, so that something could go wrong. pinned: without compaction fewer blocks are free than
    arithmetic says. noticed_*: the test fails, as it should in a control. copies_ratio: copies while decoding, over
    those of a repack of the same choice.
    """
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
    evicts to `budget` (by "window", one set) and is compacted. Then a third one shares that prefix.

    hits: share of the prefix's blocks whose keys and values are unchanged, bit by bit; noticed: some are not.
    logit_gap: the third request's logits against those of the same request before anything was evicted. slot_copies: of
    the second one's compactions. Layout "references ignored" is hole filling that treats no block as shared; it comes
    last, since it ruins the cache.
    """
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
        second, logits = read_on("fill" if layout == IGNORED else layout)
        if layout == IGNORED:
            ledger.references[:] = ledger.references.clip(max=1)
        second.generate(logits, survivors, new_tokens)
        hits = float((blocks() == before).flatten(2).all(2).all(0).float().mean())
        second.free()
        third, logits_after = read_on()
        third.free()
        gap = float((logits_after - logits_before).abs().max())
        copies = sum(one["copies"] for one in second.passes[0])
        row = {"layout": layout, "hits": hits, "noticed": 1.0 * (hits < 1), "logit_gap": gap, "slot_copies": copies}
        rows.append(row)
    return pd.DataFrame(rows)


# ---- time between tokens


def repeats(every: int) -> int:
    """How many rounds are timed at a cadence."""
    return max(2, 24 // every)


def timed(cadences: Sequence[int]) -> int:
    """Most tokens that follow a prompt while it is timed: one to warm up, then the rounds."""
    return 1 + max(repeats(every) * every for every in cadences)


def latency(
    loaded: Loaded, ids: list[int], cadences: Sequence[int], budget: int = 256, block_size: int = 16, seed: int = 0
) -> pd.DataFrame:
    """Time between tokens: rows (every, layout), of the compactions, with `added`: the time over that of a cache which
    evicts as many tokens and is not compacted, less 1; the median over `repeats(every)` rounds.

    A time is that of the model's step, and of a pass (eviction of random tokens with its bookkeeping, and the
    compaction) spread over `every` tokens. A prompt shorter than two budgets has half of its tokens as budget. The
    layouts take turns, so that a busy machine slows all of them. A step is the mean of a round's first and last; the
    tokens between are read at once, since which tokens they are does not change the time.
    """
    held = min(budget, len(ids) // 2)
    row, logits = read(loaded.model, ids, timed(cadences), len(LAYOUTS) + 1, block_size)
    rows: dict[str, PagedRows] = {}
    token, random = {}, {}

    def step(layout: str) -> float:
        start = time.perf_counter()
        token[layout] = int(rows[layout].extend([token[layout]]).argmax())
        return time.perf_counter() - start

    def compact(layout: str) -> float:
        start = time.perf_counter()
        [entry] = rows[layout].entries
        evict_to(row.ledger, entry, held, random[layout])
        row.ledger.compact(entry, layout)
        return time.perf_counter() - start

    tables = []
    for every in cadences:
        between, rounds = (ids * (1 + every // len(ids)))[: max(0, every - 2)], []
        with installed(loaded.model):
            for layout in LAYOUTS:
                rows[layout], random[layout] = row.fork(0, layouts=[layout]), np.random.default_rng(seed)
                token[layout] = int(logits.argmax())
                step(layout), compact(layout)  # to warm up
            for n in range(repeats(every)):
                times = {}
                for layout in np.roll(LAYOUTS, -n).tolist():
                    steps = [step(layout)]
                    if between:
                        rows[layout].extend(between)
                    steps += [step(layout)] if every > 1 else []
                    times[layout] = np.mean(steps) + compact(layout) / every
                rounds.append(times)
        for child in rows.values():
            child.free()
        seconds = pd.DataFrame(rounds)
        added = (seconds[["repack", "fill"]].div(seconds.none, axis=0) - 1).median()
        tables.append(pd.DataFrame({"every": every, "layout": added.index, "added": added.to_numpy()}))
    return pd.concat(tables, ignore_index=True)
