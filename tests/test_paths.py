"""Files that are written aside and take their places whole."""

import pytest

from kvrepro.paths import replaced


def test_what_fails_leaves_the_old_file_and_nothing_beside_it(tmp_path):
    path = tmp_path / "note"
    path.write_text("old")
    with pytest.raises(UnicodeEncodeError), replaced(path) as aside:
        aside.write_text("half \udc00", encoding="utf-8")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
