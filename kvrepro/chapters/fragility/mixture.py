"""Appendix C of DefensiveKV: an entry of the cache that is unimportant except for rare spikes."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from kvrepro.errors import InputError
from kvrepro.experiment import stats


@dataclass(frozen=True)
class Mixture:
    """Definition 2 with uniform parts: with probability `eps` importance lies in [spike, risk], else in [0, low].

    `risk` is the true risk R, the largest importance that the future can bring (definition 1).
    """

    eps: float = 0.02
    low: float = 0.1
    spike: float = 0.6
    risk: float = 1.0

    def __post_init__(self) -> None:
        if not (0 < self.eps < 1 and 0 < self.low <= self.spike < self.risk):
            raise InputError(f"{self}: needs 0 < eps < 1 and 0 < low <= spike < risk")

    def draw(self, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
        """Independent importances of an entry that follows the mixture."""
        rng = np.random.default_rng(seed)
        high, u = rng.random(shape) < self.eps, rng.random(shape)
        return np.where(high, self.spike + (self.risk - self.spike) * u, self.low * u)


def bias_of_mean(x: Mixture) -> float:
    """R - E[mean] = R - (1 - eps) mu_low - eps mu_high, whatever the window; it tends to R - mu_low as eps to 0.

    The paper calls that limit a large negative value; R - mu_low is positive. Source: theorem 1.
    """
    return x.risk - (1 - x.eps) * x.low / 2 - x.eps * (x.spike + x.risk) / 2


def bias_of_max(x: Mixture, window: int) -> float:
    """R - E[max], exactly: the integral of F^m over [0, R], with F the mixture's distribution function."""
    stay = (1 - x.eps) ** window  # chance that no past query shows the spike (proof 2)
    rise = (x.risk - x.spike) * (1 - stay * (1 - x.eps)) / (x.eps * (window + 1))
    return stay * (x.low / (window + 1) + x.spike - x.low) + rise


def theorems() -> dict[str, pd.Series]:
    """What appendix C proves, for each case of a grid of mixtures; every value must be above 0.

    theorem_1: growth of the mean's bias when spikes are half as frequent. theorem_2: the mean's bias minus that of the
    largest, for 2 to 128 past queries. limit: the mean's bias as spikes vanish, which the text calls negative.
    """
    axes = (0.001, 0.01, 0.1, 0.4), (0.05, 0.3), (0.3, 0.8), (0.9, 3.0)  # eps, low, spike, risk
    grid = [Mixture(*values) for values in itertools.product(*axes)]
    rarer = {str(x): bias_of_mean(replace(x, eps=x.eps / 2)) - bias_of_mean(x) for x in grid}
    ahead = {f"{x}, {m} queries": bias_of_mean(x) - bias_of_max(x, m) for x in grid for m in (2, 8, 32, 128)}
    limit = {str(x): x.risk - x.low / 2 for x in grid}
    return {"theorem_1": pd.Series(rarer), "theorem_2": pd.Series(ahead), "limit": pd.Series(limit)}


def survival(x: Mixture, windows: Sequence[int], heads: int = 200) -> pd.DataFrame:
    """Simulated survival of fragile entries, which the bias does not tell. Columns window, rule, value (share of
    fragile entries kept), low, high (95%).

    Of a head's 200 entries a tenth follows the mixture; each of the others has a level, uniform in [0, 0.3], and varies
    by 10% around it. The better half by mean, max and defensive aggregation is kept; ties, which the prior causes, are
    broken at random.
    """
    rng = np.random.default_rng(0)
    spiky = x.draw((heads, 20, max(windows)))
    calm = rng.uniform(0, 0.3, (heads, 180, 1)) * rng.uniform(0.9, 1.1, (heads, 180, max(windows)))
    rows = []
    for m in windows:
        seen = np.concatenate([spiky[..., :m], calm[..., :m]], 1)
        largest = seen.max(2)
        defensive = np.maximum(largest, largest.mean(1, keepdims=True))
        for rule, value in (("mean", seen.mean(2)), ("max", largest), ("defensive", defensive)):
            place = np.lexsort((rng.random(value.shape), -value), axis=1).argsort(1)
            kept = (place[:, :20] < 100).mean(1)
            rows.append((m, rule, *stats.within(stats.interval(kept), stats.UNIT).triple))
    return pd.DataFrame(rows, columns=["window", "rule", "value", "low", "high"])
