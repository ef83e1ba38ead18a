"""The grid: the parts of eviction methods, crossed. Which cells exist, which of them are run, and which published
methods are compared with them.

A cell has a level of each factor, or None where the factor does not exist for it: scores that do not come from single
queries have nothing to aggregate. There are thousands of cells; `design` chooses some, such that any two levels of
different factors meet about equally often. Then main effects and interactions of two factors can be told apart.
"""

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from kvrepro.chapters.synthesis.policies import NAMES, OF_WINDOW, SCORERS, SPLITS
from kvrepro.chapters.synthesis.settings import Settings
from kvrepro.engine.condition import Condition, DecodeCap, Prefill
from kvrepro.engine.policy import find
from kvrepro.errors import InputError

FILE = "kvrepro/chapters/synthesis/policies.py"
FACTORS: dict[str, tuple[str, ...]] = {
    "scorer": tuple(SCORERS),
    "aggregator": ("mean", "mean_var", "defensive"),
    "pooling": ("none", "average", "max"),
    "guard": ("none", "sinks", "ends"),
    "split": tuple(SPLITS),
    "quota": ("none", "parts"),
    "regime": ("question seen", "question unseen", "decode cap"),
}
PUBLISHED = (
    "streaming_llm", "snapkv", "ada_kv", "dropkv", "key_diff", "k_norm", "h2o", "defensive_kv", "layer_defensive_kv",
)  # fmt: skip
RIVALS = ("key_diff", "dropkv", "snapkv", "h2o", "defensive_kv")  # whom the finding on KeyDiff compares


def factors(kept: Sequence[float]) -> dict[str, tuple[object, ...]]:
    """Every factor with its levels, including the shares kept."""
    return {**FACTORS, "kept": tuple(kept)}


def cells(kept: Sequence[float], *, kv_heads: int = 2, slides: bool = False, asks: bool = True) -> pd.DataFrame:
    """Every cell that exists, a column per factor; None where it does not have the factor.

    Also left out are heads that compete within a layer if it has only one (`kv_heads`), one set of tokens for all
    layers if some layers slide and hold other tokens than the rest (`slides`), and "question unseen" for prompts that
    mark no question (`asks`).
    """
    every = factors(kept)
    frame = pd.DataFrame(itertools.product(*every.values()), columns=list(every)).astype(object)
    frame.loc[~frame.scorer.isin(OF_WINDOW), ["aggregator", "pooling"]] = None
    frame.loc[frame.scorer == "position", "split"] = None  # the same tokens everywhere, however a budget is shared out
    frame.loc[frame.regime == "decode cap", "quota"] = None  # a quota is set once, for a prompt
    gone = {"split": ["per head"] * (kv_heads == 1) + ["one set"] * slides, "regime": ["question unseen"] * (not asks)}
    frame = frame[~frame.split.isin(gone["split"]) & ~frame.regime.isin(gone["regime"])]
    return frame.where(frame.notna(), None).drop_duplicates().reset_index(drop=True)


def design(frame: pd.DataFrame, count: int, seed: int = 0) -> pd.DataFrame:
    """`count` of the cells, or all if there are fewer, in an order of which every beginning is balanced, too.

    Each step takes the cell whose pairs of levels are, on average, the rarest so far, in relation to how often a pair
    would occur by chance. Among equals a random number decides.
    """
    codes = [pd.factorize(frame[name])[0] for name in frame]  # -1: does not have the factor
    sizes = [code.max() + 1 for code in codes]
    pairs = [(a, b) for a, b in itertools.combinations(range(len(codes)), 2) if sizes[a] > 1 and sizes[b] > 1]
    at = np.stack([np.where((codes[a] < 0) | (codes[b] < 0), -1, codes[a] * sizes[b] + codes[b]) for a, b in pairs], 1)
    counts = [np.zeros(sizes[a] * sizes[b] + 1) for a, b in pairs]  # by pair of levels; the last: no such pair
    existing, lot = (at >= 0).sum(1).clip(min=1), np.random.default_rng(seed).random(len(frame))
    taken: list[int] = []
    for _ in range(min(count, len(frame))):
        frequency = sum(met[at[:, i]] * (len(met) - 1) for i, met in enumerate(counts)) / existing + 1e-6 * lot
        frequency[taken] = np.inf
        rarest = int(frequency.argmin())
        taken.append(rarest)
        for i, met in enumerate(counts):
            met[at[rarest, i]] += at[rarest, i] >= 0
    return frame.iloc[taken].reset_index(drop=True)


def part_names(settings: Settings) -> tuple[str, ...]:
    """Spans that a quota counts."""
    return tuple(f"part {i + 1}" for i in range(settings.parts))


def condition(cell: Mapping[str, Any], settings: Settings) -> Condition:
    """The engine's condition for a cell."""
    switches: dict[str, object] = {"window": settings.window}
    if cell["aggregator"] is not None:
        switches |= {"aggregate": cell["aggregator"], "pool": cell["pooling"], "kernel": settings.kernel}
    if cell["guard"] == "sinks":
        switches["sinks"] = 4
    parts = part_names(settings) if cell["quota"] == "parts" else ()
    until = "question" if cell["regime"] == "question unseen" else ""
    capped, prefill = DecodeCap(settings.interval), Prefill(until=until, fair=1.0 if parts else None, spans=parts)
    side = settings.guarded if cell["guard"] == "ends" else 0.0
    return Condition(
        f"{FILE}:{NAMES[cell['scorer'], cell['split'] or 'uniform']}", float(cell["kept"]),
        capped if cell["regime"] == "decode cap" else prefill, side, side,
        reading="as_described", switches=tuple(sorted(switches.items())),
    )  # fmt: skip


def levels(rows: pd.DataFrame) -> pd.DataFrame:
    """The levels of the cells that stored rows belong to, a column per factor but the share; None for other rows."""
    switches = pd.DataFrame([json.loads(text) for text in rows.switches], rows.index)
    switches = switches.reindex(columns=["aggregate", "pool", "sinks"])
    pairs = {f"{FILE}:{name}": pair for pair, name in NAMES.items()}
    scorer, split = (rows.policy.map({policy: pair[i] for policy, pair in pairs.items()}) for i in range(2))
    capped = rows.regime == "decode cap"
    unseen = np.where(rows.until == "question", "question unseen", "question seen")
    quota = pd.Series(np.where(rows.fair.notna(), "parts", "none"), rows.index)
    table = pd.DataFrame({
        "scorer": scorer, "aggregator": switches["aggregate"], "pooling": switches["pool"],
        "guard": np.where(rows.prefix > 0, "ends", np.where(switches.sinks.notna(), "sinks", "none")),
        "split": split.where(scorer != "position"), "quota": quota.where(~capped),
        "regime": np.where(capped, "decode cap", unseen),
    }).where(scorer.notna()).astype(object)  # fmt: skip
    return table.where(table.notna(), None)


def published(policies: Sequence[str], settings: Settings) -> list[Condition]:
    """Methods as their papers describe them, with the question seen, at every share. Raises InputError for methods that
    keep one set of tokens for all layers, and for those that free nothing, as pages do."""
    for name in policies:
        if find(name).shared or not find(name).frees:
            raise InputError(f"policies {name!r}: it does not compress a prompt once; take it out of the list")
    return [Condition(name, share, Prefill(), reading="as_described") for name in policies for share in settings.kept]
