"""Files that are written aside and take their places whole."""

import threading

import pandas as pd
import pytest

from kvrepro.paths import replaced, write_table


def test_two_writers_of_one_file_do_not_meet(tmp_path):
    path, both = tmp_path / "note", threading.Barrier(2, timeout=20)
    failed = []

    def write(text):
        try:
            with replaced(path) as aside:
                aside.write_text(text)
                both.wait()  # both files lie aside before either takes its place
                assert aside.read_text() == text
        except Exception as error:
            failed.append(error)

    writers = [threading.Thread(target=write, args=(letter * 1000,)) for letter in "ab"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert failed == []
    assert path.read_text() in ("a" * 1000, "b" * 1000)
    assert list(tmp_path.iterdir()) == [path]


def test_what_fails_leaves_the_old_file_and_nothing_beside_it(tmp_path):
    path = tmp_path / "note"
    path.write_text("old")
    with pytest.raises(UnicodeEncodeError), replaced(path) as aside:
        aside.write_text("half \udc00", encoding="utf-8")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_table_makes_its_folder(tmp_path):
    """A program that measured for minutes does not lose its table for want of a folder."""
    table = tmp_path / "new" / "folder" / "table.csv"
    write_table(table, pd.DataFrame({"a": [1]}))
    assert pd.read_csv(table).a.tolist() == [1]
