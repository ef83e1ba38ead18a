"""The campaign of kills: it counts what is lost, and it finds its victims."""

import sys
import time
from pathlib import Path

import pandas as pd
import pytest
import typer

from kvrepro.errors import Stopped
from kvrepro.paths import replaced
from kvrepro.tools import faults, kills


def frames(**tables):
    frame_of = {name: pd.DataFrame(rows, columns=["key", "value"]) for name, rows in tables.items()}
    return {name: frame.set_index("key", drop=False) for name, frame in frame_of.items()}


def test_what_is_lost_doubled_and_different_is_counted():
    quiet = frames(main=[("a", "1"), ("b", "2"), ("c", "3")], extra=[("d", "4")])
    other = frames(main=[("a", "1"), ("b", "9"), ("a", "1")])
    assert kills.differences(quiet, quiet).empty
    differences = kills.differences(quiet, other).set_index(["table", "column"])
    assert differences.loc[("main", "")].to_dict() == {"lost": 1, "doubled": 1, "different": 0}
    assert differences.loc[("main", "value"), "different"] == 1
    assert differences.loc[("extra", ""), "lost"] == 1


def work(chapter, parameters, log):
    """In a chapter's place: ten files; those that are there are passed over. One that forgets loses a file in the
    killed run, and writes something else into another."""
    folder = Path(parameters["results"])
    folder.mkdir(exist_ok=True)
    forgets = parameters["forgets"] and folder.name == "killed"
    for i in range(10):
        file = folder / f"{i}.parquet"
        if not file.exists() and not (forgets and i == 4):
            time.sleep(0.05)
            with replaced(file) as aside:
                pd.DataFrame({"value": [i + (forgets and i == 3)]}).to_parquet(aside)
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


STORE = """import pathlib, sys, time
import pandas as pd
folder, count = pathlib.Path(sys.argv[1]), int(sys.argv[2])
folder.mkdir(parents=True, exist_ok=True)
try:
    known = pd.read_parquet(folder / "main.parquet")
except FileNotFoundError:
    known = pd.DataFrame()
except Exception:
    sys.exit("it is no whole parquet file: move it away")
rows = pd.DataFrame({"key": [*"abcd"][:count], "chapter": "run", "name": "main", "value": range(count)})
if sys.argv[3] == "forgets" and not len(known):
    rows = rows[1:]
rows["date"] = time.time()
rows.to_parquet(folder / "main.parquet")
"""


@pytest.mark.parametrize(("does", "lost"), [("right", 0), ("forgets", 1)])
def test_what_a_damaged_file_costs_is_counted(tmp_path, monkeypatch, does, lost):
    """In the place of kvrepro, a program that stores, refuses and, in one case, does not compute everything again."""

    def command(fault, base):
        return [sys.executable, "-c", STORE, str(base / "results" / "run"), "4", does]

    monkeypatch.setattr(faults, "_command", command)
    kept = tmp_path / "stored"
    (kept / "run").mkdir(parents=True)
    frame = pd.DataFrame({"key": [*"abcd"], "chapter": "run", "name": "main", "value": range(4), "date": 0.0})
    frame.to_parquet(kept / "run" / "main.parquet")
    row = faults.damaged("a results file is cut", tmp_path, kept, kills.tables(kept))
    assert (row["exit_code"], row["lost"], row["processes_left"]) == (1, lost, 0)
    assert row["seen"] == "it is no whole parquet file: move it away"
    row = faults.damaged("files from the future", tmp_path, kept, kills.tables(kept))
    assert row["lost"] == 4  # it computed what was stored once more


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
