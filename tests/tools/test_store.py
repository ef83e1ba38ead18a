import os
import sys
from functools import partialmethod
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from kvrepro.experiment.sharing import HOST
from kvrepro.experiment.table import RowsFile
from kvrepro.tools import store as tool
from stored import Nursery, row, rows_of, written_by_version_1
from typer.testing import CliRunner

from kvrepro import __main__
from kvrepro.errors import InputError, Stopped
from kvrepro.experiment.store import Store, Tables

K, L = "6b" * 8, "6c" * 8  # keys of items


def called(*arguments):
    """Exit code and lines of `kvrepro store ...`."""
    done = CliRunner().invoke(tool.app, [str(argument) for argument in arguments])
    assert done.exception is None or isinstance(done.exception, SystemExit | InputError), done.exception
    return done.exit_code, done.output.splitlines()


def filled(folder: Path, values: dict, item_tables: dict | None = None) -> Path:
    with Store(folder, "c", "n") as table:
        table.add([row(item, value) for item, value in values.items()])
    for key, value in (item_tables or {}).items():
        Tables(folder, "c", "t").add(key, {"a": pd.DataFrame({"x": [value], "seconds": [id(folder)]})})
    return folder


@pytest.fixture(scope="module")
def nursery():
    with Nursery() as kills:
        yield kills


def test_the_command_is_there(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["kvrepro", "store", "--help"])
    with pytest.raises(SystemExit, match="0"):
        __main__.main()
    output = capsys.readouterr().out
    assert all(name in output for name in ("verify", "gc", "diff", "merge"))


def test_verify_names_each_fault(tmp_path):
    filled(tmp_path, {"a": 0.1, "b": 0.2}, {K: 1, L: 2})
    assert called("verify", tmp_path) == (0, ["3 files, 0 faults"])
    with Store(tmp_path, "c", "double") as table:
        table.add([row("a"), row("b") | {"key": "a-e1"}])
    with Store(tmp_path, "c", "cut") as table:
        table.add([row("a")])
    (tmp_path / "c" / "cut.parquet").write_bytes((tmp_path / "c" / "cut.parquet").read_bytes()[:-50])
    broken = tmp_path / "c" / "t" / K / "a.parquet"
    broken.write_bytes(broken.read_bytes().replace(b"PAR1", b"PAR2"))
    (table.folder / "notes.txt").write_text("x")
    code, lines = called("verify", tmp_path)
    assert code == 1
    assert [line.split(" ")[0].rstrip(":") for line in lines[:-1]] == [
        str(tmp_path / "c" / "cut.parquet"), str(tmp_path / "c" / "double.parquet"),
        str(broken), str(table.folder / "notes.txt"),
    ]  # fmt: skip
    assert lines[-1] == "5 files, 3 faults"
    with pytest.raises(InputError, match="no folder"):
        tool.verify(tmp_path / "none")


def test_a_table_is_found_without_the_folder_beside_it_and_whatever_stands_in_its_place(tmp_path):
    """Archives and uploads drop empty folders. Two files with wrong bytes are two lines."""
    whole = filled(tmp_path / "whole", {"a": 0.1, "b": 0.2})
    (whole / "c" / "n.rows").rmdir()
    assert called("verify", whole) == (0, ["1 file, 0 faults"])
    assert called("gc", whole, "--yes") == (0, ["0 bytes deleted"])
    (whole / "c" / "n.rows").rmdir()
    assert called("merge", whole, "--into", tmp_path / "new") == (0, [f"2 rows added to {tmp_path / 'new'}"])
    assert called("diff", whole, tmp_path / "new")[0] == 0
    odd = filled(tmp_path / "odd", {"a": 0.1})
    (odd / "c" / "folder.parquet").mkdir()
    (odd / "c" / "link.parquet").symlink_to(tmp_path / "nowhere")
    (odd / "c" / "text.parquet").write_text("no table")
    for name in ("n", "m"):
        with Store(odd, "c", name) as table:
            table.add([row("a")])
        path = odd / "c" / f"{name}.parquet"
        content = bytearray(path.read_bytes())
        content[len(content) // 3] ^= 1
        path.write_bytes(content)
    code, lines = called("verify", odd)
    assert code == 1
    assert lines[-1] == "5 files, 5 faults"
    assert sorted(Path(line.split(" ")[0].rstrip(":")).name for line in lines[:-1]) == [
        "folder.parquet", "link.parquet", "m.parquet", "n.parquet", "text.parquet",
    ]  # fmt: skip


def test_folders_that_cannot_be_made_are_one_line(tmp_path):
    whole = filled(tmp_path / "made", {"a": 0.1})
    done = CliRunner().invoke(tool.app, ["merge", str(whole), "--into", "/proc/nowhere"])
    assert isinstance(done.exception, InputError)
    assert "cannot be written" in str(done.exception)


def test_gc_deletes_what_no_one_reads_and_only_when_told(tmp_path):
    written_by_version_1(tmp_path, [[row("a", 0.1), row("b", 0.2)], [row("b", 0.3, engine="e2")]])
    leftover = tmp_path / "c" / "n.rows" / f"00000003@{HOST}-4194304-0123abcd.parquet.tmp"
    of_another = leftover.with_name("00000003@elsewhere-7-0123abcd.parquet.tmp")
    for path in (leftover, of_another):
        path.write_text("half")
    (leftover.parent / "notes.txt").write_text("mine")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.*") if path.is_file()}
    code, lines = called("gc", tmp_path)
    assert code == 0
    assert lines[0] == f"{leftover}: half-written, 4 bytes"
    assert "1 rows that newer ones replaced" in lines[1]
    assert "--yes" in lines[2]
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.*") if path.is_file()} == before
    assert called("gc", tmp_path, "--yes")[0] == 0
    assert dict(rows_of(tmp_path)) == {"a": 0.1, "b": 0.3}
    assert len(pd.read_parquet(tmp_path / "c" / "n.parquet")) == 2
    assert sorted(path.name for path in leftover.parent.iterdir()) == [of_another.name, "notes.txt"]
    assert called("gc", tmp_path)[1] == ["0 bytes to delete: --yes deletes them"]


def test_gc_goes_on_after_a_table_that_it_cannot_read(tmp_path):
    written_by_version_1(tmp_path, [[row("a", 0.1), row("b", 0.2)], [row("b", 0.3, engine="e2")]])
    (tmp_path / "c" / "a.parquet").mkdir()  # comes before the other
    code, lines = called("gc", tmp_path, "--yes")
    assert code == 1
    assert any("1 rows that newer ones replaced" in line for line in lines)
    assert dict(rows_of(tmp_path)) == {"a": 0.1, "b": 0.3}
    assert (tmp_path / "c" / "a.parquet").is_dir()


def test_gc_leaves_what_other_programs_call_tmp(tmp_path):
    """However old, and whichever folder was named by mistake; what this package left half-written goes."""
    theirs = [
        tmp_path / "c" / "notes.tmp",
        tmp_path / "c" / "src" / "build.tmp" / "a",
        tmp_path / "c" / "n.rows" / "x.tmp",
    ]
    ours = [
        tmp_path / "c" / "claims.csv.0123abcd.tmp",
        tmp_path / "c" / "t" / "k.00000000@elsewhere-7-0123abcd.tmp" / "a",
    ]
    for path in (*theirs, *ours):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("half")
        for entry in (path, path.parent):
            os.utime(entry, (0, 0))
    assert called("gc", tmp_path, "--yes")[0] == 0
    assert [path.exists() for path in (*theirs, *ours)] == [True] * 3 + [False] * 2


def test_gc_says_in_one_line_that_another_process_holds_a_table(tmp_path, monkeypatch):
    filled(tmp_path, {"a": 0.1})
    lock = tmp_path / "c" / "n.rows" / "fold.lock"
    lock.write_text("1\nelsewhere\n")
    monkeypatch.setattr(Store, "locked", partialmethod(Store.locked, wait=0.1))
    with pytest.raises(Stopped, match="keeps the rows that newer ones replaced: .*elsewhere"):
        tool.compact(tmp_path / "c" / "n.parquet", True)
    assert dict(rows_of(tmp_path)) == {"a": 0.1}


@pytest.mark.parametrize("command", ["verify", "gc", "diff", "merge"])
def test_a_store_that_another_process_folds_meanwhile_is_read_again(tmp_path, monkeypatch, command):
    folder = filled(tmp_path / "a", {"a": 0.1})
    other = filled(tmp_path / "b", {"a": 0.1, "b": 0.2})
    with Store(folder, "c", "n") as writer:
        writer.add([row("b", 0.2)])
        read = RowsFile.read

        def folded_before(self, *arguments):
            monkeypatch.setattr(RowsFile, "read", read)
            writer.fold()
            return read(self, *arguments)

        monkeypatch.setattr(RowsFile, "read", folded_before)
        more = {"diff": [other], "merge": ["--into", tmp_path / "c"]}.get(command, [])
        code, lines = called(command, folder, *more)
    assert (code, lines[-1]) == {
        "verify": (0, "1 file, 0 faults"),
        "gc": (0, "0 bytes to delete: --yes deletes them"),
        "diff": (0, "tables per item: 0 only in A, 0 only in B, 0 of 0 differ"),
        "merge": (0, f"2 rows added to {tmp_path / 'c'}"),
    }[command]


@pytest.mark.parametrize("content", [b"", b"a,b\n1,2\n", b"\xff\xfe\x00"])
def test_diff_names_a_file_of_verdicts_that_holds_none(tmp_path, content):
    folders = [filled(tmp_path / name, {"x": 0.1}) for name in "ab"]
    (folders[0] / "c" / "claims.csv").write_text("claim,reading,verdict\nP1,as_run,partly\n")
    (folders[1] / "c" / "claims.csv").write_bytes(content)
    done = CliRunner().invoke(tool.app, ["diff", *map(str, folders)])
    assert isinstance(done.exception, InputError)
    assert f"{folders[1] / 'c' / 'claims.csv'} is no table of verdicts" in str(done.exception)


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_a_row_that_failed_is_no_conflict_and_makes_room_when_merged(tmp_path, order):
    """As when one machine had too little memory for what another one computed."""
    filled(tmp_path / "a", {"x": 0.1})
    with Store(tmp_path / "b", "c", "n") as table:
        table.add([row("x") | {"token_f1": None, "error": "OutOfMemoryError: "}])
    assert called("merge", *(tmp_path / name for name in order), "--into", tmp_path / "into")[0] == 0
    assert dict(rows_of(tmp_path / "into")) == {"x": 0.1}


def test_diff_counts_what_differs(tmp_path):
    a = filled(tmp_path / "a", {"x": 0.1, "y": 0.2, "z": 0.3}, {K: 1, L: 2})
    same = filled(tmp_path / "same", {"z": 0.3, "y": 0.2, "x": 0.1}, {L: 2, K: 1})
    b = filled(tmp_path / "b", {"y": 0.2, "z": 0.4, "w": 0.5, "v": 0.6}, {K: 1, L: 3})
    assert called("diff", a, same)[0] == 0
    code, lines = called("diff", a, b)
    assert code == 1
    assert lines == [
        "c/n.parquet: 1 only in A, 2 only in B, 1 of 2 differ (50.00%)", "    token_f1 1",
        "tables per item: 0 only in A, 0 only in B, 1 of 2 differ",
    ]  # fmt: skip
    assert called("diff", a, filled(tmp_path / "d", {"x": 0.1}))[0] == 1


def test_diff_shows_rows_and_verdicts_that_differ(tmp_path):
    folders = [filled(tmp_path / name, {"x": value, "y": 0.2}) for name, value in (("a", 0.1), ("b", 0.3))]
    for folder, verdict in zip(folders, ("partly", "reproduced"), strict=True):
        frame = pd.DataFrame({"claim": ["P1", "P2"], "reading": "as_run", "verdict": [verdict, "partly"]})
        frame.to_csv(folder / "c" / "claims.csv", index=False)
    code, lines = called("diff", *folders, "--show", "5")
    assert code == 1
    assert lines[2:6] == [
        "    item=x model=m policy=lru capacity=256", "      token_f1: 0.1 -> 0.3",
        "c/claims.csv: 1 verdicts differ", "    P1 as_run: partly -> reproduced",
    ]  # fmt: skip


def test_merge_joins_and_never_overwrites(tmp_path):
    a = filled(tmp_path / "a", {"x": 0.1, "y": 0.2}, {K: 1})
    b = filled(tmp_path / "b", {"y": 0.2, "z": 0.3}, {K: 1, L: 2})
    into = filled(tmp_path / "into", {"w": 0.4})
    assert called("merge", a, b, "--into", into)[0] == 0
    assert dict(rows_of(into)) == {"w": 0.4, "x": 0.1, "y": 0.2, "z": 0.3}
    assert called("merge", a, b, "--into", into)[1] == [f"0 rows added to {into}"]
    assert Tables(into, "c", "t").read(L)["a"].x.tolist() == [2]
    other = filled(tmp_path / "other", {"x": 0.9, "v": 0.5}, {K: 3})
    code, lines = called("merge", other, "--into", into)
    assert code == 1
    assert lines[0].startswith(f"{other / 'c/n.parquet'}: 1 rows differ")
    assert lines[1].startswith(f"{other / 'c/t' / K}: differs")
    assert "v" not in rows_of(into)
    assert called("merge", other, "--into", into, "--first")[0] == 0
    assert dict(rows_of(into)) == {"w": 0.4, "x": 0.1, "y": 0.2, "z": 0.3, "v": 0.5}
    assert Tables(into, "c", "t").read(K)["a"].x.tolist() == [1]


def test_a_folder_without_results_is_refused_where_it_would_pass_for_whole(tmp_path):
    """That of a chapter, one above, an empty one."""
    filled(tmp_path / "of" / "results", {"x": 0.1}, {K: 1})
    (tmp_path / "empty").mkdir()
    for wrong in (tmp_path / "of" / "results" / "c", tmp_path / "of", tmp_path, tmp_path / "empty"):
        for command in (["verify"], ["gc"], ["diff", wrong], ["merge", "--into", tmp_path / "new"]):
            done = CliRunner().invoke(tool.app, [str(argument) for argument in (*command, wrong)])
            assert str(done.exception).startswith(f"no results in {wrong}: give a folder of results, such as ")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("harmed", ["c/n.parquet", f"c/t/{K}/a.parquet"])
def test_nothing_is_merged_where_a_file_is_cut(tmp_path, harmed):
    a, b = (filled(tmp_path / name, {name: 0.1}, {key: 1}) for name, key in (("a", L), ("b", K)))
    os.truncate(b / harmed, (b / harmed).stat().st_size // 2)
    code, lines = called("merge", a, b, "--into", tmp_path / "new", "--first")
    assert code == 1
    assert lines[0].startswith(f"{b / harmed} is no whole parquet file (")
    assert lines[1:] == ["nothing was merged"]
    assert not (tmp_path / "new").exists()


def test_kills_while_merging_migrating_and_deleting_change_nothing(tmp_path, nursery):
    """A merge of a folder of version 1 with one of this version, and a deletion of stale rows, killed 30 times."""
    old = [[row(i, i / 1000, engine="e0") for i in range(50)], *([row(i, i / 1000)] for i in range(20))]
    written_by_version_1(tmp_path / "a", old)
    b, into, killed = filled(tmp_path / "b", {str(i): i / 1000 for i in range(40, 90)}), tmp_path / "into", 0
    moments = np.random.default_rng(0)
    for i in range(30):
        work = nursery.start("merge", tmp_path / "a", b, into) if i % 2 else nursery.start("gc", tmp_path / "a")
        killed += nursery.kill(work, moments.uniform(0.0, 0.12))
        assert dict(rows_of(tmp_path / "a")) == {str(i): i / 1000 for i in range(50)}
    assert killed > 10
    nursery.wait(nursery.start("gc", tmp_path / "a"))
    nursery.wait(nursery.start("merge", tmp_path / "a", b, into))
    assert dict(rows_of(into)) == {str(i): i / 1000 for i in range(90)}
    assert dict(rows_of(b)) == {str(i): i / 1000 for i in range(40, 90)}
    for folder in (tmp_path / "a", into):
        assert tool.faults(folder) == (1, [])
        assert len(pd.read_parquet(folder / "c" / "n.parquet")) == len(rows_of(folder))


@pytest.mark.parametrize(("option", "value", "says"), [
    ("--rows", "0", "rows 0: "),
    ("--rows", "-1", "rows -1: "),
    ("--rows", f"1{'0' * 20}", "less than or equal to 1000000000"),
    ("--out", "{}", "give a file in a folder that is there"),
    ("--out", "{}/none/t.csv", "give a file in a folder that is there"),
])  # fmt: skip
def test_the_bench_refuses_what_it_cannot_measure_or_store_before_it_writes(tmp_path, option, value, says):
    value = value.format(tmp_path)
    done = CliRunner().invoke(tool.app, ["bench", "--rows", "10", "--like", "none", f"{option}={value}"])
    assert isinstance(done.exception, InputError)
    assert says in str(done.exception)


def test_the_bench_measures_and_stores_its_rows(tmp_path):
    like = filled(tmp_path / "like", {str(i): i / 100 for i in range(70)}) / "c" / "n.parquet"
    code, _ = called("bench", "--rows", 500, "--like", like, "--out", tmp_path / "t.csv")
    assert code == 0
    [measured] = pd.read_csv(tmp_path / "t.csv").to_dict("records")
    assert measured["rows"] == 500
    assert all(0 < measured[f"{name}_seconds"] < 60 for name in ("open", "study", "one_item", "add", "fold"))
