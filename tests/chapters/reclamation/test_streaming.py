"""Wall 1: the guide's own checks, transcribed, and column sums from one extra pass against the full matrix."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrepro.chapters.reclamation import streaming


def test_the_guides_facts():
    value = streaming.wall().set_index("check").value
    assert value["online minus eager"] <= 1e-12
    assert value["online minus eager after 400"] <= 1e-12
    assert value["peak live scores"] == 512 * 32 == 512 * 512 / 16
    assert value["output of the two caches"] <= 1e-12
    assert value["running maximum of the two caches"] == 0
    assert value["denominator of the two caches"] <= 1e-12
    assert value["scores swapped"] <= 1e-12
    assert value["score gap of the swapped tokens"] > 1e-3


@settings(max_examples=25, deadline=None)
@given(queries=st.integers(1, 20), tokens=st.integers(1, 33), tile=st.integers(1, 40), seed=st.integers(0, 9))
def test_online_equals_eager_for_any_tile(queries, tokens, tile, seed):
    random = np.random.default_rng(seed)
    q, k, v = random.standard_normal((queries, 5)) * 9, *random.standard_normal((2, tokens, 5))
    np.testing.assert_allclose(streaming.online(q, k, v, tile)["output"], streaming.eager(q, k, v)[0], atol=1e-12)


@settings(max_examples=25, deadline=None)
@given(tokens=st.integers(1, 70), tile=st.integers(1, 80), seed=st.integers(0, 9))
def test_column_sums_of_the_extra_pass(tokens, tile, seed):
    q, k = torch.randn(2, 2, tokens, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 3
    scores = (q @ k.transpose(1, 2)) / 8**0.5
    scores = scores.masked_fill(torch.ones(tokens, tokens, dtype=torch.bool).triu(1), -torch.inf)
    sums = streaming.column_sums(q, k, torch.logsumexp(scores, -1), tile)
    torch.testing.assert_close(sums.double(), torch.softmax(scores, -1).sum(1), rtol=1e-4, atol=1e-5)
    assert sums.sum() == pytest.approx(2 * tokens, rel=1e-5)  # every query gives away its whole attention
