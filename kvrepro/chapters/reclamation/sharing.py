"""Requests that share a prefix while one of them evicts and is compacted: does the prefix still serve the next one?

The guide asks for such a test. A control shows that it can fail: a cache that ignores reference counts.
"""

from collections.abc import Collection

import pandas as pd
import torch

from kvrepro.chapters.reclamation.paged import LoggedSteps, PagedCache, PagedRows, call_for, extend, generate, read
from kvrepro.chapters.reclamation.survivors import POLICIES, WINDOW, condition
from kvrepro.engine.attention import installed
from kvrepro.engine.regime import DecodeCap
from kvrepro.experiment.models import Loaded

EVICTS = {"window": POLICIES["window"]}
IGNORED = "references ignored"
TRIED = ("repack", "fill", IGNORED)  # the control comes last, since it ruins the cache


def sharing(
    loaded: Loaded, ids: list[int], budget: int = 128, new_tokens: int = 8, every: int = 2, block_size: int = 16,
    policies: Collection[str] = EVICTS,
) -> pd.DataFrame:  # fmt: skip
    """Rows (layout). One request reads the first 60% of the prompt. A second one shares its whole blocks, reads on,
    evicts to `budget` (by the only one of `policies`, one set) and is compacted. Then a third one shares that prefix.

    hits: share of the prefix's blocks whose keys and values are unchanged, bit by bit; noticed: some are not.
    logit_gap: the third request's logits against those of the same request before anything was evicted. slot_copies: of
    the second one's compactions. Layout "references ignored" is hole filling that treats no block as shared.
    """
    cut = int(0.6 * len(ids)) // block_size * block_size
    call, prefix, _ = read(loaded.model, ids[:cut], len(ids) - cut + new_tokens, 4, block_size, ("mass",))
    pages = prefix.pages

    def read_on() -> tuple[PagedRows, torch.Tensor]:
        child = prefix.fork()
        with installed(loaded.model):
            return child, extend(call, child, ids[cut:], WINDOW)

    first, logits_before = read_on()
    first.free()
    held = _blocks(pages, prefix)
    rows, [policy] = [], policies
    for layout in TRIED:
        second, logits = read_on()
        second.layouts = ["fill" if layout == IGNORED else layout]
        if layout == IGNORED:
            pages.ledger.references[:] = pages.ledger.references.clip(max=1)
        steps = call_for(loaded.model, ids, new_tokens + 1, LoggedSteps)
        generate(steps, second, logits, [condition(policy, "one set", budget, DecodeCap(every))])
        same = (_blocks(pages, prefix) == held).flatten(2).all(2).all(0)
        second.free()
        third, logits_after = read_on()
        third.free()
        rows.append({
            "layout": layout, "hits": float(same.float().mean()),
            "logit_gap": float((logits_after - logits_before).abs().max()),
            "slot_copies": sum(p.copies for p in second.passes[0]), "passes": len(second.passes[0]),
        })  # fmt: skip
    return pd.DataFrame(rows).assign(noticed=lambda r: 1.0 * (r.hits < 1))


def _blocks(pages: PagedCache, row: PagedRows) -> torch.Tensor:
    """A copy of a single row's keys and values, [2 * layers, blocks, block_size, kv_heads, dim]."""
    size = pages.ledger.block_size
    return torch.stack([flat.unflatten(0, (-1, size))[row.entries[0].blocks] for flat in pages.stored])
