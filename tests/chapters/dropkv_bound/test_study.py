"""The bound's frames on a tiny model, and tables, intervals and verdicts on frames whose answer is known."""

import json
import re
from pathlib import Path

import checkpoint
import numpy as np
import pandas as pd
import pytest
import tiny
import torch
from scipy import stats as scipy_stats

from kvrepro.chapters.dropkv_bound import bound, members, quality, tables, triples
from kvrepro.chapters.dropkv_bound import study as runs
from kvrepro.chapters.dropkv_bound.study import Settings, Study
from kvrepro.chapters.dropkv_bound.triples import RULES, STRATA
from kvrepro.errors import InputError
from kvrepro.experiment import claims, data, models
from kvrepro.experiment.run import Settings as RunSettings

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


def test_a_prompt_with_fewer_triples_than_asked_gives_all_of_them():
    records = runs.prompt(Loaded(), tiny.prompts(60)[0], SMALL, take=50)["records"]
    assert len(tables.selected(records)) == 18 * len(STRATA) * 2


def test_only_the_parts_that_are_asked_for_are_computed():
    found = runs.prompt(Loaded(), tiny.prompts(60)[0], SMALL, take=3, parts=("assumptions",))
    assert set(found) == {"assumptions"}


def test_profiles_take_changes():
    items, settings = runs.size("quick", None, positions=None, per_cell=12)
    assert (items, settings.per_cell, settings.positions) == (12, 12, 2)
    assert runs.size("quick", 7)[0] == 7
    with pytest.raises(InputError, match="choose quick or full"):
        runs.size("slow")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"n_items": 0}, "n_items 0: a whole number, at least 1"),
        ({"k": 0}, "k 0: a whole number"),
        ({"pools": []}, "pools is \\[\\]: give a list"),
        ({"pools": 0.5}, "pools is 0.5: give a list"),
        ({"pools": [0.5, 1.5]}, "pools 1.5: a whole number, at least 1, or a number, above 0, below 1"),
        ({"pools": [0.9, 0.8, 0.7, 0.6, 0.5]}, "5 pools > 4"),
        ({"positions": 0}, "positions 0: a whole number"),
        ({"window": 0}, "window 0: a whole number"),
        ({"shares": []}, "shares is \\[\\]: give a list"),
        ({"shares": [0.1, 1.0]}, "shares 1.0: a number, above 0, below 1"),
    ],
)
def test_parameters_are_refused_before_anything_runs(given, message):
    with pytest.raises(InputError, match=message):
        runs.size("quick", **given)


# ---- prompts of a given length


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    """A random checkpoint whose tokenizer needs several times the tokens of the world's own."""
    return models.load(str(checkpoint.save(tmp_path_factory.mktemp("model") / "small", context=4096)))


def counts(loaded, items) -> list[int]:
    return [len(data.build_prompt(item, loaded.tokenizer, 10**9).ids) for item in items]


def test_the_world_s_prompts_have_the_length_asked_for_in_the_model_s_own_tokens(foreign):
    tokens = 1900
    given = (quality.RETRIEVAL, 6, tokens, Settings(pools=(0.9,)))
    found = runs.questions(foreign, *given)
    assert 0.9 * tokens < max(counts(foreign, found)) <= tokens
    own = models.load()
    assert [item.id for item in runs.questions(own, *given)] == [
        item.id for item in data.load_items(quality.RETRIEVAL, 6, tokens=tokens)
    ]


def test_lengths_that_cannot_be_had_are_left_out_and_told(foreign, capsys):
    settings = Settings(pools=(0.9, 0.5))
    found = runs.questions_by_length(foreign, quality.RETRIEVAL, 2, [300, 1900, 9000], settings)
    assert list(found) == [1900]
    told = capsys.readouterr().out
    assert "length 300 is left out: prompts of 300 tokens of small wanted" in told
    assert "length 9000 is left out: 9000 + 48 tokens > context 4096" in told
    with pytest.raises(InputError, match="context 4096"):
        runs.questions_by_length(foreign, quality.RETRIEVAL, 2, [9000], settings)
    with pytest.raises(InputError, match="lengths is"):
        runs.questions_by_length(foreign, quality.RETRIEVAL, 2, [], settings)
    with pytest.raises(InputError, match="max_new_tokens 0"):
        runs.questions(foreign, quality.RETRIEVAL, 2, 1900, settings, max_new_tokens=0)


def test_pools_that_no_query_can_fill_are_refused_before_the_run(foreign):
    with pytest.raises(InputError, match="keys before a query's window < pool of 1500"):
        runs.questions(foreign, quality.RETRIEVAL, 2, 1900, Settings(pools=(1500,)))


def test_a_passage_is_cut_and_messages_are_taken_as_they_are(foreign, tmp_path):
    passages, messages = tmp_path / "passages.jsonl", tmp_path / "messages.jsonl"
    long = "The red door is open and the fog came in. " * 200
    rows = [{"context": long, "question": f"Which door, {i}?", "answer": "red"} for i in range(2)]
    passages.write_text("".join(json.dumps(row) + "\n" for row in rows))
    turns = [[{"role": "user", "content": "Which door is open? " * (30 + i)}] for i in range(2)]
    messages.write_text("".join(json.dumps({"messages": turn, "answer": "red"}) + "\n" for turn in turns))
    few = Settings(pools=(0.9, 0.5))
    assert list(runs.questions_by_length(foreign, str(passages), 2, [300, 400], few)) == [300, 400]
    [length] = runs.questions_by_length(foreign, str(messages), 2, [300, 400], few)
    assert length == max(counts(foreign, data.load_items(str(messages), 2)))
    with pytest.raises(InputError, match=f"has {length} tokens > 100"):
        runs.questions(foreign, str(messages), 2, 100, few)


def test_the_study_s_own_length_is_not_run_again(study):
    found = runs.by_length(Loaded(), study, {60: []}, RunSettings(), tokens=60)
    first = study.assumptions[study.assumptions.pool == "lowest 90%"]
    assert len(found) == 2 * len(first)  # one position, two pools
    assert set(found.length) == {60}


# ---- intervals and correlations


def test_rank_correlation_is_spearman_s_and_ranks_infinity_last():
    rng = np.random.default_rng(1)
    x = rng.normal(size=80)
    frame = pd.DataFrame({"item": np.arange(80) // 10, "x": x, "y": x + rng.normal(size=80)})
    value, low, high = tables.rank_correlation(frame, "x", "y").triple
    assert value == pytest.approx(scipy_stats.spearmanr(frame.x, frame.y).statistic)
    assert low < value < high
    top = frame.assign(x=np.where(frame.y == frame.y.max(), np.inf, frame.y))
    assert tables.rank_correlation(top, "x", "y").value == pytest.approx(1)


def test_a_loss_that_grows_with_the_factor_is_predicted(study):
    rng = np.random.default_rng(2)
    closed = study.assumptions.assign(c_low=rng.uniform(0.1, 0.9, len(study.assumptions)))
    study = Study(closed, study.records, study.lemma, study.budgets, study.alignment, study.settings)
    first = study.assumptions[study.assumptions.pool == "lowest 90%"]
    factor = tables.with_factor(first, 10).groupby(["item", "layer"], as_index=False).factor.median()
    losses = factor.assign(loss=factor.factor.rank())[["item", "layer", "loss"]]
    found = tables.prediction(study, losses, k=10)
    assert found.rho["factor against loss, per item, layer"] == pytest.approx(1)
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
    frame = members.evaluate(study, model="tiny", profile="quick")
    assert frame.columns.tolist() == claims.COLUMNS
    wanted = {f"D{i}" for i in range(1, 8)}
    assert wanted <= set(frame.claim)
    assert set(frame.verdict) <= set(claims.VERDICTS)
    verdicts = frame.set_index("claim").verdict
    assert verdicts["D3h"] == "reproduced"  # a theorem
    assert (verdicts[["D4", "D4b", "D4c", "D4d", "D5"]] == "not testable here").all()  # no answers were generated
    assert "<caption>All</caption>" in tables.shown(claims.overview(frame), "All").to_html()
    found = tables.numbers(frame, study)
    assert all(isinstance(value, str) for value in found.values())
    assert found["violations"] == "0"
    json.dumps(found)


def test_every_glued_number_is_computed(study):
    chapter = json.loads((Path(runs.__file__).resolve().parents[3] / "notebooks/dropkv_bound.ipynb").read_text())
    text = "\n".join("".join(cell["source"]) for cell in chapter["cells"])
    wanted = set(re.findall(r"\{glue:\w+\}`([^`:]+)", text))
    frame = members.evaluate(study, model="tiny", profile="quick")
    methods = ["full", *quality.PEERS, *quality.VARIANTS]
    rows = pd.DataFrame(
        {"item": i, "method": name, "share": 1.0 if name == "full" else 0.05, "token_f1": 0.5, "length": 1900}
        for i in range(6)
        for name in methods
    )
    assert wanted <= set(tables.numbers(frame, study) | quality.numbers(rows))


def answered(full: float, dropkv: float, peer: float, task: str = "needle", tokens: int = 1900) -> pd.DataFrame:
    """Forty items with the same F1 for each method at 5% and 30%."""
    means = {"full": full, "dropkv": dropkv, "snapkv": peer, "andpro": peer / 2}
    return pd.DataFrame(
        {"item": f"i{i}", "method": name, "share": share, "token_f1": f1 + 0.0005 * i, "length": tokens, "task": task}
        | {"prompt_tokens": tokens}
        for i in range(40)
        for name, f1 in means.items()
        for share in ((1.0,) if name == "full" else (0.05, 0.3))
    )


def verdicts_of(study, answers) -> pd.DataFrame:
    return members.evaluate(study, answers, model="tiny", profile="quick").set_index("claim")


def test_a_model_that_answers_nothing_decides_nothing_about_answers(study):
    found = verdicts_of(study, answered(0.0, 0.0, 0.0)).loc[["D4b", "D4c", "D4d"]]
    assert set(found.verdict) == {"not testable here"}
    assert found.note.str.contains("the full cache itself answers too few").all()


def test_claims_about_answers_are_in_points_and_follow_them(study):
    found = verdicts_of(study, answered(0.9, 0.8, 0.5))
    assert found.ours["D4b"] == pytest.approx(30)
    assert found.verdict[["D4b", "D4c", "D4d"]].to_list() == ["reproduced", "reproduced", "not reproduced"]
    assert "100000 tokens wanted, 1900 run" in found.note["D4"]
    assert "-p items longbench" in found.note["D5"]


def test_claims_about_public_items_are_computed_where_these_were_run(study):
    long = verdicts_of(study, answered(0.9, 0.8, 0.5, tokens=131072))
    assert (long.ours["D4"], long.verdict["D4"]) == (pytest.approx(30), "reproduced")
    public = verdicts_of(study, answered(0.9, 0.4, 0.5, task="qasper"))
    assert (public.ours["D5"], public.verdict["D5"]) == (pytest.approx(-10), "not reproduced")


def test_a_share_that_was_not_run_is_told(study):
    rows = answered(0.9, 0.8, 0.5)
    found = verdicts_of(study, rows[rows.share != 0.05])
    assert found.note["D4b"] == "not run: dropkv at 5%"


def test_the_explanation_follows_the_frames(study):
    where, own = ["item", "layer", "head", "position"], study.records.copy()
    pools = study.assumptions.assign(c_low=np.where(study.assumptions["head"] % 2, 0.1, -0.1))
    odd = own["head"] % 2 == 1

    def said(ratio) -> str:
        return tables.explanation(
            Study(pools, own.assign(ratio=ratio), study.lemma, study.budgets, study.alignment, study.settings)
        )

    rng = np.random.default_rng(0).uniform(0, 0.01, len(own))
    if own.merge(pools, on=where)["head"].mod(2).nunique() == 2:
        assert "goes with near-optimality" in said(np.where(odd, 1.0, 1.5) + rng)
        assert "runs against" in said(np.where(odd, 1.5, 1.0) + rng)
    closed = Study(pools.assign(c_low=-0.1), own, study.lemma, study.budgets, study.alignment, study.settings)
    assert tables.explanation(closed).startswith("The pool of no triple has a cone")


def test_verdicts_follow_the_frames(study):
    """The same study with every cone closed, and with every ratio above the bound."""
    a = study.assumptions.assign(c_low=-0.1)
    r = study.records.assign(ratio=1.5 * study.records.bound.fillna(1e9))
    changed = Study(a, r, study.lemma, study.budgets, study.alignment, study.settings)
    verdicts = members.evaluate(changed, model="tiny", profile="quick").set_index("claim").verdict
    assert (verdicts[["D1", "D1b", "D2", "D3", "D3h"]] == "not reproduced").all()


def test_fewer_than_six_prompts_decide_nothing(study):
    few = {name: frame[frame["item"] < "prompt-5"] for name, frame in vars(study).items() if name != "settings"}
    frame = members.evaluate(Study(**few, settings=SMALL), model="tiny", profile="quick")
    exact = frame.claim.isin(["D3c", "D3h"])  # a counterexample is one in any number of prompts
    assert set(frame[(frame.topic != "kernels") & ~exact].verdict) == {"not testable here"}  # timings are not prompts


def test_a_record_above_the_bound_refutes_the_theorem_and_is_named(study):
    r = study.records.copy()
    own = tables.selected(r)
    at = own[np.isfinite(own.bound)].index[3]
    r.loc[at, "ratio"] = 2 * r.bound[at]
    row = (
        members.evaluate(Study(**(vars(study) | {"records": r})), model="tiny", profile="quick")
        .set_index("claim")
        .loc["D3h"]
    )
    assert (row.verdict, row.ours) == ("not reproduced", pytest.approx(2))
    assert f"{r['item'][at]}, layer {r.layer[at]}, head {r['head'][at]}" in row.decided_by


def test_the_shift_without_residuals_is_lemma_1_s():
    model, ids = tiny.model("llama"), tiny.prompts(30)[0]

    def visit(layer):
        for t in layer:
            evicted = torch.arange(30) % 3 == 0
            assert runs._moved(t, evicted).sqrt() == pytest.approx(bound.shift(t.p, t.v, evicted).norm().item())

    triples.triples(model, ids, [29], visit)
