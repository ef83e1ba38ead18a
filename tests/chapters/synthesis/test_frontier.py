"""The frontier on points whose frontier is known, and what a condition holds and frees."""

import numpy as np
import pandas as pd
import pytest

from kvrepro.chapters.reclamation.study import reclaim
from kvrepro.chapters.synthesis import frontier, study
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


def test_blocks_are_counted_as_in_the_chapter_on_reclamation():
    keep = np.random.default_rng(0).random((3, 2, 100)) < 0.03
    generation = Generation([], [], [], "", 0, 0, 0, 0, 0.0, 0.0, "torch", kept_sets=list(keep))
    prompt = Prompt(list(range(100)), {"evidence": [3, 4, 60]})
    measures, reclaimed = study.kept_of(None, prompt, generation, 16), reclaim(keep, 16)
    assert measures["freed"] == pytest.approx(reclaimed["share_plain"])
    assert measures["freed_compacted"] == pytest.approx(reclaimed["share_repack"])
    assert measures["held"] == pytest.approx(1 - reclaimed["evicted"])
    assert measures["evidence_heads"] == pytest.approx(keep[..., [3, 4, 60]].mean())
