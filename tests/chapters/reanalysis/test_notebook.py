"""The notebook runs from top to bottom, in another measure and on fewer tables too."""

import pytest

from kvrepro.tools import book


@pytest.mark.parametrize(
    "given",
    [pytest.param({}, marks=pytest.mark.slow), {"measure": "rouge_l", "tables": ["11", "22"], "margin": 0.5}],
    ids=["as it stands", "other measure"],
)
def test_the_notebook_runs(given):
    sources = list(book.cells("reanalysis", given))
    assert any("wording.findings(" in source for source in sources)
    assert not any("models.load(" in source for source in sources)


@pytest.mark.parametrize("table", ["17", "A"])
def test_a_single_table_says_what_it_lacks(table):
    """Table 17 has no runs of the full cache, table A has no answers."""
    shown = []
    list(book.cells("reanalysis", {"tables": [table]}, display=lambda *things, **options: shown.extend(things)))
    [meaning] = [thing.data for thing in shown if "What few pairs say" in (getattr(thing, "data", None) or "")]
    assert "None of the chosen tables" in meaning
    assert "nan" not in meaning
