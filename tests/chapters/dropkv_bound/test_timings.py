"""Timings beside the paper's: members of the claims and their intervals, on tables whose answer is known."""

import pandas as pd
import pytest

from kvrepro.chapters.dropkv_bound import timings
from kvrepro.chapters.dropkv_bound.timings import PLAIN, SCORING, TORCH


@pytest.fixture
def kernels(tmp_path):
    grouped, repeated = timings.REFERENCES
    rows = [
        (SCORING, 1, 2, 4, 16.0),
        ("scores alone", 0.5, 1, 2, 0.0),
        (grouped, 10, 12, 14, 100.0),
        (repeated, 20, 30, 40, 1000.0),
    ]
    frame = pd.DataFrame(rows, columns=["variant", "p20_us", "p50_us", "p80_us", "scratch_mib"])
    frame = frame.assign(kernel="window_scores", shape=timings.SHAPE, batch=1, device="gpu", dtype="float16")
    file = tmp_path / "kernels.csv"
    pd.concat([frame.assign(tokens=tokens) for tokens in (4096, 131072)]).to_csv(file, index=False)
    return file


@pytest.fixture
def models(tmp_path):
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
    return file


def only(frame: pd.DataFrame) -> tuple:
    return pytest.approx(frame[["value", "low", "high"]].iloc[-1].tolist())


def test_the_kernel_s_members(kernels):
    assert only(timings.speedup(kernels)) == [15, 5, 40]
    assert pytest.approx(timings.scratch(kernels)[["value", "low", "high"]].iloc[0], rel=1e-3) == [
        16.777,
        16.777,
        16.777,
    ]


def test_scratch_and_peak_are_shares_of_each_references(kernels):
    assert timings.scratch_share(kernels).value.tolist() == pytest.approx([0.16, 0.016])
    held = 2 * 131072 * 8 * 128 * 2 / 2**20
    peak = timings.scratch_share(kernels, held=True).value.tolist()
    assert peak == pytest.approx([(16 + held) / (100 + held), (16 + held) / (1000 + held)])


def test_the_models_members(models):
    assert only(timings.latency(models)) == [0.4, 4 * (2.0 - 2.2), 4 * (2.2 - 1.9)]
    assert only(timings.first_token(models)) == [1.05, 2.0 / 2.1, 2.2 / 1.9]
    assert only(timings.prefill_gain(models)) == [1.0, 4.0 / 2.2 - 1, 4.4 / 2.0 - 1]
    assert only(timings.throughput(models)) == [20, 10 * 0.1 / 0.1, 10 * 0.2 / 0.1]
    assert only(timings.throughput(models, slowest=True)) == [20, 10 * 0.1 / 0.2, 10 * 0.4 / 0.1]
    assert only(timings.throughputs(models)) == [20, 20 * 0.5, 20]
    assert timings.throughputs(models).member.str.endswith(("plain cache", "everything kept")).all()


def test_every_contrast_reads_the_measured_tables():
    for compute, file, _ in timings.CONTRASTS.values():
        table = compute(file)
        assert table.columns.tolist() == ["member", "value", "low", "high", "n"]
        table = table.dropna(subset=["low"])
        assert len(table)
        assert (table.low <= table.value).all()
        assert (table.value <= table.high).all()
