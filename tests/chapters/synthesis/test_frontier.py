"""The frontier on points whose frontier is known, and advice that is not flattered by chance."""

import numpy as np
import pandas as pd
import pytest

from kvrepro.chapters.reclamation.study import reclaim
from kvrepro.chapters.synthesis import frontier, grid, study
from kvrepro.engine.condition import Generation, Prompt


def test_the_frontier_of_a_quarter_circle_is_the_circle():
    """Points at angles on the circle, each with one that costs the same and scores less, and one dearer and equal."""
    angle = np.linspace(0.1, 1.4, 9)
    best = pd.DataFrame({"held": 1 - np.cos(angle), "value": np.sin(angle), "on": True})
    below, dearer = best.assign(value=best.value - 0.05, on=False), best.assign(held=best.held + 0.3, on=False)
    table = pd.concat([below, best, dearer]).sample(frac=1, random_state=0)
    on_frontier = frontier.frontier(table, "held")
    assert on_frontier.on.all()
    assert on_frontier.value.tolist() == pytest.approx(np.sin(angle))


def cells(scores: np.ndarray) -> pd.DataFrame:
    """Rows of the grid, [items, conditions] of scores, alike in regime and share, and a full cache that is always 1."""
    levels = dict.fromkeys(grid.FACTORS, "none") | {"aggregator": None, "regime": "question seen", "kept": 0.1}
    columns = {"kind": "grid", "method": None, "model": "m", "freed": 0.1, "held": 0.1, "task": "t"}
    rows = [
        levels | columns | {"item": f"i{i}", "scorer": f"s{j}", "score": scores[i, j]}
        for i, j in np.ndindex(scores.shape)
    ]
    full = [levels | columns | {"item": f"i{i}", "kind": "full", "score": 1.0} for i in range(len(scores))]
    return pd.DataFrame(rows + full)


def test_advice_is_scored_on_items_that_did_not_choose():
    """Of two hundred conditions of pure chance the best one's mean is far above one half; what is reported is not."""
    values = []
    for seed in range(20):
        scores = np.random.default_rng(seed).random((8, 200))
        [row] = frontier.advice(cells(scores)).itertuples()
        assert scores.mean(0).max() > 0.7
        values.append(row.value)
    assert np.mean(values) == pytest.approx(0.5, abs=0.05)


def test_advice_names_the_best_and_the_task_at_which_it_loses_most():
    scores = np.tile([0.2, 0.8, 0.5], (6, 1))
    rows = cells(scores)
    hard = rows["item"].isin(["i0", "i1"])
    rows.loc[hard, "task"] = "hard"
    rows.loc[hard & (rows.scorer == "s1"), "score"] = 0.6
    [row] = frontier.advice(rows).itertuples()
    assert row.use.startswith("s1")
    assert (row.fails_at, row.of, row.memory) == ("hard", 3, "any")
    assert row.loss == pytest.approx(0.4)
    assert row.value == pytest.approx((4 * 0.8 + 2 * 0.6) / 6)


def test_blocks_are_counted_as_in_the_chapter_on_reclamation():
    keep = np.random.default_rng(0).random((3, 2, 100)) < 0.03
    generation = Generation([], [], [], "", 0, 0, 0, 0, 0.0, 0.0, "torch", kept_sets=list(keep))
    prompt = Prompt(list(range(100)), {"evidence": [3, 4, 60]})
    measures, reclaimed = study.kept_of(None, prompt, generation, 16), reclaim(keep, 16)
    assert measures["freed"] == pytest.approx(reclaimed["share_plain"])
    assert measures["freed_compacted"] == pytest.approx(reclaimed["share_repack"])
    assert measures["held"] == pytest.approx(1 - reclaimed["evicted"])
    assert measures["evidence_heads"] == pytest.approx(keep[..., [3, 4, 60]].mean())
    assert measures["evidence_best"] == pytest.approx(keep[..., [3, 4, 60]].mean(-1).max())
