"""The examples of CONTRIBUTING.md are executed as they stand there."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

from kvrepro.engine.condition import REGIMES

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
SECTIONS = {section.splitlines()[0]: section for section in TEXT.split("\n## ")[1:]}
EXAMPLES = [title for title, section in SECTIONS.items() if "```python" in section]


def imported(path: Path) -> dict[str, object]:
    """The names of a file, as a module of its own (Triton wants to read its kernels' source)."""
    spec = importlib.util.spec_from_file_location(f"contributing_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return vars(module)


@pytest.mark.parametrize("title", EXAMPLES)
def test_the_examples_of_a_section_run_one_after_another(title, tmp_path, monkeypatch):
    if "kernel" in title:
        pytest.importorskip("triton", reason="triton is packaged for Linux only")
    monkeypatch.chdir(tmp_path)
    before = dict(REGIMES)
    names: dict[str, object] = {}
    for language, code in re.findall(r"```(python|yaml)\n(.*?)```", SECTIONS[title], flags=re.S):
        if file := re.match(r"# ([\w/]+\.\w+)\n", code):
            path = tmp_path / file[1]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(code)
            names |= imported(path) if language == "python" else {}
        else:
            exec(compile(code, f"CONTRIBUTING.md, {title}", "exec"), names)
    for name in REGIMES.keys() - before.keys():
        del REGIMES[name]


def test_files_and_folders_that_it_names_exist():
    for name in re.findall(r"`((?:kvrepro|kernels|tests|data)/[\w/.]+)`", TEXT):
        assert name == "data/results" or (ROOT / name).exists(), name  # a run makes it
