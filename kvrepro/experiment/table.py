"""A results table as it lies on the disk: its columns, its files, and which of their rows are the latest.

`<chapter>/<name>.parquet` is the table; beside it `<name>.rows/` holds what has arrived since, a file of its own name
for each time that rows were added. Order is by number, never by a clock. A row is known by its `key`: a hash of
configuration, model, prompt and the code that decides it. A row that other code decides is stale: it is computed again,
and the new row takes its place. Rows of another checkpoint or of other data stand beside it, whatever their names.
"""

import contextlib
import hashlib
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from kvrepro.errors import InputError
from kvrepro.experiment.sealed import AWAY, File

VERSION = 3  # of the files; of earlier ones `MIGRATIONS` knows
MARK = {b"kvrepro": b"results %d" % VERSION}
TEXT, WHOLE, REAL, TRUTH = pa.string(), pa.int64(), pa.float64(), pa.bool_()
SCHEMA = pa.schema(
    {
        "key": TEXT, "chapter": TEXT, "name": TEXT, "item": TEXT, "task": TEXT,
        "model": TEXT, "model_hash": TEXT, "data_hash": TEXT, "engine_hash": TEXT,
        "policy": TEXT, "capacity": WHOLE, "prefix": REAL, "suffix": REAL, "suffix_mode": TEXT, "interval": WHOLE,
        "reading": TEXT, "execution": TEXT, "switches": TEXT, "regime": TEXT, "share": REAL, "until": TEXT,
        "whitelist": TEXT, "spans": TEXT, "fair": REAL, "chunk": WHOLE, "chunk_mode": TEXT, "bits": WHOLE,
        "limit": WHOLE, "max_new_tokens": WHOLE, "prompt_tokens": WHOLE, "cut": WHOLE, "n_generated": WHOLE,
        "enable_thinking": TRUTH,
        "prediction": TEXT, "answer": TEXT,
        "thought": TEXT,  # the <think> block that the prediction leaves out
        "any_script": TRUTH,  # true where texts are compared in any script; null where as the papers do (`Item.papers`)
        "token_f1": REAL, "token_f1_longbench": REAL, "exact_match": REAL, "rouge_l": REAL, "repetition_4gram": REAL,
        "first_right": REAL, "rest_f1": REAL, "evidence_at": REAL, "evidence_coverage": REAL,
        "official": REAL, "metric": TEXT,
        "kept": pa.list_(WHOLE), "kept_mean": REAL, "kept_hash": TEXT, "evicted": WHOLE, "policy_calls": WHOLE,
        "pages": WHOLE, "bytes_held": WHOLE, "bytes_state": WHOLE, "bytes_full": WHOLE,
        "peak_bytes": WHOLE,  # only rows of earlier versions have it
        "prefill_seconds": REAL, "decode_seconds": REAL,
        "backend": TEXT, "dtype": TEXT, "device": TEXT, "processor": TEXT, "torch": TEXT, "transformers": TEXT,
        "profile": TEXT, "seed": WHOLE, "date": TEXT, "error": TEXT, "note": TEXT,
    },
    metadata=MARK,
)  # fmt: skip
COLUMNS = SCHEMA.names
IDENTITY = ["item", "model", "model_hash", "data_hash", "dtype", "device", "limit", "max_new_tokens", "enable_thinking",
            "policy", "capacity", "prefix", "suffix", "suffix_mode", "interval", "reading", "execution", "switches",
            "regime", "share", "until", "whitelist", "spans", "fair", "chunk", "chunk_mode", "bits"]  # fmt: skip
FILED = SCHEMA.append(pa.field("asked", pa.int64()))  # a hash of IDENTITY: rows with the same were asked the same
PART = re.compile(r"(\d{8})(@.+-\d+-[0-9a-f]{8})?\.parquet")  # number, and since version 2 host and process
T = TypeVar("T")


class RowsFile(File):
    """A file of a results table, of this version or an earlier one. Rows of an earlier version are brought to this one
    as they are read. Raises InputError for any other file."""

    def __init__(self, path: Path):
        super().__init__(path)
        version = re.fullmatch(rb"results (\d+)", self.label.get(b"kvrepro", b""))
        self.version = int(version[1]) if version else 0
        if self.version > VERSION:
            raise InputError(f"{path} was written by a later version of kvrepro: install that one. {AWAY.capitalize()}")
        readable = self.version == 1 or (self.sealed and self.version in (*MIGRATIONS, VERSION))
        if not readable or set(self.columns) - set(FILED.names):
            raise InputError(f"{path} is not a results table of this version of kvrepro: {AWAY}")
        try:  # files that this one took the place of
            self.folded = [str(name) for name in json.loads(self.label.get(b"folded", b"[]"))]
        except (ValueError, TypeError):
            raise InputError(f"{path} does not say which files it took the place of: {AWAY}") from None

    def read(self, columns: Collection[str], rows: np.ndarray | None = None) -> pa.Table:
        """Columns of FILED: of the rows with these numbers (ascending), or of all rows."""
        groups = None
        if rows is not None:
            sizes = [self.metadata.row_group(i).num_rows for i in range(self.metadata.num_row_groups)]
            starts = np.cumsum([0, *sizes])
            of_row = np.searchsorted(starts, rows, "right") - 1
            groups = np.unique(of_row)
            before = np.cumsum([0, *(sizes[group] for group in groups)])[:-1]
            rows = rows - starts[of_row] + before[np.searchsorted(groups, of_row)]
        table = self.table(columns if self.version == VERSION else None, groups)
        if rows is not None and len(rows) < len(table):  # a mask: `take` is slow on long tables of texts
            mask = np.zeros(len(table), bool)
            mask[rows] = True
            table = table.filter(pa.array(mask))
        for version in range(self.version, VERSION):
            table = MIGRATIONS[version](table)
        try:
            return _with(table, columns).select(columns).cast(pa.schema([FILED.field(name) for name in columns]))
        except pa.ArrowException:
            raise InputError(f"{self.path} is not a results table of this version of kvrepro: {AWAY}") from None

    def rows_with(self, wanted: Mapping[str, Sequence[Any]]) -> np.ndarray:
        """Numbers of the rows that may have one of the wanted values in each column, by the statistics of the row
        groups in the file's footer."""
        if not wanted:
            return np.arange(self.rows)
        numbers, start = [np.array([], int)], 0
        for number in range(self.metadata.num_row_groups):
            group = self.metadata.row_group(number)
            stats = {c.path_in_schema: c.statistics for c in map(group.column, range(group.num_columns))}
            ends = {name: (s.min, s.max) for name in wanted if (s := stats.get(name)) and s.has_min_max}
            if all(any(low <= value <= high for value in wanted[name]) for name, (low, high) in ends.items()):
                numbers.append(np.arange(start, start + group.num_rows))
            start += group.num_rows
        return np.concatenate(numbers)


def with_identity(table: pa.Table) -> pa.Table:
    """The table with the column `asked`. Null values do not count, so that new columns can be added to IDENTITY."""
    columns = [table.column(name).to_pylist() for name in IDENTITY]
    texts = (
        repr([(n, v) for n, v in zip(IDENTITY, row, strict=True) if v is not None and v == v])
        for row in zip(*columns, strict=True)
    )
    hashes = [hashlib.blake2b(text.encode(), digest_size=8).digest() for text in texts]
    return table.append_column(FILED.field("asked"), pa.array(np.frombuffer(b"".join(hashes), "<i8")))


def _with(table: pa.Table, columns: Collection[str]) -> pa.Table:
    """The table with these columns, null where it has none."""
    for name in (name for name in columns if name not in table.schema.names):
        table = table.append_column(name, pa.nulls(len(table), FILED.field(name).type))
    return table


def _from_1(table: pa.Table) -> pa.Table:
    """Version 1 had neither checksums nor the column `asked`."""
    return with_identity(_with(table, IDENTITY))


def _from_2(table: pa.Table) -> pa.Table:
    """In version 2 rows of other checkpoints and of other data took each other's place where their names were equal."""
    return _from_1(table.drop_columns("asked"))


MIGRATIONS = {1: _from_1, 2: _from_2}  # version -> a function that turns its rows into those of the next version


def parts(table: Path) -> list[Path]:
    """The files beside a table, in the order in which they arrived."""
    folder = table.with_name(f"{table.stem}.rows")
    return sorted(path for path in folder.glob("*.parquet") if PART.fullmatch(path.name))


def files_of(table: Path, replaced: bool = False) -> list[RowsFile]:
    """The files of a table, oldest first. replaced: those whose rows lie in another file too, left by a kill."""
    files = [RowsFile(path) for path in [*([table] if table.exists() else []), *parts(table)]]
    folded = {name for file in files for name in file.folded}
    return [file for file in files if (file.path.name in folded) == replaced]


def steadily(table: Path, work: Callable[[list[RowsFile]], T]) -> T:
    """Call `work` with a table's files, again where a file was folded into another one meanwhile."""
    return unmoved(table, lambda path: work(files_of(path)))


def unmoved(table: Path, work: Callable[[Path], T]) -> T:
    """Call `work` with a table, again where another process folded a file into another one meanwhile."""
    for _ in range(100):
        with contextlib.suppress(FileNotFoundError):
            return work(table)
    raise InputError(f"{table} changes while it is read: wait until its writers are done")


def index(
    files: Sequence[RowsFile], where: Mapping[str, Any] | None = None, identities: Collection[int] | None = None
) -> pd.DataFrame:
    """Where the latest row of each (item, condition) lies: a table with the columns file, row, asked and failed.

    where: columns of IDENTITY -> their value or values. identities: only rows with these values of `asked`; the table
    then has the column key, too.
    """
    wanted = {n: [v] if isinstance(v, str) or not isinstance(v, Collection) else [*v] for n, v in (where or {}).items()}
    if identities is None:
        numbers = [file.rows_with(wanted) for file in files]
    else:
        numbers = [np.flatnonzero(_is_in(file.read(["asked"])["asked"], [*identities])) for file in files]

    def column(*names: str) -> pa.Table:
        tables = [file.read(names, rows) for file, rows in zip(files, numbers, strict=True)]
        return pa.concat_tables([pa.schema([FILED.field(name) for name in names]).empty_table(), *tables])

    table = column("asked", "error", *wanted, *([] if identities is None else ["key"]))
    chosen = np.ones(len(table), bool)
    for name, values in wanted.items():
        chosen &= _is_in(table[name], values)
    failed = table["error"].is_valid().to_numpy()
    if failed.any():  # one of two processes may have failed where the other did not
        all_keys = column("key")["key"]
        done = _is_in(all_keys, all_keys.filter(pa.array(failed))) & ~failed
        chosen &= ~(failed & _is_in(all_keys, all_keys.filter(pa.array(done))))
    places = {
        "file": np.repeat(np.arange(len(files)), [len(rows) for rows in numbers])[chosen],
        "row": np.concatenate([np.array([], int), *numbers])[chosen],
        "failed": failed[chosen],
    }
    table = table.filter(pa.array(chosen))
    frame = pd.DataFrame(places | {"asked": table["asked"].to_numpy()})
    if identities is not None:
        frame["key"] = table["key"].to_pylist()
    return frame[~frame.asked.duplicated(keep="last")]


def _is_in(column: pa.ChunkedArray, values: Any) -> np.ndarray:
    values = values.combine_chunks() if isinstance(values, pa.ChunkedArray) else pa.array(values, column.type)
    return pc.is_in(column, values).to_numpy()


def rows_of(files: Sequence[RowsFile], chosen: pd.DataFrame, columns: Collection[str]) -> pa.Table:
    """Columns of the rows that an index names, in the order of the files."""
    tables = [files[number].read(columns, rows.to_numpy()) for number, rows in chosen.groupby("file").row]
    return pa.concat_tables([pa.schema([FILED.field(name) for name in columns]).empty_table(), *tables])
