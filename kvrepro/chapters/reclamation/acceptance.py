"""The guide's acceptance tests, put to a paged cache: does it say the same when it is compacted, and does a prefix that
requests share still serve the next one? Controls show that the tests can fail.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from kvrepro.chapters.reclamation.paged import PagedRows, Pass, extend, generate, read
from kvrepro.chapters.reclamation.survivors import (
    JOINT,
    POLICIES,
    cells,
    condition,
    kept_sets,
    label,
    once,
    while_decoding,
)
from kvrepro.engine.attention import installed
from kvrepro.engine.condition import DecodeCap
from kvrepro.engine.policy import find
from kvrepro.errors import error_line
from kvrepro.experiment.models import Loaded

PREFIX = 0.6  # of a prompt belongs to another living sequence, too
COMPACTED = (("none", False), ("repack", False), ("fill", False), ("repack", True), ("fill", True))  # layout, shared
CONTROL = "storage positions"
IGNORED = "references ignored"


class Choice(NamedTuple):
    """The survivors of a generation, and how long the generation is."""

    who: dict[str, str]  # columns source ("chapter"; "catalogue", also for a reader's own), policy and granularity
    survivors: dict[int, np.ndarray]  # as `generate` takes them
    new_tokens: int


def choices(
    loaded: Loaded, ids: list[int], budget: int, policies: Sequence[str], catalogue: Sequence[str], new_tokens: int,
    every: int,
) -> tuple[list[Choice], list[dict[str, Any]]]:  # fmt: skip
    """The chapter's policies at each granularity, which evict again while decoding, and those of the catalogue or a
    reader's own, which compress the prompt once and generate half as many tokens. Then rows of policies that raised."""
    chosen = [
        Choice({"source": "chapter"} | cell, while_decoding(loaded.model, ids, c, new_tokens), new_tokens)
        for cell, c in cells(policies, JOINT, budget, DecodeCap(every))
    ]
    failed: list[dict[str, Any]] = []
    keeps = kept_sets(loaded, ids, [once(name, budget) for name in catalogue])
    for name, keep in zip(catalogue, keeps, strict=True):
        who = {"source": "catalogue", "policy": label(name), "granularity": find(name).budget}
        if isinstance(keep, Exception):
            failed.append(who | {"error": error_line(keep)})
        else:
            chosen.append(Choice(who, {len(ids): keep}, max(1, new_tokens // 2)))
    return chosen, failed


def identity(
    loaded: Loaded, ids: list[int], budget: int = 128, policies: Sequence[str] = tuple(POLICIES),
    catalogue: Sequence[str] = (), new_tokens: int = 8, every: int = 1, block_size: int = 16,
) -> pd.DataFrame:  # fmt: skip
    """Generation that evicts to `budget` after the prompt and (the chapter's policies) every `every` tokens, from
    caches of every layout. `choices` says which policies evict; each one's survivors are determined once, and all its
    layouts decode as rows of a batch.

    Rows (source, policy, granularity, layout, shared), with the columns of `_agreement`, `_summed` and `compared`, or
    `error`. shared: the first part of the prompt belongs to another living sequence, too. Layout "storage positions" is
    hole filling without its position map, a control on "one set": new tokens are told their storage index.
    """
    cut = int(PREFIX * len(ids))
    call, prefix, _ = read(loaded.model, ids[:cut], len(ids) - cut + new_tokens, len(COMPACTED) + 3, block_size)
    whole = prefix.fork()
    with installed(loaded.model):
        logits = extend(call, whole, ids[cut:])
    chosen, failed = choices(loaded, ids, budget, policies, catalogue, new_tokens, every)
    tables = [pd.DataFrame(failed)] if failed else []
    for choice in chosen:
        tried = [*COMPACTED, *[(CONTROL, False)] * (choice.who["granularity"] == "one set")]
        layouts = ["fill" if layout == CONTROL else layout for layout, _ in tried]
        rows = whole.fork(*(cut // block_size * shared for _, shared in tried), layouts=layouts)
        misplaced = [layout == CONTROL for layout, _ in tried]
        answers = generate(call, rows, logits, choice.survivors, choice.new_tokens, misplaced)
        rows.free()  # the first of `answers` is not compacted
        tables.append(compared(pd.DataFrame([
            {**choice.who, "layout": layout, "shared": shared, "tokens": choice.new_tokens}
            | _agreement(ours, answers[0]) | _summed(passes)
            for (layout, shared), ours, passes in zip(tried, answers, rows.passes, strict=True)
        ])))  # fmt: skip
    return pd.concat(tables, ignore_index=True)


def _agreement(ours: Tensor, reference: Tensor) -> dict[str, float]:
    """`identical`: 1 if all greedy tokens are the same, else 0; `logit_gap`: the largest difference of a logit. Both
    are logits [steps, vocabulary]."""
    same = torch.equal(ours.argmax(1), reference.argmax(1))
    return {"identical": float(same), "logit_gap": float((ours - reference).abs().max())}


def _summed(passes: list[Pass]) -> dict[str, float]:
    """Columns of a row that summarise its passes. as_predicted: share of passes after which the free list had grown as
    arithmetic says; decode_copies: slots that moved after the prompt's own pass; share: what these copies read and
    write, over what attention reads meanwhile; shared_slots_touched: by copies."""
    copies = sum(p.copies for p in passes[1:])
    read = sum((b.seen - a.seen) * b.living for a, b in pairwise(passes))
    return {
        "passes": len(passes),
        "as_predicted": float(np.mean([p.freed == p.predicted for p in passes])),
        "blocks_freed": sum(p.freed for p in passes),
        "slot_copies": passes[0].copies + copies,
        "decode_copies": copies,
        "share": 2 * copies / read if read else np.nan,
        "shared_slots_touched": sum(p.foreign for p in passes),
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
        moved=rows.slot_copies > 0, pinned=missed.iloc[0], noticed_blocks=1.0 * missed,
        noticed_tokens=1 - rows.identical, copies_ratio=rows.decode_copies / rows.shared.map(repack),
    )  # fmt: skip


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
    call, prefix, _ = read(loaded.model, ids[:cut], len(ids) - cut + new_tokens, 4, block_size)
    evicting, ledger = condition("window", "one set", budget, DecodeCap(every)), prefix.ledger
    survivors = while_decoding(loaded.model, ids, evicting, new_tokens)

    def read_on(layout: str = "none") -> tuple[PagedRows, Tensor]:
        child = prefix.fork(layouts=[layout])
        with installed(loaded.model):
            return child, extend(call, child, ids[cut:])

    def blocks() -> Tensor:
        """A copy of the prefix's keys and values, [2 * layers, blocks, block_size, kv_heads, dim]."""
        held = prefix.entries[0].blocks
        return torch.stack([flat.unflatten(0, (-1, block_size))[held] for flat in prefix.pages.stored])

    first, logits_before = read_on()
    first.free()
    before, rows = blocks(), []
    for layout in ("repack", "fill", IGNORED):
        second, logits = read_on("fill" if layout == IGNORED else layout)
        if layout == IGNORED:
            ledger.references[:] = ledger.references.clip(max=1)
        generate(call, second, logits, survivors, new_tokens)
        hits = float((blocks() == before).flatten(2).all(2).all(0).float().mean())
        second.free()
        third, logits_after = read_on()
        third.free()
        gap = float((logits_after - logits_before).abs().max())
        copies = sum(p.copies for p in second.passes[0])
        rows.append({"layout": layout, "hits": hits, "noticed": 1.0 * (hits < 1), "logit_gap": gap,
                     "slot_copies": copies})  # fmt: skip
    return pd.DataFrame(rows)
