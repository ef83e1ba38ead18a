"""The campaign of kills: it counts what is lost, and it finds its victims."""

import os
import shutil
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
import stored
import typer
from stored import row

from kvrepro.errors import Stopped
from kvrepro.experiment.store import Store, Tables
from kvrepro.tools import faults, kills


def filled(folder: Path, values: dict, name: str = "main") -> Path:
    with Store(folder, "run", name) as table:
        table.add([row(item, value) | {"prediction": item, "date": "2026-01-01"} for item, value in values.items()])
    return folder


def test_what_is_lost_doubled_and_different_is_counted(tmp_path):
    quiet = filled(filled(tmp_path / "quiet", {"a": 0.1, "b": 0.2, "c": 0.3}), {"d": 0.4}, "extra")
    other = filled(tmp_path / "other", {"a": 0.1, "b": 0.9})
    shutil.copy(other / "run" / "main.parquet", other / "run" / "main.rows" / "00000001.parquet")
    for folder, value in ((quiet, 1), (other, 2)):
        Tables(folder, "run", "items").add("6b" * 8, {"t": pd.DataFrame({"x": [value], "seconds": [0.1]})})
    Tables(quiet, "run", "items").add("6c" * 8, {"t": pd.DataFrame({"x": [1, 2]})})
    for folder, verdicts in ((quiet, ["partly", "partly"]), (other, ["partly", "reproduced"])):
        claims = pd.DataFrame({"claim": ["P1", "P2"], "reading": "as_run", "verdict": verdicts})
        claims.to_csv(folder / "run" / "claims.csv", index=False)
    assert not kills.differences(quiet, quiet)[["lost", "doubled", "different"]].to_numpy().any()
    counts = kills.differences(quiet, other).astype({"table": str}).set_index("table").T.to_dict("list")
    assert counts == {
        "run/extra.parquet": [1, 1, 0, 0], "run/main.parquet": [3, 1, 2, 1],
        f"run/items/{'6b' * 8}": [1, 0, 0, 1], f"run/items/{'6c' * 8}": [2, 2, 0, 0], "run/claims.csv": [2, 0, 0, 1],
    }  # fmt: skip


def test_an_items_tables_count_as_rows_once_they_have_their_name(tmp_path):
    tables = {"t": pd.DataFrame({"x": [1, 2]}), "u": pd.DataFrame({"x": [3]})}
    Tables(tmp_path, "run", "items").add("6b" * 8, tables)
    assert (kills.stored_rows(tmp_path), kills.being_written(tmp_path)) == (3, False)
    folder = tmp_path / "run" / "items" / ("6b" * 8)
    folder.rename(folder.with_suffix(".tmp"))
    assert (kills.stored_rows(tmp_path), kills.being_written(tmp_path)) == (0, True)


def test_rows_are_counted_while_others_rename_folders(tmp_path, monkeypatch):
    """A folder that is there when its parent is listed, and has another name when it is looked into."""
    Tables(tmp_path, "run", "items").add("6b" * 8, {"t": pd.DataFrame({"x": [1, 2]})})
    aside = tmp_path / "run" / "items" / "other.tmp"
    aside.mkdir()
    scandir = os.scandir

    def renamed_meanwhile(path):
        if Path(path) == aside and aside.is_dir():
            aside.rename(aside.with_suffix(""))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", renamed_meanwhile)
    assert kills.stored_rows(tmp_path) == 2
    assert not aside.is_dir()


def work(chapter, parameters, log):
    """In a chapter's place: ten rows; those that are there are passed over. One that forgets loses a row in the killed
    run, and writes something else into another."""
    folder = Path(parameters["results"])
    forgets = parameters["forgets"] and folder.name == "killed"
    with Store(folder, "run", "main") as table:
        for i in range(10):
            if table.missing(stored.identities(i)) and not (forgets and i == 4):
                time.sleep(0.05)
                table.add([row(i, i + (forgets and i == 3))])
    time.sleep(0.5)  # its analysis


@pytest.mark.parametrize("forgets", [False, True])
def test_kills_fall_into_the_computation_and_what_they_change_is_seen(tmp_path, monkeypatch, forgets):
    monkeypatch.setattr(kills, "_child", work)
    row = kills.campaign("any", {"forgets": forgets}, tmp_path, "driver", 4, seed=1)
    assert row["kills"] == 4
    assert row["while_computing"] >= 1
    assert row["rows"] == 10
    assert (row["lost"], row["doubled"], row["different"]) == (forgets, 0, forgets)


class Process:
    """What psutil says of one."""

    def __init__(self, name, line):
        self.name, self.cmdline, self.parent = lambda: name, lambda: [line], lambda: None


def test_a_node_is_killed_once_its_workers_are_busy(monkeypatch):
    raylet, worker = Process("raylet", "raylet --port"), Process("python", "ray::Worker")
    monkeypatch.setattr(kills, "family", lambda process: [raylet, worker])
    assert kills._victims(None, "node") == []
    assert kills._victims(None, "worker") == [worker]
    worker.cmdline = lambda: ["ray::Worker.do"]
    assert kills._victims(None, "node") == [raylet]


STORE = """import sys
from pathlib import Path
from stored import identities, row
from kvrepro.experiment.store import Store
folder, does = Path(sys.argv[1]), sys.argv[2]
with Store(folder, "run", "main") as table:
    rows = [row(item) | {"prediction": item, "date": "today"} for item in "abcd"]
    missing = table.missing(identities(*"abcd"))
    if does == "forgets" and len(missing) == 4:
        missing = missing[1:]
    table.add([row for row in rows if row["key"] in missing or does == "repeats"])
"""


@pytest.mark.parametrize(
    ("name", "does", "code", "lost"),
    [
        ("a results file is cut", "right", 1, 0), ("a results file is cut", "forgets", 1, 1),
        ("files from the future", "right", 0, 0), ("files from the future", "repeats", 0, 4),
    ],
)  # fmt: skip
def test_what_a_damaged_file_costs_is_counted(tmp_path, monkeypatch, name, does, code, lost):
    """In the place of kvrepro, a program that stores what is missing, or in some cases less or more."""

    def command(fault, base):
        return [sys.executable, "-c", STORE, str(base / "results"), does]

    monkeypatch.setattr(faults, "_command", command)
    monkeypatch.setenv("PYTHONPATH", str(Path(stored.__file__).parent))
    kept = filled(tmp_path / "stored", dict.fromkeys("abcd", 0.0))
    of_fault = faults.damaged(name, tmp_path, kept, kept)
    assert (of_fault["exit_code"], of_fault["lost"], of_fault["processes_left"]) == (code, lost, 0)
    assert ("main.parquet is no whole parquet file" in of_fault["seen"]) == (code == 1)


def test_a_fault_that_is_met_in_silence_fails(tmp_path, monkeypatch):
    seen = {"fault": "one", "made": "", "seen": "", "exit_code": 0, "lost": 0, "seconds": None, "processes_left": 0}
    monkeypatch.setattr(faults, "meet", lambda name, base: dict(seen))
    with pytest.raises(typer.Exit):
        faults.table_(tmp_path / "faults.csv", "NaN")
    assert len(pd.read_csv(tmp_path / "faults.csv")) == 1


def test_a_campaign_without_a_kill_is_no_result(tmp_path, monkeypatch):
    counts = {"kills": 0, "lost": 0, "doubled": 0, "different": 0}
    monkeypatch.setattr(faults, "campaign", lambda *_: dict(counts))
    monkeypatch.setenv("KVREPRO_ENGINE", "local")  # the command sets it
    table = tmp_path / "kills.csv"
    with pytest.raises(Stopped, match="^no worker could be killed: .* give more --n-items"):
        faults.kills("leakage", 3, "worker", model="small-gqa", out=table)
    assert not table.exists()
    counts["kills"] = 2
    faults.kills("leakage", 3, "worker", model="small-gqa", out=table)
    assert pd.read_csv(table).kills.tolist() == [2]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*faults.FAULTS, *faults.DAMAGES])
def test_a_fault_is_told_in_one_line_and_loses_nothing(name, tmp_path):
    [row] = faults._met([name], tmp_path)
    assert row["seen"]
    assert (row["lost"], row["processes_left"]) == (0, 0)
