"""Comparisons of the authors' rows: against printed means, by hand, and by what the harness must give."""

import numpy as np
import pytest
from scipy import stats as scipy_stats

from kvrepro.chapters.reanalysis import printed
from kvrepro.experiment import artifact, claims, stats

SCORES = artifact.scores()
ROWS = printed.panels(SCORES)
POOL = ROWS[(ROWS["items"] == "longbench-pool") & (ROWS.capacity.isna() | (ROWS.capacity == 256))]


@pytest.fixture(scope="module")
def tests():
    return printed.compare(POOL)


@pytest.mark.parametrize("model", ["Gemma-3-4B-IT", "Phi-4-mini-instruct"])
def test_differences_are_those_of_the_printed_means(tests, model):
    table = claims.published(printed.TABLES["11"]).query(
        "model == @model and protected == 'True' and metric == 'token_f1'"
    )
    f1 = table.set_index("policy").value.astype(float)
    minus_lru = tests[(tests.family == "policies") & (tests.model_name.str.lower() == model.lower())].set_index(
        "policy"
    )
    assert minus_lru.value["h2o_simple"] == pytest.approx(f1["H2O"] - f1["LRU"], abs=0.0011)
    assert minus_lru.value["snapkv_simple"] == pytest.approx(f1["SnapKV"] - f1["LRU"], abs=0.0011)
    assert np.sign(minus_lru.value["h2o_simple"]) == (1 if model.startswith("Gemma") else -1)


def test_a_comparison_by_hand(tests):
    f1 = {
        name: POOL[(POOL.model_name == "gemma-3-4b-it") & (POOL.policy == name) & (POOL.prefix == 0.1)]
        .set_index("item")
        .token_f1
        for name in ("h2o_simple", "snapkv_simple", "lru")
    }
    gap = (f1["h2o_simple"] - f1["lru"]).round(5)
    row = tests[
        (tests.model_name == "gemma-3-4b-it") & (tests.policy == "h2o_simple") & (tests.family == "policies")
    ].iloc[0]
    untied = gap[gap != 0]
    assert row.untied == len(untied)
    assert row.wilcoxon == pytest.approx(scipy_stats.wilcoxon(untied).pvalue)
    other = (f1["snapkv_simple"] - f1["lru"]).round(5)
    other = scipy_stats.wilcoxon(other[other != 0]).pvalue
    assert row.wilcoxon_holm == pytest.approx(min(1, 2 * min(row.wilcoxon, other)))  # two in its family
    assert row.tost == stats.tost(f1["h2o_simple"], f1["lru"], 0.02)


def test_no_run_is_compared_with_another_model_or_temperature():
    pairs = printed.pairs(ROWS)
    conditions = {name: artifact.condition(name) for name in SCORES["name"].unique()}
    for row in pairs.itertuples():
        [run, *_], [other, *_] = row.a, row.b
        for column in ("model", "capacity", "temperature"):
            assert conditions[run][column] == conditions[other][column]
        assert conditions[run] != conditions[other]
    hot = pairs[pairs.temperature > 0]
    assert len(hot) == 1
    assert len(hot.a.iloc[0]) == len(hot.b.iloc[0]) == 3


def test_what_was_never_evicted_is_the_full_caches_answer():
    model = "Qwen2.5-3B-Instruct"
    split = printed.by_eviction(ROWS, "ada_kv_faithful").query("model_name == @model").set_index("never")
    assert split.n.to_dict() == {True: 299, False: 182}
    assert split.value.round(3).to_dict() == {True: 0.034, False: 0.077}
    ada_kv = POOL[(POOL.model_name == model) & (POOL.policy == "ada_kv_faithful")].set_index("item")
    full = POOL[(POOL.model_name == model) & (POOL.policy == "full")].set_index("item")
    assert (ada_kv.output == full.output)[ada_kv.evicted == 0].all()
    assert not (ada_kv.output == full.output)[ada_kv.evicted > 0].all()
