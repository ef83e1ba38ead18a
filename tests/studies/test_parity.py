"""What `studies.parity` counts, and what it found. Only the comparison with kvpress needs kvpress."""

import sys

import pandas as pd
import pytest
import torch

from kvrepro.engine.catalogue import CATALOGUE, SHARED
from kvrepro.experiment import models
from kvrepro.paths import ROOT
from kvrepro.tools import command
from studies import calibrate, parity, parity_code


def test_without_kvpress_it_refuses_in_one_line(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "kvpress", None)
    with pytest.raises(SystemExit, match="2"):
        command.run(parity.main, arguments=[])
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "kvpress cannot be imported" in error
    assert "kvrepro[parity]" in error


def test_every_pair_is_a_policy_with_its_switches():
    for pair in (*parity.PAIRS, *parity_code.CODES):
        CATALOGUE[pair.policy].reading("as_run", pair.switches)


def test_what_is_not_compared_is_named_with_its_reason():
    page = (ROOT / "book" / "methods.md").read_text()
    for press in ("KVzipPress", "DuoAttentionPress", "RandomPress"):
        assert press in parity.__doc__
        assert press in page


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


def test_codes_tell_keys_apart_to_the_last_bit():
    keys = torch.randn(2, 50, 8)
    other = keys.clone()
    other[0, 3, 5] = torch.nextafter(keys[0, 3, 5], torch.tensor(9.0))
    a, b = parity._codes(keys), parity._codes(other)
    assert (a != b).sum() == 1
    assert a.unique().numel() == 100


def test_prompts_are_whole_quarters_within_the_models_reach():
    randoms, texts = parity.prompts(models.load(), 2)
    for text in randoms + texts:
        assert len(text) % 4 == 0
        assert len(text) // 4 >= 2 * 64
    assert randoms == parity.prompts(models.load(), 2)[0]


ROUNDED = ("dropkv", "k_norm", "r_kv")  # in which the last bit of a sum may choose another token


def measured():
    """Rows of kvpress, and of public codes."""
    table = pd.read_csv(ROOT / "data" / "parity.csv", keep_default_na=False)
    return table[table.kvpress != ""], table[table.kvpress == ""]


def test_the_measured_table_agrees_on_99_percent_or_says_why():
    table, _ = measured()
    assert set(table.policy) == {pair.policy for pair in parity.PAIRS}
    assert (table.groupby(["policy", "switches", "share_kept", "kvpress"]).prompts.sum() == 100).all()
    assert (table.note[table.equal / table.heads < 0.99] != "").all()
    assert ((table.equal + table.differ_by_ties) / table.heads >= 0.99).all()


def test_every_policy_as_run_has_its_row_and_every_head_is_equal_or_the_row_says_why():
    table, codes = measured()
    beyond = {*SHARED, "random", "duo_attention"}  # named in parity's docstring
    assert {name for name, p in CATALOGUE.items() if p.as_run} - beyond <= {*table.policy, *codes.policy}
    models = {"small-gqa", *(f"random, group {group}" for group in parity.GROUPS)}
    wanted = {(p.policy, p.source, share, m) for p in parity_code.CODES for share in parity.SHARES for m in models}
    assert set(zip(codes.policy, codes.press, codes.share_kept, codes.model, strict=True)) == wanted
    differ = codes[codes.equal + codes.differ_by_ties < codes.heads]
    assert set(differ.policy) <= {"cake", *ROUNDED}
    assert (differ.note != "").all()
    assert (differ.least_in_common > 0.96).all()  # one or two tokens of a head
    assert (codes.equal / codes.heads)[codes.policy != "cake"].min() >= 0.85


@pytest.mark.parametrize("group", parity.GROUPS)
def test_policies_as_run_keep_what_the_public_codes_keep(group, tmp_path):
    model = parity.random_model(group)
    ids = torch.randint(3, 1000, (528,), generator=torch.Generator().manual_seed(group)).tolist()
    calibrate.write(calibrate.calibrate(model, [ids]), tmp_path / "queries.json")
    table = parity.compare_codes(model, [ids], tmp_path / "queries.json")
    alike = table[~table.policy.isin(["cake", *ROUNDED])]
    assert (alike.equal + alike.differ_by_ties == alike.heads).all()
    assert (table.equal / table.heads)[table.policy != "cake"].min() >= 0.75
    assert (table.least_in_common > 0.98).all()  # one or two tokens of a head
    without = [parity_code.CodePair(p.policy, p.code, p.source, (("mass", 0.0),)) for p in parity_code.CODES[:2]]
    other = parity.compare_codes(model, [ids], tmp_path / "queries.json", without)
    assert (other.equal < other.heads).any()


def test_kept_sets_agree_with_kvpress_where_it_is_installed():
    pytest.importorskip("kvpress")
    pairs = [pair for pair in parity.PAIRS if pair.policy in ("snapkv", "critical_ada_kv", "pyramid_kv", "tova")]
    texts = parity.prompts(models.load(), 1)[0]
    table = parity.compare(parity.random_model(), parity.kvpress(), texts, pairs)
    assert (table.equal + table.differ_by_ties == table.heads).all()
