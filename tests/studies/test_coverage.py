"""The interval rule covers what it says, on a few seeded cells."""

import pytest

from studies import coverage


@pytest.mark.parametrize(
    ("quantity", "population", "n"),
    [
        ("mean", "50% zeros, 50% of the rest ones", 20),
        ("mean", "25% zeros, 100% of the rest ones", 48),
        ("difference", "50% ties, 75% of the rest wins", 48),
        ("share_of_ceiling", "50% zeros, ceiling 95%", 48),
        ("mean without bounds", "normal", 8),
        ("mean without bounds", "log-normal, sigma 0.5", 20),
    ],
)
def test_the_chosen_rule_covers(quantity, population, n):
    [share] = coverage.cover(quantity, population, n, ["chosen"], 400).coverage
    assert 0.925 <= share <= 0.985  # 93 to 97%, and what 400 repeats leave open


def test_six_items_are_covered_where_scipys_bca_interval_is_not():
    cells = coverage.cover("mean", "90% zeros, 50% of the rest ones", 6, ["chosen", "BCa"], 200)
    coverage_of = cells.set_index("rule").coverage
    assert coverage_of["chosen"] > 0.93 > 0.9 > coverage_of["BCa"]
