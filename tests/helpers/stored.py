"""Rows for tests of the store, its files as version 1 wrote them, and a process that is killed while it works."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from kvrepro.experiment import store


def row(item: int | str, value: float = 0.0, *, engine: str = "e1", error: str | None = None) -> dict:
    return {
        "key": f"{item}-{engine}", "item": str(item), "model": "m", "policy": "lru",
        "capacity": 256, "engine_hash": engine,
        "token_f1": None if error else value, "kept": [256, 256], "error": error,
    }  # fmt: skip


def identities(*items: int | str, engine: str = "e1") -> dict[str, int]:
    """By which a store knows the rows of these items."""
    return store.identities_of([row(item, engine=engine) for item in items])


def rows_of(folder: Path):
    """token_f1 by item of the table c/n, each item once."""
    frame = store.read(folder / "c" / "n.parquet", ["item", "token_f1"])
    assert frame["item"].is_unique
    return frame.set_index("item")["token_f1"]


# Frozen: what version 1 wrote. It had these columns (some of them), one mark, no checksums, parts with bare numbers.
COLUMNS_OF_1 = {
    "key": pa.string(), "item": pa.string(), "model": pa.string(), "policy": pa.string(), "capacity": pa.int64(),
    "share": pa.float64(), "engine_hash": pa.string(), "token_f1": pa.float64(), "kept": pa.list_(pa.int64()),
    "error": pa.string(),
}  # fmt: skip


def written_by_version_1(folder: Path, tables: list[list[dict]]) -> None:
    """The table c/n: the first rows folded, the others as parts of a run that was killed."""
    (folder / "c" / "n.rows").mkdir(parents=True)
    for number, rows in enumerate(tables):
        path = folder / "c" / ("n.parquet" if not number else f"n.rows/{number - 1:08d}.parquet")
        schema = pa.schema(COLUMNS_OF_1, metadata={b"kvrepro": b"results 1"})
        pq.write_table(pa.Table.from_pylist(rows, schema=schema), path)


NURSERY = """
import json, os, signal, sys
from pathlib import Path
import stored
from kvrepro.experiment import store
from kvrepro.tools import store as tool
store.MANY = 6  # a short test folds often
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for line in sys.stdin:
    name, arguments = json.loads(line)
    child = os.fork()
    if not child:
        code = 1
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        try:
            getattr(stored, name)(*arguments)
            code = 0
        finally:
            os._exit(code)
    print(child, flush=True)
"""


class Nursery:
    """A process that has imported everything, and forks one that works whenever it is asked to: so that thirty kills
    take seconds."""

    def __enter__(self):
        command = [sys.executable, "-c", NURSERY]
        paths = [str(Path(__file__).parent), *sys.path]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        return self

    def __exit__(self, *exception):
        self.process.stdin.close()
        self.process.wait()

    def start(self, work: str, *arguments) -> int:
        """Its process id."""
        self.process.stdin.write(json.dumps([work, [str(a) for a in arguments]]) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def kill(self, process: int, after: float) -> bool:
        """Was it still at work?"""
        end = time.monotonic() + after
        while (left := end - time.monotonic()) > 0 and (alive := lives(process)):
            time.sleep(min(left, 0.01))
        if alive := lives(process):
            os.kill(process, signal.SIGKILL)
        self.wait(process)
        return alive

    def wait(self, process: int) -> None:
        while lives(process):
            time.sleep(0.005)


def lives(process: int) -> bool:
    return Path(f"/proc/{process}").exists()


# ---- work that is killed


def add_rows(folder: str, first: str, last: str) -> None:
    """Add what is missing, one row at a time, and say so in a file for each row that is stored."""
    folder, log = Path(folder), Path(folder) / "said"
    with store.Store(folder, "c", "n") as table:
        for key in table.missing(identities(*range(int(first), int(last)))):
            number = int(key.split("-")[0])
            table.add([row(number, number / 1000)])
            with log.open("a") as file:
                file.write(f"{number}\n")
            if number % 20 == 19:
                table.close()


def add_tables(folder: str, count: str) -> None:
    import pandas as pd

    tables = store.Tables(folder, "c", "t")
    for i in range(int(count)):
        if str(i) not in tables:
            tables.add(str(i), {name: pd.DataFrame({"x": np.arange(100) + i}) for name in "ab"})


def merge(a: str, b: str, into: str) -> None:
    from kvrepro.tools import store as tool

    tool.merge([Path(a), Path(b)], Path(into))


def gc(folder: str) -> None:
    from kvrepro.tools import store as tool

    tool.gc(Path(folder), yes=True)
