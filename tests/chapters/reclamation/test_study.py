"""The reclamation studies: closed forms, policies that keep what they say, generation, verdicts from tables."""

import re
from types import SimpleNamespace

import families
import numpy as np
import pandas as pd
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrepro.chapters.reclamation import members
from kvrepro.chapters.reclamation import study as r
from kvrepro.chapters.reclamation.settings import Settings
from kvrepro.engine.catalogue import CATALOGUE
from kvrepro.engine.policy import own
from kvrepro.errors import InputError
from kvrepro.experiment import claims


@pytest.fixture(scope="module")
def loaded():
    model = tiny.model()
    return SimpleNamespace(model=model, context=512, tokenizer=None)


def test_the_guides_numbers_are_rows():
    rows = r.synthetic(draws=1).set_index("pattern")
    assert rows.loc["every 10th", ["freed_plain", "freed_repack", "freed_fill"]].tolist() == [0, 900, 900]
    assert rows.loc["one aligned block evicted", "freed_plain"] == 1
    assert rows.loc["one per block", ["freed_plain", "evicted"]].tolist() == [0, 0.9375]
    [toy] = r.toy().to_dict("records")
    assert [toy[c] for c in ("copies_repack", "copies_fill", "freed_repack", "freed_fill")] == [18, 3, 1, 1]


@pytest.mark.parametrize(("tokens", "budget", "size"), [(16_000, 1_600, 16), (32_768, 2_048, 16), (8_000, 500, 4)])
def test_decoding_with_victims_by_lot_holds_a_harmonic_number_of_blocks(tokens, budget, size):
    keeps = [r.decoded(tokens, budget, np.random.default_rng(seed)) for seed in range(8)]
    assert {keep.sum() for keep in keeps} == {budget}
    assert all(keep[-1] for keep in keeps)
    held = np.mean([row["blocks"] - row["freed_plain"] for row in (r.reclaim(keep, size) for keep in keeps)])
    assert held == pytest.approx(budget / size * sum(1 / n for n in range(1, size + 1)), rel=0.02)  # 338, 433, 260


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_reclaim_obeys_its_arithmetic(data):
    layers, heads = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    tokens, size = data.draw(st.integers(1, 80)), data.draw(st.integers(1, 17))
    keep = np.random.default_rng(data.draw(st.integers(0, 99))).random((layers, heads, tokens)) < data.draw(
        st.floats(0, 1)
    )
    row, union = r.reclaim(keep, size), keep.any((0, 1))
    assert row["freed_repack"] == row["freed_fill"] == row["freed_emptiest"] == row["blocks"] - -(-union.sum() // size)
    assert row["freed_plain"] == sum(not union[a : a + size].any() for a in range(0, tokens, size))
    blocks = [union[a : a + size] for a in range(0, tokens, size) if union[a : a + size].any()]
    left = np.concatenate([*blocks, np.empty(0, bool)])  # dead blocks leave the table before anything is copied
    assert row["copies_repack"] == (np.flatnonzero(left) != np.arange(left.sum())).sum()
    assert row["copies_fill"] == left[left.sum() :].sum()
    fullest = max(int(keep[layer, head].sum()) for layer in range(layers) for head in range(heads))
    assert row["freed_packed"] == row["blocks"] - -(-fullest // size) >= row["freed_repack"]
    assert row["share_own"] * row["blocks"] * layers * heads == pytest.approx(
        sum(row["blocks"] - -(-int(head_keep.sum()) // size) for head_keep in keep.reshape(-1, tokens))
    )


@pytest.mark.parametrize("together", [1, 3])
def test_generation_is_identical_under_every_layout_and_the_control_is_not(loaded, monkeypatch, together):
    monkeypatch.setitem(r.TOGETHER, "cpu", together)
    ids, catalogue = tiny.prompts(180)[0], ("snapkv", "ada_kv", "layer_defensive_kv")
    rows = r.identity(loaded, ids, 48, ("cumulative", "window"), catalogue=catalogue, new_tokens=8, every=4)
    real = rows[rows.layout.isin(["none", "repack", "fill"])]
    assert (real.identical == 1).all()
    assert real.logit_gap.max() < 1e-4
    assert (real[real.layout != "none"].as_predicted == 1).all()
    assert (real.shared_slots_touched == 0).all()
    assert rows.prefix_intact.all()
    assert (rows[rows.layout == "storage positions"].logit_gap > 1e-2).all()
    assert len(rows) == 2 * 4 * 5 + 2 + 3 * 5  # every granularity, the controls, the catalogue
    one_set = rows[(rows.granularity == "one set") & ~rows.shared].set_index(["policy", "layout"])
    for policy in ("cumulative", "window"):
        assert one_set.blocks_freed[policy, "repack"] > one_set.blocks_freed[policy, "none"]
        assert one_set.slot_copies[policy, "repack"] > one_set.slot_copies[policy, "fill"]
        assert 0 < one_set.share[policy, "repack"] <= 2
        copied = 2 * one_set.decode_copies[policy, "repack"] / (2 * 4 * 48)  # two later passes, four tokens each
        assert one_set.share[policy, "repack"] == pytest.approx(copied)
    assert rows[rows.source == "catalogue"].share.isna().all()  # compressed once
    who = real.drop_duplicates(["source", "policy", "granularity"])
    assert who[who.source == "chapter"].granularity.tolist() == list(r.JOINT) * 2
    assert dict(zip(who.policy[8:], who.granularity[8:], strict=True)) == {
        "SnapKV": "uniform", "Ada-KV": "per head", "Layer-DefensiveKV": "joint"
    }  # fmt: skip


SETTINGS = {"kept": [0.2, 0.5], "capacity": 40, "max_new_tokens": 2, "cadences": [1, 4], "timed_cadences": [1, 4],
            "budget": 64, "block_size": 16, "lengths": [32], "progress": False}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"block_size": 0}, "block_size 0: "),
        ({"block_size": 64}, "item a: block_size 64 > 60 tokens that prompts share"),
        ({"timed_cadences": [256]}, "item a: 100 tokens of a prompt and 513 after it exceed the model's 512"),
        ({"cadences": []}, "cadences []: "),
        ({"policies": ["snapkv", "snapkv"]}, "policies ['snapkv', 'snapkv']: give a list of at least one, each once"),
        ({"policies": ["snapkv", "twin"]}, "two of the policies are called SnapKV"),
        ({"policies": ["lru"]}, "policies lru: this model can have none of them"),
        ({"kept": [0.01]}, "item a: kept 0.01 of 100 tokens are 1, fewer than 16"),
        ({"capacity": 100}, "item a: capacity 100 >= 100 tokens of a prompt"),
    ],
)
def test_settings_are_refused_before_anything_is_computed(loaded, changed, message, tmp_path):
    own("twin", CATALOGUE["snapkv"])

    def run():
        settings = Settings(tmp_path, **{**SETTINGS, "acceptance": "policies", **changed})
        r.run(loaded, dict(zip("ab", tiny.prompts(100, 120), strict=True)), settings)

    with pytest.raises(InputError, match=re.escape(message)) as refused:
        run()
    assert "\n" not in str(refused.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("family", ["LFM2", "Qwen3.5"])
def test_models_with_layers_that_hold_no_keys_are_refused_before_anything_is_computed(family, tmp_path):
    hybrid = SimpleNamespace(model=families.build(family), context=512, tokenizer=None)
    with pytest.raises(InputError, match="hold no tokens to evict: use an attention-only model"):
        r.run(hybrid, {"a": tiny.prompts(200)[0]}, Settings(tmp_path / "results"))
    assert not (tmp_path / "results").exists()


def test_every_claim_has_a_row_and_a_missing_study_is_said():
    frame = members.verdicts({"toy": r.toy(), "synthetic": r.synthetic(draws=6)}, "none", "quick")
    assert frame.claim.tolist() == [c["id"] for c in claims.load_claims("reclamation")["claims"]]
    assert {c.rstrip("bcdefghi") for c in frame.claim} == {f"R{i}" for i in range(1, 9)}
    by_claim = frame.set_index("claim")
    assert by_claim.verdict["R1"] == by_claim.verdict["R2"] == "reproduced"
    assert by_claim.verdict["R1e"] == "partly"  # even spacing holds, the lot does not
    assert by_claim.verdict["R5"] == "not testable here"
    assert by_claim.note["R6b"] == "the study 'identity' was not run"
    assert (frame.reading == "any").all()


def test_one_counterexample_refutes_an_identity_and_is_named():
    rows = accepted()
    frame = members.verdicts({"identity": rows}, "none", "quick").set_index("claim")
    assert frame.verdict[["R6", "R6b"]].tolist() == ["reproduced"] * 2
    assert frame.n["R6"] == 14
    rows.loc[(rows["item"] == "p3") & (rows.layout == "repack"), "as_predicted"] = 0.5
    frame = members.verdicts({"identity": rows}, "none", "quick").set_index("claim")
    assert (frame.verdict["R6"], frame.members["R6"]) == ("not reproduced", "1 holds, 1 fails")
    assert frame.decided_by["R6"].startswith("repack: 2 of 14 cases, worst at item p3")


def accepted() -> pd.DataFrame:
    """Seven prompts, each uncompacted, compacted in four ways and without a position map."""
    layouts = ["none", "repack", "fill", "repack", "fill", "storage positions"]
    rows = pd.DataFrame({"item": np.repeat([f"p{i}" for i in range(7)], 6), "layout": layouts * 7})
    rows = rows.assign(
        shared=[False, False, False, True, True, False] * 7,
        slot_copies=5,
        decode_copies=5,
        share=np.linspace(1.2, 1.3, 42),
        source="chapter",
        policy="window",
        granularity="per head",
        identical=1.0,
        shared_slots_touched=0,
    )
    rows = rows.assign(as_predicted=1.0 * (rows.layout != "none"))
    rows.loc[rows.layout == "none", "slot_copies"] = 0
    return rows


def test_a_case_that_no_broken_cache_would_fail_counts_for_nothing():
    rows = accepted()
    rows.loc[rows["item"] == "p1", "slot_copies"] = 0  # nothing moved
    rows.loc[(rows["item"] == "p2") & (rows.layout == "none"), "as_predicted"] = 1.0  # nothing was pinned
    frame = members.verdicts({"identity": rows}, "none", "quick").set_index("claim")
    assert frame.n[["R6", "R6b"]].tolist() == [12, 6]
    assert frame.members["R6g"].startswith("1 open, 1 fails")  # one of seven prompts in one control, all in the other
    rows.loc[rows.layout == "storage positions", "identical"] = 0.0
    noticed = members.members({"study": "identity", "column": "noticed_tokens"}, {"identity": members._identity(rows)})
    assert noticed[0].what.data.a[rows.layout == "storage positions"].eq(1).all()
