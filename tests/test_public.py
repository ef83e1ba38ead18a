"""`import kvrepro`: fast, complete, documented, typed; one version number; every package installed."""

import inspect
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import kvrepro as kv

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_import_loads_no_library():
    code = "import sys, kvrepro; kvrepro.policies; print([m for m in ('torch', 'pandas', 'numpy') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True).stdout == "[]\n"


@pytest.mark.parametrize("name", kv.__all__)
def test_every_name_is_there_documented_and_typed(name):
    value = getattr(kv, name)
    assert value.__name__ == name
    assert len(inspect.getdoc(value).split()) > 3
    if not inspect.isclass(value):
        assert all(p.annotation is not p.empty for p in inspect.signature(value).parameters.values())
        assert inspect.signature(value).return_annotation is not inspect.Signature.empty
    assert name in dir(kv)


def test_there_is_one_version_number():
    assert kv.__version__ == PROJECT["project"]["version"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == kv.__version__
    about = (ROOT / "book" / "about.md").read_text()
    assert citation["title"] in about
    assert f"version = {{{kv.__version__}}}" in about
