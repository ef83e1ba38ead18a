"""The studies of the paper's scope: rows that the claims can be asked of, on few items of the embedded model."""

from dataclasses import replace

import pytest

from kvrepro.chapters.protection import grid, members, scope, study
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


def test_credit_and_samples_are_rows_that_the_claims_are_asked_of(tiny, settings):
    items = data.load_items(ITEMS, 6, seed=5, tokens=200)
    rows = study.main(tiny, items, grid.main([40], ("lru",), 0.1, "as_run"), settings)
    more = scope.studies(tiny, items, rows, 40, settings)
    assert set(more) == {"native", "credit", "sampling"}  # 64K tokens are beyond this model
    taught = more["credit"][more["credit"].policy == "online_credit"]
    assert taught["item"].tolist() == [item.id for item in items]
    warm = more["sampling"][more["sampling"].temperature > 0]
    assert warm.groupby(["item", "prefix"]).size().tolist() == [scope.SAMPLES] * 12
    table = members.evaluate(rows, book_of("P38", "P39", "P40"), more=more, max_new_tokens=4).set_index("claim")
    assert table.n["P38"] == table.n["P40"] == 6
    assert "65,536 tokens" in table.note["P39"]


def test_a_temperature_near_zero_gives_the_greedy_answers(tiny):
    [item] = data.load_items(ITEMS, 1, seed=6, tokens=200)
    conditions = grid.main([40], ("lru",), 0.1, "as_run")[1:]
    given = {"temperature": 1e-4, "samples": 2, "seed": 0, "limit": 512, "max_new_tokens": 8}
    cold = scope.samples_of(tiny, item, conditions, **given)
    prompt = data.build_prompt(item, tiny.tokenizer, 512)
    [greedy] = generate(tiny.model, [prompt], conditions, max_new_tokens=8, stop_ids=models.stop_ids(tiny))
    texts = [tiny.tokenizer.decode(answer.tokens, skip_special_tokens=True).strip() for answer in greedy]
    assert cold.prediction.tolist() == [texts[0]] * 2 + [texts[1]] * 2
    assert cold.n_generated.tolist()[::2] == [len(answer.tokens) for answer in greedy]


def test_published_methods_run_guarded_and_bare_in_both_regimes(tiny, settings):
    items = data.load_items(ITEMS, 6, seed=5, tokens=200)
    rows = scope.real(tiny, items, 6, 64, settings)
    cells = rows[rows.policy != "full"].groupby(["policy", "regime", "prefix"]).size()
    assert cells.tolist() == [6] * len(scope.REAL) * 2 * 2
    table = members.evaluate(rows, book_of("P45"), more={"real": rows}, max_new_tokens=4).set_index("claim")
    assert table.members["P45"].count("holds") + table.members["P45"].count("open")


def test_a_prompt_shorter_than_the_capacity_does_not_stop_the_chapter(tiny, settings):
    items = data.load_items(ITEMS, 1, seed=6, tokens=200)
    rows = scope.real(tiny, items, 1, 400, replace(settings, results=settings.results / "short"))
    assert rows.attrs["failed"] == []
    assert rows["error"].notna().equals(rows.regime == "prefill")  # nothing would leave at the prompt's end


def test_a_single_reduction_stands_beside_lru_under_the_cap(tiny, settings):
    items, longer = data.load_items(ITEMS, 6, seed=5, tokens=200), replace(settings, max_new_tokens=24)
    rows = study.main(tiny, items, grid.main([64], ["lru", "random_sample"], longer.protect_frac, "as_run"), longer)
    both = scope.once(tiny, items, rows, 64, longer)
    lru = both[both.policy == "lru"].pivot(index="item", columns=["regime", "prefix"], values="policy_calls")
    assert (lru[scope.ONCE] == 1).all(axis=None)
    assert (lru["shared cap"] > 1).any(axis=None)
    table = members.evaluate(rows, book_of("P48"), more={"once": both}, max_new_tokens=24).set_index("claim")
    again = int((lru["shared cap", longer.protect_frac] > 1).sum())
    assert table.n["P48"] == again or table.note["P48"].startswith(f"{again} items: an interval needs")


def test_ada_kv_with_equal_budgets_is_held_against_budgets_by_entropy(tiny, settings):
    items = data.load_items("tinyworld:list_all", 6, seed=5, tokens=300)
    rows = scope.native(tiny, items, 40, replace(settings, max_new_tokens=16))
    assert rows.groupby("policy").size().to_dict() == {"ada_kv_faithful": 6, "ada_kv_native": 6, "full": 6}
    prompts = [data.build_prompt(item, tiny.tokenizer, 512) for item in items]
    both = [grid.capped(name, 64, 0.1, 0.1, "as_described") for name in ("ada_kv_faithful", scope.NATIVE)]
    answers = generate(models.load("small-mha").model, prompts, both, max_new_tokens=24, stop_ids=())
    assert any(entropy.kept != equal.kept for entropy, equal in answers)  # with four heads to share among
    book, more = book_of("P30"), {"native": rows}
    two_heads, one_head = (members.evaluate(rows, book, more=more, kv_heads=heads) for heads in (2, 1))
    assert two_heads.n.tolist() == [(rows[rows.policy == "ada_kv_native"].evicted > 0).sum()]
    assert "without 1 KV heads" in one_head.note[0]  # one head's budgets are equal by themselves


def test_needles_are_asked_of_lru_and_h2o_with_a_sixteenth(tiny, settings):
    rows = scope.needle(tiny, settings, tokens=256, n_items=1)
    assert set(rows.policy) == {"full", "lru", "h2o_simple"}
    assert set(rows.capacity.dropna()) == {16}
    assert len(rows) == 5
