"""The examples of CONTRIBUTING.md are executed as they stand there."""

import importlib.util
import re
import sys
import traceback
from pathlib import Path

import pytest

import kvrepro as kv
from kvrepro.engine.condition import REGIMES
from kvrepro.errors import Stopped

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
SECTIONS = {section.splitlines()[0]: section for section in TEXT.split("\n## ")[1:]}
CALLS = "From a cell to a kernel, and how a token leaves the cache"
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


def test_the_calls_from_a_cell_to_a_kernel_are_those_that_a_debugger_shows(tmp_path, monkeypatch):
    kernels, shown = pytest.importorskip("kvrepro_kernels"), []

    def stop(*_, **__):
        shown.extend((frame.filename, frame.name) for frame in traceback.extract_stack())
        raise RuntimeError("seen")

    monkeypatch.setattr(kernels, "window_scores", stop)
    rows = re.findall(r"^\| `(\w+/[\w/]+\.py)` \| (.*?) \|", SECTIONS[CALLS], flags=re.M)
    named = [(str(ROOT / "kvrepro" / file), name) for file, names in rows for name in re.findall(r"\w+", names)]
    study = kv.Answers(
        "my_chapter",
        "calls",
        kv.load_items("tinyworld:needle", n_items=1, seed=7, tokens=200),
        [kv.Condition("snapkv", 0.9, kv.Prefill())],
        max_new_tokens=1,
    )
    with pytest.raises(Stopped, match="seen"):
        kv.run(study, kv.load("small-gqa"), kv.Settings(results=tmp_path, progress=False, backend="triton"))
    assert named == [frame for frame in shown if "/kvrepro/" in frame[0] and frame[1] != "<genexpr>"]
