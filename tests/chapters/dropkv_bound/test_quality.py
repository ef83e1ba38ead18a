"""Answers under DropKV and its peers: conditions, pairs on frames with known means, and one layer's loss."""

import numpy as np
import pandas as pd
import pytest

from kvrepro.chapters.dropkv_bound import quality
from kvrepro.chapters.dropkv_bound.settings import Settings
from kvrepro.engine.policy import check
from kvrepro.experiment.judge import NotTestable


def rows(n: int = 8) -> pd.DataFrame:
    """F1 by construction: full 1, dropkv share-dependent, snapkv always 0.1 below it."""
    means = {"full": {1.0: 1.0}, "dropkv": {0.05: 0.6, 0.3: 0.95}, "snapkv": {0.05: 0.5, 0.3: 0.85}}
    return pd.DataFrame(
        {"item": f"i{i}", "method": method, "share": share, "score": f1 - 0.02 * (i % 2), "length": 1900}
        for i in range(n)
        for method, f1_by_share in means.items()
        for share, f1 in f1_by_share.items()
    )


def test_every_condition_can_be_met_and_carries_the_paper_s_settings():
    grid = quality.grid(Settings(shares=(0.05, 0.3)))
    assert set(grid) == {"full", "dropkv", *quality.PEERS, quality.POOLED}
    for conditions in grid.values():
        for condition in conditions:
            check(condition, 1900)
    assert len(grid["snapkv"]) == 2
    assert dict(grid["snapkv"][0].switches) == {"window": 8, "kernel": 11}
    assert grid["streaming_llm"][0].switches == ()


def test_differences_and_leads_are_paired():
    both = quality.pair(rows(), "snapkv", 0.05)
    assert len(both) == 8
    assert np.allclose(both.a - both.b, 0.1)
    with pytest.raises(NotTestable, match="not run: cake at 5%"):
        quality.pair(rows(), "cake", 0.05)
