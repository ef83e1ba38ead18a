"""The files that publish: workflows, containers and environments name only what the project has."""

import json
import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[1]
MAKEFILE = (ROOT / "Makefile").read_text()
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
DEVCONTAINER = ROOT / ".devcontainer" / "devcontainer.json"


@pytest.mark.parametrize("file", [*WORKFLOWS, ROOT / "Dockerfile", DEVCONTAINER], ids=lambda path: path.name)
def test_every_target_that_is_made_exists(file):
    targets = {*re.findall(r"^([\w-]+):", MAKEFILE, flags=re.M), ".venv/.ready"}
    calls = re.findall(r"""(?:run: |RUN |": ")make ([^\n"]*)""", file.read_text())
    called = {word for call in calls for word in call.split() if "=" not in word}
    assert called <= targets
    assert called or "publish" in file.name


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda path: path.name)
def test_a_job_has_a_time_limit_or_takes_seconds_and_says_what_it_may_write(file):
    workflow = yaml.safe_load(file.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    for name, job in workflow["jobs"].items():
        assert "timeout-minutes" in job or name in ("deploy", "colab")
        assert {step["uses"].count("@") for step in job["steps"] if "uses" in step} == {1}


def test_conda_and_the_devcontainer_take_the_pinned_packages():
    conda = yaml.safe_load((ROOT / "environment.yml").read_text())
    [pip] = [entry["pip"] for entry in conda["dependencies"] if isinstance(entry, dict)]
    assert pip[0] == "-c constraints.txt"
    python = next(entry for entry in conda["dependencies"] if str(entry).startswith("python=")).removeprefix("python=")
    image = json.loads(DEVCONTAINER.read_text())["image"]
    assert python in image
    assert f"FROM python:{python}-" in (ROOT / "Dockerfile").read_text()


def test_every_pinned_package_takes_the_oldest_python_that_the_project_takes():
    requirement = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    oldest = requirement.removeprefix(">=") + ".0"
    pinned = set(re.findall(r"^([\w.-]+)==(.+)$", (ROOT / "constraints.txt").read_text(), flags=re.M))
    wanted = {
        (package.name, package.version): package.metadata.get("Requires-Python") or ""
        for package in metadata.distributions()
        if (package.name, package.version) in pinned
    }
    assert len(wanted) > 100
    assert [package for package, pythons in wanted.items() if oldest not in SpecifierSet(pythons)] == []


def test_the_container_leaves_out_what_a_clone_computes():
    ignored = set((ROOT / ".dockerignore").read_text().split())
    computed = [
        line.rstrip("/")
        for line in (ROOT / ".gitignore").read_text().splitlines()
        if line.startswith(("book/", "data/"))
    ]
    assert {".git", ".venv", "_build", *computed} <= ignored
