"""The studies of the paper's scope: rows that the claims can be asked of, on few items of the embedded model."""

from dataclasses import replace

import pytest
import synthetic

from kvrepro.chapters.protection import grid, study
from kvrepro.chapters.protection.settings import Settings
from kvrepro.engine.generate import generate
from kvrepro.experiment import claims, data, models

ITEMS = "tinyworld:needle"
BOOK = claims.load_claims("protection")


def book_of(*ids):
    """The claims file with a few claims only."""
    return BOOK | {"claims": [claim for claim in BOOK["claims"] if claim["id"] in ids]}


@pytest.fixture(scope="module")
def tiny():
    return models.load()


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    return Settings(results=tmp_path_factory.mktemp("results"), progress=False, max_new_tokens=4, workers=1)


def test_a_temperature_near_zero_gives_the_greedy_answers(tiny):
    [item] = data.load_items(ITEMS, 1, seed=6, tokens=200)
    conditions = grid.main([40], ("lru",), 0.1, "as_run")[1:]
    given = {"temperature": 1e-4, "samples": 2, "seed": 0, "limit": 512, "max_new_tokens": 8}
    cold = study.samples_of(tiny, item, conditions, **given)
    prompt = data.build_prompt(item, tiny.tokenizer, 512)
    [greedy] = generate(tiny.model, [prompt], conditions, max_new_tokens=8, stop_ids=models.stop_ids(tiny))
    texts = [tiny.tokenizer.decode(answer.tokens, skip_special_tokens=True).strip() for answer in greedy]
    assert cold.prediction.tolist() == [texts[0]] * 2 + [texts[1]] * 2
    assert cold.n_generated.tolist()[::2] == [len(answer.tokens) for answer in greedy]


def test_a_single_reduction_stands_beside_lru_under_the_cap(tiny, settings):
    items, longer = data.load_items(ITEMS, 6, seed=5, tokens=200), replace(settings, max_new_tokens=24)
    rows = study.main(tiny, items, grid.main([64], ["lru", "random_sample"], longer.protect_frac, "as_run"), longer)
    both = study.once(tiny, items, rows, 64, longer)
    lru = both[both.policy == "lru"].pivot(index="item", columns=["regime", "prefix"], values="policy_calls")
    assert (lru[study.ONCE] == 1).all(axis=None)
    assert (lru["shared cap"] > 1).any(axis=None)
    table = synthetic.verdicts(book_of("P48"), longer, main=rows, once=both).set_index("claim")
    again = int((lru["shared cap", longer.protect_frac] > 1).sum())
    assert table.n["P48"] == again or table.note["P48"].startswith(f"{again} items: an interval needs")
