"""What can be told without reading: the measure on known scores, and what the shipped tables say."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from studies import shortcuts


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=2, max_size=20))
def test_auc_counts_pairs_and_halves_ties(drawn):
    scores, positive = np.array([s for s, _ in drawn], float), np.array([p for _, p in drawn])
    if positive.all() or not positive.any():
        return
    pairs = [(a > b) + 0.5 * (a == b) for a in scores[positive] for b in scores[~positive]]
    assert shortcuts.auc(scores, positive, ~positive) == pytest.approx(np.mean(pairs))
