import pandas as pd
import pytest
from typer.testing import CliRunner

from kvrepro.errors import InputError
from kvrepro.experiment import claims
from studies import chapters, family


@pytest.fixture
def run(monkeypatch):
    """In place of a chapter's notebook: one verdict, whose estimate is the seed's tenth."""

    def notebook(name, parameters):
        row = {
            "claim": "A1",
            "verdict": "reproduced",
            "reading": "any",
            "model": "m",
            "profile": "quick",
            "note": "why",
        }
        row |= {"ours": 0.1 * parameters["options"]["seed"], "low": 0.0, "high": 1.0, "n": 8}
        table = pd.DataFrame([row]).reindex(columns=claims.COLUMNS)
        claims.write(table, family.Path(parameters["results"]) / name / "claims.csv")
        return {"items": "folder/questions.jsonl"}

    monkeypatch.setattr(chapters, "run", notebook)


def test_a_chapter_runs_once_for_its_parameters_and_its_verdicts_are_collected(run, tmp_path):
    folder = tmp_path / "m-3"
    assert family.run_chapter("tiny", folder, {"options": {"seed": 3}})
    assert not family.run_chapter("tiny", folder, {"options": {"seed": 3}})
    assert family.run_chapter("tiny", folder, {"options": {"seed": 4}})
    (folder / "other").mkdir()
    (folder / "other" / family.FAILED).write_text("InputError: why")
    [row, lost] = family.collected(tmp_path, 3, [*family.COLUMNS, "items"]).itertuples()
    assert (row.model, row.chapter, row.claim, row.verdict, row.note) == ("m", "tiny", "A1", "reproduced", "")
    assert (row.estimate, row.items) == (pytest.approx(0.4), "questions.jsonl")
    assert (lost.chapter, lost.verdict, lost.note) == ("other", family.NOT_RUN, "InputError: why")


def test_runs_that_are_not_there_and_unknown_names_are_refused(tmp_path):
    with pytest.raises(InputError, match="first family run"):
        family.collected(tmp_path)
    for option, value in (("--models", "small-mga"), ("--chapters", "protecton")):
        result = CliRunner().invoke(family.app, ["run", "--results", str(tmp_path / "x"), option, value])
        assert isinstance(result.exception, InputError)
    assert family.chosen_names("a, b", ["a", "b", "c"], "model") == ["a", "b"]


def test_the_full_profile_is_stored_and_a_quick_run_is_not(run, tmp_path, monkeypatch):
    family.run_chapter("tiny", tmp_path / "m-0", {"options": {"seed": 0}})
    monkeypatch.setattr(family, "FULL", tmp_path / "full.csv")
    given = ["full", "--results", str(tmp_path)]
    assert "profile quick" in str(CliRunner().invoke(family.app, given).exception)
    table = tmp_path / "m-0" / "tiny" / "claims.csv"
    table.write_text(table.read_text().replace("quick", "full"))
    assert CliRunner().invoke(family.app, given).exit_code == 0
    assert pd.read_csv(family.FULL).profile.tolist() == ["full"]


def test_each_model_and_seed_has_a_folder_and_a_failure_leaves_the_others(run, tmp_path, monkeypatch):
    def fails(chapter, folder, parameters):
        ran.append((folder.name, parameters["options"]["seed"], parameters["n_items"]))
        raise RuntimeError("why")

    ran = []
    monkeypatch.setattr(family, "run_chapter", fails)
    given = ["--models", "small-gqa", "--chapters", "fragility", "--seeds", "0, 1", "-p", "n_items=2"]
    assert CliRunner().invoke(family.app, ["run", "--results", str(tmp_path), *given]).exit_code == 1
    assert ran == [("small-gqa-0", 0, 2), ("small-gqa-1", 1, 2)]
    assert "why" in (tmp_path / "small-gqa-1" / "fragility" / family.FAILED).read_text()
