"""The notebook runs from top to bottom, in another measure and on fewer tables too."""

import notebook
import pytest


@pytest.mark.parametrize(
    "given",
    [pytest.param({}, marks=pytest.mark.slow), {"measure": "rouge_l", "tables": ["11", "22"], "margin": 0.5}],
    ids=["as it stands", "other measure"],
)
def test_the_notebook_runs(given):
    assert notebook.run("reanalysis", given)
