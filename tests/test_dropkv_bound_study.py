"""The bound's frames on a tiny model, and tables, intervals and verdicts on frames whose answer is known."""

import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import tiny
import torch
from scipy import stats as scipy_stats

from kvrepro import claims
from kvrepro.dropkv_bound import bound, quality, tables, triples
from kvrepro.dropkv_bound import study as runs
from kvrepro.dropkv_bound.study import Settings, Study
from kvrepro.dropkv_bound.triples import RULES, STRATA
from kvrepro.errors import InputError

SMALL = Settings(pools=(0.9, 24), positions=1, ks=(10, 18), per_cell=6, shares=(0.2, 0.5), window=4, kernel=3, steps=3)


class Loaded:
    def __init__(self):
        self.model = tiny.model("llama")


@pytest.fixture(scope="module")
def frames() -> dict[str, pd.DataFrame]:
    return runs.prompt(Loaded(), tiny.prompts(60)[0], SMALL, take=3)


@pytest.fixture(scope="module")
def study(frames) -> Study:
    """Eight prompts, each the same triples with a little noise on what the claims read."""
    rng = np.random.default_rng(0)
    parts: dict[str, list] = {name: [] for name in frames}
    for i in range(8):
        for name, frame in frames.items():
            parts[name].append(frame.assign(item=f"prompt-{i}", task="any"))
    found = {name: pd.concat(frames, ignore_index=True) for name, frames in parts.items()}
    records = found["records"]
    found["records"] = records.assign(ratio=1 + (records.ratio - 1) * rng.uniform(0.9, 1.1, len(records)))
    return Study(**found, settings=SMALL)


def test_one_prompt_gives_every_frame(frames):
    a, r = frames["assumptions"], frames["records"]
    assert len(a) == 3 * 6 * 2  # layers, heads, pools
    assert set(a.pool) == {"lowest 90%", "24 lowest"}
    assert set(a[a.pool == "24 lowest"].pool_size) == {24}
    assert (a.c_low <= a.c_high + 1e-9).all()
    assert (a.eps * (a.tokens - a.pool_size + 1) <= 1).all()  # all keys outside the pool weigh at least as much
    rules = 5 + len(RULES) + 2  # one query: 5; the window: all; pooled: 2
    assert len(r) == 3 * 2 * rules * (len(STRATA) + 2 + len(STRATA))  # ours add two strata for one of two objectives
    assert (r.ratio > 1 - 1e-9).all()  # nothing beats the optimum
    own = tables.selected(r)
    assert len(own) == 3 * len(STRATA) * 2
    assert (own.ratio <= own.bound * (1 + 1e-9)).all()  # theorem 1 on a real model's triples
    assert frames["lemma"][["single", "joint"]].to_numpy().max() < 1e-11
    assert set(frames["budgets"].allocation) == {"uniform", "adaptive"}


def test_both_allocations_spend_the_same_and_more_budget_harms_less(frames):
    b = frames["budgets"]
    evicted = b.groupby(["layer", "share", "pooling", "bf16"]).evicted.nunique()
    assert (evicted == 1).all()
    assert set(b.evicted) == {2 * (60 - 12), 2 * (60 - 30)}
    mean = b.groupby("share").error.mean()
    assert mean[0.5] < mean[0.2]


def test_a_guarantee_without_enumeration_is_never_below_one(frames):
    """Theorem 2 bounds a ratio to an optimum, which is at least 1."""
    assert (frames["assumptions"].guarantee >= 1 - 1e-9).all()


def test_too_few_triples_are_refused():
    with pytest.raises(InputError, match="19 triples asked of a prompt that has 18"):
        runs.prompt(Loaded(), tiny.prompts(60)[0], SMALL, take=19)


def test_profiles_take_changes():
    items, settings = runs.size("quick", None, positions=None, per_cell=12)
    assert (items, settings.per_cell, settings.positions) == (12, 12, 2)
    assert runs.size("quick", 7)[0] == 7
    with pytest.raises(InputError, match="choose quick or full"):
        runs.size("slow")


# ---- intervals and correlations


def test_the_interval_draws_whole_prompts():
    """Twelve prompts of 50 equal values each: the interval is as wide as for twelve values, not for six hundred."""
    means = np.linspace(0, 1, 12)
    frame = pd.DataFrame({"item": np.repeat(np.arange(12), 50), "x": np.repeat(means, 50)})
    value, low, high, n = tables.interval(frame, ["x"], np.mean)
    assert (value, n) == (pytest.approx(0.5), 12)
    half = 1.96 * means.std() / np.sqrt(12)
    assert low == pytest.approx(0.5 - half, abs=0.04)
    assert high == pytest.approx(0.5 + half, abs=0.04)
    few = tables.interval(frame[frame["item"] < 5], ["x"], np.mean)
    assert np.isnan(few[1])
    assert few[3] == 5


def test_rank_correlation_is_spearman_s_and_ranks_infinity_last():
    rng = np.random.default_rng(1)
    x = rng.normal(size=80)
    frame = pd.DataFrame({"item": np.arange(80) // 10, "x": x, "y": x + rng.normal(size=80)})
    value, low, high, _ = tables.rank_correlation(frame, "x", "y")
    assert value == pytest.approx(scipy_stats.spearmanr(frame.x, frame.y).statistic)
    assert low < value < high
    top = frame.assign(x=np.where(frame.y == frame.y.max(), np.inf, frame.y))
    assert tables.rank_correlation(top, "x", "y")[0] == pytest.approx(1)


def test_a_loss_that_grows_with_the_factor_is_predicted(study):
    rng = np.random.default_rng(2)
    closed = study.assumptions.assign(c_low=rng.uniform(0.1, 0.9, len(study.assumptions)))
    study = Study(closed, study.records, study.lemma, study.budgets, study.alignment, study.settings)
    first = study.assumptions[study.assumptions.pool == "lowest 90%"]
    factor = tables.with_factor(first, 10).groupby(["item", "layer"], as_index=False).factor.median()
    losses = factor.assign(loss=factor.factor.rank())[["item", "layer", "loss"]]
    found = tables.prediction(study, losses, k=10)
    assert found.rho["factor against loss, per item and layer"] == pytest.approx(1)
    with pytest.raises(InputError, match="give loss and item"):
        tables.prediction(study, losses.drop(columns="loss"))


# ---- tables and verdicts


def test_tables_stand_beside_the_printed_numbers(study):
    eps = tables.eps_table(study)
    assert eps["paper, 128K", "Llama"]["median"] == "3.1e-6"
    assert eps["here", "24 lowest"]["triples"] == "144"
    cone = tables.cone_table(study)
    assert cone["paper, 128K", "Qwen"]["max"] == "0.845"
    share = tables.threshold_table(study)
    low = study.assumptions[study.assumptions.pool == "lowest 90%"].c_low
    assert float(share["here", "lowest 90%"]["tau = 0.10"]) == pytest.approx(100 * (low > 0.1).mean(), rel=0.01)
    assert tables.factor_table(study)["paper, 128K", "Mistral"]["p95"] == "115"
    ratio = tables.ratio_table(study)
    assert ratio.loc[("k = 10", "near-threshold")]["paper", "DropKV", "p50"] == "1.140 to 1.160"
    assert len(ratio) == 8
    assert tables.robust_table(study).shape[1] == 2


def test_peers_and_prevalence_have_intervals(study):
    peers = tables.peers(study)
    assert peers.ratio.is_monotonic_increasing
    assert set(peers[peers.queries == 4].rule) == set(RULES)
    assert (peers.low <= peers.ratio).all()
    layers = tables.prevalence(study)
    assert len(layers) == 3 * 2
    assert layers.share.between(0, 1).all()


def test_every_claim_has_a_verdict_and_the_columns_of_the_book(study):
    frame = tables.evaluate(study, model="tiny", profile="quick", draws=200)
    assert frame.columns[:12].tolist() == claims.COLUMNS
    wanted = {f"D{i}" for i in range(1, 8)}
    assert wanted <= set(frame.claim)
    assert set(frame.verdict) <= set(claims.VERDICTS)
    verdicts = frame.set_index("claim").verdict
    assert verdicts["D3h"] == "reproduced"  # a theorem
    assert (verdicts[["D4", "D5", "D7"]] == "not testable here").all()
    assert (verdicts[["D4b", "D4c", "D4d"]] == "not testable here").all()  # no answers were generated
    found = tables.numbers(frame, study)
    assert all(isinstance(value, str) for value in found.values())
    assert found["violations"] == "0"
    json.dumps(found)


def test_every_glued_number_is_computed(study):
    chapter = json.loads((Path(runs.__file__).resolve().parents[2] / "notebooks/dropkv_bound.ipynb").read_text())
    text = "\n".join("".join(cell["source"]) for cell in chapter["cells"])
    wanted = set(re.findall(r"\{glue:\w+\}`([^`:]+)", text))
    frame = tables.evaluate(study, model="tiny", profile="quick", draws=50)
    methods = ["full", *quality.PEERS, *quality.VARIANTS]
    rows = pd.DataFrame(
        {"item": i, "method": name, "share": 1.0 if name == "full" else 0.05, "token_f1": 0.5, "length": 1900}
        for i in range(6)
        for name in methods
    )
    assert wanted <= set(tables.numbers(frame, study) | quality.numbers(rows))


def test_verdicts_follow_the_frames(study):
    """The same study with every cone closed, and with every ratio above the bound."""
    a = study.assumptions.assign(c_low=-0.1)
    r = study.records.assign(ratio=1.5 * study.records.bound.fillna(1e9))
    changed = Study(a, r, study.lemma, study.budgets, study.alignment, study.settings)
    verdicts = tables.evaluate(changed, model="tiny", profile="quick", draws=200).set_index("claim").verdict
    assert (verdicts[["D1", "D1b", "D2", "D3", "D3h"]] == "not reproduced").all()


def test_speed_ups_come_from_the_timings(tmp_path):
    file = tmp_path / "kernels.csv"
    rows = [("perturbation sum mean", 1, 2, 4), ("slow", 20, 30, 40), ("other", 1, 1, 1)]
    frame = pd.DataFrame(rows, columns=["variant", "p20_us", "p50_us", "p80_us"])
    frame = frame.assign(
        kernel="window_scores", shape="32/8/128", tokens=131072, batch=1, device="gpu", dtype="float16"
    )
    frame.to_csv(file, index=False)
    found = tables.gpu_speedup(["slow"], file=file).iloc[0]
    assert (found.value, found.low, found.high) == (15, 5, 40)
    assert tables.gpu_speedup(["slow"], file=tmp_path / "none.csv").empty
    named = frame.replace("slow", "plain torch, repeated heads").replace("other", "plain torch, grouped, lse given")
    named.to_csv(file, index=False)
    table = tables.kernel_table(file)
    assert table["speed-up over torch, repeated heads"].item() == 15
    assert table["paper's speed-up (A100)"].item() == 19.8


def test_fewer_than_six_prompts_decide_nothing(study):
    few = {name: frame[frame["item"] < "prompt-5"] for name, frame in vars(study).items() if name != "settings"}
    frame = tables.evaluate(Study(**few, settings=SMALL), model="tiny", profile="quick", draws=200)
    assert set(frame[frame.claim != "D6"].verdict) == {"not testable here"}  # D6 counts timings, not prompts


def test_the_shift_without_residuals_is_lemma_1_s():
    model, ids = tiny.model("llama"), tiny.prompts(30)[0]

    def visit(layer):
        for t in layer:
            evicted = torch.arange(30) % 3 == 0
            assert runs._moved(t, evicted).sqrt() == pytest.approx(bound.shift(t.p, t.v, evicted).norm().item())

    triples.triples(model, ids, [29], visit)
