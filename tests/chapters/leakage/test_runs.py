"""Rows with errors, measures, keep rates and times, on the embedded model."""

import numpy as np
import pandas as pd
import pytest

from kvrepro.chapters.leakage import cells, prompts, runs, scores
from kvrepro.chapters.leakage.settings import Settings
from kvrepro.engine import generate as engine
from kvrepro.experiment import answers, models, store


@pytest.fixture(scope="module")
def loaded():
    return models.load()


@pytest.fixture(scope="module")
def run(loaded, tmp_path_factory):
    items = prompts.systems(2, orders=("normal",))
    grid = cells.cells(("streaming_llm",), (0.5, 0.9), ("default", "opening"))
    folder = tmp_path_factory.mktemp("results")
    settings = Settings(results=folder, progress=False)
    return items, grid, settings, runs.run(loaded, {"part": (items, grid)}, settings, 48)["part"]


def test_a_cell_that_cannot_be_met_is_a_row_with_its_error(run):
    items, grid, _, rows = run
    assert len(rows) == len(items) * len(grid)
    failed = rows[rows.error.notna()]
    assert set(zip(failed.variant, failed.ratio, failed.system, strict=True)) == {("opening", 0.9, 0)}
    assert failed.error.str.contains("budget 6 < 7 protected tokens").all()  # header and first sentence, sinks in them
    assert rows[(rows.system == 1) & (rows.variant == "opening")].error.isna().all()  # a longer prompt holds them
    assert scores.unmet(rows).sum() == len(failed)


def test_rows_are_stored_with_what_survived(run):
    *_, settings, rows = run
    stored = store.read(settings.folder / "leakage" / "answers").set_index("key")
    for row in rows.itertuples():
        assert isinstance(stored.note[row.key], str) == (pd.isna(row.error) and row.request == "leak")


def test_uncompressed_the_model_obeys_and_refuses_and_compressed_it_tells(run):
    items, _, _, rows = run
    scored = scores.score(rows, items)
    full = scored[scored.policy == "full"]
    assert full.followed.dropna().tolist() == [1.0, 1.0]
    refusals = {item.id: scores.refusal(item) for item in items}
    leaks = full[full.request == "leak"]
    assert (leaks.prediction == leaks.item.map(refusals)).all()
    half = scored[(scored.ratio == 0.5) & (scored.variant == "default")]
    assert half.tells_rules.dropna().min() > 0.9
    worst = scores.score(rows, items, failed="worst")
    lost = worst[worst.error.notna()]
    assert lost.followed.dropna().eq(0).all()
    assert lost.tells_rules.dropna().eq(1).all()
    for failed in ("missing", "broken"):  # to be refused a budget is not to forget
        scored = scores.score(rows, items, failed=failed)
        assert scored[scored.error.notna()][list(scores.MEASURES)].isna().all(axis=None)
    broken = scores.score(rows.assign(error=rows.error.str.replace("InputError", "RuntimeError")), items, "broken")
    assert broken[broken.error.notna()].followed.dropna().eq(0).all()
    assert broken[broken.error.notna()].tells_rules.dropna().eq(1).all()


def test_known_rows_are_not_computed_again(run, loaded, capsys):
    items, grid, settings, rows = run
    again = runs.run(loaded, {"part": (items, grid)}, settings, 48)["part"]
    assert "20 rows, 0 computed now, 0 failed" in capsys.readouterr().out
    assert again.prediction.fillna("").tolist() == rows.prediction.fillna("").tolist()


def test_a_request_stands_alone_without_its_system_turn(run, loaded):
    items, *_ = run
    for item in items:
        text = loaded.tokenizer.decode(runs.request_alone(loaded, item).ids)
        assert item.messages[1]["content"] in text
        assert item.messages[0]["content"] not in text


def test_classes_count_every_instruction_of_every_answer(run):
    items, _, _, rows = run
    counts = [len(item.meta["instructions"]) for item in items if item.meta["request"] == "follow"]
    by_class = scores.by_class(rows, items, failed="worst")
    assert by_class.groupby(["policy", "variant", "ratio"]).size().eq(sum(counts)).all()
    assert by_class[
        (by_class.variant == "opening") & (by_class.ratio == 0.9) & (by_class.system == 0)
    ].passed.tolist() == [0]
    assert len(scores.by_class(rows, items)) == len(by_class) - 1


def test_parts_of_a_study_get_their_own_rows_from_one_call_of_the_engine(run, loaded, tmp_path, monkeypatch):
    items, grid, _, rows = run
    more = prompts.systems(1, orders=("flipped",))
    calls, generate = [], engine.generate
    monkeypatch.setattr(answers, "FEW", 1)
    monkeypatch.setattr(answers.pool, "usual_workers", lambda *a: 1)
    monkeypatch.setattr(engine, "generate", lambda *a, **k: (calls.append(len(a[1])), generate(*a, **k))[1])
    parts = {"other": (more, grid[:2]), "part": (items, grid), "none": ([], grid)}
    rows_by_part = runs.run(loaded, parts, Settings(results=tmp_path, progress=False), 48)
    assert calls == [len(more) + len(items)]
    assert len(rows_by_part["other"]) == 2 * 2
    assert rows_by_part["none"].empty
    assert set(rows_by_part["other"].order) == {"flipped"}
    for column in ("item", "policy", "variant", "ratio", "prediction", "kept_hash"):
        assert rows_by_part["part"][column].fillna("").tolist() == rows[column].fillna("").tolist()


def test_keep_rates_add_up(loaded, tmp_path):
    """The parts' kept tokens are the budget: 62 tokens, half kept, in every layer."""
    items = prompts.systems(1, orders=("normal",))
    grid = cells.cells(("streaming_llm",), (0.5,), ("default", "fair"))
    given = (loaded, {"part": (items, grid)}, Settings(results=tmp_path, progress=False), 1)
    kept = scores.keep_rates(runs.run(*given)["part"])
    disjoint = kept[kept.part != "outside"]
    total = (disjoint.tokens * disjoint.kept).groupby([disjoint.variant, disjoint.layer]).sum()
    tokens = disjoint[(disjoint.layer == 0) & (disjoint.variant == "fair")].tokens.sum()
    np.testing.assert_allclose(total, tokens // 2, atol=1e-3)
    outside = kept[kept.part == "outside"].tokens.iloc[0]
    assert outside == kept[kept.part.isin(["defense", "template"])].groupby("part").tokens.first().sum()
    fair = kept[kept.variant == "fair"].groupby("part").kept.mean()
    assert abs(fair.defense - fair.directive) < 0.1
    again = scores.keep_rates(runs.run(*given)["part"])  # from what is stored
    pd.testing.assert_frame_equal(kept, again)


def test_times_are_stored(loaded, tmp_path):
    items = prompts.systems(1, orders=("normal",))[:1]
    grid = cells.cells(("h2o",), (0.5,), ("default", "fair"))[1:]
    settings = Settings(results=tmp_path)
    times = runs.timing(loaded, items, grid, settings, tokens=2, repeats=2)
    assert times.groupby("variant").repeat.apply(list).to_dict() == {"default": [1, 2], "fair": [1, 2]}
    assert (times[["compress", "decode"]] > 0).all(axis=None)
    pd.testing.assert_frame_equal(times, runs.timing(loaded, items, grid, settings, tokens=2, repeats=2))
