"""The command line: quick help, one-line errors, and the same results as the calls behind it."""

import json
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pandas as pd
import pytest
import yaml

import kvrepro as kv
from kvrepro import __main__
from kvrepro.engine.catalogue import CATALOGUE
from kvrepro.experiment import data, store

ROOT = Path(__file__).parents[1]


@pytest.fixture
def call(capsys, monkeypatch):
    """`kvrepro <arguments>` in this process: exit code, output, errors."""
    monkeypatch.setenv("COLUMNS", "200")

    def called(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["kvrepro", *arguments])
        with pytest.raises(SystemExit) as ended:
            __main__.main()
        printed = capsys.readouterr()
        return ended.value.code or 0, printed.out, printed.err

    return called


def test_help_loads_no_library_and_names_every_command():
    at_the_end = "print([m for m in ('torch', 'pandas', 'papermill') if m in sys.modules])"
    code = f"import sys, atexit, kvrepro.__main__; atexit.register(lambda: {at_the_end}); kvrepro.__main__.main()"
    printed = subprocess.run([sys.executable, "-c", code, "--help"], cwd=ROOT, capture_output=True, text=True).stdout
    assert printed.endswith("[]\n")
    for name in ("run", "policies", "items", "data"):
        assert re.search(rf"\b{name} +[A-Z]", printed), name


def test_public_data_are_listed_and_fetched(call):
    code, out, _ = call("data")
    assert code == 0
    assert yaml.safe_load(out) == data.sources()
    code, _, err = call("data", "nowhere")
    assert (code, err.count("\n")) == (2, 1)
    assert "'nowhere' is not in data/sources.yml" in err


def test_policies_are_listed_and_shown(call, tmp_path, monkeypatch):
    _, out, _ = call("policies")
    listed = [line.split()[0] for line in out.splitlines() if not line.startswith(" ")]
    assert listed == ["full", *CATALOGUE]
    assert "regimes: shared cap; budget: one set for all heads and layers; readings: as_run, as_described" in out
    _, out, _ = call("policies", "snapkv")
    assert re.search(r"as_run: .*'window': 64", out)
    assert re.search(r"as_described: .*'window': 32", out)
    (tmp_path / "mine.py").write_text(
        "from kvrepro.engine.policy import Policy\n\n\ndef newest(o):\n    '''The newest. More.'''\n\n\n"
        "MINE = Policy('Mine', 'tests', newest, {'window': 7})\n"
    )
    monkeypatch.chdir(tmp_path)
    _, out, _ = call("policies", "mine.py:MINE")
    assert "keeps: The newest\n" in out
    assert "as_described: {'window': 7}" in out
    assert call("policies", "snapvk")[0] == 2


def test_a_run_is_the_study_that_it_names(call, tmp_path):
    drawn = data.load_items("tinyworld:needle", 2, 5, 300)
    (tmp_path / "items.jsonl").write_text("\n".join(json.dumps(asdict(item)) for item in drawn))
    given = ["-p", "streaming_llm", "-p", "snapkv", "-b", "64", "-b", "50%", "-s", "until=question", "-s", "window=8"]
    given += ["-i", str(tmp_path / "items.jsonl"), "-n", "2", "--max-new-tokens", "6", "-o", f"results={tmp_path}"]
    code, out, _ = call("run", *given, "-o", "progress=false", "--out", str(tmp_path / "rows.csv"))
    assert code == 0
    items = data.load_items(str(tmp_path / "items.jsonl"))
    when, window = kv.Prefill(until="question"), (("window", 8),)
    conditions = [kv.Condition("streaming_llm", 64, when), kv.Condition("streaming_llm", 0.5, when)]
    conditions += [kv.Condition("snapkv", size, when, switches=window) for size in (64, 0.5)]
    study = kv.Answers("again", "main", items, [kv.Condition(), *conditions], 6)
    expected = kv.run(study, kv.load(), kv.Settings(results=tmp_path, progress=False))
    rows = store.read(tmp_path / "run" / "main")
    same = ["item", "policy", "capacity", "share", "until", "switches", "prediction", "kept_hash"]
    order = ["item", "policy", "capacity"]
    pd.testing.assert_frame_equal(
        *(frame[same].sort_values(order, ignore_index=True) for frame in (rows, expected)), check_dtype=False
    )
    assert len(pd.read_csv(tmp_path / "rows.csv")) == len(rows) == 10
    table = [line.split() for line in out.splitlines() if line.split()[-1:] and line.split()[0] in ("full", *CATALOGUE)]
    both = [("streaming_llm", "64.0"), ("streaming_llm", "0.5"), ("snapkv", "64.0"), ("snapkv", "0.5")]
    assert [(line[0], line[1]) for line in table] == [("full", "-"), *both]
    assert float(table[1][-1]) < float(table[2][-1]) < float(table[0][-1])  # memory
    assert {(line[3], line[4]) for line in table} == {("-", "-")}
    code, out, _ = call("run", *given, "-o", "progress=false", "--measure", "evicted")
    assert "10 rows, 0 computed now" in out
    assert " evicted " in out


WRONG = {
    "budget '1x': ": ["-b", "1x"],
    "budget 0: ": ["-b", "0"],
    "budget 1.2: ": ["-b", "120%"],
    "unknown setting of these conditions, regimes and policies 'untill', did you mean": ["-s", "untill=question"],
    "is not of the form name=value": ["-s", "window"],
    "is no YAML value": ["-s", "window=[8"],
    "unknown regime 'some-times'; there are: prefill, chunked, offline, decode-cap, ": ["-r", "some times"],
    "cannot run in regime 'shared cap'": ["-r", "shared-cap"],
    "unknown policy 'snapvk'": ["-p", "snapvk"],
    "--out 'nowhere/rows.csv': give a file in a folder that is there": ["--out", "nowhere/rows.csv"],
    "--out '/': give a file": ["--out", "/"],
    "name 'a b': give up to 60 letters, digits, _, . or -": ["--name", "a b", "-n", "1", "-b", "0.5"],
    "unknown option 'sede', did you mean 'seed'": ["-o", "sede=1"],
    "unknown model 'nowhere'": ["-m", "nowhere"],
    "unknown items 'squad'": ["-i", "squad"],
    "unknown column 'tokenf1', did you mean 'token_f1'?": ["--measure", "tokenf1"],
}


@pytest.mark.parametrize(
    ("calls", "does", "failed"),
    [("== 40", "raise ValueError('no')", 1), (">= 0", "raise ValueError('no')", 11), (">= 0", "return o.keys / 0", 11)],
)
def test_a_run_with_failed_rows_ends_with_1_and_shows_the_others(calls, does, failed, call, tmp_path):
    """The policy's 41st call raises: one row of 22, fewer than the tenth that ends a study. Or every call does, or
    returns what are no scores."""
    (tmp_path / "mine.py").write_text(
        "import itertools\n\nfrom kvrepro.engine.policy import Policy\n\nCALLS = itertools.count()\n\n\n"
        f"def score(o):\n    if next(CALLS) {calls}:\n        {does}\n"
        "    return o.keys.float().norm(dim=-1)\n\n\nMINE = Policy('Mine', 'me', score)\n"
    )
    given = ["-p", f"{tmp_path / 'mine.py'}:MINE", "-b", "0.5", "-n", "11", "--limit", "300", "--max-new-tokens", "2"]
    given += ["--out", str(tmp_path / "rows.csv"), "-o", f"results={tmp_path}"]
    code, out, err = call("run", *given, "-o", "progress=false", "-o", "workers=1")
    assert code == 1
    assert f"22 rows, 22 computed now, {failed} failed" in out
    assert re.search(r"^ *full +- +0\.\d", out, re.MULTILINE)
    assert re.search(rf"mine.py:MINE +0.5 .* {11 - failed} ", out)
    assert ("run/main: 11 of 22 rows failed, the first " in err) == (failed == 11)
    for rows in (store.read(tmp_path / "run" / "main"), pd.read_csv(tmp_path / "rows.csv")):
        assert (len(rows), rows["error"].notna().sum()) == (22, failed)


@pytest.mark.parametrize("message", WRONG)
def test_a_wrong_word_is_one_line_and_exit_code_2(message, call, tmp_path, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    code, out, err = call("run", "-p", "snapkv", *WRONG[message], "-o", f"results={tmp_path}")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err
