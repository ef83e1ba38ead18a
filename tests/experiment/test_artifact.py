"""The protection paper's rows: what their files' names say, its tables' values, items that pair."""

import os
from pathlib import Path

import pandas as pd
import pytest

from kvrepro.experiment import artifact, data
from kvrepro.experiment.store import COLUMNS
from studies import scores


@pytest.mark.parametrize(
    ("path", "policy", "capacity", "side", "model"),
    [
        ("n481/qwen25-3b/q25-c256-lru-noprot", "lru", 256, 0.0, "Qwen/Qwen2.5-3B-Instruct"),
        ("n481/qwen25-3b/q25-c256-lru-prot15", "lru", 256, 0.15, "Qwen/Qwen2.5-3B-Instruct"),
        ("confound-fix/q25-c128-lru-protected", "lru", 128, 0.1, "Qwen/Qwen2.5-3B-Instruct"),
        ("credit-v2/q25-c512-oc", "online_credit", 512, 0.1, "Qwen/Qwen2.5-3B-Instruct"),
        ("longctx/q3b-longctx-c1024-noprot", "lru", 1024, 0.0, "Qwen/Qwen2.5-3B-Instruct"),
        ("confound/q25-c2048-fullcache", "full", None, 0.0, "Qwen/Qwen2.5-3B-Instruct"),
        ("32k/q7b-32k-c32768-lru-noprot", "full", None, 0.0, "Qwen/Qwen2.5-7B-Instruct"),
        ("q3-4b-2507-robustness/q3-4b-2507-rob-c256-lru-prot-t07-s42", "lru", 256, 0.1, "Qwen/Qwen3-4B-Instruct-2507"),
        ("n481/phi4mini/phi4mini-c256-h2o-prot", "h2o_simple", 256, 0.1, "microsoft/Phi-4-mini-instruct"),
    ],
)
def test_conditions_are_read_from_file_names(path, policy, capacity, side, model):
    row = artifact.condition(path)
    assert (row["policy"], row["capacity"], row["prefix"], row["suffix"]) == (policy, capacity, side, side)
    assert row["model"] == model
    assert row["temperature"] == (0.7 if "t07" in path else 0.0)


def test_the_shipped_scores_hold_every_file_item_by_item_and_no_text():
    rows = artifact.scores()
    files = [p for p in data.sources()["artifact"]["files"] if p.startswith("results/") and p.endswith(".jsonl")]
    assert set(rows["name"]) == {p.removeprefix("results/").removesuffix(".jsonl") for p in files}
    counts = rows.groupby("name")["item"].agg(["size", "nunique"])
    assert (counts["size"] == counts["nunique"]).all()
    assert set(counts["size"]) == set(artifact.ITEMS)
    assert list(rows.columns[: len(COLUMNS)]) == COLUMNS
    assert rows[["prediction", "answer"]].isna().all(axis=None)
    assert artifact.SCORES.stat().st_size < 1_500_000
    shares = rows[["token_f1", "token_f1_longbench", "rouge_l", "rest_f1", "first_f1", "first_gold_f1"]]
    assert (shares.isna() | ((shares >= 0) & (shares <= 1))).all(axis=None)


MIRRORED = (Path(os.environ.get("KVREPRO_DATA", "/none")) / "artifact" / "results").is_dir()


needs_artifact = pytest.mark.skipif(not MIRRORED, reason="KVREPRO_DATA names no folder with the paper's results")


@needs_artifact
@pytest.mark.parametrize(
    "part",
    ["confound", "longctx", "niah", "jit", "n481/phi35/phi35-c256-adakv", "credit-v2"]
    + [pytest.param("", marks=pytest.mark.slow)],
)
def test_the_shipped_scores_are_what_the_artifact_gives(part):
    results, shipped = scores.results(part).fillna(float("nan")), artifact.scores()  # None in rows is NaN in a file
    shipped = shipped[shipped["name"].str.startswith(part)].reset_index(drop=True)
    texts = ["prediction", "answer"]
    same = {"check_dtype": False, "check_exact": False, "atol": 1e-6, "rtol": 0}
    pd.testing.assert_frame_equal(results.drop(columns=texts), shipped.drop(columns=texts), **same)


@needs_artifact
def test_the_panel_pairs_with_the_authors_rows_by_item():
    panel = {item.id: item for item in data.load_items("protection-panel")}
    assert len(panel) == 162
    rows = pd.concat([scores.results(part) for part in ("ablation", "confound", "credit", "phi35-multiarch")])
    for _, group in rows.groupby("name"):
        assert set(group["item"]) == set(panel)
    assert all(
        panel[name].answer.strip()[:500] == answer for name, answer in zip(rows["item"], rows["answer"], strict=True)
    )
    assert all(panel[name].task == task for name, task in zip(rows["item"], rows["task"], strict=True))
