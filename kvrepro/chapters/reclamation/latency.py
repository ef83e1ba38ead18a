"""What compaction adds to the time between tokens, with real decoding on a paged cache."""

import time
from collections.abc import Sequence

import numpy as np
import pandas as pd

from kvrepro.chapters.reclamation.ledger import evict_to
from kvrepro.chapters.reclamation.paged import PagedRows, extend, read
from kvrepro.engine.attention import installed
from kvrepro.engine.rows import Call
from kvrepro.experiment.models import Loaded

LAYOUTS = ("none", "repack", "fill")


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

    Random tokens are evicted. A prompt shorter than two budgets has half of its tokens as budget.
    """
    held = min(budget, len(ids) // 2)
    call, row, logits = read(loaded.model, ids, timed(cadences), len(LAYOUTS) + 1, block_size)
    parts = []
    for every in cadences:
        with installed(call.model):
            times = _rounds(call, row, int(logits.argmax()), ids, every, held, seed)
        added = (times[["repack", "fill"]].div(times.none, axis=0) - 1).median()
        parts.append(pd.DataFrame({"every": every, "layout": added.index, "added": added.to_numpy()}))
    return pd.concat(parts, ignore_index=True)


def _rounds(call: Call, row: PagedRows, first: int, ids: list[int], every: int, budget: int, seed: int) -> pd.DataFrame:
    """Milliseconds per token, [rounds, layouts]: the model's step, and a pass (eviction with its bookkeeping, and the
    compaction) spread over `every` tokens.

    The layouts take turns, so that a busy machine slows all of them. A step is the mean of a round's first and last;
    the tokens between are read at once, since which tokens they are does not change the time.
    """
    children = {layout: row.fork(0, layouts=[layout]) for layout in LAYOUTS}
    random = {layout: np.random.default_rng(seed) for layout in LAYOUTS}
    token = dict.fromkeys(LAYOUTS, first)
    between = (ids * (1 + every // len(ids)))[: max(0, every - 2)]

    def step(layout: str) -> float:
        start = time.perf_counter()
        token[layout] = int(extend(call, children[layout], [token[layout]]).argmax())
        return 1e3 * (time.perf_counter() - start)

    def compact(layout: str) -> float:
        start = time.perf_counter()
        [number] = children[layout].numbers
        evict_to(row.ledger, number, budget, random[layout])
        row.pages.compact(number, layout)
        return 1e3 * (time.perf_counter() - start)

    for layout in LAYOUTS:  # to warm up
        step(layout), compact(layout)
    rounds = []
    for n in range(repeats(every)):
        times = {}
        for layout in np.roll(LAYOUTS, -n).tolist():
            steps = [step(layout)]
            if between:
                extend(call, children[layout], between)
            steps += [step(layout)] if every > 1 else []
            times[layout] = np.mean(steps) + compact(layout) / every
        rounds.append(times)
    for child in children.values():
        child.free()
    return pd.DataFrame(rounds)
