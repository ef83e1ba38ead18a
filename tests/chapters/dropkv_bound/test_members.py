"""What claims are tested on: records and answers made for it, and timings beside the paper's; verdicts follow them."""

from types import SimpleNamespace

import few_claims
import numpy as np
import pandas as pd
import pytest
import tiny

from kvrepro.chapters.dropkv_bound import members, study
from kvrepro.chapters.dropkv_bound.members import SCORING, TORCH
from kvrepro.chapters.dropkv_bound.study import Settings
from kvrepro.experiment import claims, stats, verdict
from kvrepro.experiment.claims import KEPT, PLAIN

Tables = dict[str, pd.DataFrame]


@pytest.fixture(autouse=True)
def _few_resamples(monkeypatch):
    """Verdicts are of data made for them, far from their thresholds; how well intervals cover is asked elsewhere."""
    monkeypatch.setattr(stats, "DRAWS", 120)


@pytest.fixture(scope="module")
def tables() -> Tables:
    """Eight prompts, each the same triples with a little noise on what the claims read."""
    loaded = SimpleNamespace(model=tiny.model("llama"))
    frames = study.prompt(loaded, tiny.prompts(60)[0], 3, pools=(0.95, 24), positions=1, window=4)
    eight = [f"prompt-{i}" for i in range(8)]
    joined = {name: pd.concat([f.assign(item=item) for item in eight], ignore_index=True) for name, f in frames.items()}
    records = joined["records"]
    noise = np.random.default_rng(0).uniform(0.9, 1.1, len(records))
    return joined | {"records": records.assign(ratio=1 + (records.ratio - 1) * noise)}


def judged(**tables: pd.DataFrame) -> pd.DataFrame:
    frame = verdict.verdicts("dropkv_bound", tables, SimpleNamespace(name="tiny"), Settings())
    return frame.set_index("claim", drop=False)


def test_every_claim_has_a_verdict_and_the_columns_of_the_book(tables):
    frame = judged(**tables)
    assert frame.columns.tolist() == claims.COLUMNS
    assert frame.claim.tolist() == [claim["id"] for claim in claims.load_claims("dropkv_bound")["claims"]]
    assert set(frame.verdict) <= set(claims.VERDICTS)
    assert frame.verdict["D3h"] == "reproduced"  # a theorem
    assert (frame.verdict[["D4", "D4b", "D4c", "D4d", "D5"]] == "not testable here").all()  # no answers were generated


def answered(full: float, dropkv: float, peer: float, task: str = "needle", tokens: int = 1900) -> pd.DataFrame:
    """Forty items with the same F1 for each method at 5% and 30%."""
    means = {"full": full, "dropkv": dropkv, "snapkv": peer, "andpro": peer / 2}
    return pd.DataFrame(
        {"item": f"i{i}", "method": name, "share": share, "score": f1 + 0.0005 * i, "length": tokens, "task": task}
        | {"prompt_tokens": tokens}
        for i in range(40)
        for name, f1 in means.items()
        for share in ((1.0,) if name == "full" else (0.05, 0.3))
    )


@few_claims.only("D4", "D4b", "D4c", "D4d", "D4h", "D5")
def test_claims_about_answers_are_in_points_and_follow_them(tables):
    answers = answered(0.9, 0.8, 0.5)
    verdicts = judged(**tables, answers=answers)
    assert verdicts.ours["D4b"] == pytest.approx(30)
    assert verdicts.verdict[["D4b", "D4c", "D4d"]].to_list() == ["reproduced", "reproduced", "not reproduced"]
    assert "-p items ruler" in verdicts.note["D4"]
    assert "-p items longbench" in verdicts.note["D5"]
    assert "-p lengths" in verdicts.note["D4h"]
    ruler = judged(answers=answers.assign(task="vt"))
    assert "100000 tokens wanted, 1900 run" in ruler.note["D4"]
    shorter = answered(0.9, 0.6, 0.5, tokens=500)
    assert judged(answers=pd.concat([answers, shorter])).ours["D4h"] == pytest.approx(20)


@few_claims.only("D1", "D1b", "D2", "D3", "D3h")
def test_verdicts_follow_the_tables(tables):
    """The same tables with every cone closed, and with every ratio above the bound."""
    closed = tables["assumptions"].assign(c_low=-0.1)
    above = tables["records"].assign(ratio=1.5 * tables["records"].bound.fillna(1e9))
    verdicts = judged(**tables | {"assumptions": closed, "records": above}).verdict
    assert (verdicts[["D1", "D1b", "D2", "D3", "D3h"]] == "not reproduced").all()


# ---- timings


@pytest.fixture
def _kernels(tmp_path, monkeypatch):
    grouped, repeated = members.REFERENCES
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
    monkeypatch.setattr(members, "KERNELS", file)


@pytest.mark.usefixtures("_kernels")
def test_kernels_over_each_reference():
    f = members.speedups().query("variant == @SCORING and tokens == 131072").set_index("variant_reference")
    grouped, repeated = members.REFERENCES
    assert f.loc[repeated, ["value", "low", "high"]].tolist() == pytest.approx([15, 5, 40])
    assert f.scratch[[grouped, repeated]].tolist() == pytest.approx([0.16, 0.016])
    held = 2 * 131072 * 8 * 128 * 2 / 2**20
    peak = [(16 + held) / (100 + held), (16 + held) / (1000 + held)]
    assert f.peak[[grouped, repeated]].tolist() == pytest.approx(peak)


def test_models_by_what_was_timed(tmp_path, monkeypatch):
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
        ("decode", *mistral, KEPT, 5, 0.1, 0.05, 9.0),
        ("decode", *mistral, "5% kept", 100, 0.1, 0.1, 0.2),
        ("prefill", "Qwen", 100, PLAIN, 1, 2.0, 1.9, 2.1),
        ("prefill", "Qwen", 100, "DropKV", 1, 2.0, 2.0, 2.0),
    ]
    frame = pd.DataFrame(rows, columns=["part", "model", "tokens", "method", "batch", "seconds", "low", "high"])
    file = tmp_path / "models.csv"
    frame.assign(device="NVIDIA any", runs=6).to_csv(file, index=False)
    monkeypatch.setattr(members, "MODELS", file)
    expected = {
        ("latency", "batch 4"): (0.4, 4 * (2.0 - 2.2), 4 * (2.2 - 1.9)),
        ("first_token", "Mistral-7B, 32768"): (1.05, 2.0 / 2.1, 2.2 / 1.9),
        ("prefill_gain", "Mistral-7B, 32768"): (1.0, 4.0 / 2.2 - 1, 4.4 / 2.0 - 1),
        ("throughput", "Mistral-7B, 32768, over plain cache"): (20, 10 * 0.1 / 0.1, 10 * 0.2 / 0.1),
        ("throughput", "Mistral-7B, 32768, over everything kept"): (20, 20 * 0.5, 20),
        ("throughput_of_steps", "Mistral-7B, 32768, over plain cache"): (20, 10 * 0.1 / 0.2, 10 * 0.4 / 0.1),
    }
    timed = members.of_models().set_index(["what", "cell"])[["value", "low", "high"]]
    for where, ends in expected.items():
        assert timed.loc[where].tolist() == pytest.approx(ends)


def test_the_measured_tables_hold_every_timing():
    tidy = members.tidied({}, SimpleNamespace(), Settings())
    assert set(tidy["timings"].what) == {"first_token", "prefill_gain", "latency", "throughput", "throughput_of_steps"}
    for timed in (tidy["timings"].dropna(), tidy["speedups"]):
        assert len(timed)
        assert ((timed.low <= timed.value) & (timed.value <= timed.high)).all()
