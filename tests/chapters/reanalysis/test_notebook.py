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


@pytest.mark.parametrize("table", ["17", "A"])
def test_a_single_table_says_what_it_lacks(table):
    """Table 17 has no runs of the full cache, table A has no answers."""
    cells = notebook.run("reanalysis", {"tables": [table]})
    texts = [data.get("text/markdown", "") for _, shown in cells for data in shown]
    [meaning] = [text for text in texts if "What few pairs say" in text]
    assert "None of the chosen tables" in meaning
    assert "nan" not in meaning
