"""Rows and tables on the disk: what is found again, what other code does, what a kill or a full disk leaves."""

import multiprocessing
import os
import shutil
import signal
from dataclasses import dataclass

import numpy as np
import pandas as pd
import pytest

from kvrepro.engine.condition import Condition
from kvrepro.errors import InputError
from kvrepro.experiment import store
from kvrepro.experiment.store import Store, Tables
from kvrepro.paths import CODE


def row(item, key=None, **values):
    return {"key": key or f"key-{item}", "item": item, "model": "m", "policy": "lru", "token_f1": 0.5, **values}


def test_rows_come_back_in_the_order_of_their_keys(tmp_path):
    table = Store(tmp_path, "c", "n", "org/model")
    table.add([row("b", kept=[3, 4]), row("a")])
    table.add([row("c")])
    assert table.missing(["key-a", "key-x", "key-c"]) == ["key-x"]
    frame = Store(tmp_path, "c", "n", "org/model").frame(["key-a", "key-b"])
    assert list(frame["item"]) == ["a", "b"]
    assert list(frame.kept[1]) == [3, 4]
    assert list(frame.columns) == store.COLUMNS
    with pytest.raises(InputError, match="has no longer 1 of the rows"):
        table.frame(["key-x"])


def test_a_row_that_failed_is_tried_again_and_gives_way_to_one_that_did_not(tmp_path):
    table = Store(tmp_path, "c", "n", "m")
    table.add([row("a", error="RuntimeError: no")])
    assert table.missing(["key-a"]) == ["key-a"]
    table.add([row("a")])
    table.add([row("a", error="RuntimeError: another process")])  # of two writers
    assert table.missing(["key-a"]) == []
    assert table.frame(["key-a"]).error.isna().all()
    assert store.read(tmp_path / "c" / "n").error.isna().tolist() == [True]


def test_every_flipped_byte_is_seen(tmp_path):
    table = Store(tmp_path, "c", "n", "m")
    table.add([row("a")])
    [file] = table.folder.glob("*.parquet")
    data = file.read_bytes()
    for at in np.random.default_rng(0).integers(0, len(data), 40):
        store.whole.clear()
        file.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises((InputError, OSError)):  # a broken header is no parquet file at all
            table.frame(["key-a"])


def test_a_full_disk_leaves_what_was_stored_whole(tmp_path, monkeypatch):
    table = Store(tmp_path, "c", "n", "m")
    table.add([row("a")])

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store.pq, "write_table", full)
    with pytest.raises(InputError, match="No space left on device.*What was stored before is whole"):
        table.add([row("b")])
    assert list(table.frame(["key-a"])["item"]) == ["a"]
    assert not list(tmp_path.rglob("*.tmp"))


def writer(folder, name, count):
    table = Store(folder, "c", "n", "m")
    for i in range(count):
        table.add([row(f"{name}-{i}"), row(f"shared-{i}")])


def test_two_writers_and_a_kill_lose_and_double_nothing(tmp_path):
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=writer, args=(tmp_path, name, count)) for name, count in (("a", 15), ("b", 400))]
    for process in writers:
        process.start()
    writers[0].join()
    os.kill(writers[1].pid, signal.SIGKILL)
    writers[1].join()
    stored = store.read(tmp_path / "c" / "n")
    assert stored["item"].is_unique
    assert {f"a-{i}" for i in range(15)} | {f"shared-{i}" for i in range(15)} <= set(stored["item"])
    of_b = stored["item"][stored["item"].str.startswith("b-")]
    assert set(of_b) == {f"b-{i}" for i in range(len(of_b))}


def test_an_item_s_tables_appear_together_and_the_first_writer_wins(tmp_path):
    tables = Tables(tmp_path, "c", "n")
    tables.add("k", {"one": pd.DataFrame({"x": [1]}), "two": pd.DataFrame({"y": ["a"]})})
    tables.add("k", {"one": pd.DataFrame({"x": [2]})})
    assert "k" in tables
    assert "other" not in tables
    read = tables.read("k")
    assert (read["one"].x.tolist(), read["two"].y.tolist()) == ([1], ["a"])
    assert not list(tmp_path.rglob("*.tmp"))


# ---- what decides a result


@dataclass(frozen=True)
class Plain:
    x: object


def test_equal_data_have_equal_digests_and_other_data_others():
    values = [1, 1.0, True, "1", None, b"1", (1, 2), {"a": 1}, {"a": 2}, Plain(1), Plain(2), Condition("lru", 1)]
    values += [Condition("lru", 1.0), np.arange(3), np.arange(4), len]
    digests = [store.digest(value) for value in values]
    assert digests == [store.digest(value) for value in values]
    assert len(set(digests)) == len(values)
    assert store.digest({"a": 1, "b": 2}) == store.digest({"b": 2, "a": 1})
    assert store.digest({3, 1}) == store.digest({1, 3})


def test_a_function_counts_by_its_file_and_one_without_a_file_is_never_found_again(tmp_path):
    file = tmp_path / "mine.py"

    def defined(source):
        file.write_text(source)
        space = {"__name__": "mine"}
        exec(compile(source, str(file), "exec"), space)
        return space["f"]

    first, again, edited = (store.digest(defined(s)) for s in ("def f(): 1", "def f(): 1", "def f(): 1\n# more"))
    assert first == again != edited
    typed: dict = {"__name__": "__main__"}
    exec(compile("def f(): 1", "<cell 3>", "exec"), typed)
    assert store.digest(typed["f"]) != store.digest(typed["f"])


def test_code_is_the_engine_the_measures_and_the_chapter(tmp_path, monkeypatch):
    copy = shutil.copytree(CODE["kvrepro"], tmp_path / "kvrepro", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setitem(CODE, "kvrepro", copy)

    def codes():
        store.code_of.cache_clear()
        return store.code_of("leakage"), store.code_of("fragility")

    before = codes()
    assert len(set(before)) == 2
    edits = {"engine/allocate.py": (True, True), "experiment/measure.py": (True, True), "world/world.py": (True, True),
             "chapters/leakage/study.py": (True, False), "experiment/figure.py": (False, False)}  # fmt: skip
    for name, changes in edits.items():
        file = copy / name
        source = file.read_text()
        file.write_text(source + "\n# edited\n")
        assert tuple(a != b for a, b in zip(codes(), before, strict=True)) == changes, name
        file.write_text(source)
    store.code_of.cache_clear()
