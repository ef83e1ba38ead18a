"""What pip installs: archives built from a copy of the project, and used in an empty folder that sees no clone."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from kvrepro.experiment import models

ROOT = Path(__file__).parents[1]
SCRIPT = """
import kvrepro as kv
import kvrepro_kernels
from kvrepro import paths

print(paths.ROOT, kvrepro_kernels.__file__, sep="\\n")
tiny = kv.load()
[item] = kv.load_items("tinyworld:needle", n_items=1, seed=7, tokens=1000)
prompt = kv.build_prompt(item, tiny.tokenizer, limit=1200)
asked = [kv.Condition(), *(kv.Condition(name, 0.5, kv.Prefill()) for name in ("tri_attention", "duo_attention"))]
[answers] = kv.generate(tiny.model, [prompt], asked, max_new_tokens=8, stop_ids=kv.stop_ids(tiny))
assert tiny.tokenizer.decode(answers[0].tokens, skip_special_tokens=True).strip() == item.answer
assert max(answers[1].kept) < max(answers[0].kept)
rows = kv.run(kv.Answers("mine", "main", [item], asked, 8, 1200), tiny, kv.Settings(progress=False, workers=1))
assert len(rows) == 3 and not rows.error.notna().any()

from kvrepro.experiment import artifact, claims, data

assert claims.load_claims("leakage")["claims"] and len(artifact.scores()) and data.sources()
assert len(claims.published("protection_t20_faithful.csv"))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, which is built from the source archive."""
    place = tmp_path_factory.mktemp("dist")
    left_out = (".git", ".venv", ".gpu", "_build", "build", "dist", "executed", "generated", "results", "*.egg-info")
    shutil.copytree(ROOT, place / "copy", ignore=shutil.ignore_patterns(*left_out, "__pycache__"))
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(place), str(place / "copy")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(place.glob("*.whl"))


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
    """Runs Python in an empty folder where kvrepro is the wheel's."""
    site, folder = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("empty")
    zipfile.ZipFile(wheel).extractall(site)
    env = os.environ | {"PYTHONPATH": str(site), "KVREPRO_WORKERS": "1"}

    def run(*arguments):
        return subprocess.run([sys.executable, *arguments], cwd=folder, env=env, capture_output=True, text=True)

    run.site, run.folder = site, folder
    return run


def test_the_wheel_brings_one_model_the_tables_and_the_notebooks(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    shipped = {name.removeprefix("kvrepro/shipped/") for name in names if name.startswith("kvrepro/shipped/")}
    for folder in ("published", "claims", "artifact", "gpu", "words", f"models/{models.DEFAULT}"):
        assert {f"data/{folder}/{file.name}" for file in (ROOT / "data" / folder).iterdir()} <= shipped
    assert {f"data/{file.name}" for file in (ROOT / "data").iterdir() if file.is_file()} <= shipped
    assert {f"notebooks/{file.name}" for file in (ROOT / "notebooks").glob("*.ipynb")} <= shipped
    assert {"kvrepro/py.typed", "kvrepro_kernels/py.typed"} <= names
    assert {name.split("/")[2] for name in shipped if name.startswith("data/models/")} == {
        models.DEFAULT,
        *(f"{models.DEFAULT}-{kind}.json" for kind in ("gates", "queries")),
    }
    assert not {name for name in names if name.startswith(("tests", "kvrepro/shipped/data/results"))}
    assert wheel.stat().st_size < 12e6


def test_an_installed_package_runs_studies_and_chapters_and_stores_in_the_working_folder(python):
    before = sorted(python.site.rglob("*.parquet"))
    done = python("-c", SCRIPT)
    lines = done.stdout.splitlines()
    assert [line.startswith(str(python.site)) for line in lines[:2]] == [True, True], done
    assert done.returncode == 0, done.stderr
    assert (python.folder / "data" / "results" / "mine" / "main").is_dir()
    assert sorted(python.site.rglob("*.parquet")) == before


def test_notebooks_are_copied_and_not_written_over(python):
    done = python("-m", "kvrepro", "notebooks")
    copied = sorted((python.folder / "notebooks").iterdir())
    assert [file.name for file in copied] == sorted(file.name for file in (ROOT / "notebooks").glob("*.ipynb"))
    assert done.stdout.split() == [f"notebooks/{file.name}" for file in copied], done.stderr
    refused = python("-m", "kvrepro", "notebooks")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "'notebooks' is there already: give another name" in refused.stderr
