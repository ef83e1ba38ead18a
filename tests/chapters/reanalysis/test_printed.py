"""Printed numbers beside the same from the shipped scores: equal, or with a reason; what is not public is named."""

import pandas as pd
import pytest

from kvrepro.chapters.reanalysis import printed
from kvrepro.errors import InputError
from kvrepro.experiment import artifact, claims

SCORES = artifact.scores()
POLICIES = {"LRU": "lru", "H2O": "h2o_simple", "SnapKV": "snapkv_simple", "Random": "random_sample"}
POLICIES |= {"CreditV2": "online_credit", "Ada-KV-faithful": "ada_kv_faithful", "FullCache": "full"}


@pytest.fixture(scope="module")
def beside():
    """Every printed number beside its scores."""
    return printed.beside(SCORES, list(printed.TABLES))


def test_every_public_mean_comes_out_to_three_decimals_or_is_rounded_twice(beside):
    assert set(beside.table) == set(printed.TABLES)
    public = beside[beside.same.notna()]
    assert set(public.table) == set(printed.TABLES)
    assert not (public.why == "it differs").any()
    means = public[public.metric.str.startswith("token_f1")]
    assert len(means) > 100
    assert (means["token F1"] - means.printed).abs().max() < 0.00052
    assert (means[means.low.notna()].eval("low <= `token F1` <= high")).all()


def test_other_scores_are_noticed():
    moved = SCORES.assign(token_f1=SCORES.token_f1.where(SCORES["name"] != "n481/phi35/phi35-c256-h2o-prot", 0.5))
    differs = printed.beside(moved, ["11"]).query("why == 'it differs'")
    assert list(zip(differs.policy, differs.model, strict=True)) == [
        ("H2O", "Phi-3.5-mini-instruct"),
        ("(range over row)", "Phi-3.5-mini-instruct"),
    ]


def test_what_is_called_not_public_has_no_file_of_its_condition():
    cells = pd.concat([claims.published(file) for file in printed.TABLES.values()])
    cells = cells[(cells.metric == "token_f1") & (cells.artifact_file == "") & cells.policy.isin(POLICIES)]
    assert len(cells) > 50
    sizes = SCORES.groupby("name")["item"].transform("size")
    for cell in cells.itertuples():
        same = SCORES.model.str.lower().str.endswith(cell.model.lower()) & (sizes == int(cell.n_items))
        same &= (SCORES.policy == POLICIES[cell.policy]) & (SCORES.prefix == float(cell.protect_frac))
        if cell.policy != "FullCache":
            same &= SCORES.capacity == float(cell.capacity)
        assert not same.any(), cell


@pytest.mark.parametrize(
    ("measure", "margin", "tables", "words"),
    [
        ("f1", "a", ["3", "Z"], "measure 'f1': .* or 'rouge_l'; margin 'a': .*; tables 'Z': give some of .'3', '8', "),
        ("rouge_l", -1, [], r"margin -1: should be greater than 0; tables \[\]: give some of "),
    ],
)
def test_parameters_are_checked_all_at_once(measure, margin, tables, words):
    printed.check("rouge_l", 1, ("3",))
    with pytest.raises(InputError, match=f"^{words}"):
        printed.check(measure, margin, tables)
