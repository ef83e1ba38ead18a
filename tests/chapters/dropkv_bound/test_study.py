"""The tables over triples of a tiny model's prompt, prompts of a given length, and conditions."""

import pandas as pd
import pytest
import tiny
import torch
from conditions import check

from kvrepro.chapters.dropkv_bound import bound, members, triples
from kvrepro.chapters.dropkv_bound import study as runs
from kvrepro.chapters.dropkv_bound.study import Settings, pool_name
from kvrepro.chapters.dropkv_bound.triples import RULES, STRATA

POOLS = (0.9, 24)


class Loaded:
    def __init__(self, kind: str = "llama"):
        self.model = tiny.model(kind)


@pytest.fixture(scope="module")
def frames() -> dict[str, pd.DataFrame]:
    return runs.prompt(Loaded(), tiny.prompts(60)[0], 3, pools=(0.95, 24), positions=1, window=4)


def test_one_prompt_gives_every_frame(frames):
    a, r = frames["assumptions"], frames["records"]
    assert len(a) == 3 * 6 * 2  # layers, heads, pools
    assert set(a.pool) == {"lowest 95%", "24 lowest"}
    few = a[a.pool == "24 lowest"]
    assert (few.eps * (few.tokens - 24 + 1) <= 1).all()  # all keys outside the pool weigh at least as much
    rules = 5 + len(RULES)  # one query: 5; the window: all
    assert len(r) == 3 * 2 * rules * (len(STRATA) + 2 + len(STRATA))  # ours adds two strata for one of two objectives
    assert (r.ratio > 1 - 1e-9).all()  # nothing beats the optimum
    of_dropkv = members.selected(r)
    assert len(of_dropkv) == 3 * len(STRATA) * 2
    assert (of_dropkv.ratio <= of_dropkv.bound * (1 + 1e-9)).all()  # theorem 1 on a real model's triples


def test_a_layer_at_once_is_what_each_triple_gives(monkeypatch):
    how = {"pools": POOLS, "positions": 2, "window": 4}
    together = runs.prompt(Loaded("qwen2"), tiny.prompts(60)[0], 0, **how)["assumptions"]
    rows = []

    def visit(layer):
        for t in tiny.triples_of(layer):
            for size in POOLS:
                keys = bound.pool(t.p, size, 4)
                numbers = {"eps": t.p[keys].max().item(), "c_low": bound.cone(t.r[keys]).item()}
                rows.append(t.where | {"tokens": len(t.p), "pool": pool_name(size)} | numbers)

    triples.triples(Loaded("qwen2").model, tiny.prompts(60)[0], [44, 59], visit, window=4)
    pd.testing.assert_frame_equal(together, pd.DataFrame(rows), rtol=1e-5, atol=1e-7, check_like=True)
    monkeypatch.setattr(runs, "CONES", 5)
    few = runs.prompt(Loaded("qwen2"), tiny.prompts(60)[0], 0, **how)["assumptions"]
    assert len(few) == 5 * 2
    assert len(few.merge(together, on=[*runs.WHERE, "pool"])) == 5 * 2


def test_every_condition_can_be_met_and_carries_the_paper_s_settings():
    grid = runs.grid(Settings(shares=(0.05, 0.3)))
    assert set(grid) == {"full", "dropkv", *runs.PEERS, runs.POOLED}
    for conditions in grid.values():
        for condition in conditions:
            check(condition, 1900)
    assert len(grid["snapkv"]) == 2
    assert dict(grid["snapkv"][0].switches) == {"window": 8, "kernel": 11}
    assert grid["streaming_llm"][0].switches == ()


def test_ways_to_weigh_a_key(frames):
    """Alone all orders of the length agree; sets of the projected way move the projected output least in the mean."""
    f = frames["weights"]
    assert len(f) == 3 * len(STRATA) * 2 * 3
    assert f[f.way == "linear"].same_alone.all()
    assert not f[f.way == "projected"].same_alone.all()
    model, ids, lengths = tiny.model("llama"), tiny.prompts(60)[0], []

    def visit(layer):
        for t in tiny.triples_of(layer):
            lengths.append(((t.r @ t.root).norm(dim=-1), (t.r @ layer.projection[t.head].double()).norm(dim=-1)))

    triples.triples(model, ids, [59], visit, window=4)
    for ours, expected in lengths:
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-7)
