"""The reclamation studies: closed forms, policies that keep what they say, generation, verdicts from tables."""

from dataclasses import replace
from types import SimpleNamespace

import families
import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

import kvrepro as kv
from kvrepro.chapters.reclamation import study as r
from kvrepro.chapters.reclamation import survivors as s
from kvrepro.chapters.reclamation.study import Settings
from kvrepro.engine.catalogue import CATALOGUE
from kvrepro.engine.condition import Prefill
from kvrepro.engine.generate import generate
from kvrepro.engine.policy import own
from kvrepro.errors import InputError
from kvrepro.experiment import claims, verdict


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


def test_a_prompt_of_which_nothing_leaves_is_left_out(tmp_path):
    with pytest.raises(InputError, match="of the 2.. tokens of item .* none leaves: lower capacity, block_size"):
        r.prompts(kv.load(), "tinyworld:needle", 2, Settings(tmp_path, prompt_tokens=300, capacity=300))


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
    assert by_claim.note["R6b"] == "not run: it needs the study accepted"
    assert (frame.reading == "any").all()


def test_hole_filling_copies_a_fraction_of_what_a_repack_copies():
    rows = r.traffic([1, 16, 600], 64, 128).set_index(["every", "layout"])
    assert (rows.copies_ratio.xs("repack", level="layout") == 1).all()
    assert (rows.copies_ratio.xs("fill", level="layout")[[1, 16]] < 0.5).all()


def test_a_policy_that_raises_or_cannot_run_is_left_out_and_named(capsys):
    """A prompt too short for the budget, a policy of another regime, and one whose scorer raises."""
    broken = own("broken", replace(CATALOGUE["k_norm"], title="Broken", score=lambda o: 1 / 0))
    loaded = SimpleNamespace(model=tiny.model(), context=512, tokenizer=None)
    rows = r.arising(loaded, tiny.prompts(100)[0], [0.2], ["k_norm", "lru", "snapkv", broken], granularities=())
    errors = rows.set_index("policy").error
    assert errors[errors.notna()].index.tolist() == ["LRU", "SnapKV", "Broken"]
    whole = r._without_failed("published", rows.assign(item="a"))
    assert whole.policy.tolist() == ["K-norm"]
    assert "published: Broken is left out of 1 item, the first a: ZeroDivisionError" in capsys.readouterr().out
    with pytest.raises(InputError, match="published: none of the policies can be run: "):
        r._without_failed("published", rows[1:].assign(item="a"))


def test_bytes_of_a_token_and_tokens_beside_the_weights():
    token = 2 * 64 * 8 * 128 * 2  # keys and values, layers, KV heads, dimensions, bytes
    rows = r.memory().set_index("check").value
    assert rows["tokens in 24 x 10^9 bytes, four bits for every weight"] == (24_000_000_000 - 16_400_000_000) // token
    assert rows["tokens in 24 x 2^30 bytes"] == 24_512
    assert rows["smaller by GQA"].tolist()[0] == 32 / 8


# ---- who chooses the survivors


PAIRS = [(p, g) for p in s.POLICIES for g in (s.JOINT if p != "sinks_recency" else s.JOINT[:1])]


def keep(policy: str, granularity: str, budget: int = 40) -> np.ndarray:
    """Who stays of a prompt of 200 tokens, [layers, kv_heads, tokens]."""
    chosen = s.condition(policy, granularity, budget, Prefill())
    [[answer]] = generate(tiny.model(), tiny.prompts(200), [chosen], max_new_tokens=1, stop_ids=(), kept_sets=True)
    return np.stack(answer.kept_sets)


@pytest.mark.parametrize(("policy", "granularity"), PAIRS)
def test_a_granularity_is_who_chooses_for_itself(policy, granularity):
    kept = keep(policy, granularity)
    assert kept.sum() == 40 * 6
    assert kept[..., -1].all()
    if granularity != "joint":
        assert (kept.sum(-1) == 40).all()
    alike = {axis: bool((kept == kept.take([0], axis)).all()) for axis in (0, 1)}
    one_set = granularity == "one set"
    assert alike == {0: one_set, 1: one_set or granularity == "per layer"}
