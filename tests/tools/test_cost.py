import pandas as pd
import pytest

from kvrepro.tools import cost
from studies import trial


def test_hours_follow_the_line_through_two_sizes():
    measured = pd.DataFrame(
        {"n_items": [4, 1], "seconds": [90.0, 60.0], "in_studies": [0, 0]}
    )  # 50 to begin, 10 an item
    for profile in ("quick", "full"):
        expected = (50 + 10 * cost.ITEMS["protection"][profile]) / 3600
        assert cost.hours(measured, "protection", profile) == pytest.approx(expected)
    less = pd.DataFrame({"n_items": [1, 2], "seconds": [90.0, 60.0], "in_studies": [80, 50]})  # beside other work
    assert cost.hours(less, "leakage", "quick") == pytest.approx((10 + 25 * cost.ITEMS["leakage"]["quick"]) / 3600)
    assert cost.hours(less[1:], "leakage", "quick") == cost.hours(less, "leakage", "quick")  # one size alone


def test_a_chapter_that_failed_has_no_cost(tmp_path):
    path = tmp_path / "chapters.csv"
    row = {
        "shape": "a",
        "device": "H",
        "chapter": "leakage",
        "n_items": 2,
        "seconds": 9.0,
        "in_studies": 4,
        "peak_gib": 3.5,
        "date": "d",
        "note": "alone",
        "results": 5,
        "prefill": None,
        "decode": None,
    }
    rows = [row | {"failed": 0, "error": None}, row | {"shape": "b", "failed": 1, "error": None},
            row | {"shape": "c", "failed": 0, "error": "not done"}]  # fmt: skip
    pd.DataFrame(rows).to_csv(path, index=False)
    assert cost.table(path)["model's shape"].tolist() == ["a"]
    [measured] = cost.table(path).to_dict("records")
    assert [measured[name] for name in ("rows", "failed", "s an item", "prefill", "decode")] == [5, 0, 4.5, "-", "-"]
    assert cost.overview(path)["model's shape"].tolist() == ["a"]
    assert [line.split(", ")[1] for line in cost.failures(path).splitlines()] == ["shape of b", "shape of c"]


def test_an_upper_bound_is_marked_and_a_line_through_two_sizes_is_not(tmp_path):
    row = {"shape": "a", "device": "H", "n_items": 1, "seconds": 3700.0, "in_studies": 3600.0, "peak_gib": 3.5,
           "failed": 0, "error": None, "note": "alone", "date": "2026-11-26", "results": 5, "prefill": 370.0,
           "decode": 1850.0}  # fmt: skip
    rows = [row | {"chapter": "leakage", "date": "2026-11-22"}, row | {"chapter": "protection"},
            row | {"chapter": "protection", "n_items": 2, "seconds": 3710.0, "peak_gib": 9.6}]  # fmt: skip
    pd.DataFrame(rows).to_csv(path := tmp_path / "chapters.csv", index=False)
    [row] = cost.overview(path).to_dict("records")
    assert row["leakage"].startswith("≤ ")
    expected = [(3690 + 10 * cost.ITEMS["protection"][profile]) / 3600 for profile in ("quick", "full")]
    assert row["protection"] == "{:.2g} / {:.2g}".format(*expected)
    assert (row["fragility"], row["peak GiB"], row["measured from"]) == ("-", 10, "2026-11-22")


def test_every_chapter_of_the_trial_has_its_items():
    assert set(cost.ITEMS) == set(trial.CHAPTERS)
    assert all(sizes["quick"] <= sizes["full"] for sizes in cost.ITEMS.values())


def test_targets_say_whether_they_were_reached(tmp_path):
    path = tmp_path / "real.csv"
    row = {"what": "a", "shape": "s", "unit": "s", "before": 9.0, "now": 2.0, "target": 3.0, "floor": None,
           "date": "d", "device": "H", "note": "n"}  # fmt: skip
    pd.DataFrame([row, row | {"now": 4.0}, row | {"target": None}]).to_csv(path, index=False)
    assert cost.targets(path).reached.tolist() == ["yes", "no", "no target"]
    [axes] = cost.bars(path).axes
    assert len(axes.containers) == 3


def test_the_floors_are_told_of_the_longest_inputs_and_of_our_kernels_alone(tmp_path):
    rows = [
        ("ours", "one pass", 32768, 0.8), ("ours", "one pass", 4096, 0.1), ("ours", "torch two passes", 32768, 0.99),
        ("other", "one pass", 131072, 0.5), ("ceiling", "copy", 32768, 1.0),
    ]  # fmt: skip
    table = pd.DataFrame(rows, columns=["kernel", "variant", "tokens", "fraction_of_floor"])
    table.assign(device="GPU 1", shape="s", batch=1).to_csv(file := tmp_path / "kernels.csv", index=False)
    assert "reaches from 50% (`other`) to 80% (`ours`) of its floor (GPU 1)." in cost.floors_sentence(file)
    [axes] = cost.floors(file).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["ours", "other"]
    assert len(cost.longest(file)) == 3  # the longest input of each variant


def test_the_dots_of_a_kernel_are_of_one_batch(tmp_path):
    rows = [("one pass", batch, batch / 10) for batch in (8, 1)] + [("torch", batch, batch / 10) for batch in (1, 8)]
    table = pd.DataFrame(rows, columns=["variant", "batch", "fraction_of_floor"])
    table.assign(kernel="k", shape="s", tokens=32768).to_csv(file := tmp_path / "kernels.csv", index=False)
    assert cost.longest(file).fraction_of_floor.tolist() == [0.8, 0.8]
