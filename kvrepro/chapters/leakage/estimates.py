"""Statistics by system prompt: means, rankings of classes, Pareto-optimal settings.

A system prompt counts once and is resampled whole: its two requests, its rules and all its conditions stay together.
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cached_property, lru_cache
from itertools import product
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
from scipy.stats import rankdata

from kvrepro.chapters.leakage.cells import LAMBDAS
from kvrepro.chapters.leakage.scores import CELL
from kvrepro.experiment import stats
from kvrepro.experiment.judge import NotTestable

SETTINGS = {0.0: "default", **{x: f"debias {x:g}" for x in LAMBDAS}, 1.0: "fair"}  # of the dial -> variant
Series: TypeAlias = np.ndarray  # [1 + DRAWS]: the sample's value, then the resamples'


@lru_cache(maxsize=8)
def weights(systems: int) -> np.ndarray:
    """[1 + DRAWS, systems]: a row of ones, then for each resample how often each system was drawn."""
    drawn = np.random.default_rng(42).multinomial(systems, np.full(systems, 1 / systems), size=stats.DRAWS)
    return np.concatenate([np.ones((1, systems)), drawn])


class Means:
    """One measure in every cell of `CELL` and `more`: means over the rows of a system prompt, nan without rows. each:
    how many scored things make one mean. piled: whether values pile up at 0 and 1, as scores do and keep rates do not.
    """

    def __init__(self, rows: pd.DataFrame, measure: str, *more: str, each: float = 1, piled: bool = True) -> None:
        self.names, self.each, self.piled = [*CELL, *more], each, piled
        valued = rows.dropna(subset=measure)
        wide = valued.pivot_table(index="system", columns=self.names, values=measure) if len(valued) else pd.DataFrame()
        self.systems = len(wide)
        self.cells: dict[tuple, np.ndarray] = dict(zip(wide.columns, wide.to_numpy().T, strict=True))

    @cached_property
    def most(self) -> float:
        """The largest mean: 1, or more where a prompt of many rules counts more than others."""
        return max([1.0, *(float(np.nanmax(values)) for values in self.cells.values())])

    @property
    def bounds(self) -> tuple[float, float] | None:
        """The ends where means pile up."""
        return (0.0, self.most) if self.piled else None

    def per(self, **cell) -> np.ndarray:
        """Means of one cell, [systems]; ratio 0 is the uncompressed cache. Raises NotTestable if it was not run."""
        cell = {"order": "normal", "variant": "default"} | cell
        key = tuple(cell[name] for name in self.names)
        if key not in self.cells:
            raise NotTestable("not run: " + ", ".join(f"{name} {value}" for name, value in cell.items()))
        return self.cells[key]

    def mean(self, ratios: Iterable[float], **cell) -> np.ndarray:
        """Mean over ratios, [systems]; nan if a ratio is missing."""
        return np.mean([self.per(ratio=ratio, **cell) for ratio in ratios], 0)

    def uncompressed(self) -> float:
        """The mean without compression, the defense first."""
        start = [values for cell, values in self.cells.items() if cell[0] == "normal" and not cell[3]]
        if not start:
            raise NotTestable("nothing was answered without compression")
        return float(np.nanmean(start[0]))

    def ratios(self, whole: bool = False, **cell) -> list[float]:
        """Ratios above 0 at which a policy's curve was run; whole: for every system prompt."""
        ratios = []
        for ratio in sorted({key[3] for key in self.cells} - {0.0}):
            with suppress(NotTestable):
                if np.isfinite(self.per(ratio=ratio, **cell)).all() or not whole:
                    ratios.append(ratio)
        if not ratios:
            raise NotTestable("not run: " + ", ".join(map(str, cell.values())))
        return ratios

    def at(self, **cell) -> Series:
        """One cell's mean in the sample and in resamples of whole system prompts (nan for fewer than six prompts)."""
        values = self.per(**cell)
        finite = np.isfinite(values)
        with np.errstate(invalid="ignore"):
            series = (weights(self.systems) @ np.where(finite, values, 0)) / (weights(self.systems) @ finite)
        if finite.sum() < stats.MIN_ITEMS:
            series[1:] = np.nan
        return series


def mean_of(values: np.ndarray, axis: int) -> np.ndarray:
    """Mean of the finite values along an axis; nan where there are none."""
    finite = np.isfinite(values)
    counts = finite.sum(axis)
    return np.divide(np.where(finite, values, 0).sum(axis), counts, out=np.full(counts.shape, np.nan), where=counts > 0)


# ---- classes of rules


def rank_correlation(curve: np.ndarray, start: np.ndarray) -> np.ndarray:
    """Spearman's coefficient between two rankings of classes, over the last axis, average ranks for ties; nan where a
    ranking is constant. curve, start: [..., classes]."""
    x, y = (rankdata(values, axis=-1, nan_policy="omit") for values in (curve, start))
    x, y = x - mean_of(x, -1)[..., None], y - mean_of(y, -1)[..., None]
    size = np.sqrt(np.nansum(x**2, -1) * np.nansum(y**2, -1))
    return np.divide(np.nansum(x * y, -1), size, out=np.full(size.shape, np.nan), where=size > 1e-12)


def rank_curves(accuracy: Means, rules: str, ratios: Sequence[float], **cell) -> np.ndarray:
    """Rank correlation of the classes' accuracies with the uncompressed ones, [1 + DRAWS, ratios], in prompts with one
    rule or several. Classes that fewer than six prompts hold are left out."""
    kinds = sorted({key[-1] for key in accuracy.cells if key[-2] == rules})
    curves = np.full((1 + stats.DRAWS, 1 + len(ratios), len(kinds)), np.nan)
    for (i, ratio), (j, kind) in product(enumerate([0.0, *ratios]), enumerate(kinds)):
        key = {"order": "alone", "ratio": ratio, "rules": rules, "kind": kind} | cell
        with suppress(NotTestable):  # every prompt with this class failed there
            series = accuracy.at(**key)
            if np.isfinite(series[1:]).any():
                curves[:, i, j] = series
    return rank_correlation(curves[:, 1:], curves[:, :1])


# ---- settings of the dial


def optimal(follow: np.ndarray, leak: np.ndarray, both: bool = False) -> np.ndarray:
    """Mask of the points that no other beats, [..., points], by being better in one measure (more followed, or less
    told) and no worse in the other. both: by being better in both, as the paper words it."""
    more = follow[..., None, :] - follow[..., :, None]
    less = leak[..., :, None] - leak[..., None, :]
    if both:
        return ~((more > 1e-9) & (less > 1e-9)).any(-1)
    return ~((more > -1e-9) & (less > -1e-9) & ((more > 1e-9) | (less > 1e-9))).any(-1)


def optimality(
    answers: pd.DataFrame, policies: Sequence[str], orders: Sequence[str], *, both: bool = False, start: bool = True
) -> dict[float, Series]:
    """The share of (ratio, order, policy) cells in which each setting of the dial is Pareto-optimal. both: as in
    `optimal`. start: count ratio 0 as well, as the paper does; all settings are the same there."""
    follow, leak = Means(answers, "following"), Means(answers, "told")
    best, dials = [], set()
    for policy, order in product(policies, orders):
        curve: dict[str, Any] = {"policy": policy, "order": order}
        curves = {x: curve | {"variant": variant} for x, variant in SETTINGS.items()}
        ratios = {}
        for x, cell in curves.items():
            with suppress(NotTestable):
                ratios[x] = set(follow.ratios(**cell))
        if len(ratios) < 3:
            raise NotTestable(f"no setting between default and fair was run for {policy}")
        dials.add(tuple(ratios))
        for ratio in [0.0] * start + sorted(set.intersection(*ratios.values())):
            followed, told = (np.stack([m.at(ratio=ratio, **curves[x]) for x in ratios], -1) for m in (follow, leak))
            known = np.isfinite(followed + told).all(-1, keepdims=True)
            best.append(np.where(known, optimal(followed, told, both), np.nan))
    if len(dials) > 1:
        raise NotTestable(f"the dial has other settings under {policies[0]} than under {policies[-1]}")
    return dict(zip(dials.pop(), np.mean(best, 0).T, strict=True))
