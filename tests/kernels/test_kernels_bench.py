"""The committed tables: their columns, their arithmetic, and that the book's page is theirs."""

import csv

import pytest
import torch

pytest.importorskip("triton", reason="triton is packaged for Linux only")

from kvrepro_kernels.bench import __main__, tables

TIMES = list(csv.DictReader((tables.FOLDER / "kernels.csv").open()))
TARGETS = list(csv.DictReader((tables.FOLDER / "targets.csv").open()))
CHECKS = list(csv.DictReader((tables.FOLDER / "checks.csv").open()))


def test_columns():
    assert list(TIMES[0]) == tables.COLUMNS
    assert {x["kernel"] for x in TIMES} >= {
        "window_scores", "window_attention", "column_mass", "prefill_attention", "ragged_decode", "compaction"
    }  # fmt: skip


@pytest.mark.parametrize("row", TIMES, ids=lambda x: f"{x['kernel']}-{x['variant']}-{x['tokens']}-{x['batch']}")
def test_a_row_is_consistent(row):
    low, middle, high, floor = (float(row[x]) for x in ("p20_us", "p50_us", "p80_us", "floor_us"))
    assert low <= middle <= high
    assert float(row["fraction_of_floor"]) == pytest.approx(floor / middle, rel=2e-3)
    assert row["device"]
    assert row["date"]
    if row["reference_p50_us"]:
        assert float(row["speedup"]) == pytest.approx(float(row["reference_p50_us"]) / middle, rel=2e-3)


def test_the_floor_of_one_pass_is_its_bytes():
    """Llama-3.1-8B, 131,072 tokens: 8 heads of 128 dims, keys and values, 2 bytes, at the table's copy bandwidth."""
    copy = next(x for x in TIMES if x["variant"] == "copy of 2 GiB")
    bandwidth = 2 * 2**31 / float(copy["floor_us"])  # bytes per microsecond, read and written
    row = next(x for x in TIMES if x["variant"] == "perturbation sum mean" and x["tokens"] == "131072")
    assert float(row["floor_us"]) == pytest.approx(131072 * 8 * 128 * 2 * 2 / bandwidth, rel=2e-3)


@pytest.mark.parametrize("row", TARGETS, ids=lambda x: x["target"])
def test_met_is_what_the_numbers_say(row):
    sign, wanted = row["wanted"].split()
    outcome = float(row["outcome"])
    above = outcome >= float(wanted) if sign in (">=", ">") else outcome <= float(wanted)
    assert row["met"] == ("yes" if above else "no")


def test_errors_are_those_of_the_types():
    for row in CHECKS:
        rounded = row["variant"].endswith("outputs")  # stored in the type itself; all else is float32
        limit = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 1e-2}[row["dtype"]] if rounded else 1e-4
        if row["variant"] == "perturbation sum mean, sharp":
            limit = 5e-2  # rounding of the log-sum-exp times 2 / (1 - p), which leads the norm
        assert float(row["error"]) < limit, row
        assert row["not_ties"] in ("", "0"), row


def test_the_books_page_is_made_from_the_tables():
    assert (tables.FOLDER / "kernels.md").read_text() == tables.page(tables.FOLDER)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys):
    assert __main__.main([]) == 2
    assert "torch sees none" in capsys.readouterr().err
