"""The reclamation studies: closed forms, policies that keep what they say, generation, verdicts from tables."""

import json
import re
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import checkpoint
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
from kvrepro.engine.policy import Policy, own
from kvrepro.errors import InputError
from kvrepro.experiment import claims, models
from studies import trial


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


def test_chance_alone_follows_the_power_of_the_block_size():
    random = np.random.default_rng(0)
    for size in (1, 4, 16, 64):
        freed = np.mean([r.reclaim(random.random(16_000) < 0.1, size)["share_plain"] for _ in range(6)])
        assert freed == pytest.approx(0.9**size, abs=0.02)


@pytest.mark.parametrize(("tokens", "budget", "size"), [(16_000, 1_600, 16), (32_768, 2_048, 16), (8_000, 500, 4)])
def test_decoding_with_victims_by_lot_holds_a_harmonic_number_of_blocks(tokens, budget, size):
    keeps = [r.decoded(tokens, budget, np.random.default_rng(seed)) for seed in range(8)]
    assert {keep.sum() for keep in keeps} == {budget}
    assert all(keep[-1] for keep in keeps)
    held = np.mean([row["blocks"] - row["freed_plain"] for row in (r.reclaim(keep, size) for keep in keeps)])
    assert held == pytest.approx(budget / size * sum(1 / n for n in range(1, size + 1)), rel=0.02)  # 338, 433, 260


def test_a_ledger_that_evicts_at_every_token_holds_as_many_blocks():
    rows = r.rounds(1, "none", budget=128, tokens=6000)
    harmonic = sum(1 / n for n in range(1, 17))
    held = rows.blocks_held[1024:].mean()
    assert held == pytest.approx(120 / 16 * harmonic + 8 / 16, rel=0.04)  # the newest eight are no victims


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


def test_unknown_layouts_are_refused():
    with pytest.raises(InputError, match="layout 'compact'"):
        r.rounds(8, "compact")


def test_arising_and_occupancy_tell_the_same(loaded):
    ids = tiny.prompts(150)[0]
    rows = r.arising(loaded, ids, (0.2,), ("window",))
    blocks = r.occupancy(loaded, ids, 0.2, ("window",))
    assert rows.granularity.tolist() == list(r.GRANULARITIES)
    for row in rows.itertuples():
        blocks_of_row = blocks[blocks.granularity == row.granularity]
        assert (len(blocks_of_row), blocks_of_row.living.sum(), (blocks_of_row.living == 0).sum()) == (
            row.blocks,
            row.living,
            row.freed_plain,
        )
    assert rows.living.is_monotonic_increasing  # more heads, more survivors in the union


def test_eviction_while_decoding_meets_the_same_budget_with_other_tokens(loaded):
    ids = tiny.prompts(300)[0]
    once = r.arising(loaded, ids, (0.2,), ("window",), granularities=["per head"])
    [row] = r.arising(loaded, ids, (0.2,), ("window",), granularities=["per head"], regime=r.DECODING).itertuples()
    assert row.evicted == once.evicted[0] == 0.8
    assert row.living != once.living[0]


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


def test_policies_that_the_model_cannot_have_are_named_and_left_out(loaded, capsys):
    ids = {"a": tiny.prompts(150)[0]}
    possible = r.runnable(loaded, ids, ("snapkv", "tri_attention", "kv_zip", "quest_pages", "lru"), [48])
    assert possible == ["snapkv"]
    reasons = dict(line.split(" is left out: ") for line in capsys.readouterr().out.splitlines())
    assert list(reasons) == ["tri_attention", "kv_zip", "quest_pages", "lru"]
    assert "calibrat" in reasons["tri_attention"]
    assert "frees nothing" in reasons["quest_pages"]
    assert "one set of tokens for all layers" in reasons["lru"]
    assert r.runnable(loaded, ids, ("streaming_llm",), [0.5, 0.01]) == []
    assert "streaming_llm is left out: budget 1 < 4" in capsys.readouterr().out


def test_rounds_hold_what_arithmetic_says():
    for layout in ("repack", "fill"):
        rows = r.rounds(32, layout, budget=256, tokens=128)
        due = rows[rows.token % 32 == 0]
        assert (due.blocks_held == 16).all()
        assert rows.blocks_held.max() == 18
        assert (due.freed >= 2).all()
        assert rows.freed.sum() == 2 * 4
        assert rows.copies.sum() == due.copies.sum()
    assert due.copies.max() <= 32  # hole filling moves no more than the round's tokens


def test_a_repack_moves_what_lies_behind_the_first_victim():
    means = r.cadence([1, 16], budget=256, tokens=64, draws=6).groupby(["layout", "every"]).copies_per_pass.mean()
    assert means["repack", 1] == pytest.approx(256 / 2, rel=0.15)  # one victim by lot: half the cache on average
    assert means["repack", 16] == pytest.approx(256 * 16 / 17, rel=0.1)
    assert means["fill", 16] <= 16
    assert means["none", 16] == 0


def test_latency_compares_with_a_cache_that_evicts_alike(loaded):
    rows = r.latency(loaded, tiny.prompts(100)[0], cadences=(2, 8), budget=40)
    assert rows.groupby(["every", "layout"]).size().tolist() == [1] * 6
    assert rows.set_index("every").rounds.to_dict() == {2: 12, 8: 3}
    assert (rows[["step_ms", "pass_ms"]] > 0).all(axis=None)
    assert (rows.added.isna() == (rows.layout == "none")).all()
    assert (rows.longest_ms >= rows.token_ms).all()
    assert r.timed((2, 8)) == 25


def test_what_compaction_adds_is_read_off_rounds_side_by_side(loaded, monkeypatch):
    def rounds(*_):  # a machine that is three times slower in the second round, and a repack that costs a tenth
        return [
            {"layout": layout, "round": i, "step_ms": slow * (11 if layout == "repack" else 10), "pass_ms": 0.0}
            for i, slow in enumerate((1, 3, 1))
            for layout in r.COMPARED_LAYOUTS
        ]

    monkeypatch.setattr(r, "_rounds", rounds)
    added = r.latency(loaded, tiny.prompts(60)[0], (1,)).set_index("layout").added
    assert added[["repack", "fill"]].tolist() == pytest.approx([0.1, 0.0])


def test_a_cadence_beyond_the_tokens_decoded_is_one_pass():
    rows = r.cadence([64], budget=64, tokens=32, draws=1)
    assert (rows[rows.layout == "repack"].copies_per_pass > 0).all()


SETTINGS = {"kept": [0.2, 0.5], "capacity": 40, "max_new_tokens": 2, "cadences": [1, 4], "timed_cadences": [1, 4],
            "budget": 64, "block_size": 16, "lengths": [32], "progress": False}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"block_size": 0}, "block_size 0: "),
        ({"block_size": 64}, "item a: block_size 64 > 60 tokens that prompts share"),
        ({"cadences": [0]}, "cadences 0: "),
        ({"timed_cadences": [256]}, "item a: 100 tokens of a prompt and 513 after it exceed the model's 512"),
        ({"cadences": []}, "cadences []: "),
        ({"policies": "window"}, "policies 'window': "),
        ({"policies": []}, "policies []: "),
        ({"policies": ["snapkw"]}, "unknown policy 'snapkw'"),
        ({"policies": ["snapkv", "snapkv"]}, "policies ['snapkv', 'snapkv']: give a list of at least one, each once"),
        ({"policies": ["snapkv", "twin"]}, "two of the policies are called SnapKV"),
        ({"policies": ["lru"]}, "policies lru: this model can have none of them"),
        ({"budget": 4}, "budget 4: "),
        ({"max_new_tokens": 0}, "max_new_tokens 0: "),
        ({"kept": [2.0]}, "kept 2.0: "),
        ({"kept": [0.01]}, "item a: kept 0.01 of 100 tokens are 1, fewer than 16"),
        ({"capacity": 100}, "item a: capacity 100 >= 100 tokens of a prompt"),
        ({"shape": "GPT-2"}, "shape 'GPT-2'"),
        ({"acceptance": "all"}, "acceptance 'all'"),
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


@pytest.mark.parametrize(
    ("kinds", "most"), [(["sliding_attention"] * 2, 250), (["sliding_attention", "full_attention"], 300)]
)
def test_prompts_are_what_a_model_all_of_whose_layers_slide_can_hold(kinds, most, tmp_path, capsys):
    changes = {"use_sliding_window": True, "sliding_window": 251, "layer_types": kinds}
    loaded = models.load(str(trial.checkpoint(tmp_path / "slides", "two-layer", checkpoint.TEXTS, **changes)))
    items = tmp_path / "items.jsonl"
    items.write_text("".join(json.dumps(row) + "\n" for row in checkpoint.questions(3)))
    prompts = r.prompts(loaded, str(items), 3, Settings(tmp_path, prompt_tokens=300))
    assert 0 <= most - max(map(len, prompts.values())) < 20
    assert ("prompts of 250 tokens at most" in capsys.readouterr().out) == (most == 250)


def test_prompts_too_long_for_the_model_are_left_out_and_the_first_is_named(tmp_path, capsys):
    loaded, items = models.load(str(checkpoint.save(tmp_path / "small", context=4096))), tmp_path / "items.jsonl"
    rows = [{"id": f"{n} words", "context": "door " * n, "question": "Which?", "answer": "red"} for n in (200, 250)]
    items.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = Settings(tmp_path, capacity=8, kept=(0.5,))
    short, _ = map(len, r.prompts(loaded, str(items), 2, settings).values())
    longest = replace(settings, timed_cadences=[(loaded.context - short - 1) // 2])
    assert list(r.prompts(loaded, str(items), 2, longest)) == ["200 words"]
    first = r"1 of 2 items left out, the first because: item 250 words: \d+ tokens of a prompt and \d+ after it exceed"
    assert re.search(first, capsys.readouterr().out)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"capacity": 128, "block_size": 16}, r"capacity 128 >= \d+ tokens of a prompt"),
        ({"capacity": 8, "block_size": 16, "kept": (0.1,)}, r"kept 0\.1 of \d+ tokens are \d+, fewer than 16"),
        ({"capacity": 8, "block_size": 96, "kept": (0.5,)}, r"block_size 96 > \d+ tokens that prompts share"),
    ],
)
def test_prompts_too_short_for_a_setting_are_left_out_and_the_first_is_named(changes, why, tmp_path, capsys):
    loaded = models.load(str(checkpoint.save(tmp_path / "small", context=4096)))
    rows = [{"id": f"{n} words", "context": "door " * n, "question": "Which?", "answer": "red"} for n in (200, 5, 250)]
    items, short = tmp_path / "items.jsonl", tmp_path / "short.jsonl"
    items.write_text("".join(json.dumps(row) + "\n" for row in rows))
    short.write_text(json.dumps(rows[1]) + "\n")
    settings = Settings(tmp_path, **changes)
    assert list(r.prompts(loaded, str(items), 3, settings)) == ["200 words", "250 words"]
    first = f"reclamation: 1 of 3 items left out, the first because: item 5 words: {why}"
    assert re.match(first, capsys.readouterr().out)
    with pytest.raises(InputError, match=f"^item 5 words: {why}"):
        r.prompts(loaded, str(short), 1, settings)


def test_a_crash_loses_one_study_and_what_is_stored_is_not_computed_again(tmp_path, monkeypatch, capsys):
    loaded = models.load(str(checkpoint.save(tmp_path / "small")))
    ids = {name: tiny.prompts(100, seed=seed)[0] for seed, name in enumerate("ab")}
    ids = {name: [token % 100 + 3 for token in token_ids] for name, token_ids in ids.items()}
    monkeypatch.setattr(r, "cadence", partial(r.cadence, tokens=64, draws=1))

    def stop(loaded, item, **settings):
        raise KeyboardInterrupt

    def run(**changed) -> dict[str, int]:
        """How much of each study was computed."""
        tables = r.run(loaded, ids, Settings(tmp_path / "results", **{**SETTINGS, "acceptance": "policies", **changed}))
        assert tables["arising"]["item"].unique().tolist() == ["a", "b"]
        counts = re.findall(r"reclamation/(\w+): \d items, (\d) computed", capsys.readouterr().out)
        return {name: int(count) for name, count in counts if int(count)}

    with monkeypatch.context() as patch:
        patch.setattr(r, "identity", stop)
        with pytest.raises(KeyboardInterrupt):
            run()
    capsys.readouterr()
    assert run() == {"identity": 2, "latency": 2, "sharing": 2, "sparsity": 2, "pages": 2}
    assert run() == {}
    assert run(capacity=44) == {"identity": 2, "sharing": 2}


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


def test_a_wrong_number_is_not_reproduced():
    wrong = r.toy().assign(copies_fill=4)
    frame = members.verdicts({"toy": wrong}, "none", "quick").set_index("claim")
    assert (frame.verdict["R2b"], frame.ours["R2b"]) == ("not reproduced", 4)


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


def test_compared_rounds_and_passes_by_hand():
    rows = pd.DataFrame({"every": 1, "draw": [0, 0, 1, 1, 2, 2], "layout": ["repack", "fill"] * 3,
                         "copies_per_pass": [8.0, 1.0, 4.0, 1.0, 0.0, 0.0]})  # fmt: skip
    ratio = members._traffic(rows).copies_ratio
    assert ratio[:4].tolist() == [1.0, 0.125, 1.0, 0.25]
    assert ratio[4:].isna().all()  # a repack that moves nothing compares with nothing
    ways = pd.DataFrame({"tokens": 8, "repeat": 0, "way": ["fused attention", "eager"], "seconds": [2.0, 3.0],
                         "held_mib": [1.0, 4.0]})  # fmt: skip
    assert members._passes(ways)[["slower", "larger"]].to_numpy().tolist() == [[1.0, 1.0], [1.5, 4.0]]


def test_copy_loops_and_far_fewer_copies_are_judged_on_the_chapters_policies_as_they_decode():
    rows = pd.concat([accepted().assign(policy=name) for name in ("cumulative", "window", "redundancy")])
    rows["decode_copies"] = rows.layout.map({"repack": 40, "fill": 4}).fillna(0)
    tables = {"identity": rows, "traffic": r.cadence([16, 128, 512], budget=2048, draws=1)}

    def judged():
        return members.verdicts(tables, "none", "quick").set_index("claim").loc[["R2d", "R6e"]]

    assert judged().verdict.tolist() == ["reproduced"] * 2
    rows.loc[rows.policy == "window", "decode_copies"] = 40
    rows["share"] = rows.share.where(rows.policy != "window", rows.share - 1)
    assert judged().members.tolist() == ["5 holds, 1 fails", "2 holds, 1 fails"]


def test_each_prompt_counts_once_and_too_few_are_not_judged():
    rows = pd.DataFrame({"item": np.repeat([f"p{i}" for i in range(7)], 4), "layout": ["repack", "fill"] * 14})
    rows = rows.assign(every=1, added=np.linspace(0.2, 0.3, 28))
    for n, verdict in ((7, "reproduced"), (5, "not testable here")):
        frame = members.verdicts({"latency": rows[: 4 * n]}, "none", "quick").set_index("claim")
        assert frame.verdict["R6f"] == verdict
    assert frame.note["R6f"] == "5 items: an interval needs at least 6"


def test_the_example_is_not_testable_with_other_blocks():
    frame = members.verdicts({"synthetic": r.synthetic(block_size=1, draws=6)}, "none", "quick").set_index("claim")
    for claim in ("R1", "R1b", "R1c", "R1d", "R1e"):
        assert frame.verdict[claim] == "not testable here"
        assert "block_size 16" in frame.note[claim]


def test_what_the_guide_quotes_is_printed_in_full():
    frame = members.verdicts({}, "none", "quick").set_index("claim")
    assert frame.paper[["R5b", "R5c", "R5d", "R5e"]].tolist() == [
        "40.8, 20.0, 17.5, 32.9", "40.8 against 40.8", "2.5", "10.7",
    ]  # fmt: skip
    assert (frame.verdict == "not testable here").all()
    assert "give such a model, calibrated for TriAttention" in frame.note["R5"]


def test_published_policies_reclaim_by_their_own_sets(loaded):
    rows = r.published(loaded, tiny.prompts(96)[0], (0.25,), ("streaming_llm", "k_norm")).set_index("policy")
    assert rows.evicted.tolist() == [0.75, 0.75]
    assert rows.loc["StreamingLLM", ["living", "freed_repack"]].tolist() == [24, 4]
    assert rows.loc["K-norm", "living"] > 24  # heads disagree
    assert rows.loc["K-norm", "share_repack"] < rows.loc["K-norm", "share_own"] <= 0.75


def test_a_policy_of_ones_own_has_rows_and_verdicts_and_moves_no_others(loaded):
    own("mine", Policy("Mine", "this test", lambda o: o.attention.mean((2, 3)), {"window": 8, "recent": "window"}))
    ids = {name: tiny.prompts(150, seed=seed)[0] for seed, name in enumerate("abcdef")}
    both, kept = ("window", "mine"), (0.1, 0.5)
    parts = [r.arising(loaded, token_ids, kept, both).assign(item=name) for name, token_ids in ids.items()]
    decoding = [
        r.arising(loaded, token_ids, kept[:1], both, granularities=["per head"], regime=r.DECODING).assign(item=name)
        for name, token_ids in ids.items()
    ]
    tables = {"arising": pd.concat(parts), "decoding": pd.concat(decoding)}
    tables |= {"identity": r.identity(loaded, ids["a"], 48, (), ("snapkv", "mine"))}
    own_rows = tables["arising"][tables["arising"].policy == "Mine"]
    assert own_rows.groupby("granularity").size().to_dict() == dict.fromkeys(r.GRANULARITIES, 12)
    assert (
        own_rows.groupby("item").living.first() < own_rows.groupby("item").living.max()
    ).all()  # one set before many
    assert set(tables["identity"].policy) == {"SnapKV", "Mine"}
    frame = members.verdicts(tables, "tiny", "quick", both).set_index("claim")
    book = len(claims.load_claims("reclamation")["claims"])
    without = {name: t[t.policy != "Mine"] for name, t in tables.items()}
    others = members.verdicts(without, "tiny", "quick").set_index("claim")
    pd.testing.assert_frame_equal(others, frame[:book])
    assert frame.index[book:].tolist() == [f"{name} Mine" for name in ("R1f", "R1g", "R2e", "R6", "R6b")]
    assert frame.verdict[["R6 Mine", "R6b Mine"]].tolist() == ["reproduced"] * 2
    assert frame.n["R1f Mine"] == 6
    assert frame.members["R1g Mine"].count(",") <= 2
    assert frame.decided_by["R1g Mine"].startswith("Mine, ")
    assert "2 not testable" not in frame.members["R1f Mine"]


def test_a_policy_of_ones_own_that_cannot_be_had_is_refused(loaded):
    own("greedy", Policy("Greedy", "this test", lambda o: o.keys.norm(dim=-1), {"recent": 60}))
    with pytest.raises(InputError, match="budget 48 < 60 protected tokens"):
        r.runnable(loaded, {"a": tiny.prompts(150)[0]}, ["greedy"], [48])


def test_a_policy_of_ones_own_that_raises_is_refused_by_name_before_anything_is_computed(loaded):
    def score(o):
        if o.keys.shape[2] > 140:
            raise RuntimeError("too long for me")
        return o.keys.norm(dim=-1)

    own("short_only", Policy("Short only", "this test", score))
    prompts = {"a": tiny.prompts(120)[0], "b": tiny.prompts(150)[0]}
    with pytest.raises(InputError, match="short_only raised RuntimeError: too long for me: mend it, or leave it out"):
        r.runnable(loaded, prompts, ["short_only"], [48])


def test_a_policy_that_raises_on_one_item_costs_its_own_rows_of_that_item_alone(tmp_path, monkeypatch, capsys):
    def score(o):
        if o.keys.shape[2] == 110:
            raise RuntimeError("not this one")
        return o.keys.float().norm(dim=-1)

    own("picky", Policy("Picky", "this test", score))
    monkeypatch.setattr(r, "cadence", partial(r.cadence, tokens=64, draws=1))
    loaded = models.load(str(checkpoint.save(tmp_path / "small")))
    lengths = {"a": 100, "b": 110, "c": 120}
    ids = {name: [token % 100 + 3 for token in tiny.prompts(n)[0]] for name, n in lengths.items()}
    settings = Settings(tmp_path, **{**SETTINGS, "acceptance": "policies", "policies": ("window", "k_norm", "picky")})
    tables = r.run(loaded, ids, settings)
    printed = capsys.readouterr().out
    for name in ("arising", "published", "identity"):
        of_item = tables[name].groupby("item").policy.agg(set)
        assert "Picky" in of_item["a"]
        assert of_item.to_dict() == {"a": of_item["a"], "b": of_item["a"] - {"Picky"}, "c": of_item["a"]}
        assert "error" not in tables[name]
        assert f"reclamation/{name}: Picky is left out of 1 item, the first b: RuntimeError: not this" in printed
