"""Results that grow as they arrive and survive a kill at any moment.

`Store`: rows of generations. `data/results/<chapter>/<name>.parquet` is the table; beside it `<name>.rows/` holds what
has arrived since, a file of its own name for each `add`, written aside and renamed, so that a reader or a resumed run
meets whole files only. Several processes may write, also from several machines. Files are folded together under a lock:
small ones often, large ones never, so that adding does not get slower while the table grows. Order is by number, never
by a clock. A row is known by its `key`: a hash of configuration, model, prompt and the code that decides it. A row
whose key changed is stale: it is computed again, and the new row takes its place.

Every file ends with checksums of its columns and of its footer, which are compared when it is read.

`Tables`: whatever else is computed per item, a folder of tables for each, which appears whole or not at all.
"""

import contextlib
import hashlib
import json
import os
import platform
import re
import secrets
import shutil
import sys
import tempfile
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import filelock
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from kvrepro.errors import InputError
from kvrepro.paths import replaced

VERSION = 2  # of the files; 1 had neither checksums nor the column `asked`
MARK = {b"kvrepro": b"results %d" % VERSION}
TEXT, WHOLE, REAL = pa.string(), pa.int64(), pa.float64()
SCHEMA = pa.schema(
    {
        "key": TEXT, "chapter": TEXT, "name": TEXT, "item": TEXT, "task": TEXT,
        "model": TEXT, "model_hash": TEXT, "data_hash": TEXT, "engine_hash": TEXT,
        "policy": TEXT, "capacity": WHOLE, "prefix": REAL, "suffix": REAL, "suffix_mode": TEXT, "interval": WHOLE,
        "reading": TEXT, "execution": TEXT, "switches": TEXT, "regime": TEXT, "share": REAL, "until": TEXT,
        "whitelist": TEXT, "spans": TEXT, "fair": REAL, "chunk": WHOLE, "chunk_mode": TEXT, "bits": WHOLE,
        "limit": WHOLE, "max_new_tokens": WHOLE, "prompt_tokens": WHOLE, "cut": WHOLE, "n_generated": WHOLE,
        "prediction": TEXT, "answer": TEXT,
        "token_f1": REAL, "token_f1_longbench": REAL, "exact_match": REAL, "rouge_l": REAL, "repetition_4gram": REAL,
        "first_right": REAL, "rest_f1": REAL, "evidence_at": REAL, "evidence_coverage": REAL,
        "official": REAL, "metric": TEXT,
        "kept": pa.list_(WHOLE), "kept_mean": REAL, "kept_hash": TEXT, "evicted": WHOLE, "policy_calls": WHOLE,
        "pages": WHOLE, "bytes_held": WHOLE, "bytes_state": WHOLE, "bytes_full": WHOLE, "peak_bytes": WHOLE,
        "prefill_seconds": REAL, "decode_seconds": REAL,
        "backend": TEXT, "dtype": TEXT, "device": TEXT, "processor": TEXT, "torch": TEXT, "transformers": TEXT,
        "profile": TEXT, "seed": WHOLE, "date": TEXT, "error": TEXT, "note": TEXT,
    },
    metadata=MARK,
)  # fmt: skip
COLUMNS = SCHEMA.names
IDENTITY = ["item", "model", "dtype", "device", "limit", "max_new_tokens", "policy", "capacity", "prefix", "suffix",
            "suffix_mode", "interval", "reading", "execution", "switches", "regime", "share", "until", "whitelist",
            "spans", "fair", "chunk", "chunk_mode", "bits"]  # fmt: skip
FILED = SCHEMA.append(pa.field("asked", pa.int64()))  # a hash of IDENTITY: rows with the same were asked the same
MANY = 64  # files that arrived, from which a running store folds them
LEAST = 50_000  # rows of a file that every close may write again
MOST = 500_000  # rows of a file at most
GROUP = 32_768  # rows that are read together
PART = re.compile(r"(\d{8})(@.+-\d+-[0-9a-f]{8})?\.parquet")  # number, and since version 2 host and process
UNFINISHED = re.compile(r".*@(.+)-(\d+)-[0-9a-f]{8}(\.parquet)?\.tmp")
HOST = re.sub(r"[^\w.]", "_", platform.node())
SEAL = b"kvrepro\x01"
AWAY = "nothing was changed; move it away, or choose another results folder or name"
T = TypeVar("T")


# ---- files with checksums


def write(table: pa.Table, path: Path, aside: Path | None = None) -> None:
    """Write a parquet file whole or not at all, with checksums before its footer. InputError where it cannot be."""
    aside = aside or path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        pq.write_table(table, aside, row_group_size=GROUP, compression="zstd")
        _seal(aside)
        os.replace(aside, path)
    finally:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)


def _seal(path: Path) -> None:
    """Put a checksum of every column chunk, and one of these and the footer, between data and footer: readers of
    parquet pass over what stands there."""
    with path.open("r+b") as file:
        footer, _ = _footer(file)
        sums = np.array([_sum(file, *span) for _, span in _chunks(pq.read_metadata(path))], "<u4").tobytes()
        file.seek(-len(footer), os.SEEK_END)
        file.write(sums + SEAL + _digest(sums + footer) + footer)
        file.flush()
        os.fsync(file.fileno())


def _footer(file: Any) -> tuple[bytes, int]:
    """Footer, its length and the last four letters; where it starts."""
    end = file.seek(0, os.SEEK_END)
    file.seek(max(0, end - 8))
    start = max(0, end - 8 - int.from_bytes(file.read(4), "little"))
    file.seek(start)
    return file.read(), start


def _chunks(metadata: pq.FileMetaData, columns: Collection[str] | None = None) -> list[tuple[int, tuple[int, int]]]:
    """(number, (start, length)) of the stored pieces of the columns."""
    count = metadata.num_columns
    names = [metadata.schema.column(i).path.split(".")[0] for i in range(count)]
    chosen = [i for i in range(count) if columns is None or names[i] in columns]
    found = []
    for group in range(metadata.num_row_groups):
        for i in chosen:
            chunk = metadata.row_group(group).column(i)
            start = chunk.dictionary_page_offset or chunk.data_page_offset
            found.append((group * count + i, (start, chunk.total_compressed_size)))
    return found


def _sum(file: Any, start: int, length: int) -> int:
    return zlib.crc32(os.pread(file.fileno(), length, start))


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


class File:
    """A parquet file whose checksums hold: the footer's is compared here, those of columns when they are read.

    `sealed` is False for a file written before there were checksums. Raises InputError for one that is not whole.
    """

    def __init__(self, path: Path, way_out: str = AWAY):
        self.path, self.way_out, self.sums = path, way_out, np.array([], "<u4")
        with self._whole(), path.open("rb") as file:
            self.found = _state(os.fstat(file.fileno()))
            footer, start = _footer(file)
            self.metadata = pq.read_metadata(file)
            size = 4 * self.metadata.num_columns * self.metadata.num_row_groups
            seal = os.pread(file.fileno(), size + 24, max(0, start - size - 24))
            self.sealed = seal[size : size + 8] == SEAL
            if self.sealed:
                if _digest(seal[:size] + footer) != seal[size + 8 :]:
                    raise pa.ArrowException("its footer's checksum is wrong")
                self.sums = np.frombuffer(seal[:size], "<u4")
        self.label = self.metadata.metadata or {}
        self.rows = self.metadata.num_rows
        self.columns = self.metadata.schema.to_arrow_schema().names

    @contextlib.contextmanager
    def _whole(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            why = str(error).splitlines()[0]
            raise InputError(f"{self.path} is no whole parquet file ({why}): {self.way_out}") from None

    def changed(self) -> bool:
        """Has another file taken its place?"""
        return not self.path.exists() or _state(self.path.stat()) != self.found

    def table(self, columns: Collection[str] | None = None, groups: Sequence[int] | None = None) -> pa.Table:
        """Some columns of some groups of rows, or all. FileNotFoundError where another file has taken its place."""
        with self._whole(), self.path.open("rb") as file:
            if _state(os.fstat(file.fileno())) != self.found:
                raise FileNotFoundError(self.path)
            for number, span in _chunks(self.metadata, columns) if self.sealed else []:
                here = groups is None or number // self.metadata.num_columns in groups
                if here and _sum(file, *span) != self.sums[number]:
                    raise pa.ArrowException("a column's checksum is wrong")
            parquet = pq.ParquetFile(file, metadata=self.metadata)
            names = None if columns is None else [name for name in self.columns if name in columns]
            if groups is None:
                return parquet.read(names)
            return parquet.read_row_groups(list(groups), names)


def _state(stat: os.stat_result) -> tuple[int, ...]:
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


# ---- files of rows


class Rows(File):
    """A file of a results table, of this version or an earlier one, whose rows are brought to this one's as they are
    read. Raises InputError for another file."""

    def __init__(self, path: Path):
        super().__init__(path)
        made = re.fullmatch(rb"results (\d+)", self.label.get(b"kvrepro", b""))
        if made and int(made[1]) > VERSION:
            raise InputError(f"{path} was written by a later version of kvrepro: install that one. {AWAY.capitalize()}")
        if not made or set(self.columns) - set(FILED.names) or (int(made[1]) == VERSION and not self.sealed):
            raise InputError(f"{path} is not a results table of this version of kvrepro: {AWAY}")
        self.folded = json.loads(self.label.get(b"folded", b"[]"))  # files that this one took the place of

    def read(self, columns: Collection[str], rows: np.ndarray | None = None) -> pa.Table:
        """Columns of FILED, of the rows with these numbers (ascending) or of all."""
        asked = "asked" in columns and "asked" not in self.columns  # written by version 1
        names = [*columns, *IDENTITY] if asked else list(columns)
        groups = None
        if rows is not None:
            sizes = [self.metadata.row_group(i).num_rows for i in range(self.metadata.num_row_groups)]
            starts = np.cumsum([0, *sizes])
            of_row = np.searchsorted(starts, rows, "right") - 1
            groups = np.unique(of_row)
            before = np.cumsum([0, *(sizes[group] for group in groups)])[:-1]
            rows = rows - starts[of_row] + before[np.searchsorted(groups, of_row)]
        table = self.table(names, groups)
        if rows is not None and len(rows) < len(table):  # a mask: `take` is slow on long tables of texts
            mask = np.zeros(len(table), bool)
            mask[rows] = True
            table = table.filter(pa.array(mask))
        for name in (name for name in names if name not in table.schema.names and name != "asked"):
            table = table.append_column(name, pa.nulls(len(table), FILED.field(name).type))
        if asked:
            table = with_asked(table)
        try:
            return table.select(columns).cast(pa.schema([FILED.field(name) for name in columns]))
        except pa.ArrowException:
            raise InputError(f"{self.path} is not a results table of this version of kvrepro: {AWAY}") from None

    def rows_with(self, wanted: Mapping[str, Sequence[Any]]) -> np.ndarray:
        """Numbers of the rows that may have one of the values in each column, as far as the footer tells."""
        if not wanted:
            return np.arange(self.rows)
        found, start = [np.array([], int)], 0
        for number in range(self.metadata.num_row_groups):
            group = self.metadata.row_group(number)
            stats = {c.path_in_schema: c.statistics for c in map(group.column, range(group.num_columns))}
            ends = {name: (s.min, s.max) for name in wanted if (s := stats.get(name)) and s.has_min_max}
            if all(any(low <= value <= high for value in wanted[name]) for name, (low, high) in ends.items()):
                found.append(np.arange(start, start + group.num_rows))
            start += group.num_rows
        return np.concatenate(found)


def with_asked(table: pa.Table) -> pa.Table:
    """The table with the column `asked`. A column that is null does not count, so that new ones can come."""
    columns = [table.column(name).to_pylist() for name in IDENTITY]
    texts = (
        repr([(n, v) for n, v in zip(IDENTITY, row, strict=True) if v is not None and v == v])
        for row in zip(*columns, strict=True)
    )
    hashes = [hashlib.blake2b(text.encode(), digest_size=8).digest() for text in texts]
    return table.append_column(FILED.field("asked"), pa.array(np.frombuffer(b"".join(hashes), "<i8")))


def parts(table: Path) -> list[Path]:
    """The files beside a table, in the order in which they arrived."""
    folder = table.with_name(f"{table.stem}.rows")
    return sorted(path for path in folder.glob("*.parquet") if PART.fullmatch(path.name))


def files_of(table: Path, replaced: bool = False) -> list[Rows]:
    """The files of a table, oldest first; or those whose rows another one holds, left by a process that was killed."""
    found = [Rows(path) for path in [*([table] if table.exists() else []), *parts(table)]]
    gone = {name for file in found for name in file.folded}
    return [file for file in found if (file.path.name in gone) == replaced]


def _steadily(table: Path, work: Callable[[list[Rows]], T]) -> T:
    """Do something with a table's files, again where a file was folded into another one meanwhile."""
    for _ in range(100):
        with contextlib.suppress(FileNotFoundError):
            return work(files_of(table))
    raise InputError(f"{table} changes while it is read: wait until its writers are done")


def index(
    files: Sequence[Rows], keys: Collection[str] | None = None, where: Mapping[str, Any] | None = None,
    asked: Collection[int] | None = None,
) -> pd.DataFrame:  # fmt: skip
    """Which rows are the latest of each (item, condition): file, row, asked and failed. keys: of what was asked under
    these, also earlier or later under others; then with the column key. where: columns of IDENTITY -> their value or
    values. asked: of these values of `asked` alone, which saves reading all keys."""
    wanted = {n: [v] if isinstance(v, str) or not isinstance(v, Collection) else [*v] for n, v in (where or {}).items()}
    numbers = [file.rows_with(wanted) for file in files]
    if asked is not None:
        each = (_is_in(file.read(["asked"])["asked"], [*asked]) for file in files)
        numbers = [np.flatnonzero(some) for some in each]

    def column(*names: str) -> pa.Table:
        tables = [file.read(names, rows) for file, rows in zip(files, numbers, strict=True)]
        return pa.concat_tables([pa.schema([FILED.field(name) for name in names]).empty_table(), *tables])

    table = column("asked", "error", *wanted, *([] if keys is None else ["key"]))
    chosen = np.ones(len(table), bool)
    for name, values in wanted.items():
        chosen &= _is_in(table[name], values)
    if keys is not None:
        chosen &= _is_in(table["asked"], table["asked"].filter(pa.array(_is_in(table["key"], [*keys]))))
    failed = table["error"].is_valid().to_numpy()
    if failed.any():  # one of two processes may have failed where the other did not
        known = column("key")["key"]
        done = _is_in(known, known.filter(pa.array(failed))) & ~failed
        chosen &= ~(failed & _is_in(known, known.filter(pa.array(done))))
    found = {
        "file": np.repeat(np.arange(len(files)), [len(rows) for rows in numbers])[chosen],
        "row": np.concatenate([np.array([], int), *numbers])[chosen],
        "failed": failed[chosen],
    }
    some = table.filter(pa.array(chosen))
    frame = pd.DataFrame(found | {"asked": some["asked"].to_numpy()})
    if keys is not None:
        frame["key"] = some["key"].to_pylist()
    return frame[~frame.asked.duplicated(keep="last")]


def _is_in(column: pa.ChunkedArray, values: Any) -> np.ndarray:
    values = values.combine_chunks() if isinstance(values, pa.ChunkedArray) else pa.array(values, column.type)
    return pc.is_in(column, values).to_numpy()


def asked_of(rows: Collection[Mapping[str, Any]]) -> list[int]:
    """The values of `asked` that these rows have or will have."""
    schema = pa.schema([SCHEMA.field(name) for name in IDENTITY])
    found: list[int] = with_asked(pa.Table.from_pylist(list(rows), schema=schema))["asked"].to_pylist()
    return found


def rows_of(files: Sequence[Rows], chosen: pd.DataFrame, columns: Collection[str]) -> pa.Table:
    """Columns of the rows that an index names, in the order of the files."""
    each = chosen.groupby("file").row
    tables = [files[number].read(columns, rows.to_numpy()) for number, rows in each]
    return pa.concat_tables([pa.schema([FILED.field(name) for name in columns]).empty_table(), *tables])


def read(
    table: str | Path, columns: Collection[str] = tuple(COLUMNS), where: Mapping[str, Any] | None = None
) -> pd.DataFrame:
    """The rows of a table, also of one whose run was interrupted or is under way.

    columns: those that are read, all unless given. where: only rows with these values, such as `{"model": "small-gqa",
    "item": ["a", "b"]}`, of columns of IDENTITY. Raises InputError for a table or columns that do not exist.
    """
    if unknown := sorted({*columns} - {*COLUMNS} | {*(where or {})} - {*IDENTITY}):
        raise InputError(f"no column {unknown[0]}: rows have {', '.join(COLUMNS)}; `where` takes {', '.join(IDENTITY)}")

    def of(files: list[Rows]) -> pd.DataFrame:
        if not files:
            raise InputError(f"no results at {table}: run the chapter first")
        return rows_of(files, index(files, where=where), columns).to_pandas()

    return _steadily(Path(table), of)


# ---- a table that grows


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """What the system refuses becomes one line."""
    try:
        yield
    except (filelock.Timeout, FileNotFoundError):
        raise
    except OSError as error:
        why = (error.strerror or str(error)).splitlines()[0]
        way_out = "make room or take away what stands there, or choose another results folder"
        raise InputError(f"{path} cannot be written ({why}): {way_out}. What was stored before is whole") from None


def prepare(results: Path, folder: Path) -> None:
    """Make a folder below the results folder, and try whether it can be written. Says so where the results folder holds
    other things."""
    if results.is_dir() and not any(any(results.glob(of)) for of in ("*/*.rows", "*/claims.csv", "*/*/*/*.parquet")):
        others = sorted(path.name for path in results.iterdir())
        if others:
            print(f"results go into {results}, which holds other things ({others[0]}): in folders of their own")
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()


def _named(number: int) -> str:
    return f"{number:08d}@{HOST}-{os.getpid()}-{secrets.token_hex(4)}.parquet"


class Store:
    """One results table, open for adding rows; use as a context manager. Several processes may have it open."""

    def __init__(self, results: str | Path, chapter: str, name: str):
        """Open or create. Raises InputError for a file that is not ours or not whole, and where nothing can be
        written."""
        self.table = Path(results) / chapter / f"{name}.parquet"
        self.folder = self.table.with_name(f"{name}.rows")
        _steadily(self.table, lambda files: files)
        prepare(Path(results), self.folder)

    def missing(self, keys: Iterable[str], asked: Collection[int] | None = None) -> list[str]:
        """The keys without a row; a row with an error counts as missing, so that a resumed run tries it again. asked:
        `asked_of` the rows with these keys, which makes it quick in a long table."""
        keys = list(keys)
        found = _steadily(self.table, lambda files: index(files, keys, asked=asked))
        known = set(found.key[~found.failed])
        return [key for key in keys if key not in known]

    def add(self, rows: Collection[dict[str, Any]]) -> None:
        """Write rows (columns as in SCHEMA, absent ones null) so that they outlive this process."""
        unknown = {column for row in rows for column in row} - set(COLUMNS)
        if unknown:
            raise InputError(f"unknown column {sorted(unknown)[0]}: a results row has {', '.join(COLUMNS)}")
        if rows:
            self._write(with_asked(pa.Table.from_pylist(list(rows), schema=SCHEMA)))
        if len(parts(self.table)) > MANY:
            self.fold(newest=MANY, wait=0)

    def _write(self, table: pa.Table, number: int | None = None, folded: Sequence[str] = ()) -> None:
        """A file among the parts: as the newest, or with a number that others had."""
        numbers = [int(path.name[:8]) for path in parts(self.table)]
        path = self.folder / _named(max(numbers, default=-1) + 1 if number is None else number)
        with writing(path):
            try:
                self._put(table, path, folded)
            except FileNotFoundError:  # another process closed the table, still empty
                self.folder.mkdir(parents=True, exist_ok=True)
                self._put(table, path, folded)

    def _put(self, table: pa.Table, path: Path, folded: Sequence[str]) -> None:
        label = MARK | {b"folded": json.dumps(list(folded)).encode()}
        aside = self.folder / f"{_named(0)}.tmp"
        write(table.select(FILED.names).replace_schema_metadata(label), path, aside)

    def frame(
        self, keys: Collection[str] | None = None, columns: Collection[str] = tuple(COLUMNS),
        asked: Collection[int] | None = None,
    ) -> pd.DataFrame:  # fmt: skip
        """The latest row of each (item, condition), of all or with these keys (`asked`: see `missing`). InputError
        where a key has no row."""

        def of(files: list[Rows]) -> pd.DataFrame:
            chosen = index(files, keys, asked=asked)
            if keys is not None:
                chosen = chosen[chosen.key.isin(keys)]
                if lost := len({*keys} - {*chosen.key}):
                    why = "another version of the code stored its own meanwhile"
                    raise InputError(f"{self.table} has no longer {lost} of the rows ({why}): run this again")
            return rows_of(files, chosen, columns).to_pandas()

        return _steadily(self.table, of)

    def fold(self, least: int = 0, newest: int = 0, wait: float = 10) -> None:
        """Make one file of the newest ones, under the lock; nothing where another process holds it longer than `wait`
        seconds. least: rows of a file that is written again in any case; newest: how many files are. Of the others
        those are that have at most twice as many rows as all newer ones, so that each row is written a few times."""
        try:
            with self.locked(wait):
                files = files_of(self.table)
                total, first = 0, len(files)
                for i in reversed(range(len(files))):
                    rows = files[i].rows
                    if total + rows > MOST:
                        break
                    if len(files) - i <= newest or rows <= max(least, 2 * total):
                        first = i
                    total += rows
                if len(files) - first > 1 or [file.path for file in files[first:]] not in ([], [self.table]):
                    self.join(files, files[first:], index(files[first:]))
        except filelock.Timeout:
            if wait:
                lock = self.folder / "fold.lock"
                print(f"{self.folder} keeps its files: {lock} is held by another process", file=sys.stderr)

    @contextlib.contextmanager
    def locked(self, wait: float = 10) -> Iterator[None]:
        """Alone in changing files. What killed processes left is removed first. The lock names host and process; one
        whose process has ended on this host counts for nothing, one of another host stays."""
        with writing(self.folder), _acquired(self.folder / "fold.lock", wait):
            for path in self.folder.glob("fold.lock.*"):  # of one that was killed as it took over a lock
                path.unlink(missing_ok=True)
            for file in files_of(self.table, replaced=True):
                file.path.unlink(missing_ok=True)
            for path in leftovers(self.folder):
                path.unlink(missing_ok=True)
            yield

    def join(self, files: Sequence[Rows], some: Sequence[Rows], chosen: pd.DataFrame) -> None:
        """Under the lock: put the chosen rows of some neighbouring files into one, in the place of all of them. A kill
        in between loses and doubles nothing: the new file names those that it takes the place of."""
        names = [file.path.name for file in some if file.path != self.table]
        table = rows_of(some, chosen, FILED.names)
        if some[0] is files[0] and (some[0].path == self.table or not self.table.exists()):
            if some[0].path == self.table and some[0].changed():
                return  # somebody took this lock for that of a process that has ended
            self._put(table, self.table, names)
        elif len(some) > 1 or len(table) < some[0].rows:
            self._write(table, int(names[-1][:8]), names)
        else:
            return
        for name in names:
            (self.folder / name).unlink(missing_ok=True)

    def close(self) -> None:
        """Fold the arrived rows into the table. Where that fails they stay in their own files, and a line says so."""
        try:
            if parts(self.table):
                self.fold(LEAST)
        except InputError as error:
            print(f"{self.table}: all rows are stored, in {self.folder} ({error})", file=sys.stderr)
        if not self.table.exists():  # nothing was ever stored: leave no trace
            with contextlib.suppress(OSError):
                self.folder.rmdir()
                self.folder.parent.rmdir()

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _acquired(path: Path, wait: float) -> contextlib.AbstractContextManager[Any]:
    """The lock at a path. Raises filelock.Timeout after `wait` seconds. A file that stays without a name for five of
    them is of a process that was killed before it wrote its own: filelock would respect it forever."""
    lock, unnamed, patience = filelock.SoftFileLock(path, poll_interval=0.05), _unnamed(path), 5
    try:
        return lock.acquire(timeout=min(wait, patience))
    except filelock.Timeout:
        if wait < patience:
            raise
        if unnamed is not None and _unnamed(path) == unnamed:
            path.unlink(missing_ok=True)
        return lock.acquire(timeout=wait - patience)


def _unnamed(path: Path) -> tuple[int, int] | None:
    """What tells an empty file from another one."""
    with contextlib.suppress(FileNotFoundError):
        found = path.stat()
        return None if found.st_size else (found.st_ino, found.st_mtime_ns)
    return None


def leftovers(folder: Path) -> list[Path]:
    """Files that a process of this host was writing when it was killed."""
    found = []
    for path in folder.glob("*.tmp"):
        made = UNFINISHED.fullmatch(path.name)
        if made and made[1] == HOST and not _alive(int(made[2])):
            found.append(path)
    return found


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def replace_rows(table: Path, rows: pd.DataFrame, by: Sequence[str], digits: int = 6) -> pd.DataFrame:
    """Write rows into a table of the project (CSV), in the place of those whose columns `by` have the same values; the
    whole table. digits: of its numbers."""
    known = pd.read_csv(table) if table.is_file() else rows[:0]
    same = pd.MultiIndex.from_frame(known[list(by)]).isin(pd.MultiIndex.from_frame(rows[list(by)]))
    whole = pd.concat([part for part in (known[~same], rows) if len(part)] or [rows], ignore_index=True)
    with replaced(table) as aside:
        whole.to_csv(aside, index=False, float_format=f"%.{digits}g")
    return whole


class Tables:
    """Tables of items, `<results>/<chapter>/<name>/<key>/<table>.parquet`."""

    def __init__(self, results: str | Path, chapter: str, name: str):
        self.results = Path(results)
        self.folder = self.results / chapter / name

    def __contains__(self, key: str) -> bool:
        return (self.folder / key).is_dir()

    def add(self, key: str, tables: Mapping[str, pd.DataFrame]) -> None:
        """Write an item's tables aside, then give the folder its name. Of two writers the first wins. InputError where
        nothing can be written."""
        if not self.folder.is_dir():
            prepare(self.results, self.folder)
        aside = self.folder / f"{key}.{_named(0).removesuffix('.parquet')}.tmp"
        try:
            with writing(aside):
                aside.mkdir()
                for name, table in tables.items():
                    write(pa.Table.from_pandas(table, preserve_index=False), aside / f"{name}.parquet")
                try:
                    os.rename(aside, self.folder / key)
                except OSError:
                    if key not in self:
                        raise
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    def read(self, key: str) -> dict[str, pd.DataFrame]:
        """The tables of one item. Raises InputError for a file that is not whole."""
        folder = self.folder / key
        way_out = f"remove the folder {folder}, and it is computed again"
        return {path.stem: File(path, way_out).table().to_pandas() for path in sorted(folder.glob("*.parquet"))}
