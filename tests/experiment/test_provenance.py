"""Where numbers come from: every field is there, in a clone and outside one, and the command repeats what was given."""

import shlex
from types import SimpleNamespace

import yaml

from kvrepro.experiment import provenance
from kvrepro.experiment.run import Settings


def test_a_chapter_says_where_its_numbers_come_from():
    loaded = SimpleNamespace(name="tiny", dtype="float32", device="cpu", hash="ab12")
    text = provenance.provenance("leakage", loaded, Settings(seed=5, profile="full")).data
    names = [line.partition("**: ")[0].removeprefix("- **") for line in text.splitlines()]
    assert names == ["Code", "Date", "Model", "Profile", "Machine", "Versions", "Again"]
    for part in ("tiny, float32 on cpu", "`ab12`", "full, seed 5", "torch 2.", "cores", "notebooks/leakage.ipynb"):
        assert part in text
    assert "Model" not in provenance.provenance("reanalysis").data


def test_the_command_gives_the_parameters_again(monkeypatch):
    given = {"policies": ["snapkv", "it's"], "n_items": 3, "options": {"seed": 1}, "model": None}
    for parameters in (given, {}):
        monkeypatch.setattr(provenance, "injected", lambda parameters=parameters: parameters)
        words = shlex.split(provenance.provenance("leakage").data.splitlines()[-1].split("`")[1])
        assert (yaml.safe_load(words[words.index("-y") + 1]) if "-y" in words else {}) == parameters
