"""Files that are written aside and take their places whole."""

import pandas as pd
import pytest

from kvrepro.paths import replaced, write_table


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
