"""Timings beside the paper's: members of the claims and their intervals, on tables whose answer is known."""

import math

import pandas as pd
import pytest

from kvrepro.chapters.dropkv_bound import timings
from kvrepro.chapters.dropkv_bound.timings import PLAIN, SCORING, TORCH


@pytest.fixture
def _kernels(tmp_path, monkeypatch):
    grouped, repeated = timings.REFERENCES
    rows = [
        (SCORING, 1, 2, 4, 16.0),
        ("scores alone", 0.5, 1, 2, 0.0),
        (grouped, 10, 12, 14, 100.0),
        (repeated, 20, 30, 40, 1000.0),
    ]
    frame = pd.DataFrame(rows, columns=["variant", "p20_us", "p50_us", "p80_us", "scratch_mib"])
    frame = frame.assign(kernel="window_scores", shape="32/8/128", batch=1, device="gpu", dtype="float16")
    file = tmp_path / "kernels.csv"
    pd.concat([frame.assign(tokens=tokens) for tokens in (4096, 131072)]).to_csv(file, index=False)
    monkeypatch.setattr(timings, "KERNELS", file)


@pytest.fixture
def _models(tmp_path, monkeypatch):
    mistral = ("Mistral-7B", 32768)
    rows = [
        ("prefill", *mistral, PLAIN, 1, 2.0, 1.9, 2.1),
        ("prefill", *mistral, "SnapKV", 1, 2.0, 1.9, 2.2),
        ("prefill", *mistral, "DropKV", 1, 2.1, 2.0, 2.2),
        ("prefill", *mistral, TORCH, 1, 4.2, 4.0, 4.4),
        ("answer", *mistral, PLAIN, 4, 40.0, 40.0, 40.0),
        ("answer", *mistral, "SnapKV", 4, 20.0, 20.0, 20.0),
        ("answer", *mistral, "DropKV", 4, 20.4, 20.4, 20.4),
        ("decode", *mistral, PLAIN, 1, 0.1, 0.1, 0.1),
        ("decode", *mistral, PLAIN, 10, 0.2, 0.1, 0.4),
        ("decode", *mistral, timings.KEPT, 5, 0.1, 0.05, 9.0),
        ("decode", *mistral, "5% kept", 100, 0.1, 0.1, 0.2),
        ("prefill", "Qwen", 100, PLAIN, 1, 2.0, 1.9, 2.1),
        ("prefill", "Qwen", 100, "DropKV", 1, 2.0, 2.0, 2.0),
    ]
    frame = pd.DataFrame(rows, columns=["part", "model", "tokens", "method", "batch", "seconds", "low", "high"])
    file = tmp_path / "models.csv"
    frame.assign(device="NVIDIA any", runs=6).to_csv(file, index=False)
    monkeypatch.setattr(timings, "MODELS", file)


def ends(measured, label: str) -> tuple:
    return pytest.approx((measured[label].value, measured[label].low, measured[label].high))


@pytest.mark.usefixtures("_kernels")
def test_the_kernel_s_members():
    assert ends(timings.speedup(), list(timings.REFERENCES)[1]) == (15, 5, 40)
    assert timings.scratch()["all"].value == pytest.approx(16.777, rel=1e-3)


@pytest.mark.usefixtures("_kernels")
def test_scratch_and_peak_are_shares_of_each_references():
    assert [m.value for m in timings.scratch_share().values()] == pytest.approx([0.16, 0.016])
    held = 2 * 131072 * 8 * 128 * 2 / 2**20
    peak = [m.value for m in timings.scratch_share(held=True).values()]
    assert peak == pytest.approx([(16 + held) / (100 + held), (16 + held) / (1000 + held)])


@pytest.mark.usefixtures("_models")
def test_the_models_members():
    assert ends(timings.latency(), "batch 4") == (0.4, 4 * (2.0 - 2.2), 4 * (2.2 - 1.9))
    assert ends(timings.first_token(), "Mistral-7B, 32768") == (1.05, 2.0 / 2.1, 2.2 / 1.9)
    assert ends(timings.prefill_gain(), "Mistral-7B, 32768") == (1.0, 4.0 / 2.2 - 1, 4.4 / 2.0 - 1)
    plain = "Mistral-7B, 32768, over plain cache"
    assert ends(timings.throughput(), plain) == (20, 10 * 0.1 / 0.1, 10 * 0.2 / 0.1)
    assert ends(timings.throughput(), "Mistral-7B, 32768, over everything kept") == (20, 20 * 0.5, 20)
    assert ends(timings.throughput(slowest=True), plain) == (20, 10 * 0.1 / 0.2, 10 * 0.4 / 0.1)


def test_every_contrast_reads_the_measured_tables():
    for compute, _ in timings.CONTRASTS.values():
        measured = [m for m in compute().values() if not math.isnan(m.low)]
        assert measured
        assert all(m.low <= m.value <= m.high for m in measured)
