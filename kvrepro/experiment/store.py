"""Results that grow as they arrive and survive a kill at any moment.

`Store`: rows of generations, a table (`kvrepro.experiment.table`). New rows are written to a temporary file that is
then renamed, so that a reader or a resumed run meets whole files only. Several processes may write, also from several
machines. Files are folded together under a lock: small ones often, large ones never, so that adding gets no slower
while the table grows.

`Tables`: whatever else is computed per item. Each item has a folder of tables, which appears whole or not at all.
"""

import contextlib
import json
import os
import shutil
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import filelock
import pandas as pd
import pyarrow as pa

from kvrepro.errors import InputError
from kvrepro.experiment.sealed import File, write
from kvrepro.experiment.sharing import leftovers, make_folder, named, writing
from kvrepro.experiment.table import (
    COLUMNS,
    FILED,
    IDENTITY,
    MARK,
    SCHEMA,
    RowsFile,
    files_of,
    index,
    parts,
    rows_of,
    steadily,
    with_identity,
)

MANY = 64  # files that arrived, from which a running store folds them
LEAST = 50_000  # rows of a file that every fold may write again
MOST = 500_000  # rows of a file at most
UNNAMED = 60.0  # seconds for which a lock may be empty, which takes microseconds unless its process is killed


def read(
    table: str | Path, columns: Collection[str] = tuple(COLUMNS), where: Mapping[str, Any] | None = None
) -> pd.DataFrame:
    """The rows of a table, also of one whose run was interrupted or is under way: those of every checkpoint and of all
    data, whatever their names (`newest` chooses).

    columns: those that are read, all unless given. where: only rows with these values, such as `{"model": "small-gqa",
    "item": ["a", "b"]}`, of columns of IDENTITY. Raises InputError for a table or columns that do not exist.
    """
    if unknown := sorted({*columns} - {*COLUMNS} | {*(where or {})} - {*IDENTITY}):
        raise InputError(f"no column {unknown[0]}: rows have {', '.join(COLUMNS)}; `where` takes {', '.join(IDENTITY)}")

    def latest(files: list[RowsFile]) -> pd.DataFrame:
        if not files:
            raise InputError(f"no results at {table}: run the chapter first")
        return rows_of(files, index(files, where=where), columns).to_pandas()

    return steadily(Path(table), latest)


def newest(rows: pd.DataFrame) -> pd.DataFrame:
    """Of each name of a model the rows of the checkpoint that was stored last, and of each of its items those of the
    data that were stored last: for pages, which have neither at hand. rows: in the order in which they were stored."""
    for column, by in (("model_hash", ["model"]), ("data_hash", ["model", "item", "limit", "max_new_tokens"])):
        hashes = rows[column].fillna("")
        rows = rows[hashes == hashes.groupby([rows[name] for name in by], dropna=False).transform("last")]
    return rows


def identities_of(rows: Collection[Mapping[str, Any]]) -> dict[str, int]:
    """key -> value of `asked`, which each of these rows has or will have."""
    schema = pa.schema([SCHEMA.field(name) for name in IDENTITY])
    identities = with_identity(pa.Table.from_pylist(list(rows), schema=schema))["asked"].to_pylist()
    return dict(zip((row["key"] for row in rows), identities, strict=True))


class Store(contextlib.AbstractContextManager["Store"]):
    """One results table, open for adding rows; use as a context manager. Several processes may have it open."""

    def __init__(self, results: str | Path, chapter: str, name: str):
        """Open or create. Raises InputError for a file that is not ours or not whole, and where nothing can be
        written."""
        self.table = Path(results) / chapter / f"{name}.parquet"
        self.folder = self.table.with_name(f"{name}.rows")
        steadily(self.table, lambda files: files)
        make_folder(self.folder)

    def missing(self, identities: Mapping[str, int]) -> list[str]:
        """The keys of `identities_of` some rows that are not stored. A row with an error counts as missing, so that a
        resumed run tries it again."""
        latest = steadily(self.table, lambda files: index(files, identities=identities.values()))
        done = set(latest.key[~latest.failed])
        return [key for key in identities if key not in done]

    def add(self, rows: Collection[dict[str, Any]]) -> None:
        """Write rows (columns as in SCHEMA, absent ones null) so that they outlive this process."""
        unknown = {column for row in rows for column in row} - set(COLUMNS)
        if unknown:
            raise InputError(f"unknown column {sorted(unknown)[0]}: a results row has {', '.join(COLUMNS)}")
        if rows:
            self.write(with_identity(pa.Table.from_pylist(list(rows), schema=SCHEMA)))
        if len(parts(self.table)) > MANY:
            self.fold(wait=0)

    def write(self, table: pa.Table, number: int | None = None, folded: Sequence[str] = ()) -> None:
        """Write a file among the parts: as the newest one, or with a number that a folded file had. folded: names of
        the files that it replaces."""
        numbers = [int(path.name[:8]) for path in parts(self.table)]
        path = self.folder / named(max(numbers, default=-1) + 1 if number is None else number)
        with writing(path):
            self.folder.mkdir(parents=True, exist_ok=True)  # somebody may have cleared the results away
            self._put(table, path, folded)

    def _put(self, table: pa.Table, path: Path, folded: Sequence[str]) -> None:
        label = MARK | {b"folded": json.dumps(list(folded)).encode()}
        aside = self.folder / f"{named(0)}.tmp"
        write(table.select(FILED.names).replace_schema_metadata(label), path, aside)

    def frame(self, identities: Mapping[str, int]) -> pd.DataFrame:
        """The latest rows with the keys of `identities_of` some rows. InputError where a key has no row."""

        def latest(files: list[RowsFile]) -> pd.DataFrame:
            chosen = index(files, identities=identities.values())
            chosen = chosen[chosen.key.isin(identities.keys())]
            if lost := len(identities.keys() - {*chosen.key}):
                why = "another version of the code stored its own meanwhile"
                raise InputError(f"{self.table} has no longer {lost} of the rows ({why}): run this again")
            return rows_of(files, chosen, COLUMNS).to_pandas()

        return steadily(self.table, latest)

    def fold(self, wait: float = 10) -> None:
        """Join the newest files into one, under the lock: small ones, and those with at most twice as many rows as all
        newer ones together, so that each row is written only a few times. Does nothing where another process holds the
        lock longer than `wait` seconds."""
        try:
            with self.locked(wait):
                files = files_of(self.table)
                total, first = 0, len(files)
                for i in reversed(range(len(files))):
                    rows = files[i].rows
                    if total + rows > MOST:
                        break
                    if rows <= max(LEAST, 2 * total):
                        first = i
                    total += rows
                if len(files) - first > 1 or [file.path for file in files[first:]] not in ([], [self.table]):
                    self.join(files, files[first:], index(files[first:]))
        except filelock.Timeout:
            if wait:
                held = "fold.lock there is another process's; if no run is under way, remove it"
                print(f"{self.folder} keeps its files: {held}", file=sys.stderr)

    @contextlib.contextmanager
    def locked(self, wait: float = 10) -> Iterator[None]:
        """Hold the lock under which files are changed; what killed processes left is removed first. The lock names host
        and process: it counts for nothing once its process has ended on this host, but a lock of another host stays. A
        lock that stays empty is that of a process that was killed before it wrote its name."""
        lock_file = self.folder / "fold.lock"
        with writing(self.folder), contextlib.suppress(FileNotFoundError):
            stat = lock_file.stat()
            if not stat.st_size and time.time() - stat.st_mtime > UNNAMED:
                lock_file.unlink()
        with writing(self.folder), filelock.SoftFileLock(lock_file, poll_interval=0.05).acquire(timeout=wait):
            for path in self.folder.glob("fold.lock.*"):  # left by a process that was killed as it took over a lock
                path.unlink(missing_ok=True)
            for file in files_of(self.table, replaced=True):
                file.path.unlink(missing_ok=True)
            for path in leftovers(self.folder):
                path.unlink(missing_ok=True)
            yield

    def join(self, files: Sequence[RowsFile], joined: Sequence[RowsFile], chosen: pd.DataFrame) -> None:
        """Under the lock: replace the neighbouring files `joined` by one with their chosen rows. A kill in between
        loses and doubles nothing, because the new file names those that it replaces."""
        names = [file.path.name for file in joined if file.path != self.table]
        table = rows_of(joined, chosen, FILED.names)
        if joined[0] is files[0] and (joined[0].path == self.table or not self.table.exists()):
            if joined[0].path == self.table and joined[0].changed():
                return  # somebody took this lock for that of a process that has ended
            self._put(table, self.table, names)
        elif len(joined) > 1 or len(table) < joined[0].rows:
            self.write(table, int(names[-1][:8]), names)
        else:
            return
        for name in names:
            (self.folder / name).unlink(missing_ok=True)

    def close(self) -> None:
        """Fold the arrived rows into the table. Where that fails they stay in their own files, and a line says so, but
        not where bad input or a full disk ends the run anyway: that has a line of its own."""
        has_own_line = isinstance(sys.exception(), InputError)
        try:
            if parts(self.table):
                self.fold()
        except InputError as error:
            if not has_own_line:
                print(f"{self.table}: the rows that were stored lie in {self.folder} ({error})", file=sys.stderr)

    def __exit__(self, *exception: object) -> None:
        self.close()


class Tables:
    """Tables of items, `<results>/<chapter>/<name>/<key>/<table>.parquet`."""

    def __init__(self, results: str | Path, chapter: str, name: str):
        self.folder = Path(results) / chapter / name

    def __contains__(self, key: str) -> bool:
        return next((self.folder / key).glob("*.parquet"), None) is not None  # an emptied folder holds no result

    def add(self, key: str, tables: Mapping[str, pd.DataFrame]) -> None:
        """Write an item's tables to a temporary folder, then rename it. Of two writers the first wins. Raises
        InputError where nothing can be written."""
        if not self.folder.is_dir():
            make_folder(self.folder)
        aside = self.folder / f"{key}.{named(0).removesuffix('.parquet')}.tmp"
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
