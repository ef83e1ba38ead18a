import json

import nbformat
import pandas as pd
import pytest
from typer.testing import CliRunner

from kvrepro.errors import InputError
from studies import family, trial

CELLS = """import pandas as pd
from kvrepro.experiment import claims
from pathlib import Path
---
model = "m"
items = "folder/questions.jsonl"
results = "data/results"
options = {}
---
table = pd.DataFrame([{"claim": "A1", "verdict": "reproduced", "reading": "any", "model": model, "profile": "quick",
                       "ours": 0.1 * options.get("seed", 0), "low": 0.0, "high": 1.0, "n": 8, "note": "why"}])
claims.write(table.reindex(columns=claims.COLUMNS), Path(results) / "tiny" / "claims.csv")
---
raise RuntimeError("figures are not drawn")"""


@pytest.fixture
def root(tmp_path):
    cells = [nbformat.v4.new_code_cell(source) for source in CELLS.split("\n---\n")]
    cells[1].metadata["tags"] = ["parameters"]
    (tmp_path / "notebooks").mkdir()
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=kernel), tmp_path / "notebooks" / "tiny.ipynb")
    return tmp_path


def test_a_chapter_runs_as_far_as_its_verdicts_and_once(root):
    folder = root / "out" / "m-3"
    given = {"model": "m", "options": {"seed": 3}}
    assert family.run_chapter("tiny", folder, given, root)
    assert not family.run_chapter("tiny", folder, given, root)
    assert family.run_chapter("tiny", folder, {"model": "m", "options": {"seed": 4}}, root)
    [row] = family.collected(root / "out", seed=3).itertuples()
    assert (row.model, row.chapter, row.claim, row.verdict, row.note) == ("m", "tiny", "A1", "reproduced", "")
    assert row.estimate == pytest.approx(0.4)
    (folder / "other").mkdir()
    (folder / "other" / family.FAILED).write_text("InputError: why")
    lost = family.collected(root / "out", seed=3).iloc[-1]
    assert (lost.chapter, lost.verdict, lost.note) == ("other", family.NOT_RUN, "InputError: why")
    [row] = family.collected(root / "out", 3, ["claim", "items"]).dropna().itertuples()
    assert row.items == "questions.jsonl"
    [row] = family.collected(root / "out", seed=3).dropna(subset="claim").itertuples()
    assert row.code == json.loads((folder / "tiny" / family.DONE).read_text())["code"][:8]


def test_a_chapter_without_verdicts_and_runs_that_are_not_there_are_refused(root):
    notebook = root / "notebooks" / "tiny.ipynb"
    notebook.write_text(notebook.read_text().replace("claims.write(", "print(").replace("raise RuntimeError", "str"))
    with pytest.raises(InputError, match="stores no verdicts"):
        family.run_chapter("tiny", root / "out", {}, root)
    with pytest.raises(InputError, match="first family run"):
        family.collected(root / "out")


def test_the_full_profile_is_stored_and_a_quick_run_is_not(root, monkeypatch):
    family.run_chapter("tiny", root / "out" / "m-0", {"model": "m"}, root)
    monkeypatch.setattr(family, "FULL", root / "full.csv")
    given = ["full", "--results", str(root / "out")]
    assert "profile quick" in str(CliRunner().invoke(family.app, given).exception)
    assert not family.FULL.exists()
    table = root / "out" / "m-0" / "tiny" / "claims.csv"
    table.write_text(table.read_text().replace("quick", "full"))
    assert CliRunner().invoke(family.app, given).exit_code == 0
    assert pd.read_csv(family.FULL)[["claim", "verdict", "profile"]].to_numpy().tolist() == [
        ["A1", "reproduced", "full"]
    ]


def test_blanks_between_seeds_are_no_part_of_a_runs_folder(tmp_path, monkeypatch):
    ran = []
    monkeypatch.setattr(family, "run_chapter", lambda chapter, folder, given: ran.append(folder.name))
    given = ["--models", "small-gqa", "--chapters", "fragility", "--seeds", "0, 1"]
    assert CliRunner().invoke(family.app, ["run", "--results", str(tmp_path), *given]).exit_code == 0
    assert ran == ["small-gqa-0", "small-gqa-1"]


def test_names_that_do_not_exist_are_refused_before_anything_runs(tmp_path):
    for option, value in (("--models", "small-mga"), ("--chapters", "protecton")):
        result = CliRunner().invoke(family.app, ["run", "--results", str(tmp_path / "x"), option, value])
        assert isinstance(result.exception, InputError)
    assert not (tmp_path / "x").exists()
    assert family.chosen_names("a, b", ["a", "b", "c"], "model") == ["a", "b"]
    with pytest.raises(InputError, match="unknown model 'd'"):
        family.chosen_names("a,d", ["a", "b"], "model")


def test_a_checkpoint_of_ones_own_runs_under_its_folders_name(tmp_path, monkeypatch):
    ran = []
    monkeypatch.setattr(family, "run_chapter", lambda chapter, folder, given: ran.append((folder.name, given["model"])))
    (tmp_path / "mine").mkdir()
    trial.checkpoint(tmp_path / "mine", "two-layer", ["a text"], 300)
    given = ["--model", str(tmp_path / "mine"), "--chapters", "fragility"]
    assert CliRunner().invoke(family.app, ["run", "--results", str(tmp_path), *given]).exit_code == 0
    assert ran == [("mine-0", str(tmp_path / "mine"))]
    given[1] = str(tmp_path / "none")
    assert "none" in str(CliRunner().invoke(family.app, ["run", "--results", str(tmp_path), *given]).exception)
