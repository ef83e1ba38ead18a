"""Data where the answer is known: they stand where they shall, and are as many as asked for."""

import math

import numpy as np
import pandas as pd
import pytest

from kvrepro.experiment.judge import Drawn, Sample
from studies import known_truth

RNG = np.random.default_rng(0)
F1 = pd.DataFrame({"a": RNG.choice([0.0, 0.33, 1.0], 48), "b": RNG.choice([0.0, 0.5, 1.0], 48, p=[0.6, 0.2, 0.2])})
F1 = F1.assign(full=np.maximum(F1.a, RNG.choice([0.5, 1.0], 48)), x=F1.a, y=F1.b)
CLUSTERS = np.repeat(np.arange(12), 5)
LONG = pd.DataFrame({"x": np.exp(RNG.normal(size=12)[CLUSTERS] + RNG.normal(size=60))})


def speed(values: np.ndarray) -> float:
    """Of tokens: base over variant, as medians."""
    return float(np.median(values[:, 1]) / np.median(values[:, 0]) - 1)


def value_of(sample) -> float:
    """Without the interval of a statistic, which takes thousands of resamples."""
    if isinstance(sample, Drawn):
        return sample.value
    statistic = getattr(sample, "contrast", None)
    return statistic(sample.data.to_numpy()) if callable(statistic) else sample.estimate().value


@pytest.mark.parametrize(
    ("what", "target"),
    [
        (Sample(F1[["a"]]), 0.9),
        (Sample(F1[["a"]], each=4), 0.1),
        (Sample(F1[["a", "b"]], "difference"), 0.9),  # so much that both conditions have to move
        (Sample(F1[["a", "b"]], "difference"), -0.05),
        (Sample(F1[["a", "full"]], "share_of_ceiling"), 0.3),
        (Sample(F1[["a", "full"]], "loss"), 0.02),
        (Sample(F1[["x", "y", "full"]], "difference_of_ceiling"), 0.1),
        (Sample(F1[["a", "b"]], "difference", bounds=None), 0.2),
        (Sample(F1[["a", "full"]], "share_of_ceiling", bounds=None), 2.0),
        (Sample(LONG, lambda v: float(np.median(v)), CLUSTERS, bounds=None), 3.0),
        (Sample(LONG, lambda v: float(np.quantile(v, 0.95) / np.median(v)), CLUSTERS, bounds=None), 4.0),
        (Sample(F1[["a", "b"]] + 1, speed, bounds=None), 0.6),
        (Sample(pd.DataFrame({"a": F1.a, "b": F1.b[:20]}), "unpaired"), -0.4),
        (Drawn(0.3, RNG.normal(0.3, 0.1, 500), 12), 0.0),
    ],
)
def test_new_data_stand_where_they_shall_and_within_their_bounds(what, target):
    source, rng = known_truth.source(what), np.random.default_rng(1)
    bounded = isinstance(what, Sample) and what.bounds is not None and what.contrast != "unpaired"
    drawn = [source.drawn(target, rng, {}) for _ in range(150 if bounded else 60)]
    values = [value_of(sample) for sample in drawn[:60]]
    error = np.std(values) / math.sqrt(len(values))
    assert abs(np.mean(values) - target) < 4 * error + 0.1 * (not isinstance(getattr(what, "contrast", ""), str))
    if bounded:
        assert all(sample.data.to_numpy().min() >= 0 and sample.data.to_numpy().max() <= 1 for sample in drawn)
        assert all(sample.data.shape == what.data.shape for sample in drawn)
