"""The book's builder on two small notebooks: what it executes, what it passes over, what a failure leaves behind."""

import importlib.util
import json
from pathlib import Path

import nbformat
import pytest
import yaml

ROOT = Path(__file__).parents[2]
FILES = ["book/executed/one", "book/plain", "book/executed/claims"]
TOC = {"parts": [{"chapters": [{"file": file} for file in FILES]}]}


@pytest.fixture
def build(tmp_path, monkeypatch):
    """The builder, with a clone of two notebooks, the second of which reads what the first wrote."""
    spec = importlib.util.spec_from_file_location("build", ROOT / "book" / "build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "_toc.yml").write_text(yaml.safe_dump(TOC))
    for folder in ("notebooks", "book/executed"):
        (tmp_path / folder).mkdir(parents=True)
    for name, code in (("one", "assert size < 5, 'too large'"), ("claims", "print(1)")):
        cells = [nbformat.v4.new_code_cell("size = 2  # or more", metadata={"tags": ["parameters"]})]
        notebook = nbformat.v4.new_notebook(cells=[*cells, nbformat.v4.new_code_cell(code)])
        notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
        nbformat.write(notebook, tmp_path / "notebooks" / f"{name}.ipynb")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "EXECUTED", tmp_path / "book" / "executed")
    return module


def test_a_notebook_is_executed_once_and_again_when_its_parameters_change(build, capsys):
    assert build.execute("one", [["other", "1"]])
    assert build.execute("one", [])
    assert "one                unchanged" in capsys.readouterr().out
    assert build.execute("one", [["size", "3"]])
    executed = json.loads((build.EXECUTED / "one.ipynb").read_text())
    assert executed["metadata"]["papermill"]["parameters"] == {"size": 3}
    assert "unchanged" not in capsys.readouterr().out


def test_a_failing_notebook_is_shown_with_its_error_and_tried_again(build, capsys):
    assert not build.execute("one", [["size", "7"]])
    assert "too large" in capsys.readouterr().err
    assert "AssertionError" in (build.EXECUTED / "one.ipynb").read_text()
    assert not (build.EXECUTED / "one.stamp").exists()
