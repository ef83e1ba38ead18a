"""Shares of variance on made-up tables whose effects are known, and effects beside those of a mixed model; the frontier
on points whose frontier is known."""

import itertools

import numpy as np
import pandas as pd
import pytest
from statsmodels.regression.mixed_linear_model import MixedLM

from kvrepro.chapters.synthesis import analysis

LEVELS = {"a": "pqr", "b": "xy", "c": "klmn"}
A, B = {"p": -0.3, "q": 0.0, "r": 0.3}, {"x": -0.1, "y": 0.1}


def table(items: int = 12, noise: float = 0.2, seed: int = 0, both: float = 0.0) -> pd.DataFrame:
    """Score = 0.3 (a) + 0.1 (b) + both x (a x b) + the item + noise; c does nothing."""
    random = np.random.default_rng(seed)
    rows = []
    for i in range(items):
        item_effect = random.normal(0, 0.15)
        for a, b, c in itertools.product(*LEVELS.values()):
            score = A[a] + B[b] + both * np.sign(A[a] * B[b]) + item_effect + random.normal(0, noise)
            rows.append({"item": f"i{i}", "a": a, "b": b, "c": c, "score": score})
    return pd.DataFrame(rows)


def parts(rows: pd.DataFrame, draws: int = 200):
    conditions, scores = analysis.wide(rows, list(LEVELS), "score")
    d = analysis.design(conditions)
    return analysis.shares(d, scores, draws).set_index("term"), d, conditions, scores


def test_shares_are_those_of_the_effects_without_bias():
    """A mean over tables: 0.06 of a, 0.01 of b, 0.0225 of items, 0.04 of noise; c and all interactions nothing."""
    values = pd.concat([parts(table(8, seed=seed), 2)[0].value for seed in range(60)], axis=1).mean(axis=1)
    total = 0.06 + 0.01 + 0.0225 + 0.04
    assert values["a"] == pytest.approx(0.06 / total, abs=0.02)
    assert values["b"] == pytest.approx(0.01 / total, abs=0.01)
    assert values["item"] == pytest.approx(0.0225 / total, abs=0.03)
    for nothing in ("c", "a x b", "a x c", "b x c", analysis.BEYOND):
        assert abs(values[nothing]) < 0.003, nothing


def test_an_interaction_is_found_and_is_no_main_effect():
    """a's two outer levels times b, +-0.2: its variance is 0.04 x 2/3, and it has no part in a's or b's means."""
    tables = [parts(table(8, both=0.2, seed=seed), 50)[0] for seed in range(20)]
    values = pd.concat([shares.value for shares in tables], axis=1).mean(axis=1)
    total = 0.06 + 0.01 + 0.04 * 2 / 3 + 0.0225 + 0.04
    assert values["a x b"] == pytest.approx(0.04 * 2 / 3 / total, abs=0.02)
    assert values["a"] == pytest.approx(0.06 / total, abs=0.03)
    assert abs(values["a x c"]) < 0.005
    assert all(shares.low["a x b"] > 0.02 for shares in tables)


def test_intervals_hold_the_truth_usually():
    total = 0.06 + 0.01 + 0.0225 + 0.04
    held = [f.low["a"] <= 0.06 / total <= f.high["a"] for f in (parts(table(10, seed=s))[0] for s in range(40))]
    assert np.mean(held) > 0.8


def test_effects_are_those_of_the_mixed_model():
    rows = table(60, noise=0.2, seed=3)
    _, _, conditions, scores = parts(rows, 2)
    effects = analysis.effects(conditions, scores).set_index(["factor", "level"]).value
    for level, value in (("p", -0.3), ("q", 0.0), ("r", 0.3)):
        assert effects["a", level] == pytest.approx(value, abs=0.03)
    plain = rows.groupby("a").score.mean() - rows.score.mean()  # a full table: plain means are the effects
    for level in LEVELS["a"]:
        assert effects["a", level] == pytest.approx(plain[level], abs=1e-9)
    columns = np.concatenate([np.ones((len(scores), 1)), *(analysis.coded(conditions[name])[0] for name in LEVELS)], 1)
    y, groups = scores.to_numpy().T.ravel(), np.repeat(np.arange(scores.shape[1]), len(scores))
    fit = MixedLM(y, np.tile(columns, (scores.shape[1], 1)), groups).fit()
    assert effects["a", "p"] == pytest.approx(fit.fe_params[1], abs=1e-6)


def test_the_frontier_of_a_quarter_circle_is_the_circle():
    """Points at angles on the circle, each with one that costs the same and scores less, and one dearer and equal."""
    angle = np.linspace(0.1, 1.4, 9)
    best = pd.DataFrame({"held": 1 - np.cos(angle), "value": np.sin(angle), "on": True})
    below, dearer = best.assign(value=best.value - 0.05, on=False), best.assign(held=best.held + 0.3, on=False)
    table = pd.concat([below, best, dearer]).sample(frac=1, random_state=0)
    on_frontier = analysis.frontier(table, "held")
    assert on_frontier.on.all()
    assert on_frontier.value.tolist() == pytest.approx(np.sin(angle))
