import os
import signal
import subprocess
import sys
import time

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrepro.errors import InputError
from kvrepro.experiment import store
from kvrepro.experiment.store import Store


def row(item: int | str, value: float = 0.0, *, engine: str = "e1", error: str | None = None) -> dict:
    return {
        "key": f"{item}-{engine}", "item": str(item), "model": "m", "policy": "lru",
        "capacity": 256, "engine_hash": engine,
        "token_f1": None if error else value, "kept": [256, 256], "error": error,
    }  # fmt: skip


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
@settings(max_examples=40, deadline=None)
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


WRITER = """
import sys
from kvrepro.experiment.store import Store
sys.path.insert(0, {tests!r})
from test_store import row
while True:
    with Store({folder!r}, "c", "n") as table:
        for i in table.missing(f"{{i}}-e1" for i in range(60)):
            number = int(i.split("-")[0])
            table.add([row(number, number / 60)])
            print(number, flush=True)
    print("closed", flush=True)
"""


@pytest.mark.parametrize("after", [1, 7, 33, 60])
def test_survives_a_kill_at_any_moment(tmp_path, after):
    """The writer is killed after it reported `after` rows; every reported row is there, whole, and the run resumes."""
    code = WRITER.format(tests=os.path.dirname(__file__), folder=str(tmp_path))
    writer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    reported = [int(writer.stdout.readline()) for _ in range(after)]
    time.sleep(0.002 * after)  # into an add, or into folding the rows into the table
    writer.send_signal(signal.SIGKILL)
    rest = writer.communicate()[0].split()
    reported += [int(number) for number in rest if number != "closed"]
    frame = store.read(tmp_path / "c" / "n.parquet").set_index("item")
    assert set(map(str, reported)) <= set(frame.index)
    assert all(value == int(item) / 60 for item, value in frame["token_f1"].items())
    with Store(tmp_path, "c", "n") as table:
        table.add([row(i, i / 60) for i in range(60) if f"{i}-e1" in table.missing(f"{i}-e1" for i in range(60))])
    assert len(pd.read_parquet(tmp_path / "c" / "n.parquet")) == 60


def killed_while_folding(tmp_path, monkeypatch, step: str):
    """A store whose close stops at `step`, as a kill would leave it."""
    table = Store(tmp_path, "c", "n")
    table.add([row("a", 0.5)])
    table.add([row("b", 0.25)])

    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(*{"replace": (os, "replace"), "remove": (store.Path, "unlink")}[step], stop)
        with pytest.raises(KeyboardInterrupt):
            table.close()
    os.close(table._lock)


@pytest.mark.parametrize("step", ["replace", "remove"])
def test_a_kill_while_folding_loses_and_doubles_nothing(tmp_path, monkeypatch, step):
    killed_while_folding(tmp_path, monkeypatch, step)
    with Store(tmp_path, "c", "n") as table:
        assert table.missing(["a-e1", "b-e1"]) == []
    assert list(pd.read_parquet(tmp_path / "c" / "n.parquet")["item"]) == ["a", "b"]
    assert sorted(p.name for p in (tmp_path / "c").rglob("*") if p.is_file()) == ["n.parquet"]


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


def test_one_writer_at_a_time(tmp_path):
    with Store(tmp_path, "c", "n"), pytest.raises(InputError, match="another process"):
        Store(tmp_path, "c", "n")


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
    with pytest.raises(InputError, match="broken file"):
        tables.read("k")


def test_rows_replace_those_of_the_same_key(tmp_path):
    file, two = tmp_path / "t.csv", pd.DataFrame({"a": ["x", "y"], "b": [1, 1], "c": [0.1234567, 2.0]})
    assert len(store.replace_rows(file, two, ["a", "b"])) == 2
    new = pd.DataFrame({"a": ["x", "x"], "b": [1, 2], "c": [3.0, 4.0]})
    store.replace_rows(file, new, ["a", "b"], digits=3)
    assert pd.read_csv(file).to_numpy().tolist() == [["y", 1, 2.0], ["x", 1, 3.0], ["x", 2, 4.0]]
    assert store.replace_rows(file, new[:1], ["a"]).a.tolist() == ["y", "x"]  # all of that name
    assert [one.name for one in tmp_path.iterdir()] == ["t.csv"]
