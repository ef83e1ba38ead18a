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
from kvrepro.paths import CODE


def row(item, key=None, **values):
    return {"key": key or f"key-{item}", "item": item, "model": "m", "policy": "lru", "token_f1": 0.5, **values}


def keys(folder):
    return store.read(folder, ["key"]).key.tolist()


def test_rows_come_back_as_they_were_written(tmp_path):
    store.add(tmp_path / "m", [row("b", kept=[3, 4]), row("a")])
    store.add(tmp_path / "m", [row("c")])
    store.add(tmp_path / "m", [])
    frame = store.read(tmp_path / "m", ["key"])
    assert list(frame["item"]) == ["b", "a", "c"]
    assert list(frame.kept[0]) == [3, 4]
    assert list(frame.columns) == store.COLUMNS
    assert keys(tmp_path / "nothing") == []


def test_a_row_that_failed_gives_way_to_one_that_did_not(tmp_path):
    for error in ("RuntimeError: no", None, "RuntimeError: another process"):  # of two writers
        store.add(tmp_path / "m", [row("a", error=error)])
    assert store.read(tmp_path / "m", ["key"]).error.isna().tolist() == [True]
    assert store.read(tmp_path).error.isna().tolist() == [True]


def test_every_flipped_byte_is_seen(tmp_path):
    store.add(tmp_path, [row("a")])
    [file] = tmp_path.glob("*.parquet")
    data = file.read_bytes()
    for at in np.random.default_rng(0).integers(0, len(data), 40):
        file.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(InputError, match="is damaged"):
            store.read(tmp_path)


def test_a_full_disk_leaves_what_was_stored_whole(tmp_path, monkeypatch):
    store.add(tmp_path, [row("a")])

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store.pq, "write_table", full)
    with pytest.raises(OSError, match="No space left on device"):
        store.add(tmp_path, [row("b")])
    with pytest.raises(OSError, match="No space left on device"):
        store.add_tables(tmp_path / "k", {"one": pd.DataFrame({"x": [1]})})
    assert keys(tmp_path) == ["key-a"]
    assert not list(tmp_path.rglob("*.tmp"))


def writer(folder, name, count):
    for i in range(count):
        store.add(folder, [row(f"{name}-{i}"), row(f"shared-{i}")])


def test_two_writers_and_a_kill_lose_and_double_nothing(tmp_path):
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=writer, args=(tmp_path, name, count)) for name, count in (("a", 15), ("b", 400))]
    for process in writers:
        process.start()
    writers[0].join()
    os.kill(writers[1].pid, signal.SIGKILL)
    writers[1].join()
    stored = store.read(tmp_path)
    assert stored["item"].is_unique
    assert {f"a-{i}" for i in range(15)} | {f"shared-{i}" for i in range(15)} <= set(stored["item"])
    of_b = stored["item"][stored["item"].str.startswith("b-")]
    assert set(of_b) == {f"b-{i}" for i in range(len(of_b))}


def test_an_item_s_tables_appear_together_and_the_first_writer_wins(tmp_path):
    place = tmp_path / "c" / "k"
    store.add_tables(place, {"one": pd.DataFrame({"x": [1]}), "two": pd.DataFrame({"y": ["a"]})})
    store.add_tables(place, {"one": pd.DataFrame({"x": [2]})})
    assert store.read_tables(tmp_path / "other") == {}
    read = store.read_tables(place)
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
    both = ("engine/allocate.py", "experiment/measure.py", "experiment/answers.py", "world/world.py")
    edits = dict.fromkeys(both, (True, True))
    edits |= {"chapters/leakage/study.py": (True, False), "experiment/figure.py": (False, False)}
    for name, changes in edits.items():
        file = copy / name
        source = file.read_text()
        file.write_text(source + "\n# edited\n")
        assert tuple(a != b for a, b in zip(codes(), before, strict=True)) == changes, name
        file.write_text(source)
    store.code_of.cache_clear()
