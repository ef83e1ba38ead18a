import warnings

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from kvrepro.chapters.dropkv_bound import estimates
from kvrepro.chapters.dropkv_bound.study import WHERE


def test_ranks_that_do_not_vary_have_no_correlation_and_no_warning():
    """Tied scores give one rank to all keys, on a model whose head attends to none of them, for instance."""
    random = np.random.default_rng(0)
    ranks = {name: random.permutation(20) + 1.0 for name in ("andpro", "dropkv", "andpro_value", "dropkv_value")}
    varied = pd.DataFrame(ranks | {"distance": 0.5, "stratum": "near"}).assign(item="a", **dict.fromkeys(WHERE, 0))
    tied = varied.assign(item="b", andpro=10.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first, second = estimates.disagreement(pd.concat([varied, tied])).itertuples()
    assert first.rho == pytest.approx(stats.spearmanr(ranks["andpro"], ranks["dropkv"]).statistic)
    assert np.isnan(second.rho)
    assert second.rho_value == pytest.approx(first.rho_value)
