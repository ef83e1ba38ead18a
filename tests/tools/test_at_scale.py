"""What a large sweep takes: the arithmetic, on rates that are given; and that the driver can be measured."""

import pytest

from kvrepro.tools import at_scale


def test_hours_and_limits_follow_from_the_rates():
    row = {"job": 1000.0, "result": 500.0, "stored": 100.0, "add": 1e-4, "open": 1e-6, "close": 2e-6}
    table = at_scale.table(row, seconds=0.036, efficiency=0.5).set_index("what")
    count = 10 * 4750 * 200
    assert table.loc["rows", "8 GPUs"] == count
    assert table.loc["GPU hours", "64 GPUs"] == pytest.approx(count * 0.036 / 3600, rel=0.01)
    assert table.loc["the sweep", "8 GPUs"] == pytest.approx(2 * count * 0.036 / 3600 / 8, rel=0.01)
    assert table.loc["rows that arrive", "64 GPUs"] == pytest.approx(64 * 0.5 / 0.036, rel=0.01)
    assert table.loc["share of the driver's time", "64 GPUs"] == pytest.approx(8.89, rel=0.01)
    assert table.loc["GPUs that one driver can serve", "8 GPUs"] == 720
    assert table.loc["object store, at most", "8 GPUs"] == pytest.approx(2 * 8 * 8192 * 1500 / 1e6, rel=0.01)
    assert table.loc["results on disk", "8 GPUs"] == pytest.approx(0.95)


@pytest.mark.slow
def test_the_driver_is_measured(tmp_path):
    costs = at_scale.driver(tmp_path)
    assert all(value > 0 for value in costs.values())
    assert costs["stored"] > 256  # a row's answer alone
