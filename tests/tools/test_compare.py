import pandas as pd
import pytest
import typer

from kvrepro.experiment.store import Store
from kvrepro.tools import compare

ROW = {"item": "a", "model": "m", "dtype": "float32", "device": "cpu", "max_new_tokens": 8, "policy": "h2o",
       "capacity": 64, "interval": 8, "reading": "as_run", "execution": "physical", "switches": "{}",
       "regime": "harness", "until": "", "whitelist": "[]", "spans": "[]", "chunk": 4096, "suffix_mode": "dynamic",
       "prefix": 0.0, "suffix": 0.0, "chunk_mode": "last_chunk", "limit": 9,
       "prediction": "red", "kept_hash": "k", "token_f1": 0.5}  # fmt: skip
NOW = ROW | {"policy": "h2o_simple", "regime": "shared cap", "chunk": None, "chunk_mode": None, "limit": 4088}


def fill(folder, *rows):
    with Store(folder, "c", "main") as table:
        table.add([row | {"key": str(i)} for i, row in enumerate(rows)])


def test_rows_are_found_again_under_other_names_and_differences_are_counted(tmp_path, capsys):
    full = ROW | {"policy": "full", "capacity": None}
    fill(tmp_path / "a", ROW, full, ROW | {"item": "b"}, ROW | {"item": "only a"})
    fill(tmp_path / "b", NOW, full | {"regime": None, "interval": None}, NOW | {"item": "b", "prediction": "blue"})
    for folder, verdict in (("a", "partly"), ("b", "reproduced")):
        frame = pd.DataFrame({"claim": ["P1", "P2"], "reading": "as_run", "verdict": [verdict, "partly"]})
        frame.to_csv(tmp_path / folder / "c" / "claims.csv", index=False)
    with pytest.raises(typer.Exit) as ended:
        compare.main(tmp_path / "a", tmp_path / "b")
    assert ended.value.exit_code == 1
    said = capsys.readouterr().out
    assert "1 only A, 0 only B, 3 both, 1 other prediction, 0 other kept_hash, 0 other token_f1" in said
    assert "prediction, A: red" in said
    assert "1 verdicts differ\n  P1 as_run: partly -> reproduced" in said


def test_equal_folders_are_equal(tmp_path):
    for folder in ("a", "b"):
        fill(tmp_path / folder, ROW)
    with pytest.raises(typer.Exit) as ended:
        compare.main(tmp_path / "a", tmp_path / "b", chapter="c")
    assert ended.value.exit_code == 0
