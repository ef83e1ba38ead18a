"""Assumptions of a layer at once against one triple at a time, and which triples are taken where not all are."""

import numpy as np
import pandas as pd
import tiny

from kvrepro.chapters.dropkv_bound import bound, study
from kvrepro.chapters.dropkv_bound.settings import Sampling, pool_name
from kvrepro.chapters.dropkv_bound.triples import triples

S = Sampling(pools=(0.9, 24), positions=2, window=4, steps=2)


class Loaded:
    def __init__(self):
        self.model = tiny.model("qwen2")


def test_a_layer_at_once_is_what_each_triple_gives():
    together = study.prompt(Loaded(), tiny.prompts(60)[0], S, 0, ("assumptions",))["assumptions"]
    rows = []

    def visit(layer):
        for t in tiny.triples_of(layer):
            for size in S.pools:
                keys = bound.pool(t.p, size, S.window)
                p, r = t.p[keys], t.r[keys]
                c = bound.cone(r, S.steps)
                row = t.where | {"tokens": len(t.p), "of_triples": 36, "pool": pool_name(size), "pool_size": len(keys)}
                row |= {"eps": p.max(), "c_low": c.low, "c_high": c.high}
                rows.append({name: getattr(value, "item", lambda value=value: value)() for name, value in row.items()})

    triples(Loaded().model, tiny.prompts(60)[0], [44, 59], visit, window=S.window)
    expected = pd.DataFrame(rows)
    holds = expected.c_low > bound.ORIGIN
    pd.testing.assert_frame_equal(together[holds], expected[holds], rtol=1e-5, atol=1e-7, check_like=True)
    assert np.allclose(together.c_low, expected.c_low, rtol=1e-4)


def test_where_not_all_are_asked_every_layer_head_and_position_has_its_share():
    layers, heads, positions, take = 36, 16, 2, 144
    every = [(la, h, t) for la in range(layers) for h in range(heads) for t in range(positions)]
    taken = study._evenly(len(every), take)
    assert len(set(taken)) == take
    for axis, count in enumerate((layers, heads, positions)):
        per = np.bincount([every[i][axis] for i in taken], minlength=count)
        assert abs(per - take / count).max() <= max(1, 0.25 * take / count)
    assert study._evenly(5, 9) == [0, 1, 2, 3, 4]
