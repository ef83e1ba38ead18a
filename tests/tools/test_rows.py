"""Rows of a table of the project take the place of those of the same key."""

import pandas as pd

from kvrepro.tools import rows


def test_rows_replace_those_of_the_same_key(tmp_path):
    file, two = tmp_path / "t.csv", pd.DataFrame({"a": ["x", "y"], "b": [1, 1], "c": [0.1234567, 2.0]})
    assert len(rows.replace_rows(file, two, ["a", "b"])) == 2
    new = pd.DataFrame({"a": ["x", "x"], "b": [1, 2], "c": [3.0, 4.0]})
    rows.replace_rows(file, new, ["a", "b"], digits=3)
    assert pd.read_csv(file).to_numpy().tolist() == [["y", 1, 2.0], ["x", 1, 3.0], ["x", 2, 4.0]]
    assert rows.replace_rows(file, new[:1], ["a"]).a.tolist() == ["y", "x"]  # all of that name
    assert [file.name for file in tmp_path.iterdir()] == ["t.csv"]
