"""Where numbers come from: every field is there, in a clone and outside one, and the command repeats what was given."""

import shlex
import subprocess
from types import SimpleNamespace

import yaml

from kvrepro.experiment import provenance
from kvrepro.experiment.run import Settings


def test_a_chapter_says_where_its_numbers_come_from():
    loaded = SimpleNamespace(name="tiny", dtype="float32", device="cpu", hash="ab12")
    text = provenance.provenance("leakage", loaded, Settings(seed=5, profile="full")).data
    names = [line.partition("**: ")[0].removeprefix("- **") for line in text.splitlines()]
    assert names == ["Code", "Date", "Model", "Profile", "Machine", "Versions", "Time", "Again"]
    for part in ("tiny, float32 on cpu", "`ab12`", "full, seed 5", "torch 2.", "cores", "notebooks/leakage.ipynb"):
        assert part in text
    assert "Model" not in provenance.provenance("reanalysis").data


def test_the_commit_is_the_clones_and_changes_are_said(tmp_path):
    assert "commit" not in provenance.commit(tmp_path)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / "a").write_text("1")
    for words in (["init", "-q"], ["add", "a"], ["commit", "-qm", "a"]):
        subprocess.run([*git, *words], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    assert provenance.commit(tmp_path).endswith(f"commit `{head}`")
    (tmp_path / "a").write_text("2")
    assert provenance.commit(tmp_path).endswith("not committed")


def test_the_command_gives_the_parameters_again():
    given = {"policies": ["snapkv", "it's"], "n_items": 3, "options": {"seed": 1}, "model": None}
    words = shlex.split(provenance.command("leakage", given))
    assert yaml.safe_load(words[words.index("-y") + 1]) == given
    assert "-y" not in provenance.command("leakage", {})
