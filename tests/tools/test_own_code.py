"""The page "Your own code" is executed as it stands there: its Python, and its commands."""

import re
import shlex
import sys
from pathlib import Path

import pytest

from kvrepro import __main__

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "book" / "own-code.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.S)


def test_its_python_runs_and_evicts(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").symlink_to(ROOT / "data")
    names: dict[str, object] = {}
    for code in blocks("python"):
        exec(compile(code, "own-code.md", "exec"), names)
    output = capsys.readouterr().out
    read, kept = map(int, re.search(r"(\d+) tokens read, at most (\d+) kept", output).groups())
    assert read > 800
    assert 256 <= kept < 256 + 8
    document, left, written = re.search(r"(\d+) tokens read once, ([\d,]+) bytes kept: (.*)", output).groups()
    assert written == names["asked"][0].answer
    config = names["model"].config
    token = 2 * names["model"].dtype.itemsize * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    assert int(left.replace(",", "")) == int(0.3 * int(document)) * token
    assert names["reply"].shape[1] > int(document)
    assert "generate" not in vars(names["model"])


@pytest.mark.parametrize("line", [line for code in blocks("bash") for line in code.splitlines()])
def test_its_commands_run(line, tmp_path, monkeypatch, capsys):
    words = shlex.split(line)
    more = ["-o", f"results={tmp_path}", "-o", "progress=false"] if words[1] == "run" else []
    monkeypatch.setattr(sys, "argv", [*words, *more])
    with pytest.raises(SystemExit) as ended:
        __main__.main()
    captured = capsys.readouterr()
    assert not ended.value.code, captured.err
    assert captured.out.count("\n") > 1
