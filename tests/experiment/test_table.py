"""Which rows of which files are the latest, whatever wrote the files."""

import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from stored import identities, row, rows_of, written_by_version_1

from kvrepro.errors import InputError
from kvrepro.experiment import sealed, store
from kvrepro.experiment.store import Store
from kvrepro.experiment.table import FILED, files_of, parts


def test_order_is_by_number_and_not_by_the_clock(tmp_path):
    table = Store(tmp_path, "c", "n")
    for value in (0.1, 0.2):
        table.add([row("a", value)])
    for age, path in enumerate(parts(table.table)):
        os.utime(path, (1e9 - age * 1e6,) * 2)  # the clock was set back between them
    assert dict(rows_of(tmp_path)) == {"a": 0.2}
    table.close()
    os.utime(table.table, (4e9,) * 2)
    with Store(tmp_path, "c", "n") as table:
        table.add([row("a", 0.3)])
        assert dict(rows_of(tmp_path)) == {"a": 0.3}
    assert dict(rows_of(tmp_path)) == {"a": 0.3}


def test_a_failure_does_not_take_the_place_of_another_processs_success(tmp_path):
    with Store(tmp_path, "c", "n") as first, Store(tmp_path, "c", "n") as second:
        first.add([row("a", 0.5)])
        second.add([row("a", error="RuntimeError: no memory"), row("b", error="ValueError: b")])
        assert first.missing(identities("a", "b")) == ["b-e1"]
    assert store.read(tmp_path / "c" / "n.parquet", ["error"]).error.isna().tolist() == [True, False]


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
        table.frame(store.identities_of([row(i) | {"model": "a", "key": f"{i}-a"} for i in (1, 9)]))


def test_a_table_of_version_1_is_read_and_written_again_as_this_version(tmp_path):
    old = [[row("a", 0.1), row("b", 0.2)], [row("b", 0.3), row("c", error="x")], [row("d", 0.4)]]
    written_by_version_1(tmp_path, old)
    before = (tmp_path / "c" / "n.parquet").read_bytes()
    path = tmp_path / "c" / "n.parquet"
    assert store.read(path).set_index("item").token_f1.dropna().to_dict() == {"a": 0.1, "b": 0.3, "d": 0.4}
    assert path.read_bytes() == before  # reading writes nothing
    with Store(tmp_path, "c", "n") as table:
        assert table.missing(identities("a", "b", "c", "d")) == ["c-e1"]
        table.add([row("c", 0.5), row("a", 0.6, engine="e2")])
    [file] = files_of(path)
    assert file.sealed
    assert file.label[b"kvrepro"] == b"results 3"
    assert store.read(path).set_index("item").token_f1.to_dict() == {"b": 0.3, "d": 0.4, "c": 0.5, "a": 0.6}


def test_a_table_of_version_2_is_asked_by_the_hashes_of_model_and_data_too(tmp_path):
    """Version 2 hashed names alone into `asked`, which is computed anew; its files were sealed."""
    of = [row(i, i / 10) | {"model_hash": f"m{i}", "data_hash": "d", "key": f"k{i}"} for i in range(2)]
    old = pa.Table.from_pylist(of, schema=FILED.with_metadata({b"kvrepro": b"results 2"}))
    old = old.drop_columns(["enable_thinking", "thought", "any_script"])  # which it did not have
    old = old.set_column(old.schema.get_field_index("asked"), "asked", pa.array([1, 2]))
    path = tmp_path / "c" / "n.parquet"
    path.parent.mkdir()
    sealed.write(old, path)
    with Store(tmp_path, "c", "n") as table:
        assert table.missing(store.identities_of([*of, of[0] | {"model_hash": "m2", "key": "k2"}])) == ["k2"]
        table.add([of[0] | {"token_f1": 0.7}])
    assert store.read(path).set_index("key").token_f1.to_dict() == {"k0": 0.7, "k1": 0.1}
    pq.write_table(old, path)
    with pytest.raises(InputError, match="is not a results table of this version"):
        Store(tmp_path, "c", "n")


def test_a_later_version_is_refused_in_one_line(tmp_path):
    (tmp_path / "c").mkdir()
    later = FILED.with_metadata({b"kvrepro": b"results 4"}).append(pa.field("new", pa.string()))
    sealed.write(later.empty_table(), tmp_path / "c" / "n.parquet")
    with pytest.raises(InputError, match=r"^\S+n.parquet was written by a later version of kvrepro: .*$"):
        Store(tmp_path, "c", "n")


@pytest.mark.parametrize("folded", [b"xx", b"5", b"null"])
def test_a_table_that_took_the_place_of_nonsense_is_refused_in_one_line(tmp_path, folded):
    (tmp_path / "c").mkdir()
    schema = FILED.with_metadata({b"kvrepro": b"results 3", b"folded": folded})
    sealed.write(schema.empty_table(), tmp_path / "c" / "n.parquet")
    with pytest.raises(InputError, match=r"^\S+n.parquet does not say which files it took the place of: .*$"):
        Store(tmp_path, "c", "n")


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
