"""Generation from compacted caches and a shared prefix under compaction, each with a control that must fail."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import tiny

from kvrepro.chapters.reclamation import acceptance
from kvrepro.chapters.reclamation.study import Settings
from kvrepro.chapters.reclamation.survivors import JOINT
from kvrepro.experiment import verdict

LOADED = SimpleNamespace(model=tiny.model(), context=512, tokenizer=None)


def judged(**tables) -> pd.DataFrame:
    return verdict.verdicts("reclamation", tables, SimpleNamespace(name="none"), Settings()).set_index("claim")


def test_generation_is_identical_under_every_layout_and_the_control_is_not():
    ids, catalogue = tiny.prompts(180)[0], ("snapkv", "ada_kv", "layer_defensive_kv")
    rows = acceptance.identity(LOADED, ids, 48, ("cumulative", "window"), catalogue=catalogue, new_tokens=8, every=4)
    real = rows[rows.layout.isin(["none", "repack", "fill"])]
    assert (real.identical == 1).all()
    assert real.logit_gap.max() < 1e-4
    assert (real[real.layout != "none"].as_predicted == 1).all()
    assert (real.shared_slots_touched == 0).all()
    assert (rows[rows.layout == "storage positions"].logit_gap > 1e-2).all()
    assert len(rows) == 2 * 4 * 5 + 2 + 3 * 5  # every granularity, the controls, the catalogue
    one_set = rows[(rows.granularity == "one set") & ~rows.shared].set_index(["policy", "layout"])
    for policy in ("cumulative", "window"):
        assert one_set.slot_copies[policy, "repack"] > one_set.slot_copies[policy, "fill"]
        assert 0 < one_set.share[policy, "repack"] <= 2
        copied = 2 * one_set.decode_copies[policy, "repack"] / (2 * 4 * 48)  # two later passes, four tokens each
        assert one_set.share[policy, "repack"] == pytest.approx(copied)
    assert rows[rows.source == "catalogue"].share.isna().all()  # compressed once
    who = real.drop_duplicates(["source", "policy", "granularity"])
    assert who[who.source == "chapter"].granularity.tolist() == list(JOINT) * 2
    assert who.policy[8:].tolist() == ["SnapKV", "Ada-KV", "Layer-DefensiveKV"]
    assert who.granularity[8:].tolist() == ["uniform", "per head", "joint"]


def accepted() -> pd.DataFrame:
    """Seven prompts, each uncompacted, compacted in four ways and without a position map."""
    layouts = ["none", "repack", "fill", "repack", "fill", "storage positions"]
    rows = pd.DataFrame({"item": np.repeat([f"p{i}" for i in range(7)], 6), "layout": layouts * 7})
    rows = rows.assign(
        shared=[False, False, False, True, True, False] * 7,
        slot_copies=5 * (rows.layout != "none"),
        decode_copies=5,
        share=np.linspace(1.2, 1.3, 42),
        source="chapter",
        policy="window",
        granularity="per head",
        identical=1.0,
        shared_slots_touched=0,
    )
    return rows.assign(as_predicted=1.0 * (rows.layout != "none"))


def compared(rows: pd.DataFrame) -> pd.DataFrame:
    return pd.concat([acceptance.compared(of_item) for _, of_item in rows.groupby("item")])


def test_one_counterexample_refutes_an_identity_and_is_named():
    rows = accepted()
    frame = judged(identity=compared(rows))
    assert frame.verdict[["R6", "R6b"]].tolist() == ["reproduced"] * 2
    assert frame.n["R6"] == 14
    rows.loc[(rows["item"] == "p3") & (rows.layout == "repack"), "as_predicted"] = 0.5
    frame = judged(identity=compared(rows))
    assert (frame.verdict["R6"], frame.members["R6"]) == ("not reproduced", "1 holds, 1 fails")
    assert frame.decided_by["R6"].startswith("repack: 2 of 14 cases, worst at p3")


def test_a_case_that_no_broken_cache_would_fail_counts_for_nothing():
    rows = accepted()
    rows.loc[rows["item"] == "p1", "slot_copies"] = 0  # nothing moved
    rows.loc[(rows["item"] == "p2") & (rows.layout == "none"), "as_predicted"] = 1.0  # nothing was pinned
    frame = judged(identity=compared(rows))
    assert frame.n[["R6", "R6b"]].tolist() == [12, 6]
    assert frame.members["R6g"].startswith("1 open, 1 fails")  # one of seven prompts in one control, all in the other
    rows.loc[rows.layout == "storage positions", "identical"] = 0.0
    assert compared(rows).noticed_tokens[rows.layout == "storage positions"].eq(1).all()


def test_a_prefix_outlives_compactions_and_the_control_breaks_it():
    rows = acceptance.sharing(LOADED, tiny.prompts(180)[0], budget=48, new_tokens=4).assign(item="a")
    sound, broken = rows[rows.layout != acceptance.IGNORED], rows[rows.layout == acceptance.IGNORED].iloc[0]
    assert (sound.slot_copies > 0).all()
    assert (sound[["hits", "logit_gap"]] == [1.0, 0.0]).all(axis=None)
    assert broken.hits < 1
    assert broken.logit_gap > 1e-2
    assert (judged(sharing=rows).verdict[["R6c", "R6h", "R6i"]] == "reproduced").all()
    assert judged(sharing=rows.assign(hits=0.9)).verdict["R6c"] == "not reproduced"
