import contextlib
import os
import platform
import shlex
import shutil
import subprocess
import sys

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import stored
from hypothesis import given, settings
from hypothesis import strategies as st
from stored import Nursery, lives, row, rows_of, written_by_version_1

from kvrepro.errors import InputError
from kvrepro.experiment import store
from kvrepro.experiment.store import Store


def test_rows_come_back_and_are_known(tmp_path):
    with Store(tmp_path, "protection", "main") as table:
        assert table.missing(["a-e1", "b-e1"]) == ["a-e1", "b-e1"]
        table.add([row("a", 0.5)])
        assert list(table.frame()["item"]) == ["a"]
    with Store(tmp_path, "protection", "main") as table:
        assert table.missing(["a-e1", "b-e1"]) == ["b-e1"]
        table.add([row("b", 0.25)])
    frame = store.read(tmp_path / "protection" / "main.parquet")
    assert list(frame["token_f1"]) == [0.5, 0.25]
    assert list(frame.columns) == store.COLUMNS
    assert [list(kept) for kept in frame["kept"]] == [[256, 256]] * 2
    assert not list((tmp_path / "protection" / "main.rows").iterdir())


def test_a_null_capacity_survives(tmp_path):
    with Store(tmp_path, "c", "n") as table:
        table.add([row("a") | {"capacity": None, "policy": "full"}, row("a") | {"key": "other"}])
    assert list(pd.read_parquet(tmp_path / "c" / "n.parquet")["capacity"].isna()) == [True, False]


def test_a_stale_row_is_replaced_and_lost_only_then(tmp_path):
    with Store(tmp_path, "c", "n") as table:
        table.add([row("a", 0.1), row("b", 0.2)])
    with Store(tmp_path, "c", "n") as table:
        assert table.missing(["a-e2", "b-e2"]) == ["a-e2", "b-e2"]
        table.add([row("b", 0.9, engine="e2")])
    frame = store.read(tmp_path / "c" / "n.parquet").set_index("item")
    assert dict(frame["token_f1"]) == {"a": 0.1, "b": 0.9}
    assert frame["engine_hash"]["b"] == "e2"


def test_a_failed_row_is_tried_again(tmp_path):
    with Store(tmp_path, "c", "n") as table:
        table.add([row("a", error="RuntimeError: no memory")])
        assert table.missing(["a-e1"]) == ["a-e1"]
    with Store(tmp_path, "c", "n") as table:
        assert table.missing(["a-e1"]) == ["a-e1"]
        table.add([row("a", 0.5)])
        assert table.missing(["a-e1"]) == []
    assert list(store.read(tmp_path / "c" / "n.parquet")["error"].isna()) == [True]


@given(st.lists(st.lists(st.tuples(st.integers(0, 6), st.floats(0, 1)), max_size=5), max_size=6), st.integers(0, 6))
@settings(max_examples=20, deadline=None)
def test_the_table_is_the_latest_row_of_each_item(tmp_path_factory, batches, closes):
    folder, expected = tmp_path_factory.mktemp("store"), {}
    table = Store(folder, "c", "n")
    for i, batch in enumerate(batches):
        table.add([row(item, value) for item, value in batch])
        expected |= {str(item): value for item, value in batch}
        if i == closes:
            table.close()
            table = Store(folder, "c", "n")
    assert dict(table.frame().set_index("item")["token_f1"]) == expected if expected else True
    table.close()
    if any(batches):
        assert dict(store.read(folder / "c" / "n.parquet").set_index("item")["token_f1"]) == expected


# ---- several processes, killed at any moment


@pytest.fixture(scope="module")
def nursery():
    with Nursery() as found:
        yield found


def test_a_lock_without_a_name_is_that_of_a_killed_process(tmp_path):
    with Store(tmp_path, "c", "n") as table:
        table.add([row("a", 0.5)])
        (tmp_path / "c" / "n.rows" / "fold.lock").touch()
    assert [*(tmp_path / "c" / "n.rows").iterdir()] == []
    assert len(store.read(tmp_path / "c" / "n.parquet")) == 1


def test_thirty_kills_lose_and_double_nothing(tmp_path, nursery):
    """A process that adds, folds and closes is killed thirty times; each row that it reported is there, once."""
    random, killed, reported = np.random.default_rng(0), 0, set()
    with Store(tmp_path, "c", "n") as table:
        table.add([row("other", 0.5) | {"model": "other", "key": "other"}])
    for i in range(30):
        writer = nursery.start("add_rows", tmp_path, 5 * i, 5 * i + 40)
        killed += nursery.kill(writer, random.uniform(0.02, 0.15))
        found = rows_of(tmp_path).drop("other")
        reported |= {*(tmp_path / "said").read_text().split()} if (tmp_path / "said").exists() else set()
        assert reported <= {*found.index}
        assert all(value == int(item) / 1000 for item, value in found.items())
    assert killed > 20
    nursery.wait(nursery.start("add_rows", tmp_path, 0, 185))
    whole = pd.read_parquet(tmp_path / "c" / "n.parquet").set_index("item")
    assert whole.index.is_unique
    assert {*whole.index} == {str(i) for i in range(185)} | {"other"}
    assert whole.model["other"] == "other"
    assert [*(tmp_path / "c" / "n.rows").iterdir()] == []


def test_processes_that_share_a_table_lose_and_double_nothing(tmp_path, nursery):
    """Three processes with parts that overlap, each folding often, while this one reads."""
    writers = [nursery.start("add_rows", tmp_path, *part) for part in ((0, 60), (30, 90), (40, 80))]
    before, reads = 0, 0
    while any(map(lives, writers)):
        with contextlib.suppress(InputError):
            found = rows_of(tmp_path)  # raises where a row is there twice
            assert len(found) >= before
            before, reads = len(found), reads + 1
    assert reads > 3
    assert dict(rows_of(tmp_path)) == {str(i): i / 1000 for i in range(90)}
    Store(tmp_path, "c", "n").close()
    assert len(pd.read_parquet(tmp_path / "c" / "n.parquet")) == 90


def test_kills_leave_an_items_tables_whole(tmp_path, nursery):
    random, tables = np.random.default_rng(1), store.Tables(tmp_path, "c", "t")
    for _ in range(10):
        nursery.kill(nursery.start("add_tables", tmp_path, 40), random.uniform(0.01, 0.1))
        for path in (tmp_path / "c" / "t").glob("[0-9]*"):
            if not path.name.endswith(".tmp"):
                assert [*tables.read(path.name)] == ["a", "b"]
    nursery.wait(nursery.start("add_tables", tmp_path, 40))
    assert [tables.read(str(i))["b"].x[0] for i in range(40)] == [*range(40)]


def test_a_kill_between_folding_and_removing_loses_and_doubles_nothing(tmp_path):
    table, aside = Store(tmp_path, "c", "n"), tmp_path / "aside"
    for value in (0.1, 0.2, 0.3):
        table.add([row("a", value), row("b", 2 * value)])
    shutil.copytree(table.folder, aside)
    table.close()
    for path in sorted(aside.iterdir())[:2]:  # the newest was removed already
        shutil.copy(path, table.folder)
    assert dict(rows_of(tmp_path)) == {"a": 0.3, "b": 0.6}
    with Store(tmp_path, "c", "n") as table:
        table.add([row("c", 0.5)])
    assert dict(rows_of(tmp_path)) == {"a": 0.3, "b": 0.6, "c": 0.5}
    assert [*table.folder.iterdir()] == []


def test_a_lock_of_another_host_is_respected_and_one_of_a_dead_process_is_not(tmp_path, capsys):
    table = Store(tmp_path, "c", "n")
    table.add([row("a", 0.5)])
    lock = table.folder / "fold.lock"
    lock.write_text("4194304\nanother-host\n")
    table.fold(wait=0.1)
    assert "held by another process" in capsys.readouterr().err
    assert len(store.parts(table.table)) == 1
    lock.write_text(f"4194304\n{platform.node()}\n")  # no such process
    table.close()
    assert list(pd.read_parquet(table.table)["item"]) == ["a"]


def test_order_is_by_number_and_not_by_the_clock(tmp_path):
    table = Store(tmp_path, "c", "n")
    for value in (0.1, 0.2):
        table.add([row("a", value)])
    for age, path in enumerate(store.parts(table.table)):
        os.utime(path, (1e9 - age * 1e6,) * 2)  # the clock was set back between them
    assert dict(rows_of(tmp_path)) == {"a": 0.2}
    table.close()
    os.utime(table.table, (4e9,) * 2)
    with Store(tmp_path, "c", "n") as table:
        table.add([row("a", 0.3)])
        assert dict(rows_of(tmp_path)) == {"a": 0.3}
    assert dict(rows_of(tmp_path)) == {"a": 0.3}


def test_a_failure_does_not_take_the_place_of_another_processs_success(tmp_path):
    with Store(tmp_path, "c", "n") as one, Store(tmp_path, "c", "n") as other:
        one.add([row("a", 0.5)])
        other.add([row("a", error="RuntimeError: no memory"), row("b", error="ValueError: b")])
        assert one.missing(["a-e1", "b-e1"]) == ["b-e1"]
    assert store.read(tmp_path / "c" / "n.parquet", ["error"]).error.isna().tolist() == [True, False]


# ---- large tables


def test_large_files_are_never_written_again(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "MOST", 100)
    monkeypatch.setattr(store, "LEAST", 20)
    monkeypatch.setattr(store, "MANY", 8)
    expected, states = {}, {}
    for number in range(30):
        with Store(tmp_path, "c", "n") as table:
            for part in range(3):
                some = {f"{(7 * number + i) % 400}": number + part / 10 for i in range(10)}
                table.add([row(item, value) for item, value in some.items()])
                expected |= some
        for file in store.files_of(table.table):
            assert file.rows <= 100
            if file.rows > 60:
                assert states.setdefault(file.path, file.found) == file.found
    assert dict(rows_of(tmp_path)) == expected
    assert len(states) > 1
    assert len(store.files_of(table.table)) < 25
    keys, asked = [f"{item}-e1" for item in (3, 199, 150)], store.asked_of([row(item) for item in (3, 199, 150)])
    assert table.missing([*keys, "new"], asked) == table.missing([*keys, "new"]) == ["new"]
    assert table.frame(keys, ["item", "token_f1"], asked).set_index("item").token_f1.to_dict() == {
        item: expected[item] for item in ("3", "199", "150")
    }


def test_only_what_is_asked_for_is_read(tmp_path):
    with Store(tmp_path, "c", "n") as table:
        table.add([row(i, i / 10) | {"model": model, "key": f"{i}-{model}"} for i in range(4) for model in "ab"])
    frame = store.read(table.table, ["token_f1"], {"model": "a", "item": ["1", "3"]})
    assert frame.to_dict("list") == {"token_f1": [0.1, 0.3]}
    assert store.read(table.table, ["item"], {"capacity": 7}).empty
    with pytest.raises(InputError, match="no column colour"):
        store.read(table.table, ["colour"])
    with pytest.raises(InputError, match="no column token_f1"):
        store.read(table.table, ["item"], {"token_f1": 0.1})
    with pytest.raises(InputError, match="no longer 1 of the rows"):
        table.frame(["1-a", "9-a"])


# ---- versions


def test_a_table_of_version_1_is_read_and_written_again_as_this_version(tmp_path):
    old = [[row("a", 0.1), row("b", 0.2)], [row("b", 0.3), row("c", error="x")], [row("d", 0.4)]]
    written_by_version_1(tmp_path, old)
    before = (tmp_path / "c" / "n.parquet").read_bytes()
    path = tmp_path / "c" / "n.parquet"
    assert store.read(path).set_index("item").token_f1.dropna().to_dict() == {"a": 0.1, "b": 0.3, "d": 0.4}
    assert path.read_bytes() == before  # reading writes nothing
    with Store(tmp_path, "c", "n") as table:
        assert table.missing(["a-e1", "b-e1", "c-e1", "d-e1"]) == ["c-e1"]
        table.add([row("c", 0.5), row("a", 0.6, engine="e2")])
    [file] = store.files_of(path)
    assert file.sealed
    assert file.label[b"kvrepro"] == b"results 2"
    assert store.read(path).set_index("item").token_f1.to_dict() == {"b": 0.3, "d": 0.4, "c": 0.5, "a": 0.6}


def test_a_later_version_is_refused_in_one_line(tmp_path):
    (tmp_path / "c").mkdir()
    later = store.FILED.with_metadata({b"kvrepro": b"results 3"}).append(pa.field("new", pa.string()))
    store.write(later.empty_table(), tmp_path / "c" / "n.parquet")
    with pytest.raises(InputError, match=r"^\S+n.parquet was written by a later version of kvrepro: .*$"):
        Store(tmp_path, "c", "n")


# ---- faults of storage


@pytest.mark.parametrize("name", ["n.parquet", "t/k/a.parquet"])
def test_every_changed_byte_is_noticed(tmp_path, name):
    with Store(tmp_path, "c", "n") as table:
        table.add([row(i, i / 7) for i in range(5)])
    tables = store.Tables(tmp_path, "c", "t")
    tables.add("k", {"a": pd.DataFrame({"x": np.arange(50.0), "y": ["text"] * 50})})
    read = {"n.parquet": lambda: store.read(table.table), "t/k/a.parquet": lambda: tables.read("k")["a"]}[name]
    path, right = tmp_path / "c" / name, read()
    data, random, silent = path.read_bytes(), np.random.default_rng(0), 0
    for at in random.choice(np.arange(4, len(data)), 400, replace=False):
        changed = bytearray(data)
        changed[at] ^= 1 << random.integers(8)
        path.write_bytes(changed)
        with contextlib.suppress(InputError):
            pd.testing.assert_frame_equal(read(), right)  # right all the same: the byte was the checksums' mark
            silent += 1
    assert silent <= (0 if name == "n.parquet" else 8)
    for length in random.integers(0, len(data), 20):
        path.write_bytes(data[:length])
        with pytest.raises(InputError, match=rf"^{path} is no whole parquet file .*$"):
            read()


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
    assert (done.returncode, len(lines)) == (2, 2)
    assert "File too large" in lines[0]
    assert "all rows are stored" in lines[0]
    assert "cannot be written (" in lines[1]
    assert "make room" in lines[1]
    assert dict(rows_of(tmp_path)) == {"a": 0.5}
    assert not [*tmp_path.rglob("*.tmp")]


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


def test_strange_files_are_left_alone(tmp_path, capsys):
    with Store(tmp_path, "c", "n") as table:
        table.add([row("a", 0.5)])
        for name in ("notes.txt", "old.parquet", "00000001.parquet.bak"):
            (table.folder / name).write_text("mine")
    assert len(rows_of(tmp_path)) == 1
    assert {path.read_text() for path in table.folder.iterdir()} == {"mine"}
    assert capsys.readouterr().out == ""
    (tmp_path / "holiday.jpg").write_text("x")
    Store(tmp_path, "c", "n").close()
    assert capsys.readouterr().out == ""  # a folder of results
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "holiday.jpg").write_text("x")
    Store(tmp_path / "pictures", "c", "n").close()
    assert "which holds other things (holiday.jpg)" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "pictures").iterdir()] == ["holiday.jpg"]


def half_written(path):
    with Store(path.parents[1], path.parent.name, path.stem) as table:
        table.add([row("a")])
    path.write_bytes(path.read_bytes()[:-100])


def foreign(path):
    path.parent.mkdir(parents=True)
    pq.write_table(pa.table({"item": ["x"]}), path)


def not_parquet(path):
    path.parent.mkdir(parents=True)
    path.write_text("a,b\n1,2\n")


@pytest.mark.parametrize("damage", [half_written, foreign, not_parquet])
def test_a_damaged_or_foreign_table_is_refused_and_left_alone(tmp_path, damage):
    path = tmp_path / "c" / "n.parquet"
    damage(path)
    before = path.read_bytes()
    with pytest.raises(InputError) as error:
        Store(tmp_path, "c", "n")
    assert str(path) in str(error.value)
    assert "move it away" in str(error.value)
    assert "\n" not in str(error.value)
    assert path.read_bytes() == before
    path.unlink()
    with Store(tmp_path, "c", "n") as table:  # the refusal released the lock
        table.add([row("a")])


def test_two_open_stores_share_a_table(tmp_path):
    with Store(tmp_path, "c", "n") as one, Store(tmp_path, "c", "n") as other:
        one.add([row("a", 0.1), row("b", 0.2)])
        other.add([row("b", 0.2), row("c", 0.3)])
        assert one.missing(["a-e1", "b-e1", "c-e1", "d-e1"]) == ["d-e1"]
    assert dict(rows_of(tmp_path)) == {"a": 0.1, "b": 0.2, "c": 0.3}
    with Store(tmp_path, "c", "n") as one:
        with Store(tmp_path, "c", "n"):
            pass
        one.add([row("d", 0.4)])  # the other one closed, and left the folder
    assert len(rows_of(tmp_path)) == 4


def test_a_table_that_was_given_nothing_leaves_no_folder(tmp_path):
    with Store(tmp_path, "c", "n"):
        pass
    assert list(tmp_path.iterdir()) == []
    with Store(tmp_path, "c", "n") as table:
        table.add([row(1)])
    with Store(tmp_path, "c", "n"), Store(tmp_path, "c", "other"):
        pass
    assert sorted(file.name for file in (tmp_path / "c").iterdir()) == ["n.parquet", "n.rows"]


def test_unknown_columns_are_refused(tmp_path):
    with Store(tmp_path, "c", "n") as table, pytest.raises(InputError, match="colour"):
        table.add([row("a") | {"colour": "red"}])


def test_nothing_stored_is_said(tmp_path):
    with pytest.raises(InputError, match="run the chapter first"):
        store.read(tmp_path / "c" / "n.parquet")


def test_an_items_tables_appear_whole_or_not_at_all(tmp_path, monkeypatch):
    tables = store.Tables(tmp_path, "c", "n")
    made = {"a": pd.DataFrame({"x": [1, 2]}), "b": pd.DataFrame({"y": ["z"]})}

    def stop(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", stop)
        with pytest.raises(KeyboardInterrupt):
            tables.add("k", made)
    assert "k" not in tables
    tables.add("k", made)
    tables.add("k", made)  # another process was first
    assert "k" in tables
    for name, table in tables.read("k").items():
        pd.testing.assert_frame_equal(table, made[name])
    assert not list(tmp_path.rglob("*.tmp"))
    (tmp_path / "c" / "n" / "k" / "a.parquet").write_bytes(b"no")
    with pytest.raises(InputError, match="no whole parquet file .*remove the folder"):
        tables.read("k")


def test_rows_replace_those_of_the_same_key(tmp_path):
    file, two = tmp_path / "t.csv", pd.DataFrame({"a": ["x", "y"], "b": [1, 1], "c": [0.1234567, 2.0]})
    assert len(store.replace_rows(file, two, ["a", "b"])) == 2
    new = pd.DataFrame({"a": ["x", "x"], "b": [1, 2], "c": [3.0, 4.0]})
    store.replace_rows(file, new, ["a", "b"], digits=3)
    assert pd.read_csv(file).to_numpy().tolist() == [["y", 1, 2.0], ["x", 1, 3.0], ["x", 2, 4.0]]
    assert store.replace_rows(file, new[:1], ["a"]).a.tolist() == ["y", "x"]  # all of that name
    assert [one.name for one in tmp_path.iterdir()] == ["t.csv"]
