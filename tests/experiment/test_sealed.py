"""A file is whole or not at all, and a changed byte of it is noticed."""

import contextlib

import numpy as np
import pandas as pd
import pytest
from stored import row

from kvrepro.errors import InputError
from kvrepro.experiment import store
from kvrepro.experiment.store import Store


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
