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

from kvrepro.chapters.reclamation import study as r
from kvrepro.chapters.reclamation.settings import Settings
from kvrepro.engine.catalogue import CATALOGUE
from kvrepro.engine.policy import own
from kvrepro.errors import InputError
from kvrepro.experiment import claims, verdict


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
    assert row["freed_repack"] == row["freed_fill"] == row["blocks"] - -(-union.sum() // size)
    assert row["freed_plain"] == sum(not union[a : a + size].any() for a in range(0, tokens, size))
    blocks = [union[a : a + size] for a in range(0, tokens, size) if union[a : a + size].any()]
    left = np.concatenate([*blocks, np.empty(0, bool)])  # dead blocks leave the table before anything is copied
    assert row["copies_repack"] == (np.flatnonzero(left) != np.arange(left.sum())).sum()
    assert row["copies_fill"] == left[left.sum() :].sum()
    fullest = max(int(keep[layer, head].sum()) for layer in range(layers) for head in range(heads))
    assert row["share_packed"] * row["blocks"] == pytest.approx(row["blocks"] - -(-fullest // size))
    assert row["share_packed"] >= row["share_repack"]
    assert row["share_own"] * row["blocks"] * layers * heads == pytest.approx(
        sum(row["blocks"] - -(-int(head_keep.sum()) // size) for head_keep in keep.reshape(-1, tokens))
    )


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
    tables = {"toy": r.toy(), "synthetic": r.synthetic(draws=6)}
    frame = verdict.verdicts("reclamation", tables, SimpleNamespace(name="none"), Settings())
    assert frame.claim.tolist() == [c["id"] for c in claims.load_claims("reclamation")["claims"]]
    by_claim = frame.set_index("claim")
    assert by_claim.verdict["R1"] == by_claim.verdict["R2"] == "reproduced"
    assert by_claim.verdict["R1e"] == "partly"  # even spacing holds, the lot does not
    assert by_claim.verdict["R5"] == "not testable here"
    assert by_claim.note["R6b"] == "the study 'identity' was not run"
    assert (frame.reading == "any").all()


def test_hole_filling_copies_a_fraction_of_what_a_repack_copies():
    rows = r.traffic([1, 16, 600], 64, 128).set_index(["every", "layout"])
    assert (rows.copies_ratio.xs("repack", level="layout") == 1).all()
    assert (rows.copies_ratio.xs("fill", level="layout")[[1, 16]] < 0.5).all()
    assert rows.copies_per_pass[600, "repack"].between(1, 64).all()


def test_a_policy_that_raises_is_left_out_and_named(capsys):
    rows = pd.DataFrame({"item": ["a", "a"], "policy": ["x", "y"], "shared": [None, True], "error": ["E: no", None]})
    assert r._without_failed("identity", rows).to_dict("records") == [{"item": "a", "policy": "y", "shared": True}]
    assert capsys.readouterr().out == "reclamation/identity: x is left out of 1 item, the first a: E: no\n"
