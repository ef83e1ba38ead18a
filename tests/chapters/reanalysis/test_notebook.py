"""The notebook runs from top to bottom, in another measure and on fewer tables too."""

import pytest

from kvrepro.tools import book


@pytest.mark.parametrize(
    "given",
    [pytest.param({}, marks=pytest.mark.slow), {"measure": "rouge_l", "tables": ["11", "22"], "margin": 0.05}],
    ids=["as it stands", "other measure"],
)
def test_the_notebook_runs(given):
    shown = []
    sources = list(book.cells("reanalysis", given, display=shown.append))
    assert any("wording.findings(" in source for source in sources)
    assert not any("models.load(" in source for source in sources)
