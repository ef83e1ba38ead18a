"""A folder that several processes write: locks, and what the system refuses."""

import importlib.util
import os
import platform
import re
import shlex
import subprocess
import sys

import pandas as pd
import pytest
import stored
from stored import row, rows_of

from kvrepro.errors import InputError
from kvrepro.experiment import sharing, store
from kvrepro.experiment.store import Store
from kvrepro.experiment.table import parts


def test_a_lock_of_another_host_is_respected_and_one_of_a_dead_process_is_not(tmp_path, capsys):
    table = Store(tmp_path, "c", "n")
    table.add([row("a", 0.5)])
    lock = table.folder / "fold.lock"
    for owner in ("4194304\nanother-host\n", ""):  # an empty one may get its name at any moment
        lock.write_text(owner)
        table.fold(wait=0.1)
        assert "fold.lock there is another process's; if no run is under way, remove it" in capsys.readouterr().err
        assert len(parts(table.table)) == 1
    lock.write_text(f"4194304\n{platform.node()}\n")  # no such process
    table.close()
    assert list(pd.read_parquet(table.table)["item"]) == ["a"]


def test_a_lock_that_stays_empty_is_that_of_a_killed_process(tmp_path, capsys):
    with Store(tmp_path, "c", "n") as table:
        table.add([row("a", 0.5)])
        lock = table.folder / "fold.lock"
        lock.touch()
        os.utime(lock, (lock.stat().st_mtime - store.UNNAMED - 1,) * 2)
    assert [*table.folder.iterdir()] == []
    assert dict(rows_of(tmp_path)) == {"a": 0.5}
    assert not capsys.readouterr().err


def test_a_host_without_a_name_recognises_its_files(tmp_path, monkeypatch):
    monkeypatch.setattr(platform, "node", lambda: "")
    module = importlib.util.module_from_spec(sharing.__spec__)
    sharing.__spec__.loader.exec_module(module)
    monkeypatch.setattr(module.psutil, "pid_exists", lambda process: False)
    file = tmp_path / f"{module.named(1)}.tmp"
    file.touch()
    assert module.leftovers(tmp_path) == [file]


def test_a_full_disk_loses_no_row_that_was_stored(tmp_path):
    """Files can grow to 64 KB only, in a process of its own: what the system says is the same as on a full disk."""
    code = f"""
import resource, sys
sys.path.insert(0, {os.path.dirname(stored.__file__)!r})
from stored import row, store
from kvrepro.errors import one_line_errors
with one_line_errors(), store.Store({str(tmp_path)!r}, "c", "n") as table:
    table.add([row("a", 0.5)])
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    table.add([row("b", 0.5)])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    lines = done.stderr.splitlines()
    assert (done.returncode, len(lines)) == (2, 1)
    assert re.search(r"cannot be written \(.*File too large.*\): make room", lines[0])
    assert dict(rows_of(tmp_path)) == {"a": 0.5}
    assert not [*tmp_path.rglob("*.tmp")]


def test_rows_that_could_not_be_folded_in_are_whole_and_a_line_says_where(tmp_path, monkeypatch, capsys):
    def full(*_):
        raise InputError("no room")

    monkeypatch.setattr(Store, "fold", full)
    with Store(tmp_path, "c", "n") as table:
        table.add([row("a", 0.5)])
    assert capsys.readouterr().err.endswith(f"the rows that were stored lie in {table.folder} (no room)\n")
    assert dict(rows_of(tmp_path)) == {"a": 0.5}


def test_what_stands_in_the_way_is_named(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "n.rows").write_text("x")
    for where in (tmp_path / "file", tmp_path):
        with pytest.raises(InputError, match=r"n.rows cannot be written \(") as error:
            Store(where, "c", "n")
        assert "\n" not in str(error.value)
    with pytest.raises(InputError, match=r"cannot be written"):
        store.Tables(tmp_path / "file", "c", "t").add("k", {"a": pd.DataFrame({"x": [1]})})


def test_a_read_only_folder_is_refused_before_anything_is_computed(tmp_path):
    with Store(tmp_path, "c", "n") as table:
        table.add([row("a", 0.5)])
    code = f"from kvrepro.experiment.store import Store; Store({str(tmp_path)!r}, 'c', 'n')"
    mount = f"mount --bind {tmp_path} {tmp_path} && mount -o remount,ro,bind {tmp_path}"
    script = f"{mount} && {sys.executable} -c {shlex.quote(code)}"
    if subprocess.run(["unshare", "-rm", "sh", "-c", mount], capture_output=True).returncode:
        pytest.skip("this machine allows no mounts of a user's own")
    done = subprocess.run(["unshare", "-rm", "sh", "-c", script], capture_output=True, text=True)
    assert done.returncode
    assert "n.rows cannot be written (Read-only file system)" in done.stderr.splitlines()[-1]
    assert dict(rows_of(tmp_path)) == {"a": 0.5}


def test_strange_files_are_left_alone(tmp_path):
    with Store(tmp_path, "c", "n") as table:
        table.add([row("a", 0.5)])
        for name in ("notes.txt", "old.parquet", "00000001.parquet.bak"):
            (table.folder / name).write_text("mine")
    assert len(rows_of(tmp_path)) == 1
    assert {path.read_text() for path in table.folder.iterdir()} == {"mine"}
