"""What `studies.parity` counts, and what it found. Only the comparison with kvpress needs kvpress."""

import pandas as pd
import pytest
import torch

from kvrepro.engine.catalogue import CATALOGUE, SHARED
from kvrepro.experiment import models
from kvrepro.paths import ROOT
from studies import parity


def test_agreement_tells_ties_from_differences():
    ours = torch.tensor([[1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 0]]).bool()
    theirs = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 1], [1, 0, 1, 0]]).bool()
    scores = torch.tensor([[4.0, 3, 2, 1], [4, 1, 3, 3 + 1e-6], [4, 3, 2, 1]])
    common, tied = parity.agreement(ours, theirs, scores, joint=False)
    assert common.tolist() == [1, 0.5, 0.5]
    assert tied.tolist() == [False, True, False]
    assert not parity.agreement(ours, theirs, None, joint=False)[1].any()
    one_more = torch.tensor([[1, 1, 1, 0]]).bool()  # another number of tokens is no tie
    for joint in (False, True):
        assert not parity.agreement(ours[:1], one_more, scores[:1], joint)[1].any()


def test_agreement_over_a_layer_compares_across_heads():
    ours, theirs = torch.tensor([[1, 1], [0, 0]]).bool(), torch.tensor([[1, 0], [1, 0]]).bool()
    for other, tied in ((5.0, True), (6.0, False)):
        scores = torch.tensor([[9.0, 5.0], [other, 1.0]])
        assert parity.agreement(ours, theirs, scores, joint=True)[1].tolist() == [tied, tied]


def test_the_measured_table_agrees_on_99_percent_or_says_why():
    table = pd.read_csv(ROOT / "data" / "parity.csv", keep_default_na=False)
    beyond = {*SHARED, "random", "duo_attention"}  # named in parity's docstring
    assert {name for name, p in CATALOGUE.items() if p.as_run} - beyond <= {*table.policy}
    assert (table.note[table.equal + table.differ_by_ties < table.heads] != "").all()
    table = table[table.kvpress != ""]
    assert set(table.policy) == {pair.policy for pair in parity.PAIRS}
    assert ((table.equal + table.differ_by_ties) / table.heads >= 0.99).all()


def test_kept_sets_agree_with_kvpress_where_it_is_installed():
    pytest.importorskip("kvpress")
    pairs = [pair for pair in parity.PAIRS if pair.policy in ("snapkv", "critical_ada_kv", "pyramid_kv", "tova")]
    texts = parity.prompts(models.load(), 1)[0]
    table = parity.compare(parity.random_model(), parity.kvpress(), texts, pairs)
    assert (table.equal + table.differ_by_ties == table.heads).all()
