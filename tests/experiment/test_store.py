"""Rows and tables that survive kills, whoever writes beside."""

import contextlib
import os
import shutil

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stored import Nursery, identities, lives, row, rows_of

from kvrepro.errors import InputError
from kvrepro.experiment import store
from kvrepro.experiment.store import Store
from kvrepro.experiment.table import COLUMNS, files_of


def test_rows_come_back_and_are_known(tmp_path):
    with Store(tmp_path, "protection", "main") as table:
        assert table.missing(identities("a", "b")) == ["a-e1", "b-e1"]
        table.add([row("a", 0.5)])
        assert list(store.read(table.table)["item"]) == ["a"]
    with Store(tmp_path, "protection", "main") as table:
        assert table.missing(identities("a", "b")) == ["b-e1"]
        table.add([row("b", 0.25)])
    frame = store.read(tmp_path / "protection" / "main.parquet")
    assert list(frame["token_f1"]) == [0.5, 0.25]
    assert list(frame.columns) == COLUMNS
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
        assert table.missing(identities("a", "b", engine="e2")) == ["a-e2", "b-e2"]
        table.add([row("b", 0.9, engine="e2")])
    frame = store.read(tmp_path / "c" / "n.parquet").set_index("item")
    assert dict(frame["token_f1"]) == {"a": 0.1, "b": 0.9}
    assert frame["engine_hash"]["b"] == "e2"


def test_rows_of_another_checkpoint_or_other_data_stay_and_pages_take_the_newest(tmp_path):
    first = row("a", 0.1) | {"model_hash": "m1", "data_hash": "d1", "key": "1"}
    second = first | {"model_hash": "m2", "key": "2", "token_f1": 0.2}
    third = second | {"data_hash": "d2", "key": "3", "token_f1": 0.3}
    other = first | {"item": "b", "key": "4", "token_f1": 0.4}  # of the first checkpoint alone
    named = first | {"model": "n", "key": "5", "token_f1": 0.5}
    longer = third | {
        "data_hash": "d3",
        "limit": 900,
        "key": "6",
        "token_f1": 0.6,
    }  # cut elsewhere: a prompt of its own
    every = [first, other, second, third, named, longer]
    with Store(tmp_path, "c", "n") as table:
        for added in every:
            table.add([added])
        assert table.missing(store.identities_of(every)) == []
        assert table.frame(store.identities_of([first])).token_f1.tolist() == [0.1]
    rows = store.read(table.table)
    assert rows.token_f1.tolist() == [0.1, 0.4, 0.2, 0.3, 0.5, 0.6]
    assert store.read(table.table, where={"model_hash": "m1", "model": "m"}).token_f1.tolist() == [0.1, 0.4]
    assert store.newest(rows).token_f1.tolist() == [0.3, 0.5, 0.6]


def test_a_failed_row_is_tried_again(tmp_path):
    with Store(tmp_path, "c", "n") as table:
        table.add([row("a", error="RuntimeError: no memory")])
        assert table.missing(identities("a")) == ["a-e1"]
    with Store(tmp_path, "c", "n") as table:
        assert table.missing(identities("a")) == ["a-e1"]
        table.add([row("a", 0.5)])
        assert table.missing(identities("a")) == []
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
    assert dict(store.read(table.table).set_index("item")["token_f1"]) == expected if expected else True
    table.close()
    if any(batches):
        assert dict(store.read(folder / "c" / "n.parquet").set_index("item")["token_f1"]) == expected


# ---- several processes, killed at any moment


@pytest.fixture(scope="module")
def nursery():
    with Nursery() as started:
        yield started


def test_thirty_kills_lose_and_double_nothing(tmp_path, nursery):
    """A process that adds, folds and closes is killed thirty times; each row that it reported is there, once."""
    random, killed, reported = np.random.default_rng(0), 0, set()
    with Store(tmp_path, "c", "n") as table:
        table.add([row("other", 0.5) | {"model": "other", "key": "other"}])
    for i in range(30):
        writer = nursery.start("add_rows", tmp_path, 5 * i, 5 * i + 40)
        killed += nursery.kill(writer, random.uniform(0.02, 0.15))
        rows = rows_of(tmp_path).drop("other")
        reported |= {*(tmp_path / "said").read_text().split()} if (tmp_path / "said").exists() else set()
        assert reported <= {*rows.index}
        assert all(value == int(item) / 1000 for item, value in rows.items())
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
            rows = rows_of(tmp_path)  # raises where a row is there twice
            assert len(rows) >= before
            before, reads = len(rows), reads + 1
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


# ---- large tables


def test_large_files_are_never_written_again(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "MOST", 100)
    monkeypatch.setattr(store, "LEAST", 20)
    monkeypatch.setattr(store, "MANY", 8)
    expected, states = {}, {}
    for number in range(30):
        with Store(tmp_path, "c", "n") as table:
            for part in range(3):
                part_rows = {f"{(7 * number + i) % 400}": number + part / 10 for i in range(10)}
                table.add([row(item, value) for item, value in part_rows.items()])
                expected |= part_rows
        for file in files_of(table.table):
            assert file.rows <= 100
            if file.rows > 60:
                assert states.setdefault(file.path, file.state) == file.state
    assert dict(rows_of(tmp_path)) == expected
    assert len(states) > 1
    assert len(files_of(table.table)) < 25
    chosen = identities(3, 199, 150)
    assert table.missing(chosen | {"new": 0}) == ["new"]
    assert table.frame(chosen).set_index("item").token_f1.to_dict() == {
        item: expected[item] for item in ("3", "199", "150")
    }


# ---- what is refused, and what is left behind


def test_two_open_stores_share_a_table(tmp_path):
    with Store(tmp_path, "c", "n") as first, Store(tmp_path, "c", "n") as second:
        first.add([row("a", 0.1), row("b", 0.2)])
        second.add([row("b", 0.2), row("c", 0.3)])
        assert first.missing(identities("a", "b", "c", "d")) == ["d-e1"]
    assert dict(rows_of(tmp_path)) == {"a": 0.1, "b": 0.2, "c": 0.3}
    with Store(tmp_path, "c", "n") as first:
        with Store(tmp_path, "c", "n"):
            pass
        first.add([row("d", 0.4)])  # the other one closed, and left the folder
    assert len(rows_of(tmp_path)) == 4


def test_results_that_are_cleared_away_end_no_run(tmp_path):
    with Store(tmp_path, "c", "n") as table:
        table.add([row("a", 0.1)])
        shutil.rmtree(tmp_path / "c")
        assert table.missing(identities("a")) == ["a-e1"]
        table.add([row("b", 0.2)])
    assert dict(rows_of(tmp_path)) == {"b": 0.2}


def test_unknown_columns_are_refused(tmp_path):
    with Store(tmp_path, "c", "n") as table, pytest.raises(InputError, match="colour"):
        table.add([row("a") | {"colour": "red"}])


def test_nothing_stored_is_said(tmp_path):
    with pytest.raises(InputError, match="run the chapter first"):
        store.read(tmp_path / "c" / "n.parquet")


def test_an_items_tables_appear_whole_or_not_at_all(tmp_path, monkeypatch):
    tables = store.Tables(tmp_path, "c", "n")
    contents = {"a": pd.DataFrame({"x": [1, 2]}), "b": pd.DataFrame({"y": ["z"]})}

    def stop(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", stop)
        with pytest.raises(KeyboardInterrupt):
            tables.add("k", contents)
    assert "k" not in tables
    tables.add("k", contents)
    tables.add("k", contents)  # another process was first
    assert "k" in tables
    for name, table in tables.read("k").items():
        pd.testing.assert_frame_equal(table, contents[name])
    assert not list(tmp_path.rglob("*.tmp"))
    (tmp_path / "c" / "n" / "k" / "a.parquet").write_bytes(b"no")
    with pytest.raises(InputError, match="no whole parquet file .*remove the folder"):
        tables.read("k")
    for path in (tmp_path / "c" / "n" / "k").iterdir():
        path.unlink()
    assert "k" not in tables  # an emptied folder holds no result: it is computed again, not passed over
    tables.add("k", contents)
    assert set(tables.read("k")) == set(contents)
